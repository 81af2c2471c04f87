"""Matmuls, attention, norms, softmax, reductions and scans of ATen as `qc` ops and reduction loops."""

from __future__ import annotations

import math as pymath
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.common.scalars import Scalars, opmath
from qcompiler.frontends.torch.aten.scope import (
    BUILDERS,
    Args,
    Result,
    Scope,
    Shape,
    broadcast_shapes,
    listed_axes,
    lowers,
    normalize_axes,
    overload,
)
from qcompiler.ir import qc, types
from qcompiler.ir.build import Reduction
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, product
from qcompiler.plan.kernel import DType

aten = torch.ops.aten
V = SSAValue

# --- matmuls ---------------------------------------------------------------------------------------------------------


def _is_weight(value: V) -> bool:
    return isinstance(value.owner, qc.ConstOp | qc.DequantizeOp)


@lowers(aten.linear.default)
def _linear(s: Scope, node: fx.Node, a: Args) -> Result:
    x, w = s.value(a["input"]), s.value(a["weight"])
    bias = s.value(a["bias"]) if a.get("bias") is not None else None
    rank = len(shape_of(w.type))
    if rank == 1:  # a weight (K) gives one output without a dimension of its own
        w = s.reshape(w, [1, *shape_of(w.type)])
    wide = s.shape(node) if rank == 2 else (*s.shape(node), 1)
    if _is_weight(w) and s.dtype(node) in FLOATS_OF_MATMUL:
        flat = bias if bias is None or shape_of(bias.type) else s.reshape(bias, [1])
        out = s.insert(qc.LinearOp(x, w, flat, types.tensor(wide, s.dtype(node))))
        return s.reshape(out, s.shape(node))
    product_ = _matmul(s, x, s.transpose(w, [1, 0]))
    total = product_ if bias is None else _add(s, product_, bias)
    return s.reshape(total, s.shape(node))


def _add(s: Scope, x: V, y: V) -> V:
    dtype = tensor_dtype(x.type)
    return s.pointwise([x, y], lambda m, p, q: m.add(p, q), compute=opmath(dtype), result=dtype)


def _matmul(s: Scope, x: V, y: V) -> V:
    """numpy.matmul on ranks >= 1: batch dims broadcast explicitly, a shared right side folds the left's batch."""
    left, right = shape_of(x.type), shape_of(y.type)
    if len(right) == 1:
        return _drop(s, _matmul(s, x, s.reshape(y, [*right, 1])), -1)
    if len(left) == 1:
        return _drop(s, _matmul(s, s.reshape(x, [1, *left]), y), -2)
    dtype = tensor_dtype(x.type)
    if len(right) == 2 and len(left) > 2 and dtype in FLOATS_OF_MATMUL:
        rows = product(left[:-1]).to_dim()
        flat = s.reshape(x, [rows, left[-1]])
        out = s.insert(qc.BatchMatmulOp(flat, y, types.tensor([rows, right[-1]], dtype)))
        return s.reshape(out, [*left[:-1], right[-1]])
    batch = broadcast_shapes([left[:-2], right[:-2]])
    if dtype not in FLOATS_OF_MATMUL:
        return _plain_product(s, x, y, batch)
    a, b = s.broadcast(x, [*batch, *left[-2:]]), s.broadcast(y, [*batch, *right[-2:]])
    return s.insert(qc.BatchMatmulOp(a, b, types.tensor([*batch, left[-2], right[-1]], dtype)))


FLOATS_OF_MATMUL: tuple[DType, ...] = ("f32", "bf16", "f16")
"""The types that kernels of matrix products support."""


def _plain_product(s: Scope, x: V, y: V, batch: Shape) -> V:
    """Matrix products of integers and of f64 as a reduction loop."""
    left, right, dtype = shape_of(x.type), shape_of(y.type), tensor_dtype(x.type)
    rank = len(right)
    columns = s.transpose(y, [*range(rank - 2), rank - 1, rank - 2])
    inputs = [
        s.reshape(x, [*left[:-1], 1, left[-1]]), s.reshape(columns, [*right[:-2], 1, right[-1], right[-2]]),
    ]  # fmt: skip
    wide = (*batch, left[-2], right[-1], left[-1])
    return s.fold(inputs, wide, (len(wide) - 1,), "add", compute=dtype, term=lambda m, p, q: m.mul(p, q))


def _drop(s: Scope, value: V, axis: int) -> V:
    shape = list(shape_of(value.type))
    del shape[axis]
    return s.reshape(value, shape)


@lowers(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default)
def _product(s: Scope, node: fx.Node, a: Args) -> Result:
    x, y = list(a.values())[:2]
    return s.reshape(_matmul(s, s.value(x), s.value(y)), s.shape(node))


@lowers(aten.addmm.default, aten.baddbmm.default)
def _addmm(s: Scope, node: fx.Node, a: Args) -> Result:
    """beta * self + alpha * (x @ y); the sum in fp32, rounded once more than a fused kernel would."""
    first, second = ("mat1", "mat2") if node.target is aten.addmm.default else ("batch1", "batch2")
    out = _matmul(s, s.value(a[first]), s.value(a[second]))
    alpha, beta, dtype = a["alpha"], a["beta"], s.dtype(node)
    if beta == 0 and alpha == 1:
        return out

    def body(m: Scalars, x: V, y: V) -> V:
        scaled = x if alpha == 1 else m.mul(x, m.const(alpha))
        return m.add(scaled, y if beta == 1 else m.mul(y, m.const(beta)))

    added = s.value(a["self"])
    return s.pointwise([out, added], body, compute=opmath(dtype), result=dtype, shape=s.shape(node))


@lowers(aten.addbmm.default)
def _addbmm(s: Scope, node: fx.Node, a: Args) -> Result:
    """beta * self + alpha * the sum of all products of a batch."""
    dtype, alpha, beta = s.dtype(node), a["alpha"], a["beta"]
    compute = opmath(dtype)
    products = _matmul(s, s.value(a["batch1"]), s.value(a["batch2"]))
    total = s.reduce(products, (0,), "add", compute=compute)

    def body(m: Scalars, x: V, y: V) -> V:
        scaled = x if alpha == 1 else m.mul(x, m.const(alpha))
        return m.add(scaled, y if beta == 1 else m.mul(y, m.const(beta))) if beta != 0 else scaled

    return s.pointwise([total, s.value(a["self"])], body, compute=compute, result=dtype, shape=s.shape(node))


@lowers(aten._trilinear.default)
def _trilinear(s: Scope, node: fx.Node, a: Args) -> Result:
    """The product of three tensors with inserted unit dims, summed over `sumdim`: bilinear layers."""
    rank = len(shape_of(s.value(a["i1"]).type)) + len(a["expand1"])
    spread = []
    for name, expand in (("i1", a["expand1"]), ("i2", a["expand2"]), ("i3", a["expand3"])):
        value = s.value(a[name])
        sizes = iter(shape_of(value.type))
        spread.append(s.reshape(value, [1 if i in expand else next(sizes) for i in range(rank)]))
    wide = broadcast_shapes([shape_of(v.type) for v in spread])
    axes = listed_axes(a["sumdim"], rank)
    compute = opmath(s.dtype(node))
    total = s.fold(spread, wide, axes, "add", compute=compute, term=lambda m, x, y, z: m.mul(m.mul(x, y), z))
    return s.cast(s.reshape(total, s.shape(node)), s.dtype(node))


@lowers(aten._cdist_forward.default)
def _cdist(s: Scope, node: fx.Node, a: Args) -> Result:
    """Distances of all pairs of rows, (…, P, M) and (…, R, M): the p-norm of their differences."""
    x, y = s.value(a["x1"]), s.value(a["x2"])
    left, right, dtype = shape_of(x.type), shape_of(y.type), s.dtype(node)
    order, compute = float(a["p"]), opmath(dtype)
    inputs = [s.reshape(x, [*left[:-1], 1, left[-1]]), s.reshape(y, [*right[:-2], 1, *right[-2:]])]
    wide = (*s.shape(node), left[-1])
    kind: Reduction = "max" if pymath.isinf(order) else "add"

    def term(m: Scalars, p: V, q: V) -> V:
        return _norm_term(m, m.sub(p, q), order)

    total = s.fold(inputs, wide, (len(wide) - 1,), kind, compute=compute, term=term)
    return s.cast(_norm_root(s, total, order, compute), dtype)


# --- norms and softmax -----------------------------------------------------------------------------------------------


@lowers(aten.layer_norm.default, aten.native_layer_norm.default)
def _layer_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    x, weight, bias, shape = _norm_operands(s, a)
    native = node.target is aten.native_layer_norm.default
    op = qc.LayerNormOp(x, weight, bias, x.type, eps=float(a["eps"]))
    out = s.reshape(s.insert(op), shape)
    return (out, None, None) if native else out


@lowers(aten.rms_norm.default, aten._fused_rms_norm.default)
def _rms_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    x, weight, _, shape = _norm_operands(s, a)
    fused = node.target is aten._fused_rms_norm.default
    dtype = a["input"].meta["val"].dtype
    eps = a["eps"] if a.get("eps") is not None else torch.finfo(dtype).eps
    out = s.reshape(s.insert(qc.RmsNormOp(x, weight, x.type, eps=float(eps))), shape)
    return (out, None) if fused else out


def _norm_operands(s: Scope, a: Args) -> tuple[V, V | None, V | None, Shape]:
    """x with the normalised dims as one last dim, weight and bias flattened likewise, and x's own shape."""
    x = s.value(a["input"])
    shape, count = shape_of(x.type), len(a["normalized_shape"])
    inner = product(shape[len(shape) - count :]).to_dim()
    flat = s.reshape(x, [*shape[: len(shape) - count], inner])
    affine = [s.reshape(s.value(a[n]), [inner]) if a.get(n) is not None else None for n in ("weight", "bias")]
    same = [v if v is None else s.cast(v, tensor_dtype(x.type)) for v in affine]
    return flat, same[0], same[1], shape


@lowers(aten.native_group_norm.default)
def _group_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    """Layer norm over each group of channels, then weight and bias per channel; statistics in fp32."""
    x, groups = s.value(a["input"]), int(a["group"])
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    compute = opmath(dtype)
    sizes: list[Dim] = [product([shape[1]]).divide_exact(groups).to_dim(), *shape[2:]]
    grouped = s.reshape(x, [shape[0], groups, *sizes])
    out = s.reshape(_standardised(s, grouped, tuple(range(2, 2 + len(sizes))), float(a["eps"]), compute), shape)
    return (s.cast(_affine_per_channel(s, out, a, compute), dtype), None, None)


@lowers(aten._native_batch_norm_legit.no_stats, aten.native_batch_norm.default)
def _instance_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    """Batch norm with the statistics of its input: torch's form of an instance norm, over (1, n * c, …)."""
    if a.get("running_mean") is not None:
        if a["training"]:
            raise s.unsupported(node, "the model is in training mode; call model.eval() before compiling it")
        return BUILDERS[aten._native_batch_norm_legit_no_training.default](s, node, a)
    x = s.value(a["input"])
    shape, dtype = shape_of(x.type), tensor_dtype(x.type)
    compute = opmath(dtype)
    axes = tuple(i for i in range(len(shape)) if i != 1)
    out = _standardised(s, x, axes, float(a["eps"]), compute)
    return (s.cast(_affine_per_channel(s, out, a, compute), dtype), None, None)


def _standardised(s: Scope, x: V, axes: tuple[int, ...], eps: float, compute: DType) -> V:
    """(x - mean) / sqrt(var + eps) over `axes`, in `compute`: two passes, the biased variance."""
    shape = shape_of(x.type)
    sizes = [shape[i] for i in axes]
    mean = _divide_by_count(s, s.reduce(x, axes, "add", compute=compute), sizes, 0, compute)
    centred = s.pointwise(
        [x, s.keep_axes(mean, shape, axes)], lambda m, p, q: m.sub(p, q), compute=compute, result=compute
    )
    squares = s.reduce(centred, axes, "add", compute=compute, term=lambda m, v: m.mul(v, v))
    var = s.keep_axes(_divide_by_count(s, squares, sizes, 0, compute), shape, axes)

    def scale(m: Scalars, value: V, variance: V) -> V:
        return m.div(value, m.call("sqrt", m.add(variance, m.const(eps))))

    return s.pointwise([centred, var], scale, compute=compute, result=compute)


def _affine_per_channel(s: Scope, x: V, a: Args, compute: DType) -> V:
    """x * weight + bias, if given, with one entry for each channel (dim 1)."""
    shape = shape_of(x.type)
    spread = [1, shape[1], *([1] * (len(shape) - 2))]
    for name in [n for n in ("weight", "bias") if a.get(n) is not None]:
        affine = s.reshape(s.value(a[name]), spread)
        step = Scalars.mul if name == "weight" else Scalars.add
        x = s.pointwise([x, affine], lambda m, p, q, f=step: f(m, p, q), compute=compute, result=compute)
    return x


@lowers(aten._softmax.default, aten.softmax.int)
def _softmax(s: Scope, node: fx.Node, a: Args) -> Result:
    x = s.cast(s.value(a["self"]), s.dtype(node))
    return _along_last(
        s, x, a["dim"], lambda last: s.insert(qc.SoftmaxOp(last, last.type, axis=len(shape_of(last.type)) - 1))
    )


def _along_last(s: Scope, x: V, axis: int, build: Any) -> V:
    """Applies `build` to x with `axis` last, and moves the axis back."""
    rank = len(shape_of(x.type))
    if rank == 0:
        return s.reshape(build(s.reshape(x, [1])), [])
    moved = s.move_axis(x, axis % rank, rank - 1)
    out: V = build(moved)
    return s.move_axis(out, rank - 1, axis % rank)


@lowers(aten._log_softmax.default, aten.log_softmax.int)
def _log_softmax(s: Scope, node: fx.Node, a: Args) -> Result:
    """x - max - log(sum(exp(x - max))), in fp32 throughout."""
    x, result = s.value(a["self"]), s.dtype(node)
    shape = shape_of(x.type)
    if not shape:
        return s.full(0, shape, result)
    axes, compute = normalize_axes(a["dim"], len(shape)), opmath(result)
    top = s.keep_axes(s.reduce(x, axes, "max", compute=compute), shape, axes)
    shifted = s.pointwise([x, top], lambda m, p, q: m.sub(p, q), compute=compute, result=compute)
    total = s.reduce(shifted, axes, "add", compute=compute, term=lambda m, v: m.call("exp", v))
    total = s.keep_axes(total, shape, axes)
    return s.pointwise([shifted, total], lambda m, p, q: m.sub(p, m.call("log", q)), compute=compute, result=result)


# --- reductions ------------------------------------------------------------------------------------------------------


def _axes(s: Scope, a: Args) -> tuple[V, Shape, tuple[int, ...]]:
    x = s.value(a["self"])
    shape = shape_of(x.type)
    return x, shape, normalize_axes(a.get("dim"), len(shape))


def _finish(s: Scope, node: fx.Node, value: V) -> V:
    """Applies keepdim and the result's type."""
    return s.cast(s.reshape(value, s.shape(node)), s.dtype(node))


@lowers(aten.sum.default, aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int)
def _sum(s: Scope, node: fx.Node, a: Args) -> Result:
    x, _, axes = _axes(s, a)
    kind: Reduction = "mul" if "prod" in overload(node) else "add"
    return _finish(s, node, s.reduce(x, axes, kind, compute=opmath(s.dtype(node))))


@lowers(aten.mean.default, aten.mean.dim)
def _mean(s: Scope, node: fx.Node, a: Args) -> Result:
    x, shape, axes = _axes(s, a)
    compute = opmath(s.dtype(node))
    total = s.reduce(x, axes, "add", compute=compute)
    return _finish(s, node, _divide_by_count(s, total, [shape[i] for i in axes], 0, compute))


def _divide_by_count(s: Scope, total: V, sizes: Sequence[Dim], less: float, compute: DType) -> V:
    """total / max(product of sizes - less, 0); the count may be symbolic."""
    count = product(sizes).to_dim()
    if isinstance(count, int):
        divisor = max(count - less, 0)
        return s.pointwise([total], lambda m, x: m.div(x, m.const(divisor)), compute=compute, result=compute)
    number = s.symbolic(count)

    def body(m: Scalars, x: V, n: V) -> V:
        return m.div(x, m.maximum(m.sub(n, m.const(less)), m.const(0)) if less else n)

    return s.pointwise([total, number], body, compute=compute, result=compute)


@lowers(aten.var.correction, aten.var_mean.correction)
def _var(s: Scope, node: fx.Node, a: Args) -> Result:
    """Two passes: the mean, then the squared deviations."""
    x, shape, axes = _axes(s, a)
    both = node.target is aten.var_mean.correction
    dtype, compute = tensor_dtype(x.type), opmath(tensor_dtype(x.type))
    correction = 1 if a.get("correction") is None else a["correction"]
    sizes = [shape[i] for i in axes]
    mean = _divide_by_count(s, s.reduce(x, axes, "add", compute=compute), sizes, 0, compute)
    centred = s.pointwise(
        [x, s.keep_axes(mean, shape, axes)], lambda m, p, q: m.sub(p, q), compute=compute, result=compute
    )
    total = s.reduce(centred, axes, "add", compute=compute, term=lambda m, v: m.mul(v, v))
    results = [_divide_by_count(s, total, sizes, correction, compute), mean]
    metas = node.meta["val"] if both else [node.meta["val"]]
    out = [s.cast(s.reshape(r, s.symbols.shape(m.shape)), dtype) for r, m in zip(results, metas, strict=False)]
    return tuple(out) if both else out[0]


@lowers(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(s: Scope, node: fx.Node, a: Args) -> Result:
    x, _, axes = _axes(s, a)
    kind: Reduction = "max" if "max" in overload(node) else "min"
    return _finish(s, node, s.reduce(x, axes, kind, compute=opmath(s.dtype(node))))


@lowers(aten.linalg_vector_norm.default)
def _vector_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    """(sum |x|^p)^(1/p); the largest or smallest |x| for p = ±inf, the count of nonzeros for p = 0."""
    x, _, axes = _axes(s, a)
    order, compute = float(a["ord"]), opmath(s.dtype(node))
    if pymath.isinf(order):
        kind: Reduction = "max" if order > 0 else "min"
        return _finish(s, node, s.reduce(x, axes, kind, compute=compute, term=lambda m, v: m.abs(v)))

    total = s.reduce(x, axes, "add", compute=compute, term=lambda m, v: _norm_term(m, v, order))
    return _finish(s, node, _norm_root(s, total, order, compute))


def _norm_term(m: Scalars, v: V, order: float) -> V:
    """The term that a p-norm sums (or maximises, for inf)."""
    if order == 0:
        return m.select(m.compare("ne", v, m.const(0)), m.const(1), m.const(0))
    if order in (1, 2) or pymath.isinf(order):
        return m.mul(v, v) if order == 2 else m.abs(v)
    return m.call("powf", m.abs(v), m.const(order))


def _norm_root(s: Scope, total: V, order: float, compute: DType) -> V:
    if order in (0, 1) or pymath.isinf(order):
        return total

    def root(m: Scalars, v: V) -> V:
        return m.call("sqrt", v) if order == 2 else m.call("powf", v, m.const(1 / order))

    return s.pointwise([total], root, compute=compute, result=compute)


@lowers(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _any(s: Scope, node: fx.Node, a: Args) -> Result:
    x, _, axes = _axes(s, a)
    kind: Reduction = "or" if "any" in overload(node) else "and"
    return _finish(s, node, s.reduce(x, axes, kind, compute="i1"))


# --- positions of extremes -------------------------------------------------------------------------------------------


@lowers(aten.argmax.default, aten.argmin.default)
def _argmax(s: Scope, node: fx.Node, a: Args) -> Result:
    kind: Reduction = "min" if "min" in overload(node) else "max"
    return s.reshape(_index_of_extreme(s, s.value(a["self"]), a.get("dim"), kind), s.shape(node))


def _index_of_extreme(s: Scope, x: V, axis: int | None, kind: Reduction) -> V:
    """The first position of the largest (smallest) value along `axis`, which is dropped; NaN counts as extreme.

    Two loops that any target has: the extreme, then the smallest index among the values that equal it.
    """
    dtype = tensor_dtype(x.type)
    if axis is None:
        x, axis = s.reshape(x, [product(shape_of(x.type)).to_dim()]), 0
    shape = shape_of(x.type)
    if not shape:
        return s.full(0, [], "i64")
    axis %= len(shape)
    compute = opmath(dtype)
    best = s.keep_axes(s.reduce(x, (axis,), kind, compute=compute), shape, (axis,))

    def position(m: Scalars, value: V, extreme: V) -> V:
        hit = m.compare("eq", value, extreme)
        if m.floating:
            hit = m.bitwise("or", hit, m.is_nan(value))
        number = Scalars(m.builder, "i64")
        return number.select(hit, number.index(axis), number.const(2**63 - 1))

    positions = s.pointwise([x, best], position, compute=compute, result="i64")
    return s.reduce(positions, (axis,), "min", compute="i64")


@lowers(aten.max.dim, aten.min.dim)
def _extreme_and_index(s: Scope, node: fx.Node, a: Args) -> Result:
    x = s.value(a["self"])
    axes = normalize_axes(a["dim"], len(shape_of(x.type)))
    kind: Reduction = "min" if "min" in overload(node) else "max"
    dtype = tensor_dtype(x.type)
    value = s.reduce(x, axes, kind, compute=opmath(dtype))
    index = _index_of_extreme(s, x, axes[0] if axes else None, kind)
    shape = s.symbols.shape(node.meta["val"][0].shape)
    return s.cast(s.reshape(value, shape), dtype), s.reshape(index, shape)
