// Reductions over the threads of a block, in one fixed order: the same bits on every run.
#pragma once
#include "device.cuh"

// Over all WARPS warps of the block, in every thread: lanes first, then warps in order. `partial` is WARPS floats of
// shared memory; every thread of the block takes part.
template <int WARPS> QC_DEVICE float qc_block_sum(float v, float* partial) {
    v = qc_warp_sum(v);
    __syncthreads();  // whoever still reads the reduction before this one
    if (threadIdx.x % QC_WARP == 0) partial[threadIdx.x / QC_WARP] = v;
    __syncthreads();
    float total = partial[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) total += partial[warp];
    return total;
}
template <int WARPS> QC_DEVICE float qc_block_max(float v, float* partial) {
    v = qc_warp_max(v);
    __syncthreads();
    if (threadIdx.x % QC_WARP == 0) partial[threadIdx.x / QC_WARP] = v;
    __syncthreads();
    float top = partial[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) top = fmaxf(top, partial[warp]);
    return top;
}

// A value as memory of type T would give it back.
template <class T> QC_DEVICE float qc_rounded(float v) {
    T stored;
    qc_store(&stored, v);
    return qc_load(&stored);
}

// Column `at` of a row of which a lane keeps the columns lane, lane + 32, …; lanes may differ in `at`. All take part.
template <int N> QC_DEVICE float qc_kept(const float (&kept)[N], int at) {
    float v = __shfl_sync(QC_ALL_LANES, kept[0], at % QC_WARP);
#pragma unroll
    for (int i = 1; i < N; i++) {
        const float other = __shfl_sync(QC_ALL_LANES, kept[i], at % QC_WARP);
        if (at / QC_WARP == i) v = other;
    }
    return v;
}
