// Matrix products on the CPU: decoding of packed weights, one register-tiled microkernel, and the drivers that cut the
// work into tasks. Emitted kernels fill a `qg_job` and call `qg_run`; nothing here is instantiated per kernel.
//
//     out[m, n] = epilogue(sum_k x[m, k] * w[n, k])        fp32 products and sums, k ascending inside blocks of QG_KC
//
// Weights come as *panels* of 16 rows of w, that is 16 lanes for each k:
//
//     codes   [panel][word][16 lanes]           u32 words of codes, and the entries beside them (decode.h)
//     values  [panel][k][16 lanes]              plain f32, bf16, f16
//
// A task owns a range of panels and rows. It decodes [kc][16] fp32 panels into its thread's scratch and runs the
// microkernel (QG_MR rows x QG_NP panels of accumulators in registers) over the rows of x, which stay as they are: the
// microkernel broadcasts from them. Few rows are multiplied straight from codes (few_rows.h). How tasks are cut never
// changes the order of additions of an element.
#pragma once
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "abi.h"
#include "decode.h"
#include "task.h"
#include "vec.h"

// QG_MR rows x QG_NP panels: the microkernel's accumulators, which with one row of w and one broadcast x fill the
// register file (32 zmm: 14 * 2 + 2 + 1; 16 ymm: 6 * 2 + 2 + 1; 16 xmm: 2 * 4 + 4 + 2; 32 NEON: 6 * 4 + 4 + 1). QG_FEW:
// most rows that are multiplied straight from codes.
#if defined(QC_AVX512)
enum { QG_MR = 14, QG_NP = 2, QG_FEW = 8 };
#elif defined(QC_AVX2)
enum { QG_MR = 6, QG_NP = 1, QG_FEW = 4 };
#elif defined(__aarch64__)
enum { QG_MR = 6, QG_NP = 1, QG_FEW = 4 };
#else
enum { QG_MR = 2, QG_NP = 1, QG_FEW = 2 };
#endif
enum {
    QG_KC = 512,  // most columns of a decoded panel: QG_GROUP panels take 256 KiB, a quarter of a 1 MiB L2
    QG_GROUP = 8,  // most panels of a task
    QG_BLOCKS = 16,  // most blocks of QG_MR rows of a task: bounds its partial sums
    QG_FAR = 1048576,  // a result or a residual of more bytes is asked for ahead
    QG_LONGEST = 32,  // columns of a step of any decoder divide it: those of a trellis have so many
};

// 16 lanes, or the first few of them at the end of a row.
template <class T> QC_INLINE auto qg_load_lanes(const T* p, int lanes) {
    return lanes == 16 ? vload(p) : vload_n(p, lanes);
}
template <class T, class V> QC_INLINE void qg_store_lanes(T* p, V x, int lanes) {
    if (lanes == 16) vstore(p, x);
    else vstore_n(p, x, lanes);
}

// The sums of up to 16 pairs of rows, from those of one panel or two, each of which has 8 of the first half of w's rows
// and then the same 8 of the second.
QC_INLINE void qg_pairs(const float* sums, int64_t left, float (&pairs)[2][16]) {
    for (int half = 0; half < 2; half++) {
        memcpy(pairs[half], sums + 8 * half, 32);
        if (left > 16) memcpy(pairs[half] + 8, sums + 16 + 8 * half, 32);
        else memset(pairs[half] + 8, 0, 32);
    }
}

// --- one matrix product ----------------------------------------------------------------------------------------------

struct qg_job;
// Writes panel `panel`, columns [k0, k0 + kc), as fp32 [kc][16].
typedef void (*qg_decode)(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, float* dst);
// Converts x[m0 … m0 + rows)[k0 … k0 + kc) to fp32 rows of `stride` floats; to the engine's type if job->loads_words.
typedef void (*qg_load_x)(const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst,
                          int64_t stride);
// Finishes out[m0 … m0 + rows)[n0 … n0 + cols) from the fp32 sums at `tile` (rows `stride` floats apart; lanes
// beyond `cols` up to a multiple of 16 may be read).
typedef void (*qg_finish)(
    const qg_job* job, const float* tile, int64_t stride, int64_t m0, int64_t rows, int64_t n0, int64_t cols);

// Panels [p0, p1) times rows [m0, m1) (at most QG_BLOCKS * QG_MR), finished. More than QG_GROUP panels: at most
// `qg_kept_rows` rows.
typedef void (*qg_multiply)(const qg_job* job, int64_t p0, int64_t p1, int64_t m0, int64_t m1, char* scratch);

// Where `finish` writes, or reads beside sums: bytes from row to row, and of 16 columns of w's rows (0: not said).
struct qg_target { const char* at; int64_t row, panel; };
enum { QG_TARGETS = 3 };

struct qg_job {
    int64_t m, n, k;
    const char* x;
    int64_t x_row, x_col;  // strides of x in elements; x_col is 1 unless `load_x` handles another
    const struct qg_window* window;  // x is an image: how `load_x` reads its windows (im2col.h)
    qg_load_x load_x;      // null: fp32 with unit column stride, read in place
    qg_load_x load_words;  // of windows of bf16 numbers: leaves these as they are, for an engine that takes them
    bool loads_words;      // what `load_x` makes needs no rounding by the engine
    int64_t kept_at, kept_bytes;  // room in scratch for rows that `load_x` made, which are kept for all panels
    const char* codes;     // plain values in panels, or the row-major matrix
    qg_packed packed;      // a packed weight
    int64_t w_row, w_col;  // strides of a row-major w in elements
    qg_decode decode;      // null: plain fp32 panels, read in place
    qg_multiply multiply;  // null: in fp32
    qg_finish finish;
    void* const* op;       // for `finish`: the kernel's operands and symbols
    const int64_t* sym;
    int64_t batches;       // batched products: how many, and what turns to number `batch` (null: there is one)
    void (*select)(qg_job* job, int64_t batch);
    char* out;             // for `select` and `finish` of batched products
    qg_target targets[QG_TARGETS];  // the result, then what is read row for row: their lines are asked for ahead
    // how the work is cut (qg_cut): tasks share items, one group times one chunk each
    int64_t groups, chunks, items, tasks;
};

// --- decoders --------------------------------------------------------------------------------------------------------

// Each decoder walks one panel, given to `start`, in groups of GROUP columns: `at(k)` moves to the group that starts at
// k (a multiple of GROUP, ascending), `value<J>()` gives the 16 lanes of column k + J in fp32, scaled as the format's
// decoder does.

// How a format's codes are read: in planes, unless its struct names another reader.
template <class W, class = void> struct qg_codes_of {
    typedef qg_codes<W::BITS, W::GROUP> type;
    static constexpr bool PLANES = true;
};
template <class W> struct qg_codes_of<W, decltype((void)sizeof(typename W::codes))> {
    typedef typename W::codes type;
    static constexpr bool PLANES = false;
};

// Packed weights: W is the struct of their format (decode.h). COVERS columns share the entries (0: all columns do);
// GROUP divides it.
template <class W> struct qg_coded {
    static constexpr int GROUP = W::GROUP;
    // Whether an element is its code's value times a scale of whole SHARED columns, plus an offset perhaps.
    static constexpr int SHARED = W::COVERS;
    static constexpr bool OFFSET = W::OFFSET;
    static constexpr bool SUMMED = W::SCALED && SHARED >= 16 && SHARED % 16 == 0 && W::BITS <= 8;
    static constexpr bool IN_PLANES = (W::BITS & (W::BITS - 1)) != 0;  // in more than one
    // Whether few rows ask for the next panel's entries: not for codes in planes, whose own lines are asked for.
    static constexpr bool ASKS = W::SCATTERED && !IN_PLANES;
    const qg_packed* from;
    int64_t panel, until;  // first column of the next entries
    typename qg_codes_of<W>::type codes;
    typename W::values values;
    W entries;

    QG_METHOD void start(const qg_job* job, int64_t p) {
        from = &job->packed, panel = p, until = 0;
        entries = W();
        codes.start(*from, p);
        values.start();
        if (W::COVERS == 0) entries.load(*from, p, 0);
    }
    QG_METHOD void at(int64_t k) {
        entries_at(k);
        codes_at(k);
    }
    // Panels are walked in turns, and `apart` panels on is the one that comes after this: codes behind this one's last
    // ones, which lie in the next panel, are at hand, and those of the later panel are asked for.
    QG_METHOD void look_ahead(int64_t k, int64_t apart) {
        if constexpr (qg_codes_of<W>::PLANES) codes.look_ahead(k, from->k, apart);
    }
    QG_METHOD void ask(int64_t p, int64_t k) const {
        constexpr uint64_t step = W::COVERS ? W::COVERS : 1;
        if (W::COVERS != 0 && (uint64_t)k % step == 0) W::ask(*from, p, k);
    }
    QG_METHOD void entries_at(int64_t k) {
        if (W::COVERS == 0 || k < until) return;
        constexpr int64_t step = W::COVERS ? W::COVERS : 1;
        until = ((uint64_t)k / step + 1) * step;
        entries.load(*from, panel, k);
    }
    QG_METHOD void codes_at(int64_t k) {
        codes.at(k);
        values.at(codes);
    }
    template <int J> QG_METHOD vf value() const {
        return entries.element(values.template value<J>(codes));
    }
    // What value() is made of: the code's value over UNIT, and the scale and the offset of the columns that share them.
    // IN_PLACE: the code's value multiplies numbers of x that are made for it.
    static constexpr bool IN_PLACE = W::values::IN_PLACE;
    static constexpr float UNIT = OFFSET && !IN_PLACE ? 1.0f : W::values::UNIT;
    template <int J> QG_METHOD vf code() const {
        if constexpr (UNIT != 1.0f) return values.template units<J>(codes);
        else return values.template value<J>(codes);
    }
    QG_METHOD vf scale() const { return entries.scale(); }
    QG_METHOD vf offset() const { return entries.offset(); }
};

// The same where blocks run across rows: row r, column k reads the entries of element r * K + k. They change at another
// column in each lane, at most once in COVERS columns.
template <class W> struct qg_straddling {
    static constexpr int GROUP = W::GROUP;
    static constexpr bool SUMMED = false;
    const qg_packed* from;
    int64_t panel, until;   // the first column for which `here` and `next` may not do
    int64_t border[16];     // the column where `next` begins
    qg_words change;        // the same, counted inside the group
    qg_codes<W::BITS, GROUP> codes;
    typename W::values values;
    W here, next;

    QG_METHOD void start(const qg_job* job, int64_t p) {
        from = &job->packed, panel = p, until = 0;
        codes.start(*from, p);
        values.start();
    }
    QG_METHOD void move(int64_t k) {
        int64_t now[16], then[16];
        const int64_t last = from->n * from->k - 1;  // padding rows and columns read the last element's
        until = INT64_MAX;
        for (int l = 0; l < 16; l++) {
            const int64_t element = (panel * 16 + l) * from->k + k, end = (element / W::COVERS + 1) * W::COVERS;
            now[l] = qc_min(element, last), then[l] = qc_min(end, last);
            border[l] = k + end - element;
            until = qc_min(until, border[l] + W::COVERS);
        }
        here.load(*from, now), next.load(*from, then);
    }
    QG_METHOD void look_ahead(int64_t, int64_t) {}
    QG_METHOD void ask(int64_t, int64_t) const {}
    QG_METHOD void at(int64_t k) {
        if (k + GROUP > until || until == 0) move(k);
        uint32_t columns[16];
        for (int l = 0; l < 16; l++) columns[l] = (uint32_t)qc_max(qc_min(border[l] - k, GROUP), 0);
        change = qg_load_words(columns);
        codes.at(k);
        values.at(codes);
    }
    template <int J> QG_METHOD vf value() const {
        const vm before = QC_EACH(vm, q_ltu(q_seti(J), (qi)change.r[i]));
        return W::pick(before, here, next).element(values.template value<J>(codes));
    }
};

// Plain values in panels, of storage type T.
template <class T> struct qg_plain {
    static constexpr int GROUP = 8;
    static constexpr bool SUMMED = false;
    const T* first;
    const T* now;
    QG_METHOD void start(const qg_job* j, int64_t panel) { first = now = (const T*)j->codes + panel * j->k * 16; }
    QG_METHOD void look_ahead(int64_t, int64_t) {}
    QG_METHOD void ask(int64_t, int64_t) const {}
    QG_METHOD void at(int64_t k) {
        now = first + k * 16;
        QG_UNROLL for (int line = 0; line < GROUP * 16 * (int)sizeof(T); line += 64)
            __builtin_prefetch((const char*)now + QG_AHEAD + line);
    }
    template <int J> QG_METHOD vf value() const { return vload(now + 16 * J); }
};

// Lane l of the result is lane from[l] of a and b end to end.
QC_INLINE qf qg_pick(qf a, qf b, qi from) {
#if defined(__clang__)
    qf r;
    for (int l = 0; l < QC_W; l++) r[l] = from[l] < QC_W ? a[from[l]] : b[from[l] - QC_W];
    return r;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

// One step of a transpose of QC_W x QC_W lanes: swaps the off-diagonal blocks of size D in every block of size 2 * D.
template <int D> QC_INLINE void qg_swap_blocks(qf* row) {
    if constexpr (D > 0) {
        qi upper, lower;
        for (int l = 0; l < QC_W; l++) upper[l] = l & D ? QC_W + l - D : l, lower[l] = l & D ? QC_W + l : l + D;
        QG_UNROLL for (int i = 0; i < QC_W; i++) {
            if (i & D) continue;
            const qf a = row[i], b = row[i + D];
            row[i] = qg_pick(a, b, upper), row[i + D] = qg_pick(a, b, lower);
        }
        qg_swap_blocks<D / 2>(row);
    }
}

QC_COLD void qg_transpose(const float (*from)[16], float (*to)[16]) {
    for (int i = 0; i < 16; i += QC_W)
        for (int j = 0; j < 16; j += QC_W) {
            qf row[QC_W];
            QG_UNROLL for (int r = 0; r < QC_W; r++) row[r] = q_load(from[i + r] + j);
            qg_swap_blocks<QC_W / 2>(row);
            QG_UNROLL for (int r = 0; r < QC_W; r++) q_store(to[j + r] + i, row[r]);
        }
}

// Plain values of a strided matrix (n, k): weights that are not constants, and batched products.
template <class T> struct qg_strided {
    static constexpr int GROUP = 16;
    static constexpr bool SUMMED = false;
    const qg_job* job;
    int64_t n0;
    float block[16][16];

    QG_METHOD void start(const qg_job* j, int64_t panel) { job = j, n0 = panel * 16; }
    QG_METHOD void at(int64_t k) {
        const int64_t rows = qc_min(job->n - n0, 16), cols = qc_min(job->k - k, 16);
        const int64_t down = job->w_row, right = job->w_col;
        const T* from = (const T*)job->codes + n0 * down + k * right;
        if (down == 1) {  // lanes are neighbours in memory
            for (int64_t c = 0; c < cols; c++) vstore(block[c], qg_load_lanes(from + c * right, (int)rows));
        } else if (right == 1) {  // columns are: transpose
            float lines[16][16] = {};
            for (int64_t r = 0; r < rows; r++) vstore(lines[r], qg_load_lanes(from + r * down, (int)cols));
            qg_transpose(lines, block);
        } else {
            memset(block, 0, sizeof block);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < cols; c++) block[c][r] = qc_load(from + r * down + c * right);
        }
    }
    template <int J> QG_METHOD vf value() const { return vload(block[J]); }
};

// A `qg_load_x` for x of storage type T.
template <class T> static void qg_convert_x(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    for (int64_t i = 0; i < rows; i++, dst += stride) {
        const T* x = (const T*)job->x + (m0 + i) * job->x_row + k0 * job->x_col;
        if (job->x_col != 1) {
            for (int64_t k = 0; k < kc; k++) dst[k] = qc_load(x + k * job->x_col);
            continue;
        }
        int64_t k = 0;
        for (; k + 16 <= kc; k += 16) vstore(dst + k, vload(x + k));
        if (k < kc) vstore(dst + k, vload_n(x + k, (int)(kc - k)));
    }
}

// The same, rounded to bf16.
template <class T> static void qg_round_x(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    qg_convert_x<T>(job, m0, rows, k0, kc, dst, stride);
    for (int64_t i = 0; i < rows; i++, dst += stride)
        for (int64_t k = 0; k < kc; k += 16) vstore(dst + k, vround_bf16(vload(dst + k)));
}

// Calls body.template step<J>() for J = 0 … min(COUNT, left) - 1, unrolled.
template <int J, int COUNT, class Body> QC_INLINE void qg_steps(Body& body, int64_t left) {
    if constexpr (J < COUNT) {
        if (J >= left) return;
        body.template step<J>();
        qg_steps<J + 1, COUNT>(body, left);
    }
}

template <class D> struct qg_store_step {
    const D& decoder;
    float* dst;
    template <int J> QG_METHOD void step() { vstore(dst + 16 * J, decoder.template value<J>()); }
};

// A `qg_decode` for decoder D. k0 is a multiple of D::GROUP.
template <class D> QC_COLD void qg_decode_panel(const qg_job* job, int64_t panel, int64_t k0, int64_t kc, float* dst) {
    static_assert(QG_LONGEST % D::GROUP == 0, "blocks are whole groups");
    D decoder;
    decoder.start(job, panel);
    int64_t done = 0;
    for (; done + D::GROUP <= kc; done += D::GROUP) {
        decoder.at(k0 + done);
        qg_store_step<D> body{decoder, dst + done * 16};
        qg_steps<0, D::GROUP>(body, D::GROUP);
    }
    if (done < kc) {
        decoder.at(k0 + done);
        qg_store_step<D> body{decoder, dst + done * 16};
        qg_steps<0, D::GROUP>(body, kc - done);
    }
}

// Clock cycles of work that pay for handing a task to another thread: the region takes 1000, and the rows of x and of
// the result move between the cores' caches (docs/performance.md has the time with 2048).
enum { QG_TASK = 8192 };

// --- many rows: decoded panels and the microkernel -------------------------------------------------------------------

// How numbers are multiplied. A panel holds steps of 16 words of 32 bits, a word for each lane, and a row of x holds a
// word for each step. This engine's words are fp32 numbers; gemm_bf16.h has one for pairs of bf16.
struct qg_fp32 {
    static constexpr int WIDTH = sizeof(float);  // bytes of a column of x
    typedef qf word;
    static QG_METHOD word load(const float* p) { return q_load(p); }
    // sum[v] += w[v] * the word of x
    template <int N> static QG_METHOD void multiply(qf (&sum)[N], const word (&w)[N], const char* x) {
        const qf a = q_set(*(const float*)x);
        QG_UNROLL for (int v = 0; v < N; v++) sum[v] = q_fma(a, w[v], sum[v]);
    }
    // The same for the columns that are left when no whole word is.
    template <int N> static QG_METHOD void multiply_last(qf (&)[N], const word (&)[N], const char*) {}
    // What becomes of rows that `load_x` has made.
    static QG_METHOD void round_rows(float*, int64_t, int64_t, int64_t) {}
};

// tile[i][16 * p + lane] (+)= sum_k x[i][k] * panel[p][k][lane] for MR rows, `stride` bytes apart. Row pointers are
// kept for every third row, the two after it are reached by index, so that MR rows need MR / 3 registers.
template <class E, int MR> static void qg_micro(
    const char* x, int64_t stride, const float* const* panel, int64_t kc, float* tile, int64_t tile_stride, bool add) {
    // Two steps at a time on AVX-512, where registers are left: with 16 of them g++ loads the second step's operands
    // early, keeps a sum in memory for it, and half of the speed is lost.
    enum { THIRDS = (MR + 2) / 3, STEP = QC_W == 16 ? 2 : 1, REGS = QG_NP * QC_REGS };
    enum { COLUMNS = sizeof(float) / E::WIDTH };
    qf sum[MR][REGS];
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int v = 0; v < REGS; v++) sum[i][v] = (qf){};
    const char* row[THIRDS];
    QG_UNROLL for (int t = 0; t < THIRDS; t++) {
        row[t] = x + 3 * t * stride;
        asm("" : "+r"(row[t]));  // a register of its own, not an expression of x
    }
    const float* b[QG_NP];
    QG_UNROLL for (int p = 0; p < QG_NP; p++) b[p] = panel[p];
    auto step = [&](int u, bool whole) __attribute__((always_inline)) {
        typename E::word w[REGS];
        QG_UNROLL for (int v = 0; v < REGS; v++)
            w[v] = E::load(b[v / QC_REGS] + 16 * u + QC_W * (v % QC_REGS));
        QG_UNROLL for (int i = 0; i < MR; i++) {
            const char* const at = row[i / 3] + (i % 3) * stride + sizeof(float) * u;
            if (whole) E::multiply(sum[i], w, at);
            else E::multiply_last(sum[i], w, at);
        }
    };
    auto advance = [&](int steps) __attribute__((always_inline)) {
        QG_UNROLL for (int t = 0; t < THIRDS; t++) {
            row[t] += sizeof(float) * steps;
            asm("" : "+r"(row[t]));
        }
        QG_UNROLL for (int p = 0; p < QG_NP; p++) {
            b[p] += 16 * steps;
            asm("" : "+r"(b[p]));
        }
    };
    int64_t k = 0;
    for (; k + STEP * COLUMNS <= kc; k += STEP * COLUMNS) {
        QG_UNROLL for (int u = 0; u < STEP; u++) step(u, true);
        advance(STEP);
    }
    for (; k + COLUMNS <= kc; k += COLUMNS) {
        step(0, true);
        advance(1);
    }
    if (COLUMNS > 1 && k < kc) step(0, false);
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int v = 0; v < REGS; v++) {
            float* to = tile + i * tile_stride + QC_W * v;
            q_store(to, add ? q_load(to) + sum[i][v] : sum[i][v]);
        }
}

template <class E, int MR> QC_INLINE void qg_micro_rows(
    int64_t rows, const char* x, int64_t stride, const float* const* panel, int64_t kc, float* tile,
    int64_t tile_stride, bool add) {
    if constexpr (MR > 0) {
        if (rows == MR) return qg_micro<E, MR>(x, stride, panel, kc, tile, tile_stride, add);
        qg_micro_rows<E, MR - 1>(rows, x, stride, panel, kc, tile, tile_stride, add);
    }
}

template <class E> static void qg_micro_any(
    int64_t rows, const char* x, int64_t stride, const float* const* panel, int64_t kc, float* tile,
    int64_t tile_stride, bool add) {
    qg_micro_rows<E, QG_MR>(rows, x, stride, panel, kc, tile, tile_stride, add);
}

// Columns in a block of k: equal blocks of at most QG_KC, whole steps of every decoder.
constexpr int64_t qg_block(int64_t k) {
    const int64_t blocks = qg_up(k, QG_KC);
    return k <= QG_KC ? k : qg_up(qg_up(k, blocks), QG_LONGEST) * QG_LONGEST;
}

// Bytes of scratch of qg_product: decoded panels, converted or copied rows of x, tiles of sums.
constexpr int64_t qg_scratch_for(int64_t block, bool whole) {
    return 4 * (QG_GROUP * block * 16 + QG_MR * (block + 16) + QG_MR * QG_GROUP * 16 * (whole ? 1 : QG_BLOCKS));
}
constexpr int64_t qg_scratch(int64_t k) { return qg_scratch_for(qg_block(k), qg_block(k) >= k); }

// Rows that begin a multiple of so many bytes apart share one set of an L1 cache (64 sets of lines of 64 bytes), which
// holds 8 or 12 lines: QG_MR such rows are copied to where they do not (docs/performance.md has what that is worth).
enum { QG_ALIASES = 4096 };

static void qg_copy_rows(char* to, int64_t to_stride, const char* from, int64_t stride, int64_t rows, int64_t bytes) {
    for (int64_t i = 0; i < rows; i++, to += to_stride, from += stride) {
        int64_t at = 0;
        for (; at + 64 <= bytes; at += 64) vstore((int32_t*)(to + at), vload((const int32_t*)(from + at)));
        memcpy(to + at, from + at, (size_t)(bytes - at));
    }
}

// Asks for the lines that `finish` will write and read for `panels` panels, so that they arrive while these are
// multiplied: of matrices that do not stay in an L2 cache.
QC_INLINE void qg_ask_for_targets(const qg_job* job, int64_t panel, int64_t panels, int64_t m0, int64_t rows) {
    for (const qg_target& to : job->targets) {
        const char* at = to.at + m0 * to.row + panel * to.panel;
        const int64_t bytes = job->m * to.row > QG_FAR ? panels * to.panel : 0;
        for (int64_t i = 0; bytes > 0 && i < rows; i++, at += to.row)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b);
    }
}

// At most QG_GROUP panels times rows, with engine E.
template <class E> static void qg_product_of(
    const qg_job* job, int64_t p0, int64_t p1, int64_t m0, int64_t m1, char* scratch) {
    const int64_t block = qg_block(job->k), tile_stride = QG_GROUP * 16, x_stride = block + 16;
    const int64_t rows = m1 - m0, blocks = (rows + QG_MR - 1) / QG_MR;
    const bool whole = block >= job->k;  // one block of k: each tile is finished at once, and its memory used again
    float* panels = (float*)scratch;
    float* converted = panels + QG_GROUP * block * 16;
    float* tiles = converted + QG_MR * x_stride;
    const bool aliases = !job->load_x && job->x_row != 0 && E::WIDTH * job->x_row % QG_ALIASES == 0;
    int64_t k0 = 0;
    do {  // once even for k = 0, whose sums are zero
        const int64_t kc = job->k - k0 < block ? job->k - k0 : block;
        const float* panel[QG_GROUP + QG_NP];
        for (int64_t p = p0; p < p1; p++) {
            panel[p - p0] = job->decode ? panels + (p - p0) * block * 16
                                        : (const float*)job->codes + (p * job->k + k0) * 16;
            if (job->decode) job->decode(job, p, k0, kc, panels + (p - p0) * block * 16);
        }
        for (int64_t p = p1 - p0; p % QG_NP; p++) panel[p] = panel[0];  // computed and never read
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = rows * b / blocks, count = rows * (b + 1) / blocks - first, row = m0 + first;
            float* tile = whole ? tiles : tiles + first * tile_stride;
            const char* x = job->x + E::WIDTH * (row * job->x_row + k0);
            int64_t stride = E::WIDTH * job->x_row;
            if (job->load_x) {
                job->load_x(job, row, count, k0, kc, converted, x_stride);
                if (!job->loads_words) E::round_rows(converted, x_stride, count, kc);
                x = (const char*)converted, stride = sizeof(float) * x_stride;
            } else if (aliases) {
                qg_copy_rows((char*)converted, E::WIDTH * x_stride, x, stride, count, E::WIDTH * kc);
                x = (const char*)converted, stride = E::WIDTH * x_stride;
            }
            const bool last = k0 + kc == job->k;
            for (int64_t p = 0; p < p1 - p0; p += QG_NP) {
                if (last) qg_ask_for_targets(job, p0 + p, qc_min(p1 - p0 - p, QG_NP), row, count);
                qg_micro_any<E>(count, x, stride, panel + p, kc, tile + p * 16, tile_stride, k0 > 0);
            }
            if (last) {
                const int64_t n0 = p0 * 16, n1 = p1 * 16 < job->n ? p1 * 16 : job->n;
                job->finish(job, tile, tile_stride, row, count, n0, n1 - n0);
            }
        }
        k0 += kc;
    } while (k0 < job->k);
}

// Words of 32 bits of a row that `load_x` makes.
QC_INLINE int64_t qg_kept_words(const qg_job* job) { return job->loads_words ? (job->k + 1) / 2 : job->k; }

// Floats from one kept row to the next, which begin at other sets of an L1 cache.
constexpr int64_t qg_kept_stride(int64_t words) {
    const int64_t lines = qg_up(words, 16);
    return 16 * (lines % (QG_ALIASES / 64) ? lines : lines + 1);
}

// Rows that there is room to keep, a multiple of QG_MR, if they pay: the more rows, the more seldom panels are decoded.
static int64_t qg_kept_rows(const qg_job* job) {
    if (!job->load_x || job->kept_bytes == 0) return 0;
    const int64_t rows = qc_min(job->kept_bytes / (4 * qg_kept_stride(qg_kept_words(job))) / QG_MR, QG_BLOCKS);
    return rows < QG_BLOCKS / 2 ? 0 : rows * QG_MR;
}

// A `qg_multiply` with engine E.
template <class E> static void qg_product(
    const qg_job* job, int64_t p0, int64_t p1, int64_t m0, int64_t m1, char* scratch) {
    if (p1 - p0 <= QG_GROUP) return qg_product_of<E>(job, p0, p1, m0, m1, scratch);
    const int64_t stride = qg_kept_stride(qg_kept_words(job));
    float* const kept = (float*)(scratch + job->kept_at);
    for (int64_t m = m0; m < m1; m++) {  // one at a time, so that it is rounded from an L1 cache
        float* const row = kept + (m - m0) * stride;
        job->load_x(job, m, 1, 0, job->k, row, stride);
        if (!job->loads_words) E::round_rows(row, stride, 1, job->k);
    }
    qg_job one = *job;
    one.load_x = nullptr, one.window = nullptr, one.x_row = stride * (4 / E::WIDTH);
    one.x = (const char*)((uintptr_t)kept - (uintptr_t)(4 * stride * m0));  // where row 0 would be
    for (int64_t p = p0; p < p1; p += QG_GROUP)
        qg_product_of<E>(&one, p, qc_min(p + QG_GROUP, p1), m0, m1, scratch);
}

// How the product is cut: `groups` of panels times `chunks` of rows, by an estimate of the clock cycles until the last
// thread is done: all work shared evenly, plus the largest task for each thread that idles in the last round. A cut
// never changes a result: an element's additions are ordered by k alone. Estimates are doubles: times the number of
// threads, those of the largest products would leave 64 bits.
struct qg_cutting {
    qg_job* job;
    int64_t threads, panels, units, blocks;
    double best;

    // Groups of at most `wide` units, and chunks from `chunks` on.
    void consider(int64_t wide, int64_t chunks) {
        const double k = (double)job->k;
        const double column = k * QC_REGS;  // vector operations for a row of x, or a panel, per panel
        const int64_t groups = qg_up(units, wide), broad = qg_up(units, groups) * QG_NP;
        const int64_t products = job->select ? job->batches : 1;
        for (; chunks <= blocks; chunks += 1 + chunks / 8) {
            const int64_t tasks = products * groups * chunks, tall = qg_up(blocks, chunks) * QG_MR;
            const double sums = (double)job->m * panels * column / 2, decoding = (double)chunks * panels * column * 2;
            const double all = products * (sums + decoding + (double)groups * job->m * k / 8) + tasks * 600.0;
            const double largest = broad * column * (tall / 2 + 2) + tall * k / 8 + 600;
            const int64_t idle = qg_up(tasks, threads) * threads - tasks;
            const double cost = (all + idle * largest) / threads;
            if (cost < best) best = cost, job->groups = groups, job->chunks = chunks;
            if (threads == 1 || tall == QG_MR) break;
        }
    }
};

static void qg_cut(qg_job* job, int64_t threads) {
    const int64_t panels = (job->n + 15) / 16, units = qg_up(panels, QG_NP), blocks = qg_up(job->m, QG_MR);
    qg_cutting cut = {job, threads, panels, units, blocks, INFINITY};
    for (int64_t wide = QG_GROUP / QG_NP; wide >= 1; wide /= 2) cut.consider(wide, qg_up(blocks, QG_BLOCKS));
    const int64_t kept = qg_kept_rows(job);
    if (kept > 0) cut.consider(units, qg_up(blocks * QG_MR, kept));
}

static void qg_task(void* arg, int64_t task, char* scratch) {
    const qg_job* job = (const qg_job*)arg;
    const int64_t units = ((job->n + 15) / 16 + QG_NP - 1) / QG_NP, blocks = (job->m + QG_MR - 1) / QG_MR;
    const int64_t panels = (job->n + 15) / 16, cells = job->groups * job->chunks;
    const int64_t end = qc_share(job->items, task + 1, job->tasks);
    for (int64_t i = qc_share(job->items, task, job->tasks); i < end; i++) {
        const int64_t group = i % job->groups, chunk = i / job->groups % job->chunks;
        const int64_t p0 = qc_share(units, group, job->groups) * QG_NP;
        const int64_t p1 = qc_share(units, group + 1, job->groups) * QG_NP;
        const int64_t m0 = qc_share(blocks, chunk, job->chunks) * QG_MR;
        const int64_t m1 = qc_share(blocks, chunk + 1, job->chunks) * QG_MR;
        qg_job one = *job;
        if (job->select) job->select(&one, i / cells);
        const qg_multiply multiply = job->multiply ? job->multiply : qg_product<qg_fp32>;
        multiply(&one, p0, p1 < panels ? p1 : panels, m0, m1 < job->m ? m1 : job->m, scratch);
    }
}

QC_COLD void qg_run(qc_ctx* ctx, qg_job* job) {
    if (job->m <= 0 || job->n <= 0 || (job->select && job->batches <= 0)) return;
    const int64_t threads = ctx->num_threads, panels = (job->n + 15) / 16;
    job->groups = job->chunks = 1;
    qg_cut(job, threads);
    job->items = job->groups * job->chunks * (job->select ? job->batches : 1);
    const int64_t cycles = job->items / (job->groups * job->chunks) * panels * QC_REGS * job->k * (job->m / 2 + 3);
    const int64_t most = cycles / QG_TASK;
    job->tasks = job->items < 64 * threads ? job->items : 64 * threads;
    job->tasks = job->tasks < most ? job->tasks : most;
    if (job->tasks > 1 && threads > 1) return ctx->parallel(ctx, job->tasks, qg_task, job);
    job->tasks = 1;
    qg_task(job, 0, ctx->scratch);
}
