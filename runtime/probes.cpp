// What the machine can do at most: operations per second of its vector units, and bytes per second of its memory.
// Compiled behind the headers of the CPU's kernels (vec.h, abi.h). Each probe runs on all threads of a context's pool.

#include <time.h>
extern "C" {
int qb_clock = CLOCK_MONOTONIC;
int64_t qb_steps = 100000;  // of each task of a rate: 3 to 6 ms
}
static double seconds() { timespec t; clock_gettime(qb_clock, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }

enum { CHAINS = 24 / QC_REGS, SHARES = 8 };
static double rate(qc_ctx* ctx, void (*task)(void*, int64_t, char*), double operations) {
    const double start = seconds();
    ctx->parallel(ctx, ctx->num_threads * SHARES, task, 0);
    return ctx->num_threads * SHARES * operations * CHAINS * double(qb_steps) / (seconds() - start);
}
// Every loop over the chains is unrolled: one that is not keeps their sums in memory.
#define EACH_CHAIN(i) _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++)
static void fp32_task(void*, int64_t, char* scratch) {
    const int64_t steps = qb_steps;
    vf sum[CHAINS];
    EACH_CHAIN(i) sum[i] = vset((float)i);
    const vf a = vset(0.999f), b = vset(0.5f);
    for (int64_t k = 0; k < steps; k++) EACH_CHAIN(i) sum[i] = vfma(sum[i], a, b);
    EACH_CHAIN(i) sum[0] = sum[0] + sum[i];
    vstore((float*)scratch, sum[0]);
}
extern "C" double qb_fp32(qc_ctx* ctx) { return rate(ctx, fp32_task, 2.0 * 16); }

#if defined(QC_AVX512)
__attribute__((target("avx512bf16"))) static void bf16_task(void*, int64_t task, char* scratch) {
    const int64_t steps = qb_steps;
    __m512 sum[CHAINS];
    EACH_CHAIN(i) sum[i] = _mm512_set1_ps((float)i);
    const __m512bh a = (__m512bh)_mm512_set1_epi16((short)(0x3f80 + task)), b = (__m512bh)_mm512_set1_epi16(0x3a00);
    for (int64_t k = 0; k < steps; k++) EACH_CHAIN(i) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    EACH_CHAIN(i) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    _mm512_storeu_ps(scratch, sum[0]);
}
__attribute__((target("avx512vnni"))) static void int8_task(void*, int64_t task, char* scratch) {
    const int64_t steps = qb_steps;
    __m512i sum[CHAINS];
    EACH_CHAIN(i) sum[i] = _mm512_set1_epi32(i);
    const __m512i a = _mm512_set1_epi8((char)(task + 1)), b = _mm512_set1_epi8((char)(task - 3));
    for (int64_t k = 0; k < steps; k++)
        EACH_CHAIN(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum[i]) : "v"(a), "v"(b));
    EACH_CHAIN(i) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    _mm512_storeu_si512(scratch, sum[0]);
}
#endif
#if defined(__x86_64__)
// Tiles of numbers that are not zero: with zeros the processor keeps a higher clock.
template <class F, class G> static void tiles_task(const F& byte, const G& multiply) {
    struct { uint8_t palette, row, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; t++) shape.bytes[t] = 64, shape.rows[t] = 16;
    alignas(64) uint8_t tile[2048];
    for (int i = 0; i < 2048; i++) tile[i] = byte(i);
    const int64_t steps = qb_steps, row = 64;
    const uint8_t* const other = tile + 1024;
    asm volatile("ldtilecfg %0" : : "m"(shape));
    asm volatile("tileloadd (%0,%2,1), %%tmm4\n tileloadd (%1,%2,1), %%tmm5\n tileloadd (%0,%2,1), %%tmm6\n"
                 "tileloadd (%1,%2,1), %%tmm7" : : "r"(tile), "r"(other), "r"(row) : "memory");
    for (int64_t k = 0; k < steps; k++) multiply();
    asm volatile("tilerelease");
}
#define FOUR_PRODUCTS(name) \
    asm volatile(name " %tmm6, %tmm4, %tmm0\n " name " %tmm7, %tmm4, %tmm1\n " \
                 name " %tmm6, %tmm5, %tmm2\n " name " %tmm7, %tmm5, %tmm3")
static uint8_t mixed(int64_t i) { return (uint8_t)((uint32_t)i * 2654435761u >> 13); }
static void int8_tiles_task(void*, int64_t task, char*) {
    tiles_task([=](int i) { return mixed(i + task); }, [] { FOUR_PRODUCTS("tdpbssd"); });
}
static void bf16_tiles_task(void*, int64_t task, char*) {  // from 1 to 2, and their negatives
    tiles_task([=](int i) -> uint8_t { return i % 2 ? 0x3f | (mixed(i + task) & 0x80) : mixed(i + task) | 0x80; },
               [] { FOUR_PRODUCTS("tdpbf16ps"); });
}
#endif
extern "C" double qb_bf16(qc_ctx* ctx) {
#if defined(__x86_64__)
    if (ctx->bf16_units == QC_BF16_TILES) return rate(ctx, bf16_tiles_task, 4.0 * 2 * 16 * 16 * 32 / CHAINS);
#endif
#if defined(QC_AVX512)
    if (__builtin_cpu_supports("avx512bf16")) return rate(ctx, bf16_task, 4.0 * 16);
#endif
    return 0;
}
extern "C" double qb_int8(qc_ctx* ctx) {
#if defined(__x86_64__)
    if (ctx->int8_units == QC_INT8_TILES) return rate(ctx, int8_tiles_task, 4.0 * 2 * 16 * 16 * 64 / CHAINS);
#endif
#if defined(QC_AVX512)
    if (__builtin_cpu_supports("avx512vnni")) return rate(ctx, int8_task, 8.0 * 16);
#endif
    return 0;
}

struct read_job { const float* data; int64_t count; int64_t tasks; };
static void read_task(void* arg, int64_t task, char* scratch) {
    const read_job* job = (const read_job*)arg;
    const int64_t first = job->count / job->tasks * task, last = first + job->count / job->tasks;
    vf a = vzero(), b = a, c = a, d = a;
    for (int64_t i = first; i + 64 <= last; i += 64) {
        a = a + vload(job->data + i), b = b + vload(job->data + i + 16);
        c = c + vload(job->data + i + 32), d = d + vload(job->data + i + 48);
    }
    vstore((float*)scratch, a + b + c + d);
}
extern "C" double qb_read(qc_ctx* ctx, const float* data, int64_t count) {  // bytes per second
    read_job job = {data, count, ctx->num_threads * 16};
    const double start = seconds();
    ctx->parallel(ctx, job.tasks, read_task, &job);
    return 4.0 * count / (seconds() - start);
}
