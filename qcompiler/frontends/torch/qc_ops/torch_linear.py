"""`torch.ops.qc.linear`: a linear whose factors have the type of its weight, in plain torch.

    linear(x, w, bias) -> Tensor        x is rounded to w's type; products and sums in fp32, rounded once to x's type

It stands for `aten.linear` where a recipe chooses another arithmetic than the model's (`QuantConfig(compute=…)`). The
imported op is `qc.linear`.
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.scope import Scope
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


def import_linear(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.linear`."""
    x, w, bias = (None if each is None else s.value(each) for each in node.args)
    assert x is not None and w is not None
    return s.insert(qc.LinearOp(x, w, bias, types.tensor(s.shape(node), s.dtype(node))))


IMPORTS = {torch.ops.qc.linear.default: import_linear}

__all__ = ["IMPORTS", "linear"]
