"""`torch.ops.qc.linear` and `torch.ops.qc.convolution`: products whose factors have the type of the weight, in plain
torch.

    linear(x, w, bias) -> Tensor                x is rounded to w's type; products and sums in fp32, rounded once to
    convolution(input, weight, bias, …)         x's type

They stand for `aten.linear` and `aten.convolution` where a recipe chooses another arithmetic than the model's
(`QuantConfig(compute=…)`). The imported ops are `qc.linear` and `qc.conv2d`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.conv import convolution as import_aten
from qcompiler.frontends.torch.aten.scope import Result, Scope, bind
from qcompiler.ir import qc, types

Tensor = torch.Tensor


@torch.library.custom_op("qc::linear", mutates_args=())
def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x (…, K) @ w (N, K)ᵀ + bias (N)``, in x's type."""
    wide = None if bias is None else bias.to(torch.float32)
    rows = x.to(w.dtype).to(torch.float32)
    return torch.nn.functional.linear(rows, w.to(torch.float32), wide).to(x.dtype)


@linear.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("qc::convolution", mutates_args=())
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """`aten.convolution` of ``input (b, C, …)`` rounded to the type of ``weight (O, C / groups, …)``, in input's
    type."""
    wide = None if bias is None else bias.to(torch.float32)
    image, factors = input.to(weight.dtype).to(torch.float32), weight.to(torch.float32)
    numbers = (stride, padding, dilation, transposed, output_padding, groups)
    sums: Tensor = torch.ops.aten.convolution(image, factors, wide, *numbers)
    return sums.to(input.dtype)


@convolution.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None, *numbers: object) -> Tensor:
    same = None if bias is None else bias.to(input.dtype)
    made: Tensor = torch.ops.aten.convolution(input, weight.to(input.dtype), same, *numbers)
    return made


def import_linear(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.linear`."""
    x, w, bias = (None if each is None else s.value(each) for each in node.args)
    assert x is not None and w is not None
    return s.insert(qc.LinearOp(x, w, bias, types.tensor(s.shape(node), s.dtype(node))))


def import_convolution(s: Scope, node: fx.Node) -> Result:
    """`qc.conv2d`."""
    return import_aten(s, node, bind(node))


IMPORTS = {torch.ops.qc.linear.default: import_linear, torch.ops.qc.convolution.default: import_convolution}

__all__ = ["IMPORTS", "convolution", "linear"]
