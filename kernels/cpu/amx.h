// The instructions of AMX, one function each. Tiles are numbered by template parameters: eight registers of 16 rows of
// 64 bytes. A thread configures its tiles, and releases them so that the system need not save them any longer; the
// process must have asked the system for them before (runtime/amx.py). The tests define QC_AMX_MODEL and bring a
// model of the tiles in the place of these functions.
#pragma once
#include "vec.h"

// Operand of `ldtilecfg`, of palette 1: bytes of a row of each tile, and its rows.
struct qa_shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    constexpr qa_shape() {}
};
static_assert(sizeof(qa_shape) == 64, "ldtilecfg reads 64 bytes");

// Products of bf16: tiles 0 … 3 hold sums, 4 and 5 rows (of x, queries, weights), 6 and 7 what multiplies them. Fewer
// than 16 rows take less time.
QC_INLINE qa_shape qa_shape_for(int64_t rows) {
    qa_shape shape;
    for (int t = 0; t < 8; t++) shape.row_bytes[t] = 64, shape.rows[t] = (uint8_t)(t < 6 && rows < 16 ? rows : 16);
    return shape;
}

#if defined(__x86_64__) && !defined(QC_AMX_MODEL)
QC_INLINE void qa_configure(const qa_shape& shape) { asm volatile("ldtilecfg %0" : : "m"(shape)); }
QC_INLINE void qa_release() { asm volatile("tilerelease"); }
template <int T> QC_INLINE void qa_zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
template <int T> QC_INLINE void qa_load(const void* from, int64_t stride) {  // bytes from one row to the next
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
// The same of what is not needed again soon, and does not take the place of other lines in the L1 cache.
template <int T> QC_INLINE void qa_load_once(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> QC_INLINE void qa_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// SUM[m][n] += the four signed bytes X[m][4 j …] times the four unsigned bytes W[j][4 n …] for all j, in 32 bits that
// wrap.
template <int SUM, int X, int W> QC_INLINE void qa_dot_signed_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}
// The same with signed bytes of W.
template <int SUM, int X, int W> QC_INLINE void qa_dot_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}
// SUM[m][n] += X[m][2 j] * W[j][2 n] + X[m][2 j + 1] * W[j][2 n + 1] for all j: bf16 numbers, sums in fp32.
template <int SUM, int X, int W> QC_INLINE void qa_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
}
#endif
