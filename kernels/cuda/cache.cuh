// Rows of a cache in 8 or 4 bits (qcompiler/formats/cache_rows.py): codes, then their scales. Rows begin at multiples
// of 16 bytes.
#pragma once
#include "decode.cuh"
#include "tile.cuh"

// Where a row of `cols` codes of a byte has its scale, and how many bytes it has.
QC_DEVICE constexpr int qc_scale_at(int cols) { return (cols + 3) / 4 * 4; }
QC_DEVICE constexpr int qc_row_bytes(int cols) { return (qc_scale_at(cols) + 4 + 15) / 16 * 16; }

// A code of each kind. Of those of a byte: the float that it is, and the byte of the code nearest to a number that is
// at most `most`.
struct qc_code_int8 {
    static constexpr bool in_groups = false;
    static constexpr float most = 127.0f;
    static QC_DEVICE float value(uint32_t byte) { return (float)(int8_t)byte; }
    static QC_DEVICE uint32_t nearest(float x) { return (uint32_t)(int)rintf(x) & 255u; }
};
// e4m3: exponents count from 7, and the smallest number is 2^-9.
struct qc_code_fp8 {
    static constexpr bool in_groups = false;
    static constexpr float most = 448.0f;
    static QC_DEVICE float value(uint32_t byte) { return qc_minifloat<3>(byte); }
    static QC_DEVICE uint32_t nearest(float x) {
        const float size = fabsf(x);
        const uint32_t bits = __float_as_uint(size), sign = __float_as_uint(x) >> 24 & 128u;
        const uint32_t code = (bits + 0x7ffffu + (bits >> 20 & 1u) >> 20) - (120u << 3);
        return (size < 0x1p-6f ? (uint32_t)(int)rintf(size * 0x1p9f) : code) | sign;
    }
};

// Codes of 4 bits, the first in the low ones. 32 columns share a step and a least number, in bf16, behind the codes.
struct qc_code_int4 {
    static constexpr bool in_groups = true;
};
QC_DEVICE constexpr int qc_group_scales_at(int cols) { return (cols + 31) / 32 * 16; }

// What kernels that are printed for every target call.
QC_DEVICE float qc_of_e4m3(int8_t code) { return qc_minifloat<3>((uint8_t)code); }
QC_DEVICE float qc_of_int4(const int8_t* row, int cols, int c) {
    const uint32_t scales = *(const uint32_t*)(row + qc_group_scales_at(cols) + c / 32 * 4);
    const float code = (float)((uint8_t)row[c / 2] >> c % 2 * 4 & 15);
    return code * __uint_as_float(scales << 16) + __uint_as_float(scales & 0xffff0000u);
}

// What the values of a row are multiplied by; those of 4 bits are whole already.
template <class CODE, int COLS> QC_DEVICE float qc_row_scale(const int8_t* row) {
    if constexpr (CODE::in_groups) return 1.0f;
    else return *(const float*)(row + qc_scale_at(COLS));
}

// Four codes as floats.
template <class CODE> QC_DEVICE void qc_unpack_codes(float* value, uint32_t word) {
#pragma unroll
    for (int i = 0; i < 4; i++) value[i] = CODE::value(word >> 8 * i & 0xffu);
}

// How a lane reads WIDTH columns of a row of COLS codes from column c (a multiple of WIDTH) on: `load` asks for them as
// they are stored, `unpack` makes floats of them, zeros behind the end of the row. Of 4 bits, WIDTH is 4, 8 or 16:
template <class CODE, int COLS, int WIDTH, bool IN_GROUPS = CODE::in_groups> struct qc_code_rows {
    static constexpr int width = WIDTH, cols = COLS;
    struct raw {
        uint32_t word[(WIDTH + 7) / 8], scales;
    };
    static QC_DEVICE raw load(const int8_t* row, int c, bool) {
        raw of;
        of.scales = *(const uint32_t*)(row + qc_group_scales_at(COLS) + c / 32 * 4);
        if constexpr (WIDTH == 16) {
            const uint2 two = *(const uint2*)(row + c / 2);
            of.word[0] = two.x, of.word[1] = two.y;
        } else if constexpr (WIDTH == 8) {
            of.word[0] = *(const uint32_t*)(row + c / 2);
        } else {
            of.word[0] = *(const uint16_t*)(row + c / 2);
        }
        return of;
    }
    static QC_DEVICE void unpack(float (&value)[WIDTH], const raw& of, int c) {
        const float step = __uint_as_float(of.scales << 16), least = __uint_as_float(of.scales & 0xffff0000u);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            value[i] = fmaf((float)(of.word[i / 8] >> i % 8 * 4 & 15u), step, least);
            if (COLS % WIDTH != 0) value[i] = c + i < COLS ? value[i] : 0.0f;
        }
    }
};

// Of a byte, 8 or 16 codes at a time, without their scale.
template <class CODE, int COLS, int WIDTH> struct qc_code_rows<CODE, COLS, WIDTH, false> {
    static constexpr int width = WIDTH, cols = COLS;
    struct raw {
        uint32_t word[WIDTH / 4];
    };
    static QC_DEVICE raw load(const int8_t* row, int c, bool) {
        raw of;
        if constexpr (WIDTH == 16) {
            const uint4 four = *(const uint4*)(row + c);
            of.word[0] = four.x, of.word[1] = four.y, of.word[2] = four.z, of.word[3] = four.w;
        } else {
            const uint2 two = *(const uint2*)(row + c);
            of.word[0] = two.x, of.word[1] = two.y;
        }
        return of;
    }
    static QC_DEVICE void unpack(float (&value)[WIDTH], const raw& of, int c) {
#pragma unroll
        for (int i = 0; i < WIDTH / 4; i++) qc_unpack_codes<CODE>(value + 4 * i, of.word[i]);
        if (COLS % WIDTH != 0 && c + WIDTH > COLS) {  // the scale stands behind the last code
#pragma unroll
            for (int i = 0; i < WIDTH; i++) value[i] = c + i < COLS ? value[i] : 0.0f;
        }
    }
};

// Codes of a byte, or values of codes in groups; zeros where the row is not there.
template <class CODE, int COLS, int WIDTH>
QC_DEVICE void qc_read_codes(float (&value)[WIDTH], const int8_t* row, int c, bool there) {
    using rows = qc_code_rows<CODE, COLS, WIDTH>;
    typename rows::raw of = {};
    if (there && c < COLS) of = rows::load(row, c, true);
    rows::unpack(value, of, c);
}

// tile[r * STRIDE + c] = value c0 + c of row r, in fp32, for ROWS x WIDTH (a multiple of 4) elements of rows of COLS
// columns; zeros from row `live` and from the last column on.
template <class CODE, int COLS, int ROWS, int WIDTH, int STRIDE, int THREADS>
QC_DEVICE void qc_stage_cache(float* tile, const int8_t* rows, int64_t row_stride, int c0, int live) {
    constexpr int WORDS = WIDTH / 4;
#pragma unroll 2
    for (int e = (int)threadIdx.x; e < ROWS * WORDS; e += THREADS) {
        const int r = e / WORDS, c = e % WORDS * 4;
        const bool there = r < live && c0 + c < COLS;
        const int8_t* const row = rows + r * row_stride;
        float value[4];
        if constexpr (CODE::in_groups) qc_read_codes<CODE, COLS>(value, row, c0 + c, there);
        else qc_unpack_codes<CODE>(value, there ? *(const uint32_t*)(row + c0 + c) : 0u);
        const float scale = there ? qc_row_scale<CODE, COLS>(row) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) tile[r * STRIDE + c + i] = value[i] * scale;
    }
}

// The same as 16-bit numbers, rounded once, for COLS (a multiple of 8) columns.
template <class CODE, int COLS, int ROWS, int STRIDE, int THREADS, class T>
QC_DEVICE void qc_stage_cache(T* tile, const int8_t* rows, int64_t row_stride, int live) {
    constexpr int CHUNKS = COLS / 8;
#pragma unroll 2
    for (int e = (int)threadIdx.x; e < ROWS * CHUNKS; e += THREADS) {
        const int r = e / CHUNKS, c = e % CHUNKS * 8;
        const int8_t* const row = rows + r * row_stride;
        float value[8];
        qc_read_codes<CODE, COLS>(value, row, c, r < live);
        const float scale = r < live ? qc_row_scale<CODE, COLS>(row) : 0.0f;
        uint32_t pair[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pair[i] = qc_pack(value[2 * i] * scale, value[2 * i + 1] * scale, T());
        *(uint4*)(tile + r * STRIDE + c) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}

// One row of COLS elements by a warp, with one scale.
template <class CODE, int COLS, class T> QC_DEVICE void qc_quantise_cache_row(const T* x, int8_t* row, int lane) {
    int top = 0;  // magnitudes as integers: a NaN is above infinity, which is above all others
    for (int k = lane; k < COLS; k += 32) top = max(top, (int)__float_as_uint(fabsf(qc_load(x + k))));
    for (int step = 16; step > 0; step >>= 1) top = max(top, __shfl_xor_sync(QC_ALL_LANES, top, step));
    const bool finite = top < 0x7f800000;
    float scale = __uint_as_float((uint32_t)top) / CODE::most;
    if (!(scale > 0.0f)) scale = 1.0f;
    for (int k = 4 * lane; k < qc_row_bytes(COLS); k += 128) {
        uint32_t word = 0;
        if (k == qc_scale_at(COLS)) word = finite ? __float_as_uint(scale) : 0x7fc00000u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (finite && k + i < COLS) {
                const float part = fmaxf(fminf(qc_load(x + k + i) / scale, CODE::most), -CODE::most);
                word |= CODE::nearest(part) << 8 * i;
            }
        }
        *(uint32_t*)(row + k) = word;
    }
}

// The next bf16 below x, and the next above a number that is not negative; x itself if it is one.
QC_DEVICE float qc_bf16_down(float x) {
    return __uint_as_float((__float_as_uint(x) + (x < 0.0f ? 0xffffu : 0u)) & 0xffff0000u);
}
QC_DEVICE float qc_bf16_up(float x) { return __uint_as_float((__float_as_uint(x) + 0xffffu) & 0xffff0000u); }

// One row of COLS elements in 4 bits by a warp, a lane for each of 32 columns.
template <int COLS, class T> QC_DEVICE void qc_quantise_int4_row(const T* x, int8_t* row, int lane) {
    constexpr int GROUPS = (COLS + 31) / 32;
#pragma unroll 2
    for (int group = 0; group < GROUPS; group++) {
        const bool there = group * 32 + lane < COLS;
        const float number = there ? qc_load(x + group * 32 + lane) : 0.0f;
        const float value = fmaxf(fminf(number, 1e38f), -1e38f);
        const bool finite = __all_sync(QC_ALL_LANES, (__float_as_uint(number) & 0x7fffffffu) < 0x7f800000u);
        float low = there ? value : 1e38f, high = there ? value : -1e38f;
        for (int step = 16; step > 0; step >>= 1) {
            low = fminf(low, __shfl_xor_sync(QC_ALL_LANES, low, step));
            high = fmaxf(high, __shfl_xor_sync(QC_ALL_LANES, high, step));
        }
        const float least = qc_bf16_down(low + 0.0f);  // -0 becomes 0
        const float exact = (high - least) / 15.0f, step = finite && exact > 0.0f ? qc_bf16_up(exact) : 0.0f;
        uint32_t word = 0;
        if (there && step > 0.0f) word = (uint32_t)rintf(fminf((value - least) / step, 15.0f)) << lane % 8 * 4;
        for (int near = 1; near < 8; near *= 2) word |= __shfl_xor_sync(QC_ALL_LANES, word, near);
        if (lane % 8 == 0) *(uint32_t*)(row + group * 16 + lane / 2) = word;
        const uint32_t scales = __float_as_uint(step) >> 16 | (finite ? __float_as_uint(least) : 0x7fc00000u);
        if (lane == 0) *(uint32_t*)(row + qc_group_scales_at(COLS) + group * 4) = scales;
    }
    constexpr int USED = GROUPS * 20;
    if (USED + 4 * lane < (USED + 15) / 16 * 16) *(uint32_t*)(row + USED + 4 * lane) = 0;
}
