// Products of 3 rows and more in fp32 on AVX-512: rows of x are put in order by columns, [k][row], and an FMA takes its
// factor of x from memory (`vfmadd231ps zmm, zmm, m32{1to16}`). So one panel of w is enough for a broadcast x to cost
// nothing, walking x is one stream whatever its row stride, and decoding runs in the pipes that FMA leaves idle:
// shifts, permutations and stores are free behind eight rows or more (docs/performance.md).
//
//     3 … 8 rows   straight from codes. Those of up to 5 bits are summed as they are over the columns of a scale, as
//                  few_rows.h does for one and two rows.
//     more         blocks of 8, 12 or 16 rows, up to eight of them in a pass. The first block multiplies what it
//                  decodes, and stores it for the others. An element's additions have gemm.h's order, in blocks of k.
#pragma once
#include "few_rows.h"

enum {
    QG_FIRST_PASS = 9,  // from so many rows on, passes are faster than decoding panels and then multiplying them
    QG_HIGH = 16,       // most rows of a block
    QG_BLOCKS_OF_PASS = 8,
    QG_SERVED = 16,  // panels that pay for putting rows in order: a task has as many, unless threads would be idle
};

// Rows of a pass: up to 8 blocks, for which a thread keeps up to 2 MiB, but one block at least.
constexpr int64_t qg_pass(int64_t k) {
    const int64_t blocks = (1 << 19) / QG_HIGH / (k > 0 ? k : 1);
    return (blocks < 1 ? 1 : blocks < QG_BLOCKS_OF_PASS ? blocks : QG_BLOCKS_OF_PASS) * QG_HIGH;
}

// Floats of `rows` rows by columns: whole vectors are written.
constexpr int64_t qg_columns(int64_t k, int64_t rows) { return (k + 15) / 16 * 16 * rows + 16; }

// Bytes of scratch of qg_few_columns_task and of qg_pass_task.
constexpr int64_t qg_few_columns_scratch(int64_t k, int64_t rows, bool converts) {
    return qg_few_scratch(k, rows, converts) + 4 * (qg_columns(k, rows) + qg_columns(k / 32, rows));
}
constexpr int64_t qg_pass_scratch(int64_t k) {
    return 4 * (qg_pass(k) * QG_NP * 16 + QG_HIGH * ((qg_block(k) + 15) / 16 * 16) + qg_columns(k, qg_pass(k)));
}

#if defined(QC_AVX512)
// to[j * width + i] = x[i * stride + j] for `count` rows and `columns` columns; rows up to `width` <= 16 are zeros.
static void qg_by_columns(const float* x, int64_t stride, int count, int64_t columns, float* to, int64_t width) {
    int64_t j = 0;
    for (; j + 16 <= columns; j += 16) vtranspose(x + j, stride, to + j * width, width, count);
    if (j == columns) return;
    float last[16][16] = {};
    for (int i = 0; i < count; i++) vstore(last[i], vload_n(x + i * stride + j, (int)(columns - j)));
    vtranspose(last[0], 16, to + j * width, width);
}

// Columns k + J of one group: MR rows of x times the elements of a panel, or with CODES times the values of its codes.
template <class D, int MR, int SUMS, bool CODES> struct qg_column_step {
    const D& decoder;
    const float* x;
    vf (&sum)[MR][SUMS];
    template <int J> QG_METHOD void step() {
        vf w;
        if constexpr (CODES) w = decoder.template code<J>();
        else w = decoder.template value<J>();
        QG_UNROLL for (int i = 0; i < MR; i++) {
            vf& to = sum[i][J % SUMS];
            to = vfma(vset(x[J * MR + i]), w, to);
        }
    }
};

// --- 3 to 8 rows -----------------------------------------------------------------------------------------------------

// totals[g * MR + i] = the sum of columns [g * span, (g + 1) * span) of row i.
template <int MR> static void qg_add_columns(const float* x, int64_t span, int64_t groups, float* totals) {
    for (int64_t g = 0; g < groups; g++, totals += MR) {
        vf total[4] = {};
        for (int64_t k = 0; k < span; k++, x += MR) total[k % 4] = total[k % 4] + vload(x);
        vstore(totals, qg_sum<4>(total));  // lanes from MR on are written again
    }
}

template <class D, int MR> static void qg_few_columns(
    const qg_job* job, const float* x, const float* totals, int64_t panel, float* tile) {
    constexpr int SUMS = MR < 8 ? 2 : 1;  // at least six chains of additions hide the latency of FMA
    vf sum[MR][SUMS] = {};
    D decoder;
    decoder.start(job, panel);
    int64_t k = 0;
    if constexpr (D::SUMMED) {
        for (; k + D::SHARED <= job->k; k += D::SHARED, totals += MR) {
            vf part[MR][SUMS] = {};
            if constexpr (D::ASKS) decoder.entries.ask(job->packed, panel + 1, k);
            decoder.at(k);
            for (int at = 0; at < D::SHARED; at += D::GROUP) {
                if (at > 0) decoder.codes_at(k + at);
                qg_column_step<D, MR, SUMS, true> body{decoder, x + (k + at) * MR, part};
                qg_steps<0, D::GROUP>(body, D::GROUP);
            }
            QG_UNROLL for (int i = 0; i < MR; i++) {
                vf& to = sum[i][0];
                to = vfma(qg_sum<SUMS>(part[i]), decoder.scale(), to);
                if constexpr (D::OFFSET) to = vfma(vset(totals[i]), decoder.offset(), to);
            }
        }
    } else {
        for (; k + D::GROUP <= job->k; k += D::GROUP) {
            decoder.at(k);
            qg_column_step<D, MR, SUMS, false> body{decoder, x + k * MR, sum};
            qg_steps<0, D::GROUP>(body, D::GROUP);
        }
    }
    for (; k < job->k; k += D::GROUP) {  // what is left is decoded to memory, to keep the code small
        float last[D::GROUP * 16];
        const int64_t left = qc_min(job->k - k, D::GROUP);
        qg_decode_panel<D>(job, panel, k, left, last);
        for (int64_t j = 0; j < left; j++)
            QG_UNROLL for (int i = 0; i < MR; i++)
                sum[i][0] = vfma(vset(x[(k + j) * MR + i]), vload(last + j * 16), sum[i][0]);
    }
    QG_UNROLL for (int i = 0; i < MR; i++) vstore(tile + i * QG_NP * 16, qg_sum<SUMS>(sum[i]));
}

// Panels [panel, end) of one unit times MR rows by columns. `x`: the rows as they were.
template <class D, int MR> static void qg_few_columns_unit(
    const qg_job* job, const qg_few_x& x, const float* columns, int64_t panel, int64_t end, float* tile) {
    for (int64_t p = panel; p < end; p++) {
        float* const to = tile + (p - panel) * 16;
        qg_few_columns<D, MR>(job, columns, x.totals, p, to);
        if constexpr (D::SUMMED)
            for (int i = 0; i < MR; i++) {  // as in qg_few_panels
                float* const own = to + i * QG_NP * 16;
                const vf found = vload(own);
                if (vsum(found - found) != 0.0f)
                    qg_few_panels<D, 1, false>(job, {x.rows + i * x.stride, x.stride, nullptr, 0}, p, p, own);
            }
    }
}

// All units of a task for MR rows or, if `count` says so, fewer.
template <class D, int MR> static void qg_few_columns_units(
    const qg_job* job, int64_t task, int64_t m0, int64_t count, qg_few_x x, float* tile, float* totals,
    float* columns) {
    if constexpr (MR > 2) {
        if (count != MR) return qg_few_columns_units<D, MR - 1>(job, task, m0, count, x, tile, totals, columns);
        qg_by_columns(x.rows, x.stride, MR, job->k, columns, MR);
        if constexpr (qg_needs_totals<D>()) qg_add_columns<MR>(columns, D::SHARED, job->k / D::SHARED, totals);
        x.totals = totals;
    } else {
        x = qg_add_up<D>(x.rows, x.stride, count, job->k, totals);
    }
    qg_each_unit(job, task, m0, count, tile, [&](int64_t panel, int64_t end) {
        if constexpr (MR > 2) qg_few_columns_unit<D, MR>(job, x, columns, panel, end, tile);
        else qg_few_rows<D, 2>(job, count, x, panel, end - 1, tile);
    });
}

// As qg_few_task.
template <class D, int MAX> static void qg_few_columns_task(void* arg, int64_t task, char* scratch) {
    const qg_job* job = (const qg_job*)arg;
    float* const tile = (float*)scratch;
    float* const totals = tile + MAX * QG_NP * 16;
    float* const columns = totals + qc_max(qg_most_totals(job->k), qg_columns(job->k / 32, MAX));
    float* const converted = columns + qg_columns(job->k, MAX);
    for (int64_t m0 = 0; m0 < job->m; m0 += MAX) {
        const int64_t count = qc_min(job->m - m0, MAX);
        const qg_few_x x = qg_load_few(job, m0, count, converted);
        qg_few_columns_units<D, MAX>(job, task, m0, count, x, tile, totals, columns);
    }
}

// --- passes over 9 rows and more -------------------------------------------------------------------------------------

// A pass: blocks of rows by columns, each of 12 or 16 rows, or the last of two of 8.
struct qg_pass_x {
    int blocks;
    const float* columns[QG_BLOCKS_OF_PASS];
    int rows[QG_BLOCKS_OF_PASS];
};

// The sums of MR rows over a block of k: added to the tile where the block is not the first one.
template <int MR> QC_INLINE void qg_store_block(const vf (&sum)[MR][1], float* tile, bool add) {
    QG_UNROLL for (int i = 0; i < MR; i++) {
        float* const to = tile + i * QG_NP * 16;
        vstore(to, add ? vload(to) + sum[i][0] : sum[i][0]);
    }
}

template <int MR> QC_INLINE void qg_add_column(const float* panel, const float* x, vf (&sum)[MR][1]) {
    const vf w = vload(panel);
    QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0] = vfma(vset(x[i]), w, sum[i][0]);
}

// MR rows times `columns` columns of a decoded panel.
template <int MR> static void qg_times_panel(
    const float* panel, const float* x, int64_t columns, float* tile, bool add) {
    vf sum[MR][1] = {};
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < columns; k++) qg_add_column<MR>(panel + 16 * k, x + k * MR, sum);
    qg_store_block<MR>(sum, tile, add);
}

// Columns k + J of one group: MR rows of x times the elements of a panel, which are stored as well for other blocks.
template <class D, int MR, bool STORES> struct qg_pass_step {
    const D& decoder;
    const float* x;
    vf (&sum)[MR][1];
    float* to;
    template <int J> QG_METHOD void step() {
        const vf w = decoder.template value<J>();
        if (STORES) vstore(to + 16 * J, w);
        QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0] = vfma(vset(x[J * MR + i]), w, sum[i][0]);
    }
};

// One panel times the rows of a pass: MR of them, and with MORE those of the other blocks.
template <class D, int MR, bool MORE> static void qg_pass_panel(
    const qg_job* job, const qg_pass_x& x, int64_t panel, float* decoded, float* tile) {
    const int64_t block = qg_block(job->k);
    D decoder;
    decoder.start(job, panel);
    int64_t k0 = 0;
    do {  // once even for k = 0
        const int64_t kc = qc_min(job->k - k0, block);
        const float* const columns = x.columns[0] + k0 * MR;
        vf sum[MR][1] = {};
        int64_t k = 0;
        for (; k + D::GROUP <= kc; k += D::GROUP) {
            decoder.at(k0 + k);
            qg_pass_step<D, MR, MORE> body{decoder, columns + k * MR, sum, decoded + 16 * k};
            qg_steps<0, D::GROUP>(body, D::GROUP);
        }
        if (k < kc) {
            qg_decode_panel<D>(job, panel, k0 + k, kc - k, decoded + 16 * k);
            for (; k < kc; k++) qg_add_column<MR>(decoded + 16 * k, columns + k * MR, sum);
        }
        qg_store_block<MR>(sum, tile, k0 > 0);
        float* to = tile + MR * QG_NP * 16;
        for (int b = 1; MORE && b < x.blocks; to += x.rows[b++] * QG_NP * 16) {
            const float* const others = x.columns[b] + k0 * x.rows[b];
            if (x.rows[b] == 16) qg_times_panel<16>(decoded, others, kc, to, k0 > 0);
            else if (x.rows[b] == 12) qg_times_panel<12>(decoded, others, kc, to, k0 > 0);
            else qg_times_panel<8>(decoded, others, kc, to, k0 > 0);
        }
        k0 += kc;
    } while (k0 < job->k);
}

// Rows [m0, m0 + count) by columns, as fp32. `converted` has room for 16 rows of a block of k.
static void qg_load_columns(
    const qg_job* job, int64_t m0, int count, float* columns, int64_t width, float* converted) {
    const int64_t block = qg_block(job->k), stride = (block + 15) / 16 * 16;
    for (int64_t k0 = 0; k0 < job->k; k0 += block) {
        const int64_t kc = qc_min(job->k - k0, block);
        const float* x = (const float*)job->x + m0 * job->x_row + k0;
        if (job->load_x) job->load_x(job, m0, count, k0, kc, converted, stride);
        qg_by_columns(
            job->load_x ? converted : x, job->load_x ? stride : job->x_row, count, kc, columns + k0 * width, width);
    }
}

// Rows [m0, m0 + count) in blocks of nearly equal heights, the highest first.
static qg_pass_x qg_load_pass(const qg_job* job, int64_t m0, int count, float* columns, float* converted) {
    qg_pass_x x = {(count + QG_HIGH - 1) / QG_HIGH, {}, {}};
    const int spare = (x.blocks * QG_HIGH - count) / 4;
    for (int b = 0, row = 0; b < x.blocks; b++) {
        const int less = spare * (b + 1) / x.blocks - spare * b / x.blocks;
        x.columns[b] = columns, x.rows[b] = QG_HIGH - 4 * (x.blocks > 1 || less < 1 ? less : 1);
        const int own = count - row < x.rows[b] ? count - row : x.rows[b];
        qg_load_columns(job, m0 + row, own, columns, x.rows[b], converted);
        columns += x.rows[b] * ((job->k + 15) / 16 * 16), row += own;
    }
    return x;
}

template <class D> static void qg_pass_any(
    const qg_job* job, const qg_pass_x& x, int64_t panel, float* decoded, float* tile) {
    const int high = x.rows[0];
    if (x.blocks > 1 && high == 16) return qg_pass_panel<D, 16, true>(job, x, panel, decoded, tile);
    if (x.blocks > 1) return qg_pass_panel<D, 12, true>(job, x, panel, decoded, tile);
    if (high == 16) return qg_pass_panel<D, 16, false>(job, x, panel, decoded, tile);
    qg_pass_panel<D, 12, false>(job, x, panel, decoded, tile);
}

// The units of a task for all rows, pass by pass.
template <class D> static void qg_pass_task(void* arg, int64_t task, char* scratch) {
    const qg_job* job = (const qg_job*)arg;
    float* const tile = (float*)scratch;
    float* const decoded = tile + qg_pass(job->k) * QG_NP * 16;
    float* const columns = decoded + QG_HIGH * ((qg_block(job->k) + 15) / 16 * 16);
    const int64_t passes = qg_up(job->m, qg_pass(job->k));
    for (int64_t pass = 0; pass < passes; pass++) {
        const int64_t m0 = qc_share(job->m, pass, passes), count = qc_share(job->m, pass + 1, passes) - m0;
        const qg_pass_x x = qg_load_pass(job, m0, (int)count, columns, decoded);
        qg_each_unit(job, task, m0, count, tile, [&](int64_t panel, int64_t end) {
            for (int64_t p = panel; p < end; p++) qg_pass_any<D>(job, x, p, decoded, tile + (p - panel) * 16);
        });
    }
}

QC_INLINE void qg_share_columns(qc_ctx* ctx, qg_job* job, void (*run)(void* job, int64_t task, char* scratch)) {
    qg_share_few(ctx, job, run, qc_max((job->n + 15) / 16 / QG_SERVED, ctx->num_threads));
}
#endif

// Up to MAX rows at a time, straight from codes.
template <class D, int MAX> static void qg_run_rows(qc_ctx* ctx, qg_job* job) {
#if defined(QC_AVX512)
    if constexpr (MAX > 2) return qg_share_columns(ctx, job, qg_few_columns_task<D, MAX>);
#endif
    qg_run_few<D, MAX>(ctx, job);
}

// Any number of rows. Many rows of few panels, and windows of an image, are cut by rows as well (gemm.h).
template <class D> static void qg_run_passes(qc_ctx* ctx, qg_job* job) {
#if defined(QC_AVX512)
    const int64_t threads = ctx->num_threads, least = job->m <= 4 * QG_HIGH ? 16 * threads : 16 * QG_SERVED * threads;
    if (job->n > least && job->m >= QG_FIRST_PASS && !job->window)
        return qg_share_columns(ctx, job, qg_pass_task<D>);
#endif
    qg_run(ctx, job);
}
