// Linear layers on the CUDA cores, and for few rows of x.
//
// qc_linear_few: up to 8 rows of x, where the bytes of the weight set the time. A block has one panel of 16 rows of the
// weight; its warps take tiles in turn, so that the block as a whole reads its panel front to back; x lies in shared
// memory, in the order in which a lane wants it. Four tiles are under way per lane (64 bytes, 16 KiB per block of 8
// warps), the next ones asked for as soon as one is used, across the barriers of x as well. (Two where CUDA cores
// multiply more than four rows: arithmetic sets the time then, and the sums need the registers. Two as well where
// tensor cores multiply any number of rows by codes whose values global memory has. One where pieces ask for entries of
// their own, as in rows that end inside a block: sixteen pieces of them would spill.)
//
// Instructions per weight of the whole loop on tensor cores, counted in SASS (docs/hot-loops.md; a test compares):
// nf4, M = 1, sm_90a: 3.50; int4_g32, M = 1, sm_90a: 2.17; int4_g128, M = 1, sm_90a: 2.11; q4_K, M = 1, sm_90a: 3.27.
// An H200 (132 SMs, 4 instructions a clock each) could issue about 5 at 75 % of the copy bandwidth. It issues 40 % of
// that: int4 at 3.29 instructions, before its sums were scaled late, took 1.9 times the time of its bytes.
//
// A thread stores one result: a block has 16 of each row of x, which is one sector of memory, and for each a sum of as
// many parts as there are warps.
//
// qc_linear_tiled: any number of rows, a classic tiled product in fp32. Weights are decoded into shared memory, tile by
// tile; plain weights may have any strides.
#pragma once
#include "linear.cuh"

// --- x ---------------------------------------------------------------------------------------------------------------

// 16 elements of a row of x from column k on, zero past the last column, as pairs or in fp32. Rows begin anywhere, so
// that 16-byte loads are taken only where the address allows them.
template <class X> QC_DEVICE void qc_read_pairs(const X* row, int64_t k, int64_t cols, uint32_t (&pairs)[8]) {
    if (k + 16 <= cols && ((uint64_t)(row + k) & 15) == 0) {
        const uint4 low = ((const uint4*)(row + k))[0], high = ((const uint4*)(row + k))[1];
        pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
        pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t first = k + 2 * i < cols ? row[k + 2 * i].bits : 0;
            const uint32_t second = k + 2 * i + 1 < cols ? row[k + 2 * i + 1].bits : 0;
            pairs[i] = first | second << 16;
        }
    }
}
QC_DEVICE void qc_read_floats(const float* row, int64_t k, int64_t cols, float (&v)[16]) {
    if (k + 16 <= cols && ((uint64_t)(row + k) & 15) == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 four = ((const float4*)(row + k))[i];
            v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) v[i] = k + i < cols ? row[k + i] : 0.0f;
    }
}
template <class X> QC_DEVICE void qc_read_floats(const X* row, int64_t k, int64_t cols, float (&v)[16]) {
    uint32_t pairs[8];
    qc_read_pairs(row, k, cols, pairs);
#pragma unroll
    for (int i = 0; i < 8; i++) v[2 * i] = qc_low(pairs[i], X()), v[2 * i + 1] = qc_high(pairs[i], X());
}

// One piece of x into shared memory, so that what one lane multiplies lies together: columns 2t, 2t+1, 2t+8, 2t+9 at
// 4t (16-bit values as they are for `mma`, else fp32); beside tiles of plain fp32, columns t, t+4 of each 8 at 2t.
template <class X> QC_DEVICE void qc_stage_pairs(const uint32_t (&pairs)[8], X* to) {
    ((uint4*)to)[0] = make_uint4(pairs[0], pairs[4], pairs[1], pairs[5]);
    ((uint4*)to)[1] = make_uint4(pairs[2], pairs[6], pairs[3], pairs[7]);
}
template <bool InEights> QC_DEVICE void qc_stage_floats(const float (&v)[16], float* to) {
    float4* const out = (float4*)to;
    if constexpr (InEights) {
        out[0] = make_float4(v[0], v[4], v[1], v[5]), out[1] = make_float4(v[2], v[6], v[3], v[7]);
        out[2] = make_float4(v[8], v[12], v[9], v[13]), out[3] = make_float4(v[10], v[14], v[11], v[15]);
    } else {
#pragma unroll
        for (int t = 0; t < 4; t++) out[t] = make_float4(v[2 * t], v[2 * t + 1], v[2 * t + 8], v[2 * t + 9]);
    }
}

// --- up to 8 rows of x -----------------------------------------------------------------------------------------------

// How sums of ROWS rows of x are held by a lane (g, t): on CUDA cores rows g and g + 8 of the weight over the lane's
// own columns; by `mma` as its operand D, whose 8 columns are the rows of x.
template <int ROWS, bool MMA> struct qc_few_sums {
    float of[MMA ? 1 : ROWS][MMA ? 4 : 2];
    QC_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < (MMA ? 1 : ROWS); i++)
#pragma unroll
            for (int j = 0; j < (MMA ? 4 : 2); j++) of[i][j] = 0.0f;
    }
    // To out[row of x][row of the panel]. All lanes of the warp take part.
    QC_DEVICE void store(float* out, int lane) const {
        const int g = lane / 4, t = lane % 4;
        if constexpr (MMA) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (2 * t + i % 2 < ROWS) out[(2 * t + i % 2) * 16 + g + i / 2 * 8] = of[0][i];
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float sum = of[r][half];
                    sum += __shfl_xor_sync(QC_ALL_LANES, sum, 1);
                    sum += __shfl_xor_sync(QC_ALL_LANES, sum, 2);
                    if (t == 0) out[r * 16 + g + 8 * half] = sum;
                }
        }
    }
};

// The shape of a launch: rows of x per pass, warps, tiles under way per lane, tiles of x (per warp) in shared memory;
// whether integers are scaled late, for which a loop over rows of x would lack registers.
template <class W, class X, int Rows, int Warps, int Depth, int ChunkTiles, bool Mma, bool Late = false> struct qc_few {
    static constexpr int rows = Rows, warps = Warps, depth = Depth;
    static constexpr bool mma = Mma, late = Late;
    static constexpr int columns = qc_tile_of<W>::columns;
    static constexpr int padded = (int)((W::tiles * columns + 15) / 16 * 16);  // columns, to the last tile's end
    static constexpr int chunk = ChunkTiles * Warps * columns;  // columns of x in shared memory
    // Rows of 16-bit x stand 32 bytes apart modulo 128: lanes g = 0 … 3 of a half warp read different banks.
    static constexpr int pitch = chunk + (Mma && Rows > 1 ? 16 : 0);
    typedef X x_type;
    static_assert(ChunkTiles % depth == 0 && chunk % 16 == 0, "whole rings, whole pieces");
};

// What becomes of x on its way to shared memory: nothing, or the norms of a struct that linear_norm.py writes.
struct qc_as_it_is {
    static constexpr bool norms = false, adds = false, keeps = false;
};

// The total of a row: the sums of WARPS warps, added in order as qc_block_sum (rows.cuh) does.
template <int WARPS> QC_DEVICE float qc_total(const float* sums) {
    float total = sums[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) total += sums[warp];
    return total;
}

// Rounded to 16 bits and back, which fp32 is not.
QC_DEVICE void qc_round_piece(float (&)[16], float) {}
template <class X> QC_DEVICE void qc_round_piece(float (&v)[16], X tag) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t pair = qc_pack(v[2 * i], v[2 * i + 1], tag);
        v[2 * i] = qc_low(pair, tag), v[2 * i + 1] = qc_high(pair, tag);
    }
}

// 16 elements to a row from column k on, as qc_read_pairs and qc_read_floats read them.
template <class X> QC_DEVICE void qc_write_pairs(const uint32_t (&pairs)[8], X* row, int64_t k, int64_t cols) {
    if (k + 16 <= cols && ((uint64_t)(row + k) & 15) == 0) {
        qc_store_global_16(row + k, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        qc_store_global_16(row + k + 8, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (k + i < cols) row[k + i].bits = (uint16_t)(pairs[i / 2] >> 16 * (i % 2));
    }
}
template <class X> QC_DEVICE void qc_write_floats(const float (&v)[16], X* row, int64_t k, int64_t cols) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (k + i < cols) qc_store(row + k + i, v[i]);
}

// 16 elements that are rounded to the type of the row already.
QC_DEVICE void qc_write_piece(const float (&v)[16], float* row, int64_t k, int64_t cols) {
    qc_write_floats(v, row, k, cols);
}
template <class X> QC_DEVICE void qc_write_piece(const float (&v)[16], X* row, int64_t k, int64_t cols) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = qc_pack(v[2 * i], v[2 * i + 1], X());
    qc_write_pairs(pairs, row, k, cols);
}

// 16 elements of a row of x on their way to shared memory: pairs for `mma`, else fp32.
template <class S> struct qc_x_piece {
    typedef typename S::x_type X;
    uint32_t pairs[S::mma ? 8 : 1];
    float values[S::mma ? 1 : 16];

    QC_DEVICE void read(const X* row, int64_t k, int64_t cols) {
        if constexpr (S::mma) qc_read_pairs(row, k, cols, pairs);
        else qc_read_floats(row, k, cols, values);
    }
    // What norms make of these columns of row `row`, rounded to the type of x. Where a first norm is added to a
    // residual and a second one follows, their sum is written for other readers if `keeps`.
    template <class P> QC_DEVICE void prepare(const P& prologue, int row, int64_t k, int64_t cols, bool keeps) {
        if constexpr (P::norms && S::mma) {
            float v[16];
#pragma unroll
            for (int i = 0; i < 8; i++) v[2 * i] = qc_low(pairs[i], X()), v[2 * i + 1] = qc_high(pairs[i], X());
            add(prologue, row, k, cols, keeps, v);
            prologue.apply(row, k, v);
#pragma unroll
            for (int i = 0; i < 8; i++) pairs[i] = qc_pack(v[2 * i], v[2 * i + 1], X());
        } else if constexpr (P::norms) {
            add(prologue, row, k, cols, keeps, values);
            prologue.apply(row, k, values);
            qc_round_piece(values, X());
        }
    }
    template <class P>
    QC_DEVICE static void add(const P& prologue, int row, int64_t k, int64_t cols, bool keeps, float (&v)[16]) {
        if constexpr (P::adds) {
            prologue.add(row, k, v);
            qc_round_piece(v, X());
            if constexpr (P::keeps)
                if (keeps && (uint32_t)k / 16 % P::blocks == prologue.panel)
                    qc_write_piece(v, prologue.rows + row * prologue.rows_row, k, cols);
        }
    }
    // Writes what `prepare` made of row `row` for other readers, if these columns are this block's share.
    template <class P> QC_DEVICE void keep(const P& prologue, int row, int64_t k, int64_t cols) const {
        if constexpr (P::keeps && !P::adds) {
            if ((uint32_t)k / 16 % P::blocks != prologue.panel) return;
            X* const to = prologue.rows + row * prologue.rows_row;
            if constexpr (S::mma) qc_write_pairs(pairs, to, k, cols);
            else qc_write_floats(values, to, k, cols);
        }
    }
    template <class Shared> QC_DEVICE void store(Shared* to) const {
        if constexpr (S::mma) qc_stage_pairs(pairs, to);
        else qc_stage_floats<S::columns == 8>(values, to);
    }
};

// `live` rows of x from column k0 on. Tensor cores read the last of them again for those that are not there; CUDA cores
// find the first one in their place. Neither result is stored. The table is filled, if it is to be, while the first
// piece of each thread is under way.
template <class W, class S, bool Fill, class Shared, class Table, class P = qc_as_it_is>
QC_DEVICE void qc_stage_x(const typename S::x_type* x, int64_t x_row, int live, int k0, Table table, bool fill,
                          int thread, Shared* to, const P& prologue = P()) {
    constexpr int threads = 32 * S::warps;
    const int left = (S::padded - k0) / 16, pieces = left < S::chunk / 16 ? left : S::chunk / 16;
    const int rows = S::mma ? live : S::rows, count = rows * pieces;
    const auto row_of = [&](int i) QC_INLINED { return i / pieces < live ? i / pieces : 0; };
    const auto from = [&](int i) QC_INLINED { return x + row_of(i) * x_row; };
    const auto at = [&](int i) QC_INLINED { return to + i / pieces * S::pitch + i % pieces * 16; };
    int i = thread;
    if constexpr (Fill) {
        qc_x_piece<S> first;
        if (i < count) first.read(from(i), k0 + i % pieces * 16, W::cols);
        if (fill) qc_fill<W, threads>(table);
        if (i < count) {
            first.prepare(prologue, row_of(i), k0 + i % pieces * 16, W::cols, i / pieces < live);
            if (i / pieces < live) first.keep(prologue, i / pieces, k0 + i % pieces * 16, W::cols);
            first.store(at(i));
        }
        i += threads;
    }
    for (; i < count; i += threads) {
        qc_x_piece<S> piece;
        piece.read(from(i), k0 + i % pieces * 16, W::cols);
        piece.prepare(prologue, row_of(i), k0 + i % pieces * 16, W::cols, i / pieces < live);
        if (i / pieces < live) piece.keep(prologue, i / pieces, k0 + i % pieces * 16, W::cols);
        piece.store(at(i));
    }
}

// Whether codes go through a table or are floats of 8 bits. The next tile's would be decoded before this one's
// products, and their values would not fit the registers.
template <class W, bool CODED = W::packed> struct qc_decodes_early { static constexpr bool value = false; };
template <class W> struct qc_decodes_early<W, true> {
    static constexpr bool value = W::lookup || W::codes == QC_E4M3 || W::codes == QC_E5M2;
};

QC_DEVICE constexpr uint32_t qc_pair_of_ones(qc_bf16) { return 0x3f803f80u; }
QC_DEVICE constexpr uint32_t qc_pair_of_ones(qc_f16) { return 0x3c003c00u; }

// One tile of integers times rows of x: exact products, whose sums over the columns of a group are scaled. `mine` is
// the lane's part of x. Sums of x alone, which an offset multiplies, are a product with ones.
template <class W, class S, class Shared>
QC_DEVICE void qc_multiply_late(const qc_lane_tile<W>& tile, const qc_entries<W>& entries, int lane,
                                const Shared* mine, float (&sums)[4]) {
    constexpr int groups = qc_tile_of<W>::groups, per_group = qc_tile_of<W>::pieces / groups;
    constexpr uint32_t one = qc_pair_of_ones(typename W::type());
    const uint32_t ones[4] = {one, one, one, one};
    qc_row_parts<W, qc_passed_late<W>> late;
    late.begin(entries);
#pragma unroll
    for (int group = 0; group < groups; group++) {
        late.turn_to(entries, group * per_group, lane);
        const uint32_t shift[2] = {W::late_shift(late.rows[0]), W::late_shift(late.rows[1])};
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < per_group; j++) {
            const int piece = group * per_group + j;
            const uint2 two = *(const uint2*)(mine + 16 * piece);
            const uint32_t b[2] = {two.x, two.y};
            uint32_t of[qc_piece_of<W>::words], a[4];
            tile.codes.piece(piece, of);
#pragma unroll
            for (int p = 0; p < 4; p++)
                a[p] = qc_fma2(qc_piece_pair<W>(of, p, qc_pair_bias(typename W::type())), one, shift[p % 2],
                               typename W::type());
            qc_mma_16816(product, a, b, typename W::type());
            if constexpr (W::late_adds) qc_mma_16816(total, ones, b, typename W::type());
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[i] = fmaf(product[i], late.rows[i / 2].of[0], sums[i]);
            if constexpr (W::late_adds) sums[i] = fmaf(total[i], late.rows[i / 2].of[1], sums[i]);
        }
    }
}

// One tile times the rows of x that lie at `x` (the tile's first column).
template <class W, class S, class Shared, class Table>
QC_DEVICE void qc_multiply_tile(const qc_lane_tile<W>& tile, const qc_entries<W>& entries, const uint8_t* w,
                                int64_t panel, int64_t k0, int lane, int live, const Shared* x, Table table,
                                qc_few_sums<S::rows, S::mma>& sums) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (S::late) {
        static_assert(S::mma && W::late, "integers of few bits, in groups");
        qc_multiply_late<W, S>(tile, entries, lane, x + (g < live ? g : live - 1) * S::pitch + 4 * t, sums.of[0]);
        return;
    }
    qc_row_parts<W> parts;
    parts.begin(entries);
    if constexpr (S::mma) {
        // Column g of B is row g of x. Columns of D that stand for no row go nowhere.
        const Shared* const mine = x + (g < live ? g : live - 1) * S::pitch + 4 * t;
#pragma unroll
        for (int piece = 0; piece < tile.pieces; piece++) {
            const uint2 two = *(const uint2*)(mine + 16 * piece);
            const uint32_t b[2] = {two.x, two.y};
            uint32_t a[4];
            tile.fragment(w, panel, k0, lane, piece, table, entries, parts, a);
            qc_mma_16816(sums.of[0], a, b, typename W::type());
        }
    } else if constexpr (S::columns == 8) {
#pragma unroll
        for (int r = 0; r < S::rows; r++) {
            const float2 two = *(const float2*)(x + r * S::pitch + 2 * t);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float& sum = sums.of[r][half];
                sum = fmaf(__uint_as_float(tile.codes.words[half]), two.x, sum);
                sum = fmaf(__uint_as_float(tile.codes.words[2 + half]), two.y, sum);
            }
        }
    } else {
#pragma unroll
        for (int piece = 0; piece < tile.pieces; piece++) {
            float v[8];
            tile.values(w, panel, k0, lane, piece, table, entries, parts, v);
#pragma unroll
            for (int r = 0; r < S::rows; r++) {
                const float4 four = *(const float4*)(x + r * S::pitch + 16 * piece + 4 * t);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float& sum = sums.of[r][half];
                    sum = fmaf(v[2 * half], four.x, sum);
                    sum = fmaf(v[2 * half + 1], four.y, sum);
                    sum = fmaf(v[4 + 2 * half], four.z, sum);
                    sum = fmaf(v[4 + 2 * half + 1], four.w, sum);
                }
            }
        }
    }
}

// Sums of `live` (at most S::rows) rows of x with panel `panel`: partial[warp][row of x][row of the panel]. A barrier
// must follow. The table is filled on the `first` pass, while the first tiles are under way. `thread` is threadIdx.x; a
// loop over passes hides that from the compiler, which would keep where pieces of x lie from pass to pass: registers
// that the hot loop would lack. A norm's statistics are computed while the first tiles are under way.
template <class W, class S, class Shared, class Table, class P = qc_as_it_is>
QC_DEVICE void qc_linear_few(const uint8_t* w, const typename S::x_type* x, int64_t x_row, int live, int64_t panel,
                             Shared* x_tile, Table table, bool first, int thread, float* partial,
                             const P& prologue = P()) {
    constexpr int tiles = (int)W::tiles, steps = (tiles + S::warps - 1) / S::warps;
    constexpr int chunk_steps = S::chunk / (S::warps * S::columns), round = S::depth * S::warps;
    // Every warp has a tile in every step. Where it is not known, ptxas does not reorder across the conditions, which
    // keeps fewer values in registers: with more rows and tables, or on CUDA cores, these would not suffice.
    constexpr bool even = tiles > 0 && tiles % round == 0 && S::mma && (S::rows == 1 || !W::lookup);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const qc_share_place<W> mine(w, panel, lane);
    const qc_row_place<W> rows(w, panel, lane / 4);
    qc_lane_tile<W> ring[S::depth];
    qc_entries<W> row_entries;
    if constexpr (qc_entries<W>::whole_rows && tiles > 0) row_entries.load(rows, 0, lane);
#pragma unroll
    for (int s = 0; s < S::depth; s++) {
        const int index = s * S::warps + warp;
        if (even || index < tiles) ring[s].load(mine, rows, index, lane);
    }
    // No kernel writes weights, so that the first tiles and the table need not wait for the kernels before.
    constexpr bool early = QC_KERNELS_OVERLAP;
    if constexpr (early)
        if (first) qc_fill<W, 32 * S::warps>(table);
    qc_wait_for_kernels();
    if constexpr (P::norms) prologue.prepare(x, x_row, live);
    // Whatever was in `x_tile` before, all threads have passed a barrier since they read it.
    qc_stage_x<W, S, true>(x, x_row, live, 0, table, first && !early, thread, x_tile, prologue);
    __syncthreads();
    qc_few_sums<S::rows, S::mma> sums;
    sums.clear();
#pragma unroll 1
    for (int step = 0; step < steps; step += S::depth) {
        int inside = step;
        if constexpr (steps > chunk_steps) {
            inside = step % chunk_steps;
            if (inside == 0 && step > 0) {
                __syncthreads();  // the last chunk is used up
                qc_stage_x<W, S, false>(
                    x, x_row, live, step * S::warps * S::columns, table, false, thread, x_tile, prologue);
                __syncthreads();
            }
        }
#pragma unroll
        for (int s = 0; s < S::depth; s++) {
            const int index = (step + s) * S::warps + warp;
            if (even || index < tiles) {
                const Shared* const at = x_tile + ((inside + s) * S::warps + warp) * S::columns;
                const qc_entries<W>& entries = qc_entries<W>::whole_rows ? row_entries : ring[s].entries;
                qc_multiply_tile<W, S>(
                    ring[s], entries, w, panel, (int64_t)index * S::columns, lane, live, at, table, sums);
            }
            QC_KEEP_ORDER();  // for sm_100 the next tile's lookups would be hoisted until registers spill
            if constexpr (even && qc_decodes_early<W>::value) __syncwarp();  // the same for ptxas
            if (even ? step + S::depth < steps : index + round < tiles) ring[s].load(mine, rows, index + round, lane);
        }
    }
    sums.store(partial + warp * S::rows * 16, lane);
}

// --- any number of rows of x -----------------------------------------------------------------------------------------

// A block of 256 threads makes TN columns by TM rows of the result, in steps of 32 columns of x and w. Shared memory
// holds [32][pitch] of both, columns of x first, so that a thread's inputs are one vector; the pitch of 4 modulo 32
// keeps the stores of a decoded piece (rows g apart, columns 2t apart) in banks of their own.
constexpr int QC_TILED_STEP = 32;

template <int N> QC_DEVICE void qc_read_vector(const float* from, float (&v)[N]) {
    if constexpr (N == 4) {
        const float4 four = *(const float4*)from;
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    } else {
        const float2 two = *(const float2*)from;
        v[0] = two.x, v[1] = two.y;
    }
}

// Rows n0 … of a weight in cuda_t16_v1, columns k0 … k0 + 31, as [column][row]. Rows past the last panel stay what they
// are: only results that nobody stores come from them. Columns past the last meet zeros of x, but must be finite.
template <class W, int TN, class Table>
QC_DEVICE void qc_decode_step(const uint8_t* w, int64_t n0, int64_t k0, Table table, float* to) {
    constexpr int columns = qc_tile_of<W>::columns, pitch = TN + 4;
    constexpr int units = TN / 16 * (columns >= 16 ? 2 : 4);  // pieces, or tiles of 8 columns
    for (int i = threadIdx.x; i < units * 32; i += 256) {
        const int lane = i % 32, unit = i / 32, g = lane / 4, t = lane % 4;
        const int row = unit % (TN / 16) * 16, column = unit / (TN / 16) * (columns >= 16 ? 16 : 8);
        const int64_t panel = n0 / 16 + unit % (TN / 16), k = k0 + column, tile = k / columns;
        const bool there = panel * 16 < W::rows && tile < W::tiles;
        if constexpr (columns >= 16) {
            float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (there) qc_read_piece<W>(w, panel, k, lane, table, v);
#pragma unroll
            for (int j = 0; j < 8; j++)
                to[(column + 2 * t + 8 * (j / 4) + j % 2) * pitch + row + g + 8 * (j / 2 % 2)] = v[j];
        } else {
            qc_lane_codes<W> mine;
            mine.clear();
            if (there) mine.load(w, panel * W::tiles * 32 + lane, (qc_tile_index<W>)tile);
#pragma unroll
            for (int p = 0; p < 4; p++)
                to[(column + t + 4 * (p / 2)) * pitch + row + g + 8 * (p % 2)] = __uint_as_float(mine.words[p]);
        }
    }
}

// Rows r0 … of a plain matrix, columns k0 … k0 + 31, as [column][row], zero outside (rows x cols).
template <int ROWS, class T>
QC_DEVICE void qc_gather_step(const T* from, int64_t down, int64_t right, int64_t rows, int64_t cols, int64_t r0,
                              int64_t k0, float* to) {
    // Neighbouring threads take neighbouring rows: their stores meet no bank twice.
    for (int i = threadIdx.x; i < ROWS * QC_TILED_STEP / 4; i += 256) {
        const int row = i % ROWS, column = i / ROWS * 4;
        const T* const at = from + (r0 + row) * down + (k0 + column) * right;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool there = r0 + row < rows && k0 + column + j < cols;
            to[(column + j) * (ROWS + 4) + row] = there ? qc_load(at + j * right) : 0.0f;
        }
    }
}

// sums[i / RN][i % RN], by constants alone: an index in a register would put the array into local memory. It lets
// results be finished in a loop, whose epilogue stands in the code once.
template <int RM, int RN> QC_DEVICE float qc_pick(const float (&sums)[RM][RN], int i) {
    float picked = 0.0f;
#pragma unroll
    for (int each = 0; each < RM * RN; each++)
        if (each == i) picked = sums[each / RN][each % RN];
    return picked;
}

// Row i of sums, by constants alone.
template <int RM, int RN> QC_DEVICE void qc_pick_row(const float (&sums)[RM][RN], int i, float (&row)[RN]) {
#pragma unroll
    for (int j = 0; j < RN; j++) {
        row[j] = sums[0][j];
#pragma unroll
        for (int each = 1; each < RM; each++)
            if (each == i) row[j] = sums[each][j];
    }
}

// sums[i][j]: row threadIdx.x / 16 * (TM / 16) + i of what `stage_x(k0, to)` fills, column threadIdx.x % 16 * (TN / 16)
// + j of what `stage_w(k0, to)` fills, over all columns of both.
template <int TN, int TM, class StageX, class StageW>
QC_DEVICE void qc_tiled_sums(int64_t cols, float* x_step, float* w_step, const StageX& stage_x, const StageW& stage_w,
                             float (&sums)[TM / 16][TN / 16]) {
    constexpr int RM = TM / 16, RN = TN / 16;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < RM; i++)
#pragma unroll
        for (int j = 0; j < RN; j++) sums[i][j] = 0.0f;
    for (int64_t k0 = 0; k0 < cols; k0 += QC_TILED_STEP) {
        __syncthreads();  // the last step is used up
        stage_x(k0, x_step);
        stage_w(k0, w_step);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < QC_TILED_STEP; k++) {
            float a[RM], b[RN];
            qc_read_vector<RM>(x_step + k * (TM + 4) + ty * RM, a);
            qc_read_vector<RN>(w_step + k * (TN + 4) + tx * RN, b);
#pragma unroll
            for (int i = 0; i < RM; i++)
#pragma unroll
                for (int j = 0; j < RN; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
    }
}

// The same of rows of x from m0 on; the columns are rows of w from n0 on.
template <int TN, int TM, class X, class Stage>
QC_DEVICE void qc_linear_tiled(const X* x, int64_t x_row, int64_t m, int64_t cols, int64_t m0, float* x_step,
                               float* w_step, const Stage& stage_w, float (&sums)[TM / 16][TN / 16]) {
    const auto stage_x = [&](int64_t k0, float* to) { qc_gather_step<TM>(x, x_row, 1, m, cols, m0, k0, to); };
    qc_tiled_sums<TN, TM>(cols, x_step, w_step, stage_x, stage_w, sums);
}
