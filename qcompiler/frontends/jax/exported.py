"""What the stages behind an export need to know of it, whoever made it: `jax.export`, or a text of MLIR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from qcompiler.config import Activations
from qcompiler.frontends.jax.graph import Graph

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Arithmetic:
    """How linears of one weight compute: the codes of x (None: x as it is), and whether they multiply in bf16."""

    codes: Activations | None
    bf16: bool


@dataclass(frozen=True)
class StaticScales:
    """The static scales of the inputs of linears, by the part of a leaf that they multiply with (a layer, an expert).

    `parts` (the leaf's shape, int32) has the number of the part at each element; x becomes the codes of x * factor, and
    codes * scale are its values, fp32 (`int8_rows.clip_factors`).
    """

    parts: Array
    factors: Array
    scales: Array


Run = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Any]
InArithmetic = Callable[[Mapping[int, Arithmetic], Mapping[int, str], Mapping[int, StaticScales]], Run]


@dataclass
class Exported:
    """The graph, and what the call of the program looks like.

    `leaves` are the arrays of weights, in the order of `graph.leaves`; `values(leaf, name)` are the values of one.
    `inputs` and `outputs` are trees of `plan.Signature`.  `run(leaves, args, kwargs)` is the function itself with other
    leaves, each made by `leaf_of(array)`.  `in_arithmetic` makes it a function whose linears compute in another way, by
    the number of their leaf; its second argument names the types of leaves that are given in a wider type than the
    function has them in, its third one the static scales of their parts.  None if there is no such oracle: then `run`
    takes such leaves, too.  `states` are the first values of arguments that became states.
    """

    graph: Graph
    leaves: list[Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    names: list[str]
    samples: list[Any]
    run: Run
    values: Callable[[Any, str], Array]
    leaf_of: Callable[[Array], Any]
    in_arithmetic: InArithmetic | None = None
    states: dict[str, Array] = field(default_factory=dict)
