"""ggml's formats of 16 unevenly spaced values: iq4_nl and iq4_xs."""

from __future__ import annotations

import numpy as np

from qcompiler.formats.base import Encoding
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Entries, Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat, quiet, reciprocal
from qcompiler.formats.ggml_search import TableSearch, nearest, ordered_sum, signed_extreme, transposed
from qcompiler.formats.packing import Pieces, planes

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's 16 values, closer to each other around zero; none of them is zero."""

_SCALES = Pieces(
    tuple(((2 + e // 2, 4 * (e % 2), 4), (e // 4, 2 * (e % 4), 2)) for e in range(8)),
    "bits 0…3 are nibbles of the last four bytes, bits 4 and 5 pairs of bits of the first two, lowest first",
)


_TABLE = TableSearch(VALUES)
_TRIALS = 7


class _Iq4(GgmlFormat):
    takes_importance = True

    def _scales(self, job: Encoding, start: int, blocks: Float32, x: Float32) -> Float32:
        """The scales (blocks, block / 32) of each 32 elements; `x` are those elements, transposed."""
        with quiet():
            importance = self._importance(job, start, blocks)
            if importance is None:
                weights = x * x
            else:
                sigma2 = ordered_sum(transposed(blocks * blocks, self.block)) * np.float32(2 / self.block)
                weights = transposed(importance * np.sqrt(sigma2[:, None] + blocks * blocks), 32)
            scales = _TABLE.scale(x, weights, _TRIALS).reshape(len(blocks), -1)
        self._check_scales(job, start, scales)
        return scales


_TIES = "nearest value of the table by w · (1/scale) in fp32, halves to the upper one"
_RECIPROCAL = "multiplies by fp32 1/scale, before scales are rounded for storage"
_NUMERICS = {
    32: Numerics(
        ties=_TIES,
        zero_block="code 8 (value 1), d 0, where the largest magnitude lies below 1e-15",
        scale_clamp="none; a scale that exceeds fp16 is an error",
        zero_point="none; no value of the table is 0. The scale is the best of 16 fits by least squares, the errors "
        "weighted by w² or, with an importance, by importance · sqrt(2 · mean(w²) + w²)",
        reciprocal=_RECIPROCAL,
    ),
    256: Numerics(
        ties=f"{_TIES}; scales to even: rint(scale / d)",
        zero_block="code 8, scale code 32 (value 0), where the largest magnitude lies below 1e-15",
        scale_clamp="to -32…31 times d = (signed extreme of the scales) / -32; a d that exceeds fp16 is an error",
        zero_point="none; no value of the table is 0. Scales are found as in iq4_nl",
        reciprocal=_RECIPROCAL,
    ),
}


class IQ4_NL(_Iq4):
    """ggml's iq4_nl."""

    name, block, ggml_type = "iq4_nl", 32, 20

    def declare(self) -> Declaration:
        return self._declare(
            "4-bit codes into a table of 16 unevenly spaced integers, one fp16 scale per 32 elements of a row",
            (
                Field("d", "f16", 16, covers=32, offset=0),
                Field("codes", "uint", 4, offset=2, packing=planes(4, 16, 32)),
            ),
            "d * table[codes]",
            _NUMERICS[self.block],
            f"{SOURCE}, quantize_iq4_nl, which llama-quantize runs (quantize_row_iq4_nl_ref tries one scale only; "
            "gguf-py has no encoder)",
            table=VALUES,
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        x = transposed(blocks, 32)
        scale = self._scales(job, start, blocks, x)[:, 0]
        stored = self._half(job, start, scale, "scale")
        with quiet():
            codes = _TABLE.codes(x, reciprocal(scale)).T
        self.store(job.packed, start // 32, {"d": stored, "codes": codes})


class IQ4_XS(_Iq4):
    """ggml's iq4_xs."""

    name, block, ggml_type = "iq4_xs", 256, 23

    def declare(self) -> Declaration:
        return self._declare(
            "4-bit codes into iq4_nl's table; 256 elements of a row share an fp16 scale, each 32 of them a 6-bit one",
            (
                Field("d", "f16", 16, covers=256, offset=0),
                Field("scales", "uint", 6, covers=32, offset=2, packing=_SCALES),
                Field("codes", "uint", 4, offset=8, packing=planes(4, 16, 256)),
            ),
            "d * (scales - 32) * table[codes]",
            _NUMERICS[self.block],
            f"{SOURCE}, quantize_iq4_xs (gguf-py has no encoder)",
            table=VALUES,
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        blocks = self._blocks(job, start, tile)
        x = transposed(blocks, 32)
        scales = self._scales(job, start, blocks, x)
        d = signed_extreme(scales.T) / np.float32(-32)
        stored = self._half(job, start, d, "scale")
        with quiet():
            levels = np.clip(nearest(reciprocal(d)[:, None] * scales), -32, 31)
            codes = _TABLE.codes(x, reciprocal((d[:, None] * levels).reshape(-1)))
        entries: dict[str, Entries] = {
            "d": stored,
            "scales": (levels + np.float32(32)).astype(np.uint8),
            "codes": codes.T.reshape(-1, 256),
        }
        self.store(job.packed, start // 256, entries)
