// A logical vector of 16 lanes, the same for every ISA: `vf` floats, `vi` int32, `vm` masks.
//
//   AVX-512 (F, BW, DQ, VL)   one zmm register; masks are k registers
//   AVX2 + FMA + F16C         two ymm registers; masks are all-ones lanes
//   otherwise                 four 128-bit GCC vectors (SSE2, NEON, or whatever the compiler makes of them)
//
// bf16 and f16 exist in memory only: loads widen exactly, stores round to nearest even and keep NaN.  Nothing is fused
// unless it says so: compile with -ffp-contract=off.  `vfma` fuses where the ISA has FMA and rounds twice elsewhere;
// every function gives the same bits for a lane whatever the other lanes hold, so loop tails agree with loop bodies.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define QC_INLINE static inline __attribute__((always_inline, unused))
#define QC_BODY __attribute__((always_inline))  // behind a lambda's parameters
#define QC_COLD static __attribute__((noinline, unused))

// --- storage types and their scalar conversions ---------------------------------------------------------------------

struct qc_bf16 { uint16_t bits; };
struct qc_f16 { uint16_t bits; };

QC_INLINE uint32_t qc_bits(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
QC_INLINE float qc_from_bits(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

QC_INLINE float qc_load(const float* p) { return *p; }
QC_INLINE float qc_load(const qc_bf16* p) { return qc_from_bits((uint32_t)p->bits << 16); }
QC_INLINE double qc_load(const double* p) { return *p; }
QC_INLINE int64_t qc_load(const int64_t* p) { return *p; }
QC_INLINE int32_t qc_load(const int32_t* p) { return *p; }
QC_INLINE int16_t qc_load(const int16_t* p) { return *p; }
QC_INLINE int8_t qc_load(const int8_t* p) { return *p; }
QC_INLINE uint8_t qc_load(const uint8_t* p) { return *p; }
QC_INLINE bool qc_load(const bool* p) { return *p; }

QC_INLINE uint16_t qc_to_bf16_bits(float x) {
    const uint32_t u = qc_bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// f16 <-> f32 after F. Giesen, "Half to float done quic(k)": one multiplication renormalises subnormals exactly.
QC_INLINE float qc_load(const qc_f16* p) {
    const uint32_t magnitude = p->bits & 0x7fff;
    uint32_t u = qc_bits(qc_from_bits(magnitude << 13) * 0x1p112f);
    if (magnitude > 0x7bff) u |= 0x7f800000;
    return qc_from_bits(u | (uint32_t)(p->bits & 0x8000) << 16);
}

QC_INLINE uint16_t qc_to_f16_bits(float x) {
    const uint32_t sign = qc_bits(x) >> 16 & 0x8000, u = qc_bits(x) & 0x7fffffff;
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x1ff));
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
    if (u < 0x38800000)  // result is subnormal: adding 0.5 lets the FPU round at the right bit
        return (uint16_t)(sign | (qc_bits(qc_from_bits(u) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13));
}

QC_INLINE void qc_store(float* p, float x) { *p = x; }
QC_INLINE void qc_store(qc_bf16* p, float x) { p->bits = qc_to_bf16_bits(x); }
QC_INLINE void qc_store(qc_f16* p, float x) { p->bits = qc_to_f16_bits(x); }
QC_INLINE void qc_store(double* p, double x) { *p = x; }
QC_INLINE void qc_store(int64_t* p, int64_t x) { *p = x; }
QC_INLINE void qc_store(int32_t* p, int32_t x) { *p = x; }
QC_INLINE void qc_store(int16_t* p, int16_t x) { *p = x; }
QC_INLINE void qc_store(int8_t* p, int8_t x) { *p = x; }
QC_INLINE void qc_store(uint8_t* p, uint8_t x) { *p = x; }
QC_INLINE void qc_store(bool* p, bool x) { *p = x; }

QC_INLINE float qc_round_bf16(float x) { return qc_from_bits((uint32_t)qc_to_bf16_bits(x) << 16); }
QC_INLINE float qc_round_f16(float x) { const qc_f16 h = {qc_to_f16_bits(x)}; return qc_load(&h); }

// --- one register: `qf` floats, `qi` int32, `qm` a mask --------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QC_W 16
#define QC_REGS 1
#define QC_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QC_W 8
#define QC_REGS 2
#define QC_AVX2 1
#else
#define QC_W 4
#define QC_REGS 4
#endif
#define QC_LANES 16

typedef float qf __attribute__((vector_size(4 * QC_W)));
typedef int32_t qi __attribute__((vector_size(4 * QC_W)));
typedef uint32_t qu __attribute__((vector_size(4 * QC_W)));
typedef uint16_t qh __attribute__((vector_size(2 * QC_W)));  // bf16 or f16 bits
typedef int8_t qb __attribute__((vector_size(QC_W)));
typedef float qf_unaligned __attribute__((vector_size(4 * QC_W), aligned(4), may_alias));
typedef int32_t qi_unaligned __attribute__((vector_size(4 * QC_W), aligned(4), may_alias));

QC_INLINE qf q_load(const float* p) { return *(const qf_unaligned*)p; }
QC_INLINE qi q_load(const int32_t* p) { return *(const qi_unaligned*)p; }
QC_INLINE void q_store(float* p, qf x) { *(qf_unaligned*)p = x; }
QC_INLINE void q_store(int32_t* p, qi x) { *(qi_unaligned*)p = x; }
QC_INLINE qh q_load_h(const void* p) { qh h; memcpy(&h, p, sizeof h); return h; }
QC_INLINE void q_store_h(void* p, qh h) { memcpy(p, &h, sizeof h); }
QC_INLINE qf q_set(float x) { return x - qf{}; }
QC_INLINE qi q_seti(int32_t x) { return x - qi{}; }

#if defined(QC_AVX512)
typedef __mmask16 qm;
QC_INLINE qf q_fma(qf a, qf b, qf c) { return _mm512_fmadd_ps(a, b, c); }
QC_INLINE qf q_sqrt(qf a) { return _mm512_sqrt_ps(a); }
QC_INLINE qf q_min(qf a, qf b) { return _mm512_min_ps(a, b); }  // b where either is NaN, as MINPS
QC_INLINE qf q_max(qf a, qf b) { return _mm512_max_ps(a, b); }
QC_INLINE qf q_rint(qf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QC_INLINE qf q_floor(qf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
QC_INLINE qf q_ceil(qf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
QC_INLINE qf q_trunc(qf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
QC_INLINE qi q_toint(qf a) { return (qi)_mm512_cvttps_epi32(a); }  // truncates; out of range is unspecified
QC_INLINE qf q_tofloat(qi a) { return _mm512_cvtepi32_ps((__m512i)a); }
QC_INLINE qf q_scale2(qf a, qf n) { return _mm512_scalef_ps(a, n); }  // a * 2^n for integral n
QC_INLINE qm q_lt(qf a, qf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
QC_INLINE qm q_le(qf a, qf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
QC_INLINE qm q_eq(qf a, qf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
QC_INLINE qm q_lt(qi a, qi b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
QC_INLINE qm q_eq(qi a, qi b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
QC_INLINE qm q_ltu(qi a, qi b) { return _mm512_cmplt_epu32_mask((__m512i)a, (__m512i)b); }
QC_INLINE qf q_sel(qm m, qf a, qf b) { return _mm512_mask_blend_ps(m, b, a); }
QC_INLINE qi q_sel(qm m, qi a, qi b) { return (qi)_mm512_mask_blend_epi32(m, (__m512i)b, (__m512i)a); }
QC_INLINE qm q_setm(bool x) { return x ? 0xffff : 0; }
QC_INLINE qm q_not(qm m) { return (qm)~m; }
QC_INLINE int q_any(qm m) { return m != 0; }
QC_INLINE qm q_first(int n) { return (qm)((1u << n) - 1); }  // lanes below n, 0 <= n <= 16
QC_INLINE qm q_loadm(const bool* p) {
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return _mm_test_epi8_mask(b, b);
}
QC_INLINE void q_storem(bool* p, qm m) { _mm_storeu_si128((__m128i*)p, _mm_maskz_set1_epi8(m, 1)); }
QC_INLINE qi q_maskbits(qm m) { return (qi)_mm512_movm_epi32(m); }
QC_INLINE qf q_from_f16(qh h) { return _mm512_cvtph_ps((__m256i)h); }
QC_INLINE qh q_to_f16(qf x) { return (qh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
typedef qi qm;
QC_INLINE qf q_sel(qm m, qf a, qf b) { return m ? a : b; }
QC_INLINE qi q_sel(qm m, qi a, qi b) { return m ? a : b; }
QC_INLINE qm q_lt(qf a, qf b) { return a < b; }
QC_INLINE qm q_le(qf a, qf b) { return a <= b; }
QC_INLINE qm q_eq(qf a, qf b) { return a == b; }
QC_INLINE qm q_lt(qi a, qi b) { return a < b; }
QC_INLINE qm q_eq(qi a, qi b) { return a == b; }
QC_INLINE qm q_ltu(qi a, qi b) { return (qm)((qu)a < (qu)b); }
QC_INLINE qm q_setm(bool x) { return q_seti(-(int32_t)x); }
QC_INLINE qm q_not(qm m) { return ~m; }
QC_INLINE int q_any(qm m) { int32_t any = 0; for (int j = 0; j < QC_W; j++) any |= m[j]; return any != 0; }
QC_INLINE qm q_loadm(const bool* p) { qb b; memcpy(&b, p, sizeof b); return __builtin_convertvector(b, qi) != 0; }
QC_INLINE void q_storem(bool* p, qm m) { const qb b = __builtin_convertvector(m & 1, qb); memcpy(p, &b, sizeof b); }
QC_INLINE qi q_maskbits(qm m) { return m; }
QC_INLINE qf q_tofloat(qi a) { return __builtin_convertvector(a, qf); }
QC_INLINE qi q_toint(qf a) { return __builtin_convertvector(a, qi); }
QC_INLINE qf q_scale2(qf a, qf n) {  // two factors: neither overflows, and only the last product can round (subnormals)
    const qi k = q_toint(n), half = k >> 1;
    return a * (qf)((half + 127) << 23) * (qf)((k - half + 127) << 23);
}
QC_INLINE qm q_first(int n) {
    qi lane;
    for (int j = 0; j < QC_W; j++) lane[j] = j;
    return lane < n;
}
#if defined(QC_AVX2)
QC_INLINE qf q_fma(qf a, qf b, qf c) { return _mm256_fmadd_ps(a, b, c); }
QC_INLINE qf q_sqrt(qf a) { return _mm256_sqrt_ps(a); }
QC_INLINE qf q_min(qf a, qf b) { return _mm256_min_ps(a, b); }
QC_INLINE qf q_max(qf a, qf b) { return _mm256_max_ps(a, b); }
QC_INLINE qf q_rint(qf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QC_INLINE qf q_floor(qf a) { return _mm256_floor_ps(a); }
QC_INLINE qf q_ceil(qf a) { return _mm256_ceil_ps(a); }
QC_INLINE qf q_trunc(qf a) { return _mm256_round_ps(a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
QC_INLINE qf q_from_f16(qh h) { return _mm256_cvtph_ps((__m128i)h); }
QC_INLINE qh q_to_f16(qf x) { return (qh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
QC_INLINE qf q_fma(qf a, qf b, qf c) { return a * b + c; }
QC_INLINE qf q_sqrt(qf a) { for (int j = 0; j < QC_W; j++) a[j] = sqrtf(a[j]); return a; }
QC_INLINE qf q_min(qf a, qf b) { return a < b ? a : b; }
QC_INLINE qf q_max(qf a, qf b) { return a > b ? a : b; }
QC_INLINE qf q_abs(qf a);
// Adding and subtracting 1.5 * 2^23 rounds to nearest even where a fraction exists (|a| < 2^23); the sign of zero is
// kept.
QC_INLINE qf q_rint(qf a) {
    const qf magnitude = (qf)((qi)a & 0x7fffffff), rounded = magnitude + 0x1p23f - 0x1p23f;
    return (magnitude < 0x1p23f) ? (qf)((qi)rounded | ((qi)a & (int32_t)0x80000000)) : a;
}
QC_INLINE qf q_floor(qf a) {
    const qf r = q_rint(a), down = r - 1.0f;
    return r > a ? down : r;
}
QC_INLINE qf q_ceil(qf a) { return -q_floor(-a); }
QC_INLINE qf q_trunc(qf a) {
    const qf down = q_floor((qf)((qi)a & 0x7fffffff));
    return (qf)((qi)down | ((qi)a & (int32_t)0x80000000));
}
QC_INLINE qf q_from_f16(qh h) {
    const qi u = __builtin_convertvector(h, qi), magnitude = u & 0x7fff;
    const qi finite = (qi)((qf)(magnitude << 13) * 0x1p112f);
    return (qf)((magnitude > 0x7bff ? finite | 0x7f800000 : finite) | (u & 0x8000) << 16);
}
QC_INLINE qh q_to_f16(qf x) { qh h; for (int j = 0; j < QC_W; j++) h[j] = qc_to_f16_bits(x[j]); return h; }
#endif
#endif

QC_INLINE qf q_abs(qf a) { return (qf)((qi)a & 0x7fffffff); }
QC_INLINE qf q_sign(qf a) { return (qf)((qi)a & (int32_t)0x80000000); }  // +0 or -0
QC_INLINE qf q_or(qf a, qf b) { return (qf)((qi)a | (qi)b); }
QC_INLINE qf q_and(qf a, qf b) { return (qf)((qi)a & (qi)b); }
QC_INLINE qm q_nan(qf a) { return q_not(q_eq(a, a)); }
QC_INLINE qf q_from_bf16(qh h) { return (qf)(__builtin_convertvector(h, qi) << 16); }
QC_INLINE qi q_round_bf16_bits(qf x) {
    const qu u = (qu)x, odd = u >> 16 & 1;  // unsigned: the sum of a NaN, which is not taken, may wrap
    return q_sel(q_nan(x), (qi)(u | 0x400000), (qi)(u + 0x7fff + odd));
}
QC_INLINE qh q_to_bf16(qf x) {
    const qu u = (qu)q_round_bf16_bits(x) >> 16;
#if defined(QC_AVX512)
    return (qh)_mm512_cvtepi32_epi16((__m512i)u);
#elif defined(QC_AVX2)
    const __m128i lo = _mm256_castsi256_si128((__m256i)u), hi = _mm256_extracti128_si256((__m256i)u, 1);
    return (qh)_mm_packus_epi32(lo, hi);
#else
    return __builtin_convertvector(u, qh);
#endif
}
QC_INLINE qf q_round_bf16(qf x) { return (qf)(q_round_bf16_bits(x) & (int32_t)0xffff0000); }
QC_INLINE qf q_round_f16(qf x) { return q_from_f16(q_to_f16(x)); }

// IEEE 754-2019 maximum/minimum: NaN if either is NaN, -0 < +0.
QC_INLINE qf q_maximum(qf a, qf b) {
    return q_sel(q_nan(a), a, q_sel(q_eq(a, b), q_and(a, b), q_max(a, b)));
}
QC_INLINE qf q_minimum(qf a, qf b) {
    return q_sel(q_nan(a), a, q_sel(q_eq(a, b), q_or(a, b), q_min(a, b)));
}
// maxnum/minnum: the other operand where one is NaN.
QC_INLINE qf q_maxnum(qf a, qf b) { return q_sel(q_nan(b), a, q_max(a, b)); }
QC_INLINE qf q_minnum(qf a, qf b) { return q_sel(q_nan(b), a, q_min(a, b)); }

// --- 16 lanes --------------------------------------------------------------------------------------------------------

struct vf { qf r[QC_REGS]; };
struct vi { qi r[QC_REGS]; };
struct vm { qm r[QC_REGS]; };

// A value of type T whose register i is the expression (which may use `i`), for each register.
#define QC_REG_(I, ...) { constexpr int i = I; (void)i; out_.r[i] = (__VA_ARGS__); }
#if QC_REGS == 1
#define QC_EACH(T, ...) ({ T out_; QC_REG_(0, __VA_ARGS__) out_; })
#elif QC_REGS == 2
#define QC_EACH(T, ...) ({ T out_; QC_REG_(0, __VA_ARGS__) QC_REG_(1, __VA_ARGS__) out_; })
#else
#define QC_EACH(T, ...) \
    ({ T out_; QC_REG_(0, __VA_ARGS__) QC_REG_(1, __VA_ARGS__) QC_REG_(2, __VA_ARGS__) QC_REG_(3, __VA_ARGS__) out_; })
#endif

QC_INLINE vf vset(float x) { return QC_EACH(vf, q_set(x)); }
QC_INLINE vi vset(int32_t x) { return QC_EACH(vi, q_seti(x)); }
QC_INLINE vm vset(bool x) { return QC_EACH(vm, q_setm(x)); }
QC_INLINE vf vzero() { return QC_EACH(vf, qf{}); }

QC_INLINE vf operator+(vf a, vf b) { return QC_EACH(vf, a.r[i] + b.r[i]); }
QC_INLINE vf operator-(vf a, vf b) { return QC_EACH(vf, a.r[i] - b.r[i]); }
QC_INLINE vf operator*(vf a, vf b) { return QC_EACH(vf, a.r[i] * b.r[i]); }
QC_INLINE vf operator/(vf a, vf b) { return QC_EACH(vf, a.r[i] / b.r[i]); }
QC_INLINE vf operator-(vf a) { return QC_EACH(vf, -a.r[i]); }
QC_INLINE vf vfma(vf a, vf b, vf c) { return QC_EACH(vf, q_fma(a.r[i], b.r[i], c.r[i])); }  // a * b + c
QC_INLINE vf vsqrt(vf a) { return QC_EACH(vf, q_sqrt(a.r[i])); }
QC_INLINE vf vrsqrt(vf a) { return QC_EACH(vf, 1.0f / q_sqrt(a.r[i])); }  // two correct roundings: <= 1.5 ulp
QC_INLINE vf vabs(vf a) { return QC_EACH(vf, q_abs(a.r[i])); }
QC_INLINE vf vcopysign(vf a, vf b) { return QC_EACH(vf, q_or(q_abs(a.r[i]), q_sign(b.r[i]))); }
QC_INLINE vf vrint(vf a) { return QC_EACH(vf, q_rint(a.r[i])); }  // halves to even
QC_INLINE vf vfloor(vf a) { return QC_EACH(vf, q_floor(a.r[i])); }
QC_INLINE vf vceil(vf a) { return QC_EACH(vf, q_ceil(a.r[i])); }
QC_INLINE vf vtrunc(vf a) { return QC_EACH(vf, q_trunc(a.r[i])); }
QC_INLINE vf vround(vf a) {  // halves away from zero: adding the float below one half never carries a smaller fraction
    return QC_EACH(vf, q_trunc(a.r[i] + q_or(q_set(0x1.fffffep-2f), q_sign(a.r[i]))));
}
QC_INLINE vf vmin(vf a, vf b) { return QC_EACH(vf, q_min(a.r[i], b.r[i])); }  // b where either is NaN (MINPS)
QC_INLINE vf vmax(vf a, vf b) { return QC_EACH(vf, q_max(a.r[i], b.r[i])); }
QC_INLINE vf vmaximum(vf a, vf b) { return QC_EACH(vf, q_maximum(a.r[i], b.r[i])); }
QC_INLINE vf vminimum(vf a, vf b) { return QC_EACH(vf, q_minimum(a.r[i], b.r[i])); }
QC_INLINE vf vmaxnum(vf a, vf b) { return QC_EACH(vf, q_maxnum(a.r[i], b.r[i])); }
QC_INLINE vf vminnum(vf a, vf b) { return QC_EACH(vf, q_minnum(a.r[i], b.r[i])); }
QC_INLINE vf vround_bf16(vf a) { return QC_EACH(vf, q_round_bf16(a.r[i])); }
QC_INLINE vf vround_f16(vf a) { return QC_EACH(vf, q_round_f16(a.r[i])); }

QC_INLINE vi operator+(vi a, vi b) { return QC_EACH(vi, (qi)((qu)a.r[i] + (qu)b.r[i])); }
QC_INLINE vi operator-(vi a, vi b) { return QC_EACH(vi, (qi)((qu)a.r[i] - (qu)b.r[i])); }
QC_INLINE vi operator*(vi a, vi b) { return QC_EACH(vi, (qi)((qu)a.r[i] * (qu)b.r[i])); }
QC_INLINE vi operator&(vi a, vi b) { return QC_EACH(vi, a.r[i] & b.r[i]); }
QC_INLINE vi operator|(vi a, vi b) { return QC_EACH(vi, a.r[i] | b.r[i]); }
QC_INLINE vi operator^(vi a, vi b) { return QC_EACH(vi, a.r[i] ^ b.r[i]); }
QC_INLINE vi vmax(vi a, vi b) { return QC_EACH(vi, a.r[i] < b.r[i] ? b.r[i] : a.r[i]); }
QC_INLINE vi vshl(vi a, int n) { return QC_EACH(vi, (qi)((qu)a.r[i] << n)); }
QC_INLINE vi vshr(vi a, int n) { return QC_EACH(vi, a.r[i] >> n); }        // arithmetic
QC_INLINE vi vshru(vi a, int n) { return QC_EACH(vi, (qi)((qu)a.r[i] >> n)); }

QC_INLINE vm vlt(vf a, vf b) { return QC_EACH(vm, q_lt(a.r[i], b.r[i])); }  // ordered: false where either is NaN
QC_INLINE vm vle(vf a, vf b) { return QC_EACH(vm, q_le(a.r[i], b.r[i])); }
QC_INLINE vm veq(vf a, vf b) { return QC_EACH(vm, q_eq(a.r[i], b.r[i])); }
QC_INLINE vm vnan(vf a) { return QC_EACH(vm, q_nan(a.r[i])); }
QC_INLINE vm vlt(vi a, vi b) { return QC_EACH(vm, q_lt(a.r[i], b.r[i])); }
QC_INLINE vm veq(vi a, vi b) { return QC_EACH(vm, q_eq(a.r[i], b.r[i])); }
QC_INLINE vm vltu(vi a, vi b) { return QC_EACH(vm, q_ltu(a.r[i], b.r[i])); }
QC_INLINE vm operator&(vm a, vm b) { return QC_EACH(vm, (qm)(a.r[i] & b.r[i])); }
QC_INLINE vm operator|(vm a, vm b) { return QC_EACH(vm, (qm)(a.r[i] | b.r[i])); }
QC_INLINE vm operator^(vm a, vm b) { return QC_EACH(vm, (qm)(a.r[i] ^ b.r[i])); }
QC_INLINE vm operator~(vm a) { return QC_EACH(vm, q_not(a.r[i])); }
QC_INLINE vf vsel(vm m, vf a, vf b) { return QC_EACH(vf, q_sel(m.r[i], a.r[i], b.r[i])); }
QC_INLINE vi vsel(vm m, vi a, vi b) { return QC_EACH(vi, q_sel(m.r[i], a.r[i], b.r[i])); }
QC_INLINE vm vsel(vm m, vm a, vm b) { return (m & a) | (~m & b); }
QC_INLINE bool vany(vm m) { int any = 0; for (int k = 0; k < QC_REGS; k++) any |= q_any(m.r[k]); return any; }
QC_INLINE vm vfirst(int n) {  // lanes below n
    return QC_EACH(vm, q_first(n - i * QC_W < 0 ? 0 : n - i * QC_W > QC_W ? QC_W : n - i * QC_W));
}

QC_INLINE vf vtofloat(vi a) { return QC_EACH(vf, q_tofloat(a.r[i])); }
QC_INLINE vi vmaskbits(vm m) { return QC_EACH(vi, q_maskbits(m.r[i])); }  // 0 or -1
QC_INLINE vi vbits(vf a) { return QC_EACH(vi, (qi)a.r[i]); }
QC_INLINE vf vfrombits(vi a) { return QC_EACH(vf, (qf)a.r[i]); }
QC_INLINE vi vtoint(vf a) {  // truncates, saturates, NaN gives 0
    return QC_EACH(vi, q_sel(q_nan(a.r[i]), qi{}, q_sel(q_lt(a.r[i], q_set(0x1p31f)),
                   q_toint(q_max(a.r[i], q_set(-0x1p31f))), q_seti(INT32_MAX))));
}

// --- memory ----------------------------------------------------------------------------------------------------------

QC_INLINE vf vload(const float* p) { return QC_EACH(vf, q_load(p + i * QC_W)); }
QC_INLINE vf vload(const qc_bf16* p) { return QC_EACH(vf, q_from_bf16(q_load_h(p + i * QC_W))); }
QC_INLINE vf vload(const qc_f16* p) { return QC_EACH(vf, q_from_f16(q_load_h(p + i * QC_W))); }
QC_INLINE vi vload(const int32_t* p) { return QC_EACH(vi, q_load(p + i * QC_W)); }
QC_INLINE vi vload(const int16_t* p) {
    typedef int16_t q16 __attribute__((vector_size(2 * QC_W)));
    return QC_EACH(vi, __builtin_convertvector((q16)q_load_h(p + i * QC_W), qi));
}
// Bytes: GCC 12 widens a vector of them lane by lane where it is not told the instruction.
#if defined(QC_AVX512)
QC_INLINE vi vload(const int8_t* p) { return {(qi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
QC_INLINE vi vload(const uint8_t* p) { return {(qi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
#elif defined(QC_AVX2)
QC_INLINE vi vload(const int8_t* p) {
    return QC_EACH(vi, (qi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * QC_W))));
}
QC_INLINE vi vload(const uint8_t* p) {
    return QC_EACH(vi, (qi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * QC_W))));
}
#else
QC_INLINE vi vload(const int8_t* p) {
    return QC_EACH(vi, ({ qb b; memcpy(&b, p + i * QC_W, sizeof b); __builtin_convertvector(b, qi); }));
}
QC_INLINE vi vload(const uint8_t* p) { return vload((const int8_t*)p) & vset((int32_t)255); }
#endif
QC_INLINE vm vload(const bool* p) { return QC_EACH(vm, q_loadm(p + i * QC_W)); }

QC_INLINE void vstore(float* p, vf x) { for (int k = 0; k < QC_REGS; k++) q_store(p + k * QC_W, x.r[k]); }
QC_INLINE void vstore(qc_bf16* p, vf x) {
    for (int k = 0; k < QC_REGS; k++) q_store_h(p + k * QC_W, q_to_bf16(x.r[k]));
}
QC_INLINE void vstore(qc_f16* p, vf x) { for (int k = 0; k < QC_REGS; k++) q_store_h(p + k * QC_W, q_to_f16(x.r[k])); }
QC_INLINE void vstore(int32_t* p, vi x) { for (int k = 0; k < QC_REGS; k++) q_store(p + k * QC_W, x.r[k]); }
QC_INLINE void vstore(int16_t* p, vi x) {
    for (int k = 0; k < QC_REGS; k++) q_store_h(p + k * QC_W, __builtin_convertvector((qu)x.r[k], qh));
}
// 16 numbers of 4 bits in 8 bytes, the first in the low bits.
QC_INLINE vi vnibbles(const void* p) {
    uint64_t bits;
    memcpy(&bits, p, sizeof bits);
#if QC_REGS == 1
    const qi low = q_seti((int32_t)bits), high = q_seti((int32_t)(bits >> 32));
    const qi words = q_sel(q_first(8), low, high), shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    return {(qi)((qu)words >> (qu)shifts) & 15};
#elif QC_REGS == 2
    const qi shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    return QC_EACH(vi, (qi)((qu)q_seti((int32_t)(bits >> 32 * i)) >> (qu)shifts) & 15);
#else
    const qi shifts = {0, 4, 8, 12};
    return QC_EACH(vi, (qi)((qu)q_seti((int32_t)(bits >> 16 * i)) >> (qu)shifts) & 15);
#endif
}
QC_INLINE void vstore(int8_t* p, vi x) {
    for (int k = 0; k < QC_REGS; k++) {
        const qb b = __builtin_convertvector(x.r[k], qb);
        memcpy(p + k * QC_W, &b, sizeof b);
    }
}
QC_INLINE void vstore(uint8_t* p, vi x) { vstore((int8_t*)p, x); }
QC_INLINE void vstore(bool* p, vm x) { for (int k = 0; k < QC_REGS; k++) q_storem(p + k * QC_W, x.r[k]); }

// The first n lanes (0 <= n <= 16); the others read as zero and are not touched in memory.
#if defined(QC_AVX512)
QC_INLINE vf vload_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(q_first(n), p)}; }
QC_INLINE vf vload_n(const qc_bf16* p, int n) { return {q_from_bf16((qh)_mm256_maskz_loadu_epi16(q_first(n), p))}; }
QC_INLINE vf vload_n(const qc_f16* p, int n) { return {q_from_f16((qh)_mm256_maskz_loadu_epi16(q_first(n), p))}; }
QC_INLINE vi vload_n(const int32_t* p, int n) { return {(qi)_mm512_maskz_loadu_epi32(q_first(n), p)}; }
QC_INLINE vm vload_n(const bool* p, int n) {
    const __m128i b = _mm_maskz_loadu_epi8(q_first(n), p);
    return {_mm_test_epi8_mask(b, b)};
}
QC_INLINE void vstore_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, q_first(n), x.r[0]); }
QC_INLINE void vstore_n(qc_bf16* p, vf x, int n) {
    _mm256_mask_storeu_epi16(p, q_first(n), (__m256i)q_to_bf16(x.r[0]));
}
QC_INLINE void vstore_n(qc_f16* p, vf x, int n) { _mm256_mask_storeu_epi16(p, q_first(n), (__m256i)q_to_f16(x.r[0])); }
QC_INLINE void vstore_n(int32_t* p, vi x, int n) { _mm512_mask_storeu_epi32(p, q_first(n), (__m512i)x.r[0]); }
#endif
template <class T> QC_INLINE auto vload_n(const T* p, int n) {
    T t[QC_LANES] = {};
    for (int j = 0; j < n; j++) t[j] = p[j];
    return vload(t);
}
template <class T, class V> QC_INLINE void vstore_n(T* p, V x, int n) {
    T t[QC_LANES];
    vstore(t, x);
    for (int j = 0; j < n; j++) p[j] = t[j];
}

// All 16 lanes where n is 16, which is a constant in loop bodies, else the first n.
template <class T> QC_INLINE auto vload_upto(const T* p, int n) { return n == QC_LANES ? vload(p) : vload_n(p, n); }
template <class T, class V> QC_INLINE void vstore_upto(T* p, V x, int n) {
    n == QC_LANES ? vstore(p, x) : vstore_n(p, x, n);
}

// Lanes `stride` elements apart.
template <class T> QC_INLINE auto vload_s(const T* p, int64_t stride, int n = QC_LANES) {
    T t[QC_LANES] = {};
    for (int j = 0; j < n; j++) t[j] = p[j * stride];
    return vload(t);
}
template <class T, class V> QC_INLINE void vstore_s(T* p, int64_t stride, V x, int n = QC_LANES) {
    T t[QC_LANES];
    vstore(t, x);
    for (int j = 0; j < n; j++) p[j * stride] = t[j];
}

// --- across lanes, in one fixed order --------------------------------------------------------------------------------

// Pairs lane j with lane j + 8, then + 4, + 2, + 1.
#if defined(QC_AVX512)
QC_INLINE float vsum(vf x) { return _mm512_reduce_add_ps(x.r[0]); }  // GCC and Clang pair lanes in that same order
#else
QC_INLINE float vsum(vf x) {
    float t[QC_LANES];
    vstore(t, x);
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) t[j] += t[j + half];
    return t[0];
}
#endif
QC_INLINE float vmaxlane(vf x) {  // as vmax: a NaN may be passed over
#if defined(QC_AVX512)
    return _mm512_reduce_max_ps(x.r[0]);
#else
    float t[QC_LANES];
    vstore(t, x);
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) t[j] = t[j] > t[j + half] ? t[j] : t[j + half];
    return t[0];
#endif
}

// out[j * out_stride + i] = in[i * stride + j] for a 16 x 16 block, values widened to float. On AVX-512 columns are
// written in ascending order, and of `in` only `rows` rows are read: the others count as zeros.
#if defined(QC_AVX512)
template <class T>
QC_INLINE void vtranspose(const T* in, int64_t stride, float* out, int64_t out_stride, int rows = 16) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = i < rows ? vload(in + i * stride).r[0] : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {  // pairs of rows: 32-bit interleave
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    // fours of rows: a[4 i + c] holds columns c, c + 4, c + 8, c + 12 of rows 4 i … 4 i + 3
    for (int i = 0; i < 4; i++) {
        a[4 * i] = (__m512)_mm512_unpacklo_pd((__m512d)b[4 * i], (__m512d)b[4 * i + 2]);
        a[4 * i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)b[4 * i], (__m512d)b[4 * i + 2]);
        a[4 * i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)b[4 * i + 1], (__m512d)b[4 * i + 3]);
        a[4 * i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)b[4 * i + 1], (__m512d)b[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {  // 4 x 4 transpose of 128-bit lanes
        const __m512 p = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), q = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
        const __m512 r = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
        const __m512 s = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_f32x4(p, r, 0x88), b[c + 4] = _mm512_shuffle_f32x4(q, s, 0x88);
        b[c + 8] = _mm512_shuffle_f32x4(p, r, 0xdd), b[c + 12] = _mm512_shuffle_f32x4(q, s, 0xdd);
    }
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) _mm512_storeu_ps(out + j * out_stride, b[j]);
}
#else
// Four lanes of a and b end to end, by number.
#if defined(__clang__)
#define QC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t qc_lanes __attribute__((vector_size(16)));
#define QC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, qc_lanes{__VA_ARGS__})
#endif
template <class T> QC_INLINE void vtranspose(const T* in, int64_t stride, float* out, int64_t out_stride) {
    typedef float f4 __attribute__((vector_size(16)));
    typedef float f4_unaligned __attribute__((vector_size(16), aligned(4), may_alias));
    for (int i = 0; i < 16; i += 4) {
        float rows[4][QC_LANES];
        for (int k = 0; k < 4; k++) vstore(rows[k], vload(in + (i + k) * stride));
        for (int j = 0; j < 16; j += 4) {
            const f4 a = *(f4_unaligned*)(rows[0] + j), b = *(f4_unaligned*)(rows[1] + j);
            const f4 c = *(f4_unaligned*)(rows[2] + j), d = *(f4_unaligned*)(rows[3] + j);
            const f4 ab0 = QC_SHUFFLE(a, b, 0, 4, 1, 5), ab1 = QC_SHUFFLE(a, b, 2, 6, 3, 7);
            const f4 cd0 = QC_SHUFFLE(c, d, 0, 4, 1, 5), cd1 = QC_SHUFFLE(c, d, 2, 6, 3, 7);
            *(f4_unaligned*)(out + j * out_stride + i) = QC_SHUFFLE(ab0, cd0, 0, 1, 4, 5);
            *(f4_unaligned*)(out + (j + 1) * out_stride + i) = QC_SHUFFLE(ab0, cd0, 2, 3, 6, 7);
            *(f4_unaligned*)(out + (j + 2) * out_stride + i) = QC_SHUFFLE(ab1, cd1, 0, 1, 4, 5);
            *(f4_unaligned*)(out + (j + 3) * out_stride + i) = QC_SHUFFLE(ab1, cd1, 2, 3, 6, 7);
        }
    }
}
#endif
