// Products of nine rows of int8 and more with the integer codes of packed weights, on tensor cores that multiply bytes
// (sm_75 and later), to the bit what qcompiler/formats/integer_product.py says. int8.cuh describes operands and P.
//
//     block      WN x WT x WK warps: 16 * PANELS * WN rows of w by 8 * BLOCKS * WT rows of x (tokens)
//     chunk      64 columns, which a warp multiplies between two barriers
//     step       WK chunks, one for each warp along the columns
//     x          loaded AHEAD steps ahead into registers, and stored to shared memory, where there are two steps of it,
//                in the order of the weight's bytes; `ldmatrix` makes operand B of 16 tokens by 32 columns
//     weights    loaded AHEAD steps ahead into registers: operand A is made of them without shared memory
//
// Where warps share the columns, integer sums of a whole row are added in any order at the end. Where groups of columns
// have scales, a warp takes whole groups and hands their terms over to the threads that own the elements, which add
// them in the order of k, a round of groups later.
#pragma once
#include "int8.cuh"
#include "linear_mma.cuh"

enum {
    QI_CHUNK = 64,
    QI_PAD = 16,     // bytes between rows of staged x: eight rows of an ldmatrix fall into different banks
    QI_SUM_PAD = 4,  // floats between rows of finished sums, as QM_SUM_PAD
    // The bits of 1.5 * 2^23. As many more are the bits of 1.5 * 2^23 + sum, for sums of a magnitude below 2^22.
    QI_BIASED = 0x4b400000,
};

template <int BLOCKS_, int PANELS_, int WN_, int WT_, int WK_, int AHEAD_> struct qi_tile {
    static constexpr int BLOCKS = BLOCKS_, PANELS = PANELS_, WN = WN_, WT = WT_, WK = WK_, AHEAD = AHEAD_;
    static constexpr int THREADS = 32 * WN * WT * WK, TOKENS = 8 * BLOCKS * WT, ROWS = 16 * PANELS * WN;
    static constexpr int PITCH = QI_CHUNK * WK + QI_PAD, PIECES = 4 * WK;  // bytes, and pieces, of a row of a step
    static constexpr int X = TOKENS * PIECES / THREADS;                    // pieces that a thread stages in a step
    static constexpr int ELEMENTS = ROWS * TOKENS, EACH = (ELEMENTS + THREADS - 1) / THREADS;
    static constexpr int VECTOR = EACH < 4 ? EACH : 4;  // neighbours among the elements that a thread adds up
    static constexpr int STORED = WK > 1 ? BLOCKS : 2;  // blocks of tokens, per warp, that are stored at a time
    static_assert(TOKENS * PIECES % THREADS == 0 && X >= 1, "whole pieces for each thread");
    static_assert(ELEMENTS % THREADS == 0 || EACH == 1, "whole elements for each thread");
    static_assert(BLOCKS % 2 == 0 || (BLOCKS == 1 && WK > 1), "tokens are multiplied, and stored, 16 at a time");
};

// How groups lie in chunks: GROUPS of a chunk that end in it, one every STEPS_OF chunks where they are wider. A lane
// holds HELD entries of the four (row half, group) of two groups.
template <class P> struct qi_groups {
    typedef typename P::weight W;
    static constexpr bool one = qi_shape<P>::one;
    static constexpr int group = one ? QI_CHUNK : (int)P::group;
    static constexpr int GROUPS = group < QI_CHUNK ? QI_CHUNK / group : 1, HELD = GROUPS == 4 ? 2 : 1;
    static constexpr int STEPS_OF = group / QI_CHUNK > 1 ? group / QI_CHUNK : 1;
    static constexpr int CHUNKS = (int)((W::cols + QI_CHUNK - 1) / QI_CHUNK);
    // Sums of codes that are staged of a chunk: of every 32 columns, or of 16; none of rows of one group.
    static constexpr int RUNS = one || qi_shape<P>::runs == 0 ? 0 : 2 * qi_shape<P>::runs;
    // Sums begin at `zero`. From QI_BIASED on, one fused step has the bits of a conversion and a product, since P's
    // slopes have few digits: (1.5 * 2^23 + sum) * slope - 1.5 * 2^23 * slope is rounded once.
    static constexpr bool biased = !one && P::biases;
    static constexpr int zero = biased ? QI_BIASED : 0;
    static_assert(group == 16 || group == 32 || group % QI_CHUNK == 0, "groups of parts or multiples of a chunk");
};

// Bytes of shared memory: x, its runs, terms that are handed over; afterwards sums, and what is stored.
template <class P, class T> struct qi_tile_shared {
    typedef qi_groups<P> G;
    static constexpr int X = 2 * T::TOKENS * T::PITCH, RUNS = 2 * T::TOKENS * T::WK * G::RUNS * 4;
    static constexpr int TERMS = G::one || T::WK == 1 ? 0 : 2 * T::WK * G::GROUPS * T::ELEMENTS * 4;
    static constexpr int SUMS = G::one && T::WK > 1 ? T::WK * T::ELEMENTS * 4 : 0;
    static constexpr int STORED = 8 * T::STORED * T::WT * (T::ROWS + QI_SUM_PAD) * 4;
    static constexpr int LOOP = X + RUNS + TERMS, END = SUMS > STORED ? SUMS : STORED;
    static constexpr int BYTES = LOOP > END ? LOOP : END;
};

// The codes of a lane in a chunk of a panel. Behind the last chunk it is the last one, which x multiplies by zeros.
// WHOLE: there is none behind it. KEPT: other warps of the block read it, too.
template <class W, bool WHOLE, bool KEPT> struct qi_chunk_codes {
    typedef qi_codes<W> codes;
    codes of[2];

    QC_DEVICE void load(const uint8_t* w, int64_t panel, int chunk, int lane) {
        if constexpr (W::bits == 8) {
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const int64_t segment = WHOLE ? 2 * chunk + s : qc_min(2 * chunk + s, W::tiles - 1);
                const uint8_t* const from = w + W::plane(0) + (panel * W::tiles * 32 + lane) * 16 + segment * 512;
                const uint4 read = KEPT ? *(const uint4*)from : qc_load_stream_16(from);
                of[s].words[0] = read.x, of[s].words[1] = read.y, of[s].words[2] = read.z, of[s].words[3] = read.w;
            }
        } else {
            const int64_t tile = WHOLE ? chunk : qc_min(chunk, W::tiles - 1);
            const int64_t share = panel * W::tiles * 32 + lane + tile * 32;
            if constexpr (codes::four) {
                const uint8_t* const from = w + W::plane(0) + share * 16;
                const uint4 read = KEPT ? *(const uint4*)from : qc_load_stream_16(from);
                of[0].words[0] = read.x, of[0].words[1] = read.y, of[1].words[0] = read.z, of[1].words[1] = read.w;
            }
            if constexpr (codes::two) {
                const uint2 read = ((const uint2*)(w + W::plane(codes::four)))[share];
                of[0].words[2 * codes::four] = read.x, of[1].words[2 * codes::four] = read.y;
            }
            if constexpr (codes::one) {
                const uint32_t read = ((const uint32_t*)(w + W::plane(codes::four + codes::two)))[share];
                of[0].words[2 * codes::four + codes::two] = read;
                of[1].words[2 * codes::four + codes::two] = read >> 8;
            }
        }
    }
};

// One block's product with `live` rows of x.
template <class P, class T, class Rows> struct qi_tiles {
    typedef typename P::weight W;
    typedef qi_groups<P> G;
    typedef qi_tile_shared<P, T> S;
    static constexpr int STEPS_OF = G::STEPS_OF, ROUND = T::WK * STEPS_OF;
    // Whole rounds where warps share the columns; else there is nothing to add behind the last chunk.
    static constexpr int STEPS = T::WK > 1 ? (G::CHUNKS + ROUND - 1) / ROUND * STEPS_OF : G::CHUNKS;
    static constexpr bool SHARES = T::WK > 1, ADDS = !G::one && SHARES;
    // No step reaches behind the last column.
    static constexpr bool WHOLE = W::cols % QI_CHUNK == 0 && (!SHARES || G::CHUNKS % ROUND == 0);
    typedef qi_chunk_codes<W, WHOLE, (T::WT > 1)> chunk_codes;

    const uint8_t* w;
    const Rows& rows;
    int live;
    int64_t panel;  // the warp's first one
    unsigned char* shared;
    int lane, warp_n, warp_t, warp_k;
    int sums[T::PANELS][T::BLOCKS][4];
    float total[G::one || SHARES ? 1 : T::PANELS][G::one || SHARES ? 1 : T::BLOCKS][4];
    float owned[SHARES ? T::EACH : 1];  // of the elements that the thread adds up
    int ones[T::BLOCKS][2];             // of a group wider than a chunk, so far
    uint4 x_ahead[T::AHEAD][T::X];
    chunk_codes w_ahead[T::AHEAD][T::PANELS];
    typename W::entry entries[T::AHEAD][T::PANELS][G::HELD];

    QC_DEVICE qi_tiles(const uint8_t* w, const Rows& rows, int live, int64_t n0, unsigned char* shared)
        : w(w), rows(rows), live(live), shared(shared) {
        const int warp = (int)threadIdx.x / 32;
        lane = (int)threadIdx.x % 32;
        warp_k = warp % T::WK, warp_t = warp / T::WK % T::WT, warp_n = warp / (T::WK * T::WT);
        panel = n0 / 16 + warp_n * T::PANELS;
    }

    // --- loads -------------------------------------------------------------------------------------------------------

    QC_DEVICE static int chunk_of(int step, int k) {
        return (step / STEPS_OF * T::WK + k) * STEPS_OF + step % STEPS_OF;
    }
    QC_DEVICE int64_t panel_of(int i) const { return qc_min(panel + i, (W::rows + 15) / 16 - 1); }

    QC_DEVICE void load_weights(int d, int step) {
        const int chunk = chunk_of(step, warp_k);
#pragma unroll
        for (int i = 0; i < T::PANELS; i++) {
            w_ahead[d][i].load(w, panel_of(i), chunk, lane);
            if constexpr (!G::one) {
#pragma unroll
                for (int h = 0; h < G::HELD; h++) {
                    const int64_t row = panel_of(i) * 16 + lane / 4 + lane % 2 * 8;
                    const int group = G::GROUPS > 1 ? lane / 2 % 2 + 2 * h : 0;
                    const int64_t k = (int64_t)chunk * QI_CHUNK + group * G::group;
                    entries[d][i][h] = W::load(w, row, (uint32_t)(WHOLE ? k : qc_min(k, W::cols - 1)));
                }
            }
        }
    }
    QC_DEVICE void load_rows(int d, int step) {
#pragma unroll
        for (int j = 0; j < T::X; j++) {
            const int i = (int)threadIdx.x + j * T::THREADS, token = i / T::PIECES, piece = i % T::PIECES;
            const int64_t column = (int64_t)chunk_of(step, piece / 4) * QI_CHUNK + piece % 4 * 16;
            const bool there = token < live && (WHOLE || column < qi_shape<P>::padded);
            x_ahead[d][j] = there ? rows.piece(token, column) : make_uint4(0, 0, 0, 0);
        }
    }
    // In the order of the codes; `buffer` of two.
    QC_DEVICE void stage(int d, int buffer) const {
        unsigned char* const to = shared + buffer * (T::TOKENS * T::PITCH);
        int* const runs = (int*)(shared + S::X) + buffer * (T::TOKENS * T::WK * G::RUNS);
#pragma unroll
        for (int j = 0; j < T::X; j++) {
            const int i = (int)threadIdx.x + j * T::THREADS, token = i / T::PIECES, piece = i % T::PIECES;
            const uint4 read = x_ahead[d][j];
            *(uint4*)(to + token * T::PITCH + piece * 16) = qi_in_order<W>(read);
            if constexpr (G::RUNS != 0) {
                int run = qi_sum_of(read);
                if constexpr (G::RUNS == 2) {
                    run += __shfl_xor_sync(QC_ALL_LANES, run, 1);
                    if (piece % 2 == 0) runs[piece / 2 * T::TOKENS + token] = run;
                } else {
                    runs[piece * T::TOKENS + token] = run;
                }
            }
        }
    }

    // --- products ----------------------------------------------------------------------------------------------------

    QC_DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < T::PANELS; i++)
#pragma unroll
            for (int b = 0; b < T::BLOCKS; b++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][b][e] = G::zero;
    }
    QC_DEVICE void multiply(const uint32_t (&a)[T::PANELS][4], qc_place from) {
        if constexpr (T::BLOCKS == 1) {
            uint32_t b[2];
            qc_ldmatrix_x2(b, from);
#pragma unroll
            for (int i = 0; i < T::PANELS; i++) qc_mma_16832_s8(sums[i][0], a[i], b);
        }
#pragma unroll
        for (int t = 0; t < T::BLOCKS / 2; t++) {
            uint32_t b[4];
            qc_ldmatrix_x4(b, from + t * 16 * T::PITCH);
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
            for (int i = 0; i < T::PANELS; i++) {
                qc_mma_16832_s8(sums[i][2 * t], a[i], first);
                qc_mma_16832_s8(sums[i][2 * t + 1], a[i], second);
            }
        }
    }
    // Where this warp's codes of token 2t of each eight have their runs.
    QC_DEVICE const int* runs_at(int buffer, int run) const {
        const int* const runs = (const int*)(shared + S::X) + buffer * (T::TOKENS * T::WK * G::RUNS);
        return runs + (warp_k * G::RUNS + run) * T::TOKENS + warp_t * T::BLOCKS * 8 + lane % 4 * 2;
    }
    QC_DEVICE void count(int buffer) {
        if constexpr (G::RUNS != 0 && G::GROUPS == 1) {
#pragma unroll
            for (int b = 0; b < T::BLOCKS; b++) {
                const int2 low = *(const int2*)(runs_at(buffer, 0) + 8 * b);
                const int2 high = *(const int2*)(runs_at(buffer, 1) + 8 * b);
                ones[b][0] += low.x + high.x, ones[b][1] += low.y + high.y;
            }
        }
    }
    // Slopes and intercepts of a lane's entries in a chunk; whether all slopes of its warp are finite.
    struct factors {
        float slopes[T::PANELS][G::HELD], intercepts[T::PANELS][G::HELD];
        bool finite;
    };
    // The terms of group c of a chunk: to the totals, or handed over to those who own them. FUSED: slopes are finite.
    template <bool FUSED>
    QC_DEVICE void fold_as(const factors& of_lane, int c, int buffer, int round, bool inside) {
#pragma unroll
        for (int i = 0; i < T::PANELS; i++) {
            float slope[2], shift[2], intercept[2] = {0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int from = (lane & 28) + half + c % 2 * 2;
                slope[half] = __shfl_sync(QC_ALL_LANES, of_lane.slopes[i][c / 2], from);
                shift[half] = -12582912.0f * slope[half];  // exact
                if constexpr (P::affine)
                    intercept[half] = __shfl_sync(QC_ALL_LANES, of_lane.intercepts[i][c / 2], from);
            }
#pragma unroll
            for (int b = 0; b < T::BLOCKS; b++) {
                int2 of = make_int2(0, 0);
                if constexpr (G::RUNS != 0) {
                    if constexpr (G::GROUPS > 1) of = *(const int2*)(runs_at(buffer, c) + 8 * b);
                    else of = make_int2(ones[b][0], ones[b][1]);
                }
                float term[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int count = e % 2 ? of.y : of.x;
                    if constexpr (FUSED) {
                        term[e] = fmaf(__int_as_float(sums[i][b][e]), slope[e / 2], shift[e / 2]);
                        if constexpr (P::affine) term[e] = term[e] + (float)count * intercept[e / 2];
                    } else {
                        term[e] = qi_scaled<P>(sums[i][b][e] - G::zero, count, slope[e / 2], intercept[e / 2]);
                    }
                }
                if constexpr (SHARES) {
                    *(float4*)(terms(round % 2, warp_k, c) + place_of(i, b)) =
                        make_float4(term[0], term[1], term[2], term[3]);
                } else if (WHOLE || inside) {
#pragma unroll
                    for (int e = 0; e < 4; e++) total[i][b][e] = total[i][b][e] + term[e];
                }
            }
        }
        clear();
        if constexpr (G::RUNS != 0 && G::GROUPS == 1) {
#pragma unroll
            for (int b = 0; b < T::BLOCKS; b++) ones[b][0] = ones[b][1] = 0;
        }
    }
    QC_DEVICE void fold(const factors& of_lane, int c, int buffer, int round, bool inside) {
        if constexpr (G::biased) {
            if (of_lane.finite) fold_as<true>(of_lane, c, buffer, round, inside);
            else fold_as<false>(of_lane, c, buffer, round, inside);
        } else {
            fold_as<false>(of_lane, c, buffer, round, inside);
        }
    }
    QC_DEVICE float* terms(int buffer, int k, int c) const {
        return (float*)(shared + S::X + S::RUNS) + ((buffer * T::WK + k) * G::GROUPS + c) * T::ELEMENTS;
    }
    // Of a lane's four sums of panel i and eight tokens b among the block's elements.
    QC_DEVICE int place_of(int i, int b) const {
        return ((((warp_n * T::WT + warp_t) * T::PANELS + i) * T::BLOCKS + b) * 32 + lane) * 4;
    }
    // Adds the terms of a round, in the order of k.
    QC_DEVICE void add(int round) {
        if constexpr (ADDS) {
            if (!owns()) return;
#pragma unroll
            for (int k = 0; k < T::WK; k++) {
#pragma unroll
                for (int c = 0; c < G::GROUPS; c++) {
                    const int64_t column = G::GROUPS > 1 ? (int64_t)(round * T::WK + k) * QI_CHUNK + c * G::group
                                                         : (int64_t)(round * T::WK + k) * G::group;
                    if (WHOLE || column < W::cols) {
                        const float* const from = terms(round % 2, k, c);
#pragma unroll
                        for (int j = 0; j < T::EACH; j++) owned[j] = owned[j] + from[element(j)];
                    }
                }
            }
        }
    }
    // Whether the thread adds up elements: all do, but those behind the 128 of a small tile.
    QC_DEVICE static bool owns() { return T::ELEMENTS >= T::THREADS || (int)threadIdx.x < T::ELEMENTS; }
    // The number of a thread's j-th element, and what it is.
    QC_DEVICE static int element(int j) {
        return (j / T::VECTOR * T::THREADS + (int)threadIdx.x) * T::VECTOR + j % T::VECTOR;
    }
    QC_DEVICE static int token_of(int element) {
        const int b = element / 128 % T::BLOCKS, t = element / (128 * T::BLOCKS * T::PANELS) % T::WT;
        return (t * T::BLOCKS + b) * 8 + element / 4 % 4 * 2 + element % 2;
    }
    QC_DEVICE static int row_of(int element) {
        const int i = element / (128 * T::BLOCKS) % T::PANELS, n = element / (128 * T::BLOCKS * T::PANELS * T::WT);
        return (n * T::PANELS + i) * 16 + element / 16 % 8 + element / 2 % 2 * 8;
    }

    // Multiplies a step, and stages the next one in the middle: its stores are issued between products.
    QC_DEVICE void compute(int d, int step, int buffer, qc_place from) {
        chunk_codes codes[T::PANELS];
        factors of_lane;
        of_lane.finite = true;
#pragma unroll
        for (int i = 0; i < T::PANELS; i++) {
            codes[i] = w_ahead[d][i];
            if constexpr (!G::one) {
#pragma unroll
                for (int h = 0; h < G::HELD; h++) {
                    const typename W::parts parts = W::make(entries[d][i][h]);
                    of_lane.slopes[i][h] = P::slope(parts), of_lane.intercepts[i][h] = P::intercept(parts);
                    of_lane.finite = of_lane.finite && fabsf(of_lane.slopes[i][h]) < INFINITY;
                }
            }
        }
        if constexpr (G::biased) of_lane.finite = __all_sync(QC_ALL_LANES, of_lane.finite);
        if (step + T::AHEAD < STEPS) load_weights(d, step + T::AHEAD);
        const int round = step / STEPS_OF;
        const int64_t k = (int64_t)chunk_of(step, warp_k) * QI_CHUNK;
#pragma unroll
        for (int s = 0; s < 2; s++) {
            uint32_t a[T::PANELS][4];
#pragma unroll
            for (int i = 0; i < T::PANELS; i++) qi_operand<P>(codes[i].of[s], a[i]);
            if (s == 1 && step + 1 < STEPS) {
                constexpr int AHEAD = T::AHEAD;
                stage((d + 1) % AHEAD, (step + 1) % 2);
                if (step + 1 + AHEAD < STEPS) load_rows((d + 1) % AHEAD, step + 1 + AHEAD);
            }
            if constexpr (!G::one && G::group == 16) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t part[T::PANELS][4];
#pragma unroll
                    for (int i = 0; i < T::PANELS; i++)
#pragma unroll
                        for (int r = 0; r < 4; r++) part[i][r] = r / 2 == half ? a[i][r] : 0;
                    multiply(part, from + s * 32);
                    fold(of_lane, 2 * s + half, buffer, round, k + (2 * s + half) * 16 < W::cols);
                }
            } else {
                multiply(a, from + s * 32);
                if constexpr (!G::one && G::group == 32)
                    fold(of_lane, s, buffer, round, k + s * 32 < W::cols);
            }
        }
        if constexpr (!G::one && G::GROUPS == 1) {
            count(buffer);
            if (step % STEPS_OF == STEPS_OF - 1 || (!SHARES && step == STEPS - 1))
                fold(of_lane, 0, buffer, round, k / G::group * G::group < W::cols);
        }
    }

    template <class Make> QC_DEVICE void run(const Make& make, float* scales, int* row_ones) {
        clear();
#pragma unroll
        for (int b = 0; b < T::BLOCKS; b++) ones[b][0] = ones[b][1] = 0;
#pragma unroll
        for (int j = 0; j < (SHARES ? T::EACH : 1); j++) owned[j] = 0.0f;
        if constexpr (!G::one && !SHARES) {
#pragma unroll
            for (int i = 0; i < T::PANELS; i++)
#pragma unroll
                for (int b = 0; b < T::BLOCKS; b++)
#pragma unroll
                    for (int e = 0; e < 4; e++) total[i][b][e] = 0.0f;
        }
#pragma unroll
        for (int d = 0; d < T::AHEAD; d++)
            if (d < STEPS) load_weights(d, d);
        make();
#pragma unroll
        for (int d = 0; d < T::AHEAD; d++)
            if (d < STEPS) load_rows(d, d);
        stage(0, 0);
        if (T::AHEAD < STEPS) load_rows(0, T::AHEAD);
        describe(scales, row_ones);
        const int token = warp_t * T::BLOCKS * 8 + (T::BLOCKS > 1 ? lane / 16 * 8 : 0) + lane % 8;
        const qc_place place = qc_fixed(shared + token * T::PITCH + warp_k * QI_CHUNK + lane / 8 % 2 * 16);
#pragma unroll 1
        for (int base = 0; base < STEPS; base += T::AHEAD) {
#pragma unroll
            for (int d = 0; d < T::AHEAD; d++) {
                const int step = base + d, buffer = step % 2;
                if (STEPS % T::AHEAD == 0 || step < STEPS) {
                    __syncthreads();  // the step is there, and so are the terms of the one before
                    if (ADDS && step != 0 && step % STEPS_OF == 0) add(step / STEPS_OF - 1);
                    compute(d, step, buffer, place + buffer * (T::TOKENS * T::PITCH));
                }
            }
        }
        __syncthreads();
        if constexpr (ADDS) add(STEPS / STEPS_OF - 1);
    }

    // The scales of the rows, and of rows that are one group the sums of their codes.
    QC_DEVICE void describe(float* scales, int* row_ones) const {
        for (int i = (int)threadIdx.x; i < T::TOKENS; i += T::THREADS)
            scales[i] = i < live ? rows.scale(i, qi_shape<P>::padded) : 0.0f;
        if constexpr (G::one && qi_shape<P>::runs != 0) {
            for (int i = (int)threadIdx.x / 32; i < T::TOKENS; i += T::THREADS / 32) {
                int sum = 0;
                for (int64_t s = lane; i < live && s < qi_shape<P>::segments; s += 32)
                    sum += rows.sum(i, s, qi_shape<P>::padded);
                for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(QC_ALL_LANES, sum, step);
                if (lane == 0) row_ones[i] = sum;
            }
        }
    }

    // --- results -----------------------------------------------------------------------------------------------------

    QC_DEVICE float of_row(int sum, int token, const typename W::parts& parts, const int* row_ones) const {
        int of = 0;
        if constexpr (qi_shape<P>::runs != 0) of = row_ones[token];
        return 0.0f + qi_term<P>(sum, of, parts);
    }
    // All sums of the block, where its warps share the columns. They are ints until now if rows are one group.
    QC_DEVICE void gather(int64_t n0, const int* row_ones) {
        if constexpr (G::one) {
            int* const of = (int*)shared;
#pragma unroll
            for (int i = 0; i < T::PANELS; i++)
#pragma unroll
                for (int b = 0; b < T::BLOCKS; b++)
                    *(int4*)(of + warp_k * T::ELEMENTS + place_of(i, b)) =
                        make_int4(sums[i][b][0], sums[i][b][1], sums[i][b][2], sums[i][b][3]);
            __syncthreads();
#pragma unroll
            for (int j = 0; j < T::EACH && owns(); j++) {
                int sum = 0;
#pragma unroll
                for (int k = 0; k < T::WK; k++) sum += of[k * T::ELEMENTS + element(j)];
                const int64_t row = qc_min(n0 + row_of(element(j)), (W::rows + 15) / 16 * 16 - 1);
                owned[j] = of_row(sum, token_of(element(j)), qi_parts<P>(w, row, 0), row_ones);
            }
        }
        __syncthreads();
        float* const part = (float*)shared;
#pragma unroll
        for (int j = 0; j < T::EACH && owns(); j++)
            part[token_of(element(j)) * (T::ROWS + QI_SUM_PAD) + row_of(element(j))] = owned[j];
    }
    // Those of two blocks of tokens of each warp, where a warp has all columns.
    QC_DEVICE void put(int pass, const typename W::parts (&parts)[T::PANELS][2], const int* row_ones) const {
        float* const part = (float*)shared;
#pragma unroll
        for (int i = 0; i < T::PANELS; i++)
#pragma unroll
            for (int more = 0; more < 2; more++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int in_block = more * 8 + lane % 4 * 2 + e % 2;
                    const int row = (warp_n * T::PANELS + i) * 16 + lane / 4 + e / 2 * 8;
                    const int token = (warp_t * T::BLOCKS + pass) * 8 + in_block;
                    float& to = part[(warp_t * 16 + in_block) * (T::ROWS + QI_SUM_PAD) + row];
                    if constexpr (G::one) to = of_row(sums[i][pass + more][e], token, parts[i][e / 2], row_ones);
                    else to = total[i][pass + more][e];
                }
    }

    // `finish` stores GROUP elements from (m, n) on along n.
    template <int GROUP, class Finish>
    QC_DEVICE void store(int64_t m0, int64_t n0, const float* scales, const int* row_ones, const Finish& finish) {
        constexpr int COUNT = 8 * T::STORED, GROUPS = T::ROWS / GROUP / (P::pairs ? 2 : 1);
        static_assert(!P::pairs || 8 % GROUP == 0, "groups of pairs lie in one panel");
        typename W::parts parts[T::PANELS][2];
        if constexpr (G::one && !SHARES) {
#pragma unroll
            for (int i = 0; i < T::PANELS; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    parts[i][half] = qi_parts<P>(w, panel_of(i) * 16 + lane / 4 + half * 8, 0);
        }
#pragma unroll
        for (int pass = 0; pass < T::BLOCKS; pass += T::STORED) {
            if (pass != 0) __syncthreads();  // the sums of the pass before have been read
            if constexpr (SHARES) gather(n0, row_ones);
            else put(pass, parts, row_ones);
            __syncthreads();
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < COUNT * T::WT * GROUPS; i += T::THREADS) {
                const int place = i / GROUPS, column = i % GROUPS * GROUP;
                const int token = (place / COUNT * T::BLOCKS + pass) * 8 + place % COUNT;
                const int row = P::pairs ? column / 8 * 16 + column % 8 : column;
                if (token < live && n0 + row < W::rows) {
                    const float* const first = (const float*)shared + place * (T::ROWS + QI_SUM_PAD) + row;
                    float sum[GROUP];
                    qm_read<GROUP>(first, sum);
#pragma unroll
                    for (int e = 0; e < GROUP; e++) sum[e] = sum[e] * scales[token];
                    if constexpr (P::pairs) {
                        float other[GROUP];
                        qm_read<GROUP>(first + 8, other);
#pragma unroll
                        for (int e = 0; e < GROUP; e++) other[e] = other[e] * scales[token];
                        finish(sum, other, m0 + token, n0 / 2 + column);
                    } else {
                        finish(sum, m0 + token, n0 + column);
                    }
                }
            }
        }
    }
};

// Where the outputs of a block begin, of which there are `m` by `n`; false for a block behind the last one.
template <class T> QC_DEVICE bool qi_place_of(int64_t m, int64_t n, int64_t& m0, int64_t& n0) {
    const uint32_t tokens = (uint32_t)((m + T::TOKENS - 1) / T::TOKENS), rows = (uint32_t)((n + T::ROWS - 1) / T::ROWS);
    if ((uint64_t)blockIdx.x >= (uint64_t)tokens * rows) return false;
    uint32_t token_block, row_block;
    qm_numbered(blockIdx.x, tokens, rows, token_block, row_block);
    m0 = (int64_t)token_block * T::TOKENS, n0 = (int64_t)row_block * T::ROWS;
    return true;
}

// `rows` are those of the block, which begin at m0; it has rows of w from n0 on. `make` makes them, as in int8.cuh.
template <class P, class T, int GROUP, class Rows, class Finish, class Make = qi_made_before>
QC_DEVICE void qi_linear_tiles(const uint8_t* w, const Rows& rows, int64_t m, int64_t m0, int64_t n0,
                               unsigned char* shared, float* scales, int* row_ones, const Finish& finish,
                               const Make& make = Make()) {
    qi_tiles<P, T, Rows> tiles(w, rows, (int)qc_min(T::TOKENS, m - m0), n0, shared);
    tiles.run(make, scales, row_ones);
    tiles.template store<GROUP>(m0, n0, scales, row_ones, finish);
}
