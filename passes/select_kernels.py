"""select-kernels: each op gets its kernel, with the reason for every candidate that was passed over.

    before  %y = qc.linear %x, %w                       M = b*s in [1, 32768]
    after   %y = qc.linear %x, %w {qc.cases = ["8:2-8", ":large"], qc.layout = "cpu_p16_v1"}

Ops with a single kernel need no attribute: their template is their name.  An op without any kernel on the target is an
error that names it and its place in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import path_of, ranges_of
from qcompiler.ir.qc import (
    ArgmaxOp,
    AttentionOp,
    BatchMatmulOp,
    ConstOp,
    CopyOp,
    CumsumOp,
    DimOp,
    EmbeddingOp,
    GatherOp,
    GroupedLinearOp,
    IndexUpdateOp,
    LayerNormOp,
    LinearOp,
    QuantizeRowsOp,
    RecurrentOp,
    RmsNormOp,
    ScatterOp,
    SoftmaxOp,
    SortOp,
    StateOp,
    StateUpdateOp,
    TopkOp,
    TorchCallOp,
    WindowsOp,
)
from qcompiler.ir.types import QTensorType, shape_of, tensor_dtype
from qcompiler.kernels.select import FLOATS, LINEAR, Case, LinearQuery, choose_linear, templates
from qcompiler.passes.devices.engine_report import report_engines
from qcompiler.passes.devices.extents import check_extents
from qcompiler.passes.pack_weights import WANTED_LAYOUT
from qcompiler.plan.dims import Range, product

CASES = "qc.cases"

TEMPLATES: dict[type[Operation], str] = {
    LinearOp: "linear",
    GroupedLinearOp: "grouped_linear",
    QuantizeRowsOp: "quantize_rows",
    RecurrentOp: "recurrent",
    BatchMatmulOp: "batch_matmul",
    AttentionOp: "attention",
    LayerNormOp: "norm",
    RmsNormOp: "norm",
    SoftmaxOp: "softmax",
    EmbeddingOp: "embedding",
    GatherOp: "gather",
    IndexUpdateOp: "index_update",
    CumsumOp: "scan",
    ScatterOp: "scatter",
    SortOp: "order",
    TopkOp: "order",
    ArgmaxOp: "argmax",
}
"""The template that serves each `qc` op. linalg.generic has the loop template; views and sizes need none."""

FLOAT_ONLY = (
    LinearOp, GroupedLinearOp, RecurrentOp, BatchMatmulOp, AttentionOp, LayerNormOp, RmsNormOp, SoftmaxOp,
)  # fmt: skip
"""Their kernels accumulate in fp32."""

_NO_KERNEL = (ConstOp, DimOp, StateOp, StateUpdateOp, CopyOp, WindowsOp, TorchCallOp)
"""Values, what a linear's kernel reads in place, and what torch runs."""


@dataclass(frozen=True)
class SelectKernelsPass(ModulePass):
    """Annotates linears with their cases and their weight's layout; refuses ops that no kernel serves."""

    name = "select-kernels"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        if context.target.others:
            what = f"one plan for {', '.join(context.target.isas)}"
            context.report.add(self.name, "", what, "its kernels are those that each of these can run")
        for function in op.body.block.ops:
            if not isinstance(function, FuncOp):
                continue
            ranges = ranges_of(function)
            for each in function.body.block.ops:
                if isinstance(each, FLOAT_ONLY):
                    _check_float(each, context)
                check_extents(each, context)
                if isinstance(each, LinearOp):
                    _select_linear(each, ranges, context)
                elif each.name.startswith("qc.") and not isinstance(each, _NO_KERNEL):
                    _check_template(each, context)
                if isinstance(each, GroupedLinearOp):
                    _select_layout(each, context)
                if isinstance(each, RecurrentOp):
                    _select_recurrent(each, context)
                if isinstance(each, AttentionOp):
                    report_engines(each, context, (), constant=False)


def _check_template(op: Operation, context: QCContext) -> None:
    available = templates(context.target.kind)
    if TEMPLATES.get(type(op)) not in available:
        served = sorted(each.name for each, template in TEMPLATES.items() if template in available)
        raise KernelSelectionError(
            f"{op.name} at '{path_of(op)}' has no kernel for {context.target.kind} yet (kernels exist for: "
            f"{', '.join(served)}). Rewrite that place of the model, or compute it outside of the compiled model and "
            "pass the result in"
        )


def _check_float(op: Operation, context: QCContext) -> None:
    codes = isinstance(op, LinearOp) and op.multiplies_codes
    for value in (op.results[0],) if codes else (op.operands[0], op.results[0]):
        dtype = tensor_dtype(value.type)
        if dtype not in FLOATS:
            raise KernelSelectionError(
                f"{op.name} at '{path_of(op)}' is {dtype}, and its kernels for {context.target.kind} take "
                f"{', '.join(FLOATS)}; convert its operands, for example with .float()"
            )


def _select_linear(op: LinearOp, ranges: dict[str, Range], context: QCContext) -> None:
    n, k = shape_of(op.w.type)
    query = LinearQuery(
        m=product(shape_of(op.x.type)[:-1]).bounds(ranges),
        n=int(n),
        k=int(k),
        x_dtype=tensor_dtype(op.x.type),
        out_dtype=tensor_dtype(op.result.type),
        format=op.w.type.format.ref if isinstance(op.w.type, QTensorType) else None,
        constant_weight=_is_constant(op.w, context),
        kind=context.target.kind,
        isas=context.target.isas,
        codes=op.multiplies_codes,
    )
    choice = choose_linear(query)
    op.attributes[CASES] = ArrayAttr([StringAttr(_case_text(case)) for case in choice.cases])
    if choice.layout is not None:
        op.attributes[WANTED_LAYOUT] = StringAttr(choice.layout)
    chosen = ", ".join(f"{c.m_class}" + ("" if c.max is None else f" (M <= {c.max})") for c in choice.cases)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
    what = "int8 linear" if op.multiplies_codes else "linear"
    context.report.add("select-kernels", path_of(op), f"{what} {chosen}", reasons)
    if not op.multiplies_codes:
        report_engines(op, context, [case.m_class for case in choice.cases], constant=query.constant_weight)


def _select_layout(op: GroupedLinearOp, context: QCContext) -> None:
    """One kernel serves any number of pairs; constant weights lie as linears want theirs."""
    n, k = shape_of(op.w.type)
    if _is_constant(op.w, context):
        op.attributes[WANTED_LAYOUT] = StringAttr(LINEAR[context.target.kind][1])
    experts = op.experts.value.data
    what = f"grouped_linear: {experts} experts of {int(n) // experts}x{k}, {op.repeat.value.data} pairs per row"
    context.report.add("select-kernels", path_of(op), what, "")
    report_engines(op, context, (), constant=_is_constant(op.w, context))


def _select_recurrent(op: RecurrentOp, context: QCContext) -> None:
    """One kernel goes over all steps; constant weights lie as linears want theirs."""
    if any(_is_constant(op.operands[number], context) for number in op.weights):
        op.attributes[WANTED_LAYOUT] = StringAttr(LINEAR[context.target.kind][1])
    steps, batch, _ = shape_of(op.x.type)
    what = f"recurrent: {op.kind.data}, {steps} steps of {batch} rows in one kernel, which reads the weight once a step"
    context.report.add("select-kernels", path_of(op), what, "")


def _is_constant(weight: SSAValue, context: QCContext) -> bool:
    return isinstance(weight.owner, ConstOp) and weight.owner.key in context.weights


def _case_text(case: Case) -> str:
    return f"{'' if case.max is None else case.max}:{case.m_class}"


def cases_of(op: LinearOp) -> list[tuple[int | None, str]]:
    """The cases that select-kernels wrote on a linear: (largest M, row class), ascending, the last without a limit."""
    attribute = op.attributes.get(CASES)
    if not isinstance(attribute, ArrayAttr):
        raise KernelSelectionError(f"qc.linear at '{path_of(op)}' has no kernel; run select-kernels before lower-to-rt")
    cases: list[tuple[int | None, str]] = []
    for each in attribute:
        assert isinstance(each, StringAttr)
        limit, _, m_class = each.data.partition(":")
        cases.append((int(limit) if limit else None, m_class))
    return cases
