// llm_int8: signed bytes and the absmax of each row (formats/llm_int8.py).  out: codes, absmax.
#pragma once
#include "tile.h"

static int32_t qe_llm_int8(const qe_tile& t, float largest_absmax, float smallest_absmax) {
    for (int64_t i = 0; i < t.count; i += t.cols) {
        const float* const x = t.x + i;
        uint8_t* const out = t.out[0] + t.start + i;
        const float absmax = qc_from_bits((uint32_t)qe_absmax_bits(x, t.cols));
        if (!(absmax <= largest_absmax) || (absmax < smallest_absmax && absmax != 0)) return QE_LEFT;
        ((float*)t.out[1])[(t.start + i) / t.cols] = absmax;
        const vf inverse = vset(absmax == 0 ? 0.0f : 127.0f / absmax);
        for (int64_t j = 0; j < t.cols; j += 16) {
            const int n = (int)(t.cols - j < 16 ? t.cols - j : 16);
            vstore_upto(out + j, qe_truncated(vrint(vload_upto(x + j, n) * inverse)), n);
        }
    }
    return QE_DONE;
}
