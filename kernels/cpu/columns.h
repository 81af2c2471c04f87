// Products of 3 rows and more in fp32 on AVX-512: rows of x are put in order by columns, [k][row], so that walking x is
// one stream whatever its row stride, and multiplied in blocks of a few rows by two panels. A number of x is broadcast
// once for both: a block of eight rows takes ten loads for 16 multiplications. By one panel, each multiplication would
// load its number, and a Zen 5, as cores of Intel's, begins as many loads in a cycle as multiplications. Decoding runs
// in the pipes that FMA leaves idle: shifts, permutations and stores.
//
//     3 … 8 rows   straight from codes, which are summed as they are over the columns of a scale of 16 or more, as
//                  few_rows.h does for one and two rows.
//     9 … 16       two blocks of six or eight rows, where a scale has 32 columns or more. On a Zen 4, of any weight,
//                  one block of twelve or sixteen rows by one panel. 8-bit floats only where AVX-512 VBMI decodes them.
//     more         passes over up to 128 rows. The first block multiplies what it decodes, and stores it for the
//                  others. An element's additions have gemm.h's order, in blocks of k.
#pragma once
#include "few_rows.h"

enum {
    QG_FIRST_PASS = 9,  // from so many rows on, passes are faster than decoding panels and then multiplying them
    // Columns of a product that pay for putting its rows in order, which panels do not need: for up to QG_SOME_ROWS
    // rows, and for more.
    QG_SOME_ROWS = 64,
    QG_LEAST_COLUMNS = 33,
    QG_MANY_COLUMNS = 512,
    QG_DECODING_ROWS = 8,  // rows of a pass's first block, beside whose sums registers are left for decoding
    QG_LOW_ROWS = 6,       // rows of each of two blocks for up to twice as many
    QG_OTHER_ROWS = 12,    // most rows of the others
    QG_PASS_ROWS = 128,    // most rows of a pass
    QG_BLOCKS_OF_PASS = 1 + (QG_PASS_ROWS - QG_DECODING_ROWS + QG_OTHER_ROWS - 1) / QG_OTHER_ROWS,
    QG_PASS_FLOATS = 1 << 19,  // most numbers of a pass: two MiB of a thread's scratch
    QG_WIDE = QG_NP * 16,      // numbers of a row of a tile
    QG_ORDERING_COLUMNS = 24,  // columns of a product that take as long as putting its rows in order
};

// Rows of a pass: fewer where a row is long, but two blocks at least.
constexpr int64_t qg_pass(int64_t k) {
    const int64_t most = QG_PASS_ROWS, least = 2 * QG_DECODING_ROWS;
    const int64_t rows = QG_PASS_FLOATS / (k > 0 ? k : 1) / QG_DECODING_ROWS * QG_DECODING_ROWS;
    return rows < least ? least : rows < most ? rows : most;
}

// Floats of `rows` rows by columns: whole vectors are written.
constexpr int64_t qg_columns(int64_t k, int64_t rows) { return (k + 15) / 16 * 16 * rows + 16; }

// Bytes of scratch of qg_few_columns_task and of qg_pass_task.
constexpr int64_t qg_few_columns_scratch(int64_t k, int64_t rows, bool converts) {
    return qg_few_scratch(k, rows, converts) + 4 * (qg_columns(k, rows) + qg_columns(k / 16, rows));
}
constexpr int64_t qg_pass_scratch(int64_t k) {
    return 4 * (qg_pass(k) * QG_WIDE + QG_WIDE * ((qg_block(k) + 15) / 16 * 16) + qg_columns(k, qg_pass(k)) +
                2 * qg_columns(k / 32, QG_DECODING_ROWS));
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

// --- blocks of rows --------------------------------------------------------------------------------------------------

// sum += MR numbers of x times a column of NP panels.
template <int MR, int NP> QC_INLINE void qg_add_column(const vf (&w)[NP], const float* x, vf (&sum)[MR][NP]) {
    QG_UNROLL for (int i = 0; i < MR; i++) {
        const vf a = vset(x[i]);
        QG_UNROLL for (int p = 0; p < NP; p++) sum[i][p] = vfma(a, w[p], sum[i][p]);
    }
}
// The same with the column in memory, [panel][16].
template <int MR, int NP> QC_INLINE void qg_add_column(const float* column, const float* x, vf (&sum)[MR][NP]) {
    vf w[NP];
    QG_UNROLL for (int p = 0; p < NP; p++) w[p] = vload(column + p * 16);
    qg_add_column<MR, NP>(w, x, sum);
}

// Columns k + J of one group: MR rows of x times the elements of NP panels, or with CODES times the values of their
// codes. With STORES, these are stored as well, [column][panel][16].
template <class D, int MR, int NP, bool CODES, bool STORES> struct qg_column_step {
    const D (&decoder)[NP];
    const float* x;
    vf (&sum)[MR][NP];
    float* to;
    template <int J> QG_METHOD void step() {
        vf w[NP];
        QG_UNROLL for (int p = 0; p < NP; p++) {
            if constexpr (CODES) w[p] = decoder[p].template code<J>();
            else w[p] = decoder[p].template value<J>();
            if (STORES) vstore(to + (J * NP + p) * 16, w[p]);
        }
        qg_add_column<MR, NP>(w, x + J * MR, sum);
    }
};

// Columns [k, k + count) of NP panels, fewer than a group, decoded to memory to keep the code small:
// [column][panel][16].
template <class D, int NP> QC_COLD void qg_decode_last(
    const qg_job* job, int64_t panel, int64_t next, int64_t k, int64_t count, float* to) {
    float one[D::GROUP * 16];
    for (int p = 0; p < NP; p++) {
        qg_decode_panel<D>(job, p ? next : panel, k, count, one);
        for (int64_t j = 0; j < count; j++) vstore(to + (j * NP + p) * 16, vload(one + j * 16));
    }
}

// totals[g * MR + i] = the sum of columns [g * span, (g + 1) * span) of row i.
template <int MR> static void qg_add_columns(const float* x, int64_t span, int64_t groups, float* totals) {
    for (int64_t g = 0; g < groups; g++, totals += MR) {
        vf total[4] = {};
        for (int64_t k = 0; k < span; k++, x += MR) total[k % 4] = total[k % 4] + vload(x);
        vstore(totals, qg_sum<4>(total));  // lanes from MR on are written again
    }
}

// MR rows by columns times NP panels: tile[i][p] = sums by codes, with their totals. `next` is the last of the panels;
// a short unit repeats its only one. A sum may be no number where that of elements is one: 0 * infinity.
template <class D, int MR, int NP> static void qg_block_by_codes(
    const qg_job* job, const float* x, const float* totals, int64_t panel, int64_t next, float* tile) {
    static_assert(D::UNIT == 1.0f, "values, not multiples");
    D decoder[NP];
    QG_UNROLL for (int p = 0; p < NP; p++) decoder[p].start(job, p ? next : panel);
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < NP; p++) vstore(tile + i * QG_WIDE + p * 16, vzero());
    int64_t k = 0;
    for (; k + D::SHARED <= job->k; k += D::SHARED, totals += MR) {
        vf part[MR][NP] = {};
        QG_UNROLL for (int p = 0; p < NP; p++) {
            if (NP > 1) decoder[p].ask(next + 1 + p, k);  // a Zen 4, which takes one panel, is slower by it
            decoder[p].entries_at(k);
        }
        for (int at = 0; at < D::SHARED; at += D::GROUP) {
            QG_UNROLL for (int p = 0; p < NP; p++) decoder[p].look_ahead(k + at, NP), decoder[p].codes_at(k + at);
            qg_column_step<D, MR, NP, true, false> body{decoder, x + (k + at) * MR, part, nullptr};
            qg_steps<0, D::GROUP>(body, D::GROUP);
        }
        QG_UNROLL for (int p = 0; p < NP; p++) {
            const vf scale = decoder[p].scale();
            QG_UNROLL for (int i = 0; i < MR; i++) {
                float* const to = tile + i * QG_WIDE + p * 16;
                vf sum = vfma(part[i][p], scale, vload(to));
                if constexpr (D::OFFSET) sum = vfma(vset(totals[i]), decoder[p].offset(), sum);
                vstore(to, sum);
            }
        }
    }
    if (k == job->k) return;
    float last[D::GROUP * NP * 16];
    for (; k < job->k; k += D::GROUP) {
        const int64_t left = qc_min(job->k - k, D::GROUP);
        qg_decode_last<D, NP>(job, panel, next, k, left, last);
        vf sum[MR][NP];
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int p = 0; p < NP; p++) sum[i][p] = vload(tile + i * QG_WIDE + p * 16);
        for (int64_t j = 0; j < left; j++) qg_add_column<MR, NP>(last + j * NP * 16, x + (k + j) * MR, sum);
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int p = 0; p < NP; p++) vstore(tile + i * QG_WIDE + p * 16, sum[i][p]);
    }
}

// The sums of MR rows over a block of k: added to the tile where the block is not the first one.
template <int MR, int NP> QC_INLINE void qg_store_block(const vf (&sum)[MR][NP], float* tile, bool add) {
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < NP; p++) {
            float* const to = tile + i * QG_WIDE + p * 16;
            vstore(to, add ? vload(to) + sum[i][p] : sum[i][p]);
        }
}

// MR rows by columns times the elements of columns [k0, k0 + kc) of NP panels, which STORES leaves in `decoded`.
template <class D, int MR, int NP, bool STORES> static void qg_block_by_elements(
    const qg_job* job, const float* x, int64_t k0, int64_t kc, int64_t panel, int64_t next, float* decoded,
    float* tile) {
    D decoder[NP];
    QG_UNROLL for (int p = 0; p < NP; p++) decoder[p].start(job, p ? next : panel);
    vf sum[MR][NP] = {};
    int64_t k = 0;
    for (; k + D::GROUP <= kc; k += D::GROUP) {
        QG_UNROLL for (int p = 0; p < NP; p++) {
            if (NP > 1) decoder[p].ask((p ? next : panel) + NP, k0 + k);
            decoder[p].look_ahead(k0 + k, NP), decoder[p].at(k0 + k);
        }
        qg_column_step<D, MR, NP, false, STORES> body{decoder, x + k * MR, sum, decoded + k * NP * 16};
        qg_steps<0, D::GROUP>(body, D::GROUP);
    }
    if (k < kc) {
        float last[D::GROUP * NP * 16];
        qg_decode_last<D, NP>(job, panel, next, k0 + k, kc - k, last);
        for (const float* w = last; k < kc; k++, w += NP * 16) {
            qg_add_column<MR, NP>(w, x + k * MR, sum);
            if (STORES) memcpy(decoded + k * NP * 16, w, NP * 64);
        }
    }
    qg_store_block<MR, NP>(sum, tile, k0 > 0);
}

// The same with elements in memory: `step` floats from one column of a panel to the next.
template <int MR> static void qg_block_of_panels(
    const float* first, const float* second, int64_t step, const float* x, int64_t columns, float* tile,
    bool add) {
    vf sum[MR][QG_NP] = {};
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < columns; k++, first += step, second += step)
        qg_add_column<MR, QG_NP>({vload(first), vload(second)}, x + k * MR, sum);
    qg_store_block<MR, QG_NP>(sum, tile, add);
}

QC_COLD void qg_block_of_panels_any(
    int rows, const float* first, const float* second, int64_t step, const float* x, int64_t columns, float* tile,
    bool add) {
    if (rows == 12) return qg_block_of_panels<12>(first, second, step, x, columns, tile, add);
    if (rows == 8) return qg_block_of_panels<8>(first, second, step, x, columns, tile, add);
    qg_block_of_panels<4>(first, second, step, x, columns, tile, add);
}

// --- 3 to 8 rows -----------------------------------------------------------------------------------------------------

// From so many rows on, two panels are faster than one: with fewer, one has enough sums under way if each row has two.
template <class D> constexpr int qg_both_from() {
    if constexpr (D::SUMMED) return D::IN_PLANES ? 5 : 8;
    return 9;
}

template <class D, int MR, int SUMS, bool CODES> struct qg_few_column_step {
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

template <class D, int MR> static void qg_few_columns(
    const qg_job* job, const float* x, const float* totals, int64_t panel, float* tile) {
    // Where two panels may be multiplied, each row has one sum, as there. Five of these chains hide the latency of FMA
    // on a Zen 4, which is the one that takes one panel.
    constexpr int SUMS = MR < 8 && MR < qg_both_from<D>() ? 2 : 1;
    vf sum[MR][SUMS] = {};
    D decoder;
    decoder.start(job, panel);
    int64_t k = 0;
    if constexpr (D::SUMMED) {
        for (; k + D::SHARED <= job->k; k += D::SHARED, totals += MR) {
            vf part[MR][SUMS] = {};
            if constexpr (D::ASKS) decoder.ask(panel + 1, k);
            decoder.at(k);
            for (int at = 0; at < D::SHARED; at += D::GROUP) {
                if (at > 0) decoder.codes_at(k + at);
                qg_few_column_step<D, MR, SUMS, true> body{decoder, x + (k + at) * MR, part};
                qg_steps<0, D::GROUP>(body, D::GROUP);
            }
            QG_UNROLL for (int i = 0; i < MR; i++) {
                vf& to = sum[i][0];
                to = vfma(qg_sum<SUMS>(part[i]), decoder.scale(), to);
                if constexpr (D::OFFSET) to = vfma(vset(totals[i]), decoder.offset(), to);
            }
        }
        if constexpr (D::UNIT != 1.0f)
            QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0] = sum[i][0] * vset(D::UNIT);
    } else {
        for (; k + D::GROUP <= job->k; k += D::GROUP) {
            decoder.at(k);
            qg_few_column_step<D, MR, SUMS, false> body{decoder, x + k * MR, sum};
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
    const bool both = MR >= qg_both_from<D>() && qg_broadcasts();
    if constexpr (MR >= qg_both_from<D>())
        if (both) qg_block_by_codes<D, MR, QG_NP>(job, columns, x.totals, panel, end - 1, tile);
    for (int64_t p = panel; p < end; p++) {
        float* const to = tile + (p - panel) * 16;
        if (!both) qg_few_columns<D, MR>(job, columns, x.totals, p, to);
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
template <class D, int MAX> struct qg_few_columns_task {
    static void run(void* arg, int64_t task, char* scratch);
};
template <class D, int MAX> void qg_few_columns_task<D, MAX>::run(void* arg, int64_t task, char* scratch) {
    const qg_job* job = (const qg_job*)arg;
    float* const tile = (float*)scratch;
    // One or two rows are not put in order by columns: rows for codes in place lie where these would be.
    static_assert(qg_columns(64, MAX) >= qg_most_raised(64, MAX), "rows for codes in place");
    float* const totals = tile + MAX * QG_NP * 16;
    float* const columns = totals + qc_max(qg_most_totals(job->k), qg_columns(job->k / 16, MAX));
    float* const converted = columns + qg_columns(job->k, MAX);
    for (int64_t m0 = 0; m0 < job->m; m0 += MAX) {
        const int64_t count = qc_min(job->m - m0, MAX);
        const qg_few_x x = qg_load_few(job, m0, count, converted);
        qg_few_columns_units<D, MAX>(job, task, m0, count, x, tile, totals, columns);
    }
}

// --- 9 rows and more -------------------------------------------------------------------------------------------------

// A pass: its rows by columns, in blocks; and memory for what is made of them.
struct qg_pass_x {
    int blocks;
    int rows[QG_BLOCKS_OF_PASS];
    const float* columns[QG_BLOCKS_OF_PASS];  // [k][rows]
    const float* totals[2];  // where codes are summed
    float *tile, *decoded;
};

// Rows [m0, m0 + count) by columns, as fp32. `converted` has room for 32 rows of a block of k.
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

// Rows of the first block, which decodes: plain weights leave registers for more.
template <class D> struct qg_first { static constexpr int ROWS = QG_DECODING_ROWS; };
template <class T> struct qg_first<qg_plain<T>> { static constexpr int ROWS = QG_OTHER_ROWS; };

// Rows [m0, m0 + count) in a block of `first` rows and others of 12, the last of which have 8 or 4.
QC_COLD void qg_load_pass(const qg_job* job, int64_t m0, int count, int first, float* columns, qg_pass_x* x) {
    x->blocks = 0;
    for (int row = 0; row < count; x->blocks++) {
        const int left = (count - row + 3) / 4 * 4;
        const int other = left == 8 || left == 16 ? QG_DECODING_ROWS : qc_min(left, QG_OTHER_ROWS);
        const int high = x->blocks == 0 ? first : other;
        x->rows[x->blocks] = high, x->columns[x->blocks] = columns;
        qg_load_columns(job, m0 + row, qc_min(count - row, high), columns, high, x->decoded);
        columns += high * ((job->k + 15) / 16 * 16), row += high;
    }
}

// A unit of two panels times a pass.
template <class D> static void qg_pass_unit(const qg_job* job, const qg_pass_x& x, int64_t panel, int64_t next) {
    constexpr int FIRST = qg_first<D>::ROWS;
    constexpr bool IN_PLACE = std::is_same_v<D, qg_plain<float>>;
    const int64_t block = qg_block(job->k);
    const float *first = x.decoded, *second = first + 16;
    int64_t k0 = 0;
    do {  // once even for k = 0, whose sums are zero
        const int64_t kc = qc_min(job->k - k0, block);
        qg_block_by_elements<D, FIRST, QG_NP, !IN_PLACE>(
            job, x.columns[0] + k0 * FIRST, k0, kc, panel, next, x.decoded, x.tile);
        if (IN_PLACE) first = (const float*)job->codes + (panel * job->k + k0) * 16;
        if (IN_PLACE) second = first + (next - panel) * job->k * 16;
        float* tile = x.tile + FIRST * QG_WIDE;
        for (int b = 1; b < x.blocks; tile += x.rows[b++] * QG_WIDE)
            qg_block_of_panels_any(
                x.rows[b], first, second, IN_PLACE ? 16 : QG_WIDE, x.columns[b] + k0 * x.rows[b], kc, tile, k0 > 0);
        k0 += kc;
    } while (k0 < job->k);
}

// Whether blocks of 9 to 16 rows sum codes: where a scale has fewer columns, elements are as fast.
template <class D> constexpr bool qg_sums_blocks() {
    if constexpr (D::SUMMED) return D::SHARED >= 32;
    return false;
}

// Block b of a few rows, MR of them, times NP panels: straight from codes.
template <class D, int MR, int NP> static void qg_straight_block(
    const qg_job* job, const qg_pass_x& x, int b, int64_t panel, int64_t next, float* tile) {
    constexpr bool STORES = MR == QG_DECODING_ROWS && NP == QG_NP;  // one function less: a pass's first block
    constexpr bool SUMS = qg_sums_blocks<D>();
    bool bad[MR][NP], any = !SUMS;
    if constexpr (SUMS) {
        qg_block_by_codes<D, MR, NP>(job, x.columns[b], x.totals[b], panel, next, tile);
        for (int i = 0; i < MR; i++)  // a sum of codes may be no number where that of elements is one
            for (int p = 0; p < NP; p++) {
                const vf found = vload(tile + i * QG_WIDE + 16 * p);
                any |= bad[i][p] = vsum(found - found) != 0.0f;
            }
    }
    if (!any) return;
    float elements[MR * QG_WIDE];
    float* const to = SUMS ? elements : tile;
    const int64_t block = qg_block(job->k);
    int64_t k0 = 0;
    do {  // once even for k = 0, whose sums are zero
        qg_block_by_elements<D, MR, NP, STORES>(
            job, x.columns[b] + k0 * MR, k0, qc_min(job->k - k0, block), panel, next, x.decoded, to);
        k0 += block;
    } while (k0 < job->k);
    for (int i = 0; SUMS && i < MR; i++)
        for (int p = 0; p < NP; p++)  // each panel by itself, as where there is one
            if (bad[i][p]) memcpy(tile + i * QG_WIDE + 16 * p, elements + i * QG_WIDE + 16 * p, 64);
}

// A unit of two panels times the rows in `x`.
typedef void (*qg_unit)(const qg_job* job, const qg_pass_x& x, int64_t panel, int64_t next);

template <class D, int MR> static void qg_two_blocks(
    const qg_job* job, const qg_pass_x& x, int64_t panel, int64_t next) {
    for (int b = 0; b < 2; b++)
        qg_straight_block<D, MR, QG_NP>(job, x, b, panel, next, x.tile + b * MR * QG_WIDE);
}
template <class D, int MR> static void qg_one_block(
    const qg_job* job, const qg_pass_x& x, int64_t panel, int64_t next) {
    for (int64_t p = panel; p <= next; p++)
        qg_straight_block<D, MR, 1>(job, x, 0, p, p, x.tile + (p - panel) * 16);
}

// All rows by columns in `blocks` blocks of MR.
template <class D, int MR> static void qg_load_blocks(
    const qg_job* job, int blocks, float* columns, float* totals, qg_pass_x* x) {
    for (int b = 0; b < blocks; b++) {
        x->columns[b] = columns, x->totals[b] = totals;
        qg_load_columns(job, b * MR, (int)qc_min(job->m - b * MR, MR), columns, MR, x->decoded);
        if constexpr (qg_sums_blocks<D>() && qg_needs_totals<D>())
            qg_add_columns<MR>(columns, D::SHARED, job->k / D::SHARED, totals);
        columns += MR * ((job->k + 15) / 16 * 16), totals += qg_columns(job->k / 32, MR);
    }
}

// Up to 16 rows by columns, and what multiplies them.
template <class D> static qg_unit qg_load_straight(const qg_job* job, float* columns, float* totals, qg_pass_x* x) {
    constexpr int LOW = QG_LOW_ROWS, HIGH = QG_DECODING_ROWS;
    const bool low = job->m <= 2 * LOW;
    if constexpr (qg_sums_blocks<D>())
        if (qg_broadcasts()) {
            if (low) qg_load_blocks<D, LOW>(job, 2, columns, totals, x);
            else qg_load_blocks<D, HIGH>(job, 2, columns, totals, x);
            return low ? qg_two_blocks<D, LOW> : qg_two_blocks<D, HIGH>;
        }
    if (low) qg_load_blocks<D, 2 * LOW>(job, 1, columns, totals, x);
    else qg_load_blocks<D, 2 * HIGH>(job, 1, columns, totals, x);
    return low ? qg_one_block<D, 2 * LOW> : qg_one_block<D, 2 * HIGH>;
}

// `straight`: up to 16 rows in all, straight from codes.
struct qg_pass_call { qg_job* job; int64_t chunks, groups; bool straight; };

// Task t takes a pass of rows, and a share of the panels. STRAIGHT: up to 16 rows may be multiplied straight from
// codes.
template <class D, bool STRAIGHT> static void qg_pass_task(void* arg, int64_t task, char* scratch) {
    const qg_pass_call& call = *(const qg_pass_call*)arg;
    const qg_job* const job = call.job;
    const int64_t chunk = task / call.groups, group = task % call.groups;
    const int64_t m0 = qc_share(job->m, chunk, call.chunks), count = qc_share(job->m, chunk + 1, call.chunks) - m0;
    const int64_t panels = (job->n + 15) / 16, units = qg_up(panels, QG_NP);
    const int64_t begin = qc_share(units, group, call.groups) * QG_NP;
    const int64_t end = qc_min(qc_share(units, group + 1, call.groups) * QG_NP, panels);
    qg_pass_x x;
    x.tile = (float*)scratch;
    x.decoded = x.tile + qg_pass(job->k) * QG_WIDE;
    float* const columns = x.decoded + QG_WIDE * ((qg_block(job->k) + 15) / 16 * 16);
    float* const totals = columns + qg_columns(job->k, qg_pass(job->k));
    qg_unit multiply = nullptr;
    if constexpr (STRAIGHT)
        if (call.straight) multiply = qg_load_straight<D>(job, columns, totals, &x);
    if (!multiply) qg_load_pass(job, m0, (int)count, qg_first<D>::ROWS, columns, &x), multiply = qg_pass_unit<D>;
    for (int64_t p = begin; p < end; p += QG_NP) {
        const int64_t next = qc_min(p + QG_NP, end) - 1;
        multiply(job, x, p, next);
        job->finish(job, x.tile, QG_WIDE, m0, count, p * 16, qc_min((next + 1) * 16, job->n) - p * 16);
    }
}

// How a product is cut into passes and shares of its panels: by the time until the last thread is done, in units of a
// row times a column. A cut never changes a result.
QC_COLD qg_pass_call qg_cut_passes(qg_job* job, bool straight, int64_t threads) {
    const int64_t units = qg_up(qg_up(job->n, 16), QG_NP), worth = units * job->k * (job->m + 3) / QG_TASK;
    qg_pass_call best = {job, straight ? 1 : qg_up(job->m, qg_pass(job->k)), 1, straight};
    if (threads == 1 || worth < 2) return best;
    double least = INFINITY;
    for (int64_t chunks = best.chunks;; chunks *= 2) {
        const int64_t most = qc_min(qc_min(units, 4 * threads), qc_max(worth / chunks, 1));
        const int64_t wanted = (chunks > 1 ? 3 : 2) * threads;  // so that no thread waits for the last one
        const int64_t step = qc_max(threads / 4, 1);  // a few tries, however many threads there are
        for (int64_t groups = qc_min(most, qg_up(wanted, chunks)); groups <= most; groups += step) {
            const int64_t columns = QG_WIDE * qg_up(units, groups) + QG_ORDERING_COLUMNS;
            const double task = (double)(qg_up(job->m, chunks) + 3) * columns;
            const double cost = task * qg_up(chunks * groups, threads);
            if (cost < least) least = cost, best.chunks = chunks, best.groups = groups;
        }
        if (straight || chunks * units >= 2 * threads || job->m / (2 * chunks) < QG_DECODING_ROWS) return best;
    }
}

// Any number of rows.
template <class D, bool STRAIGHT> static void qg_run_by_columns(qc_ctx* ctx, qg_job* job) {
    const bool straight = STRAIGHT && job->m <= 2 * QG_DECODING_ROWS && (qg_sums_blocks<D>() || !qg_broadcasts());
    qg_pass_call call = qg_cut_passes(job, straight, ctx->num_threads);
    const int64_t tasks = call.chunks * call.groups;
    if (tasks > 1 && ctx->num_threads > 1) return ctx->parallel(ctx, tasks, qg_pass_task<D, STRAIGHT>, &call);
    for (int64_t task = 0; task < tasks; task++) qg_pass_task<D, STRAIGHT>(&call, task, ctx->scratch);
}
#endif

// Up to MAX rows at a time, straight from codes.
template <class D, int MAX> static void qg_run_rows(qc_ctx* ctx, qg_job* job) {
#if defined(QC_AVX512)
    if constexpr (MAX > 2) {  // each task puts its rows in order
        const int64_t threads = ctx->num_threads, most = qc_max(qc_min(job->n / 256, 2 * threads), threads);
        return qg_share_few(ctx, job, qg_task_of<D, MAX, qg_few_columns_task>(job->m), most);
    }
#endif
    qg_run_few<D, MAX>(ctx, job);
}

// Any number of rows.
template <class D> static void qg_run_passes(qc_ctx* ctx, qg_job* job) {
#if defined(QC_AVX512)
    const int64_t columns = job->m <= QG_SOME_ROWS ? (int64_t)QG_LEAST_COLUMNS : (int64_t)QG_MANY_COLUMNS;
    if (job->m >= QG_FIRST_PASS && job->n >= columns && !job->window) {
        constexpr bool FLOATS = qg_mantissa<D> != 0;  // which have a faster form, and only that one straight
        if constexpr (FLOATS)
            if (qg_faster_of<D>::runs()) return qg_run_by_columns<typename qg_faster_of<D>::type, true>(ctx, job);
        return qg_run_by_columns<D, !FLOATS>(ctx, job);
    }
#endif
    qg_run(ctx, job);
}
