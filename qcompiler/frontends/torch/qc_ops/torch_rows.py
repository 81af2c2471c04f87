"""`torch.ops.qc.quantize_rows` and `torch.ops.qc.dequantize_rows`: activations as rows of int8, in plain torch.

    quantize_rows(x, "token", 0.0, None) -> Tensor         int8 (…, row_bytes(K)) of x (…, K)
    dequantize_rows(rows, K, torch.bfloat16) -> Tensor     code * scale in fp32, rounded once

The bytes and the rules are those of formats/int8_rows.py; only the sizes of a row are imported from it.  The imported
ops are `qc.quantize_rows` and `qc.dequantize_rows`.
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.formats.int8_rows import RUN, padded, row_bytes
from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc, types

Tensor = torch.Tensor
TINY = 3.8e-37
"""LLM.int8 treats rows of smaller magnitudes as zeros: 127 / magnitude would be infinite."""


@torch.library.custom_op("qc::quantize_rows", mutates_args=())
def quantize_rows(
    x: Tensor, kind: str, value: float, columns: Tensor | None, largest_of: Tensor | None = None
) -> Tensor:
    """Rows of int8 of x (…, K). `kind` is "token", "tensor" (`value` is the clip), "outliers" (the threshold;
    `columns` are bools that broadcast against x: where codes are 0) or "image" (`largest_of` (B,) has the largest
    magnitudes of x (B, …, K), in fp32)."""
    x = x.detach().to(torch.float32)
    one = torch.ones((), dtype=torch.float32, device=x.device)  # a tensor: operators take shortcuts for Python numbers
    if kind == "outliers":
        x = torch.where(x.abs() >= torch.tensor(value, dtype=torch.float32), 0 * one, x)
    largest = x.abs().amax(-1, keepdim=True)
    if kind == "image":
        assert largest_of is not None
        largest = largest_of.reshape(-1, *[1] * (x.ndim - 1)).expand_as(largest)
    if kind in ("token", "image"):
        scale = largest / (127 * one)
        scale = torch.where(scale > 0, scale, one)
        codes = x / scale
    elif kind == "tensor":
        scale = torch.full_like(largest, value / 127)
        codes = x * torch.tensor(127 / value if value else 0.0, dtype=torch.float32)
    else:
        scale = largest / (127 * one)
        codes = x * torch.where(largest < TINY, 0 * one, 127 * one / largest)
        codes = torch.where(columns, 0 * one, codes) if columns is not None else codes
    finite = torch.isfinite(largest)
    codes = torch.where(finite, torch.round(codes).clamp(-127, 127), 0 * one).to(torch.int8)
    scale = torch.where(finite, scale, torch.nan * one)
    cols = x.shape[-1]
    end = padded(cols)
    rows = torch.zeros((*x.shape[:-1], row_bytes(cols)), dtype=torch.int8, device=x.device)
    rows[..., :cols] = codes
    rows[..., end : end + 4] = scale.contiguous().view(torch.int8)
    sums = rows[..., :end].reshape(*x.shape[:-1], -1, RUN).to(torch.int16).sum(-1, dtype=torch.int16)
    rows[..., end + 16 : end + 16 + 2 * sums.shape[-1]] = sums.contiguous().view(torch.int8)
    return rows


@quantize_rows.register_fake
def _(x: Tensor, kind: str, value: float, columns: Tensor | None, largest_of: Tensor | None = None) -> Tensor:
    del kind, value, columns, largest_of
    return x.new_empty((*x.shape[:-1], row_bytes(int(x.shape[-1]))), dtype=torch.int8)


@torch.library.custom_op("qc::dequantize_rows", mutates_args=())
def dequantize_rows(rows: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """The values of rows of int8, (…, cols)."""
    end = padded(cols)
    scale = rows[..., end : end + 4].contiguous().view(torch.float32)
    return (rows[..., :cols].to(torch.float32) * scale).to(dtype)


@dequantize_rows.register_fake
def _(rows: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], cols), dtype=dtype)


def import_quantize_rows(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.quantize_rows`."""
    x, kind, value, columns, *largest = node.args
    rows = types.tensor(s.shape(node), "i8")
    chosen, given = (None if each is None else s.value(each) for each in (columns, *(largest or [None])))
    op = qc.QuantizeRowsOp(s.value(x), chosen, rows, kind=str(kind), value=float(value), largest=given)  # type: ignore[arg-type]
    return s.insert(op)


def import_dequantize_rows(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.dequantize_rows`."""
    return s.insert(qc.DequantizeRowsOp(s.value(node.args[0]), types.tensor(s.shape(node), s.dtype(node))))


IMPORTS = {
    torch.ops.qc.quantize_rows.default: import_quantize_rows,
    torch.ops.qc.dequantize_rows.default: import_dequantize_rows,
}
"""Operators that only insert-qdq puts into graphs: these are not in docs/operators.md."""

__all__ = ["IMPORTS", "dequantize_rows", "quantize_rows"]
