// Elementary functions on 16 lanes, own polynomials: exp exp2 expm1 log log2 log1p tanh sigmoid erf sin cos pow.
//
// Error, measured by tests/kernels/test_vec.py against float64 over all floats' exponents: <= 2 ulp; erf, pow, sigmoid
// <= 4 ulp. Polynomials are Chebyshev interpolants of the function over the reduced range, rounded to float; reductions
// after Cephes (S. Moshier) and fdlibm.  The scalar forms are lane 0 of the vector forms, so tails give the same bits.
#pragma once
#include "vec.h"

// e^x = 2^n e^r, n = rint(x / ln 2), |r| <= ln(2)/2.  ln 2 is split so that n * 0x1.63p-1 is exact without FMA.
QC_INLINE qf q_exp(qf x) {
    x = q_min(q_set(89.0f), q_max(q_set(-105.0f), x));  // beyond: 0 and infinity; NaN passes both
    const qf n = q_rint(x * 0x1.715476p+0f);
    const qf r = q_fma(n, q_set(0x1.bd0106p-13f), q_fma(n, q_set(-0x1.63p-1f), x));
    qf p = q_set(0x1.6d117cp-10f);
    p = q_fma(p, r, q_set(0x1.120be2p-7f));
    p = q_fma(p, r, q_set(0x1.555518p-5f));
    p = q_fma(p, r, q_set(0x1.5554dcp-3f));
    p = q_fma(p, r, q_set(0.5f));
    p = q_fma(p, r * r, r) + 1.0f;
    return q_scale2(p, n);
}

QC_INLINE qf q_exp2(qf x) {
    x = q_min(q_set(130.0f), q_max(q_set(-152.0f), x));
    const qf n = q_rint(x), r = x - n;
    qf p = q_set(0x1.441412p-13f);
    p = q_fma(p, r, q_set(0x1.5f0956p-10f));
    p = q_fma(p, r, q_set(0x1.3b2a52p-7f));
    p = q_fma(p, r, q_set(0x1.c6af6cp-5f));
    p = q_fma(p, r, q_set(0x1.ebfbe0p-3f));
    p = q_fma(p, r, q_set(0x1.62e430p-1f));
    return q_scale2(q_fma(p, r, q_set(1.0f)), n);
}

// e^x - 1 = 2 (2^(n-1) (e^r - 1) + (2^(n-1) - 1/2)): half scale keeps n = 128 in range.
QC_INLINE qf q_expm1(qf x) {
    const qf c = q_min(q_set(89.0f), q_max(q_set(-20.0f), x));
    const qf n = q_rint(c * 0x1.715476p+0f);
    const qf r = q_fma(n, q_set(0x1.bd0106p-13f), q_fma(n, q_set(-0x1.63p-1f), c));
    qf p = q_set(0x1.a1256cp-13f);
    p = q_fma(p, r, q_set(0x1.6d43b0p-10f));
    p = q_fma(p, r, q_set(0x1.1110e0p-7f));
    p = q_fma(p, r, q_set(0x1.5554e8p-5f));
    p = q_fma(p, r, q_set(0x1.555556p-3f));
    p = q_fma(p, r, q_set(0.5f));
    p = q_fma(p, r * r, r);
    const qf t = q_scale2(q_set(0.5f), n), y = 2.0f * q_fma(t, p, t - 0.5f);
    return q_sel(q_lt(q_abs(x), q_set(0x1p-25f)), x, y);  // keeps -0 and the last bit of tiny x
}

// x = 2^e m with m in [sqrt(1/2), sqrt(2)), f = m - 1; log(1 + f) = f + tail, tail = -f^2/2 + f^3 P(f).
QC_INLINE qf q_log_parts(qf x, qf* f_out, qf* e_out) {
    const qm tiny = q_lt(x, q_set(0x1p-126f));
    const qi u = (qi)q_sel(tiny, x * 0x1p23f, x), k = (qi)((qu)u - 0x3f3504f3u) >> 23;
    const qf f = (qf)((qu)u - ((qu)k << 23)) - 1.0f, z = f * f;
    *e_out = q_tofloat(k) - q_sel(tiny, q_set(23.0f), qf{});
    *f_out = f;
    qf p = q_set(0x1.1d8bdep-4f);
    p = q_fma(p, f, q_set(-0x1.d658d6p-4f));
    p = q_fma(p, f, q_set(0x1.deb356p-4f));
    p = q_fma(p, f, q_set(-0x1.fcf158p-4f));
    p = q_fma(p, f, q_set(0x1.23d126p-3f));
    p = q_fma(p, f, q_set(-0x1.555b54p-3f));
    p = q_fma(p, f, q_set(0x1.999d60p-3f));
    p = q_fma(p, f, q_set(-0x1.fffffcp-3f));
    p = q_fma(p, f, q_set(0x1.555554p-2f));
    return p * f * z;
}

QC_INLINE qf q_log_special(qf x, qf y) {  // 0 -> -inf, negative -> NaN, inf and NaN as they are
    y = q_sel(q_lt(x, q_set(INFINITY)), y, x);
    y = q_sel(q_eq(x, qf{}), q_set(-INFINITY), y);
    return q_sel(q_lt(x, qf{}), q_set(NAN), y);
}

QC_INLINE qf q_log(qf x) {
    qf f, e;
    qf y = q_log_parts(x, &f, &e);
    y = q_fma(e, q_set(-0x1.bd0106p-13f), y);
    y = q_fma(f * f, q_set(-0.5f), y);
    return q_log_special(x, q_fma(e, q_set(0x1.63p-1f), f + y));
}

QC_INLINE qf q_log2(qf x) {  // log2(e) = 1 + 0x1.c551d9p-2: the one is added exactly
    qf f, e;
    const qf y = q_fma(f * f, q_set(-0.5f), q_log_parts(x, &f, &e));
    const qf small = q_fma(y, q_set(0x1.c551dap-2f), q_fma(f, q_set(0x1.c551dap-2f), y));
    return q_log_special(x, (small + f) + e);
}

// log(1 + x) = log(u) + (x - (u - 1)) / u with u = fl(1 + x) (Kahan): the second term repairs the rounding of u.
QC_INLINE qf q_log1p(qf x) {
    const qf u = x + 1.0f, repair = (x - (u - 1.0f)) / u, y = q_log(u) + repair;
    const qm plain = q_lt(q_set(0x1p-25f), q_abs(x));
    const qm finite = q_lt(u, q_set(INFINITY));
    return q_sel(plain, q_sel(finite, q_sel(q_eq(u, qf{}), q_set(-INFINITY), y), q_sel(q_nan(x), x, u)), x);
}

QC_INLINE qf q_tanh(qf x) {  // odd polynomial below 0.625, else 1 - 2 / (e^2x + 1)
    const qf a = q_abs(x), z = x * x;
    qf p = q_set(0x1.2c630ep-9f);
    p = q_fma(p, z, q_set(-0x1.1162e0p-7f));
    p = q_fma(p, z, q_set(0x1.64a85cp-6f));
    p = q_fma(p, z, q_set(-0x1.ba08b4p-5f));
    p = q_fma(p, z, q_set(0x1.1110e8p-3f));
    p = q_fma(p, z, q_set(-0x1.555556p-2f));
    const qf small = q_fma(p * z, x, x);
    const qf large = 1.0f - 2.0f / (q_exp(a + a) + 1.0f);
    return q_or(q_sel(q_lt(a, q_set(0.625f)), small, large), q_sign(x));  // tanh(-0) = -0
}

QC_INLINE qf q_sigmoid(qf x) {  // e^-|x| never overflows, so the tail below -88 keeps its digits
    const qf e = q_exp(-q_abs(x)), one = q_set(1.0f);
    return q_sel(q_lt(x, qf{}), e, one) / (1.0f + e);
}

// erf(x) = x / 4 + x P(x^2) / Q(x^2) up to 3.92, from where on it rounds to 1. The quarter is exact, and what is added
// to it is small where erf nears 1 and a rounding counts most. P and Q: a weighted least-squares fit, own coefficients.
QC_INLINE qf q_erf(qf x) {
    const qf z = x * x;
    qf p = q_set(-0x1.8bbb18p-17f);
    p = q_fma(p, z, q_set(-0x1.5877e8p-17f));
    p = q_fma(p, z, q_set(0x1.8fdc5ep-15f));
    p = q_fma(p, z, q_set(0x1.39ccf6p-5f));
    p = q_fma(p, z, q_set(0x1.a62352p-4f));
    p = q_fma(p, z, q_set(0x1.638ed4p+0f));
    qf q = q_set(0x1.f8108cp-15f);
    q = q_fma(q, z, q_set(0x1.e2f4d8p-10f));
    q = q_fma(q, z, q_set(0x1.848556p-6f));
    q = q_fma(q, z, q_set(0x1.71ff12p-3f));
    q = q_fma(q, z, q_set(0x1.96bce6p-1f));
    q = q_fma(q, z, q_set(0x1.94c9e6p+0f));
    const qf y = q_fma(x, q_set(0.25f), x * p / q);
    return q_sel(q_lt(q_set(3.92f), q_abs(x)), q_or(q_set(1.0f), q_sign(x)), y);
}

// --- through double precision, lane by lane: the compiler vectorises these loops ------------------------------------

// quadrant = rint(x 2/pi); r = x - quadrant pi/2 with pi/2 in two parts, exact products up to 2^20 quadrants (fdlibm).
// The kernels of sine and cosine on |r| <= pi/4 are good to 1e-14, so the float result is rounded almost correctly.
QC_COLD void qc_sincos_lanes(const float* x, float* y, int64_t shift) {
    for (int j = 0; j < QC_LANES; j++) {
        const double v = x[j], n = (v * 0x1.45f306dc9c883p-1 + 0x1.8p52) - 0x1.8p52;
        const double r = (v - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34, z = r * r;
        const double s = r + r * z * (-0x1.5555555555166p-3 + z * (0x1.1111110fd28f7p-7 + z * (-0x1.a019fd9820cb8p-13 +
                         z * (0x1.71d9a79f7c8bdp-19 + z * -0x1.aa27435ae367dp-26))));
        const double c = 1.0 - 0.5 * z + z * z * (0x1.5555555555435p-5 + z * (-0x1.6c16c16b60960p-10 +
                         z * (0x1.a019ff51e32bap-16 + z * (-0x1.27e25df65feabp-22 + z * 0x1.1c812551bd7f2p-29))));
        const double n_bits = n + 0x1.8p52;  // the quadrant stands in the low bits of the mantissa
        int64_t quadrant;
        memcpy(&quadrant, &n_bits, 8);
        quadrant += shift;
        const double value = quadrant & 1 ? c : s;
        y[j] = (float)(quadrant & 2 ? -value : value);
    }
    for (int j = 0; j < QC_LANES; j++) {
        if (!(fabsf(x[j]) < 1.0e6f)) y[j] = (float)(shift ? cos((double)x[j]) : sin((double)x[j]));
        if (!shift && x[j] == 0.0f) y[j] = x[j];
    }
}

// x^y = 2^(y log2 x) in double: log2 by the atanh series in (m - 1)/(m + 1), good to 2e-15; 2^r by a polynomial, 1e-11.
QC_COLD void qc_pow_lanes(const float* base, const float* exponent, float* out) {
    for (int j = 0; j < QC_LANES; j++) {
        const double v = base[j];
        int64_t u;
        memcpy(&u, &v, 8);
        const int64_t k = (int64_t)((uint64_t)u - 0x3fe6a09e667f3bcd) >> 52;
        const int64_t m_bits = (int64_t)((uint64_t)u - ((uint64_t)k << 52));
        double m;
        memcpy(&m, &m_bits, 8);
        const double s = (m - 1.0) / (m + 1.0), z = s * s;
        const double p = 0x1.ec709dc3a01a8p-1 + z * (0x1.2776c5105e0fap-1 + z * (0x1.a6175e5afaaa8p-2 +
                         z * (0x1.484d805b59017p-2 + z * (0x1.0bfcf4cbd44acp-2 + z * 0x1.eb21a2f1d0ff6p-3))));
        double t = (double)exponent[j] * ((double)k + (s * 0x1.71547652b82fep+1 + s * z * p));
        t = t < -200.0 ? -200.0 : t > 200.0 ? 200.0 : t;
        const double shifted = t + 0x1.8p52, r = t - (shifted - 0x1.8p52);
        const double e = 1.0 + r * (0x1.62e42fefa39efp-1 + r * (0x1.ebfbdff823bd4p-3 + r * (0x1.c6b08d7047e0bp-5 +
                         r * (0x1.3b2ab7184750ep-7 + r * (0x1.5d87fe8714a28p-10 + r * (0x1.4308ac1c81dc6p-13 +
                         r * (0x1.ffcb94abad672p-17 + r * (0x1.63d1c24a346d6p-20 + r * 0x1.b6390dce32a95p-24))))))));
        int64_t n;
        memcpy(&n, &shifted, 8);
        int64_t scaled;
        memcpy(&scaled, &e, 8);
        scaled += (int64_t)((uint64_t)n << 52);  // adds n to the exponent: 2^-201 < e < 2^201 stays normal
        double value;
        memcpy(&value, &scaled, 8);
        out[j] = (float)value;
    }
    for (int j = 0; j < QC_LANES; j++)  // zero, negative, infinite and NaN operands by the C library
        if (!(base[j] > 0.0f && base[j] < INFINITY && fabsf(exponent[j]) < INFINITY))
            out[j] = powf(base[j], exponent[j]);
}

// --- 16 lanes and scalars --------------------------------------------------------------------------------------------

#define QC_MATH(name)                                                       \
    QC_INLINE vf v##name(vf x) { return QC_EACH(vf, q_##name(x.r[i])); }    \
    QC_COLD float qc_##name(float x) { return q_##name(q_set(x))[0]; }
QC_MATH(exp)
QC_MATH(exp2)
QC_MATH(expm1)
QC_MATH(log)
QC_MATH(log2)
QC_MATH(log1p)
QC_MATH(tanh)
QC_MATH(sigmoid)
QC_MATH(erf)

QC_INLINE vf qc_sincos(vf x, int64_t shift) {
    float t[QC_LANES], y[QC_LANES];
    vstore(t, x);
    qc_sincos_lanes(t, y, shift);
    return vload(y);
}
QC_INLINE vf vsin(vf x) { return qc_sincos(x, 0); }
QC_INLINE vf vcos(vf x) { return qc_sincos(x, 1); }
QC_INLINE vf vpow(vf x, vf y) {
    float a[QC_LANES], b[QC_LANES], out[QC_LANES];
    vstore(a, x);
    vstore(b, y);
    qc_pow_lanes(a, b, out);
    return vload(out);
}
QC_INLINE float qc_sin(float x) { float t[QC_LANES]; vstore(t, vsin(vset(x))); return t[0]; }
QC_INLINE float qc_cos(float x) { float t[QC_LANES]; vstore(t, vcos(vset(x))); return t[0]; }
QC_INLINE float qc_pow(float x, float y) { float t[QC_LANES]; vstore(t, vpow(vset(x), vset(y))); return t[0]; }

// Functions of the C library, lane by lane: rare enough that no vector form is worth its text.
template <class F> QC_INLINE vf vlift(vf x, F f) {
    float t[QC_LANES];
    vstore(t, x);
    for (int j = 0; j < QC_LANES; j++) t[j] = f(t[j]);
    return vload(t);
}
template <class F> QC_INLINE vf vlift(vf x, vf y, F f) {
    float t[QC_LANES], u[QC_LANES];
    vstore(t, x);
    vstore(u, y);
    for (int j = 0; j < QC_LANES; j++) t[j] = f(t[j], u[j]);
    return vload(t);
}
QC_INLINE vf vfused(vf a, vf b, vf c) {  // a * b + c rounded once, on every ISA
#if defined(QC_AVX512) || defined(QC_AVX2)
    return vfma(a, b, c);
#else
    return QC_EACH(vf, ({ qf t; for (int j = 0; j < QC_W; j++) t[j] = fmaf(a.r[i][j], b.r[i][j], c.r[i][j]); t; }));
#endif
}
