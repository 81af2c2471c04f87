"""Writes docs/operators.md from the table of builders: `make docs`.

The page's contents are read from the builders' code: the `qc` ops that a builder names, whether it builds loops, and
the cases that it refuses.  So the page cannot promise more than the code does.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import operator
import sys
import textwrap
import types as pytypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture.decompose import ALSO
from qcompiler.ir import qc
from qcompiler.kernels.select import FLOATS, templates
from qcompiler.passes.lowering.kinds import FLOAT_ONLY, TEMPLATES

_FAMILIES = {builder.__module__ for builder in BUILDERS.values()}
_LOOPS = {"pointwise", "unary", "fold", "reduce", "iota", "full", "generic", "fill", "cast", "reduce_windows"}
_HEADER = """\
# Operators

Generated from the importer's own tables by `make docs`. Do not edit: a test compares this page with the tables, and
another one demands a test case for every operator on it.

`qc doctor --model` lists the operators of a model that do not lower. An operator that is not listed here is first
decomposed by torch's core ATen table (losses, `var`, `std`, `einsum`, recurrent cells and several hundred more). What
remains and is not listed is an `UnsupportedOperatorError` that names it and its module path.

* *Lowers to*: `loops` are loop nests (`linalg.generic`), which fuse; `qc.…` are ops with kernels of their own, possibly
  one of several; `view` moves no data.
* *Types*: `all` are f64, f32, bf16, f16, i64, i32, i16, i8, ui8 and bool, if torch accepts them. `floats` are f32,
  bf16 and f16: the kernels accumulate in fp32.
* Dimensions may be dynamic unless a limit says otherwise. Sizes that depend on values (`nonzero`, `masked_select`,
  `unique`, `x[mask]`) cannot be compiled: use a mask, `torch.where` or a fixed maximum. Pass random numbers in.
* Operators run on the CPU and on CUDA alike, except where a limit names a device.
"""


@dataclass(frozen=True)
class Row:
    """One line of the page: overloads of one operator that share a builder."""

    name: str
    overloads: tuple[str, ...]
    lowers: tuple[str, ...]
    dtypes: str
    notes: str
    limits: tuple[str, ...]


def rows() -> dict[str, list[Row]]:
    """The rows by section (the builder's module), sorted by name."""
    grouped: dict[tuple[str, str, tuple[str, ...]], list[Any]] = {}
    for overload, builder in BUILDERS.items():
        if overload is operator.getitem:
            continue
        functions = tuple(_reachable(builder))
        key = (builder.__module__, _packet(overload), _lowers(functions))
        grouped.setdefault(key, []).append(overload)
    sections: dict[str, list[Row]] = {}
    for (module, name, lowers), overloads in sorted(grouped.items(), key=lambda item: item[0]):
        builder = BUILDERS[overloads[0]]
        reached = tuple(_reachable(builder))
        listed = tuple(sorted(str(each).rpartition(".")[2] for each in overloads))
        limits = tuple(dict.fromkeys(limit for each in reached for limit in _limits(each)))
        row = Row(name, listed, lowers, _dtypes(lowers), _notes(builder), (*limits, *_devices(lowers)))
        sections.setdefault(module, []).append(row)
    return sections


def _packet(overload: Any) -> str:
    return str(overload).removeprefix("aten.").rpartition(".")[0]


# --- reading code ----------------------------------------------------------------------------------------------------


def _reachable(builder: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A builder and all functions of the frontend's operator modules that it can call, each once."""
    seen: set[int] = set()
    stack: list[Any] = [builder]
    while stack:
        function = stack.pop()
        if not isinstance(function, pytypes.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if function.__module__ not in _FAMILIES:
            continue
        yield function
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        stack += [each for cell in cells for each in (cell if isinstance(cell, tuple | list) else [cell])]
        stack += [function.__globals__.get(name) for name in reversed(_names(function.__code__))]


def _names(code: pytypes.CodeType) -> list[str]:
    """Global names and attributes that a function uses, including its inner functions."""
    found = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, pytypes.CodeType):
            found += _names(constant)
    return found


def _lowers(functions: tuple[Callable[..., Any], ...]) -> tuple[str, ...]:
    names = {name for function in functions for name in _names(function.__code__)}
    ops = {getattr(qc, name).name for name in names if name.endswith("Op") and hasattr(qc, name)}
    found = sorted(ops - {"qc.const", "qc.dequantize"})
    if names & _LOOPS:
        found.append("loops")
    return tuple(found) or ("view",)


@functools.cache
def _parsed(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (SyntaxError, OSError):  # a lambda inside a table has no source text of its own
        return None


def _limits(function: Callable[..., Any]) -> Iterator[str]:
    """The texts with which a function refuses a case."""
    tree = _parsed(function)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "unsupported":
            yield _text(node.args[1])


def _text(node: ast.expr) -> str:
    """The text of a string or an f-string, with `…` for values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def _notes(builder: Callable[..., Any]) -> str:
    """The first sentence of the builder's docstring."""
    text = " ".join((inspect.getdoc(builder) or "").split("\n\n")[0].split())
    return text if text.endswith((".", "?")) or not text else text + "."


def _dtypes(lowers: tuple[str, ...]) -> str:
    """The types. Matrix products of other types are loops; the other ops of fp32 kernels have no second form."""
    heavy = {each.name for each in FLOAT_ONLY} - {qc.LinearOp.name, qc.BatchMatmulOp.name}
    return "floats" if heavy & set(lowers) else "all"


def _devices(lowers: tuple[str, ...]) -> Iterator[str]:
    """Devices without a kernel for one of the ops."""
    for kind, shown in (("cpu", "CPU"), ("cuda", "CUDA")):
        served = {each.name for each, template in TEMPLATES.items() if template in templates(kind)}
        for name in sorted(set(lowers) & {each.name for each in TEMPLATES} - served):
            yield f"{name} has no kernel on {shown}"


# --- writing ---------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The whole page."""
    parts = [_HEADER]
    for module, lines in rows().items():
        title = (inspect.getdoc(importlib.import_module(module)) or module).split("\n")[0].rstrip(".:")
        parts += [f"## {title}", "", "| operator | lowers to | types | notes and limits |", "|---|---|---|---|"]
        parts += [_line(row) for row in lines]
        parts.append("")
    parts += _recurrent()
    also = ", ".join(f"`{name.removesuffix('.default')}`" for name in ALSO)
    parts += [f"Decomposed by torch, although its core table keeps them: {also}.", ""]
    parts.append(f"Kernels for {', '.join(FLOATS)}: " + ", ".join(f"`{each.name}`" for each in FLOAT_ONLY) + ".")
    return "\n".join(parts) + "\n"


def _recurrent() -> list[str]:
    """The section of layers that become `qc.recurrent`, which are decomposed before import."""
    title = (inspect.getdoc(recurrent) or "").split(":")[0]
    lines = [f"## {title}", "", "| operator | lowers to | types | notes and limits |", "|---|---|---|---|"]
    note = (
        "Any number of layers, both directions, an LSTM's projections, batch first or not, with or without states; "
        "a dynamic length. A kernel loops over all steps of a layer"
    )
    taken = sorted(_packet(op) for op, made in recurrent.DECOMPOSITIONS.items() if made is not recurrent.refuse_packed)
    limits = ("a packed sequence", "dropout in training mode")
    lowers = ("qc.linear", "qc.recurrent", "loops")
    lines += [_line(Row(name, ("input",), lowers, _dtypes(lowers), f"{note}.", limits)) for name in taken]
    return [*lines, ""]


def _line(row: Row) -> str:
    forms = "" if row.overloads == ("default",) else f" ({', '.join(row.overloads)})"
    lowers = ", ".join(f"`{name}`" if name.startswith("qc.") else name for name in row.lowers)
    limits = " ".join(f"Not: {limit.rstrip('.')}." for limit in row.limits)
    notes = " ".join(part for part in (row.notes, limits) if part).replace("|", "\\|").replace("…[", "… [")
    return f"| `{row.name}`{forms} | {lowers} | {row.dtypes} | {notes} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
