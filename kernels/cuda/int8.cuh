// Products of rows of int8 (qcompiler/formats/int8_rows.py) with the integer codes of packed weights in cuda_t16_v1, to
// the bit what qcompiler/formats/integer_product.py says. Sums of integers are exact in any order; their scaling, group
// by group in the order of k, is done by one thread per element.
//
// A lane (g, t) has of 16 rows by 32 columns of w: rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9 of both pieces
// of 16 columns: four registers of bytes, operand A of `mma` m16n8k32. x is staged in shared memory so that eight words
// per row and 32 columns are operand B in the same order: word 4 * piece + t. Where groups are of 16 columns, the two
// pieces are multiplied one after the other, with zeros in place of the other.
//
//     QI_MMA     qc_mma_16832_s8: sm_75 (as four products of depth 16) and later
//     QI_DP4A    __dp4a, everywhere else
//
// P describes the product: `weight`, the struct of weights.py; group (columns that share entries); first (the byte that
// a code of 0 becomes) and offset (what a byte of 0 stands for); affine, slope(parts), intercept(parts); biases, if
// sums may begin at a bias (int8_tiles.cuh). Listed codes stand for the signed bytes of list(i), four in a word.
#pragma once
#include "grouped.cuh"
#include "linear_fma.cuh"

enum { QI_MMA = 0, QI_DP4A = 1 };

// --- operand A -------------------------------------------------------------------------------------------------------

// A lane's words of 32 columns (a segment), and as signed bytes: rows g, g + 8 of the first piece, then of the second.
// Columns of a piece are in the order 2t, 2t + 1, 2t + 8, 2t + 9, those of codes of less than 8 bits in the order 2t,
// 2t + 8, 2t + 1, 2t + 9: kernels/layouts/cuda.py draws them.
template <class W> struct qi_codes {
    static constexpr bool four = W::bits & 4, two = W::bits & 2, one = W::bits & 1;
    static constexpr int count = W::bits == 8 ? 4 : 2 * four + two + one;
    uint32_t words[count];

    QC_DEVICE void load(const uint8_t* w, int64_t panel, int64_t segment, int lane) {
        if constexpr (W::bits == 8) {
            const uint4 read = qc_load_stream_16(w + W::plane(0) + ((panel * W::tiles + segment) * 32 + lane) * 16);
            words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
        } else {
            const int64_t share = (panel * W::tiles + segment / 2) * 32 + lane;
            if constexpr (four) {
                const uint2 read = ((const uint2*)(w + W::plane(0)))[share * 2 + segment % 2];
                words[0] = read.x, words[1] = read.y;
            }
            if constexpr (two)
                words[2 * four] = ((const uint32_t*)(w + W::plane(four)))[share * 2 + segment % 2];
            if constexpr (one)
                words[2 * four + two] = ((const uint32_t*)(w + W::plane(four + two)))[share] >> segment % 2 * 8;
        }
    }
    QC_DEVICE void fragment(uint32_t (&a)[4]) const {
        if constexpr (W::bits == 4) {
            a[0] = words[0] & 0x0f0f0f0fu, a[1] = words[0] >> 4 & 0x0f0f0f0fu;
            a[2] = words[1] & 0x0f0f0f0fu, a[3] = words[1] >> 4 & 0x0f0f0f0fu;
        } else if constexpr (W::bits == 8) {
            constexpr uint32_t flip = W::flips_sign ? 0 : 0x80808080u;
            a[0] = __byte_perm(words[0], words[1], 0x5410) ^ flip;
            a[1] = __byte_perm(words[0], words[1], 0x7632) ^ flip;
            a[2] = __byte_perm(words[2], words[3], 0x5410) ^ flip;
            a[3] = __byte_perm(words[2], words[3], 0x7632) ^ flip;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = pair(i / 2, i % 2) | pair(i / 2, i % 2 + 2) << 8;
        }
    }

private:
    QC_DEVICE uint32_t pair(int piece, int p) const {  // pair p of a piece, in the halves of a word
        const uint32_t wide = four ? words[piece * four] : 0, narrow = two ? words[2 * four * two] >> 8 * piece : 0;
        const uint32_t narrowest = one ? words[(2 * four + two) * one] >> 4 * piece : 0;
        return qc_code_pair<W::bits>(wide, narrow, narrowest, p, 0);
    }
};

// The bytes that P lists for four codes of up to 4 bits.
template <class P> QC_DEVICE uint32_t qi_listed(uint32_t codes) {
    const uint32_t low = codes & 0x07070707u, two = (low | low >> 4) & 0x00ff00ffu;
    const uint32_t places = (two | two >> 8) & 0xffffu;
    const uint32_t second = (codes >> 3 & 0x01010101u) * 0xffu;  // bytes of the second half of the list
    return (__byte_perm(P::list(0), P::list(1), places) & ~second) |
           (__byte_perm(P::list(2), P::list(3), places) & second);
}

template <class P> QC_DEVICE void qi_operand(const qi_codes<typename P::weight>& codes, uint32_t (&a)[4]) {
    codes.fragment(a);
    if constexpr (P::listed) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = qi_listed<P>(a[i]);
    } else if constexpr (P::first != 0) {
        // Four sums of bytes in one: with 128 more, no sum leaves its byte.
        constexpr uint32_t more = (uint32_t)(P::first + 128) * 0x01010101u;
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = (a[i] + more) ^ 0x80808080u;
    }
}

// --- x in shared memory ----------------------------------------------------------------------------------------------

// What a product reads of its rows: 16 codes, the sum of 32, the scale. `Place` says where row i lies.
template <class Place> struct qi_rows_at {
    Place place;
    QC_DEVICE uint4 piece(int i, int64_t column) const { return *(const uint4*)(place[i] + column); }
    QC_DEVICE int sum(int i, int64_t segment, int64_t padded) const {
        return ((const int16_t*)(place[i] + padded + 16))[segment];
    }
    QC_DEVICE float scale(int i, int64_t padded) const { return *(const float*)(place[i] + padded); }
};

// Rows of int8 that follow each other, `step` bytes apart.
struct qi_following {
    const int8_t* x;
    int64_t step;
    QC_DEVICE const int8_t* operator[](int i) const { return x + i * step; }
};
typedef qi_rows_at<qi_following> qi_rows;

// The rows of listed pairs of a row and an expert.
struct qi_of_pairs {
    const int8_t* x;
    int64_t step;
    const int* pairs;
    int repeat;
    QC_DEVICE const int8_t* operator[](int i) const { return x + pairs[i] / repeat * step; }
};
typedef qi_rows_at<qi_of_pairs> qi_listed_rows;

// 16 codes of a row of x, in the order of the weight's.
template <class W> QC_DEVICE uint4 qi_in_order(uint4 read) {
    constexpr uint32_t even = W::bits < 8 ? 0x5140 : 0x5410, odd = W::bits < 8 ? 0x7362 : 0x7632;
    return make_uint4(__byte_perm(read.x, read.z, even), __byte_perm(read.x, read.z, odd),
                      __byte_perm(read.y, read.w, even), __byte_perm(read.y, read.w, odd));
}

// The sum of 16 codes.
QC_DEVICE int qi_sum_of(uint4 codes) {
    return __dp4a((int)codes.x, 0x01010101, __dp4a((int)codes.y, 0x01010101, __dp4a((int)codes.z, 0x01010101,
                  __dp4a((int)codes.w, 0x01010101, 0))));
}

// SEGMENTS of 32 columns from `first` on, of TOKENS rows of which `live` exist, PITCH words apart; zeros outside. With
// RUNS also sums of the codes: 1 of each segment, which the rows bring along, 2 of each piece of 16 columns, token by
// token. There are 16 threads for each segment.
template <class W, int TOKENS, int SEGMENTS, int PITCH, int RUNS, class Rows>
QC_DEVICE void qi_stage(const Rows& rows, int live, int64_t first, uint32_t* staged, int* runs) {
    constexpr int64_t padded = (W::cols + 63) / 64 * 64;
    constexpr int threads = 16 * SEGMENTS;
    for (int i = threadIdx.x; i < TOKENS * SEGMENTS * 2; i += threads) {
        const int token = i / (SEGMENTS * 2), piece = i % (SEGMENTS * 2);
        const int64_t column = first * 32 + piece * 16;
        uint4 read = make_uint4(0, 0, 0, 0);
        if (token < live && column < padded) read = rows.piece(token, column);
        *(uint4*)(staged + token * PITCH + piece * 4) = qi_in_order<W>(read);
        if constexpr (RUNS == 2) runs[i] = qi_sum_of(read);
    }
    if constexpr (RUNS == 1) {
        for (int i = threadIdx.x; i < TOKENS * SEGMENTS; i += threads) {
            const int token = i / SEGMENTS;
            const int64_t segment = first + i % SEGMENTS;
            const bool there = token < live && segment * 32 < padded;
            runs[i] = there ? rows.sum(token, segment, padded) : 0;
        }
    }
}

// --- sums ------------------------------------------------------------------------------------------------------------

// 16 rows of w by 8 * BLOCKS tokens. `reduce` gives them as `mma` has them: rows g (0, 1) and g + 8 (2, 3), tokens 2t
// and 2t + 1 of each eight.
template <int ENGINE, int BLOCKS> struct qi_sums {
    static constexpr int count = ENGINE == QI_MMA ? 4 : 16;
    int of[BLOCKS][count];

    QC_DEVICE void clear() {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < count; i++) of[b][i] = 0;
    }
    // `x` is the staged segment of the first token. PIECES: 3 for both, 1 for the first alone, 2 for the second.
    template <int PIECES> QC_DEVICE void multiply(const uint32_t (&a)[4], const uint32_t* x, int pitch, int lane) {
        const int g = lane / 4, t = lane % 4;
        constexpr bool first = PIECES & 1, second = PIECES & 2;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            if constexpr (ENGINE == QI_MMA) {
                const uint32_t* const from = x + (8 * b + g) * pitch + t;
                const uint32_t fragment[2] = {from[0], from[4]};
                const uint32_t part[4] = {first ? a[0] : 0, first ? a[1] : 0, second ? a[2] : 0, second ? a[3] : 0};
                qc_mma_16832_s8(of[b], part, fragment);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const uint32_t* const from = x + (8 * b + j) * pitch + t;
                    if (first) {
                        of[b][j] = __dp4a((int)a[0], (int)from[0], of[b][j]);
                        of[b][8 + j] = __dp4a((int)a[1], (int)from[0], of[b][8 + j]);
                    }
                    if (second) {
                        of[b][j] = __dp4a((int)a[2], (int)from[4], of[b][j]);
                        of[b][8 + j] = __dp4a((int)a[3], (int)from[4], of[b][8 + j]);
                    }
                }
            }
        }
    }
    QC_DEVICE void reduce(int lane, int (&to)[BLOCKS][4]) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[b][i] = of[b][i];
            if constexpr (ENGINE != QI_MMA) {
#pragma unroll
                for (int i = 0; i < 16; i++) {  // lane t of a quad keeps tokens 2t and 2t + 1
                    int sum = of[b][i];
                    sum += __shfl_xor_sync(QC_ALL_LANES, sum, 1);
                    sum += __shfl_xor_sync(QC_ALL_LANES, sum, 2);
                    if (i % 8 / 2 == lane % 4) to[b][i / 8 * 2 + i % 2] = sum;
                }
            }
        }
    }
};

// One group's term: sum of code * q, times the slope, and sum of q times the intercept. Sums wrap, since rows that a
// call or a file brings may hold any.
template <class P> QC_DEVICE float qi_scaled(int sum, int ones, float slope, float intercept) {
    float term = (float)(int)((unsigned)sum + (unsigned)P::offset * (unsigned)ones) * slope;
    if constexpr (P::affine) term = term + (float)ones * intercept;
    return term;
}
template <class P> QC_DEVICE float qi_term(int sum, int ones, const typename P::weight::parts& parts) {
    return qi_scaled<P>(sum, ones, P::slope(parts), P::intercept(parts));
}

template <class P> QC_DEVICE typename P::weight::parts qi_parts(const uint8_t* w, int64_t row, int64_t k) {
    return P::weight::make(P::weight::load(w, row, (uint32_t)k));
}

template <class P> struct qi_shape {
    typedef typename P::weight W;
    static constexpr int64_t segments = (W::cols + 31) / 32, padded = (W::cols + 63) / 64 * 64;
    static constexpr bool one = W::cols <= P::group, halves = !one && P::group % 32 != 0;
    static_assert(!halves || P::group == 16, "groups are of 16 columns, or of whole segments");
    static constexpr int runs = P::affine || P::offset != 0 ? 1 + halves : 0;
};

// --- few rows of x: the warps of a block share the columns of one panel ----------------------------------------------

// What makes rows of int8 in a block before it reads them: nothing, if they are in memory.
struct qi_made_before {
    QC_DEVICE void operator()() const {}
};

// 8 tokens. Each warp takes two segments of a round; sums go through shared memory to the thread that owns an element,
// as integers: of all columns at the end where a row is one group, else of UNIT columns (half a segment, one, or two,
// as groups hold them) in every round. There are four warps at least. `rows` are those of the block; `make` makes them,
// in shared memory, while the first codes of w are under way.
template <class P, int ENGINE, int WARPS, class Rows, class Finish, class Make = qi_made_before>
QC_DEVICE void qi_linear_few(const uint8_t* w, const Rows& rows, int64_t m, int64_t panel, uint32_t* staged, int* runs,
                             int* sums_of, Finish finish, Make make = Make()) {
    typedef typename P::weight W;
    static_assert(WARPS >= 4, "a thread for each of 16 rows of w times 8 tokens");
    constexpr int SEGMENTS = 2 * WARPS, PITCH = SEGMENTS * 8 + 4, RUNS = qi_shape<P>::runs;
    constexpr int UNIT = P::group % 64 == 0 ? 64 : qi_shape<P>::halves ? 16 : 32, UNITS = SEGMENTS * 32 / UNIT;
    constexpr bool ONE = qi_shape<P>::one;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = threadIdx.x / 8, token = threadIdx.x % 8;
    const int64_t m0 = (int64_t)blockIdx.y * 8;
    const int live = (int)qc_min(8, m - m0);
    qi_codes<W> ahead[2];
    qi_sums<ENGINE, 1> sums;
    sums.clear();
#pragma unroll
    for (int s = 0; s < 2; s++)
        ahead[s].load(w, panel, qc_min(2 * warp + s, qi_shape<P>::segments - 1), lane);
    make();
    float total = 0.0f;
    int sum = 0, ones = 0;
    const auto hand_over = [&](int slot) {
        int found[1][4];
        sums.reduce(lane, found);
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums_of[slot * 128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = found[0][i];
        sums.clear();
    };
    for (int64_t first = 0; first < qi_shape<P>::segments; first += SEGMENTS) {
        qi_stage<W, 8, SEGMENTS, PITCH, RUNS>(rows, live, first, staged, runs);
        __syncthreads();
#pragma unroll
        for (int s = 0; s < 2; s++) {
            uint32_t a[4];
            qi_operand<P>(ahead[s], a);
            const int64_t next = first + SEGMENTS + 2 * warp + s;
            if (next < qi_shape<P>::segments) ahead[s].load(w, panel, next, lane);
            const uint32_t* const xs = staged + (2 * warp + s) * 8;  // x is zero behind the last column
            if constexpr (!ONE && UNIT == 16) {
                sums.template multiply<1>(a, xs, PITCH, lane);
                hand_over(2 * (2 * warp + s));
                sums.template multiply<2>(a, xs, PITCH, lane);
                hand_over(2 * (2 * warp + s) + 1);
            } else {
                sums.template multiply<3>(a, xs, PITCH, lane);
                if (!ONE && (s + 1) * 32 % UNIT == 0) hand_over((2 * warp + s) * 32 / UNIT);
            }
        }
        if constexpr (!ONE) __syncthreads();
        if (threadIdx.x < 128) {
            for (int j = 0; j < UNITS; j++) {
                const int64_t k = first * 32 + j * UNIT, end = k + UNIT;
                if (k >= W::cols) break;
                if constexpr (RUNS != 0) {
                    constexpr int EACH = RUNS == 2 ? UNIT / 16 : UNIT / 32;  // sums of a unit
                    for (int r = 0; r < EACH; r++) ones += runs[(token * UNITS + j) * EACH + r];
                }
                if constexpr (!ONE) {
                    sum += sums_of[j * 128 + threadIdx.x];
                    if (end % P::group == 0 || end >= W::cols) {
                        const auto parts = qi_parts<P>(w, panel * 16 + row, k / P::group * P::group);
                        total = total + qi_term<P>(sum, ones, parts);
                        sum = ones = 0;
                    }
                }
            }
        }
        __syncthreads();
    }
    if constexpr (ONE) {
        hand_over(warp);
        __syncthreads();
    }
    const bool mine = threadIdx.x < 128 && token < live;
    if constexpr (ONE) {
        if (mine) {
            for (int j = 0; j < WARPS; j++) sum += sums_of[j * 128 + threadIdx.x];
            total = total + qi_term<P>(sum, ones, qi_parts<P>(w, panel * 16 + row, 0));
        }
    }
    if (mine) total = total * rows.scale(token, qi_shape<P>::padded);
    if constexpr (P::pairs) {  // the thread of row r + 8 hands its sum to that of row r
        if (mine) sums_of[threadIdx.x] = __float_as_int(total);
        __syncthreads();
        if (mine && row < 8) finish(total, __int_as_float(sums_of[threadIdx.x + 64]), m0 + token, panel * 8 + row);
    } else if (mine) {
        finish(total, m0 + token, panel * 16 + row);
    }
}

// --- more rows: a panel per warp, 8 * BLOCKS tokens per block --------------------------------------------------------

// `live` rows of x times the panel of the warp; `make` makes them, as above. `finish` gets a sum, the token, and the
// row in the panel; where pairs of rows are combined it gets both sums, and which pair of the panel's eight.
template <class P, int ENGINE, int BLOCKS, class Rows, class Finish, class Make = qi_made_before>
QC_DEVICE void qi_multiply_many(const uint8_t* w, const Rows& rows, int live, int64_t panel, uint32_t* staged,
                                int* runs, const Finish& finish, Make make = Make()) {
    typedef typename P::weight W;
    constexpr int SEGMENTS = 8, PITCH = SEGMENTS * 8 + 4, TOKENS = 8 * BLOCKS, RUNS = qi_shape<P>::runs;
    constexpr bool ONE = qi_shape<P>::one;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    qi_sums<ENGINE, BLOCKS> sums;
    sums.clear();
    float total[BLOCKS][4];
    int ones[BLOCKS][2];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        ones[b][0] = ones[b][1] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) total[b][i] = 0.0f;
    }
    const auto fold = [&](int64_t k) {
        const int64_t row = panel * 16 + g;
        const typename W::parts upper = qi_parts<P>(w, row, k), lower = qi_parts<P>(w, row + 8, k);
        int found[BLOCKS][4];
        sums.reduce(lane, found);
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                total[b][i] = total[b][i] + qi_term<P>(found[b][i], ones[b][i % 2], i < 2 ? upper : lower);
        sums.clear();
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) ones[b][0] = ones[b][1] = 0;
    };
    qi_codes<W> ahead;
    ahead.load(w, panel, 0, lane);
    make();
    for (int64_t first = 0; first < qi_shape<P>::segments; first += SEGMENTS) {
        qi_stage<W, TOKENS, SEGMENTS, PITCH, RUNS>(rows, live, first, staged, runs);
        __syncthreads();
#pragma unroll 1
        for (int s = 0; s < SEGMENTS && first + s < qi_shape<P>::segments; s++) {
            uint32_t a[4];
            qi_operand<P>(ahead, a);
            const int64_t segment = first + s, end = (segment + 1) * 32;
            if (segment + 1 < qi_shape<P>::segments) ahead.load(w, panel, segment + 1, lane);
            const auto count = [&](int run, int of_token) {
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
                    ones[b][0] += runs[(8 * b + 2 * t) * of_token + run];
                    ones[b][1] += runs[(8 * b + 2 * t + 1) * of_token + run];
                }
            };
            if constexpr (!ONE && qi_shape<P>::halves) {
                sums.template multiply<1>(a, staged + s * 8, PITCH, lane);
                if constexpr (RUNS != 0) count(2 * s, 2 * SEGMENTS);
                fold(segment * 32);
                if (segment * 32 + 16 < W::cols) {
                    sums.template multiply<2>(a, staged + s * 8, PITCH, lane);
                    if constexpr (RUNS != 0) count(2 * s + 1, 2 * SEGMENTS);
                    fold(segment * 32 + 16);
                }
            } else {
                sums.template multiply<3>(a, staged + s * 8, PITCH, lane);
                if constexpr (RUNS == 1) count(s, SEGMENTS);
                if constexpr (!ONE)
                    if (end % P::group == 0 || end >= W::cols) fold(segment * 32 / P::group * P::group);
            }
        }
        __syncthreads();
    }
    if constexpr (ONE) fold(0);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 8 * b + 2 * t + i % 2;
            if (P::pairs && i >= 2) continue;  // the other half of a pair
            if (token < live) {
                const float scale = rows.scale(token, qi_shape<P>::padded);
                if constexpr (P::pairs)
                    finish(total[b][i] * scale, total[b][i + 2] * scale, token, g);
                else
                    finish(total[b][i] * scale, token, g + i / 2 * 8);
            }
        }
}

// `rows` are those of the block.
template <class P, int ENGINE, int BLOCKS, int WARPS, class Rows, class Finish, class Make = qi_made_before>
QC_DEVICE void qi_linear_many(const uint8_t* w, const Rows& rows, int64_t m, int64_t panels, uint32_t* staged,
                              int* runs, Finish finish, Make make = Make()) {
    constexpr int TOKENS = 8 * BLOCKS;
    const int64_t mine = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32, m0 = (int64_t)blockIdx.x * TOKENS;
    const int live = (int)qc_min(TOKENS, m - m0);
    const int64_t panel = qc_min(mine, panels - 1);
    if constexpr (P::pairs) {
        const auto place = [&](float sum, float other, int token, int pair) QC_INLINED {
            finish(sum, other, m0 + token, mine * 8 + pair);
        };
        qi_multiply_many<P, ENGINE, BLOCKS>(w, rows, live, panel, staged, runs, place, make);
    } else {
        const auto place = [&](float sum, int token, int row) QC_INLINED { finish(sum, m0 + token, mine * 16 + row); };
        qi_multiply_many<P, ENGINE, BLOCKS>(w, rows, live, panel, staged, runs, place, make);
    }
}

// --- chosen experts: a panel per warp for all rows of an expert ------------------------------------------------------

// The expert begins at row `first` of w and has `width` rows. Pairs without an expert have blocks of their own, for
// which `there` is false, and get NaN. `list` has room for 8 * BLOCKS pairs.
template <class P, int ENGINE, int BLOCKS, int WARPS, class Chosen, class Out>
QC_DEVICE void qi_grouped_many(const uint8_t* w, const int8_t* x, int64_t x_row, int64_t pairs, int repeat,
                               int64_t first, int64_t width, bool there, const Chosen& chosen, qc_pair_list list,
                               uint32_t* staged, int* runs, Out* out, int64_t out_row) {
    const int64_t mine = first / 16 + (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t panel = qc_min(mine, (first + width - 1) / 16);
    const qi_listed_rows rows = {{x, x_row, list.rows, repeat}};
    const auto finish = [&](float sum, int token, int row) QC_INLINED {
        const int64_t column = mine * 16 + row - first;
        if (column >= 0 && column < width) qc_store(out + list.rows[token] * out_row + column, sum);
    };
    int64_t from = 0;
    while (const int live = qc_list_pairs<8 * BLOCKS, 32 * WARPS>(pairs, from, chosen, list)) {
        if (there) {
            qi_multiply_many<P, ENGINE, BLOCKS>(w, rows, live, panel, staged, runs, finish);
        } else {
            for (int i = threadIdx.x % 32; i < live * 16; i += 32) finish(NAN, i / 16, i % 16);
        }
    }
}


// --- making rows -----------------------------------------------------------------------------------------------------

enum { QI_TOKEN = 0, QI_TENSOR = 1, QI_OUTLIERS = 2, QI_IMAGE = 3 };

// How codes of a row are made, from its largest magnitude as an integer: a NaN is above infinity, which is above all
// others.
template <int KIND> struct qi_rule {
    static constexpr bool divides = KIND == QI_TOKEN || KIND == QI_IMAGE;
    bool finite;
    float scale, by;

    QC_DEVICE qi_rule(int top, float factor, float fixed) {
        const float largest = __uint_as_float((uint32_t)top);
        finite = top < 0x7f800000;
        scale = KIND == QI_TENSOR ? fixed : largest / 127.0f;
        if (divides && !(scale > 0.0f)) scale = 1.0f;
        const float inverse = largest < 3.8e-37f ? 0.0f : 127.0f / largest;
        by = divides ? scale : KIND == QI_TENSOR ? factor : inverse;
    }
    QC_DEVICE int code(float v) const {
        const float code = rintf(divides ? v / by : v * by);
        return (int)fmaxf(fminf(code, 127.0f), -127.0f);
    }
    // What stands behind the codes but their sums, and the zeros behind those: `padded` codes, by one of `threads`.
    QC_DEVICE void finish(int8_t* row, int64_t padded, int thread, int threads) const {
        const uint32_t bits = finite ? __float_as_uint(scale) : 0x7fc00000u;
        if (thread < 4) ((uint32_t*)(row + padded))[thread] = thread ? 0u : bits;
        const int64_t runs = padded / 32;
        for (int64_t r = runs + thread; r < (runs + 7) / 8 * 8; r += threads)
            ((int16_t*)(row + padded + 16))[r] = 0;
    }
};

// The largest of the numbers of THREADS neighbours, which are not negative: some of a warp, or all of a block. Then a
// barrier must follow before `tops` is used again.
template <int THREADS> QC_DEVICE int qi_largest(int top, int* tops) {
    for (int step = THREADS < 32 ? THREADS / 2 : 16; step > 0; step >>= 1)
        top = max(top, __shfl_xor_sync(QC_ALL_LANES, top, step));
    if constexpr (THREADS > 32) {
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
        __syncthreads();
        for (int i = 0; i < THREADS / 32; i++) top = max(top, tops[i]);
    }
    return top;
}

// One row by a block of THREADS: formats/int8_rows.py. A thread takes four columns at a time; eight lanes make a sum.
// For QI_IMAGE, `fixed` is the largest magnitude of the image.
template <int KIND, int THREADS, class T>
QC_DEVICE void qi_quantise_row(const T* x, int64_t cols, float factor, float fixed, float threshold,
                               const bool* columns, int8_t* row, int* tops) {
    const int64_t padded = (cols + 63) / 64 * 64;
    const auto read = [&](int64_t k) {
        const float v = qc_load(x + k);
        return KIND == QI_OUTLIERS && threshold <= fabsf(v) ? 0.0f : v;
    };
    int top = 0;
    if constexpr (KIND == QI_IMAGE) {
        top = (int)__float_as_uint(fabsf(fixed));
    } else {
        for (int64_t k = threadIdx.x; k < cols; k += THREADS) top = max(top, (int)__float_as_uint(fabsf(read(k))));
        top = qi_largest<THREADS>(top, tops);
    }
    const qi_rule<KIND> rule(top, factor, fixed);
    for (int64_t base = 0; base < padded; base += 4 * THREADS) {
        const int64_t k = base + 4 * (int64_t)threadIdx.x;
        uint32_t word = 0;
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (rule.finite && k + i < cols) {
                const int number = KIND == QI_OUTLIERS && columns[k + i] ? 0 : rule.code(read(k + i));
                word |= (uint32_t)(number & 255) << 8 * i;
                sum += number;
            }
        }
        for (int step = 1; step < 8; step <<= 1) sum += __shfl_xor_sync(QC_ALL_LANES, sum, step);
        if (k < padded) {
            *(uint32_t*)(row + k) = word;
            if (threadIdx.x % 8 == 0) ((int16_t*)(row + padded + 16))[k / 32] = (int16_t)sum;
        }
    }
    rule.finish(row, padded, (int)threadIdx.x, THREADS);
}

// --- making rows in a linear -----------------------------------------------------------------------------------------

template <class X> struct qi_floats {
    typedef X x_type;
    static constexpr bool mma = false;
    static constexpr int columns = 16;
};

// `live` rows of int8, in shared memory and 16-byte aligned, of rows of x or of what a prologue makes of them
// (linear_fma.cuh), to the bit as above. LANES threads share a row: all of a block, which makes one row after the
// other, or some of a warp, so that several rows are made at once. A thread takes 16 columns at a time, two lanes make
// a sum. The columns of a thread stay in registers if they are few; else they are made once for the largest, and once
// for the codes.
template <int KIND, int THREADS, int LANES, int COLS, class X, class P = qc_as_it_is>
QC_DEVICE void qi_make_rows(const X* x, int64_t x_row, int live, float factor, float fixed, int8_t* rows, int64_t width,
                            int* tops, const P& prologue = P()) {
    static_assert(LANES == THREADS || (LANES >= 4 && 32 % LANES == 0), "a block, or a part of a warp");
    constexpr int padded = (COLS + 63) / 64 * 64, pieces = padded / 16, rounds = (pieces + LANES - 1) / LANES;
    constexpr int kept = rounds <= 2 ? rounds : 1, at_once = THREADS / LANES;
    typedef qc_x_piece<qi_floats<X>> piece;
    if constexpr (P::norms) prologue.prepare(x, x_row, live);
    const int lane = (int)threadIdx.x % LANES;
#pragma unroll 1
    for (int first = 0; first < live; first += at_once) {
        const int row = first + (int)threadIdx.x / LANES, end = row < live ? pieces : 0;
        piece held[kept];
        const auto make = [&](int i, bool writes, piece& to) QC_INLINED {
            to.read(x + row * x_row, (int64_t)i * 16, COLS);
            to.prepare(prologue, row, (int64_t)i * 16, COLS, writes);
            if (writes) to.keep(prologue, row, (int64_t)i * 16, COLS);
        };
        int top = 0;
#pragma unroll kept
        for (int round = 0; round < rounds; round++) {
            const int i = round * LANES + lane;
            piece& mine = held[kept == rounds ? round : 0];
            if (i >= end) continue;
            make(i, true, mine);
#pragma unroll
            for (int j = 0; j < 16; j++) top = max(top, (int)__float_as_uint(fabsf(mine.values[j])));
        }
        const qi_rule<KIND> rule(qi_largest<LANES>(top, tops), factor, fixed);
        int8_t* const to = rows + row * width;
#pragma unroll kept
        for (int round = 0; round < rounds; round++) {
            const int i = round * LANES + lane;
            piece& mine = held[kept == rounds ? round : 0];
            uint32_t words[4] = {0, 0, 0, 0};
            int sum = 0;
            if (i < end && rule.finite) {
                if constexpr (kept != rounds) make(i, false, mine);
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    const int number = rule.code(mine.values[j]);
                    words[j / 4] |= (uint32_t)(number & 255) << 8 * (j % 4);
                    sum += number;
                }
            }
            sum += __shfl_xor_sync(QC_ALL_LANES, sum, 1);
            if (i < end) {
                *(uint4*)(to + i * 16) = make_uint4(words[0], words[1], words[2], words[3]);
                if (i % 2 == 0) ((int16_t*)(to + padded + 16))[i / 2] = (int16_t)sum;
            }
        }
        if (row < live) rule.finish(to, padded, lane, LANES);
        if constexpr (at_once == 1) __syncthreads();  // `tops` is free
    }
    if constexpr (at_once > 1) __syncthreads();
}

// Copies rows of WIDTH bytes, which the block has made in shared memory, to where others read them.
template <int WIDTH> QC_DEVICE void qi_keep_rows(const int8_t* rows, int live, int8_t* to, int64_t to_row) {
    constexpr int pieces = WIDTH / 16;
    static_assert(WIDTH % 16 == 0, "rows of int8 have whole pieces of 16 bytes");
    for (int i = (int)threadIdx.x; i < live * pieces; i += (int)blockDim.x)
        *(uint4*)(to + i / pieces * to_row + i % pieces * 16) = ((const uint4*)rows)[i];
}
