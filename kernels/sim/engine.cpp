// The engine of the simulated GPU: what kernels call (the shim's functions and the access hooks that the compiler
// places), and what Python calls. One launch runs at a time.

#include "launch.h"
#include "float_state.h"

using namespace qs;

#define QS_API extern "C" __attribute__((visibility("default")))
#define QS_PC ((uint64_t)__builtin_return_address(0) - 1)

// --- what kernels call -----------------------------------------------------------------------------------------------

QS_API uint64_t qs_thread_index() { return S.thread->index; }
QS_API uint64_t qs_block_index() { return S.block->index; }
QS_API uint64_t qs_block_dim() { return S.block_dim; }
QS_API uint64_t qs_grid_dim() { return S.grid_dim; }
QS_API void* qs_shared(int line, const char* name, int64_t offset, int64_t count, int64_t size, int64_t alignment) {
    return shared_range(line, name, offset, count, size, alignment);
}
QS_API int qs_barrier(int line, int reduction, int value) { return barrier(line, reduction, value); }
QS_API void qs_wait_for_kernels() { S.thread->waited = true; }
QS_API void qs_syncwarp(int line, uint32_t mask) { arrive(SYNCWARP, line, mask, nullptr, 0); }
QS_API uint32_t qs_activemask() { return S.thread->warp->alive; }

QS_API uint64_t qs_shuffle(int line, uint32_t mask, uint64_t value, int kind, int operand, int width) {
    if (width < 1 || width > 32 || (width & (width - 1))) {
        add_site(name_of(S.thread), 0, line);
        fail("shuffle-mask", "%s shuffles with the width %d; it must be 1, 2, 4, 8, 16 or 32", name_of(S.thread),
             width);
    }
    ShuffleData data = {value, value, operand, -1};
    arrive(SHUFFLE, line, mask, &data, (uint64_t)kind | (uint64_t)width << 3);
    if (data.failed_source >= 0) {
        add_site(name_of(S.thread), 0, line);
        fail("shuffle-mask",
             "%s (lane %d) takes a value from lane %d, which does not take part in the shuffle (mask 0x%08x)",
             name_of(S.thread), S.thread->lane, data.failed_source, mask);
    }
    return data.result;
}
QS_API uint32_t qs_vote(int line, uint32_t mask, int predicate) {
    uint64_t data = (uint64_t)predicate;
    arrive(VOTE, line, mask, &data, 0);
    return (uint32_t)data;
}

template <Kind kind>
__attribute__((noinline)) static void access_at(uintptr_t at, uint64_t size, uint64_t pc, int line, bool aligned) {
    access<kind>(at, size, pc, line, aligned);
}

static bool in_shared(const void* p) { return (uintptr_t)p - S.shared_base < S.shared_bytes; }

static void need_shared(const char* what, const void* p, int line) {
    if (!in_shared(p)) {
        add_site(name_of(S.thread), 0, line);
        fail("out-of-bounds", "%s in %s takes an address of shared memory, and got %s", what, name_of(S.thread),
             describe_global((uintptr_t)p, 16));
    }
    if ((uintptr_t)p & 15) {
        add_site(name_of(S.thread), 0, line);
        fail("misaligned", "%s in %s: the address, %s, is no multiple of 16", what, name_of(S.thread),
             describe_shared((uintptr_t)p));
    }
}

struct qs_fragment { uint32_t r[4]; };
struct qs_sum { float d[4]; };
QS_API qs_fragment qs_ldmatrix(int line, const void* row, int matrices, int transposed) {
    whole_warp("ldmatrix", line);
    if (S.thread->lane < 8 * matrices) {
        need_shared("ldmatrix", row, line);
        if (S.checked) access_at<READ>((uintptr_t)row, 16, 0, line, true);
    }
    MatrixData data = {(const char*)row, {0, 0, 0, 0}};
    arrive(LDMATRIX, line, ~0u, &data, (uint64_t)matrices | (uint64_t)transposed << 3);
    return {{data.r[0], data.r[1], data.r[2], data.r[3]}};
}
// kind: 0 f16, 1 bf16, 2 signed bytes, whose sums are the bits of floats.
QS_API qs_sum qs_mma(int line, int kind, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                     float d0, float d1, float d2, float d3) {
    whole_warp("mma", line);
    ProductData data = {{a0, a1, a2, a3}, {b0, b1}, {d0, d1, d2, d3}};
    arrive(MMA, line, ~0u, &data, (uint64_t)kind);
    return {{data.d[0], data.d[1], data.d[2], data.d[3]}};
}

QS_API void qs_cp_async(int line, void* shared, const void* global, int there) {
    need_shared("cp.async", shared, line);
    Thread* t = S.thread;
    if (there && ((uintptr_t)global & 15)) {
        add_site(name_of(t), 0, line);
        fail("misaligned", "cp.async in %s: the source, %s, is no multiple of 16", name_of(t),
             describe_global((uintptr_t)global, 16));
    }
    if (S.checked) {
        if (there && in_shared(global)) {
            add_site(name_of(t), 0, line);
            fail("out-of-bounds", "cp.async in %s reads from shared memory", name_of(t));
        }
        if (there) access_at<READ>((uintptr_t)global, 16, 0, line, true);
        access_at<ASYNC>((uintptr_t)shared, 16, 0, line, true);
    }
    t->copies.push_back({(char*)shared, (const char*)global, (bool)there, t->group, line});
    if (S.launch.early_copies && (next_random() & 1)) {  // a device may copy at once, or at the wait, or between
        if (there) memcpy(shared, global, 16);
        else memset(shared, 0, 16);
    }
}
QS_API void qs_cp_async_commit(int) { ++S.thread->group; }
QS_API void qs_cp_async_wait(int, int groups) {
    Thread* t = S.thread;
    size_t kept = 0;
    const Stamp mine = S.stamp;
    for (AsyncCopy& copy : t->copies) {
        if (copy.group + (uint32_t)groups >= t->group) {
            t->copies[kept++] = copy;
            continue;
        }
        if (copy.there) memcpy(copy.to, copy.from, 16);
        else memset(copy.to, 0, 16);
        if (!S.checked) continue;
        Cell* cells = &S.block->shadow.words[((uintptr_t)copy.to - S.shared_base) / 4];
        for (int i = 0; i < 4; ++i) cells[i].pending = 0, cells[i].written = mine;
    }
    t->copies.resize(kept);
}

QS_API void qs_wgmma(int line, int bf16, int columns, const uint32_t* a, void* b, float* d) {
    whole_warp("wgmma", line);
    need_shared("wgmma", b, line);
    issue_wgmma(line, bf16, columns, a, b, d);
}
QS_API void qs_wgmma_fence(int) { S.thread->fenced_wgmma = true; }
QS_API void qs_wgmma_commit(int) { ++S.thread->products_group; }
QS_API void qs_wgmma_wait(int, int groups) { wait_wgmma(groups); }
QS_API void qs_fence_async(int) {
    advance_time(*S.block);
    S.thread->fenced_async = S.block->time;
}

QS_API void qs_fence(int, int device_wide) {
    Thread* t = S.thread;
    Block& b = *S.block;
    if (!device_wide || !S.checked) return;
    if (t->seen_relaxed) {  // what relaxed reads before the fence saw is now ordered
        if (!t->acquired) t->acquired = std::make_unique<Knowledge>();
        t->acquired->merge(*t->seen_relaxed);
        t->seen_relaxed.reset();
    }
    if (!t->fenced) t->fenced = std::make_unique<Knowledge>();
    advance_time(b);
    Knowledge& k = *t->fenced;
    if (b.known) k.merge(*b.known);
    if (t->acquired) k.merge(*t->acquired);
    k.blocks[b.serial] = time_of(b.ordered);
    const int first = t->id / WARP * WARP;
    for (int lane = 0; lane < WARP; ++lane)
        k.threads[(uint64_t)b.serial << 10 | (uint64_t)(first + lane)] =
            t->warp->partial ? t->warp->met[t->lane][lane] : t->warp->ordered_time;
    k.threads[(uint64_t)b.serial << 10 | (uint64_t)t->id] = b.time;
}

static uint64_t apply(void* p, uint64_t value, uint64_t compare, int operation, int size) {
    enum { READ_, WRITE_, ADD, MAX, MIN, CAS, AND, OR, XOR, ADD_F32, ADD_F64, MAX_SIGNED, MIN_SIGNED };
    uint64_t old = 0;
    memcpy(&old, p, (size_t)size);
    const int64_t s_old = size == 4 ? (int64_t)(int32_t)old : (int64_t)old;
    const int64_t s_value = size == 4 ? (int64_t)(int32_t)value : (int64_t)value;
    uint64_t next = value;
    switch (operation) {
        case READ_: next = old; break;
        case ADD: next = old + value; break;
        case MAX: next = std::max(old, value); break;
        case MIN: next = std::min(old, value); break;
        case CAS: next = old == compare ? value : old; break;
        case AND: next = old & value; break;
        case OR: next = old | value; break;
        case XOR: next = old ^ value; break;
        case MAX_SIGNED: next = (uint64_t)std::max(s_old, s_value); break;
        case MIN_SIGNED: next = (uint64_t)std::min(s_old, s_value); break;
        case ADD_F32: {
            float a, b;
            memcpy(&a, &old, 4), memcpy(&b, &value, 4);
            a += b;
            next = 0;
            memcpy(&next, &a, 4);
            break;
        }
        case ADD_F64: {
            double a, b;
            memcpy(&a, &old, 8), memcpy(&b, &value, 8);
            a += b;
            memcpy(&next, &a, 8);
            break;
        }
        default: break;
    }
    if (operation != READ_) memcpy(p, &next, (size_t)size);
    return old;
}

QS_API uint64_t qs_atomic(int line, void* address, uint64_t value, uint64_t compare, int operation, int size,
                          int order) {
    Thread* t = S.thread;
    const uintptr_t at = (uintptr_t)address;
    const bool reads = operation != 1, writes = operation != 0;
    if (S.checked) {
        if (reads && writes) access_at<ATOMIC_READ>(at, (uint64_t)size, QS_PC, line, true);
        if (writes) access_at<ATOMIC>(at, (uint64_t)size, QS_PC, line, true);
        else access_at<ATOMIC_READ>(at, (uint64_t)size, QS_PC, line, true);
    }
    if (S.checked && !in_shared(address)) {
        if (order & 2) {  // release: a fence and the store
            auto fenced = std::move(t->fenced);
            auto seen = std::move(t->seen_relaxed);
            qs_fence(line, 1);
            Knowledge& k = S.released[at];
            if (!reads) k.blocks.clear(), k.threads.clear();
            k.merge(*t->fenced);
            t->fenced = std::move(fenced), t->seen_relaxed = std::move(seen);
        } else if (writes && t->fenced) {
            Knowledge& k = S.released[at];
            if (!reads) k.blocks.clear(), k.threads.clear();
            k.merge(*t->fenced);
        }
        if (reads) {
            const auto found = S.released.find(at);
            if (found != S.released.end()) {
                auto& into = order & 1 ? t->acquired : t->seen_relaxed;
                if (!into) into = std::make_unique<Knowledge>();
                into->merge(found->second);
            }
        }
    }
    const uint64_t old = apply(address, value, compare, operation, size);
    if (writes && operation != 5) note_progress();
    const bool polls = operation == 0 || (operation == 5 && old != compare);
    if (polls) {
        if (t->polled == at) poll(line, 0);
        t->polled = at;
    } else {
        if (operation == 5) note_progress();
        t->polled = 0;
    }
    return old;
}
QS_API void qs_pause(int line) { poll(line, 0); }
QS_API void qs_trap(int line) {
    add_site(name_of(S.thread), 0, line);
    fail("trap", "%s reached __trap()", name_of(S.thread));
}
QS_API void qs_copy(int line, void* to, const void* from, size_t bytes) {
    if (S.checked && bytes) {
        access_at<READ>((uintptr_t)from, bytes, QS_PC, line, false);
        access_at<WRITE>((uintptr_t)to, bytes, QS_PC, line, false);
    }
    memcpy(to, from, bytes);
}
QS_API void qs_fill(int line, void* to, int value, size_t bytes) {
    if (S.checked && bytes) access_at<WRITE>((uintptr_t)to, bytes, QS_PC, line, false);
    memset(to, value, bytes);
}

// --- the hooks that -fsanitize=thread places before each load and store ----------------------------------------------

template <Kind kind> static void rarely(uintptr_t at, uint64_t size, uint64_t pc, bool aligned) {
    access_at<kind>(at, size, pc, 0, aligned);
}

static void volatile_read(uintptr_t at, uint64_t size, uint64_t pc, bool aligned) {
    rarely<ATOMIC_READ>(at, size, pc, aligned);
    if (at - S.stack_base < STACK_BYTES) return;
    if (S.thread->polled == at) poll(0, pc);
    S.thread->polled = at;
}

#define QS_HOOKS(size)                                                                                                \
    QS_API void __tsan_read##size(void* p) { access<READ>((uintptr_t)p, size, QS_PC, 0, true); }                      \
    QS_API void __tsan_write##size(void* p) { access<WRITE>((uintptr_t)p, size, QS_PC, 0, true); }                    \
    QS_API void __tsan_unaligned_read##size(void* p) { rarely<READ>((uintptr_t)p, size, QS_PC, false); }              \
    QS_API void __tsan_unaligned_write##size(void* p) { rarely<WRITE>((uintptr_t)p, size, QS_PC, false); }            \
    QS_API void __tsan_volatile_read##size(void* p) { volatile_read((uintptr_t)p, size, QS_PC, true); }               \
    QS_API void __tsan_volatile_write##size(void* p) { rarely<ATOMIC>((uintptr_t)p, size, QS_PC, true); }             \
    QS_API void __tsan_unaligned_volatile_read##size(void* p) { volatile_read((uintptr_t)p, size, QS_PC, false); }    \
    QS_API void __tsan_unaligned_volatile_write##size(void* p) { rarely<ATOMIC>((uintptr_t)p, size, QS_PC, false); }  \
    QS_API void __tsan_read_write##size(void* p) {                                                                    \
        rarely<READ>((uintptr_t)p, size, QS_PC, true);                                                                \
        rarely<WRITE>((uintptr_t)p, size, QS_PC, true);                                                               \
    }

QS_HOOKS(1)
QS_HOOKS(2)
QS_HOOKS(4)
QS_HOOKS(8)
QS_HOOKS(16)
QS_API void __tsan_read_range(void* p, size_t size) {
    if (size) rarely<READ>((uintptr_t)p, size, QS_PC, false);
}
QS_API void __tsan_write_range(void* p, size_t size) {
    if (size) rarely<WRITE>((uintptr_t)p, size, QS_PC, false);
}
QS_API void __tsan_init() {}
QS_API void __tsan_func_entry(void*) {}
QS_API void __tsan_func_exit() {}
QS_API void __tsan_vptr_update(void**, void*) {}
QS_API void __tsan_vptr_read(void**) {}
QS_API void* __tsan_memcpy(void* to, const void* from, size_t n) { return qs_copy(0, to, from, n), to; }
QS_API void* __tsan_memmove(void* to, const void* from, size_t n) {
    if (S.checked && n) {
        rarely<READ>((uintptr_t)from, n, QS_PC, false);
        rarely<WRITE>((uintptr_t)to, n, QS_PC, false);
    }
    return memmove(to, from, n);
}
QS_API void* __tsan_memset(void* to, int value, size_t n) { return qs_fill(0, to, value, n), to; }
// Calls that the compiler makes of its own for large copies (linked with --wrap).
QS_API void* __wrap_memcpy(void* to, const void* from, size_t n) { return __tsan_memcpy(to, from, n); }
QS_API void* __wrap_memmove(void* to, const void* from, size_t n) { return __tsan_memmove(to, from, n); }
QS_API void* __wrap_memset(void* to, int value, size_t n) { return __tsan_memset(to, value, n); }

// --- what Python calls -----------------------------------------------------------------------------------------------

typedef std::lock_guard<std::mutex> Lock;

QS_API int qs_reserve(int device) {
    Lock lock(S.mutex);
    return S.memory.reserve(device);
}
QS_API uint64_t qs_allocate(int device, uint64_t nbytes, const char* label) {
    Lock lock(S.mutex);
    return S.memory.allocate(device, nbytes, label);
}
QS_API int qs_free(uint64_t address) {
    Lock lock(S.mutex);
    return S.memory.release(address);
}
QS_API int qs_device_of(uint64_t address) {
    Lock lock(S.mutex);
    return S.memory.device_of(address);
}
// 1 and the allocation's base, size and label; 0 where nothing is allocated.
QS_API int qs_allocation_of(uint64_t address, uint64_t* base, uint64_t* nbytes, char* label, uint64_t room) {
    Lock lock(S.mutex);
    const Allocation* a = S.memory.allocation_of(address);
    if (!a) return 0;
    *base = a->base, *nbytes = a->nbytes;
    snprintf(label, room, "%s", a->label.c_str());
    return 1;
}
// 1 if done, 0 if the bytes do not lie in one allocation.
QS_API int qs_mark_initialised(uint64_t address, uint64_t nbytes) {
    Lock lock(S.mutex);
    Allocation* a = S.memory.allocation_of(address);
    if (!a || address + nbytes > a->base + a->nbytes) return nbytes == 0;
    a->shadow.mark_initialised(address, nbytes);
    return 1;
}
// 1 if all have a value, 0 if not, -1 if the bytes do not lie in one allocation.
QS_API int qs_is_initialised(uint64_t address, uint64_t nbytes) {
    Lock lock(S.mutex);
    const Allocation* a = S.memory.allocation_of(address);
    if (!a || address + nbytes > a->base + a->nbytes) return nbytes == 0 ? 1 : -1;
    return a->shadow.first_uninitialised(address, nbytes) == address + nbytes;
}
// Of every live allocation of the device: the first byte of a red zone that was overwritten, or 0.
QS_API uint64_t qs_broken_red_zone(int device) {
    Lock lock(S.mutex);
    for (const auto& [base, allocation] : S.memory.allocations)
        if (allocation->device == device)
            if (const unsigned char* broken = broken_red_zone(*allocation)) return (uint64_t)broken;
    return 0;
}
QS_API void qs_launch(const QsLaunch* launch, QsReport* report) {
    Lock lock(S.mutex);
    const qc_float::Fixed fixed;  // a GPU knows nothing of the caller's
    S.launch = *launch;
    run_launch(report);
}
