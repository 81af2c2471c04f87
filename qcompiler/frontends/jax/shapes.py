"""The symbolic shape of a result whose type has `?`: StableHLO says which operand a size comes from.

dot_general(f32[b, s, 64], f32[64, 32])            f32[b, s, 32]
dynamic_reshape(x, [b*s, 64])                      f32[b*s, 64]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qcompiler.frontends.jax.fold import entries_of
from qcompiler.frontends.jax.graph import Node
from qcompiler.plan.dims import Dim, dim

Shape = tuple[Dim, ...]
Infer = Callable[[Node, int], Sequence[Dim] | None]
_INFER: dict[str, Infer] = {}


def infers(*names: str) -> Callable[[Infer], Infer]:
    """Registers the rule of ops."""

    def register(function: Infer) -> Infer:
        _INFER.update({f"stablehlo.{name}": function for name in names})
        return function

    return register


def infer(node: Node, number: int, declared: Sequence[Dim | None]) -> Shape:
    """The shape of result `number`, declared with None for `?`. UnsupportedOperatorError if it depends on values."""
    if all(size is not None for size in declared):
        return tuple(size for size in declared if size is not None)
    rule = _INFER.get(node.op, _like_an_operand)
    found = rule(node, number)
    if found is None or len(found) != len(declared):
        raise node.unsupported("the shape of its result depends on values, or is no expression of the input's sizes")
    return tuple(size if size is not None else dim(given).to_dim() for size, given in zip(declared, found, strict=True))


def _like_an_operand(node: Node, number: int) -> Shape | None:
    """Elementwise: the first operand with the largest rank."""
    del number
    return max((v.shape for v in node.operands), key=len, default=None)


@infers("select", "clamp")
def _second(node: Node, number: int) -> Shape:
    del number
    return node.operands[1].shape


@infers("dynamic_update_slice", "scatter", "sort", "while")
def _same(node: Node, number: int) -> Shape:
    return node.operands[number if node.op == "stablehlo.sort" else 0].shape


@infers("dynamic_reshape", "dynamic_broadcast_in_dim", "dynamic_iota")
def _given(node: Node, number: int) -> Shape | None:
    del number
    entries = entries_of(node.operands[-1])
    return tuple(entries) if entries is not None else None


@infers("transpose")
def _transpose(node: Node, number: int) -> Shape:
    del number
    return tuple(node.operands[0].shape[axis] for axis in node.attrs["permutation"])


@infers("reduce")
def _reduce(node: Node, number: int) -> Shape:
    shape = node.operands[number].shape
    return tuple(size for axis, size in enumerate(shape) if axis not in node.attrs["dimensions"])


@infers("concatenate")
def _concatenate(node: Node, number: int) -> Shape:
    del number
    axis, first = node.attrs["dimension"], node.operands[0].shape
    total = dim(0)
    for value in node.operands:
        total = total + dim(value.shape[axis])
    return (*first[:axis], total.to_dim(), *first[axis + 1 :])


@infers("dot_general")
def _dot(node: Node, number: int) -> Shape:
    del number
    numbers, (x, y) = node.attrs["dot_dimension_numbers"], node.operands
    batch = [x.shape[i] for i in numbers["lhs_batching_dimensions"]]
    left = {*numbers["lhs_batching_dimensions"], *numbers["lhs_contracting_dimensions"]}
    right = {*numbers["rhs_batching_dimensions"], *numbers["rhs_contracting_dimensions"]}
    free = [[s for i, s in enumerate(v.shape) if i not in used] for v, used in ((x, left), (y, right))]
    return (*batch, *free[0], *free[1])


@infers("gather", "dynamic_gather")
def _gather(node: Node, number: int) -> Shape | None:
    del number
    numbers, indices = node.attrs["dimension_numbers"], node.operands[1].shape
    sizes: Any = node.attrs.get("slice_sizes")
    if sizes is None:
        sizes = entries_of(node.operands[2])
    if sizes is None:
        return None
    gone = {*numbers["collapsed_slice_dims"], *numbers["operand_batching_dims"]}
    window = iter([size for i, size in enumerate(sizes) if i not in gone])
    batch = iter([s for i, s in enumerate(indices) if i != numbers["index_vector_dim"]])
    rank = len(numbers["offset_dims"]) + len(indices) - (numbers["index_vector_dim"] < len(indices))
    return tuple(next(window) if i in numbers["offset_dims"] else next(batch) for i in range(rank))


@infers("slice")
def _slice(node: Node, number: int) -> Shape:
    del number
    a = node.attrs
    entries = zip(a["start_indices"], a["limit_indices"], a["strides"], strict=True)
    return tuple(((dim(stop) - dim(start) + (step - 1)) // step).to_dim() for start, stop, step in entries)


@infers("real_dynamic_slice")
def _real_slice(node: Node, number: int) -> Shape | None:
    del number
    parts = [entries_of(value) for value in node.operands[1:]]
    if any(part is None for part in parts):
        return None
    return tuple(
        ((dim(stop) - dim(start) + (dim(step) - 1)) // dim(step)).to_dim()
        for start, stop, step in zip(*parts, strict=True)
    )


@infers("pad", "dynamic_pad")
def _pad(node: Node, number: int) -> Shape | None:
    del number
    if node.op == "stablehlo.pad":
        parts = [node.attrs[name] for name in ("edge_padding_low", "edge_padding_high", "interior_padding")]
    else:
        parts = [entries_of(value) for value in node.operands[2:]]
    if any(part is None for part in parts):
        return None
    found: list[Dim] = []
    for size, low, high, inner in zip(node.operands[0].shape, *parts, strict=True):
        found.append((dim(size) + dim(low) + dim(high) + (dim(size) - 1) * dim(inner)).to_dim())
    return tuple(found)


def padding_of(node: Node, rank: int) -> list[tuple[Dim, Dim]]:
    """The padding of a window in each dimension: numbers, or sizes."""
    given = node.attrs.get("padding")
    if given is None:
        return [(0, 0)] * rank
    low_high = [[n if isinstance(n, str) else int(n) for n in pair] for pair in given]
    return [(low, high) for low, high in low_high]


@infers("reduce_window")
def _windows(node: Node, number: int) -> Shape:
    a, shape = node.attrs, node.operands[number].shape
    rank = len(shape)
    ones, padding = [1] * rank, padding_of(node, rank)
    found: list[Dim] = []
    for i, size in enumerate(shape):
        low, high = map(dim, padding[i])
        dilation = (a.get("window_dilations") or ones)[i]
        reach = (dim(a["window_dimensions"][i]) - 1) * dilation + 1
        room = dim(size) + (low + high - reach)
        found.append((room // (a.get("window_strides") or ones)[i] + 1).to_dim())
    return tuple(found)


@infers("convolution")
def _convolution(node: Node, number: int) -> Shape:
    del number
    a, (x, w) = node.attrs, node.operands
    numbers = a["dimension_numbers"]
    count = len(numbers["input_spatial_dimensions"])
    shape: list[Dim] = [1] * (count + 2)
    shape[numbers["output_batch_dimension"]] = x.shape[numbers["input_batch_dimension"]]
    shape[numbers["output_feature_dimension"]] = w.shape[numbers["kernel_output_feature_dimension"]]
    ones, padding = [1] * count, a.get("padding")
    for i, axis in enumerate(numbers["output_spatial_dimensions"]):
        low, high = (int(n) for n in padding[i]) if padding is not None else (0, 0)
        kernel = dim(w.shape[numbers["kernel_spatial_dimensions"][i]])
        size = dim(x.shape[numbers["input_spatial_dimensions"][i]])
        spread = (size - 1) * (a.get("lhs_dilation") or ones)[i] + 1
        reach = (kernel - 1) * (a.get("rhs_dilation") or ones)[i] + 1
        room = spread + (low + high) - reach
        shape[axis] = (room // (a.get("window_strides") or ones)[i] + 1).to_dim()
    return tuple(shape)
