// The tiles of AMX in plain C++, for processors without them: what Intel's manual says of each instruction that
// kernels/cpu/amx.h has. A use that would raise an exception counts as an error and does nothing.
#include <stdint.h>
#include <string.h>

#define QC_AMX_MODEL 1
extern "C" { int64_t amx_errors, amx_dots, amx_configured, amx_released, amx_once; }

struct amx_tiles {
    uint8_t shape[64];      // the operand of ldtilecfg; a palette of 0 means that tiles are in their initial state
    uint8_t row[8][16][64];
};
static thread_local amx_tiles amx;

static void amx_count(int64_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
static int amx_rows(int t) { return amx.shape[48 + t]; }
static int amx_bytes(int t) { return amx.shape[16 + 2 * t] | amx.shape[17 + 2 * t] << 8; }
static bool amx_usable(int t) {
    const bool usable = amx.shape[0] == 1 && t < 8 && amx_rows(t) > 0 && amx_bytes(t) > 0;
    if (!usable) amx_count(&amx_errors);
    return usable;
}

template <class S> static void qa_configure(const S& shape) {
    amx_count(&amx_configured);
    memset(&amx, 0, sizeof amx);
    memcpy(amx.shape, &shape, 64);
    bool fits = amx.shape[0] == 1;
    for (int i = 2; i < 16; i++) fits = fits && amx.shape[i] == 0;
    for (int t = 0; t < 16; t++) {
        fits = fits && amx_rows(t) <= (t < 8 ? 16 : 0) && amx_bytes(t) <= (t < 8 ? 64 : 0);
        fits = fits && (amx_rows(t) == 0) == (amx_bytes(t) == 0);
    }
    if (!fits) amx_count(&amx_errors), memset(&amx, 0, sizeof amx);
}
static void qa_release() { amx_count(&amx_released), memset(&amx, 0, sizeof amx); }
template <int T> static void qa_zero() {
    if (amx_usable(T)) memset(amx.row[T], 0, sizeof amx.row[T]);
}
template <int T> static void qa_load(const void* from, int64_t stride) {  // rows and bytes beyond the shape become zero
    if (!amx_usable(T)) return;
    memset(amx.row[T], 0, sizeof amx.row[T]);
    for (int i = 0; i < amx_rows(T); i++) memcpy(amx.row[T][i], (const char*)from + i * stride, amx_bytes(T));
}
template <int T> static void qa_load_once(const void* from, int64_t stride) {
    amx_count(&amx_once);
    qa_load<T>(from, stride);
}
template <int T> static void qa_store(void* to, int64_t stride) {
    if (!amx_usable(T)) return;
    for (int i = 0; i < amx_rows(T); i++) memcpy((char*)to + i * stride, amx.row[T][i], amx_bytes(T));
}
// Signed bytes of X times bytes of W, which are int8_t or uint8_t, in sums of 32 bits that wrap.
template <int SUM, int X, int W, class BYTE> static void amx_dot() {
    if (!amx_usable(SUM) || !amx_usable(X) || !amx_usable(W)) return;
    const bool fits = SUM != X && SUM != W && X != W && amx_rows(X) == amx_rows(SUM) &&
                      amx_bytes(X) == 4 * amx_rows(W) && amx_bytes(W) == amx_bytes(SUM) && amx_bytes(X) % 4 == 0 &&
                      amx_bytes(W) % 4 == 0;
    if (!fits) return amx_count(&amx_errors);
    amx_count(&amx_dots);
    for (int m = 0; m < amx_rows(SUM); m++)
        for (int n = 0; n < amx_bytes(SUM) / 4; n++) {
            uint32_t sum;
            memcpy(&sum, &amx.row[SUM][m][4 * n], 4);
            for (int k = 0; k < amx_bytes(X) / 4; k++)
                for (int b = 0; b < 4; b++)
                    sum += (uint32_t)((int8_t)amx.row[X][m][4 * k + b] * (int32_t)(BYTE)amx.row[W][k][4 * n + b]);
            memcpy(&amx.row[SUM][m][4 * n], &sum, 4);
        }
}
// tdpbf16ps: sums of even and of odd columns apart, fused and each rounded, then their sum is added. Numbers below
// 2^-126 count as zero, before and after each operation.
static float amx_flushed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    memcpy(&x, &bits, 4);
    return x;
}
static float amx_number(const uint8_t* bytes) {
    const uint32_t bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
    float x;
    memcpy(&x, &bits, 4);
    return amx_flushed(x);
}
template <int SUM, int X, int W> static void qa_dot_bf16() {
    if (!amx_usable(SUM) || !amx_usable(X) || !amx_usable(W)) return;
    const bool fits = SUM != X && SUM != W && X != W && amx_rows(X) == amx_rows(SUM) &&
                      amx_bytes(X) == 4 * amx_rows(W) && amx_bytes(W) == amx_bytes(SUM) && amx_bytes(X) % 4 == 0 &&
                      amx_bytes(W) % 4 == 0;
    if (!fits) return amx_count(&amx_errors);
    amx_count(&amx_dots);
    for (int m = 0; m < amx_rows(SUM); m++)
        for (int n = 0; n < amx_bytes(SUM) / 4; n++) {
            float sum, part[2] = {};
            memcpy(&sum, &amx.row[SUM][m][4 * n], 4);
            for (int k = 0; k < amx_bytes(X) / 4; k++)
                for (int odd = 0; odd < 2; odd++)
                    part[odd] = amx_flushed(__builtin_fmaf(
                        amx_number(&amx.row[X][m][4 * k + 2 * odd]), amx_number(&amx.row[W][k][4 * n + 2 * odd]),
                        part[odd]));
            sum = amx_flushed(amx_flushed(sum) + amx_flushed(part[0] + part[1]));
            memcpy(&amx.row[SUM][m][4 * n], &sum, 4);
        }
}
template <int SUM, int X, int W> static void qa_dot_signed_unsigned() { amx_dot<SUM, X, W, uint8_t>(); }  // tdpbsud
template <int SUM, int X, int W> static void qa_dot_signed() { amx_dot<SUM, X, W, int8_t>(); }            // tdpbssd
