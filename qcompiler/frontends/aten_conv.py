"""Convolutions and batch norm of ATen.

    aten.convolution on (b, c, h, w)     qc.conv2d
    aten.convolution on (b, c, length)   qc.conv2d of height 1, between views
    batch_norm                           x * scale + shift, both made from constants and so at load time

What stands in the graph has been prepared by `fold-conv` (batch norms after a convolution are part of its weight,
transposed convolutions are plain ones) and by `insert-qdq` (how the weight is stored).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.scalars import Scalars, opmath
from qcompiler.frontends.scope import Args, Result, Scope, lowers
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim

aten = torch.ops.aten
V = SSAValue


@lowers(aten.convolution.default)
def _convolution(s: Scope, node: fx.Node, a: Args) -> Result:
    if a["transposed"]:
        raise s.unsupported(node, "a transposed convolution whose weight is not a parameter of the model")
    x, w = s.value(a["input"]), s.value(a["weight"])
    bias = s.value(a["bias"]) if a.get("bias") is not None else None
    count = len(shape_of(w.type)) - 2
    if count not in (1, 2):
        raise s.unsupported(node, f"a convolution over {count} dimensions; there are kernels for one and two")
    if not all(isinstance(size, int) for size in shape_of(w.type)):
        raise s.unsupported(node, f"a weight of shape {shape_of(w.type)} that is not fixed")
    padding = _two(a["padding"], count, 0)
    out: Sequence[Dim] = s.shape(node)
    op = qc.Conv2dOp(
        _image(s, x, count),
        _image(s, w, count),
        bias,
        types.tensor([*out[:2], *([1] * (2 - count)), *out[2:]], s.dtype(node)),
        strides=_two(a["stride"], count, 1),
        padding=[*padding, *padding],
        dilation=_two(a["dilation"], count, 1),
        groups=int(a["groups"]),
    )
    result = s.insert(op)
    if count == 2:
        return result
    last = s.reshape(s.transpose(result, [0, 2, 3, 1]), [out[0], out[2], out[1]])
    return s.transpose(last, [0, 2, 1])


def _two(numbers: Sequence[int], count: int, missing: int) -> list[int]:
    """torch's list of one number for all dims, or one for each, as two; `missing` for the height of a conv1d."""
    full = [int(n) for n in numbers] * (count if len(numbers) == 1 else 1)
    return [missing] * (2 - count) + full


def _image(s: Scope, value: V, count: int) -> V:
    """(b, c, length) as (b, c, 1, length), by way of (b, 1, length, c): the order in which all of them are stored."""
    if count == 2:
        return value
    b, c, length = shape_of(value.type)
    last = s.reshape(s.transpose(value, [0, 2, 1]), [b, 1, length, c])
    return s.transpose(last, [0, 3, 1, 2])


@lowers(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(s: Scope, node: fx.Node, a: Args) -> Result:
    """x * scale + shift over channels (dim 1), in fp32 and rounded once.

    scale = weight / sqrt(var + eps) and shift = bias - mean * scale, as torch's CPU kernel does it.
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
