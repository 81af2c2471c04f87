// Dequantising matrix products on tensor cores: one template for every format, for 9 to 64 rows of x and for many.
//
//     out[m, n] = finish(sum_k x[m, k] * decode(w)[n, k])        fp32 accumulation
//
// The weight is the A operand of `mma` (16 rows of w are its 16 rows), x is the B operand (8 rows of x, called tokens
// here, are its 8 columns). Weights lie in cuda_t16_v1, so that the 16 bytes that a lane loads are its fragments: codes
// become bf16 or f16 in registers and never pass through shared memory. x goes through a ring of shared tiles that
// cp.async fills; `ldmatrix` turns them into fragments.
//
//     block      WARPS_N x WARPS_K warps; TOKENS rows of x by 16 * PANELS * WARPS_N rows of w
//     chunk      QM_CHUNK columns, which a warp multiplies between two barriers; warp (n, k) has chunks k + i * WARPS_K
//     x ring     STAGES tiles of TOKENS rows by QM_CHUNK * WARPS_K columns
//     weights    DEPTH chunks ahead in registers: 16 * PANELS * DEPTH bytes per lane under way for 4-bit codes
//
// Instructions per weight of the whole loop, counted in SASS (docs/hot-loops.md; a test compares):
// nf4, M = 16, sm_90a: 4.48; nf4, M = 64, sm_90a: 6.04; int4_g128, M = 16, sm_90a: 4.09; int4_g128, M = 512,
// sm_80: 6.45. For many rows of x on sm_90a see linear_wgmma.cuh.
//
// The WARPS_K partial sums are added in the order of k through shared memory: results do not depend on scheduling.
//
// The weight is described by a struct W that the emitter writes from the format's declaration (linear.cuh). Of the
// groups of columns that share entries this engine takes those of 16, of 32, and of multiples of 64 columns, or of
// whole rows; of a stream those of powers of two from 32 on. linear_fma.cuh takes the others.
#pragma once
#include "linear.cuh"

enum {
    QM_CHUNK = 64,  // columns of a 4-bit tile: 16 bytes per lane, four fragments
    QM_PAD = 8,     // elements between rows of a shared x tile: 16 bytes make the row stride an odd multiple of 16, and
                    // eight rows of an ldmatrix fall into different banks
    QM_SUM_PAD = 4,  // floats between rows of the tile of sums: lanes (g, t) write rows 2t, columns g without conflict
    QM_PASS = 32,    // tokens whose sums pass through shared memory at a time
    QM_GROUP = 8,    // token blocks that follow one another before the next rows of w: they share x and w in L2
};

// Whether parts of groups reach the lanes of a quad piece by piece: where a chunk meets more than two groups of a row.
template <class W> struct qm_groups {
    static constexpr bool coded = W::packed, flat = coded && W::straddles;
    static constexpr bool single = !coded || (!flat && (W::covers >= W::cols || W::covers % QM_CHUNK == 0));
    static constexpr bool many = !single && W::covers < (flat ? QM_CHUNK : QM_CHUNK / 2);
    // Groups that a chunk meets at a time: those of its halves, or those before and after a border.
    static constexpr int slots = single || (many && !flat) ? 1 : 2;
    static constexpr int held = many ? 2 : 1;  // entries that a lane loads per panel and chunk
    static_assert(!coded || single || (flat ? W::covers >= 32 && (W::covers & (W::covers - 1)) == 0
                                            : W::covers == 32 || W::covers == 16), "groups");
};

// Whether decoding takes few registers: not 16-bit values, which are not decoded, nor floats of 8 bits.
template <class W, bool CODED> struct qm_light { static constexpr bool value = false; };
template <class W> struct qm_light<W, true> {
    static constexpr bool value = W::codes == QC_COUNTS || W::codes == QC_SIXTEEN;
};

// One warp's share of a weight: PANELS panels of 16 rows, one chunk of columns at a time. ALL_THERE: none of a block's
// panels lies behind the last one.
template <class W, int PANELS, bool ALL_THERE> struct qm_weight {
    typedef qm_groups<W> groups;
    typedef qc_passed<W> passed;
    typedef qc_tile_index<W> index_type;
    static constexpr bool CODED = W::packed, FLAT = groups::flat, MANY = groups::many, NARROW = CODED && W::bits < 8;
    static constexpr int WORDS = qc_piece_of<W>::words, TILES_OF_CHUNK = NARROW ? 1 : W::bits / 4;
    static constexpr int TILES = (int)W::tiles, COLS = (int)W::cols, SLOTS = groups::slots;
    static constexpr bool LIGHT = qm_light<W, CODED>::value;
    static constexpr int ALL_PANELS = (int)((W::rows + 15) / 16);
    typedef typename W::mma_parts state[2][SLOTS];  // of rows g and g + 8

    struct chunk {
        qc_lane_codes<W> codes[PANELS][TILES_OF_CHUNK];
        // A lane loads one of its quad's four: of row half t % 2, slot t / 2. MANY: group t of both rows.
        typename W::entry entry[PANELS][groups::held];
    };
    struct made {
        typename passed::made of[PANELS][groups::held];
    };

    int lane, panels;     // of this warp that exist: PANELS, fewer at the end of w
    const uint8_t* w;
    int64_t panel;        // the first one
    qc_share_place<W> mine;
    qc_row_place<W> entries;  // of row g, or where a lane has a row's entries to itself, of that one

    QC_DEVICE qm_weight(const uint8_t* w, int64_t panel, int lane)
        : lane(lane), w(w), panel(panel), mine(w, panel, lane),
          entries(w, panel, lane / 4 + (MANY ? 0 : lane % 2 * 8)) {
        const int64_t left = ALL_PANELS - panel;
        panels = left < PANELS ? (int)left : PANELS;
    }

    QC_DEVICE void load(chunk& c, int index) const {
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const bool there = ALL_THERE || i < panels;
#pragma unroll
            for (int v = 0; v < TILES_OF_CHUNK; v++) {
                const bool inside = TILES % TILES_OF_CHUNK == 0 || index * TILES_OF_CHUNK + v < TILES;
                if (there && inside)
                    c.codes[i][v].load(
                        mine.w, mine.share + (int64_t)i * TILES * 32, (index_type)index * TILES_OF_CHUNK + v);
                else c.codes[i][v].clear();
            }
            if constexpr (CODED) {
#pragma unroll
                for (int h = 0; h < groups::held; h++) {
                    if (there) c.entry[i][h] = entry_of(i, index, h, MANY ? lane % 4 : lane / 2 % 2);
                    else c.entry[i][h] = typename W::entry();
                }
            }
        }
    }

    // What the given slot of a chunk needs, for a row of panel `i`: of half t % 2, or MANY: of half `held`. What lies
    // behind the last column is padding.
    QC_DEVICE typename W::entry entry_of(int i, int index, int held, int slot) const {
        const int down = 16 * i + 8 * held;
        if constexpr (FLAT) {
            const int64_t row = panel * 16 + lane / 4 + (MANY ? 0 : lane % 2 * 8) + down;
            return W::load(w, qc_min(row * COLS + index * QM_CHUNK + slot * W::covers, W::rows * W::cols - 1));
        } else {
            const int offset = groups::single ? 0 : slot * (int)W::covers;
            return entries.template load_panel<QM_CHUNK>(i, 8 * held, index, offset);
        }
    }

    QC_DEVICE void make(const chunk& c, made& m) const {
#pragma unroll
        for (int i = 0; i < PANELS; i++)
#pragma unroll
            for (int h = 0; h < groups::held; h++) m.of[i][h] = passed::make(c.entry[i][h]);
    }

    // The state of panel `i` for a whole chunk.
    QC_DEVICE void turn_to_chunk(const made& m, int i, state& s) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++)
                s[half][slot] = passed::from_lane(m.of[i][0], (lane & 28) + half + 2 * slot);
    }

    // MANY: the state of panel `i` for piece `j`.
    QC_DEVICE void turn_to_piece(const made& m, int i, int j, int index, state& s) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int slot = FLAT ? (begins_at(i, half, index) + 16 * j) / (int)W::covers : j;
#pragma unroll
            for (int more = 0; more < SLOTS; more++)
                s[half][more] = passed::from_lane(m.of[i][half], (lane & 28) + slot + more);
        }
    }

    // FLAT: where in its group a row's first element of this chunk stands.
    QC_DEVICE int begins_at(int i, int half, int index) const {
        const uint32_t row = (uint32_t)panel * 16 + (uint32_t)(i * 16 + lane / 4 + half * 8);
        // a power of two
        return (int)(row * (uint32_t)COLS + (uint32_t)(index * QM_CHUNK) & (uint32_t)(W::covers - 1));
    }
    // Columns of the chunk that lie before the border behind which state[…][1] holds.
    QC_DEVICE int before_border(int i, int half, int j, int index) const {
        const int begin = begins_at(i, half, index), covers = (int)W::covers;
        return (MANY ? ((begin + 16 * j) / covers + 1) * covers : covers) - begin;
    }

    // The words of panel `i`, WORDS for each piece.
    static QC_DEVICE void flatten(const chunk& c, int i, uint32_t (&words)[4 * WORDS]) {
        constexpr int per_tile = 4 / TILES_OF_CHUNK;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t of[WORDS];
            c.codes[i][j / per_tile].piece(j % per_tile, of);
#pragma unroll
            for (int q = 0; q < WORDS; q++) words[j * WORDS + q] = of[q];
        }
    }

    // Fragment A of piece `j` (columns 16 j to 16 j + 15) of panel `i`, whose words stand first in `words`; they are
    // dropped, so that a loop over pieces need not be unrolled to keep them in registers.
    template <class Table>
    QC_DEVICE void fragment(const Table& table, uint32_t (&words)[4 * WORDS], int i, int j, int index,
                            const state& s, uint32_t (&a)[4]) const {
        uint32_t of[WORDS];
#pragma unroll
        for (int q = 0; q < WORDS; q++) of[q] = words[q];
        if constexpr (!CODED) {
#pragma unroll
            for (int p = 0; p < 4; p++) a[p] = of[p];
        } else if constexpr (FLAT) {
            const typename W::mma_parts here[2] = {s[0][0], s[1][0]}, next[2] = {s[0][1], s[1][1]};
            const int border[2] = {before_border(i, 0, j, index), before_border(i, 1, j, index)};
            float v[8];
            qc_piece_codes<W>(of, table, v);
            qc_apply_bordered<W>(here, next, border, 16 * j, lane, v);
            qc_pack_piece(v, a, typename W::type());
        } else {
            typename W::mma_parts rows[2] = {s[0][0], s[1][0]};
            if constexpr (SLOTS == 2)
                if (j >= 2) rows[0] = s[0][1], rows[1] = s[1][1];
            qc_piece_fragment<W>(of, table, rows, a);
        }
        // what zero codes stand for is no product's business
        if constexpr (CODED && W::cols % 16 != 0) qc_clear_outside<W>(index * QM_CHUNK + 16 * j, lane, a);
#pragma unroll
        for (int q = 0; q < 3 * WORDS; q++) words[q] = words[q + WORDS];
    }
};

// Where the pieces of a tile of x stand, in elements: rows one after another, with a gap between them.
template <int COLUMNS> struct qm_padded {
    static constexpr int STRIDE = COLUMNS + QM_PAD;
    static constexpr int ROWS_ALIKE = 1;      // rows r and r + ROWS_ALIKE are laid out alike, STRIDE to a row
    static constexpr bool ALL_READ = false;   // rows that do not exist are read, too
    static QC_DEVICE int of(int row, int piece) { return row * STRIDE + piece * 8; }
};

// Copies of x into the ring: TOKENS rows of x from `first` on, zero past m; COLUMNS columns from k0 on, zero past COLS.
// A thread copies the same 16-byte piece of every ROW_STEPth row.
// Place says where a tile's pieces stand.
template <class T, int TOKENS, int COLUMNS, int COLS, int THREADS, class Place = qm_padded<COLUMNS>> struct qm_x {
    static constexpr int STRIDE = Place::STRIDE, PIECES = COLUMNS / 8, ROW_STEP = THREADS / PIECES;
    static constexpr bool PREPARES = false;  // qm_normed_x does (linear_statistics.cuh)
    static_assert(THREADS % PIECES == 0 && TOKENS % ROW_STEP == 0 && ROW_STEP % Place::ROWS_ALIKE == 0,
                  "whole rows of pieces per step");

    const T* from;   // this thread's first piece
    int64_t step;    // elements between its rows: ROW_STEP rows of x
    int token;       // its first row
    int there;       // rows of the tile that exist
    int used;        // rows that are multiplied: of 64 only 16 or 32 where m is small, else all
    bool aligned;    // pieces start at multiples of 16 bytes

    QC_DEVICE qm_x(const T* x, int64_t row, int64_t first, int64_t m) {
        token = (int)threadIdx.x / PIECES;
        from = x + (first + token) * row + (int)threadIdx.x % PIECES * 8;
        step = row * ROW_STEP;
        there = m - first < TOKENS ? (int)(m - first) : TOKENS;
        used = TOKENS != 64 || Place::ALL_READ || there > 32 ? TOKENS : there > 16 ? 32 : 16;
        aligned = ((uint64_t)x & 15) == 0 && row % 8 == 0;
    }

    // To the tile at `tile`, whose place is `place`.
    QC_DEVICE void copy(T* tile, qc_place place, int k0) const {
        const int piece = (int)threadIdx.x % PIECES, k = k0 + piece * 8, first = Place::of(token, piece);
        const T* source = from + k0;
        if (aligned && (COLS % 8 == 0 || k + 8 <= COLS || k >= COLS)) {
            const qc_place to = place + first * 2;
            const bool column = COLS % COLUMNS == 0 || k < COLS;
            if (there == TOKENS) {
#pragma unroll
                for (int i = 0; i < TOKENS; i += ROW_STEP) {
                    if constexpr (COLS % COLUMNS == 0) qc_cp_async_16(to + i * STRIDE * 2, source);
                    else qc_cp_async_16_or_zero(to + i * STRIDE * 2, column ? source : from, column);
                    source += step;
                }
            } else {
#pragma unroll
                for (int i = 0; i < TOKENS; i += ROW_STEP) {
                    if (token + i < used) {
                        const bool inside = column && token + i < there;
                        qc_cp_async_16_or_zero(to + i * STRIDE * 2, inside ? source : from, inside);
                    }
                    source += step;
                }
            }
        } else {  // element by element: x is a view that starts or steps off 16 bytes, or its rows end inside a piece
#pragma unroll 1
            for (int i = 0; token + i < used; i += ROW_STEP) {
                uint32_t pairs[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const bool inside = token + i < there;
                    const uint32_t low = inside && k + 2 * e < COLS ? source[2 * e].bits : 0;
                    const uint32_t high = inside && k + 2 * e + 1 < COLS ? source[2 * e + 1].bits : 0;
                    pairs[e] = high << 16 | low;
                }
                *(uint4*)(tile + first + i * STRIDE) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                source += step;
            }
        }
    }
};

// The block of the output, of `tokens` by `rows` of them, that has a number: QM_GROUP token blocks by all row blocks at
// a time, so that blocks that run together read few rows of x and few of w.
QC_DEVICE void qm_numbered(uint32_t number, uint32_t tokens, uint32_t rows, uint32_t& token_block,
                           uint32_t& row_block) {
    const uint32_t per_group = QM_GROUP * rows, group = number / per_group, within = number - group * per_group;
    const uint32_t left = tokens - group * QM_GROUP, height = left < QM_GROUP ? left : QM_GROUP;
    row_block = within / height;
    token_block = group * QM_GROUP + (within - row_block * height);
}

// Which block of the output a block of the grid (token blocks, row blocks) computes. Grids of 2^31 blocks and more go
// as they are numbered, so that 32-bit divisions do.
QC_DEVICE void qm_block(uint32_t& token_block, uint32_t& row_block) {
    token_block = blockIdx.x, row_block = blockIdx.y;
    if (gridDim.x == 1 || (uint64_t)gridDim.x * gridDim.y >= 1u << 31) return;
    qm_numbered(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x, gridDim.y, token_block, row_block);
}

// One piece: the first 16 * COUNT tokens of the tile at `rows` (this lane's row for ldmatrix), times every panel.
template <int COUNT, int STRIDE, int PANELS, int TILES, class T>
QC_DEVICE void qm_multiply(float (&sums)[PANELS][TILES][4], const uint32_t (&a)[PANELS][4], qc_place rows, T tag) {
#pragma unroll
    for (int t = 0; t < COUNT && 2 * t < TILES; t++) {
        uint32_t b[4];
        qc_ldmatrix_x4(b, rows + 16 * t * STRIDE * 2);
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            qc_mma_16816(sums[i][2 * t], a[i], first, tag);
            qc_mma_16816(sums[i][2 * t + 1], a[i], second, tag);
        }
    }
}

// Bytes of shared memory: the ring of x, and afterwards the tile of sums.
template <int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES> struct qm_shared {
    static constexpr int RING = STAGES * TOKENS * (QM_CHUNK * WARPS_K + QM_PAD) * 2;
    static constexpr int PASS = TOKENS < QM_PASS ? TOKENS : QM_PASS;
    static constexpr int SUMS = WARPS_K * PASS * (16 * PANELS * WARPS_N + QM_SUM_PAD) * 4;
    static constexpr int BYTES = RING > SUMS ? RING : SUMS;
};

// GROUP floats from a multiple of as many on, or one.
template <int GROUP> QC_DEVICE void qm_read(const float* from, float (&v)[GROUP]) {
    if constexpr (GROUP == 1) {
        v[0] = *from;
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; i += 4) {
            const float4 four = *(const float4*)(from + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
    }
}

// The sums of WARPS_K parts that are STEP floats apart, in order.
template <int GROUP, int WARPS_K, int STEP> QC_DEVICE void qm_total(const float* first, float (&total)[GROUP]) {
    qm_read<GROUP>(first, total);
#pragma unroll
    for (int k = 1; k < WARPS_K; k++) {
        float more[GROUP];
        qm_read<GROUP>(first + k * STEP, more);
#pragma unroll
        for (int e = 0; e < GROUP; e++) total[e] += more[e];
    }
}

// The block's sums to shared memory, PASS tokens at a time, [warp_k][token][row of w]; then one thread per GROUP
// elements along a row of the result, so that `finish` reads and writes along rows. Parts are added in the order of
// warp_k. Where PAIRS, each panel has 8 rows of either half of w, and an element has a sum of both: `finish` takes two
// arrays, and n counts pairs.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int PASS, int GROUP, bool PAIRS, class Finish>
QC_DEVICE void qm_finish(
    const float (&sums)[PANELS][TOKENS / 8][4], int warp_n, int warp_k, float* part, int64_t m0, int64_t n0, int64_t m,
    int used, const Finish& finish) {
    constexpr int BLOCK_ROWS = 16 * PANELS * WARPS_N;
    constexpr int STRIDE = BLOCK_ROWS + QM_SUM_PAD, THREADS = 32 * WARPS_N * WARPS_K;
    constexpr int GROUPS = BLOCK_ROWS / GROUP / (PAIRS ? 2 : 1);
    static_assert(!PAIRS || 8 % GROUP == 0, "groups of pairs lie in one panel");
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int pass = 0; pass < TOKENS; pass += PASS) {
        __syncthreads();  // the ring, or the sums of the pass before, have been read
        if (pass < used) {
#pragma unroll
            for (int i = 0; i < PANELS; i++)
#pragma unroll
                for (int j = 0; j < PASS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int token = 8 * j + 2 * (lane % 4) + e % 2;
                        const int row = (warp_n * PANELS + i) * 16 + lane / 4 + e / 2 * 8;
                        part[(warp_k * PASS + token) * STRIDE + row] = sums[i][pass / 8 + j][e];
                    }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < PASS * GROUPS; i += THREADS) {
            const int token = i / GROUPS, column = i % GROUPS * GROUP;
            const int row = PAIRS ? column / 8 * 16 + column % 8 : column;
            if (m0 + pass + token < m && n0 + row < W::rows) {
                const float* const first = part + token * STRIDE + row;
                float total[GROUP];
                qm_total<GROUP, WARPS_K, PASS * STRIDE>(first, total);
                if constexpr (PAIRS) {
                    float other[GROUP];
                    qm_total<GROUP, WARPS_K, PASS * STRIDE>(first + 8, other);
                    finish(total, other, m0 + pass + token, n0 / 2 + column);
                } else {
                    finish(total, m0 + pass + token, n0 + column);
                }
            }
        }
    }
}

// The tile of x from row m0 on, times the rows of w from n0 (a multiple of 16) on, over all columns. There are m rows
// of x. `finish(sums, m, n)` stores GROUP elements from (m, n) on along n. All threads of the block arrive here, and x
// is what `tile` copies. IN_BLOCKS: n0 is a multiple of the rows of w that a block takes.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES, int DEPTH, int GROUP, bool IN_BLOCKS,
          bool PAIRS, class Table, class Tile, class Finish>
QC_DEVICE void qm_product(
    const Table& table, const uint8_t* bytes, const Tile& tile, int64_t m0, int64_t n0, int64_t m, void* shared,
    const Finish& finish) {
    typedef typename W::type T;
    constexpr int COLUMNS = QM_CHUNK * WARPS_K, CHUNKS = (int)((W::cols + QM_CHUNK - 1) / QM_CHUNK);
    constexpr int STEPS = (CHUNKS + WARPS_K - 1) / WARPS_K;
    constexpr bool ALL_THERE = IN_BLOCKS && (W::rows + 15) / 16 % (PANELS * WARPS_N) == 0;
    typedef qm_weight<W, PANELS, ALL_THERE> Weight;
    constexpr int TILE = TOKENS * Tile::STRIDE, PASS = qm_shared<TOKENS, WARPS_N, WARPS_K, PANELS, STAGES>::PASS;

    // Unrolled at a time. Beside 128 tokens' sums, four pieces of 16-bit values or floats of 8 bits would spill.
    constexpr int PIECES = TOKENS <= 64 || Weight::LIGHT ? 4 : 1;

    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int warp_n = warp / WARPS_K, warp_k = warp % WARPS_K;
    const Weight weight(bytes, n0 / 16 + warp_n * PANELS, lane);
    T* const ring = (T*)shared;
    const qc_place place = qc_fixed(shared);

    float sums[PANELS][TOKENS / 8][4];
#pragma unroll
    for (int i = 0; i < PANELS; i++)
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;

    typename Weight::chunk ahead[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d * WARPS_K + warp_k < CHUNKS) weight.load(ahead[d], d * WARPS_K + warp_k);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < STEPS) tile.copy(ring + s * TILE, place + s * TILE * 2, s * COLUMNS);
        qc_cp_async_commit();
    }
    if constexpr (Tile::PREPARES) tile.begin();

    qc_fill<W, 32 * WARPS_N * WARPS_K>(table);  // the loop begins with a barrier

    // ldmatrix: lane 8 i + r gives row r of matrix i; matrices 0 and 1 are tokens 0 to 7 (columns 0 to 7, 8 to 15),
    // 2 and 3 tokens 8 to 15.
    const qc_place b_place =
        place + ((lane / 16 * 8 + lane % 8) * Tile::STRIDE + lane / 8 % 2 * 8 + warp_k * QM_CHUNK) * 2;

    int slot = 0;  // step % STAGES
#pragma unroll 1
    for (int base = 0; base < STEPS; base += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int step = base + d, index = step * WARPS_K + warp_k;
            if (STEPS % DEPTH == 0 || step < STEPS) {
                qc_cp_async_wait<STAGES - 2>();
                if constexpr (Tile::PREPARES) tile.prepare(ring + slot * TILE, step * COLUMNS);
                __syncthreads();  // tile `step` is there for every thread, and nobody still reads tile `step - 1`
                const int refill = slot == 0 ? STAGES - 1 : slot - 1;
                const int coming = step + STAGES - 1;
                if (coming < STEPS) tile.copy(ring + refill * TILE, place + refill * TILE * 2, coming * COLUMNS);
                qc_cp_async_commit();
                if (CHUNKS % WARPS_K == 0 || index < CHUNKS) {
                    const qc_place b_rows = b_place + slot * TILE * 2;
                    typename Weight::made made;
                    typename Weight::state state[PANELS];
                    uint32_t words[PANELS][4 * Weight::WORDS];
                    if constexpr (Weight::CODED) weight.make(ahead[d], made);
#pragma unroll
                    for (int i = 0; i < PANELS; i++) {
                        weight.flatten(ahead[d], i, words[i]);
                        if constexpr (Weight::CODED && !Weight::MANY) weight.turn_to_chunk(made, i, state[i]);
                    }
                    if (index + DEPTH * WARPS_K < CHUNKS) weight.load(ahead[d], index + DEPTH * WARPS_K);
#pragma unroll(PIECES)
                    for (int j = 0; j < 4; j++) {
                        if (W::cols % QM_CHUNK == 0 || index * QM_CHUNK + 16 * j < W::cols) {
                            uint32_t a[PANELS][4];
#pragma unroll
                            for (int i = 0; i < PANELS; i++) {
                                if constexpr (Weight::MANY) weight.turn_to_piece(made, i, j, index, state[i]);
                                weight.fragment(table, words[i], i, j, index, state[i], a[i]);
                            }
                            const qc_place b_piece = b_rows + 16 * j * 2;
                            if (TOKENS != 64 || tile.used == 64)
                                qm_multiply<TOKENS / 16, Tile::STRIDE>(sums, a, b_piece, T());
                            else if (tile.used == 32)
                                qm_multiply<2, Tile::STRIDE>(sums, a, b_piece, T());
                            else
                                qm_multiply<1, Tile::STRIDE>(sums, a, b_piece, T());
                        }
                    }
                }
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
        }
    }
    qm_finish<W, TOKENS, WARPS_N, WARPS_K, PANELS, PASS, GROUP, PAIRS>(
        sums, warp_n, warp_k, (float*)shared, m0, n0, m, tile.used, finish);
}

// One block of a linear: rows of x `x_row` elements apart.
template <class W, int TOKENS, int WARPS_N, int WARPS_K, int PANELS, int STAGES, int DEPTH, int GROUP, bool PAIRS,
          class Table, class Finish>
QC_DEVICE void qm_linear(
    const Table& table, const uint8_t* bytes, const typename W::type* x, int64_t x_row, int64_t m, void* shared,
    const Finish& finish) {
    constexpr int COLUMNS = QM_CHUNK * WARPS_K, THREADS = 32 * WARPS_N * WARPS_K;
    uint32_t token_block, row_block;
    qm_block(token_block, row_block);
    const int64_t m0 = (int64_t)token_block * TOKENS, n0 = (int64_t)row_block * (16 * PANELS * WARPS_N);
    const qm_x<typename W::type, TOKENS, COLUMNS, (int)W::cols, THREADS> tile(x, x_row, m0, m);
    qm_product<W, TOKENS, WARPS_N, WARPS_K, PANELS, STAGES, DEPTH, GROUP, true, PAIRS>(
        table, bytes, tile, m0, n0, m, shared, finish);
}
