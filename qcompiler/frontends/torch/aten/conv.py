"""Convolutions and batch norm of ATen.

    aten.convolution on (b, c, h, w)     qc.conv2d
    aten.convolution on (b, c, length)   qc.conv2d of height 1, between views
    batch_norm                           x * scale + shift, both computed from constants, so at load time
    transposed convolution               zeros between the pixels, then qc.conv2d with the kernel rotated

insert-qdq has prepared the graph: batch norms behind a convolution are part of its weight, and weights are stored as
their products read them (conv_weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from xdsl.ir import Attribute, SSAValue

from qcompiler.frontends.common.scalars import FLOATS, Scalars, opmath
from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, lowers
from qcompiler.ir import build, qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim

aten = torch.ops.aten
V = SSAValue


@lowers(aten.convolution.default)
def convolution(s: Scope, node: fx.Node, a: Args) -> Result:
    if a["transposed"]:
        return _transposed(s, node, a)
    x, w = s.value(a["input"]), s.value(a["weight"])
    bias = s.value(a["bias"]) if a.get("bias") is not None else None
    count = _dimensions(s, node, w)
    if int(a["groups"]) > 1 and tensor_dtype(x.type) not in FLOATS:
        raise s.unsupported(
            node, "a convolution of integers in groups; convert its operands, for example with .float()"
        )
    padding = _two(a["padding"], count, 0)
    op = qc.Conv2dOp(
        _image(s, x, count),
        _image(s, w, count),
        bias,
        _image_type(s, node, count),
        strides=_two(a["stride"], count, 1),
        padding=[*padding, *padding],
        dilation=_two(a["dilation"], count, 1),
        groups=int(a["groups"]),
    )
    return _from_image(s, s.insert(op), s.shape(node))


def _transposed(s: Scope, node: fx.Node, a: Args) -> Result:
    """The convolution of an image with zeros between its pixels, with the rotated kernel and a wider border."""
    if int(a["groups"]) != 1:
        raise s.unsupported(node, f"a transposed convolution of {a['groups']} groups")
    if a["weight"].target is not aten.flip.default:  # as insert-qdq stores it: already rotated
        raise s.unsupported(node, "a transposed convolution whose weight is not a parameter of its own")
    w = s.value(a["weight"].args[0])
    count = _dimensions(s, node, w)
    bias = s.value(a["bias"]) if a.get("bias") is not None else None
    kernel = [1] * (2 - count) + [int(n) for n in shape_of(w.type)[2:]]
    strides, dilation = _two(a["stride"], count, 1), _two(a["dilation"], count, 1)
    padding, more = _two(a["padding"], count, 0), _two(a["output_padding"], count, 0)
    before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    after = [n + m for n, m in zip(before, more, strict=True)]
    op = qc.Conv2dOp(
        _cut(s, _spread(s, _image(s, s.value(a["input"]), count), strides), before, after),
        _image(s, s.transpose(w, [1, 0, *range(2, 2 + count)]), count),
        bias,
        _image_type(s, node, count),
        strides=(1, 1),
        padding=[max(n, 0) for n in (*before, *after)],
        dilation=dilation,
        groups=1,
    )
    return _from_image(s, s.insert(op), s.shape(node))


def _spread(s: Scope, x: V, strides: Sequence[int]) -> V:
    """`strides - 1` zeros between neighbours of the last two dims."""
    shape = shape_of(x.type)
    if tuple(strides) == (1, 1):
        return x
    wide = [((dim(n) - 1) * step + 1).to_dim() for n, step in zip(shape[2:], strides, strict=True)]
    zeros = s.full(0, [*shape[:2], *wide], tensor_dtype(x.type))
    return build.insert_slice(s.builder, x, zeros, [0, 0, 0, 0], [1, 1, *strides])


def _cut(s: Scope, x: V, before: Sequence[int], after: Sequence[int]) -> V:
    """A border of negative width: removes that much of the last two dims."""
    for axis, (first, last) in enumerate(zip(before, after, strict=True), 2):
        if first < 0 or last < 0:
            size = dim(shape_of(x.type)[axis]) + (min(first, 0) + min(last, 0))
            x = s.slice(x, axis, max(-first, 0), size.to_dim())
    return x


def _dimensions(s: Scope, node: fx.Node, w: V) -> int:
    """The number of dims of a convolution: 1 or 2."""
    shape = shape_of(w.type)
    if len(shape) not in (3, 4):
        raise s.unsupported(node, f"a convolution over {len(shape) - 2} dimensions; there are kernels for one and two")
    if not all(isinstance(size, int) for size in shape):
        raise s.unsupported(node, f"a weight of shape {shape} that is not fixed")
    return len(shape) - 2


def _image_type(s: Scope, node: fx.Node, count: int) -> Attribute:
    """The type of the result as an image."""
    out = s.shape(node)
    return types.tensor([*out[:2], *([1] * (2 - count)), *out[2:]], s.dtype(node))


def _from_image(s: Scope, result: V, out: Sequence[Dim]) -> V:
    """(b, c, 1, length) as (b, c, length), if that is the result's shape."""
    if len(out) == 4:
        return result
    last = s.reshape(s.transpose(result, [0, 2, 3, 1]), [out[0], out[2], out[1]])
    return s.transpose(last, [0, 2, 1])


def _two(numbers: Sequence[int], count: int, missing: int) -> list[int]:
    """torch's single number or list as two numbers; `missing` is the height's for a conv1d."""
    full = [int(n) for n in numbers] * (count if len(numbers) == 1 else 1)
    return [missing] * (2 - count) + full


def _image(s: Scope, value: V, count: int) -> V:
    """(b, c, length) as (b, c, 1, length), via (b, 1, length, c), the order in which all of them are stored."""
    if count == 2:
        return value
    b, c, length = shape_of(value.type)
    last = s.reshape(s.transpose(value, [0, 2, 1]), [b, 1, length, c])
    return s.transpose(last, [0, 3, 1, 2])


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    """x * scale + shift over channels (dim 1), in fp32 and rounded once.

    scale = weight / sqrt(var + eps) and shift = bias - mean * scale, as in torch's CPU kernel.
    """
    x = s.value(a["input"])
    shape, dtype, eps = shape_of(x.type), tensor_dtype(x.type), float(a["eps"])
    compute = opmath(dtype)
    mean, var = s.value(a["running_mean"]), s.value(a["running_var"])
    weight, bias = (s.value(a[n]) if a.get(n) is not None else None for n in ("weight", "bias"))

    def scale_of(m: Scalars, variance: V, *factor: V) -> V:
        inverse = m.div(m.const(1), m.call("sqrt", m.add(variance, m.const(eps))))
        return m.mul(inverse, factor[0]) if factor else inverse

    def shift_of(m: Scalars, average: V, factor: V, *added: V) -> V:
        moved = m.mul(average, factor)
        return m.sub(added[0], moved) if added else m.sub(m.const(0), moved)

    scale = s.pointwise([var, *([weight] if weight is not None else [])], scale_of, compute=compute, result=compute)
    given = [mean, scale, *([bias] if bias is not None else [])]
    shift = s.pointwise(given, shift_of, compute=compute, result=compute)
    spread = [1, shape[1], *([1] * (len(shape) - 2))]
    affine = [s.reshape(v, spread) for v in (scale, shift)]
    out = s.pointwise([x, *affine], lambda m, v, f, t: m.add(m.mul(v, f), t), compute=compute, result=dtype)
    return (out, None, None)
