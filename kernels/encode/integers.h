// int8, int4, int3, int2: a scale per group of a row or per row (formats/integers.py).  out: codes, scales, zeros.
#pragma once
#include "tile.h"

// GROUP is 0 for one scale per row. SCALE is how scales are stored.
template <int BITS, int GROUP, bool SYMMETRIC, class SCALE> static int32_t qe_integers(const qe_tile& t) {
    constexpr bool SIGNED = BITS == 8 && SYMMETRIC;
    constexpr int LARGEST = (1 << BITS) - 1, HALF = 1 << (BITS - 1), PIECE = 512;
    const int64_t group = GROUP ? GROUP : t.cols, first = t.start / group;
    typename SCALE::type* const scales = (typename SCALE::type*)t.out[1] + first;
    uint8_t* const zeros = SYMMETRIC ? nullptr : t.out[2] + first;
    alignas(64) uint8_t codes[PIECE];
    for (int64_t g = 0; g < t.count / group; g++) {
        const float* const x = t.x + g * group;
        qe_range r = qe_extremes(x, group);
        if (!r.finite || -r.low > QE_FLT_MAX / 4 || r.high > QE_FLT_MAX / 4) return QE_LEFT;  // codes may have to move
        double exact;
        if (!SYMMETRIC) {
            r.low = r.low < 0 ? r.low : 0;
            r.high = r.high > 0 ? r.high : 0;
            exact = ((double)r.high - r.low) / LARGEST;
        } else if (SIGNED) {
            exact = (double)(-r.low > r.high ? -r.low : r.high) / 127;
        } else {
            exact = (double)(-r.low >= r.high ? r.low : r.high) / -HALF;
        }
        typename SCALE::type stored = SCALE::round(exact);
        if (SCALE::widen(stored) == 0) stored = SCALE::round(1);
        const float scale = SCALE::widen(stored);
        if (scale - scale != 0) return QE_LEFT;
        scales[g] = stored;
        float zero = SIGNED ? 0 : HALF;
        if (!SYMMETRIC) {
            zero = rintf(-r.low / scale);
            zero = zero < 0 ? 0 : zero > LARGEST ? LARGEST : zero;
            zeros[g] = (uint8_t)zero;
        }
        constexpr float LOWEST = SIGNED ? -127 : 0, HIGHEST = SIGNED ? 127 : LARGEST;
        const vf s = vset(scale), z = vset(zero), low = vset(LOWEST), high = vset(HIGHEST);
        uint8_t* const to = t.out[0] + (t.start + g * group) * BITS / 8;
        for (int64_t i = 0; i < group; i += PIECE) {
            const int64_t n = group - i < PIECE ? group - i : PIECE;
            for (int64_t j = 0; j < n; j += 16) {
                const vf w = vload_upto(x + i + j, (int)(n - j < 16 ? n - j : 16));
                vf c = vrint(w / s);
                if (!SIGNED) c = c + z;
                vstore(codes + j, qe_truncated(vmin(vmax(c, low), high)));
            }
            qe_pack<BITS>(codes, n, to + i * BITS / 8);
        }
    }
    return QE_DONE;
}
