"""For each checker of the simulated GPU: a kernel with the bug that it is for, and the correct twin of that kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qcompiler.runtime.sim.engine import LaunchOptions

Twins = Callable[..., Any]


def floats(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.float32)


def ints(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


# --- order inside a block ---------------------------------------------------------------------------------------------


def test_missing_barrier_is_found_whatever_the_order(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(const float* x, float* y) {
            QC_SHARED(float, tile, 0, 128);
            const int t = threadIdx.x;
            tile[t] = 0;
            __syncthreads();
            tile[t] = x[t];
            @@
            y[t] = tile[127 - t];
        }""",
        bad="",
        good="__syncthreads();",
    )
    for seed in range(10):
        more: dict[str, Any] = {
            "block": 128,
            "shared": 512,
            "seed": seed,
            "x": ("r", floats(128)),
            "y": ("w", floats(128)),
        }
        message = cuda.finds("race", "bad", **more)
        assert "shared 'tile'" in message and "no barrier between them" in message
        assert "y[t] = tile[127 - t]" in message and "tile[t] = x[t]" in message  # both sides, with their lines
        (y,) = cuda.run("good", **more)
        np.testing.assert_array_equal(y, floats(128)[::-1])


def test_missing_barrier_is_found_where_every_order_gives_right_numbers(twins: Twins, compile_cuda: Twins) -> None:
    text = """KERNEL(const float* x, float* y) {
        QC_SHARED(float, tile, 0, 64);
        const int t = threadIdx.x;
        tile[t] = x[t];
        __syncthreads();
        const float other = tile[63 - t];
        @@
        tile[t] = 0.5f * (tile[t] + other);
        __syncthreads();
        y[t] = tile[t];
    }"""
    more: dict[str, Any] = {"block": 64, "shared": 256, "x": ("r", np.full(64, 3, np.float32)), "y": ("w", floats(64))}
    unchecked = compile_cuda(
        'extern "C" __global__ void ' + text.replace("KERNEL", "qk_bad").replace("@@", ""), checked=False
    )
    for seed in range(20):
        np.testing.assert_array_equal(unchecked.run("bad", seed=seed, **more)[0], 3)
    cuda = twins(text, bad="", good="__syncthreads();")
    cuda.finds("race", "bad", **more)
    cuda.run("good", **more)


def test_write_after_read_on_a_ring_buffer_is_a_race(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(const float* x, float* y) {
            QC_SHARED(float, ring, 0, 256);
            const int t = threadIdx.x;
            float sum = 0;
            for (int i = 0; i < 8; ++i) {
                float* const stage = ring + (i % @@) * 64;
                stage[t] = x[i * 64 + t];
                __syncthreads();
                sum += stage[(t + 33) % 64];
            }
            y[t] = sum;
        }""",
        bad="1",
        good="2",
    )
    x = floats(512)
    more: dict[str, Any] = {"block": 64, "shared": 1024, "x": ("r", x), "y": ("w", floats(64))}
    assert "shared 'ring'" in cuda.finds("race", "bad", **more)
    (y,) = cuda.run("good", **more)
    np.testing.assert_array_equal(y, np.roll(x.reshape(8, 64).sum(0), -33))


def test_barriers_on_two_sides_of_a_branch_diverge(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            if (threadIdx.x < 32) {
                y[threadIdx.x] = 1;
                __syncthreads();
            } else {
                @@
                __syncthreads();
            }
        }""",
        bad="y[threadIdx.x] = 2;",
        good="y[threadIdx.x] = 2; } if (threadIdx.x >= 64) {",
    )
    message = cuda.finds("barrier-divergence", "bad", block=64, y=("w", floats(64)))
    assert message.count("__syncthreads();") == 2
    cuda.finds("exited-before-barrier", "good", block=64, y=("w", floats(64)))  # half of it never comes
    cuda.run("good", block=32, y=("w", floats(32)))


def test_threads_at_a_barrier_and_at_a_collective_wait_for_each_other(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(int* y) {
            int v = threadIdx.x;
            if (threadIdx.x < @@) v = __shfl_xor_sync(0xffffffffu, v, 1);
            __syncthreads();
            y[threadIdx.x] = v;
        }""",
        bad="16",
        good="32",
    )
    message = cuda.finds("barrier-divergence", "bad", block=64, y=("w", ints(64)))
    assert "__shfl_xor_sync" in message and "__syncthreads" in message
    (y,) = cuda.run("good", block=64, y=("w", ints(64)))
    np.testing.assert_array_equal(y[:32], ints(32) ^ 1)


def test_early_return_before_a_barrier(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y, int64_t n) {
            QC_SHARED(float, tile, 0, 64);
            const int t = threadIdx.x;
            @@
            if (t < n) tile[t] = t;
            __syncthreads();
            if (t < n) y[t] = tile[n - 1 - t];
        }""",
        bad="if (t >= n) return;",
        good="",
    )
    more: dict[str, Any] = {"block": 64, "shared": 256, "y": ("w", floats(50)), "n": 50}
    for seed in range(5):
        assert "returned from the kernel" in cuda.finds("exited-before-barrier", "bad", seed=seed, **more)
        np.testing.assert_array_equal(cuda.run("good", seed=seed, **more)[0], floats(50)[::-1])


# --- copies that arrive late ------------------------------------------------------------------------------------------

COPY = """KERNEL(const float* x, float* y) {
    QC_SHARED(float, tile, 0, 256);
    const int t = threadIdx.x;
    for (int stage = 0; stage < 2; ++stage) {
        qc_cp_async_16(tile + stage * 128 + 4 * t, x + stage * 128 + 4 * t);
        qc_cp_async_commit();
    }
    qc_cp_async_wait<1>();
    __syncthreads();
    for (int i = 0; i < 4; ++i) y[t + 32 * i] = tile[t + 32 * i];
    @@
    __syncthreads();
    for (int i = 0; i < 4; ++i) y[128 + t + 32 * i] = tile[128 + t + 32 * i];
}"""


@pytest.mark.parametrize("early", [False, True])
def test_missing_wait_for_cp_async(twins: Twins, early: bool) -> None:
    cuda = twins(COPY, bad="", good="qc_cp_async_wait<0>();")
    more: dict[str, Any] = {"shared": 1024, "x": ("r", floats(256)), "y": ("w", floats(256))}
    options = LaunchOptions(early_copies=early)
    assert "no wait has covered it" in cuda.finds("cp-async-pending", "bad", options=options, **more)
    np.testing.assert_array_equal(cuda.run("good", options=options, **more)[0], floats(256))


def test_cp_async_lands_at_its_wait_and_not_before(compile_cuda: Twins) -> None:
    unchecked = compile_cuda(
        'extern "C" __global__ void ' + COPY.replace("KERNEL", "qk_bad").replace("@@", ""), checked=False
    )
    more: dict[str, Any] = {"shared": 1024, "x": ("r", floats(256)), "y": ("w", floats(256))}
    (y,) = unchecked.run("bad", **more)
    np.testing.assert_array_equal(y[:128], floats(128))
    assert np.isnan(y[128:]).all()
    (y,) = unchecked.run("bad", options=LaunchOptions(early_copies=True), **more)
    assert np.isnan(y[128:]).any() and not np.isnan(y[128:]).all()


def test_a_barrier_is_no_wait_for_another_threads_copy(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(const float* x, float* y) {
            QC_SHARED(float, tile, 0, 128);
            const int t = threadIdx.x;
            qc_cp_async_16(tile + 4 * t, x + 4 * t);
            qc_cp_async_commit();
            @@
            y[t] = tile[127 - t];
        }""",
        bad="__syncthreads(); qc_cp_async_wait<0>();",
        good="qc_cp_async_wait<0>(); __syncthreads();",
    )
    more: dict[str, Any] = {"shared": 512, "x": ("r", floats(128)), "y": ("w", floats(32))}
    for seed in range(4):
        with pytest.raises(Exception, match="shared 'tile'") as caught:
            cuda.run("bad", seed=seed, **more)
        assert caught.value.finding in ("cp-async-pending", "race")
        cuda.run("good", seed=seed, **more)


# --- values that are not there ----------------------------------------------------------------------------------------


def test_uninitialised_shared_memory(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            QC_SHARED(float, tile, 0, 64);
            const int t = threadIdx.x;
            if (t < @@) tile[t] = t;
            __syncthreads();
            y[t] = tile[t];
        }""",
        bad="63",
        good="64",
    )
    more: dict[str, Any] = {"block": 64, "shared": 256, "y": ("w", floats(64))}
    assert "shared 'tile' + 252 bytes" in cuda.finds("uninitialised-read", "bad", **more)
    cuda.run("good", **more)


def test_shared_memory_of_an_earlier_block_is_uninitialised(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_k(float* y) {
        QC_SHARED(float, tile, 0, 32);
        if (blockIdx.x == 0) tile[threadIdx.x] = 1;
        y[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x];
    }""")
    assert "block 1, " in cuda.finds("uninitialised-read", "k", grid=2, shared=128, y=("w", floats(64)))
    cuda.run("k", grid=1, shared=128, y=("w", floats(32)))


def test_uninitialised_global_memory(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_copy(const float* x, float* y) {
        y[threadIdx.x] = x[threadIdx.x];
    }""")
    x = floats(32)
    assert "operand 'x'" in cuda.finds(
        "uninitialised-read", "copy", x=("r", x, {"initialised": False}), y=("w", floats(32))
    )
    np.testing.assert_array_equal(cuda.run("copy", x=("r", x), y=("w", floats(32)))[0], x)


def test_half_the_threads_leave_half_of_the_output_unwritten(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_fill(float* y) { y[threadIdx.x] = 1; }""")
    cuda.run("fill", block=32, y=("w", floats(64)))
    assert cuda.report.unwritten == 128
    cuda.run("fill", block=64, y=("w", floats(64)))
    assert cuda.report.unwritten == 0


# --- places -----------------------------------------------------------------------------------------------------------

COPY_N = """KERNEL(const float* x, float* y, int64_t n) {
    for (int64_t i = threadIdx.x; i @@ n; i += 32) y[i] = x[i];
}"""


def test_one_past_an_allocation(twins: Twins) -> None:
    cuda = twins(COPY_N, bad="<=", good="<")
    message = cuda.finds("out-of-bounds", "bad", x=("r", floats(50)), y=("w", floats(50)), n=50)
    assert "0 bytes past the end of operand 'x' (it has 200)" in message and "y[i] = x[i]" in message
    message = cuda.finds("out-of-bounds", "bad", x=("r", floats(51)), y=("w", floats(50)), n=50)
    assert "writes 4 bytes at 0 bytes past the end of operand 'y'" in message
    cuda.run("good", x=("r", floats(50)), y=("w", floats(50)), n=50)


def test_one_past_the_declared_bytes_of_a_larger_allocation(twins: Twins) -> None:
    cuda = twins(COPY_N, bad="<=", good="<")
    more: dict[str, Any] = {"x": ("r", floats(64), {"declared": 200}), "y": ("w", floats(64)), "n": 50}
    assert "past the end of operand 'x'" in cuda.finds("out-of-bounds", "bad", **more)
    cuda.run("good", **more)


def test_one_past_a_range_of_shared_memory(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            QC_SHARED(float, left, 0, 32);
            QC_SHARED(float, right, 128, 32);
            const int t = threadIdx.x;
            right[t] = t;
            left[t + @@] = t;
            __syncthreads();
            y[t] = left[t] + right[t];
        }""",
        bad="(t == 31)",
        good="0",
    )
    message = cuda.finds("out-of-bounds", "bad", shared=256, y=("w", floats(32)))
    assert "0 bytes past the end of shared 'left' (it has 128)" in message
    np.testing.assert_array_equal(cuda.run("good", shared=256, y=("w", floats(32)))[0], 2 * floats(32))


def test_shared_ranges_that_overlap_or_leave_the_block(twins: Twins) -> None:
    text = """KERNEL(float* y) {
        QC_SHARED(float, a, 0, 33);
        QC_SHARED(float, b, @@, 32);
        a[0] = 1;
        b[0] = 2;
        y[0] = a[0] + b[0];
    }"""
    cuda = twins(text, bad="128", good="256")
    assert "overlaps shared 'a'" in cuda.finds("out-of-bounds", "bad", block=1, shared=512, y=("w", floats(1)))
    assert "the block has 300 bytes" in cuda.finds("out-of-bounds", "good", block=1, shared=300, y=("w", floats(1)))
    assert cuda.run("good", block=1, shared=384, y=("w", floats(1)))[0][0] == 3


def test_memory_of_another_device(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_follow(float* const* pointers, float* y) {
        y[threadIdx.x] = pointers[0][threadIdx.x];
    }""")
    there = cuda.engine.allocate(1, 128, "elsewhere")
    here = cuda.engine.allocate(0, 128, "undeclared")
    try:
        for address, finding in ((there, "wrong-device"), (here, "undeclared-access")):
            pointers = ("r", np.array([address], np.uint64))
            cuda.finds(finding, "follow", pointers=pointers, y=("w", floats(32)))
        message = cuda.finds("wrong-device", "follow", pointers=("r", floats(2)), y=("w", floats(32), {"device": 1}))
        assert "operand 'y' lies on sim:1, but the kernel runs on sim:0" in message
    finally:
        cuda.engine.free(there)
        cuda.engine.free(here)


def test_writing_what_is_declared_as_read(twins: Twins) -> None:
    cuda = twins(
        "KERNEL(float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; @@[threadIdx.x] = 0; }", bad="x", good="y"
    )
    message = cuda.finds("undeclared-access", "bad", x=("r", floats(32)), y=("w", floats(32)))
    assert "the launch declares operand 'x' as read only" in message
    cuda.run("good", x=("r", floats(32)), y=("w", floats(32)))


def test_reading_what_is_declared_as_written(twins: Twins) -> None:
    cuda = twins("KERNEL(float* y) { @@ y[threadIdx.x] += 1; }", bad="", good="y[threadIdx.x] = 1;")
    more = {"y": ("w", floats(32), {"initialised": True})}
    assert "declared as written only" in cuda.finds("undeclared-access", "bad", **more)
    np.testing.assert_array_equal(cuda.run("good", **more)[0], 2)


def test_misaligned_vector(twins: Twins) -> None:
    cuda = twins(
        "KERNEL(const float* x, float4* y) { y[threadIdx.x] = *(const float4*)(x + @@ * threadIdx.x); }",
        bad="3",
        good="4",
    )
    message = cuda.finds("misaligned", "bad", x=("r", floats(128)), y=("w", floats(128)))
    assert "no multiple of 16" in message
    np.testing.assert_array_equal(cuda.run("good", x=("r", floats(128)), y=("w", floats(128)))[0], floats(128))


# --- warps ------------------------------------------------------------------------------------------------------------


def test_missing_syncwarp_between_lanes(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(int* y) {
            QC_SHARED(int, tile, 0, 32);
            const int t = threadIdx.x;
            tile[t] = t;
            @@
            const int v = tile[t ^ 1];
            __syncwarp();
            tile[t] = v;
            y[t] = tile[t];
        }""",
        bad="const int nothing = __shfl_sync(0xffffffffu, t, 0); if (nothing) return;",  # orders no memory
        good="__syncwarp();",
    )
    assert "no __syncwarp and no barrier" in cuda.finds("race", "bad", shared=128, y=("w", ints(32)))
    np.testing.assert_array_equal(cuda.run("good", shared=128, y=("w", ints(32)))[0], ints(32) ^ 1)


def test_syncwarp_of_half_a_warp_orders_that_half_only(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(int* y) {
            QC_SHARED(int, tile, 0, 32);
            const int t = threadIdx.x;
            const uint32_t mine = t < 16 ? 0x0000ffffu : 0xffff0000u;
            for (int i = 0; i < 3; ++i) {
                tile[t] = t + i;
                __syncwarp(mine);
                y[t] = tile[t ^ @@];
                __syncwarp(mine);
            }
        }""",
        bad="16",
        good="8",
    )
    for seed in range(4):
        with pytest.raises(Exception, match="shared 'tile'") as caught:
            cuda.run("bad", seed=seed, shared=128, y=("w", ints(32)))
        assert caught.value.finding in ("race", "uninitialised-read")
        np.testing.assert_array_equal(cuda.run("good", seed=seed, shared=128, y=("w", ints(32)))[0], (ints(32) ^ 8) + 2)


SHUFFLES = {
    "masks that differ": ("t < 16 ? 0x0000ffffu | 1u << 20 : 0xffff0000u", "t < 16 ? 0x0000ffffu : 0xffff0000u"),
    "a mask without the caller": ("0x7fffffffu", "0xffffffffu"),
}


@pytest.mark.parametrize("case", SHUFFLES)
@pytest.mark.parametrize("checked", [False, True])
def test_inconsistent_shuffle_masks(compile_cuda: Twins, case: str, checked: bool) -> None:
    bad, good = SHUFFLES[case]
    text = """extern "C" __global__ void qk_NAME(int* y) {
        const int t = threadIdx.x;
        y[t] = __shfl_xor_sync(MASK, t, 1);
    }"""
    cuda = compile_cuda(
        text.replace("NAME", "bad").replace("MASK", bad) + text.replace("NAME", "good").replace("MASK", good),
        checked=checked,
    )
    for seed in range(4):
        cuda.finds("shuffle-mask", "bad", seed=seed, y=("w", ints(32)))
        np.testing.assert_array_equal(cuda.run("good", seed=seed, y=("w", ints(32)))[0], ints(32) ^ 1)


def test_shuffle_from_a_lane_that_does_not_take_part(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(int* y) {
            const int t = threadIdx.x;
            if (t < 16) y[t] = __shfl_xor_sync(0x0000ffffu, t, @@);
        }""",
        bad="16",
        good="8",
    )
    assert "which does not take part" in cuda.finds("shuffle-mask", "bad", y=("w", ints(16)))
    np.testing.assert_array_equal(cuda.run("good", y=("w", ints(16)))[0], ints(16) ^ 8)


def test_tensor_core_instructions_need_the_whole_warp(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(float* y) {
            const int t = threadIdx.x;
            if (t >= @@) return;
            float d[4] = {0, 0, 0, 0};
            const uint32_t one = 0x3f803f80u, two = 0x40004000u, a[4] = {one, one, one, one}, b[2] = {two, two};
            qc_mma_16816(d, a, b, qc_bf16());
            y[t] = d[0];
        }""",
        bad="31",
        good="32",
    )
    cuda.finds("shuffle-mask", "bad", y=("w", floats(32)))
    np.testing.assert_array_equal(cuda.run("good", y=("w", floats(32)))[0], 32)


def test_ldmatrix_rows_are_sixteen_byte_aligned(twins: Twins) -> None:
    cuda = twins(
        """KERNEL(uint32_t* y) {
            QC_SHARED(uint16_t, tile, 0, 512);
            const int t = threadIdx.x;
            for (int i = t; i < 512; i += 32) tile[i] = i;
            __syncwarp();
            uint32_t r[4];
            qc_ldmatrix_x4(r, tile + @@ * t);
            for (int i = 0; i < 4; ++i) y[4 * t + i] = r[i];
        }""",
        bad="12",
        good="8",
    )
    more: dict[str, Any] = {"shared": 1024, "y": ("w", np.zeros((32, 4), np.uint32))}
    cuda.finds("misaligned", "bad", **more)
    (y,) = cuda.run("good", **more)
    lane, i = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    low = 64 * i + 8 * (lane // 4) + 2 * (lane % 4)
    np.testing.assert_array_equal(y, low | (low + 1) << 16)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_two_blocks_on_one_address(twins: Twins) -> None:
    cuda = twins("KERNEL(float* y) { y[blockIdx.x * @@ + threadIdx.x] = threadIdx.x; }", bad="31", good="32")
    assert "nothing orders the two blocks" in cuda.finds("race", "bad", grid=2, y=("w", floats(64)))
    cuda.run("good", grid=2, y=("w", floats(64)))
    assert cuda.report.unwritten == 0


def test_plain_and_atomic_updates_of_one_address(twins: Twins) -> None:
    cuda = twins("KERNEL(int* y) { if (threadIdx.x == 0) { @@ } }", bad="*y += 1;", good="atomicAdd(y, 1);")
    cuda.finds("race", "bad", grid=8, y=("rw", np.zeros(1, np.int32)))
    assert cuda.run("good", grid=8, y=("rw", np.zeros(1, np.int32)))[0][0] == 8


LAST_BLOCK = """KERNEL(const float* x, float* parts, uint32_t* count, float* y) {
    QC_SHARED(uint32_t, turn, 0, 1);
    const int t = threadIdx.x;
    const float sum = qc_warp_sum(x[blockIdx.x * 32 + t]);
    if (t == 0) {
        parts[blockIdx.x] = sum;
        @@
    }
    __syncthreads();
    if (*turn == gridDim.x - 1) y[t] = parts[t % gridDim.x];
}"""


@pytest.mark.parametrize(
    "arrive",
    ["*turn = qc_atomic_add_acq_rel(count, 1u);", "__threadfence(); *turn = atomicAdd(count, 1u); __threadfence();"],
)
def test_the_last_block_reads_what_others_wrote(twins: Twins, arrive: str) -> None:
    cuda = twins(LAST_BLOCK, bad="*turn = atomicAdd(count, 1u);", good=arrive)
    for seed in range(5):
        more: dict[str, Any] = {
            "grid": 6, "shared": 4, "seed": seed, "x": ("r", floats(192)), "parts": ("w", floats(6)),
            "count": ("rw", np.zeros(1, np.uint32)), "y": ("w", floats(32)),
        }  # fmt: skip
        assert "nothing orders the two blocks" in cuda.finds("race", "bad", **more)
        *_, y = cuda.run("good", **more)
        np.testing.assert_array_equal(y, np.resize(floats(192).reshape(6, 32).sum(1), 32))


SPIN = """KERNEL(uint32_t* count) {
    if (threadIdx.x == 0) {
        qc_atomic_add_acq_rel(count, 1u);
        while (qc_load_acquire(count) < @@) { }
    }
    __syncthreads();
}"""


def test_a_spin_that_never_ends(twins: Twins) -> None:
    cuda = twins(SPIN, bad="gridDim.x + 1", good="gridDim.x")
    more: dict[str, Any] = {"grid": 12, "block": 64, "count": ("rw", np.zeros(1, np.uint32))}
    message = cuda.finds("timeout", "bad", options=LaunchOptions(spin_limit=0.1), **more)
    assert "12 of 12 blocks have started" in message and "qc_load_acquire(count)" in message
    assert cuda.run("good", **more)[0][0] == 12  # the blocks of a grid may wait for each other
    message = cuda.finds("timeout", "good", options=LaunchOptions(spin_limit=0.1, resident_blocks=4), **more)
    assert "4 of 12 blocks have started; at most 4 are resident at once" in message


def test_a_spin_on_a_volatile_flag_is_found_too(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_wait(volatile int* flag) {
        if (threadIdx.x == 1) *flag = 1;
        while (*flag == (int)blockDim.x - 1) { }
    }""")
    cuda.run("wait", block=32, flag=("rw", np.full(1, 31, np.int32)))
    options = LaunchOptions(spin_limit=0.1)
    message = cuda.finds("timeout", "wait", block=2, options=options, flag=("rw", np.full(1, 1, np.int32)))
    assert "while (*flag ==" in message


def test_a_loop_that_never_ends_meets_the_time_limit(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_loop(float* y, int64_t n) {
        for (int64_t i = 0; i >= 0; i = (i + 1) % n) y[i] = i;
    }""")
    options = LaunchOptions(time_limit=0.2)
    message = cuda.finds("timeout", "loop", block=1, options=options, y=("rw", floats(8)), n=8)
    assert "longer than its limit of 0.2 s" in message and "y[i] = i;" in message


# --- the checks themselves --------------------------------------------------------------------------------------------


def test_a_write_that_no_hook_sees(twins: Twins) -> None:
    helpers = """
    #if defined(__x86_64__)
    #define STORE(p, v) asm volatile("movl %1, (%0)" :: "r"(p), "r"(v) : "memory")
    #else
    #define STORE(p, v) asm volatile("str %w1, [%0]" :: "r"(p), "r"(v) : "memory")
    #endif
    """
    text = "KERNEL(int* x, int* y) { if (threadIdx.x == 0) { y[0] = 1; @@ } }"
    cuda = twins(text, bad="STORE(y + 1, 5);", good="y[1] = 5;", helpers=helpers)
    more: dict[str, Any] = {"x": ("r", ints(4)), "y": ("rw", ints(8) + 9)}
    assert "operand 'y' + 4 bytes" in cuda.finds("self-check", "bad", **more)
    cuda.run("good", **more)
    cuda = twins(text, bad="STORE(x, 5);", good="STORE(y, 5);", helpers=helpers)
    assert "declared as read only, has changed" in cuda.finds("self-check", "bad", **more)
    cuda = twins(text, bad="STORE(y + 8, 5);", good="", helpers=helpers)
    assert "past the end of operand 'y'" in cuda.finds("self-check", "bad", **more)
    shared = "KERNEL(int* x, int* y) { QC_SHARED(int, tile, 0, 4); if (threadIdx.x == 0) { @@; y[0] = 1; } }"
    cuda = twins(shared, bad="STORE(tile + 2, 5)", good="tile[2] = 5", helpers=helpers)
    assert "shared 'tile' + 8 bytes" in cuda.finds("self-check", "bad", shared=16, **more)
    cuda.run("good", shared=16, **more)


def test_trap_is_a_finding(twins: Twins) -> None:
    cuda = twins("KERNEL(int* y) { y[threadIdx.x] = 0; @@ }", bad="if (threadIdx.x == 7) __trap();", good="")
    assert "thread 7" in cuda.finds("trap", "bad", y=("w", ints(32)))
    cuda.run("good", y=("w", ints(32)))


def test_launches_that_cuda_refuses(compile_cuda: Twins) -> None:
    cuda = compile_cuda("""extern "C" __global__ void qk_fill(float* y) { y[threadIdx.x] = 1; }""")
    y = ("w", floats(2048))
    cuda.finds("bad-launch", "fill", block=1025, y=y)
    cuda.finds("bad-launch", "fill", grid=(1, 65536), y=y)
    cuda.finds("bad-launch", "fill", grid=0, y=y)
    message = cuda.finds("bad-launch", "fill", y=("w", floats(8), {"declared": 36}))
    assert "does not lie in one live allocation" in message
