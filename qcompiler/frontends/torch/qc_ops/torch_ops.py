"""`torch.ops.qc.dequantize` and `torch.ops.qc.quantize`: the storage formats as torch operators; and `grouped_linear`.

Their CPU code is plain torch: a rewritten program that runs in eager torch is an oracle of the emitted kernels.  nf4,
int8 and int4 with the parameters below are written from the documented bytes and share nothing with
`qcompiler.formats`.  Every other format is decoded from its declaration (torch_formats.py).  Only these three are
encoded.

    dequantize(packed_u8, "nf4:block=64", [rows, cols], torch.bfloat16) -> Tensor    decode in fp32, round once
    quantize(x, "int8") -> Tensor                                                    bytes of x.reshape(-1, K)
    grouped_linear(x, w, index, experts, repeat) -> Tensor                           products with chosen experts

Canonical bytes are sections one after another, each aligned to its item size:

    nf4   codes (u4, high nibble first, flat)   absmax (f32 per block of the flattened matrix)
    int8  codes (s8)                            scales (f32 per row)
    int4  codes (u4, low nibble first, flat)    scales (f16 per group)    zeros (u8 per group) if not symmetric
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qcompiler.errors import UnknownFormatError
from qcompiler.frontends.torch.qc_ops import torch_formats

Tensor = torch.Tensor

# The quantiles of QLoRA (Dettmers et al. 2023, appendix E).
_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


@dataclass(frozen=True)
class _Text:
    """The parts of a format text such as `int4:group=32,symmetric=False`."""

    name: str
    params: dict[str, str]

    @staticmethod
    def parse(text: str) -> _Text:
        name, _, rest = text.partition(":")
        params = dict(item.split("=", 1) for item in rest.split(",")) if rest else {}
        return _Text(name, params)

    @property
    def plain(self) -> bool:
        """True for the formats and parameters that this file implements."""
        return self.name in _PLAIN and self.params.keys() <= _PLAIN[self.name] and self.params.get("group") != "row"

    def number(self, key: str, default: int) -> int:
        return int(self.params.get(key, default))

    @property
    def symmetric(self) -> bool:
        return self.params.get("symmetric", "True") == "True"


@torch.library.custom_op("qc::dequantize", mutates_args=())
def dequantize(packed: Tensor, format: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Decodes canonical bytes (uint8, 1-D) to a matrix of `shape` = [rows, cols] and `dtype`."""
    rows, cols = shape
    text = _Text.parse(format)
    if not text.plain:
        return torch_formats.decode(packed.contiguous(), format, rows, cols).to(dtype)
    return _DECODERS[text.name](packed.contiguous().clone(), text, rows, cols).to(dtype)


@dequantize.register_fake
def _(packed: Tensor, format: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@torch.library.custom_op("qc::quantize", mutates_args=())
def quantize(x: Tensor, format: str) -> Tensor:
    """Encodes x, viewed as a matrix (rows, K) over its last dimension, to canonical bytes (uint8, 1-D)."""
    text = _encoded(format)
    sections = _ENCODERS[text.name](x.detach().reshape(-1, x.shape[-1]).to(torch.float32), text)
    out = x.new_zeros(_nbytes(text, x.numel() // x.shape[-1], x.shape[-1]), dtype=torch.uint8)
    end = 0
    for section in sections:
        start = _align(end, section.element_size())
        data = section.contiguous().reshape(-1).view(torch.uint8)
        end = start + data.numel()
        out[start:end] = data
    return out


@quantize.register_fake
def _(x: Tensor, format: str) -> Tensor:
    cols = x.shape[-1]
    return x.new_empty(_nbytes(_encoded(format), x.numel() // cols, cols), dtype=torch.uint8)


def _encoded(format: str) -> _Text:
    text = _Text.parse(format)
    if not text.plain:
        raise UnknownFormatError(
            f"torch.ops.qc.quantize does not encode {format!r}; it encodes nf4 (block), int8, int4 (group, symmetric)"
        )
    return text


@torch.library.custom_op("qc::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, w: Tensor, index: Tensor, experts: int, repeat: int) -> Tensor:
    """`out[p] = x[p // repeat] @ w_e.T`, e = index[p]: x (M, K), w (experts * N, K), index (M * repeat), out (…, N).

    One product per expert that occurs in `index`.  If w has another type than x, x is rounded to it; products and sums
    are in fp32 then, rounded once to x's type.  IndexError for an expert that does not exist.
    """
    matrices, rows = w.reshape(experts, -1, w.shape[1]), x
    if x.dtype != w.dtype:
        matrices, rows = matrices.to(torch.float32), x.to(w.dtype).to(torch.float32)
    out = x.new_empty(index.shape[0], matrices.shape[1])
    for expert in torch.unique(index).tolist():
        if not 0 <= expert < experts:
            raise IndexError(f"there is no expert {expert}; there are {experts}")
        pairs = (index == expert).nonzero()[:, 0]
        out[pairs] = torch.nn.functional.linear(rows[pairs // repeat], matrices[expert]).to(x.dtype)
    return out


@grouped_linear.register_fake
def _(x: Tensor, w: Tensor, index: Tensor, experts: int, repeat: int) -> Tensor:
    del repeat
    return x.new_empty(index.shape[0], w.shape[0] // experts)


# --- bytes -----------------------------------------------------------------------------------------------------------


def _align(offset: Any, size: int) -> Any:
    return (offset + size - 1) // size * size


def _nbytes(text: _Text, rows: Any, cols: Any) -> Any:
    elements = rows * cols
    if text.name == "int8":
        return _align(elements, 4) + 4 * rows
    if text.name == "nf4":
        block = text.number("block", 64)
        return _align((elements + 1) // 2, 4) + 4 * ((elements + block - 1) // block)
    groups = elements // text.number("group", 32)
    return _align((elements + 1) // 2, 2) + groups * (2 if text.symmetric else 3)


def _section(packed: Tensor, start: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """`count` items of `dtype` from the first aligned offset at or after `start`, and where they end."""
    start = _align(start, dtype.itemsize)
    end = start + count * dtype.itemsize
    return packed[start:end].view(dtype), end


def _nibbles(packed: Tensor, count: int, *, high_first: bool) -> Tensor:
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=-1).reshape(-1)[:count]


def _pack_nibbles(codes: Tensor, *, high_first: bool, pad: int) -> Tensor:
    codes = codes.reshape(-1).to(torch.uint8)
    if codes.numel() % 2:
        codes = torch.cat([codes, codes.new_full((1,), pad)])
    first, second = codes[0::2], codes[1::2]
    return (first << 4) | second if high_first else first | (second << 4)


# --- nf4 -------------------------------------------------------------------------------------------------------------


def _decode_nf4(packed: Tensor, text: _Text, rows: int, cols: int) -> Tensor:
    count, block = rows * cols, text.number("block", 64)
    codes = _nibbles(packed[: (count + 1) // 2], count, high_first=True)
    absmax, _ = _section(packed, (count + 1) // 2, -(-count // block), torch.float32)
    table = torch.tensor(_NF4, dtype=torch.float32, device=packed.device)
    return (table[codes.long()] * absmax.repeat_interleave(block)[:count]).reshape(rows, cols)


def _encode_nf4(x: Tensor, text: _Text) -> list[Tensor]:
    """bitsandbytes' CPU rule: full blocks multiply by 1/absmax, a short last block divides; strict > midpoints."""
    flat, block = x.reshape(-1), text.number("block", 64)
    full = flat.numel() // block * block
    table = torch.tensor(_NF4, dtype=torch.float32, device=x.device)
    midpoints = (table[:-1] + table[1:]) / 2
    blocks = flat[:full].reshape(-1, block)
    absmax = blocks.abs().amax(1) if full else flat.new_zeros(0)
    scaled = (blocks * (1 / absmax.clamp(min=1e-38))[:, None]).reshape(-1)
    if full < flat.numel():
        last = flat[full:].abs().amax().clamp(min=1e-38)
        scaled, absmax = torch.cat([scaled, flat[full:] / last]), torch.cat([absmax, last[None]])
    return [_pack_nibbles(torch.bucketize(scaled, midpoints), high_first=True, pad=7), absmax]


# --- int8 ------------------------------------------------------------------------------------------------------------


def _decode_int8(packed: Tensor, text: _Text, rows: int, cols: int) -> Tensor:
    codes, end = _section(packed, 0, rows * cols, torch.int8)
    scales, _ = _section(packed, end, rows, torch.float32)
    return codes.reshape(rows, cols).to(torch.float32) * scales[:, None]


def _encode_int8(x: Tensor, text: _Text) -> list[Tensor]:
    scales = x.abs().amax(1) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return [torch.round(x / scales[:, None]).clamp(-127, 127).to(torch.int8), scales]


# --- int4 ------------------------------------------------------------------------------------------------------------


def _decode_int4(packed: Tensor, text: _Text, rows: int, cols: int) -> Tensor:
    count, group = rows * cols, text.number("group", 32)
    codes = _nibbles(packed[: (count + 1) // 2], count, high_first=False).to(torch.float32)
    scales, end = _section(packed, (count + 1) // 2, count // group, torch.float16)
    zeros = torch.full_like(scales, 8)
    if not text.symmetric:
        zeros = packed[end : end + count // group]
    codes = codes.reshape(-1, group) - zeros.to(torch.float32)[:, None]
    return (codes * scales.to(torch.float32)[:, None]).reshape(rows, cols)


def _encode_int4(x: Tensor, text: _Text) -> list[Tensor]:
    groups = x.reshape(-1, text.number("group", 32))
    low, high = groups.amin(1), groups.amax(1)
    if text.symmetric:
        exact, zeros = torch.where(-low >= high, low, high).double() / -8, None
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        exact, zeros = (high.double() - low) / 15, low
    scales = exact.to(torch.float16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    step = scales.to(torch.float32)
    zero = torch.full_like(step, 8) if zeros is None else torch.round(-zeros / step).clamp(0, 15)
    codes = (torch.round(groups / step[:, None]) + zero[:, None]).clamp(0, 15)
    packed = _pack_nibbles(codes, high_first=False, pad=0)
    return [packed, scales] if zeros is None else [packed, scales, zero.to(torch.uint8)]


_PLAIN: dict[str, set[str]] = {"nf4": {"block"}, "int8": set(), "int4": {"group", "symmetric"}}
_DECODERS = {"nf4": _decode_nf4, "int8": _decode_int8, "int4": _decode_int4}
_ENCODERS = {"nf4": _encode_nf4, "int8": _encode_int8, "int4": _encode_int4}
