"""`torch.ops.qc.hadamard`: an orthogonal transform of each run of columns, in plain torch.

    hadamard(x, block) -> Tensor

The equation is that of `qc.hadamard` (ir/qc_hadamard.py).
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc
from qcompiler.plan.kinds.hadamard import scale_of

Tensor = torch.Tensor


@torch.library.custom_op("qc::hadamard", mutates_args=())
def hadamard(x: Tensor, block: int) -> Tensor:
    """Runs of `block` columns of x (…, K) times the orthonormal Hadamard matrix, in fp32, rounded once to x's type."""
    values, width = x.detach().to(torch.float32).reshape(-1), 1
    while width < block:
        low, high = values.view(-1, 2, width).unbind(1)
        values = torch.stack((low + high, low - high), 1).reshape(-1)
        width *= 2
    return (values * scale_of(block)).reshape(x.shape).to(x.dtype)


@hadamard.register_fake
def _(x: Tensor, block: int) -> Tensor:
    del block
    return x.new_empty(x.shape)


def import_hadamard(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.hadamard`."""
    x, block = node.args
    return s.insert(qc.HadamardOp(s.value(x), block=int(block)))  # type: ignore[arg-type]


IMPORTS = {torch.ops.qc.hadamard.default: import_hadamard}

__all__ = ["IMPORTS", "hadamard"]
