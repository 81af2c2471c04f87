// Products of int8 rows with chosen experts: the pairs of grouped.h, the product of int8.h. Sums of integers are exact,
// and are scaled in one order, so how many rows an expert has, and how its panels are shared out, changes no bit.
//
// A task owns a part of one expert's panels and multiplies all rows that chose the expert, as many at a time as one
// task of int8.h takes.
#pragma once
#include "grouped.h"
#include "int8_run.h"

enum { QM_SHARES = 8 };  // parts of the work for each thread: experts have different numbers of rows

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
                const char* const row = job->x + part.one.rows[i] / job->repeat * job->x_row;
                qi_prepare_row<W, E>(row, job->k, x, start, total, scale);
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
