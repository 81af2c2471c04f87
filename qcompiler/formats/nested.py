"""Double quantisation (nested statistics, QLoRA): the absmax of every block is stored in eight bits.

    absmax of a block = dynamic[code] * scale of 256 blocks + offset of the tensor

`dynamic` is the signed 8-bit data type with a dynamic exponent (dynamic tree quantisation) of Dettmers et al., "8-bit
Optimizers via Block-wise Quantization" (2021): zeros behind the sign bit count powers of ten, and the bits after them
divide the upper nine tenths of that decade evenly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from qcompiler.formats.equation import Float32

BLOCKS = 256
"""Blocks whose absmax share one second-level scale."""

_STEPS = 65536
"""bitsandbytes' CPU library rounds a normalised value to this many levels before it looks the code up."""


def _dynamic_map() -> Float32:
    """The 256 values, ascending, with the roundings of bitsandbytes' `create_dynamic_map` (signed, 7 exponent bits)."""
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    first, one = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        count = 1 << exponent
        step = np.float64((one - first) / np.float32(count))
        place = np.arange(count + 1)
        # A linear space as torch computes it: from the nearer end, with one rounding per value (fused multiply-add).
        ends = np.where(place < (count + 1) // 2, first + step * place, 1 - step * (count - place)).astype(np.float32)
        magnitudes = np.float32(10.0 ** (exponent - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        values += [magnitudes, -magnitudes]
    return np.sort(np.concatenate(values))


DYNAMIC = _dynamic_map()


def _lookup() -> npt.NDArray[np.uint8]:
    """The code of each of `_STEPS` evenly spaced values in [-1, 1]: the number of fp32 midpoints below it."""
    step = np.arange(_STEPS, dtype=np.float32) * np.float32(2) / np.float32(_STEPS - 1)
    midpoints = (DYNAMIC[:-1] + DYNAMIC[1:]) * np.float32(0.5)
    return np.searchsorted(midpoints, np.float32(-1) + step).astype(np.uint8)


_LOOKUP = _lookup()


def mean_offset(absmax: Float32) -> np.float32:
    """The mean of all absmax, summed in float64 from the first to the last, rounded once to fp32.

    bitsandbytes sums in fp32, in an order that depends on its number of threads.
    """
    total = np.zeros(1, np.float64)
    for part in _parts(absmax):
        total = np.add.accumulate(np.concatenate([total, part]), dtype=np.float64)[-1:]
    return np.float32(total[0] / absmax.size)


def encode(absmax: Float32, offset: np.float32, codes: npt.NDArray[np.uint8], scales: Float32) -> None:
    """Fills `codes`, one for each absmax, and `scales`, one for 256 of them.

    Bit for bit bitsandbytes 0.50's `quantize_blockwise(absmax - offset, blocksize=256)` on an x86 CPU.  The difference
    times fp32 ``1 / scale`` is rounded to one of 65536 levels.  Its code is the nearest one, or the lower of two equal
    distances.  So 0 decodes to 2.1e-5 of the scale.  If all differences are 0, codes and scale are 0.
    """
    first = 0
    for part in _parts(absmax):
        difference = part - offset
        full = difference.size - difference.size % BLOCKS
        for block in (difference[:full].reshape(-1, BLOCKS), difference[full:].reshape(1, -1)):
            if block.size:
                stop = first + block.size
                scales[first // BLOCKS : -(-stop // BLOCKS)], found = _encode_blocks(block)
                codes[first:stop] = found.reshape(-1)
                first = stop


def _parts(absmax: Float32) -> Iterator[Float32]:
    """Pieces of whole second-level blocks, which keep temporary arrays small."""
    for start in range(0, absmax.size, 256 * BLOCKS):
        yield absmax[start : start + 256 * BLOCKS]


def _encode_blocks(blocks: Float32) -> tuple[Float32, npt.NDArray[np.uint8]]:
    scale = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # the reciprocal of a denormal may be infinite
        value = np.clip(blocks * (np.float32(1) / scale)[:, None], -1, 1)
        level = (value + np.float32(1)) * np.float32(0.5)
        # A fused multiply-add in fp32: float64 holds product and sum exactly.
        level = (level.astype(np.float64) * (_STEPS - 1) + 0.5).astype(np.float32)
    level[np.isnan(level)] = 0  # 0 times infinity, which the library's conversion turns into level 0
    codes = _LOOKUP[level.astype(np.uint16)]
    codes[scale == 0] = 0
    return scale, codes
