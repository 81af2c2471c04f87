"""What the shim gives kernels in place of the device's own functions, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

TEXT = r"""
extern "C" __global__ void qk_widen(const uint16_t* x, float* y) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i] = qc_f32_of_f16(x[i]);
}
extern "C" __global__ void qk_narrow(const float* x, uint16_t* y, uint16_t* z) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    y[i] = qc_f16_of_f32(x[i]);
    z[i] = qc_bf16_of_f32(x[i]);
}
extern "C" __global__ void qk_pack(uint32_t* y) {
    y[0] = qc_pack_f16(1.0f, -2.0f);
    y[1] = qc_pack_bf16(1.0f, -2.0f);
}
extern "C" __global__ void qk_integers(const float* x, int* y) {
    const float v = x[threadIdx.x];
    int* const row = y + 4 * threadIdx.x;
    row[0] = __float2int_rn(v);
    row[1] = __float2int_rz(v);
    row[2] = __float2int_rd(v);
    row[3] = (int)__float2uint_rn(v);
}
extern "C" __global__ void qk_bits(const uint32_t* x, uint32_t* y) {
    const uint32_t v = x[threadIdx.x];
    uint32_t* const row = y + 8 * threadIdx.x;
    row[0] = __popc(v);
    row[1] = __clz(v);
    row[2] = __ffs(v);
    row[3] = __brev(v);
    row[4] = __byte_perm(v, 0x89abcdefu, 0x7531u);
    row[5] = __byte_perm(v, 0x89abcdefu, 0x4c04u);
    row[6] = __funnelshift_l(0x80000001u, v, 4);
    row[7] = __umulhi(v, 0x10001u);
}
extern "C" __global__ void qk_shuffles(const int64_t* x, int64_t* y) {
    const int t = threadIdx.x;
    const int64_t v = x[t];
    y[t] = __shfl_sync(QC_ALL_LANES, v, 5);
    y[32 + t] = __shfl_sync(QC_ALL_LANES, v, t + 1, 8);
    y[64 + t] = __shfl_up_sync(QC_ALL_LANES, v, 3);
    y[96 + t] = __shfl_down_sync(QC_ALL_LANES, v, 3, 16);
    y[128 + t] = __shfl_xor_sync(QC_ALL_LANES, v, 9);
    y[160 + t] = (int64_t)__shfl_xor_sync(QC_ALL_LANES, (float)v, 1);
}
extern "C" __global__ void qk_votes(uint32_t* y) {
    const int t = threadIdx.x;
    y[t] = __ballot_sync(QC_ALL_LANES, t % 3 == 0);
    y[64 + t] = __any_sync(QC_ALL_LANES, t == 40) | __all_sync(QC_ALL_LANES, t < 32) << 1;
    y[128 + t] = __syncthreads_or(t == 63) | __syncthreads_and(t < 63) << 1 | __syncthreads_count(t % 4 == 0) << 2;
}
extern "C" __global__ void qk_atomics(int* y, float* f, unsigned long long* u) {
    const int t = threadIdx.x;
    atomicAdd(y, t);
    atomicMax(y + 1, 10 - t);
    atomicMin(y + 2, 10 - t);
    atomicCAS(y + 3, 0, t == 7 ? 99 : 0);
    atomicOr((unsigned*)y + 4, 1u << t % 8);
    atomicExch(y + 5, 3);
    atomicAdd(f, 0.5f);
    atomicAdd(u, 1ull << 33);
}
"""


@pytest.fixture(params=[True, False], ids=["checked", "fast"])
def cuda(compile_cuda: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return compile_cuda(TEXT, checked=request.param)


def test_every_half_widens_exactly(cuda: Any) -> None:
    x = np.arange(65536, dtype=np.uint16)
    (y,) = cuda.run("widen", grid=256, block=256, x=("r", x), y=("w", np.zeros(65536, np.float32)))
    np.testing.assert_array_equal(y, x.view(np.float16).astype(np.float32))


def test_floats_narrow_to_the_nearest_even(cuda: Any) -> None:
    rng = np.random.default_rng(0)
    halves = np.arange(0, 31744, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 65504, 65519.996, 65520, 1e-8, 6e-8, 2.98023224e-8], np.float32)
    x = np.concatenate([ties, -ties, np.nextafter(ties, np.float32(9e9)), bits, special])
    x = np.resize(x[~np.isnan(x)], (len(x) // 256 + 1) * 256)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    y = np.zeros(x.size, np.uint16)
    y, z = cuda.run("narrow", grid=x.size // 256, block=256, x=("r", x), y=("w", y), z=("w", y))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(z, x.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_not_a_number_stays_one(cuda: Any) -> None:
    x = np.full(256, np.nan, np.float32)
    y = np.zeros(256, np.uint16)
    y, z = cuda.run("narrow", block=256, x=("r", x), y=("w", y), z=("w", y))
    assert np.isnan(y.view(np.float16)).all() and np.isnan(z.view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_the_lower_half_of_a_pair_comes_first(cuda: Any) -> None:
    (y,) = cuda.run("pack", block=1, y=("w", np.zeros(2, np.uint32)))
    np.testing.assert_array_equal(y, [0xC0003C00, 0xC0003F80])


def test_conversions_to_integers_saturate(cuda: Any) -> None:
    x = np.array([0.5, 1.5, -2.5, 3e9, -3e9, np.nan, 2.7, -2.7], np.float32)
    (y,) = cuda.run("integers", block=8, x=("r", x), y=("w", np.zeros((8, 4), np.int32)))
    low, high = -(2**31), 2**31 - 1
    np.testing.assert_array_equal(y[:, 0], [0, 2, -2, high, low, 0, 3, -3])
    np.testing.assert_array_equal(y[:, 1], [0, 1, -2, high, low, 0, 2, -2])
    np.testing.assert_array_equal(y[:, 2], [0, 1, -3, high, low, 0, 2, -3])
    np.testing.assert_array_equal(y[:, 3].view(np.uint32), [0, 2, 0, 3000000000, 0, 0, 3, 0])


def test_bit_functions(cuda: Any) -> None:
    x = np.array([0, 1, 0x80000000, 0x12345678], np.uint32)
    (y,) = cuda.run("bits", block=4, x=("r", x), y=("w", np.zeros((4, 8), np.uint32)))
    np.testing.assert_array_equal(y[:, 0], [0, 1, 1, 13])
    np.testing.assert_array_equal(y[:, 1], [32, 31, 0, 3])
    np.testing.assert_array_equal(y[:, 2], [0, 1, 32, 4])
    np.testing.assert_array_equal(y[:, 3], [0, 0x80000000, 1, 0x1E6A2C48])
    # selector 0x7531, lowest nibble first: bytes 1, 3 of x, then 5, 7, which are bytes 1, 3 of the other word
    np.testing.assert_array_equal(y[3, 4], 0x89CD1256)
    # 4: byte 0 of the other word; 0: byte 0 of x; c: as 4, the fourth bit does not count; 4 again
    np.testing.assert_array_equal(y[3, 5], 0xEFEF78EF)
    np.testing.assert_array_equal(y[3, 6], 0x23456788)
    np.testing.assert_array_equal(y[:, 7], [(int(v) * 0x10001) >> 32 for v in x])


def test_shuffles(cuda: Any) -> None:
    x = np.arange(32, dtype=np.int64) + (1 << 20)
    (y,) = cuda.run("shuffles", x=("r", x), y=("w", np.zeros((6, 32), np.int64)))
    lane = np.arange(32)
    np.testing.assert_array_equal(y[0], x[5])
    np.testing.assert_array_equal(y[1], x[lane // 8 * 8 + (lane + 1) % 8])
    np.testing.assert_array_equal(y[2], x[np.where(lane < 3, lane, lane - 3)])
    np.testing.assert_array_equal(y[3], x[np.where(lane % 16 > 12, lane, (lane + 3) % 32)])
    np.testing.assert_array_equal(y[4], x[lane ^ 9])
    np.testing.assert_array_equal(y[5], x[lane ^ 1])


def test_votes_and_counting_barriers(cuda: Any) -> None:
    (y,) = cuda.run("votes", block=64, y=("w", np.zeros((3, 64), np.uint32)))
    third = [sum(1 << lane for lane in range(32) if (lane + base) % 3 == 0) for base in (0, 32)]
    np.testing.assert_array_equal(y[0], np.repeat(third, 32))
    np.testing.assert_array_equal(y[1], np.repeat([2, 1], 32))
    np.testing.assert_array_equal(y[2], 1 | 0 << 1 | 16 << 2)


def test_atomics(cuda: Any) -> None:
    integers = np.array([0, -5, 5, 0, 0, 0], np.int32)
    y, f, u = cuda.run(
        "atomics",
        grid=2,
        block=48,
        y=("rw", integers),
        f=("rw", np.zeros(1, np.float32)),
        u=("rw", np.zeros(1, np.uint64)),
    )
    np.testing.assert_array_equal(y, [2 * sum(range(48)), 10, -37, 99, 255, 3])
    assert f[0] == 48 and u[0] == 96 << 33
