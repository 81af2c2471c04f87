"""The table of kernels of one program: equal drafts share one `rt.kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import msgspec
from xdsl.ir import Operation, Region, SSAValue
from xdsl.printer import Printer

from qcompiler.ir import rt
from qcompiler.passes.lowering.drafts import Draft
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import Operand


class KernelTable:
    """Gives each draft a kernel name. Drafts with equal operands and an equal text of their ops share a kernel."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._ops: list[rt.KernelOp] = []
        self._stems: dict[str, int] = {}
        self.launches = 0

    def name(self, draft: Draft) -> str:
        """The name of a draft's kernel. A new kernel is added on first use."""
        self.launches += 1
        for op in draft.body.ops:
            _strip(op)
        key = _identity(draft)
        if key not in self._names:
            number = self._stems.get(draft.stem, 0)
            self._stems[draft.stem] = number + 1
            self._names[key] = f"{draft.stem}_{number}"
            self._ops.append(_kernel_op(self._names[key], draft))
        return self._names[key]

    def ops(self) -> Sequence[rt.KernelOp]:
        return self._ops


def _strip(op: Operation) -> None:
    """Removes module paths and devices, which are not part of a kernel's identity."""
    for name in ("qc.path", "qc.device"):
        op.attributes.pop(name, None)


def _identity(draft: Draft) -> str:
    text = StringIO()
    printer = Printer(stream=text, print_generic_format=True)
    for argument in draft.body.args:
        printer.print_ssa_value(argument)
    for op in draft.body.ops:
        printer.print_op(op)
    operands = msgspec.json.encode(draft.operands, order="deterministic").decode()
    return f"{operands}\n{text.getvalue()}"


def _kernel_op(name: str, draft: Draft) -> rt.KernelOp:
    last = draft.body.last_op
    assert last is not None
    written: Sequence[SSAValue] = draft.written or last.results
    draft.body.add_op(rt.YieldOp(*written))
    return rt.KernelOp(name, symbols_of(draft.operands), draft.operands, Region(draft.body), draft.path)


def symbols_of(operands: Sequence[Operand]) -> list[str]:
    """Every symbol in the operands' shapes and strides, sorted: the run-time arguments of the kernel."""
    found: set[str] = set()
    for operand in operands:
        for entry in (*operand.shape, *operand.strides):
            found |= dim(entry).symbols()
    return sorted(found)
