// CUDA C++ for the host's compiler: what NVRTC provides of itself, and the twins of device.cuh's PTX wrappers.
//
// The text of a kernel is compiled unchanged behind this header. Threads are fibers of the engine (engine.cpp);
// whatever involves more than one thread, or memory that arrives late, is a call into it and carries the line it stands
// on. No header of the C++ library is used: they would cost more to compile than the kernels.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define QS_INLINE static inline __attribute__((always_inline))

// --- the engine ------------------------------------------------------------------------------------------------------

extern "C" {
uint64_t qs_thread_index() __attribute__((const));  // x, y, z in 16 bits each: a fiber's never changes
uint64_t qs_block_dim() __attribute__((const));
uint64_t qs_block_index() __attribute__((const));   // x in 31 bits, y and z in 16 each
uint64_t qs_grid_dim() __attribute__((const));
void* qs_shared(int line, const char* name, int64_t offset, int64_t count, int64_t size, int64_t alignment);
int qs_barrier(int line, int reduction, int value);  // 0: plain, 1: or, 2: and, 3: count
void qs_syncwarp(int line, uint32_t mask);
void qs_wait_for_kernels();
uint64_t qs_shuffle(int line, uint32_t mask, uint64_t value, int kind, int operand, int width);
uint32_t qs_vote(int line, uint32_t mask, int predicate);
uint32_t qs_activemask();
void qs_cp_async(int line, void* shared, const void* global, int there);
void qs_cp_async_commit(int line);
void qs_cp_async_wait(int line, int groups);
// By value: an array whose address left the kernel would count as memory in every access.
struct qs_fragment { uint32_t r[4]; };
struct qs_sum { float d[4]; };
qs_fragment qs_ldmatrix(int line, const void* row, int matrices, int transposed);
qs_sum qs_mma(int line, int kind, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
              float d0, float d1, float d2, float d3);
// A product of a warpgroup: its sums are at d, and what it reads at a and b, until a wait.
void qs_wgmma(int line, int bf16, int columns, const uint32_t* a, void* b, float* d);
void qs_wgmma_fence(int line);
void qs_wgmma_commit(int line);
void qs_wgmma_wait(int line, int groups);
void qs_fence_async(int line);
// `size` bytes at `address`; `order` 0 relaxed, 1 acquire, 2 release, 3 both. Each gives the old value.
uint64_t qs_atomic(int line, void* address, uint64_t value, uint64_t compare, int operation, int size, int order);
void qs_fence(int line, int device_wide);
void qs_pause(int line);
void qs_copy(int line, void* to, const void* from, size_t bytes);
void qs_fill(int line, void* to, int value, size_t bytes);
void qs_trap(int line);
}

struct qs_index { unsigned x, y, z; };
QS_INLINE qs_index qs_unpack(uint64_t v, int x_bits) {
    return {(unsigned)(v & ((1ull << x_bits) - 1)), (unsigned)(v >> x_bits & 0xffff),
            (unsigned)(v >> (x_bits + 16) & 0xffff)};
}
#define threadIdx qs_unpack(qs_thread_index(), 16)
#define blockDim qs_unpack(qs_block_dim(), 16)
#define blockIdx qs_unpack(qs_block_index(), 31)
#define gridDim qs_unpack(qs_grid_dim(), 31)
#define warpSize 32

// --- vector types ----------------------------------------------------------------------------------------------------
// A copy is one access of the vector's whole size, as on the device: else the compiler would take the fields one by
// one, and neither a misaligned vector nor the width of the access could be seen.

#define QS_RAW(bits) \
    typedef uint##bits##_t qs_raw##bits __attribute__((may_alias))
QS_RAW(16); QS_RAW(32); QS_RAW(64);
typedef uint32_t qs_raw128 __attribute__((vector_size(16), may_alias));

#define QS_COPIES(name, bits)                                                                                     \
    name() = default;                                                                                                 \
    __forceinline__ name(const name& o) { *(qs_raw##bits*)this = *(const qs_raw##bits*)&o; }                           \
    __forceinline__ name& operator=(const name& o) { *(qs_raw##bits*)this = *(const qs_raw##bits*)&o; return *this; }
#define QS_VECTOR_2(name, type, bits)                                                                             \
    struct alignas(bits / 8) name {                                                                                   \
        type x, y;                                                                                                    \
        QS_COPIES(name, bits)                                                                                         \
        __forceinline__ name(type a, type b) : x(a), y(b) {}                                                           \
    };                                                                                                                \
    QS_INLINE name make_##name(type a, type b) { return name(a, b); }
#define QS_VECTOR_4(name, type, bits)                                                                             \
    struct alignas(bits / 8) name {                                                                                   \
        type x, y, z, w;                                                                                              \
        QS_COPIES(name, bits)                                                                                         \
        __forceinline__ name(type a, type b, type c, type d) : x(a), y(b), z(c), w(d) {}                               \
    };                                                                                                                \
    QS_INLINE name make_##name(type a, type b, type c, type d) { return name(a, b, c, d); }
QS_VECTOR_2(char2, signed char, 16)   QS_VECTOR_4(char4, signed char, 32)
QS_VECTOR_2(uchar2, unsigned char, 16) QS_VECTOR_4(uchar4, unsigned char, 32)
QS_VECTOR_2(short2, short, 32)        QS_VECTOR_4(short4, short, 64)
QS_VECTOR_2(ushort2, unsigned short, 32) QS_VECTOR_4(ushort4, unsigned short, 64)
QS_VECTOR_2(int2, int, 64)            QS_VECTOR_4(int4, int, 128)
QS_VECTOR_2(uint2, unsigned, 64)      QS_VECTOR_4(uint4, unsigned, 128)
QS_VECTOR_2(float2, float, 64)        QS_VECTOR_4(float4, float, 128)
QS_VECTOR_2(double2, double, 128)     QS_VECTOR_2(longlong2, long long, 128)
QS_VECTOR_2(ulonglong2, unsigned long long, 128)

// --- bits and numbers ------------------------------------------------------------------------------------------------

template <class To, class From> QS_INLINE To qs_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    __builtin_memcpy(&to, &v, sizeof to);
    return to;
}
QS_INLINE float __uint_as_float(unsigned v) { return qs_bits<float>(v); }
QS_INLINE float __int_as_float(int v) { return qs_bits<float>(v); }
QS_INLINE unsigned __float_as_uint(float v) { return qs_bits<unsigned>(v); }
QS_INLINE int __float_as_int(float v) { return qs_bits<int>(v); }
QS_INLINE long long __double_as_longlong(double v) { return qs_bits<long long>(v); }
QS_INLINE double __longlong_as_double(long long v) { return qs_bits<double>(v); }
QS_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
QS_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
QS_INLINE int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
QS_INLINE int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
QS_INLINE int __ffs(int v) { return __builtin_ffs(v); }
QS_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
QS_INLINE unsigned __brev(unsigned v) {
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(v);
}
// Three bits of each digit of the selector count; in PTX' `prmt` the fourth replicates the sign.
QS_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= ((unsigned)(bytes >> (8 * (selector >> (4 * i) & 7))) & 0xff) << (8 * i);
    return result;
}
QS_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31)) >> 32);
}
QS_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
QS_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
QS_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
QS_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
QS_INLINE int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += (int)(int8_t)(a >> (8 * i)) * (int)(int8_t)(b >> (8 * i));
    return c;
}

template <class T> QS_INLINE T __ldg(const T* p) { return *p; }
template <class T> QS_INLINE T __ldcs(const T* p) { return *p; }
template <class T> QS_INLINE void __stcs(T* p, T v) { *p = v; }

#define QS_MIN_MAX(type)                                          \
    QS_INLINE type min(type a, type b) { return b < a ? b : a; }      \
    QS_INLINE type max(type a, type b) { return a < b ? b : a; }
QS_MIN_MAX(int) QS_MIN_MAX(unsigned) QS_MIN_MAX(long) QS_MIN_MAX(unsigned long) QS_MIN_MAX(long long)
QS_MIN_MAX(unsigned long long)
QS_INLINE int abs(int v) { return v < 0 ? -v : v; }
QS_INLINE long abs(long v) { return v < 0 ? -v : v; }
QS_INLINE long long abs(long long v) { return v < 0 ? -v : v; }

#define QS_MATH_1(name)                                                        \
    QS_INLINE float name##f(float x) { return __builtin_##name##f(x); }            \
    QS_INLINE double name(double x) { return __builtin_##name(x); }                \
    QS_INLINE float name(float x) { return __builtin_##name##f(x); }
#define QS_MATH_2(name)                                                                 \
    QS_INLINE float name##f(float x, float y) { return __builtin_##name##f(x, y); }         \
    QS_INLINE double name(double x, double y) { return __builtin_##name(x, y); }            \
    QS_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); }
QS_MATH_1(sqrt) QS_MATH_1(exp) QS_MATH_1(exp2) QS_MATH_1(expm1) QS_MATH_1(log) QS_MATH_1(log2) QS_MATH_1(log10)
QS_MATH_1(log1p) QS_MATH_1(sin) QS_MATH_1(cos) QS_MATH_1(tan) QS_MATH_1(asin) QS_MATH_1(acos) QS_MATH_1(atan)
QS_MATH_1(sinh) QS_MATH_1(cosh)
QS_MATH_1(tanh) QS_MATH_1(asinh) QS_MATH_1(acosh) QS_MATH_1(atanh) QS_MATH_1(erf) QS_MATH_1(erfc) QS_MATH_1(cbrt)
QS_MATH_1(floor) QS_MATH_1(ceil) QS_MATH_1(trunc) QS_MATH_1(round) QS_MATH_1(rint) QS_MATH_1(nearbyint) QS_MATH_1(fabs)
QS_MATH_2(pow) QS_MATH_2(fmod) QS_MATH_2(remainder) QS_MATH_2(atan2) QS_MATH_2(hypot) QS_MATH_2(fmin) QS_MATH_2(fmax)
QS_MATH_2(copysign) QS_MATH_2(fdim) QS_MATH_2(nextafter)
QS_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
QS_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
QS_INLINE double min(double a, double b) { return __builtin_fmin(a, b); }
QS_INLINE double max(double a, double b) { return __builtin_fmax(a, b); }
QS_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
QS_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
QS_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
QS_INLINE float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
QS_INLINE double ldexp(double x, int e) { return __builtin_ldexp(x, e); }
QS_INLINE float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
QS_INLINE double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
template <class T> QS_INLINE bool isnan(T x) { return __builtin_isnan(x); }
template <class T> QS_INLINE bool isinf(T x) { return __builtin_isinf(x); }
template <class T> QS_INLINE bool isfinite(T x) { return __builtin_isfinite(x); }
template <class T> QS_INLINE bool signbit(T x) { return __builtin_signbit(x); }
QS_INLINE float __expf(float x) { return __builtin_expf(x); }
QS_INLINE float __logf(float x) { return __builtin_logf(x); }
QS_INLINE float __log2f(float x) { return __builtin_log2f(x); }
QS_INLINE float __fdividef(float a, float b) { return a / b; }
QS_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
QS_INLINE float __fadd_rn(float a, float b) { return a + b; }
QS_INLINE float __fsub_rn(float a, float b) { return a - b; }
QS_INLINE float __fmul_rn(float a, float b) { return a * b; }
QS_INLINE float __fdiv_rn(float a, float b) { return a / b; }
QS_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
QS_INLINE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
QS_INLINE float __frcp_rn(float x) { return 1.0f / x; }
QS_INLINE double __dadd_rn(double a, double b) { return a + b; }
QS_INLINE double __dmul_rn(double a, double b) { return a * b; }

// Conversions to integers saturate, and a NaN becomes 0, as on the device.
template <class Integer> QS_INLINE Integer qs_saturate(double x, Integer lowest, Integer highest) {
    if (!(x == x)) return 0;
    if (x <= (double)lowest) return lowest;
    if (x >= (double)highest) return highest;
    return (Integer)x;
}
QS_INLINE int __float2int_rn(float x) {
    return qs_saturate<int>(__builtin_rint((double)x), -2147483647 - 1, 2147483647);
}
QS_INLINE int __float2int_rz(float x) {
    return qs_saturate<int>(__builtin_trunc((double)x), -2147483647 - 1, 2147483647);
}
QS_INLINE int __float2int_rd(float x) {
    return qs_saturate<int>(__builtin_floor((double)x), -2147483647 - 1, 2147483647);
}
QS_INLINE int __float2int_ru(float x) {
    return qs_saturate<int>(__builtin_ceil((double)x), -2147483647 - 1, 2147483647);
}
QS_INLINE unsigned __float2uint_rn(float x) {
    return qs_saturate<unsigned>(__builtin_rint((double)x), 0u, 4294967295u);
}
QS_INLINE unsigned __float2uint_rz(float x) {
    return qs_saturate<unsigned>(__builtin_trunc((double)x), 0u, 4294967295u);
}
QS_INLINE long long __float2ll_rn(float x) {
    return qs_saturate<long long>(__builtin_rint((double)x), -9223372036854775807ll - 1, 9223372036854775807ll);
}
QS_INLINE long long __float2ll_rz(float x) {
    return qs_saturate<long long>(__builtin_trunc((double)x), -9223372036854775807ll - 1, 9223372036854775807ll);
}
QS_INLINE int __double2int_rn(double x) { return qs_saturate<int>(__builtin_rint(x), -2147483647 - 1, 2147483647); }
QS_INLINE int __double2int_rz(double x) { return qs_saturate<int>(__builtin_trunc(x), -2147483647 - 1, 2147483647); }
QS_INLINE long long __double2ll_rn(double x) {
    return qs_saturate<long long>(__builtin_rint(x), -9223372036854775807ll - 1, 9223372036854775807ll);
}
QS_INLINE long long __double2ll_rz(double x) {
    return qs_saturate<long long>(__builtin_trunc(x), -9223372036854775807ll - 1, 9223372036854775807ll);
}
QS_INLINE float __int2float_rn(int x) { return (float)x; }
QS_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
QS_INLINE float __ll2float_rn(long long x) { return (float)x; }
QS_INLINE float __double2float_rn(double x) { return (float)x; }

// --- threads together ------------------------------------------------------------------------------------------------

#define __syncthreads() ((void)qs_barrier(__LINE__, 0, 0))
#define __syncthreads_or(value) qs_barrier(__LINE__, 1, (value) != 0)
#define __syncthreads_and(value) qs_barrier(__LINE__, 2, (value) != 0)
#define __syncthreads_count(value) qs_barrier(__LINE__, 3, (value) != 0)
QS_INLINE void qs_syncwarp_at(int line, uint32_t mask = 0xffffffffu) { qs_syncwarp(line, mask); }
#define QS_COMMA_IF(...) __VA_OPT__(,) __VA_ARGS__
#define __syncwarp(...) qs_syncwarp_at(__LINE__ QS_COMMA_IF(__VA_ARGS__))

template <class T> QS_INLINE T qs_shuffle_at(int line, int kind, uint32_t mask, T value, int operand, int width = 32) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
    uint64_t bits = 0;
    if constexpr (sizeof(T) == 4) bits = qs_bits<uint32_t>(value); else bits = qs_bits<uint64_t>(value);
    bits = qs_shuffle(line, mask, bits, kind, operand, width);
    if constexpr (sizeof(T) == 4) return qs_bits<T>((uint32_t)bits); else return qs_bits<T>(bits);
}
#define __shfl_sync(...) qs_shuffle_at(__LINE__, 0, __VA_ARGS__)
#define __shfl_up_sync(...) qs_shuffle_at(__LINE__, 1, __VA_ARGS__)
#define __shfl_down_sync(...) qs_shuffle_at(__LINE__, 2, __VA_ARGS__)
#define __shfl_xor_sync(...) qs_shuffle_at(__LINE__, 3, __VA_ARGS__)

QS_INLINE uint32_t qs_ballot_at(int line, uint32_t mask, int predicate) { return qs_vote(line, mask, predicate != 0); }
QS_INLINE int qs_any_at(int line, uint32_t mask, int predicate) { return qs_vote(line, mask, predicate != 0) != 0; }
QS_INLINE int qs_all_at(int line, uint32_t mask, int predicate) { return qs_vote(line, mask, predicate == 0) == 0; }
#define __ballot_sync(...) qs_ballot_at(__LINE__, __VA_ARGS__)
#define __any_sync(...) qs_any_at(__LINE__, __VA_ARGS__)
#define __all_sync(...) qs_all_at(__LINE__, __VA_ARGS__)
#define __activemask() qs_activemask()

#define __threadfence() qs_fence(__LINE__, 1)
#define __threadfence_block() qs_fence(__LINE__, 0)
#define __nanosleep(nanoseconds) ((void)(nanoseconds), qs_pause(__LINE__))
#define __trap() qs_trap(__LINE__)
#define memcpy(to, from, bytes) qs_copy(__LINE__, to, from, bytes)
#define memset(to, value, bytes) qs_fill(__LINE__, to, value, bytes)

enum { QS_READ, QS_WRITE, QS_ADD, QS_MAX, QS_MIN, QS_CAS, QS_AND, QS_OR, QS_XOR, QS_ADD_F32, QS_ADD_F64, QS_MAX_SIGNED,
       QS_MIN_SIGNED };
template <class T> QS_INLINE T qs_atomic_at(int line, int operation, T* p, T value, T compare = T(), int order = 0) {
    uint64_t v, c, old;
    if constexpr (sizeof(T) == 4) {
        v = qs_bits<uint32_t>(value), c = qs_bits<uint32_t>(compare);
        old = qs_atomic(line, (void*)p, v, c, operation, 4, order);
        return qs_bits<T>((uint32_t)old);
    } else {
        v = qs_bits<uint64_t>(value), c = qs_bits<uint64_t>(compare);
        old = qs_atomic(line, (void*)p, v, c, operation, 8, order);
        return qs_bits<T>(old);
    }
}
#define QS_ATOMIC(name, type, operation) \
    QS_INLINE type name(int line, type* p, type v) { return qs_atomic_at<type>(line, operation, p, v); }
QS_ATOMIC(qs_atomic_add, int, QS_ADD) QS_ATOMIC(qs_atomic_add, unsigned, QS_ADD)
QS_ATOMIC(qs_atomic_add, unsigned long long, QS_ADD) QS_ATOMIC(qs_atomic_add, unsigned long, QS_ADD)
QS_ATOMIC(qs_atomic_add, float, QS_ADD_F32) QS_ATOMIC(qs_atomic_add, double, QS_ADD_F64)
QS_ATOMIC(qs_atomic_max, int, QS_MAX_SIGNED) QS_ATOMIC(qs_atomic_max, unsigned, QS_MAX)
QS_ATOMIC(qs_atomic_max, unsigned long long, QS_MAX) QS_ATOMIC(qs_atomic_max, unsigned long, QS_MAX)
QS_ATOMIC(qs_atomic_min, int, QS_MIN_SIGNED) QS_ATOMIC(qs_atomic_min, unsigned, QS_MIN)
QS_ATOMIC(qs_atomic_min, unsigned long long, QS_MIN) QS_ATOMIC(qs_atomic_min, unsigned long, QS_MIN)
QS_ATOMIC(qs_atomic_or, int, QS_OR) QS_ATOMIC(qs_atomic_or, unsigned, QS_OR)
QS_ATOMIC(qs_atomic_and, int, QS_AND) QS_ATOMIC(qs_atomic_and, unsigned, QS_AND)
QS_ATOMIC(qs_atomic_exch, int, QS_WRITE) QS_ATOMIC(qs_atomic_exch, unsigned, QS_WRITE)
QS_ATOMIC(qs_atomic_exch, float, QS_WRITE) QS_ATOMIC(qs_atomic_exch, unsigned long long, QS_WRITE)
QS_ATOMIC(qs_atomic_exch, unsigned long, QS_WRITE)
template <class T> struct qs_same { typedef T type; };
template <class T>
QS_INLINE T qs_atomic_cas(int line, T* p, typename qs_same<T>::type compare, typename qs_same<T>::type v) {
    return qs_atomic_at<T>(line, QS_CAS, p, v, compare);
}
#define atomicAdd(p, v) qs_atomic_add(__LINE__, p, v)
#define atomicMax(p, v) qs_atomic_max(__LINE__, p, v)
#define atomicMin(p, v) qs_atomic_min(__LINE__, p, v)
#define atomicOr(p, v) qs_atomic_or(__LINE__, p, v)
#define atomicAnd(p, v) qs_atomic_and(__LINE__, p, v)
#define atomicExch(p, v) qs_atomic_exch(__LINE__, p, v)
#define atomicCAS(p, compare, v) qs_atomic_cas(__LINE__, p, compare, v)

// --- twins of device.cuh's PTX wrappers ------------------------------------------------------------------------------

#define QC_SHARED(type, name, offset, count) \
    type* const name = (type*)qs_shared(__LINE__, #name, offset, count, sizeof(type), alignof(type))

#define QC_KERNELS_OVERLAP (__CUDA_ARCH__ >= 900)
QS_INLINE void qc_let_next_start() {}
QS_INLINE void qc_wait_for_kernels() { qs_wait_for_kernels(); }
QS_INLINE uint4 qc_load_stream_16(const void* global) { return *(const uint4*)global; }
struct qc_place {
    char* address;
    __forceinline__ qc_place(const void* shared) : address((char*)shared) {}
    __forceinline__ qc_place operator+(int bytes) const { return qc_place(address + bytes); }
    __forceinline__ operator void*() const { return address; }
};
QS_INLINE qc_place qc_fixed(const void* shared) { return qc_place(shared); }
QS_INLINE const uint8_t* qc_fixed_global(const uint8_t* global) { return global; }
QS_INLINE float2 qc_load_shared_8(qc_place shared) { return *(const float2*)shared.address; }
QS_INLINE void qc_store_shared_16(qc_place shared, uint4 v) { *(uint4*)shared.address = v; }
QS_INLINE void qc_store_global_16(void* global, uint4 v) { *(uint4*)global = v; }
QS_INLINE uint32_t qc_and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

#if __CUDA_ARCH__ >= 800
#define qc_cp_async_16(shared, global) qs_cp_async(__LINE__, shared, global, 1)
#define qc_cp_async_16_or_zero(shared, global, there) qs_cp_async(__LINE__, shared, global, there)
#define qc_cp_async_commit() qs_cp_async_commit(__LINE__)
template <int N> QS_INLINE void qc_cp_async_wait() { qs_cp_async_wait(0, N); }
#else
QS_INLINE void qc_cp_async_16(qc_place shared, const void* global) {
    *(uint4*)shared.address = *(const uint4*)global;
}
QS_INLINE void qc_cp_async_16_or_zero(qc_place shared, const void* global, bool there) {
    if (there) *(uint4*)shared.address = *(const uint4*)global;
    else *(uint4*)shared.address = make_uint4(0, 0, 0, 0);
}
QS_INLINE void qc_cp_async_commit() {}
template <int N> QS_INLINE void qc_cp_async_wait() {}
#endif

template <int N> QS_INLINE void qs_ldmatrix_at(int line, uint32_t (&r)[N], const void* row, int transposed) {
    const qs_fragment got = qs_ldmatrix(line, row, N, transposed);
    for (int i = 0; i < N; ++i) r[i] = got.r[i];
}
#define qc_ldmatrix_x4(r, row) qs_ldmatrix_at<4>(__LINE__, r, row, 0)
#define qc_ldmatrix_x4_trans(r, row) qs_ldmatrix_at<4>(__LINE__, r, row, 1)
#define qc_ldmatrix_x2(r, row) qs_ldmatrix_at<2>(__LINE__, r, row, 0)

struct qc_f16;
struct qc_bf16;
template <class Tag> struct qs_is_bf16;
template <> struct qs_is_bf16<qc_f16> { enum { value = 0 }; };
#if __CUDA_ARCH__ >= 800
template <> struct qs_is_bf16<qc_bf16> { enum { value = 1 }; };
#endif
template <class Tag>
QS_INLINE void qs_mma_tagged(int line, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Tag) {
    const qs_sum sum = qs_mma(line, qs_is_bf16<Tag>::value, a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3]);
    for (int i = 0; i < 4; ++i) d[i] = sum.d[i];
}
#define qc_mma_16816(...) qs_mma_tagged(__LINE__, __VA_ARGS__)

#if __CUDA_ARCH__ >= 750
// Integers go through the engine as the bits of floats.
QS_INLINE void qs_mma_s8(int line, int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const auto bits = [](int v) { return __uint_as_float((unsigned)v); };
    const qs_sum sum = qs_mma(line, 2, a[0], a[1], a[2], a[3], b[0], b[1], bits(d[0]), bits(d[1]), bits(d[2]),
                              bits(d[3]));
    for (int i = 0; i < 4; ++i) d[i] = (int)__float_as_uint(sum.d[i]);
}
#define qc_mma_16832_s8(...) qs_mma_s8(__LINE__, __VA_ARGS__)
#endif

#if __CUDA_ARCH__ == 900
template <int TILES, class Tag>
QS_INLINE void qs_wgmma_at(int line, float (&d)[TILES][4], const uint32_t (&a)[4], qc_place b, Tag) {
    static_assert(TILES == 8 || TILES == 16 || TILES == 32, "a wrapper of device.cuh");
    qs_wgmma(line, qs_is_bf16<Tag>::value, 8 * TILES, a, b.address, &d[0][0]);
}
#define qc_wgmma_16(...) qs_wgmma_at(__LINE__, __VA_ARGS__)
#define qc_wgmma_fence() qs_wgmma_fence(__LINE__)
#define qc_wgmma_commit() qs_wgmma_commit(__LINE__)
template <int N> QS_INLINE void qc_wgmma_wait() { qs_wgmma_wait(0, N); }
#define qc_fence_async() qs_fence_async(__LINE__)
#endif

QS_INLINE float qc_f32_of_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // * 2^112: subnormals come right
    const float magnitude = __uint_as_float(rest << 13) * __uint_as_float(0x77800000u);
    return __uint_as_float(sign | __float_as_uint(magnitude));
}
QS_INLINE uint16_t qc_f16_of_f32(float x) {
    const uint32_t u = __float_as_uint(x), rest = u & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    if (rest > 0x7f800000u) return 0x7fffu;                        // cvt.rn gives the canonical NaN
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);    // 65520 and above round to infinity
    if (rest < 0x38800000u) {                                      // subnormal: let the addition of 0.5 round
        const float shifted = __uint_as_float(rest) + 0.5f;
        return (uint16_t)(sign | (__float_as_uint(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13));
}
QS_INLINE uint32_t qc_pack_f16(float low, float high) {
    return (uint32_t)qc_f16_of_f32(high) << 16 | qc_f16_of_f32(low);
}
// A number as `digits` binary digits with exponents from `lowest` on (the type's bias is 1 - lowest), to nearest even.
QS_INLINE uint16_t qs_round_16(double x, int digits, int lowest) {
    const uint64_t u = qs_bits<uint64_t>(x);
    const uint16_t sign = (uint16_t)(u >> 63 << 15);
    const uint16_t infinity = (uint16_t)((uint32_t)(2 - 2 * lowest + 1) << (digits - 1));
    const uint64_t magnitude = u & 0x7fffffffffffffffull;
    if (magnitude > 0x7ff0000000000000ull) return 0x7fff;
    const int exponent = (int)(magnitude >> 52) - 1023;
    if (exponent > 1 - lowest) return (uint16_t)(sign | infinity);
    const int least = exponent > lowest ? exponent : lowest, dropped = 53 - digits + (least - exponent);
    if (dropped > 54) return sign;
    const uint64_t whole = (magnitude & 0xfffffffffffffull) | 1ull << 52;
    const uint64_t kept = whole >> dropped, rest = whole & ((1ull << dropped) - 1), half = 1ull << (dropped - 1);
    const uint64_t rounded = kept + (rest > half || (rest == half && (kept & 1)));
    // A carry into the next exponent, and from subnormals to normal numbers, comes right by itself.
    const uint32_t bits = (uint32_t)rounded + ((uint32_t)(least - lowest) << (digits - 1));
    return (uint16_t)(sign | (bits > infinity ? infinity : bits));
}
// a * b + c, rounded once: the product is exact in a double; the sum is rounded to odd, so that the last rounding
// decides alone.
QS_INLINE uint16_t qs_fma_16(double a, double b, double c, int digits, int lowest) {
    const double product = a * b;
    double sum = product + c;
    const double part = sum - product, error = (product - (sum - part)) + (c - part);
    if (error != 0.0 && sum - sum == 0.0) {
        uint64_t bits = qs_bits<uint64_t>(sum);
        if ((bits & 1) == 0) bits = (error > 0.0) == (sum > 0.0) ? bits | 1 : bits - 1;
        sum = qs_bits<double>(bits);
    }
    return qs_round_16(sum, digits, lowest);
}
QS_INLINE double qs_double_of(uint32_t bits, qc_f16*) { return (double)qc_f32_of_f16((uint16_t)bits); }
QS_INLINE double qs_double_of(uint32_t bits, qc_bf16*) { return (double)__uint_as_float(bits << 16); }
template <class Tag>
QS_INLINE uint32_t qs_fma2(uint32_t a, uint32_t b, uint32_t c, int digits, int lowest, Tag* tag) {
    const auto half = [&](int shift) __attribute__((always_inline)) {
        const double x = qs_double_of(a >> shift & 0xffffu, tag), y = qs_double_of(b >> shift & 0xffffu, tag);
        return (uint32_t)qs_fma_16(x, y, qs_double_of(c >> shift & 0xffffu, tag), digits, lowest);
    };
    return half(16) << 16 | half(0);
}
#define qc_fma2(a, b, c, tag) qs_fma2_of(a, b, c, tag)
template <class Tag> QS_INLINE uint32_t qs_fma2_of(uint32_t a, uint32_t b, uint32_t c, Tag) {
    static_assert(__CUDA_ARCH__ >= 800 || !qs_is_bf16<Tag>::value, "no arithmetic in bf16 before sm_80");
    return qs_fma2(a, b, c, qs_is_bf16<Tag>::value ? 8 : 11, qs_is_bf16<Tag>::value ? -126 : -14, (Tag*)nullptr);
}
QS_INLINE float qc_exp2_fast(float x) {
    const float y = __builtin_exp2f(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}

#define qc_load_acquire(p) qs_atomic_at<uint32_t>(__LINE__, QS_READ, (uint32_t*)(p), 0u, 0u, 1)
#define qc_store_release(p, v) ((void)qs_atomic_at<uint32_t>(__LINE__, QS_WRITE, (uint32_t*)(p), v, 0u, 2))
#define qc_atomic_add_acq_rel(p, v) qs_atomic_at<uint32_t>(__LINE__, QS_ADD, (uint32_t*)(p), v, 0u, 3)
