"""The parts of `qc inspect` that show a program's stages, its ledger and its kernels, as text or as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qcompiler.errors import ArgumentError
from qcompiler.inspect.files import kernels_of, kernels_text, ledger_of
from qcompiler.inspect.stage_texts import StageTexts, difference, ops_text, read_stages
from qcompiler.inspect.terminal import show
from qcompiler.units import printable


def show_stages(options: argparse.Namespace) -> None:
    """`--stage`, `--diff` and `--op`."""
    if options.op is not None and (options.ledger or options.kernels or options.plan or options.timeline):
        raise ArgumentError("--op searches the texts of stages: give it alone, with --stage or with --diff")
    texts = read_stages(options.program)
    if options.diff is not None:
        _show_difference(texts, options)
    elif options.op is not None:
        found = texts.matching(options.op, options.stage)
        if options.json:
            show(json.dumps([op.as_dict() for ops in found.values() for op in ops], indent=1))
            return
        if not any(found.values()):
            where = f"after {options.stage}" if options.stage is not None else "in any stage"
            raise ArgumentError(f"--op {options.op.pattern}: no op of {texts.where} matches {where}")
        one = options.stage is not None
        show("\n".join(op.text for ops in found.values() for op in ops) if one else ops_text(found), "ir")
    elif options.json:
        show(json.dumps({"stage": options.stage, "text": texts.text(options.stage)}, indent=1))
    else:
        show(texts.text(options.stage).removesuffix("\n"), "ir")


def _show_difference(texts: StageTexts, options: argparse.Namespace) -> None:
    """Of whole texts, or of the ops in them that match."""
    first, second = options.diff
    sides = [texts.text(stage) for stage in options.diff]
    if options.op is not None:
        sides = ["\n".join(op.text for op in texts.matching(options.op, stage)[stage]) for stage in options.diff]
        if not any(sides):
            raise ArgumentError(f"--op {options.op.pattern}: no op of {texts.where} matches after {first} or {second}")
    found = difference(sides[0], sides[1])
    if options.json:
        show(json.dumps({"first": first, "second": second, **found.as_dict()}, indent=1))
    else:
        show(found.text(first, second), "diff")


def show_ledger(program: Path, *, as_json: bool) -> None:
    ledger = ledger_of(program)
    show(ledger.to_json() if as_json else printable(str(ledger)))


def show_kernels(program: Path, *, as_json: bool) -> None:
    kernels = kernels_of(program)
    show(json.dumps(kernels, indent=1) if as_json else kernels_text(kernels))


__all__ = ["show_kernels", "show_ledger", "show_stages"]
