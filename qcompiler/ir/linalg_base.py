"""Shared parts of the rules that lower `qc` ops to linalg: the table of rules, and loops around scalar code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects.builtin import AnyFloat, IntegerType
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap

from qcompiler.errors import QCompilerError
from qcompiler.ir import build, qc
from qcompiler.ir.linalg_formats import decode_weight, element_decoder
from qcompiler.ir.module import path_of
from qcompiler.ir.scalar_code import Code, Scalar, where
from qcompiler.ir.types import ELEMENT_TYPES, QTensorType, shape_of, tensor_dtype
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

Scalars = Sequence[SSAValue]
Combine = Callable[[Builder, Scalars], SSAValue | Operation]
Body = Callable[[Code, Sequence[Scalar]], Scalar]
"""Scalar code: from one scalar for each input, and the output's, to the result."""


@dataclass
class LinalgLowering:
    """The builder for new ops, and the values of each packed weight's sections (by argument name)."""

    builder: Builder
    sections: dict[SSAValue, Mapping[str, SSAValue]] = field(default_factory=dict)
    decoded: dict[tuple[SSAValue, bool], SSAValue] = field(default_factory=dict)

    def weight(self, value: SSAValue, *, rounded: bool = True) -> SSAValue:
        """A weight as a plain tensor. A packed one is decoded once, rounded to its element type or not."""
        if not isinstance(value.type, QTensorType):
            return value
        if (value, rounded) not in self.decoded:
            made = decode_weight(self.builder, value.type, self._sections(value), rounded=rounded)
            self.decoded[value, rounded] = made
        return self.decoded[value, rounded]

    def element(self, value: SSAValue) -> Callable[[Code, Scalar, Scalar], Scalar]:
        """What reads one element of a matrix, by row and column: of a packed one, decoded and rounded."""
        type_ = value.type
        if not isinstance(type_, QTensorType):
            return lambda code, row, column: code.read(value, row, column)
        decode = element_decoder(self.builder, type_, self._sections(value))
        return lambda code, row, column: decode(code, row, column, {}).to(type_.dtype)

    def _sections(self, value: SSAValue) -> Mapping[str, SSAValue]:
        if value not in self.sections:
            raise QCompilerError(f"only constants can be decoded by linalg; {value.type} is computed")
        return self.sections[value]

    def lowered(self, op: Operation, operands: Sequence[SSAValue]) -> Sequence[SSAValue]:
        """What an op of a region means for other operands. The op stays as it is."""
        copy = op.clone(dict(zip(op.operands, operands, strict=True)))
        results = lower(copy, self)
        copy.erase()
        return results

    def at(self, builder: Builder) -> LinalgLowering:
        """The same, building elsewhere."""
        return replace(self, builder=builder)


Rule = Callable[[Any, LinalgLowering], Sequence[SSAValue]]

RULES: dict[type[Operation], Rule] = {}
"""The lowering of each op; linalg_lowering.py fills it."""

WITHOUT: dict[str, str] = {
    "qc.join_attention": "split-attention makes it for the kernels of a GPU: take the text of a stage before that one",
    "qc.quantize": "it encodes a matrix, and weights are encoded when the program is compiled; no frontend makes it",
    "qc.torch_call": "torch runs it: compile the program without fallback='torch', or leave the operator out",
}
"""Ops that have no lowering, with the reason. In the IR before kernels are chosen, every other op has one."""


def lower(op: Operation, lowering: LinalgLowering) -> Sequence[SSAValue]:
    """The op's results as linalg. QCompilerError, with the module path, for an op without a rule."""
    rule = RULES.get(type(op))
    if rule is None:
        why = WITHOUT.get(op.name, "it has no rule yet")
        raise QCompilerError(f"{op.name} at '{path_of(op) or '?'}' cannot be lowered to linalg: {why}")
    return rule(op, lowering)


# --- scalars ---------------------------------------------------------------------------------------------------------


def accumulator(*values: SSAValue) -> DType:
    """f32, or f64 if an operand is f64."""
    return "f64" if any(tensor_dtype(v.type) == "f64" for v in values) else "f32"


def convert(b: Builder, value: SSAValue, dtype: DType) -> SSAValue:
    """A float scalar in another float type."""
    target = ELEMENT_TYPES[dtype]
    if value.type == target:
        return value
    assert isinstance(target, AnyFloat) and isinstance(value.type, AnyFloat)
    cast = arith.ExtFOp if target.bitwidth > value.type.bitwidth else arith.TruncFOp
    return b.insert(cast(value, target)).results[0]


def inlined(b: Builder, block: Block, arguments: Scalars) -> SSAValue:
    """Copies a scalar body; returns what it yields."""
    values: dict[SSAValue, SSAValue] = dict(zip(block.args, arguments, strict=True))
    for op in block.ops:
        if isinstance(op, qc.YieldOp):
            return values[op.operands[0]]
        copy = b.insert(op.clone(dict(values)))
        values.update(zip(op.results, copy.results, strict=True))
    raise QCompilerError("an epilogue does not end in qc.yield")


def size_of(b: Builder, size: Dim, dtype: DType) -> SSAValue:
    """A dim as a float scalar."""
    if isinstance(size, int):
        return build.scalar(b, float(size), dtype)
    index = build.dim_value(b, size)
    assert isinstance(index, SSAValue)
    integer = b.insert(arith.IndexCastOp(index, IntegerType(64))).result
    target = ELEMENT_TYPES[dtype]
    assert isinstance(target, AnyFloat)
    return b.insert(arith.SIToFPOp(integer, target)).result


def length(code: Code, size: Dim | SSAValue) -> Scalar:
    """A dim as an index. A symbolic one must have been built in front of the loop."""
    return code.scalar(size) if isinstance(size, SSAValue) else code.constant(int(size), "index")


# --- loops -----------------------------------------------------------------------------------------------------------


def dims(*positions: int) -> tuple[AffineExpr, ...]:
    return tuple(AffineDimExpr(p) for p in positions)


def _wrapped(body: Body) -> Combine:
    def inner(b: Builder, scalars: Scalars) -> SSAValue:
        code = Code(b)
        return body(code, [code.scalar(value) for value in scalars]).value

    return inner


def points(b: Builder, inputs: Sequence[SSAValue], shape: Sequence[Dim], dtype: DType, body: Body) -> SSAValue:
    """A pointwise loop over `shape`; the inputs broadcast to it."""
    return build.pointwise(b, inputs, shape, dtype, _wrapped(body))


def folded(
    b: Builder,
    inputs: Sequence[tuple[SSAValue, Sequence[AffineExpr]]],
    shape: Sequence[Dim],
    dtype: DType,
    body: Body,
    *,
    start: float | SSAValue = 0.0,
    extent: Dim | None = None,
) -> SSAValue:
    """Loops over `shape`, and one reduction loop behind them, from `start` on. Each input has the expressions that
    index it. `extent` is the size of the reduction loop where no input gives it."""
    rank = len(shape)
    operands, reads = [value for value, _ in inputs], [tuple(read) for _, read in inputs]
    if extent is not None:
        operands.append(build.empty(b, (extent,), "f32"))
        reads.append(dims(rank))
    maps = [AffineMap(rank + 1, 0, r) for r in (*reads, dims(*range(rank)))]
    iterators: list[build.Iterator] = [*(["parallel"] * rank), "reduction"]  # type: ignore[list-item]
    init = start if isinstance(start, SSAValue) else build.fill(b, start, shape, dtype)
    return build.generic(b, operands, maps, shape, dtype, iterators, _wrapped(body), init=init)


def contract(
    b: Builder, operands: Sequence[SSAValue], maps: Sequence[Sequence[AffineExpr]], out: Sequence[Dim], acc: DType
) -> SSAValue:
    """A sum of products: parallel loops over `out`, then one reduction loop."""

    def body(_: Code, s: Sequence[Scalar]) -> Scalar:
        return s[2] + s[0].to(acc) * s[1].to(acc)

    return folded(b, list(zip(operands, maps, strict=True)), out, acc, body)


def rounded(b: Builder, value: SSAValue, dtype: DType) -> SSAValue:
    """A tensor in another element type."""
    if tensor_dtype(value.type) == dtype:
        return value
    return points(b, [value], shape_of(value.type), dtype, lambda _, s: s[0].to(dtype))


def beside(
    b: Builder, full: Sequence[SSAValue], reduced: Sequence[SSAValue], axis: int, dtype: DType, body: Combine
) -> SSAValue:
    """A pointwise op over tensors of one shape and tensors of the same shape without `axis`."""
    shape = shape_of(full[0].type)
    kept = tuple(i for i in range(len(shape)) if i != axis)
    identity = AffineMap.identity(len(shape))
    maps = [identity] * len(full) + [AffineMap(len(shape), 0, dims(*kept))] * len(reduced) + [identity]
    return build.generic(b, [*full, *reduced], maps, shape, dtype, ["parallel"] * len(shape), body)


def mean_of(b: Builder, total: SSAValue, size: Dim, acc: DType) -> SSAValue:
    count = size_of(b, size, acc)
    return points(b, [total, count], shape_of(total.type), acc, lambda _, s: s[0] / s[1])


def indices(code: Code, rank: int) -> list[Scalar]:
    """The indices of the first `rank` loops."""
    return [code.index(axis) for axis in range(rank)]


def groups_folded(b: Builder, rows: SSAValue, size: int, dtype: DType, body: Body, start: float = 0.0) -> SSAValue:
    """A fold of each `size` consecutive entries of rows, of a fixed length, the last ones fewer: (…, groups).

    `body` gets the entry, in f32 if it is a float, and the total.
    """
    *lead, cols = shape_of(rows.type)
    rank, last = len(lead), int(cols) - 1
    shape = (*lead, -(-int(cols) // size))

    def step(code: Code, s: Sequence[Scalar]) -> Scalar:
        column = code.index(rank) * size + code.index(rank + 1)
        entry = code.read(rows, *indices(code, rank), column.minimum(last))
        entry = entry.to("f32") if entry.floats else entry
        return where(column <= last, body(code, [entry, s[-1]]), s[-1])

    return folded(b, [], shape, dtype, step, start=start, extent=size)
