// The C interface between the runtime, its thread pool and emitted kernels. Plain C layout: Python fills it by ctypes.
#pragma once
#include <stdint.h>

struct qc_ctx;

// A task runs with `scratch`: `scratch_stride` bytes, 64-byte aligned, that belong to the executing thread.
typedef void (*qc_task)(void* arg, int64_t task, char* scratch);

// Runs fn(arg, 0 … tasks-1, …) on the pool and returns when all are done. Results must not depend on who runs what.
typedef void (*qc_parallel)(struct qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg);

struct qc_ctx {
    qc_parallel parallel;
    void* pool;              // the runtime's own
    char* scratch;           // num_threads * scratch_stride bytes
    int64_t scratch_stride;
    int32_t num_threads;
    int32_t error_code;      // 0, or the first error a kernel reported (see below)
    int64_t error_value;     // the offending value
    int64_t error_limit;     // the bound it broke
    int32_t error_kernel;    // index of the kernel in the plan, or -1
    int32_t int8_units;      // QC_INT8_…: which instructions may multiply int8
    int32_t bf16_units;      // QC_BF16_…: which instructions may multiply bf16
};

// Without a choice the dot products of bytes that the processor has (VNNI), else pairs of 16-bit numbers; tiles where
// the runtime has asked the system for them (runtime/int8_units.py). No choice changes a result.
enum { QC_INT8_DEFAULT = 0, QC_INT8_PAIRS = 1, QC_INT8_TILES = 2 };

// Dot products of pairs where the processor has them (AVX512-BF16), or tiles of AMX for many rows.
enum { QC_BF16_DEFAULT = 0, QC_BF16_TILES = 1 };

enum { QC_OK = 0, QC_INDEX_OUT_OF_RANGE = 1 };

// Every kernel: operands' addresses in the order of its KernelSpec, the values of `KernelSpec.symbols` in order.
typedef void (*qc_kernel)(struct qc_ctx* ctx, void* const* operands, const int64_t* symbols);

// Every entry point: base addresses of the plan's arenas in the order of `Plan.arenas` (null where the entry does not
// use one), the values of `EntryPoint.symbols` in order. Returns ctx->error_code.
typedef int32_t (*qc_entry)(struct qc_ctx* ctx, char* const* arenas, const int64_t* symbols);
