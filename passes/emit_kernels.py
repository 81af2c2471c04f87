"""emit-kernels: makes a KernelSpec of every `rt.kernel`, a Plan of the schedule, and C++ text of both.

    before  rt.kernel @linear_nf4_0 {operands = […]} ({ %y = qc.linear %x, %w … rt.yield %y })
    after   KernelSpec(name="linear_nf4_0", body=LinearKernel(m="b*s", n=1536, k=384, m_class="large", …))
            extern "C" void qk_0(qc_ctx* ctx, void* const* op, const int64_t* sym) { … }

For a CUDA target the text is CUDA C++, the same for a GPU and for the simulated GPU, and the report has the launch
geometry of each kernel. A program file runs from the specs, not from the text: another machine emits and compiles the
text again. The pass does not change the module. Its result is `emitted` in the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import rt
from qcompiler.ir.context import Emitted, QCContext, qc_context
from qcompiler.ir.rt_plan import plan_from_rt
from qcompiler.kernels.cpu.emit import emit_kernel, emit_program
from qcompiler.kernels.cuda import emit as cuda
from qcompiler.passes.lowering.kinds import spec_of
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import Plan
from qcompiler.plan.verify import verify_plan
from qcompiler.plan.verify_kernels import check_kernels


@dataclass(frozen=True)
class EmitKernelsPass(ModulePass):
    """Writes the plan and its C++ source into the context."""

    name = "emit-kernels"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        plan = plan_from_rt(op, kernel_specs(op), context.weights, context.weights.moved)
        verify_plan(plan)  # again: only now do in-place loops have their real bodies
        check_kernels(plan)
        context.emitted = Emitted(plan, _source(plan, context))


def _source(plan: Plan, context: QCContext) -> str:
    """The text of the program's kernels for the target. KernelSelectionError for a kind of target without an emitter.

    The kernels are emitted for the other instruction sets of the target, too. So an instruction set that cannot have
    them is an error now, and not when the program is saved.
    """
    kind, isa = context.target.kind, context.target.isa
    if kind == "cpu":
        for other in context.target.others:
            for spec in plan.kernels:
                emit_kernel(spec, other)
        return emit_program(plan, isa)
    if kind != "cuda":
        raise KernelSelectionError(f"there is no emitter for target '{kind}'; there are emitters for cpu and cuda")
    for each in context.target.isas:
        for spec in plan.kernels:
            _report_launch(spec, each, context)
    return cuda.emit_program(plan, isa)


def _report_launch(spec: KernelSpec, arch: str, context: QCContext) -> None:
    kernel = cuda.emit_kernel(spec, arch)
    launch = kernel.geometry
    grid, block = ("x".join(str(extent) for extent in extents) for extents in (launch.grid, launch.block))
    where = f" on {arch}" if context.target.others else ""
    what = f"{spec.name}{where}: {kernel.engine}, grid {grid}, block {block}, {launch.shared} bytes shared"
    context.report.add("emit-kernels", spec.serves, what, "; ".join(kernel.notes))


def kernel_specs(module: ModuleOp) -> dict[str, KernelSpec]:
    """The spec of every `rt.kernel` of a module, by name."""
    specs: dict[str, KernelSpec] = {}
    for op in module.body.block.ops:
        if isinstance(op, rt.KernelOp) and op.body is not None:
            specs[op.sym] = spec_of(op.sym, op.symbol_names, op.operand_records, op.body.block, op.serves_text)
    return specs
