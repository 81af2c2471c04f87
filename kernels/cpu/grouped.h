// Products with chosen experts on the CPU, over gemm.h's decoders and microkernel.
//
//     out[p, j] = sum_k x[p / repeat, k] * w[index[p] * width + j, k]      for every pair p of a row and an expert
//
// The weight is one matrix in panels of 16 rows, the experts' rows below each other, so an expert begins anywhere in a
// panel. A task owns a group of panels of one expert. It looks the pairs of that expert up in `index`, in ascending
// order, as many at a time as its sums have room for, and multiplies their rows: few of them straight from codes, more
// by panels that are decoded once. So weights of experts that nobody chose are not read, and no list depends on the
// number of pairs. The order of an element's additions depends on k, and on whether its expert has few rows or many;
// never on threads.
#pragma once
#include "few_rows.h"
#include "lookup.h"

enum {
    QM_FEW = QG_FEW < 4 ? QG_FEW : 4,  // most rows of an expert that are multiplied straight from codes
    QM_ROWS = QG_MR * QG_BLOCKS,       // most rows of an expert at a time: those of qg_product
};

// What all tasks share: gemm.h's job (n: rows of the whole weight), and who meets whom.
struct qm_job : qg_job {
    const void* index;
    int64_t index_step;  // elements from one pair's expert to the next one's
    int64_t pairs, repeat, experts, width;
    int64_t out_row;
    int64_t units, groups;  // items: `groups` of panels for each unit, that is for each expert or for each pair
    // Of products that are combined (below): pairs of a row of the result, and the next totals from the sums of one.
    int64_t top;
    void (*mix)(const qm_job* job, const float* sums, int64_t row, int64_t place, float* totals, int64_t count);
};

// One expert's product: row i of it is the pair rows[i].
struct qm_product : qg_job {
    const qm_job* all;
    int64_t first;  // the expert's first row of w
    int64_t rows[QM_ROWS];
};

// A `qg_load_x` for rows that stand anywhere in x.
template <class X> static void qm_load_rows(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    const qm_product* const product = (const qm_product*)job;
    for (int64_t i = 0; i < rows; i++, dst += stride) {
        const X* const x = (const X*)job->x + product->rows[m0 + i] / product->all->repeat * job->x_row + k0;
        for (int64_t k = 0; k < kc; k += 16) {
            const int lanes = (int)qc_min(kc - k, 16);
            if (lanes == 16) vstore(dst + k, vload(x + k));
            else vstore_n(dst + k, vload_n(x + k, lanes), lanes);
        }
    }
}

// The same, rounded to bf16.
template <class X> static void qm_round_rows(
    const qg_job* job, int64_t m0, int64_t rows, int64_t k0, int64_t kc, float* dst, int64_t stride) {
    qm_load_rows<X>(job, m0, rows, k0, kc, dst, stride);
    for (int64_t i = 0; i < rows; i++, dst += stride)
        for (int64_t k = 0; k < kc; k += 16) vstore(dst + k, vround_bf16(vload(dst + k)));
}

// A `qg_finish`: sums of the expert's own columns go to the rows of its pairs; a panel may hold rows of its neighbours.
template <class OUT> static void qm_finish(
    const qg_job* job, const float* tile, int64_t stride, int64_t m0, int64_t rows, int64_t n0, int64_t cols) {
    const qm_product* const product = (const qm_product*)job;
    const int64_t from = qc_max(n0, product->first), to = qc_min(n0 + cols, product->first + product->all->width);
    for (int64_t i = 0; i < rows; i++) {
        OUT* const out = (OUT*)job->out + product->rows[m0 + i] * product->all->out_row - product->first;
        const float* const sums = tile + i * stride - n0;
        for (int64_t n = from; n < to; n += 16) {
            const int lanes = (int)qc_min(to - n, 16);
            qg_store_lanes(out + n, qg_load_lanes(sums + n, lanes), lanes);
        }
    }
}

// Few rows of one expert times panels [p0, p1): rows of x become fp32 in scratch, codes are decoded in registers.
template <class D> static void qm_few(const qm_product* job, int64_t count, int64_t p0, int64_t p1, char* scratch) {
    float* const tile = (float*)scratch;
    float* const sums = tile + QM_FEW * QG_NP * 16;
    float* const x = sums + qg_most_totals(job->k);
    const int64_t stride = (job->k + 15) / 16 * 16;
    job->load_x(job, 0, count, 0, job->k, x, stride);
    static_assert(!qg_in_place<D>(), "no room for rows of codes in place");
    const qg_few_x rows = qg_add_up<D>(x, stride, count, job->k, sums);
    for (int64_t p = p0; p < p1; p += QG_NP) {
        const int64_t last = qc_min(p + QG_NP, p1) - 1;  // the panel behind an odd number of them is another task's
        qg_few_rows<D, QM_FEW>(job, count, rows, p, last, tile);
        job->finish(job, tile, QG_NP * 16, 0, count, p * 16, qc_min(job->n - p * 16, (last + 1 - p) * 16));
    }
}

constexpr int64_t qm_few_scratch(int64_t k) {
    return 4 * (QM_FEW * (QG_NP * 16 + (k + 15) / 16 * 16) + qg_most_totals(k));
}

// The unit's expert and its first pair, or -1 where another unit has them. Units are experts; where there are fewer
// pairs than experts they are pairs, and the first pair of an expert stands for all of them.
template <class I> static int64_t qm_expert(const qm_job* job, int64_t unit, int64_t* pair) {
    const I* const index = (const I*)job->index;
    *pair = 0;
    if (job->units == job->experts) return unit;
    const int64_t expert = index[unit * job->index_step];
    if (expert < 0 || expert >= job->experts) return -1;
    for (int64_t p = 0; p < unit; p++)
        if (index[p * job->index_step] == expert) return -1;
    *pair = unit;
    return expert;
}

// Group `group` of the panels of one expert, and the pairs that chose it, which `take` goes through.
template <class I> struct qm_part {
    int64_t pair, expert, p0, p1;  // the next pair to look at; -1 where another unit has the expert; panels [p0, p1)
    qm_product one;

    qm_part(const qm_job* job, int64_t unit, int64_t group) : expert(qm_expert<I>(job, unit, &pair)) {
        const int64_t first = expert * job->width, panel = first / 16, count = (first + job->width + 15) / 16 - panel;
        p0 = panel + qc_share(count, group, job->groups);
        p1 = panel + qc_share(count, group + 1, job->groups);
        (qg_job&)one = *job;
        one.all = job, one.first = first;
    }
    bool chosen(int64_t p) const { return ((const I*)one.all->index)[p * one.all->index_step] == expert; }
    // The next of its pairs, at most `most`, become rows of `one`; returns how many there are.
    int64_t take(int64_t most) {
        int64_t rows = 0;
        for (; pair < one.all->pairs && rows < most; pair++)
            if (chosen(pair)) one.rows[rows++] = pair;
        return rows;
    }
};

// One part, times the rows of all pairs that chose its expert.
template <class D, class I, bool FEW>
static void qm_item(const qm_job* job, int64_t unit, int64_t group, char* scratch) {
    qm_part<I> part(job, unit, group);
    if (part.expert < 0) return;
    while (const int64_t rows = part.take(QM_ROWS)) {
        part.one.m = rows;
        if constexpr (FEW) {
            if (rows <= QM_FEW) {
                qm_few<D>(&part.one, rows, part.p0, part.p1, scratch);
                continue;
            }
        }
        qg_product<qg_fp32>(&part.one, part.p0, part.p1, 0, rows, scratch);
    }
}

template <class D, class I, bool FEW> static void qm_task(void* arg, int64_t task, char* scratch) {
    const qm_job* const job = (const qm_job*)arg;
    for (int64_t i = qc_share(job->items, task, job->tasks); i < qc_share(job->items, task + 1, job->tasks); i++)
        qm_item<D, I, FEW>(job, i / job->groups, i % job->groups, scratch);
}

// Pairs without an expert get zeros and are reported.
template <class I, class OUT> QC_COLD void qm_check(qc_ctx* ctx, const qm_job* job) {
    for (int64_t p = 0; p < job->pairs; p++) {
        const int64_t expert = ((const I*)job->index)[p * job->index_step];
        if (expert >= 0 && expert < job->experts) continue;
        ql_report(ctx, expert, job->experts);
        ql_zero_row(job->width, (OUT*)job->out + p * job->out_row);
    }
}

// FEW: whether D decodes panels group by group in registers.
template <class D, class I, class OUT, bool FEW> static void qm_run(qc_ctx* ctx, qm_job* job) {
    if (job->pairs <= 0) return;
    qm_check<I, OUT>(ctx, job);
    const int64_t panels = (job->width + 15) / 16 + (job->width % 16 != 0);  // at most
    job->units = qc_min(job->pairs, job->experts);
    job->groups = (panels + QG_GROUP - 1) / QG_GROUP;
    job->items = job->units * job->groups;
    const int64_t cycles = panels * job->k * QC_REGS * (job->pairs / 2 + qc_min(job->units, 2 * job->pairs));
    const int64_t threads = ctx->num_threads;
    job->tasks = qc_max(1, qc_min(qc_min(job->items, 64 * threads), cycles / QG_TASK));
    if (job->tasks > 1 && threads > 1) return ctx->parallel(ctx, job->tasks, qm_task<D, I, FEW>, job);
    job->tasks = 1;
    qm_task<D, I, FEW>(job, 0, ctx->scratch);
}

// --- products that are combined --------------------------------------------------------------------------------------

// For few pairs: rows are multiplied straight from codes, QM_FEW at a time. Experts and their halves are whole panels.

// Most panels that a thread multiplies one after the other before it turns to others elsewhere: of one half of an
// expert, or of one of a row's experts. Codes are asked for QG_AHEAD bytes ahead, so each turn waits for its first.
enum { QM_TURN = 32 };

// Floats of the sums of QG_NP panels of one half, and of all that belong to a turn.
enum { QM_HALF = QM_FEW * QG_NP * 16, QM_HALVES = QM_TURN / QG_NP * 2 * QM_HALF };

// Few rows times panels [p0, p1) of both halves of an expert, of one half after the other: `multiply` takes the panels
// of one of them. `finish` gets the sums of QG_NP panels of the first half, and behind them, QM_FEW rows on, those of
// the second. `tiles` has room for QM_HALVES floats.
template <class F> QC_INLINE void qm_both_halves(
    const qm_product* job, int64_t count, int64_t p0, int64_t p1, float* tiles, F multiply) {
    const int64_t apart = job->all->width / 32;
    for (int half = 0; half < 2; half++) {
        float* tile = tiles + half * QM_HALF;
        for (int64_t p = p0; p < p1; p += QG_NP, tile += 2 * QM_HALF)
            multiply(p + half * apart, qc_min(p + QG_NP, p1) - 1 + half * apart, tile);
    }
    for (int64_t p = p0; p < p1; p += QG_NP, tiles += 2 * QM_HALF)
        job->finish(job, tiles, QG_NP * 16, 0, count, p * 16, (qc_min(p + QG_NP, p1) - p) * 16);
}

// The panels of group `group` of `panels` panels, whole units of QG_NP but for the last.
struct qm_range { int64_t begin, end; };
static inline qm_range qm_group_of(const qm_job* job, int64_t panels, int64_t group) {
    const int64_t units = qg_up(panels, QG_NP);
    return {qc_share(units, group, job->groups) * QG_NP,
            qc_min(qc_share(units, group + 1, job->groups) * QG_NP, panels)};
}

// In fp32.
template <class D> struct qm_pairs {
    static void run(const qm_product* job, int64_t count, int64_t p0, int64_t p1, char* scratch) {
        float* const tile = (float*)scratch;
        float* const sums = tile + QM_HALVES;
        float* const x = sums + qg_most_totals(job->k);
        const int64_t stride = (job->k + 15) / 16 * 16;
        job->load_x(job, 0, count, 0, job->k, x, stride);
        static_assert(!qg_in_place<D>(), "no room for rows of codes in place");
        const qg_few_x rows = qg_add_up<D>(x, stride, count, job->k, sums);
        qm_both_halves(job, count, p0, p1, tile, [&](int64_t panel, int64_t last, float* to) {
            qg_few_rows<D, QM_FEW>(job, count, rows, panel, last, to);
        });
    }
};

constexpr int64_t qm_pairs_scratch(int64_t k) {
    return 4 * (QM_HALVES + QM_FEW * ((k + 15) / 16 * 16) + qg_most_totals(k));
}

template <class P, class I> static void qm_pairs_task(void* arg, int64_t task, char* scratch) {
    const qm_job* const job = (const qm_job*)arg;
    const I* const index = (const I*)job->index;
    for (int64_t i = qc_share(job->items, task, job->tasks); i < qc_share(job->items, task + 1, job->tasks); i++) {
        int64_t pair;
        const int64_t expert = qm_expert<I>(job, i / job->groups, &pair), group = i % job->groups;
        if (expert < 0) continue;
        const qm_range own = qm_group_of(job, job->width / 32, group);
        const int64_t panel = expert * (job->width / 16), p0 = panel + own.begin, p1 = panel + own.end;
        qm_product one;
        (qg_job&)one = *job;
        one.all = job, one.first = expert * job->width;
        while (pair < job->pairs) {
            int64_t rows = 0;
            for (; pair < job->pairs && rows < QM_FEW; pair++)
                if (index[pair * job->index_step] == expert) one.rows[rows++] = pair;
            if (rows == 0) break;
            P::run(&one, rows, p0, p1, scratch);
        }
    }
}

// The row of one pair, in fp32, and its products.
template <class D> struct qm_pair_row {
    const qm_job* job;
    float* const sums;
    float* const x;
    qg_few_x own;

    qm_pair_row(const qm_job* job, char* scratch)
        : job(job), sums((float*)scratch), x(sums + qg_most_totals(job->k)) {
        static_assert(!qg_in_place<D>(), "no room for rows of codes in place");
    }
    void take(const qm_product* one) {
        const int64_t stride = (job->k + 15) / 16 * 16;
        job->load_x(one, 0, 1, 0, job->k, x, stride);
        own = qg_add_up<D>(x, stride, 1, job->k, sums);
    }
    void multiply(int64_t panel, int64_t last, float* tile) const {
        qg_few_rows<D, 1>(job, 1, own, panel, last, tile);
    }
};

// One row of the result, the panels of one group: the row's experts in turn. A pair without an expert has sums of zero.
// R: what takes the row of a pair, and multiplies it by panels.
template <class R, class I> static void qm_mixed_item(const qm_job* job, int64_t row, int64_t group, char* scratch) {
    float* const tile = (float*)scratch;
    float* const totals = tile + QG_NP * 16;
    R own(job, (char*)(totals + QM_TURN * 16));
    const int64_t panels = job->width / 16;
    const auto [p0, p1] = qm_group_of(job, panels, group);
    for (int64_t i = 0; i < (p1 - p0) * 16; i++) totals[i] = 0;
    qm_product one;
    (qg_job&)one = *job;
    one.all = job;
    for (int64_t place = 0; place < job->top; place++) {
        one.rows[0] = row * job->top + place;
        const int64_t expert = ((const I*)job->index)[one.rows[0] * job->index_step];
        const bool there = expert >= 0 && expert < job->experts;
        if (there) own.take(&one);
        for (int64_t p = p0; p < p1; p += QG_NP) {
            const int64_t last = qc_min(p + QG_NP, p1) - 1;
            if (there) own.multiply(expert * panels + p, expert * panels + last, tile);
            else for (int64_t i = 0; i < QG_NP * 16; i++) tile[i] = 0;
            job->mix(job, tile, row, place, totals + (p - p0) * 16, (last + 1 - p) * 16);
        }
    }
    job->finish(job, totals, 0, row, 1, p0 * 16, (p1 - p0) * 16);
}

// Scratch bytes of the tile and the totals, and of a kernel in fp32: these, and a row behind them.
constexpr int64_t qm_totals_scratch() { return 4 * (QG_NP + QM_TURN) * 16; }
constexpr int64_t qm_mixed_scratch(int64_t k) {
    return qm_totals_scratch() + 4 * ((k + 15) / 16 * 16 + qg_most_totals(k));
}

template <class R, class I> static void qm_mixed_task(void* arg, int64_t task, char* scratch) {
    const qm_job* const job = (const qm_job*)arg;
    for (int64_t i = qc_share(job->items, task, job->tasks); i < qc_share(job->items, task + 1, job->tasks); i++)
        qm_mixed_item<R, I>(job, i / job->groups, i % job->groups, scratch);
}

// Pairs without an expert are reported. ZEROS: the result has a row for each, which becomes zero.
template <class I, class OUT, bool ZEROS> QC_COLD void qm_check_combined(qc_ctx* ctx, const qm_job* job) {
    for (int64_t p = 0; p < job->pairs; p++) {
        const int64_t expert = ((const I*)job->index)[p * job->index_step];
        if (expert >= 0 && expert < job->experts) continue;
        ql_report(ctx, expert, job->experts);
        if constexpr (ZEROS) ql_zero_row(job->width / 2, (OUT*)job->out + p * job->out_row);
    }
}

// Items for each thread, if there are as many of QG_GROUP panels.
enum { QM_ITEMS = 4 };

// `units`: of work, each over `panels` panels that are read.
static inline void qm_run_tasks(
    qc_ctx* ctx, qm_job* job, int64_t units, int64_t panels, int64_t rows, void (*task)(void*, int64_t, char*)) {
    const int64_t threads = ctx->num_threads, most = qg_up(panels, QG_GROUP);
    job->units = units;
    job->groups = qc_max(qg_up(panels, QM_TURN), qc_min(most, qg_up(QM_ITEMS * threads, units)));
    job->items = job->units * job->groups;
    const int64_t cycles = panels * job->k * QC_REGS * (rows / 2 + units);
    job->tasks = qc_max(1, qc_min(qc_min(job->items, 64 * threads), cycles / QG_TASK));
    if (job->tasks > 1 && threads > 1) return ctx->parallel(ctx, job->tasks, task, job);
    job->tasks = 1;
    task(job, 0, ctx->scratch);
}

// P: what multiplies few rows of one expert.
template <class P, class I, class OUT> static void qm_run_pairs_by(qc_ctx* ctx, qm_job* job) {
    if (job->pairs <= 0) return;
    qm_check_combined<I, OUT, true>(ctx, job);
    qm_run_tasks(ctx, job, qc_min(job->pairs, job->experts), job->width / 32, job->pairs, qm_pairs_task<P, I>);
}

template <class D, class I, class OUT> static void qm_run_pairs(qc_ctx* ctx, qm_job* job) {
    qm_run_pairs_by<qm_pairs<D>, I, OUT>(ctx, job);
}

// R: `qm_pair_row`, or its like for rows of int8 (grouped_int8.h).
template <class R, class I, class OUT> static void qm_run_mixed_by(qc_ctx* ctx, qm_job* job) {
    if (job->pairs <= 0) return;
    qm_check_combined<I, OUT, false>(ctx, job);
    qm_run_tasks(ctx, job, job->pairs / job->top, job->width / 16, job->pairs, qm_mixed_task<R, I>);
}

template <class D, class I, class OUT> static void qm_run_mixed(qc_ctx* ctx, qm_job* job) {
    qm_run_mixed_by<qm_pair_row<D>, I, OUT>(ctx, job);
}
