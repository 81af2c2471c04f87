"""ggml's ternary formats, tq1_0 and tq2_0: every weight is -1, 0 or 1 times an fp16 scale per 256."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from qcompiler.formats.base import Encoding
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat, reciprocal, round_away
from qcompiler.formats.packing import Packing, Trits, planes


class _Ternary(GgmlFormat):
    block = 256
    packing: ClassVar[Packing]

    def declare(self) -> Declaration:
        return self._declare(
            "codes 0, 1, 2 for -1, 0, 1, one fp16 scale per 256 elements of a row (BitNet, TriLM)",
            (
                Field("codes", "uint", 2, offset=0, packing=self.packing),
                Field("d", "f16", 16, covers=256, offset=self.packing.nbytes),
            ),
            "(codes - 1) * d",
            Numerics(
                ties="away from zero: code = 1 + roundf(w · (1/d))",
                zero_block="code 1, d 0; likewise where 1/d is infinite (d < 2.9e-39, stored as 0)",
                scale_clamp="none; a scale that exceeds fp16 is an error",
                zero_point="1, fixed; d = absmax",
                reciprocal="multiplies by fp32 1/d, before d is rounded to fp16",
            ),
            f"{SOURCE}, quantize_row_{self.name}_ref; gguf-py 0.19 gives the same bytes",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        d = np.abs(blocks).max(axis=1)
        stored = self._half(job, start, d, "scale")
        inverse = reciprocal(d)
        inverse[np.isinf(inverse)] = 0
        codes = (round_away(blocks * inverse[:, None]) + np.float32(1)).astype(np.uint8)
        self.store(job.packed, start // 256, {"codes": codes, "d": stored})


class TQ1_0(_Ternary):
    """ggml's tq1_0: five ternary digits in a byte."""

    name, ggml_type = "tq1_0", 34
    packing = Trits(((32, 5), (16, 5), (4, 4)))


class TQ2_0(_Ternary):
    """ggml's tq2_0: two bits per digit."""

    name, ggml_type = "tq2_0", 35
    packing = planes(2, 32, 256)
