"""Correct kernels give right numbers and no finding, whatever the shape and the order of execution."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

Run = Callable[[Any, int, np.random.Generator], None]

TEXT = r"""
extern "C" __global__ void qk_rows(const float* x, float* y, int64_t n) {  // sums of rows: warps, one barrier
    QC_SHARED(float, parts, 0, 32);
    float sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
    sum = qc_warp_sum(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0;
        for (int w = 0; w < (int)blockDim.x / 32; ++w) total += parts[w];
        y[blockIdx.x] = total;
    }
}

// Neighbouring threads write halves of one word.
extern "C" __global__ void qk_transpose(const uint16_t* x, uint16_t* y, int64_t rows, int64_t columns) {
    QC_SHARED(uint16_t, tile, 0, 16 * 17);
    const int64_t r0 = blockIdx.y * 16, c0 = blockIdx.x * 16;
    if (r0 + threadIdx.y < rows && c0 + threadIdx.x < columns)
        tile[threadIdx.y * 17 + threadIdx.x] = x[(r0 + threadIdx.y) * columns + c0 + threadIdx.x];
    __syncthreads();
    if (c0 + threadIdx.y < columns && r0 + threadIdx.x < rows)
        y[(c0 + threadIdx.y) * rows + r0 + threadIdx.x] = tile[threadIdx.x * 17 + threadIdx.y];
}

extern "C" __global__ void qk_pipeline(const float* x, float* y, int64_t tiles) {  // cp.async, three stages
    QC_SHARED(float, ring, 0, 3 * 256);
    const int t = threadIdx.x;
    for (int64_t stage = 0; stage < 2; ++stage) {
        qc_cp_async_16_or_zero(ring + stage * 256 + 4 * t, x + stage * 256 + 4 * t, stage < tiles);
        qc_cp_async_commit();
    }
    float sum = 0;
    for (int64_t i = 0; i < tiles; ++i) {
        qc_cp_async_wait<1>();
        __syncthreads();
        for (int k = 0; k < 4; ++k) sum += ring[i % 3 * 256 + (t + 64 * k + 17) % 256];
        const int64_t next = i + 2;
        qc_cp_async_16_or_zero(ring + next % 3 * 256 + 4 * t, x + next * 256 + 4 * t, next < tiles);
        qc_cp_async_commit();
    }
    y[t] = sum;
}

extern "C" __global__ void qk_product(const qc_bf16* a, const qc_bf16* b, float* y, int64_t k) {  // 16 x 8 by one warp
    QC_SHARED(qc_bf16, a_tile, 0, 256);
    QC_SHARED(qc_bf16, b_tile, 512, 128);
    const int t = threadIdx.x;
    float d[4] = {0, 0, 0, 0};
    for (int64_t k0 = 0; k0 < k; k0 += 16) {
        for (int i = t; i < 256; i += 32) a_tile[i] = a[i / 16 * k + k0 + i % 16];
        for (int i = t; i < 128; i += 32) b_tile[i] = b[i / 16 * k + k0 + i % 16];
        __syncwarp();
        uint32_t left[4], right[2];
        qc_ldmatrix_x4(left, a_tile + t % 16 * 16 + t / 16 * 8);
        qc_ldmatrix_x2(right, b_tile + t % 8 * 16 + t / 8 % 2 * 8);
        qc_mma_16816(d, left, right, qc_bf16());
        __syncwarp();
    }
    for (int i = 0; i < 4; ++i) y[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = d[i];
}

extern "C" __global__ void qk_last(const float* x, float* parts, uint32_t* count, float* y) {  // the last block adds up
    QC_SHARED(uint32_t, turn, 0, 1);
    const int t = threadIdx.x;
    const float sum = qc_warp_sum(x[blockIdx.x * 32 + t]);
    if (t == 0) {
        parts[blockIdx.x] = sum;
        *turn = qc_atomic_add_acq_rel(count, 1u);
    }
    __syncthreads();
    if (*turn != gridDim.x - 1) return;
    float total = 0;
    for (int i = t; i < (int)gridDim.x; i += 32) total += parts[i];
    total = qc_warp_sum(total);
    if (t == 0) *y = total, *count = 0;
}

extern "C" __global__ void qk_histogram(const uint8_t* x, uint32_t* y, int64_t n) {  // atomics, shared and global
    QC_SHARED(uint32_t, counts, 0, 16);
    if (threadIdx.x < 16) counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        atomicAdd(&counts[x[i] & 15], 1u);
    __syncthreads();
    if (threadIdx.x < 16) atomicAdd(&y[threadIdx.x], counts[threadIdx.x]);
}

extern "C" __global__ void qk_groups(const float* x, float* y) {  // groups of eight lanes, each on its own, in place
    QC_SHARED(float, tile, 0, 128);
    const int t = threadIdx.x, lane = t % 32, member = t % 8;
    const uint32_t mine = 0xffu << (lane / 8 * 8);
    tile[t] = x[blockIdx.x * blockDim.x + t];
    for (int step = 4; step > 0; step /= 2) {
        __syncwarp(mine);
        if (member < step) tile[t] += tile[t + step];
    }
    __syncwarp(mine);
    float v = tile[t - member];
    v += __shfl_xor_sync(mine, v, 1, 8);
    const uint32_t positive = __ballot_sync(mine, v > 0) & mine;
    __syncwarp(mine);
    tile[t] = positive == mine ? v : -v;
    y[blockIdx.x * blockDim.x + t] = tile[t];
}

extern "C" __global__ void qk_scan(float* x, int64_t n) {  // in place: doubling, two buffers, a barrier each
    QC_SHARED(float, first, 0, 256);
    QC_SHARED(float, second, 1024, 256);
    const int t = threadIdx.x;
    float* from = first;
    float* to = second;
    from[t] = t < n ? x[blockIdx.x * n + t] : 0;
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        __syncthreads();
        to[t] = t >= step ? from[t] + from[t - step] : from[t];
        float* const other = from;
        from = to;
        to = other;
    }
    if (t < n) x[blockIdx.x * n + t] = from[t];
    const int inside = __syncthreads_count(t < n);
    if (t == 0 && inside != n) __trap();
}
"""


def rows(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    b, n = int(rng.integers(1, 6)), int(rng.integers(1, 300))
    x = rng.standard_normal((b, n)).astype(np.float32)
    (y,) = cuda.run(
        "rows", grid=b, block=32 * int(rng.integers(1, 5)), shared=128, seed=seed, x=("r", x),
        y=("w", np.zeros(b, np.float32)), n=n,
    )  # fmt: skip
    np.testing.assert_allclose(y, x.astype(np.float64).sum(1), rtol=1e-4, atol=1e-4)


def transpose(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    r, c = (int(v) for v in rng.integers(1, 50, 2))
    x = rng.integers(0, 2**16, (r, c), dtype=np.uint16)
    grid = (-(-c // 16), -(-r // 16))
    (y,) = cuda.run(
        "transpose",
        grid=grid,
        block=(16, 16),
        shared=544,
        seed=seed,
        x=("r", x),
        y=("w", x.T.copy()),
        rows=r,
        columns=c,
    )
    np.testing.assert_array_equal(y, x.T)


def pipeline(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    tiles = int(rng.integers(0, 7))
    x = rng.integers(0, 100, (tiles, 256)).astype(np.float32)
    (y,) = cuda.run(
        "pipeline", block=64, shared=3072, seed=seed, x=("r", x), y=("w", np.zeros(64, np.float32)), tiles=tiles
    )
    np.testing.assert_array_equal(y, np.roll(x.reshape(tiles, 256).sum(0), -17).reshape(4, 64).sum(0))


def product(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    k = 16 * int(rng.integers(1, 5))
    a, b = (rng.integers(-8, 8, (n, k)).astype(ml_dtypes.bfloat16) for n in (16, 8))
    (y,) = cuda.run(
        "product", shared=768, seed=seed, a=("r", a.view(np.uint16)), b=("r", b.view(np.uint16)),
        y=("w", np.zeros((16, 8), np.float32)), k=k,
    )  # fmt: skip
    np.testing.assert_array_equal(y, a.astype(np.float32) @ b.astype(np.float32).T)


def last(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    blocks = int(rng.integers(1, 40))
    x = rng.integers(0, 9, blocks * 32).astype(np.float32)
    *_, count, y = cuda.run(
        "last", grid=blocks, shared=4, seed=seed, x=("r", x), parts=("w", np.zeros(blocks, np.float32)),
        count=("rw", np.zeros(1, np.uint32)), y=("w", np.zeros(1, np.float32)),
    )  # fmt: skip
    assert y[0] == x.sum() and count[0] == 0


def histogram(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, int(rng.integers(1, 500)), dtype=np.uint8)
    (y,) = cuda.run(
        "histogram", grid=3, block=64, shared=64, seed=seed, x=("r", x), y=("rw", np.zeros(16, np.uint32)), n=x.size
    )
    np.testing.assert_array_equal(y, np.bincount(x & 15, minlength=16))


def groups(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    threads = 32 * int(rng.integers(1, 5))
    x = rng.integers(-9, 9, (3, threads)).astype(np.float32)
    (y,) = cuda.run("groups", grid=3, block=threads, shared=512, seed=seed, x=("r", x), y=("w", x))
    np.testing.assert_array_equal(y, np.abs(np.repeat(2 * x.reshape(3, -1, 8).sum(2), 8, axis=1)))


def scan(cuda: Any, seed: int, rng: np.random.Generator) -> None:
    n = int(rng.integers(1, 256))
    x = rng.integers(-9, 9, (2, n)).astype(np.float32)
    (y,) = cuda.run("scan", grid=2, block=256, shared=2048, seed=seed, x=("rw", x), n=n)
    np.testing.assert_array_equal(y, x.cumsum(1))


KERNELS: dict[str, Run] = {
    "rows": rows, "transpose": transpose, "pipeline": pipeline, "product": product, "last": last,
    "histogram": histogram, "groups": groups, "scan": scan,
}  # fmt: skip


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_correct_kernels_have_no_finding(compile_cuda: Callable[..., Any], kernel: str, checked: bool) -> None:
    cuda = compile_cuda(TEXT, checked=checked)
    for seed in range(13):  # eight kernels: a hundred and four runs with every check
        KERNELS[kernel](cuda, seed, np.random.default_rng(seed))


def test_a_seed_repeats_the_order_and_another_changes_it(compile_cuda: Callable[..., Any]) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_order(int* next, int* y) {
        y[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(next, 1);
    }""")
    orders = [
        cuda.run(
            "order", grid=5, block=64, seed=seed, next=("rw", np.zeros(1, np.int32)), y=("w", np.zeros(320, np.int32))
        )[1]
        for seed in (1, 1, 2, 2, 3)
    ]
    assert sorted(orders[0]) == list(range(320))
    assert (orders[0] == orders[1]).all() and (orders[2] == orders[3]).all()
    assert (orders[0] != orders[2]).any() and (orders[2] != orders[4]).any()


@pytest.mark.slow
def test_threads_switched_by_the_system_give_the_same(tmp_path: Path) -> None:
    """What other processors than x86-64 and arm64 use."""
    program = """
import sys, numpy as np
from qcompiler.runtime.sim.engine import SimEngine
import importlib.util
spec = importlib.util.spec_from_file_location("clean", sys.argv[1])
clean = importlib.util.module_from_spec(spec); spec.loader.exec_module(clean)
spec = importlib.util.spec_from_file_location("support", sys.argv[2])
support = importlib.util.module_from_spec(spec); spec.loader.exec_module(support)
cuda = support.Cuda(clean.TEXT, True, 800)
for run in clean.KERNELS.values():
    run(cuda, 5, np.random.default_rng(5))
print("done")
"""
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", program, str(here), str(here.with_name("conftest.py"))],
        env={**os.environ, "QC_SIM_FIBERS": "ucontext"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stderr
