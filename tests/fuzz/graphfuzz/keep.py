"""Graphs as text that stays: a failing one is written as a Python file, and read back for every later run.

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    x1="float32[b, 3] normal 17",
    statements=[rounds("v2 = torch.cosh(x1)", "float32[b, 3]")],
    outputs="v2",
)
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphfuzz.graphs import Graph, Leaf, Statement, Type
from graphfuzz.sizes import RANGES, Size

KEPT = Path(__file__).parents[1] / "kept"


def parse_type(text: str) -> Type:
    """`float32[b, 2*s, 3]`"""
    dtype, _, rest = text.partition("[")
    sizes = [part.strip() for part in _split(rest.removesuffix("]"))]
    return Type(dtype, tuple(parse_size(size) for size in sizes if size))


def parse_size(text: str) -> Size:
    """A sum of products of numbers, symbols and bracketed expressions."""
    total = Size.of(0)
    for term in _split(text, "+"):
        product = Size.of(1)
        for factor in _split(term, "*"):
            word = factor.strip()
            product = product * (Size.of(int(word)) if re.fullmatch(r"-?\d+", word) else Size.of(word))
        total = total + product
    return total


def _split(text: str, separator: str = ",") -> list[str]:
    """Parts between separators that stand in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def moves(line: str, types: str, *, rule: str = "kept") -> Statement:
    """A statement that gives exact values from exact ones."""
    return _statement(line, types, rule, exact=True)


def rounds(line: str, types: str, *, coarse: bool = False, rule: str = "kept") -> Statement:
    return _statement(line, types, rule, exact=False, coarse=coarse)


def _statement(line: str, types: str, rule: str, *, exact: bool, coarse: bool = False) -> Statement:
    left, _, text = line.partition(" = ") if re.match(r"[v\d, ]+ = ", line) else ("", "", line)
    names = tuple(name.strip() for name in left.split(",") if name.strip())
    found = tuple(dict.fromkeys(re.findall(r"\bself\.\w+|\b[xv]\d+\b", text)))
    return Statement(names, text, found, tuple(parse_type(t) for t in types.split(";") if t), rule, exact, coarse)


def graph(
    leaves: dict[str, str],
    statements: Sequence[Statement],
    outputs: str,
    *,
    quant: dict[str, str] | None = None,
    special: bool = False,
) -> Graph:
    """`leaves` maps a name to "type; fill; seed"."""
    made = []
    for name, text in leaves.items():
        type_, fill, seed = (part.strip() for part in text.split(";"))
        made.append(Leaf(name, parse_type(type_), fill, int(seed)))
    names = tuple(name.strip() for name in outputs.split(","))
    return Graph(tuple(made), tuple(statements), names, tuple((quant or {}).items()), special)


def text_of_graph(kept: Graph, story: str) -> str:
    """The file of a graph; `story` says what was wrong with it."""
    lines = [f'"""{story.strip()}', "", *(f"    {line}" for line in kept.source().splitlines()), '"""', ""]
    used = sorted({"moves" if s.exact else "rounds" for s in kept.statements})
    lines += [f"from graphfuzz.keep import {', '.join(['graph', *used])}", "", "GRAPH = graph(", "    {"]
    lines += [f'        "{leaf.name}": "{leaf.type}; {leaf.fill}; {leaf.seed}",' for leaf in kept.leaves]
    lines += ["    },", "    ["]
    for statement in kept.statements:
        kind = "moves" if statement.exact else "rounds"
        coarse = ", coarse=True" if statement.coarse and not statement.exact else ""
        types = ";".join(map(str, statement.types))
        lines.append(f"        {kind}({quoted(statement.line())}, {quoted(types)}{coarse}),")
    lines += ["    ],", f"    {quoted(', '.join(kept.outputs))},"]
    if kept.quant:
        lines.append(f"    quant={dict(kept.quant)!r},")
    if kept.special:
        lines.append("    special=True,")
    return "\n".join([*lines, ")", ""])


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read(path: Path) -> Graph:
    """The graph of a kept file."""
    spec = importlib.util.spec_from_file_location(f"graphfuzz_kept_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Graph = module.GRAPH
    return found


def kept_files(folder: Path = KEPT) -> list[Path]:
    return sorted(folder.glob("*.py"))


__all__ = ["KEPT", "RANGES", "graph", "kept_files", "moves", "read", "rounds", "text_of_graph"]
