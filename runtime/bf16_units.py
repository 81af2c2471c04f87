"""Which instructions multiply bf16 on the CPU, by the variable `QC_BF16`.

    amx      tiles of AMX for two to six rows and more (kernels/cpu/bf16_tiles.h), else as dots, and for nine rows and
             more in fp32 (kernels/cpu/fp32_tiles.h): the default
    dots     dot products of pairs (AVX512-BF16) where the processor has them, else fp32

Tiles add the products of a sum in another order than dot products do, so the last bits of results differ.
"""

from __future__ import annotations

import os

from qcompiler.runtime.amx import BF16_FLAGS, tiles_refused_to
from qcompiler.runtime.int8_units import asked_of
from qcompiler.runtime.progress import note_once

UNITS = {"dots": 0, "amx": 1}
"""The numbers of abi.h: QC_BF16_DEFAULT, QC_BF16_TILES."""


def asked_units() -> str:
    """The value of `QC_BF16`, "amx" by default. ArgumentError for one that is not in `UNITS`."""
    return asked_of("QC_BF16", "bf16", UNITS)


def bf16_units(isa: str) -> int:
    """The `bf16_units` of a context for kernels of an instruction set. ArgumentError as of `asked_units`.

    Where tiles cannot be used, `QC_BF16=dots` serves. A note says why if they were asked for by name. (If the processor
    has them and the system refuses them, that of int8_units.py says so.)
    """
    asked = asked_units()
    if asked != "amx":
        return UNITS[asked]
    why = tiles_refused_to(isa, BF16_FLAGS)
    if why is None:
        return UNITS["amx"]
    if os.environ.get("QC_BF16"):
        note_once(f"QC_BF16=amx: {why}; bf16 is multiplied as with QC_BF16=dots")
    return UNITS["dots"]
