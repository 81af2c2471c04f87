"""The generator: from choices to a graph; as a hypothesis strategy, and from a plain seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any

from graphfuzz import rules_blocks, rules_index, rules_nn, rules_pointwise, rules_reduce, rules_views  # noqa: F401  (they register)
from graphfuzz.builder import Builder, Impossible, Limits
from graphfuzz.draws import Drawn, Draws, Seeded
from graphfuzz.graphs import Graph, Type
from graphfuzz.rules import RULES
from graphfuzz.sizes import RANGES

Sizes = Mapping[str, int]

PROFILES: dict[str, tuple[int, Limits]] = {
    "float": (30, Limits(("float32", "bool", "int64"), 9)),
    "bf16": (14, Limits(("bfloat16", "float32", "bool", "int64"), 9)),
    "fp16": (10, Limits(("float16", "float32", "bool"), 9)),
    "mixed": (12, Limits(("float32", "bfloat16", "float16", "int64", "int32", "bool"), 9)),
    "integers": (10, Limits(("int64", "int32", "int16", "int8", "uint8", "bool", "float32"), 9)),
    "quantised": (12, Limits(("float32", "bfloat16", "float16", "int64", "bool"), 7, quantised=True)),
    "special": (6, Limits(("float32", "float16", "bfloat16", "bool"), 5, special=True)),
    "empty": (4, Limits(("float32", "int64", "bool"), 6, empty=True)),
    "double": (2, Limits(("float64", "float32", "int64"), 6)),
    "blocks": (0, Limits(("float32", "bfloat16", "float32"), 24, quantised=True, blocks=True)),
}
"""Kinds of graphs, and how often each is made where none is asked for."""


def sizes_of(seed: int) -> tuple[Sizes, Sizes, Sizes]:
    """The sizes at which the graphs of a seed are compared: smallest, largest, and one between."""
    source = random.Random(seed)
    low, high = ({name: bounds[i] for name, bounds in RANGES.items()} for i in (0, 1))
    return low, high, {name: source.randint(*bounds) for name, bounds in RANGES.items()}


def build(source: Draws, sizes: tuple[Sizes, ...], seed: int, profile: str | None = None) -> Graph:
    """A graph from choices; `seed` decides the values of inputs, not the structure."""
    if profile is None:
        names = [name for name, (weight, _) in PROFILES.items() for _ in range(weight)]
        profile = names[source.integer(0, len(names) - 1)]
    limits = PROFILES[profile][1]
    b = Builder(source, limits, sizes, seed)
    while not limits.blocks and (len(b.leaves) < 1 or (len(b.leaves) < 2 and b.chance(50))):
        shape = b.random_shape(b.choose((2, 3, 3, 1, 4, 0)))
        with contextlib.suppress(Impossible):  # too large
            b.leaf(Type(b.choose(limits.dtypes) if b.chance(30) else b.float_dtype(), shape))
    rules = rules_blocks.BLOCKS if limits.blocks else RULES
    table = [(name, function) for name, (weight, function) in rules.items() for _ in range(weight)]
    wanted, tries = b.integer(2, limits.statements), 0
    while len(b.statements) < wanted and tries < 60:
        tries += 1
        name, function = b.choose(table)
        b.rule = name
        try:
            function(b)
        except Impossible:
            continue
    if not b.statements:
        b.rule = "unary"
        x = b.leaf(Type("float32", b.random_shape(2)), "normal")
        b.emit(f"torch.tanh({x})", [x], b.shape(x), "float32")
    return b.graph()


def graph_of(seed: int, sizes: tuple[Sizes, ...], profile: str | None = None) -> Graph:
    """The graph of a plain seed."""
    return build(Seeded(seed), sizes, seed % 100_003, profile)


def graphs(sizes: tuple[Sizes, ...]) -> Any:
    """A hypothesis strategy of graphs whose values mean something at all of `sizes`."""
    from hypothesis import strategies as st

    @st.composite
    def one(draw: Callable[[Any], Any]) -> Graph:
        source = Drawn(draw)
        return build(source, sizes, source.integer(0, 100_002))

    return one()
