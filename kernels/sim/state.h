// What a launch is while it runs: threads, warps, resident blocks, the launch itself, and how a finding ends it.
#pragma once
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "memory.h"

// --- the interface to Python (runtime/sim/engine.py mirrors these structures) ----------------------------------------

enum { QS_RANGE_READ = 1, QS_RANGE_WRITE = 2, QS_RANGE_CONSTANT = 4 };

struct QsRange {
    uint64_t low, high;
    uint64_t access;  // QS_RANGE_READ | QS_RANGE_WRITE | QS_RANGE_CONSTANT
    const char* label;
};
struct QsLaunch {
    uint64_t function;  // void (*)(void* const* args)
    const char* name;
    const uint64_t* args;
    const QsRange* ranges;
    uint64_t arg_count, range_count, shared_bytes, seed;
    uint32_t grid[3], block[3];
    int32_t device, checked, early_copies, resident_blocks;
    int32_t overlaps;  // the kernels before may still run when this one starts
    double time_limit, spin_limit;  // seconds
};
struct QsSite {  // a place that a finding speaks of
    const char* what;
    uint64_t address;  // of the code; 0 where only the line is known
    uint64_t line;     // of the emitted text; 0 where only the address is known
};
struct QsInterval {
    uint64_t low, high, written;
};
struct QsReport {
    char finding[32];  // empty: none
    char message[4096];
    QsSite sites[6];
    uint64_t site_count, interval_count, unwritten, accesses;
    const QsInterval* intervals;  // until the next launch
    double seconds;
};

namespace qs {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_WARPS = 32;
constexpr uint64_t SLICE = 1 << 18;  // accesses

// What a thread has learnt by acquiring: of a block, every access up to a time; of single threads, likewise.
struct Knowledge {
    std::unordered_map<uint32_t, uint32_t> blocks;   // serial -> time; what lies before it is ordered
    std::unordered_map<uint64_t, uint32_t> threads;  // serial << 10 | thread -> time
    void merge(const Knowledge& other) {
        for (const auto& [key, time] : other.blocks) blocks[key] = std::max(blocks[key], time);
        for (const auto& [key, time] : other.threads) threads[key] = std::max(threads[key], time);
    }
    bool orders(Stamp s) const {
        const auto block = blocks.find(serial_of(s));
        if (block != blocks.end() && time_of(s) < block->second) return true;
        const auto thread = threads.find((uint64_t)serial_of(s) << 10 | thread_of(s));
        return thread != threads.end() && time_of(s) < thread->second;
    }
};

struct AsyncCopy {
    char* to;
    const char* from;
    bool there;
    uint32_t group;
    int line;
};

enum Collective { SYNCWARP, SHUFFLE, VOTE, LDMATRIX, MMA, WGMMA };

struct PendingProduct {  // of a warpgroup: what it reads until a wait
    const uint32_t* a;
    uint32_t kept[4];  // what `a` was
    const char* b;
    int columns;
    uint64_t digest;   // of b
    uint32_t group;
    int line;
};
struct PendingSums {
    float* d;
    std::vector<float> values;  // what arrives there
    uint32_t group;
};

struct Arrival {  // a lane at a warp collective
    Collective kind;
    int line;
    uint32_t mask;
    void* data;
    uint64_t detail;  // must be equal in all lanes (the shuffle's kind and width, the matrix count)
};

struct Block;
struct Warp;

struct Thread {
    Fiber fiber;
    uint64_t index;  // threadIdx, 16 bits each
    Block* block;
    Warp* warp;
    int id, lane;
    char* stack;
    uintptr_t polled;  // the address it last polled
    int waiting_line;  // of the barrier, collective or poll it is at
    uint64_t waiting_pc;
    int barrier_result;
    uint32_t group;    // cp.async groups committed
    bool waited;       // for the kernels before this one
    std::vector<AsyncCopy> copies;
    uint32_t products_group;  // groups of warpgroup products committed
    bool fenced_wgmma;        // since the last product
    uint32_t fenced_async;    // what this thread wrote before this time is visible to products
    std::vector<PendingProduct> products;
    std::vector<PendingSums> sums;
    std::unique_ptr<Knowledge> acquired, seen_relaxed, fenced;
};

struct Warp {
    uint32_t born, alive, ready, spinning, at_barrier, waiting;  // lanes
    uint64_t products;        // a digest of the warpgroup products, in order
    uint32_t ordered_time;    // all lanes have met since every access stamped before this time
    bool partial;             // some lanes have met without the others: `met` counts
    uint32_t met[WARP][WARP]; // met[a][b]: accesses of lane b before this time come before what lane a does now
    uint32_t group;           // waiting lanes known to agree with each other; `leader` is one of them
    int leader;
    Arrival arrivals[WARP];
};

struct SharedRange {
    const char* name;
    int64_t offset, size;
    uintptr_t at;
};

struct Block {
    uint64_t index;  // blockIdx: x 31 bits, y 16, z 16
    uint64_t number; // linear
    uint32_t serial, time;
    // stamps below `ordered` that are this block's, or older than it, are before every thread's present
    Stamp first, ordered;
    int threads, warps, exited, at_barrier, first_exited;
    int barrier_line, barrier_reduction, barrier_value, barrier_thread;
    uint32_t ready_warps;
    int current_warp;
    bool resident = false;
    std::unique_ptr<Knowledge> known;
    Warp warp[MAX_WARPS];
    Thread thread[MAX_THREADS];
    char* stacks = nullptr;
    int stack_count = 0;
    // shared memory
    char* shared = nullptr;
    uint64_t shared_size = 0;
    uint64_t shared_used;
    Shadow shadow;
    std::vector<SharedRange> ranges;
};

struct Range {  // of a launch
    uintptr_t low;
    uint64_t size;
    bool readable, writable;
    bool constant;  // no kernel writes it
    bool plain;  // only read by this launch and wholly initialised: no access can be wrong
    const char* label;
    Allocation* allocation;
    uint64_t* read_bits;
    uint64_t* written_bits;
    uintptr_t bits_base;  // low rounded down to 64
    std::vector<uint64_t> read_map, written_map;
    std::vector<char> before;  // a copy, or empty where `digest` serves
    uint64_t digest;
};

struct State {
    // the hot part
    Thread* thread = nullptr;
    Block* block = nullptr;
    uintptr_t shared_base = 0, stack_base = 0;
    uint64_t shared_bytes = 0;
    Stamp launch_first = 0;
    Stamp stamp = 0;  // of what the running thread does now
    uint64_t accesses = 0;
    uint64_t slice_at = 0;  // of `accesses`: when other threads get their turn
    uint64_t pause_at = 0;  // the same; 0 while an address is watched: no access takes the short path then
    uint64_t random = 1;
    Range* read_cache[64];
    Range* write_cache[64];
    bool checked = false;

    Fiber main;
    QsLaunch launch;
    QsReport* report = nullptr;
    void (*function)(void* const*);
    std::vector<void*> args;
    std::vector<uint64_t> arg_values;
    uint64_t block_dim = 0, grid_dim = 0;
    std::vector<Range> ranges;
    std::vector<std::unique_ptr<Block>> slots;
    std::unordered_map<uintptr_t, Knowledge> released;  // by the address of a flag or a counter
    uint32_t next_serial = 1;
    uint64_t progress = 0;  // grows whenever something other than polling happens
    double began = 0, progressed = 0;
    bool failed = false;
    uintptr_t module_low = 0, module_high = 0;  // the kernel library's own data
    // replay of a failed launch, to name the other side of a race
    uintptr_t watched = 0;
    uint64_t watched_size = 0;
    struct Seen {
        uint64_t pc;
        int line, thread;
        uint64_t block;
        bool write;
    };
    std::vector<Seen> seen;

    Memory memory;
    std::mutex mutex;
};

static State S;

inline uint64_t next_random() {  // xorshift64*
    uint64_t x = S.random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    S.random = x;
    return x * 2685821657736338717ull;
}

inline double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// --- findings --------------------------------------------------------------------------------------------------------

inline const char* text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline const char* text(const char* format, ...) {  // a rotating buffer: findings leave fibers without unwinding them
    static char buffers[16][512];
    static int next = 0;
    char* buffer = buffers[next++ % 16];
    va_list list;
    va_start(list, format);
    vsnprintf(buffer, sizeof buffers[0], format, list);
    va_end(list);
    return buffer;
}

inline void add_site(const char* what, uint64_t pc, int line) {
    if (S.report->site_count < 6) S.report->sites[S.report->site_count++] = {what, pc, (uint64_t)(line > 0 ? line : 0)};
}

inline const char* name_of_block(uint64_t number) {
    const uint64_t x = S.launch.grid[0], y = S.launch.grid[1];
    if (y == 1 && S.launch.grid[2] == 1) return text("block %llu", (unsigned long long)number);
    return text("block (%llu, %llu, %llu)", (unsigned long long)(number % x), (unsigned long long)(number / x % y),
                (unsigned long long)(number / x / y));
}
inline const char* name_of_thread(int id) {
    const unsigned x = S.launch.block[0], y = S.launch.block[1];
    if (y == 1 && S.launch.block[2] == 1) return text("thread %d", id);
    return text("thread (%u, %u, %u)", (unsigned)id % x, (unsigned)id / x % y, (unsigned)id / x / y);
}
inline const char* name_of(uint64_t block, int thread) {
    return text("%s, %s", name_of_block(block), name_of_thread(thread));
}
inline const char* name_of(const Thread* t) { return name_of(t->block->number, t->id); }

inline void record_finding(const char* kind, const char* format, va_list list) {
    if (S.failed) return;
    S.failed = true;
    snprintf(S.report->finding, sizeof S.report->finding, "%s", kind);
    vsnprintf(S.report->message, sizeof S.report->message, format, list);
}
inline void record(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
inline void record(const char* kind, const char* format, ...) {
    va_list list;
    va_start(list, format);
    record_finding(kind, format, list);
    va_end(list);
}
// Ends the launch from inside a fiber, which is never resumed.
[[noreturn]] inline void fail(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] inline void fail(const char* kind, const char* format, ...) {
    va_list list;
    va_start(list, format);
    record_finding(kind, format, list);
    va_end(list);
    switch_fiber(&S.thread->fiber, &S.main);
    __builtin_unreachable();
}

}  // namespace qs
