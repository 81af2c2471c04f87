"""Lowers `qc.recurrent` to an `scf.for` over the steps around linalg: each step reads the state of the step before it.

It is the one op whose lowering has control flow. Upstream MLIR bufferises the loop's tensors in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xdsl.builder import Builder
from xdsl.dialects import scf
from xdsl.dialects import tensor as tensor_dialect
from xdsl.dialects.builtin import DenseArrayBase, IndexType, i64
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.linalg_base import LinalgLowering, Rule, accumulator, contract, dims, points, rounded
from qcompiler.ir.scalar_code import Code, Scalar
from qcompiler.ir.types import DYNAMIC, shape_of, tensor_dtype
from qcompiler.plan.kernel import DType
from qcompiler.plan.kinds.recurrent import GATES


def _logistic(x: Scalar) -> Scalar:
    return 1 / (x.apply("negative").apply("exp") + 1)


def _recurrent(op: qc.RecurrentOp, lowering: LinalgLowering) -> Sequence[SSAValue]:
    b, names = lowering.builder, op.result_names
    weights = {"w": lowering.weight(op.w)}
    if op.projection is not None:
        weights["projection"] = lowering.weight(op.projection)
    steps, batch, _ = shape_of(op.x.type)
    starts = {"out": op.start}
    if op.cell_start is not None:
        starts["cell"] = op.cell_start
    if op.projection is not None:
        starts["room"] = build.fill(b, 0.0, (batch, op.hidden), "f32")
    out = op.results[0]
    states = build.empty(b, shape_of(out.type), tensor_dtype(out.type))
    ends = build.dim_value(b, steps)
    bounds = [build.index_constant(b, v) if isinstance(v, int) else v for v in (0, ends, 1)]
    carried = [states, *(starts[name] for name in names)]
    block = Block(arg_types=[IndexType(), *(value.type for value in carried)])
    inner = Builder(InsertPoint.at_end(block))
    step, given, *before = block.args
    time = _time(inner, op, step, bounds[1])
    made = _step(op, lowering.at(inner), weights, time, dict(zip(names, before, strict=True)))
    # What the loop yields is written into what it was given: bufferisation then needs no memory for each step.
    stored = [build.insert_slice(inner, made[name], into, [0, 0]) for name, into in zip(names, before, strict=True)]
    inner.insert(scf.YieldOp(_written(inner, made["out"], given, time), *stored))
    loop = b.insert(scf.ForOp(bounds[0], bounds[1], bounds[2], carried, Region(block)))
    return [loop.results[0], *loop.results[2:]]


def _time(b: Builder, op: qc.RecurrentOp, step: SSAValue, ends: SSAValue) -> SSAValue:
    """The entry along the time that a step reads and writes."""
    code = Code(b)
    return (code.scalar(ends) - 1 - code.scalar(step)).value if op.reverse is not None else step


def _written(b: Builder, state: SSAValue, states: SSAValue, time: SSAValue) -> SSAValue:
    """The states with that of one step."""
    sizes = shape_of(state.type)
    entries = [build.dim_value(b, size) for size in sizes]
    static = [1, *(entry if isinstance(entry, int) else DYNAMIC for entry in entries)]
    op = tensor_dialect.InsertSliceOp.build(
        operands=[state, states, [time], [entry for entry in entries if isinstance(entry, SSAValue)], []],
        result_types=[states.type],
        properties={
            "static_offsets": DenseArrayBase.from_list(i64, [DYNAMIC, 0, 0]),
            "static_sizes": DenseArrayBase.from_list(i64, static),
            "static_strides": DenseArrayBase.from_list(i64, [1, 1, 1]),
        },
    )
    return b.insert(op).result


def _step(
    op: qc.RecurrentOp,
    lowering: LinalgLowering,
    weights: Mapping[str, SSAValue],
    time: SSAValue,
    before: Mapping[str, SSAValue],
) -> dict[str, SSAValue]:
    """The states after one step, by name."""
    b, kind, hidden = lowering.builder, op.kind.data, op.hidden
    acc = accumulator(op.x, weights["w"])
    batch, columns = shape_of(before["out"].type)[0], GATES[kind] * hidden
    share = contract(b, [before["out"], weights["w"]], [dims(0, 2), dims(1, 2)], (batch, columns), acc)
    if op.bias is not None:
        share = points(b, [share, op.bias], (batch, columns), acc, lambda _, s: s[0] + s[1].to(acc))
    types: dict[str, DType] = {n: tensor_dtype(v.type) for n, v in zip(op.result_names, op.results, strict=True)}
    shape = (batch, hidden)

    def gate(code: Code, number: int) -> tuple[Scalar, Scalar]:
        """What the input and the state contribute to a gate."""
        row, column = code.index(0), code.index(1) + number * hidden
        return code.read(op.x, code.scalar(time), row, column).to(acc), code.read(share, row, column)

    def summed(code: Code, number: int) -> Scalar:
        first, second = gate(code, number)
        return first + second

    made: dict[str, SSAValue] = {}
    if kind == "lstm":

        def cell(code: Code, s: Sequence[Scalar]) -> Scalar:
            i, f, u = (summed(code, number) for number in (0, 1, 2))
            return (_logistic(f) * s[0].to(acc) + _logistic(i) * u.apply("tanh")).to(types["cell"])

        made["cell"] = points(b, [before["cell"]], shape, types["cell"], cell)

    def new(code: Code, s: Sequence[Scalar]) -> Scalar:
        if kind == "lstm":
            return _logistic(summed(code, 3)) * s[0].to(acc).apply("tanh")
        if kind == "gru":
            r, z = _logistic(summed(code, 0)), _logistic(summed(code, 1))
            own, shared = gate(code, 2)
            n = (own + r * shared).apply("tanh")
            return n + z * (s[0].to(acc) - n)
        total = summed(code, 0)
        return total.apply("tanh") if kind == "tanh" else total.maximum(0.0)

    state = points(b, [made["cell"] if kind == "lstm" else before["out"]], shape, acc, new)
    if op.projection is not None:
        made["room"] = rounded(b, state, "f32")
        projection = weights["projection"]
        wide = (batch, shape_of(projection.type)[0])
        state = contract(b, [state, projection], [dims(0, 2), dims(1, 2)], wide, acc)
    made["out"] = rounded(b, state, types["out"])
    return made


RECURRENT: dict[type[Operation], Rule] = {qc.RecurrentOp: _recurrent}
