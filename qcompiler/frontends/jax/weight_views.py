"""Which parts of the leaves are matrices of weights: how the graph reads each leaf, as one matrix (rows, columns).

    dot_general(x, w), w (in, out)                    w.T, (out, in)
    einsum("bsd,dhk->bshk", x, w)                     (h*k, d)
    dot_general(x, slice(w, layer 3)), w (L, in, out) layer 3 of w, transposed: a weight "w.3"
    gather of rows of w (V, D)                        (V, D), the embedding; x @ w.T reads the same matrix
    convolution(x, w), w HWIO                         (O, kh*kw*I)

Two reads are of one weight if they read the same elements in the same order: the strides of the view say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from qcompiler.frontends.jax.graph import Graph, Node, Value

Kind = Literal["linear", "embedding", "conv"]
Array = npt.NDArray[Any]
Key = tuple[Any, ...]


TYPES = ("f32", "bf16", "f16")
"""The types of leaves that formats store, and of views of them."""


@dataclass
class View:
    """A leaf seen through slices, transposes, reshapes and a conversion. `meta` has the view's strides, and no data."""

    leaf: Value
    meta: Array
    steps: tuple[Callable[[Array], Array], ...] = ()
    suffix: str = ""
    dtype: str = ""

    def then(self, step: Callable[[Array], Array], suffix: str = "") -> View:
        """The view after one more step, which must not copy."""
        return View(self.leaf, step(self.meta), (*self.steps, step), self.suffix + suffix, self.dtype)

    def values(self, array: Array) -> Array:
        """The view of the leaf's values."""
        for step in self.steps:
            array = step(array)
        return array


@dataclass
class Matrix:
    """One weight: a matrix of `rows` by `cols`, and the nodes that read it."""

    leaf: Value
    key: Key
    suffix: str
    view: View
    shape: tuple[int, ...]
    """The shape of the part of the leaf, as the function has it."""
    rows: int
    cols: int
    dtype: str
    kinds: set[Kind] = field(default_factory=set)

    def values(self, array: Array) -> Array:
        """The matrix of the leaf's values, row-major."""
        return np.ascontiguousarray(self.view.values(array).reshape(self.rows, self.cols))


@dataclass
class Use:
    """A node that reads matrices: one, or one for each entry of its batch dims. `operand` is the weight's number."""

    kind: Kind
    operand: int
    matrices: list[Matrix]


@dataclass
class Uses:
    """All uses, by node, and the leaves that something reads in another way."""

    matrices: dict[Key, Matrix] = field(default_factory=dict)
    uses: dict[Node, Use] = field(default_factory=dict)
    elsewhere: dict[Value, str] = field(default_factory=dict)
    """The reader that keeps a leaf from being quantised."""


def find_uses(graph: Graph) -> Uses:
    """Looks at every live node. A leaf that anything reads as another tensor than its matrices is kept as it is."""
    found = Uses()
    views: dict[Value, View] = {leaf: _whole(leaf) for leaf in graph.leaves if leaf.type in TYPES and leaf.rank >= 2}
    for node in graph.live():
        _look(node, views, found)
    for value in graph.returned:
        if value in views:
            found.elsewhere[views[value].leaf] = "the function returns it"
    overlapping(found, graph.leaves)
    kept = found.elsewhere
    found.uses = {n: u for n, u in found.uses.items() if all(m.leaf not in kept for m in u.matrices)}
    found.matrices = {k: m for k, m in found.matrices.items() if m.leaf not in kept}
    return found


def _look(node: Node, views: dict[Value, View], found: Uses) -> None:
    step = _STEPS.get(node.op)
    for position, value in enumerate(node.operands):
        view = views.get(value)
        if view is None:
            continue
        further = step(node, view) if step is not None and position == 0 else None
        if further is not None:
            views[node.result] = further
            continue
        use = None
        if sum(v in views for v in node.operands) == 1:  # not a product of two weights
            use = _USES[node.op](node, position, view, found) if node.op in _USES else None
        if use is None:
            line = f" ({node.line})" if node.line else ""
            found.elsewhere.setdefault(view.leaf, f"{node.op.removeprefix('stablehlo.')} reads it as a tensor{line}")
        else:
            found.uses[node] = use


_SHARED = "it is read as several matrices with common elements (two orientations, two types or overlapping slices)"


def overlapping(found: Uses, leaves: Iterable[Value]) -> None:
    """Keeps leaves whose matrices share elements without being equal (`x @ w` beside `y @ w.T`), or share a name."""
    by_leaf: dict[Value, list[Matrix]] = {}
    for matrix in found.matrices.values():
        by_leaf.setdefault(matrix.leaf, []).append(matrix)
    for leaf, matrices in by_leaf.items():
        if len({m.suffix for m in matrices}) < len(matrices) or _any_shared([m.view.meta for m in matrices]):
            found.elsewhere.setdefault(leaf, _SHARED)
    names = {leaf.name for leaf in leaves}
    for matrix in found.matrices.values():
        path = matrix.leaf.name + matrix.suffix
        if matrix.suffix and path in names:
            found.elsewhere.setdefault(matrix.leaf, f"its part '{path}' has the name of another array")
        names.add(path)


MAX_WORK = 100_000
"""Steps of NumPy's exact test for common elements; views that need more count as overlapping."""


def _any_shared(metas: Sequence[Array]) -> bool:
    """Whether two of the views have a common element. Only those whose bounds overlap are compared exactly."""
    bounds = sorted(((*byte_bounds(m), i) for i, m in enumerate(metas) if m.size), key=lambda each: each[0])
    open_: list[tuple[int, int]] = []
    for low, high, i in bounds:
        open_ = [(end, j) for end, j in open_ if end > low]
        if any(_shared(metas[i], metas[j]) for _, j in open_):
            return True
        open_.append((high, i))
    return False


def _shared(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=MAX_WORK))  # type: ignore[arg-type]  # the stub has two numbers only
    except TooHardError:
        return True


# --- steps -----------------------------------------------------------------------------------------------------------


def _whole(leaf: Value) -> View:
    shape = tuple(int(size) for size in leaf.shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    meta = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, strides)
    return View(leaf, meta, dtype=leaf.type)


def _slice(node: Node, view: View) -> View | None:
    a = node.attrs
    entries = list(zip(a["start_indices"], a["limit_indices"], a["strides"], view.meta.shape, strict=True))
    suffix = "".join(
        f".{start}" if stop - start == 1 else f".{start}-{stop}" + (f"-{step}" if step > 1 else "")
        for start, stop, step, size in entries
        if (start, stop, step) != (0, size, 1)
    )
    at = tuple(slice(start, stop, step) for start, stop, step, _ in entries)
    return view.then(lambda array: array[at], suffix)


def _reshape(node: Node, view: View) -> View | None:
    shape = tuple(int(size) for size in node.result.shape)
    return _reshaped(view, shape)


def _reshaped(view: View, shape: Sequence[int]) -> View | None:
    try:
        np.reshape(view.meta, shape, copy=False)
    except ValueError:
        return None
    return view.then(lambda array: array.reshape(shape))


def _transpose(node: Node, view: View) -> View | None:
    order = tuple(node.attrs["permutation"])
    return view.then(lambda array: array.transpose(order))


def _broadcast(node: Node, view: View) -> View | None:
    """Only one that adds dims of size 1."""
    axes, shape = node.attrs["broadcast_dimensions"], node.result.shape
    same = list(axes) == sorted(axes) and math.prod(map(int, shape)) == view.meta.size
    return _reshaped(view, [int(n) for n in shape]) if same and all(isinstance(n, int) for n in shape) else None


def _convert(node: Node, view: View) -> View | None:
    """The last of several conversions, if those before it lose nothing: float32 to bfloat16 and back rounds."""
    if node.result.type not in TYPES or view.dtype not in (view.leaf.type, "f32"):
        return None
    return View(view.leaf, view.meta, view.steps, view.suffix, node.result.type)


_STEPS: dict[str, Callable[[Node, View], View | None]] = {
    "stablehlo.slice": _slice,
    "stablehlo.reshape": _reshape,
    "stablehlo.transpose": _transpose,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.convert": _convert,
}

# --- uses ------------------------------------------------------------------------------------------------------------


def _matrix(found: Uses, view: View, rows: Sequence[int], cols: Sequence[int], kind: Kind, more: str = "") -> Matrix:
    """The weight whose rows and columns are these dims of the view."""
    order = (*rows, *cols)
    meta = view.meta.transpose(order)
    key = (view.leaf, view.dtype, _canonical(meta, len(rows)))
    shape = [math.prod(view.meta.shape[i] for i in group) for group in (rows, cols)]
    moved = View(view.leaf, meta, (*view.steps, lambda array: array.transpose(order)), view.suffix + more, view.dtype)
    made = Matrix(view.leaf, key, moved.suffix, moved, tuple(view.meta.shape), shape[0], shape[1], view.dtype)
    matrix = found.matrices.setdefault(key, made)
    matrix.kinds.add(kind)
    return matrix


def _canonical(meta: Array, rows: int) -> Key:
    """Offset, and sizes and strides of the row dims and the column dims, with neighbours merged."""
    offset = meta.__array_interface__["data"][0]
    parts = []
    for group in (range(rows), range(rows, meta.ndim)):
        merged: list[list[int]] = []
        for i in group:
            size, stride = meta.shape[i], meta.strides[i]
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                merged[-1] = [merged[-1][0] * size, stride]
            else:
                merged.append([size, stride])
        parts.append(tuple(map(tuple, merged)))
    return (offset, *parts)


def dot_dims(node: Node, weight: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Of a dot_general: batch and contracting dims of x, and of the weight, contracting ones in the weight's order."""
    numbers = node.attrs["dot_dimension_numbers"]
    sides = ("lhs", "rhs")
    mine, other = sides[weight], sides[1 - weight]
    pairs = sorted(
        zip(numbers[f"{mine}_contracting_dimensions"], numbers[f"{other}_contracting_dimensions"], strict=True)
    )
    return (
        list(numbers[f"{other}_batching_dimensions"]),
        [b for _, b in pairs],
        list(numbers[f"{mine}_batching_dimensions"]),
        [a for a, _ in pairs],
    )


MAX_BATCH = 64
"""Products with more matrices than this in one dot_general keep them as one tensor."""


def _dot(node: Node, position: int, view: View, found: Uses) -> Use | None:
    _, _, batch, contracted = dot_dims(node, position)
    free = [i for i in range(view.meta.ndim) if i not in batch and i not in contracted]
    if not contracted or not free:
        return None
    counts = [view.meta.shape[i] for i in batch]
    if math.prod(counts) > MAX_BATCH:
        return None
    matrices = []
    for index in np.ndindex(*counts):
        at = tuple(slice(index[batch.index(i)], index[batch.index(i)] + 1) if i in batch else slice(None)
                   for i in range(view.meta.ndim))  # fmt: skip
        one = view.then(lambda array, at=at: array[at], "".join(f".{n}" for n in index))  # type: ignore[misc]
        matrices.append(_matrix(found, one, [*batch, *free], contracted, "linear"))
    return Use("linear", position, matrices)


def is_row_gather(node: Node) -> bool:
    """Whether a gather picks whole rows of a matrix."""
    numbers, shape = node.attrs["dimension_numbers"], node.operands[0].shape
    return (
        len(shape) == 2
        and numbers["start_index_map"] == [0]
        and numbers["collapsed_slice_dims"] == [0]
        and not numbers["operand_batching_dims"]
        and list(node.attrs.get("slice_sizes", ())) == [1, shape[1]]
        and numbers["offset_dims"] == [node.result.rank - 1]
    )


def _gather(node: Node, position: int, view: View, found: Uses) -> Use | None:
    if position != 0 or not is_row_gather(node):
        return None
    return Use("embedding", 0, [_matrix(found, view, [0], [1], "embedding")])


def _conv(node: Node, position: int, view: View, found: Uses) -> Use | None:
    numbers = node.attrs["dimension_numbers"]
    plain = node.attrs.get("feature_group_count", 1) == 1 and node.attrs.get("batch_group_count", 1) == 1
    reversal = any(node.attrs.get("window_reversal") or ())
    if position != 1 or not plain or reversal or len(numbers["kernel_spatial_dimensions"]) not in (1, 2):
        return None
    columns = [*numbers["kernel_spatial_dimensions"], numbers["kernel_input_feature_dimension"]]
    return Use("conv", 1, [_matrix(found, view, [numbers["kernel_output_feature_dimension"]], columns, "conv")])


_USES: dict[str, Callable[[Node, int, View, Uses], Use | None]] = {
    "stablehlo.dot_general": _dot,
    "stablehlo.gather": _gather,
    "stablehlo.convolution": _conv,
}
