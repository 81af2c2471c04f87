// What loop kernels use: groups of N neighbouring elements in registers, and exchanges between lanes.
#pragma once
#include "scalar.cuh"

// The widest access that divides BYTES, up to 16.
template <int BYTES> struct qc_word { typedef uint4 type; };
template <> struct qc_word<2> { typedef uint16_t type; };
template <> struct qc_word<4> { typedef uint32_t type; };
template <> struct qc_word<8> { typedef uint2 type; };

// Elements [0, n) behind `from`; the others become 0. `whole` allows wide accesses: n is N and the address is a
// multiple of N * sizeof(T), or of 16 if that is less.
template <int N, class T, class V> QC_DEVICE void qc_load_group(const T* from, bool whole, int n, V (&to)[N]) {
    if (whole) {
        typedef typename qc_word<N * sizeof(T)>::type word;
        union { word words[N * sizeof(T) / sizeof(word)]; T items[N]; } group;
#pragma unroll
        for (int i = 0; i < (int)(N * sizeof(T) / sizeof(word)); i++) group.words[i] = ((const word*)from)[i];
#pragma unroll
        for (int v = 0; v < N; v++) to[v] = qc_load(&group.items[v]);
    } else {
#pragma unroll
        for (int v = 0; v < N; v++) to[v] = v < n ? qc_load(from + v) : V(0);
    }
}

// The same where the elements are `step` apart.
template <int N, class T, class V> QC_DEVICE void qc_load_strided(const T* from, int64_t step, int n, V (&to)[N]) {
#pragma unroll
    for (int v = 0; v < N; v++) to[v] = v < n ? qc_load(from + v * step) : V(0);
}

template <int N, class T, class V> QC_DEVICE void qc_store_group(T* to, bool whole, int n, const V (&from)[N]) {
    if (whole) {
        typedef typename qc_word<N * sizeof(T)>::type word;
        union { word words[N * sizeof(T) / sizeof(word)]; T items[N]; } group;
#pragma unroll
        for (int v = 0; v < N; v++) qc_store(&group.items[v], from[v]);
#pragma unroll
        for (int i = 0; i < (int)(N * sizeof(T) / sizeof(word)); i++) ((word*)to)[i] = group.words[i];
    } else {
#pragma unroll
        for (int v = 0; v < N; v++)
            if (v < n) qc_store(to + v, from[v]);
    }
}

template <int N, class T, class V> QC_DEVICE void qc_store_strided(T* to, int64_t step, int n, const V (&from)[N]) {
#pragma unroll
    for (int v = 0; v < N; v++)
        if (v < n) qc_store(to + v * step, from[v]);
}

// The value of the lane whose number differs in the bits of `mask`, for every type that bodies compute in.
QC_DEVICE float qc_exchange(float v, int mask) { return __shfl_xor_sync(QC_ALL_LANES, v, mask); }
QC_DEVICE double qc_exchange(double v, int mask) { return __shfl_xor_sync(QC_ALL_LANES, v, mask); }
QC_DEVICE int64_t qc_exchange(int64_t v, int mask) { return __shfl_xor_sync(QC_ALL_LANES, v, mask); }
QC_DEVICE int32_t qc_exchange(int32_t v, int mask) { return __shfl_xor_sync(QC_ALL_LANES, v, mask); }
QC_DEVICE int16_t qc_exchange(int16_t v, int mask) { return (int16_t)__shfl_xor_sync(QC_ALL_LANES, (int)v, mask); }
QC_DEVICE int8_t qc_exchange(int8_t v, int mask) { return (int8_t)__shfl_xor_sync(QC_ALL_LANES, (int)v, mask); }
QC_DEVICE bool qc_exchange(bool v, int mask) { return __shfl_xor_sync(QC_ALL_LANES, (int)v, mask) != 0; }
