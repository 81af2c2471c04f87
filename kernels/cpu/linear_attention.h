// Linear attention with decay: some rows of a head's state, and a block of tokens that change and read them.
//
// Rows of a state need each other at no token, so a task may take any of them.  R rows stay in registers while the
// tokens of a block pass if they fit there (HELD), otherwise in the memory of the state.
//
// With the delta rule, a token changes a row by its product with the key.  The product with the query is made before
// the change as well, where the processor has time while it waits for the first one:
//
//     S = S * exp(d),   u = beta (v - S k),   out = S q + u (k q),   S = S + u k
//
// The rounding error of S q + u (k q) is that of (S + u k) q to a constant: u, which both contain, is a difference of v
// and S k, and has their absolute error.
#pragma once
#include "task.h"
#include "vmath.h"

#define QA_METHOD inline __attribute__((always_inline))
#define QA_ROWS _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)

// A block of tokens as the rows of one head see it.  A token's key, query and `keeps` have whole vectors; behind the
// last column keys and queries are zero.
struct qa_block {
    const float *k, *q;
    const float* keeps;     // exp(decay) of each token and column; null if all columns keep the same
    const float* kept;      // exp(decay) of each token
    const float* beta;      // of each token, with the delta rule
    const float* products;  // k q of each token, with the delta rule
    int64_t tokens, width;
};

// f(j, lanes) for the vectors of a row: `j` is the first column, `lanes` a constant where f is inlined.
template <int64_t DEPTH, bool UNROLLED, class F> QC_INLINE void qa_columns(F f) {
    constexpr int64_t WHOLE = DEPTH / QC_LANES * QC_LANES;
    if constexpr (UNROLLED) {
        _Pragma("GCC unroll 32") for (int64_t j = 0; j < WHOLE; j += QC_LANES) f(j, QC_LANES);
    } else {
        for (int64_t j = 0; j < WHOLE; j += QC_LANES) f(j, QC_LANES);
    }
    if constexpr (DEPTH > WHOLE) f(WHOLE, (int)(DEPTH - WHOLE));
}

// Copies a token's columns to whole vectors at `to`.
template <int64_t DEPTH> QC_INLINE void qa_pack(const float* from, float* to) {
    qa_columns<DEPTH, false>([&](int64_t j, int lanes) QC_BODY { vstore(to + j, vload_upto(from + j, lanes)); });
}

// to[j] = exp(decay[j] * times), in whole vectors.
template <int64_t DEPTH> QC_INLINE void qa_decays(const float* decay, float times, float* to) {
    qa_columns<DEPTH, false>([&](int64_t j, int lanes) QC_BODY {
        vstore(to + j, vexp(vset(times) * vload_upto(decay + j, lanes)));
    });
}

// The product of a packed key and query.
template <int64_t DEPTH> QC_INLINE float qa_product(const float* k, const float* q) {
    vf sum = vzero();
    qa_columns<DEPTH, false>([&](int64_t j, int) QC_BODY { sum = vfma(vload(k + j), vload(q + j), sum); });
    return vsum(sum);
}

// vsum(x) in every lane.  What follows stays in vectors: GCC packs the scalars of two rows into one vector, and that
// takes longer than the sums.
QC_INLINE vf qa_spread(vf x) {
#if defined(QC_AVX512)
    __m512 sum = x.r[0];
    sum = sum + _mm512_shuffle_f32x4(sum, sum, 0x4e);
    sum = sum + _mm512_shuffle_f32x4(sum, sum, 0xb1);
    sum = sum + _mm512_permute_ps(sum, 0x4e);
    sum = sum + _mm512_permute_ps(sum, 0xb1);
    return {sum};
#else
    return vset(vsum(x));
#endif
}

// R rows of a state, `stride` floats apart, that begin with zeros or with what is there.
template <int R, int64_t DEPTH, bool HELD> struct qa_rows {
    static constexpr int64_t VECTORS = HELD ? (DEPTH + QC_LANES - 1) / QC_LANES : 1;
    float* const memory;
    const int64_t stride;
    vf held[R][VECTORS];

    QA_METHOD qa_rows(float* state, int64_t stride, bool begins) : memory(state), stride(stride) {
        for (int r = 0; r < R && begins && !HELD; r++) memset(memory + r * stride, 0, 4 * DEPTH);
        if constexpr (HELD)
            each([&](int r, int64_t j, int lanes) QC_BODY {
                held[r][j / QC_LANES] = begins ? vzero() : vload_upto(memory + r * stride + j, lanes);
            });
    }
    template <class F> QA_METHOD void each(F f) {
        QA_ROWS qa_columns<DEPTH, HELD>([&](int64_t j, int lanes) QC_BODY { f(r, j, lanes); });
    }
    QA_METHOD vf get(int r, int64_t j, int lanes) const {
        if constexpr (HELD) return held[r][j / QC_LANES];
        else return vload_upto(memory + r * stride + j, lanes);
    }
    QA_METHOD void set(int r, int64_t j, vf x, int lanes) {
        if constexpr (HELD) held[r][j / QC_LANES] = x;
        else vstore_upto(memory + r * stride + j, x, lanes);
    }
    QA_METHOD void write_back() {
        if constexpr (HELD)
            each([&](int r, int64_t j, int lanes) QC_BODY {
                vstore_upto(memory + r * stride + j, held[r][j / QC_LANES], lanes);
            });
    }
};

// All tokens of a block, for R rows.  `x` has a value for each row, `block.width` floats from token to token, and then
// what the tokens read.  COLUMNS: each column has a decay of its own; DELTA: with the delta rule.
template <int R, int64_t DEPTH, bool HELD, bool DELTA, bool COLUMNS>
QC_INLINE void qa_tokens(float* state, int64_t stride, bool begins, const qa_block& block, float* x) {
    constexpr int64_t WIDE = (DEPTH + QC_LANES - 1) / QC_LANES * QC_LANES;
    qa_rows<R, DEPTH, HELD> rows(state, stride, begins);
    for (int64_t t = 0; t < block.tokens; t++, x += block.width) {
        const float *const k = block.k + t * WIDE, *const q = block.q + t * WIDE;
        const auto decayed = [&](int r, int64_t j, int lanes) QC_BODY {
            return rows.get(r, j, lanes) * (COLUMNS ? vload(block.keeps + t * WIDE + j) : vset(block.kept[t]));
        };
        vf sum[R], u[R];
        QA_ROWS sum[r] = vzero(), u[r] = vset(x[r]);
        if constexpr (DELTA) {
            vf seen[R];
            QA_ROWS seen[r] = vzero();
            qa_columns<DEPTH, HELD>([&](int64_t j, int lanes) QC_BODY {
                QA_ROWS {
                    const vf row = decayed(r, j, lanes);
                    if constexpr (HELD) rows.set(r, j, row, lanes);
                    else sum[r] = vfma(row, vload(q + j), sum[r]);
                    seen[r] = vfma(row, vload(k + j), seen[r]);
                }
            });
            if constexpr (HELD)
                qa_columns<DEPTH, HELD>([&](int64_t j, int lanes) QC_BODY {
                    QA_ROWS sum[r] = vfma(rows.get(r, j, lanes), vload(q + j), sum[r]);
                });
            QA_ROWS u[r] = vset(block.beta[t]) * (u[r] - qa_spread(seen[r]));
            QA_ROWS x[r] = vsum(sum[r]) + u[r].r[0][0] * block.products[t];
            qa_columns<DEPTH, HELD>([&](int64_t j, int lanes) QC_BODY {
                QA_ROWS {
                    const vf before = HELD ? rows.get(r, j, lanes) : decayed(r, j, lanes);
                    rows.set(r, j, vfma(u[r], vload(k + j), before), lanes);
                }
            });
        } else {
            qa_columns<DEPTH, HELD>([&](int64_t j, int lanes) QC_BODY {
                QA_ROWS {
                    const vf row = vfma(u[r], vload(k + j), decayed(r, j, lanes));
                    rows.set(r, j, row, lanes);
                    sum[r] = vfma(row, vload(q + j), sum[r]);
                }
            });
            QA_ROWS x[r] = vsum(sum[r]);
        }
    }
    rows.write_back();
}

// One token of a head whose state has one row, without the delta rule.  A column's decay is `decay` times its `rate`,
// or its own (COLUMNS), or without either the same for all.
template <int64_t DEPTH, bool COLUMNS>
QC_INLINE float qa_step(
    float* row, const float* k, const float* q, float value, const float* decay, const float* rate) {
    const vf kept = COLUMNS || rate != nullptr ? vzero() : vexp(vset(*decay));
    vf sum = vzero();
    qa_columns<DEPTH, false>([&](int64_t j, int lanes) QC_BODY {
        vf keeps = kept;
        if constexpr (COLUMNS) keeps = vexp(vload_upto(decay + j, lanes));
        else if (rate != nullptr) keeps = vexp(vset(*decay) * vload_upto(rate + j, lanes));
        const vf x = vfma(vset(value), vload_upto(k + j, lanes), vload_upto(row + j, lanes) * keeps);
        vstore_upto(row + j, x, lanes);
        sum = vfma(x, vload_upto(q + j, lanes), sum);
    });
    return vsum(sum);
}
