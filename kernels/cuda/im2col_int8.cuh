// Windows of an image of int8 rows (qcompiler/formats/int8_rows.py) as rows of int8, read where they are multiplied.
//
// Pieces of 16 codes are what a product stages. Where 16 divides the channels, a piece belongs to one tap and is one
// load; else its codes are looked up one by one. A window's scale is that of the first pixel of its image, and sums of
// its codes are made of the pieces.
#pragma once
#include "im2col.cuh"
#include "int8.cuh"

struct qi_window_rows {
    const int8_t* x;
    const qc_window& window;
    const qc_window_place* places;  // of the block's rows, in shared memory
    int64_t columns;                // of a window

    QC_DEVICE uint4 piece(int i, int64_t column) const {
        int64_t offset = 0;
        if (window.channels % 16 == 0) {
            const bool there = column < columns && qc_window_element(window, places[i], (int)column, offset);
            return there ? *(const uint4*)(x + offset) : make_uint4(0, 0, 0, 0);
        }
        return make_uint4(word(i, column), word(i, column + 4), word(i, column + 8), word(i, column + 12));
    }
    QC_DEVICE int sum(int i, int64_t segment, int64_t) const {
        return qi_sum_of(piece(i, segment * 32)) + qi_sum_of(piece(i, segment * 32 + 16));
    }
    QC_DEVICE float scale(int i, int64_t) const {
        return *(const float*)(x + places[i].image + ((int64_t)window.channels + 63) / 64 * 64);
    }

private:
    QC_DEVICE uint32_t word(int i, int64_t column) const {
        uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t offset = 0;
            if (column + j < columns && qc_window_element(window, places[i], (int)column + j, offset))
                codes |= (uint32_t)(uint8_t)x[offset] << 8 * j;
        }
        return codes;
    }
};
