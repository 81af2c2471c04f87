// What every kernel shares: handing tasks to the pool, and index arithmetic.
#pragma once
#include "abi.h"

// One kernel call, as its tasks see it.
struct qc_call {
    struct qc_ctx* ctx;
    void* const* op;
    const int64_t* sym;
};

// Runs `tasks` tasks; a single one on the calling thread.
static inline void qc_run(struct qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t tasks, qc_task task) {
    struct qc_call call = {ctx, op, sym};
    if (tasks <= 0) return;
    if (tasks == 1) task(&call, 0, ctx->scratch);
    else ctx->parallel(ctx, tasks, task, &call);
}

// Task t of `tasks` works on [qc_share(t), qc_share(t + 1)) of `count` items: equal shares, independent of threads.
static inline int64_t qc_share(int64_t count, int64_t t, int64_t tasks) {
    return count / tasks * t + (count % tasks) * t / tasks;
}

#ifndef QC_TASK_COST  // tests lower it, so that small shapes split too
#define QC_TASK_COST 65536
#endif

// How many tasks `count` items of `cost` element operations each are worth: 64 k operations take 16 lanes 1 to 2 us,
// what handing a task over must not outweigh.
static inline int64_t qc_tasks(int64_t count, int64_t cost) {
    const int64_t wanted = (count * (cost < 1 ? 1 : cost)) / QC_TASK_COST;
    return wanted < 1 ? 1 : wanted < count ? (wanted < 256 ? wanted : 256) : count;
}

// Runs `tasks` tasks: by all threads if `together`, else one after the other on the calling thread.
static inline void qc_run_tasks(struct qc_ctx* ctx, bool together, int64_t tasks, qc_task task, void* arg) {
    if (together) return ctx->parallel(ctx, tasks, task, arg);
    for (int64_t t = 0; t < tasks; t++) task(arg, t, ctx->scratch);
}

// Runs `tasks` tasks of `cost` element operations together: on the calling thread if they are not worth handing over,
// so that a small step wakes nobody. The cost is a double since a product of sizes may pass 2^63.
static inline void qc_run_if_worth(
    struct qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t tasks, double cost, qc_task task) {
    struct qc_call call = {ctx, op, sym};
    qc_run_tasks(ctx, tasks > 1 && cost >= 2.0 * QC_TASK_COST, tasks, task, &call);
}

static inline int64_t qc_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t qc_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t qc_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t qc_mod(int64_t a, int64_t b) { return a - qc_floordiv(a, b) * b; }

// Whether a kernel has reported an error; the first kernel to do so (by its index in the plan) is noted.
static inline bool qc_failed(struct qc_ctx* ctx, int32_t kernel) {
    if (ctx->error_code == QC_OK) return false;
    if (ctx->error_kernel < 0) ctx->error_kernel = kernel;
    return true;
}
