// Products of fp32 numbers with codes by AMX, where the context allows tiles of bf16. An fp32 number is the sum of
// three of bf16, which have eight bits of its mantissa each, and values of codes are numbers that bf16 has unrounded.
// So every product is exact, and sums are in fp32, as those of FMA are. Sums of the columns of a scale are scaled in
// fp32.
//
//     x         [16 rows][columns of a tile][piece][16 rows][64 bytes]: what a block of columns needs of 16 rows is
//               12 KiB of neighbours, which stay in an L1 cache of 48 KiB while panels pass by
//     words     of two columns, as bf16_tiles.h makes them from codes, for a block of columns of all panels of a task.
//               Of up to 16 rows, each panel's are multiplied as soon as they are made
//     sums      a pair of scales at a time: one tile of two panels each, so that four chains of additions are under way
//
// Numbers below 2^-126 count as zero: the last bits of numbers of x below 2^-103, and sums.
#pragma once
#include "bf16_tiles.h"

// Rows of a block, columns of a block, pieces of a number; most panels of a task and bytes of rows at a time.
enum { QFT_ROWS = 16, QFT_BLOCK = 128, QFT_PIECES = 3, QFT_PANELS = 16, QFT_CHUNK = 6 << 20 };

constexpr int64_t qft_row(int64_t k) { return QFT_PIECES * 2 * qbt_padded(k); }  // bytes of a row of x
// Most rows at a time, of at most `m` (0: any number).
constexpr int64_t qft_chunk(int64_t k, int64_t m) {
    const int64_t most = m > 0 && m < 512 ? qg_up(m, QFT_ROWS) * QFT_ROWS : 512;
    const int64_t fit = k > 0 ? QFT_CHUNK / qft_row(k) / QFT_ROWS * QFT_ROWS : most;
    return fit < QFT_ROWS ? (int64_t)QFT_ROWS : fit < most ? fit : most;
}
// Floats from one row of sums to the next.
enum { QFT_STRIDE = (QFT_PANELS + 1) * 16 };
// Bytes of scratch: tiles of sums, words, sums, a row in fp32, sums of an ordinary row; then rows of x and the sums of
// their columns, in the scratch of the calling thread.
enum { QFT_PARTS = 4 * 1024, QFT_WORDS = QFT_PANELS * QFT_BLOCK * 32 };
constexpr int64_t qft_work(int64_t k, int64_t m) {
    return QFT_PARTS + QFT_WORDS + 4 * (qft_chunk(k, m) * QFT_STRIDE + qbt_padded(k) + QG_NP * 16);
}
constexpr int64_t qft_scratch(int64_t k, int64_t m) {
    return qft_work(k, m) + qft_chunk(k, m) * (qft_row(k) + 4 * (k / 32 + 1));
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// Whether codes of D can be multiplied so. SPAN: columns of a scale, or of a sum where a row has one scale.
template <class D> struct qft_coded { static constexpr bool FITS = false; };
template <class W> struct qft_coded<qg_coded<W>> {
    static constexpr int SPAN = W::COVERS ? W::COVERS : (int)QFT_BLOCK;
    static constexpr bool exact() {
        if constexpr (qb_coded<qg_coded<W>>::SUMMED) return W::EXACT;
        else return false;
    }
    static constexpr bool WHOLE = SPAN % QBT_COLUMNS == 0 && QFT_BLOCK % SPAN == 0;
    static constexpr bool FITS = exact() && WHOLE && (W::COVERS != 0 || !W::OFFSET);
};

// Rows from which tiles take less time than FMA (docs/performance.md).
enum { QFT_LEAST = 9 };
QC_INLINE bool qft_takes(const qc_ctx* ctx, const qg_job* job) {
    return ctx->bf16_units == QC_BF16_TILES && job->m >= QFT_LEAST;
}

struct qft_call {
    const qg_job* job;
    int64_t m0, count, blocks;  // the first row, rows, blocks of them
    int64_t panels;             // of a task
    int64_t row_at;             // where in a task's scratch a row of x has room
    char* x;
    float* totals;              // [row][scale]
    int64_t scales;
    char* at(int64_t block, int64_t k) const { return x + QFT_ROWS * (block * qft_row(job->k) + k * QFT_PIECES * 2); }
};

// --- rows of x -------------------------------------------------------------------------------------------------------

// The upper halves of 32 numbers, in their order.
QC_INLINE __m512i qft_upper_halves(qf first, qf second) {
    alignas(64) static const uint16_t from[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                  33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(from), (__m512i)second);
}

// The eight highest bits of the mantissa. Of an infinity or a NaN, a piece or what is left is a NaN.
QC_INLINE qf qft_piece(qf& rest) {
    const qf piece = (qf)((qu)rest & 0xffff0000u);
    rest = rest - piece;
    return piece;
}

// Row i of a block, with its columns in the order of words of codes of BITS bits (0: as they are).
template <int BITS> QC_INLINE void qft_put_row(const float* x, int64_t k, char* to) {
    for (int64_t at = 0; at < qbt_padded(k); at += QBT_COLUMNS, to += QFT_PIECES * QBT_TILE) {
        const int64_t left = x ? k - at : 0;
        qf first = left > 0 ? vload_upto(x + at, (int)qc_min(left, 16)).r[0] : qf();
        qf second = left > 16 ? vload_upto(x + at + 16, (int)qc_min(left - 16, 16)).r[0] : qf();
        QG_UNROLL for (int p = 0; p < QFT_PIECES; p++) {
            __m512i numbers = qft_upper_halves(qft_piece(first), qft_piece(second));
            if constexpr (BITS != 0) numbers = (__m512i)qb_permute(qb_order<BITS>.from, numbers);
            _mm512_store_si512(to + p * QBT_TILE, numbers);
        }
    }
}

template <class D> static void qft_load_task(void* arg, int64_t block, char* scratch) {
    typedef decltype(D::entries) W;
    const qft_call& call = *(const qft_call*)arg;
    const qg_job* const job = call.job;
    for (int64_t i = block * QFT_ROWS; i < (block + 1) * QFT_ROWS; i++) {
        const bool there = i < call.count;
        const float* const x =
            there ? qg_load_few(job, call.m0 + i, 1, (float*)(scratch + call.row_at)).rows : nullptr;
        qft_put_row<qbt_order<D>::BITS>(x, job->k, call.at(block, 0) + i % QFT_ROWS * 64);
        if (W::OFFSET && there) {
            for (int64_t s = 0; s < call.scales; s++) {
                vf total = vzero();
                for (int64_t k = s * W::COVERS; k < (s + 1) * W::COVERS; k += 16) total = total + vload(x + k);
                call.totals[i * call.scales + s] = vsum(total);
            }
        }
    }
}

// --- words -----------------------------------------------------------------------------------------------------------

// The values of the codes of columns [k0, k0 + kc) of a panel, whole tiles; codes behind them are asked for.
template <class D> static void qft_make(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, char* words) {
    if constexpr (qb_coded<D>::LOOKED_UP) {
        const qbt_soon now = qbt_codes_at<D>(job, panel, k0);
        for (int64_t line = 0; line < kc / QBT_COLUMNS * now.lines; line++)
            __builtin_prefetch(now.at + (QFT_BLOCK / QBT_COLUMNS * now.lines + line) * 64);
    }
    qbt_codes<D>(job, panel, k0, kc, words, true);
}

// --- products --------------------------------------------------------------------------------------------------------

// Sums 2 * S + p of `columns` columns of NB panels, whose words lie QFT_BLOCK * 32 bytes apart.
template <int NB, int S> QC_INLINE void qft_multiply(const char* x, const char* words, int64_t columns) {
    qa_zero<2 * S>();
    if constexpr (NB > 1) qa_zero<2 * S + 1>();
    for (int64_t k = 0; k < columns; k += QBT_COLUMNS) {
        qa_load<6>(words + 32 * k, 64);
        if constexpr (NB > 1) qa_load<7>(words + QFT_BLOCK * 32 + 32 * k, 64);
        qa_load<4>(x, 64), qa_dot_bf16<2 * S, 4, 6>();
        if constexpr (NB > 1) qa_dot_bf16<2 * S + 1, 4, 7>();
        qa_load<5>(x + QBT_TILE, 64), qa_dot_bf16<2 * S, 5, 6>();
        if constexpr (NB > 1) qa_dot_bf16<2 * S + 1, 5, 7>();
        qa_load<4>(x + 2 * QBT_TILE, 64), qa_dot_bf16<2 * S, 4, 6>();
        if constexpr (NB > 1) qa_dot_bf16<2 * S + 1, 4, 7>();
        x += QFT_PIECES * QBT_TILE;
    }
}
template <int NB, int S> QC_INLINE void qft_store(char* parts) {
    qa_store<2 * S>(parts + 2 * S * 1024, 64);
    if constexpr (NB > 1) qa_store<2 * S + 1>(parts + (2 * S + 1) * 1024, 64);
}

// Adds COUNT scaled sums of NB panels to the rows at `sums`; `first`: begins them.
template <class W, int NB, int COUNT>
QC_INLINE void qft_add(
    const qft_call& call, int64_t block, int64_t panel, int64_t k, const char* parts, float* sums, bool first) {
    qf scale[COUNT][NB], offset[COUNT][NB];
    if constexpr (W::COVERS != 0)
        QG_UNROLL for (int s = 0; s < COUNT; s++)
            QG_UNROLL for (int p = 0; p < NB; p++) {
                W entries;
                entries.load(call.job->packed, panel + p, k + s * W::COVERS);
                scale[s][p] = entries.scale().r[0];
                if constexpr (W::OFFSET) offset[s][p] = entries.offset().r[0];
            }
    const int64_t rows = qc_min(call.count - block * QFT_ROWS, QFT_ROWS);
    const float* totals = call.totals + block * QFT_ROWS * call.scales;
    if constexpr (W::OFFSET && W::COVERS != 0) totals += (uint64_t)k / (W::COVERS ? W::COVERS : 1);
    for (int64_t i = 0; i < rows; i++, sums += QFT_STRIDE, parts += 64, totals += call.scales) {
        qf sum[NB];
        QG_UNROLL for (int p = 0; p < NB; p++) sum[p] = first ? qf() : q_load(sums + 16 * p);
        QG_UNROLL for (int s = 0; s < COUNT; s++)
            QG_UNROLL for (int p = 0; p < NB; p++) {
                const qf part = q_load((const float*)(parts + (2 * s + p) * 1024));
                if constexpr (W::COVERS == 0) {
                    sum[p] = sum[p] + part;
                } else {
                    sum[p] = q_fma(part, scale[s][p], sum[p]);
                    if constexpr (W::OFFSET) sum[p] = q_fma(q_set(totals[s]), offset[s][p], sum[p]);
                }
            }
        QG_UNROLL for (int p = 0; p < NB; p++) q_store(sums + 16 * p, sum[p]);
    }
}

// Columns [k0, k0 + kc) of NB panels times a block of rows.
template <class D, int NB>
static void qft_product(
    const qft_call& call, int64_t block, int64_t panel, int64_t k0, int64_t kc, const char* words, float* sums,
    char* parts) {
    typedef decltype(D::entries) W;
    constexpr int64_t SPAN = qft_coded<D>::SPAN, TILES = SPAN / QBT_COLUMNS * QFT_PIECES * QBT_TILE;
    const char* x = call.at(block, k0);
    for (int64_t k = 0; k < kc; k += 2 * SPAN) {
        const int64_t left = kc - k;
        qft_multiply<NB, 0>(x, words + 32 * k, qc_min(left, SPAN));
        if (left > SPAN) {
            qft_multiply<NB, 1>(x + TILES, words + 32 * (k + SPAN), qc_min(left - SPAN, SPAN));
            qft_store<NB, 0>(parts), qft_store<NB, 1>(parts);
            qft_add<W, NB, 2>(call, block, panel, k0 + k, parts, sums, k0 + k == 0);
        } else {
            qft_store<NB, 0>(parts);
            qft_add<W, NB, 1>(call, block, panel, k0 + k, parts, sums, k0 + k == 0);
        }
        x += 2 * TILES;
    }
}

// A task's rows of sums are made: scales of whole rows, and rows whose sums are no numbers where those of elements may
// be (0 * infinity; pieces of an infinity), which take the other way.
template <class D> static void qft_complete(
    const qft_call& call, int64_t block, int64_t panel, int64_t end, float* sums, float* row) {
    typedef decltype(D::entries) W;
    typedef typename qg_elements<D>::type elements;
    const qg_job* const job = call.job;
    const int64_t rows = qc_min(call.count - block * QFT_ROWS, QFT_ROWS);
    for (int64_t p = panel; p < end; p += QG_NP) {
        const int64_t last = qc_min(p + QG_NP, end) - 1;
        float* const at = sums + (p - panel) * 16;
        if constexpr (W::COVERS == 0)
            for (int64_t q = p; q <= last; q++)
                qbt_scale<W>(job->packed, q, rows, call.totals + block * QFT_ROWS, at + 16 * (q - p), QFT_STRIDE);
        for (int64_t i = 0; i < rows; i++) {
            float* const sum = at + i * QFT_STRIDE;
            const vf first = vload(sum), second = last > p ? vload(sum + 16) : vzero();
            if (vsum((first - first) + (second - second)) == 0.0f) continue;
            const qg_few_x x = qg_load_few(job, call.m0 + block * QFT_ROWS + i, 1, row);
            float* const whole = row + qbt_padded(job->k);
            qg_few_panels<elements, 1, false>(job, x, p, last, whole);
            if (qg_few_shape<elements, 1>::PANELS < QG_NP && last > p)
                qg_few_panels<elements, 1, false>(job, x, last, last, whole + 16);
            memcpy(sum, whole, (size_t)(4 * 16 * (last - p + 1)));
        }
    }
}

template <class D> static void qft_task(void* arg, int64_t task, char* scratch) {
    const qft_call& call = *(const qft_call*)arg;
    const qg_job* const job = call.job;
    const int64_t first = task * call.panels, end = qc_min(first + call.panels, qg_up(job->n, 16));
    char* const parts = scratch;
    char* const words = parts + QFT_PARTS;
    float* const sums = (float*)(words + QFT_WORDS);
    qa_configure(qa_shape_for(call.count));
    const auto make = [&](int64_t p, int64_t k0) {
        qft_make<D>(job, p, k0, qc_min(job->k - k0, QFT_BLOCK), words + (p - first) * QFT_BLOCK * 32);
    };
    const auto product = [&](int64_t b, int64_t p, int64_t k0) {
        const int64_t kc = qc_min(job->k - k0, QFT_BLOCK), i = p - first;
        const char* const from = words + i * QFT_BLOCK * 32;
        float* const to = sums + b * QFT_ROWS * QFT_STRIDE + 16 * i;
        if (p + 1 < end) qft_product<D, 2>(call, b, p, k0, kc, from, to, parts);
        else qft_product<D, 1>(call, b, p, k0, kc, from, to, parts);
    };
    if (call.blocks == 1) {
        for (int64_t p = first; p < end; p += QG_NP)
            for (int64_t k0 = 0; k0 < job->k; k0 += QFT_BLOCK) {
                make(p, k0);
                if (p + 1 < end) make(p + 1, k0);
                product(0, p, k0);
            }
    } else {
        for (int64_t k0 = 0; k0 < job->k; k0 += QFT_BLOCK) {
            for (int64_t p = first; p < end; p++) make(p, k0);
            for (int64_t b = 0; b < call.blocks; b++)
                for (int64_t p = first; p < end; p += QG_NP) product(b, p, k0);
        }
    }
    qa_release();
    const int64_t n0 = first * 16, columns = qc_min(job->n - n0, (end - first) * 16);
    for (int64_t b = 0; b < call.blocks; b++) {
        float* const at = sums + b * QFT_ROWS * QFT_STRIDE;
        qft_complete<D>(call, b, first, end, at, (float*)(scratch + call.row_at));
        job->finish(job, at, QFT_STRIDE, call.m0 + b * QFT_ROWS, qc_min(call.count - b * QFT_ROWS, QFT_ROWS), n0,
                    columns);
    }
}

// Rows of fp32, or of what `load_x` converts, times a weight whose rows have whole scales and whole tiles. `m`: what
// `qft_scratch` was told.
template <class D> static void qft_run(qc_ctx* ctx, qg_job* job, int64_t m) {
    typedef decltype(D::entries) W;
    static_assert(qft_coded<D>::FITS, "values of codes in bf16, whole tiles");
    if (job->m <= 0 || job->n <= 0) return;
    const int64_t panels = qg_up(job->n, 16), threads = ctx->num_threads, most = qft_chunk(job->k, m);
    const int64_t chunks = qg_up(job->m, most), chunk = qg_up(qg_up(job->m, chunks), QFT_ROWS) * QFT_ROWS;
    for (int64_t m0 = 0; m0 < job->m; m0 += chunk) {
        qft_call call = {};
        call.job = job, call.m0 = m0, call.count = qc_min(job->m - m0, chunk);
        call.blocks = qg_up(call.count, QFT_ROWS);
        call.row_at = QFT_PARTS + QFT_WORDS + 4 * most * QFT_STRIDE;
        call.x = ctx->scratch + qft_work(job->k, m);
        call.totals = (float*)(call.x + most * qft_row(job->k));
        call.scales = W::COVERS ? job->k / (W::COVERS ? W::COVERS : 1) : 1;
        const int64_t worth = panels * job->k * (3 + 3 * call.blocks * QFT_ROWS) / 2 / QG_TASK;
        const int64_t wanted = threads > 1 ? qc_max(qc_min(worth, 2 * threads), 1) : 1;
        const int64_t units = qg_up(panels, QG_NP), most_units = qc_min(qg_up(units, wanted), QFT_PANELS / QG_NP);
        call.panels = QG_NP * (wanted > 1 ? qbt_even(units, most_units, threads) : most_units);
        const int64_t tasks = qg_up(panels, call.panels);
        const bool shared = threads > 1 && wanted > 1 && tasks > 1;
        qc_run_tasks(ctx, shared && call.count * job->k >= 8 * QG_TASK, call.blocks, qft_load_task<D>, &call);
        qc_run_tasks(ctx, shared, tasks, qft_task<D>, &call);
    }
}
#endif
