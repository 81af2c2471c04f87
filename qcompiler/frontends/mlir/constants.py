"""Constants of a text: floating-point arrays are weights, by the names of their resources; all others are numbers.

dense_resource<up_weight> : tensor<8x16xf32>       a leaf `up_weight`
dense<[[0.5, …]]> : tensor<8x16xf32>               a leaf `constant_0`
dense<1.0> : tensor<8xf32>, dense<[0, 1]> : …      a number everywhere, and indices: known at compile time
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.errors import ExportError
from qcompiler.frontends.jax.graph import NUMPY, Graph, Value
from qcompiler.frontends.mlir import names
from qcompiler.frontends.mlir.text import array_of

Array = npt.NDArray[Any]

MAX_SPLAT = 1 << 24
"""Elements of a constant with one value everywhere that a text may write out: the text has no bytes for them."""


class Constants:
    """Makes each constant once: two reads of one resource, or of one attribute, are the same value."""

    def __init__(self, graph: Graph, resources: Mapping[str, bytes], taken: set[str]) -> None:
        self.graph, self.resources, self.taken = graph, resources, taken
        self.arrays: dict[Value, Array] = {}
        self._made: dict[Any, Value] = {}

    def resource(self, text: str, shape: tuple[int, ...], kind: str, where: str) -> Value:
        """`text` is `dense_resource<name> : …`."""
        found = re.match(r'dense_resource<"?([^">]*)"?>', text)
        name = found[1] if found is not None else ""
        if name not in self.resources:
            raise ExportError(
                f"the resource '{name}' is not in the text{where}: print the module with its resources (MLIR "
                f"may leave out "
                "long ones with elide-resource-strings-if-larger), or pass the weight as an argument"
            )
        key = (name, shape, kind)
        if key not in self._made:
            array = array_of(self.resources[name], NUMPY[kind], shape, name)
            self._made[key] = self._value(array, kind, names.of_resource(name))
        return self._made[key]

    def dense(self, key: Any, array: Array, shape: tuple[int, ...], kind: str) -> Value:
        """`key` is the attribute: equal ones are one constant."""
        if key not in self._made:
            self._made[key] = self._value(array.reshape(shape), kind, f"constant_{len(self._made)}")
        return self._made[key]

    def check_splat(self, shape: tuple[int, ...], where: str) -> None:
        if math.prod(shape) > MAX_SPLAT:
            raise ExportError(
                f"a constant of {math.prod(shape)} equal elements{where}; the limit is {MAX_SPLAT}: write a number and "
                "broadcast it"
            )

    def _value(self, array: Array, kind: str, name: str) -> Value:
        value = Value(array.shape, kind, name=name)
        if not value.floating or array.ndim == 0 or _uniform(array):
            value.known = array
            return value
        value.name = names.unique(name, self.taken)
        self.taken.add(value.name)
        self.graph.leaves[value] = None
        self.arrays[value] = array
        return value


def _uniform(array: Array) -> bool:
    flat = np.ascontiguousarray(array).reshape(-1)
    whole = flat.view(np.uint8).reshape(flat.size, flat.itemsize)
    return bool((whole == whole[:1]).all())
