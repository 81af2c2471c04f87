// The floating-point state that kernels run in, whatever the caller's is: round to nearest, denormals kept, no traps.
// Results would else depend on the caller (torch.set_flush_denormal), and on which thread computes what: a thread
// begins with the state of the one that made it.
#pragma once
#include <stdint.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace qc_float {

#if defined(__SSE__)
typedef unsigned state;
const state fixed = 0x1f80;  // MXCSR at reset: all exceptions masked, neither FTZ nor DAZ
inline state get() { return _mm_getcsr(); }
inline void set(state value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
typedef uint64_t state;
const state fixed = 0;  // FPCR at reset
inline state get() {
    state value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
}
inline void set(state value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
typedef int state;
const state fixed = 0;
inline state get() { return 0; }
inline void set(state) {}
#endif

// The fixed state from here to the end of the scope, then the one that was before.
struct Fixed {
    const state before = get();
    Fixed() { set(fixed); }
    ~Fixed() { set(before); }
};

}  // namespace qc_float
