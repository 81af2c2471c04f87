// nf4 and fp4: bitsandbytes' blocks of the flattened matrix (formats/nf4.py).  out: codes, absmax.
#pragma once
#include "table.h"
#include "tile.h"

// Codes of 16 weights from on `x`. `scale` divides those of a short last block and multiplies the others.
template <bool DIVIDE>
QC_INLINE void qe_nearest4(const float* x, int n, float scale, const float* threshold, uint8_t* codes) {
    const vf w = vload_upto(x, n), s = vset(scale);
    vstore(codes, qe_rank<true>(DIVIDE ? w / s : w * s, threshold));
}

// `by_rank` are the codes in ascending order of their values, or null where that is what codes are.
template <int BLOCK>
static int32_t qe_nf4(const qe_tile& t, const float* threshold, const uint8_t* by_rank, uint8_t zero_code) {
    alignas(64) uint8_t codes[BLOCK + 16];
    float* const absmax = (float*)t.out[1] + t.start / BLOCK;
    uint8_t* const out = t.out[0] + t.start / 2;
    const int64_t full = t.count / BLOCK, rest = t.count % BLOCK;
    for (int64_t b = 0; b <= full; b++) {
        const float* const x = t.x + b * BLOCK;
        const int64_t n = b < full ? BLOCK : rest;
        if (n == 0) break;
        const int32_t bits = qe_absmax_bits(x, n);
        if (bits >= QE_INFINITY) return QE_LEFT;
        const float largest = qc_from_bits((uint32_t)bits), divisor = largest > 1e-38f ? largest : 1e-38f;
        if (b < full) {
            absmax[b] = largest;
            const float inverse = 1.0f / divisor;
            for (int i = 0; i < BLOCK; i += 16) qe_nearest4<false>(x + i, 16, inverse, threshold, codes + i);
        } else {
            absmax[b] = divisor;
            for (int64_t i = 0; i < n; i += 16)
                qe_nearest4<true>(x + i, (int)(n - i < 16 ? n - i : 16), divisor, threshold, codes + i);
        }
        if (by_rank)
            for (int64_t i = 0; i < n; i++) codes[i] = by_rank[codes[i]];
        if (n % 2) codes[n] = zero_code;
        qe_pack4_high(codes, n + n % 2, out + b * (BLOCK / 2));
    }
    return QE_DONE;
}
