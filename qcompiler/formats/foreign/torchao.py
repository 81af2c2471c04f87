"""torchao's tensors in its safetensors files: arrays, and a JSON text for each weight in the files' metadata.

    Int8Tensor                 qdata int8 (N, K), scale (N, groups), zero_point int8 (N, groups) or none
    IntxUnpackedToInt8Tensor   the same, with codes within the range of `target_dtype` (int1 … int8)
    Int4Tensor                 qdata int8 (N, K / 2), even column in the low nibble, scale and zero_point (groups, N)
    Float8Tensor               qdata float8 (N, K), scale fp32 (N, 1), (1, 1) or (N / 128, K / 128)

    w[n, k] = (code - zero) * scale            Int4Tensor: code * scale + zero, and zero is a float

An array is called `_weight_qdata` after the layer's path.  Tensors stored in an order for one kind of GPU
(Int4TilePackedTo4dTensor, Int4PlainInt32Tensor) are refused.  An Int4Tensor with zeros of 0 has the codes of int4; any
other has no format here, and `values` decodes it.  Source: torchao 0.18, prototype/safetensors and the classes named;
the packing of Int4Tensor is FBGEMM's pack_int4 and int4_row_quantize_zp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qcompiler.errors import FormatError
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.foreign import floats
from qcompiler.formats.foreign.arrays import (
    FLOATS,
    Array,
    Arrays,
    Bytes,
    Integers,
    group_of,
    groups_in,
    pack_words,
    tensor_of,
)
from qcompiler.formats.foreign.json_text import shown

PREFIX = "_weight_"
NAMES = ("qdata", "scale", "zero_point", "act_pre_scale", "scale_and_zero", "per_tensor_scale")
KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor")

_WIDTHS = (2, 3, 4, 8)
_WAY_OUT = (
    "Save the model again, quantised with IntxWeightOnlyConfig, Int8WeightOnlyConfig or Float8WeightOnlyConfig, or "
    "import its floating-point checkpoint"
)


def read(arrays: Mapping[str, Array], described: Mapping[str, Any], layer: str = "layer") -> PackedTensor:
    """The weight of a layer. `arrays` are by name after `_weight_`, `described` is the weight's metadata.

    FormatError names the layer and the array, and what to save instead of an unsupported kind.
    """
    kind, data, found = _opened(arrays, described, layer)
    if kind == "Float8Tensor":
        found.refuse_unknown(("qdata", "scale"))
        return floats.read_fp8(_squeezed(found), "qdata", "scale")
    if kind == "Int4Tensor":
        return _read_int4(found, data)
    bits = 8 if kind == "Int8Tensor" else _target_bits(found, data)
    codes = found.get("qdata", (np.int8,), 2)
    return _integers(found, codes, bits, data)


def is_decoded(arrays: Mapping[str, Array], described: Mapping[str, Any], layer: str = "layer") -> bool:
    """Whether a layer has no format here and needs `values`: an Int4Tensor with float zeros."""
    kind, _, found = _opened(arrays, described, layer)
    return kind == "Int4Tensor" and bool(found.get("zero_point", FLOATS, 2).astype(np.float32).any())


def values(arrays: Mapping[str, Array], described: Mapping[str, Any], layer: str = "layer") -> Array:
    """The decoded weight of an Int4Tensor, in fp32."""
    _, data, found = _opened(arrays, described, layer)
    codes, scales, zeros, group = _int4_parts(found, data)
    spread = np.repeat(scales.astype(np.float32), group, axis=1)[:, : codes.shape[1]]
    offset = np.repeat(zeros.astype(np.float32), group, axis=1)[:, : codes.shape[1]]
    return codes.astype(np.float32) * spread + offset


def _opened(
    arrays: Mapping[str, Array], described: Mapping[str, Any], layer: str
) -> tuple[str, Mapping[str, Any], Arrays]:
    kind, data = described.get("_type"), described.get("_data")
    found = Arrays(arrays, layer, f"torchao {kind}" if isinstance(kind, str) else "torchao")
    if kind not in KINDS or not isinstance(data, Mapping):
        raise FormatError(
            f"{layer}: torchao stores it as {shown(kind)}, which is not read; there are {', '.join(KINDS)}. {_WAY_OUT}"
        )
    if found.has("act_pre_scale"):
        raise found.error(f"its input is scaled before the product, which is not read. {_WAY_OUT}")
    return kind, data, found


def _block(found: Arrays, data: Mapping[str, Any], shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    block = data.get("block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise found.error(f"block_size is {shown(block)}, and a weight has two dimensions")
    if block[0] not in (1, shape[0]):
        raise found.error(f"blocks of {block[0]} x {block[1]}; groups of a row, rows and whole weights are read")
    return min(block[0], shape[0]), min(block[1], shape[1])


def _target_bits(found: Arrays, data: Mapping[str, Any]) -> int:
    """The smallest of our widths for the codes."""
    target = data.get("target_dtype")
    name = target.get("_data") if isinstance(target, Mapping) else None
    if not isinstance(name, str) or name not in {f"int{bits}" for bits in range(1, 9)}:
        raise found.error(f"target_dtype is {shown(target)}; there are int1 to int8")
    return next(width for width in _WIDTHS if width >= int(name[3:]))


def _integers(found: Arrays, codes: Array, bits: int, data: Mapping[str, Any]) -> PackedTensor:
    found.refuse_unknown(("qdata", "scale", "zero_point"))
    rows, cols = codes.shape
    high, wide = _block(found, data, (rows, cols))
    half = 1 << (bits - 1)
    if int(codes.min()) < -half or int(codes.max()) >= half:
        raise found.value_error(f"qdata holds codes from {codes.min()} to {codes.max()}, which {bits} bits do not")
    group = group_of(found, -1 if wide == cols else wide, cols, bits)
    shape = (rows // high, groups_in(cols, group))
    why = f"{rows} x {cols} codes in blocks of {high} x {wide}"
    scales = np.repeat(found.shaped("scale", FLOATS, shape, why), high, axis=0)
    zeros = np.full(scales.shape, half, np.uint16)
    if found.has("zero_point"):
        stored = found.shaped("zero_point", (np.int8,), shape, why).astype(np.int16) + half
        if int(stored.min()) < 0 or int(stored.max()) >= 2 * half:
            raise found.value_error(f"zero_point is not within {-half} to {half - 1}, as {bits} bits demand")
        zeros = np.repeat(stored.astype(np.uint16), high, axis=0)
    unsigned = (codes.astype(np.int16) + half).astype(np.uint8)
    return tensor_of(found, Integers(bits, cols, group, pack_words(unsigned, bits), scales, zeros), None)


def _int4_parts(found: Arrays, data: Mapping[str, Any]) -> tuple[Array, Array, Array, int]:
    """Signed codes (N, K), scales and zeros (N, groups), and the group."""
    found.refuse_unknown(("qdata", "scale", "zero_point"))
    packed = found.get("qdata", (np.int8, np.uint8), 2)
    rows, cols = packed.shape[0], 2 * packed.shape[1]
    bytes_: Bytes = np.ascontiguousarray(packed).view(np.uint8)
    codes = np.stack([bytes_ & 0xF, bytes_ >> 4], axis=-1).reshape(rows, cols).astype(np.int8)
    codes = np.where(codes > 7, codes - 16, codes).astype(np.int8)
    high, wide = _block(found, data, (rows, cols))
    if high != 1:
        raise found.error(f"blocks of {high} rows; groups of a row are read")
    shape = (-(-cols // wide), rows)
    why = f"{rows} x {cols} codes in groups of {wide}"
    scales = np.ascontiguousarray(found.shaped("scale", FLOATS, shape, why).T)
    zeros = np.ascontiguousarray(found.shaped("zero_point", FLOATS, shape, why).T)
    found.refuse_nonfinite("scale", scales)
    found.refuse_nonfinite("zero_point", zeros)
    return codes, scales, zeros, wide


def _read_int4(found: Arrays, data: Mapping[str, Any]) -> PackedTensor:
    codes, scales, zeros, wide = _int4_parts(found, data)
    if zeros.astype(np.float32).any():
        raise found.error("its zero points are floats, which no integer format holds")
    cols = codes.shape[1]
    group = group_of(found, -1 if wide == cols else wide, cols, 4)
    unsigned = (codes.astype(np.int16) + 8).astype(np.uint8)
    middle = np.full(scales.shape, 8, np.uint16)
    return tensor_of(found, Integers(4, cols, group, pack_words(unsigned, 4), scales, middle), True)


def _squeezed(found: Arrays) -> Arrays:
    """The arrays, with a scale of the whole tensor as one number: torchao keeps its two dimensions."""
    scale = np.asarray(found.given["scale"]) if found.has("scale") else None
    if scale is None or scale.shape != (1, 1) or np.asarray(found.given.get("qdata", scale)).shape[0] == 1:
        return found
    return Arrays({**found.given, "scale": scale.reshape(1)}, found.layer, found.system)


__all__ = ["KINDS", "NAMES", "PREFIX", "is_decoded", "read", "values"]
