// Products of bf16 rows with chosen experts: the pairs of grouped.h, the products of bf16_blocks.h and gemm_bf16.h.
//
// A task owns a part of one expert's panels and multiplies the rows of all pairs that chose it, some of them at a time.
// Each part rounds these rows and puts them in order again, so there are few parts. What multiplies depends on the
// number of pairs that chose the expert, as it does on the number of rows of a linear: never on threads, nor on how
// these pairs are shared out.
#pragma once
#include "bf16_run.h"
#include "grouped.h"

enum { QM_BF16_SHARES = 8 };  // parts of the work for each thread: experts have different numbers of rows

// Bytes of scratch of one task. `most`: 0 where rows are never multiplied straight from codes.
constexpr int64_t qm_bf16_scratch(int64_t k, int64_t most) {
    const int64_t panels = qg_scratch(k), blocks = most ? qb_block_scratch(k, QB_MOST, true) : 0;
    return panels > blocks ? panels : blocks;
}

// That of products of pairs, which are few rows.
constexpr int64_t qm_bf16_pairs_scratch(int64_t k) {
    return 4 * QM_HALVES + qb_block_scratch(k, QM_FEW, true);
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
struct qm_bf16_call {
    const qm_job* job;
    int64_t floats;  // up to so many rows of an expert are multiplied in fp32 (qb_rows_in_floats)
};

// A row of T as bf16 numbers.
template <class T> QC_INLINE void qm_round_row(const T* x, int64_t k, uint16_t* to) {
    if constexpr (qb_same<T>::value) memcpy(to, x, 2 * (size_t)k);
    else qb_round_rows(x, 0, 1, k, (char*)to, 0);
}

// Where the row of x of an expert's row `i` begins.
template <class T> QC_INLINE const T* qm_row(const qm_product* product, int64_t i) {
    return (const T*)product->x + product->rows[i] / product->all->repeat * product->x_row;
}

// A `qg_load_x` that leaves bf16 numbers.
template <class T> static void qm_load_words(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    for (int64_t i = 0; i < rows; i++, dst += stride)
        qm_round_row(qm_row<T>((const qm_product*)job, m0 + i) + k0, kc, (uint16_t*)dst);
}

// `count` rows of one expert, rounded to where `rows` has them.
template <class T> static void qm_round(const qm_product* job, int64_t count, const qb_rows& rows) {
    for (int64_t i = 0; i < count; i++)
        qm_round_row(qm_row<T>(job, i), job->k, (uint16_t*)(rows.x + i * rows.stride));
}

// `count` rows of one expert, rounded and in the order that `qb_few_rows` takes.
template <class D, class T> static qb_rows qm_few_words(
    const qm_product* job, int64_t count, const qb_block_room& room) {
    qb_rows rows = {(const char*)room.ordered, 2 * qb_apart(job->k), nullptr, 0, nullptr, 0};
    if constexpr (qb_coded<D>::SUMMED) rows = qb_rows_in<D>(room, job->k);
    qm_round<T>(job, count, rows);
    if constexpr (qb_coded<D>::SUMMED) qb_order_rows<D, false>(rows, job->k, count, true, room);
    return rows;
}

// `count` rows of one expert times panels [p0, p1), in blocks, or MAX rows at a time straight from codes.
template <class D, class T, int MAX> static void qm_bf16_straight(
    const qm_product* job, int64_t count, int64_t p0, int64_t p1, char* scratch) {
    typedef typename qb_block_decoder<D>::type block_decoder;
    constexpr int LEAST = qb_block_policy<D>::LEAST;
    constexpr int FEW = LEAST == 0 || LEAST > MAX ? MAX : LEAST > 1 ? LEAST - 1 : 1;
    const qb_block_room room(scratch, job->k, count);
    if constexpr (LEAST > 0)
        if (job->m >= LEAST) {
            const bool elements = qb_takes_elements<block_decoder, QB_MOST>(job);
            const qb_rows rows = qb_rows_in<block_decoder>(room, job->k);
            qm_round<T>(job, count, rows);
            qb_order_rows<block_decoder, false>(rows, job->k, count, !elements, room);
            return qb_block_panels<block_decoder, QB_MOST>(job, room, rows, elements, 0, count, p0, p1);
        }
    const qb_rows rows = qm_few_words<D, T>(job, count, room);
    for (int64_t i = 0; i < count; i += FEW) {
        const qb_rows own = qb_rows_from(rows, i);
        const int64_t few = qc_min(count - i, FEW);
        for (int64_t p = p0; p < p1; p += QG_NP) {
            const int64_t end = qc_min(p + QG_NP, p1);
            for (int64_t each = p; each < end; each++)
                qb_few_rows<D, FEW>(job, few, own, each, room.tile + (each - p) * 16);
            job->finish(job, room.tile, QG_NP * 16, i, few, p * 16, qc_min(job->n - p * 16, (end - p) * 16));
        }
    }
}

// As `qm_pairs` of grouped.h.
template <class D, class T> struct qm_bf16_pairs {
    static void run(const qm_product* job, int64_t count, int64_t p0, int64_t p1, char* scratch) {
        float* const tile = (float*)scratch;
        const qb_block_room room((char*)(tile + QM_HALVES), job->k, count);
        const qb_rows rows = qm_few_words<D, T>(job, count, room);
        qm_both_halves(job, count, p0, p1, tile, [&](int64_t panel, int64_t last, float* to) {
            for (int64_t p = panel; p <= last; p++)
                qb_few_rows<D, QM_FEW>(job, count, rows, p, to + (p - panel) * 16);
        });
    }
};

// One part (`qm_part`), times the rows of all pairs that chose its expert.
template <class D, class T, class I, int MAX>
static void qm_bf16_item(const qm_bf16_call* call, int64_t unit, int64_t group, char* scratch) {
    const qm_job* const job = call->job;
    qm_part<I> part(job, unit, group);
    if (part.expert < 0) return;
    qm_product& one = part.one;
    const int64_t p0 = part.p0, p1 = part.p1;
    one.m = 0;
    for (int64_t p = part.pair; p < job->pairs; p++) one.m += part.chosen(p);
    constexpr int64_t MOST = MAX > 0 ? qb_block_policy<D>::MOST : 0;
    const bool in_floats = MAX > 0 && one.m <= call->floats, straight = one.m <= MOST;
    const int64_t most = in_floats ? (int64_t)QM_FEW : straight ? qb_rows_of_task(job->k) : (int64_t)QM_ROWS;
    const int64_t chunks = qg_up(one.m, most);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {  // of nearly as many rows each: few are multiplied otherwise
        const int64_t rows = part.take(qc_share(one.m, chunk + 1, chunks) - qc_share(one.m, chunk, chunks));
        if constexpr (MAX > 0) {
            if (in_floats) {
                qm_few<D>(&one, rows, p0, p1, scratch);
                continue;
            }
            if (straight) {
                qm_bf16_straight<D, T, MAX>(&one, rows, p0, p1, scratch);
                continue;
            }
        }
        if constexpr (MOST < INT64_MAX) {
            qm_product words = one;
            words.load_x = qm_load_words<T>, words.loads_words = true, words.decode = qb_decode_panel<D>;
            for (int64_t p = p0; p < p1; p += QG_GROUP)
                qg_product<qb_bf16>(&words, p, qc_min(p + QG_GROUP, p1), 0, rows, scratch);
        }
    }
}

template <class D, class T, class I, int MAX> static void qm_bf16_task(void* arg, int64_t task, char* scratch) {
    const qm_bf16_call* const call = (const qm_bf16_call*)arg;
    qm_bf16_item<D, T, I, MAX>(call, task / call->job->groups, task % call->job->groups, scratch);
}
#endif

// Rows of T, with sums in fp32. MAX: how many rows are multiplied straight from codes at a time, 0 if none. Without the
// processor's instructions the job runs in fp32 as it is.
template <class D, class T, class I, class OUT, int MAX> static void qm_run_bf16(qc_ctx* ctx, qm_job* job) {
#if defined(QC_AVX512) && !defined(QB_NO_BF16)
    if (job->pairs > 0 && (MAX == 0 ? __builtin_cpu_supports("avx512bf16") : qb_block_decoder<D>::runs())) {
        qm_check<I, OUT>(ctx, job);
        const int64_t panels = (job->width + 15) / 16 + (job->width % 16 != 0);  // at most
        const int64_t threads = ctx->num_threads, units = qc_min(job->pairs, job->experts);
        const int64_t worth = panels * job->k * (job->pairs + 3 * units) / 3 / QG_TASK;
        const int64_t wanted = threads > 1 ? qc_min(worth, QM_BF16_SHARES * threads) : 1;
        job->units = units, job->groups = qc_max(1, qc_min((panels + QG_NP - 1) / QG_NP, qg_up(wanted, units)));
        job->tasks = job->items = job->units * job->groups;
        qm_bf16_call call = {job, qc_min(qb_rows_in_floats<D>(ctx), QM_FEW)};
        if (wanted > 1 && threads > 1) return ctx->parallel(ctx, job->tasks, qm_bf16_task<D, T, I, MAX>, &call);
        for (int64_t task = 0; task < job->tasks; task++) qm_bf16_task<D, T, I, MAX>(&call, task, ctx->scratch);
        return;
    }
#endif
    qm_run<D, I, OUT, (MAX > 0)>(ctx, job);
}

// The same for products of pairs of columns (`qm_run_pairs`).
template <class D, class T, class I, class OUT> static void qm_run_bf16_pairs(qc_ctx* ctx, qm_job* job) {
#if defined(QC_AVX512) && !defined(QB_NO_BF16)
    const int64_t rows = job->pairs / job->repeat;  // at most, of one expert
    if (qb_block_decoder<D>::runs() && rows > qb_rows_in_floats<D>(ctx))
        return qm_run_pairs_by<qm_bf16_pairs<D, T>, I, OUT>(ctx, job);
#endif
    qm_run_pairs<D, I, OUT>(ctx, job);
}
