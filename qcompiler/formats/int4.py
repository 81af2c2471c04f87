"""int4: 4-bit codes in groups along K, one fp16 scale per group, and a zero point per group when asymmetric."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatValueError
from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    PackedTensor,
    Parameter,
    refuse_nonfinite,
)
from qcompiler.formats.equation import Equation, Float32

GROUPS = (32, 64, 128)
LARGEST_FP16 = 65504.0


class Int4(Format):
    """Group-wise 4-bit integers. Codes are rounded against the fp16 scale that is stored, not the exact one."""

    name: ClassVar[str] = "int4"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("group", 32, GROUPS, "consecutive elements of a row that share one scale"),
        Parameter("symmetric", True, (True, False), "False adds a zero point (uint8) per group"),
    )

    def declare(self) -> Declaration:
        group = int(self.params["group"])
        codes, scales = Field("codes", "uint", 4), Field("scales", "f16", 16, covers=group)
        scale_rules = (
            "none; a group whose scale would exceed fp16's 65504 is an error. Codes are clipped to 0…15",
            "divides by the stored fp16 scale, widened to fp32",
        )
        if self.params["symmetric"]:
            return Declaration(
                summary="4-bit codes, one fp16 scale per group of a row, zero at code 8",
                block=group,
                blocking="row",
                tail="refuse",
                fields=(codes, scales),
                decode=Equation("(codes - 8) * scales"),
                numerics=Numerics(
                    ties="to even: code = 8 + rint(w / scale)",
                    zero_block="code 8; a scale that rounds to 0 in fp16 is stored as 1",
                    scale_clamp=scale_rules[0],
                    zero_point="8, fixed; scale = (signed extreme) / -8, and of two equal extremes the negative one",
                    reciprocal=scale_rules[1],
                ),
                reference="the scale of ggml's q4_0 (groups of 32), with codes rounded against the stored scale",
            )
        return Declaration(
            summary="4-bit codes, one fp16 scale and one uint8 zero point per group of a row",
            block=group,
            blocking="row",
            tail="refuse",
            fields=(codes, scales, Field("zeros", "uint", 8, covers=group)),
            decode=Equation("(codes - zeros) * scales"),
            numerics=Numerics(
                ties="to even: code = zero + rint(w / scale)",
                zero_block="code 0, zero 0; a scale that rounds to 0 in fp16 is stored as 1",
                scale_clamp=scale_rules[0],
                zero_point="0…15, no bias: rint(-low / scale), scale = (high - low) / 15; low and high enclose 0",
                reciprocal=scale_rules[1],
            ),
            reference="affine min-max quantisation as in torchao and HQQ's first step; 0 is always representable",
        )

    def _shape_message(self, cols: int) -> str:
        fitting = [str(g) for g in GROUPS if cols % g == 0]
        way_out = f"group = {' or '.join(fitting)} would fit" if fitting else "no group of int4 fits"
        return (
            f"{self} needs K to be a multiple of its group, and K = {cols} is not; {way_out}; nf4 and int8 take any K"
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        group = int(self.params["group"])
        codes = job.packed.section("codes").reshape(-1)
        scales = job.packed.section("scales").reshape(-1)
        groups = tile.reshape(-1, group)
        low, high = groups.min(axis=1), groups.max(axis=1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            refuse_nonfinite(self, job.weights, tile, start)
        first = start // group
        where = slice(first, first + len(groups))
        if self.params["symmetric"]:
            # float64 cannot overflow here, and rounding it to fp16 is the one rounding that matters.
            exact = np.where(-low >= high, low, high).astype(np.float64) / -8
            scale = self._store_scales(exact, job.packed, first, scales[where])
            zero = np.full(len(groups), 8, np.float32)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            exact = (high.astype(np.float64) - low) / 15
            scale = self._store_scales(exact, job.packed, first, scales[where])
            zero = np.clip(np.rint(-low / scale), 0, 15)
            job.packed.section("zeros").reshape(-1)[where] = zero.astype(np.uint8)
        quotient = groups / scale[:, None]
        np.rint(quotient, out=quotient)
        quotient += zero[:, None]
        np.clip(quotient, 0, 15, out=quotient)
        codes[start // 2 : (start + tile.size) // 2] = _pack(quotient.astype(np.uint8).reshape(-1))

    def _store_scales(
        self, exact: npt.NDArray[np.float64], packed: PackedTensor, first: int, out: npt.NDArray[np.float16]
    ) -> Float32:
        """Rounds scales to fp16 into `out`; returns them as fp32. `first` is the group that `exact[0]` belongs to."""
        with np.errstate(over="ignore"):
            out[:] = exact
        out[out == 0] = 1
        if not np.isfinite(out).all():
            index = int(np.flatnonzero(~np.isfinite(out))[0])
            group = int(self.params["group"])
            row, block = divmod(first + index, packed.cols // group)
            raise FormatValueError(
                f"row {row}, columns {block * group}…{block * group + group - 1}: the scale {exact[index]:g} exceeds "
                f"fp16's largest value {LARGEST_FP16:g}, in which {self} stores it; nf4 and int8 have fp32 scales"
            )
        return out.astype(np.float32)


def _pack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two codes per byte, even index in the low nibble."""
    pairs = codes.view("<u2")  # even + 256 * odd
    packed: npt.NDArray[np.uint8] = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed
