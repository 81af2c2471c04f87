// The orthonormal Hadamard transform of BLOCK numbers (plan/kinds/hadamard.py), in steps of width 1, 2, 4, ….
//
// Element e of a run belongs to lane e % 32, register e / 32 % 8 and warp e / 256. So loads and stores of a warp are
// side by side, the steps of width 1 to 16 are shuffles, those of 32 to 128 are between registers, and those from 256
// on are between warps, over shared memory. A run of fewer than 32 numbers has a part of a warp.
#pragma once
#include "device.cuh"

// Transforms the numbers that the threads of a run hold in `v`; every thread of the block takes part. `shared` is
// BLOCK floats if BLOCK is above 256.
template <int BLOCK, int KEPT> QC_DEVICE void qh_transform(float (&v)[KEPT], float* shared) {
    const int thread = (int)threadIdx.x;
#pragma unroll
    for (int width = 1; width < QC_WARP && width < BLOCK; width *= 2)
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            const float other = __shfl_xor_sync(QC_ALL_LANES, v[i], width);
            v[i] = thread & width ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int width = 1; width < KEPT; width *= 2)
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (!(i & width)) {
                const float low = v[i], high = v[i | width];
                v[i] = low + high;
                v[i | width] = low - high;
            }
    constexpr int THREADS = BLOCK / KEPT;
#pragma unroll
    for (int step = QC_WARP; step < THREADS; step *= 2) {
#pragma unroll
        for (int i = 0; i < KEPT; i++) shared[i * THREADS + thread] = v[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            const float other = shared[i * THREADS + (thread ^ step)];
            v[i] = thread & step ? other - v[i] : v[i] + other;
        }
        __syncthreads();
    }
}
