// Linears of int8 rows: which engine multiplies, and how the work is cut into tasks (int8.h).
#pragma once
#include "int8.h"

struct qi_call {
    const qg_job* job;
    int64_t chunk, groups;  // rows of x in a task; groups of units of QG_NP panels
};

template <class W, class E> static void qi_task(void* arg, int64_t task, char* scratch) {
    const qi_call* const call = (const qi_call*)arg;
    const qg_job* const job = call->job;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    const int64_t group = task % call->groups, m0 = task / call->groups * call->chunk;
    const int64_t p0 = qc_share(units, group, call->groups) * QG_NP;
    const int64_t p1 = qc_min(qc_share(units, group + 1, call->groups) * QG_NP, panels);
    qi_multiply<W, E>(
        job, m0, qc_min(job->m - m0, call->chunk), call->chunk, p0, p1, scratch,
        [&](int64_t i) { return job->x + (m0 + i) * job->x_row; });
}

template <class W, class E> static void qi_run_with(qc_ctx* ctx, qg_job* job) {
    if (job->m <= 0) return;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    qi_call call = {job, qi_chunk_of(job->k, E::ROWS), 1};
    const int64_t chunks = qg_up(job->m, call.chunk);
    const int64_t worth = panels * job->k * QC_REGS * (job->m + 3) / 8 / QG_TASK;
    const int64_t wanted = ctx->num_threads > 1 ? qc_min(worth, 4 * (int64_t)ctx->num_threads) : 1;
    call.groups = qc_max(1, qc_min(units, qg_up(wanted, chunks)));
    if (call.groups * chunks > 1 && ctx->num_threads > 1)
        return ctx->parallel(ctx, call.groups * chunks, qi_task<W, E>, &call);
    for (int64_t task = 0; task < call.groups * chunks; task++) qi_task<W, E>(&call, task, ctx->scratch);
}

// Calls run(engine) with the best engine that the processor has and the context allows.
template <class F> static void qi_with_engine(const qc_ctx* ctx, F run) {
#if defined(QC_AVX512)
    const bool has = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (has && ctx->int8_units != QC_INT8_PAIRS) return run(qi_vnni());
#elif defined(QC_AVX2)
    if (ctx->int8_units != QC_INT8_PAIRS && qi_has_vex()) return run(qi_vex());
#endif
    run(qi_pairs());
}

template <class W> static void qi_run(qc_ctx* ctx, qg_job* job) {
    qi_with_engine(ctx, [&](auto engine) { qi_run_with<W, decltype(engine)>(ctx, job); });
}
