"""Runs the compiler's stages again on an imported module, and the module after each in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp

from qcompiler.ir.context import QCContext, Report
from qcompiler.ir.text import parse_module, print_module
from qcompiler.passes.checks.answers import answers
from qcompiler.passes.pipeline import STAGES, run_pipeline, with_options
from qcompiler.runtime.progress import Counted

Array = npt.NDArray[Any]
Answers = Mapping[str, Sequence[Array]]
See = Callable[[str, Answers], None]


@dataclass(frozen=True)
class StagesAgain:
    """The stages of one compile, to be run again: on the text after the import, with the weights and the options that
    it had. `context` is as it was before the first pass."""

    context: QCContext
    options: Mapping[str, Mapping[str, object]]

    def run(self, text: str, inputs: Sequence[Array], states: Mapping[str, Array], see: See) -> None:
        """Calls `see` with the results of the imported module, as "import", and after each stage that changed it.

        Raises the errors of the interpreter, and QCompilerError if no entry point takes inputs of these shapes.
        """
        module, context = parse_module(text), self.context.clone()
        context.report = Report()  # the decisions were reported when the program was compiled
        last = print_module(module)
        with Counted("running the program after each stage", len(STAGES), "stages") as progress:

            def on_stage(name: str, current: ModuleOp, _seconds: float, changed: bool) -> None:
                nonlocal last
                before, last = last, print_module(current) if changed else last
                if last != before and context.emitted is None:  # `changed` is always true of the first stage
                    see(name, answers(current, context, inputs, states))
                progress.step(1)

            see("import", answers(module, context, inputs, states))
            run_pipeline(module, context, stages=with_options(STAGES, self.options), on_stage=on_stage)


__all__ = ["Answers", "StagesAgain"]
