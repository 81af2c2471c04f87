// A launch from beginning to end: what it may touch, the run, what it touched, and the search for unseen writes.
#pragma once
#include <link.h>

#include "wgmma.h"

namespace qs {

// The kernel library's own data: constants may be read.
inline void find_module(uint64_t function) {
    static uint64_t known;
    if (known == function) return;
    known = function;
    S.module_low = S.module_high = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            const uintptr_t at = *(const uint64_t*)data;
            uintptr_t low = ~(uintptr_t)0, high = 0;
            bool inside = false;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& p = info->dlpi_phdr[i];
                if (p.p_type != PT_LOAD) continue;
                const uintptr_t from = info->dlpi_addr + p.p_vaddr, to = from + p.p_memsz;
                low = std::min(low, from), high = std::max(high, to);
                inside |= at >= from && at < to;
            }
            if (inside) S.module_low = low, S.module_high = high;
            return inside ? 1 : 0;
        },
        &function);
}

inline uint64_t digest_of(const char* p, uint64_t n) {  // of bytes that should not change; not against intent
    uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    while (n >= 64) {
        for (int i = 0; i < 8; ++i) {
            uint64_t v;
            memcpy(&v, p + 8 * i, 8);
            lanes[i] = (lanes[i] << 13 | lanes[i] >> 51) + (v ^ (lanes[i] >> 7));
        }
        p += 64, n -= 64;
    }
    uint64_t all = n;
    while (n--) all = all * 1099511628211ull ^ (unsigned char)*p++;
    for (uint64_t lane : lanes) all = (all ^ lane) * 0x9e3779b97f4a7c15ull;
    return all;
}

// Ranges as the launch declares them. False, with a finding, where one lies in no live allocation of the device.
inline bool prepare_ranges() {
    const uint64_t count = S.launch.range_count;
    S.ranges.resize(count);
    for (uint64_t i = 0; i < count; ++i) {
        const QsRange& q = S.launch.ranges[i];
        Range& r = S.ranges[i];
        r.low = q.low, r.size = q.high - q.low, r.label = q.label;
        r.readable = q.access & QS_RANGE_READ, r.writable = q.access & QS_RANGE_WRITE;
        r.constant = q.access & QS_RANGE_CONSTANT;
        r.allocation = S.memory.allocation_of(r.low);
        const int device = S.memory.device_of(r.low);
        if (q.high < q.low || !r.allocation || r.low + r.size > r.allocation->base + r.allocation->nbytes) {
            if (q.high == q.low) {  // an empty operand lies anywhere
                r.allocation = nullptr, r.size = 0;
                continue;
            }
            record("bad-launch", "operand '%s' (%lld bytes at 0x%llx) does not lie in one live allocation", q.label,
                   (long long)(q.high - q.low), (unsigned long long)q.low);
            return false;
        }
        if (device != S.launch.device) {
            record("wrong-device", "operand '%s' lies on sim:%d, but the kernel runs on sim:%d", q.label, device,
                   S.launch.device);
            return false;
        }
    }
    for (Range& r : S.ranges) {
        if (!r.allocation) continue;
        r.bits_base = r.low & ~(uintptr_t)63;
        const uint64_t words = (r.low + r.size - r.bits_base) / 64 + 2;
        r.read_map.assign(r.readable ? words : 0, 0), r.written_map.assign(r.writable ? words : 0, 0);
        r.read_bits = r.read_map.data(), r.written_bits = r.written_map.data();
        r.plain = r.readable && !r.writable
                  && r.allocation->shadow.first_uninitialised(r.low, r.size) == r.low + r.size;
        for (const Range& other : S.ranges)
            if (other.writable && other.size && other.low < r.low + r.size && r.low < other.low + other.size)
                r.plain = false;
    }
    return true;
}

// --- writes that no hook saw -----------------------------------------------------------------------------------------

inline void take_copies() {
    for (Range& r : S.ranges) {
        r.before.clear();
        if (!r.allocation) continue;
        if (r.writable) r.before.assign((const char*)r.low, (const char*)r.low + r.size);
        else r.digest = digest_of((const char*)r.low, r.size);
    }
}

inline bool seen_as_written(uintptr_t at) {
    for (const Range& r : S.ranges)
        if (r.writable && at - r.low < r.size) {
            const uint64_t i = at - r.bits_base;
            if (r.written_bits[i >> 6] >> (i & 63) & 1) return true;
        }
    return false;
}

// Bytes of a live allocation's red zones; null if they are whole.
inline const unsigned char* broken_red_zone(const Allocation& a) {
    const auto* low = (const unsigned char*)a.base - RED_ZONE;
    const auto* high = (const unsigned char*)a.base + a.nbytes;
    for (uint64_t i = 0; i < RED_ZONE; ++i) {
        if (low[i] != RED_ZONE_BYTE) return low + i;
        if (high[i] != RED_ZONE_BYTE) return high + i;
    }
    return nullptr;
}

inline void search_unseen_writes() {
    for (const Range& r : S.ranges) {
        if (!r.allocation || S.failed) continue;
        if (const unsigned char* broken = broken_red_zone(*r.allocation))
            record("self-check", "a byte %s changed, and no access to it was seen",
                   describe_global((uintptr_t)broken, 1));
        if (r.writable) {
            const char* after = (const char*)r.low;
            for (uint64_t i = 0; i < r.size; i += 64) {
                const uint64_t n = std::min<uint64_t>(64, r.size - i);
                if (!memcmp(&r.before[i], after + i, n)) continue;
                for (uint64_t j = i; j < i + n; ++j)
                    if (r.before[j] != after[j] && !seen_as_written(r.low + j))
                        return record("self-check",
                                      "%s changed, and no write to it was seen: the compiler's hooks missed an access "
                                                    "(inline assembly? a copy made by a call?)",
                                      describe_global(r.low + j, 1));
            }
        } else if (digest_of((const char*)r.low, r.size) != r.digest) {
            bool rewritten = false;  // the same bytes under another name
            for (const Range& other : S.ranges)
                rewritten |= other.writable && other.size && other.low < r.low + r.size
                             && r.low < other.low + other.size;
            if (!rewritten)
                record("self-check", "operand '%s' is declared as read only, has changed, and no write to it was seen",
                       r.label);
        }
    }
}

// The same for shared memory: it began as 0xff. A few blocks tell as much as all: the hooks are a property of the code.
inline void search_unseen_shared_writes(Block& b) {
    for (const SharedRange& r : b.ranges) {
        const auto* bytes = (const unsigned char*)r.at;
        for (int64_t i = 0; i < r.size; ++i) {
            if (bytes[i] == 0xff) continue;
            const uint64_t at = r.at + (uint64_t)i - b.shadow.base;
            const Cell& word = b.shadow.words[at / 4];
            const Cell& cell = word.split ? b.shadow.bytes[at] : word;
            if (cell.written >= b.first) continue;
            enter_block(b);
            return record("self-check",
                          "%s of %s changed, and no write to it was seen: the compiler's hooks missed an access",
                          describe_shared(r.at + (uint64_t)i), name_of_block(b.number));
        }
    }
}

inline void finish_block(Block& b) {
    compare_warpgroups(b);
    if (S.checked && (b.number < 4 || b.number % 16 == 0)) search_unseen_shared_writes(b);
}

// --- the launch ------------------------------------------------------------------------------------------------------

inline void add_intervals(const Range& r, const std::vector<uint64_t>& map, bool written,
                          std::vector<QsInterval>& into) {
    uint64_t begin = 0;
    bool open = false;
    for (uint64_t w = 0; w < map.size(); ++w) {
        if (map[w] == (open ? ~0ull : 0)) continue;
        for (uint64_t i = 0; i < 64; ++i) {
            const bool bit = map[w] >> i & 1;
            if (bit == open) continue;
            if (bit) begin = w * 64 + i;
            else into.push_back({r.bits_base + begin, r.bits_base + w * 64 + i, written});
            open = bit;
        }
    }
    if (open) into.push_back({r.bits_base + begin, r.bits_base + map.size() * 64, written});
}

inline void collect(QsReport* report) {
    static std::vector<QsInterval> intervals;
    intervals.clear();
    report->unwritten = 0;
    for (const Range& r : S.ranges) {
        if (!r.allocation) continue;
        add_intervals(r, r.read_map, false, intervals);
        add_intervals(r, r.written_map, true, intervals);
        if (r.writable && !r.readable) {
            uint64_t count = 0;
            for (uint64_t word : r.written_map) count += (uint64_t)__builtin_popcountll(word);
            report->unwritten += r.size - count;
        }
    }
    report->intervals = intervals.data(), report->interval_count = intervals.size();
}

inline void forget_everything() {  // the serials are used up: all histories end here
    for (auto& [base, allocation] : S.memory.allocations) allocation->shadow.forget_history();
    for (auto& slot : S.slots)
        if (slot->shared_size) slot->shadow.forget_history();
    S.next_serial = 1;
}

inline void run_once(QsReport* report) {
    const QsLaunch& l = S.launch;
    const uint64_t blocks = (uint64_t)l.grid[0] * l.grid[1] * l.grid[2];
    if (blocks + S.next_serial > 0xfffffff0ull) forget_everything();
    S.report = report, S.failed = false, S.seen.clear();
    S.random = (l.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 4; ++i) next_random();
    S.launch_first = (Stamp)S.next_serial << SERIAL_SHIFT;
    S.accesses = 0, S.slice_at = SLICE, S.pause_at = S.watched ? 0 : SLICE, S.progress = 0;
    memset(S.read_cache, 0, sizeof S.read_cache), memset(S.write_cache, 0, sizeof S.write_cache);
    S.released.clear();
    for (auto& slot : S.slots) {
        forget_shared(*slot);
        slot->resident = false;
    }
    S.began = S.progressed = now();
    run_grid();
    S.stack_base = S.shared_base = S.shared_bytes = 0;
    report->accesses = S.accesses;
}

inline void run_launch(QsReport* report) {
    const QsLaunch& l = S.launch;
    S.report = report, S.failed = false;
    report->finding[0] = 0, report->site_count = 0, report->interval_count = 0, report->unwritten = 0;
    const double began = now();
    const uint64_t threads = (uint64_t)l.block[0] * l.block[1] * l.block[2];
    const uint64_t blocks = (uint64_t)l.grid[0] * l.grid[1] * l.grid[2];
    if (!threads || threads > MAX_THREADS || l.block[2] > 64)
        return record("bad-launch", "a block of %u x %u x %u threads (at most 1024, z at most 64)", l.block[0],
                      l.block[1], l.block[2]);
    if (!blocks || l.grid[0] > 0x7fffffff || l.grid[1] > 65535 || l.grid[2] > 65535 || blocks > 0x7fffffff)
        return record("bad-launch", "a grid of %u x %u x %u blocks (at most 2147483647 x 65535 x 65535, none 0)",
                      l.grid[0], l.grid[1], l.grid[2]);
    S.checked = l.checked;
    S.function = (void (*)(void* const*))l.function;
    S.arg_values.assign(l.args, l.args + l.arg_count);
    S.args.resize(l.arg_count);
    for (uint64_t i = 0; i < l.arg_count; ++i) S.args[i] = &S.arg_values[i];
    S.block_dim = (uint64_t)l.block[0] | (uint64_t)l.block[1] << 16 | (uint64_t)l.block[2] << 32;
    S.grid_dim = (uint64_t)l.grid[0] | (uint64_t)l.grid[1] << 31 | (uint64_t)l.grid[2] << 47;
    find_module(l.function);
    if (!prepare_ranges()) return;
    if (S.checked) take_copies();
    S.watched = 0;
    run_once(report);
    if (S.failed && S.watched && !strcmp(report->finding, "race")) {
        // Once more from the same memory, with an eye on the address, to name the other side. The order is the same.
        for (const Range& r : S.ranges)
            if (r.writable) memcpy((void*)r.low, r.before.data(), r.size);
        report->site_count = 0;
        run_once(report);
    }
    S.watched = 0;
    if (S.checked && !S.failed) search_unseen_writes();
    if (!S.failed && S.checked) collect(report);
    report->seconds = now() - began;
}

}  // namespace qs
