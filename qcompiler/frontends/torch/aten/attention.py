"""`scaled_dot_product_attention` as `qc.attention`: which dims are batch and heads, and which operands broadcast."""

from __future__ import annotations

import math

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.frontends.torch.aten.scope import Args, Result, Scope, Shape, broadcast_shapes, lowers
from qcompiler.ir import qc, types
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import product

aten = torch.ops.aten


@lowers(aten.scaled_dot_product_attention.default)
def _attention(s: Scope, node: fx.Node, a: Args) -> Result:
    if a["dropout_p"]:
        raise s.unsupported(node, f"dropout_p={a['dropout_p']}; call model.eval() before compiling")
    q, k, v, mask = _operands(s, node, a)
    depth = shape_of(q.type)[-1]
    if not isinstance(depth, int):
        raise s.unsupported(node, f"a head size '{depth}' that is not fixed")
    scale = a["scale"] if a.get("scale") is not None else 1 / math.sqrt(depth)
    type_ = types.tensor((*shape_of(q.type)[:3], shape_of(v.type)[-1]), s.dtype(node))
    op = qc.AttentionOp(q, k, v, mask, type_, scale=float(scale), causal=bool(a["is_causal"]))
    return s.reshape(s.insert(op), s.shape(node))


def _operands(s: Scope, node: fx.Node, a: Args) -> tuple[SSAValue, SSAValue, SSAValue, SSAValue | None]:
    """q, k, v and the mask as (batch, heads, length, size).

    Without grouped heads, rank 3 is a batch of single heads, as are heads whose number is not fixed; dims beyond rank 4
    fold into the batch.  Leading dims broadcast; a single key head that all query heads share (multi-query attention)
    stays one.
    """
    values = [s.value(a[name]) for name in ("query", "key", "value")]
    mask = s.value(a["attn_mask"]) if a.get("attn_mask") is not None else None
    shapes = [shape_of(each.type) for each in values]
    is_fixed = all(len(shape) < 3 or isinstance(shape[-3], int) for shape in shapes)
    if not a["enable_gqa"] and (all(len(shape) == 3 for shape in shapes) or not is_fixed):
        values = [_with_one_head(s, each) for each in values]
        mask = _with_one_head(s, mask) if mask is not None else None
    rank = max(4, *(len(shape_of(each.type)) for each in values))
    values = [_of_rank(s, each, rank) for each in values]
    leading = broadcast_shapes([shape_of(each.type)[:-3] for each in values])
    counts = _heads(s, node, values, bool(a["enable_gqa"]))
    q, k, v = (
        _folded(s, s.broadcast(each, (*leading, heads, *shape_of(each.type)[-2:])))
        for each, heads in zip(values, counts, strict=True)
    )
    return q, k, v, None if mask is None else _mask(s, mask, leading, q)


def _heads(s: Scope, node: fx.Node, values: list[SSAValue], grouped: bool) -> tuple[int, int, int]:
    """The numbers of heads of q, k and v."""
    found = [shape_of(each.type)[-3] for each in values]
    counts = [size for size in found if isinstance(size, int)]
    if len(counts) != 3:
        raise s.unsupported(node, f"numbers of heads {tuple(found)} that are not fixed")
    q_heads, k_heads, v_heads = counts
    kv_heads, heads = max(k_heads, v_heads), max(counts)
    if min(k_heads, v_heads) not in (1, kv_heads) or q_heads not in (1, heads) or heads % kv_heads:
        raise s.unsupported(node, f"{q_heads} query, {k_heads} key and {v_heads} value heads")
    if kv_heads not in (1, heads) and not grouped:
        raise s.unsupported(node, f"{heads} query heads and {kv_heads} key heads without enable_gqa")
    return heads, kv_heads, kv_heads


def _mask(s: Scope, mask: SSAValue, leading: Shape, q: SSAValue) -> SSAValue:
    """The mask with rank 4, broadcastable; float masks in the query's type."""
    if len(leading) > 1 and len(shape_of(mask.type)) > 3:
        mask = _folded(s, s.broadcast(mask, (*leading, *shape_of(mask.type)[-3:])))
    else:
        mask = _of_rank(s, mask, 4)
    return mask if tensor_dtype(mask.type) == "i1" else s.cast(mask, tensor_dtype(q.type))


def _of_rank(s: Scope, value: SSAValue, rank: int) -> SSAValue:
    """Adds leading dims of 1 until the rank is reached."""
    shape = shape_of(value.type)
    return s.reshape(value, (*([1] * (rank - len(shape))), *shape))


def _with_one_head(s: Scope, value: SSAValue) -> SSAValue:
    """The heads as part of the batch."""
    shape = shape_of(value.type)
    return s.reshape(value, (*shape[:-2], 1, *shape[-2:])) if len(shape) >= 3 else value


def _folded(s: Scope, value: SSAValue) -> SSAValue:
    """All dims before the heads as one batch."""
    shape = shape_of(value.type)
    return s.reshape(value, (product(shape[:-3]).to_dim(), *shape[-3:]))
