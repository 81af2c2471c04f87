// Dequantising matrix products of many rows of x on Hopper's tensor cores (`wgmma`): linear_mma.cuh's product, by
// warpgroups.
//
//     block      GROUPS_N x GROUPS_K warpgroups; TOKENS rows of x by 64 * GROUPS_N rows of w
//     chunk      QM_CHUNK columns; warpgroup (n, k) has chunks k + i * GROUPS_K
//     x ring     STAGES tiles of TOKENS rows by QM_CHUNK * GROUPS_K columns, swizzled as products read them
//     weights    a warp has one panel of 16 rows, DEPTH - 1 chunks ahead in registers
//
// The weight is operand A of the product, from registers: a lane's 16 bytes of cuda_t16_v1 are its fragments, as they
// are for `mma`. While a product of 16 columns runs, the warps decode the fragment of the next 16 into other registers.
// x is operand B, in shared memory: once it is there, threads read it only to normalise it.
//
// At the barrier between two chunks each warpgroup has up to QW_LAG products under way, which read the tile of the
// chunk before. So the tile that is filled behind that barrier is the one before that: a ring of STAGES tiles has
// STAGES - 2 on their way.
//
// Instructions per weight of the whole loop, counted in SASS (docs/hot-loops.md; a test compares), for 256 rows of x:
// nf4, M = 512, sm_90a: 7.09; int4_g128, M = 512, sm_90a: 6.68.
//
// The GROUPS_K partial sums are added in the order of k through shared memory: results do not depend on scheduling.
#pragma once
#include "linear_mma.cuh"
#include "linear_statistics.cuh"

enum {
    QW_LAG = 3,        // products that may run on while the next fragment is decoded
    QW_FRAGMENTS = 4,  // in registers: at least QW_LAG + 1, and a divisor of the four of a chunk
};

// Where the pieces of a tile of x stand, in elements: for each 64 columns, rows of 128 bytes one after another. Piece p
// of row r has the place of piece p ^ r % 8.
template <int TOKENS> struct qw_swizzled {
    static constexpr int STRIDE = 64, ROWS_ALIKE = 8;
    static constexpr bool ALL_READ = true;
    static QC_DEVICE int of(int row, int piece) {
        return piece / 8 * (TOKENS * 64) + row * 64 + ((piece ^ row) & 7) * 8;
    }
};

// 1024 bytes of the ring, at a multiple of 1024.
struct alignas(1024) qw_aligned {
    unsigned char bytes[1024];
};

// Bytes of shared memory: the ring of x, and afterwards the tile of sums, PASS tokens at a time.
template <int TOKENS, int GROUPS_N, int GROUPS_K, int STAGES> struct qw_shared {
    static constexpr int RING = STAGES * TOKENS * QM_CHUNK * GROUPS_K * 2;
    static constexpr int PASS = TOKENS < 128 ? TOKENS : 128;
    static constexpr int SUMS = GROUPS_K * PASS * (64 * GROUPS_N + QM_SUM_PAD) * 4;
    static constexpr int BYTES = RING > SUMS ? RING : SUMS;
};

// As qm_product, by warpgroups; n0 is a multiple of the rows of w that a block takes.
template <class W, int TOKENS, int GROUPS_N, int GROUPS_K, int STAGES, int DEPTH, int GROUP, bool PAIRS, class Table,
          class Tile, class Finish>
QC_DEVICE void qw_product(
    const Table& table, const uint8_t* bytes, const Tile& tile, int64_t m0, int64_t n0, int64_t m, void* shared,
    const Finish& finish) {
    typedef typename W::type T;
    constexpr int COLUMNS = QM_CHUNK * GROUPS_K, CHUNKS = (int)((W::cols + QM_CHUNK - 1) / QM_CHUNK);
    constexpr int STEPS = (CHUNKS + GROUPS_K - 1) / GROUPS_K, TILE = TOKENS * COLUMNS;
    constexpr bool ALL_THERE = (W::rows + 15) / 16 % (4 * GROUPS_N) == 0;
    constexpr bool RAGGED = W::cols % COLUMNS != 0;  // the last step has columns that do not exist
    typedef qm_weight<W, 1, ALL_THERE> Weight;

    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, group = warp / 4;
    const int warp_n = group / GROUPS_K * 4 + warp % 4, group_k = group % GROUPS_K;
    const Weight weight(bytes, n0 / 16 + warp_n, lane);
    T* const ring = (T*)shared;
    const qc_place place = qc_fixed(shared);

    float sums[1][TOKENS / 8][4];
#pragma unroll
    for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[0][j][e] = 0.0f;

    // The chunk of step `step`; of the last one where there is none. A load neither depends on a condition nor comes
    // while something still reads what was there: else the compiler would move what arrives from register to register,
    // and wait for it.
    const auto load = [&](typename Weight::chunk& chunk, int step) QC_INLINED {
        const int index = step * GROUPS_K + group_k;
        if constexpr (CHUNKS > 0) weight.load(chunk, index < CHUNKS ? index : CHUNKS - 1);
    };
    typename Weight::chunk ahead[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH - 1; d++) load(ahead[d], d);
#pragma unroll
    for (int s = 0; s < STAGES - 2; s++) {
        if (s < STEPS) tile.copy(ring + s * TILE, place + s * TILE * 2, s * COLUMNS);
        qc_cp_async_commit();
    }
    if constexpr (Tile::PREPARES) tile.begin();

    qc_fill<W, 128 * GROUPS_N * GROUPS_K>(table);
    // Words that are not decoded have to be copied all the same: else the next chunk's are loaded into registers that a
    // product still reads, and the compiler waits for each product (ptxas: C7513). It drops copies, but does not know
    // that this is zero.
    const uint32_t zero = blockIdx.z;
    typename Weight::made made;
    typename Weight::state state;
    uint32_t words[4 * Weight::WORDS], a[QW_FRAGMENTS][4];
    const auto turn_to = [&](const typename Weight::chunk& chunk) QC_INLINED {
        if constexpr (Weight::CODED) weight.make(chunk, made);
        weight.flatten(chunk, 0, words);
        if constexpr (Weight::CODED && !Weight::MANY) weight.turn_to_chunk(made, 0, state);
    };
    const auto decode = [&](int index, int j, uint32_t (&fragment)[4]) QC_INLINED {
        if constexpr (Weight::MANY) weight.turn_to_piece(made, 0, j, index, state);
        weight.fragment(table, words, 0, j, index, state, fragment);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            if constexpr (!Weight::CODED) fragment[p] ^= zero;
            if (RAGGED && index * QM_CHUNK + 16 * j >= W::cols) fragment[p] = 0;
        }
    };
    __syncthreads();  // the table is filled
    if constexpr (CHUNKS > 0) {
        turn_to(ahead[0]);
        decode(group_k, 0, a[0]);
    }

    int slot = 0;  // step % STAGES
#pragma unroll 1
    for (int base = 0; base < STEPS; base += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = base + d, index = step * GROUPS_K + group_k;
            if (STEPS % DEPTH == 0 || step < STEPS) {
                qc_cp_async_wait<STAGES - 3>();
                if constexpr (Tile::PREPARES) tile.prepare(ring + slot * TILE, step * COLUMNS);
                qc_fence_async();
                __syncthreads();  // tile `step` is there, and no product reads tile `step - 2` any more
                const qc_place b = place + (slot * TILE + group_k * (TOKENS * QM_CHUNK)) * 2;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    qc_wgmma_fence();
                    qc_wgmma_16(sums[0], a[j % QW_FRAGMENTS], b + 32 * j, T());
                    qc_wgmma_commit();
                    if (j == 0) {
                        const int refill = slot < 2 ? slot + STAGES - 2 : slot - 2, coming = step + STAGES - 2;
                        if (coming < STEPS)
                            tile.copy(ring + refill * TILE, place + refill * TILE * 2, coming * COLUMNS);
                        qc_cp_async_commit();
                        load(ahead[(d + DEPTH - 1) % DEPTH], step + DEPTH - 1);
                    }
                    qc_wgmma_wait<QW_LAG>();
                    if (j == 3) turn_to(ahead[(d + 1) % DEPTH]);
                    decode(index + j / 3 * GROUPS_K, (j + 1) % 4, a[(j + 1) % QW_FRAGMENTS]);
                }
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
        }
    }
    qc_wgmma_wait<0>();
    qm_finish<W, TOKENS, 4 * GROUPS_N, GROUPS_K, 1, qw_shared<TOKENS, GROUPS_N, GROUPS_K, STAGES>::PASS, GROUP, PAIRS>(
        sums, warp_n, group_k, (float*)shared, m0, n0, m, tile.used, finish);
}

// As qm_block, where each row of the grid stands for HALVES rows of blocks: a kernel for any number of rows of x has
// tiles of several sizes, and one grid.
template <int HALVES> QC_DEVICE void qw_block(uint32_t& token_block, uint32_t& row_block) {
    qm_block(token_block, row_block);
    row_block = row_block * HALVES + token_block % HALVES, token_block /= HALVES;
}

// The ring of x, whose rows a Norm normalises if there is one.
template <class T, int TOKENS, int COLUMNS, int COLS, int THREADS, class... Norm> struct qw_x {
    typedef qm_normed_x<T, TOKENS, COLUMNS, COLS, THREADS, Norm..., qw_swizzled<TOKENS>> type;
};
template <class T, int TOKENS, int COLUMNS, int COLS, int THREADS> struct qw_x<T, TOKENS, COLUMNS, COLS, THREADS> {
    typedef qm_x<T, TOKENS, COLUMNS, COLS, THREADS, qw_swizzled<TOKENS>> type;
};

// One block of a linear: rows of x `x_row` elements apart, and a norm of them or none.
template <class W, int TOKENS, int GROUPS_N, int GROUPS_K, int STAGES, int DEPTH, int HALVES, int GROUP, bool PAIRS,
          class Table, class Finish, class... Norm>
QC_DEVICE void qw_linear(
    const Table& table, const uint8_t* bytes, const typename W::type* x, int64_t x_row, int64_t m, void* shared,
    const Finish& finish, const Norm&... norm) {
    constexpr int COLUMNS = QM_CHUNK * GROUPS_K, THREADS = 128 * GROUPS_N * GROUPS_K;
    uint32_t token_block, row_block;
    qw_block<HALVES>(token_block, row_block);
    const int64_t m0 = (int64_t)token_block * TOKENS, n0 = (int64_t)row_block * (64 * GROUPS_N);
    if (m0 >= m || n0 >= W::rows) return;  // a grid for any number of rows has too many blocks for some
    const typename qw_x<typename W::type, TOKENS, COLUMNS, (int)W::cols, THREADS, Norm...>::type tile(
        x, x_row, m0, m, norm...);
    qw_product<W, TOKENS, GROUPS_N, GROUPS_K, STAGES, DEPTH, GROUP, PAIRS>(
        table, bytes, tile, m0, n0, m, shared, finish);
}
