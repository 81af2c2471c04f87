// fp32 tiles in shared memory, multiplied on the CUDA cores. A thread owns 4 rows and every 16th column.
#pragma once
#include "device.cuh"

// tile[r * STRIDE + c] = matrix[r][c] as fp32 for ROWS x COLS elements, zeros outside of the live ones. Eight loads are
// under way before the first is stored. Neighbouring threads take neighbouring columns, or rows if DOWN.
template <int ROWS, int COLS, int STRIDE, int THREADS, bool DOWN, class T>
QC_DEVICE void qc_stage_strided(float* tile, const T* matrix, int64_t row_stride, int64_t column_stride, int live_rows,
                                int live_cols) {
    constexpr int BATCH = 8;
    for (int first = (int)threadIdx.x; first < ROWS * COLS; first += BATCH * THREADS) {
        float value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int e = first + i * THREADS, r = DOWN ? e % ROWS : e / COLS, c = DOWN ? e / ROWS : e % COLS;
            value[i] = r < live_rows && c < live_cols ? qc_load(matrix + r * row_stride + c * column_stride) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int e = first + i * THREADS, r = DOWN ? e % ROWS : e / COLS, c = DOWN ? e / ROWS : e % COLS;
            if (e < ROWS * COLS) tile[r * STRIDE + c] = value[i];
        }
    }
}

// The same for rows with unit stride.
template <int ROWS, int COLS, int STRIDE, int THREADS, class T>
QC_DEVICE void qc_stage_floats(float* tile, const T* rows, int64_t row_stride, int live_rows, int live_cols) {
    qc_stage_strided<ROWS, COLS, STRIDE, THREADS, false>(tile, rows, row_stride, 1, live_rows, live_cols);
}

// sum[r][c] += sum_d left[r][d] * right[16 c][d] over DEPTH (a multiple of 4) columns: rows of STRIDE floats, 16-byte
// aligned. A STRIDE of 4 more than a multiple of 32 keeps 16 neighbouring rows in different banks.
template <int DEPTH, int STRIDE, int COLUMNS>
QC_DEVICE void qc_dot_tile(float (&sum)[4][COLUMNS], const float* left, const float* right) {
#pragma unroll 2
    for (int d = 0; d < DEPTH; d += 4) {
        float4 left_row[4];
#pragma unroll
        for (int r = 0; r < 4; r++) left_row[r] = *(const float4*)(left + r * STRIDE + d);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float4 right_row = *(const float4*)(right + 16 * c * STRIDE + d);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                sum[r][c] = fmaf(left_row[r].x, right_row.x, sum[r][c]);
                sum[r][c] = fmaf(left_row[r].y, right_row.y, sum[r][c]);
                sum[r][c] = fmaf(left_row[r].z, right_row.z, sum[r][c]);
                sum[r][c] = fmaf(left_row[r].w, right_row.w, sum[r][c]);
            }
        }
    }
}
