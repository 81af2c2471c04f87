"""What is reduced: a module, the passes that run on it, and their context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.inspect.opt import Job, apply_passes
from qcompiler.ir.context import QCContext
from qcompiler.passes.checks.reproducer import Samples
from qcompiler.passes.pipeline import VerifyEach


@dataclass(frozen=True)
class Case:
    """`context` is None where the passes fail without weights, too. A case is never changed where it was
    made, only replaced."""

    module: ModuleOp
    passes: tuple[ModulePass, ...]
    context: QCContext | None = None
    samples: Samples | None = None
    verify_each: VerifyEach | None = None

    @property
    def size(self) -> int:
        """Ops of the module, those in regions included, without the module itself."""
        return sum(1 for _ in self.module.walk()) - 1

    def of(self, module: ModuleOp) -> Case:
        return replace(self, module=module)

    def run(self, begins: Callable[[str], None]) -> None:
        """Verifies the module and runs the passes on it, in a child process; `begins` is called with the name of each
        pass. Raises what fails."""
        job = Job(self.module, QCContext.default() if self.context is None else self.context, self.samples)
        job.module.verify()
        apply_passes(job, self.passes, self.verify_each, begins=begins)


__all__ = ["Case"]
