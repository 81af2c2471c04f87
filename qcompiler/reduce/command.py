"""`qc reduce`: reads a failing IR and how to run it, reduces it, and writes a test file."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from qcompiler.errors import ArgumentError
from qcompiler.inspect.opt import read_job, read_text
from qcompiler.inspect.sample_inputs import samples_for
from qcompiler.ir.text import print_module
from qcompiler.passes.checks.reproducer import write_context
from qcompiler.passes.pipeline import VerifyEach, parse_passes
from qcompiler.reduce.case import Case
from qcompiler.reduce.failure import observe
from qcompiler.reduce.reducer import Reducer
from qcompiler.runtime.files import replacing

INTERRUPTED = 130

_RUN = re.compile(r"^// RUN: (?:not )?qc opt (.*?)(?: 2>&1)?(?: \|.*)?$")


_AS_A_GOLDEN = (
    "// As PASS.CASE.mlir in tests/filecheck/passes this fails until the bug is mended; --update-goldens then writes",
    "// the CHECK lines.",
)


@dataclass(frozen=True)
class _Run:
    """The arguments of `qc opt` that a file's RUN line names, or the user."""

    passes: str
    context: Path | None
    verify_each: str | None


def reduce(options: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if the text of the result does not fail as it did in memory, 130 after Ctrl-C."""
    source: Path = options.file
    text = read_text(str(source))
    run = _run_of(text, source, options)
    job = read_job(text, run.context, where=str(source))
    mode: VerifyEach | None = "numerics" if run.verify_each == "numerics" else None
    context = job.context if run.context is not None else None
    case = Case(job.module, tuple(parse_passes(run.passes)), context, job.samples, mode)
    reducer = Reducer.of(case, options.timeout)
    output = options.output or Path(f"{(reducer.best.passes or case.passes)[-1].name}.reduced.mlir")
    print(f"qc: {reducer.failure}", file=sys.stderr)
    try:
        reducer.reduce()
        status = 0
    except KeyboardInterrupt:
        print("\nqc: interrupted; the smallest so far is kept", file=sys.stderr)
        status = INTERRUPTED
    written = _write(reducer, output)
    print(f"qc: {reducer.summary()}", file=sys.stderr)
    print(f"wrote {' and '.join(map(str, written))}", file=sys.stderr)
    return status or _check(reducer, written)


def _run_of(text: str, source: Path, options: argparse.Namespace) -> _Run:
    """The passes, the context and the check: those of the command line, else those of the file's RUN line."""
    parser = argparse.ArgumentParser(prog="RUN", exit_on_error=False, add_help=False)
    parser.add_argument("-p", "--passes", action="append", default=[])
    parser.add_argument("--context")
    parser.add_argument("--verify-each", choices=("ir", "numerics"))
    found = next((each for each in map(_RUN.match, text.splitlines()[:1]) if each is not None), None)
    try:
        words = shlex.split(found[1]) if found is not None else []
        said, _ = parser.parse_known_args([_in_place(word, source) for word in words])
    except (ValueError, argparse.ArgumentError) as error:  # ValueError: a quote without its end
        raise ArgumentError(f"{source}: the RUN line in its first line cannot be read: {error}") from error
    passes = options.passes or ",".join(said.passes)
    if not passes:
        raise ArgumentError(
            f"{source} does not say which passes fail: its first line is no '// RUN: qc opt -p …'; name them with -p"
        )
    context = options.context or (Path(said.context) if said.context else None)
    return _Run(passes, context, options.verify_each or said.verify_each)


def _in_place(word: str, source: Path) -> str:
    """%s is the file and %S its folder, as in LLVM's lit."""
    return word.replace("%S", str(source.parent)).replace("%s", str(source))


def _write(reducer: Reducer, output: Path) -> list[Path]:
    """Writes the result as a file for tests/filecheck, and beside it the context, if the failure needs one."""
    best = reducer.best
    passes = shlex.quote(",".join(map(str, best.passes)))
    written = [output]
    run = f"qc opt -p {passes} %s | filecheck %s"
    if best.context is not None or best.verify_each is not None:
        run = f"qc opt -p {passes} %s"
    if best.context is not None:
        context = output.with_suffix(".context.safetensors")
        samples = samples_for(best.module, best.samples) if best.verify_each == "numerics" else None
        temporary = context.with_suffix(".part")
        try:
            write_context(best.context, temporary, samples)
            temporary.replace(context)
        finally:
            temporary.unlink(missing_ok=True)
        run += f" --context %S/{shlex.quote(context.name)}"
        written.append(context)
    run += " --verify-each numerics" if best.verify_each == "numerics" else ""
    lines = [
        f"// RUN: {run}",
        f"// {reducer.failure}",
        f"// Reduced by `qc reduce`: {reducer.summary().partition(';')[0]}.",
        *(_AS_A_GOLDEN if len(written) == 1 and best.verify_each is None else ()),
        print_module(best.module),
    ]
    with replacing(output) as file:
        file.write("\n".join(lines).encode())
    return written


def _check(reducer: Reducer, written: list[Path]) -> int:
    """Whether the result fails from its text, too."""
    text = written[0].read_text(encoding="utf-8")
    job = read_job(text, written[1] if len(written) > 1 else None, where=str(written[0]))
    best = reducer.best
    context = job.context if best.context is not None else None
    again = observe(replace(best, module=job.module, context=context, samples=job.samples), reducer.seconds)
    if again == reducer.failure:
        return 0
    print(f"qc: read back from its text it does not fail in the same way: {again or 'no failure'}", file=sys.stderr)
    return 1


__all__ = ["reduce"]
