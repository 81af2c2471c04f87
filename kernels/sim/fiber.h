// Fibers: a stack and a saved stack pointer each. A switch saves what the calling convention says a call preserves, and
// nothing else: no system call, unlike swapcontext, which would be the larger part of a simulated barrier.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(QS_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define QS_UCONTEXT 1
#endif
#ifdef QS_UCONTEXT
#include <ucontext.h>
#endif

namespace qs {

constexpr size_t STACK_BYTES = 128 * 1024;  // a guard page below it; pages that no fiber touches are never there

#ifdef QS_UCONTEXT

struct Fiber {
    ucontext_t context;
};
inline void switch_fiber(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }
inline void prepare_fiber(Fiber* fiber, char* stack, void (*entry)()) {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, entry, 0);
}

#else

struct Fiber {
    void* stack_pointer;
};
extern "C" void qs_switch_stacks(void** save, void* load) __attribute__((visibility("hidden")));

#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .hidden qs_switch_stacks
    .globl qs_switch_stacks
    .type qs_switch_stacks, @function
qs_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size qs_switch_stacks, .-qs_switch_stacks
)");
inline void prepare_fiber(Fiber* fiber, char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK_BYTES);
    top[-1] = nullptr;          // the place of a return address: `entry` never returns
    top[-2] = (void*)entry;     // where the switch's `ret` goes; the stack is then 16 n + 8, as after a call
    for (int i = 3; i <= 8; ++i) top[-i] = nullptr;
    fiber->stack_pointer = top - 8;
}
#else  // __aarch64__
asm(R"(
    .text
    .p2align 4
    .hidden qs_switch_stacks
    .globl qs_switch_stacks
    .type qs_switch_stacks, %function
qs_switch_stacks:
    stp x19, x20, [sp, #-160]!
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x19, x20, [sp], #160
    ret
    .size qs_switch_stacks, .-qs_switch_stacks
)");
inline void prepare_fiber(Fiber* fiber, char* stack, void (*entry)()) {
    char* top = stack + STACK_BYTES - 160;
    for (int i = 0; i < 20; ++i) ((void**)top)[i] = nullptr;
    ((void**)top)[11] = (void*)entry;  // x30, where the switch's `ret` goes
    fiber->stack_pointer = top;
}
#endif
inline void switch_fiber(Fiber* from, Fiber* to) { qs_switch_stacks(&from->stack_pointer, to->stack_pointer); }

#endif

// `count` stacks, each with a guard page below it; null if the system has no room for them.
inline char* map_stacks(size_t count) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), each = STACK_BYTES + page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* base = (char*)mmap(nullptr, count * each, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    for (size_t i = 0; i < count; ++i) mprotect(base + i * each, page, PROT_NONE);
    return base;
}
inline char* stack_of(char* stacks, size_t index) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return stacks + index * (STACK_BYTES + page) + page;
}

}  // namespace qs
