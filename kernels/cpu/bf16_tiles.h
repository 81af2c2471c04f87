// Products of bf16 numbers by AMX (`tdpbf16ps`), where the context allows it: sixteen rows of x times sixteen of w, 32
// columns at a time, with sums in fp32.
//
// Words of two columns, as gemm_bf16.h makes them, are tiles of w as they lie: [pair of columns][16 lanes]. Rows of x are
// rounded once for all tasks and put in tiles, too, in the scratch of the calling thread. A task has some units of two
// panels. For one block of columns after the other, and each unit in it, it makes the words and multiplies all rows by
// them: words stay in the L1 cache, the rows of a block of columns in the L1 or the L2 cache, the sums of all units in
// the L2 cache.
//
//     by elements   a word holds two rounded elements
//     by codes      a word holds the values of two codes, which take a fifth of the time to make, and the sums of the
//                   columns of a scale are multiplied by it. Pays for few rows, and where a row has one scale
//
// A tile adds the products of even and of odd columns apart, 16 each, and then both to the sum; each addition rounds.
#pragma once
#include "amx.h"
#include "gemm_bf16.h"

// Columns of a tile of x, bytes of a tile, most rows and columns of a block (the words of a unit take 32 KiB).
enum { QM_COLUMNS = 32, QM_TILE = 1024, QM_ROWS = 32, QM_BLOCK = 512 };
// Few rows have narrower blocks: x and the words share an L1 cache of 48 KiB.
enum { QM_NARROW = 256 };
// Bytes of rows of x at a time, most rows, most units of a task, floats of their sums (a quarter of 2 MiB of L2).
enum { QM_CHUNK = 1 << 22, QM_MOST = 1024, QM_UNITS = 8, QM_SUMS = 1 << 17 };
// Most rows that are multiplied by codes where a row of w has several scales.
enum { QM_BY_CODES = 64 };

constexpr int64_t qm_padded(int64_t k) { return qg_up(k, QM_COLUMNS) * QM_COLUMNS; }
// Most rows at a time, of at most `m` (0: any number).
constexpr int64_t qm_chunk(int64_t k, int64_t m) {
    const int64_t fit = k > 0 ? QM_CHUNK / (2 * qm_padded(k)) / QM_ROWS * QM_ROWS : (int64_t)QM_MOST;
    const int64_t most = m > 0 && m < QM_MOST ? qg_up(m, QM_ROWS) * QM_ROWS : (int64_t)QM_MOST;
    return fit < QM_ROWS ? (int64_t)QM_ROWS : fit > most ? most : fit;
}
// Floats from one row of sums to the next: not a power of two, whose multiples share sets of an L1 cache.
constexpr int64_t qm_stride(int64_t units) { return (units * QG_NP + 1) * 16; }
// Floats of the sums of a task, once more those of a unit, and those of a block of rows before they are scaled.
constexpr int64_t qm_sums(int64_t chunk) {
    const int64_t all = chunk * qm_stride(QM_UNITS), unit = chunk * qm_stride(1);
    const int64_t least = all < QM_SUMS ? all : (int64_t)QM_SUMS;
    return (least < unit ? unit : least) + unit + QM_ROWS * qm_stride(1);
}
// Floats of the sums of columns of x, and of a row of it.
constexpr int64_t qm_totals(int64_t k, int64_t chunk) {
    return qg_up(chunk + QM_BY_CODES * (k / QM_COLUMNS), 16) * 16 + qm_padded(k);
}
// Bytes of scratch: words of a unit, sums, rows of x in tiles, their totals.
constexpr int64_t qm_scratch(int64_t k, int64_t m) {
    const int64_t chunk = qm_chunk(k, m);
    return QG_NP * QM_BLOCK * 32 + 4 * qm_sums(chunk) + chunk * 2 * qm_padded(k) + 4 * qm_totals(k, chunk);
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// --- tiles -----------------------------------------------------------------------------------------------------------

// Tiles 0 … 3 hold sums, 4 and 5 rows of x, 6 and 7 words of w. Fewer than 16 rows take less time.
QC_INLINE qa_shape qm_shape(int64_t rows) {
    qa_shape shape;
    for (int t = 0; t < 8; t++) shape.row_bytes[t] = 64, shape.rows[t] = (uint8_t)(t < 6 && rows < 16 ? rows : 16);
    return shape;
}

// Asks for lines. (Compilers may keep an address for each in a register.)
template <int LINES> QC_INLINE void qm_ask(const char* at) {
    if constexpr (LINES > 0) {
        asm volatile("prefetcht0 %c1(%0)" : : "r"(at), "i"(64 * (LINES - 1)));
        qm_ask<LINES - 1>(at);
    }
}

// sums[16 b + i][16 p + lane] (+)= tiles of MB blocks of 16 rows times NB panels, whose words lie `next` bytes apart;
// rows of sums lie `stride` bytes apart. The tiles of both blocks lie side by side, from one column of tiles to the next
// `step` bytes.
template <int MB, int NB> QC_INLINE void qm_block(
    const char* x, int64_t step, const char* w, int64_t next, int64_t tiles, float* sums, int64_t stride, bool add) {
    float* const below = (float*)((char*)sums + 16 * stride);
    if (add) {
        qa_load<0>(sums, stride);
        if constexpr (NB > 1) qa_load<1>(sums + 16, stride);
        if constexpr (MB > 1) qa_load<2>(below, stride);
        if constexpr (MB > 1 && NB > 1) qa_load<3>(below + 16, stride);
    } else {
        qa_zero<0>(), qa_zero<1>();
        if constexpr (MB > 1) qa_zero<2>(), qa_zero<3>();
    }
    for (; tiles > 0; tiles--, x += step, w += QM_TILE) {
        qa_load<4>(x, 64);
        if constexpr (MB > 1) qa_load<5>(x + QM_TILE, 64);
        qa_load<6>(w, 64);
        if constexpr (NB > 1) qa_load<7>(w + next, 64);
        qm_ask<16 * MB>(x + step);
        qa_dot_bf16<0, 4, 6>();
        if constexpr (NB > 1) qa_dot_bf16<1, 4, 7>();
        if constexpr (MB > 1) qa_dot_bf16<2, 5, 6>();
        if constexpr (MB > 1 && NB > 1) qa_dot_bf16<3, 5, 7>();
    }
    qa_store<0>(sums, stride);
    if constexpr (NB > 1) qa_store<1>(sums + 16, stride);
    if constexpr (MB > 1) qa_store<2>(below, stride);
    if constexpr (MB > 1 && NB > 1) qa_store<3>(below + 16, stride);
}

// --- words of w ------------------------------------------------------------------------------------------------------

// Where codes are looked up, a word holds columns J and J + HALF of every PER columns, by elements as well.
template <class D, bool LOOKED_UP = qb_coded<D>::LOOKED_UP> struct qm_order {
    static constexpr int HALF = 1, BITS = 0;
};
template <class D> struct qm_order<D, true> {
    static constexpr int HALF = qb_coded<D>::HALF, BITS = qb_coded<D>::LOW;
    static_assert(D::GROUP % qb_coded<D>::PER == 0, "groups are whole words");
};

template <class D> struct qm_store_step {
    const D& decoder;
    int32_t* dst;
    template <int P> QG_METHOD void step() {
        constexpr int HALF = qm_order<D>::HALF, J = P / HALF * 2 * HALF + P % HALF;
        q_store(dst + 16 * P, (qi)qb_pairs(decoder.template value<J>(), decoder.template value<J + HALF>()));
    }
};

// Columns [k0, k0 + kc) of a panel, and what is left of whole tiles: zeros, or where codes are looked up the columns
// behind the last one, which are multiplied by zeros.
template <class D> QC_COLD void qm_elements(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, char* words) {
    int64_t end = (kc + 1) / 2 * 64;
    if constexpr (qm_order<D>::BITS == 0) {
        qb_decode_panel<D>(job, panel, k0, kc, (float*)words);
    } else {
        D decoder;
        decoder.start(job, panel);
        end = qg_up(kc, D::GROUP) * D::GROUP * 32;
        for (int64_t k = 0; k < kc; k += D::GROUP) {
            decoder.at(k0 + k);
            qm_store_step<D> body{decoder, (int32_t*)(words + 32 * k)};
            qg_steps<0, D::GROUP / 2>(body, D::GROUP / 2);
        }
    }
    const int64_t whole = qm_padded(kc) * 32;
    if (end < whole) memset(words + end, 0, (size_t)(whole - end));
}

// The values of the codes of columns [k0, k0 + kc), whole tiles.
template <class D> QC_COLD void qm_codes(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, char* words) {
    typedef decltype(D::entries) W;
    typedef qb_coded<D> P;
    qb_table<W> table;
    qb_words<W> from;
    table.load(), from.start(job->packed, panel);
    from.words += k0 / P::PER * 16;
    for (int64_t k = 0; k < kc; k += P::PER) {
        from.at(k0 + k);
        QG_UNROLL for (int j = 0; j < P::HALF; j++)
            q_store((int32_t*)(words + 32 * k) + 16 * j, (qi)table.look(from.pair(j)));
    }
}

// Columns of a scale if `rows` rows are multiplied by codes, else 0. Words of elements take four more cycles for 32
// weights than those of codes, and to scale the sums of a row takes four.
template <class D> QC_INLINE int64_t qm_span(int64_t k, int64_t rows) {
    if constexpr (!qb_coded<D>::LOOKED_UP) return 0;
    else {
        const int64_t span = qb_coded<D>::span(k);
        if (decltype(D::entries)::COVERS == 0) return k > 0 && span == k && k % QM_COLUMNS == 0 ? k : 0;
        const bool whole = k % span == 0 && span % QM_COLUMNS == 0 && QM_NARROW % span == 0;
        return whole && rows <= qc_min(span, QM_BY_CODES) ? span : 0;
    }
}

// --- rows of x -------------------------------------------------------------------------------------------------------

// 32 numbers of a row, of which `left` are there, rounded to bf16.
template <class T> QC_INLINE __m512i qm_numbers(const T* x, int64_t left) {
    const vf first = vload_upto(x, (int)qc_min(left, 16));
    const vf second = left > 16 ? vload_upto(x + 16, (int)qc_min(left - 16, 16)) : vzero();
    __m512i both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first.r[0]), "v"(second.r[0]));
    return both;
}
QC_INLINE __m512i qm_numbers(const qc_bf16* x, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(x);
    return _mm512_maskz_loadu_epi16((__mmask32)((1u << left) - 1), x);
}

// How rows of x lie: blocks of `width` columns, in each the blocks of 16 or 32 rows, in each the columns of tiles, in
// each a tile or two.
struct qm_rows {
    char* tiles;
    int64_t count, padded;
    int64_t width, block, blocks;  // columns and rows of a block, blocks of rows
    qm_rows(char* at, int64_t rows, int64_t k)
        : tiles(at), count(rows), padded(qm_padded(k)), width(rows > QM_ROWS ? (int64_t)QM_BLOCK : QM_NARROW),
          block(rows > 16 ? (int64_t)QM_ROWS : 16), blocks(qg_up(rows, block)) {}
    int64_t step() const { return block * 64; }
    int64_t columns(int64_t k0) const { return qc_min(padded - k0, width); }  // of the block that begins at k0
    char* at(int64_t k, int64_t b) const {
        const int64_t k0 = k / width * width;
        return tiles + 2 * block * (k0 * blocks + b * columns(k0) + (k - k0));
    }
};

// Row i, with its columns in the order of words of codes of BITS bits (0: as they are).
template <int BITS, class T> QC_INLINE void qm_put_row(const T* x, int64_t k, const qm_rows& rows, int64_t i) {
    for (int64_t k0 = 0; k0 < rows.padded; k0 += rows.width) {
        char* to = rows.at(k0, i / rows.block) + i % rows.block * 64;
        for (int64_t at = k0; at < k0 + rows.columns(k0); at += QM_COLUMNS, to += rows.step()) {
            __m512i numbers = k > at ? qm_numbers(x + at, k - at) : __m512i();
            if constexpr (BITS != 0) numbers = (__m512i)qb_permute(qb_order<BITS>.from, numbers);
            _mm512_store_si512(to, numbers);
        }
    }
}

QC_INLINE vf qm_rounded(vf x, const void*) { return vround_bf16(x); }
QC_INLINE vf qm_rounded(vf x, const qc_bf16*) { return x; }

// The sums of whole groups of `span` columns, rounded to bf16.
template <class T> QC_INLINE void qm_add_up(const T* x, int64_t k, int64_t span, float* totals) {
    for (int64_t g = 0; g < k / span; g++) {
        vf total = vzero();
        for (int64_t at = g * span; at < (g + 1) * span; at += 16) total = total + qm_rounded(vload(x + at), x);
        totals[g] = vsum(total);
    }
}

// Whether elements have an offset.
template <class D> constexpr bool qm_offset() {
    if constexpr (qb_coded<D>::LOOKED_UP) return decltype(D::entries)::OFFSET;
    return false;
}

// Rows m0 + [first, last) of x in tiles (behind the last row zeros), and for `span` > 0 the sums of their columns. A
// window is made in `row`.
template <class D, class T>
static void qm_load_rows(
    const qg_job* job, int64_t m0, const qm_rows& rows, int64_t first, int64_t last, int64_t span, float* totals,
    float* row) {
    const auto put = [&](const auto* x, int64_t i) {
        qm_put_row<qm_order<D>::BITS>(x, job->k, rows, i);
        if (qm_offset<D>() && span > 0) qm_add_up(x, job->k, span, totals + i * (job->k / span));
    };
    for (int64_t i = first; i < last; i++) {
        if (i >= rows.count) qm_put_row<0>((const T*)nullptr, 0, rows, i);
        else if (job->window) job->load_x(job, m0 + i, 1, 0, job->k, row, rows.padded), put(row, i);
        else put((const T*)job->x + (m0 + i) * job->x_row, i);
    }
}

// --- products --------------------------------------------------------------------------------------------------------

struct qm_call {
    const qg_job* job;
    qm_rows rows;
    int64_t m0, span, units;  // the first row; columns of a scale, or 0; units of a task
    float* totals;
    int64_t row_at;  // where in scratch a row of x has room
};

// A unit: one panel, or two, and where its sums are.
struct qm_unit {
    int64_t panel;
    bool two;
    float* sums;
    int64_t stride;  // floats from row to row
    float* block(int64_t b) const { return sums + b * QM_ROWS * stride; }
};

// sums (+)= columns [k, k + tiles * 32) of block b of rows, times words. `stride`: floats from row to row.
QC_COLD void qm_product(
    const qm_rows& rows, int64_t b, int64_t k, int64_t tiles, const char* words, bool two, float* sums, int64_t stride,
    bool add) {
    const char* const x = rows.at(k, b);
    const int64_t step = rows.step(), next = QM_BLOCK * 32;
    if (rows.count - b * QM_ROWS > 16) {
        if (two) qm_block<2, 2>(x, step, words, next, tiles, sums, 4 * stride, add);
        else qm_block<2, 1>(x, step, words, next, tiles, sums, 4 * stride, add);
    } else {
        if (two) qm_block<1, 2>(x, step, words, next, tiles, sums, 4 * stride, add);
        else qm_block<1, 1>(x, step, words, next, tiles, sums, 4 * stride, add);
    }
}

// The columns of a block times a unit: its sums.
template <class D> static void qm_by_elements(const qm_call& call, const qm_unit& unit, int64_t k0, char* words) {
    const int64_t kc = qc_min(call.job->k - k0, call.rows.width);
    qm_elements<D>(call.job, unit.panel, k0, kc, words);
    if (unit.two) qm_elements<D>(call.job, unit.panel + 1, k0, kc, words + QM_BLOCK * 32);
    for (int64_t b = 0; b < call.rows.blocks; b++)
        qm_product(
            call.rows, b, k0, qg_up(kc, QM_COLUMNS), words, unit.two, unit.block(b), unit.stride, k0 > 0);
}

// Rows of numbers, `stride` apart.
template <class T> struct qm_lines { T* at; int64_t stride; };

// sums[i] (+)= parts[i] * scale + total[i] * offset for `count` rows, with the scale of a panel at column k.
template <class W> QC_INLINE void qm_scale(
    const qg_packed& from, int64_t panel, int64_t k, int64_t count, qm_lines<const float> parts,
    qm_lines<const float> totals, qm_lines<float> sums, bool add) {
    W entries;
    entries.load(from, panel, k);
    const qf scale = entries.scale().r[0];
    [[maybe_unused]] qf offset;
    if constexpr (W::OFFSET) offset = entries.offset().r[0];
    for (int64_t i = 0; i < count; i++) {
        float* const to = sums.at + i * sums.stride;
        const qf part = q_load(parts.at + i * parts.stride);
        qf sum = add ? q_fma(part, scale, q_load(to)) : part * scale;
        if constexpr (W::OFFSET) sum = q_fma(q_set(totals.at[i * totals.stride]), offset, sum);
        q_store(to, sum);
    }
}

// As `qm_by_elements`. `parts`: room for the sums of a block of rows.
template <class D>
static void qm_by_codes(const qm_call& call, const qm_unit& unit, int64_t k0, char* words, float* parts) {
    typedef decltype(D::entries) W;
    const int64_t groups = call.job->k / call.span, kc = qc_min(call.job->k - k0, call.rows.width);
    const int64_t narrow = qm_stride(1);
    qm_codes<D>(call.job, unit.panel, k0, kc, words);
    if (unit.two) qm_codes<D>(call.job, unit.panel + 1, k0, kc, words + QM_BLOCK * 32);
    for (int64_t b = 0; b < call.rows.blocks; b++) {
        float* const sums = unit.block(b);
        const int64_t count = qc_min(call.rows.count - b * QM_ROWS, QM_ROWS);
        const auto scale = [&](int64_t k, const float* these, int64_t stride, bool add) {
            const float* const totals = call.totals + b * QM_ROWS * groups + k / call.span;
            for (int p = 0; p < 1 + unit.two; p++)
                qm_scale<W>(call.job->packed, unit.panel + p, k, count, {these + 16 * p, stride}, {totals, groups},
                            {sums + 16 * p, unit.stride}, add);
        };
        if (groups == 1) {
            qm_product(call.rows, b, k0, kc / QM_COLUMNS, words, unit.two, sums, unit.stride, k0 > 0);
            if (k0 + kc == call.job->k) scale(0, sums, unit.stride, false);
            continue;
        }
        for (int64_t k = k0; k < k0 + kc; k += call.span) {
            const char* const these = words + 32 * (k - k0);
            qm_product(call.rows, b, k, call.span / QM_COLUMNS, these, unit.two, parts, narrow, false);
            scale(k, parts, narrow, k > 0);
        }
    }
}

// A sum of codes may be no number where that of elements is one (0 * infinity): such rows take the other way, too.
template <class D> QC_COLD void qm_mend(const qm_call& call, const qm_unit& unit, char* words, float* others) {
    bool made = false;
    for (int64_t i = 0; i < call.rows.count; i++) {
        float* const row = unit.sums + i * unit.stride;
        const vf first = vload(row), second = unit.two ? vload(row + 16) : vzero();
        if (vsum((first - first) + (second - second)) == 0.0f) continue;
        const qm_unit other = {unit.panel, unit.two, others, qm_stride(1)};
        for (int64_t k0 = 0; !made && k0 < call.job->k; k0 += call.rows.width) qm_by_elements<D>(call, other, k0, words);
        made = true;
        memcpy(row, others + i * qm_stride(1), 4 * 16 * QG_NP);
    }
}

template <class D> static void qm_task(void* arg, int64_t task, char* scratch) {
    const qm_call& call = *(const qm_call*)arg;
    const qg_job* const job = call.job;
    const int64_t panels = (job->n + 15) / 16, p0 = task * call.units * QG_NP, n0 = p0 * 16;
    const int64_t units = qc_min(qg_up(panels, QG_NP) - task * call.units, call.units);
    const int64_t rows = call.rows.blocks * call.rows.block, stride = qm_stride(call.units);
    char* const words = scratch;
    float* const sums = (float*)(words + QG_NP * QM_BLOCK * 32);
    float* const others = sums + rows * stride;
    float* const parts = others + rows * qm_stride(1);
    qa_configure(qm_shape(call.rows.count));
    int64_t k0 = 0;
    do {  // once even for k = 0, whose sums are zero
        for (int64_t panel = p0; panel < p0 + units * QG_NP; panel += QG_NP) {
            const qm_unit unit = {panel, panel + 1 < panels, sums + (panel - p0) * 16, stride};
            if constexpr (qb_coded<D>::LOOKED_UP)
                if (call.span > 0) qm_by_codes<D>(call, unit, k0, words, parts);
            if (call.span == 0) qm_by_elements<D>(call, unit, k0, words);
            if constexpr (qb_coded<D>::LOOKED_UP)
                if (call.span > 0 && k0 + call.rows.width >= job->k) qm_mend<D>(call, unit, words, others);
        }
        k0 += call.rows.width;
    } while (k0 < job->k);
    qa_release();
    const int64_t columns = qc_min(job->n - n0, units * QG_NP * 16);
    for (int64_t i = 0; i < call.rows.count; i += QM_ROWS)
        job->finish(job, sums + i * stride, stride, call.m0 + i, qc_min(call.rows.count - i, QM_ROWS), n0, columns);
}

// Rows of a task that puts them in tiles.
enum { QM_LOADED = 32 };
template <class D, class T> static void qm_load_task(void* arg, int64_t task, char* scratch) {
    const qm_call& call = *(const qm_call*)arg;
    float* const row = (float*)(scratch + call.row_at);
    const int64_t end = call.rows.blocks * call.rows.block;
    qm_load_rows<D, T>(call.job, call.m0, call.rows, task * QM_LOADED, qc_min((task + 1) * QM_LOADED, end), call.span,
                       call.totals, row);
}

// Rows of T times a weight. `m`: what `qm_scratch` was told.
template <class D, class T> static void qm_run(qc_ctx* ctx, qg_job* job, int64_t m) {
    if (job->m <= 0 || job->n <= 0) return;
    const int64_t units = qg_up((job->n + 15) / 16, QG_NP), threads = ctx->num_threads;
    const int64_t most = qm_chunk(job->k, m), chunks = qg_up(job->m, most), padded = qm_padded(job->k);
    const int64_t chunk = qc_min(most, qg_up(qg_up(job->m, chunks), QM_ROWS) * QM_ROWS);  // nearly equal ones
    char* const tiles = ctx->scratch + QG_NP * QM_BLOCK * 32 + 4 * qm_sums(most);
    float* const totals = (float*)(tiles + most * 2 * padded);
    for (int64_t m0 = 0; m0 < job->m; m0 += chunk) {
        const qm_rows rows(tiles, qc_min(job->m - m0, chunk), job->k);
        const int64_t fit = (QM_SUMS / (rows.blocks * rows.block * 16) - 1) / QG_NP;
        const int64_t worth = units * QG_NP * job->k * (3 + qg_up(rows.count, 16)) / 2 / QG_TASK;
        const int64_t tasks = threads > 1 ? qc_max(qc_min(worth, 2 * threads), 1) : 1;
        const int64_t wide = qc_max(qc_min(qc_min(fit, QM_UNITS), units / tasks), 1);
        qm_call call = {job, rows, m0, qm_span<D>(job->k, job->m), wide, totals, qm_scratch(job->k, m) - 4 * padded};
        const int64_t loads = qg_up(rows.blocks * rows.block, QM_LOADED), all = qg_up(units, call.units);
        const bool shared = threads > 1 && all > 1 && tasks > 1;
        if (shared && rows.count * job->k >= 8 * QG_TASK) ctx->parallel(ctx, loads, qm_load_task<D, T>, &call);
        else for (int64_t task = 0; task < loads; task++) qm_load_task<D, T>(&call, task, ctx->scratch);
        if (shared) ctx->parallel(ctx, all, qm_task<D>, &call);
        else for (int64_t task = 0; task < all; task++) qm_task<D>(&call, task, ctx->scratch);
    }
}
#endif
