"""What each inline-PTX wrapper of kernels/cuda/*.cuh must do: a kernel that calls it, and a NumPy model of the answer.
Three more checks do the same for intrinsics that kernels use and the simulator imitates.

The same kernels run twice: on the simulated GPU, where the wrappers are kernels/sim/shim.h's twins
(test_conformance_sim.py), and on hardware, where they are PTX (check.py).  The models are written from the PTX ISA
("Matrix multiply-accumulate", "ldmatrix", "cvt", "ex2", "cp.async") and share no code with either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One launch. `inputs` and then `outputs` (zeros of the right shape) are the kernel's pointers, in order.

    `judge(outputs)` says what is wrong, or nothing.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    judge: Callable[[Sequence[Array]], str | None]
    grid: int = 1
    block: int = 32
    shared: int = 0


@dataclass(frozen=True)
class Check:
    """A kernel (body and parameters as C text) that shows what the wrappers `covers` do; it needs `arch`."""

    name: str
    covers: tuple[str, ...]
    parameters: str
    body: str
    case: Callable[[], Case]
    arch: int = 70
    alone: bool = False
    """Architectures after `arch` lack it."""

    @property
    def text(self) -> str:
        return f'extern "C" __global__ void qk_{self.name}({self.parameters}) {{\n{self.body}}}\n'

    @property
    def call(self) -> str:
        """The simulator's entry: parameters by address."""
        kinds = [part.rsplit("const ", 1)[0].strip() for part in self.parameters.split(",")]
        passed = ", ".join(f"*({kind} const*)args[{i}]" for i, kind in enumerate(kinds))
        return f'extern "C" void qs_call_{self.name}(void* const* args) {{ qk_{self.name}({passed}); }}\n'


# --- judging ----------------------------------------------------------------------------------------------------------


def equal(want: Array) -> Callable[[Sequence[Array]], str | None]:
    """The first output has exactly these bits."""

    def judge(outputs: Sequence[Array]) -> str | None:
        return first_difference(outputs[0].view(np.uint8).view(want.dtype), want)

    return judge


def first_difference(got: Array, want: Array) -> str | None:
    wrong = np.flatnonzero(got.reshape(-1) != want.reshape(-1))
    if wrong.size == 0:
        return None
    i = int(wrong[0])
    return f"{wrong.size} of {want.size} differ, first at {i}: {got.reshape(-1)[i]!r}, expected {want.reshape(-1)[i]!r}"


def same_floats(got: Array, want: Array) -> str | None:
    """Equal bits, but any NaN serves for a NaN (PTX gives the canonical one)."""
    bits = {2: np.uint16, 4: np.uint32}[want.dtype.itemsize]
    both = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    return first_difference(np.where(both, 0, got.view(bits)), np.where(both, 0, want.view(bits)))


def random(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


# --- memory -----------------------------------------------------------------------------------------------------------


def _copied() -> Case:
    data = random("load").integers(0, 2**32, 4 * 256, np.uint32)
    return Case([data], [np.zeros_like(data)], equal(data), grid=2, block=128)


def _load_shared() -> Case:
    """Each thread reads the 8 bytes of another one."""
    data = random("shared").integers(0, 2**32, (128, 2), np.uint32)
    return Case([data], [np.zeros_like(data)], equal(data[np.arange(128) ^ 37]), block=128, shared=1024 + 256)


def _cp_async() -> Case:
    """128 threads, two groups each: the neighbour's half of group 0 is read while group 1 may be under way."""
    data = random("cp").integers(0, 2**32, (2, 128, 4), np.uint32)
    want = np.stack([data[0, np.arange(128) ^ 1], data[1, np.arange(128) ^ 33]])
    return Case([data], [np.zeros_like(want)], equal(want), block=128, shared=4096)


def _cp_async_zero() -> Case:
    """Odd threads get zeros; their address lies outside the input and must not be read."""
    data = random("cp zero").integers(1, 2**32, (64, 4), np.uint32)
    want = np.zeros((128, 4), np.uint32)
    want[::2] = data
    return Case([data], [np.zeros_like(want)], equal(want), block=128, shared=2048)


def _follow() -> Case:
    """Launched alone: neither call does anything that a result would show."""
    data = random("follow").integers(0, 2**32 - 1, 128, np.uint32)
    return Case([data], [np.zeros_like(data)], equal(data + np.uint32(1)), block=128)


def _last_block() -> Case:
    """Each block stores its part and releases its flag; the block that counts last acquires all flags and adds up."""
    blocks, threads = 24, 64
    parts = random("last").integers(0, 1 << 16, (blocks, threads)).astype(np.uint32)
    total = parts.sum(axis=1, dtype=np.uint32)
    scratch = [np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32), np.zeros(1, np.uint32)]

    def judge(outputs: Sequence[Array]) -> str | None:
        stored, flags, counter, out = outputs
        wrong = first_difference(stored, total) or first_difference(flags, np.ones(blocks, np.uint32))
        sums = np.array([total.sum(dtype=np.uint32), blocks], np.uint32)
        return wrong or first_difference(counter, np.array([blocks], np.uint32)) or first_difference(out, sums)

    return Case([parts], [*scratch, np.zeros(2, np.uint32)], judge, grid=blocks, block=threads, shared=4)


# --- matrices ---------------------------------------------------------------------------------------------------------


def _ldmatrix_rows() -> tuple[Array, Array]:
    """Four 8x8 matrices of 16-bit numbers, and where each of their 32 rows lies in shared memory (in rows)."""
    rng = random("ldmatrix")
    return rng.integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16), rng.permutation(32).astype(np.uint32)


def _ldmatrix(count: int, *, transposed: bool) -> Case:
    matrices, place = _ldmatrix_rows()
    shared = np.zeros((32, 8), np.uint16)
    shared[place] = matrices.reshape(32, 8)
    read = matrices.transpose(0, 2, 1) if transposed else matrices
    # Lane l, register i: elements 2*(l % 4) and 2*(l % 4) + 1 of row l / 4 of matrix i.
    want = (
        np.ascontiguousarray(read[:count].reshape(count, 32, 2).transpose(1, 0, 2)).view(np.uint32).reshape(32, count)
    )
    return Case([shared, place], [np.zeros((32, count), np.uint32)], equal(want), shared=512)


_LDMATRIX = """    QC_SHARED(uint16_t, tile, 0, 256);
    for (int i = 0; i < 8; ++i) tile[8 * threadIdx.x + i] = shared[8 * threadIdx.x + i];
    __syncthreads();
    uint32_t r[{count}];
    {function}(r, tile + 8 * (int)place[threadIdx.x]);
    for (int i = 0; i < {count}; ++i) out[{count} * threadIdx.x + i] = r[i];
"""


def fragments(a: Array, b: Array, d: Array) -> tuple[Array, Array, Array]:
    """Matrices (16 x 16, 16 x 8, 16 x 8) as registers of 32 lanes: (32, 4) words, (32, 2) words, (32, 4) floats."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    half = np.arange(2)
    words_a = np.stack(
        [a[(g + 8 * (i % 2))[:, None], (2 * t + 8 * (i // 2))[:, None] + half] for i in range(4)], axis=1
    )
    words_b = np.stack([b[(2 * t + 8 * i)[:, None] + half, g[:, None]] for i in range(2)], axis=1)
    return pack(words_a), pack(words_b), accumulators(d)


def accumulators(d: Array) -> Array:
    """A 16 x 8 matrix as (32, 4) registers: rows g and g + 8, columns 2t and 2t + 1."""
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    return np.stack([d[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)], axis=1)


def pack(pairs: Array) -> Array:
    """16-bit pairs, the lower half first, as words."""
    return np.ascontiguousarray(pairs).view(np.uint16).astype(np.uint32)[..., 0::2].squeeze(-1) | (
        np.ascontiguousarray(pairs).view(np.uint16).astype(np.uint32)[..., 1::2].squeeze(-1) << 16
    )


def _mma(dtype: Any, *, exact: bool) -> Case:
    rng = random(f"mma {dtype} {exact}")
    if exact:  # small integers: every order of summation gives the same bits
        draw = lambda *shape: rng.integers(-8, 9, shape).astype(np.float32)  # noqa: E731
    else:
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    a, b, d = draw(16, 16).astype(dtype), draw(16, 8).astype(dtype), draw(16, 8)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    want = accumulators(d + wide_a @ wide_b)
    # Sums of 17 terms in fp32, whose alignment may truncate: a few units in the last place of the sum of magnitudes.
    bound = accumulators(np.abs(d) + np.abs(wide_a) @ np.abs(wide_b)) * (0.0 if exact else 17 * 2.0**-23)

    def judge(outputs: Sequence[Array]) -> str | None:
        if not np.isfinite(outputs[0]).all():
            return "not all finite"
        excess = np.abs(outputs[0].astype(np.float64) - want) - bound
        if excess.max() <= 0:
            return None
        lane, i = np.unravel_index(int(excess.argmax()), excess.shape)
        return f"lane {lane}, d[{i}]: {outputs[0][lane, i]!r}, expected {want[lane, i]!r} within {bound[lane, i]:.1e}"

    return Case([*fragments(a, b, d)], [np.zeros((32, 4), np.float32)], judge)


_MMA = """    float d[4];
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i) d[i] = d0[4 * threadIdx.x + i];
    for (int i = 0; i < 4; ++i) a[i] = a0[4 * threadIdx.x + i];
    for (int i = 0; i < 2; ++i) b[i] = b0[2 * threadIdx.x + i];
    qc_mma_16816(d, a, b, {tag}{{}});
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
"""
_MMA_PARAMETERS = "const uint32_t* const a0, const uint32_t* const b0, const float* const d0, float* const out"


def _mma_s8() -> Case:
    rng = random("mma s8")
    a, b = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((16, 32), (32, 8)))
    a[0], b[:, 0] = -128, -128  # the ends
    d = rng.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
    lane, four = np.arange(32), np.arange(4)
    g, t = lane // 4, lane % 4
    words_a = np.stack([a[(g + 8 * (i % 2))[:, None], (4 * t + 16 * (i // 2))[:, None] + four] for i in range(4)], 1)
    words_b = np.stack([b[(4 * t + 16 * i)[:, None] + four, g[:, None]] for i in range(2)], 1)
    want = accumulators((d.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32))
    inputs = [np.ascontiguousarray(words).view(np.uint32)[..., 0] for words in (words_a, words_b)]
    return Case([*inputs, accumulators(d)], [np.zeros((32, 4), np.int32)], equal(want))


def _wgmma(dtype: Any, columns: int) -> Case:
    """A product of depth 64, in four pieces: 64 rows in the registers of 128 threads, and rows of b as they stand."""
    rng = random(f"wgmma {dtype} {columns}")
    a, b = (rng.standard_normal((rows, 64)).astype(np.float32).astype(dtype) for rows in (64, columns))
    d = rng.standard_normal((64, columns)).astype(np.float32)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    tiles = range(columns // 8)

    def registers(values: Array) -> Array:
        """(128, columns / 8, 4): of each thread, the four of each eight columns."""
        warps = [[accumulators(values[16 * w : 16 * w + 16, 8 * j : 8 * j + 8]) for j in tiles] for w in range(4)]
        return np.ascontiguousarray(np.array(warps).transpose(0, 2, 1, 3).reshape(128, -1, 4))

    nothing = np.zeros((16, 8), dtype)
    words = np.concatenate([
        np.stack([
            fragments(a[16 * w : 16 * w + 16, 16 * j : 16 * j + 16], nothing, np.zeros((16, 8)))[0] for j in range(4)
        ], axis=1)
        for w in range(4)
    ])  # fmt: skip
    want = registers(d + wide_a @ wide_b.T)
    bound = registers(np.abs(d) + np.abs(wide_a) @ np.abs(wide_b).T) * (65 * 2.0**-23)  # 65 terms, as in _mma

    def judge(outputs: Sequence[Array]) -> str | None:
        excess = np.abs(outputs[0].astype(np.float64) - want) - bound
        if (excess <= 0).all():  # NaN is not
            return None
        return f"thread, tile and d: {np.argwhere(~(excess <= 0))[0]}"

    inputs = [words, b.view(np.uint16), registers(d)]
    return Case(inputs, [np.zeros_like(want, np.float32)], judge, block=128, shared=128 * columns)


_WGMMA = """    QC_SHARED(uint4, tile, 0, {columns} * 8);
    float d[{columns} / 8][4];
    uint32_t a[4][4];
    const int t = threadIdx.x;
    for (int i = t; i < {columns} * 8; i += 128) tile[i / 8 * 8 + (i ^ i / 8) % 8] = ((const uint4*)b0)[i];
    qc_fence_async();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < {columns} / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][e] = d0[({columns} / 8 * t + i) * 4 + e];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int p = 0; p < 4; ++p) a[j][p] = a0[(4 * t + j) * 4 + p];
    qc_wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {{
        qc_wgmma_fence();
        qc_wgmma_16(d, a[j], qc_place(tile) + 32 * j, {tag}{{}});
        qc_wgmma_commit();
        qc_wgmma_wait<1>();
    }}
    qc_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < {columns} / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[({columns} / 8 * t + i) * 4 + e] = d[i][e];
"""


_MMA_S8 = _MMA.replace("float d[4]", "int d[4]").replace("qc_mma_16816(d, a, b, {tag}{{}})", "qc_mma_16832_s8(d, a, b)")


# --- numbers ----------------------------------------------------------------------------------------------------------


def _all_halves() -> Array:
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def _f32_of_f16() -> Case:
    want = _all_halves().view(np.float16).astype(np.float32)
    return Case(
        [_all_halves()], [np.zeros(1 << 16, np.float32)], lambda out: same_floats(out[0], want), grid=256, block=256
    )


def floats(name: str, dtype: Any) -> Array:
    """2^18 floats: all values of a 16-bit type, the midpoints between them and the floats beside those, random bits."""
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        middles = (values + np.roll(values, -1)) * np.float32(0.5)
    near = np.concatenate([np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))])
    bits = random(name).integers(0, 2**32, (1 << 16) - 4, np.uint32).view(np.float32)
    special = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)
    chosen = np.concatenate([values, middles, near[::2], bits, special])
    return np.ascontiguousarray(chosen[: 1 << 18])


def rounded(values: Array, dtype: Any) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = values.astype(dtype)
    return result


def _f16_of_f32() -> Case:
    values = floats("narrow", np.float16)
    want = rounded(values, np.float16)
    return Case(
        [values],
        [np.zeros(values.size, np.uint16)],
        lambda out: same_floats(out[0].view(np.float16), want),
        grid=values.size // 256,
        block=256,
    )


def _pack(dtype: Any) -> Case:
    low = floats(f"low {dtype}", dtype)
    high = random("shuffle").permutation(floats(f"high {dtype}", dtype))
    want = np.stack([rounded(low, dtype), rounded(high, dtype)], axis=1)

    def judge(outputs: Sequence[Array]) -> str | None:
        return same_floats(outputs[0].view(np.uint16).view(dtype).reshape(-1, 2), want)

    return Case([low, high], [np.zeros(low.size, np.uint32)], judge, grid=low.size // 256, block=256)


def _exp2() -> Case:
    rng = random("exp2")
    inside = rng.uniform(-126, 128, 6 << 10)
    near = rng.uniform(-1, 1, 1 << 10) * 10.0 ** rng.uniform(-30, 0, 1 << 10)
    special = [0.0, -0.0, 1.0, -1.0, 127.0, -126.0, 128.0, 1e30, -1e30, -151.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40]
    x = np.concatenate([inside, near, np.arange(-126.0, 128.0), special]).astype(np.float32)
    x = np.resize(x, -(-x.size // 256) * 256)
    with np.errstate(over="ignore"):
        want = np.exp2(x.astype(np.float64))

    def judge(outputs: Sequence[Array]) -> str | None:
        got = outputs[0]
        tiny = float(np.finfo(np.float32).tiny)
        with np.errstate(over="ignore", invalid="ignore"):
            ulp = np.spacing(np.clip(want, tiny, 3e38).astype(np.float32)).astype(np.float64)
            off = np.abs(got.astype(np.float64) - want) / ulp
        largest = float(np.finfo(np.float32).max)
        good = np.where(
            np.isnan(want), np.isnan(got),
            np.where(want > largest, np.isinf(got) & (got > 0), np.where(want < tiny, got == 0, off <= 2.0)),
        )  # fmt: skip
        # A result beside the smallest normal number may be rounded up to it or flushed.
        good |= (np.abs(want - tiny) < 4 * ulp) & ((got == 0) | (np.abs(got - tiny) < 8 * ulp))
        if good.all():
            return None
        i = int(np.flatnonzero(~good)[0])
        return f"{int((~good).sum())} of {x.size} are off, first 2^{x[i]!r}: {got[i]!r}, expected {want[i]!r}"

    return Case([x], [np.zeros(x.size, np.float32)], judge, grid=x.size // 256, block=256)


# --- what NVRTC provides and the simulator imitates -------------------------------------------------------------------


def _bits() -> Case:
    rng = random("bits")
    a, b = (rng.integers(0, 2**32, 1024, np.uint32) for _ in range(2))
    a[:37] = [0, 2**32 - 1, 2**31 - 1, 2**31 + 1, 3, *(1 << i for i in range(32))]
    b[:4] = [0, 31, 32, 2**32 - 1]
    wide = a.astype(np.uint64) << np.uint64(32) | b
    bits = np.unpackbits(a.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    any_bit = bits.any(axis=1)
    selected = np.concatenate([a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)], axis=1)
    nibbles = np.stack([b >> np.uint32(4 * i) & np.uint32(15) for i in range(4)], axis=1)
    taken = np.take_along_axis(selected, (nibbles & 7).astype(np.int64), axis=1)  # no sign is replicated
    signed = (x.view(np.int8).reshape(-1, 4).astype(np.int64) for x in (a, b))
    columns = [
        bits.sum(axis=1),
        np.where(any_bit, bits[:, ::-1].argmax(axis=1), 32),
        np.where(any_bit, bits.argmax(axis=1) + 1, 0),
        np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0],
        np.ascontiguousarray(taken).view(np.uint32)[:, 0],
        (wide << (b & 31).astype(np.uint64)) >> np.uint64(32) & np.uint64(2**32 - 1),
        wide >> (b & 31).astype(np.uint64) & np.uint64(2**32 - 1),
        a.astype(np.uint64) * b >> np.uint64(32),
        (next(signed) * next(signed)).sum(axis=1) + a.view(np.int32),
    ]
    want = np.stack([column.astype(np.int64).astype(np.uint32) for column in columns], axis=1)
    return Case([a, b], [np.zeros_like(want)], equal(want), grid=4, block=256)


def _to_integers() -> Case:
    rng = random("integers")
    special = [np.nan, np.inf, -np.inf, 0.5, 1.5, 2.5, -0.5, -1.5, 2.0**31 - 128, 2.0**31, -(2.0**31), 3e9, -3e9, 1e30]
    count = 1024 - len(special)
    x = np.array([*special, *(rng.standard_normal(count) * 10.0 ** rng.uniform(0, 11, count))], np.float32)
    low, high = -(2**31), 2**31 - 1

    def saturated(values: Array) -> Array:
        finite = np.nan_to_num(values.astype(np.float64), nan=0, posinf=high, neginf=low)
        return np.clip(finite, low, high)

    want = np.stack([saturated(np.rint(x)), saturated(np.trunc(x))], axis=1).astype(np.int64).astype(np.int32)
    return Case([x], [np.zeros_like(want)], equal(want), grid=4, block=256)


def _shuffles() -> Case:
    """One warp: each kind of shuffle over the warp and over quarters of it, and the votes."""
    x = random("shuffle").integers(0, 2**32, 32, np.uint32)
    lane = np.arange(32)
    columns = []
    for width in (32, 8):
        begin, end = lane // width * width, lane // width * width + width - 1
        columns += [
            x[begin + 5 % width],
            x[np.where(lane - 3 < begin, lane, lane - 3)],
            x[np.where(lane + 3 > end, lane, lane + 3)],
            x[lane ^ 5],
        ]
    odd = int(sum(1 << i for i in range(32) if x[i] & 1))
    columns += [np.full(32, odd), np.full(32, int(odd != 0)), np.full(32, int(odd == 2**32 - 1))]
    want = np.stack([column.astype(np.uint32) for column in columns], axis=1)
    return Case([x], [np.zeros_like(want)], equal(want))


def _and_or() -> Case:
    x, mask, bits = random("and or").integers(0, 2**32, (3, 1024), np.uint32)
    return Case([x, mask, bits], [np.zeros_like(x)], equal(x & mask | bits), grid=4, block=256)


def _fma2(dtype: Any) -> Case:
    """Pairs of any bits, and pairs whose sum is a tie but for a far smaller part: the exact sum is rounded once."""
    digits, lowest, top = (8, -126, 127) if dtype == ml_dtypes.bfloat16 else (11, -14, 15)
    bits = random("fma2").integers(0, 2**16, (3, 4096)).astype(np.uint16)
    near = random("fma2 near").integers(0, 2**7, (3, 1024)).astype(np.uint16)
    near[0] |= np.uint16(0x3F80 if digits == 8 else 0x3C00)  # from 1 on, times the same, plus a little or a lot
    near[1] |= near[0] & np.uint16(0x7F80 if digits == 8 else 0x7C00)
    bits[:, :1024] = near
    bits[2, 1024:1536] = 0x8000  # a product alone
    a, b, c = bits

    def rounded(x: float, y: float, z: float) -> float:
        if not np.isfinite([x, y, z]).all():
            with np.errstate(all="ignore"):
                return float(np.float64(x) * np.float64(y) + np.float64(z))
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if exact == 0:
            return float(np.float64(x) * np.float64(y) + np.float64(z))  # a zero of the right sign
        exponent = lowest
        while abs(exact) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        step = Fraction(2) ** (exponent - digits + 1)
        value = round(exact / step) * step  # Fraction rounds ties to even
        if abs(value) >= Fraction(2) ** (top + 1):
            return float("inf") if value > 0 else float("-inf")
        return float(value) if value else float(np.copysign(0.0, float(exact > 0) - 0.5))

    with np.errstate(invalid="ignore"):  # NaNs among the bits
        values = [each.view(dtype).astype(np.float64) for each in (a, b, c)]
    want = np.array([rounded(*each) for each in zip(*values, strict=True)]).astype(np.float32).astype(dtype)

    def judge(outputs: Sequence[Array]) -> str | None:
        return same_floats(outputs[0].view(dtype), want)

    pairs = [np.ascontiguousarray(each).view(np.uint32) for each in (a, b, c)]
    return Case(pairs, [np.zeros_like(pairs[0])], judge, grid=8, block=256)


_INDEX = "    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;\n"

CHECKS: tuple[Check, ...] = (
    Check(
        "load_stream", ("qc_load_stream_16",), "const uint32_t* const x, uint32_t* const out",
        _INDEX + "    const uint4 v = qc_load_stream_16(x + 4 * i);\n"
        "    out[4 * i] = v.x;\n    out[4 * i + 1] = v.y;\n    out[4 * i + 2] = v.z;\n    out[4 * i + 3] = v.w;\n",
        _copied,
    ),
    Check(
        "store_global", ("qc_store_global_16",), "const uint32_t* const x, uint32_t* const out",
        _INDEX + "    const uint32_t* const v = x + 4 * i;\n"
        "    qc_store_global_16(out + 4 * i, make_uint4(v[0], v[1], v[2], v[3]));\n",
        _copied,
    ),
    Check(
        "load_shared", ("qc_load_shared_8", "qc_store_shared_16"), "const float* const x, float* const out",
        """    QC_SHARED(float, before, 0, 64);
    QC_SHARED(float2, tile, 256, 128);
    const int i = threadIdx.x;
    if (i < 64) before[i] = 0.0f;
    const uint4 two = make_uint4(__float_as_uint(x[4 * (i / 2)]), __float_as_uint(x[4 * (i / 2) + 1]),
                                 __float_as_uint(x[4 * (i / 2) + 2]), __float_as_uint(x[4 * (i / 2) + 3]));
    if (i % 2 == 0) qc_store_shared_16(qc_fixed(tile) + 8 * i, two);
    __syncthreads();
    const float2 v = qc_load_shared_8(qc_fixed(tile) + 8 * (i ^ 37));
    out[2 * i] = v.x, out[2 * i + 1] = v.y;
""",
        _load_shared,
    ),
    Check(
        "and_or", ("qc_and_or",),
        "const uint32_t* const x, const uint32_t* const mask, const uint32_t* const bits, uint32_t* const out",
        _INDEX + "    out[i] = qc_and_or(x[i], mask[i], bits[i]);\n", _and_or,
    ),
    *(
        Check(
            name, ("qc_fma2",),
            "const uint32_t* const a, const uint32_t* const b, const uint32_t* const c, uint32_t* const out",
            _INDEX + f"    out[i] = qc_fma2(a[i], b[i], c[i], {tag}());\n", case, arch,
        )
        for name, tag, arch, case in (
            ("fma2_f16", "qc_f16", 70, lambda: _fma2(np.float16)),
            ("fma2_bf16", "qc_bf16", 80, lambda: _fma2(ml_dtypes.bfloat16)),
        )
    ),
    Check(
        "cp_async", ("qc_cp_async_16", "qc_cp_async_commit", "qc_cp_async_wait"),
        "const uint32_t* const x, uint32_t* const out",
        """    QC_SHARED(uint32_t, first, 0, 512);
    QC_SHARED(uint32_t, second, 2048, 512);
    const int i = threadIdx.x;
    qc_cp_async_16(first + 4 * i, x + 4 * i);
    qc_cp_async_commit();
    qc_cp_async_16(second + 4 * i, x + 512 + 4 * i);
    qc_cp_async_commit();
    qc_cp_async_wait<1>();
    __syncthreads();
    for (int j = 0; j < 4; ++j) out[4 * i + j] = first[4 * (i ^ 1) + j];
    qc_cp_async_wait<0>();
    __syncthreads();
    for (int j = 0; j < 4; ++j) out[512 + 4 * i + j] = second[4 * (i ^ 33) + j];
""",
        _cp_async,
    ),
    Check(
        "cp_async_zero", ("qc_cp_async_16_or_zero",), "const uint32_t* const x, uint32_t* const out",
        """    QC_SHARED(uint32_t, tile, 0, 512);
    const int i = threadIdx.x;
    const bool there = i % 2 == 0;
    qc_cp_async_16_or_zero(tile + 4 * i, x + (there ? 2 * i : 1 << 20), there);
    qc_cp_async_commit();
    qc_cp_async_wait<0>();
    __syncthreads();
    for (int j = 0; j < 4; ++j) out[4 * i + j] = tile[4 * i + j];
""",
        _cp_async_zero,
    ),
    Check(
        "follow", ("qc_let_next_start", "qc_wait_for_kernels"), "const uint32_t* const x, uint32_t* const out",
        """    qc_let_next_start();
    qc_wait_for_kernels();
    out[threadIdx.x] = x[threadIdx.x] + 1;
""",
        _follow,
    ),
    Check(
        "last_block", ("qc_load_acquire", "qc_store_release", "qc_atomic_add_acq_rel"),
        "const uint32_t* const parts, uint32_t* const stored, uint32_t* const flags, uint32_t* const counter, "
        "uint32_t* const out",
        """    QC_SHARED(uint32_t, seen, 0, 1);
    const int threads = blockDim.x;
    if (threadIdx.x == 0) {
        uint32_t sum = 0;
        for (int i = 0; i < threads; ++i) sum += parts[threads * blockIdx.x + i];
        stored[blockIdx.x] = sum;
        qc_store_release(flags + blockIdx.x, 1);
        seen[0] = qc_atomic_add_acq_rel(counter, 1);
    }
    __syncthreads();
    if (seen[0] == gridDim.x - 1 && threadIdx.x == 0) {
        uint32_t total = 0, arrived = 0;
        for (int b = 0; b < (int)gridDim.x; ++b) {
            arrived += qc_load_acquire(flags + b);
            total += stored[b];
        }
        out[0] = total;
        out[1] = arrived;
    }
""",
        _last_block,
    ),
    *(
        Check(
            name, (f"qc_{name}",), "const uint16_t* const shared, const uint32_t* const place, uint32_t* const out",
            _LDMATRIX.format(count=count, function=f"qc_{name}"), case, 75,
        )
        for name, count, case in (
            ("ldmatrix_x4", 4, lambda: _ldmatrix(4, transposed=False)),
            ("ldmatrix_x4_trans", 4, lambda: _ldmatrix(4, transposed=True)),
            ("ldmatrix_x2", 2, lambda: _ldmatrix(2, transposed=False)),
        )
    ),
    *(
        Check(name, ("qc_mma_16816",), _MMA_PARAMETERS, _MMA.format(tag=tag), case, arch)
        for name, tag, arch, case in (
            ("mma_f16", "qc_f16", 75, lambda: _mma(np.float16, exact=False)),
            ("mma_f16_exact", "qc_f16", 75, lambda: _mma(np.float16, exact=True)),
            ("mma_bf16", "qc_bf16", 80, lambda: _mma(ml_dtypes.bfloat16, exact=False)),
            ("mma_bf16_exact", "qc_bf16", 80, lambda: _mma(ml_dtypes.bfloat16, exact=True)),
        )
    ),
    Check(
        "mma_s8", ("qc_mma_16832_s8",), _MMA_PARAMETERS.replace("float*", "int*"), _MMA_S8, _mma_s8, 75,
    ),
    *(
        Check(
            f"wgmma_{name}_{columns}",
            ("qc_wgmma_16", "qc_wgmma_fence", "qc_wgmma_commit", "qc_wgmma_wait", "qc_fence_async"),
            "const uint32_t* const a0, const uint16_t* const b0, const float* const d0, float* const out",
            _WGMMA.format(columns=columns, tag=f"qc_{name}"), functools.partial(_wgmma, dtype, columns), 90, alone=True,
        )
        for name, dtype in (("bf16", ml_dtypes.bfloat16), ("f16", np.float16))
        for columns in (64, 128, 256)
    ),
    Check(
        "f32_of_f16", ("qc_f32_of_f16",), "const uint16_t* const x, float* const out",
        _INDEX + "    out[i] = qc_f32_of_f16(x[i]);\n", _f32_of_f16,
    ),
    Check(
        "f16_of_f32", ("qc_f16_of_f32",), "const float* const x, uint16_t* const out",
        _INDEX + "    out[i] = qc_f16_of_f32(x[i]);\n", _f16_of_f32,
    ),
    Check(
        "pack_f16", ("qc_pack_f16",), "const float* const low, const float* const high, uint32_t* const out",
        _INDEX + "    out[i] = qc_pack_f16(low[i], high[i]);\n", lambda: _pack(np.float16),
    ),
    Check(
        "pack_bf16", ("qc_pack_bf16",), "const float* const low, const float* const high, uint32_t* const out",
        _INDEX + "    out[i] = qc_pack_bf16(low[i], high[i]);\n", lambda: _pack(ml_dtypes.bfloat16),
    ),
    Check(
        "exp2_fast", ("qc_exp2_fast",), "const float* const x, float* const out",
        _INDEX + "    out[i] = qc_exp2_fast(x[i]);\n", _exp2,
    ),
    Check(
        "bits", (), "const uint32_t* const a, const uint32_t* const b, uint32_t* const out",
        _INDEX + """    uint32_t* const to = out + 9 * i;
    to[0] = __popc(a[i]);
    to[1] = __clz((int)a[i]);
    to[2] = __ffs((int)a[i]);
    to[3] = __brev(a[i]);
    to[4] = __byte_perm(a[i], b[i], b[i]);
    to[5] = __funnelshift_l(b[i], a[i], b[i]);
    to[6] = __funnelshift_r(b[i], a[i], b[i]);
    to[7] = __umulhi(a[i], b[i]);
    to[8] = (uint32_t)__dp4a((int)a[i], (int)b[i], (int)a[i]);
""",
        _bits,
    ),
    Check(
        "to_integers", (), "const float* const x, int32_t* const out",
        _INDEX + "    out[2 * i] = __float2int_rn(x[i]);\n    out[2 * i + 1] = __float2int_rz(x[i]);\n", _to_integers,
    ),
    Check(
        "shuffles", (), "const uint32_t* const x, uint32_t* const out",
        """    const uint32_t v = x[threadIdx.x];
    uint32_t* const to = out + 11 * threadIdx.x;
    to[0] = __shfl_sync(QC_ALL_LANES, v, 5);
    to[1] = __shfl_up_sync(QC_ALL_LANES, v, 3);
    to[2] = __shfl_down_sync(QC_ALL_LANES, v, 3);
    to[3] = __shfl_xor_sync(QC_ALL_LANES, v, 5);
    to[4] = __shfl_sync(QC_ALL_LANES, v, 5, 8);
    to[5] = __shfl_up_sync(QC_ALL_LANES, v, 3, 8);
    to[6] = __shfl_down_sync(QC_ALL_LANES, v, 3, 8);
    to[7] = __shfl_xor_sync(QC_ALL_LANES, v, 5, 8);
    to[8] = __ballot_sync(QC_ALL_LANES, v & 1);
    to[9] = __any_sync(QC_ALL_LANES, v & 1);
    to[10] = __all_sync(QC_ALL_LANES, v & 1);
""",
        _shuffles,
    ),
)  # fmt: skip


def checks_for(arch: int) -> list[Check]:
    """The checks of an architecture (as a number: 90)."""
    return [check for check in CHECKS if (check.arch == arch if check.alone else check.arch <= arch)]
