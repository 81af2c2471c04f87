"""A generated graph: inputs, parameters and statements with their types, and its text as a torch module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphfuzz.sizes import RANGES, Shape, Size

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
FLOATS = ("float32", "bfloat16", "float16", "float64")
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place at 1: what one rounding may change, relatively."""
SMALLEST = {"float64": 1e-300, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}
"""What one rounding may change absolutely, near zero."""


@dataclass(frozen=True)
class Type:
    dtype: str
    shape: Shape

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Leaf:
    """A value that comes from outside: an input `x0`, a parameter `self.p0`, or a buffer that is written, `self.s0`.

    `fill` names a distribution of `values.make`, `seed` what it is drawn with.
    """

    name: str
    type: Type
    fill: str
    seed: int

    @property
    def is_input(self) -> bool:
        return not self.name.startswith("self.")

    @property
    def attribute(self) -> str:
        return self.name.removeprefix("self.")


@dataclass(frozen=True)
class Statement:
    """`names = text`. Without names: a write into a buffer.

    `exact` says that every implementation gives these very bits, if its operands are exact.
    """

    names: tuple[str, ...]
    text: str
    operands: tuple[str, ...]
    types: tuple[Type, ...]
    rule: str
    exact: bool
    coarse: bool = False
    """Whether eager torch rounds to the operands' own type inside."""

    def line(self) -> str:
        left = ", ".join(self.names) + ("," if self.text.startswith("(*") else "")
        return f"{left} = {self.text}" if self.names else self.text


@dataclass(frozen=True)
class Graph:
    leaves: tuple[Leaf, ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    quant: tuple[tuple[str, str], ...] = ()
    """Attribute of a parameter -> the format that it is stored in."""
    special: bool = False
    """Whether inputs hold infinities, NaN, signed zeros and subnormal numbers."""
    symbols: tuple[str, ...] = field(default=())
    """Which symbols are dynamic; the others have their size in the text already."""

    @property
    def inputs(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_input)

    @property
    def attributes(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if not leaf.is_input)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(s.operands[0] for s in self.statements if not s.names)

    def types(self) -> dict[str, Type]:
        found = {leaf.name: leaf.type for leaf in self.leaves}
        for statement in self.statements:
            found.update(zip(statement.names, statement.types, strict=True))
        return found

    def without_dead_code(self) -> Graph:
        """Statements and leaves that no output needs are dropped; an input that tells a symbol's size stays."""
        needed = {*self.outputs}
        kept: list[Statement] = []
        for statement in reversed(self.statements):
            if not statement.names or needed.intersection(statement.names):
                needed.update(statement.operands)
                kept.append(statement)
        used = symbols_in(statement.text for statement in kept)
        leaves: list[Leaf] = []
        for leaf in self.leaves:
            told = {str(size) for size in leaf.type.shape} & used
            if leaf.name in needed or (leaf.is_input and told):
                used -= told if leaf.is_input else set()
                leaves.append(leaf)
        quant = tuple((a, f) for a, f in self.quant if any(leaf.attribute == a for leaf in leaves))
        return replace(self, leaves=tuple(leaves), statements=tuple(reversed(kept)), quant=quant)

    def source(self, name: str = "Graph") -> str:
        """The text of an nn.Module. Symbols that statements use are read off the inputs' shapes."""
        used = symbols_in(statement.text for statement in self.statements)
        lines = [f"class {name}(torch.nn.Module):"]
        if self.attributes:
            lines += ["    def __init__(self) -> None:", "        super().__init__()"]
            lines += [f"        {line}" for line in self._attribute_lines()]
            lines.append("")
        arguments = ", ".join(f"{leaf.name}: torch.Tensor" for leaf in self.inputs)
        lines.append(f"    def forward(self, {arguments}) -> tuple[torch.Tensor, ...]:")
        for symbol in RANGES:
            if symbol in used:
                lines.append(f"        {symbol} = {self._place_of(symbol)}")
        lines += [f"        {statement.line()}" for statement in self.statements]
        lines.append(f"        return ({', '.join(self.outputs)},)")
        return "\n".join(lines) + "\n"

    def _attribute_lines(self) -> Iterable[str]:
        written = set(self.states)
        for leaf in self.attributes:
            shape = ", ".join(str(size) for size in leaf.type.shape) + ("," if leaf.type.rank == 1 else "")
            value = f'make("{leaf.fill}", torch.{leaf.type.dtype}, ({shape}), {leaf.seed})'
            if leaf.type.is_float and leaf.attribute.startswith("p") and leaf.name not in written:
                yield f"{leaf.name} = torch.nn.Parameter({value})"
            else:
                yield f'self.register_buffer("{leaf.attribute}", {value})'

    def _place_of(self, symbol: str) -> str:
        wanted = Size.of(symbol)
        for leaf in self.inputs:
            for axis, size in enumerate(leaf.type.shape):
                if size == wanted:
                    return f"{leaf.name}.shape[{axis}]"
        raise ValueError(f"no input has a dimension '{symbol}'")

    def dynamic_shapes(self) -> tuple[dict[int, tuple[str, int, int]], ...]:
        """For each input the dims that are symbols, as `qcompile` takes them."""
        specs = []
        for leaf in self.inputs:
            dims = {axis: str(size) for axis, size in enumerate(leaf.type.shape) if not size.is_static}
            specs.append({axis: (name, *RANGES[name]) for axis, name in dims.items()})
        return tuple(specs)


_SYMBOL = re.compile(rf"\b({'|'.join(RANGES)})\b")


def symbols_in(texts: Iterable[str]) -> set[str]:
    return {found for text in texts for found in _SYMBOL.findall(text)}


def rename(text: str, names: Mapping[str, str]) -> str:
    """The text with values replaced; names are whole words."""
    if not names:
        return text
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({pattern})\b", lambda m: names[m.group()], text)


def build_module(graph: Graph, file: str = "graph.py") -> torch.nn.Module:
    """The module of a graph's text, as if it stood in `file`: tracebacks and error messages show its lines."""
    return module_of(graph.source(), "Graph", file)


def module_of(source: str, name: str, place: str) -> torch.nn.Module:
    import linecache

    from graphfuzz.values import make

    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "make": make}
    exec(compile(source, place, "exec"), space)
    made: torch.nn.Module = space[name]()
    return made.eval()


def count_types(graphs: Sequence[Graph]) -> dict[str, int]:
    """How many values of each dtype."""
    found: dict[str, int] = {}
    for graph in graphs:
        for type_ in graph.types().values():
            found[type_.dtype] = found.get(type_.dtype, 0) + 1
    return found
