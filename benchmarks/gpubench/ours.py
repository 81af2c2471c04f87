"""Our kernels as work: what a call launches, what it must move, and the reference of its result.

    work = linear(rig, store, cell, sizes)
    work.call(3)                 # one launch, on the third copy of the weight
    work.error()                 # ||out - ref|| / ||ref|| of the last call's output

A spec is what the compiler makes of such an op (the row class is picked by the function of `select-kernels`), so the
measured kernel is one that a program gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpubench.cells import EXPERTS, FORMATS, INTEGERS, Cell, Sizes
from gpubench.rig import Array, Rig
from gpubench.weights import BF16, LAYOUT, Store, copies_of
from qcompiler.formats import int8_rows
from qcompiler.kernels.select import LinearQuery, MClass, choose_linear
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.norm import NormKernel

MOST_ROWS = 8192
"""The largest M in programs with a symbolic number of rows."""

TOLERANCE = {"linear": 4e-3, "attention_decode": 8e-3, "attention_prefill": 8e-3, "norm": 4e-3, "grouped": 4e-3}
"""Relative L2 error against float64 over the decoded weight. Rounding a result to bf16 costs about 1.7e-3 (at most 2^-9
per value); attention on tensor cores also rounds its softmax weights to bf16."""


@dataclass
class Work:
    """Something to run. `call(i)` launches it on copy i of its inputs; `error()` checks the last call's output,
    `output()` returns it as bytes, `poison()` overwrites it."""

    call: Callable[[int], object]
    error: Callable[[], float]
    output: Callable[[], bytes]
    poison: Callable[[], None]
    copies: int
    nbytes: int
    operations: int
    tolerance: float
    path: str
    facts: dict[str, Any]


def relative(result: Array, wanted: Array) -> float:
    """||result - wanted|| / ||wanted||; NaN is never small."""
    difference = float(np.linalg.norm(result.astype(np.float64).ravel() - wanted.ravel()))
    return difference / float(np.linalg.norm(wanted.ravel()))


# --- specs -----------------------------------------------------------------------------------------------------------


def plain(name: str, dtype: DType, shape: tuple[Dim, ...], strides: tuple[Dim, ...], access: Any = "r") -> Operand:
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)


def format_of(engine: str) -> FormatRef | None:
    kind = FORMATS[engine]
    return None if kind is None else FormatRef(name=kind[0], params=dict(kind[1]))


def weight_operand(engine: str, n: int, k: int) -> Operand:
    dtype: DType = "f32" if engine in INTEGERS else "bf16"
    return Operand(name="w", dtype=dtype, access="r", shape=(n, k), format=format_of(engine), layout=LAYOUT)


@functools.cache
def class_of(engine: str, n: int, k: int, m: int, symbolic: bool) -> MClass:
    """The row class whose kernel a program gets, for M = `m` known or for any M."""
    codes = engine in INTEGERS
    query = LinearQuery(
        m=(1, MOST_ROWS) if symbolic else (m, m), n=n, k=k, x_dtype="i8" if codes else "bf16", out_dtype="bf16",
        format=format_of(engine), constant_weight=True, kind="cuda", isas=("sm_90a",), codes=codes,
    )  # fmt: skip
    return next(case.m_class for case in choose_linear(query).cases if case.max is None or m <= case.max)


def linear_spec(engine: str, n: int, k: int, m: int, *, symbolic: bool = False) -> KernelSpec:
    """A bf16 linear without bias, for exactly `m` rows or for the row class that serves them."""
    chosen = class_of(engine, n, k, m, symbolic)
    rows: Dim = "m" if symbolic else m
    codes = engine in INTEGERS
    width = int8_rows.row_bytes(k) if codes else k
    operands = (
        plain("x", "i8" if codes else "bf16", (rows, width), (width, 1)),
        weight_operand(engine, n, k),
        plain("out", "bf16", (rows, n), (n, 1), "w"),
    )
    body = LinearKernel(m=rows, n=n, k=k, m_class=chosen, has_bias=False, codes=codes)
    name = f"{engine}_{n}_{k}_" + (f"{chosen.replace('-', '_')}_any" if symbolic else f"m{m}")
    return KernelSpec(name=name, symbols=("m",) if symbolic else (), operands=operands, body=body)


def attention_spec(sizes: Sizes, *, causal: bool) -> KernelSpec:
    """Grouped-query attention over (batch, length, heads, dim), in bf16: one query, or as many as keys."""

    def heads(name: str, count: int, length: int, access: Any = "r") -> Operand:
        row = count * sizes.dim
        return plain(name, "bf16", (1, count, length, sizes.dim), (length * row, sizes.dim, row, 1), access)

    operands = (
        heads("q", sizes.heads, sizes.m), heads("k", sizes.kv_heads, sizes.n), heads("v", sizes.kv_heads, sizes.n),
        heads("out", sizes.heads, sizes.m, "w"),
    )  # fmt: skip
    body = AttentionKernel(
        batch=1, heads=sizes.heads, kv_heads=sizes.kv_heads, q_len=sizes.m, kv_len=sizes.n, head_dim=sizes.dim,
        value_dim=sizes.dim, scale=sizes.dim**-0.5, causal=causal, mask="none",
    )  # fmt: skip
    return KernelSpec(name=f"attention_{sizes.m}_{sizes.n}_{sizes.dim}", symbols=(), operands=operands, body=body)


def norm_spec(m: int, k: int) -> KernelSpec:
    row = (m, k), (k, 1)
    operands = (plain("x", "bf16", *row), plain("weight", "bf16", (k,), (1,)), plain("out", "bf16", *row, "w"))
    body = NormKernel(kind="rms", rows=m, cols=k, eps=1e-5, has_weight=True, has_bias=False)
    return KernelSpec(name=f"rmsnorm_{m}_{k}", symbols=(), operands=operands, body=body)


def grouped_spec(engine: str, n: int, k: int, m: int) -> KernelSpec:
    """Two of eight experts for each of `m` rows."""
    operands = (
        plain("x", "bf16", (m, k), (k, 1)),
        weight_operand(engine, EXPERTS * n, k),
        plain("index", "i64", (2 * m,), (1,)),
        plain("out", "bf16", (2 * m, n), (n, 1), "w"),
    )
    body = GroupedLinearKernel(rows=m, repeat=2, experts=EXPERTS, n=n, k=k)
    return KernelSpec(name=f"grouped_{engine}_{n}_{k}_m{m}", symbols=(), operands=operands, body=body)


def spec_of(cell: Cell, sizes: Sizes) -> KernelSpec:
    """The kernel of one of our cells that has one; ValueError for a layer, which is a program."""
    match cell.kind:
        case "linear":
            return linear_spec(cell.engine, sizes.n, sizes.k, sizes.m, symbolic=cell.symbolic)
        case "attention_decode":
            return attention_spec(sizes, causal=False)
        case "attention_prefill":
            return attention_spec(sizes, causal=True)
        case "norm":
            return norm_spec(sizes.m, sizes.k)
        case "grouped":
            return grouped_spec(cell.engine, sizes.n, sizes.k, sizes.m)
    raise ValueError(f"{cell.id} is a program, not a kernel")


# --- work ------------------------------------------------------------------------------------------------------------


def weight_of(cell: Cell, sizes: Sizes) -> tuple[str, int, int] | None:
    """The arguments of `Store.get` for a cell; None if it reads no weight."""
    if cell.kind == "grouped":
        return cell.engine, EXPERTS * sizes.n, sizes.k
    return (cell.engine, sizes.n, sizes.k) if cell.kind == "linear" else None


def work_of(rig: Rig, store: Store, cell: Cell, sizes: Sizes) -> Work:
    """The work of one of our cells that is one kernel."""
    match cell.kind:
        case "linear":
            return linear(rig, store, cell, sizes)
        case "attention_decode" | "attention_prefill":
            return attention(rig, cell, sizes)
        case "norm":
            return norm(rig, cell, sizes)
        case "grouped":
            return grouped(rig, store, cell, sizes)
    raise ValueError(f"{cell.id} is a program, not a kernel")


def linear(rig: Rig, store: Store, cell: Cell, sizes: Sizes) -> Work:
    copies, values = store.get(cell.engine, sizes.n, sizes.k)
    x = random_bf16((sizes.m, sizes.k), sizes.m)
    given, seen = x, x
    if cell.engine in INTEGERS:
        given = int8_rows.quantise(x, "token", 0.0, None)
        seen = int8_rows.dequantise(given, sizes.k)
    there = rig.upload(given)
    launched = Launched(rig, cell, sizes, (sizes.m, sizes.n), len(copies), lambda i: [there, copies[i]])
    moved = given.nbytes + copies[0].nbytes
    return launched.work(lambda: rig.product(seen, values), moved, 2 * sizes.m * sizes.n * sizes.k)


def grouped(rig: Rig, store: Store, cell: Cell, sizes: Sizes) -> Work:
    pairs = 2 * sizes.m
    copies, values = store.get(cell.engine, EXPERTS * sizes.n, sizes.k)
    x = random_bf16((sizes.m, sizes.k), sizes.m)
    index = np.random.default_rng(1).integers(0, EXPERTS, pairs).astype(np.int64)
    rows, chosen = rig.upload(x), rig.upload(index)

    def wanted() -> Array:
        every = rig.product(x, values).reshape(sizes.m, EXPERTS, sizes.n)
        result: Array = every[np.arange(pairs) // 2, index]
        return result

    launched = Launched(rig, cell, sizes, (pairs, sizes.n), len(copies), lambda i: [rows, copies[i], chosen])
    read = copies[0].nbytes * len(set(index.tolist())) // EXPERTS
    return launched.work(wanted, x.nbytes + index.nbytes + read, 2 * pairs * sizes.n * sizes.k)


def attention(rig: Rig, cell: Cell, sizes: Sizes) -> Work:
    causal = cell.kind == "attention_prefill"
    q = random_bf16((sizes.m, sizes.heads, sizes.dim), 1)
    keys, values = (random_bf16((sizes.n, sizes.kv_heads, sizes.dim), seed) for seed in (2, 3))
    count = copies_of(2 * keys.nbytes, rig.cache)
    queries, caches = rig.upload(q), [[rig.upload(keys), rig.upload(values)] for _ in range(count)]
    launched = Launched(rig, cell, sizes, q.shape, count, lambda i: [queries, *caches[i]])
    pairs = sizes.m * sizes.n // (2 if causal else 1)
    moved = q.nbytes + 2 * keys.nbytes
    return launched.work(lambda: attended(q, keys, values, causal=causal), moved, 4 * pairs * sizes.heads * sizes.dim)


def norm(rig: Rig, cell: Cell, sizes: Sizes) -> Work:
    x, weight = random_bf16((sizes.m, sizes.k), sizes.m), random_bf16((sizes.k,), 7)
    count = copies_of(x.nbytes, rig.cache) if sizes.m > 1 else 2  # in a model, too, one row comes from the cache
    rows, scale = [rig.upload(x) for _ in range(count)], rig.upload(weight)

    def wanted() -> Array:
        wide = x.astype(np.float64)
        root = np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
        result: Array = wide / root * weight.astype(np.float64)
        return result

    launched = Launched(rig, cell, sizes, x.shape, count, lambda i: [rows[i], scale])
    return launched.work(wanted, x.nbytes + weight.nbytes, 4 * x.size)


def attended(q: Array, keys: Array, values: Array, *, causal: bool) -> Array:
    """Attention in float64 over (length, heads, dim) each; a key head may serve a group of query heads."""
    out = np.empty(q.shape, np.float64)
    group = q.shape[1] // keys.shape[1]
    hidden = np.arange(keys.shape[0])[None, :] > np.arange(q.shape[0])[:, None]
    for head in range(q.shape[1]):
        key, value = keys[:, head // group].astype(np.float64), values[:, head // group].astype(np.float64)
        scores = q[:, head].astype(np.float64) @ key.T * q.shape[2] ** -0.5
        if causal:
            scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ value
    return out


def random_bf16(shape: tuple[int, ...], seed: int) -> Array:
    made: Array = np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(BF16)
    return made


class Launched:
    """A kernel on a rig with its output. `inputs(i)` are its operands, without the output, for copy i of `count`."""

    def __init__(
        self, rig: Rig, cell: Cell, sizes: Sizes, shape: tuple[int, ...], count: int, inputs: Callable[[int], list[Any]]
    ) -> None:
        spec = spec_of(cell, sizes)
        self._rig, self._cell, self._shape, self._count, self._inputs = rig, cell, shape, count, inputs
        self._symbols = (sizes.m,) if spec.symbols else ()
        self._kernel, self.facts = rig.kernel(spec), rig.facts(spec, self._symbols)
        self._out = rig.allocate(int(np.prod(shape)) * BF16.itemsize)

    def call(self, i: int) -> None:
        operands = [*self._inputs(i % self._count), self._out]
        self._rig.launch(self._kernel, [memory.address for memory in operands], self._symbols)

    def work(self, wanted: Callable[[], Array], read: int, operations: int) -> Work:
        """`read` are the bytes that a call must read."""
        known: list[Array] = []

        def error() -> float:
            if not known:
                known.append(wanted())
            return relative(self._rig.read(self._out, self._shape), known[0])

        return Work(
            self.call, error, lambda: self._rig.read(self._out, self._shape).tobytes(),
            lambda: self._rig.poison(self._out), self._count, read + self._out.nbytes, operations,
            TOLERANCE[self._cell.kind], self.facts["engine"], self.facts,
        )  # fmt: skip
