// Linears whose factors are bf16: what multiplies, by the processor, the context and the number of rows.
#pragma once
#include "bf16_blocks.h"
#include "bf16_kept.h"

// Bytes of scratch of tiles, for at most `m` rows (0: any number).
constexpr int64_t qb_tiles_scratch(int64_t k, int64_t m) {
    if (!qbt_keeps(k, m)) return qbt_scratch(k, m);
    const int64_t few = qbt_scratch(k, QBT_FEW), many = qbk_scratch(k, m);
    return few < many ? many : few;
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// Whether tiles multiply.
template <class D> QC_INLINE bool qbt_chosen(const qc_ctx* ctx, const qg_job* job) {
    return ctx->bf16_units == QC_BF16_TILES && job->m >= qbt_least<D>(job->k, job->m);
}

// By tiles. `m`: what `qb_tiles_scratch` was told.
template <class D, class T> QC_INLINE void qb_run_tiles(qc_ctx* ctx, qg_job* job, int64_t m) {
    if (!qbt_keeps(job->k, m)) qbt_run<D, T>(ctx, job, m);
    else if (job->m > QBT_FEW) qbk_run<D, T>(ctx, job, m);
    else qbt_run<D, T>(ctx, job, QBT_FEW);
}

// In blocks, or MAX rows at a time straight from codes. ROWS: for how many rows at a time there is scratch.
template <class D, class T, int MAX, int64_t ROWS = INT64_MAX> QC_INLINE void qb_run_straight(
    qc_ctx* ctx, qg_job* job) {
    constexpr int BLOCKS = qb_block_policy<D>::LEAST, LEAST = ROWS < BLOCKS ? 0 : BLOCKS;
    constexpr bool ALWAYS = LEAST == 2 && ROWS < INT64_MAX;  // qb_run_few has one row multiplied in fp32
    if constexpr (LEAST > 0)
        if (ALWAYS || job->m >= LEAST)
            return qb_run_blocks<typename qb_block_decoder<D>::type, T, ROWS>(ctx, job);
    constexpr int FEW = LEAST == 0 || LEAST > MAX ? MAX : LEAST - 1;
    if constexpr (!ALWAYS) qg_share_few(ctx, job, qb_few_task<D, T, FEW>);
}
#endif

// How many rows are multiplied in fp32, where products of x and codes are exact in both.
//
// On processors with tiles, where `vdpbf16ps` has half the rate of FMA, up to qb_coded<D>::FLOATS. On a Xeon of family
// 6, model 207, that takes 0.53 to 0.95 of the time for 1 to 8 rows of int8 and q8_0, and 0.80 to 0.93 for 1 and 2 rows
// of codes of 2 and 4 bits in one plane (int2, int4, q4_0, q4_1, q4_K, iq4_nl, mxfp4). nf4 stays, since bf16 rounds its
// values, and so do codes in two planes, which take longer in fp32. From five rows on, tiles take less time where words
// hold bytes (0.58 to 0.90).
//
// Elsewhere one row of codes of 8 bits: making pairs of them takes longer than the products that these save (0.8 to 0.9
// of the time on a Zen 4).
#if defined(QC_AVX512) && !defined(QB_NO_BF16)
template <class D> QC_INLINE int64_t qb_rows_in_floats(const qc_ctx* ctx) {
    return ctx->bf16_units == QC_BF16_TILES ? qb_coded<D>::FLOATS : qb_coded<D>::ALONE;
}
// Of a linear, which tiles may multiply (experts have none).
enum { QB_LINEAR_FLOATS = 4 };
template <class D> QC_INLINE int64_t qb_linear_rows_in_floats(const qc_ctx* ctx, const qg_job* job) {
    const int64_t rows = qb_rows_in_floats<D>(ctx);
    if constexpr (qbt_bytes_of<D>() != 0)
        if (ctx->bf16_units == QC_BF16_TILES && qbt_span<D>(job->k, job->m) > 0) return QB_LINEAR_FLOATS;
    return rows;
}
#endif

// Few rows of T, MAX at a time; in fp32 without AVX512-BF16, or for 8-bit floats without AVX-512 VBMI. `m`: the most
// rows for which tiles have room at a time, 0 for any.
template <class D, class T, int MAX> static void qb_run_few(qc_ctx* ctx, qg_job* job, int64_t m) {
#if defined(QC_AVX512) && !defined(QB_NO_BF16)
    if constexpr (MAX == 1 && qb_coded<D>::ALONE) return qg_run_few<D, MAX>(ctx, job);
    if constexpr (qb_coded<D>::FLOATS > 0)
        if (job->m <= qb_linear_rows_in_floats<D>(ctx, job)) return qg_run_few<D, MAX>(ctx, job);
    if constexpr (MAX > 1)
        if (qbt_chosen<D>(ctx, job)) return qb_run_tiles<D, T>(ctx, job, m);
    if (qb_block_decoder<D>::runs()) return qb_run_straight<D, T, MAX, MAX>(ctx, job);
#endif
    qg_run_few<D, MAX>(ctx, job);
}

// Rows of T times a weight. MAX is how many rows can be multiplied straight from codes, 0 if none. Where the
// processor lacks an instruction the job runs in fp32 as it is. `m`: as of `qb_run_few`.
template <class D, class T, int MAX> static void qb_run(qc_ctx* ctx, qg_job* job, int64_t m) {
#if defined(QC_AVX512) && !defined(QB_NO_BF16)
    // Panels need no lookups of 8-bit floats.
    if (MAX == 0 ? __builtin_cpu_supports("avx512bf16") : qb_block_decoder<D>::runs()) {
        if (qbt_chosen<D>(ctx, job)) return qb_run_tiles<D, T>(ctx, job, m);
        constexpr int64_t MOST = MAX > 0 ? qb_block_policy<D>::MOST : 0;
        if constexpr (MOST == INT64_MAX) {
            return qb_run_straight<D, T, MAX>(ctx, job);
        } else {
            if constexpr (MAX > 0)
                if (job->m <= MOST) return qb_run_straight<D, T, MAX>(ctx, job);
            job->load_x = job->window ? job->load_words : qb_same<T>::value ? nullptr : qb_load_x<T>;
            job->loads_words = true;
            job->decode = qb_decode_panel<D>, job->multiply = qg_product<qb_bf16>;
        }
    }
#endif
    qg_run(ctx, job);
}
