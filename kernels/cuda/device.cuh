// What every emitted kernel may use: types, conversions, and one wrapper per PTX instruction.
//
// The file has two halves. The first is plain CUDA C++ and is compiled as it stands on every target. The second holds
// inline PTX; the simulated GPU (QC_SIM) leaves it out and defines the same functions in kernels/sim/shim.h, and
// `make gpu-check` compares the two, wrapper by wrapper, on hardware.
//
// No header of a CUDA toolkit is needed: NVRTC alone compiles this text.
#pragma once

#ifndef QC_SIM
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif

#ifndef INT64_C
#define INT64_C(value) value##LL
#endif
#ifndef INFINITY
#define INFINITY __uint_as_float(0x7f800000u)
#define NAN __uint_as_float(0x7fffffffu)
#endif

#define QC_DEVICE __device__ __forceinline__
// Of lambdas: the simulator must see every access of a kernel, and sees those of functions that are inlined.
#ifdef QC_SIM
#define QC_INLINED __attribute__((always_inline))
#else
#define QC_INLINED
#endif
#define QC_WARP 32
#define QC_ALL_LANES 0xffffffffu

// No instruction: the compiler moves no access to memory across it, which bounds what it keeps in registers.
#define QC_KEEP_ORDER() asm volatile("" ::: "memory")
// Nor here: the compiler takes `x`, of 32 or 64 bits, for a value of its own, and keeps it instead of making it anew at
// each use.
#define QC_KEEP_32(x) asm volatile("" : "+r"(x))
#define QC_KEEP_64(x) asm volatile("" : "+l"(x))

// 16-bit floats are bits: arithmetic happens in fp32 or in the tensor cores.
struct alignas(2) qc_bf16 { uint16_t bits; };
struct alignas(2) qc_f16 { uint16_t bits; };

// --- inline PTX, one wrapper per instruction; the simulator's twins stand in kernels/sim/shim.h ----------------------
#ifndef QC_SIM

// A name for a range of the block's dynamic shared memory: `QC_SHARED(float, x_tile, 1024, 256)` is 256 floats at byte
// 1024. Ranges of one kernel do not overlap; the simulator puts red zones between them.
#define QC_SHARED(type, name, offset, count) type* const name = (type*)(qc_shared_memory() + (offset))
QC_DEVICE unsigned char* qc_shared_memory() {
    extern __shared__ __align__(1024) unsigned char qc_shared_bytes[];
    return qc_shared_bytes;
}

// A pointer to global memory that is computed once.
QC_DEVICE const uint8_t* qc_fixed_global(const uint8_t* global) {
    auto address = __cvta_generic_to_global(global);
    QC_KEEP_64(address);
    return (const uint8_t*)__cvta_global_to_generic(address);
}

QC_DEVICE uint32_t qc_shared_address(const void* shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

// A place in shared memory, by its 32-bit address. From a pointer it is converted at each use, which takes three
// instructions on sm_90; `qc_fixed` is converted once, and what is added to it stays one addition.
struct qc_place {
    uint32_t address;
    QC_DEVICE qc_place(const void* shared) : address(qc_shared_address(shared)) {}
    QC_DEVICE qc_place operator+(int bytes) const {
        qc_place moved = *this;
        moved.address += (uint32_t)bytes;
        return moved;
    }
};
QC_DEVICE qc_place qc_fixed(const void* shared) {
    qc_place place = shared;
    QC_KEEP_32(place.address);
    return place;
}

// 16 bytes that are read once (weights): not kept in L1.
QC_DEVICE uint4 qc_load_stream_16(const void* global) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(global));
    return v;
}

// 8 bytes of shared memory, at a multiple of 8.
QC_DEVICE float2 qc_load_shared_8(qc_place shared) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(shared.address));
    return v;
}

// 16 bytes to shared memory, at a multiple of 16.
QC_DEVICE void qc_store_shared_16(qc_place shared, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared.address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// 16 bytes to global memory, at a multiple of 16. Of a pointer to a vector whose alignment it cannot see, the compiler
// makes four stores.
QC_DEVICE void qc_store_global_16(void* global, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(global), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Kernels that follow one another in a stream may overlap on sm_90 and later, where they are launched so: the next one
// starts when all blocks of this one have called the first function or ended, and whatever it does before the second
// function may run beside this kernel. The second returns when all kernels before have ended and what they wrote is
// visible.
// A kernel calls it before it reads what another kernel may have written, and before it writes anything.
#if __CUDA_ARCH__ >= 900
#define QC_KERNELS_OVERLAP true
#else
#define QC_KERNELS_OVERLAP false
#endif
QC_DEVICE void qc_let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
QC_DEVICE void qc_wait_for_kernels() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes from global to shared memory, complete at the wait that covers its commit. Both addresses 16-byte aligned.
// Before sm_80 it is an ordinary copy.
QC_DEVICE void qc_cp_async_16(qc_place shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared.address), "l"(global) : "memory");
#else
    qc_store_shared_16(shared, *(const uint4*)global);
#endif
}
// The same where `there` holds, else 16 zero bytes (`global` is then not read).
QC_DEVICE void qc_cp_async_16_or_zero(qc_place shared, const void* global, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared.address), "l"(global), "r"(there ? 16 : 0) : "memory");
#else
    qc_store_shared_16(shared, there ? *(const uint4*)global : make_uint4(0, 0, 0, 0));
#endif
}
QC_DEVICE void qc_cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most N of this thread's committed groups are under way. Other threads' copies need a barrier after it.
template <int N> QC_DEVICE void qc_cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements. Lane 8i + r gives the address of row r (16 bytes) of matrix i; register i of
// lane l then holds elements 2*(l % 4) and 2*(l % 4) + 1 of row l / 4 of matrix i. `_trans`: of the transposed
// matrices.
QC_DEVICE void qc_ldmatrix_x4(uint32_t (&r)[4], qc_place row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row.address) : "memory");
}
QC_DEVICE void qc_ldmatrix_x4_trans(uint32_t (&r)[4], qc_place row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row.address) : "memory");
}
// Two matrices: the addresses of lanes 0…15 count.
QC_DEVICE void qc_ldmatrix_x2(uint32_t (&r)[2], qc_place row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(row.address) : "memory");
}

// d += a (16 x 16, row-major) * b (16 x 8, column-major), fp32 accumulation. With g = lane / 4, t = lane % 4, two
// 16-bit elements per register, the lower half first:
//   a[0]: row g,     columns 2t, 2t+1        b[0]: rows 2t, 2t+1,     column g
//   a[1]: row g + 8, columns 2t, 2t+1        b[1]: rows 2t+8, 2t+9,   column g
//   a[2]: row g,     columns 2t+8, 2t+9      d[0], d[1]: row g,     columns 2t, 2t+1
//   a[3]: row g + 8, columns 2t+8, 2t+9      d[2], d[3]: row g + 8, columns 2t, 2t+1
// The tag chooses the element type. bf16 needs sm_80; f16 on sm_75 is two products of depth 8.
QC_DEVICE void qc_mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], qc_f16) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif __CUDA_ARCH__ >= 750
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b[1]));
#endif
}
#if __CUDA_ARCH__ >= 800
QC_DEVICE void qc_mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], qc_bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// d += a (16 x 32, row-major) * b (32 x 8, column-major) of signed bytes, in 32 bits that wrap. With g = lane / 4,
// t = lane % 4, four bytes per register, the lowest first:
//   a[0]: row g,     columns 4t … 4t+3       b[0]: rows 4t … 4t+3,       column g
//   a[1]: row g + 8, columns 4t … 4t+3       b[1]: rows 4t+16 … 4t+19,   column g
//   a[2]: row g,     columns 4t+16 … 4t+19   d[0], d[1]: row g,     columns 2t, 2t+1
//   a[3]: row g + 8, columns 4t+16 … 4t+19   d[2], d[3]: row g + 8, columns 2t, 2t+1
// On sm_75 it is four products of 8 x 16; earlier ones have none.
#if __CUDA_ARCH__ >= 750
QC_DEVICE void qc_mma_16832_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1]) : "r"(a[i]), "r"(b[i / 2]));
#endif
}
#endif

// --- products of a warpgroup (wgmma), sm_90a alone -------------------------------------------------------------------
//
// d += a * b for four consecutive warps, the first one's number a multiple of four. a: 64 x 16, in registers; warp w
// has rows 16 w to 16 w + 15, as operand a of qc_mma_16816. b: 16 x 8 N, in shared memory, as rows of 64 columns of its
// transpose: 128 bytes each, one after another from a multiple of 1024 on, the 16-byte piece p of row r at the place of
// piece p ^ r % 8. `b` is a multiple of 32 bytes behind row 0: 16 columns each. d: tile j as d of qc_mma_16816, columns
// 8 j to 8 j + 7.
//
// The product runs on while the warps go on. Until a qc_wgmma_wait covers its commit, d and a keep their registers:
// neither is read nor written, and nobody writes b. Before a product, qc_wgmma_fence orders it behind what has written
// d and a. Whoever has written b calls qc_fence_async before the barrier that the warps wait at.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
QC_DEVICE void qc_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
QC_DEVICE void qc_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the committed groups are under way.
template <int N> QC_DEVICE void qc_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
// What this thread has written to shared memory becomes visible to products, after a barrier.
QC_DEVICE void qc_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of b: its address, 1024 bytes from eight rows to the next, swizzled over 128 bytes (PTX ISA, "Matrix
// descriptor format"; all in units of 16 bytes).
QC_DEVICE uint64_t qc_wgmma_descriptor(qc_place b) {
    return (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16 | (b.address & 0x3ffff) >> 4;
}

#define QC_NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QC_NAMES_64 \
    QC_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QC_NAMES_128 \
    QC_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, " \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QC_SUMS_4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define QC_SUMS_16(d, j) QC_SUMS_4(d, j), QC_SUMS_4(d, j + 1), QC_SUMS_4(d, j + 2), QC_SUMS_4(d, j + 3)
#define QC_SUMS_32(d, j) QC_SUMS_16(d, j), QC_SUMS_16(d, j + 4)
#define QC_SUMS_64(d, j) QC_SUMS_32(d, j), QC_SUMS_32(d, j + 8)
#define QC_SUMS_128(d, j) QC_SUMS_64(d, j), QC_SUMS_64(d, j + 16)
#define QC_WGMMA(shape, type, names, a, b) \
    "{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64" shape "k16.f32." type "." type \
    " {" names "}, {" a "}, " b ", p, 1, 1, 0;}"
#define QC_WGMMA_64(type) QC_WGMMA("n64", type, QC_NAMES_32, "%32, %33, %34, %35", "%36")
#define QC_WGMMA_128(type) QC_WGMMA("n128", type, QC_NAMES_64, "%64, %65, %66, %67", "%68")
#define QC_WGMMA_256(type) QC_WGMMA("n256", type, QC_NAMES_128, "%128, %129, %130, %131", "%132")
QC_DEVICE void qc_wgmma_16(float (&d)[8][4], const uint32_t (&a)[4], qc_place b, qc_bf16) {
    asm volatile(QC_WGMMA_64("bf16")
                 : QC_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
QC_DEVICE void qc_wgmma_16(float (&d)[8][4], const uint32_t (&a)[4], qc_place b, qc_f16) {
    asm volatile(QC_WGMMA_64("f16")
                 : QC_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
QC_DEVICE void qc_wgmma_16(float (&d)[16][4], const uint32_t (&a)[4], qc_place b, qc_bf16) {
    asm volatile(QC_WGMMA_128("bf16")
                 : QC_SUMS_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
QC_DEVICE void qc_wgmma_16(float (&d)[16][4], const uint32_t (&a)[4], qc_place b, qc_f16) {
    asm volatile(QC_WGMMA_128("f16")
                 : QC_SUMS_64(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
QC_DEVICE void qc_wgmma_16(float (&d)[32][4], const uint32_t (&a)[4], qc_place b, qc_bf16) {
    asm volatile(QC_WGMMA_256("bf16")
                 : QC_SUMS_128(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
QC_DEVICE void qc_wgmma_16(float (&d)[32][4], const uint32_t (&a)[4], qc_place b, qc_f16) {
    asm volatile(QC_WGMMA_256("f16")
                 : QC_SUMS_128(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(qc_wgmma_descriptor(b)));
}
#endif

// (x & mask) | bits. A SASS LOP3 takes one immediate: with both constants in the source the compiler makes two of it.
QC_DEVICE uint32_t qc_and_or(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

// a * b + c of both halves, rounded once. bf16 needs sm_80.
QC_DEVICE uint32_t qc_fma2(uint32_t a, uint32_t b, uint32_t c, qc_f16) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#if __CUDA_ARCH__ >= 800
QC_DEVICE uint32_t qc_fma2(uint32_t a, uint32_t b, uint32_t c, qc_bf16) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

// Round to nearest even.
QC_DEVICE float qc_f32_of_f16(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
QC_DEVICE uint16_t qc_f16_of_f32(float x) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
QC_DEVICE uint32_t qc_pack_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)qc_f16_of_f32(high) << 16 | qc_f16_of_f32(low);
#endif
}

// 2^x within 2 ulp, denormal results flushed.
QC_DEVICE float qc_exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Device-wide ordering for reductions by the last block.
QC_DEVICE uint32_t qc_load_acquire(const uint32_t* global) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
    return v;
}
QC_DEVICE void qc_store_release(uint32_t* global, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(global), "r"(v) : "memory");
}
QC_DEVICE uint32_t qc_atomic_add_acq_rel(uint32_t* global, uint32_t v) {  // the old value
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(global), "r"(v) : "memory");
    return old;
}

#endif  // QC_SIM

// --- on every target -------------------------------------------------------------------------------------------------

QC_DEVICE float qc_f32_of_bf16(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
QC_DEVICE uint16_t qc_bf16_of_f32(float x) {  // nearest even; a NaN stays one
    const uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
QC_DEVICE uint32_t qc_pack_bf16(float low, float high) {
#if !defined(QC_SIM) && __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (uint32_t)qc_bf16_of_f32(high) << 16 | qc_bf16_of_f32(low);
#endif
}
QC_DEVICE uint32_t qc_pack(float low, float high, qc_bf16) { return qc_pack_bf16(low, high); }
QC_DEVICE uint32_t qc_pack(float low, float high, qc_f16) { return qc_pack_f16(low, high); }

// What dimension expressions use: C's `/` and `%` round towards zero.
QC_DEVICE int64_t qc_min(int64_t a, int64_t b) { return a < b ? a : b; }
QC_DEVICE int64_t qc_max(int64_t a, int64_t b) { return a > b ? a : b; }
QC_DEVICE int64_t qc_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
QC_DEVICE int64_t qc_mod(int64_t a, int64_t b) { return a - qc_floordiv(a, b) * b; }

// One element as a value of the type that bodies compute in, and back with one rounding.
QC_DEVICE float qc_load(const float* p) { return *p; }
QC_DEVICE float qc_load(const qc_bf16* p) { return qc_f32_of_bf16(p->bits); }
QC_DEVICE float qc_load(const qc_f16* p) { return qc_f32_of_f16(p->bits); }
QC_DEVICE double qc_load(const double* p) { return *p; }
QC_DEVICE int64_t qc_load(const int64_t* p) { return *p; }
QC_DEVICE int32_t qc_load(const int32_t* p) { return *p; }
QC_DEVICE int16_t qc_load(const int16_t* p) { return *p; }
QC_DEVICE int8_t qc_load(const int8_t* p) { return *p; }
QC_DEVICE uint8_t qc_load(const uint8_t* p) { return *p; }
QC_DEVICE bool qc_load(const bool* p) { return *p; }
template <class T, class V> QC_DEVICE void qc_store(T* p, V v) { *p = (T)v; }
QC_DEVICE void qc_store(qc_bf16* p, float v) { p->bits = qc_bf16_of_f32(v); }
QC_DEVICE void qc_store(qc_f16* p, float v) { p->bits = qc_f16_of_f32(v); }

QC_DEVICE float qc_warp_sum(float v) {  // in every lane, in one fixed order
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(QC_ALL_LANES, v, step);
    return v;
}
QC_DEVICE float qc_warp_max(float v) {
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(QC_ALL_LANES, v, step));
    return v;
}
