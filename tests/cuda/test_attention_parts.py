"""Attention in parts: the parts and what joins them against float64 and the whole attention, for all divisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import cache_rows
from qcompiler.formats.cache_rows import row_bytes
from qcompiler.kernels.attention_split import INSTRUCTIONS, TRIPS_PER_STRIP
from qcompiler.kernels.cpu.emit import emit_kernel as emit_cpu
from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.attention_decode import PART_KEYS, STRIP, Share
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import sass

Array = np.ndarray
ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
"""Half the distance of the neighbours of 1: the most by which a rounding changes a number, relative to it."""


@dataclass(frozen=True)
class Case:
    """A cache of `kv` rows, of which the first query of batch b sees those up to `last[b]`."""

    name: str
    kv: int
    parts: int
    last: tuple[int, ...]
    q: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    dtype: DType = "f32"
    window: int | None = None
    ring: bool = False
    softcap: float | None = None
    cache: cache_rows.Kind | None = None
    mask: bool = False
    sinks: bool = False
    slow: bool = True

    @property
    def batch(self) -> int:
        return len(self.last)

    def operand(self, name: str, shape: tuple[int, ...], dtype: DType, access: Any = "r") -> Operand:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=tuple(strides))

    def attention(self, parts: int | None) -> KernelSpec:
        """The whole attention without `parts`."""
        k, v = (row_bytes(n, self.cache) if self.cache else n for n in (self.dim, self.value_dim))
        kept: DType = "i8" if self.cache else self.dtype
        rows = (self.batch, self.heads, self.q)
        operands = [
            self.operand("q", (*rows, self.dim), self.dtype),
            self.operand("k", (self.batch, self.kv_heads, self.kv, k), kept),
            self.operand("v", (self.batch, self.kv_heads, self.kv, v), kept),
            *([self.operand("mask", (*rows, self.kv), "i1")] if self.mask else []),
            self.operand("last", (self.batch, self.q), "i64"),
            *([self.operand("sinks", (*rows, 1), "f32")] if self.sinks else []),
        ]
        if parts is None:
            operands.append(self.operand("out", (*rows, self.value_dim), self.dtype, "w"))
        else:
            operands.append(self.operand("out", (*rows, parts, self.value_dim + 2), "f32", "w"))
        body = AttentionKernel(
            batch=self.batch, heads=self.heads, kv_heads=self.kv_heads, q_len=self.q, kv_len=self.kv,
            head_dim=self.dim, value_dim=self.value_dim, scale=self.dim**-0.5, causal=False,
            mask="bool" if self.mask else "none", window=self.window, softcap=self.softcap, last=True, ring=self.ring,
            cache=self.cache, parts=parts, sinks=self.sinks,
        )  # fmt: skip
        return KernelSpec(name=f"{self.name}_{parts or 'whole'}", symbols=(), operands=tuple(operands), body=body)

    @property
    def join(self) -> KernelSpec:
        rows = (self.batch, self.heads, self.q)
        x = self.operand("x", (*rows, self.parts, self.value_dim + 2), "f32")
        out = self.operand("out", (*rows, self.value_dim), self.dtype, "w")
        body = JoinAttentionKernel(
            batch=self.batch, heads=self.heads, q_len=self.q, parts=self.parts, value_dim=self.value_dim
        )
        return KernelSpec(name=f"{self.name}_join", symbols=(), operands=(x, out), body=body)

    @property
    def specs(self) -> list[KernelSpec]:
        return [self.attention(None), self.attention(self.parts), self.join]


CASES = [
    # lengths that are 1, shorter than a part, one part exactly, one key more, and the whole cache; sequences differ
    Case("three", 3 * PART_KEYS, 3, (2 * PART_KEYS - 1, 0, 2 * PART_KEYS), slow=False),
    Case("one_part", 600, 1, (599,)),
    Case("two", 2 * PART_KEYS, 2, (PART_KEYS, PART_KEYS - 1, 6)),
    Case("seven", 2000, 7, (1999, 63, -1), dtype="bf16", dim=64, value_dim=40),
    Case("long_parts", 1500, 2, (1400, 700, 1499), dtype="f16"),
    Case("many", 300, 70, (299, 256, 255)),
    Case("all_heads", 600, 3, (599, 300), heads=16, kv_heads=1, dim=128, value_dim=128, dtype="bf16"),
    Case("four_queries", 700, 3, (698, 100), q=4, heads=6),
    Case("masked", 700, 3, (699, 400), mask=True),
    Case("sinks", 3 * PART_KEYS, 3, (2 * PART_KEYS - 1, 0, 2 * PART_KEYS), sinks=True, slow=False),
    Case("sinks_masked", 700, 3, (699, 400), q=2, heads=6, sinks=True, mask=True, dtype="bf16"),
    Case("sinks_ring", 900, 3, (5000, 1200, 100), window=90, ring=True, sinks=True),
    Case("window", 1200, 3, (1100, 600, 90), window=520, softcap=2.0),
    Case("ring", 700, 3, (5000, 300, 699), window=650, ring=True),
    Case("ring_of_strips", 900, 3, (5000, 1200, 100), window=90, ring=True),
    Case("deep", 300, 2, (299,), dim=200, value_dim=300),
    Case("wide_values", 600, 2, (599,), value_dim=520, heads=2),
    *(
        Case(f"{kind}_{dim}", 600, 3, (599, 200), cache=kind, dim=dim, value_dim=dim, dtype="bf16")
        for kind, dim in (("int8", 64), ("fp8", 128), ("int4", 64), ("int4", 128), ("int8", 20))
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
PARAMETERS = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]


@dataclass(frozen=True)
class Results:
    whole: Array
    parts: Array
    joined: Array


@pytest.fixture(scope="module")
def run(sim_module: Callable[..., Any]) -> Callable[..., Results]:
    """``run(case, arrays)``: the whole attention, its parts, and these joined."""

    def call(case: Case, arrays: list[Array], **how: Any) -> Results:
        module = sim_module([spec for each in CASES if each.slow == case.slow for spec in each.specs])
        whole, parts, join = case.specs
        empty = [np.empty(spec.operands[-1].shape, NUMPY_DTYPES[spec.operands[-1].dtype]) for spec in case.specs]
        (first,) = module.run(whole.name, [*arrays, empty[0]], **how)
        (divided,) = module.run(parts.name, [*arrays, empty[1]], **how)
        (joined,) = module.run(join.name, [divided, empty[2]], **how)
        return Results(first, divided, joined)

    return call


def inputs(case: Case) -> list[Array]:
    rng = np.random.default_rng(3)
    kept = NUMPY_DTYPES[case.dtype]
    shapes = (
        (case.heads, case.q, case.dim),
        (case.kv_heads, case.kv, case.dim),
        (case.kv_heads, case.kv, case.value_dim),
    )
    arrays = [rng.normal(size=(case.batch, *shape)).astype(kept) for shape in shapes]
    if case.cache is not None:
        arrays[1:] = [cache_rows.quantise(each, case.cache) for each in arrays[1:]]
    if case.mask:
        mask = rng.random((case.batch, case.heads, case.q, case.kv)) < 0.7
        mask[0, 0] = False  # sees no key
        arrays.append(mask)
    last = np.array(case.last, np.int64)[:, None] + np.arange(case.q)
    arrays.append(np.minimum(last, case.kv - 1) if not case.ring else last)
    if case.sinks:
        arrays.append((rng.normal(size=(case.batch, case.heads, case.q, 1)) * 3).astype(np.float32))
    return arrays


def last_of(case: Case, arrays: list[Array]) -> Array:
    return arrays[-2] if case.sinks else arrays[-1]


def weighed(case: Case, arrays: list[Array]) -> tuple[Array, Array]:
    """Scores (batch, heads, q, kv) in float64, -inf where hidden, and values for each head. A sink is the score of one
    more key, whose value is zero."""
    read = list(arrays[:3])
    if case.cache is not None:
        sizes = (case.dim, case.value_dim)
        read[1:] = [cache_rows.dequantise(a, d, case.cache) for a, d in zip(read[1:], sizes, strict=True)]
    q, k, v = (a.astype(np.float64) for a in read)
    k, v = (np.repeat(a, case.heads // case.kv_heads, axis=1) for a in (k, v))
    scores = q @ k.swapaxes(-1, -2) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    last, keys = last_of(case, arrays)[:, None, :, None], np.arange(case.kv)
    seen = keys <= last
    if case.ring:
        seen &= (last - keys) % case.kv < case.window
    elif case.window is not None:
        seen &= keys > last - case.window
    if case.mask:
        seen = seen & arrays[3]
    scores = np.where(seen, scores, -np.inf)
    if case.sinks:
        scores = np.concatenate([scores, arrays[-1].astype(np.float64)], -1)
        v = np.concatenate([v, np.zeros((*v.shape[:2], 1, v.shape[3]))], 2)
    return scores, v


def softmax_of(scores: Array, v: Array) -> Array:
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    out: Array = weights @ v / np.where(total == 0, 1, total)
    return out


def allowed(case: Case, scores: Array, v: Array) -> Array:
    """The most that an fp32 result may differ from float64, of each element: a score is off by u = 2^-24 for each of
    its dim + 2 steps on the products' magnitudes, a weight by as much plus four (exp, two fades and the division), and
    a sum by one for each step of its longest chain: the keys of a lane, the warps and the parts. Rounding is added."""
    u = ROUNDING["f32"]
    steps = case.dim + 2 + 4 + case.kv / 16 + 16 + case.parts
    size = np.abs(np.where(np.isinf(scores), 0, scores)).max(-1, keepdims=True) + 1
    bound = 2 * u * steps * size * softmax_of(scores, np.abs(v))
    result: Array = bound + ROUNDING[case.dtype] * np.abs(softmax_of(scores, v)) + 1e-30
    return result


@pytest.mark.parametrize("case", PARAMETERS)
def test_joined_parts_are_the_attention_and_do_not_depend_on_the_order_of_threads(
    run: Callable[..., Results], case: Case
) -> None:
    arrays = inputs(case)
    found = run(case, arrays)
    scores, v = weighed(case, arrays)
    bound = allowed(case, scores, v)
    want = softmax_of(scores, v)
    assert (np.abs(found.joined.astype(np.float64) - want) <= bound).all()
    assert (np.abs(found.joined.astype(np.float64) - found.whole.astype(np.float64)) <= 2 * bound).all()
    again = run(case, arrays, seed=1)
    assert found.parts.tobytes() == again.parts.tobytes() and found.joined.tobytes() == again.joined.tobytes()


@pytest.mark.parametrize("case", PARAMETERS)
def test_every_key_is_in_one_part_and_parts_behind_the_last_key_are_empty(
    run: Callable[..., Results], case: Case
) -> None:
    """The totals of the parts, brought to one top, are the total of all keys that a query sees."""
    arrays = inputs(case)
    parts = run(case, arrays).parts.astype(np.float64)
    scores, _ = weighed(case, arrays)
    tops, totals = parts[..., -2], parts[..., -1]
    np.testing.assert_allclose(tops.max(-1), scores.max(-1), rtol=1e-4, atol=1e-4)
    top = np.where(np.isinf(scores.max(-1)), 0, scores.max(-1))[..., None]
    np.testing.assert_allclose((totals * np.exp(tops - top)).sum(-1), np.exp(scores - top).sum(-1), rtol=1e-3)
    for b in range(case.batch):
        seen = int(last_of(case, arrays)[b].max()) + 1 if case.window is None else case.window + case.q + 31
        used = max(0, -(-seen // PART_KEYS))
        empty = parts[b, :, :, used:]
        assert np.isneginf(empty[..., -2]).all() and not empty[..., :-2].any() and not empty[..., -1].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three", "int8_64", "four_queries"])
def test_what_lies_behind_the_last_key_is_not_used(run: Callable[..., Results], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    want = run(case, arrays).joined
    for b in range(case.batch):
        end = int(last_of(case, arrays)[b].max()) + 1
        arrays[1][b, :, end:] = arrays[2][b, :, end:] = np.nan if case.cache is None else -1  # a scale of NaN
    assert run(case, arrays).joined.tobytes() == want.tobytes()


@pytest.mark.slow
def test_a_nan_in_any_part_reaches_the_result(run: Callable[..., Results]) -> None:
    case = BY_NAME["three"]
    for key in (0, PART_KEYS, 2 * PART_KEYS - 1):
        arrays = inputs(case)
        arrays[1][0, 0, key] = np.nan
        joined = run(case, arrays).joined
        assert np.isnan(joined[0, :2]).all() and not np.isnan(joined[0, 2:]).any() and not np.isnan(joined[1:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("arch", signature.ARCHS)
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str) -> None:
    """Parts of heads of 128 columns for each type of cache: those with the most registers."""
    kinds: list[tuple[DType, cache_rows.Kind | None]] = [("f32", None), ("bf16", None)]
    kinds += [("bf16", kind) for kind in cache_rows.KINDS]
    made = [
        replace(BY_NAME["three"], name=cache or dtype, dtype=dtype, cache=cache, heads=32, kv_heads=4, dim=128,
                value_dim=128, parts=33)
        for dtype, cache in kinds
    ]  # fmt: skip
    for name, used in nvrtc([*(each.attention(33) for each in made), made[1].join], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"
        if name.endswith("_33"):
            assert used.registers <= 128, "two blocks of 256 threads share the 65536 registers of a multiprocessor"


@pytest.mark.slow
def test_a_key_takes_as_many_instructions_as_the_estimate_says(nvrtc_functions: Callable[..., Any]) -> None:
    """Four rows of 128 columns in bf16: an iteration of the loop over strips, of its loops over keys and values."""
    made = replace(BY_NAME["three"], name="count", dtype="bf16", heads=32, kv_heads=8, dim=128, value_dim=128, parts=33)
    spec = made.attention(33)
    share = Share.of(spec)
    assert (share.rows, share.warps, share.keys_ahead, share.turns, share.values_ahead) == (4, 8, 2, 2, 8)
    strip, (keys, values) = sass.nested_loops(nvrtc_functions([spec], "sm_90a")["qk_count_33"], "FFMA")
    per_value = share.values_ahead * 32 // share.value_lanes
    assert round(strip / STRIP + keys / (4 * share.keys_ahead) + values / per_value) == INSTRUCTIONS
    assert STRIP // (4 * share.keys_ahead) + STRIP // per_value == TRIPS_PER_STRIP


def test_what_no_kernel_does_is_refused_by_name() -> None:
    case = BY_NAME["three"]
    with pytest.raises(KernelSelectionError, match="divides the keys into parts; only GPUs have kernels that do"):
        emit_cpu(case.attention(3), "x86-64-v3")
    with pytest.raises(KernelSelectionError, match="divides the keys of 5 queries; it does so for at most 4"):
        emit_kernel(replace(case, q=5).attention(3), "sm_80")
    assert emit_kernel(case.attention(3), "sm_80").geometry.at({}) == (3 * 2 * 3, 1, 1)
