// Products of bf16 by AMX (bf16_tiles.h) where words stay: many rows, not too many columns.
//
// A task has some units and some blocks of 32 rows (16, if a chunk has no more). It makes the words of its units, which
// stay in the L2 cache, and multiplies block after block by unit after unit. Tiles multiply beside the other work of a
// core, so between two columns of tiles a task does some of what surrounds products:
//
//     it finishes some rows of the product before this one: bias, epilogue, rounding, and what memory takes for results
//     it asks for some of the next block of x, which comes from a cache that all cores share
//
// so that neither takes a time of its own unless it is longer than the products.
#pragma once
#include "bf16_tiles.h"

// Bytes of words that stay (half of 2 MiB of L2), floats from one row of sums to the next and of a product's sums; how
// many rows are finished at a time, at least; columns from which on a block of rows takes too much of an L1 of 48 KiB.
enum { QBK_WORDS = 1 << 20, QBK_STRIDE = 16 * QG_NP, QBK_SUMS = QBT_ROWS * QBK_STRIDE };
enum { QBK_FINISHED = 4, QBK_FAR = 512 };

// Bytes of a unit's words; how many units' words stay.
constexpr int64_t qbk_words(int64_t k) { return QG_NP * 32 * qbt_padded(k); }
constexpr int64_t qbk_units(int64_t k) { return QBK_WORDS / qbk_words(k); }
// Most rows at a time, of at most `m` (0: any number).
constexpr int64_t qbk_chunk(int64_t k, int64_t m) { return qbt_rows_that_fit(k, m, 4096); }
// Bytes of scratch of a task: spare ones, words, sums of two products. Behind them, for all tasks: rows of x in tiles,
// the sums of their columns, and a row in fp32 of each task that makes them.
constexpr int64_t qbk_work(int64_t k) { return QBT_SPARE + qbk_units(k) * qbk_words(k) + 2 * 4 * QBK_SUMS; }
constexpr int64_t qbk_scratch(int64_t k, int64_t m) {
    return qbk_work(k) + qbk_chunk(k, m) * (2 * qbt_padded(k) + 4) + 4 * qbt_padded(k);
}

#if defined(QC_AVX512) && !defined(QB_NO_BF16)
// Units and blocks of rows of a task; tasks are `groups` of units times `ranges` of blocks.
struct qbk_cut { int64_t units, blocks, groups, ranges; };

// `count` things are in parts of `size`: the least number of parts that makes them smaller, or more than `count`.
constexpr int64_t qbk_next_parts(int64_t count, int64_t size) {
    return size > 1 ? (count - 1) / (size - 1) + 1 : count + 1;
}

// The cut that takes the least time. To make a unit's words takes as long as to multiply two and a half blocks of rows
// by them. A thread does its tasks one after the other, then waits for the last thread, for a quarter of a task.
static qbk_cut qbk_cut_for(int64_t units, int64_t blocks, int64_t k, int64_t threads) {
    const int64_t least = qg_up(units, qbk_units(k));
    qbk_cut best = {};
    int64_t cost = INT64_MAX;
    for (int64_t g = least, wide; g <= qc_min(least + threads, units); g = qbk_next_parts(units, wide)) {
        wide = qg_up(units, g);
        const int64_t groups = qg_up(units, wide);
        for (int64_t r = 1, high; r <= qc_min(blocks, 4 * threads); r = qbk_next_parts(blocks, high)) {
            high = qg_up(blocks, r);
            const int64_t ranges = qg_up(blocks, high), tasks = groups * ranges;
            const int64_t quarters = threads > 1 ? 4 * qg_up(tasks, threads) + 1 : 4 * tasks;
            const int64_t all = quarters * wide * (5 + 2 * high);
            if (all < cost) best = {wide, high, groups, ranges}, cost = all;
        }
    }
    return best;
}

struct qbk_call {
    const qg_job* job;
    qbt_rows rows;
    int64_t m0, span;  // the first row; columns of a scale where words hold codes, else 0
    float* totals;
    int64_t row_at;    // where in scratch a row of x has room
    qbk_cut cut;
};

// `count` things are done within `steps` steps: `many` of them, at least `least`, in one step of `every`.
struct qbk_pace {
    int64_t many, every, wait;
    qbk_pace(int64_t count, int64_t steps, int64_t least)
        : many(qc_max(qg_up(count, steps), least)), every(qc_max(steps * many / count, 1)), wait(every) {}
    QG_METHOD int64_t step() {  // how many now
        if (--wait > 0) return 0;
        wait = every;
        return many;
    }
};

// What surrounds products.
struct qbk_around {
    const qg_job* job;
    // The product that is finished: its sums, where its results are, and how many of its rows are done.
    const float* sums = nullptr;
    int64_t m0 = 0, rows = 0, n0 = 0, columns = 0, finished = 0;
    qbk_pace finishing{1, 1, 1};
    // The bytes of x that are asked for.
    const char* at = nullptr;
    const char* end = nullptr;
    qbk_pace asking{1, 1, 1};

    __attribute__((noinline)) void finish(int64_t most) {
        const int64_t count = qc_min(most, rows - finished);
        if (count <= 0) return;
        job->finish(job, sums + finished * QBK_STRIDE, QBK_STRIDE, m0 + finished, count, n0, columns);
        finished += count;
    }
    // After each column of tiles.
    QG_METHOD void between() {
        if (const int64_t now = finishing.step()) finish(now);
        for (int64_t now = asking.step(); now > 0 && at < end; now--, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// sums[16 b + i][16 p + lane] = tiles of MB blocks of 16 rows times NB panels, whose words lie `next` bytes apart. The
// tiles of both blocks lie side by side, from one column of tiles to the next `step` bytes. FAR: the block of x does
// not stay in the L1 cache beside what else passes through it, and is asked for a column of tiles ahead.
template <int MB, int NB, bool FAR> static void qbk_block(
    const char* x, int64_t step, const char* w, int64_t next, int64_t tiles, float* sums, qbk_around& around) {
    qbt_zero_sums<MB, NB>();
    for (; tiles > 0; tiles--, x += step, w += QBT_TILE) {
        qa_load<4>(x, 64);
        if constexpr (MB > 1) qa_load<5>(x + QBT_TILE, 64);
        qa_load_once<6>(w, 64);
        if constexpr (NB > 1) qa_load_once<7>(w + next, 64);
        if constexpr (FAR) qbt_ask<16 * MB>(x + step);
        qbt_add_product<MB, NB>();
        around.between();
    }
    qbt_store_sums<MB, NB>(sums, 4 * QBK_STRIDE);
}

template <bool FAR> QC_COLD void qbk_product(
    const qbt_rows& rows, const qbt_unit& unit, int64_t b, qbk_around& around) {
    const char* const x = rows.at(0, b);
    const int64_t tiles = rows.padded / QBT_COLUMNS, step = rows.step();
    if (rows.of(b) > 16) {
        if (unit.two) qbk_block<2, 2, FAR>(x, step, unit.words, unit.next, tiles, unit.sums, around);
        else qbk_block<2, 1, FAR>(x, step, unit.words, unit.next, tiles, unit.sums, around);
    } else {
        if (unit.two) qbk_block<1, 2, FAR>(x, step, unit.words, unit.next, tiles, unit.sums, around);
        else qbk_block<1, 1, FAR>(x, step, unit.words, unit.next, tiles, unit.sums, around);
    }
}

// Block b of rows times a unit, whose words are there: sums.
template <class D> static void qbk_multiply(
    const qbk_call& call, const qbt_unit& unit, int64_t b, const qbt_spare& spare, qbk_around& around) {
    if (call.rows.padded < QBK_FAR) qbk_product<false>(call.rows, unit, b, around);
    else qbk_product<true>(call.rows, unit, b, around);
    if constexpr (qbt_codes_fit<D>()) {
        if (call.span == 0) return;
        const float* const totals = call.totals + b * QBT_ROWS;
        for (int p = 0; p < 1 + unit.two; p++)
            qbt_scale<decltype(D::entries)>(
                call.job->packed, unit.panel + p, call.rows.of(b), totals, unit.sums + 16 * p, QBK_STRIDE);
        qbt_mend<D>(call, unit, b, unit.sums, spare);
    }
}

template <class D> static void qbk_task(void* arg, int64_t task, char* scratch) {
    const qbk_call& call = *(const qbk_call*)arg;
    const qg_job* const job = call.job;
    const qbt_rows& rows = call.rows;
    const int64_t panels = (job->n + 15) / 16, bytes = qbk_words(job->k), tiles = rows.padded / QBT_COLUMNS;
    const int64_t u0 = task / call.cut.ranges * call.cut.units;
    const int64_t units = qc_min(qg_up(panels, QG_NP) - u0, call.cut.units);
    const int64_t b0 = task % call.cut.ranges * call.cut.blocks, end = qc_min(b0 + call.cut.blocks, rows.blocks);
    const qbt_spare spare(scratch);
    char* const words = scratch + QBT_SPARE;
    float* const sums = (float*)(words + qbk_units(job->k) * bytes);
    const auto unit_of = [&](int64_t u, int64_t turn) -> qbt_unit {  // `turn`: of all products of the task
        const int64_t panel = (u0 + u) * QG_NP;
        float* const to = sums + turn % 2 * QBK_SUMS;
        return {panel, panel + 1 < panels, words + u * bytes, bytes / QG_NP, to, QBK_STRIDE, {}};
    };
    qa_configure(qa_shape_for(rows.count));
    for (int64_t u = 0; u < units; u++) qbt_make<D>(job, unit_of(u, 0), 0, job->k, call.span > 0);
    qbk_around around{job};
    for (int64_t b = b0, turn = 0; b < end; b++) {
        if (b + 1 < end) {
            around.at = rows.at(0, b + 1), around.end = rows.at(0, b + 2);
            around.asking = qbk_pace((around.end - around.at) / 64, units * tiles, 1);
        }
        for (int64_t u = 0; u < units; u++, turn++) {
            const qbt_unit unit = unit_of(u, turn);
            qbk_multiply<D>(call, unit, b, spare, around);
            around.finish(QBT_ROWS);  // what is left of the product before
            around.sums = unit.sums, around.m0 = call.m0 + b * QBT_ROWS, around.rows = rows.of(b);
            around.n0 = unit.panel * 16, around.columns = qc_min(job->n - around.n0, QG_NP * 16);
            around.finished = 0, around.finishing = qbk_pace(around.rows, tiles, QBK_FINISHED);
        }
    }
    qa_release();
    around.finish(QBT_ROWS);
}

// Rows of T times a weight. `m`: what `qbk_scratch` was told.
template <class D, class T> static void qbk_run(qc_ctx* ctx, qg_job* job, int64_t m) {
    if (job->n <= 0) return;
    const int64_t k = job->k, padded = qbt_padded(k), units = qg_up((job->n + 15) / 16, QG_NP);
    const int64_t most = qbk_chunk(k, m), chunk = qbt_equal_chunk(job->m, most);
    char* const tiles = ctx->scratch + qbk_work(k);
    for (int64_t m0 = 0; m0 < job->m; m0 += chunk) {
        const qbt_rows rows(tiles, qc_min(job->m - m0, chunk), k, true);
        const int64_t worth = units * QG_NP * k * (3 + 2 * rows.blocks) / 2 / QG_TASK;
        const int64_t threads = qc_max(qc_min(ctx->num_threads, worth), 1);
        qbk_call call = {job, rows, m0, qbt_span<D>(k, job->m), (float*)(tiles + most * 2 * padded),
                        qbk_scratch(k, m) - 4 * padded, qbk_cut_for(units, rows.blocks, k, threads)};
        const int64_t loads = qg_up(rows.blocks * rows.block, QBT_LOADED), all = call.cut.groups * call.cut.ranges;
        const bool shared = threads > 1 && all > 1;
        qc_run_tasks(ctx, shared && rows.count * k >= 8 * QG_TASK, loads, qbt_load_task<D, T, qbk_call>, &call);
        qc_run_tasks(ctx, shared, all, qbk_task<D>, &call);
    }
}
#endif
