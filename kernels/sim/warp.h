// Threads together: the block's barrier, the warp's collectives, and what happens when not everyone comes.
#pragma once
#include "schedule.h"

namespace qs {

// --- shared memory's ranges ------------------------------------------------------------------------------------------

constexpr uint64_t SHARED_RED_ZONE = 128;

inline void* shared_range(int line, const char* name, int64_t offset, int64_t count, int64_t size, int64_t alignment) {
    Block& b = *S.block;
    const int64_t bytes = count * size;
    for (const SharedRange& r : b.ranges)
        if (r.offset == offset && r.size == bytes && strcmp(r.name, name) == 0) return (void*)r.at;
    if (offset < 0 || bytes < 0 || (uint64_t)(offset + bytes) > S.launch.shared_bytes) {
        add_site("declared", 0, line);
        fail("out-of-bounds", "shared '%s' takes bytes %lld to %lld, but the block has %llu bytes of shared memory",
             name, (long long)offset, (long long)(offset + bytes), (unsigned long long)S.launch.shared_bytes);
    }
    if (offset % alignment) {
        add_site("declared", 0, line);
        fail("misaligned", "shared '%s' begins at byte %lld, but its type needs multiples of %lld", name,
             (long long)offset, (long long)alignment);
    }
    for (const SharedRange& r : b.ranges)
        if (offset < r.offset + r.size && r.offset < offset + bytes) {
            add_site("declared", 0, line);
            fail("out-of-bounds", "shared '%s' (bytes %lld to %lld) overlaps shared '%s' (bytes %lld to %lld)", name,
                 (long long)offset, (long long)(offset + bytes), r.name, (long long)r.offset,
                 (long long)(r.offset + r.size));
        }
    // The same place within 1024 bytes as declared, so that alignment is as on the device; a red zone on either side.
    const uint64_t start = (b.shared_used + SHARED_RED_ZONE + 1023) / 1024 * 1024 + (uint64_t)offset % 1024;
    if (start + (uint64_t)bytes + SHARED_RED_ZONE > b.shared_size || b.ranges.size() >= 254) {
        add_site("declared", 0, line);
        fail("bad-launch", "too many ranges of shared memory");
    }
    b.ranges.push_back({name, offset, bytes, (uintptr_t)b.shared + start});
    memset(b.shared + start, 0xff, (size_t)bytes);
    if (S.checked) {
        const uint64_t end = start + (uint64_t)bytes;
        for (uint64_t w = start / 4; w < (end + 3) / 4; ++w) {
            b.shadow.words[w].range = (uint8_t)b.ranges.size();
            b.shadow.words[w].split = (w + 1) * 4 > end || w * 4 < start ? RANGE_END : WHOLE;
        }
    }
    b.shared_used = start + (uint64_t)bytes;
    return b.shared + start;
}

// --- barrier ---------------------------------------------------------------------------------------------------------

inline void advance_time(Block& b) {
    S.stamp += (Stamp)1 << TIME_SHIFT;
    if (++b.time >= TIME_LIMIT - 1)
        fail("timeout", "%s synchronised more than two million times", name_of_block(b.number));
}

inline int barrier(int line, int reduction, int value) {
    Thread* t = S.thread;
    Block& b = *S.block;
    if (b.exited) {
        add_site(text("%s waits", name_of(t)), 0, line);
        fail("exited-before-barrier", "%s is at a barrier, but %s has returned from the kernel (%d of %d threads have)",
             name_of(t), name_of_thread(b.first_exited), b.exited, b.threads);
    }
    if (!b.at_barrier) {
        b.barrier_line = line, b.barrier_reduction = reduction, b.barrier_thread = t->id;
        b.barrier_value = reduction == 2;
    } else if (b.barrier_line != line || b.barrier_reduction != reduction) {
        add_site(text("%s waits", name_of(b.number, b.barrier_thread)), 0, b.barrier_line);
        add_site(text("%s waits", name_of(t)), 0, line);
        fail("barrier-divergence", "threads of one block wait at different barriers: %s on line %d, %s on line %d",
             name_of(b.number, b.barrier_thread), b.barrier_line, name_of_thread(t->id), line);
    }
    if (reduction == 1) b.barrier_value |= value;
    if (reduction == 2) b.barrier_value &= value;
    if (reduction == 3) b.barrier_value += value;
    t->waiting_line = line;
    t->warp->at_barrier |= 1u << t->lane;
    t->polled = 0;
    if (++b.at_barrier < b.threads) {
        wait();
        return t->barrier_result;
    }
    // The last one opens it.
    note_progress();
    b.at_barrier = 0;
    advance_time(b);
    b.ordered = b.first | (Stamp)b.time << TIME_SHIFT;
    for (int w = 0; w < b.warps; ++w) {
        make_ready(&b.warp[w], b.warp[w].at_barrier);
        b.warp[w].at_barrier = 0;
        b.warp[w].ordered_time = b.time;
    }
    bool learnt = false;
    for (int i = 0; i < b.threads; ++i) {
        b.thread[i].barrier_result = b.barrier_value;
        learnt |= (bool)b.thread[i].acquired;
    }
    if (learnt) {
        if (!b.known) b.known = std::make_unique<Knowledge>();
        for (int i = 0; i < b.threads; ++i)
            if (b.thread[i].acquired) b.known->merge(*b.thread[i].acquired), b.thread[i].acquired.reset();
    }
    wait();
    return t->barrier_result;
}

// --- warp collectives ------------------------------------------------------------------------------------------------

inline const char* name_of_collective(Collective kind) {
    static const char* const names[] = {"__syncwarp", "a shuffle", "a vote", "ldmatrix", "mma", "wgmma"};
    return names[kind];
}

inline void mismatch(const Thread* t, const Arrival& mine, const Thread* other, const Arrival& theirs) {
    add_site(text("%s: %s, mask 0x%08x", name_of(t), name_of_collective(mine.kind), mine.mask), 0, mine.line);
    add_site(text("%s: %s, mask 0x%08x", name_of(other), name_of_collective(theirs.kind), theirs.mask), 0, theirs.line);
    fail("shuffle-mask",
         "lanes of one warp that name each other do not do the same: %s is at %s with mask 0x%08x on line %d, %s at "
                         "%s with mask 0x%08x on line %d",
         name_of(t), name_of_collective(mine.kind), mine.mask, mine.line, name_of_thread(other->id),
         name_of_collective(theirs.kind), theirs.mask, theirs.line);
}

void perform(Warp& w, uint32_t lanes);

// True when everyone that the mask names is here. Lanes that a partial warp never had are not waited for, nor at
// __syncwarp lanes that have returned; a value from such a lane would be undefined, so nothing else may name one.
inline bool complete(Warp& w, int lane) {
    const uint32_t needed = w.arrivals[lane].mask & w.alive;
    return (w.waiting & needed) == needed;
}

// After a lane of the warp has returned: whoever waited only for it goes on.
inline void release_waiting(Warp& w) {
    for (uint32_t rest = w.waiting; rest;) {
        const int lane = __builtin_ctz(rest);
        rest &= rest - 1;
        if (!(w.waiting >> lane & 1) || !complete(w, lane)) continue;
        const uint32_t lanes = w.arrivals[lane].mask & w.alive;
        perform(w, lanes);
        w.waiting &= ~lanes, w.group &= ~lanes;
        make_ready(&w, lanes);
        note_progress();
    }
}

// Whoever waits for this lane while this lane waits for them must do the same.
inline void compare_with_waiting(const Warp& w, const Thread* t, uint32_t others) {
    const Arrival& mine = w.arrivals[t->lane];
    for (uint32_t rest = others; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        const Arrival& theirs = w.arrivals[lane];
        if (!(theirs.mask >> t->lane & 1)) continue;  // busy with a group of its own; it may come here next
        const bool same_place = mine.kind == SYNCWARP || theirs.line == mine.line;
        if (theirs.mask != mine.mask || theirs.kind != mine.kind || theirs.detail != mine.detail || !same_place)
            mismatch(t, mine, &t->block->thread[(&w - t->block->warp) * WARP + lane], theirs);
    }
}

inline void arrive(Collective kind, int line, uint32_t mask, void* data, uint64_t detail) {
    Thread* t = S.thread;
    Warp& w = *t->warp;
    Arrival& mine = w.arrivals[t->lane];
    mine = {kind, line, mask, data, detail};
    t->polled = 0;
    if (!(mask >> t->lane & 1)) {
        add_site(name_of(t), 0, line);
        fail("shuffle-mask", "%s (lane %d) calls %s with the mask 0x%08x, which does not name it", name_of(t), t->lane,
             name_of_collective(kind), mask);
    }
    if (const uint32_t gone = mask & w.born & ~w.alive; gone && kind != SYNCWARP) {
        add_site(name_of(t), 0, line);
        fail("shuffle-mask", "%s calls %s with the mask 0x%08x, but lane %d has returned from the kernel", name_of(t),
             name_of_collective(kind), mask, __builtin_ctz(gone));
    }
    const uint32_t me = 1u << t->lane, others = w.waiting & mask;
    const Arrival& known = w.arrivals[w.leader];
    if (others && !(others & ~w.group) && known.mask == mask && known.kind == kind && known.detail == detail &&
        (known.line == line || kind == SYNCWARP)) {
        w.group |= me;
    } else {
        compare_with_waiting(w, t, others);
        w.group = me, w.leader = t->lane;
    }
    w.waiting |= me;
    t->waiting_line = line;
    if (!complete(w, t->lane)) {
        wait();
        return;
    }
    note_progress();
    const uint32_t lanes = mask & w.alive;
    perform(w, lanes);
    w.waiting &= ~lanes, w.group &= ~lanes;
    if (next_random() & 1) {
        make_ready(&w, lanes & ~me);
    } else {
        make_ready(&w, lanes);
        wait();
    }
}

struct ShuffleData {
    uint64_t value, result;
    int operand, failed_source;
};
struct MatrixData {
    const char* row;
    uint32_t r[4];
};
struct ProductData {
    uint32_t a[4], b[2];
    float d[4];
};

template <class To, class From> To as(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &v, sizeof to);
    return to;
}

inline void perform_syncwarp(Warp& w, uint32_t lanes) {
    Block& b = *S.block;
    advance_time(b);
    if (lanes == w.born) {  // lanes that have returned met nobody here
        w.ordered_time = b.time;
        return;
    }
    if (!w.partial) {
        w.partial = true;
        for (auto& row : w.met)
            for (uint32_t& time : row) time = w.ordered_time;
    }
    // Each lane of the group learns what any of them knew, and that all of them came this far.
    uint32_t together[WARP];
    for (int j = 0; j < WARP; ++j) {
        together[j] = w.ordered_time;
        for (uint32_t rest = lanes; rest; rest &= rest - 1)
            together[j] = std::max(together[j], w.met[__builtin_ctz(rest)][j]);
        if (lanes >> j & 1) together[j] = b.time;
    }
    for (uint32_t rest = lanes; rest; rest &= rest - 1) memcpy(w.met[__builtin_ctz(rest)], together, sizeof together);
}

inline void perform_shuffle(Warp& w, uint32_t lanes) {
    for (uint32_t rest = lanes; rest; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        auto& mine = *(ShuffleData*)w.arrivals[lane].data;
        const int kind = (int)(w.arrivals[lane].detail & 7), width = (int)(w.arrivals[lane].detail >> 3);
        const int first = lane & ~(width - 1), last = first + width - 1;
        int source = lane;
        if (kind == 0) source = first + (mine.operand & (width - 1));
        if (kind == 1) source = lane - mine.operand < first ? lane : lane - mine.operand;
        if (kind == 2) source = lane + mine.operand > last ? lane : lane + mine.operand;
        if (kind == 3) source = (lane ^ mine.operand) > last ? lane : lane ^ mine.operand;
        mine.failed_source = -1;
        if (lanes >> (source & 31) & 1)
            mine.result = ((ShuffleData*)w.arrivals[source & 31].data)->value;
        else
            mine.failed_source = source & 31;
    }
}

inline void perform_vote(Warp& w, uint32_t lanes) {
    uint32_t ballot = 0;
    for (uint32_t rest = lanes; rest; rest &= rest - 1)
        ballot |= (uint32_t)(*(uint64_t*)w.arrivals[__builtin_ctz(rest)].data != 0) << __builtin_ctz(rest);
    for (uint32_t rest = lanes; rest; rest &= rest - 1) *(uint64_t*)w.arrivals[__builtin_ctz(rest)].data = ballot;
}

inline void perform_ldmatrix(Warp& w) {
    const int matrices = (int)(w.arrivals[0].detail & 7);
    const bool transposed = w.arrivals[0].detail >> 3;
    for (int i = 0; i < matrices; ++i) {
        uint16_t m[8][8];
        for (int r = 0; r < 8; ++r) memcpy(m[r], ((MatrixData*)w.arrivals[8 * i + r].data)->row, 16);
        for (int lane = 0; lane < WARP; ++lane) {
            const int g = lane / 4, t = lane % 4 * 2;
            const uint32_t low = transposed ? m[t][g] : m[g][t], high = transposed ? m[t + 1][g] : m[g][t + 1];
            ((MatrixData*)w.arrivals[lane].data)->r[i] = low | high << 16;
        }
    }
}

// 16-bit floats to fp32, exactly.
inline void widen(const uint16_t* from, float* to, int count, bool bf16) {
    uint32_t bits[256];
    if (bf16) {
        for (int i = 0; i < count; ++i) bits[i] = (uint32_t)from[i] << 16;
    } else {
        for (int i = 0; i < count; ++i) {
            const uint32_t rest = from[i] & 0x7fffu, shifted = rest << 13;
            const float scaled = as<float>(shifted) * as<float>(0x77800000u);  // * 2^112: subnormals come right
            bits[i] = (rest >= 0x7c00u ? 0x7f800000u | shifted : as<uint32_t>(scaled)) | (from[i] & 0x8000u) << 16;
        }
    }
    memcpy(to, bits, sizeof(float) * (size_t)count);
}

// Signed bytes, 16 x 32 by 32 x 8; sums wrap.
inline void perform_mma_s8(Warp& w) {
    int8_t a[16][32], b[8][32];
    for (int lane = 0; lane < WARP; ++lane) {
        const ProductData& p = *(ProductData*)w.arrivals[lane].data;
        const int g = lane / 4, t = lane % 4 * 4;
        for (int i = 0; i < 4; ++i) memcpy(&a[g + i % 2 * 8][t + i / 2 * 16], &p.a[i], 4);
        for (int i = 0; i < 2; ++i) memcpy(&b[g][t + i * 16], &p.b[i], 4);
    }
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i) {
            float& d = ((ProductData*)w.arrivals[lane].data)->d[i];
            uint32_t sum = as<uint32_t>(d);
            const int8_t* const row = a[lane / 4 + i / 2 * 8];
            const int8_t* const column = b[lane % 4 * 2 + i % 2];
            for (int k = 0; k < 32; ++k) sum += (uint32_t)(row[k] * column[k]);
            d = as<float>(sum);
        }
}

// Sums in the order of the depth. The products are exact in fp32, so that this is what fused additions give as well.
inline void perform_mma(Warp& w) {
    typedef float Row __attribute__((vector_size(32)));
    if (w.arrivals[0].detail & 2) return perform_mma_s8(w);
    const bool bf16 = w.arrivals[0].detail & 1;
    uint16_t a16[16][16], b16[16][8];
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const ProductData& p = *(ProductData*)w.arrivals[lane].data;
        const int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            a16[g + i % 2 * 8][t + i / 2 * 8] = (uint16_t)p.a[i];
            a16[g + i % 2 * 8][t + i / 2 * 8 + 1] = (uint16_t)(p.a[i] >> 16);
            d[g + i / 2 * 8][t + i % 2] = p.d[i];
        }
        for (int i = 0; i < 2; ++i) {
            b16[t + 8 * i][g] = (uint16_t)p.b[i];
            b16[t + 8 * i + 1][g] = (uint16_t)(p.b[i] >> 16);
        }
    }
    widen(a16[0], a[0], 256, bf16);
    widen(b16[0], b[0], 128, bf16);
    Row columns[16];
    memcpy(columns, b, sizeof columns);
    for (int i = 0; i < 16; ++i) {
        Row sum;
        memcpy(&sum, d[i], sizeof sum);
        for (int k = 0; k < 16; ++k) sum += a[i][k] * columns[k];
        memcpy(d[i], &sum, sizeof sum);
    }
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i)
            ((ProductData*)w.arrivals[lane].data)->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

void perform_wgmma(Warp& w);

inline void perform(Warp& w, uint32_t lanes) {
    switch (w.arrivals[__builtin_ctz(lanes)].kind) {
        case SYNCWARP: return perform_syncwarp(w, lanes);
        case SHUFFLE: return perform_shuffle(w, lanes);
        case VOTE: return perform_vote(w, lanes);
        case LDMATRIX: return perform_ldmatrix(w);
        case MMA: return perform_mma(w);
        case WGMMA: return perform_wgmma(w);
    }
}

// ldmatrix and mma are .aligned: the whole warp, and nobody gone.
inline void whole_warp(const char* what, int line) {
    if (S.thread->warp->alive == ~0u) return;
    add_site(name_of(S.thread), 0, line);
    fail("shuffle-mask", "%s in %s needs all 32 lanes of the warp; alive are 0x%08x", what, name_of(S.thread),
         S.thread->warp->alive);
}

// --- ends ------------------------------------------------------------------------------------------------------------

inline void exit_thread() {
    Thread* t = S.thread;
    Block& b = *S.block;
    note_progress();
    if (b.at_barrier) {
        add_site(text("%s waits", name_of(b.number, b.barrier_thread)), 0, b.barrier_line);
        fail("exited-before-barrier",
             "%s returned from the kernel while %s waits at a barrier (%d of %d threads are there)",
             name_of(t), name_of_thread(b.barrier_thread), b.at_barrier, b.threads);
    }
    if (!b.exited++) b.first_exited = t->id;
    t->warp->alive &= ~(1u << t->lane);
    for (uint32_t rest = t->warp->waiting; rest; rest &= rest - 1) {
        const Arrival& a = t->warp->arrivals[__builtin_ctz(rest)];
        if (a.kind == SYNCWARP || !(a.mask >> t->lane & 1)) continue;
        const int waiter = (int)(t->warp - b.warp) * WARP + __builtin_ctz(rest);
        add_site(text("%s waits at %s, mask 0x%08x", name_of(b.number, waiter), name_of_collective(a.kind), a.mask), 0,
                 a.line);
        fail("shuffle-mask", "%s returned from the kernel while %s waits for it at %s with mask 0x%08x on line %d",
             name_of(t), name_of_thread(waiter), name_of_collective(a.kind), a.mask, a.line);
    }
    release_waiting(*t->warp);
    wait();
    __builtin_unreachable();
}

// No thread of the block can ever go on: say who waits for whom.
inline void explain_stuck(Block& b) {
    S.block = &b;
    const Thread* at_barrier = nullptr;
    const Thread* at_collective = nullptr;
    for (int i = 0; i < b.threads; ++i) {
        const Thread& t = b.thread[i];
        if (t.warp->at_barrier >> t.lane & 1 && !at_barrier) at_barrier = &t;
        if (t.warp->waiting >> t.lane & 1 && !at_collective) at_collective = &t;
    }
    if (!at_collective) return record("barrier-divergence", "a block can make no progress at its barrier");
    const Warp& w = *at_collective->warp;
    const Arrival& a = w.arrivals[at_collective->lane];
    add_site(text("%s waits at %s, mask 0x%08x", name_of(at_collective), name_of_collective(a.kind), a.mask), 0,
             a.line);
    const int missing =
        __builtin_ctz(a.mask & w.alive & ~w.waiting ? a.mask & w.alive & ~w.waiting : a.mask & w.waiting);
    const Thread& other = b.thread[(&w - b.warp) * WARP + missing];
    const bool barrier = w.at_barrier >> missing & 1;
    add_site(text("%s waits at %s", name_of(&other), barrier ? "the block's barrier" : "another collective"), 0,
             other.waiting_line);
    if (barrier)
        record("barrier-divergence", "%s waits at %s on line %d for %s, which is at the block's barrier on line %d",
               name_of(at_collective), name_of_collective(a.kind), a.line, name_of_thread(other.id),
               other.waiting_line);
    else
        record("shuffle-mask", "%s waits at %s with mask 0x%08x on line %d for %s, which never comes",
               name_of(at_collective), name_of_collective(a.kind), a.mask, a.line, name_of_thread(other.id));
}

}  // namespace qs
