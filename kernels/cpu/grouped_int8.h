// Products of int8 rows with chosen experts: the pairs of grouped.h, the product of int8.h. Sums of integers are exact,
// and are scaled in one order, so how many rows an expert has, and how its panels are shared out, changes no bit.
//
// A task owns a part of one expert's panels and multiplies all rows that chose the expert, as many at a time as one
// task of int8.h takes.
#pragma once
#include "grouped.h"
#include "int8_run.h"

enum { QM_SHARES = 8 };  // parts of the work for each thread: experts have different numbers of rows

// Row i of an expert's product, prepared (`qi_prepare_row`).
template <class W, class E> static void qm_prepare_row(
    const qm_product* one, int64_t i, char* x, int32_t* start, float* total, float* scale) {
    const char* const row = one->x + one->rows[i] / one->all->repeat * one->x_row;
    qi_prepare_row<W, E>(row, one->k, x, start, total, scale);
}

// One part (`qm_part`), times the rows of all pairs that chose its expert.
template <class W, class E, class I>
static void qm_int8_item(const qm_job* job, int64_t unit, int64_t group, char* scratch) {
    qm_part<I> part(job, unit, group);
    if (part.expert < 0) return;
    const int64_t chunk = qi_rows_of_task<E>(job->k), most = qc_min(chunk, QM_ROWS);
    while (const int64_t rows = part.take(most))
        qi_multiply_by<W, E>(
            &part.one, 0, rows, chunk, part.p0, part.p1, scratch,
            [&](int64_t i, char* x, int32_t* start, float* total, float* scale) {
                qm_prepare_row<W, E>(&part.one, i, x, start, total, scale);
            });
}

template <class W, class E, class I> static void qm_int8_task(void* arg, int64_t task, char* scratch) {
    const qm_job* const job = (const qm_job*)arg;
    qm_int8_item<W, E, I>(job, task / job->groups, task % job->groups, scratch);
}

template <class W, class E, class I> static void qm_run_int8_with(qc_ctx* ctx, qm_job* job) {
    const int64_t panels = (job->width + 15) / 16 + (job->width % 16 != 0);  // at most
    const int64_t threads = ctx->num_threads, units = qc_min(job->pairs, job->experts);
    const int64_t worth = panels * job->k * QC_REGS * (job->pairs + 3 * units) / 8 / QG_TASK;
    const int64_t wanted = threads > 1 ? qc_min(worth, QM_SHARES * threads) : 1;
    job->units = units, job->groups = qc_max(1, qc_min((panels + QG_NP - 1) / QG_NP, qg_up(wanted, units)));
    job->tasks = job->items = job->units * job->groups;
    if (wanted > 1 && threads > 1) return ctx->parallel(ctx, job->tasks, qm_int8_task<W, E, I>, job);
    for (int64_t task = 0; task < job->tasks; task++) qm_int8_task<W, E, I>(job, task, ctx->scratch);
}

template <class W, class I, class OUT> static void qm_run_int8(qc_ctx* ctx, qm_job* job) {
    if (job->pairs <= 0) return;
    qm_check<I, OUT>(ctx, job);
    const int64_t rows = job->pairs / qc_max(job->experts, 1);  // of an expert, on average
    qi_with_engine<W>(ctx, rows, job->k, [&](auto engine) { qm_run_int8_with<W, decltype(engine), I>(ctx, job); });
}

// --- products that are combined --------------------------------------------------------------------------------------

// The rows of `one`, at most MOST of them, prepared in scratch, and their products with panels. A block that is not
// full multiplies rows of zeros behind them (QI_SPARE), and its sums stay within MOST rows of the tile.
template <class W, class E, int MOST> struct qm_int8_rows {
    static constexpr int BLOCK = MOST < qi_full_rows<W, E>() ? MOST : qi_full_rows<W, E>();
    const qm_job* job;
    qi_prepared<W, E> x;
    int64_t count = 0;

    qm_int8_rows(const qm_job* job, char* scratch) : job(job), x(scratch, job->k, MOST) {}
    void take(const qm_product* one, int64_t rows = 1) {
        count = rows;
        x.fill(rows, [&](int64_t i, char* to, int32_t* start, float* total, float* scale) {
            qm_prepare_row<W, E>(one, i, to, start, total, scale);
        });
    }
    void multiply(int64_t panel, int64_t last, float* tile) const {
        for (int64_t i = 0; i < count; i += BLOCK)
            qi_micro_rows<W, E, BLOCK>(
                qc_min(count - i, BLOCK), job->packed, x.from(i), panel, last, tile + i * QG_NP * 16);
    }
};

// As `qm_pairs` of grouped.h.
template <class W, class E> struct qm_int8_pairs {
    static void run(const qm_product* one, int64_t count, int64_t p0, int64_t p1, char* scratch) {
        float* const tile = (float*)scratch;
        qm_int8_rows<W, E, QM_FEW> rows(one->all, (char*)(tile + QM_HALVES));
        rows.take(one, count);
        qm_both_halves(one, count, p0, p1, tile, [&](int64_t panel, int64_t last, float* to) {
            rows.multiply(panel, last, to);
        });
    }
};

constexpr int64_t qm_int8_prepared(int64_t k, int64_t groups, int64_t most) {
    return qi_most(qi_prepared_bytes(k, groups, most, 4), qi_prepared_bytes(k, groups, most, 8));
}
constexpr int64_t qm_int8_pairs_scratch(int64_t k, int64_t groups) {
    return 4 * QM_HALVES + qm_int8_prepared(k, groups, QM_FEW);
}
constexpr int64_t qm_int8_mixed_scratch(int64_t k, int64_t groups) {
    return qm_totals_scratch() + qm_int8_prepared(k, groups, 1);
}

template <class W, class I, class OUT> static void qm_run_int8_pairs(qc_ctx* ctx, qm_job* job) {
    qi_with_engine_of_few(
        ctx, [&](auto engine) { qm_run_pairs_by<qm_int8_pairs<W, decltype(engine)>, I, OUT>(ctx, job); });
}

template <class W, class I, class OUT> static void qm_run_int8_mixed(qc_ctx* ctx, qm_job* job) {
    qi_with_engine_of_few(
        ctx, [&](auto engine) { qm_run_mixed_by<qm_int8_rows<W, decltype(engine), 1>, I, OUT>(ctx, job); });
}
