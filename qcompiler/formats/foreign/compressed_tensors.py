"""compressed-tensors checkpoints (llm-compressor, vLLM).

    pack-quantized         weight_packed int32 (N, words): codes + 2^(bits-1), a stream along K, lowest bits first;
                           weight_shape (2,), weight_scale (N, groups), (N, 1) or (1,);
                           weight_zero_point int32 (words along N, groups), or int8 (N, groups) in older files;
                           weight_g_idx int32 (K,) where columns are ordered by group
    int-quantized          weight int8 (N, K), weight_scale, weight_zero_point int8
    float-quantized        weight float8 (N, K), weight_scale (1,), (N, 1) or (N / 128, K / 128)
    naive-quantized        one of the two above
    nvfp4-pack-quantized   weight_packed uint8, weight_scale e4m3, weight_global_scale fp32 (1,), which divides
    mxfp4-pack-quantized   weight_packed uint8, weight_scale uint8
    mxfp8-quantized        weight float8, weight_scale uint8

    w[n, k] = (code - zero) * scale            in the formats with integers

Source: compressed-tensors 0.20, `compressors/`.  A scale of the whole tensor becomes one scale per row in integer
formats, which have no scale per tensor; everything else is a bijection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatValueError
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.foreign import floats
from qcompiler.formats.foreign.arrays import (
    FLOATS,
    Array,
    Arrays,
    Group,
    Integers,
    g_idx_of,
    group_of,
    groups_in,
    integers_of,
    inverse_of,
    order_of,
    pack_words,
    tensor_of,
    unpack_words,
    words_for,
)
from qcompiler.formats.fp8 import FP8E4M3, FP8E5M2
from qcompiler.formats.integers import IntegerFormat
from qcompiler.formats.mx import MXFP4, MXFP8
from qcompiler.formats.nvfp4 import NVFP4

Kind = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
]
KINDS: tuple[Kind, ...] = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
BITS = (2, 3, 4, 8)
Shared = int | Literal["row", "tensor", "block"]

_BESIDE = ("bias", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


def read(
    arrays: Mapping[str, Array],
    *,
    kind: Kind,
    bits: int = 8,
    group: Shared | None = None,
    symmetric: bool | None = None,
    layer: str = "layer",
) -> tuple[PackedTensor, npt.NDArray[np.intp] | None]:
    """The weight (N, K) of a layer, and the permutation for its input if columns were sorted by group.

    `kind`, `bits`, `group` and `symmetric` are the config's `format`, `num_bits`, `strategy` ("channel" is "row", or
    the `group_size`) and `symmetric`.  None for the last two takes the value from the arrays; a value that the arrays
    contradict is an error.  With a permutation ``y = x[:, permutation] @ decode(packed).T``.

    FormatError (and its shape and value kinds) names the layer and the array.
    """
    found = Arrays(arrays, layer, f"compressed-tensors {kind}")
    if kind == "pack-quantized":
        return _read_packed(found, bits, group, symmetric)
    if kind == "nvfp4-pack-quantized":
        found.refuse_unknown(("weight_packed", "weight_scale", "weight_global_scale"), _BESIDE)
        return floats.read_nvfp4(found, "weight_packed", "weight_scale", "weight_global_scale", divisor=True), None
    if kind == "mxfp4-pack-quantized":
        found.refuse_unknown(("weight_packed", "weight_scale"), _BESIDE)
        return floats.read_mx(found, "weight_packed", "weight_scale"), None
    if kind not in KINDS:
        raise found.error(f"is none of {', '.join(KINDS)}")
    found.refuse_unknown(("weight", "weight_scale", "weight_zero_point"), _BESIDE)
    integers = found.has("weight") and np.asarray(arrays["weight"]).dtype == np.int8
    if kind == "int-quantized" or (kind == "naive-quantized" and integers):
        return _read_integers(found, bits, group, symmetric), None
    if found.has("weight_zero_point") and np.asarray(arrays["weight_zero_point"]).astype(np.float32).any():
        raise found.value_error("weight_zero_point is not zero, and floats have no zero points")
    if kind == "mxfp8-quantized":
        return floats.read_mx(found, "weight", "weight_scale"), None
    if isinstance(group, int):
        raise found.error(f"groups of {group}; fp8 weights have scales per tensor, per row, or per block of 128 x 128")
    return floats.read_fp8(found, "weight", "weight_scale", group), None


def _read_packed(
    found: Arrays, bits: int, group: Shared | None, symmetric: bool | None
) -> tuple[PackedTensor, npt.NDArray[np.intp] | None]:
    found.refuse_unknown(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"), _BESIDE
    )
    if bits not in BITS:
        raise found.error(f"{bits} bits; the integer formats have {', '.join(map(str, BITS))}")
    packed = found.get("weight_packed", (np.int32,), 2)
    rows, cols = (int(n) for n in found.shaped("weight_shape", (np.int64, np.int32), (2,), "two dimensions"))
    if min(rows, cols) < 1 or packed.shape != (rows, words_for(cols, bits)):
        raise found.shape_error(
            f"weight_packed has the shape {packed.shape}; weight_shape {rows} x {cols} in {bits} bits gives "
            f"{(rows, words_for(cols, bits))}"
        )
    ours, scales = _scales(found, rows, cols, bits, group)
    parts = Integers(bits, cols, ours, packed, scales, _packed_zeros(found, bits, scales.shape, symmetric))
    g_idx = found.get("weight_g_idx", (np.int32, np.int64), 1) if found.has("weight_g_idx") else None
    if g_idx is not None and (g_idx == -1).all():  # the initial value: columns in order
        g_idx = None
    order = order_of(found, "weight_g_idx", g_idx, cols, ours)
    sorted_parts = Integers(bits, cols, ours, parts.permuted(order), scales, parts.zeros)
    return tensor_of(found, sorted_parts, symmetric), order


def _packed_zeros(found: Arrays, bits: int, shape: tuple[int, ...], symmetric: bool | None) -> npt.NDArray[np.uint16]:
    """Unsigned zero points (N, groups)."""
    half = 1 << (bits - 1)
    if not found.has("weight_zero_point"):
        if symmetric is False:
            raise found.error("needs weight_zero_point, since the layer is said to be asymmetric")
        return np.full(shape, half, np.uint16)
    if np.asarray(found.given["weight_zero_point"]).dtype == np.int32:
        rows, groups = shape
        why = f"{rows} rows of {groups} groups in {bits} bits"
        words = found.shaped("weight_zero_point", (np.int32,), (words_for(rows, bits), groups), why)
        return np.ascontiguousarray(unpack_words(np.ascontiguousarray(words.T), bits, rows).T).astype(np.uint16)
    zeros = found.shaped("weight_zero_point", (np.int8,), shape, "the scales").astype(np.int16) + half
    if zeros.min() < 0 or zeros.max() >= 2 * half:
        raise found.value_error(f"weight_zero_point is not within {-half} to {half - 1}, as {bits} bits demand")
    return zeros.astype(np.uint16)


def _scales(found: Arrays, rows: int, cols: int, bits: int, group: Shared | None) -> tuple[Group, Array]:
    """(our group, scales (N, groups)) of weight_scale; a scale of the tensor is repeated for its rows."""
    if not found.has("weight_scale"):
        raise found.error(f"needs weight_scale, and the layer has {', '.join(sorted(found.given))}")
    given = np.asarray(found.given["weight_scale"])
    if group == "block":
        raise found.error("square blocks; integer formats have groups of a row")
    if given.size == 1 and given.ndim <= 1 and group in (None, "tensor"):
        scales = found.get("weight_scale", FLOATS, given.ndim)
        return "row", np.full((rows, 1), scales.reshape(-1)[0], scales.dtype)
    if group == "tensor":
        raise found.shape_error(f"weight_scale has the shape {given.shape}, and the layer is said to have one scale")
    if group is None:
        count = given.shape[-1] if given.ndim == 2 else 0
        if count < 1 or cols % count:
            raise found.shape_error(f"weight_scale has the shape {given.shape}, which gives {cols} columns no groups")
        group = cols // count
    ours = group_of(found, -1 if group == "row" else group, cols, bits)
    why = f"{rows} rows of {cols} elements in groups of {group}"
    return ours, found.shaped("weight_scale", FLOATS, (rows, groups_in(cols, ours)), why)


def _read_integers(found: Arrays, bits: int, group: Shared | None, symmetric: bool | None) -> PackedTensor:
    """int8 codes unchanged; asymmetric codes and their zero points become unsigned by adding 128."""
    weight = found.get("weight", (np.int8,), 2)
    half = 1 << (bits - 1)
    if weight.size and not -half <= int(weight.min()) <= int(weight.max()) < half:
        raise found.value_error(f"weight holds codes from {weight.min()} to {weight.max()}, which {bits} bits do not")
    rows, cols = weight.shape
    ours, scales = _scales(found, rows, cols, 8, group)
    zeros = np.full(scales.shape, 128, np.uint16)
    if found.has("weight_zero_point"):
        stored = found.get("weight_zero_point", (np.int8,), np.asarray(found.given["weight_zero_point"]).ndim)
        if stored.size == 1:
            stored = np.full(scales.shape, stored.reshape(-1)[0], np.int8)
        if stored.shape != scales.shape:
            raise found.shape_error(f"weight_zero_point has the shape {stored.shape}, and the scales {scales.shape}")
        zeros = (stored.astype(np.int16) + 128).astype(np.uint16)
    elif symmetric is False:
        raise found.error("needs weight_zero_point, since the layer is said to be asymmetric")
    unsigned = weight.view(np.uint8) ^ np.uint8(0x80)
    return tensor_of(found, Integers(8, cols, ours, pack_words(unsigned, 8), scales, zeros), symmetric)


# --- writing ---------------------------------------------------------------------------------------------------------


def kind_of(packed: PackedTensor) -> Kind:
    """The kind of checkpoint that holds a tensor of this format. FormatError if there is none."""
    fmt = packed.format
    if isinstance(fmt, IntegerFormat):
        return "int-quantized" if fmt.bits == 8 else "pack-quantized"
    if isinstance(fmt, (FP8E4M3, FP8E5M2)):
        return "float-quantized"
    if isinstance(fmt, NVFP4) and fmt.setting("divisor"):
        return "nvfp4-pack-quantized"
    if isinstance(fmt, MXFP4):
        return "mxfp4-pack-quantized"
    if isinstance(fmt, MXFP8):
        return "mxfp8-quantized"
    raise FormatError(
        f"compressed-tensors has no packing for {fmt}; it has int2, int3, int4, int8, fp8_e4m3, fp8_e5m2, mxfp4, mxfp8 "
        "and nvfp4(divisor=True)"
    )


def write(
    packed: PackedTensor,
    *,
    kind: Kind | None = None,
    permutation: npt.NDArray[np.intp] | None = None,
    scale_dtype: Any = np.float32,
) -> dict[str, Array]:
    """The arrays of a layer with this weight: the inverse of `read`.

    `kind` may be "pack-quantized" for int8, too; else it follows from the format (`kind_of`).  `scale_dtype` is for
    fp8 and must represent the scales exactly.  FormatError for formats that the kind does not hold, FormatValueError
    for a zero point or a scale that it cannot store.
    """
    kind = kind or kind_of(packed)
    if kind == "pack-quantized":
        return _write_packed(packed, permutation)
    if permutation is not None:
        raise FormatError(f"compressed-tensors {kind} has no order of columns")
    if kind == "int-quantized":
        return _write_integers(packed)
    if kind == "nvfp4-pack-quantized":
        return dict(
            zip(
                ("weight_packed", "weight_scale", "weight_global_scale"),
                floats.write_nvfp4(packed, divisor=True),
                strict=True,
            )
        )
    names = ("weight_packed" if kind == "mxfp4-pack-quantized" else "weight", "weight_scale")
    if kind in ("mxfp4-pack-quantized", "mxfp8-quantized"):
        return dict(zip(names, floats.write_mx(packed), strict=True))
    return dict(zip(names, floats.write_fp8(packed, scale_dtype), strict=True))


def _write_packed(packed: PackedTensor, permutation: npt.NDArray[np.intp] | None) -> dict[str, Array]:
    parts = integers_of(packed, "compressed-tensors pack-quantized")
    inverse = None if permutation is None else inverse_of(permutation, parts.cols)
    arrays: dict[str, Array] = {
        "weight_packed": parts.permuted(inverse),
        "weight_scale": parts.scales,
        "weight_shape": np.array([packed.rows, packed.cols], np.int64),
    }
    if not packed.format.setting("symmetric"):
        if parts.zeros.max() >= 1 << parts.bits:
            raise FormatValueError(f"a zero point of {parts.zeros.max()} does not fit {parts.bits} bits")
        along_rows = pack_words(np.ascontiguousarray(parts.zeros.T).astype(np.uint8), parts.bits)
        arrays["weight_zero_point"] = np.ascontiguousarray(along_rows.T)
    if permutation is not None:
        arrays["weight_g_idx"] = g_idx_of(permutation, parts.cols, parts.group)
    return arrays


def _write_integers(packed: PackedTensor) -> dict[str, Array]:
    parts = integers_of(packed, "compressed-tensors int-quantized")
    if parts.bits != 8:
        raise FormatError(f"compressed-tensors int-quantized stores int8, and the tensor is {packed.format}")
    unsigned = unpack_words(parts.words, 8, parts.cols)
    arrays = {"weight": (unsigned ^ np.uint8(0x80)).view(np.int8), "weight_scale": parts.scales}
    if not packed.format.setting("symmetric"):
        arrays["weight_zero_point"] = (parts.zeros.astype(np.int16) - 128).astype(np.int8)
    return arrays
