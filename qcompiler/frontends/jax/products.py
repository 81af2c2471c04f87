"""dot_general and convolution: linears of weights, batched products of activations, `qc.conv2d`.

dot_general(x, params.w)          qc.linear(x, qc.dequantize(qc.const @params.w))
dot_general(q, k), batch (b, h)   qc.batch_matmul of transposed views
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.frontends.jax.activations import Input
from qcompiler.frontends.jax.graph import Node
from qcompiler.frontends.jax.scope import Result, Scope, V, lowers, opmath
from qcompiler.frontends.jax.weight_views import Matrix, Use, dot_dims
from qcompiler.ir import build, qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim, product
from qcompiler.plan.kernel import DType

MATMUL: tuple[DType, ...] = ("f32", "bf16", "f16")
"""The types that kernels of matrix products support."""


def product_of(s: Scope, node: Node, use: Use, weights: Sequence[V], inputs: Sequence[Input | None]) -> V:
    """A dot_general whose operand `use.operand` is made of weights: a linear for each of its batch's entries.

    `inputs` quantise x, for each weight (activations.py).
    """
    position = use.operand
    x, w = node.operands[1 - position], node.operands[position]
    batch, contracted, w_batch, w_contracted = dot_dims(node, position)
    free = [i for i in range(x.rank) if i not in batch and i not in contracted]
    w_free = [w.shape[i] for i in range(w.rank) if i not in w_batch and i not in w_contracted]
    rows, depth = [x.shape[i] for i in free], product([x.shape[i] for i in contracted]).to_dim()
    counts = [x.shape[i] for i in batch]
    given = s.transpose(s.value(x), [*batch, *free, *contracted])
    given = s.reshape(given, [product(counts).to_dim(), *rows, depth] if batch else [*rows, depth])
    parts = []
    for number, matrix in enumerate(use.matrices):
        one = s.reshape(s.slice(given, 0, number, 1), [*rows, depth]) if batch else given
        parts.append(_linear(s, one, weights[number], matrix, node.result.dtype, inputs[number]))
    if batch:
        wide = [s.reshape(p, [1, *shape_of(p.type)]) for p in parts]
        out = s.reshape(build.concat(s.builder, wide, 0), [*counts, *rows, *w_free])
    else:
        out = s.reshape(parts[0], [*rows, *w_free])
    if position == 1:
        return out
    b, r, f = len(counts), len(rows), len(w_free)  # the weight's dims come first
    return s.transpose(out, [*range(b), *range(b + r, b + r + f), *range(b, b + r)])


def _linear(s: Scope, x: V, w: V, matrix: Matrix, result: DType, quantised: Input | None) -> V:
    """x (…, K) of any rank, also of rank 1; x has the weight's type."""
    shape = shape_of(x.type)
    flat = s.reshape(x, [1, *shape]) if len(shape) == 1 else x
    alone = None
    if quantised is not None:
        flat, alone = quantised(s, flat)
    made: DType = result if result in MATMUL else tensor_dtype(w.type)
    type_ = types.tensor([*shape_of(flat.type)[:-1], matrix.rows], made)
    out = s.insert(qc.LinearOp(s.cast(flat, tensor_dtype(w.type)), w, None, type_))
    if alone is not None:
        other = s.insert(qc.LinearOp(s.cast(alone, tensor_dtype(w.type)), w, None, type_))
        out = s.pointwise([out, other], lambda m, p, q: m.add(p, q), compute=opmath(made), result=made)
    return s.cast(s.reshape(out, [*shape[:-1], matrix.rows]), result)


@lowers("stablehlo.dot_general", "stablehlo.dot")
def _dot(s: Scope, node: Node) -> Result:
    """(batch, M, K) @ (batch, K, N) after transposes; each group of dims is one dim where a kernel needs it."""
    x, y = node.operands
    batch, contracted, y_batch, y_contracted = _dot_numbers(node)
    free = [i for i in range(x.rank) if i not in batch and i not in contracted]
    y_free = [i for i in range(y.rank) if i not in y_batch and i not in y_contracted]
    counts = [x.shape[i] for i in batch]
    rows, cols = [x.shape[i] for i in free], [y.shape[i] for i in y_free]
    depth = product([x.shape[i] for i in contracted]).to_dim()
    m, n = product(rows).to_dim(), product(cols).to_dim()
    result = node.result.dtype
    compute = _compute_type(x.dtype, y.dtype, result)
    a = s.reshape(s.transpose(s.cast(s.value(x), compute), [*batch, *free, *contracted]), [*counts, m, depth])
    b = s.reshape(s.transpose(s.cast(s.value(y), compute), [*y_batch, *y_contracted, *y_free]), [*counts, depth, n])
    shape: list[Dim] = [*counts, m, n]
    out = _matmul(s, a, b, shape, compute)
    return s.cast(s.reshape(out, [*counts, *rows, *cols]), result)


def _dot_numbers(node: Node) -> tuple[list[int], list[int], list[int], list[int]]:
    if node.op == "stablehlo.dot":
        return [], [node.operands[0].rank - 1], [], [0]
    numbers = node.attrs["dot_dimension_numbers"]
    return (
        list(numbers["lhs_batching_dimensions"]),
        list(numbers["lhs_contracting_dimensions"]),
        list(numbers["rhs_batching_dimensions"]),
        list(numbers["rhs_contracting_dimensions"]),
    )


def _compute_type(x: DType, y: DType, result: DType) -> DType:
    """bf16 with a result in fp32 multiplies in fp32, which holds each product exactly."""
    if x == y == result or (x == y and result not in ("f32", "f64", "i32", "i64")):
        return x
    return result


def _matmul(s: Scope, a: V, b: V, shape: Sequence[Dim], dtype: DType) -> V:
    if dtype in MATMUL:
        return s.insert(qc.BatchMatmulOp(a, b, types.tensor(shape, dtype)))
    rank = len(shape)  # integers and f64: a reduction loop
    left, right = shape_of(a.type), shape_of(b.type)
    columns = s.transpose(b, [*range(rank - 2), rank - 1, rank - 2])
    inputs = [s.reshape(a, [*left[:-1], 1, left[-1]]), s.reshape(columns, [*right[:-2], 1, right[-1], right[-2]])]
    wide = (*shape, left[-1])
    return s.fold(inputs, wide, (rank,), "add", compute=dtype, term=lambda m, p, q: m.mul(p, q))


# --- convolutions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Conv:
    """The numbers of a convolution on (b, c, h, w); one of fewer dims has height 1."""

    strides: list[int]
    low: list[int]
    high: list[int]
    spread: list[int]
    dilation: list[int]
    groups: int
    count: int


def _numbers(node: Node) -> _Conv:
    a = node.attrs
    count = len(a["dimension_numbers"]["input_spatial_dimensions"])
    if count not in (1, 2):
        raise node.unsupported(f"a convolution over {count} dimensions; there are lowerings for 1 and 2")
    if a.get("batch_group_count", 1) != 1 or any(a.get("window_reversal") or ()):
        raise node.unsupported("a convolution with batch groups or reversed windows (the gradient of another one)")
    more, ones = [1] * (2 - count), [1] * count
    padding = a["padding"].tolist() if a.get("padding") is not None else [[0, 0]] * count
    zeros = [0] * (2 - count)
    return _Conv(
        [*more, *(a.get("window_strides") or ones)],
        [*zeros, *(int(p[0]) for p in padding)],
        [*zeros, *(int(p[1]) for p in padding)],
        [*more, *(a.get("lhs_dilation") or ones)],
        [*more, *(a.get("rhs_dilation") or ones)],
        int(a.get("feature_group_count", 1)),
        count,
    )


@lowers("stablehlo.convolution")
def _convolution(s: Scope, node: Node) -> Result:
    numbers = node.attrs["dimension_numbers"]
    order = [numbers["kernel_output_feature_dimension"], numbers["kernel_input_feature_dimension"],
             *numbers["kernel_spatial_dimensions"]]  # fmt: skip
    return convolve(s, node, s.cast(s.transpose(s.value(node.operands[1]), order), node.result.dtype))


def conv_of(s: Scope, node: Node, w: V) -> V:
    """A convolution whose weight is the matrix (O, kernel * C). x is rounded to the type of a quantised one."""
    numbers, shape = node.attrs["dimension_numbers"], node.operands[1].shape
    kernel = [shape[i] for i in numbers["kernel_spatial_dimensions"]]
    out, depth = (shape[numbers[f"kernel_{side}_feature_dimension"]] for side in ("output", "input"))
    wide = s.reshape(w, [out, *kernel, depth])
    return convolve(s, node, s.transpose(wide, [0, len(kernel) + 1, *range(1, len(kernel) + 1)]))


def convolve(s: Scope, node: Node, w: V) -> V:
    """The convolution with a weight (O, C / groups, *kernel). Its result has the function's type
    (`preferred_element_type`)."""
    if 0 in node.result.shape:  # a kernel may be larger than its image
        return build.fill(s.builder, 0, node.result.shape, node.result.dtype)
    c, numbers = _numbers(node), node.attrs["dimension_numbers"]
    order = [numbers["input_batch_dimension"], numbers["input_feature_dimension"], *numbers["input_spatial_dimensions"]]
    x = _image(s, s.transpose(s.value(node.operands[0]), order), c.count)
    if tensor_dtype(w.type) == node.result.dtype:
        x = s.cast(x, node.result.dtype)
    x, low, high = _spread(s, x, c)
    back = [
        numbers["output_batch_dimension"],
        numbers["output_feature_dimension"],
        *numbers["output_spatial_dimensions"],
    ]
    out = [node.result.shape[i] for i in back]
    image = [*out[:2], *([1] * (2 - c.count)), *out[2:]]
    op = qc.Conv2dOp(
        x, _image(s, w, c.count), None, types.tensor(image, node.result.dtype),
        strides=c.strides, padding=[*low, *high], dilation=c.dilation, groups=c.groups,
    )  # fmt: skip
    return s.transpose(s.reshape(s.insert(op), out), [back.index(i) for i in range(len(back))])


def _image(s: Scope, value: V, count: int) -> V:
    shape = shape_of(value.type)
    return s.reshape(value, [*shape[:2], *([1] * (2 - count)), *shape[2:]])


def _spread(s: Scope, x: V, c: _Conv) -> tuple[V, list[int], list[int]]:
    """Zeros between pixels (a transposed convolution), and a cut where the padding is negative."""
    shape = shape_of(x.type)
    if c.spread != [1, 1]:
        wide = [((dim(n) - 1) * step + 1).to_dim() for n, step in zip(shape[2:], c.spread, strict=True)]
        zeros = s.full(0, [*shape[:2], *wide], tensor_dtype(x.type))
        x = build.insert_slice(s.builder, x, zeros, [0, 0, 0, 0], [1, 1, *c.spread])
    for i, (before, after) in enumerate(zip(c.low, c.high, strict=True)):
        if before < 0 or after < 0:
            size = dim(shape_of(x.type)[2 + i]) + min(before, 0) + min(after, 0)
            x = s.slice(x, 2 + i, max(-before, 0), size.to_dim())
    return x, [max(n, 0) for n in c.low], [max(n, 0) for n in c.high]
