// Attention in bf16 by tiles of AMX: sixteen queries times sixteen keys, and their weights times sixteen columns of
// values. Scores, their softmax and all sums are fp32.
//
// Rows of a task are the queries of some query heads that share a key head, one head behind the other. They are rounded
// into tiles once. For one block of keys after the other, keys and values are made words for all rows; 32 rows at a
// time get their scores, then weights, then sums. A row's bits do not depend on the rows beside it.
#pragma once
#include "amx.h"
#include "attention.h"
#include "attention_bf16.h"
#include "task.h"

// Bytes of a tile; rows that are multiplied together; most rows of a task.
enum { QAT_TILE = 1024, QAT_ROWS = 32, QAT_MOST = 256 };
// Rows of weights that are made between two steps of products: 4 rows of 128 keys take 0.1 us.
enum { QAT_TURN = 4 };

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// --- tasks -----------------------------------------------------------------------------------------------------------

// A launch, and how its tasks divide the rows of a key head: so many query heads, and so many queries of each.
struct qat_launch {
    qc_call call;
    int64_t kv_heads, group, q_len;
    int64_t heads, size;
    int64_t parts() const { return (group + heads - 1) / heads; }
    int64_t blocks() const { return (q_len + size - 1) / size; }
};

// The rows of a task.
struct qat_rows {
    int64_t b, kv_h, h0, heads, q0, q_count;
    qat_rows(const qat_launch& l, int64_t task) {
        const int64_t part = task / l.blocks() % l.parts();
        q0 = task % l.blocks() * l.size, q_count = qc_min(l.size, l.q_len - q0);
        kv_h = task / l.blocks() / l.parts() % l.kv_heads, b = task / l.blocks() / l.parts() / l.kv_heads;
        h0 = kv_h * l.group + part * l.heads, heads = qc_min(l.heads, (kv_h + 1) * l.group - h0);
    }
    int64_t count() const { return heads * q_count; }
};

// Tasks of as many rows as fit, or of fewer where threads would have nothing to do.
QC_COLD void qat_run(qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t batch, int64_t kv_heads, int64_t group,
                    int64_t q_len, double cost, qc_task task) {
    qat_launch launch = {{ctx, op, sym}, kv_heads, group, q_len, 1, 1};
    if (batch <= 0 || q_len <= 0) return;
    const bool shared = ctx->num_threads > 1 && cost >= 2.0 * QC_TASK_COST;
    int64_t tasks = 0;
    for (int64_t rows = QAT_MOST; rows >= QAT_ROWS; rows /= 2) {
        const int64_t blocks = (q_len + rows - 1) / rows;
        launch.size = blocks == 1 ? q_len : ((q_len + blocks - 1) / blocks + 15) / 16 * 16;
        launch.heads = qc_max(1, qc_min(group, rows / launch.size));
        tasks = batch * kv_heads * launch.parts() * launch.blocks();
        if (!shared || tasks >= 2 * (int64_t)ctx->num_threads) break;
    }
    if (shared && tasks > 1) return ctx->parallel(ctx, tasks, task, &launch);
    for (int64_t t = 0; t < tasks; t++) task(&launch, t, ctx->scratch);
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// Tiles of a product that lie side by side, and bytes to those of the next 16 rows, or of the next 16 columns.
struct qat_tiles {
    const char* at;
    int64_t next;
};

// sums[16 b + i][16 p + lane] (+)= `tiles` tiles of MB blocks of 16 rows times NB blocks of 16 columns; rows of sums
// lie `pitch` floats apart.
template <int MB, int NB> QC_INLINE void qat_block(
    qat_tiles x, qat_tiles w, int64_t tiles, float* sums, int64_t pitch, bool add) {
    float* const below = sums + 16 * pitch;
    if (add) {
        qa_load<0>(sums, 4 * pitch);
        if constexpr (NB > 1) qa_load<1>(sums + 16, 4 * pitch);
        if constexpr (MB > 1) qa_load<2>(below, 4 * pitch);
        if constexpr (MB > 1 && NB > 1) qa_load<3>(below + 16, 4 * pitch);
    } else {
        qa_zero<0>(), qa_zero<1>();
        if constexpr (MB > 1) qa_zero<2>(), qa_zero<3>();
    }
    for (int64_t t = 0; t < tiles * QAT_TILE; t += QAT_TILE) {
        qa_load<4>(x.at + t, 64);
        qa_load<6>(w.at + t, 64);
        qa_dot_bf16<0, 4, 6>();
        if constexpr (MB > 1) qa_load<5>(x.at + x.next + t, 64), qa_dot_bf16<2, 5, 6>();
        if constexpr (NB > 1) qa_load<7>(w.at + w.next + t, 64), qa_dot_bf16<1, 4, 7>();
        if constexpr (MB > 1 && NB > 1) qa_dot_bf16<3, 5, 7>();
    }
    qa_store<0>(sums, 4 * pitch);
    if constexpr (NB > 1) qa_store<1>(sums + 16, 4 * pitch);
    if constexpr (MB > 1) qa_store<2>(below, 4 * pitch);
    if constexpr (MB > 1 && NB > 1) qa_store<3>(below + 16, 4 * pitch);
}

// A product of 32 rows, or 16 (`two` says which), by blocks of 16 columns: two blocks in a step.
struct qat_product {
    qat_tiles x, w;
    bool two;
    int64_t columns, tiles;
    float* sums;
    int64_t pitch;
    bool add;
};
QC_COLD void qat_step(qat_product& p) {
    if (p.columns > 1) {
        if (p.two) qat_block<2, 2>(p.x, p.w, p.tiles, p.sums, p.pitch, p.add);
        else qat_block<1, 2>(p.x, p.w, p.tiles, p.sums, p.pitch, p.add);
    } else {
        if (p.two) qat_block<2, 1>(p.x, p.w, p.tiles, p.sums, p.pitch, p.add);
        else qat_block<1, 1>(p.x, p.w, p.tiles, p.sums, p.pitch, p.add);
    }
    p.columns -= 2, p.w.at += 2 * p.w.next, p.sums += 32;
}

// Products that other work waits for, or runs beside. When nothing is multiplied for about 0.4 us, the next product
// takes 0.35 us longer (Emerald Rapids); so the softmax of 32 rows runs steps of the products of others.
struct qat_queue {
    qat_product waiting[2];
    int first = 0, count = 0;
    void push(const qat_product& product) { waiting[(first + count++) % 2] = product; }
    void step() {
        if (count == 0) return;
        qat_step(waiting[first]);
        if (waiting[first].columns <= 0) first = !first, count--;
    }
    void drain() {
        while (count > 0) step();
    }
};

// Row r of `tiles`: a query of `depth` columns, rounded, and zeros up to `columns` (a multiple of 32).
template <class T> static void qat_put_query(const T* query, int64_t depth, int64_t columns, int64_t r, char* tiles) {
    char* const to = tiles + r / 16 * 32 * columns + r % 16 * 64;
    for (int64_t d = 0; d < columns; d += QC_LANES)
        qb_store(to + d / 32 * QAT_TILE + d % 32 * 2,
                 vload_upto(query + d, (int)qc_max(0, qc_min(QC_LANES, depth - d))));
}

// Tiles [j / 16][d / 32] of words of two columns of a key; zeros where there is no such column, or no key. `rounded`
// has room for 16 rows.
template <class T> static void qat_put_keys(
    const T* keys, int64_t stride, int64_t count, int64_t depth, int64_t columns, uint16_t* rounded, char* tiles) {
    for (int64_t j = 0; j < count; j += 16) {
        qa_round_rows(keys + j * stride, stride, qc_min(16, count - j), 16, depth, columns, rounded);
        for (int64_t d = 0; d < columns; d += 32)
            vtranspose((const float*)(rounded + d), columns / 2, (float*)(tiles + j * 2 * columns + d * 32), 16);
    }
}

// Rows of a task that are multiplied together, how many keys of a block they see, and which of two places they have.
struct qat_group {
    int64_t r0, live, visible;
    int place;
};

// --- softmax ---------------------------------------------------------------------------------------------------------

// Up to 16 rows of scores of a block of keys, and what they become. Row r sees the keys before limit[r], and no row any
// behind `visible`. The largest score of a row is found first, as `best[r]` lane by lane; scores from limit[r] to the
// next multiple of 32 are made -inf then.
struct qat_strip {
    float* scores;
    int64_t pitch;       // floats from row to row
    float* best;         // [16][16]
    char* weights;       // tiles [key / 32]
    int64_t rows, visible, limit[16];
    float factor;        // an exponent of 2 is a score times this
    float *top, *total;  // of each row so far: the largest score, and the sum of weights
    float* sums;         // of values, `columns` floats from row to row
    int64_t columns;
    char* const* written;  // rows of the result, of so many cache lines, if this block is the last one; else null
    int64_t lines;
};

// 2^t to 3e-6 of it; 1 for 0, 0 for -inf. A NaN stays one.
QC_INLINE qf qat_exp2(qf t) {
    const qf f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    qf p = q_fma(q_set(0x1.b7ea5cp-7f), f, q_set(0x1.abfe7ep-5f));
    p = q_fma(p, f, q_set(0x1.ee2374p-3f));
    p = q_fma(p, f, q_set(0x1.62d6d0p-1f));
    return q_scale2(q_fma(p, f, q_set(1.0f)), t);
}

struct qat_max { QC_INLINE qf of(qf a, qf b) { return q_max(a, b); } };
struct qat_sum { QC_INLINE qf of(qf a, qf b) { return a + b; } };

// Lane r: all lanes of row r put together, for 16 rows.
template <class OP> QC_INLINE qf qat_across(const float* rows) {
    qf part[4];
    for (int i = 0; i < 4; i++) {
        qf two[2];
        for (int k = 0; k < 2; k++) {
            const qf a = q_load(rows + 64 * i + 32 * k), b = q_load(rows + 64 * i + 32 * k + 16);
            two[k] = OP::of(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        const __m512d a = (__m512d)two[0], b = (__m512d)two[1];
        part[i] = OP::of((qf)_mm512_unpacklo_pd(a, b), (qf)_mm512_unpackhi_pd(a, b));
    }
    const auto halves = [](qf a, qf b) {
        return OP::of(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return halves(halves(part[0], part[1]), halves(part[2], part[3]));
}

// Hides the scores of row r behind its limit.
QC_INLINE void qat_hide(const qat_strip& s, int64_t r) {
    float* const row = s.scores + r * s.pitch;
    const int64_t limit = s.limit[r], last = limit / 16 * 16;
    if (limit % 32 == 0) return;
    vstore(row + last, vsel(vfirst((int)(limit - last)), vload(row + last), vset(-INFINITY)));
    if (last % 32 == 0) vstore(row + last + 16, vset(-INFINITY));
}

// Finds the largest scores, where they are only limited.
QC_COLD void qat_find_best(const qat_strip& s) {
    for (int64_t r = 0; r < s.rows; r++) {
        const float* const row = s.scores + r * s.pitch;
        qat_hide(s, r);
        vf even = vset(-INFINITY), odd = even;
        for (int64_t j = 0; j < s.limit[r]; j += 32)
            even = vmax(vload(row + j), even), odd = vmax(vload(row + j + 16), odd);
        vstore(s.best + 16 * r, vmax(even, odd));
    }
}

// Makes weights of scores, and updates the maximum, the total and the sums of each row. `scales`: of the values, or
// null.
QC_COLD void qat_weigh(const qat_strip& s, const float* scales, qat_queue& queue) {
    const qf factor = q_set(s.factor), before = q_load(s.top), lowest = q_set(-INFINITY);
    const qf now = q_max(qat_across<qat_max>(s.best), before);
    const qf shift = q_sel(q_eq(now, lowest), qf{}, now * factor);  // nothing seen yet: all weights are 0
    const qf fade = qat_exp2(before * factor - shift);
    float shifts[16], fades[16];
    q_store(shifts, shift), q_store(fades, fade), q_store(s.top, now);
    for (int64_t r = 0; r < s.rows; r++) {
        if (r % QAT_TURN == 0) queue.step();
        // lines of the result, one row at a time: more requests than a core can have under way would make it wait
        for (int64_t l = 0; s.written && l < s.lines; l++)
            asm volatile("prefetchw (%0)" : : "r"(s.written[r] + 64 * l));
        const float* const row = s.scores + r * s.pitch;
        const qf less = q_set(-shifts[r]);
        qf even = {}, odd = {};
        char* to = s.weights + r * 64;
        int64_t j = 0;
        for (; j < s.limit[r]; j += 32, to += QAT_TILE) {
            qf a = qat_exp2(q_fma(q_load(row + j), factor, less));
            qf b = qat_exp2(q_fma(q_load(row + j + 16), factor, less));
            even += a, odd += b;
            if (scales) a *= q_load(scales + j), b *= q_load(scales + j + 16);
            _mm512_store_si512(to, qb_in_order(a, b));
        }
        for (; j < s.visible; j += 32, to += QAT_TILE) _mm512_store_si512(to, __m512i());
        q_store(s.best + 16 * r, even + odd);
    }
    q_store(s.total, q_fma(q_load(s.total), fade, qat_across<qat_sum>(s.best)));
    uint32_t faded = q_not(q_eq(fade, q_set(1.0f))) & q_not(q_eq(before, lowest)) & q_first((int)s.rows);
    for (; faded; faded &= faded - 1) {
        const int r = __builtin_ctz(faded);
        float* const row = s.sums + r * s.columns;
        for (int64_t c = 0; c < s.columns; c += 16) q_store(row + c, q_load(row + c) * fades[r]);
    }
}
#endif
