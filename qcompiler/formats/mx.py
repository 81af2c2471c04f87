"""MX formats of the Open Compute Project: blocks of 32 small floats of a row that share a power of two."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Declaration, Encoding, Field, Format, Numerics, Parameter, refuse_nonfinite
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.minifloat import (
    E2M1,
    E2M1_VALUES,
    E4M3,
    E5M2,
    E8M0_BIAS,
    EXPONENT_RULES,
    MiniFloat,
    absmax,
    block_importance,
    e8m0_codes,
    e8m0_values,
    lesser,
    pack_nibbles,
    weighted_error,
)

BLOCK = 32

SEARCH = "search"

_RULE = Parameter(
    "exponent",
    "floor",
    (*EXPONENT_RULES, SEARCH),
    "how the encoder rounds a block's exponent, or `search`: the exponent of the least squared error among floor's and "
    "its two neighbours; what is stored decodes alike",
)

NEIGHBOURS = (0, 1, -1)
"""What a search adds to floor's exponent; of equal errors the first one wins. One more saturates nothing, one less
halves the steps and saturates what lies above half of the largest element."""


class _MX(Format):
    """A scale 2^s per block, and ``code = cast(w / 2^s)``, as in OCP MX 1.0 and torchao 0.18's `to_mx`."""

    @property
    @abstractmethod
    def element(self) -> MiniFloat:
        """The type of the elements."""

    @property
    def takes_importance(self) -> bool:
        return self.setting("exponent") == SEARCH

    def declare(self) -> Declaration:
        e = self.element
        four_bits = e is E2M1
        codes = Field("codes", "uint", 4) if four_bits else Field("codes", "e4m3" if e is E4M3 else "e5m2", 8)
        return Declaration(
            summary=f"{e.name} elements, one power of two (E8M0) per block of 32 of a row: OCP MX 1.0",
            block=BLOCK,
            blocking="row",
            tail="refuse",
            fields=(codes, Field("scales", "e8m0", 8, covers=BLOCK)),
            decode=Equation("table[codes] * scales" if four_bits else "codes * scales"),
            table=E2M1_VALUES if four_bits else None,
            numerics=Numerics(
                ties=f"to the even mantissa; beyond {e.largest:g} * scale it saturates, as OCP MX 1.0 section 6.3 says",
                zero_block="codes 0 (-0 keeps its sign), scale 2^-127 (code 0)",
                scale_clamp=f"exponents from -127 to {127 - e.exponent}, above which {e.largest:g} would decode to "
                "infinity; the NaN scale (code 255) is never written and decodes to NaN",
                zero_point="none",
                reciprocal="divides by the stored power of two (exact); torchao divides by 2^-126 where it stores "
                "2^-127 (a workaround of its own compiler), which halves such values",
            ),
            reference="OCP Microscaling Formats 1.0, section 6.3; torchao 0.18 prototype.mx_formats.mx_tensor.to_mx in "
            "the scaling modes FLOOR, CEIL, EVEN, RCEIL; compressed-tensors 0.20 rounds exponents by EVEN",
        )

    def _shape_message(self, cols: int) -> str:
        return f"{self} needs K to be a multiple of 32, and K = {cols} is not; fp8_e4m3, nf4 and int8 take any K"

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = tile.reshape(-1, BLOCK)
        largest = absmax(blocks, axis=1)
        if not np.isfinite(largest).all():
            refuse_nonfinite(self, job.weights, tile, start)
        first = start // BLOCK
        if self.setting("exponent") == SEARCH:
            exponents = self._searched(blocks, largest, block_importance(job, first, len(blocks), BLOCK))
        else:
            exponents = e8m0_codes(largest, self.element, str(self.setting("exponent")))
        scales = job.packed.section("scales").reshape(-1).view(np.uint8)
        scales[first : first + len(blocks)] = exponents
        found: Any = self.element.saturate(blocks / e8m0_values(exponents)[:, None]).reshape(-1)
        codes = job.packed.section("codes").reshape(-1)
        if self.element is E2M1:
            codes[start // 2 : (start + tile.size) // 2] = pack_nibbles(found.view(np.uint8))
        else:
            codes[start : start + tile.size] = found

    def _searched(self, blocks: Float32, largest: Float32, importance: Float32 | None) -> npt.NDArray[np.uint8]:
        """The exponent of the least (weighted) squared error of each block.

        Errors are computed in units of floor's scale, a power of two: nothing overflows, and nothing is rounded more.
        """
        base = e8m0_codes(largest, self.element, "floor")
        scaled = blocks / e8m0_values(base)[:, None]
        best, chosen = np.full(len(blocks), np.inf, np.float32), base
        for shift in NEIGHBOURS:
            codes = np.clip(base.astype(np.int32) + shift, 0, 2 * E8M0_BIAS - self.element.exponent).astype(np.uint8)
            ratio: Float32 = np.exp2(codes.astype(np.float32) - base.astype(np.float32))[:, None]
            over: Float32 = scaled / ratio
            values: Float32 = self.element.saturate(over).astype(np.float32) * ratio
            best, chosen = lesser(best, chosen, weighted_error(scaled, values, importance), codes)
        return chosen


class MXFP4(_MX):
    """E2M1 elements, two per byte with the even index in the low nibble (torchao, compressed-tensors, gpt-oss)."""

    name: ClassVar[str] = "mxfp4"
    parameters: ClassVar[tuple[Parameter, ...]] = (_RULE,)

    @property
    def element(self) -> MiniFloat:
        return E2M1


class MXFP8(_MX):
    """E4M3 or E5M2 elements."""

    name: ClassVar[str] = "mxfp8"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("element", "e4m3", ("e4m3", "e5m2"), "the type of the elements", shown=True),
        _RULE,
    )

    @property
    def element(self) -> MiniFloat:
        return E4M3 if self.setting("element") == "e4m3" else E5M2
