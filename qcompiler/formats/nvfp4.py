"""NVFP4: blocks of 16 E2M1 elements of a row, an E4M3 scale per block, one fp32 scale for the tensor."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    Parameter,
    absmax_of_all,
)
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.minifloat import (
    E2M1,
    E2M1_VALUES,
    E4M3,
    absmax,
    block_importance,
    lesser,
    pack_nibbles,
    weighted_error,
)

BLOCK = 16
SMALLEST_SCALE = np.float32(2.0**-6)
"""E4M3's smallest normal value."""

SMALLEST_GLOBAL = np.float32(2.0**-120)
"""Keeps ``1 / global_scale / 2^-6`` = 2^126 finite in fp32; applies where absmax is below 2688 * 2^-120 = 2e-33."""

_RANGE = np.float32(448 * 6)
"""The largest product of a block's scale and an element."""

SEARCH = "search"

NEIGHBOURS = (0, 1, -1, 2, -2, 3, -3, 4, 5, 6)
"""What a search adds to the code of the scale absmax / 6; of equal errors the first one wins. Eight codes are a factor
of 2: with scales of up to 1.5 times absmax / 6 the largest element may become 4 (absmax / 4 is 4 or 5 codes above), and
with smaller ones it saturates."""

_FIRST, _FIRST_OF_DIVISORS, _LAST = 0x08, 0x01, 0x7E
"""The codes of 2^-6, the smallest scale of torchao; of 2^-9, that of compressed-tensors; and of 448."""

ZERO_SCALE = np.float32(0.125)
"""compressed-tensors stores this instead of a block scale that rounds to zero."""


class NVFP4(Format):
    """Bit for bit torchao 0.18's `nvfp4_quantize`, or with ``divisor=True`` compressed-tensors 0.20's result."""

    name: ClassVar[str] = "nvfp4"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("divisor", False, (False, True), "True: the stored global scale divides (compressed-tensors)"),
        Parameter(
            "scales",
            "absmax",
            ("absmax", SEARCH),
            "`search`: of the E4M3 scales beside absmax / 6 the one of the least squared error; what is stored decodes "
            "alike",
        ),
    )

    def declare(self) -> Declaration:
        divisor = bool(self.setting("divisor"))
        return Declaration(
            summary="e2m1 elements, an E4M3 scale per block of 16 of a row, one fp32 "
            + ("divisor for all scales" if divisor else "scale for all"),
            block=BLOCK,
            blocking="row",
            tail="refuse",
            fields=(
                Field("codes", "uint", 4),
                Field("scales", "e4m3", 8, covers=BLOCK),
                Field("global_scale", "f32", 32, covers="tensor"),
            ),
            table=E2M1_VALUES,
            decode=Equation(f"table[codes] * (scales {'/' if divisor else '*'} global_scale)"),
            numerics=_DIVISOR if divisor else _MULTIPLIER,
            reference="compressed-tensors 0.20, generate_gparam, calculate_qparams and quantize_and_pack_fp4, in fp32"
            if divisor
            else "torchao 0.18, prototype.mx_formats.nvfp4_tensor.nvfp4_quantize with per_tensor_amax_to_scale",
        )

    @property
    def takes_importance(self) -> bool:
        return self.setting("scales") == SEARCH

    def _shape_message(self, cols: int) -> str:
        return f"{self} needs K to be a multiple of 16, and K = {cols} is not; fp8_e4m3, nf4 and int8 take any K"

    def _begin(self, job: Encoding) -> None:
        job.packed.section("global_scale")[:] = self._global_scale(absmax_of_all(self, job.weights))

    def _global_scale(self, largest: np.float32) -> np.float32:
        if not self.setting("divisor"):
            return np.float32(np.maximum(largest / _RANGE, SMALLEST_GLOBAL))
        with np.errstate(over="ignore"):
            # torch divides a number by a tensor by multiplying with the tensor's reciprocal.
            divisor = np.float32(1) / np.maximum(largest, np.finfo(np.float32).tiny) * _RANGE
            if not np.isfinite(divisor):
                return np.float32(1)
            # Three roundings may carry a weight at fp32's maximum past that maximum.
            while not np.isfinite(np.float32(448) / divisor * np.float32(6)):
                divisor = np.nextafter(divisor, np.float32(1))
            return np.float32(divisor)

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = tile.reshape(-1, BLOCK)
        of_all, first = job.packed.section("global_scale")[0], start // BLOCK
        local = absmax(blocks, axis=1) / np.float32(6)
        if self.setting("divisor"):
            stored = E4M3.saturate(local * of_all)
            stored[stored.view(np.uint8) == 0] = ZERO_SCALE
        else:
            stored = E4M3.saturate(np.maximum(local / of_all, SMALLEST_SCALE))
        if self.setting("scales") == SEARCH:
            stored = self._searched(blocks, stored, of_all, block_importance(job, first, len(blocks), BLOCK))
        scaled = self._scaled(blocks, stored, of_all)
        job.packed.section("scales").reshape(-1)[first : first + len(blocks)] = stored
        codes = job.packed.section("codes").reshape(-1)
        found = E2M1.saturate(scaled).reshape(-1).view(np.uint8)
        codes[start // 2 : (start + tile.size) // 2] = pack_nibbles(found)

    def _scaled(self, blocks: Float32, stored: npt.NDArray[Any], of_all: np.float32) -> Float32:
        """The elements over their scales, as the references divide."""
        if self.setting("divisor"):
            scaled: Float32 = blocks / (stored.astype(np.float32) / of_all)[:, None]
            scaled += np.float32(0)  # the reference multiplies by the sign of -0.0, which is 0, and so gives +0
            return scaled
        return blocks * (np.float32(1) / of_all / stored.astype(np.float32))[:, None]

    def _searched(
        self, blocks: Float32, stored: npt.NDArray[Any], of_all: np.float32, importance: Float32 | None
    ) -> npt.NDArray[Any]:
        """The block scales of the least (weighted) squared error. Errors are in units of the scale from the absmax."""
        base = stored.view(np.uint8)
        own: Float32 = stored.astype(np.float32)
        units = self._scaled(blocks, stored, of_all)
        best, chosen = np.full(len(blocks), np.inf, np.float32), base
        smallest = _FIRST_OF_DIVISORS if self.setting("divisor") else _FIRST
        for step in NEIGHBOURS:
            codes = np.clip(base.astype(np.int32) + step, smallest, _LAST).astype(np.uint8)
            other: Float32 = codes.view(E4M3.dtype).astype(np.float32)
            ratio: Float32 = (other / own)[:, None]
            cast: Float32 = E2M1.saturate(self._scaled(blocks, codes.view(E4M3.dtype), of_all)).astype(np.float32)
            values: Float32 = cast * ratio
            best, chosen = lesser(best, chosen, weighted_error(units, values, importance), codes)
        return chosen.view(E4M3.dtype)


_TIES = "to the even mantissa, for elements and for block scales; beyond 6 it saturates"

_MULTIPLIER = Numerics(
    ties=_TIES,
    zero_block="codes 0 (-0 keeps its sign), block scale 2^-6",
    scale_clamp="block scales from 2^-6 (E4M3's smallest normal; other systems go down to 2^-9) to 448; the global "
    "scale absmax / 2688 is at least 2^-120, also for a tensor of zeros, where the reference divides by 0",
    zero_point="none",
    reciprocal="multiplies by fp32 (1 / global) / scale; decoding multiplies by both",
)
_DIVISOR = Numerics(
    ties=_TIES,
    zero_block="codes 0 (-0 loses its sign), block scale 0.125",
    scale_clamp="a block scale that rounds to 0 in E4M3 is stored as 0.125; the global divisor is 2688 * fp32 (1 / "
    "absmax), or 1 where that is infinite, and so large that the largest weight stays finite",
    zero_point="none",
    reciprocal="the global scale is stored as a divisor; elements are divided by fp32 (scale / global)",
)
