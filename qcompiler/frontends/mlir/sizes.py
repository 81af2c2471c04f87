"""Sizes of arguments: the numbers of the text, and for each `?` a symbol with a range, which the caller names.

tensor<?x8xf32>, dynamic_shapes={"x": {0: ("b", 1, 64)}}          (b, 8), b in 1 … 64
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompiler.errors import ArgumentError, UnboundedDimError
from qcompiler.frontends.mlir.types import Argument
from qcompiler.plan.dims import Dim, Range

LARGEST = 1 << 24
"""The largest size of a symbol."""

FORM = '{"x": {0: ("b", 1, 64)}}: by argument and dimension, a symbol with its range'


def resolve(
    arguments: Sequence[Argument], dynamic_shapes: Mapping[str, Any] | None
) -> tuple[list[tuple[Dim, ...]], dict[str, Range]]:
    """The shapes of arguments with symbols, and the symbols' ranges.

    ArgumentError for entries that name no `?`; UnboundedDimError for a `?` without an entry.
    """
    given = _checked(arguments, dynamic_shapes)
    ranges: dict[str, Range] = {}
    shapes: list[tuple[Dim, ...]] = []
    for argument in arguments:
        entries = given.get(argument.name, {})
        shape: list[Dim] = []
        for axis, size in enumerate(argument.shape):
            if size is not None:
                shape.append(size)
                continue
            if axis not in entries:
                raise UnboundedDimError(
                    f"dimension {axis} of the argument '{argument.name}' is `?`, and programs plan their memory: give "
                    f"it a name and a range, dynamic_shapes={{{argument.name!r}: {{{axis}: ('b', 1, 64)}}}}"
                )
            symbol, low, high = entries[axis]
            if ranges.setdefault(symbol, (low, high)) != (low, high):
                raise ArgumentError(
                    f"dynamic_shapes gives '{symbol}' the ranges {ranges[symbol]} and {(low, high)}: one symbol has "
                    "one range, so take two symbols, or the same range"
                )
            shape.append(symbol)
        shapes.append(tuple(shape))
    return shapes, ranges


def _checked(arguments: Sequence[Argument], dynamic_shapes: Any) -> dict[str, dict[int, tuple[str, int, int]]]:
    if dynamic_shapes is None:
        return {}
    if not isinstance(dynamic_shapes, Mapping):
        raise ArgumentError(f"dynamic_shapes={dynamic_shapes!r}: write {FORM}")
    known = {argument.name: argument for argument in arguments}
    found: dict[str, dict[int, tuple[str, int, int]]] = {}
    for name, entries in dynamic_shapes.items():
        if name not in known or not isinstance(entries, Mapping):
            raise ArgumentError(
                f"dynamic_shapes[{name!r}] = {entries!r}: write {FORM}; the arguments are {', '.join(known) or 'none'}"
            )
        for axis, entry in entries.items():
            found.setdefault(name, {})[axis] = _entry(known[name], axis, entry)
    return found


def _entry(argument: Argument, axis: Any, entry: Any) -> tuple[str, int, int]:
    where = f"dynamic_shapes[{argument.name!r}][{axis!r}] = {entry!r}"
    if type(axis) is not int or not 0 <= axis < len(argument.shape):
        raise ArgumentError(f"{where}: the argument has the dimensions 0 to {len(argument.shape) - 1}")
    if argument.shape[axis] is not None:
        raise ArgumentError(f"{where}: the text says {argument.shape[axis]}; only a `?` takes other sizes")
    plain = isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[0], str)
    if not plain or not entry[0].isidentifier() or not all(type(n) is int for n in entry[1:]):
        raise ArgumentError(f"{where}: write a symbol with its range, ('b', 1, 64)")
    symbol, low, high = entry
    if not 1 <= low <= high <= LARGEST:
        raise ArgumentError(f"{where}: write 1 <= low <= high <= {LARGEST}")
    return symbol, low, high
