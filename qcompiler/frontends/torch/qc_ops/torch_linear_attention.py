"""`torch.ops.qc.linear_attention`: a recurrence with a matrix as its state, token by token, in plain torch.

    linear_attention(state, query, key, value, decay, first, counts, rate, beta) -> (Tensor, Tensor)

Shapes and equations are those of `qc.linear_attention` (ir/qc_linear_attention.py).  The results are the new states and
what each token reads of them.
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc

Tensor = torch.Tensor


@torch.library.custom_op("qc::linear_attention", mutates_args=())
def linear_attention(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    first: Tensor,
    counts: Tensor,
    rate: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The states (slots, H, P, N) after the tokens that count, and outputs (B, T, H, P)."""
    count, shared = query.shape[0], state.shape[1] // query.shape[2]
    after, out = state.clone(memory_format=torch.contiguous_format), value.new_zeros(value.shape)
    begins = (first == 0).view(-1, 1, 1, 1)
    old = after[:count]
    now = torch.where(begins, torch.zeros_like(old), old)
    for t in range(query.shape[1]):
        k, q = (each[:, t].repeat_interleave(shared, 1).unsqueeze(2) for each in (key, query))
        kept = torch.exp(decay[:, t] if rate is None else decay[:, t] * rate).unsqueeze(2)
        before, added = now * kept, value[:, t]
        if beta is not None:
            added = beta[:, t].unsqueeze(-1) * (added - (before * k).sum(-1))
        new = before + added.unsqueeze(-1) * k
        reads = (t < counts).view(-1, 1, 1, 1)
        now = torch.where(reads, new, now)
        out[:, t] = torch.where(reads[..., 0], (new * q).sum(-1), torch.zeros_like(out[:, t]))
    after[:count] = torch.where((counts > 0).view(-1, 1, 1, 1), now, old)
    return after, out


@linear_attention.register_fake
def _(state: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    del query, key
    return state.new_empty(state.shape), value.new_empty(value.shape)


def import_linear_attention(s: Scope, node: fx.Node) -> tuple[SSAValue, SSAValue]:
    """`qc.linear_attention`."""
    *given, rate, beta = (None if each is None else s.value(each) for each in node.args)
    op = qc.LinearAttentionOp(*(each for each in given if each is not None), rate=rate, beta=beta)
    s.builder.insert(op)
    return op.after, op.out


IMPORTS = {torch.ops.qc.linear_attention.default: import_linear_attention}

__all__ = ["IMPORTS", "import_linear_attention", "linear_attention"]
