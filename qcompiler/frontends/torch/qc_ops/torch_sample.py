"""`torch.ops.qc.sample`: one token for each sequence, as plan/sample_rule.py defines it."""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.ir import types
from qcompiler.ir.qc_index import SampleOp
from qcompiler.plan import sample_rule

Tensor = torch.Tensor


@torch.library.custom_op("qc::sample", mutates_args=())
def sample(x: Tensor, how: Tensor, tallies: Tensor, bias: Tensor) -> Tensor:
    """x (rows, n), how (b, 10) i64, tallies (b, n) and bias (b, n) f32; returns tokens (b,) i64."""
    given = [to_numpy(each.detach()) for each in (x.float(), how, tallies, bias)]
    return torch.from_numpy(sample_rule.sample(*given))


@sample.register_fake
def _(x: Tensor, how: Tensor, tallies: Tensor, bias: Tensor) -> Tensor:
    del x, tallies, bias
    return how.new_empty((how.shape[0],))


def import_sample(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.sample`."""
    x, how, tallies, bias = (s.value(each) for each in node.args)
    return s.insert(SampleOp(x, how, tallies, bias, types.tensor(s.shape(node), "i64")))


OPERATOR = torch.ops.qc.sample.default

__all__ = ["OPERATOR", "import_sample", "sample"]
