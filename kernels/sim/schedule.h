// Who runs next: a warp runs while it has a lane that can, in random order; a block runs until it is done or all of it
// waits.
//
// Threads that poll (an acquiring load, a compare-and-swap, a volatile read of the same address again) step back until
// no other thread of the block can run; then further blocks become resident, up to the launch's limit, so that a grid
// may wait for itself as on a device. If all resident threads poll for long, the launch has a finding.
#pragma once
#include <numeric>

#include "state.h"

namespace qs {

inline void enter(Thread* t) {
    S.thread = t;
    S.stack_base = (uintptr_t)t->stack;
    S.stamp = t->block->first | (Stamp)t->block->time << TIME_SHIFT | (Stamp)t->id << 1;
    t->block->current_warp = (int)(t->warp - t->block->warp);
}

// The next thread of the current block that can run, or null.
inline Thread* pick() {
    Block& b = *S.block;
    Warp* w = &b.warp[b.current_warp];
    const uint64_t r = next_random();
    if (!w->ready || (r & 7) == 0) {
        uint32_t candidates = b.ready_warps;
        if (!candidates) return nullptr;
        const int turn = (int)(r >> 8 & 31);
        const uint32_t turned = turn ? candidates >> turn | candidates << (32 - turn) : candidates;
        w = &b.warp[(__builtin_ctz(turned) + turn) & 31];
    }
    const int turn = (int)(r >> 16 & 31);
    const uint32_t turned = turn ? w->ready >> turn | w->ready << (32 - turn) : w->ready;
    const int lane = (__builtin_ctz(turned) + turn) & 31;
    w->ready &= ~(1u << lane);
    if (!w->ready) b.ready_warps &= ~(1u << (w - b.warp));
    return &b.thread[(w - b.warp) * WARP + lane];
}

inline void make_ready(Warp* w, uint32_t lanes) {
    if (!lanes) return;
    w->ready |= lanes;
    S.block->ready_warps |= 1u << (w - S.block->warp);
}

// Leaves the running thread, which has already noted what it waits for, and comes back when it may go on.
inline void wait() {
    Thread* self = S.thread;
    Thread* next = pick();
    if (next == self) return;
    if (!next) {
        switch_fiber(&self->fiber, &S.main);
    } else {
        enter(next);
        switch_fiber(&self->fiber, &next->fiber);
    }
}

inline void note_progress() { ++S.progress; }

// The thread found nothing yet where it polls.
inline void poll(int line, uint64_t pc) {
    Thread* t = S.thread;
    t->waiting_line = line, t->waiting_pc = pc;
    t->warp->spinning |= 1u << t->lane;
    wait();
}

void exit_thread();

inline void fiber_main() {
    S.function(S.args.data());
    if (!S.thread->waited)  // a kernel behind this one would not wait for those before it
        fail("before-wait", "%s ends without qc_wait_for_kernels()", name_of(S.thread));
    exit_thread();
    __builtin_unreachable();
}

inline bool check_time() {
    const double t = now();
    if (t - S.began > S.launch.time_limit) {
        record("timeout", "the launch ran longer than its limit of %.3g s", S.launch.time_limit);
        return false;
    }
    return true;
}

// Now and then from the access hooks: a thread that loops over plain memory lets others run, and the clock is read.
inline void slice(uint64_t pc, int line) {
    S.slice_at = S.accesses + SLICE;
    if (S.pause_at) S.pause_at = S.slice_at;
    if (S.failed) return;
    Thread* t = S.thread;
    if (!check_time()) {
        add_site(text("%s runs", name_of(t)), pc, line);
        switch_fiber(&t->fiber, &S.main);
    }
    make_ready(t->warp, 1u << t->lane);
    wait();
}

// A block's place: stacks, shared memory, shadow. Kept for the blocks that come after it.
inline bool prepare_slot(Block& b, int threads, uint64_t shared_bytes) {
    if (b.stack_count < threads) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        if (b.stacks) munmap(b.stacks, (size_t)b.stack_count * (STACK_BYTES + page));
        b.stack_count = std::max(threads, 256);
        b.stacks = map_stacks((size_t)b.stack_count);
        if (!b.stacks) return b.stack_count = 0, false;
    }
    const uint64_t size = shared_bytes * 2 + 65536;  // red zones between the ranges
    if (b.shared_size < size) {
        if (b.shared) munmap(b.shared, b.shared_size), b.shadow.unmap();
        b.shared = map_zeroed<char>(size);
        b.shared_size = size;
        if (!b.shared || !b.shadow.map((uintptr_t)b.shared, size, false)) return b.shared_size = 0, false;
    }
    return true;
}

// Shared memory as it is before a block declares ranges of it. Blocks of one launch may declare different ones.
inline void forget_shared(Block& b) {
    if (b.shared_size)
        for (uint64_t w = 0; w < b.shared_used / 4 + 1; ++w) b.shadow.words[w].range = 0;
    b.ranges.clear(), b.shared_used = 0;
}

inline void start_block(Block& b, uint64_t number) {
    const uint64_t gx = S.launch.grid[0], gy = S.launch.grid[1];
    b.number = number;
    b.index = number % gx | (number / gx % gy) << 31 | (number / gx / gy) << 47;
    b.serial = S.next_serial++;
    b.time = 0;
    b.first = b.ordered = (Stamp)b.serial << SERIAL_SHIFT;
    b.threads = (int)(S.launch.block[0] * S.launch.block[1] * S.launch.block[2]);
    b.warps = (b.threads + WARP - 1) / WARP;
    b.exited = b.at_barrier = 0;
    b.barrier_line = 0;
    b.ready_warps = b.warps == 32 ? ~0u : (1u << b.warps) - 1;
    b.current_warp = (int)(next_random() % (uint64_t)b.warps);
    b.resident = true;
    b.known.reset();
    forget_shared(b);  // each declaration fills its range with NaNs
    for (int w = 0; w < b.warps; ++w) {
        Warp& warp = b.warp[w];
        const int lanes = std::min(WARP, b.threads - w * WARP);
        warp.born = warp.alive = warp.ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warp.spinning = warp.at_barrier = warp.waiting = warp.group = 0;
        warp.ordered_time = 0, warp.products = 0;
        warp.partial = false;
    }
    const unsigned bx = S.launch.block[0], by = S.launch.block[1];
    for (int i = 0; i < b.threads; ++i) {
        Thread& t = b.thread[i];
        t.block = &b, t.warp = &b.warp[i / WARP], t.id = i, t.lane = i % WARP;
        t.index = (uint64_t)i % bx | ((uint64_t)i / bx % by) << 16 | ((uint64_t)i / bx / by) << 32;
        t.polled = 0, t.group = 0, t.waited = !S.launch.overlaps;
        t.copies.clear();
        t.products_group = t.fenced_async = 0, t.fenced_wgmma = false;
        t.products.clear(), t.sums.clear();
        if (t.acquired || t.seen_relaxed || t.fenced) t.acquired.reset(), t.seen_relaxed.reset(), t.fenced.reset();
        t.stack = stack_of(b.stacks, (size_t)i);
        // Stacks lie a fixed distance apart: without the offset their tops would share a few sets of the first cache.
        prepare_fiber(&t.fiber, t.stack - (size_t)(i % 61) * 64, fiber_main);
    }
    note_progress();
}

inline bool any_ready(const Block& b) { return b.ready_warps != 0; }
inline bool any_spinning(const Block& b) {
    for (int w = 0; w < b.warps; ++w)
        if (b.warp[w].spinning) return true;
    return false;
}

void explain_stuck(Block& b);
void finish_block(Block& b);

inline void enter_block(Block& b) {
    S.block = &b;
    S.shared_base = (uintptr_t)b.shared;
    S.shared_bytes = b.shared_size;
}

inline void run_block(Block& b) {
    enter_block(b);
    if (Thread* first = pick()) {
        enter(first);
        switch_fiber(&S.main, &first->fiber);
    }
}

inline void explain_spin(uint64_t started, uint64_t total) {
    record("timeout",
           "every resident thread polls and nothing else happened for %.3g s (%llu of %llu blocks have started; "
                      "at most %d are resident at once)",
           S.launch.spin_limit, (unsigned long long)started, (unsigned long long)total, S.launch.resident_blocks);
    int named = 0;
    for (auto& slot : S.slots) {
        if (!slot->resident) continue;
        for (int i = 0; i < slot->threads && named < 2; ++i)
            if (slot->thread[i].warp->spinning >> slot->thread[i].lane & 1) {
                add_site(text("%s polls", name_of(&slot->thread[i])), slot->thread[i].waiting_pc,
                         slot->thread[i].waiting_line);
                ++named;
                break;
            }
    }
}

// Blocks of a grid in a drawn order: steps of a length that has no factor in common with their number.
struct BlockOrder {
    uint64_t total, step, at;
    explicit BlockOrder(uint64_t blocks) : total(blocks), step(1), at(next_random() % blocks) {
        if (total >= 3) step = next_random() % total;
        while (step == 0 || std::gcd(step, total) != 1) ++step;
    }
    uint64_t next() { return at = (at + step) % total; }
};

// A slot for one more resident block; null where the launch has as many as it may.
inline Block* vacant_slot() {
    const size_t limit = (size_t)S.launch.resident_blocks;
    for (size_t i = 0; i < std::min(S.slots.size(), limit); ++i)
        if (!S.slots[i]->resident) return S.slots[i].get();
    if (S.slots.size() >= limit) return nullptr;
    S.slots.push_back(std::make_unique<Block>());
    return S.slots.back().get();
}

// All resident blocks poll: they look again.
inline void poll_again() {
    for (auto& slot : S.slots) {
        if (!slot->resident) continue;
        S.block = slot.get();
        for (int w = 0; w < slot->warps; ++w) {
            make_ready(&slot->warp[w], slot->warp[w].spinning);
            slot->warp[w].spinning = 0;
        }
    }
}

// Runs all blocks, in an order that depends on the seed.
inline void run_grid() {
    const uint64_t total = (uint64_t)S.launch.grid[0] * S.launch.grid[1] * S.launch.grid[2];
    const int threads = (int)(S.launch.block[0] * S.launch.block[1] * S.launch.block[2]);
    BlockOrder order(total);
    uint64_t started = 0, finished = 0, last_progress = 0;
    size_t turn = 0;
    while (finished < total && !S.failed) {
        Block* chosen = nullptr;
        for (size_t i = 0; i < S.slots.size() && !chosen; ++i) {
            Block& b = *S.slots[(turn + i) % S.slots.size()];
            if (b.resident && any_ready(b)) chosen = &b, turn = (turn + i) % S.slots.size();
        }
        if (!chosen && started < total && (chosen = vacant_slot())) {
            if (!prepare_slot(*chosen, threads, S.launch.shared_bytes))
                return record("bad-launch", "the host has no memory for one more resident block");
            ++started;
            start_block(*chosen, order.next());
        }
        if (!chosen) {
            const double t = now();
            if (S.progress != last_progress) last_progress = S.progress, S.progressed = t;
            if (t - S.progressed > S.launch.spin_limit) return explain_spin(started, total);
            if (!check_time()) return;
            poll_again();
            turn = (turn + 1) % S.slots.size();
            continue;
        }
        run_block(*chosen);
        if (S.failed) return;
        if (chosen->exited == chosen->threads) {
            finish_block(*chosen);
            chosen->resident = false;
            ++finished;
            note_progress();
        } else if (!any_ready(*chosen) && !any_spinning(*chosen)) {
            return explain_stuck(*chosen);
        }
    }
}

}  // namespace qs
