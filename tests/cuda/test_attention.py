"""Attention on the device against float64: several tiles, grouped queries, masks, causality, views, types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import cache_rows
from qcompiler.formats.cache_rows import row_bytes
from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = np.ndarray
TOLERANCE = {"f32": 2e-6, "bf16": 4e-3, "f16": 6e-4}
"""Of the result's norm: fp32 throughout, or the rounding of the weights and of the result."""


@dataclass(frozen=True)
class Case:
    """Operands lie as (batch, length, heads, dim); lengths are symbols unless `q_static`."""

    name: str
    q: int
    kv: int
    heads: int = 2
    kv_heads: int = 2
    dim: int = 32
    value_dim: int = 32
    dtype: DType = "f32"
    causal: bool = False
    mask: Literal["none", "bool", "float"] = "none"
    mask_axes: str = "bqk"  # the axes along which the mask varies; the others have stride 0
    q_static: bool = False
    batch: int = 1
    engine: str = "fma"
    window: int | None = None
    softcap: float | None = None
    last: tuple[int, int] | None = None  # (first, step): query i of batch b counts as first + step * i + 2 * b
    ring: bool = False  # of `kv` rows
    cache: cache_rows.Kind | None = None
    sinks: str | None = None  # the axes along which sinks vary, of "bhq"
    misaligned: bool = False  # views that begin one element into their buffers
    slow: bool = False

    @property
    def spec(self) -> KernelSpec:
        q_len: int | str = self.q if self.q_static else "t"

        def tensor(name: str, heads: int, length: int | str, dim: int) -> Operand:
            batch = f"{length}*{heads * dim}" if isinstance(length, str) else length * heads * dim
            shape = ("b", heads, length, dim)
            kept: DType = "i8" if self.cache is not None and name in ("k", "v") else self.dtype
            return Operand(name=name, dtype=kept, access="r", shape=shape, strides=(batch, dim, heads * dim, 1))

        operands = [
            tensor("q", self.heads, q_len, self.dim),
            tensor("k", self.kv_heads, "s", row_bytes(self.dim, self.cache) if self.cache else self.dim),
            tensor("v", self.kv_heads, "s", row_bytes(self.value_dim, self.cache) if self.cache else self.value_dim),
        ]
        if self.mask != "none":
            down = "s" if "k" in self.mask_axes else 1
            rows = q_len if "q" in self.mask_axes else 1
            strides = (
                f"({down})*({rows})" if "b" in self.mask_axes else 0,
                0,
                down if "q" in self.mask_axes else 0,
                1 if "k" in self.mask_axes else 0,
            )
            shape = ("b", self.heads, q_len, "s")
            dtype: DType = "i1" if self.mask == "bool" else "f32"
            operands.append(Operand(name="mask", dtype=dtype, access="r", shape=shape, strides=strides))
        if self.last is not None:
            kept: DType = "i32" if self.dtype == "bf16" else "i64"
            operands.append(Operand(name="last", dtype=kept, access="r", shape=("b", q_len), strides=(q_len, 1)))
        if self.sinks is not None:
            rows = q_len if "q" in self.sinks else 1
            heads = self.heads if "h" in self.sinks else 1
            steps = {"b": f"({rows})*{heads}", "h": rows, "q": 1}
            strides = tuple(steps[axis] if axis in self.sinks else 0 for axis in "bhq")
            shape = ("b", self.heads, q_len, 1)
            kept = "f32" if "b" in self.sinks else self.dtype
            operands.append(Operand(name="sinks", dtype=kept, access="r", shape=shape, strides=(*strides, 1)))
        out = tensor("out", self.heads, q_len, self.value_dim)
        operands.append(Operand(name="out", dtype=self.dtype, access="w", shape=out.shape, strides=out.strides))
        body = AttentionKernel(
            batch="b", heads=self.heads, kv_heads=self.kv_heads, q_len=q_len, kv_len="s", head_dim=self.dim,
            value_dim=self.value_dim, scale=self.dim**-0.5, causal=self.causal, mask=self.mask,
            window=self.window, softcap=self.softcap, last=self.last is not None, ring=self.ring,
            cache=self.cache, sinks=self.sinks is not None,
        )  # fmt: skip
        return KernelSpec(name=self.name, symbols=("b", "s", "t"), operands=tuple(operands), body=body)


def mma(name: str, q: int, kv: int, dtype: DType = "bf16", **others: Any) -> Case:
    return Case(name, q, kv, dtype=dtype, engine="mma", **others)


def few(name: str, q: int, kv: int, **others: Any) -> Case:
    return Case(name, q, kv, q_static=True, **others)


CASES = [
    Case("plain", 37, 37, batch=2),
    Case("long", 70, 200),
    Case("tiny", 1, 1),
    Case("odd_dims", 19, 45, dim=20, value_dim=27),
    Case("wide", 9, 70, dim=128, value_dim=64),
    Case("pieces", 20, 40, dim=200, value_dim=300),
    Case("grouped", 33, 65, heads=6, kv_heads=2),
    Case("causal", 70, 70, causal=True),
    Case("causal_long_keys", 20, 150, causal=True),
    Case("causal_long_queries", 100, 17, causal=True),
    Case("bool_mask", 21, 40, mask="bool", batch=2),
    Case("key_mask", 21, 100, mask="bool", mask_axes="bk", batch=2),
    Case("float_mask", 21, 40, mask="float", mask_axes="qk", batch=2),
    Case("row_mask", 21, 40, mask="float", mask_axes="bq", batch=2),
    Case("masked_causal", 21, 40, mask="float", causal=True),
    Case("window", 150, 150, causal=True, window=20),
    Case("window_softcap_mask", 70, 90, window=33, softcap=2.0, mask="bool", mask_axes="bk", heads=4, kv_heads=2),
    Case("narrow_head", 40, 40, dtype="bf16", dim=40, value_dim=24),
    few("few_static", 11, 90, dtype="f32"),
    mma("mma_bf16", 70, 130, dim=64, value_dim=64),
    mma("mma_f16", 37, 37, dtype="f16", dim=16, value_dim=32, batch=2),
    mma("mma_causal", 130, 130, dim=128, value_dim=128, causal=True, heads=4, kv_heads=2, batch=1),
    mma("mma_causal_long_keys", 20, 150, causal=True),
    mma("mma_bool", 70, 70, mask="bool", batch=2),
    mma("mma_key_mask", 40, 90, mask="bool", mask_axes="bk", batch=2),
    mma("mma_float", 40, 70, dtype="f16", mask="float", dim=48, value_dim=80),
    mma("mma_masked_causal", 40, 70, mask="float", mask_axes="k", causal=True),
    mma("mma_window", 200, 200, causal=True, window=70),
    mma("mma_window_of_one", 40, 40, causal=True, window=1, softcap=1.5),
    mma("mma_window_past_the_keys", 150, 17, window=20),
    mma("mma_softcap", 70, 70, softcap=2.0, mask="float", window=9),
    mma("mma_misaligned", 33, 70, misaligned=True),
    mma("mma_9", 9, 70, q_static=True),
    mma("mma_30", 30, 70, q_static=True, mask="bool", mask_axes="q"),
    few("decode", 1, 300, heads=6, kv_heads=2, batch=2),
    few("decode_short", 1, 1),
    few("decode_masked", 1, 70, mask="bool", mask_axes="bk", dtype="bf16", value_dim=40, batch=2),
    few("decode_odd", 1, 65, dim=20, value_dim=27, mask="float"),
    few("decode_bf16", 1, 600, dim=128, value_dim=128, heads=4, kv_heads=1, dtype="bf16"),
    few("decode_many_heads", 1, 50, heads=11, kv_heads=1, dim=64, value_dim=64, dtype="f16"),
    few("decode_deep", 1, 40, dim=200, value_dim=300, heads=3, kv_heads=1),
    few("decode_misaligned", 1, 40, dtype="bf16", misaligned=True),
    few("decode_causal", 1, 40, causal=True),
    few("decode_softcap", 1, 70, softcap=1.5, window=3),
    few("three_window", 3, 40, window=2, softcap=1.5, causal=True),
    few("three_queries", 3, 100, heads=6, kv_heads=2, mask="bool"),
    few("three_causal", 3, 40, heads=4, kv_heads=2, causal=True),
    few("four_causal_masked", 4, 40, causal=True, mask="float", mask_axes="k"),
    Case("last", 21, 150, last=(70, 1), heads=4, kv_heads=2, batch=2),
    Case("last_falls_none_seen", 40, 60, last=(20, -1), mask="bool"),
    Case("last_window", 70, 200, last=(99, 1), window=40),
    mma("mma_last", 40, 200, last=(130, 1), batch=2),
    mma("mma_last_masked", 40, 150, last=(150, -4), mask="bool", dtype="f16"),
    mma("mma_last_window", 70, 300, last=(180, 1), window=90),
    few("decode_last", 1, 300, last=(99, 0), heads=6, kv_heads=2, batch=2),
    few("decode_last_past", 1, 40, last=(44, 0), dtype="bf16", mask="bool"),
    few("decode_last_window", 1, 300, last=(201, 0), window=70, dtype="f16"),
    few("three_last", 3, 100, last=(50, 1), heads=6, kv_heads=2),
    few("three_last_falls", 3, 100, last=(1, -1), window=2),
    Case("sinks", 70, 100, sinks="h", causal=True, heads=4, kv_heads=2),
    Case("sinks_of_queries", 21, 45, sinks="bhq", softcap=1.5, mask="bool", dim=20, value_dim=27, batch=2),
    Case("sinks_pieces", 20, 40, sinks="h", dim=200, value_dim=300, last=(-3, 1)),
    mma("mma_sinks", 70, 300, sinks="h", last=(180, 1), window=90, heads=4, kv_heads=2, batch=2),
    mma("mma_sinks_float", 40, 70, dtype="f16", sinks="bhq", mask="float", batch=2),
    mma("mma_sinks_ring", 70, 300, sinks="h", last=(1180, 1), window=90, ring=True),
    mma("mma_sinks_cache", 40, 200, sinks="q", last=(130, 1), cache="int8"),
    few("decode_sinks", 1, 300, sinks="h", last=(99, 0), heads=6, kv_heads=2, batch=2),
    few("decode_sinks_ring", 1, 300, sinks="bhq", last=(1201, 0), window=70, ring=True, heads=11, kv_heads=1,
        dtype="bf16", batch=2),
    few("decode_sinks_none", 1, 40, sinks="h", last=(-1, 0), dtype="f16", batch=2),
    few("three_sinks", 3, 100, sinks="q", heads=6, kv_heads=2, mask="float"),
    few("three_sinks_cache", 3, 300, sinks="bhq", last=(99, 1), cache="int4", heads=6, kv_heads=2, batch=2),
    Case("ring", 21, 100, last=(190, 1), window=50, ring=True, heads=4, kv_heads=2, batch=2),
    Case("ring_begins", 21, 60, last=(0, 1), window=30, ring=True),
    Case("ring_skips", 40, 400, last=(2**40, 1), window=9, ring=True, softcap=2.0),
    mma("mma_ring", 70, 300, last=(1180, 1), window=90, ring=True, batch=2),
    mma("mma_ring_wraps", 40, 128, last=(350, 1), window=80, ring=True, dtype="f16"),
    mma("mma_ring_whole", 70, 300, last=(530, 1), window=231, ring=True),
    mma("mma_ring_none", 20, 70, last=(-10, 1), window=40, ring=True),
    few("decode_ring", 1, 300, last=(1201, 0), window=70, ring=True, heads=6, kv_heads=2, batch=2),
    few("decode_ring_long", 1, 1100, last=(3000, 0), window=600, ring=True, dtype="f16"),
    few("three_ring", 3, 100, last=(250, 1), window=98, ring=True, dtype="bf16"),
    few("decode_ring_none", 1, 40, last=(-1, 0), window=9, ring=True, batch=2),
    Case("cache_ring", 21, 70, last=(150, 1), window=50, ring=True, cache="int8", dim=20, value_dim=27),
    mma("cache_mma_ring", 40, 200, last=(430, 1), cache="int8", dim=64, value_dim=128, window=90, ring=True),
    few("cache_decode_ring", 1, 300, last=(899, 0), cache="int8", dim=64, value_dim=64, window=100, ring=True),
    Case("cache", 21, 70, last=(50, 1), cache="int8", dim=20, value_dim=27, heads=4, kv_heads=2, batch=2),
    Case("cache_fp8", 21, 70, last=(50, 1), cache="fp8", dim=20, value_dim=27, heads=4, kv_heads=2, batch=2),
    mma("cache_fp8_mma", 40, 200, last=(130, 1), cache="fp8", dim=64, value_dim=128, window=90, batch=2),
    few("cache_fp8_decode", 1, 300, last=(99, 0), cache="fp8", heads=6, kv_heads=2, batch=2, dim=64, value_dim=64),
    few("cache_fp8_wide", 1, 200, cache="fp8", heads=8, kv_heads=1, dim=128, value_dim=128, dtype="bf16"),
    Case("cache_int4", 21, 70, last=(50, 1), cache="int4", dim=20, value_dim=27, heads=4, kv_heads=2, batch=2),
    Case("cache_int4_pieces", 20, 40, cache="int4", dim=200, value_dim=300, mask="bool"),
    mma("cache_int4_mma", 40, 200, last=(130, 1), cache="int4", dim=64, value_dim=128, window=90, batch=2),
    mma("cache_int4_mma_f16", 17, 70, dtype="f16", cache="int4", dim=80, value_dim=80),
    few("cache_int4_decode", 1, 300, last=(99, 0), cache="int4", heads=6, kv_heads=2, batch=2, dim=64, value_dim=64),
    few("cache_int4_odd", 1, 65, cache="int4", dim=20, value_dim=47, mask="float"),
    few("cache_int4_wide", 1, 200, cache="int4", heads=8, kv_heads=1, dim=128, value_dim=128, dtype="bf16"),
    Case("cache_pieces", 20, 40, cache="int8", dim=200, value_dim=300, mask="bool"),
    mma("cache_mma", 40, 200, last=(130, 1), cache="int8", dim=64, value_dim=128, window=90, batch=2),
    mma("cache_mma_f16", 17, 70, dtype="f16", cache="int8", softcap=2.0),
    few("cache_decode", 1, 300, last=(99, 0), cache="int8", heads=6, kv_heads=2, batch=2, dim=64, value_dim=64),
    few("cache_decode_wide", 1, 200, cache="int8", heads=8, kv_heads=1, dim=128, value_dim=128, dtype="bf16"),
    few("cache_three_odd", 3, 40, last=(30, 1), cache="int8", dim=20, value_dim=27, softcap=1.5, window=9),
    *(
        Case(f"grid_{dtype}_{dim}_{q}_{kv}", q, kv, dim=dim, value_dim=dim, dtype=dtype, engine=engine, slow=True)
        for dtype, engine in (("f32", "fma"), ("bf16", "mma"), ("f16", "mma"))
        for dim in (16, 64, 112)
        for q in (16, 63, 64, 65)
        for kv in (1, 15, 64, 129)
    ),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
QUICK = [case for case in CASES if not case.slow]
FEW = [
    "causal",
    "mma_causal",
    "mma_float",
    "decode_bf16",
    "pieces",
    "cache_pieces",
    "mma_ring",
    "cache_mma",
    "cache_decode_wide",
    "cache_fp8_mma",
    "cache_fp8_decode",
    "cache_int4_mma",
    "cache_int4_decode",
]
"""What NVRTC compiles for every architecture in the quick suite: each form, in its largest size."""
MOST = [case.name for case in QUICK if case.name not in FEW]
PARAMETERS = [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else []) for case in CASES]
ARCHS = [
    pytest.param(arch, marks=[] if arch in ("sm_75", "sm_90a", "sm_120") else [pytest.mark.slow])
    for arch in signature.ARCHS
]


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module([case.spec for case in QUICK])


@pytest.fixture(scope="module")
def run(sim_module: Callable[..., Any]) -> Callable[..., Array]:
    """``run(case, arrays, seed=0, arch="sm_80")``."""

    def call(case: Case, arrays: list[Array], seed: int = 0, arch: str = "sm_80") -> Array:
        group = [each.spec for each in CASES if each.slow == case.slow]
        if arch != "sm_80":
            group = [each.spec for each in OLD]
        shape = (case.batch, case.q, case.heads, case.value_dim)
        operands = [*arrays, heads_first(place(case, np.empty(shape, NUMPY_DTYPES[case.dtype])))]
        (out,) = sim_module(group, arch).run(case.name, operands, [case.batch, case.kv, case.q], seed=seed)
        result: Array = out
        return result

    return call


def heads_first(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)


def place(case: Case, x: Array) -> Array:
    """`x`, one element into a larger buffer if the case asks for views that start anywhere."""
    if not case.misaligned:
        return x
    flat = np.zeros(x.size + 1, x.dtype)[1:]
    flat[:] = x.reshape(-1)
    return flat.reshape(x.shape)


def inputs(case: Case) -> list[Array]:
    """q, k, v as (batch, heads, length, dim) views, and the mask broadcast to (batch, heads, q, kv)."""
    rng = np.random.default_rng(6)
    kept = NUMPY_DTYPES[case.dtype]
    shapes = ((case.q, case.heads, case.dim), (case.kv, case.kv_heads, case.dim),
              (case.kv, case.kv_heads, case.value_dim))  # fmt: skip
    arrays = [heads_first(place(case, rng.normal(size=(case.batch, *shape)).astype(kept))) for shape in shapes]
    if case.cache is not None:
        arrays[1:] = [heads_first(cache_rows.quantise(heads_first(a), case.cache)) for a in arrays[1:]]
    if case.mask != "none":
        sizes = [
            n if axis in case.mask_axes else 1 for axis, n in zip("bqk", (case.batch, case.q, case.kv), strict=True)
        ]
        values = rng.normal(size=(sizes[0], 1, *sizes[1:]))
        mask = values > -0.3 if case.mask == "bool" else values.astype(np.float32)
        arrays.append(np.broadcast_to(mask, (case.batch, case.heads, case.q, case.kv)))
    if case.last is not None:
        arrays.append(last_keys(case).astype(np.int32 if case.dtype == "bf16" else np.int64))
    if case.sinks is not None:
        sizes = [
            n if axis in case.sinks else 1 for axis, n in zip("bhq", (case.batch, case.heads, case.q), strict=True)
        ]
        sinks = rng.normal(size=(*sizes, 1)) * 3
        sinks.flat[0] = -np.inf  # as good as none
        sinks = sinks.astype(np.float32 if "b" in case.sinks else kept)
        arrays.append(np.broadcast_to(sinks, (case.batch, case.heads, case.q, 1)))
    return arrays


def last_keys(case: Case) -> Array:
    """(batch, q)"""
    assert case.last is not None
    (first, step), b, i = case.last, np.arange(case.batch)[:, None], np.arange(case.q)[None]
    return first + step * i + 2 * b


def reference(case: Case, arrays: list[Array]) -> Array:
    read = list(arrays[:3])
    if case.cache is not None:
        read[1:] = [
            cache_rows.dequantise(a, d, case.cache) for a, d in zip(read[1:], (case.dim, case.value_dim), strict=True)
        ]
    q, k, v = (a.astype(np.float64) for a in read)
    k, v = (np.repeat(a, case.heads // case.kv_heads, axis=1) for a in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.mask != "none":
        scores = np.where(arrays[3], scores, -np.inf) if case.mask == "bool" else scores + arrays[3]
    rows = np.arange(case.q)[None] if case.last is None else last_keys(case)
    rows, columns = rows[:, None, :, None], np.arange(case.kv)
    if case.causal or case.last is not None:
        scores = np.where(columns <= rows, scores, -np.inf)
    if case.ring:
        held = rows - (rows - columns) % case.kv  # the position whose key the row holds
        scores = np.where(held > rows - case.window, scores, -np.inf)
    elif case.window is not None:
        scores = np.where(columns > rows - case.window, scores, -np.inf)
    sinks = np.full((1, 1, 1, 1), -np.inf) if case.sinks is None else arrays[-1].astype(np.float64)
    top = np.maximum(scores.max(-1, keepdims=True), sinks)
    shift = np.where(np.isinf(top), 0, top)
    weights = np.exp(scores - shift)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - shift)
    out: Array = np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) @ v
    return out


def error(out: Array, want: Array) -> float:
    return float(np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", PARAMETERS)
def test_attention_matches_float64_and_does_not_depend_on_the_order_of_threads(
    run: Callable[..., Array], case: Case
) -> None:
    arrays = inputs(case)
    out = run(case, arrays)
    assert error(out, reference(case, arrays)) <= TOLERANCE[case.dtype]
    assert out.tobytes() == run(case, arrays, seed=1).tobytes()


@pytest.mark.parametrize(
    "name", ["last", "mma_last", "decode_last", "three_last", "cache", "cache_mma", "cache_decode"]
)
def test_what_lies_behind_the_last_key_is_not_used(run: Callable[..., Array], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    want = run(case, arrays)
    for b in range(case.batch):
        end = int(arrays[-1][b].max()) + 1
        arrays[1][b, :, end:] = arrays[2][b, :, end:] = np.nan if case.cache is None else -1  # a scale of NaN
    assert run(case, arrays).tobytes() == want.tobytes()


OLD = [
    mma("old_f16", 40, 70, dtype="f16", dim=64, value_dim=64, causal=True),
    Case("old_bf16", 40, 70, dtype="bf16", dim=64, value_dim=64),
]


@pytest.mark.parametrize("case", OLD, ids=lambda case: case.name)
def test_sm_75_multiplies_f16_on_tensor_cores_and_bf16_in_fp32(run: Callable[..., Array], case: Case) -> None:
    assert emit_kernel(case.spec, "sm_75").engine == case.engine
    arrays = inputs(case)
    assert error(run(case, arrays, arch="sm_75"), reference(case, arrays)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_tensor_cores_serve_what_they_can_and_the_note_says_why_not(case: Case) -> None:
    kernel = emit_kernel(case.spec, "sm_80")
    assert kernel.engine == case.engine
    if case.engine == "fma" and not (case.q_static and case.q <= 4):
        reason = "head_dim is 40" if case.name == "narrow_head" else "not one 16-bit type"
        assert any(reason in note for note in kernel.notes)


@pytest.mark.parametrize("name", ["bool_mask", "mma_bool", "decode_masked", "three_queries"])
def test_query_that_sees_no_key_gives_zeros(run: Callable[..., Array], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    hidden = np.array(arrays[3][:, :1])
    hidden[0, :, case.q - 1] = False
    arrays[3] = np.broadcast_to(hidden, arrays[3].shape) if name != "decode_masked" else hidden_keys(case, hidden)
    out = run(case, arrays)
    assert not out[0, :, case.q - 1].astype(np.float32).any()
    assert error(out, reference(case, arrays)) <= TOLERANCE[case.dtype]


def hidden_keys(case: Case, hidden: Array) -> Array:
    return np.broadcast_to(hidden, (case.batch, case.heads, case.q, case.kv))


@pytest.mark.parametrize("name", ["plain", "mma_bf16", "decode"])
def test_no_keys_at_all_give_zeros(run: Callable[..., Array], name: str) -> None:
    case = replace(BY_NAME[name], kv=0)
    assert not run(case, inputs(case)).astype(np.float32).any()


@pytest.mark.parametrize("name", ["float_mask", "mma_float", "decode_odd"])
def test_a_row_masked_by_the_lowest_float_weighs_all_keys_alike(run: Callable[..., Array], name: str) -> None:
    """As the interpreter: -3.4e38 swallows the scores, so the row's weights are equal; scaling it must not overflow."""
    case = BY_NAME[name]
    arrays = inputs(case)
    lowest = np.array(arrays[3][:1, :1])
    lowest[:, :, 0] = np.finfo(np.float32).min
    arrays[3] = np.broadcast_to(lowest, arrays[3].shape)
    mean = np.repeat(arrays[2].astype(np.float64), case.heads // case.kv_heads, axis=1).mean(2)
    out = run(case, arrays).astype(np.float64)
    assert np.abs(out[:, :, 0] - mean).max() <= 4 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("name", ["key_mask", "mma_key_mask", "decode_masked"])
def test_padding_behind_the_mask_cannot_leak(run: Callable[..., Array], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    want = run(case, arrays)
    hidden = ~arrays[3][:, 0, 0]
    for batch in range(case.batch):
        arrays[1][batch][:, hidden[batch]] = 1e30
    assert run(case, arrays).tobytes() == want.tobytes()


@pytest.mark.parametrize("name", ["causal", "mma_causal"])
def test_nan_reaches_every_query_that_sees_it_and_no_other(run: Callable[..., Array], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    arrays[1][0, :, 50] = np.nan
    out = run(case, arrays).astype(np.float32)
    assert np.isnan(out[0, :, 50:]).all()
    assert not np.isnan(out[0, :, :50]).any()


@pytest.mark.parametrize("name", ["long", "mma_bf16", "decode"])
def test_large_scores_do_not_overflow(run: Callable[..., Array], name: str) -> None:
    case = BY_NAME[name]
    arrays = inputs(case)
    arrays[0][...] = (arrays[0].astype(np.float32) * 1000).astype(arrays[0].dtype)
    out = run(case, arrays)
    assert error(out, reference(case, arrays)) <= 2e-3 if case.dtype == "f32" else 2e-2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("names", [FEW, pytest.param(MOST, marks=pytest.mark.slow)], ids=["few", "most"])
def test_no_kernel_spills_on_any_architecture(nvrtc: Callable[..., Any], arch: str, names: list[str]) -> None:
    for name, used in nvrtc([BY_NAME[name].spec for name in names], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_group_of_heads_makes_few_queries_spill(nvrtc: Callable[..., Any], arch: str, dim: int) -> None:
    """Groups of six heads, or of two with three queries, spilled with heads of 64 columns and a cache in 8 bits."""
    types: list[tuple[DType, cache_rows.Kind | None]] = [("f32", None), ("bf16", None), ("f32", "int8")]
    types += [("bf16", kind) for kind in cache_rows.KINDS]
    made = [
        few(f"{dtype}_{kind}_{heads}_{queries}", queries, 1, dtype=dtype, cache=kind, heads=heads, kv_heads=1, dim=dim,
            value_dim=dim, last=(0, 0), sinks="h", window=70)
        for dtype, kind in types for heads in (1, 2, 3, 4, 6, 8) for queries in (1, 3)
    ]  # fmt: skip
    for name, used in nvrtc([each.spec for each in made], arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), f"{name} on {arch}"


def test_operands_that_no_kernel_reads_are_refused_by_name() -> None:
    spec = Case("doubles", 5, 5, dtype="f64").spec
    with pytest.raises(KernelSelectionError, match="operand 'q' is f64"):
        emit_kernel(spec, "sm_80")
