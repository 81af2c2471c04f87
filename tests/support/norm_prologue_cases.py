"""Linears that begin with a norm, each beside the norm and the linear that it stands for: the bits must be the same.

    for case in cases("cpu_p16_v2", …):
        case.fused, case.norms, case.plain     the specs; norms are one, or one with a residual and perhaps a second
        case.given(seed)                       the operands of the fused one, the result last
        case.apart(run, operands)              the norms, and the linear that reads their result: [rows if kept, result]
        case.expected(operands)                the result in float64

Every second of them keeps the normalised rows.  Operands have gaps between their rows, and sizes that fill no vector
and no panel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from kernel_cases import aligned, residual_program, stored_weight

from qcompiler.formats import int8_rows
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel, RowCodes, RowNorm
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Array = Any
EPS = 1e-5
NORMS = {
    "rms": RowNorm(kind="rms", eps=EPS, has_weight=True, has_bias=False),
    "rms_bare": RowNorm(kind="rms", eps=EPS, has_weight=False, has_bias=False),
    "layer": RowNorm(kind="layer", eps=EPS, has_weight=True, has_bias=True),
    "layer_bare": RowNorm(kind="layer", eps=EPS, has_weight=False, has_bias=False),
    "layer_weight": RowNorm(kind="layer", eps=EPS, has_weight=True, has_bias=False),
}
FORMATS: dict[str, tuple[str, dict[str, Any]] | str] = {
    "plain": "layout",
    "nf4": ("nf4", {"block": 64}),
    "nf4_across_rows": ("nf4", {"block": 64}),
    "int4": ("int4", {"group": 32}),
    "int8": ("int8", {}),
    "q4_K": ("q4_K", {}),
    "q6_K": ("q6_K", {}),
    "fp8": ("fp8_e4m3", {}),
    "tq": ("tq", {"bits": 3}),
}
COLS = {
    "plain": 77, "nf4": 192, "nf4_across_rows": 97, "int4": 96, "int8": 1, "q4_K": 1024, "q6_K": 768, "fp8": 613,
    "tq": 512,
}  # fmt: skip


@dataclass
class Case:
    """See the module. `weight` are its stored bytes, `values` what they decode to."""

    fused: KernelSpec
    norms: list[KernelSpec]
    plain: KernelSpec
    weight: Array
    values: Array

    @property
    def specs(self) -> list[KernelSpec]:
        return [self.fused, *self.norms, self.plain]

    @property
    def body(self) -> LinearKernel:
        assert isinstance(self.fused.body, LinearKernel)
        return self.fused.body

    def given(self, seed: int, offset: float = 0.5) -> list[Array]:
        rng, found = np.random.default_rng(seed), []
        for operand in self.fused.operands:
            if operand.name == "w":
                found.append(self.weight)
                continue
            rows = [int(size) for size in operand.shape]
            pitch = int(operand.strides[0]) if len(rows) == 2 else rows[0]
            shape = (rows[0], pitch) if len(rows) == 2 else (rows[0],)
            values = rng.standard_normal(shape) * (3 if operand.name == "x" else 1) + offset
            array = np.zeros(shape) if operand.access == "w" else values
            whole = array.astype(NUMPY_DTYPES[operand.dtype])
            found.append(whole[:, : rows[1]] if len(rows) == 2 else whole)
        return found

    @property
    def written(self) -> int:
        """How many operands it writes, the last ones."""
        return 1 + self.body.keeps

    def apart(self, run: Callable[[KernelSpec, Sequence[Array]], Array], operands: Sequence[Array]) -> list[Array]:
        """What the two kernels write, in the order of the fused one's operands; `run` gives what a kernel writes."""
        extras = self.body.extras(len(operands))
        x, affine = operands[0], operands[extras.stop : -self.written]
        rows, kept = x, list[Array]()
        for spec in self.norms:
            count = len(spec.operands) - 2
            rows = run(spec, [rows, *affine[:count], np.zeros(x.shape, x.dtype)])
            affine, kept = affine[count:], kept or [rows] * self.body.keeps
        return [*kept, run(self.plain, [rows, *operands[1 : extras.stop], operands[-1]])]

    def expected(self, operands: Sequence[Array]) -> Array:
        body = self.body
        names = (operand.name for operand in self.fused.operands)
        named = {name: value.astype(np.float64) for name, value in zip(names, operands, strict=True) if name != "w"}
        v = named["x"]
        for norm in body.norms:
            first = "residual" if norm.has_residual else "norm"
            if norm.kind == "layer":
                v = v - v.mean(1, keepdims=True)
            v = v / np.sqrt((v * v).mean(1, keepdims=True) + EPS)
            if norm.has_weight:
                v = v * named[f"{first}_weight"]
            if norm.has_bias:
                v = v + named[f"{first}_bias"]
            if norm.has_residual:
                v = v + named["residual"]
        out = v @ self.values.astype(np.float64).T
        if body.has_bias:
            out = out + named["bias"].astype(np.float64)
        if body.epilogue is not None:
            out = out + named["r"].astype(np.float64) * named["s"].astype(np.float64)
        return out


def make(
    layout: str, fmt: str, dtype: Any, norm: str, m: int, m_class: Any, *, rows: int = 37, cols: int | None = None,
    has_bias: bool = False, residual: bool = False, gap: int = 3, keeps: bool = False, added: str | None = None,
) -> Case:  # fmt: skip
    """One case: `rows` of the weight, and `cols` of its format's own number unless given. `added` is a first norm, with
    a residual; `norm` may be "none" then."""
    k, kind = cols or COLS[fmt], FORMATS[fmt]
    w = np.random.default_rng(k).standard_normal((rows, k)).astype(np.float32) / np.float32(k**0.5)
    stored, data, values = stored_weight(w, kind if isinstance(kind, str) else FormatRef(*kind), dtype, layout)

    def matrix(name: str, cols: int, gap: int, access: Any = "r") -> Operand:
        return Operand(name=name, dtype=dtype, access=access, shape=(m, cols), strides=(cols + gap, 1))

    def vector(name: str, size: int) -> Operand:
        return Operand(name=name, dtype=dtype, access="r", shape=(size,), strides=(1,))

    records = [] if added is None else [msgspec.structs.replace(NORMS[added], has_residual=True)]
    records += [] if norm == "none" else [NORMS[norm]]
    beside = [
        [matrix(name, k, gap + 2) if name == "residual" else vector(name, k) for name in record.names]
        for record in records
    ]
    affine = [each for operands in beside for each in operands]
    rest = [stored, *([vector("bias", rows)] if has_bias else [])]
    rest += [matrix("r", rows, 0), matrix("s", rows, 2)] if residual else []
    x, out = matrix("x", k, gap), matrix("out", rows, 0, "w")
    body = LinearKernel(
        m=m, n=rows, k=k, m_class=m_class, has_bias=has_bias, epilogue=residual_program(dtype) if residual else None,
    )  # fmt: skip
    kept_by_first = [msgspec.structs.replace(each, keeps=keeps and i == 0) for i, each in enumerate(records)]
    prologue = {"added" if each.has_residual else "norm": each for each in kept_by_first}
    without, body = body, msgspec.structs.replace(body, **prologue)
    kept = [matrix("rows", k, gap, "w")] * keeps
    name = f"{fmt}_{dtype}_{norm}_{m}_{m_class.replace('-', '_')}_{rows}x{k}{'_kept' * keeps}_{added}"
    normed, alone = matrix("x", k, 0), list[KernelSpec]()
    for record, operands in zip(records, beside, strict=True):
        kernel = NormKernel(
            kind=record.kind, rows=m, cols=k, eps=EPS, has_weight=record.has_weight, has_bias=record.has_bias,
            has_residual=record.has_residual,
        )  # fmt: skip
        given = (normed if alone else x, *operands, matrix("y", k, 0, "w"))
        alone.append(KernelSpec(name=f"norm{len(alone)}_{name}", symbols=(), operands=given, body=kernel))
    return Case(
        KernelSpec(name=f"fused_{name}", symbols=(), operands=(x, *rest, *affine, *kept, out), body=body),
        alone,
        KernelSpec(name=f"plain_{name}", symbols=(), operands=(normed, *rest, out), body=without),
        aligned(data), values,
    )  # fmt: skip


MS = (1, 2, 7, 8)


ADDED = (("rms", "rms"), ("layer", "none"), ("rms_bare", "layer"), ("layer_weight", "rms_bare"), ("rms", "none"))
"""Norms with a residual, and those behind them."""


def added_cases(layout: str, dtypes: Sequence[str], names: Sequence[str]) -> Iterator[Case]:
    """The same with a residual: every pair of norms, most of them keeping their sum."""
    number = 0
    for dtype in dtypes:
        for fmt in names:
            for m in (1, 7, 3):
                added, norm = ADDED[number % len(ADDED)]
                yield make(
                    layout, fmt, dtype, norm, m, "1" if m == 1 else "2-8", rows=(37, 16, 3)[number // 2 % 3],
                    has_bias=number % 2 == 0, residual=number % 4 == 0, gap=number % 4, keeps=number % 3 != 2,
                    added=added,
                )  # fmt: skip
                number += 1


def cases(layout: str, dtypes: Sequence[str], names: Sequence[str], most: int = 8) -> Iterator[Case]:
    """Every format and number of rows in turn with every norm; every second with a bias, every third with an
    epilogue."""
    number = 0
    for dtype in dtypes:
        for fmt in names:
            for m in MS:
                norm = list(NORMS)[number % len(NORMS)]
                m_class = "1" if m == 1 else "2-8"
                yield make(
                    layout, fmt, dtype, norm, m, m_class, rows=(37, 16, 3, 40)[(number // 4 + number) % 4],
                    has_bias=number % 2 == 0, residual=number % 3 == 0, gap=number % 4,
                    keeps=number % 2 == 1,
                )  # fmt: skip
                number += 1


@dataclass
class CodesCase:
    """A linear that makes rows of int8, of x or of a norm of it, and the `steps` that it stands for. It may keep the
    rows of int8, with gaps between them."""

    fused: KernelSpec
    steps: list[KernelSpec]
    weight: Array
    m: int
    written: int

    def given(self, seed: int) -> list[Array]:
        rng, found = np.random.default_rng(seed), []
        for operand in self.fused.operands:
            if operand.name == "w":
                found.append(self.weight)
                continue
            pitch = operand.strides[0] if len(operand.shape) == 2 else operand.shape[0]
            shape = (*operand.shape[:-1], int(pitch))
            values = rng.standard_normal(shape) * (operand.access == "r")
            found.append(values.astype(NUMPY_DTYPES[operand.dtype])[..., : int(operand.shape[-1])])
        return found

    def apart(self, run: Callable[[KernelSpec, Sequence[Array]], Array], operands: Sequence[Array]) -> list[Array]:
        """The rows of int8 if they are kept, and the result."""
        rows, affine, kept = operands[0], operands[2 : -self.written], list[Array]()
        for step in self.steps[:-1]:
            out = step.operands[-1]
            extra = affine if isinstance(step.body, NormKernel) else ()
            rows = run(step, [rows, *extra, np.zeros(out.shape, NUMPY_DTYPES[out.dtype])])
            kept = [rows] * (self.written - 1)
        return [*kept, run(self.steps[-1], [rows, self.weight, operands[-1]])]


def make_codes(
    layout: str, fmt: str, dtype: Any, norm: str | None, m: int, kind: Any, *, cols: int, m_class: Any = "large",
    keeps: bool = False,
) -> CodesCase:  # fmt: skip
    """37 rows of the weight; the clip of kind "tensor" is 2.5."""
    value = 2.5 if kind == "tensor" else 0.0
    case = make(layout, fmt, dtype, norm or "rms_bare", m, m_class, cols=cols, gap=0)
    x, w, *affine, out = case.fused.operands
    width = int8_rows.row_bytes(cols)
    codes = Operand(name="codes", dtype="i8", access="w", shape=(m, width), strides=(width, 1))
    record = RowCodes(kind=kind, value=value, keeps=keeps)
    kept = [msgspec.structs.replace(codes, name="kept_codes", strides=(width + 48, 1))] * keeps
    fused = msgspec.structs.replace(case.body, codes=True, rows=record, norm=case.body.norm if norm else None)
    apart = msgspec.structs.replace(fused, rows=None, norm=None, added=None)
    name = f"{fmt}_{dtype}_{norm}_{m}_{kind}_{cols}{'_kept' * keeps}"
    quantise = QuantizeRowsKernel(rows=m, cols=cols, kind=kind, value=value)
    read = msgspec.structs.replace(codes, access="r")
    steps = [
        *(case.norms if norm else []),
        KernelSpec(name=f"codes_{name}", symbols=(), operands=(x, codes), body=quantise),
        KernelSpec(name=f"product_{name}", symbols=(), operands=(read, w, out), body=apart),
    ]
    whole = KernelSpec(name=f"whole_{name}", symbols=(), operands=(x, w, *affine, *kept, out), body=fused)
    return CodesCase(whole, steps, case.weight, m, 1 + keeps)
