"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes in 32-bit words along K, zero points in words along N.

    qweight  int32 (K * bits / 32, N)      bits 2, 3, 4, 8; a stream along K, lowest bits first; 3 bits cross words
    qzeros   int32 (groups, N * bits / 32) the same along N; version 1 stores zero - 1, version 2 zero
    scales   fp16, bf16 or fp32 (groups, N)
    g_idx    int32 (K,)                    the group of each row of qweight's codes ("act-order"); optional

    w[k, n] = (code[k, n] - zero[g_idx[k], n]) * scales[g_idx[k], n]

Sources: AutoGPTQ 0.7 `qlinear_cuda.py`, GPTQModel's `format: gptq | gptq_v2`.  They disagree on the stored value
2^bits - 1 of version 1: current kernels read the zero point 2^bits, older ones wrap to 0; see `full_zero`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatShapeError, FormatValueError
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.foreign.arrays import (
    FLOATS,
    Array,
    Arrays,
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

NAMES = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)


def read(
    arrays: Mapping[str, Array],
    *,
    bits: int,
    group: int,
    version: Literal[1, 2] = 1,
    symmetric: bool | None = None,
    act_order: bool | None = None,
    full_zero: Literal["refuse", "keep", "wrap"] = "refuse",
    layer: str = "layer",
) -> tuple[PackedTensor, npt.NDArray[np.intp] | None]:
    """The weight (N, K) of a layer, and the permutation for its input if columns were sorted by group.

    `bits`, `group` (-1: a whole row), `version`, `symmetric` and `act_order` are the config's `bits`, `group_size`,
    `checkpoint_format`, `sym` and `desc_act`.  None for the last two takes the value from the arrays; a value that the
    arrays contradict is an error.  With a permutation ``y = x[:, permutation] @ decode(packed).T``.

    `full_zero` is the meaning of version 1's largest stored zero point: "keep" 2^bits, "wrap" 0; by default it is an
    error.  FormatError (and its shape and value kinds) names the layer and the array.
    """
    found = Arrays(arrays, layer, "GPTQ")
    found.refuse_unknown(NAMES)
    if bits not in BITS:
        raise found.error(f"{bits} bits; GPTQ has {', '.join(map(str, BITS))}")
    qweight = found.get("qweight", (np.int32,), 2)
    rows, cols = qweight.shape[1], qweight.shape[0] * 32 // bits
    if words_for(cols, bits) != qweight.shape[0] or cols * bits % 32:
        raise found.shape_error(f"qweight has {qweight.shape[0]} words per column, no whole number of {bits}-bit codes")
    ours = group_of(found, group, cols, bits)
    count = groups_in(cols, ours)
    why = f"{rows} columns of {cols} codes in groups of {group}"
    scales = found.shaped("scales", FLOATS, (count, rows), why)
    qzeros = found.shaped("qzeros", (np.int32,), (count, words_for(rows, bits)), why)
    zeros = unpack_words(qzeros, bits, rows).astype(np.uint16)
    if version == 1:
        zeros = _plus_one(found, zeros, bits, full_zero)
    order = order_of(found, "g_idx", arrays.get("g_idx"), cols, ours)
    if act_order is False and order is not None:
        raise found.value_error("the columns should be in order (desc_act false), but g_idx reorders them")
    words = np.ascontiguousarray(qweight.T)
    parts = Integers(bits, cols, ours, words, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T))
    sorted_parts = Integers(bits, cols, ours, parts.permuted(order), parts.scales, parts.zeros)
    return tensor_of(found, sorted_parts, symmetric), order


def _plus_one(
    found: Arrays, stored: npt.NDArray[np.uint16], bits: int, full_zero: Literal["refuse", "keep", "wrap"]
) -> npt.NDArray[np.uint16]:
    zeros = stored + np.uint16(1)
    full = zeros == 1 << bits
    if not full.any():
        return zeros
    if full_zero == "wrap":
        zeros[full] = 0
        return zeros
    place = tuple(int(i) for i in np.argwhere(full)[0])
    where = f"qzeros of group {place[0]}, column {place[1]} stores {(1 << bits) - 1}"
    if full_zero == "keep":
        if bits == 8:
            raise found.value_error(f"{where}, and a zero point of 256 does not fit int8's uint8 zero points")
        return zeros
    raise found.value_error(
        f"{where}, which version 1 reads as {1 << bits} (current kernels) or as 0 (older ones): "
        "say full_zero='keep' or full_zero='wrap'"
    )


def write(
    packed: PackedTensor, *, version: Literal[1, 2] = 1, permutation: npt.NDArray[np.intp] | None = None
) -> dict[str, Array]:
    """The arrays of a layer with this weight: the inverse of `read`.

    FormatError for another format than int2, int3, int4, int8; FormatShapeError if N codes do not fill words;
    FormatValueError for a zero point that the version cannot store (version 1: 0; version 2: 2^bits).
    """
    parts = integers_of(packed, "GPTQ")
    bits, rows = parts.bits, packed.rows
    if rows * bits % 32 or parts.cols * bits % 32:
        raise FormatShapeError(
            f"GPTQ fills 32-bit words along both dimensions, and {rows} x {parts.cols} codes of {bits} bits do not"
        )
    bias = 1 if version == 1 else 0
    low, high = int(parts.zeros.min()), int(parts.zeros.max())
    if low < bias or high - bias >= 1 << bits:
        raise FormatValueError(
            f"zero points from {low} to {high} do not fit GPTQ version {version}, which stores {bias} to "
            f"{(1 << bits) - 1 + bias}" + ("; version 2 stores 0" if low == 0 else "")
        )
    inverse = None if permutation is None else inverse_of(permutation, parts.cols)
    return {
        "qweight": np.ascontiguousarray(parts.permuted(inverse).T),
        "qzeros": pack_words((parts.zeros.T - bias).astype(np.uint8), bits),
        "scales": np.ascontiguousarray(parts.scales.T),
        "g_idx": g_idx_of(permutation, parts.cols, parts.group),
    }
