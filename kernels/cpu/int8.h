// Products of rows of int8 (qcompiler/formats/int8_rows.py) with the integer codes of packed weights, to the bit what
// qcompiler/formats/integer_product.py says: sums of integers are exact, their scaling has one order.
//
// A weight's panel holds words of four or eight columns of one row, 16 rows side by side (decode.h): as bytes, that is
// what `vpdpbusd` multiplies. Codes are taken as unsigned bytes (signed ones with their sign bit flipped), so that a
// product is  sum(byte * q) + LOWEST * sum(q)  and the second part, from the sums that a row brings along, is where
// accumulation begins.
//
//     qi_vnni     AVX-512 with VNNI: vpdpbusd, 4 columns at a time; asked for at run time, since x86-64-v4 does not
//                 promise it
//     qi_pairs    pmaddwd on pairs of 16-bit numbers (AVX-512BW, AVX2, SSE2), exact where pmaddubsw would saturate;
//                 elsewhere plain multiplications
//
// W is the struct of a packed weight with its integer product (kernels/cpu/linear_int8.py): CODES bits, FLIP of the
// sign bit, LOWEST code's value, SHARED columns of a group (0: all, at most QI_WIDEST), AFFINE, slope(), intercept().
#pragma once
#include "gemm.h"

enum {
    QI_RUN = 32,       // columns of a sum that a row brings along
    QI_WIDEST = 65536,
    QI_CHUNK = 458752,  // bytes of prepared rows of a task, unless one block of rows takes more
    QI_BLOCKS = 8,     // most blocks of rows of a task
};
#if defined(QC_AVX512)
enum { QI_ROWS = 14 };
#elif defined(QC_AVX2)
enum { QI_ROWS = 4 };
#else
enum { QI_ROWS = 2 };
#endif

typedef int32_t qi_word __attribute__((may_alias));
typedef int8_t qi_bytes __attribute__((vector_size(16)));
typedef int16_t qi_shorts __attribute__((vector_size(32)));

// --- engines: how four columns are multiplied ------------------------------------------------------------------------

#if defined(QC_AVX512)
// A row prepared for it: four bytes per step.
struct qi_vnni {
    static constexpr int ROWS = 14, STEP = 4;
    typedef qu operand;
    static QG_METHOD operand make(qu bytes) { return bytes; }
    static QG_METHOD void dot(qu& sum, const operand& w, const char* x) {  // unsigned bytes of w times signed ones of x
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const qi_word*)x));
    }
};
#endif

// sum += even 16-bit numbers of w (0 … 255) times those of x, and odd ones, which wraps as all sums here do.
QC_INLINE void qi_multiply_pairs(qu& sum, qu w, int32_t x) {
#if defined(QC_AVX512)
    sum += (qu)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(QC_AVX2)
    sum += (qu)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
#elif defined(__SSE2__)
    sum += (qu)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(x));
#else
    sum += (w & 0xffffu) * (uint32_t)(int32_t)(int16_t)x + (w >> 16) * (uint32_t)(x >> 16);
#endif
}

// A row prepared for it: columns c0, c2, c1, c3 of each step as 16-bit numbers.
struct qi_pairs {
    static constexpr int ROWS = QI_ROWS == 14 ? 12 : QI_ROWS, STEP = 8;
    struct operand { qu even, odd; };
    static QG_METHOD operand make(qu bytes) { return {bytes & 0x00ff00ffu, (bytes >> 8) & 0x00ff00ffu}; }
    static QG_METHOD void dot(qu& sum, const operand& w, const char* x) {
        qi_multiply_pairs(sum, w.even, ((const qi_word*)x)[0]);
        qi_multiply_pairs(sum, w.odd, ((const qi_word*)x)[1]);
    }
};

// --- rows of x, in the order in which words of codes hold columns ----------------------------------------------------

// Where byte i of a prepared group of 16 columns comes from. A word of 4-bit codes gives the even columns of eight,
// shifted by four the odd ones.
template <int CODES, int STEP> constexpr int qi_source(int i) {
    const int step = i / 4, j = STEP == 8 ? (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4) : i % 4;
    return CODES == 8 ? 4 * step + j : step / 2 * 8 + 2 * j + step % 2;
}

template <int CODES, int STEP> static void qi_prepare(const char* row, int64_t columns, char* to) {
    for (int64_t k = 0; k < columns; k += 16, to += 4 * STEP) {
        qi_bytes x, moved;
        memcpy(&x, row + k, 16);
#if defined(__clang__)
        for (int i = 0; i < 16; i++) moved[i] = x[qi_source<CODES, STEP>(i)];
#else
        const qi_bytes from = {
            qi_source<CODES, STEP>(0), qi_source<CODES, STEP>(1), qi_source<CODES, STEP>(2),
            qi_source<CODES, STEP>(3), qi_source<CODES, STEP>(4), qi_source<CODES, STEP>(5),
            qi_source<CODES, STEP>(6), qi_source<CODES, STEP>(7), qi_source<CODES, STEP>(8),
            qi_source<CODES, STEP>(9), qi_source<CODES, STEP>(10), qi_source<CODES, STEP>(11),
            qi_source<CODES, STEP>(12), qi_source<CODES, STEP>(13), qi_source<CODES, STEP>(14),
            qi_source<CODES, STEP>(15)};
        moved = __builtin_shuffle(x, from);
#endif
        if (STEP == 4) {
            memcpy(to, &moved, 16);
        } else {
            const qi_shorts wide = __builtin_convertvector(moved, qi_shorts);
            memcpy(to, &wide, 32);
        }
    }
}

constexpr int64_t qi_padded(int64_t k) { return (k + 63) / 64 * 64; }
constexpr int64_t qi_span(int64_t k, int64_t shared) {
    return shared ? shared : k < QI_WIDEST ? k : (int64_t)QI_WIDEST;
}

// A block of prepared rows: `x` rows of `stride` bytes, and for each row and group where its sum begins and the sum of
// its codes.
struct qi_block {
    const char* x;
    int64_t stride, groups;
    const int32_t* start;
    const int32_t* total;
    const float* scale;
};

template <class W, class E>
static void qi_prepare_row(const qg_job* job, int64_t m, char* x, int32_t* start, int32_t* total, float* scale) {
    const char* const row = job->x + m * job->x_row;
    const int64_t padded = qi_padded(job->k), span = qi_span(job->k, W::SHARED);
    qi_prepare<W::CODES, E::STEP>(row, padded, x);
    memcpy(scale, row + padded, 4);
    const char* const runs = row + padded + 16;
    int64_t run = 0;
    for (int64_t g = 0, k = 0; k < job->k; g++, k += span) {
        int32_t sum = 0;
        for (const int64_t end = (qc_min(k + span, job->k) + QI_RUN - 1) / QI_RUN; run < end; run++) {
            int16_t part;
            memcpy(&part, runs + 2 * run, 2);
            sum += part;
        }
        total[g] = sum, start[g] = W::LOWEST * sum;
    }
}

template <int S> struct qi_number { static constexpr int value = S; };

// --- the microkernel -------------------------------------------------------------------------------------------------

// Bytes number S of a register of words.
template <class W, int S> QC_INLINE qu qi_bytes_of(qu word) {
    if (W::CODES == 4) return (S ? word >> 4 : word) & 0x0f0f0f0fu;
    return W::FLIP ? word ^ 0x80808080u : word;
}

// tile[i][16 p + lane]: MR rows of x times QG_NP panels of w (`next` repeats the last one), scaled.
template <class W, class E, int MR>
static void qi_micro(const qg_packed& from, const qi_block& rows, int64_t panel, int64_t next, float* tile) {
    constexpr int PER = 32 / W::CODES, REGS = QG_NP * QC_REGS;
    const int64_t span = qi_span(from.k, W::SHARED), of_panel = qg_up(from.k, PER) * 16;
    const uint32_t* w[QG_NP];
    W entries[QG_NP];
    QG_UNROLL for (int p = 0; p < QG_NP; p++) w[p] = (const uint32_t*)from.part[0] + (p ? next : panel) * of_panel;
    const char* x = rows.x;
    for (int64_t g = 0, k = 0; k < from.k; g++, k += span) {
        qu sum[MR][REGS];
        QG_UNROLL for (int i = 0; i < MR; i++)
            QG_UNROLL for (int v = 0; v < REGS; v++) sum[i][v] = (qu)q_seti(rows.start[i * rows.groups + g]);
        auto step = [&](auto number) __attribute__((always_inline)) {
            constexpr int S = decltype(number)::value;
            typename E::operand u[REGS];
            QG_UNROLL for (int v = 0; v < REGS; v++) {
                const qu word = (qu)q_load((const int32_t*)w[v / QC_REGS] + QC_W * (v % QC_REGS));
                u[v] = E::make(qi_bytes_of<W, S>(word));
            }
            QG_UNROLL for (int i = 0; i < MR; i++)
                QG_UNROLL for (int v = 0; v < REGS; v++) E::dot(sum[i][v], u[v], x + i * rows.stride);
            x += E::STEP;
        };
        for (int64_t words = qg_up(qc_min(span, from.k - k), PER); words > 0; words--) {
            step(qi_number<0>());
            if constexpr (W::CODES == 4) step(qi_number<1>());
            QG_UNROLL for (int p = 0; p < QG_NP; p++) w[p] += 16;
        }
        QG_UNROLL for (int p = 0; p < QG_NP; p++) {
            entries[p].load(from, p ? next : panel, k);
            const vf slope = entries[p].slope(), intercept = entries[p].intercept();
            QG_UNROLL for (int i = 0; i < MR; i++) {
                float* const to = tile + (i * QG_NP + p) * 16;
                vf term;
                QG_UNROLL for (int r = 0; r < QC_REGS; r++) term.r[r] = q_tofloat((qi)sum[i][p * QC_REGS + r]);
                term = term * slope;
                if (W::AFFINE) term = term + vset((float)rows.total[i * rows.groups + g]) * intercept;
                vstore(to, (g ? vload(to) : vzero()) + term);
            }
        }
    }
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < QG_NP; p++) {
            float* const to = tile + (i * QG_NP + p) * 16;
            vstore(to, vload(to) * vset(rows.scale[i]));
        }
}

// `count` rows by the smallest microkernel that takes them; the rows behind are zeros.
template <class W, class E, int MR> QC_INLINE void qi_micro_rows(
    int64_t count, const qg_packed& from, const qi_block& rows, int64_t panel, int64_t next, float* tile) {
    constexpr int SMALLER = MR > 12 ? 8 : MR > 4 ? 4 : MR > 1;
    if constexpr (SMALLER > 0)
        if (count <= SMALLER) return qi_micro_rows<W, E, SMALLER>(count, from, rows, panel, next, tile);
    qi_micro<W, E, MR>(from, rows, panel, next, tile);
}

// --- the work --------------------------------------------------------------------------------------------------------

struct qi_call {
    const qg_job* job;
    int64_t blocks, per_chunk, groups;  // blocks of rows, of them in a task; groups of units of QG_NP panels
};

constexpr int64_t qi_blocks_of(int64_t k, int64_t rows) {
    const int64_t fit = QI_CHUNK / (rows * qi_padded(k) * 2);
    return fit < 1 ? 1 : fit < QI_BLOCKS ? fit : (int64_t)QI_BLOCKS;
}

// Bytes of scratch: prepared rows, two integers per row and group, a scale per row, a tile of sums.
constexpr int64_t qi_scratch_for(int64_t k, int64_t groups, int64_t rows) {
    return qi_blocks_of(k, rows) * rows * (2 * qi_padded(k) + 8 * groups + 4) + 64 * rows * QG_NP;
}

template <class W, class E> static void qi_task(void* arg, int64_t task, char* scratch) {
    const qi_call* const call = (const qi_call*)arg;
    const qg_job* const job = call->job;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    const int64_t chunk = task / call->groups, group = task % call->groups;
    const int64_t stride = qi_padded(job->k) / 4 * E::STEP, groups = qg_up(job->k, qi_span(job->k, W::SHARED));
    const int64_t m0 = chunk * call->per_chunk * E::ROWS, rows = qc_min(job->m - m0, call->per_chunk * E::ROWS);
    const int64_t room = call->per_chunk * E::ROWS, whole = qc_min(qg_up(rows, E::ROWS) * E::ROWS, room);
    char* const x = scratch;
    float* const tile = (float*)(x + room * stride);
    float* const scale = tile + E::ROWS * QG_NP * 16;
    int32_t* const start = (int32_t*)(scale + room);
    int32_t* const total = start + room * groups;
    for (int64_t i = 0; i < rows; i++)
        qi_prepare_row<W, E>(job, m0 + i, x + i * stride, start + i * groups, total + i * groups, scale + i);
    memset(x + rows * stride, 0, (size_t)((whole - rows) * stride));
    for (int64_t i = rows; i < whole; i++) scale[i] = 0.0f;
    memset(start + rows * groups, 0, (size_t)((whole - rows) * groups * 4));
    memset(total + rows * groups, 0, (size_t)((whole - rows) * groups * 4));
    for (int64_t u = qc_share(units, group, call->groups); u < qc_share(units, group + 1, call->groups); u++) {
        const int64_t panel = u * QG_NP, next = qc_min(panel + QG_NP, panels) - 1, n0 = panel * 16;
        for (int64_t i = 0; i < rows; i += E::ROWS) {
            const int64_t count = qc_min(rows - i, E::ROWS);
            const qi_block block = {x + i * stride, stride, groups, start + i * groups, total + i * groups, scale + i};
            qi_micro_rows<W, E, E::ROWS>(count, job->packed, block, panel, next, tile);
            job->finish(job, tile, QG_NP * 16, m0 + i, count, n0, qc_min(job->n - n0, QG_NP * 16));
        }
    }
}

template <class W, class E> static void qi_run_with(qc_ctx* ctx, qg_job* job) {
    if (job->m <= 0) return;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    qi_call call = {job, qg_up(job->m, E::ROWS), qi_blocks_of(job->k, E::ROWS), 1};
    const int64_t chunks = qg_up(call.blocks, call.per_chunk);
    const int64_t worth = panels * job->k * QC_REGS * (job->m + 3) / 8 / QG_TASK;
    const int64_t wanted = ctx->num_threads > 1 ? qc_min(worth, 4 * (int64_t)ctx->num_threads) : 1;
    call.groups = qc_max(1, qc_min(units, qg_up(wanted, chunks)));
    if (call.groups * chunks > 1 && ctx->num_threads > 1)
        return ctx->parallel(ctx, call.groups * chunks, qi_task<W, E>, &call);
    for (int64_t task = 0; task < call.groups * chunks; task++) qi_task<W, E>(&call, task, ctx->scratch);
}

template <class W> static void qi_run(qc_ctx* ctx, qg_job* job) {
#if defined(QC_AVX512) && !defined(QI_NO_VNNI)  // tests leave it out
    if (__builtin_cpu_supports("avx512vnni")) return qi_run_with<W, qi_vnni>(ctx, job);
#endif
    qi_run_with<W, qi_pairs>(ctx, job);
}

// --- making rows -----------------------------------------------------------------------------------------------------

enum { QI_TOKEN = 0, QI_TENSOR = 1, QI_OUTLIERS = 2 };

QC_INLINE void qi_store_codes(int8_t* p, vf rounded) {
    const vi codes = vtoint(rounded);
#if defined(QC_AVX512)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)codes.r[0]));
#else
    vstore(p, codes);
#endif
}

// One row of `cols` elements: formats/int8_rows.py. `factor` and `fixed` are those of QI_TENSOR, `threshold` that of
// QI_OUTLIERS, whose `columns` have codes 0.
template <int KIND, class T> static void qi_quantise_row(
    const T* x, int64_t cols, float factor, float fixed, float threshold, const bool* columns, int8_t* row) {
    const int64_t padded = qi_padded(cols);
    const auto read = [&](int64_t k, int n) QC_BODY {
        const vf v = vload_upto(x + k, n);
        return KIND == QI_OUTLIERS ? vsel(vle(vset(threshold), vabs(v)), vzero(), v) : v;
    };
    vi top = vset((int32_t)0);  // magnitudes as integers: a NaN is above infinity, which is above all others
    qc_columns(cols, [&](int64_t k, int n) QC_BODY {
        const vi bits = vbits(vabs(read(k, n)));
        top = vsel(vlt(top, bits), bits, top);
    });
    int32_t lanes[16], most = 0;
    vstore(lanes, top);
    for (int l = 0; l < 16; l++) most = lanes[l] > most ? lanes[l] : most;
    const bool finite = most < 0x7f800000;
    const float largest = qc_from_bits((uint32_t)most);
    float scale = KIND == QI_TENSOR ? fixed : largest / 127.0f;
    if (KIND == QI_TOKEN && !(scale > 0.0f)) scale = 1.0f;
    const float inverse = largest < 3.8e-37f ? 0.0f : 127.0f / largest;
    const float by = KIND == QI_TOKEN ? scale : KIND == QI_TENSOR ? factor : inverse;
    memset(row + cols, 0, (size_t)(padded - cols));
    if (finite) {
        qc_columns(cols, [&](int64_t k, int n) QC_BODY {
            const vf v = read(k, n);
            vf code = vrint(KIND == QI_TOKEN ? v / vset(by) : v * vset(by));
            if (KIND == QI_OUTLIERS) code = vsel(vload_upto(columns + k, n), vzero(), code);
            code = vmax(vmin(code, vset(127.0f)), vset(-127.0f));
            if (n == 16) return qi_store_codes(row + k, code);
            int8_t last[16];
            qi_store_codes(last, code);
            memcpy(row + k, last, (size_t)n);
        });
    } else {
        memset(row, 0, (size_t)cols);
        scale = qc_from_bits(0x7fc00000u);
    }
    int8_t* const behind = row + padded;
    const int64_t runs = padded / QI_RUN;
    memset(behind, 0, (size_t)(16 + (2 * runs + 15) / 16 * 16));
    memcpy(behind, &scale, 4);
    for (int64_t r = 0; r < runs; r++) {
        int32_t sum = 0;
        for (int k = 0; k < QI_RUN; k++) sum += row[r * QI_RUN + k];
        const int16_t part = (int16_t)sum;
        memcpy(behind + 16 + 2 * r, &part, 2);
    }
}
