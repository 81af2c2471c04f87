"""Which instructions multiply int8 on the CPU, by the variable `QC_INT8`. No choice changes a result.

    amx      tiles of AMX for 8 to 14 rows and more (kernels/cpu/int8_tiles.h), else as vnni: the default
    vnni     dot products of bytes (AVX-512 VNNI, AVX-VNNI) where the processor has them, else pairs
    pairs    pairs of 16-bit numbers (pmaddwd), as on a processor without VNNI

Linux lets a process use tiles after it has asked for them (`arch_prctl`, Documentation/arch/x86/xstate.rst), since
their state makes the frames of signals 8 KiB larger. It refuses where a thread's stack for signals is too small.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from qcompiler.errors import ArgumentError
from qcompiler.runtime.isa import cpuinfo_flags
from qcompiler.runtime.progress import note_once

UNITS = {"vnni": 0, "pairs": 1, "amx": 2}
"""The numbers of abi.h: QC_INT8_DEFAULT, QC_INT8_PAIRS, QC_INT8_TILES."""

TILE_FLAGS = ("amx_tile", "amx_int8", "avx512_vnni", "avx512vbmi")
"""What a processor needs for tiles, by the names of /proc/cpuinfo: AVX-512 makes the bytes that tiles multiply."""

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
CPUINFO = Path("/proc/cpuinfo")


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
    why = tiles_refused() if isa == "x86-64-v4" else f"kernels for {isa} have no tiles, those for x86-64-v4 do"
    if why is None:
        return UNITS["amx"]
    if os.environ.get("QC_INT8"):
        note_once(f"QC_INT8=amx: {why}; int8 is multiplied as with QC_INT8=vnni")
    elif isa == "x86-64-v4" and tiles_lacking() is None:
        note_once(f"{why}; int8 is multiplied without AMX, as with QC_INT8=vnni")
    return UNITS["vnni"]


def tiles_lacking(flags: tuple[str, ...] = TILE_FLAGS) -> str | None:
    """Why the processor has no tiles that multiply int8, or what else needs `flags`; None if it has them."""
    found = cpuinfo_flags(CPUINFO)
    if found is None:
        return "this system does not tell which instructions its processor has"
    lacks = [flag for flag in flags if flag not in found]
    return f"this processor lacks {', '.join(lacks)}" if lacks else None


@functools.cache
def tiles_refused(flags: tuple[str, ...] = TILE_FLAGS) -> str | None:
    """Asks the system, once in this process, to let its threads use tiles. The reason if they cannot; else None."""
    if lacking := tiles_lacking(flags):
        return lacking
    if error := request_tiles():
        return f"the system refuses tiles: {os.strerror(error)} ({errno.errorcode.get(error, error)})"
    return None


def request_tiles() -> int:
    """0 if the system lets this process use tiles from now on, else its error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.syscall(*(ctypes.c_long(each) for each in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA)))
    return ctypes.get_errno() if asked != 0 else 0
