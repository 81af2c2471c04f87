"""Which instructions multiply int8 on the CPU, by the variable `QC_INT8`. No choice changes a result.

    vnni     dot products of bytes (AVX-512 VNNI, AVX-VNNI) where the processor has them, else pairs: the default
    pairs    pairs of 16-bit numbers (pmaddwd), as on a processor without VNNI
"""

from __future__ import annotations

import os

from qcompiler.errors import ArgumentError

UNITS = {"vnni": 0, "pairs": 1}
"""The numbers of abi.h: QC_INT8_DEFAULT, QC_INT8_PAIRS."""


def int8_units() -> int:
    """The `int8_units` of a context. ArgumentError for a value of `QC_INT8` that is none of these."""
    asked = os.environ.get("QC_INT8") or "vnni"
    if asked not in UNITS:
        raise ArgumentError(f"QC_INT8={asked!r} names no instructions that multiply int8; choose from {', '.join(UNITS)}")
    return UNITS[asked]
