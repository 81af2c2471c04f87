"""`torch.ops.qc.ring_attention`: attention over a ring of keys, in plain torch.

    ring_attention(q, k, v, last, window, scale, softcap, sinks=None) -> Tensor

q (b, heads, s, d), k (b, kv heads, R, d) and v (b, kv heads, R, dv); `last` (b, s), integers, has the queries'
positions, and `sinks` (b or 1, heads or 1, s or 1, 1), floats, one more score for each of them.  Row r of a ring holds
the key of the latest position that is congruent to r modulo R; a query at position p sees the positions from
p - window + 1 to p that are not negative.  The rule is that of `qc.attention` (ir/qc.py).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.errors import ArgumentError
from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc, types

Tensor = torch.Tensor
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("qc::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(b, heads, s, dv). ArgumentError for a ring that is too short for the window of every query, and for sinks of
    another shape."""
    _check(q, k, window, sinks)
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.float().repeat_interleave(groups, 1) for each in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    position = last[:, None, :, None].long()
    behind = torch.remainder(position - torch.arange(k.shape[2], device=q.device), k.shape[2])
    seen = (behind < window) & (behind <= position)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]  # no key seen: zeros
    return (weights @ values).to(q.dtype)


@ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: Tensor,
    window: int,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    del last, scale, softcap
    _check(q, k, window, sinks)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _check(q: Tensor, k: Tensor, window: int, sinks: Tensor | None) -> None:
    if window < 1 or k.shape[2] < window:
        raise ArgumentError(f"a ring of {k.shape[2]} rows does not hold a window of {window} positions")
    if sinks is None:
        return
    fits = sinks.ndim == 4 and all(n in (1, size) for n, size in zip(sinks.shape, (*q.shape[:3], 1), strict=True))
    if not fits or sinks.dtype not in _FLOATS:
        kinds = ", ".join(str(each).removeprefix("torch.") for each in _FLOATS)
        raise ArgumentError(
            f"sinks are {sinks.dtype} of shape {tuple(sinks.shape)}; they are {kinds} of shape (b or 1, heads or 1, s "
            "or 1, 1)"
        )


def import_ring_attention(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.attention` with `ring`."""
    q, k, v, last = (s.value(each) for each in node.args[:4])
    window, scale, softcap = (cast("float | None", each) for each in node.args[4:7])
    lone = None if len(node.args) < 8 or node.args[7] is None else s.value(node.args[7])
    assert window is not None and scale is not None
    cap = None if softcap is None else float(softcap)
    type_ = types.tensor(s.shape(node), s.dtype(node))
    op = qc.AttentionOp(
        q, k, v, None, type_, scale=float(scale), window=int(window), softcap=cap, last=last, sinks=lone, ring=True
    )
    return s.insert(op)


IMPORTS = {torch.ops.qc.ring_attention.default: import_ring_attention}

__all__ = ["IMPORTS", "ring_attention"]
