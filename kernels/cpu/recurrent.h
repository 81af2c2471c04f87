// Recurrent layers on the CPU: all steps of one direction of one layer in one kernel, over gemm.h's decoders.
//
//     gates[t] = x[t] + h @ w' + bias, then the cell's arithmetic gives the state h after step t
//
// A step is cut into items: QR_UNITS hidden units times QR_ROWS rows of the batch. An item makes the sums of all gates
// of its units, which lie in different panels, and then their new states; one hand-over to the threads serves a step.
// Codes of the weight are read and decoded once for each step and item of rows: few rows straight into the
// accumulators, more by panels. A unit may begin anywhere in a panel.
// The state of the step before is read from the result itself, the cell state lies in `cell` from step to step. The
// order of an element's additions depends on the width and the batch alone.
#pragma once
#include "few_rows.h"

enum { QR_UNITS = 64, QR_ROWS = 4 * QG_MR };  // of an item: 4 panels of each gate; the microkernel's rows, four times
enum { QR_LSTM, QR_GRU, QR_TANH, QR_RELU };
constexpr int qr_gates(int kind) { return kind == QR_LSTM ? 4 : kind == QR_GRU ? 3 : 1; }

// What all items of a step share: gemm.h's job with the state before the step as its x.
struct qr_job : qg_job {
    int64_t hidden, groups_of_units;
    const char* given;  // the input's share of the gates, at this step
    int64_t given_row;
    const char* bias;   // null: none
    char* state;        // the state after this step; with a projection what is projected
    int64_t state_row;
    char* cell;
    int64_t cell_row;
};

// One item's product: sums[row][gate][unit].
struct qr_product : qr_job {
    float* sums;
    int64_t gate, first, units, from_row;
};

// A `qg_finish`: columns of the item's own units go to its sums; a panel may hold rows of other gates.
template <int GATES> static void qr_keep(
    const qg_job* job, const float* tile, int64_t stride, int64_t m0, int64_t rows, int64_t n0, int64_t cols) {
    const qr_product* const own = (const qr_product*)job;
    const int64_t begin = own->gate * own->hidden + own->first;
    const int64_t from = qc_max(n0, begin), to = qc_min(n0 + cols, begin + own->units);
    for (int64_t i = 0; i < rows; i++) {
        float* const sums = own->sums + ((m0 - own->from_row + i) * GATES + own->gate) * QR_UNITS - begin;
        for (int64_t n = from; n < to; n += 16) {
            const int lanes = (int)qc_min(to - n, 16);
            qg_store_lanes(sums + n, qg_load_lanes(tile + i * stride - n0 + n, lanes), lanes);
        }
    }
}

// All that one kernel is made of: the kind of cell, the types of the input's share, the bias, the state and the cell.
template <int KIND, class X, class BIAS, class STATE, class NEW, class CELL> struct qr_layer {
    static constexpr int GATES = qr_gates(KIND);

    // The new states of one row of an item.
    static void row(const qr_product* job, int64_t row, const float* sums) {
        const X* const given = (const X*)job->given + row * job->given_row + job->first;
        const BIAS* const bias = job->bias ? (const BIAS*)job->bias + job->first : nullptr;
        NEW* const state = (NEW*)job->state + row * job->state_row + job->first;
        for (int64_t n = 0; n < job->units; n += 16) {
            const int lanes = (int)qc_min(job->units - n, 16);
            auto share = [&](int gate) __attribute__((always_inline)) {
                const vf sum = vload(sums + gate * QR_UNITS + n);
                return bias ? sum + qg_load_lanes(bias + gate * job->hidden + n, lanes) : sum;
            };
            auto own = [&](int gate) __attribute__((always_inline)) {
                return qg_load_lanes(given + gate * job->hidden + n, lanes);
            };
            vf out;
            if constexpr (KIND == QR_LSTM) {
                CELL* const cell = (CELL*)job->cell + row * job->cell_row + job->first + n;
                const vf in = vsigmoid(own(0) + share(0)), forget = vsigmoid(own(1) + share(1));
                const vf update = vtanh(own(2) + share(2));
                qg_store_lanes(cell, forget * qg_load_lanes(cell, lanes) + in * update, lanes);
                out = vsigmoid(own(3) + share(3)) * vtanh(qg_load_lanes(cell, lanes));
            } else if constexpr (KIND == QR_GRU) {
                const STATE* const old = (const STATE*)job->x + row * job->x_row + job->first + n;
                const vf reset = vsigmoid(own(0) + share(0)), keep = vsigmoid(own(1) + share(1));
                const vf fresh = vtanh(own(2) + reset * share(2));
                out = fresh + keep * (qg_load_lanes(old, lanes) - fresh);
            } else {
                const vf sum = own(0) + share(0);
                out = KIND == QR_TANH ? vtanh(sum) : vsel(vlt(sum, vset(0.0f)), vset(0.0f), sum);  // NaN stays
            }
            qg_store_lanes(state + n, out, lanes);
        }
    }
};

// The sums of one gate of an item. Few rows, which are `few`, are multiplied straight from codes.
template <class D, int FEW, int GATES>
static void qr_gate(const qr_product* job, int64_t rows, const qg_few_x& few, char* scratch) {
    const int64_t begin = job->gate * job->hidden + job->first;
    const int64_t p0 = begin / 16, p1 = (begin + job->units + 15) / 16;
    if constexpr (FEW > 0) {
        if (rows <= FEW) {
            float* const tile = (float*)scratch;
            for (int64_t p = p0; p < p1; p += QG_NP) {
                const int64_t end = qc_min(p + QG_NP, p1);
                qg_few_rows<D, FEW>(job, rows, few, p, end - 1, tile);
                qr_keep<GATES>(job, tile, QG_NP * 16, job->from_row, rows, p * 16, qc_min(job->n, end * 16) - p * 16);
            }
            return;
        }
    }
    qg_product<qg_fp32>(job, p0, p1, job->from_row, job->from_row + rows, scratch);
}

// FEW: most rows that are multiplied straight from codes; 0 for weights that lie row by row.
template <class LAYER, class D, int FEW> static void qr_item(const qr_job* job, int64_t item, char* scratch) {
    constexpr int GATES = LAYER::GATES;
    qr_product own;
    (qr_job&)own = *job;
    own.first = item % job->groups_of_units * QR_UNITS, own.units = qc_min(job->hidden - own.first, QR_UNITS);
    own.from_row = item / job->groups_of_units * QR_ROWS;
    const int64_t rows = qc_min(job->m - own.from_row, QR_ROWS), few = FEW > 0 && rows <= FEW;
    own.sums = (float*)scratch;
    scratch += 4 * (job->m < QR_ROWS ? qc_max(job->m, 1) : QR_ROWS) * GATES * QR_UNITS;
    const float* x = (const float*)job->x + own.from_row * job->x_row;
    int64_t stride = job->x_row;
    if (few && job->load_x) {
        stride = (job->k + 15) / 16 * 16;
        job->load_x(job, own.from_row, rows, 0, job->k, (float*)scratch, stride);
        x = (const float*)scratch, scratch += 4 * rows * stride;
    }
    qg_few_x prepared = {x, stride, nullptr, 0};
    if (few) {
        static_assert(!qg_in_place<D>(), "no room for rows of codes in place");
        prepared = qg_add_up<D>(x, stride, rows, job->k, (float*)scratch);
        scratch += 4 * qg_most_totals(job->k);
    }
    for (own.gate = 0; own.gate < GATES; own.gate++) qr_gate<D, FEW, GATES>(&own, rows, prepared, scratch);
    for (int64_t i = 0; i < rows; i++) LAYER::row(&own, own.from_row + i, own.sums + i * GATES * QR_UNITS);
}

// Bytes of scratch of an item: its sums; then rows in fp32 and a tile, or what decoded panels take.
constexpr int64_t qr_scratch(int64_t k, int64_t rows, int64_t few, int gates, bool converts) {
    const int64_t sums = 4 * (rows < QR_ROWS ? rows : QR_ROWS) * gates * QR_UNITS;
    const int64_t straight = few ? qg_few_scratch(k, few, converts) : 0;
    const int64_t panels = rows > few ? qg_scratch(k) : 0;
    return sums + (straight > panels ? straight : panels);
}

template <class LAYER, class D, int FEW> static void qr_task(void* arg, int64_t task, char* scratch) {
    const qr_job* const job = (const qr_job*)arg;
    for (int64_t i = qc_share(job->items, task, job->tasks); i < qc_share(job->items, task + 1, job->tasks); i++)
        qr_item<LAYER, D, FEW>(job, i, scratch);
}

// One step. How its items are dealt to threads changes no result.
template <class LAYER, class D, int FEW> static void qr_step(qc_ctx* ctx, qr_job* job) {
    if (job->tasks > 1) return ctx->parallel(ctx, job->tasks, qr_task<LAYER, D, FEW>, job);
    qr_task<LAYER, D, FEW>(job, 0, ctx->scratch);
}

static inline void qr_cut(qc_ctx* ctx, qr_job* job) {
    job->groups_of_units = (job->hidden + QR_UNITS - 1) / QR_UNITS;
    job->items = job->groups_of_units * ((job->m + QR_ROWS - 1) / QR_ROWS);
    const int64_t cycles = (job->n + 15) / 16 * job->k * QC_REGS * (job->m + 3) / 2;
    const int64_t most = qc_min(job->items, 4 * (int64_t)ctx->num_threads);
    job->tasks = ctx->num_threads > 1 ? qc_max(1, qc_min(most, cycles / QG_TASK)) : 1;
}

// `rows` rows of `count` elements from one place to another: what a state begins with.
template <class T> static void qr_copy(const T* from, int64_t from_row, T* to, int64_t to_row, int64_t rows,
                                       int64_t count) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, (size_t)count * sizeof(T));
}

// A `qg_finish`: sums of a projection are the state, at `out` in rows that are *sym elements apart. (The drivers of
// gemm.h hand on a plain qg_job.)
template <class OUT> static void qr_store(
    const qg_job* job, const float* tile, int64_t stride, int64_t m0, int64_t rows, int64_t n0, int64_t cols) {
    for (int64_t i = 0; i < rows; i++) {
        OUT* const out = (OUT*)job->out + (m0 + i) * *job->sym + n0;
        for (int64_t n = 0; n < cols; n += 16) {
            const int lanes = (int)qc_min(cols - n, 16);
            qg_store_lanes(out + n, qg_load_lanes(tile + i * stride + n, lanes), lanes);
        }
    }
}
