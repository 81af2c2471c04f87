// Statistics of rows in parts (qcompiler/plan/row_statistics.py): a linear of many rows writes those of the rows that
// it stores, and another one normalises its rows by them.
//
//     qc_write_parts      after the last store of a block: the groups of 32 columns that it has stored, two lanes each
//     qc_join_parts       the mean and the scale of a block's rows, by eight lanes each
//     qm_normed_x         a ring of x (linear_mma.cuh) whose threads normalise the pieces that they have copied
//     qc_normed_step      the same for a step of linear_fma.cuh's tiles
//
// A block reads the elements back that it has stored: they are in L2, and their rounding is part of the statistics. All
// sums have one order, which depends on the sizes alone.
#pragma once
#include "linear_fma.cuh"
#include "linear_mma.cuh"

enum {
    QC_GROUP = 32,      // columns of a group: row_statistics.py's GROUP
    QC_JOINING = 8,     // lanes that join the groups of a row
};

// The sum over LANES neighbouring lanes, in each of them. All lanes of a warp arrive here.
template <int LANES> QC_DEVICE float qc_lanes_sum(float v) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) v += __shfl_xor_sync(QC_ALL_LANES, v, step);
    return v;
}

// Columns in group `group` of a row.
template <int COLUMNS> QC_DEVICE int qc_group_count(int group) {
    const int left = COLUMNS - group * QC_GROUP;
    return left < QC_GROUP ? left : (int)QC_GROUP;
}

// The parts of rows m0 … m0 + ROWS - 1, columns n0 … n0 + WIDTH - 1 of `out`, which the block has stored as far as they
// are inside (m x COLUMNS).
template <int ROWS, int WIDTH, int THREADS, int COLUMNS, bool CENTRED, class T>
QC_DEVICE void qc_write_parts(const T* out, int64_t out_row, float* parts, int64_t parts_row, int64_t m0, int64_t n0,
                              int64_t m) {
    constexpr int GROUPS = WIDTH / QC_GROUP;
    static_assert(WIDTH % QC_GROUP == 0 && ROWS * GROUPS * 2 % 32 == 0 && THREADS % 32 == 0, "whole groups and warps");
    __syncthreads();  // what other threads have stored
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * GROUPS * 2; i += THREADS) {
        const int64_t row = m0 + i / (2 * GROUPS), first = n0 + i / 2 % GROUPS * QC_GROUP;
        const bool there = row < m && first < COLUMNS;
        const int64_t k = first + i % 2 * 16;
        const int group = (int)(first / QC_GROUP), count = qc_group_count<COLUMNS>(there ? group : 0);
        float v[16], mean = 0.0f, square = 0.0f;
        qc_read_floats(out + (there ? row : m0) * out_row, there ? k : COLUMNS, COLUMNS, v);
        if constexpr (CENTRED) {
#pragma unroll
            for (int e = 0; e < 16; e++) mean += v[e];
            mean = qc_lanes_sum<2>(mean) / (float)count;
        }
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const float away = k + e < COLUMNS ? v[e] - mean : 0.0f;
            square = fmaf(away, away, square);
        }
        square = qc_lanes_sum<2>(square);
        if (there && i % 2 == 0) {
            float* const to = parts + row * parts_row + (CENTRED ? 2 : 1) * group;
            if constexpr (CENTRED) to[0] = mean, to[1] = square;
            else to[0] = square;
        }
    }
}

// values[i] = (mean, 1 / sqrt(mean square of the distances from it + eps)) of row i of `parts`, for `live` rows, at
// least one. A barrier must follow.
template <int ROWS, int THREADS, int COLUMNS, bool CENTRED>
QC_DEVICE void qc_join_parts(const float* parts, int64_t parts_row, int live, float eps, float2* values) {
    constexpr int GROUPS = (COLUMNS + QC_GROUP - 1) / QC_GROUP;
    static_assert(ROWS * QC_JOINING % 32 == 0 && THREADS % 32 == 0, "whole warps");
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * QC_JOINING; i += THREADS) {
        const int row = i / QC_JOINING, lane = i % QC_JOINING;
        const float* const from = parts + (row < live ? row : 0) * parts_row;
        float mean = 0.0f, square = 0.0f;
        if constexpr (CENTRED) {
#pragma unroll 4
            for (int g = lane; g < GROUPS; g += QC_JOINING)
                mean = fmaf((float)qc_group_count<COLUMNS>(g), from[2 * g], mean);
            mean = qc_lanes_sum<QC_JOINING>(mean) / (float)COLUMNS;
#pragma unroll 4
            for (int g = lane; g < GROUPS; g += QC_JOINING) {
                const float away = from[2 * g] - mean;
                square += fmaf((float)qc_group_count<COLUMNS>(g) * away, away, from[2 * g + 1]);
            }
        } else {
#pragma unroll 4
            for (int g = lane; g < GROUPS; g += QC_JOINING) square += from[g];
        }
        square = qc_lanes_sum<QC_JOINING>(square) / (float)COLUMNS;
        if (lane == 0 && row < live) values[row] = make_float2(mean, 1.0f / sqrtf(square + eps));
    }
}

// Eight elements from a multiple of eight on.
QC_DEVICE void qc_read_eight(const float* from, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 four = ((const float4*)from)[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
}
template <class T> QC_DEVICE void qc_read_eight(const T* from, float (&v)[8]) {
    const uint4 four = *(const uint4*)from;
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int p = 0; p < 4; p++) v[2 * p] = qc_low(words[p], T()), v[2 * p + 1] = qc_high(words[p], T());
}

// A vector of COLUMNS elements into shared memory, zero up to a multiple of eight.
template <int COLUMNS, int THREADS, class T> QC_DEVICE void qc_keep_vector(const T* from, T* to) {
    for (int i = (int)threadIdx.x; i < (COLUMNS + 7) / 8 * 8; i += THREADS) {
        if (i < COLUMNS) to[i] = from[i];
        else qc_store(to + i, 0.0f);
    }
}

// A ring of x whose tiles are normalised in place: each thread does so with the pieces that it has copied itself, and
// so needs no barrier between. Norm: begin<TOKENS, THREADS>(first row, rows) fills shared memory, and pieces of eight
// columns from k on are made by read(k, weights, biases) and apply(row's values, x, weight, bias).
template <class T, int TOKENS, int COLUMNS, int COLS, int THREADS, class Norm, class Place = qm_padded<COLUMNS>>
struct qm_normed_x {
    typedef qm_x<T, TOKENS, COLUMNS, COLS, THREADS, Place> plain;
    static constexpr int STRIDE = plain::STRIDE;
    static constexpr bool PREPARES = true;

    plain x;
    Norm norm;
    int64_t first;
    int used;

    QC_DEVICE qm_normed_x(const T* from, int64_t row, int64_t first, int64_t m, const Norm& norm)
        : x(from, row, first, m), norm(norm), first(first) {
        used = x.used;
    }
    QC_DEVICE void copy(T* tile, qc_place place, int k0) const { x.copy(tile, place, k0); }
    // While the first tiles are under way. A thread of another warp may have filled what `prepare` reads.
    QC_DEVICE void begin() const {
        norm.template begin<TOKENS, THREADS>(first, x.there);
        __syncthreads();
    }
    QC_DEVICE void prepare(T* tile, int k0) const {
        const int piece = (int)threadIdx.x % plain::PIECES, k = k0 + piece * 8;
        if (k >= COLS) return;  // zeros, which meet weights of zero
        float weights[8], biases[8];
        norm.read(k, weights, biases);
#pragma unroll 1
        for (int row = x.token; row < x.there; row += plain::ROW_STEP) {
            uint4* const at = (uint4*)(tile + Place::of(row, piece));
            const float2 of = norm.values[row];
            float v[8];
            qc_read_eight((const T*)at, v);
            uint32_t words[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const float low = norm.apply(of, v[2 * p], weights[2 * p], biases[2 * p]);
                const float high = norm.apply(of, v[2 * p + 1], weights[2 * p + 1], biases[2 * p + 1]);
                words[p] = qc_pack(COLS % 8 == 0 || k + 2 * p < COLS ? low : 0.0f,
                                   COLS % 8 == 0 || k + 2 * p + 1 < COLS ? high : 0.0f, T());
            }
            *at = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};

// One block of a linear whose rows of x are normalised: qm_linear with a norm.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES, int DEPTH, int GROUP, bool PAIRS,
          class Table, class Norm, class Finish>
QC_DEVICE void qm_normed(
    const Table& table, const uint8_t* bytes, const typename W::type* x, int64_t x_row, int64_t m, const Norm& norm,
    void* shared, const Finish& finish) {
    constexpr int COLUMNS = QM_CHUNK * WARPS_K, THREADS = 32 * WARPS_N * WARPS_K;
    uint32_t token_block, row_block;
    qm_block(token_block, row_block);
    const int64_t m0 = (int64_t)token_block * TOKENS, n0 = (int64_t)row_block * (16 * PANELS * WARPS_N);
    const qm_normed_x<typename W::type, TOKENS, COLUMNS, (int)W::cols, THREADS, Norm> tile(x, x_row, m0, m, norm);
    qm_product<W, TOKENS, WARPS_N, WARPS_K, PANELS, STAGES, DEPTH, GROUP, true, PAIRS>(
        table, bytes, tile, m0, n0, m, shared, finish);
}

// Rows r0 … of a matrix, columns k0 … k0 + 31, normalised, as [column][row]; zero outside (rows x cols). norm.at(row of
// the block, k, x) is what the norm makes of an element.
template <int ROWS, class T, class Norm>
QC_DEVICE void qc_normed_step(const T* from, int64_t down, int64_t rows, int64_t cols, int64_t r0, int64_t k0,
                              const Norm& norm, float* to) {
    for (int i = threadIdx.x; i < ROWS * QC_TILED_STEP / 4; i += 256) {
        const int row = i % ROWS, column = i / ROWS * 4;
        const T* const at = from + (r0 + row) * down + k0 + column;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool there = r0 + row < rows && k0 + column + j < cols;
            to[(column + j) * (ROWS + 4) + row] = there ? norm.at(row, k0 + column + j, qc_load(at + j)) : 0.0f;
        }
    }
}
