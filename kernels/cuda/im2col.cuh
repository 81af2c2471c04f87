// Windows of an image as rows of a matrix product: the x of a convolution, read where it is multiplied.
//
//     x[(b, i, j), (y, x, c)] = image[b, i * stride + y * dilation - pad, j * stride + x * dilation - pad, c], or zero
//
// A block looks up once where each of its rows lies (qc_place_windows); every element then costs one comparison of its
// tap with the image's height and width.
#pragma once
#include "device.cuh"

// Sizes and steps may be symbols, the others are literals.
struct qc_window {
    int64_t height, width;                         // of the image
    int64_t image_step, row_step, column_step;     // elements to the next image, row, column
    int64_t rows, columns;                         // windows down and across
    int channels, kernel_columns;                  // channels lie side by side
    int stride_rows, stride_columns, top, left;    // top, left: width of the border
    int dilation_rows, dilation_columns;
};

// Of one window: the image's first element, and where the first tap lies.
struct qc_window_place {
    int64_t image, row, column;
};

// The windows m0 … m0 + ROWS - 1, as far as there are m. By a whole block; a barrier must follow.
template <int ROWS>
QC_DEVICE void qc_place_windows(const qc_window& g, int64_t m0, int64_t m, qc_window_place* places) {
    for (int r = (int)threadIdx.x; r < ROWS; r += (int)blockDim.x) {
        const int64_t number = m0 + r < m ? m0 + r : m - 1, down = number / g.columns;
        places[r].image = down / g.rows * g.image_step;
        places[r].row = down % g.rows * g.stride_rows - g.top;
        places[r].column = number % g.columns * g.stride_columns - g.left;
    }
}

// Whether column k of a window lies inside of the image; then `offset` is its element.
QC_DEVICE bool qc_window_element(const qc_window& g, const qc_window_place& place, int k, int64_t& offset) {
    const int tap = k / g.channels, down = tap / g.kernel_columns, across = tap - down * g.kernel_columns;
    const int64_t row = place.row + (int64_t)down * g.dilation_rows;
    const int64_t column = place.column + (int64_t)across * g.dilation_columns;
    offset = place.image + row * g.row_step + column * g.column_step + (k - tap * g.channels);
    return row >= 0 && row < g.height && column >= 0 && column < g.width;
}

// Columns k0 … k0 + 31 of the placed windows, as [column][row], zero past `live` rows and the last column. 256 threads.
template <int ROWS, class T>
QC_DEVICE void qc_window_step(const T* image, const qc_window& g, const qc_window_place* places, int64_t live,
                              int64_t cols, int64_t k0, float* to) {
    for (int i = (int)threadIdx.x; i < ROWS * 8; i += 256) {
        const int row = i % ROWS, column = i / ROWS * 4;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t offset = 0;
            const bool wanted = row < live && k0 + column + j < cols;
            const bool there = wanted && qc_window_element(g, places[row], (int)k0 + column + j, offset);
            to[(column + j) * (ROWS + 4) + row] = there ? qc_load(image + offset) : 0.0f;
        }
    }
}
