// Windows of an image of int8 rows (qcompiler/formats/int8_rows.py) as rows of int8: the x of a convolution of codes.
//
//     row (b, i, j) = the codes of the pixels of its taps side by side, the scale of image b, sums of 32 codes each
//
// A tap outside of the image has codes 0. The codes of a pixel are followed by zeros up to a whole line of 64 bytes, so
// that lines, or halves of them, are copied whole: what a tap writes behind its channels is written again by what comes
// behind. Of a number of channels that 32 divides it writes nothing there, so that sums can be written beside codes.
#pragma once
#include "im2col.h"
#include "int8_run.h"

enum { QI_LINE = 64 };
typedef char qi_line __attribute__((vector_size(QI_LINE), aligned(1), may_alias));
typedef char qi_half_line __attribute__((vector_size(QI_LINE / 2), aligned(1), may_alias));

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
    return qi_padded(k) + qi_behind(k) + QI_LINE;
}

// The window that is row m of x: where its image and its first tap lie.
struct qi_window_place {
    const char* image;
    int64_t top, left;

    QG_METHOD qi_window_place(const qg_job* job, int64_t m) {
        const qg_window& g = *job->window;
        const int64_t j = m % g.columns, line = m / g.columns, i = line % g.rows;
        image = job->x + line / g.rows * g.image_step;
        top = i * g.stride_rows - g.top, left = j * g.stride_columns - g.left;
    }
    // f(pixel) for each tap in turn; null for a tap outside of the image.
    template <class F> QG_METHOD void taps(const qg_window& g, F f) const {
        for (int64_t y = 0; y < g.kernel_rows; y++) {
            const int64_t row = top + y * g.dilation_rows;
            const bool inside = row >= 0 && row < g.height;
            for (int64_t x = 0; x < g.kernel_columns; x++) {
                const int64_t column = left + x * g.dilation_columns;
                const bool there = inside && column >= 0 && column < g.width;
                f(there ? image + (row * g.row_step + column * g.column_step) : nullptr);
            }
        }
    }
};

// The lines of a prepared row of k columns, LINE bytes apart, with zeros behind its last column.
template <int64_t LINE> static void qi_lay_lines(char* row, int64_t k, char* to) {
    const int64_t padded = qi_padded(k), steps = qg_up(k, 4) * 4;
    memset(row + steps, 0, (size_t)(padded - steps));
    for (int64_t e = 0; e < padded; e += QI_LINE, to += LINE) *(qi_line*)to = *(const qi_line*)(row + e);
}

struct qi_rows_of_windows {
    // Codes are copied from the image to where the product reads them if a tap is whole there, in the order of the
    // weight's codes, and has groups of columns of its own; else the row of int8 is made first.
    template <class W, class E>
    static void prepare(
        const qg_job* job, int64_t m, char* room, char* x, int32_t* start, float* total, float* scale) {
        const qg_window& g = *job->window;
        constexpr bool AS_IT_IS = qi_planes<W>::LOW == 8 && E::STEP == 4;
        constexpr int64_t SPAN = W::SHARED ? W::SHARED : QI_WIDEST;
        const bool groups = W::SHARED ? W::SHARED % QI_RUN == 0 && g.channels % SPAN == 0 : job->k <= QI_WIDEST;
        const qi_window_place place(job, m);
        if (!groups || (!AS_IT_IS && g.channels % 16 != 0)) {
            make_row(job, place, room);
            return qi_prepare_row<W, E>(room, job->k, x, start, total, scale);
        }
        const int64_t behind = qi_padded(g.channels);
        char* const lines = x;
        if (E::TILES) x = room;
        memcpy(scale, place.image + behind, 4);
        int32_t all = 0;
        place.taps(g, [&](const char* pixel) QC_BODY {
            if constexpr (AS_IT_IS) {  // the next tap, or the next row, overwrites what this writes behind its channels
                if (pixel) qi_copy_lines(x, pixel, g.channels);
                else qi_zero_lines(x, g.channels);
                x += g.channels;
            } else {
                if (pixel) qi_prepare<qi_planes<W>::LOW, E::STEP>(pixel, g.channels, x);
                else memset(x, 0, (size_t)(g.channels / 4 * E::STEP));
                x += g.channels / 4 * E::STEP;
            }
            if constexpr (W::SHARED != 0) {
                const int64_t count = g.channels / SPAN;
                if (pixel) qi_sums<W::SHARED>(pixel, behind, g.channels, SPAN, start);
                else memset(start, 0, (size_t)(4 * count));
                qi_begin<W>(count, start, total);
                start += count, total += count;
            } else if (pixel) {
                int32_t sum;
                qi_sums<0>(pixel, behind, g.channels, g.channels, &sum);
                all += sum;
            }
        });
        if (job->k % 4 != 0) memset(x, 0, (size_t)(4 - job->k % 4));  // the rest of a step: weights there are not zero
        if constexpr (E::TILES) qi_lay_lines<E::LINE>(room, job->k, lines);
        if constexpr (W::SHARED == 0) *start = all, qi_begin<W>(1, start, total);
    }
    // Equal tasks, as many for each thread: an image has few rows.
    static int64_t chunk(const qg_job* job, int64_t most, int64_t block, int64_t threads) {
        const int64_t chunks = qg_up(qg_up(job->m, most), threads) * threads;
        return qc_min(most, qg_up(qg_up(job->m, chunks), block) * block);
    }

private:
    // The window as a row of int8.
    static void make_row(const qg_job* job, const qi_window_place& place, char* to) {
        const qg_window& g = *job->window;
        const int64_t behind = qi_padded(job->k), scale_of_pixel = qi_padded(g.channels), runs = g.channels / QI_RUN;
        const bool whole = g.channels % QI_RUN == 0;  // then the sums of a pixel's codes are those of the window's
        char *at = to, *sums = to + behind + 16;
        place.taps(g, [&](const char* pixel) QC_BODY {
            if (pixel) qi_copy_lines(at, pixel, g.channels);
            else qi_zero_lines(at, g.channels);
            for (int64_t r = 0; whole && r < runs; r++)
                ((qi_run_sum*)sums)[r] = pixel ? ((const qi_run_sum*)(pixel + scale_of_pixel + 16))[r] : 0;
            at += g.channels, sums += 2 * runs;
        });
        memset(to + job->k, 0, (size_t)(behind - job->k));
        memcpy(to + behind, place.image + scale_of_pixel, 4);
        if (!whole) return qi_add_runs(to, behind, (qi_run_sum*)(to + behind + 16));
        for (int64_t r = job->k / QI_RUN; r < behind / QI_RUN; r++) ((qi_run_sum*)(to + behind + 16))[r] = 0;
    }
};
