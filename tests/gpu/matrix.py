"""Every template and every format as one kernel each, with inputs: what test_matrix.py runs eagerly and as graphs."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from by_path import load

from qcompiler import formats
from qcompiler.formats import cache_rows
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.weights import NUMPY_DTYPES

LAYOUT = "cuda_t16_v1"


agree, every = load("tests/kernels/test_targets_agree.py"), load("tests/kernels/test_every_format.py")

MOST = {"ids": "rows", "index": "length", "last": "kv_len"}
"""Operands that hold numbers of something, and the field of the body that counts it (grouped linears: `experts`)."""


@dataclass(frozen=True)
class Case:
    """One kernel with static shapes, named for a test's message."""

    name: str
    spec: KernelSpec

    def operands(self, seed: int) -> list[np.ndarray[Any, Any]]:
        """Fresh contents of every operand but those that are written, which are empty. Weights depend on no seed."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {seed}".encode()))
        return [self._content(operand, rng) for operand in self.spec.operands]

    def _content(self, operand: Operand, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        if operand.format is not None:
            rows, cols = (int(d) for d in operand.shape)
            fmt = formats.get(operand.format.name, **operand.format.params)
            data = every.random_tensor(fmt, rows, cols).data
            assert operand.layout is not None
            packed: np.ndarray[Any, Any] = layouts.get(operand.layout).pack(fmt, operand.dtype, rows, cols, data)
            return packed
        shape = tuple(int(d) for d in operand.shape)
        dtype = NUMPY_DTYPES[operand.dtype]
        body: Any = self.spec.body
        if (cached := self.cached(operand)) is not None:
            cols, kind = cached
            rows_of_cache: np.ndarray[Any, Any] = cache_rows.quantise(rng.standard_normal((*shape[:-1], cols)), kind)
            return rows_of_cache
        if operand.name in MOST:
            most = body.experts if self.spec.template == "grouped_linear" else getattr(body, MOST[operand.name])
            count = int(np.prod(shape))
            unique = count <= most and self.spec.template == "index_update"
            found = rng.permutation(int(most))[:count] if unique else rng.integers(0, int(most), count)
            return found.reshape(shape).astype(dtype)
        if operand.layout in (LAYOUT, agree.PAIRED[LAYOUT]):  # plain, in tiles
            rows, cols = shape
            plain = rng.standard_normal(shape).astype(dtype)
            raw = np.ascontiguousarray(plain).view(np.uint8).reshape(-1)
            tiles: np.ndarray[Any, Any] = layouts.get(operand.layout).pack(None, operand.dtype, rows, cols, raw)
            return tiles
        if dtype.kind == "b":
            return rng.random(shape) > 0.3
        values = 2 * rng.standard_normal(shape)
        if any(each.dtype == "i1" for each in self.spec.operands):  # truths are of zeros as well
            values *= rng.random(shape) > 0.7
        return values.astype(dtype)

    def cached(self, operand: Operand) -> tuple[int, cache_rows.Kind] | None:
        """(columns, kind) of an operand that holds rows of a cache: their scales lie among their bytes, and random
        bytes there are NaNs and numbers near zero, so that no output depends on an input."""
        body: Any = self.spec.body
        if self.spec.template == "dequantize_cache" and operand.name == "rows":
            return body.cols, body.kind
        if self.spec.template == "attention" and body.cache is not None and operand.name in ("k", "v"):
            return body.head_dim if operand.name == "k" else body.value_dim, body.cache
        return None


def _named(name: str, spec: KernelSpec) -> Case:
    label = f"{name}_{zlib.crc32(msgspec.json.encode(spec)):08x}"
    return Case(label, msgspec.structs.replace(agree.laid_out(spec, "cuda"), name=label))


MANY = 40
"""Of a template with as many specs `some` are taken."""

STRIDE = 11


def templates() -> Iterator[Case]:
    """Kernels of each template without packed weights that CPU and CUDA take. Each choice of an option and each element
    type of an operand is in one of them."""
    return iter(_templates())


@functools.cache
def _templates() -> list[Case]:
    found: dict[str, Case] = {}
    for template, specs in sorted(agree.SPECS.items()):
        plain = [s for s in specs() if all(o.format is None and dense(o) for o in s.operands)]
        taken = [s for s in plain if agree.refusal(s, "cuda") is None]
        cases = [_named(template, spec) for spec in (taken if len(taken) < MANY else some(taken))]
        found |= {case.name: case for case in cases}
    return list(found.values())


def some(specs: list[KernelSpec]) -> Iterator[KernelSpec]:
    """Every eleventh, then each other one with a choice that none before it has."""
    seen: set[tuple[str, Any]] = set()
    for spec in specs[::STRIDE]:
        seen |= choices(spec)
        yield spec
    for spec in specs:
        if not choices(spec) <= seen:
            seen |= choices(spec)
            yield spec


def choices(spec: KernelSpec) -> set[tuple[str, Any]]:
    """The options of its body, by their values, and its operands, by their element types."""
    hints = get_type_hints(type(spec.body))
    chosen = {(name, getattr(spec.body, name)) for name, hint in hints.items() if _is_option(hint)}
    return chosen | {(operand.name, operand.dtype) for operand in spec.operands}


def _is_option(hint: Any) -> bool:
    """Whether a field of this type is a choice of few: a bool, a literal, or a literal that may be missing."""
    return hint is bool or any(get_origin(each) is Literal for each in (hint, *get_args(hint)))


def dense(operand: Operand) -> bool:
    """Row after row: what `operands` makes."""
    return operand.strides in ((), agree.plain("", operand.dtype, operand.shape).strides)


def of_format(name: str) -> Iterator[Case]:
    """Linears of every class, grouped linears with few and any pairs, embeddings of both layouts; odd sizes."""
    fmt = formats.FORMATS[name]()
    cols, ref = every.widths(fmt)[-1], FormatRef(name=fmt.name, params=fmt.params)

    def weight(rows: int, layout: str = LAYOUT) -> Operand:
        return Operand(name="w", dtype="bf16", access="r", shape=(rows, cols), format=ref, layout=layout)

    for m, m_class in ((1, "1"), (5, "2-8"), (33, "9-64"), (70, "large")):
        ends = [agree.plain("x", "bf16", (m, cols)), weight(147), agree.plain("out", "bf16", (m, 147), "w")]
        spec = agree.make("linear", ends, m=m, n=147, k=cols, m_class=m_class, has_bias=False)
        yield _named(f"linear_{name}", spec)
    for rows in (1, 40):
        ends = [agree.plain("x", "bf16", (rows, cols)), weight(72), agree.plain("index", "i64", (2 * rows,)),
                agree.plain("out", "bf16", (2 * rows, 24), "w")]  # fmt: skip
        spec = agree.make("grouped_linear", ends, rows=rows, repeat=2, experts=3, n=24, k=cols)
        yield _named(f"grouped_linear_{name}", spec)
    for layout in (LAYOUT, "canonical"):
        table = msgspec.structs.replace(weight(40, layout), name="table")
        ends = [agree.plain("ids", "i64", (5,)), table, agree.plain("out", "bf16", (5, cols), "w")]
        yield _named(f"embedding_{name}", agree.make("embedding", ends, count=5, rows=40, cols=cols))
