"""`qc opt`: passes over IR text, for users and for filecheck tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import ArgumentError, NumericsError
from qcompiler.inspect.dumps import StageDumps
from qcompiler.inspect.sample_inputs import samples_for
from qcompiler.ir.context import QCContext
from qcompiler.ir.reading import applying
from qcompiler.ir.text import parse_module, print_for_mlir, print_module
from qcompiler.passes.checks.reproducer import Samples, read_all
from qcompiler.passes.pipeline import ALL_PASSES, NumericsCheck, VerifyEach, parse_passes


@dataclass(frozen=True)
class Job:
    """What passes run on: the module, its context, and the samples that a reproducer of a wrong answer holds."""

    module: ModuleOp
    context: QCContext
    samples: Samples | None = None


def read_text(file: str) -> str:
    """The text of a file, or of stdin for "-". ArgumentError for what cannot be read as text."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, a NUL in the name
        raise ArgumentError(f"cannot read '{file}': {error}") from error


def read_job(text: str, context_file: str | Path | None = None, *, where: str = "<input>") -> Job:
    """Parses and verifies. Raises QCompilerError with the position in the text.

    `context_file` holds weights and target, as written with a reproducer (passes/checks/reproducer.py).
    `where` is the text's name in messages.
    """
    module = parse_module(text, name=where)
    context, samples = (QCContext.default(), None) if context_file is None else read_all(Path(context_file))
    return Job(module, context, samples)


def apply_passes(
    job: Job,
    passes: Sequence[ModulePass],
    verify_each: VerifyEach | None = None,
    dumps: StageDumps | None = None,
    begins: Callable[[str], None] | None = None,
) -> None:
    """Runs the passes in order on the module, and verifies it after each. `begins` is called with each one's name.

    `verify_each="numerics"` also compares the program's results before and after each pass, on the job's samples or
    on random ones.  NumericsError names the first pass that changed them by more than it declares.
    """
    check = None
    if verify_each == "numerics":
        samples = samples_for(job.module, job.samples)
        check = NumericsCheck(job.module, job.context, samples.inputs, samples.states)
    for each in passes:
        if begins is not None:
            begins(each.name)
        began = time.perf_counter()
        with applying(each.name):
            each.apply(job.context, job.module)
            seconds = time.perf_counter() - began
            job.module.verify()
        if dumps is not None:
            dumps.add(each.name, print_module(job.module), seconds)
        found = None if check is None else check.after(each, job.module, job.context)
        if found is not None:
            raise NumericsError(f"the pass {each.name} changed the program's answer: {found}", stage=each.name)


def run_passes(
    text: str,
    passes: str,
    syntax: str = "pretty",
    context_file: str | Path | None = None,
    *,
    where: str = "<input>",
    verify_each: VerifyEach | None = None,
    dumps: StageDumps | None = None,
) -> str:
    """Parses, verifies, runs the passes in order (verifying after each), prints.

    `passes` names them as xDSL does, `canonicalize,assign-streams{compute-streams=4}`.  Raises QCompilerError with the
    position in the text, and ArgumentError for a pass or an option that does not exist.  `dumps` gets the text after
    each pass.
    """
    job = read_job(text, context_file, where=where)
    apply_passes(job, parse_passes(passes), verify_each, dumps)
    return print_for_mlir(job.module) if syntax == "mlir" else print_module(job.module, generic=syntax == "generic")


def list_passes() -> str:
    """Every pass with the first line of its docstring."""
    lines = []
    for name in sorted(ALL_PASSES):
        documentation = (ALL_PASSES[name]().__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{name:28} {documentation}")
    return "\n".join(lines)
