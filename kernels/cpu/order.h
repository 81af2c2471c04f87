// Sorting and top-k of one row, in place in the row of indices that is the result: no memory beside it.
//
// The order is total (equal values by index), so any algorithm gives the same answer: NaN counts as the largest value.
#pragma once
#include "scalar.h"

// One row: element i is x[i * step], and result k is index[k * to].
template <class T, bool DESCENDING> struct qc_order {
    const T* x;
    int64_t step;
    int64_t* index;
    int64_t to;

    bool precedes(int64_t i, int64_t j) const {  // whether element i comes before element j
        const auto a = qc_load(x + i * step), b = qc_load(x + j * step);
        const bool less = a == a && (b != b || a < b), greater = b == b && (a != a || b < a);
        const bool first = DESCENDING ? greater : less, second = DESCENDING ? less : greater;
        return first || (!second && i < j);
    }

    // Restores a heap of `count` entries, the one that comes last on top, below a new entry at `hole`.
    void sift(int64_t hole, int64_t entry, int64_t count) const {
        for (int64_t child = 2 * hole + 1; child < count; child = 2 * hole + 1) {
            if (child + 1 < count && precedes(index[child * to], index[(child + 1) * to])) child++;
            if (!precedes(entry, index[child * to])) break;
            index[hole * to] = index[child * to];
            hole = child;
        }
        index[hole * to] = entry;
    }

    // The first `count` of `length` elements in order.
    void run(int64_t length, int64_t count) const {
        for (int64_t k = 0; k < count; k++) index[k * to] = k;
        for (int64_t k = count / 2; k-- > 0;) sift(k, index[k * to], count);
        for (int64_t i = count; i < length; i++)
            if (precedes(i, index[0])) sift(0, i, count);
        for (int64_t k = count - 1; k > 0; k--) {
            const int64_t last = index[k * to];
            index[k * to] = index[0];
            sift(0, last, k);
        }
    }
};
