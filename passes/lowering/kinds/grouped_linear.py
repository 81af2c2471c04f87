"""qc.grouped_linear."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda import grouped_linear as cuda
from qcompiler.kernels.select import weight_layout
from qcompiler.passes.devices.engine_report import engine_weight, report_engines
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of, unit_last, vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, is_stored, named
from qcompiler.passes.lowering.scalar_body import program_of
from qcompiler.passes.pack_weights import WANTED_LAYOUT
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel


def select(op: qc.GroupedLinearOp, ranges: Ranges, context: QCContext) -> None:
    """One kernel serves any number of pairs. A constant weight gets the layout of linears."""
    n, k = shape_of(op.w.type)
    if is_stored(op.w, context):
        ref = op.w.type.format.ref if isinstance(op.w.type, QTensorType) else None
        op.attributes[WANTED_LAYOUT] = StringAttr(weight_layout(context.target.kind, ref))
    experts = op.experts.value.data
    kind = "int8 " * op.multiplies_codes + "grouped_linear"
    what = f"{kind}: {experts} experts of {int(n) // experts}x{k}, {op.repeat.value.data} pairs per row"
    how = "combines pairs of rows" * op.combines_pairs or ("" if op.count is None else f"sums {op.count} experts")
    context.report.add("select-kernels", path_of(op), what, how)
    if context.target.kind == "cuda" and not op.multiplies_codes:
        weight = engine_weight(op.w.type, in_tiles=is_stored(op.w, context))
        kernel = GroupedLinearKernel(
            rows=shape_of(op.x.type)[0],
            repeat=op.repeat.value.data,
            experts=experts,
            n=weight.rows // experts,
            k=weight.cols,
        )
        facts = {"grouped_linear": cuda.facts_of(tensor_dtype(op.x.type), weight, kernel)}
        report_engines(op, context, cuda.ENGINES, facts)


def draft(op: qc.GroupedLinearOp, memory: ValueMemory) -> Draft:
    weight, experts = memory.view(op.w), op.experts.value.data
    kind = weight.format.name if weight.format else weight.dtype
    form = (
        "int_" * op.multiplies_codes
        + "grouped_linear"
        + ("_pairs" if op.combines_pairs else "" if op.count is None else "_mixed")
    )
    result = Draft(f"{form}_{kind}_{experts}x{int(weight.shape[0]) // experts}x{weight.shape[1]}", path_of(op))
    x = result.add("x", "r", matrix_of(op.x, op, memory))
    w = result.add("w", "r", weight if weight.layout else unit_last(op.w, op, memory))
    index = result.add("index", "r", vector_of(op.index, op, memory))
    weights = None if op.weights is None else result.add("weights", "r", memory.view(op.weights))
    extras = [result.add(f"extra{i}", "r", memory.view(extra)) for i, extra in enumerate(op.extras)]
    out = views.as_matrix(memory.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    made = qc.GroupedLinearOp(
        x, w, index, tensor(out.shape, out.dtype), experts=experts, repeat=op.repeat.value.data,
        pairs=op.combines_pairs, top=op.count, weights=weights, extras=extras,
        mix=op.mix.clone() if op.mix.blocks else None, epilogue=op.epilogue.clone() if op.epilogue.blocks else None,
    )  # fmt: skip
    result.body.add_op(made)
    return result


def body(op: qc.GroupedLinearOp, operands: Operands, serves: str) -> GroupedLinearKernel:
    x, w = named(operands, "x"), named(operands, "w")
    experts = op.experts.value.data
    return GroupedLinearKernel(
        rows=x.shape[0],
        repeat=op.repeat.value.data,
        experts=experts,
        n=int(w.shape[0]) // experts,
        k=int(w.shape[1]),
        pairs=op.combines_pairs,
        top=op.count or 0,
        mix=program_of(op.mix.block, serves) if op.mix.blocks else None,
        epilogue=program_of(op.epilogue.block, serves) if op.epilogue.blocks else None,
        codes=op.multiplies_codes,
    )


LOWERING = Lowering(GroupedLinearKernel, (qc.GroupedLinearOp,), draft, body, only_floats=True, select=select)
