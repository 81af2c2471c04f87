"""Prologues of `qc.linear`: a norm of x and of what it multiplies and adds, as the region that the op holds.

    ^bb0(%x: tensor<1x64xf32>, %weight: tensor<64xf32>):
      %rows = qc.rms_norm %x weight(%weight) {eps = 1e-05} : tensor<1x64xf32>
      qc.yield %rows

`LinearOp.norm` is the norm in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, Region, SSAValue

from qcompiler.ir.qc import YieldOp
from qcompiler.ir.qc_norm import LayerNormOp, RmsNormOp, norm_of


def norm_region(norm: LayerNormOp | RmsNormOp, x: SSAValue, affine: Sequence[SSAValue]) -> Region:
    """The prologue of a linear that reads the norm of `x`. `affine` are the norm's weight and bias, if it has them."""
    block = Block(arg_types=[x.type, *(value.type for value in affine)])
    made = norm_of(norm, block.args)
    block.add_ops([made, YieldOp(made.result)])
    return Region(block)
