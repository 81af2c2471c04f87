"""`torch.ops.qc.quantize_cache` and `torch.ops.qc.dequantize_cache`: keys and values in 8 or 4 bits, in
plain torch.

    quantize_cache(x, "int8") -> Tensor                              int8 (…, row_bytes(K, "int8")) of x (…, K)
    dequantize_cache(rows, "int8", K, torch.bfloat16) -> Tensor      what they mean in fp32, rounded once

A module keeps the rows in a buffer, writes them by `index_copy_`, and gives what they mean to attention.  The
compiler's attention then reads the rows themselves.  The bytes and the rules are those of formats/cache_rows.py.
"""

from __future__ import annotations

import torch
from torch import fx
from xdsl.ir import SSAValue

from qcompiler.formats.cache_rows import (
    GROUP,
    LARGEST,
    LEVELS,
    MOST,
    Kind,
    groups_of,
    kind_of,
    row_bytes,
    scale_at,
)
from qcompiler.frontends.torch.aten.scope import Scope
from qcompiler.ir import qc, types

Tensor = torch.Tensor


@torch.library.custom_op("qc::quantize_cache", mutates_args=())
def quantize_cache(x: Tensor, kind: str) -> Tensor:
    """Rows of a cache of x (…, K). ArgumentError for an unknown kind."""
    x = x.detach().to(torch.float32)
    return _quantise_groups(x) if kind_of(kind) == "int4" else _quantise_bytes(x, kind_of(kind))


@quantize_cache.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], row_bytes(int(x.shape[-1]), kind_of(kind))), dtype=torch.int8)


@torch.library.custom_op("qc::dequantize_cache", mutates_args=())
def dequantize_cache(rows: Tensor, kind: str, cols: int, dtype: torch.dtype) -> Tensor:
    """The values of rows of a cache, (…, cols). ArgumentError for an unknown kind."""
    at = scale_at(cols, kind_of(kind))
    if kind == "int4":
        pairs = rows[..., :at].contiguous().view(torch.uint8)
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)[..., :cols]
        scales = rows[..., at : at + 4 * groups_of(cols)].contiguous().view(torch.bfloat16).to(torch.float32)
        step, least = (scales[..., first::2].repeat_interleave(GROUP, -1)[..., :cols] for first in (0, 1))
        return (codes.to(torch.float32) * step + least).to(dtype)
    scale = rows[..., at : at + 4].contiguous().view(torch.float32)
    codes = rows[..., :cols].contiguous()
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return (numbers.to(torch.float32) * scale).to(dtype)


@dequantize_cache.register_fake
def _(rows: Tensor, kind: str, cols: int, dtype: torch.dtype) -> Tensor:
    kind_of(kind)
    return rows.new_empty((*rows.shape[:-1], cols), dtype=dtype)


def _quantise_bytes(x: Tensor, kind: Kind) -> Tensor:
    one = torch.ones((), dtype=torch.float32, device=x.device)  # a tensor: operators take shortcuts for Python numbers
    largest = x.abs().amax(-1, keepdim=True)
    most = MOST[kind] * one
    scale = largest / most
    scale = torch.where(scale > 0, scale, one)
    finite = torch.isfinite(largest)
    parts = torch.where(finite, (x / scale).clamp(-most, most), 0 * one)
    codes = torch.round(parts).to(torch.int8) if kind == "int8" else parts.to(torch.float8_e4m3fn).view(torch.int8)
    cols = x.shape[-1]
    at = scale_at(cols, kind)
    rows = torch.zeros((*x.shape[:-1], row_bytes(cols, kind)), dtype=torch.int8, device=x.device)
    rows[..., :cols] = codes
    rows[..., at : at + 4] = torch.where(finite, scale, torch.nan * one).contiguous().view(torch.int8)
    return rows


def _quantise_groups(x: Tensor) -> Tensor:
    cols, groups = x.shape[-1], groups_of(x.shape[-1])
    one = torch.ones((), dtype=torch.float32, device=x.device)
    short = groups * GROUP - cols
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1).reshape(*x.shape[:-1], groups, GROUP)
    finite = torch.isfinite(padded).all(-1)
    numbers = padded.clamp(-LARGEST * one, LARGEST * one)
    least = numbers.amin(-1)
    least = _bf16(torch.where(least == 0, 0 * one, least), up=False)  # -0 becomes 0
    step = (numbers.amax(-1) - least) / (LEVELS * one)
    step = _bf16(torch.where(step > 0, step, 0 * one), up=True)
    step, least = torch.where(finite, step, 0 * one), torch.where(finite, least, torch.nan * one)
    codes = torch.round(((numbers - least[..., None]) / step[..., None]).clamp(max=LEVELS * one))
    codes = torch.where((step > 0)[..., None], codes, 0 * one).to(torch.uint8).flatten(-2)
    codes[..., cols:] = 0
    rows = torch.zeros((*x.shape[:-1], row_bytes(cols, "int4")), dtype=torch.int8, device=x.device)
    at = scale_at(cols, "int4")
    rows[..., :at] = (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)
    scales = torch.stack([step, least], -1).view(torch.int16)[..., 1::2]  # bf16: the upper halves
    rows[..., at : at + 4 * groups] = scales.flatten(-2).contiguous().view(torch.int8)
    return rows


def _bf16(x: Tensor, *, up: bool) -> Tensor:
    """The next bf16 above x, which is then not negative, or below it; x itself if it is one."""
    away = torch.full_like(x, 0xFFFF, dtype=torch.int32) * (up | (x < 0))
    return ((x.contiguous().view(torch.int32) + away) & ~0xFFFF).view(torch.float32)


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
