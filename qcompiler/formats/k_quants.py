"""ggml's k-quants: superblocks of 256 elements, whose 8 or 16 sub-blocks have small integer scales (and minima)."""

from __future__ import annotations

from qcompiler.formats.base import Encoding
from qcompiler.formats.declaration import Declaration, Field, Numerics
from qcompiler.formats.equation import Float32
from qcompiler.formats.ggml import SOURCE, GgmlFormat
from qcompiler.formats.packing import Packing, Pieces, planes, together

_LOW_NIBBLES = Pieces(tuple(((e, 0, 4),) for e in range(16)), "the low nibbles of 16 bytes")
_HIGH_NIBBLES = Pieces(tuple(((e, 4, 4),) for e in range(16)), "the high nibbles of 16 bytes")

_SCALES_OF_8 = Pieces(
    tuple(((e, 0, 6),) for e in range(4)) + tuple(((e + 8, 0, 4), (e, 6, 2)) for e in range(4)),
    "the first four in bits 0…5 of bytes 0…3; of the others bits 0…3 in the low nibbles of bytes 8…11, bits 4 and 5 "
    "in bits 6 and 7 of bytes 0…3",
)
_MINS_OF_8 = Pieces(
    tuple(((e + 4, 0, 6),) for e in range(4)) + tuple(((e + 8, 4, 4), (e + 4, 6, 2)) for e in range(4)),
    "the first four in bits 0…5 of bytes 4…7; of the others bits 0…3 in the high nibbles of bytes 8…11, bits 4 and 5 "
    "in bits 6 and 7 of bytes 4…7",
)
_SCALES_OF_16 = Pieces(
    tuple(((e % 8, 4 * (e // 8), 4), (8 + e % 4, 2 * (e // 4), 2)) for e in range(16)),
    "bits 0…3 in nibbles of bytes 0…7, eight entries apart; bits 4 and 5 in bytes 8…11, four entries apart",
)

_NUMERICS = Numerics(ties="", zero_block="", scale_clamp="", zero_point="", reciprocal="")


class _KQuant(GgmlFormat):
    block = 256
    takes_importance = True

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        raise NotImplementedError


class Q2_K(_KQuant):
    """ggml's q2_K."""

    name, ggml_type = "q2_K", 10

    def declare(self) -> Declaration:
        return self._declare(
            "2-bit codes above a minimum; each 16 elements have a 4-bit scale and minimum, 256 an fp16 scale of each",
            (
                Field("scales", "uint", 4, covers=16, offset=0, packing=_LOW_NIBBLES),
                Field("mins", "uint", 4, covers=16, offset=0, packing=_HIGH_NIBBLES),
                Field("codes", "uint", 2, offset=16, packing=planes(2, 32, 256)),
                Field("d", "f16", 16, covers=256, offset=80),
                Field("dmin", "f16", 16, covers=256, offset=82),
            ),
            "d * scales * codes - dmin * mins",
            _NUMERICS,
            SOURCE,
        )


class Q3_K(_KQuant):
    """ggml's q3_K."""

    name, ggml_type = "q3_K", 11

    def declare(self) -> Declaration:
        codes = together(planes(2, 32, 256, first=32), planes(1, 32, 256))
        return self._declare(
            "3-bit codes with their zero at 4; each 16 elements have a 6-bit scale (zero at 32), 256 an fp16 one",
            (
                Field("codes", "uint", 3, offset=0, packing=codes),
                Field("scales", "uint", 6, covers=16, offset=96, packing=_SCALES_OF_16),
                Field("d", "f16", 16, covers=256, offset=108),
            ),
            "d * (scales - 32) * (codes - 4)",
            _NUMERICS,
            SOURCE,
        )


class _ScaleMin(_KQuant):
    """q4_K and q5_K."""

    bits: int
    packing: Packing

    def declare(self) -> Declaration:
        return self._declare(
            f"{self.bits}-bit codes above a minimum; each 32 elements have a 6-bit scale and minimum, 256 an fp16 scale of each",
            (
                Field("d", "f16", 16, covers=256, offset=0),
                Field("dmin", "f16", 16, covers=256, offset=2),
                Field("scales", "uint", 6, covers=32, offset=4, packing=_SCALES_OF_8),
                Field("mins", "uint", 6, covers=32, offset=4, packing=_MINS_OF_8),
                Field("codes", "uint", self.bits, offset=16, packing=self.packing),
            ),
            "d * scales * codes - dmin * mins",
            _NUMERICS,
            SOURCE,
        )


class Q4_K(_ScaleMin):
    """ggml's q4_K."""

    name, bits, ggml_type = "q4_K", 4, 12
    packing = planes(4, 32, 256)


class Q5_K(_ScaleMin):
    """ggml's q5_K."""

    name, bits, ggml_type = "q5_K", 5, 13
    packing = together(planes(4, 32, 256, first=32), planes(1, 32, 256))


class Q6_K(_KQuant):
    """ggml's q6_K."""

    name, ggml_type = "q6_K", 14

    def declare(self) -> Declaration:
        codes = together(planes(4, 64, 256), planes(2, 32, 256, first=128))
        return self._declare(
            "6-bit codes with their zero at 32; each 16 elements have an 8-bit scale, 256 an fp16 one",
            (
                Field("codes", "uint", 6, offset=0, packing=codes),
                Field("scales", "int", 8, covers=16, offset=192),
                Field("d", "f16", 16, covers=256, offset=208),
            ),
            "d * scales * (codes - 32)",
            _NUMERICS,
            SOURCE,
        )
