// What is checked at each access: bounds, declared mode, alignment, initialisation, and order (happens-before).
//
// Two accesses of one byte, one of them a write, by different threads are a race unless something orders them: a
// barrier of their block, a __syncwarp of a group that holds both, or a chain of release and acquire. A shuffle, a
// vote, ldmatrix and mma order nothing, as on the device. The order of execution does not matter: a race is found in
// every order.
#pragma once
#include "warp.h"

namespace qs {

// ATOMIC: read-modify-write and atomic stores; ATOMIC_READ: acquiring and volatile loads; ASYNC: the destination of a
// cp.async
enum Kind { READ, WRITE, ATOMIC, ATOMIC_READ, ASYNC };
constexpr bool is_read(Kind kind) { return kind == READ || kind == ATOMIC_READ; }

// --- describing ------------------------------------------------------------------------------------------------------

inline const char* describe_global(uintptr_t at, uint64_t size) {
    const Range* best = nullptr;
    uint64_t distance = ~0ull;
    for (const Range& r : S.ranges) {
        if (at >= r.low && at < r.low + r.size) {
            const bool over = at + size > r.low + r.size;
            return text("operand '%s' + %llu bytes (it has %llu%s)", r.label, (unsigned long long)(at - r.low),
                        (unsigned long long)r.size, over ? ", the access crosses its end" : "");
        }
        const uint64_t d = at < r.low ? r.low - at : at - (r.low + r.size);
        if (d < distance) distance = d, best = &r;
    }
    const int device = S.memory.device_of(at);
    if (best && distance < 65536 && device == S.launch.device) {
        if (at < best->low)
            return text("%llu bytes before operand '%s'", (unsigned long long)(best->low - at), best->label);
        return text("%llu bytes past the end of operand '%s' (it has %llu)", (unsigned long long)distance, best->label,
                    (unsigned long long)best->size);
    }
    if (const Allocation* a = S.memory.allocation_of(at))
        return text("allocation '%s' of sim:%d + %llu bytes", a->label.c_str(), a->device,
                    (unsigned long long)(at - a->base));
    if (device >= 0)
        return text("address 0x%llx of sim:%d, where nothing is allocated", (unsigned long long)at, device);
    return text("address 0x%llx, which is no device memory", (unsigned long long)at);
}

inline const char* describe_shared(uintptr_t at) {
    const SharedRange* best = nullptr;
    uint64_t distance = ~0ull;
    for (const SharedRange& r : S.block->ranges) {
        if (at - r.at < (uint64_t)r.size)
            return text("shared '%s' + %llu bytes", r.name, (unsigned long long)(at - r.at));
        const uint64_t d = at < r.at ? r.at - at : at - (r.at + (uint64_t)r.size);
        if (d < distance) distance = d, best = &r;
    }
    if (!best) return "shared memory that no QC_SHARED declares";
    if (at < best->at) return text("%llu bytes before shared '%s'", (unsigned long long)distance, best->name);
    return text("%llu bytes past the end of shared '%s' (it has %lld)", (unsigned long long)distance, best->name,
                (long long)best->size);
}

inline const char* verb(Kind kind) {
    return is_read(kind) ? "reads" : kind == ATOMIC ? "updates" : kind == ASYNC ? "copies" : "writes";
}

// --- order -----------------------------------------------------------------------------------------------------------

inline bool lane_ordered(const Warp& w, int mine, int other, uint32_t time) {
    return time < w.ordered_time || (w.partial && time < w.met[mine][other]);
}

// Does the access with this stamp come before what the running thread does now?
__attribute__((noinline)) inline bool ordered_slowly(Stamp s) {
    const Thread* t = S.thread;
    const Block& b = *t->block;
    if (s < S.launch_first) return true;
    if (serial_of(s) != b.serial) {
        return (b.known && b.known->orders(s)) || (t->acquired && t->acquired->orders(s));
    }
    if (s < b.ordered) return true;
    const int other = (int)thread_of(s);
    if (other == t->id) return true;
    if (other / WARP == t->id / WARP && lane_ordered(*t->warp, t->lane, other % WARP, time_of(s))) return true;
    return t->acquired && t->acquired->orders(s);
}

inline bool readers_ordered(const Cell& c) {
    const Thread* t = S.thread;
    const Block& b = *t->block;
    if (c.read < S.launch_first) return true;
    switch (c.readers) {
        case ONE_THREAD: return ordered_slowly(c.read);
        case ONE_WARP: {
            if (serial_of(c.read) != b.serial) break;
            if (c.read < b.ordered) return true;
            if ((int)thread_of(c.read) / WARP != t->id / WARP) return false;
            for (uint32_t rest = c.read_lanes & ~(1u << t->lane); rest; rest &= rest - 1)
                if (!lane_ordered(*t->warp, t->lane, __builtin_ctz(rest), time_of(c.read))) return false;
            return true;
        }
        case ONE_BLOCK:
            if (serial_of(c.read) != b.serial) break;
            return c.read < b.ordered;
        default: return b.known || t->acquired;  // who has acquired nothing comes after no other block
    }
    return (b.known && b.known->orders(c.read)) || (t->acquired && t->acquired->orders(c.read));
}

inline void add_watched_sites() {
    const Thread* t = S.thread;
    for (size_t i = S.seen.size(); i-- > 0;) {
        const auto& seen = S.seen[i];
        if (seen.thread == t->id && seen.block == t->block->number) continue;
        add_site(text("%s %s", name_of(seen.block, seen.thread), seen.write ? "wrote" : "read"), seen.pc, seen.line);
        return;
    }
}

struct Access {
    uintptr_t at;
    uint64_t size;
    Kind kind;
    uint64_t pc;
    int line;
    bool shared;
};

[[noreturn]] __attribute__((noinline)) inline void report(const Access& a, const char* finding, const char* detail) {
    const char* where = a.shared ? describe_shared(a.at) : describe_global(a.at, a.size);
    add_site(text("%s %s", name_of(S.thread), verb(a.kind)), a.pc, a.line);
    if (!strcmp(finding, "race")) add_watched_sites();
    S.watched = a.at, S.watched_size = a.size;
    fail(finding, "%s %s %llu bytes at %s: %s", name_of(S.thread), verb(a.kind), (unsigned long long)a.size, where,
         detail);
}

[[noreturn]] __attribute__((noinline)) inline void report_race(const Access& a, Stamp other, const char* did,
                                                               bool several) {
    const Block& b = *S.block;
    const char* who = "a thread of another block";
    if (serial_of(other) == b.serial) {
        who = several ? "several threads of the block" : name_of_thread((int)thread_of(other));
    } else {
        for (const auto& slot : S.slots)
            if (slot->serial == serial_of(other)) who = name_of(slot->number, (int)thread_of(other));
    }
    const bool same_warp = serial_of(other) == b.serial && (int)thread_of(other) / WARP == S.thread->id / WARP;
    const char* missing = serial_of(other) != b.serial ? "nothing orders the two blocks"
                          : same_warp && !several      ? "no __syncwarp and no barrier between them"
                                                       : "no barrier between them";
    report(a, "race", text("%s %s the same byte; %s", who, did, missing));
}

// The order check of one cell. `fresh`: stamps below it never matter (older launches; for shared memory older blocks).
template <Kind kind> inline void check_cell(Cell& c, const Access& a, Stamp mine, Stamp fresh) {
    const Block& b = *S.block;
    if (c.written >= fresh) {
        const bool near = a.shared || serial_of(c.written) == b.serial;
        if (c.pending && near) {
            if (kind == ASYNC || kind == WRITE)
                report(a, "cp-async-pending", "a cp.async to the same byte is under way, and no wait has covered it");
            report(a, "cp-async-pending",
                   text("a cp.async by %s writes it, and no wait has covered it",
                        name_of_thread((int)thread_of(c.written))));
        }
        const bool before = near && c.written < b.ordered;
        if (!before && thread_of(c.written) == (uint32_t)S.thread->id && near) {
        } else if (!before && !((kind == ATOMIC || kind == ATOMIC_READ) && (c.written & 1))
                   && !ordered_slowly(c.written)) {
            report_race(a, c.written, c.written & 1 ? "updated" : "wrote", false);
        }
    }
    if (kind == ATOMIC_READ) return;
    if (kind == READ) {
        const uint32_t lane = 1u << S.thread->lane;
        if (c.read < fresh || c.read == mine) {
            c.read = mine, c.readers = ONE_THREAD, c.read_lanes = lane;
        } else if (serial_of(c.read) != b.serial) {
            if (c.readers == MANY_BLOCKS || !ordered_slowly(c.read)) c.readers = MANY_BLOCKS;
            else c.readers = ONE_THREAD, c.read_lanes = lane;
            c.read = mine;
        } else if (c.readers == MANY_BLOCKS) {
            c.read = mine;
        } else if (c.read < b.ordered || (c.readers == ONE_THREAD && thread_of(c.read) == (uint32_t)S.thread->id)) {
            c.read = mine, c.readers = ONE_THREAD, c.read_lanes = lane;
        } else if (c.readers != ONE_BLOCK && (int)thread_of(c.read) / WARP == S.thread->id / WARP) {
            if (readers_ordered(c)) c.readers = ONE_THREAD, c.read_lanes = lane;
            else c.readers = ONE_WARP, c.read_lanes |= lane;
            c.read = mine;
        } else {
            c.read = mine, c.readers = ONE_BLOCK;
        }
        return;
    }
    if (c.read >= fresh && c.read && !(c.readers == ONE_THREAD && (c.read | 1) == (mine | 1)) && !readers_ordered(c))
        report_race(a, c.read, "read", c.readers != ONE_THREAD);
    c.written = kind == ATOMIC ? mine | 1 : mine;
    c.read = 0, c.readers = ONE_THREAD;
    c.pending = kind == ASYNC;
}

template <Kind kind>
inline void check_split(Shadow& shadow, uint64_t word, uint64_t first, uint64_t last, const Access& a, Stamp mine,
                                             Stamp fresh) {
    Cell& c = shadow.words[word];
    Cell* bytes = &shadow.bytes[word * 4];
    if (!c.split) {
        for (int i = 0; i < 4; ++i) {
            bytes[i] = c;
            bytes[i].split = 0;
        }
        c.split = SPLIT;
    }
    for (uint64_t i = first; i < last; ++i) {
        if (a.shared && is_read(kind) && bytes[i].written < fresh)
            report(a, "uninitialised-read", "no thread of the block has written it so far");
        check_cell<kind>(bytes[i], a, mine, fresh);
    }
    if (!is_read(kind) && last - first == 4) {  // one history again
        const uint8_t range = c.range;
        c = bytes[0];
        c.split = 0, c.range = range;
    }
}

template <Kind kind> inline void check_cells(Shadow& shadow, const Access& a, Stamp fresh) {
    const Stamp mine = S.stamp;
    const uint64_t begin = a.at - shadow.base, end = begin + a.size;
    for (uint64_t word = begin / 4; word * 4 < end; ++word) {
        const uint64_t first = word * 4 < begin ? begin - word * 4 : 0, last = std::min<uint64_t>(4, end - word * 4);
        Cell& c = shadow.words[word];
        if (last - first == 4 && !c.split) {
            if (a.shared && is_read(kind) && c.written < fresh)
                report(a, "uninitialised-read", "no thread of the block has written it so far");
            check_cell<kind>(c, a, mine, fresh);
        } else {
            check_split<kind>(shadow, word, first, last, a, mine, fresh);
        }
    }
}

// --- where an access lies --------------------------------------------------------------------------------------------

inline void mark(uint64_t* bits, uintptr_t base, uintptr_t at, uint64_t size) {
    if (__builtin_expect(size > 64, false)) {
        mark(bits, base, at + 64, size - 64);
        size = 64;
    }
    const uint64_t i = at - base, from = i & 63;
    const uint64_t ones = size == 64 ? ~0ull : (1ull << size) - 1;
    bits[i >> 6] |= ones << from;
    if (from + size > 64) bits[(i >> 6) + 1] |= ones >> (64 - from);
}

inline void watch(const Access& a) {
    if (a.at < S.watched + S.watched_size && S.watched < a.at + a.size)
        S.seen.push_back({a.pc, a.line, S.thread->id, S.thread->block->number, !is_read(a.kind)});
}

// The common case of shared memory, without a report to prepare: whole words (or bytes of split ones) that this block
// wrote before its last barrier, or the thread itself. False: nothing is decided; the whole check follows and may
// repeat this.
template <Kind kind> __attribute__((always_inline)) inline bool plainly_right(uintptr_t at, uint64_t size) {
    const Block& b = *S.block;
    const Stamp mine = S.stamp;
    const uint64_t offset = at - S.shared_base;
    Cell* c = &b.shadow.words[offset >> 2];
    uint64_t count = size / 4;
    if (size < 4) {
        if (c->split != SPLIT || !c->range) return false;
        c = &b.shadow.bytes[offset];
        count = size;
    } else if (size > 16) {
        return false;
    }
    const Stamp since = b.ordered - b.first;
    // most often the block has read all of it since the barrier: nothing to note either
    if (kind == READ && size >= 4) {
        uint64_t other = 0;
        for (uint64_t i = 0; i < count; ++i) {
            uint64_t rest;
            memcpy(&rest, &c[i].read_lanes, 8);
            other |= (c[i].written ^ b.first) | (c[i].read ^ b.ordered)
                     | ((rest ^ (uint64_t)ONE_BLOCK << 32) & ~(0xffull << 56));
        }
        if (!other) return true;
    }
    for (uint64_t i = 0; i < count; ++i, ++c) {
        if (c->pending || (size >= 4 && (c->split || !c->range))) return false;
        const bool mine_before = c->written >= b.first && ((c->written ^ mine) & (1023 << 1 | 1)) == 0;
        if (kind == READ) {
            if (c->written - b.first < since) c->written = b.first;  // before the barrier: by whom no longer matters
            else if (!mine_before) return false;
            const uint32_t lane = 1u << S.thread->lane;
            if (c->read < b.ordered) {
                c->readers = ONE_THREAD, c->read_lanes = lane;
            } else if (c->readers == ONE_BLOCK) {
                c->read = b.ordered, c->read_lanes = 0;  // since the barrier: by whom no longer matters
                continue;
            } else if (c->read != mine) {
                const Warp& w = *S.thread->warp;
                if (w.partial || ((c->read ^ mine) & (992 << 1))) return false;
                if (time_of(c->read) < w.ordered_time) c->readers = ONE_THREAD, c->read_lanes = lane;
                else c->readers = ONE_WARP, c->read_lanes |= lane;
            }
            c->read = mine;
        } else {
            if (c->written >= b.ordered && !mine_before) return false;
            if (c->read >= b.ordered && (c->readers != ONE_THREAD || ((c->read ^ mine) & (1023 << 1)))) return false;
            c->written = mine, c->read = 0, c->readers = ONE_THREAD;
        }
    }
    return true;
}

template <Kind kind> __attribute__((noinline)) void access_shared(const Access& a) {
    Block& b = *S.block;
    const Cell& c = b.shadow.words[(a.at - S.shared_base) >> 2];
    if (!c.range) report(a, "out-of-bounds", "no range of shared memory is there");
    const SharedRange& r = b.ranges[c.range - 1];
    if (a.at < r.at || a.at + a.size > r.at + (uint64_t)r.size)
        report(a, "out-of-bounds", text("the access leaves shared '%s'", r.name));
    check_cells<kind>(b.shadow, a, b.first);
}

__attribute__((noinline)) inline Range* find_range(uintptr_t at, uint64_t size, bool writing) {
    Range* found = nullptr;
    for (Range& r : S.ranges)
        if (at >= r.low && at + size <= r.low + r.size && (writing ? r.writable : r.readable || r.writable))
            if (!found || (!writing && r.readable && !found->readable)) found = &r;
    return found;
}

[[noreturn]] __attribute__((noinline)) inline void report_place(const Access& a) {
    const int device = S.memory.device_of(a.at);
    if (device >= 0 && device != S.launch.device)
        report(a, "wrong-device",
               text("the kernel runs on sim:%d, the memory belongs to sim:%d", S.launch.device, device));
    for (const Range& r : S.ranges)
        if (a.at >= r.low && a.at + a.size <= r.low + r.size)
            report(a, "undeclared-access", text("the launch declares operand '%s' as read only", r.label));
    for (const Range& r : S.ranges)
        if (a.at < r.low + r.size && r.low < a.at + a.size)
            report(a, "out-of-bounds", "the access crosses the operand's bounds");
    const Allocation* allocation = S.memory.allocation_of(a.at);
    if (device < 0)
        report(a, "out-of-bounds", "a kernel may only touch device memory, its shared memory and its locals");
    for (const Range& r : S.ranges) {  // close to an operand: an index is wrong
        const uint64_t d = a.at < r.low ? r.low - a.at : a.at - (r.low + r.size);
        if (!allocation || (r.allocation == allocation && d < 64))
            report(a, "out-of-bounds", "outside of every operand of the launch");
    }
    if (!allocation) report(a, "out-of-bounds", "nothing is allocated there");
    report(a, "undeclared-access", "no operand of the launch covers it");
}

template <Kind kind> __attribute__((noinline)) void access_global(Range* r, const Access& a) {
    if (!r->constant && !S.thread->waited)
        report(a, "before-wait", "the kernels before may still run: qc_wait_for_kernels() was not called");
    if (is_read(kind)) {
        if (!r->readable) {
            for (uint64_t i = a.at - r->bits_base, end = i + a.size; i < end; ++i)
                if (!(r->written_bits[i >> 6] >> (i & 63) & 1))
                    report(a, "undeclared-access",
                           text("operand '%s' is declared as written only, and this launch has not written the byte",
                                r->label));
        }
        const Shadow& shadow = r->allocation->shadow;
        const uintptr_t missing = shadow.first_uninitialised(a.at, a.size);
        if (missing < a.at + a.size) report(a, "uninitialised-read", "nothing was ever written there");
        if (r->readable) mark(r->read_bits, r->bits_base, a.at, a.size);
        if (r->plain) return;
    } else {
        mark(r->written_bits, r->bits_base, a.at, a.size);
        r->allocation->shadow.mark_initialised(a.at, a.size);
    }
    check_cells<kind>(r->allocation->shadow, a, S.launch_first);
}

template <Kind kind> __attribute__((noinline)) void access_elsewhere(const Access& a) {
    Range* r = find_range(a.at, a.size, !is_read(kind));
    if (!r) {
        if (a.at >= S.module_low && a.at + a.size <= S.module_high && is_read(kind)) return;  // the kernel's constants
        const uintptr_t args = (uintptr_t)S.args.data(), values = (uintptr_t)S.arg_values.data();
        if (a.at - args < S.args.size() * 8 || a.at - values < S.arg_values.size() * 8) return;
        report_place(a);
    }
    (is_read(kind) ? S.read_cache : S.write_cache)[a.at >> 12 & 63] = r;
    access_global<kind>(r, a);
}

// Everything that the short path of `access` leaves: the whole check, with its reports.
template <Kind kind>
__attribute__((noinline)) void access_slowly(uintptr_t at, uint64_t size, uint64_t pc, int line, bool aligned) {
    if (S.accesses >= S.slice_at) slice(pc, line);
    const bool shared = at - S.shared_base < S.shared_bytes;
    const Access a = {at, size, kind, pc, line, shared};
    if (aligned && (at & (size - 1)))
        report(a, "misaligned", text("the address is no multiple of %llu", (unsigned long long)size));
    if (S.watched) watch(a);
    if (shared) return access_shared<kind>(a);
    Range* r = (is_read(kind) ? S.read_cache : S.write_cache)[at >> 12 & 63];
    if (r && at - r->low < r->size && size <= r->size - (at - r->low)) return access_global<kind>(r, a);
    access_elsewhere<kind>(a);
}

// Before each load and store. Most end here: locals, shared memory that is plainly right, operands that are only read.
template <Kind kind>
__attribute__((always_inline)) inline void access(uintptr_t at, uint64_t size, uint64_t pc, int line, bool aligned) {
    if (at - S.stack_base < STACK_BYTES) return;
    if (++S.accesses >= S.pause_at || (at & (size - 1))) return access_slowly<kind>(at, size, pc, line, aligned);
    if (at - S.shared_base < S.shared_bytes) {
        if ((kind == READ || kind == WRITE) && plainly_right<kind>(at, size)) return;
    } else if (is_read(kind)) {
        Range* r = S.read_cache[at >> 12 & 63];
        if (r && r->plain && at - r->low < r->size && size <= r->size - (at - r->low)
            && (r->constant || S.thread->waited))
            return mark(r->read_bits, r->bits_base, at, size);
    }
    access_slowly<kind>(at, size, pc, line, aligned);
}

}  // namespace qs
