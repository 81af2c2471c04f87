"""int8: signed 8-bit codes, one fp32 scale per row (per output channel of a linear layer)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from qcompiler.formats.base import (
    Declaration,
    Encoding,
    Field,
    Format,
    Numerics,
    Parameter,
    refuse_nonfinite,
)
from qcompiler.formats.equation import Equation, Float32

_FLOAT32_MAX = np.finfo(np.float32).max
LARGEST_SCALE = np.nextafter(_FLOAT32_MAX / np.float32(127), np.float32(0))
"""One step below fp32's maximum / 127, so that the code 127 never decodes to infinity."""


class Int8(Format):
    """Symmetric int8 per row: ``scale = absmax / 127``, ``code = rint(w / scale)`` in fp32."""

    name: ClassVar[str] = "int8"
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    def declare(self) -> Declaration:
        return Declaration(
            summary="signed 8-bit codes, one fp32 scale per row",
            block="row",
            blocking="row",
            tail="short",
            fields=(Field("codes", "int", 8), Field("scales", "f32", 32, covers="row")),
            decode=Equation("codes * scales"),
            numerics=Numerics(
                ties="to even (rint)",
                zero_block="codes 0; a scale that rounds to 0 in fp32 (zero row, or absmax below 9e-44) is stored as 1",
                scale_clamp="a scale is at most fp32's maximum / 127; codes are clipped to ±127 (-128 is never used)",
                zero_point="none (symmetric)",
                reciprocal="divides by the stored fp32 scale",
            ),
            reference="per-channel symmetric int8 as in torch.ao and ONNX QuantizeLinear, with range ±127",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        cols = job.packed.cols
        codes, scales = job.packed.section("codes"), job.packed.section("scales")
        rows = tile.reshape(-1, cols)
        absmax = np.maximum(rows.max(axis=1), -rows.min(axis=1))  # half the traffic of max(abs(rows))
        if not np.isfinite(absmax).all():
            refuse_nonfinite(self, job.weights, tile, start)
        scale = np.minimum(absmax / np.float32(127), LARGEST_SCALE)
        scale[scale == 0] = 1
        quotient = rows / scale[:, None]
        np.rint(quotient, out=quotient)
        # A denormal scale is coarse and the largest is clamped, so that |w / scale| can pass 127.
        np.clip(quotient, -127, 127, out=quotient)
        first = start // cols
        codes[first : first + len(rows)] = quotient.astype(np.int8)
        scales[first : first + len(rows), 0] = scale
