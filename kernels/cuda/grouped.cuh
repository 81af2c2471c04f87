// Products with chosen experts on the CUDA cores: any number of pairs of a row of x and an expert.
//
// A block makes TN columns of one expert for all rows that chose it, TM at a time: it looks their pairs up in `index`,
// in ascending order, and takes steps of 32 columns of x and w like qc_linear_tiled. Blocks of experts that nobody
// chose end without reading a weight.
#pragma once
#include "linear_fma.cuh"

// Listed pairs that found no room are met again from `*next` on. `counts` has a number for each warp.
struct qc_pair_list {
    int* rows;
    int* counts;
    int* next;
};

// The next pairs, from `from` on, for which chosen(p) holds: their number, at most TM, and the first pair not looked
// at. By a block of THREADS threads; a barrier stands behind it.
template <int TM, int THREADS, class Chosen>
QC_DEVICE int qc_list_pairs(int64_t pairs, int64_t& from, const Chosen& chosen, qc_pair_list list) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int live = 0;
    __syncthreads();  // the list before is used up
    while (live < TM && from < pairs) {
        const int64_t pair = from + threadIdx.x;
        const bool hit = pair < pairs && chosen(pair);
        const uint32_t mask = __ballot_sync(QC_ALL_LANES, hit);
        if (lane == 0) list.counts[warp] = __popc(mask);
        __syncthreads();
        int place = live + __popc(mask & ((1u << lane) - 1)), total = live;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w < warp) place += list.counts[w];
            total += list.counts[w];
        }
        if (hit && place < TM) list.rows[place] = (int)pair;
        if (hit && place == TM) *list.next = (int)pair;
        __syncthreads();
        from = total > TM ? (int64_t)*list.next : from + THREADS;
        live = total < TM ? total : TM;
    }
    __syncthreads();
    return live;
}

// Rows of x that stand anywhere, columns k0 … k0 + 31, as [column][row], zero past `live` rows and the last column.
template <int TM, class X>
QC_DEVICE void qc_gather_rows(const X* x, int64_t x_row, const int* rows, int repeat, int live, int64_t cols,
                              int64_t k0, float* to) {
    for (int i = threadIdx.x; i < TM * QC_TILED_STEP / 4; i += 256) {
        const int row = i % TM, column = i / TM * 4;
        const X* const at = x + (row < live ? rows[row] / repeat * x_row : 0) + k0 + column;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool there = row < live && k0 + column + j < cols;
            to[(column + j) * (TM + 4) + row] = there ? qc_load(at + j) : 0.0f;
        }
    }
}

// qc_tiled_sums of the listed rows.
template <int TN, int TM, class X, class Stage>
QC_DEVICE void qc_grouped_tiled(const X* x, int64_t x_row, const int* rows, int repeat, int live, int64_t cols,
                                float* x_step, float* w_step, const Stage& stage_w, float (&sums)[TM / 16][TN / 16]) {
    const auto stage_x = [&](int64_t k0, float* to) {
        qc_gather_rows<TM>(x, x_row, rows, repeat, live, cols, k0, to);
    };
    qc_tiled_sums<TN, TM>(cols, x_step, w_step, stage_x, stage_w, sums);
}
