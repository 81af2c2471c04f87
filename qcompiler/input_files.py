"""The inputs of a program from files, for `qc run` and `qc inspect --error`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qcompiler.plan.plan import Plan, Signature
from qcompiler.runtime.array_files import read_arrays
from qcompiler.runtime.tree import arguments_of


def read_inputs(texts: Sequence[str | Path]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments from files: `x.npy` by position, `name=x.npy` by name, and all arrays of `x.npz` by theirs.

    The name ends at the first `=`. A text that is the name of a file has none (`lr=0.1/x.npy`), nor has a Path.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for text in texts:
        name, path = _named(text) if isinstance(text, str) else ("", text)
        value = read_arrays(path)
        if isinstance(value, dict):
            kwargs.update(value)
        elif name:
            kwargs[name] = value
        else:
            args.append(value)
    return args, kwargs


def _named(text: str) -> tuple[str, Path]:
    name, mark, path = text.partition("=")
    return (name, Path(path)) if mark and not Path(text).exists() else ("", Path(text))


def by_structure(
    plan: Plan, signature: Signature, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Arguments that are given by the names of single tensors, as `qc inspect` lists them for an entry point.

    A command line can give the parts of a tuple or a dict only in this way.
    """
    names = [sig.name for sig in plan.entries[0].inputs]
    if args or set(kwargs) != set(names):
        return args, kwargs
    return arguments_of(signature.inputs, [kwargs[name] for name in names])


__all__ = ["by_structure", "read_inputs"]
