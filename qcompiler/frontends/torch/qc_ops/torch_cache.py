"""`torch.ops.qc.quantize_cache` and `torch.ops.qc.dequantize_cache`: keys and values in 8 bits, in plain torch.

    quantize_cache(x, "int8") -> Tensor                              int8 (…, row_bytes(K)) of x (…, K)
    dequantize_cache(rows, "int8", K, torch.bfloat16) -> Tensor      code * scale in fp32, rounded once

A module keeps the rows in a buffer, writes them by `index_copy_`, and gives what they mean to attention.  The
compiler's attention then reads the rows themselves.  The bytes and the rules are those of formats/cache_rows.py.
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.formats.cache_rows import MOST, kind_of, row_bytes, scale_at
from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc, types

Tensor = torch.Tensor


@torch.library.custom_op("qc::quantize_cache", mutates_args=())
def quantize_cache(x: Tensor, kind: str) -> Tensor:
    """Rows of a cache of x (…, K). ArgumentError for an unknown kind."""
    x = x.detach().to(torch.float32)
    one = torch.ones((), dtype=torch.float32, device=x.device)  # a tensor: operators take shortcuts for Python numbers
    largest = x.abs().amax(-1, keepdim=True)
    most = MOST[kind_of(kind)] * one
    scale = largest / most
    scale = torch.where(scale > 0, scale, one)
    finite = torch.isfinite(largest)
    parts = torch.where(finite, (x / scale).clamp(-most, most), 0 * one)
    codes = torch.round(parts).to(torch.int8) if kind == "int8" else parts.to(torch.float8_e4m3fn).view(torch.int8)
    cols = x.shape[-1]
    at = scale_at(cols)
    rows = torch.zeros((*x.shape[:-1], row_bytes(cols)), dtype=torch.int8, device=x.device)
    rows[..., :cols] = codes
    rows[..., at : at + 4] = torch.where(finite, scale, torch.nan * one).contiguous().view(torch.int8)
    return rows


@quantize_cache.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    kind_of(kind)
    return x.new_empty((*x.shape[:-1], row_bytes(int(x.shape[-1]))), dtype=torch.int8)


@torch.library.custom_op("qc::dequantize_cache", mutates_args=())
def dequantize_cache(rows: Tensor, kind: str, cols: int, dtype: torch.dtype) -> Tensor:
    """The values of rows of a cache, (…, cols). ArgumentError for an unknown kind."""
    kind_of(kind)
    at = scale_at(cols)
    scale = rows[..., at : at + 4].contiguous().view(torch.float32)
    codes = rows[..., :cols].contiguous()
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return (numbers.to(torch.float32) * scale).to(dtype)


@dequantize_cache.register_fake
def _(rows: Tensor, kind: str, cols: int, dtype: torch.dtype) -> Tensor:
    kind_of(kind)
    return rows.new_empty((*rows.shape[:-1], cols), dtype=dtype)


def import_quantize_cache(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.quantize_cache`."""
    x, kind = node.args
    return s.insert(qc.QuantizeCacheOp(s.value(x), types.tensor(s.shape(node), "i8"), kind=str(kind)))


def import_dequantize_cache(s: Scope, node: fx.Node) -> SSAValue:
    """`qc.dequantize_cache`."""
    rows, kind = node.args[:2]
    type_ = types.tensor(s.shape(node), s.dtype(node))
    return s.insert(qc.DequantizeCacheOp(s.value(rows), type_, kind=str(kind)))


IMPORTS = {
    torch.ops.qc.quantize_cache.default: import_quantize_cache,
    torch.ops.qc.dequantize_cache.default: import_dequantize_cache,
}

__all__ = ["IMPORTS", "dequantize_cache", "quantize_cache"]
