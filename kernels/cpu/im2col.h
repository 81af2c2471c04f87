// Windows of an image as rows of a matrix product: the x of a convolution, made block by block where it is multiplied.
//
//     x[(b, i, j), (y, x, c)] = image[b, i * stride + y * dilation - pad, j * stride + x * dilation - pad, c], or zero
//
// Taps that lie side by side in memory (a row of the kernel) are copied as one run.
#pragma once
#include "gemm.h"

struct qg_window {
    int64_t height, width, channels;               // of the image; channels lie side by side
    int64_t image_step, row_step, column_step;     // elements to the next image, row, column
    int64_t rows, columns;                         // windows down and across
    int64_t kernel_rows, kernel_columns, stride_rows, stride_columns;
    int64_t top, left, dilation_rows, dilation_columns;  // top, left: width of the border
};

QC_INLINE int64_t qg_clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

QC_INLINE void qg_zeros(float* to, int64_t count) {
    int64_t e = 0;
    for (; e + 16 <= count; e += 16) vstore(to + e, vzero());
    if (e < count) vstore_n(to + e, vzero(), (int)(count - e));
}
QC_INLINE void qg_zeros(qc_bf16* to, int64_t count) { memset((void*)to, 0, sizeof(qc_bf16) * (size_t)count); }

template <class T> QC_INLINE void qg_copy_run(float* to, const T* from, int64_t count) {
    int64_t e = 0;
    for (; e + 16 <= count; e += 16) vstore(to + e, vload(from + e));
    if (e < count) vstore_n(to + e, vload_n(from + e, (int)(count - e)), (int)(count - e));
}
QC_INLINE void qg_copy_run(qc_bf16* to, const qc_bf16* from, int64_t count) {
    memcpy(to, from, sizeof(qc_bf16) * (size_t)count);
}

// A `qg_load_x`: columns [k0, k0 + kc) of the windows [m0, m0 + rows) of an image of storage type T, as numbers of type
// U, in rows `row_floats` floats apart.
template <class T, class U = float> static void qg_load_windows(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t row_floats) {
    const qg_window g = *job->window;
    const bool dense = g.dilation_columns == 1 && g.column_step == g.channels;
    // taps of a run, runs of a row
    const int64_t taps = dense ? g.kernel_columns : 1, across = g.kernel_columns / taps;
    const int64_t run = taps * g.channels, first = k0 / run, end = k0 + kc;
    int64_t j = m0 % g.columns, i = m0 / g.columns % g.rows, b = m0 / g.columns / g.rows;
    for (int64_t m = 0; m < rows; m++, dst += row_floats) {
        const T* const image = (const T*)job->x + b * g.image_step;
        const int64_t top = i * g.stride_rows - g.top, left = j * g.stride_columns - g.left;
        int64_t y = first / across, x = first % across;
        for (int64_t begin = first * run; begin < end; begin += run) {
            // elements [low, high) of this run are wanted, [from, to) of them lie in the image
            const int64_t low = qc_max(k0 - begin, 0), high = qc_min(end - begin, run);
            const int64_t row = top + y * g.dilation_rows, column = left + x * g.dilation_columns;
            const bool inside = row >= 0 && row < g.height;
            const int64_t from = inside ? qg_clamp(qg_clamp(-column, 0, taps) * g.channels, low, high) : high;
            const int64_t to = inside ? qg_clamp(qg_clamp(g.width - column, 0, taps) * g.channels, from, high) : high;
            U* const at = (U*)dst + begin - k0;
            if (from > low) qg_zeros(at + low, from - low);
            if (to > from)
                qg_copy_run(at + from, image + (row * g.row_step + column * g.column_step + from), to - from);
            if (high > to) qg_zeros(at + to, high - to);
            if (++x == across) x = 0, y++;
        }
        if (++j == g.columns) {
            j = 0;
            if (++i == g.rows) i = 0, b++;
        }
    }
}
