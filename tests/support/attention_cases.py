"""Cases of attention, their inputs, and what float64 gives: tests/kernels/test_attention.py and its form in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from qcompiler.formats import cache_rows
from qcompiler.formats.cache_rows import row_bytes
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.weights import NUMPY_DTYPES


@dataclass(frozen=True)
class Case:
    name: str
    q: int
    kv: int
    heads: int = 2
    kv_heads: int = 2
    dim: int = 32
    value_dim: int = 32
    dtype: str = "f32"
    causal: bool = False
    mask: Literal["none", "bool", "float"] = "none"
    last: tuple[int, int] | None = None  # (first, step): query i of batch b counts as first + step * i + 2 * b
    last_axes: str = "bq"
    mask_axes: str = "bqk"  # the axes along which the mask varies; the others have stride 0
    decode: bool = False
    batch: int = 2
    window: int | None = None
    softcap: float | None = None
    ring: bool = False  # of `kv` rows
    cache: cache_rows.Kind | None = None
    compute: Literal["bf16"] | None = None
    sinks: str | None = None  # the axes along which sinks vary, of "bhq"

    @property
    def spec(self) -> KernelSpec:
        """Lengths are symbols (a decode kernel has one static query); q, k, v come as (batch, length, heads, dim)."""
        q_len = 1 if self.decode else "t"

        def tensor(name: str, heads: int, length: Any, dim: int) -> Operand:
            strides = (f"{length}*{heads * dim}" if isinstance(length, str) else heads * dim, dim, heads * dim, 1)
            kept = "i8" if self.cache is not None and name in ("k", "v") else self.dtype
            return Operand(name=name, dtype=kept, access="r", shape=(self.batch, heads, length, dim), strides=strides)

        operands = [
            tensor("q", self.heads, q_len, self.dim),
            tensor("k", self.kv_heads, "s", row_bytes(self.dim, self.cache) if self.cache else self.dim),
            tensor("v", self.kv_heads, "s", row_bytes(self.value_dim, self.cache) if self.cache else self.value_dim),
        ]
        if self.mask != "none":
            kept = "i1" if self.mask == "bool" else "f32"
            strides = (
                (f"s*{q_len}" if "q" in self.mask_axes else "s") if "b" in self.mask_axes else 0,
                0,
                "s" if "q" in self.mask_axes else 0,
                1 if "k" in self.mask_axes else 0,
            )
            operands.append(
                Operand(
                    name="mask", dtype=kept, access="r", shape=(self.batch, self.heads, q_len, "s"), strides=strides
                )
            )
        if self.last is not None:
            rows: Any = q_len if "q" in self.last_axes else 1
            strides = (rows if "b" in self.last_axes else 0, 1 if "q" in self.last_axes else 0)
            kept = "i32" if self.dtype == "bf16" else "i64"
            operands.append(Operand(name="last", dtype=kept, access="r", shape=(self.batch, q_len), strides=strides))
        if self.sinks is not None:
            queries: Any = q_len if "q" in self.sinks else 1
            heads = self.heads if "h" in self.sinks else 1
            steps = (f"{queries}*{heads}" if isinstance(queries, str) else queries * heads, queries, 1, 1)
            strides = tuple(step if axis in self.sinks else 0 for axis, step in zip("bhq", steps, strict=False))
            shape = (self.batch, self.heads, q_len, 1)
            kept = "f32" if "b" in self.sinks else self.dtype
            operands.append(Operand(name="sinks", dtype=kept, access="r", shape=shape, strides=(*strides, 1)))
        out = tensor("out", self.heads, q_len, self.value_dim)
        operands.append(Operand(name="out", dtype=self.dtype, access="w", shape=out.shape, strides=out.strides))
        body = AttentionKernel(
            batch=self.batch, heads=self.heads, kv_heads=self.kv_heads, q_len=q_len, kv_len="s", head_dim=self.dim,
            value_dim=self.value_dim, scale=self.dim**-0.5, causal=self.causal, mask=self.mask,
            window=self.window, softcap=self.softcap, last=self.last is not None, ring=self.ring,
            cache=self.cache, compute=self.compute, sinks=self.sinks is not None,
        )  # fmt: skip
        return KernelSpec(name=self.name, symbols=("s", "t"), operands=tuple(operands), body=body)


CASES = [
    Case("plain", 37, 37),
    Case("long", 150, 531, batch=1),
    Case("square", 128, 128, batch=1),
    Case("tiny", 1, 1),
    Case("odd_dims", 19, 45, dim=20, value_dim=27),
    Case("wide", 9, 270, dim=128, value_dim=64, batch=1),
    Case("grouped", 33, 65, heads=6, kv_heads=2),
    Case("causal", 150, 150, causal=True, batch=1),
    Case("causal_long_keys", 20, 400, causal=True),
    Case("causal_long_queries", 300, 17, causal=True, batch=1),
    Case("bool_mask", 21, 40, mask="bool"),
    Case("key_mask", 21, 300, mask="bool", mask_axes="bk"),
    Case("float_mask", 21, 40, mask="float", mask_axes="qk"),
    Case("row_mask", 21, 40, mask="float", mask_axes="bq"),
    Case("window", 300, 300, causal=True, window=20, batch=1),
    Case("window_of_one", 40, 40, causal=True, window=1, batch=1),
    Case("window_both_sides", 300, 17, window=270, batch=1),
    Case("softcap", 37, 45, softcap=1.5, heads=6, kv_heads=2),
    Case("softcap_window_mask", 150, 150, softcap=2.0, window=33, causal=True, mask="bool", mask_axes="bk"),
    Case("bf16", 40, 40, dtype="bf16"),
    Case("f16_causal", 40, 40, dtype="f16", causal=True),
    Case("decode", 1, 100, decode=True, heads=6, kv_heads=2),
    Case("decode_masked", 1, 70, decode=True, mask="bool", mask_axes="bk", dtype="bf16", value_dim=40),
    Case("decode_softcap", 1, 70, decode=True, softcap=1.5, window=3),
    Case("decode_odd", 1, 65, decode=True, dim=20, value_dim=27, mask="float"),
    Case("decode_one_kv_head", 1, 200, decode=True, heads=5, kv_heads=1, batch=1),
    Case("decode_one_kv_head_last", 1, 300, decode=True, last=(150, 0), heads=7, kv_heads=1, batch=3, dtype="bf16"),
    Case("last", 21, 400, last=(290, 1), heads=6, kv_heads=2),
    Case("last_none_seen", 21, 40, last=(-9, 1)),
    Case("last_falls", 150, 300, last=(299, -2), batch=1),
    Case("last_past_the_end", 9, 40, last=(36, 1), mask="bool"),
    Case("last_one_for_all", 9, 70, last=(30, 0), last_axes="b", dtype="bf16"),
    Case("last_window", 200, 600, last=(380, 1), window=130, batch=1),
    Case("last_window_falls", 40, 600, last=(599, -13), window=3, softcap=2.0),
    Case("ring", 17, 40, last=(100, 1), window=8, ring=True, heads=4, kv_heads=2),
    Case("ring_begins", 17, 40, last=(0, 1), window=24, ring=True),
    Case("ring_fits", 9, 16, last=(1000, 1), window=8, ring=True, dtype="bf16", dim=20, value_dim=27),
    Case("ring_of_one", 1, 1, last=(5, 0), window=1, ring=True),
    Case("ring_long", 150, 700, last=(690, 1), window=400, ring=True, batch=1, dtype="f16"),
    Case("ring_far", 130, 1100, last=(2**40, 1), window=40, ring=True, batch=1, softcap=1.5),
    Case("ring_none_seen", 9, 40, last=(-20, 3), window=5, ring=True),
    Case("ring_falls", 40, 600, last=(1599, -13), window=3, ring=True, softcap=2.0),
    Case("ring_cache", 21, 300, last=(777, 1), window=200, ring=True, cache="int8", dim=20, value_dim=27),
    Case("decode_ring", 1, 300, decode=True, last=(1201, 0), window=70, ring=True, heads=6, kv_heads=2),
    Case("decode_ring_begins", 1, 300, decode=True, last=(20, 0), window=16, ring=True, batch=3, dtype="bf16"),
    Case("decode_ring_wraps", 1, 128, decode=True, last=(1285, 0), window=100, ring=True, heads=2, kv_heads=2),
    Case("decode_ring_pieces", 1, 1300, decode=True, heads=8, kv_heads=1, last=(3900, 0), window=1100, ring=True),
    Case("decode_ring_none", 1, 30, decode=True, last=(-(2**60), 0), window=4, ring=True, batch=1),
    Case("decode_ring_cache", 1, 130, decode=True, cache="int8", heads=8, kv_heads=2, last=(1000, 0), window=64,
         ring=True, dim=64, value_dim=64),
    Case("sinks", 37, 300, sinks="h", heads=6, kv_heads=2, causal=True),
    Case("sinks_of_queries", 37, 45, sinks="bhq", softcap=1.5, mask="bool", mask_axes="bk", dim=20, value_dim=27),
    Case("sinks_last", 150, 300, sinks="h", last=(140, 1), window=70, dtype="bf16", heads=4, kv_heads=2),
    Case("sinks_none_seen", 21, 40, sinks="bh", last=(-9, 1)),
    Case("sinks_float_mask", 21, 40, sinks="q", mask="float", mask_axes="qk"),
    Case("sinks_ring", 17, 40, sinks="h", last=(100, 1), window=8, ring=True, heads=4, kv_heads=2),
    Case("sinks_cache", 37, 270, sinks="h", cache="int4", heads=4, kv_heads=2, last=(233, 1)),
    Case("decode_sinks", 1, 300, decode=True, sinks="h", last=(99, 0), heads=6, kv_heads=2),
    Case("decode_sinks_pieces", 1, 1300, decode=True, sinks="bhq", last=(1290, 0), heads=8, kv_heads=1, dtype="bf16"),
    Case("decode_sinks_one_head", 1, 65, decode=True, sinks="h", dim=20, value_dim=27, mask="float"),
    Case("decode_sinks_none", 1, 30, decode=True, sinks="h", last=(-1, 0), batch=1),
    Case("decode_sinks_ring_cache", 1, 130, decode=True, cache="int8", heads=8, kv_heads=2, last=(1000, 0), window=64,
         ring=True, dim=64, value_dim=64, sinks="h"),
    Case("decode_last", 1, 300, decode=True, last=(99, 0), heads=6, kv_heads=2),
    Case("decode_last_none", 1, 30, decode=True, last=(-1, 0), batch=1),
    Case("decode_last_past", 1, 65, decode=True, last=(70, 0), dtype="bf16", mask="bool", mask_axes="bk"),
    Case("decode_last_window", 1, 300, decode=True, last=(201, 0), window=70),
    Case("decode_pieces", 1, 1100, decode=True, heads=3, kv_heads=1, batch=1, dim=20, value_dim=27),
    Case("decode_pieces_last", 1, 1300, decode=True, last=(510, 0), heads=8, kv_heads=1, batch=2, dtype="bf16"),
    Case("decode_pieces_masked", 1, 700, decode=True, heads=4, kv_heads=1, batch=2, mask="bool", mask_axes="bk"),
    Case("decode_most_pieces", 1, 9000, decode=True, heads=1, kv_heads=1, batch=1, dtype="f16", window=8500,
         last=(8990, 0)),
    Case("decode_many_heads", 1, 600, decode=True, heads=37, kv_heads=1, batch=1, dtype="f16"),
    Case("cache", 37, 45, cache="int8", heads=4, kv_heads=2),
    Case("cache_fp8", 19, 70, cache="fp8", dim=20, value_dim=27, heads=4, kv_heads=2, last=(50, 1)),
    Case("cache_fp8_decode", 1, 130, cache="fp8", decode=True, heads=8, kv_heads=2, dim=128, value_dim=64,
         last=(99, 0), dtype="bf16"),
    Case("cache_fp8_decode_odd", 1, 65, cache="fp8", decode=True, dim=20, value_dim=27, mask="float"),
    Case("cache_int4", 37, 270, cache="int4", heads=4, kv_heads=2, last=(233, 1)),
    Case("cache_int4_odd", 19, 70, cache="int4", dim=20, value_dim=47, heads=4, kv_heads=2, last=(50, 1), mask="bool"),
    Case("cache_int4_window", 33, 140, cache="int4", dim=128, value_dim=128, last=(101, 1), window=70, dtype="bf16"),
    Case("cache_int4_decode", 1, 130, cache="int4", decode=True, heads=8, kv_heads=2, dim=128, value_dim=64,
         last=(99, 0), dtype="bf16"),
    Case("cache_int4_decode_alone", 1, 64, cache="int4", decode=True, last=(63, 0), dim=64, value_dim=64, batch=1),
    Case("cache_int4_decode_odd", 1, 65, cache="int4", decode=True, dim=20, value_dim=47, mask="float"),
    Case("cache_int4_decode_pieces", 1, 1100, cache="int4", decode=True, heads=3, kv_heads=1, batch=1, dim=48,
         value_dim=33),
    Case("cache_odd_dims", 19, 270, cache="int8", dim=20, value_dim=27, last=(250, 1), dtype="bf16"),
    Case("cache_wide_window", 64, 512, cache="int8", dim=128, value_dim=128, last=(448, 1), window=70, batch=1),
    Case("cache_softcap_mask", 21, 40, cache="int8", softcap=1.5, mask="bool", mask_axes="bk", dtype="f16"),
    Case("cache_decode", 1, 64, cache="int8", decode=True, last=(63, 0), dim=64, value_dim=64, batch=1),
    Case("cache_decode_grouped", 1, 130, cache="int8", decode=True, heads=8, kv_heads=2, dim=128, value_dim=64,
         dtype="bf16", last=(127, 0)),
    Case("cache_decode_odd", 1, 65, cache="int8", decode=True, dim=20, value_dim=27, mask="float", softcap=2.0),
    Case("cache_decode_pieces", 1, 1300, cache="int8", decode=True, heads=7, kv_heads=1, last=(1290, 0), window=900,
         dim=20, value_dim=27),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def inputs(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    kept = NUMPY_DTYPES[case.dtype]
    q = (rng.normal(size=(case.batch, case.q, case.heads, case.dim)) * 2).astype(kept)
    k = rng.normal(size=(case.batch, case.kv, case.kv_heads, case.dim)).astype(kept)
    v = rng.normal(size=(case.batch, case.kv, case.kv_heads, case.value_dim)).astype(kept)
    arrays = [q, *((k, v) if case.cache is None else (cache_rows.quantise(each, case.cache) for each in (k, v)))]
    if case.mask != "none":
        shape = [case.batch if "b" in case.mask_axes else 1, case.q if "q" in case.mask_axes else 1]
        shape.append(case.kv if "k" in case.mask_axes else 1)
        if "k" not in case.mask_axes:  # the batch stride above counts keys: lay the rows out that wide
            shape[2] = case.kv
        mask = rng.normal(size=shape)
        arrays.append(mask > -0.3 if case.mask == "bool" else mask.astype(np.float32))
    if case.last is not None:
        values = last_keys(case)
        values = values[:, :1] if "q" not in case.last_axes else values
        values = values[:1] if "b" not in case.last_axes else values
        arrays.append(np.ascontiguousarray(values, np.int32 if case.dtype == "bf16" else np.int64))
    if case.sinks is not None:
        sizes = {"b": case.batch, "h": case.heads, "q": case.q}
        sinks = rng.normal(size=[size if axis in case.sinks else 1 for axis, size in sizes.items()]) * 3
        sinks.flat[0] = -np.inf  # as good as none
        arrays.append(sinks[..., None].astype(np.float32 if "b" in case.sinks else kept))
    return arrays


def last_keys(case: Case) -> np.ndarray:
    """(batch, q)"""
    assert case.last is not None
    (first, step), b, i = case.last, np.arange(case.batch)[:, None], np.arange(case.q)[None]
    return first + step * i + 2 * b


def reference(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    read = list(arrays[:3])
    if case.cache is not None:
        read[1:] = [
            cache_rows.dequantise(a, d, case.cache) for a, d in zip(read[1:], (case.dim, case.value_dim), strict=True)
        ]
    q, k, v = (a.astype(np.float64).transpose(0, 2, 1, 3) for a in read)
    k, v = (np.repeat(a, case.heads // case.kv_heads, axis=1) for a in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if case.mask != "none":
        mask = arrays[3][:, None]
        if "k" not in case.mask_axes:
            flat = arrays[3].reshape(arrays[3].shape[0], -1)
            mask = flat[:, : case.q * case.kv : case.kv][:, None, :, None]
        scores = np.where(mask, scores, -np.inf) if case.mask == "bool" else scores + mask
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
    out = np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) @ v
    return out.transpose(0, 2, 1, 3)


def run(kernels: Any, case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    shape = (case.batch, case.q, case.heads, case.value_dim)
    out: np.ndarray = kernels.run_both(
        case.name, lambda: [*arrays, np.zeros(shape, NUMPY_DTYPES[case.dtype])], [case.kv, case.q]
    )[-1]
    return out
