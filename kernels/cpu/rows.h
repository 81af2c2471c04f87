// Walking the columns of a row 16 at a time.
#pragma once
#include "vmath.h"

// f(j, n) for each group of columns [j, j + n): n = 16, and once less at the end.
template <class F> QC_INLINE void qc_columns(int64_t cols, F f) {
    int64_t j = 0;
    for (; j + QC_LANES <= cols; j += QC_LANES) f(j, QC_LANES);
    if (j < cols) f(j, (int)(cols - j));
}

// Sum over all columns of f(j, n), whose lanes from n on must be zero: four accumulators, one fixed order.
template <class F> QC_INLINE float qc_sum_columns(int64_t cols, F f) {
    vf s0 = vzero(), s1 = vzero(), s2 = vzero(), s3 = vzero();
    int64_t j = 0;
    for (; j + 4 * QC_LANES <= cols; j += 4 * QC_LANES) {
        s0 = s0 + f(j, QC_LANES);
        s1 = s1 + f(j + QC_LANES, QC_LANES);
        s2 = s2 + f(j + 2 * QC_LANES, QC_LANES);
        s3 = s3 + f(j + 3 * QC_LANES, QC_LANES);
    }
    for (; j + QC_LANES <= cols; j += QC_LANES) s0 = s0 + f(j, QC_LANES);
    if (j < cols) s1 = s1 + f(j, (int)(cols - j));
    return vsum((s0 + s1) + (s2 + s3));
}

// Largest of f(j, n) over all columns; NaN lanes are passed over.
template <class F> QC_INLINE float qc_max_columns(int64_t cols, F f) {
    vf m0 = vset(-INFINITY), m1 = m0;
    int64_t j = 0;
    for (; j + 2 * QC_LANES <= cols; j += 2 * QC_LANES) {
        m0 = vmax(f(j, QC_LANES), m0);
        m1 = vmax(f(j + QC_LANES, QC_LANES), m1);
    }
    for (; j + QC_LANES <= cols; j += QC_LANES) m0 = vmax(f(j, QC_LANES), m0);
    if (j < cols) m1 = vsel(vfirst((int)(cols - j)), vmax(f(j, (int)(cols - j)), m1), m1);
    return vmaxlane(vmax(m0, m1));
}
