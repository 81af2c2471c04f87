// Products on tensor cores whose rows of x do not follow one another: those that pairs list, and windows of an image.
#pragma once
#include "linear_mma.cuh"
#include "im2col.cuh"

// Copies into the ring as those of qm_x, of rows that stand anywhere: `Rows` says where. rows.at(token, k, offset) is
// whether column k of that row has an element, and which one of `x`; eight of them from a multiple of 8 on lie together
// where rows.pieces().
template <class T, int TOKENS, int COLUMNS, int COLS, int THREADS, class Rows> struct qm_scattered_x {
    static constexpr int STRIDE = COLUMNS + QM_PAD, PIECES = COLUMNS / 8, ROW_STEP = THREADS / PIECES;
    static constexpr bool PREPARES = false;
    static_assert(THREADS % PIECES == 0 && TOKENS % ROW_STEP == 0, "whole rows of pieces per step");

    const T* x;
    const Rows& rows;
    int there, used;  // as qm_x
    bool aligned;

    QC_DEVICE qm_scattered_x(const T* x, const Rows& rows, int64_t live) : x(x), rows(rows) {
        there = live < TOKENS ? (int)live : TOKENS;
        used = TOKENS != 64 || there > 32 ? TOKENS : there > 16 ? 32 : 16;
        aligned = ((uint64_t)x & 15) == 0 && rows.pieces();
    }

    QC_DEVICE void copy(T* tile, qc_place place, int k0) const {
        const int token = (int)threadIdx.x / PIECES, piece = (int)threadIdx.x % PIECES * 8, k = k0 + piece;
        const int first = token * STRIDE + piece;
        if (aligned && (COLS % 8 == 0 || k + 8 <= COLS || k >= COLS)) {
#pragma unroll
            for (int i = 0; i < TOKENS; i += ROW_STEP) {
                if (token + i < used) {
                    int64_t offset = 0;
                    const bool inside = token + i < there && k < COLS && rows.at(token + i, k, offset);
                    qc_cp_async_16_or_zero(place + (first + i * STRIDE) * 2, inside ? x + offset : x, inside);
                }
            }
        } else {
#pragma unroll 1
            for (int i = 0; token + i < used; i += ROW_STEP) {
                uint32_t pairs[4];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    pairs[e] = element(token + i, k + 2 * e) | element(token + i, k + 2 * e + 1) << 16;
                *(uint4*)(tile + first + i * STRIDE) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
    QC_DEVICE uint32_t element(int token, int k) const {
        int64_t offset = 0;
        return token < there && k < COLS && rows.at(token, k, offset) ? x[offset].bits : 0;
    }
};

// Rows of x that pairs stand for: `listed` in shared memory, `repeat` pairs to a row.
struct qm_listed_rows {
    const int* listed;
    int64_t row;  // elements between rows of x
    int repeat;
    QC_DEVICE bool pieces() const { return row % 8 == 0; }
    QC_DEVICE bool at(int token, int k, int64_t& offset) const {
        offset = (int64_t)(listed[token] / repeat) * row + k;
        return true;
    }
};

// Windows of an image, whose places lie in shared memory.
struct qm_window_rows {
    const qc_window& window;
    const qc_window_place* places;
    QC_DEVICE bool pieces() const {
        return window.channels % 8 == 0 && window.column_step % 8 == 0 && window.row_step % 8 == 0 &&
               window.image_step % 8 == 0;
    }
    QC_DEVICE bool at(int token, int k, int64_t& offset) const {
        return qc_window_element(window, places[token], k, offset);
    }
};

// One block of a linear over the windows of an image; `places` has room for TOKENS of them.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES, int DEPTH, int GROUP, class Table,
          class Finish>
QC_DEVICE void qm_windows(
    const Table& table, const uint8_t* bytes, const typename W::type* image, const qc_window& window, int64_t m,
    qc_window_place* places, void* shared, const Finish& finish) {
    constexpr int COLUMNS = QM_CHUNK * WARPS_K, THREADS = 32 * WARPS_N * WARPS_K;
    uint32_t token_block, row_block;
    qm_block(token_block, row_block);
    const int64_t m0 = (int64_t)token_block * TOKENS, n0 = (int64_t)row_block * (16 * PANELS * WARPS_N);
    qc_place_windows<TOKENS>(window, m0, m, places);
    __syncthreads();
    const qm_window_rows rows = {window, places};
    const qm_scattered_x<typename W::type, TOKENS, COLUMNS, (int)W::cols, THREADS, qm_window_rows> tile(
        image, rows, m - m0);
    qm_product<W, TOKENS, WARPS_N, WARPS_K, PANELS, STAGES, DEPTH, GROUP, true, false>(
        table, bytes, tile, m0, n0, m, shared, finish);
}

// One block of a grouped linear: `live` listed pairs, times the rows of w from n0 on. `finish(sums, place, n)` stores
// one element, of the pair at that place of the list.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES, int DEPTH, class Table, class Finish>
QC_DEVICE void qm_listed(
    const Table& table, const uint8_t* bytes, const typename W::type* x, const qm_listed_rows& rows, int live,
    int64_t n0, void* shared, const Finish& finish) {
    constexpr int COLUMNS = QM_CHUNK * WARPS_K, THREADS = 32 * WARPS_N * WARPS_K;
    const qm_scattered_x<typename W::type, TOKENS, COLUMNS, (int)W::cols, THREADS, qm_listed_rows> tile(x, rows, live);
    qm_product<W, TOKENS, WARPS_N, WARPS_K, PANELS, STAGES, DEPTH, 1, false, false>(
        table, bytes, tile, 0, n0, live, shared, finish);
}
