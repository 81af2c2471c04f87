// Linears of int8 rows: which engine multiplies, and how the work is cut into tasks (int8.h).
#pragma once
#include "int8.h"
#include "int8_tiles.h"

// Bytes of scratch of any engine of this instruction set.
template <class W> constexpr int64_t qi_scratch_of(int64_t k, int64_t groups, int64_t of_group) {
#if defined(QC_AVX512)
    return qi_most(qi_scratch_for<W>(k, groups, QI_ROWS, of_group), qt_scratch_for(k, groups, W::SHARED));
#elif defined(QC_AVX2)
    return qi_most(
        qi_scratch_for<W>(k, groups, QI_ROWS, of_group), qi_scratch_for<W>(k, groups, QI_VEX_ROWS, of_group));
#else
    return qi_scratch_for<W>(k, groups, QI_ROWS, of_group);
#endif
}

// `qi_multiply` by an engine.
template <class W, class E, class Prepare> QC_INLINE void qi_multiply_by(
    const qg_job* job, int64_t m0, int64_t rows, int64_t chunk, int64_t p0, int64_t p1, char* scratch,
    Prepare prepare) {
#if defined(QC_AVX512)
    if constexpr (E::TILES) return qt_multiply<W>(job, m0, rows, chunk, p0, p1, scratch, prepare);
    else
#endif
    qi_multiply<W, E>(job, m0, rows, chunk, p0, p1, scratch, prepare);
}

// Most rows of x in a task.
template <class E> static int64_t qi_rows_of_task(int64_t k) {
#if defined(QC_AVX512)
    if constexpr (E::TILES) return qt_rows_of(k);
    else
#endif
    return qi_chunk_of(k, E::ROWS, E::STEP);
}

struct qi_call {
    const qg_job* job;
    int64_t chunk, groups;  // rows of x in a task; groups of units of QG_NP panels
    int64_t room;           // where in scratch `Rows` has room for a row
};

template <class W, class E, class Rows> static void qi_task(void* arg, int64_t task, char* scratch) {
    const qi_call* const call = (const qi_call*)arg;
    const qg_job* const job = call->job;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    const int64_t group = task % call->groups, m0 = task / call->groups * call->chunk;
    const int64_t p0 = qc_share(units, group, call->groups) * QG_NP;
    const int64_t p1 = qc_min(qc_share(units, group + 1, call->groups) * QG_NP, panels);
    qi_multiply_by<W, E>(
        job, m0, qc_min(job->m - m0, call->chunk), call->chunk, p0, p1, scratch,
        [&](int64_t i, char* x, int32_t* start, float* total, float* scale) {
            Rows::template prepare<W, E>(job, m0 + i, scratch + call->room, x, start, total, scale);
        });
}

template <class W, class E, class Rows> static void qi_run_with(qc_ctx* ctx, qg_job* job, int64_t room) {
    if (job->m <= 0) return;
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    const int64_t threads = ctx->num_threads, full = qi_full_rows<W, E>();
    const int64_t most = Rows::chunk(job, qi_rows_of_task<E>(job->k), E::ROWS, threads);
    const int64_t chunks = qg_up(job->m, most);  // of equal numbers of rows, nearly
    qi_call call = {job, qc_min(most, qg_up(qg_up(job->m, chunks), full) * full), 1, room};
    const int64_t worth = panels * job->k * QC_REGS * (job->m + 3) / 8 / QG_TASK;
    // Each task prepares its rows: two for each thread, or three where there are several chunks, so that the last is
    // short.
    const int64_t wanted = threads > 1 ? qc_min(worth, (chunks > 1 ? 3 : 2) * threads) : 1;
    call.groups = qg_up(wanted, chunks);
    // As many tasks for each thread: nine of them take two threads as long as ten.
    while (wanted >= threads && call.groups * chunks % threads != 0) call.groups++;
    call.groups = qc_max(1, qc_min(units, call.groups));
    if (call.groups * chunks > 1 && threads > 1)
        return ctx->parallel(ctx, call.groups * chunks, qi_task<W, E, Rows>, &call);
    for (int64_t task = 0; task < call.groups * chunks; task++) qi_task<W, E, Rows>(&call, task, ctx->scratch);
}

#if defined(QC_AVX512)
static inline bool qi_has_vnni() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}
#endif

// Calls run(engine) with the best engine for few rows that the processor has and the context allows.
template <class F> static void qi_with_engine_of_few(const qc_ctx* ctx, F run) {
    (void)ctx;
#if defined(QC_AVX512)
    if (ctx->int8_units != QC_INT8_PAIRS && qi_has_vnni()) return run(qi_vnni());
#elif defined(QC_AVX2)
    if (ctx->int8_units != QC_INT8_PAIRS && qi_has_vex()) return run(qi_vex());
#endif
    run(qi_pairs());
}

// The same for `rows` rows.
template <class W, class F> static void qi_with_engine(const qc_ctx* ctx, int64_t rows, int64_t k, F run) {
    (void)rows, (void)k;
#if defined(QC_AVX512)
    if constexpr (qt_columns<W>() > 0)
        if (ctx->int8_units == QC_INT8_TILES && qi_has_vnni() && qt_takes<W>(rows, k)) return run(qi_tiles());
#endif
    qi_with_engine_of_few(ctx, run);
}

template <class W, class Rows = qi_rows_in_memory> static void qi_run(qc_ctx* ctx, qg_job* job, int64_t room = 0) {
    qi_with_engine<W>(
        ctx, job->m, job->k, [&](auto engine) { qi_run_with<W, decltype(engine), Rows>(ctx, job, room); });
}
