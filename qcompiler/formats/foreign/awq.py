"""AWQ checkpoints of the GEMM kind (AutoAWQ): 4-bit codes in 32-bit words along N, in an order of their own.

    qweight  int32 (K, N / 8)      nibble i of word c, lowest first, is column 8 * c + ORDER[i]
    qzeros   int32 (groups, N / 8) zero points, likewise
    scales   fp16, bf16 or fp32 (groups, N)

    w[k, n] = (code[k, n] - zero[k // group, n]) * scales[k // group, n]

Source: AutoAWQ 0.2 `WQLinear_GEMM.from_linear`; compressed-tensors 0.20 `AutoAWQConverter` reads it in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.foreign.arrays import (
    FLOATS,
    Array,
    Arrays,
    Integers,
    group_of,
    groups_in,
    integers_of,
    pack_words,
    tensor_of,
    unpack_words,
)

NAMES = ("qweight", "qzeros", "scales")
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
BITS = 4


def read(
    arrays: Mapping[str, Array], *, group: int, bits: int = BITS, symmetric: bool | None = None, layer: str = "layer"
) -> PackedTensor:
    """The weight (N, K) of a layer; `group` (-1: a whole row), `bits` are the config's `q_group_size`, `w_bit`.

    `symmetric` is the opposite of the config's `zero_point`; None checks whether every zero point is 8.  Layers without
    qzeros are symmetric.  FormatError (and its shape and value kinds) names the layer and the array.
    """
    found = Arrays(arrays, layer, "AWQ")
    found.refuse_unknown(NAMES)
    if bits != BITS:
        raise found.error(f"{bits} bits; the GEMM packing has {BITS}")
    qweight = found.get("qweight", (np.int32,), 2)
    cols, words = qweight.shape
    rows = 8 * words
    ours = group_of(found, group, cols, bits)
    count = groups_in(cols, ours)
    why = f"{rows} columns of {cols} codes in groups of {group}"
    scales = found.shaped("scales", FLOATS, (count, rows), why)
    if found.has("qzeros"):
        qzeros = found.shaped("qzeros", (np.int32,), (count, words), why)
        zeros = _unpack(qzeros).astype(np.uint16)
    elif symmetric is False:
        raise found.error("needs qzeros, since the layer is said to have zero points")
    else:
        zeros = np.full((count, rows), 8, np.uint16)
    codes = pack_words(np.ascontiguousarray(_unpack(qweight).T), bits)
    parts = Integers(bits, cols, ours, codes, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T))
    return tensor_of(found, parts, symmetric)


def write(packed: PackedTensor) -> dict[str, Array]:
    """The arrays of a layer with this weight (int4): the inverse of `read`.

    FormatError for another format, FormatShapeError if N is not a multiple of 8, FormatValueError for a zero point
    of 16.
    """
    parts = integers_of(packed, "AWQ")
    if parts.bits != BITS:
        raise FormatError(f"AWQ's GEMM packing has {BITS}-bit codes, and the tensor is {packed.format}")
    if packed.rows % 8:
        raise FormatShapeError(f"AWQ stores eight columns per word, and N = {packed.rows} is not a multiple of 8")
    if parts.zeros.max() > 15:
        raise FormatValueError(f"a zero point of {parts.zeros.max()} does not fit AWQ's four bits")
    codes = unpack_words(parts.words, BITS, parts.cols)
    return {
        "qweight": _pack(codes.T),
        "qzeros": _pack(parts.zeros.T.astype(np.uint8)),
        "scales": np.ascontiguousarray(parts.scales.T),
    }


def _unpack(words: Array) -> npt.NDArray[np.uint8]:
    """Codes (n, 8 * w) of words (n, w)."""
    nibbles = unpack_words(words, BITS, 8 * words.shape[1]).reshape(*words.shape, 8)
    codes = np.empty_like(nibbles)
    codes[:, :, ORDER] = nibbles
    return codes.reshape(len(words), -1)


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    nibbles = codes.reshape(len(codes), -1, 8)[:, :, ORDER]
    return pack_words(nibbles.reshape(len(codes), -1), BITS)
