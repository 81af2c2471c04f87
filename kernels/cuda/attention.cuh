// Pieces of the attention kernels. Tiles lie in shared memory; what belongs to a thread is an array in registers.
#pragma once
#include "tile.cuh"

// A position from the caller, so far within 64 bits that sizes can be added to it: 2^53 is past any sequence's end.
QC_DEVICE int64_t qc_position(int64_t n) { return qc_max(-((int64_t)1 << 53), qc_min((int64_t)1 << 53, n)); }

// The first of start, start + step, … that is not below `seen`, or from which on a query at most `span` positions back
// from `highest` sees a row of a ring: `ring` rows, of which row r holds the latest position congruent to r.
QC_DEVICE int64_t qc_ring_keys(int64_t start, int64_t step, int64_t seen, int64_t highest, int64_t span, int64_t ring) {
    while (start < seen && (highest - start) % ring >= span) start += step;
    return start;
}

// Whether a query sees all `rows` rows of a ring from one on that lies `back` rows before the query's position.
QC_DEVICE bool qc_ring_tile(int64_t back, int64_t rows, int64_t window, int64_t ring) {
    return back % ring >= rows - 1 && back % ring < window;
}

// Whether every row of a matrix with unit stride in its last dim starts at a multiple of 16 bytes.
template <class T> QC_DEVICE bool qc_rows_aligned(const T* first, int64_t row_stride) {
    return (uint64_t)first % 16 == 0 && row_stride * (int64_t)sizeof(T) % 16 == 0;
}

// Over the 16 threads that share a row (half a warp), in every one of them.
QC_DEVICE float qc_row16_max(float v) {
    for (int step = 8; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(QC_ALL_LANES, v, step));
    return v;
}
QC_DEVICE float qc_row16_sum(float v) {
    for (int step = 8; step > 0; step >>= 1) v += __shfl_xor_sync(QC_ALL_LANES, v, step);
    return v;
}

// --- fp32 on the CUDA cores (scores by tile.cuh's qc_dot_tile) -------------------------------------------------------

// sum[r][g][e] += sum_j weights[r][j] * values[j][64 g + e] over KEYS (a multiple of 4) keys.
template <int KEYS, int WEIGHT_STRIDE, int VALUE_STRIDE, int GROUPS>
QC_DEVICE void qc_weigh_tile(float (&sum)[4][GROUPS][4], const float* weights, const float* values) {
    for (int j = 0; j < KEYS; j += 4) {
        float weight[4][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float4 four = *(const float4*)(weights + r * WEIGHT_STRIDE + j);
            weight[r][0] = four.x, weight[r][1] = four.y, weight[r][2] = four.z, weight[r][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                const float4 value = *(const float4*)(values + (j + i) * VALUE_STRIDE + 64 * g);
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    sum[r][g][0] = fmaf(weight[r][i], value.x, sum[r][g][0]);
                    sum[r][g][1] = fmaf(weight[r][i], value.y, sum[r][g][1]);
                    sum[r][g][2] = fmaf(weight[r][i], value.z, sum[r][g][2]);
                    sum[r][g][3] = fmaf(weight[r][i], value.w, sum[r][g][3]);
                }
            }
        }
    }
}

// --- 16 bytes of a row as fp32 ---------------------------------------------------------------------------------------

QC_DEVICE void qc_unpack_pair(uint32_t pair, float& low, float& high, qc_bf16) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
}
QC_DEVICE void qc_unpack_pair(uint32_t pair, float& low, float& high, qc_f16) {
    low = qc_f32_of_f16((uint16_t)(pair & 0xffffu)), high = qc_f32_of_f16((uint16_t)(pair >> 16));
}
QC_DEVICE void qc_unpack_16(float (&value)[4], uint4 raw, float) {
    value[0] = __uint_as_float(raw.x), value[1] = __uint_as_float(raw.y);
    value[2] = __uint_as_float(raw.z), value[3] = __uint_as_float(raw.w);
}
template <class T> QC_DEVICE void qc_unpack_16(float (&value)[8], uint4 raw, T) {
    qc_unpack_pair(raw.x, value[0], value[1], T());
    qc_unpack_pair(raw.y, value[2], value[3], T());
    qc_unpack_pair(raw.z, value[4], value[5], T());
    qc_unpack_pair(raw.w, value[6], value[7], T());
}

// The bits of an element from column c of COLS on, zeros behind the end.
template <int COLS> QC_DEVICE uint32_t qc_bits_of(const float* row, int c) {
    return c < COLS ? __float_as_uint(row[c]) : 0;
}
template <int COLS, class T> QC_DEVICE uint32_t qc_bits_of(const T* row, int c) { return c < COLS ? row[c].bits : 0; }

// --- rows of keys and values, read in place --------------------------------------------------------------------------

// How a lane reads `width` elements of a row from column c (a multiple of `width`) on: `load` asks for them as they are
// stored, `unpack` makes floats of them, zeros behind the end of the row. Rows of T with COLS columns:
template <class T, int COLS> struct qc_float_rows {
    static constexpr int width = 16 / (int)sizeof(T), cols = COLS;
    using raw = uint4;
    static QC_DEVICE raw load(const T* row, int c, bool aligned) {
        if (COLS % width == 0 && aligned) return *(const uint4*)(row + c);
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) word[i] = qc_bits_of<COLS>(row, c + i);
            else word[i] = qc_bits_of<COLS>(row, c + 2 * i + 1) << 16 | qc_bits_of<COLS>(row, c + 2 * i);
        }
        return make_uint4(word[0], word[1], word[2], word[3]);
    }
    static QC_DEVICE void unpack(float (&value)[width], const raw& of, int) { qc_unpack_16(value, of, T()); }
};

// Columns c, c + TURN, … of the rows `row`, row + step, …, zeros from row number `left` on. All loads are under way
// before the first result is used.
template <class ROWS, int COUNT, int TURNS, int TURN, class T>
QC_DEVICE void qc_load_rows(typename ROWS::raw (&to)[COUNT][TURNS], const T* row, int64_t step, int c, int left,
                            bool aligned) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
#pragma unroll
        for (int t = 0; t < TURNS; t++) {
            to[i][t] = typename ROWS::raw();
            if (i < left && (ROWS::cols % (TURN * TURNS) == 0 || c + t * TURN < ROWS::cols))
                to[i][t] = ROWS::load(row + i * step, c + t * TURN, aligned);
        }
    }
}

// --- 16-bit tiles for the tensor cores -------------------------------------------------------------------------------

// tile[r * STRIDE + c] = rows[r][c] for ROWS x COLS 16-bit elements, zero rows from `live` on: asynchronous copies
// where rows are aligned, else element by element (complete at the next barrier).
template <int ROWS, int COLS, int STRIDE, int THREADS, class T>
QC_DEVICE void qc_stage_tile(T* tile, const T* rows, int64_t row_stride, int live, bool aligned) {
    constexpr int CHUNKS = COLS / 8;
#pragma unroll 2  // the copies are asynchronous: more would only cost registers for addresses
    for (int i = 0; i < (ROWS * CHUNKS + THREADS - 1) / THREADS; i++) {
        const int chunk = (int)threadIdx.x + i * THREADS, r = chunk / CHUNKS, c = chunk % CHUNKS * 8;
        if (ROWS * CHUNKS % THREADS != 0 && r >= ROWS) continue;
        const T* const from = rows + r * row_stride + c;
        if (aligned) {
            qc_cp_async_16_or_zero(tile + r * STRIDE + c, from, r < live);
        } else {
            uint32_t pair[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                pair[j] = r < live ? (uint32_t)from[2 * j + 1].bits << 16 | from[2 * j].bits : 0;
            *(uint4*)(tile + r * STRIDE + c) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    }
}

// The operand a of qc_mma_16816 for rows g and g + 8 of 16 rows and STEPS steps of 16 columns; zero rows from `live`
// on.
template <int STEPS, class T>
QC_DEVICE void qc_load_fragments(uint32_t (&part)[STEPS][4], const T* rows, int64_t row_stride, int64_t live,
                                 int lane) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = lane / 4 + 8 * (i % 2), c = 16 * step + 2 * (lane % 4) + 8 * (i / 2);
            const T* const from = rows + r * row_stride + c;
            part[step][i] = r < live ? (uint32_t)from[1].bits << 16 | from[0].bits : 0;
        }
    }
}

// score (16 x 8 TILES) += queries (16 x 16 STEPS, in registers) * keysᵀ; keys are rows of STRIDE elements.
template <int STEPS, int TILES, int STRIDE, class T>
QC_DEVICE void qc_dot_mma(float (&score)[TILES][4], const uint32_t (&queries)[STEPS][4], const T* keys, int lane) {
    const T* const from = keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            uint32_t key[4];
            qc_ldmatrix_x4(key, from + 8 * n * STRIDE + 16 * step);
            const uint32_t left[2] = {key[0], key[1]}, right[2] = {key[2], key[3]};
            qc_mma_16816(score[n], queries[step], left, T());
            qc_mma_16816(score[n + 1], queries[step], right, T());
        }
    }
}

// sum (16 x 8 COLUMNS) += weights (16 x 8 TILES, rounded to T) * values; values are rows of STRIDE elements.
template <int TILES, int COLUMNS, int STRIDE, class T>
QC_DEVICE void qc_weigh_mma(float (&sum)[COLUMNS][4], const float (&weights)[TILES][4], const T* values, int lane) {
    const T* const from = values + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
        const uint32_t weight[4] = {
            qc_pack(weights[n][0], weights[n][1], T()), qc_pack(weights[n][2], weights[n][3], T()),
            qc_pack(weights[n + 1][0], weights[n + 1][1], T()), qc_pack(weights[n + 1][2], weights[n + 1][3], T())};
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            uint32_t value[4];
            qc_ldmatrix_x4_trans(value, from + 8 * n * STRIDE + 8 * c);
            const uint32_t left[2] = {value[0], value[1]}, right[2] = {value[2], value[3]};
            qc_mma_16816(sum[c], weight, left, T());
            qc_mma_16816(sum[c + 1], weight, right, T());
        }
    }
}
