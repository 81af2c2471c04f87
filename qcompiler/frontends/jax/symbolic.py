"""Symbolic sizes: JAX's dimension expressions as sizes of the IR, with a finite range for each symbol.

b, = jax.export.symbolic_shape("b", constraints=["b <= 64"])      the range is 1 … 64
dynamic_shapes={"b": (1, 64)}                                     the range of a symbol
dynamic_shapes={"x": {0: ("b", 1, 64)}}                           dimension 0 of the argument x
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qcompiler.errors import ArgumentError, DimError, ExportError
from qcompiler.frontends.jax import trees
from qcompiler.plan.dims import Dim, Expr, Range, dim, parse

LARGEST = 1 << 24
"""A symbol without an upper bound up to here has none."""

Limits = dict[str, Range]


def apply(
    structs: Sequence[jax.ShapeDtypeStruct], names: Sequence[str], dynamic_shapes: Mapping[str, Any] | None
) -> tuple[list[jax.ShapeDtypeStruct], Limits]:
    """The arguments with the dimensions that `dynamic_shapes` names, and the ranges it gives.

    ArgumentError for a name that is neither an argument nor a symbol.
    """
    if not isinstance(dynamic_shapes or {}, Mapping):
        raise ArgumentError(f"dynamic_shapes={dynamic_shapes!r}: write a dict, {_FORMS}")
    limits: Limits = {}
    given: dict[str, Mapping[int, Any]] = {}
    for name, entry in (dynamic_shapes or {}).items():
        if _is_range(entry):
            _limit(limits, name, *entry)
        elif isinstance(entry, Mapping) and name in names:
            shape = structs[names.index(name)].shape
            for axis, dimension in entry.items():
                _limit(limits, *_dimension(name, axis, dimension, len(shape)))
            given[name] = entry
        else:
            raise ArgumentError(f"dynamic_shapes[{name!r}] = {entry!r}: write {_FORMS}; the arguments are "
                                f"{', '.join(names)}")  # fmt: skip
    used = {s for struct in structs for size in struct.shape if not isinstance(size, int)
            for s in expression(size).symbols()}  # fmt: skip
    used |= {symbol for entry in given.values() for symbol, _, _ in entry.values()}
    for name in limits:
        if name not in used:
            raise ArgumentError(
                f"dynamic_shapes[{name!r}] gives the range of a symbol that no argument has; the symbols are "
                f"{', '.join(sorted(used)) or 'none'}, the arguments {', '.join(names)}"
            )
    if not given:
        return list(structs), limits
    chosen = {symbol for entry in given.values() for symbol, _, _ in entry.values()}
    bounds = [f"{s} {op} {n}" for s in sorted(chosen) for op, n in zip((">=", "<="), limits[s], strict=True)]
    scope = jax.export.SymbolicScope(bounds)
    made = []
    for struct, name in zip(structs, names, strict=True):
        text = [given.get(name, {}).get(axis, (str(size),))[0] for axis, size in enumerate(struct.shape)]
        shape = jax.export.symbolic_shape(", ".join(text), scope=scope) if name in given else struct.shape
        made.append(trees.struct(shape, struct.dtype))
    return made, limits


_FORMS = (
    "the range of a symbol, {'b': (1, 64)}, or dimensions of an argument with their ranges, {'x': {0: ('b', 1, 64)}}"
)


def _is_range(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(type(n) is int for n in entry)


def _dimension(name: str, axis: Any, entry: Any, rank: int) -> tuple[str, int, int]:
    """The symbol and its range that `dynamic_shapes[name][axis]` gives."""
    where = f"dynamic_shapes[{name!r}][{axis!r}] = {entry!r}"
    if type(axis) is not int or not 0 <= axis < rank:
        raise ArgumentError(f"{where}: the argument '{name}' has the dimensions 0 to {rank - 1}, without negative ones")
    plain = (
        isinstance(entry, tuple | list) and len(entry) == 3 and isinstance(entry[0], str) and entry[0].isidentifier()
    )
    if not plain or not _is_range(entry[1:]):
        raise ArgumentError(f"{where}: write a symbol with its range, ('b', 1, 64)")
    return entry[0], entry[1], entry[2]


def _limit(limits: Limits, symbol: str, low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ArgumentError(f"dynamic_shapes: the range of '{symbol}' is ({low}, {high}): write 1 <= low <= high")
    if limits.setdefault(symbol, (low, high)) != (low, high):
        raise ArgumentError(
            f"dynamic_shapes gives '{symbol}' the ranges {limits[symbol]} and {(low, high)}: one symbol has one range, "
            "so take two symbols, or the same range"
        )


def dims_of(shape: Iterable[Any]) -> tuple[Dim, ...]:
    """A shape of JAX as sizes of the IR."""
    return tuple(size if isinstance(size, int) else expression(size).to_dim() for size in shape)


def expression(size: Any) -> Expr:
    """`2*b + 1`, `floordiv(b, 2)`. ExportError for what the IR has no expression for."""
    text = re.sub(r"floordiv\(([^(),]+), ([^(),]+)\)", r"(\1)//(\2)", str(size))
    text = re.sub(r"mod\(([^(),]+), ([^(),]+)\)", r"(\1)%(\2)", text)
    text = re.sub(r"(\w+)\^(\d+)", lambda m: "*".join([m[1]] * int(m[2])), text)
    try:
        return parse(text)
    except DimError as error:
        raise ExportError(f"the symbolic size '{size}' of an argument is no sum of products of symbols") from error


def ranges_of(shapes: Iterable[Iterable[Any]], limits: Limits) -> dict[str, Range]:
    """A range for each symbol. ExportError for a symbol without an upper bound."""
    found: dict[str, Range] = {}
    for size in (size for shape in shapes for size in shape if not isinstance(size, int)):
        for name in sorted(expression(size).symbols()):
            if name in found:
                continue
            if name in limits:
                found[name] = limits[name]
                continue
            symbol = jax.export.symbolic_shape(name, scope=size.scope)[0]
            low, high = _lowest(symbol), _highest(symbol)
            if high is None:
                raise ExportError(
                    f"the symbolic size '{name}' has no upper bound, and programs plan their memory: write "
                    f"dynamic_shapes={{{name!r}: (1, 64)}}, or constraints=['{name} <= 64'] in symbolic_shape"
                )
            found[name] = (low, high)
    return found


def _holds(compare: Callable[[Any, int], Any], symbol: Any, bound: int) -> bool:
    try:
        return bool(compare(symbol, bound))
    except Exception as error:  # JAX raises where the constraints do not decide
        if "Inconclusive" not in type(error).__name__:
            raise
        return False


def _highest(symbol: Any) -> int | None:
    """The smallest number that JAX knows the symbol not to exceed: by doubling, then by halves."""
    high = 1
    while not _holds(operator.le, symbol, high):
        high *= 2
        if high > LARGEST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(operator.le, symbol, middle) else (middle, high)
    return high


def _lowest(symbol: Any) -> int:
    """The largest number that JAX knows the symbol to reach, at least 1; bounds are small, so one step at a time."""
    low = 1
    while low < 4096 and _holds(operator.ge, symbol, low + 1):
        low += 1
    return low


def sample(given: Any, struct: jax.ShapeDtypeStruct, ranges: Mapping[str, Range]) -> Any:
    """Example values for `verify_each="numerics"`: the caller's array, or small numbers of the struct's shape."""
    if not isinstance(given, jax.ShapeDtypeStruct):
        return np.asarray(given)
    chosen = {name: min(max(3, low), high) for name, (low, high) in ranges.items()}
    shape = [dim(size).evaluate(chosen) for size in dims_of(struct.shape)]
    kind = np.dtype(struct.dtype)
    if not jnp.issubdtype(kind, np.floating):
        return np.zeros(shape, kind)
    return np.random.default_rng(0).standard_normal(shape).astype(kind)
