"""Which instructions multiply int8 on the CPU, by the variable `QC_INT8`. No choice changes a result.

    amx      tiles of AMX for 8 to 14 rows and more (kernels/cpu/int8_tiles.h), else as vnni: the default
    vnni     dot products of bytes (AVX-512 VNNI, AVX-VNNI) where the processor has them, else pairs
    pairs    pairs of 16-bit numbers (pmaddwd), as on a processor without VNNI

Tiles are used where the system allows them (amx.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from qcompiler.errors import ArgumentError
from qcompiler.runtime.amx import INT8_FLAGS, tiles_lacking, tiles_refused_to
from qcompiler.runtime.progress import note_once

UNITS = {"vnni": 0, "pairs": 1, "amx": 2}
"""The numbers of abi.h: QC_INT8_DEFAULT, QC_INT8_PAIRS, QC_INT8_TILES."""


def asked_units() -> str:
    """The value of `QC_INT8`, "amx" by default. ArgumentError for one that is not in `UNITS`."""
    return asked_of("QC_INT8", "int8", UNITS)


def asked_of(variable: str, kind: str, units: Mapping[str, int]) -> str:
    """What an environment variable chooses from `units` to multiply numbers of a kind, "amx" by default."""
    asked = os.environ.get(variable) or "amx"
    if asked not in units:
        known = ", ".join(units)
        raise ArgumentError(f"{variable}={asked!r} names no instructions that multiply {kind}; choose from {known}")
    return asked


def int8_units(isa: str) -> int:
    """The `int8_units` of a context for kernels of an instruction set. ArgumentError as of `asked_units`.

    Where tiles cannot be used, `QC_INT8=vnni` serves. A note says why if they were asked for by name, or if the
    processor has them and the system refuses them.
    """
    asked = asked_units()
    if asked != "amx":
        return UNITS[asked]
    why = tiles_refused_to(isa, INT8_FLAGS)
    if why is None:
        return UNITS["amx"]
    if os.environ.get("QC_INT8"):
        note_once(f"QC_INT8=amx: {why}; int8 is multiplied as with QC_INT8=vnni")
    elif isa == "x86-64-v4" and tiles_lacking(INT8_FLAGS) is None:
        note_once(f"{why}; int8 is multiplied without AMX, as with QC_INT8=vnni")
    return UNITS["vnni"]
