"""qc.recurrent: one kernel processes all steps."""

from __future__ import annotations

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Attribute, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor
from qcompiler.kernels.select import weight_layout
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, unit_last
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, is_stored, named
from qcompiler.passes.pack_weights import WANTED_LAYOUT
from qcompiler.plan.kinds.recurrent import RecurrentKernel
from qcompiler.units import counted


def select(op: qc.RecurrentOp, ranges: Ranges, context: QCContext) -> None:
    """One kernel processes all steps. Constant weights get the layout of linears."""
    stored = [op.operands[number].type for number in op.weights if is_stored(op.operands[number], context)]
    if stored:
        refs = [each.format.ref if isinstance(each, QTensorType) else None for each in stored]
        op.attributes[WANTED_LAYOUT] = StringAttr(weight_layout(context.target.kind, *refs))
    steps, batch, _ = shape_of(op.x.type)
    size = f"{counted(steps, 'step')} of {counted(batch, 'row')}"
    what = f"recurrent: {op.kind.data}, {size} in one kernel, which reads the weight once a step"
    context.report.add("select-kernels", path_of(op), what, "")


def draft(op: qc.RecurrentOp, memory: ValueMemory) -> Draft:
    """Operands with unit stride in their last dim are read in place, so batch-first layers need no copy."""
    weight = memory.view(op.w)
    kind = weight.format.name if weight.format else weight.dtype
    result = Draft(f"{op.kind.data}_{kind}_{weight.shape[0]}x{weight.shape[1]}", path_of(op))

    def read(name: str, value: SSAValue | None, *, stored: bool = False) -> SSAValue | None:
        if value is None:
            return None
        view = memory.view(value)
        return result.add(name, "r", view if stored and view.layout else unit_last(value, op, memory))

    x, w = read("x", op.x), read("w", op.w, stored=True)
    projection, bias = read("projection", op.projection, stored=True), read("bias", op.bias)
    start, cell_start = read("start", op.start), read("cell_start", op.cell_start)
    kinds: list[Attribute] = []
    for name, value in zip(op.result_names, op.results, strict=True):
        out = memory.result(value, shape_of(value.type))
        result.add(name, "w", out)
        kinds.append(tensor(out.shape, out.dtype))
    assert x is not None and w is not None and start is not None
    result.body.add_op(op.rebuilt(x, w, start, kinds, projection=projection, bias=bias, cell_start=cell_start))
    return result


def body(op: qc.RecurrentOp, operands: Operands, serves: str) -> RecurrentKernel:
    x, w = named(operands, "x"), named(operands, "w")
    return RecurrentKernel(
        kind=op.kind.data,  # type: ignore[arg-type]
        steps=x.shape[0],
        batch=x.shape[1],
        hidden=op.hidden,
        width=int(w.shape[1]),
        reverse=op.reverse is not None,
        projects=op.projection is not None,
        has_bias=op.bias is not None,
    )


LOWERING = Lowering(RecurrentKernel, (qc.RecurrentOp,), draft, body, only_floats=True, select=select)
