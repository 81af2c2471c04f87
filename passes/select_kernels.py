"""select-kernels: chooses the kernels of each op, and reports why other candidates were rejected.

    before  %y = qc.linear %x, %w                       M = b*s in [1, 32768]
    after   %y = qc.linear %x, %w {qc.cases = ["8:2-8", ":large"], qc.layout = "cpu_p16_v1"}

An op with a single kernel needs no attribute: its name is the template's name. An op without a kernel on the target is
an error that names the op and its module path.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from qcompiler.errors import KernelSelectionError
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.module import path_of, ranges_of
from qcompiler.ir.qc import (
    ConstOp,
    CopyOp,
    DimOp,
    GroupedLinearOp,
    LinearOp,
    StateOp,
    StateUpdateOp,
    TorchCallOp,
    WindowsOp,
)
from qcompiler.ir.types import tensor_dtype
from qcompiler.kernels.select import FLOATS, templates
from qcompiler.passes.lowering.kinds import BY_OP, FLOAT_ONLY, TEMPLATES

_NO_KERNEL = (ConstOp, DimOp, StateOp, StateUpdateOp, CopyOp, WindowsOp, TorchCallOp)
"""Ops without a kernel: they give values, a linear's kernel reads them in place, or torch runs them."""


@dataclass(frozen=True)
class SelectKernelsPass(ModulePass):
    """Adds to linears their cases and the layout of their weight, and refuses ops without a kernel."""

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
                if each.name.startswith("qc.") and not isinstance(each, _NO_KERNEL):
                    _check_template(each, context)
                    select = BY_OP[type(each)].select
                    if select is not None:
                        select(each, ranges, context)


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
    codes = isinstance(op, LinearOp | GroupedLinearOp) and op.multiplies_codes
    for value in (op.results[0],) if codes else (op.operands[0], op.results[0]):
        dtype = tensor_dtype(value.type)
        if dtype not in FLOATS:
            raise KernelSelectionError(
                f"{op.name} at '{path_of(op)}' is {dtype}, and its kernels for {context.target.kind} take "
                f"{', '.join(FLOATS)}; convert its operands, for example with .float()"
            )
