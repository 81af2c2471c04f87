"""Bugs of which one order of execution alone is possible: something forces it, and orders no memory.

Elsewhere a missing barrier shows itself as a read that follows a write or as a write that follows a read, whichever
happens first, and one check would cover for the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Twins = Callable[..., Any]
SEEDS = range(5)


def floats(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def test_a_write_after_a_read_by_another_lane_needs_more_than_a_shuffle(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            QC_SHARED(float, tile, 0, 32);
            const int t = threadIdx.x;
            tile[t] = t;
            __syncwarp();
            float v = tile[t ^ 1];
            @@
            tile[t] = v;
            y[t] = tile[t];
        }""",
        bad="v = __shfl_sync(0xffffffffu, v, t);",  # all have read before one writes, and nothing says so to memory
        good="__syncwarp();",
    )
    for seed in SEEDS:
        more: dict[str, Any] = {"shared": 128, "seed": seed, "y": ("w", floats(32))}
        message = cuda.finds("race", "bad", **more)
        assert "read the same byte; no __syncwarp and no barrier" in message
        np.testing.assert_array_equal(cuda.run("good", **more)[0], np.arange(32) ^ 1)


def test_a_write_after_a_read_by_another_warp_needs_a_barrier(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(uint32_t* count, float* y) {
            QC_SHARED(float, tile, 0, 32);
            const int t = threadIdx.x;
            if (t < 32) tile[t] = t;
            __syncthreads();
            if (t >= 32) {
                y[t - 32] = tile[63 - t];
                atomicAdd(count, 1u);
            }
            if (t < 32) {
                while (atomicCAS(count, 32u, 32u) != 32u) { }
            }
            @@
            if (t < 32) tile[t] = -1;
        }""",
        bad="",
        good="__syncthreads();",
    )
    for seed in SEEDS:
        more: dict[str, Any] = {
            "block": 64, "shared": 128, "seed": seed, "count": ("rw", np.zeros(1, np.uint32)), "y": ("w", floats(32)),
        }  # fmt: skip
        message = cuda.finds("race", "bad", **more)
        assert "read the same byte; no barrier between them" in message
        np.testing.assert_array_equal(cuda.run("good", **more)[1], floats(32)[::-1])


def test_a_write_after_a_read_by_another_block_needs_release_and_acquire(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(uint32_t* count, float* x, float* y) {
            const int t = threadIdx.x;
            if (blockIdx.x > 0) {
                y[(blockIdx.x - 1) * 32 + t] = x[t];
                __syncthreads();
                if (t == 0) @@(count, 1u);
                return;
            }
            if (t == 0) {
                while (qc_load_acquire(count) < gridDim.x - 1) { }
            }
            __syncthreads();
            x[t] = -1;
        }""",
        bad="atomicAdd",
        good="qc_atomic_add_acq_rel",
    )
    for readers in (1, 3):
        for seed in SEEDS:
            more: dict[str, Any] = {
                "grid": readers + 1, "seed": seed, "count": ("rw", np.zeros(1, np.uint32)), "x": ("rw", floats(32)),
                "y": ("w", floats(32 * readers)),
            }  # fmt: skip
            message = cuda.finds("race", "bad", **more)
            assert "read the same byte; nothing orders the two blocks" in message
            _, x, y = cuda.run("good", **more)
            np.testing.assert_array_equal(x, -1)
            np.testing.assert_array_equal(y, np.tile(floats(32), readers))


def test_a_barrier_that_is_reached_after_others_have_returned(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(uint32_t* count) {
            if (threadIdx.x >= 32) {
                qc_atomic_add_acq_rel(count, 1u);
                @@
            } else {
                while (qc_load_acquire(count) < 32) { }
            }
            __syncthreads();
        }""",
        bad="return;",
        good="",
    )
    for seed in SEEDS:
        more: dict[str, Any] = {"block": 64, "seed": seed, "count": ("rw", np.zeros(1, np.uint32))}
        message = cuda.finds("exited-before-barrier", "bad", **more)
        assert "is at a barrier, but thread" in message
        assert "has returned from the kernel" in message
        assert cuda.run("good", **more)[0][0] == 32


def test_a_syncwarp_of_the_readers_alone_does_not_order_the_writers(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            QC_SHARED(float, tile, 0, 32);
            const int t = threadIdx.x;
            const uint32_t mine = t < 16 ? 0x0000ffffu : 0xffff0000u;
            tile[t] = t;
            __syncwarp();
            if (t >= 16) tile[t] = 2 * t;
            const int nothing = __shfl_sync(0xffffffffu, 0, 0);  // the upper half writes before the lower one reads
            __syncwarp(@@);
            y[t] = t < 16 ? tile[t + 16] : nothing;
        }""",
        bad="mine",
        good="0xffffffffu",
    )
    for seed in SEEDS:
        more: dict[str, Any] = {"shared": 128, "seed": seed, "y": ("w", floats(32))}
        assert "wrote the same byte; no __syncwarp and no barrier" in cuda.finds("race", "bad", **more)
        np.testing.assert_array_equal(cuda.run("good", **more)[0], np.where(floats(32) < 16, 2 * floats(32) + 32, 0))


def test_a_relaxed_read_of_a_released_flag_acquires_nothing_without_a_fence(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(uint32_t* flag, float* x, float* y) {
            if (blockIdx.x == 0) {
                *x = 5;
                qc_store_release(flag, 1u);
            } else {
                while (atomicCAS(flag, 1u, 1u) != 1u) { }
                @@
                *y = *x;
            }
        }""",
        bad="",
        good="__threadfence();",
    )
    for seed in SEEDS:
        more: dict[str, Any] = {
            "grid": 2, "block": 1, "seed": seed, "flag": ("rw", np.zeros(1, np.uint32)), "x": ("rw", floats(1)),
            "y": ("w", floats(1)),
        }  # fmt: skip
        assert "wrote the same byte; nothing orders the two blocks" in cuda.finds("race", "bad", **more)
        assert cuda.run("good", **more)[-1][0] == 5
