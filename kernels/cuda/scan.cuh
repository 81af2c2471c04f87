// Running sums over a warp, in one fixed order.
#pragma once
#include "device.cuh"

template <class T> QC_DEVICE T qc_warp_scan(T v) {  // lane l: the sum of lanes 0 … l
    const int lane = (int)threadIdx.x % QC_WARP;
#pragma unroll
    for (int step = 1; step < QC_WARP; step <<= 1) {
        const T before = __shfl_up_sync(QC_ALL_LANES, v, step);
        if (lane >= step) v += before;
    }
    return v;
}
