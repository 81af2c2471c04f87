"""`qc opt`: passes over IR text, for users and for filecheck tests."""

from __future__ import annotations

from pathlib import Path

from qcompiler.ir.context import QCContext
from qcompiler.ir.reading import applying
from qcompiler.ir.text import parse_module, print_for_mlir, print_module
from qcompiler.passes.checks.reproducer import read_context
from qcompiler.passes.pipeline import ALL_PASSES, parse_passes


def run_passes(
    text: str,
    passes: str,
    syntax: str = "pretty",
    context_file: str | Path | None = None,
    *,
    where: str = "<input>",
) -> str:
    """Parses, verifies, runs the passes in order (verifying after each), prints.

    `passes` names them as xDSL does, `canonicalize,assign-streams{compute-streams=4}`.  Raises QCompilerError with the
    position in the text, and ArgumentError for a pass or an option that does not exist.

    `context_file` holds weights and target, as written with a reproducer (passes/checks/reproducer.py).
    `where` is the text's name in messages.
    """
    module = parse_module(text, name=where)
    context = QCContext.default() if context_file is None else read_context(Path(context_file))
    for each in parse_passes(passes):
        with applying(each.name):
            each.apply(context, module)
            module.verify()
    return print_for_mlir(module) if syntax == "mlir" else print_module(module, generic=syntax == "generic")


def list_passes() -> str:
    """Every pass with the first line of its docstring."""
    lines = []
    for name in sorted(ALL_PASSES):
        documentation = (ALL_PASSES[name]().__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{name:28} {documentation}")
    return "\n".join(lines)
