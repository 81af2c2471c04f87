"""Helpers of readers and writers: arrays checked by name, codes in 32-bit words, integer codes with their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.declaration import Field
from qcompiler.formats.integers import GROUPS, Int2, Int3, Int4, Int8, IntegerFormat
from qcompiler.formats.packing import stream

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Group = int | Literal["row"]
"""Consecutive elements of a row that share a scale, or all of a row."""

FLOATS = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
_SCALE_NAMES = dict(zip(FLOATS, ("fp16", "bf16", "fp32"), strict=True))
_FORMATS: dict[int, type[IntegerFormat]] = {2: Int2, 3: Int3, 4: Int4, 8: Int8}


# --- arrays by name --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrays:
    """The arrays of one layer. `layer` is its path and `system` the packing's system, for messages."""

    given: Mapping[str, Array]
    layer: str
    system: str

    def refuse_unknown(self, known: tuple[str, ...], beside: tuple[str, ...] = ("bias",)) -> None:
        """FormatError for a name outside `known`; names in `beside` belong to the layer and not to its weight."""
        unknown = sorted(set(self.given) - {*known, *beside})
        if unknown:
            raise self.error(f"does not know {', '.join(unknown)}; it reads {', '.join(known)}")

    def has(self, name: str) -> bool:
        return name in self.given

    def get(self, name: str, dtypes: tuple[Any, ...], dims: int) -> Array:
        """The array of that name; FormatError if it is missing or has another type or number of dimensions."""
        if name not in self.given:
            raise self.error(f"needs {name}, and the layer has {', '.join(sorted(self.given)) or 'no arrays'}")
        array = np.asarray(self.given[name])
        if array.dtype not in dtypes:
            wanted = " or ".join(np.dtype(t).name for t in dtypes)
            raise self.error(f"{name} is {array.dtype.name}, not {wanted}")
        if array.ndim != dims:
            raise self.shape_error(f"{name} has the shape {array.shape}, and {dims} dimensions were expected")
        if not array.size:
            raise self.shape_error(f"{name} is empty: it has the shape {array.shape}")
        return array

    def shaped(self, name: str, dtypes: tuple[Any, ...], shape: tuple[int, ...], why: str) -> Array:
        """As `get`, and FormatShapeError unless it has this shape; `why` explains the shape in the message."""
        array = self.get(name, dtypes, len(shape))
        if array.shape != shape:
            raise self.shape_error(f"{name} has the shape {array.shape}; {why} give {shape}")
        return array

    def error(self, message: str) -> FormatError:
        return FormatError(f"{self.layer}: {self.system}: {message}")

    def shape_error(self, message: str) -> FormatShapeError:
        return FormatShapeError(f"{self.layer}: {self.system}: {message}")

    def value_error(self, message: str) -> FormatValueError:
        return FormatValueError(f"{self.layer}: {self.system}: {message}")

    def refuse_nonfinite(self, name: str, values: Array) -> None:
        """FormatValueError naming the first of `values` that is not finite."""
        bad = ~np.isfinite(values.astype(np.float32))
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            raise self.value_error(f"{name} is {values[place]} at {place}; the checkpoint is damaged")


# --- words -----------------------------------------------------------------------------------------------------------


def words_for(count: int, bits: int) -> int:
    """32-bit words for `count` codes, lowest bits first, across words."""
    return -(-count * bits // 32)


def _field(bits: int) -> Field:
    return Field("codes", "uint", bits, packing=stream(3, 32) if bits == 3 else None)


def unpack_words(words: Array, bits: int, count: int) -> Bytes:
    """Codes (n, count) of rows of int32 words (n, `words_for(count, bits)`)."""
    if bits == 3:  # three words hold 32 codes
        words = np.pad(words, ((0, 0), (0, -words.shape[1] % 3)))
    raw = np.ascontiguousarray(words, np.dtype("<i4")).view(np.uint8)
    codes: Bytes = _field(bits).unpack(raw.reshape(-1)).reshape(len(words), -1)[:, :count]
    return codes


def pack_words(codes: Bytes, bits: int) -> npt.NDArray[np.int32]:
    """The inverse; unused bits of a row's last word are zero."""
    rows, count = codes.shape
    filled = np.zeros((rows, -(-count // 32) * 32), np.uint8)
    filled[:, :count] = codes
    words = _field(bits).pack(filled.reshape(-1)).view(np.dtype("<i4")).reshape(rows, -1)
    return np.ascontiguousarray(words[:, : words_for(count, bits)], np.int32)


# --- integer codes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Integers:
    """The parts of an integer matrix: `words` int32 (rows, words) of unsigned codes, `scales` and `zeros` per group.

    value = (code - zero) * scale.  `scales` (rows, groups) are floats, `zeros` uint16 of that shape.
    """

    bits: int
    cols: int
    group: Group
    words: npt.NDArray[np.int32]
    scales: Array
    zeros: npt.NDArray[np.uint16]

    @property
    def half(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    def permuted(self, order: npt.NDArray[np.intp] | None) -> npt.NDArray[np.int32]:
        """The words with column j taken from column `order[j]`."""
        if order is None:
            return self.words
        return pack_words(unpack_words(self.words, self.bits, self.cols)[:, order], self.bits)


def group_of(found: Arrays, group: int, cols: int, bits: int) -> Group:
    """A checkpoint's group size as ours: -1 is the whole row; so is K itself if no format has groups of that size."""
    if group == -1 or (group == cols and group not in GROUPS):
        return "row"
    if group not in GROUPS:
        raise found.error(
            f"groups of {group}; int{bits} has groups of {', '.join(map(str, GROUPS))} or a row. "
            "Quantise the model again with one of these, or import its float checkpoint"
        )
    return group


def groups_in(cols: int, group: Group) -> int:
    return 1 if group == "row" else -(-cols // group)


def tensor_of(found: Arrays, parts: Integers, symmetric: bool | None) -> PackedTensor:
    """The packed tensor with these codes unchanged.

    `symmetric=True` demands that every zero point is in the middle, None checks whether it is, False stores them.
    """
    middle = bool((parts.zeros == parts.half).all())
    if symmetric and not middle:
        place = tuple(int(i) for i in np.argwhere(parts.zeros != parts.half)[0])
        raise found.value_error(
            f"the layer is said to be symmetric, and the zero point of row {place[0]}, group {place[1]} is "
            f"{parts.zeros[place]} instead of {parts.half}"
        )
    found.refuse_nonfinite("scales", parts.scales)
    keep_zeros = symmetric is False or not middle
    fmt = _FORMATS[parts.bits](
        group=parts.group, symmetric=not keep_zeros, scale=_SCALE_NAMES[np.dtype(parts.scales.dtype)]
    )
    rows = len(parts.words)
    try:
        packed = fmt.allocate(rows, parts.cols)
    except FormatShapeError as error:
        raise found.shape_error(str(error)) from None
    raw = np.ascontiguousarray(parts.words, np.dtype("<i4")).view(np.uint8).reshape(rows, -1)
    codes = packed.section("codes").view(np.uint8)
    codes[:] = raw[:, : codes.shape[1]]
    if fmt.signed:
        codes ^= np.uint8(0x80)
    packed.section("scales")[:] = parts.scales
    if keep_zeros:
        packed.section("zeros")[:] = parts.zeros.astype(np.uint8)
    return packed


def integers_of(packed: PackedTensor, system: str) -> Integers:
    """The inverse. FormatError for a tensor of another family."""
    fmt = packed.format
    if not isinstance(fmt, IntegerFormat):
        raise FormatError(f"{system} stores integer formats (int2, int3, int4, int8), and the tensor is {fmt}")
    raw = np.ascontiguousarray(packed.section("codes")).view(np.uint8)
    if fmt.signed:
        raw = raw ^ np.uint8(0x80)
    raw = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 4)))
    scales = np.ascontiguousarray(packed.section("scales"))
    zeros = np.full(scales.shape, fmt.half, np.uint16)
    if not fmt.setting("symmetric"):
        zeros = packed.section("zeros").astype(np.uint16)
    group = fmt.setting("group")
    words = np.ascontiguousarray(raw.view(np.dtype("<i4")), np.int32)
    return Integers(fmt.bits, packed.cols, group if isinstance(group, int) else "row", words, scales, zeros)


# --- columns sorted by group -----------------------------------------------------------------------------------------


def order_of(found: Arrays, name: str, g_idx: Array | None, cols: int, group: Group) -> npt.NDArray[np.intp] | None:
    """The permutation that sorts columns by group (stable), or None if they are in order.

    Column j of the packed tensor is column ``order[j]`` of the layer: ``y = x[:, order] @ decode(packed).T``.
    """
    if g_idx is None:
        return None
    in_order = np.arange(cols) // (cols if group == "row" else group)
    if g_idx.shape != (cols,):
        raise found.shape_error(f"{name} has the shape {g_idx.shape}, and the layer {cols} columns")
    if np.array_equal(g_idx, in_order):
        return None
    order = np.argsort(g_idx, kind="stable")
    if not np.array_equal(g_idx[order], in_order):
        raise found.value_error(
            f"{name} does not give each group {cols if group == 'row' else group} columns, numbered from 0"
        )
    return order


def inverse_of(order: npt.NDArray[np.intp], cols: int) -> npt.NDArray[np.intp]:
    """The inverse permutation; FormatError if `order` is not a permutation."""
    if order.shape != (cols,) or not np.array_equal(np.sort(order), np.arange(cols)):
        raise FormatError(f"the permutation does not name each of {cols} columns once")
    inverse = np.empty(cols, np.intp)
    inverse[order] = np.arange(cols)
    return inverse


def g_idx_of(order: npt.NDArray[np.intp] | None, cols: int, group: Group) -> npt.NDArray[np.int32]:
    """The group of each column of the layer, for columns in `order`."""
    in_order = (np.arange(cols) // (cols if group == "row" else group)).astype(np.int32)
    return in_order if order is None else in_order[inverse_of(order, cols)]
