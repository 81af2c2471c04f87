"""`qc opt`: passes over IR text, for people and for filecheck tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qcompiler.errors import ArgumentError
from qcompiler.ir.context import QCContext
from qcompiler.ir.reading import applying
from qcompiler.ir.text import parse_module, print_for_mlir, print_module
from qcompiler.passes.pipeline import ALL_PASSES
from qcompiler.passes.support.reproducer import read_context


def run_passes(
    text: str,
    names: Sequence[str],
    syntax: str = "pretty",
    context_file: str | Path | None = None,
    *,
    where: str = "<input>",
) -> str:
    """Parses, verifies, runs the passes in order (verifying after each), prints.

    QCompilerError with the place in the text, or ArgumentError for a pass that there is not, say what is wrong.

    `context_file` holds weights, target and buckets, as a reproducer left them (passes/support/reproducer.py).
    `where` is the text's name in messages.
    """
    module = parse_module(text, name=where)
    context = QCContext.default() if context_file is None else read_context(Path(context_file))
    for name in names:
        if name not in ALL_PASSES:
            raise ArgumentError(f"no pass '{name}'; the passes are: {', '.join(sorted(ALL_PASSES))}")
        with applying(name):
            ALL_PASSES[name]()().apply(context, module)
            module.verify()
    return print_for_mlir(module) if syntax == "mlir" else print_module(module, generic=syntax == "generic")


def list_passes() -> str:
    """Every pass with the first line of its module's docstring."""
    lines = []
    for name in sorted(ALL_PASSES):
        documentation = (ALL_PASSES[name]().__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{name:28} {documentation}")
    return "\n".join(lines)
