// Windows of an image of int8 rows (qcompiler/formats/int8_rows.py) as rows of int8: the x of a convolution of codes.
//
//     row (b, i, j) = the codes of the pixels of its taps side by side, the scale of image b, sums of 32 codes each
//
// A tap outside of the image has codes 0. The codes of a pixel are followed by zeros up to a whole line of 64 bytes, so
// that lines, or halves of them, are copied whole: what a tap writes behind its channels is written again by what comes
// behind. Of a number of channels that 32 divides it writes nothing there, so that sums can be written beside codes.
#pragma once
#include "im2col.h"
#include "int8.h"

enum { QI_LINE = 64 };
typedef char qi_line __attribute__((vector_size(QI_LINE), aligned(1), may_alias));
typedef char qi_half_line __attribute__((vector_size(QI_LINE / 2), aligned(1), may_alias));
typedef int16_t qi_run_sum __attribute__((aligned(1), may_alias));

QC_INLINE void qi_copy_lines(char* to, const char* from, int64_t bytes) {
    int64_t e = 0;
    for (; e + QI_LINE / 2 < bytes; e += QI_LINE) *(qi_line*)(to + e) = *(const qi_line*)(from + e);
    if (e < bytes) *(qi_half_line*)(to + e) = *(const qi_half_line*)(from + e);
}
QC_INLINE void qi_zero_lines(char* to, int64_t bytes) {
    int64_t e = 0;
    for (; e + QI_LINE / 2 < bytes; e += QI_LINE) *(qi_line*)(to + e) = qi_line{};
    if (e < bytes) *(qi_half_line*)(to + e) = qi_half_line{};
}

// Bytes of a window with `k` columns that is being made: a row of int8, and the end of its last line.
constexpr int64_t qi_window_room(int64_t k) {
    return qi_padded(k) + 16 + (qi_padded(k) / QI_RUN * 2 + 15) / 16 * 16 + QI_LINE;
}

struct qi_rows_of_windows {
    static const char* row(const qg_job* job, int64_t m, char* to) {
        const qg_window& g = *job->window;
        const int64_t j = m % g.columns, i = m / g.columns % g.rows, b = m / g.columns / g.rows;
        const int64_t top = i * g.stride_rows - g.top, left = j * g.stride_columns - g.left;
        const int64_t behind = qi_padded(job->k), scale_of_pixel = qi_padded(g.channels), runs = g.channels / QI_RUN;
        const bool whole = g.channels % QI_RUN == 0;  // then the sums of a pixel's codes are those of the window's
        const char* const image = job->x + b * g.image_step;
        char *at = to, *sums = to + behind + 16;
        for (int64_t y = 0; y < g.kernel_rows; y++) {
            const int64_t row = top + y * g.dilation_rows;
            for (int64_t x = 0; x < g.kernel_columns; x++, at += g.channels, sums += 2 * runs) {
                const int64_t column = left + x * g.dilation_columns;
                const bool inside = row >= 0 && row < g.height && column >= 0 && column < g.width;
                const char* const pixel = image + row * g.row_step + column * g.column_step;
                if (inside) qi_copy_lines(at, pixel, g.channels);
                else qi_zero_lines(at, g.channels);
                if (whole)
                    for (int64_t r = 0; r < runs; r++)
                        ((qi_run_sum*)sums)[r] = inside ? ((const qi_run_sum*)(pixel + scale_of_pixel + 16))[r] : 0;
            }
        }
        memset(to + job->k, 0, (size_t)(behind - job->k));
        memcpy(to + behind, image + scale_of_pixel, 4);
        for (int64_t r = whole ? job->k / QI_RUN : 0; r < behind / QI_RUN; r++) {
            int32_t sum = 0;
            for (int k = 0; k < QI_RUN; k++) sum += to[r * QI_RUN + k];
            ((qi_run_sum*)(to + behind + 16))[r] = (int16_t)sum;
        }
        return to;
    }
};
