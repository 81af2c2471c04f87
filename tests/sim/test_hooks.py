"""Every load and store of a kernel is seen, with its whole width, whatever the C++ that it is written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

VECTORS = {
    "uchar2": 2, "char4": 4, "ushort2": 4, "ushort4": 8, "uint2": 8, "float2": 8, "int4": 16, "uint4": 16, "float4": 16,
    "double2": 16,
}  # fmt: skip

FORMS = {
    "assignment": "y[t] = x[t];",
    "local": "T v = x[t]; y[t] = v;",
    "ldg": "y[t] = __ldg(x + t);",
    "cast": "*(T*)((unsigned char*)y + sizeof(T) * t) = *(const T*)((const unsigned char*)x + sizeof(T) * t);",
    "array": "T v[2]; for (int i = 0; i < 2; ++i) v[i] = x[i ? 31 - t : t]; y[t] = v[n];",
    "conditional": "y[t] = t < 32 ? x[t] : T();",
    "returned": "y[t] = identity(x[t]);",
    "assembled": "const T v = x[t]; T w = v; w.x = v.y; w.y = v.x; w.x = v.x; w.y = v.y; y[t] = w;",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_is_one_access_of_its_size(compile_cuda: Callable[..., Any], form: str) -> None:
    text = "template <class T> __device__ __attribute__((noinline)) T identity(T v) { return v; }\n"
    for name in VECTORS:
        body = FORMS[form].replace("T()", f"{name}()")
        text += f'extern "C" __global__ void qk_{name}(const {name}* x, {name}* y, int64_t n) {{\n'
        text += f"    typedef {name} T; const int t = threadIdx.x; {body}\n}}\n"
    text += 'extern "C" __global__ void qk_nothing(const char* x, char* y, int64_t n) { }\n'
    cuda = compile_cuda(text)
    rng = np.random.default_rng(1)
    for name, size in VECTORS.items():
        x = rng.integers(0, 256, 32 * size, dtype=np.uint8)
        cuda.run("nothing", x=("r", x), y=("w", x), n=0)
        overhead = cuda.report.checked_accesses
        (y,) = cuda.run(name, x=("r", x), y=("w", x), n=0)
        np.testing.assert_array_equal(y, x)
        expected = 96 if form == "array" else 64  # a load and a store, or two loads and a store, in each of 32 threads
        assert cuda.report.checked_accesses - overhead == expected, name
        assert cuda.report.unwritten == 0
        (read, written) = sorted(cuda.report.accesses, key=lambda each: each[2])
        assert (read[1] - read[0], written[1] - written[0]) == (32 * size, 32 * size)


def test_misaligned_vectors_are_found_for_every_vector(compile_cuda: Callable[..., Any]) -> None:
    text = "".join(
        f'extern "C" __global__ void qk_{name}(const uint8_t* x, {name}* y) {{ y[0] = *(const {name}*)(x + 1); }}\n'
        for name in VECTORS
    )
    cuda = compile_cuda(text)
    for name in VECTORS:
        cuda.finds("misaligned", name, block=1, x=("r", np.zeros(64, np.uint8)), y=("w", np.zeros(16, np.uint8)))


COPIES = {
    "struct": "y[t] = x[t];",
    "large struct by a local": "Large v = x[t]; y[t] = v;",
    "memcpy": "memcpy(y + t, x + t, sizeof(Large));",
    "loop": "for (int i = 0; i < 20; ++i) y[t].v[i] = x[t].v[i];",
    "bytes": "for (int i = 0; i < 80; ++i) ((unsigned char*)(y + t))[i] = ((const unsigned char*)(x + t))[i];",
    "words of bytes": """for (int i = 0; i < 20; ++i) {
        const unsigned char* p = (const unsigned char*)x[t].v + 4 * i;
        y[t].v[i] = __uint_as_float(p[0] | p[1] << 8 | p[2] << 16 | (unsigned)p[3] << 24);
    }""",
}


@pytest.mark.parametrize("case", COPIES)
def test_structs_and_copies_are_seen(compile_cuda: Callable[..., Any], case: str) -> None:
    cuda = compile_cuda(f"""
    struct Large {{ float v[20]; }};
    extern "C" __global__ void qk_copy(const Large* x, Large* y) {{ const int t = threadIdx.x; {COPIES[case]} }}
    extern "C" __global__ void qk_past(const Large* x, Large* y) {{ const int t = threadIdx.x + 1; {COPIES[case]} }}
    """)
    x = np.arange(32 * 20, dtype=np.float32)
    (y,) = cuda.run("copy", x=("r", x), y=("w", x))
    np.testing.assert_array_equal(y, x)
    assert cuda.report.unwritten == 0
    (read, written) = sorted(cuda.report.accesses, key=lambda each: each[2])
    assert (read[1] - read[0], written[1] - written[0]) == (2560, 2560)
    cuda.finds("out-of-bounds", "past", x=("r", x), y=("w", x))


@pytest.mark.parametrize("copy", ["y[t] = identity(x[t]);", "__builtin_memcpy(y + t, x + t, sizeof(Large));"])
def test_a_copy_that_has_no_hook_is_found_afterwards(compile_cuda: Callable[..., Any], copy: str) -> None:
    """The compiler places no hook where a call returns a large struct into memory; no emitted kernel does that."""
    cuda = compile_cuda(f"""
    struct Large {{ float v[20]; }};
    __device__ __attribute__((noinline)) Large identity(const Large& v) {{ return v; }}
    extern "C" __global__ void qk_copy(const Large* x, Large* y) {{ const int t = threadIdx.x; {copy} }}
    """)
    x = np.arange(32 * 20, dtype=np.float32)
    assert "no write to it was seen" in cuda.finds("self-check", "copy", x=("r", x), y=("w", x))


def test_constants_and_locals_are_no_device_memory(compile_cuda: Callable[..., Any]) -> None:
    cuda = compile_cuda("""
    __constant__ float table[4] = {1, 2, 3, 4};
    extern "C" __global__ void qk_use(float* y, int64_t n) {
        float local[8];
        for (int i = 0; i < 8; ++i) local[(i + n) % 8] = table[i % 4];
        volatile float* p = local;
        y[threadIdx.x] = p[(threadIdx.x + n) % 8];
    }
    extern "C" __global__ void qk_write(float* y) { ((float*)table)[threadIdx.x & 3] = y[threadIdx.x]; }
    """)
    (y,) = cuda.run("use", y=("w", np.zeros(32, np.float32)), n=3)
    np.testing.assert_array_equal(y, np.tile([1, 2, 3, 4], 8))
    message = cuda.finds("out-of-bounds", "write", y=("rw", np.zeros(32, np.float32)))
    assert "may only touch device memory" in message


def test_observed_intervals_have_holes_where_nothing_was_touched(compile_cuda: Callable[..., Any]) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_even(const float* x, float* y) {
        y[2 * threadIdx.x] = x[threadIdx.x < 16 ? threadIdx.x : threadIdx.x + 16];
    }""")
    x = np.arange(64, dtype=np.float32)
    cuda.run("even", x=("r", x), y=("w", x))
    reads = [(low, high) for low, high, kind in cuda.report.accesses if kind == "r"]
    writes = [(low, high) for low, high, kind in cuda.report.accesses if kind == "w"]
    assert [high - low for low, high in reads] == [64, 64] and reads[1][0] - reads[0][0] == 128
    assert [high - low for low, high in writes] == [4] * 32 and cuda.report.unwritten == 128
