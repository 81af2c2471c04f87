"""Every template and every format as one kernel each, with inputs: what test_matrix.py runs eagerly and as graphs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from by_path import load

from qcompiler import formats
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


def _named(name: str, spec: KernelSpec) -> Case:
    label = f"{name}_{zlib.crc32(msgspec.json.encode(spec)):08x}"
    return Case(label, msgspec.structs.replace(agree.laid_out(spec, "cuda"), name=label))


def templates() -> Iterator[Case]:
    """A few kernels of each template: what CPU and CUDA take alike, every eleventh, and the first; no packed ones."""
    for template, specs in sorted(agree.SPECS.items()):
        plain = [s for s in specs() if all(o.format is None and _dense(o) for o in s.operands)]
        chosen = {}
        for number, spec in enumerate(plain):
            if (number % 11 == 0 or len(plain) < 40) and agree.refusal(spec, "cuda") is None:
                case = _named(template, spec)
                chosen[case.name] = case
        yield from chosen.values()


def _dense(operand: Operand) -> bool:
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
