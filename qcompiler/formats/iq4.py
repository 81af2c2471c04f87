"""ggml's formats of 16 unevenly spaced values: iq4_nl and iq4_xs."""

from __future__ import annotations

from qcompiler.formats.base import Encoding
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat
from qcompiler.formats.packing import Pieces, planes

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's 16 values, closer to each other around zero; there is none at zero."""

_SCALES = Pieces(
    tuple(((2 + e // 2, 4 * (e % 2), 4), (e // 4, 2 * (e % 4), 2)) for e in range(8)),
    "bits 0…3 are nibbles of the last four bytes, bits 4 and 5 pairs of bits of the first two, lowest first",
)


class _Iq4(GgmlFormat):
    takes_importance = True

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        raise NotImplementedError


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
            _NUMERICS,
            f"{SOURCE}, quantize_iq4_nl (gguf-py has no encoder)",
            table=VALUES,
        )


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
            _NUMERICS,
            f"{SOURCE}, quantize_iq4_xs (gguf-py has no encoder)",
            table=VALUES,
        )


_NUMERICS = Numerics(ties="", zero_block="", scale_clamp="", zero_point="", reciprocal="")
