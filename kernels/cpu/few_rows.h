// Products of few rows on the CPU (`qg_run_few`): codes are decoded in registers straight into the accumulators, and no
// panel is stored. For one or two rows, codes whose element is value * scale, or value * scale + offset, are summed as
// they are over the columns of a scale, if it has 16 or more; the scale then multiplies the sum, and the offset the sum
// of these columns of x, which is made once for all panels. On a Zen 4, codes that count from 0 are multiplied where
// they stand in their words (decode.h, `qg_counts_in_place`); a kernel for one row does so with codes in two planes,
// too. How tasks are cut never changes the order of additions of an element.
#pragma once
#include "gemm.h"
#if defined(QC_AVX512)
// Whether a number of x is broadcast into a register once for two panels. Not on a Zen 4: there a broadcast takes a
// pipe of shuffles, and memory gives a number for each multiplication. It decides no bit. Tests define QG_BROADCASTS.
QC_INLINE bool qg_broadcasts() {
#if defined(QG_BROADCASTS)
    return QG_BROADCASTS;
#else
    return !qg_is_zen4();
#endif
}
#endif

// How MR rows are multiplied: PANELS panels at once, so that a broadcast x serves several multiplications, and SUMS
// interleaved sums for each, so that at least eight chains of additions hide the latency of FMA.
template <class D, int MR> struct qg_few_shape {
    static constexpr int PANELS = MR >= 3 ? QG_NP : 1, CHAINS = MR * PANELS * QC_REGS;
    static constexpr int SUMS = CHAINS >= 8 ? 1 : CHAINS >= 4 ? 2 : CHAINS >= 2 || D::GROUP < 8 ? 4 : 8;
};

// Columns k + J of one group: MR rows of x times the decoded lanes of PANELS panels.
template <class D, int MR, int PANELS, int SUMS> struct qg_fma_step {
    const D* decoder;
    const float* x;
    int64_t stride;
    vf (&sum)[MR][PANELS][SUMS];
    template <int J> QG_METHOD void step() {
        vf w[PANELS];
        QG_UNROLL for (int p = 0; p < PANELS; p++) w[p] = decoder[p].template value<J>();
        QG_UNROLL for (int i = 0; i < MR; i++) {
            const qf a = q_set(x[i * stride + J]);
            QG_UNROLL for (int p = 0; p < PANELS; p++)
                QG_UNROLL for (int v = 0; v < QC_REGS; v++) {
                    qf& to = sum[i][p][J % SUMS].r[v];
                    to = q_fma(a, w[p].r[v], to);
                }
        }
    }
};

// The same with the codes' values instead of the elements, for one panel.
template <class D, int MR, int SUMS> struct qg_code_step {
    const D& decoder;
    const float* x;
    int64_t stride;
    vf (&sum)[MR][SUMS];
    template <int J> QG_METHOD void step() {
        const vf w = decoder.template code<J>();
        QG_UNROLL for (int i = 0; i < MR; i++) sum[i][J % SUMS] = vfma(vset(x[i * stride + J]), w, sum[i][J % SUMS]);
    }
};

// sum[0] + … + sum[COUNT - 1] in pairs.
template <int COUNT> QC_INLINE vf qg_sum(const vf* sum) {
    if constexpr (COUNT == 1) return sum[0];
    else return qg_sum<COUNT / 2>(sum) + qg_sum<COUNT / 2>(sum + COUNT / 2);
}

// totals[g] = the sum of columns [g * span, (g + 1) * span) of x.
template <class T> QC_INLINE void qg_add_groups(const T* x, int64_t span, int64_t groups, float* totals) {
    for (int64_t g = 0; g < groups; g++, x += span) {
        vf total = vzero();
        for (int64_t k = 0; k < span; k += 16) total = total + vload_upto(x + k, (int)qc_min(span - k, 16));
        totals[g] = vsum(total);
    }
}

// Whether offsets need the sums of x.
template <class D> constexpr bool qg_needs_totals() {
    if constexpr (D::SUMMED) return D::OFFSET;
    return false;
}
// Whether numbers of x are made for codes that are multiplied where they stand (decode.h).
template <class D> constexpr bool qg_in_place() {
    if constexpr (D::SUMMED) return D::IN_PLACE;
    return false;
}

// Whether a whole group may be left behind the columns of the last scale.
template <class D> constexpr bool qg_leaves_groups() {
    if constexpr (D::SUMMED) return D::SHARED > D::GROUP;
    return true;
}

enum { QG_SUMMED_ROWS = 2 };  // most rows that are summed by codes

// Few rows of x in fp32, `stride` floats apart. `totals`: the sums of whole groups of D::SHARED columns, `groups` of
// them for each row, where qg_add_up has made them. For codes in place there are rows that are divided by `power`
// (`qg_raise`), and totals are divided by `power` and D::UNIT.
struct qg_few_x {
    const float* rows;
    int64_t stride;
    const float* totals;
    int64_t groups;
    const float* raised = nullptr;  // rows for codes in place
    int64_t apart = 0;
    float power[QG_SUMMED_ROWS] = {};
};

// Floats that totals take, in whole vectors, and those of rows for codes in place.
constexpr int64_t qg_most_totals(int64_t k) { return (2 * (k / 16) + 15) / 16 * 16; }
constexpr int64_t qg_most_raised(int64_t k, int64_t rows) {
    return (k + 15) / 16 * 16 * (rows < QG_SUMMED_ROWS ? rows : QG_SUMMED_ROWS);
}

#if defined(QC_AVX512)
// The power of two at or below the largest |x| of `columns`, a multiple of 16; 1 where that is none, or no number.
QC_INLINE float qg_power_below(const float* x, int64_t columns) {
    vf most = vzero();
    for (int64_t k = 0; k < columns; k += 16) most = vmax(vabs(vload(x + k)), most);
    const uint32_t exponent = qc_bits(vmaxlane(most)) & 0x7f800000;
    return exponent == 0x7f800000 ? 1.0f : qc_from_bits(exponent ? exponent : 0x00800000);
}

// The numbers of a row for codes in place: over `power`, times the powers of D's columns.
template <class D> QC_INLINE void qg_raise(const float* x, int64_t columns, float power, float* to) {
    const vf of_row = vset(1.0f / power), of_column = vload(decltype(D::values)::POWERS.column);
    for (int64_t k = 0; k < columns; k += 16) vstore(to + k, vload(x + k) * of_row * of_column);
}
#endif

// `x` with its totals, which are written to `totals` (`qg_most_totals`), and rows for codes in place behind them.
template <class D>
QC_INLINE qg_few_x qg_add_up(const float* x, int64_t stride, int64_t rows, int64_t k, float* totals) {
    qg_few_x prepared = {x, stride, nullptr, 0};
    if constexpr (qg_needs_totals<D>()) {
        const int64_t groups = k / D::SHARED;
        for (int64_t i = 0; rows <= QG_SUMMED_ROWS && i < rows; i++)
            qg_add_groups(x + i * stride, D::SHARED, groups, totals + i * groups);
        prepared.totals = totals, prepared.groups = groups;
    }
#if defined(QC_AVX512)
    if constexpr (qg_in_place<D>()) {
        const int64_t groups = k / D::SHARED, columns = groups * D::SHARED, apart = (k + 15) / 16 * 16;
        float* const raised = totals + qg_most_totals(k);
        prepared.raised = raised, prepared.apart = apart;
        for (int64_t i = 0; i < rows; i++) {
            const float power = prepared.power[i] = qg_power_below(x + i * stride, columns);
            qg_raise<D>(x + i * stride, columns, power, raised + i * apart);
            for (int64_t g = 0; qg_needs_totals<D>() && g < groups; g++)
                totals[i * groups + g] = totals[i * groups + g] * (1.0f / power) * (1.0f / D::UNIT);
        }
    }
#endif
    return prepared;
}

// The decoder of elements beside D, which sums codes: D itself, but for codes in place the one that looks them up,
// since it is compiled anyway.
template <class D, bool = qg_in_place<D>()> struct qg_elements { typedef D type; };
template <class W> struct qg_elements<qg_coded<W>, true> { typedef qg_coded<typename W::slower> type; };

template <class D, int MR, bool BY_CODES = D::SUMMED && MR <= QG_SUMMED_ROWS> static void qg_few_panels(
    const qg_job* job, const qg_few_x& rows, int64_t panel, int64_t next, float* tile) {
    const float* const x = rows.rows;
    const int64_t stride = rows.stride;
    constexpr int PANELS = qg_few_shape<D, MR>::PANELS, SUMS = qg_few_shape<D, MR>::SUMS;
    vf sum[MR][PANELS][SUMS] = {};
    D decoder[PANELS];
    QG_UNROLL for (int p = 0; p < PANELS; p++) decoder[p].start(job, p ? next : panel);
    int64_t k = 0;
    if constexpr (BY_CODES) {  // each row and column group is scaled once, instead of every element
        constexpr int PARTS = SUMS < 4 ? SUMS : 4;
        const float* const factors = D::IN_PLACE ? rows.raised : x;
        const int64_t apart = D::IN_PLACE ? rows.apart : stride;
        for (int64_t group = 0; k + D::SHARED <= job->k; k += D::SHARED, group++) {
            vf part[MR][PARTS] = {};
            if constexpr (D::ASKS) decoder[0].ask(panel + 1, k);
            decoder[0].entries_at(k);
            _Pragma("GCC unroll 4") for (int at = 0; at < D::SHARED; at += D::GROUP) {
                decoder[0].codes_at(k + at);
                qg_code_step<D, MR, PARTS> body{decoder[0], factors + k + at, apart, part};
                qg_steps<0, D::GROUP>(body, D::GROUP);
            }
            QG_UNROLL for (int i = 0; i < MR; i++) {
                vf& to = sum[i][0][0];
                to = vfma(qg_sum<PARTS>(part[i]), decoder[0].scale(), to);
                if constexpr (qg_needs_totals<D>())
                    to = vfma(vset(rows.totals[i * rows.groups + group]), decoder[0].offset(), to);
            }
        }
        if constexpr (D::UNIT != 1.0f)
            QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0][0] = sum[i][0][0] * vset(D::UNIT);
        if constexpr (D::IN_PLACE)
            QG_UNROLL for (int i = 0; i < MR; i++) sum[i][0][0] = sum[i][0][0] * vset(rows.power[i]);
    }
    if constexpr (!BY_CODES || qg_leaves_groups<D>())
        for (; k + D::GROUP <= job->k; k += D::GROUP) {
            QG_UNROLL for (int p = 0; p < PANELS; p++) decoder[p].at(k);
            qg_fma_step<D, MR, PANELS, SUMS> body{decoder, x + k, stride, sum};
            qg_steps<0, D::GROUP>(body, D::GROUP);
        }
    if (k < job->k) {  // a short last group: decoded to memory, column by column, to keep the code small
        float last[PANELS][D::GROUP * 16];
        for (int p = 0; p < PANELS; p++) qg_decode_panel<D>(job, p ? next : panel, k, job->k - k, last[p]);
        for (int64_t j = 0; k + j < job->k; j++)
            QG_UNROLL for (int i = 0; i < MR; i++)
                QG_UNROLL for (int p = 0; p < PANELS; p++)
                    sum[i][p][0] = vfma(vset(x[i * stride + k + j]), vload(last[p] + j * 16), sum[i][p][0]);
    }
    QG_UNROLL for (int i = 0; i < MR; i++)
        QG_UNROLL for (int p = 0; p < PANELS; p++) vstore(tile + (i * QG_NP + p) * 16, qg_sum<SUMS>(sum[i][p]));
    if constexpr (BY_CODES)
        for (int i = 0; i < MR; i++) {  // a sum of codes may be no number where that of elements is one: 0 * infinity
            const vf found = vload(tile + i * QG_NP * 16);
            if (vsum(found - found) != 0.0f)
                qg_few_panels<typename qg_elements<D>::type, 1, false>(
                    job, {x + i * stride, stride, nullptr, 0}, panel, next, tile + i * QG_NP * 16);
        }
}

// One unit of at most QG_NP panels; `next` repeats the last panel where the unit is short.
template <class D, int MR> QC_INLINE void qg_few_rows(
    const qg_job* job, int64_t count, const qg_few_x& rows, int64_t panel, int64_t next, float* tile) {
    if constexpr (MR > 0) {
        if (count != MR) return qg_few_rows<D, MR - 1>(job, count, rows, panel, next, tile);
        qg_few_panels<D, MR>(job, rows, panel, next, tile);
        if (qg_few_shape<D, MR>::PANELS < QG_NP && next != panel)
            qg_few_panels<D, MR>(job, rows, next, next, tile + 16);
    }
}

// Rows [m0, m0 + count) as fp32: where they lie, or converted.
QC_INLINE qg_few_x qg_load_few(const qg_job* job, int64_t m0, int64_t count, float* converted) {
    if (!job->load_x) return {(const float*)job->x + m0 * job->x_row, job->x_row, nullptr, 0};
    const int64_t stride = (job->k + 15) / 16 * 16;
    job->load_x(job, m0, count, 0, job->k, converted, stride);
    return {converted, stride, nullptr, 0};
}

// Task t takes the units [U * t / T, U * (t + 1) / T) of QG_NP panels. `multiply(panel, end)` puts the sums of `count`
// rows times panels [panel, end) of a unit into `tile`; they are rows [m0, m0 + count) of the result, finished here.
template <class F> QC_INLINE void qg_each_unit(
    const qg_job* job, int64_t task, int64_t m0, int64_t count, const float* tile, const F& multiply) {
    const int64_t panels = (job->n + 15) / 16, units = qg_up(panels, QG_NP);
    const int64_t last = qc_share(units, task + 1, job->tasks);
    for (int64_t u = qc_share(units, task, job->tasks); u < last; u++) {
        const int64_t panel = u * QG_NP, n0 = panel * 16;
        multiply(panel, qc_min(panel + QG_NP, panels));
        job->finish(job, tile, QG_NP * 16, m0, count, n0, qc_min(job->n - n0, QG_NP * 16));
    }
}

// At most MAX rows at a time.
template <class D, int MAX> struct qg_few_task {
    static void run(void* arg, int64_t task, char* scratch);
};
template <class D, int MAX> void qg_few_task<D, MAX>::run(void* arg, int64_t task, char* scratch) {
    const qg_job* job = (const qg_job*)arg;
    float* const tile = (float*)scratch;
    float* const totals = tile + MAX * QG_NP * 16;
    float* const converted = totals + qg_most_totals(job->k) + qg_most_raised(job->k, MAX);
    for (int64_t m0 = 0; m0 < job->m; m0 += MAX) {
        const int64_t count = qc_min(job->m - m0, MAX);
        const qg_few_x x = qg_load_few(job, m0, count, converted);
        const qg_few_x rows = qg_add_up<D>(x.rows, x.stride, count, job->k, totals);
        qg_each_unit(job, task, m0, count, tile, [&](int64_t panel, int64_t end) {
            qg_few_rows<D, MAX>(job, count, rows, panel, end - 1, tile);
        });
    }
}

constexpr int64_t qg_few_scratch(int64_t k, int64_t rows, bool converts) {
    const int64_t row = QG_NP * 16 + (converts ? (k + 15) / 16 * 16 : 0);
    return 4 * (rows * row + qg_most_totals(k) + qg_most_raised(k, rows));
}

// `most` tasks, or fewer.
QC_COLD void qg_share_few(
    qc_ctx* ctx, qg_job* job, void (*run)(void* job, int64_t task, char* scratch), int64_t most = INT64_MAX) {
    const int64_t panels = (job->n + 15) / 16, units = (panels + QG_NP - 1) / QG_NP;
    const int64_t worth = panels * job->k * QC_REGS * (job->m + 3) / 2 / QG_TASK;
    job->tasks = ctx->num_threads > 1 ? qc_min(qc_min(worth, units), qc_min(most, 4 * (int64_t)ctx->num_threads)) : 1;
    if (job->tasks > 1) return ctx->parallel(ctx, job->tasks, run, job);
    job->tasks = 1;
    run(job, 0, ctx->scratch);
}

// Decoder D as up to MAX rows walk it: codes with a plane of one bit, of whose word a decoder's group has a part, twice
// as many columns at a time where a scale has as many, and for one row a whole word's, so that words are shifted less.
// More than one row take too long to compile with whole words.
template <class D, int MAX> struct qg_few_decoder { typedef D type; };
template <class W, int MAX> struct qg_few_decoder<qg_coded<W>, MAX> {
    static constexpr int GROUP = MAX == 1 ? 32 : 16;
    static constexpr bool WIDER = qg_coded<W>::SUMMED && qg_coded<W>::IN_PLANES && W::BITS % 2 == 1 &&
                                  W::COVERS % 32 == 0 && W::GROUP < GROUP && qg_codes_of<W>::PLANES;
    struct wider : W { static constexpr int GROUP = qg_few_decoder::GROUP; };
    typedef std::conditional_t<WIDER, qg_coded<wider>, qg_coded<W>> type;
};

// Decoder D with its values in instructions that not every processor has, if they have such a form.
template <class D, class = void> struct qg_faster_of { typedef void type; };
template <class W> struct qg_faster_of<qg_coded<W>, decltype((void)sizeof(typename W::values::faster))> {
    struct weight : W {
        typedef typename W::values::faster values;
        typedef W slower;
    };
    typedef qg_coded<weight> type;
    // Values that are multiplied by a UNIT pay where they are summed before.
    static constexpr bool PAYS = W::GROUP % W::values::FASTER_GROUP == 0 &&
                                 (W::values::faster::UNIT == 1.0f || qg_coded<W>::SUMMED);
    static constexpr int ROWS = PAYS ? W::values::FASTER_ROWS : 0;
    static bool runs() {
#if defined(QG_NOT_FASTER)  // tests leave it out
        return false;
#else
        return W::values::runs();
#endif
    }
};

// The second form of decoder D that only kernels for one row compile, if there is one.
template <class D, class = void> struct qg_alone_of { typedef void type; };
template <class W> struct qg_alone_of<qg_coded<W>, decltype((void)sizeof(typename W::values::of_one_row))> {
    struct weight : W {
        typedef typename W::values::of_one_row values;
        typedef W slower;
    };
    static constexpr bool PAYS = qg_coded<W>::SUMMED && W::GROUP % weight::values::PER == 0;
    typedef std::conditional_t<PAYS, qg_coded<weight>, void> type;
    static bool runs() {
#if defined(QG_NOT_FASTER)
        return false;
#else
        return W::values::runs_alone();
#endif
    }
};

#if defined(QC_AVX512)
// The bits of mantissa of D's 8-bit floats, else 0.
template <class V> static constexpr int qg_mantissa_of = 0;
template <int BITS> static constexpr int qg_mantissa_of<qg_floats<BITS>> = BITS;
template <int BITS> static constexpr int qg_mantissa_of<qg_floats_by_bytes<BITS>> = BITS;
template <class D> static constexpr int qg_mantissa = 0;
template <class W> static constexpr int qg_mantissa<qg_coded<W>> = qg_mantissa_of<typename W::values>;
#endif

// The task for up to MAX rows at a time, of m: `Task<D, MAX>::run`, with D's faster form where the processor has it and
// a second copy of the loops is worth its compile.
template <class D, int MAX, template <class, int> class Task> QC_INLINE auto qg_task_of(int64_t m) {
#if defined(QC_AVX512)
    typedef typename qg_few_decoder<D, MAX>::type walk;
    typedef typename qg_faster_of<walk>::type faster;
    typedef typename qg_alone_of<walk>::type alone;
    if constexpr (MAX == 1 && !std::is_void_v<alone>)
        if (qg_alone_of<walk>::runs()) return Task<alone, 1>::run;
    if constexpr (!std::is_void_v<faster>) {
        constexpr int ROWS = qg_faster_of<walk>::ROWS < MAX ? qg_faster_of<walk>::ROWS : MAX;
        if constexpr (ROWS > 1 || ROWS == MAX)
            if ((ROWS == MAX || m <= ROWS) && qg_faster_of<walk>::runs()) return Task<faster, ROWS>::run;
    }
    return Task<walk, MAX>::run;
#else
    (void)m;
    return Task<D, MAX>::run;
#endif
}

template <class D, int MAX> static void qg_run_few(qc_ctx* ctx, qg_job* job) {
    qg_share_few(ctx, job, qg_task_of<D, MAX, qg_few_task>(job->m));
}
