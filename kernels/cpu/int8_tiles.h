// Products of int8 rows by AMX. A tile of sums holds 16 rows of x times 16 rows of w. A block is two tiles of rows
// times two panels, so that each tile that is loaded is multiplied twice.
//
//     x       [32 rows][step of 64 columns][row][64 bytes]: a tile is 1 KiB of neighbours
//     codes   [step of 64 columns][panel][16][64 bytes]: integers of the weight as bytes, which are made a few steps
//             before they are multiplied. Weights of whole bytes are read where they are
//
// Where columns share scales in groups, sums of a group go through memory to be scaled. They are stored when the next
// group begins, tile by tile, and while that is multiplied: storing a tile takes the decoder 16 cycles, and as long as
// tiles are multiplied one port is left for multiplications of floats, so that work of all kinds has to be mixed.
// Columns are cut into pieces (PIECE), and all rows are multiplied by a piece of the panels before the next: its codes,
// two groups of sums and a block of totals fit into an L1 of 48 KiB beside the rows that stream through it. With codes
// and sums twice as large the same loop takes 1.4 times as long.
#pragma once
#include "amx.h"
#include "int8.h"

#if defined(QC_AVX512)
enum {
    QT_CHUNK = 1048576,  // bytes of prepared rows of a task: half of an L2 of processors that have AMX
    QT_BLOCKS = 16,      // most blocks of rows of a task
};

struct qi_tiles : qi_vnni {
    static constexpr int ROWS = 32;
    static constexpr bool TILES = true;
    // Bytes from 64 columns of a prepared row to the next. Lines of one row are not in one set of the L1.
    static constexpr int64_t LINE = 64 * ROWS + 64;
};

// Columns of a tile: 64, or those of a group that is not made of as many. 0: no tile fits.
template <class W> constexpr int qt_columns() {
    return W::SHARED % 64 == 0 ? 64 : W::SHARED % 32 == 0 ? 32 : W::SHARED % 16 == 0 ? 16 : 0;
}

// Rows of x from which tiles take less time than vpdpbusd, measured on a Xeon of family 6, model 207 (4096 x 4096).
template <class W> constexpr int64_t qt_least() {
    return W::SHARED == 0 ? 13 : W::SHARED == 16 ? 14 : W::SHARED % 64 == 0 ? 8 : 10;
}

// How the integers of a weight are multiplied.
template <class W> struct qt_kind {
    static constexpr bool SIGNED = W::LOWEST >= -128 && W::HIGHEST < 128;  // they fit signed bytes
    // Where panels hold these bytes. Words of 8 bits have the columns of four bytes in their order.
    static constexpr bool DIRECT =
        W::BITS == 8 && !W::LISTED && (SIGNED ? W::FLIP && W::LOWEST == -128 : !W::FLIP);
    static constexpr bool BEGINS = !SIGNED && W::LOWEST != 0;  // bytes are -W::LOWEST too large
};

// Columns of a piece: pairs of groups and whole steps, 256 if they can be; 512 where all columns share scales.
constexpr int64_t qt_piece(int64_t shared) {
    if (shared == 0) return 512;
    int64_t piece = 2 * shared;
    while (piece < 256 || piece % 64 != 0) piece += 2 * shared;
    return piece;
}

constexpr int64_t qt_codes_of(int64_t shared) { return qt_piece(shared) * QG_NP * 16; }  // bytes of a piece

constexpr int64_t qt_bytes_of(int64_t k) { return qi_padded(k) / 64 * qi_tiles::LINE; }  // of a block of rows of x

constexpr int64_t qt_rows_of(int64_t k) {
    const int64_t fit = QT_CHUNK / qt_bytes_of(k);
    return qi_tiles::ROWS * (fit < 1 ? 1 : fit < QT_BLOCKS ? fit : (int64_t)QT_BLOCKS);
}

// Bytes of scratch: three groups of sums, entries, codes, rows, and of each row its totals and three numbers.
constexpr int64_t qt_scratch_for(int64_t k, int64_t groups, int64_t shared) {
    return 3 * 4096 + 2 * 64 * QG_NP * (groups + 1) + qt_codes_of(shared) +
           qt_rows_of(k) / qi_tiles::ROWS * qt_bytes_of(k) + qt_rows_of(k) * (64 * QG_NP + 8 * (groups + 1) + 4);
}

// The bytes that lie ahead in a plane of codes: those of the next panels are asked for while these are multiplied.
struct qt_ahead {
    const char* at;
    const char* end;
    QG_METHOD void ask(int64_t bytes) {
        const char* from = at;
        const char* const to = at = from + bytes < end ? from + bytes : end;
        for (; from < to; from += 64) __builtin_prefetch(from, 0, 2);
    }
};

// The lines that results of a block of rows will be written to: asked for in parts, while the last columns are
// multiplied, so that writing them need not wait for each.
struct qt_lines {
    const char* at;
    int64_t row, bytes, rows;
    QG_METHOD void ask(int64_t count) {
        for (count = qc_min(count, rows), rows -= count; count > 0; count--, at += row)
            for (int64_t b = 0; b < bytes; b += 64) asm volatile("prefetchw %0" : : "m"(at[b]));
    }
};

// The sums of GROUPS groups of a block of rows, whose terms are added to `rows` rows of totals.
struct qt_sums {
    int32_t* at[2];  // of each group: [16 rows][panel][16][16]
    const float* entries;
    const int32_t* start;
    const float* total;
    float* tile;
    int64_t rows;
};

// A task: what is the same for all of its blocks of rows and panels.
template <class W> struct qt_task {
    typedef qi_planes<W> P;
    typedef qt_kind<W> K;
    static constexpr int COLUMNS = qt_columns<W>(), PLANES = 1 + (P::MIDDLE != 0) + (P::HIGH != 0);
    static constexpr int ENTRIES = 16 * (1 + W::AFFINE);
    static constexpr uint64_t PIECE = qt_piece(W::SHARED), SPAN = W::SHARED ? W::SHARED : 64;

    const qg_packed* from;
    int64_t rows, pitch;  // numbers of groups from row to row: an even one
    float* tile;         // [row][panel][16]: totals
    int32_t* sums;       // [3 groups][4][16][16]
    float* entries;      // [group][panel][slope, intercept][16]
    char* codes;
    char* x;
    float* scale;
    float* total;        // [row][group], `pitch` of them
    int32_t* start;
    const char* panel[QG_NP];
    qi_walk<W, false> walk[QG_NP];
    qt_ahead ahead[PLANES];
    int64_t asked;       // bytes of each plane that a step asks for
    qt_lines lines;
    qt_sums waiting;     // a pair of groups; the sums of the second one are in the tiles
    int32_t* spare;      // sums of no group

    // --- codes ---
    template <int WIDTH> QG_METHOD int64_t bytes_of_panel() const { return qg_up(from->k, 32 / WIDTH) * 64; }
    template <int WIDTH> QG_METHOD qt_ahead ahead_of(int part, int64_t panel, int64_t end) const {
        const char* const to = from->part[part];
        return {to + panel * bytes_of_panel<WIDTH>(), to + qc_min(panel + QG_NP, end) * bytes_of_panel<WIDTH>()};
    }
    void to_panels(int64_t first, int64_t next, int64_t end) {
        const int64_t steps = qg_up(from->k, 64) * qg_up(rows, qi_tiles::ROWS), low = bytes_of_panel<P::LOW>();
        for (int p = 0; p < QG_NP; p++) {
            panel[p] = from->part[0] + (p ? next : first) * low;
            if constexpr (!K::DIRECT) walk[p].start(*from, p ? next : first);
        }
        if constexpr (K::DIRECT)
            if (from->k % 64 != 0)
                for (int p = 0; p < QG_NP; p++)  // a tile must not be read from behind the last panel
                    memcpy(codes + 1024 * p, panel[p] + from->k / 64 * 1024, (size_t)(low - from->k / 64 * 1024));
        ahead[0] = ahead_of<P::LOW>(0, next + 1, end);
        if constexpr (P::MIDDLE != 0) ahead[1] = ahead_of<P::MIDDLE>(1, next + 1, end);
        if constexpr (P::HIGH != 0) ahead[2] = ahead_of<P::HIGH>(2, next + 1, end);
        asked = qg_up(qg_up(QG_NP * low, steps), 64) * 64;
    }
    // Where a step's codes are.
    QG_METHOD char* codes_at(int64_t k) const {
        return codes + (uint64_t)k % PIECE / 64 * 2048;
    }
    QG_METHOD void unpack(int64_t k) {
        if (k >= from->k) return;
        char* to = codes_at(k);
        const int64_t end = qc_min(k + 64, from->k);
        qi_walk<W, false> at[QG_NP];  // in registers
        QG_UNROLL for (int p = 0; p < QG_NP; p++) at[p].low = walk[p].low;
        if constexpr (P::MIDDLE != 0) QG_UNROLL for (int p = 0; p < QG_NP; p++) at[p].middle = walk[p].middle;
        if constexpr (P::HIGH != 0) QG_UNROLL for (int p = 0; p < QG_NP; p++) at[p].high = walk[p].high;
        for (; k < end; k += P::PER, to += 16 * P::PER) {
            QG_UNROLL for (int p = 0; p < QG_NP; p++) at[p].at(k);
            qi_steps<W>([&](auto number) __attribute__((always_inline)) {
                constexpr int S = decltype(number)::value;
                QG_UNROLL for (int p = 0; p < QG_NP; p++) {
                    const __m512i bytes = (__m512i)at[p].template bytes<qi_vnni, S>(0);
                    const __m512i integers =
                        K::SIGNED && W::LOWEST != 0 ? _mm512_add_epi8(bytes, _mm512_set1_epi8((char)W::LOWEST)) : bytes;
                    _mm512_store_si512(to + 1024 * p + 64 * S, integers);
                }
            });
        }
        QG_UNROLL for (int p = 0; p < QG_NP; p++) walk[p].low = at[p].low;
    }
    // What a step of 64 columns has time for. `made`: the codes of the next piece are made, in the place of these.
    QG_METHOD void behind(bool made, int64_t k) {
        if constexpr (!K::DIRECT)
            if (made) unpack(k + PIECE);
        QG_UNROLL for (int i = 0; i < PLANES; i++) ahead[i].ask(asked);
        if (lines.rows > 0) lines.ask(qi_tiles::ROWS / (PIECE / 64));
    }

    // --- entries ---
    void load_entries(int64_t first, int64_t next) {
        const int64_t span = qi_span(from->k, W::SHARED);
        W entry[QG_NP];
        float* to = entries;
        for (int64_t k = 0; k < from->k; k += span)
            QG_UNROLL for (int p = 0; p < QG_NP; p++, to += ENTRIES) {
                entry[p].load(*from, p ? next : first, k);
                vstore(to, entry[p].slope());
                if (W::AFFINE) vstore(to + 16, entry[p].intercept());
            }
        memset(to, 0, QG_NP * ENTRIES * 4);  // of a group that makes a pair of the last one
    }

    // --- tiles: 0 … 3 hold sums, 4 and 5 rows of x, 6 and 7 panels ---
    void configure() {
        qa_shape shape;
        for (int t = 0; t < 8; t++) {
            const int64_t left = t == 2 || t == 3 || t == 5 ? rows - 16 : rows;
            shape.row_bytes[t] = t == 4 || t == 5 ? COLUMNS : 64;
            shape.rows[t] = (uint8_t)(t >= 6 ? COLUMNS / 4 : left > 0 ? qc_min(left, 16) : 16);
        }
        qa_configure(shape);
    }
    template <int SUM, int X, int Y> QG_METHOD void dot() {
        if constexpr (K::SIGNED) qa_dot_signed<SUM, X, Y>();
        else qa_dot_signed_unsigned<SUM, X, Y>();
    }
    QG_METHOD const char* rows_at(int64_t first, int64_t k) const {
        return x + first / qi_tiles::ROWS * qt_bytes_of(from->k) + (uint64_t)k / 64 * qi_tiles::LINE + (uint64_t)k % 64;
    }
    template <int T> QG_METHOD void load_codes(int64_t k) {
        const int64_t step = (int64_t)((uint64_t)k / 64 * 64), rest = (k - step) * 16;
        const char* at;
        if constexpr (K::DIRECT) at = step + 64 > from->k ? codes + 1024 * (T - 6) + rest : panel[T - 6] + 16 * k;
        else at = codes_at(k) + 1024 * (T - 6) + rest;
        qa_load<T>(at, 64);
    }

    // --- scaling ---
    template <int GROUPS> struct scales {
        vf slope[GROUPS][QG_NP], intercept[GROUPS][QG_NP];
        QG_METHOD void load(const float* entries) {
            QG_UNROLL for (int g = 0; g < GROUPS; g++)
                QG_UNROLL for (int p = 0; p < QG_NP; p++, entries += ENTRIES) {
                    slope[g][p] = vload(entries);
                    if (W::AFFINE) intercept[g][p] = vload(entries + 16);
                }
        }
    };
    // Adds the terms of rows [row, row + COUNT), which are in one tile.
    template <int GROUPS, int COUNT>
    QG_METHOD void scale_rows(const qt_sums& of, const scales<GROUPS>& by, int64_t row) const {
        const int64_t place = (int64_t)((uint64_t)row / 16 * QG_NP * 256 + (uint64_t)row % 16 * 16);
        float* const to = of.tile + row * QG_NP * 16;
        QG_UNROLL for (int i = 0; i < COUNT; i++) {
            vf sum[QG_NP];
            QG_UNROLL for (int p = 0; p < QG_NP; p++) sum[p] = vload(to + (i * QG_NP + p) * 16);
            QG_UNROLL for (int g = 0; g < GROUPS; g++) {
                vf total_of_row = vzero();
                if (W::AFFINE) total_of_row = vset(of.total[(row + i) * pitch + g]);
                QG_UNROLL for (int p = 0; p < QG_NP; p++) {
                    vi whole = vload(of.at[g] + place + p * 256 + i * 16);
                    if (K::BEGINS) whole = whole + vset(of.start[(row + i) * pitch + g]);
                    vf term = vtofloat(whole) * by.slope[g][p];
                    if (W::AFFINE) term = term + total_of_row * by.intercept[g][p];
                    sum[p] = sum[p] + term;
                }
            }
            QG_UNROLL for (int p = 0; p < QG_NP; p++) vstore(to + (i * QG_NP + p) * 16, sum[p]);
        }
    }
    template <int GROUPS> void scale_all(const qt_sums& of) const {
        scales<GROUPS> by;
        by.load(of.entries);
        for (int64_t row = 0; row < of.rows; row++) scale_rows<GROUPS, 1>(of, by, row);
    }

    // --- products with groups of columns ---
    // Rows that are scaled at once, so that `points` times as many are a block: a power of two, and at most a tile.
    static constexpr int rows_at_once(int rows, int points) {
        int count = 1;
        while (count * points < rows) count *= 2;
        return count < 16 ? count : 16;
    }
    // Stores the sums of the group before, and multiplies the first columns of the next, unless there is none.
    template <int BLOCKS, int T, class F>
    QG_METHOD void exchange(int32_t* to, bool more, F meanwhile) {
        qa_store<T>(to + 256 * T, 64), qa_zero<T>();
        if (more) dot<T, 4 + T / 2, 6 + T % 2>();
        meanwhile();
    }
    // Groups of columns [k, end) of BLOCKS * 16 rows from `first` on, of which `count` are wanted. `made`: whether
    // codes of the next piece are to be made.
    template <int BLOCKS> void multiply_groups(int64_t k, int64_t end, int64_t first, int64_t count, bool made) {
        // The pair before is scaled after its last group is stored.
        constexpr int COUNT = rows_at_once(16 * BLOCKS, 2 * (int)(SPAN / COLUMNS) * 2 * BLOCKS - 2 * BLOCKS + 1);
        int32_t* last = waiting.at[1];
        if (BLOCKS == 1 && waiting.rows > 16) qa_store<2>(last + 512, 64), qa_store<3>(last + 768, 64);
        while (k < end) {
            const int64_t g = (int64_t)((uint64_t)k / SPAN);
            const qt_sums before = waiting;
            waiting = {
                {spare, before.at[0]}, entries + g * QG_NP * ENTRIES, start + first * pitch + g,
                total + first * pitch + g, tile + first * QG_NP * 16, count};
            spare = before.at[1];  // stored by now, or soon; free when the pair before is scaled
            scales<2> by;
            by.load(before.entries);
            int64_t row = 0;
            const auto meanwhile = [&]() QC_BODY {
                if (row < before.rows) scale_rows<2, COUNT>(before, by, row);
                row += COUNT;
            };
            const auto nothing = []() QC_BODY {};
            QG_UNROLL for (int half = 0; half < 2; half++) {
                const int64_t until = qc_min(k + (int64_t)SPAN, end);
                const bool more = half == 0 || k < until;
                const char* at = rows_at(first, k);
                if (more) load_codes<6>(k), qa_load<4>(at, 64), load_codes<7>(k);
                if (more && BLOCKS > 1) qa_load<5>(at + 1024, 64);
                if (half == 0) {
                    exchange<BLOCKS, 0>(last, more, nothing);
                    if constexpr (BLOCKS == 1) exchange<BLOCKS, 1>(last, more, meanwhile);
                    else exchange<BLOCKS, 1>(last, more, nothing), exchange<BLOCKS, 2>(last, more, nothing);
                } else {
                    exchange<BLOCKS, 0>(last, more, meanwhile), exchange<BLOCKS, 1>(last, more, meanwhile);
                    if constexpr (BLOCKS > 1) exchange<BLOCKS, 2>(last, more, meanwhile);
                }
                if constexpr (BLOCKS > 1) exchange<BLOCKS, 3>(last, more, meanwhile);
                last = waiting.at[half];
                while (k < until) {
                    // The codes of the next piece take the places of those that were loaded for the last time.
                    const int64_t now = (uint64_t)k / 64 * 64;
                    if ((k += COLUMNS) >= now + 64 || k >= end) behind(made, now);
                    if (k >= until) break;
                    at = rows_at(first, k);
                    load_codes<6>(k), qa_load<4>(at, 64), dot<0, 4, 6>(), meanwhile();
                    load_codes<7>(k), dot<1, 4, 7>(), meanwhile();
                    if constexpr (BLOCKS > 1) {
                        qa_load<5>(at + 1024, 64), dot<2, 5, 6>(), meanwhile();
                        dot<3, 5, 7>(), meanwhile();
                    }
                }
                k = until;
            }
            while (row < before.rows) meanwhile();
        }
    }

    // --- products whose columns share one scale: sums are kept as integers in the places of totals ---
    enum { ROW = 64 * QG_NP };  // bytes of a row of totals
    template <int T> QG_METHOD void resume(char* last, const char* to, bool begins) {
        constexpr int PLACE = T / 2 * 16 * ROW + T % 2 * 64;
        qa_store<T>(last + PLACE, ROW);
        if (begins) qa_zero<T>();
        else qa_load<T>(to + PLACE, ROW);
        dot<T, 4 + T / 2, 6 + T % 2>();
    }
    template <int BLOCKS> void multiply_columns(int64_t k, int64_t end, int64_t first, int64_t count, bool made) {
        char* const last = (char*)waiting.tile;
        char* const to = (char*)(tile + first * QG_NP * 16);
        const bool goes_on = last == to;  // these tiles hold the sums of this block
        if (BLOCKS == 1 && waiting.rows > 16) qa_store<2>(last + 16 * ROW, ROW), qa_store<3>(last + 16 * ROW + 64, ROW);
        waiting.tile = (float*)to, waiting.rows = count;
        const char* at = rows_at(first, k);
        load_codes<6>(k), qa_load<4>(at, 64), load_codes<7>(k);
        if constexpr (BLOCKS > 1) qa_load<5>(at + 1024, 64);
        if (!goes_on || k == 0) {
            const bool begins = k == 0;
            resume<0>(last, to, begins), resume<1>(last, to, begins);
            if constexpr (BLOCKS > 1) resume<2>(last, to, begins), resume<3>(last, to, begins);
        } else {
            dot<0, 4, 6>(), dot<1, 4, 7>();
            if constexpr (BLOCKS > 1) dot<2, 5, 6>(), dot<3, 5, 7>();
        }
        for (;;) {
            behind(made, k);
            if ((k += 64) >= end) break;
            at += qi_tiles::LINE;
            load_codes<6>(k), qa_load<4>(at, 64), load_codes<7>(k);
            if constexpr (BLOCKS > 1) qa_load<5>(at + 1024, 64);
            dot<0, 4, 6>(), dot<1, 4, 7>();
            if constexpr (BLOCKS > 1) dot<2, 5, 6>(), dot<3, 5, 7>();
        }
    }

    // The products of two panels. lines_of(i, count): where the results of rows [i, i + count) will be. done(i, count):
    // their totals are made.
    template <class L, class F> void multiply(int64_t panel, int64_t next, int64_t end, L lines_of, F done) {
        to_panels(panel, next, end);
        load_entries(panel, next);
        if constexpr (!K::DIRECT)
            for (uint64_t k = 0; k < PIECE; k += 64) unpack((int64_t)k);
        if constexpr (W::SHARED != 0) memset(tile, 0, (size_t)(rows * ROW));
        waiting = {{sums, sums + 1024}, entries, start, total, tile, 0}, spare = sums + 2048;
        lines.rows = 0;
        for (int64_t k = 0; k < from->k; k += (int64_t)PIECE)
            for (int64_t i = 0; i < rows; i += qi_tiles::ROWS) {
                const int64_t count = qc_min(rows - i, qi_tiles::ROWS), to = qc_min(k + (int64_t)PIECE, from->k);
                const bool made = i + qi_tiles::ROWS >= rows, last = to == from->k;
                if (last) lines = lines_of(i, count);
                if constexpr (W::SHARED != 0) {
                    if (count > 16) multiply_groups<2>(k, to, i, count, made);
                    else multiply_groups<1>(k, to, i, count, made);
                } else {
                    if (count > 16) multiply_columns<2>(k, to, i, count, made);
                    else multiply_columns<1>(k, to, i, count, made);
                }
                if (last && i > 0) done(i - qi_tiles::ROWS, qi_tiles::ROWS);
            }
        if constexpr (W::SHARED != 0) {
            int32_t* const to = waiting.at[1];
            qa_store<0>(to, 64), qa_store<1>(to + 256, 64);
            if (waiting.rows > 16) qa_store<2>(to + 512, 64), qa_store<3>(to + 768, 64);
            scale_all<2>(waiting);
        } else {
            char* const to = (char*)waiting.tile;
            qa_store<0>(to, ROW), qa_store<1>(to + 64, ROW);
            if (waiting.rows > 16) qa_store<2>(to + 16 * ROW, ROW), qa_store<3>(to + 16 * ROW + 64, ROW);
        }
        const int64_t first = (rows - 1) / qi_tiles::ROWS * qi_tiles::ROWS;
        done(first, rows - first);
    }
    // Rows [first, first + count) of totals, scaled by what their rows of x have.
    void finish(int64_t first, int64_t count) {
        scales<1> by;
        if constexpr (W::SHARED == 0) by.load(entries);
        for (int64_t i = first; i < first + count; i++)
            QG_UNROLL for (int p = 0; p < QG_NP; p++) {
                float* const to = tile + (i * QG_NP + p) * 16;
                vf sum = vload(to);
                if constexpr (W::SHARED == 0) {
                    vi whole = vbits(sum);
                    if (K::BEGINS) whole = whole + vset(start[i * pitch]);
                    sum = vtofloat(whole) * by.slope[0][p];
                    if (W::AFFINE) sum = sum + vset(total[i * pitch]) * by.intercept[0][p];
                    sum = vzero() + sum;
                }
                vstore(to, sum * vset(scale[i]));
            }
    }
};

// Whether tiles multiply `rows` rows of x.
template <class W> QC_INLINE bool qt_takes(int64_t rows, int64_t k) {
    return rows >= qt_least<W>() && (W::SHARED != 0 || k <= QI_WIDEST);
}

// As `qi_multiply`.
template <class W, class Prepare> static void qt_multiply(
    const qg_job* job, int64_t m0, int64_t rows, int64_t chunk, int64_t p0, int64_t p1, char* scratch,
    Prepare prepare) {
    constexpr int64_t ROWS = qi_tiles::ROWS;
    const int64_t groups = qg_up(job->k, qi_span(job->k, W::SHARED)), block = qt_bytes_of(job->k);
    const int64_t pitch = groups + groups % 2;
    qt_task<W> task;
    task.from = &job->packed, task.rows = rows, task.pitch = pitch;
    task.sums = (int32_t*)scratch;
    task.entries = (float*)(task.sums + 3 * 1024);
    task.codes = (char*)(task.entries + 2 * 16 * QG_NP * (groups + 1));
    task.x = task.codes + qt_codes_of(W::SHARED);
    task.tile = (float*)(task.x + chunk / ROWS * block);
    task.scale = task.tile + chunk * QG_NP * 16;
    task.total = task.scale + chunk;
    task.start = (int32_t*)(task.total + chunk * pitch);
    for (int64_t i = 0; i < rows; i++) {
        int32_t* const start = task.start + i * pitch;
        float* const total = task.total + i * pitch;
        prepare(i, task.x + i / ROWS * block + i % ROWS * 64, start, total, task.scale + i);
        if (pitch > groups) start[groups] = 0, total[groups] = 0.0f;
    }
    task.configure();
    for (int64_t panel = p0; panel < p1; panel += QG_NP) {
        const int64_t next = qc_min(panel + QG_NP, p1) - 1, n0 = panel * 16;
        const auto lines_of = [&](int64_t i, int64_t count) {
            const qg_target& to = job->targets[0];
            const int64_t bytes = (next + 1 - panel) * to.panel;
            return qt_lines{to.at + (m0 + i) * to.row + panel * to.panel, to.row, bytes, bytes > 0 ? count : 0};
        };
        task.multiply(panel, next, p1, lines_of, [&](int64_t i, int64_t count) {
            const int64_t columns = qc_min(job->n - n0, (next + 1 - panel) * 16);
            task.finish(i, count);
            job->finish(job, task.tile + i * QG_NP * 16, QG_NP * 16, m0 + i, count, n0, columns);
        });
    }
    qa_release();
}
#endif
