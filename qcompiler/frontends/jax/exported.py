"""What the stages behind an export need to know of it, whoever made it: `jax.export`, or a text of MLIR."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from qcompiler.frontends.jax.graph import Graph

Array = npt.NDArray[Any]


@dataclass
class Exported:
    """The graph, and what the call of the program looks like.

    `leaves` are the arrays of weights, in the order of `graph.leaves`; `values(leaf, name)` are the values of one.
    `inputs` and `outputs` are trees of `plan.Signature`.  `run(leaves, args, kwargs)` is the function itself with other
    leaves, each made by `leaf_of(array)`.
    """

    graph: Graph
    leaves: list[Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    names: list[str]
    samples: list[Any]
    run: Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Any]
    values: Callable[[Any, str], Array]
    leaf_of: Callable[[Array], Any]
