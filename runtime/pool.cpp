// The thread pool behind `qc_ctx::parallel`: one per process, workers made when first needed.
//
// A region is published by opening a gate and ends when the gate is closed and empty:
//
//   gate = [ sequence : 40 | limit : 12 | workers inside : 12 ]      an odd sequence is open
//
// A worker enters by adding one to the gate it has seen (compare-and-swap, so never into a later region), takes tasks
// from one shared counter until none is left, and leaves by subtracting one. The caller takes tasks too, closes the
// gate and waits until nobody is inside. So the fields of a region are only written while no worker can read them, and
// a call allocates nothing. Workers spin for `spin_ns` after a region (the next one of the same model follows within
// microseconds), then sleep on a futex. Who has spun for `kEagerNs` yields its processor between two looks: where
// threads share processors, it may be the one that the thread it waits for needs.
//
// A kernel that wakes a worker may put it on the caller's own processor and leave it there for many calls, though
// others are idle (Linux 6.18, two processors: a model of 1.3 ms then takes 2.2). So a worker whose processor is also
// the caller's, or that of a worker with a lower number, moves to another one (`Places`). Nobody is bound: afterwards
// the worker may run wherever it might before.
#include "abi.h"
#include "float_state.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kMaxThreads = 1024;  // fits the gate's 12-bit fields
constexpr uint64_t kSequenceStep = uint64_t(1) << 24;
constexpr int64_t kEagerNs = 20000;  // the regions of a call follow each other within 10 us, if steps between are small

inline uint64_t sequence(uint64_t gate) { return gate >> 24; }
inline int limit(uint64_t gate) { return int(gate >> 12) & 0xfff; }
inline int inside(uint64_t gate) { return int(gate) & 0xfff; }
inline bool is_open(uint64_t gate) { return sequence(gate) & 1; }

#if defined(__linux__)
void park(std::atomic<uint32_t>* word, uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void unpark(std::atomic<uint32_t>* word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}
void reset_parking() {}
#else
pthread_mutex_t park_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t park_condition = PTHREAD_COND_INITIALIZER;
void park(std::atomic<uint32_t>* word, uint32_t expected) {
    pthread_mutex_lock(&park_mutex);
    if (word->load() == expected) pthread_cond_wait(&park_condition, &park_mutex);  // spurious wakes are harmless
    pthread_mutex_unlock(&park_mutex);
}
void unpark(std::atomic<uint32_t>*, int) {
    pthread_mutex_lock(&park_mutex);
    pthread_cond_broadcast(&park_condition);
    pthread_mutex_unlock(&park_mutex);
}
void reset_parking() {
    park_mutex = PTHREAD_MUTEX_INITIALIZER;
    park_condition = PTHREAD_COND_INITIALIZER;
}
#endif

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// On which processor each thread of the pool was when it last looked. 0 is the caller of the region.
class Places {
  public:
    Places() {
        for (auto& at : at_) at.store(-1, std::memory_order_relaxed);
    }
    // Notes where this thread is. If a thread with a lower number is there too, it moves to a processor that none of
    // these is on, if its affinity has one.
    void look(int thread) {
#if defined(__linux__)
        const int here = note(thread);
        if (here < 0) return;
        for (int other = 0; other < thread; ++other)
            if (at_[other].load(std::memory_order_relaxed) == here) return leave(thread);
#else
        (void)thread;
#endif
    }
#if defined(__linux__)
    int note(int thread) {
        const int here = sched_getcpu();
        if (at_[thread].load(std::memory_order_relaxed) != here) at_[thread].store(here, std::memory_order_relaxed);
        return here;
    }
#else
    void note(int) {}
#endif

  private:
#if defined(__linux__)
    void leave(int thread) {
        cpu_set_t allowed, free, now;  // more than 1024 processors do not fit: the call fails, and nobody moves
        if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) <= thread) return;
        free = allowed;
        for (int other = 0; other < thread; ++other) {
            const int there = at_[other].load(std::memory_order_relaxed);
            if (there >= 0 && there < CPU_SETSIZE) CPU_CLR(there, &free);
        }
        if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
        note(thread);
        if (sched_getaffinity(0, sizeof now, &now) || !CPU_EQUAL(&now, &free)) return;  // somebody has set another one
        // A thread that asks for all processors has those of its cgroup, also when the cgroup gets more of them. One
        // that asks for a set keeps to it. So `allowed` is asked for only if somebody had given this thread less.
        memset(&now, 0xff, sizeof now);
        sched_setaffinity(0, sizeof now, &now);
        if (sched_getaffinity(0, sizeof now, &now) == 0 && !CPU_EQUAL(&now, &allowed))
            sched_setaffinity(0, sizeof allowed, &allowed);
    }
#endif

    std::atomic<int> at_[kMaxThreads];  // -1: it has not looked
};

struct Pool {
    alignas(64) std::atomic<uint64_t> gate{0};
    alignas(64) std::atomic<int64_t> next{0};
    // The region. Written by the caller while the gate is closed and empty.
    alignas(64) qc_ctx* ctx = nullptr;
    qc_task fn = nullptr;
    void* arg = nullptr;
    int64_t tasks = 0;
    alignas(64) std::atomic<uint32_t> bell{0};  // rung when a region opens
    std::atomic<uint32_t> sleepers{0};
    alignas(64) std::atomic<uint32_t> done{0};  // rung when the last worker leaves a closed gate
    std::atomic<uint32_t> caller_waits{0};
    alignas(64) std::atomic<bool> owned{false};  // one region at a time
    std::atomic<int> workers{0};                 // changed by the owner only
    alignas(64) Places places;
};

alignas(64) char storage[sizeof(Pool)];  // never destroyed: workers outlive static destructors
Pool& pool = *new (storage) Pool;
std::atomic<int64_t> spin_ns{50000};

// Initial-exec: reached without the lazy allocation of a dynamic TLS block.
__thread bool in_region __attribute__((tls_model("initial-exec"))) = false;
__thread int thread_index __attribute__((tls_model("initial-exec"))) = 0;  // 0 on every thread that calls

void take_tasks(int thread) {
    qc_ctx* ctx = pool.ctx;
    char* scratch = ctx->scratch + thread * ctx->scratch_stride;
    const qc_task fn = pool.fn;
    void* arg = pool.arg;
    const int64_t tasks = pool.tasks;
    for (;;) {
        const int64_t task = pool.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= tasks) return;
        fn(arg, task, scratch);
    }
}

void leave() {
    const uint64_t before = pool.gate.fetch_sub(1, std::memory_order_seq_cst);
    if (is_open(before) || inside(before) != 1) return;
    pool.done.fetch_add(1, std::memory_order_seq_cst);
    if (pool.caller_waits.load(std::memory_order_seq_cst)) unpark(&pool.done, INT_MAX);
}

// Spins until `ready()` or until the time is over; true if ready.
template <class Ready>
bool spin_until(int thread, Ready ready) {
    const int64_t begin = now_ns(), spin = spin_ns.load(std::memory_order_relaxed);
    for (int64_t spent = 0; spent < spin; spent = now_ns() - begin) {
        if (spent > kEagerNs) {
            pool.places.look(thread);
            sched_yield();
        }
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    }
    return ready();
}

void* work(void* argument) {
    const int thread = int(reinterpret_cast<intptr_t>(argument));
    qc_float::set(qc_float::fixed);  // a thread inherits the state of the thread that made it
    in_region = true;                // regions that a task opens run inline
    thread_index = thread;
    uint64_t seen = 0;
    auto news = [&] {
        const uint64_t gate = pool.gate.load(std::memory_order_seq_cst);
        return is_open(gate) && sequence(gate) != seen;
    };
    for (;;) {
        uint64_t gate = pool.gate.load(std::memory_order_acquire);
        if (is_open(gate) && sequence(gate) != seen) {
            if (thread < limit(gate)) {
                if (!pool.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
                take_tasks(thread);
                leave();
            }
            seen = sequence(gate);
            continue;
        }
        if (spin_until(thread, news)) continue;
        const uint32_t ring = pool.bell.load(std::memory_order_seq_cst);
        pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (!news()) park(&pool.bell, ring);
        pool.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        pool.places.look(thread);
    }
    return nullptr;
}

void ensure_workers(int wanted) {
    int have = pool.workers.load(std::memory_order_relaxed);
    if (have >= wanted) return;
    sigset_t all, before;  // signals stay with the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; have < wanted; ++have) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, reinterpret_cast<void*>(intptr_t(have + 1)))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pool.workers.store(have, std::memory_order_relaxed);
}

// Another thread's region ends soon, or not for a long time: wait briefly, so that two callers take turns, then run
// inline, so that neither depends on the other.
bool own_pool() {
    const int64_t begin = now_ns();
    for (;;) {
        for (int i = 0; i < 64; ++i) {
            if (!pool.owned.load(std::memory_order_relaxed) && !pool.owned.exchange(true, std::memory_order_acquire))
                return true;
            relax();
        }
        if (now_ns() - begin > 100000) return false;
        sched_yield();
    }
}

void wait_until_empty() {
    auto empty = [] { return inside(pool.gate.load(std::memory_order_acquire)) == 0; };
    if (empty()) return;
    while (!spin_until(0, empty)) {
        const uint32_t ring = pool.done.load(std::memory_order_seq_cst);
        pool.caller_waits.store(1, std::memory_order_seq_cst);
        if (inside(pool.gate.load(std::memory_order_seq_cst)) != 0) park(&pool.done, ring);
        pool.caller_waits.store(0, std::memory_order_seq_cst);
    }
}

// After fork the child has only the calling thread: workers are made again at the next region.
void child_after_fork() {
    new (storage) Pool;
    in_region = false;
    thread_index = 0;
    reset_parking();
}

__attribute__((constructor)) void register_fork_handler() { pthread_atfork(nullptr, nullptr, child_after_fork); }

}  // namespace

extern "C" {

// What one step took, summed over runs.
struct qc_figures {
    int64_t ns;
    int64_t regions;
    int64_t tasks;
    int64_t task_ns;  // of all threads
};

void qc_pool_parallel(qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg) {
    const bool alone = tasks <= 1 || ctx->num_threads <= 1 || in_region || !own_pool();
    if (alone) {
        // A nested region uses the scratch of the task that opened it: that task must hold nothing there.
        char* scratch = ctx->scratch + thread_index * ctx->scratch_stride;
        for (int64_t task = 0; task < tasks; ++task) fn(arg, task, scratch);
        return;
    }
    int threads = ctx->num_threads < kMaxThreads ? ctx->num_threads : kMaxThreads;
    ensure_workers(threads - 1);
    const int workers = pool.workers.load(std::memory_order_relaxed);
    if (threads > workers + 1) threads = workers + 1;
    pool.ctx = ctx;
    pool.fn = fn;
    pool.arg = arg;
    pool.tasks = tasks;
    pool.next.store(0, std::memory_order_relaxed);
    pool.places.note(0);
    const uint64_t closed = pool.gate.load(std::memory_order_relaxed);
    pool.gate.store(((sequence(closed) + 1) << 24) | (uint64_t(threads) << 12), std::memory_order_seq_cst);
    pool.bell.fetch_add(1, std::memory_order_seq_cst);
    if (const int asleep = int(pool.sleepers.load(std::memory_order_seq_cst))) {
        const bool all_may_enter = threads == workers + 1;
        unpark(&pool.bell, all_may_enter && tasks - 1 < workers ? int(tasks - 1) : INT_MAX);
        // To a worker of this region that was woken on this processor, so that it leaves.
        if (asleep > workers + 1 - threads) sched_yield();
    }
    in_region = true;
    take_tasks(0);
    in_region = false;
    pool.gate.fetch_add(kSequenceStep, std::memory_order_seq_cst);
    wait_until_empty();
    pool.owned.store(false, std::memory_order_release);
}

}  // extern "C"

namespace {

struct Counted {
    qc_task fn;
    void* arg;
    std::atomic<int64_t> ns;
};

void counted_task(void* argument, int64_t task, char* scratch) {
    Counted* const counted = static_cast<Counted*>(argument);
    const int64_t begin = now_ns();
    counted->fn(counted->arg, task, scratch);
    counted->ns.fetch_add(now_ns() - begin, std::memory_order_relaxed);
}

// `ctx->pool` points to the figures of the step that runs. A region inside a task is part of that task.
void counted_parallel(qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg) {
    if (in_region) return qc_pool_parallel(ctx, tasks, fn, arg);
    Counted counted = {fn, arg, {0}};
    qc_pool_parallel(ctx, tasks, counted_task, &counted);
    qc_figures* const figures = static_cast<qc_figures*>(ctx->pool);
    ++figures->regions;
    figures->tasks += tasks;
    figures->task_ns += counted.ns.load(std::memory_order_relaxed);
}

}  // namespace

extern "C" {

// Runs an entry point, or a kernel, in the kernels' floating-point state, and restores the caller's.
int32_t qc_pool_entry(qc_entry entry, qc_ctx* ctx, char* const* arenas, const int64_t* symbols) {
    const qc_float::Fixed fixed;
    return entry(ctx, arenas, symbols);
}
void qc_pool_kernel(qc_kernel kernel, qc_ctx* ctx, void* const* operands, const int64_t* symbols) {
    const qc_float::Fixed fixed;
    kernel(ctx, operands, symbols);
}

// A step of an entry point with its addresses: a launch, or without a kernel a copy of `symbols[0]` bytes from
// `operands[1]` to `operands[0]`.
struct qc_step {
    qc_kernel kernel;
    void* const* operands;
    const int64_t* symbols;
};

// Runs the steps as a compiled entry point does and adds the time of each to `figures`. With `counts` it also counts
// the regions and their tasks, at two clock readings a task: time and counts are taken in different runs.
// Returns ctx->error_code; the steps behind one that reports an error do not run.
int32_t qc_pool_profile(const qc_step* steps, int64_t count, qc_ctx* ctx, qc_figures* figures, int32_t counts) {
    const qc_float::Fixed fixed;
    const qc_parallel parallel = ctx->parallel;
    void* const before = ctx->pool;
    if (counts) ctx->parallel = counted_parallel;
    for (int64_t i = 0; i < count && ctx->error_code == QC_OK; ++i) {
        const qc_step& step = steps[i];
        ctx->pool = &figures[i];
        const int64_t begin = now_ns();
        if (step.kernel) step.kernel(ctx, step.operands, step.symbols);
        else memcpy(step.operands[0], step.operands[1], size_t(step.symbols[0]));
        figures[i].ns += now_ns() - begin;
    }
    ctx->parallel = parallel;
    ctx->pool = before;
    return ctx->error_code;
}

void qc_pool_set_spin(int64_t nanoseconds) { spin_ns.store(nanoseconds, std::memory_order_relaxed); }

int32_t qc_pool_workers(void) { return pool.workers.load(std::memory_order_relaxed); }

// The level of x86-64 (psABI) this processor and its operating system support; 0 on other architectures.
int32_t qc_host_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? 4 : v3 ? 3 : 1;
#else
    return 0;
#endif
}

}  // extern "C"
