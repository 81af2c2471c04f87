"""Recurrent kernels with operands and answers in float64, for the tests of both targets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.config import parse_format, resolve_format
from qcompiler.kernels import layouts
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import Access, DType, KernelSpec, Operand
from qcompiler.plan.kinds.recurrent import GATES, RecurrentKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
BOUNDS = {"f32": 3e-6, "bf16": 4e-2, "f16": 5e-3}
"""Largest errors of states of magnitude one: each step rounds them, and a rounding the other way goes on."""


@dataclass
class Weight:
    """One operand, its bytes, and its values."""

    operand: Operand
    data: Array
    values: Array


@dataclass
class Case:
    spec: KernelSpec
    w: Weight
    projection: Weight | None
    bias: Array | None

    @property
    def body(self) -> RecurrentKernel:
        assert isinstance(self.spec.body, RecurrentKernel)
        return self.spec.body


def make_case(
    kind: Any, hidden: int, weight: str = "rows", *, layout: str, width: int | None = None, batch: Dim = "b",
    dtype: DType = "f32", bias: bool = True, reverse: bool = False, batch_first: bool = False,
) -> Case:  # fmt: skip
    """`weight`: the text of a format, "packed" (plain, as the target wants it), "rows" or "columns"; with `width` the
    layer projects.  `layout` is the target's."""
    text = f"{kind} {hidden} {weight} {width} {batch} {dtype} {bias} {reverse} {batch_first}"
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    rows, projects, lstm = GATES[kind] * hidden, width is not None, kind == "lstm"
    states = width if width is not None else hidden
    w = _weight("w", weight, rows, states, dtype, layout, rng)
    projection = _weight("projection", weight, states, hidden, dtype, layout, rng) if projects else None
    made: list[Operand] = [_operand("x", dtype, ("t", batch, rows), batch_first), w.operand]
    made += [projection.operand] if projection is not None else []
    made += [Operand(name="bias", dtype=dtype, access="r", shape=(rows,), strides=(1,))] * bias
    made += [_operand("start", dtype, (batch, states))]
    made += [_operand("cell_start", dtype, (batch, hidden))] * lstm
    made += [_operand("out", dtype, ("t", batch, states), batch_first, "w")]
    made += [_operand("cell", dtype, (batch, hidden), access="w")] * lstm
    made += [_operand("room", "f32", (batch, hidden), access="w")] * projects
    body = RecurrentKernel(
        kind=kind, steps="t", batch=batch, hidden=hidden, width=states, reverse=reverse, projects=projects,
        has_bias=bias,
    )  # fmt: skip
    name, symbols = f"r{zlib.crc32(text.encode()):08x}", ("b", "t") if batch == "b" else ("t",)
    spec = KernelSpec(name=name, symbols=symbols, operands=tuple(made), body=body)
    return Case(spec, w, projection, rng.standard_normal(rows).astype(DTYPES[dtype]) if bias else None)


def _operand(
    name: str, dtype: DType, shape: tuple[Dim, ...], batch_first: bool = False, access: Access = "r"
) -> Operand:
    """Rows with a gap behind each; (steps, batch, …) as it lies, or batches outermost."""
    row = int(shape[-1]) + 3
    strides: tuple[Dim, ...] = (row, 1)
    if len(shape) == 3:
        outer = (dim(shape[0 if batch_first else 1]) * row).to_dim()
        strides = (row, outer, 1) if batch_first else (outer, row, 1)
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)


def _weight(name: str, text: str, rows: int, cols: int, dtype: DType, layout: str, rng: Any) -> Weight:
    values = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
    if text in ("packed", "rows", "columns"):
        plain = values.astype(DTYPES[dtype])
        operand = Operand(name=name, dtype=dtype, access="r", shape=(rows, cols), strides=(cols, 1))
        data = plain
        if text == "packed":
            data = layouts.get(layout).pack(None, dtype, rows, cols, plain.view(np.uint8).reshape(-1))
            operand = Operand(name=name, dtype=dtype, access="r", shape=(rows, cols), layout=layout)
        elif text == "columns":
            data = np.ascontiguousarray(plain.T)
            operand = Operand(name=name, dtype=dtype, access="r", shape=(rows, cols), strides=(1, rows))
            return Weight(operand, data.T, plain.astype(np.float64))
        return Weight(operand, data, plain.astype(np.float64))
    fmt = resolve_format(text)
    packed = fmt.encode(values)
    data = layouts.get(layout).pack(fmt, dtype, rows, cols, packed.data)
    ref = parse_format(text)
    operand = Operand(name=name, dtype=dtype, access="r", shape=(rows, cols), format=ref, layout=layout)
    return Weight(operand, _aligned(data), fmt.decode(packed).astype(DTYPES[dtype]).astype(np.float64))


def _aligned(data: Array) -> Array:
    raw = data.reshape(-1).view(np.uint8)
    buffer = np.zeros(raw.size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    buffer[begin : begin + raw.size] = raw
    return buffer[begin : begin + raw.size]


# --- operands and answers --------------------------------------------------------------------------------------------


def operands_of(case: Case, steps: int, batch: int) -> list[Array]:
    """Fresh operands, in order; what is written is 7 before."""
    rng = np.random.default_rng(steps * 1000 + batch)
    made = []
    for operand in case.spec.operands:
        if operand.name in ("w", "projection"):
            weight = case.w if operand.name == "w" else case.projection
            assert weight is not None
            made.append(weight.data)
        elif operand.name == "bias":
            assert case.bias is not None
            made.append(case.bias)
        else:
            made.append(_fresh(operand, {"t": steps, "b": batch}, rng))
    return made


def _fresh(operand: Operand, sizes: dict[str, int], rng: Any) -> Array:
    shape = [dim(size).evaluate(sizes) for size in operand.shape]
    strides = [dim(stride).evaluate(sizes) for stride in operand.strides]
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis] if len(shape) == 3 and axis < 2 else axis)
    full = [shape[axis] for axis in order]
    base = np.full((*full[:-1], full[-1] + 3), 7, DTYPES[operand.dtype])
    view = base[..., : full[-1]].transpose(np.argsort(order))
    if operand.access == "r":
        view[...] = rng.standard_normal(shape).astype(view.dtype)
    return view


def answers(case: Case, operands: Sequence[Array]) -> dict[str, Array]:
    """What each written operand holds behind the call, in float64; states and cells are rounded at each step."""
    given = {operand.name: array for operand, array in zip(case.spec.operands, operands, strict=True)}
    body, w, dtype = case.body, case.w.values, given["out"].dtype
    x = given["x"].astype(np.float64)
    bias = 0.0 if case.bias is None else case.bias.astype(np.float64)
    state, out = given["start"].astype(np.float64), np.zeros(given["out"].shape)
    cell = given["cell_start"].astype(np.float64) if "cell_start" in given else None
    new = np.zeros((x.shape[1], body.hidden))
    for t in range(len(x))[:: -1 if body.reverse else 1]:
        g, s = (np.split(each, body.gates, 1) for each in (x[t], state @ w.T + bias))
        if body.kind == "lstm":
            assert cell is not None
            i, f, o = (_sigmoid(g[n] + s[n]) for n in (0, 1, 3))
            cell = (f * cell + i * np.tanh(g[2] + s[2])).astype(dtype).astype(np.float64)
            new = o * np.tanh(cell)
        elif body.kind == "gru":
            r, z = _sigmoid(g[0] + s[0]), _sigmoid(g[1] + s[1])
            new = (1 - z) * np.tanh(g[2] + r * s[2]) + z * state
        else:
            new = np.tanh(g[0] + s[0]) if body.kind == "tanh" else np.maximum(g[0] + s[0], 0)
        made = new if case.projection is None else new @ case.projection.values.T
        state = out[t] = made.astype(dtype).astype(np.float64)
    found = {"out": out, "cell": cell, "room": new}
    return {name: value for name, value in found.items() if name in given and value is not None}


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def assert_close(case: Case, found: Sequence[Array], wanted: dict[str, Array]) -> None:
    for operand, array in zip(case.spec.operands, found, strict=True):
        if operand.name in wanted:
            expected = wanted[operand.name]
            error = np.abs(array.astype(np.float64) - expected) / np.maximum(1, np.abs(expected))
            worst = float(error.max(initial=0))
            assert worst <= BOUNDS[case.spec.operands[0].dtype], f"{case.spec.body}: {operand.name} is {worst:.2e} off"
