// Recurrent layers: all steps of one direction of one layer for a few rows of the batch, by one block.
//
// A block makes its rows' sums of all gates: each warp takes panels of 16 rows of the weight in turn, with the tiles of
// linear.cuh and the state in shared memory, in the order in which a lane wants it. Then its threads make the new
// states, a unit each. Barriers stand between; nothing leaves the block, and a launch can be captured. The order of an
// element's additions depends on the width alone.
//
// The weight is read once in every step by every block: from the second step on out of the L2 cache, if it fits there.
#pragma once
#include "linear_fma.cuh"

// `rows` rows of X, all columns at a time, by `warps` warps with `Depth` tiles under way per lane: what qc_stage_x and
// qc_multiply_tile ask of a shape.
template <class W, class X, int Rows, int Warps, int Depth> struct qc_step_shape {
    static constexpr int rows = Rows, warps = Warps, depth = Depth;
    static constexpr bool mma = false, late = false;
    static constexpr int columns = qc_tile_of<W>::columns;
    static constexpr int padded = (int)((W::tiles * columns + 15) / 16 * 16);
    static constexpr int chunk = padded, pitch = padded;
    typedef X x_type;
};

// sums[panel][row of x][row of the panel] of all panels, times the rows of x that lie in `x_tile`. Barriers stand
// before and behind it.
template <class W, class S, class Table>
QC_DEVICE void qc_panel_sums(const uint8_t* w, int live, const float* x_tile, Table table, float* sums) {
    constexpr int tiles = (int)W::tiles, panels = (int)((W::rows + 15) / 16);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int panel = warp; panel < panels; panel += S::warps) {
        const qc_share_place<W> mine(w, panel, lane);
        const qc_row_place<W> rows(w, panel, lane / 4);
        qc_lane_tile<W> ring[S::depth];
        qc_entries<W> row_entries;
        if constexpr (qc_entries<W>::whole_rows) row_entries.load(rows, 0, lane);
#pragma unroll
        for (int s = 0; s < S::depth; s++)
            if (s < tiles) ring[s].load(mine, rows, s, lane);
        qc_few_sums<S::rows, false> total;
        total.clear();
#pragma unroll 1
        for (int step = 0; step < tiles; step += S::depth) {
#pragma unroll
            for (int s = 0; s < S::depth; s++) {
                const int index = step + s;
                if (index < tiles) {
                    const qc_entries<W>& entries = qc_entries<W>::whole_rows ? row_entries : ring[s].entries;
                    qc_multiply_tile<W, S>(ring[s], entries, w, panel, (int64_t)index * S::columns, lane, live,
                                           x_tile + index * S::columns, table, total);
                }
                if (index + S::depth < tiles) ring[s].load(mine, rows, index + S::depth, lane);
            }
        }
        total.store(sums + panel * S::rows * 16, lane);
    }
}

// The same of a plain matrix under any strides, (rows, cols): a warp takes rows of it in turn; x as it lies in memory.
template <int ROWS, int WARPS, class T, class X>
QC_DEVICE void qc_strided_sums(const T* w, int64_t down, int64_t right, int rows, int cols, const X* x, int64_t x_row,
                               int live, float* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int n = warp; n < rows; n += WARPS) {
        float total[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) total[r] = 0.0f;
        for (int k = lane; k < cols; k += 32) {
            const float value = qc_load(w + n * down + k * right);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (r < live) total[r] = fmaf(value, qc_load(x + r * x_row + k), total[r]);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) total[r] += __shfl_xor_sync(QC_ALL_LANES, total[r], step);
            if (lane == 0) sums[(n / 16 * ROWS + r) * 16 + n % 16] = total[r];
        }
    }
}

// Sum n of row r.
template <int ROWS> QC_DEVICE float qc_sum_at(const float* sums, int r, int n) {
    return sums[(n / 16 * ROWS + r) * 16 + n % 16];
}

QC_DEVICE float qc_gate_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// New states, from the sums of the gates and what `given(gate)` is of the input. `store` writes one and rounds it.
template <class Given, class Cell, class Store>
QC_DEVICE void qc_lstm_unit(const Given& given, Cell* cell, const Store& store) {
    const float in = qc_gate_sigmoid(given(0)), forget = qc_gate_sigmoid(given(1)), update = tanhf(given(2));
    qc_store(cell, forget * qc_load(cell) + in * update);
    store(qc_gate_sigmoid(given(3)) * tanhf(qc_load(cell)));
}
template <class Given, class Share, class Store>
QC_DEVICE void qc_gru_unit(const Given& given, const Share& share, float old, const Store& store) {
    const float reset = qc_gate_sigmoid(given(0) + share(0)), keep = qc_gate_sigmoid(given(1) + share(1));
    const float fresh = tanhf(given(2) + reset * share(2));
    store(fresh + keep * (old - fresh));
}
QC_DEVICE float qc_relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays
