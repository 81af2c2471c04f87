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
