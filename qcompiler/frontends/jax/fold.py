"""What is known at compile time: loop counters, sizes of symbolic shapes, keys of random numbers.

    %n = get_dimension_size(%x, 0)      b
    %m = multiply(%n, 8)                8*b
    %s = concatenate([%m], [64])        [8*b, 64]: the shape of a dynamic_reshape

Values are NumPy arrays of the tensor's dtype; with a symbol among them they are arrays of objects, each a number or an
`Expr`. Floats are kept, and not computed with: the program rounds as its kernels do. The exception is one whole number,
where the result is exact: `jnp.var` subtracts the degrees of freedom from the number of elements in the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qcompiler.frontends.jax.graph import NUMPY, Known, Node, Value
from qcompiler.plan.dims import Expr, Range, dim

LIMIT = 1024
"""Larger tensors of integers are computed by the program (in `@init`, if they depend on no input)."""

MAX_TRIPS = 512
"""Loops with more trips are refused: each trip becomes code. Counts up to here are computed, as a scan reads them."""

Fold = Callable[[Node, list[Known]], Known | None]
_FOLDS: dict[str, Fold] = {}


def folds(*names: str) -> Callable[[Fold], Fold]:
    """Registers the compile-time rule of ops."""

    def register(function: Fold) -> Fold:
        _FOLDS.update(dict.fromkeys(names, function))
        return function

    return register


def fold(node: Node, ranges: Mapping[str, Range]) -> Known | None:
    """The value of the node's only result, if it can be computed now: an integer, a truth value, one whole float, or
    a tensor without elements, for which there are no products."""
    if len(node.results) != 1 or node.result.type not in NUMPY:
        return None
    if 0 in node.result.shape and all(isinstance(size, int) for size in node.result.shape):
        return np.zeros(node.result.shape, NUMPY[node.result.type])  # type: ignore[arg-type]
    rule = _FOLDS.get(node.op)
    if rule is None:
        return None
    if any(value.floating for value in (*node.operands, node.result)):
        return _of_whole_number(node, rule)
    if node.op in _DECIDING:
        decided = _decided_by_one(node)
        if decided is not None:
            return decided
    known = [value.known for value in node.operands]
    if any(each is None for each in known) or not all(isinstance(size, int) for size in node.result.shape):
        return None
    if int(np.prod([int(size) for size in node.result.shape])) > LIMIT:
        return None
    node.attrs["_ranges"] = ranges
    try:
        made = rule(node, known)  # type: ignore[arg-type]
    finally:
        del node.attrs["_ranges"]
    return None if made is None else typed(made, node.result)


_DECIDING = {"stablehlo.and": False, "stablehlo.or": True}


def _decided_by_one(node: Node) -> Known | None:
    """The result of a scalar `and` with a known False, or of an `or` with a known True."""
    decides = _DECIDING[node.op]
    if node.result.type != "i1" or node.result.shape != ():
        return None
    found = any(each.known is not None and bool(each.known) is decides for each in node.operands)
    return np.array(decides) if found else None


_EXACT = ("stablehlo.add", "stablehlo.subtract", "stablehlo.convert", "stablehlo.compare")
_WHOLE = 2**24
"""Up to here fp32 holds every whole number; a narrower type is asked."""


def _of_whole_number(node: Node, rule: Fold) -> Known | None:
    """The result of a sum, a conversion or a comparison of single whole numbers, if its type holds it exactly."""
    if node.op not in _EXACT or node.attrs.get("compare_type") == "TOTALORDER":
        return None
    wide = [_whole_number(value) for value in node.operands]
    if any(each is None for each in wide):
        return None
    exact = rule(node, wide)  # type: ignore[arg-type]
    with np.errstate(invalid="ignore"):  # -1.0 as uint8 is no number, and not equal
        made = None if exact is None else typed(exact, node.result)
    return made if made is not None and bool((made.astype(np.float64) == exact).all()) else None


def _whole_number(value: Value) -> Known | None:
    """A known whole number alone, in fp64."""
    known = value.known
    if known is None or known.size != 1 or known.dtype == object:
        return None
    number = float(known.reshape(-1)[0])
    return np.full(known.shape, number) if number.is_integer() and abs(number) <= _WHOLE else None


def typed(made: Any, value: Value) -> Known:
    """The array of the value's dtype, unless symbols are in it."""
    array = np.asarray(made)
    if array.dtype != object:
        return array.astype(NUMPY[value.type], copy=False)
    plain = [dim(each).to_dim() if isinstance(each, Expr | int) else each for each in array.reshape(-1).tolist()]
    if any(isinstance(each, str) for each in plain):
        return array
    return np.array(plain, dtype=np.int64).astype(NUMPY[value.type]).reshape(array.shape)


def scalar_of(value: Value) -> int | Expr | None:
    """The only entry of a known integer tensor."""
    if value.known is None or value.known.size != 1 or value.floating:
        return None
    entry = value.known.reshape(-1)[0]
    return entry if isinstance(entry, Expr) else int(entry)


def entries_of(value: Value) -> list[Any] | None:
    """All entries of a known integer tensor as sizes."""
    if value.known is None:
        return None
    return [dim(each if isinstance(each, Expr) else int(each)).to_dim() for each in value.known.reshape(-1)]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _symbolic(known: list[Known]) -> bool:
    return any(each.dtype == object for each in known)


def _elementwise(kernel: Callable[..., Any], symbolic: Callable[..., Any] | None) -> Fold:
    def rule(node: Node, known: list[Known]) -> Known | None:
        if not _symbolic(known):
            with np.errstate(all="ignore"):
                return np.asarray(kernel(*known))
        if symbolic is None:
            return None
        pairs = [[dim(_entry(e)) for e in entries] for entries in zip(*(k.reshape(-1) for k in known), strict=True)]
        if node.op in _FLOORED and not all(_floors(a, b, node.attrs["_ranges"]) for a, b in pairs):
            return None
        return _objects([symbolic(*each) for each in pairs], known[0].shape)

    return rule


_FLOORED = ("stablehlo.divide", "stablehlo.remainder")


def _floors(a: Expr, b: Expr, ranges: Mapping[str, Range]) -> bool:
    """Whether the division of sizes, which rounds down, is StableHLO's, which rounds towards zero."""
    return a.tight_bounds(ranges)[0] >= 0 and b.tight_bounds(ranges)[0] >= 1


def _entry(value: Any) -> Any:
    return value if isinstance(value, Expr) else int(value)


def _objects(entries: list[Any], shape: tuple[int, ...]) -> Known:
    made = np.empty(len(entries), dtype=object)
    made[:] = entries
    return made.reshape(shape)


def _divide(a: Known, b: Known) -> Known:
    """Towards zero; a division by zero is -1 (all bits for unsigned types), as in XLA."""
    divisor = np.where(b == 0, np.ones_like(b), b)
    # a - fmod(a, b) is a multiple of b; where it overflows (the smallest number by -1), it wraps as the kernels do
    quotient: Known = np.where(b == 0, np.array(-1).astype(a.dtype), (a - np.fmod(a, divisor)) // divisor)
    return quotient.astype(a.dtype)


def _remainder(a: Known, b: Known) -> Known:
    found: Known = np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))
    return found


def _shift(left: bool, logical: bool) -> Callable[[Known, Known], Known]:
    def kernel(a: Known, b: Known) -> Known:
        bits = a.dtype.itemsize * 8
        unsigned = a.view(a.dtype.str.replace("i", "u")) if logical or left else a
        count = np.minimum(b.astype(np.int64), bits - 1).astype(unsigned.dtype)
        shifted = unsigned << count if left else unsigned >> count
        beyond = np.zeros_like(shifted) if logical or left else shifted
        found: Known = np.where(b.astype(np.int64) >= bits, beyond, shifted)
        return found.view(a.dtype)

    return kernel


_ARITHMETIC: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    "add": (np.add, lambda a, b: a + b),
    "subtract": (np.subtract, lambda a, b: a - b),
    "multiply": (np.multiply, lambda a, b: a * b),
    "maximum": (np.maximum, lambda a, b: a.maximum(b)),
    "minimum": (np.minimum, lambda a, b: a.minimum(b)),
    "divide": (_divide, lambda a, b: a // b),
    "remainder": (_remainder, lambda a, b: a % b),
    "negate": (np.negative, lambda a: -a),
    "abs": (np.abs, None),
    "not": (np.invert, None),
    "and": (np.bitwise_and, None),
    "or": (np.bitwise_or, None),
    "xor": (np.bitwise_xor, None),
    "shift_left": (_shift(True, True), None),
    "shift_right_logical": (_shift(False, True), None),
    "shift_right_arithmetic": (_shift(False, False), None),
}
for _name, (_kernel, _rule) in _ARITHMETIC.items():
    _FOLDS[f"stablehlo.{_name}"] = _elementwise(_kernel, _rule)


@folds("stablehlo.sign")
def _sign(node: Node, known: list[Known]) -> Known | None:
    if not _symbolic(known):
        return np.asarray(np.sign(known[0]))
    bounds = [dim(_entry(each)).tight_bounds(node.attrs["_ranges"]) for each in known[0].reshape(-1)]
    signs = [1 if low > 0 else -1 if high < 0 else 0 if low == high == 0 else None for low, high in bounds]
    return None if None in signs else np.array(signs).reshape(known[0].shape)


_COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip


@folds("stablehlo.compare")
def _compare(node: Node, known: list[Known]) -> Known | None:
    direction = node.attrs["comparison_direction"]
    if not _symbolic(known):
        return np.asarray(_COMPARES[direction](*known))
    ranges = node.attrs["_ranges"]
    flat = [_decided(direction, dim(_entry(a)) - dim(_entry(b)), ranges)
            for a, b in zip(*(k.reshape(-1) for k in known), strict=True)]  # fmt: skip
    return None if any(each is None for each in flat) else np.array(flat, np.bool_).reshape(known[0].shape)


def _decided(direction: str, difference: Expr, ranges: Mapping[str, Range]) -> bool | None:
    """`difference <direction> 0` for all sizes in the ranges; None if it depends on the size."""
    low, high = difference.tight_bounds(ranges)
    holds = {"EQ": low == high == 0, "NE": low > 0 or high < 0, "LT": high < 0, "LE": high <= 0, "GT": low > 0,
             "GE": low >= 0}  # fmt: skip
    opposite = {"EQ": "NE", "NE": "EQ", "LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT"}
    return True if holds[direction] else False if holds[opposite[direction]] else None


@folds("stablehlo.select")
def _select(node: Node, known: list[Known]) -> Known:
    return np.where(known[0], known[1], known[2])


@folds("stablehlo.clamp")
def _clamp(node: Node, known: list[Known]) -> Known | None:
    """Of sizes: the number that is inside of its bounds, or beyond one of them, for all sizes."""
    if not _symbolic(known):
        return np.minimum(np.maximum(known[1], known[0]), known[2])
    ranges, shape = node.attrs["_ranges"], known[1].shape
    flat = [np.broadcast_to(each, shape).reshape(-1) for each in known]
    low, x, high = ([dim(_entry(e)) for e in each] for each in flat)
    found = [_inside(*sizes, ranges) for sizes in zip(low, x, high, strict=True)]
    return None if any(each is None for each in found) else _objects(found, shape)


def _inside(low: Expr, x: Expr, high: Expr, ranges: Mapping[str, Range]) -> Expr | None:
    for bound, beyond in ((low, "LT"), (high, "GT")):
        outside = _decided(beyond, x - bound, ranges)
        if outside is None:
            return None
        x = bound if outside else x
    return x


@folds("stablehlo.convert")
def _convert(node: Node, known: list[Known]) -> Known | None:
    if known[0].dtype == object and node.result.type not in ("i32", "i64"):
        return None  # a narrower type wraps, and symbols do not
    return known[0] != 0 if node.result.type == "i1" else known[0]


# --- shapes ----------------------------------------------------------------------------------------------------------


@folds("stablehlo.reshape")
def _reshape(node: Node, known: list[Known]) -> Known:
    return known[0].reshape([int(size) for size in node.result.shape])


@folds("stablehlo.broadcast_in_dim")
def _broadcast(node: Node, known: list[Known]) -> Known:
    axes, shape = node.attrs["broadcast_dimensions"], [int(size) for size in node.result.shape]
    thin = [1] * len(shape)
    for axis, size in zip(axes, known[0].shape, strict=True):
        thin[axis] = size
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return np.broadcast_to(known[0].transpose(order).reshape(thin), shape).copy()


@folds("stablehlo.concatenate")
def _concatenate(node: Node, known: list[Known]) -> Known:
    return np.concatenate(known, axis=node.attrs["dimension"])


@folds("stablehlo.slice")
def _slice(node: Node, known: list[Known]) -> Known:
    a = node.attrs
    at = tuple(slice(*each) for each in zip(a["start_indices"], a["limit_indices"], a["strides"], strict=True))
    return known[0][at]


@folds("stablehlo.iota")
def _iota(node: Node, known: list[Known]) -> Known | None:
    shape, axis = [int(s) for s in node.result.shape], node.attrs["iota_dimension"]
    if int(np.prod(shape)) > MAX_TRIPS:
        return None  # a loop over its index: nothing to store
    thin = [size if i == axis else 1 for i, size in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[axis]).reshape(thin), shape).copy()
