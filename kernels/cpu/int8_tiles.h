// Products of int8 rows by AMX. The codes of two panels become unsigned bytes once for a task, in the order in which
// vpdpbusd takes them (int8.h). That is the order of tiles, too: a row of a tile holds four columns of 16 rows of w.
// Tiles hold sums of whole groups of columns, which go through memory to be scaled.
#pragma once
#include "amx.h"
#include "int8.h"

#if defined(QC_AVX512)
enum {
    QT_LEAST = 16,   // rows of x from which a block of 16 is worth its zeros
    QT_BEHIND = 64,  // bytes behind the last row: windows are written in whole lines (im2col_int8.h)
};

// Two tiles of rows times two of panels: four of sums, so that a product need not wait for the one before.
struct qi_tiles : qi_vnni {
    static constexpr int ROWS = 32;
    static constexpr bool TILES = true;
};

// Columns of a tile: 64, or those of a group that is not made of as many. 0: no tile fits.
template <class W> constexpr int qt_columns() {
    return W::SHARED % 64 == 0 ? 64 : W::SHARED % 32 == 0 ? 32 : W::SHARED % 16 == 0 ? 16 : 0;
}

// Tiles 0 … 3 hold sums, 4 and 5 rows of x, 6 and 7 panels.
template <int COLUMNS> constexpr qa_shape qt_shape() {
    qa_shape shape;
    for (int t = 0; t < 8; t++) {
        shape.row_bytes[t] = t == 4 || t == 5 ? COLUMNS : 64;
        shape.rows[t] = t >= 6 ? COLUMNS / 4 : 16;
    }
    return shape;
}

constexpr int64_t qt_codes_of(int64_t k) { return qi_padded(k) / 4 * QG_NP * 64; }

// Bytes of scratch, as `qi_scratch_for`: entries, a tile of results, one of sums, codes, rows.
constexpr int64_t qt_scratch_for(int64_t k, int64_t groups, int64_t of_group) {
    return 4 * of_group * groups + 2 * 64 * qi_tiles::ROWS * QG_NP + qt_codes_of(k) +
           qi_chunk_of(k, qi_tiles::ROWS, qi_tiles::STEP) * (qi_stride(k, qi_tiles::STEP) + 8 * groups + 4) + QT_BEHIND;
}

// The sums of columns [k, end) of BLOCKS * 16 rows and two panels: sums[block][panel][16][16].
template <int COLUMNS, int BLOCKS> QC_INLINE void qt_sums(const qi_block& rows, int64_t k, int64_t end, int32_t* sums) {
    constexpr int64_t WIDTH = QG_NP * 64;
    qa_zero<0>(), qa_zero<1>();
    if constexpr (BLOCKS > 1) qa_zero<2>(), qa_zero<3>();
    for (; k < end; k += COLUMNS) {
        const char* const w = rows.codes + k / 4 * WIDTH;
        qa_load<6>(w, WIDTH), qa_load<7>(w + 64, WIDTH);
        qa_load<4>(rows.x + k, rows.stride);
        qa_dot_signed_unsigned<0, 4, 6>(), qa_dot_signed_unsigned<1, 4, 7>();
        if constexpr (BLOCKS > 1) {
            qa_load<5>(rows.x + 16 * rows.stride + k, rows.stride);
            qa_dot_signed_unsigned<2, 5, 6>(), qa_dot_signed_unsigned<3, 5, 7>();
        }
    }
    qa_store<0>(sums, 64), qa_store<1>(sums + 256, 64);
    if constexpr (BLOCKS > 1) qa_store<2>(sums + 512, 64), qa_store<3>(sums + 768, 64);
}

// tile[i][16 p + lane]: BLOCKS * 16 rows of x, of which `count` are wanted, times two panels; scaled as by `qi_micro`.
template <class W, int BLOCKS> static void qt_micro(
    const qg_packed& from, const qi_block& rows, int64_t count, int64_t panel, int64_t next, int32_t* sums,
    float* tile) {
    const int64_t span = qi_span(from.k, W::SHARED);
    W entries[QG_NP];
    for (int64_t g = 0, k = 0; k < from.k; g++, k += span) {
        qt_sums<qt_columns<W>(), BLOCKS>(rows, k, qc_min(k + span, from.k), sums);
        for (int p = 0; p < QG_NP; p++) {
            const qi_scale scale = qi_scale_of(entries[p], from, rows, p ? next : panel, g, k, p);
            for (int64_t i = 0; i < count; i++) {
                const vi start = vset(rows.start[i * rows.groups + g]);
                vf term = vtofloat(vload(sums + (i / 16 * QG_NP + p) * 256 + i % 16 * 16) + start) * scale.slope;
                if (W::AFFINE) term = term + vset(rows.total[i * rows.groups + g]) * scale.intercept;
                float* const to = tile + (i * QG_NP + p) * 16;
                vstore(to, (g ? vload(to) : vzero()) + term);
            }
        }
    }
    for (int64_t i = 0; i < count; i++)
        for (int p = 0; p < QG_NP; p++) {
            float* const to = tile + (i * QG_NP + p) * 16;
            vstore(to, vload(to) * vset(rows.scale[i]));
        }
}

// As `qi_multiply`.
template <class W, class Prepare> static void qt_multiply(
    const qg_job* job, int64_t m0, int64_t rows, int64_t chunk, int64_t p0, int64_t p1, char* scratch,
    Prepare prepare) {
    typedef qi_tiles E;
    constexpr int64_t NUMBERS = E::ROWS * QG_NP * 16;
    const int64_t stride = qi_stride(job->k, E::STEP), groups = qg_up(job->k, qi_span(job->k, W::SHARED));
    float* const tile = (float*)scratch;
    int32_t* const sums = (int32_t*)(tile + NUMBERS);
    float* const entries = (float*)(sums + NUMBERS);
    char* const codes = (char*)(entries + (W::NESTED ? groups * qi_entries_of<W>() : 0));
    char* const x = codes + qt_codes_of(job->k);
    float* const scale = (float*)(x + chunk * stride + QT_BEHIND);
    float* const total = scale + chunk;
    int32_t* const start = (int32_t*)(total + chunk * groups);
    for (int64_t i = 0; i < rows; i++)
        prepare(i, x + i * stride, start + i * groups, total + i * groups, scale + i);
    memset(x + rows * stride, 0, (size_t)((qg_up(rows, 16) * 16 - rows) * stride));  // tiles read sixteen rows
    memset(codes, 0, (size_t)qt_codes_of(job->k));  // and whole tiles of columns; those of x are zero there
    static constexpr qa_shape shape = qt_shape<qt_columns<W>()>();
    qa_configure(shape);
    for (int64_t panel = p0; panel < p1; panel += QG_NP) {
        const int64_t next = qc_min(panel + QG_NP, p1) - 1, n0 = panel * 16;
        if (W::NESTED) qi_prepare_entries<W>(job->packed, panel, next, entries);
        qi_unpack<W, E>(job->packed, panel, next, codes);
        for (int64_t i = 0; i < rows; i += E::ROWS) {
            const int64_t count = qc_min(rows - i, E::ROWS);
            const qi_block block = {
                x + i * stride, stride, groups, start + i * groups, total + i * groups, scale + i,
                W::NESTED ? entries : nullptr, codes};
            if (count > 16) qt_micro<W, 2>(job->packed, block, count, panel, next, sums, tile);
            else qt_micro<W, 1>(job->packed, block, count, panel, next, sums, tile);
            job->finish(job, tile, QG_NP * 16, m0 + i, count, n0, qc_min(job->n - n0, (next + 1 - panel) * 16));
        }
    }
    qa_release();
}
#endif
