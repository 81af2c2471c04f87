"""Which instructions multiply int8 on the CPU, by the variable `QC_INT8`. No choice changes a result.

    vnni     dot products of bytes (AVX-512 VNNI, AVX-VNNI) where the processor has them, else pairs: the default
    pairs    pairs of 16-bit numbers (pmaddwd), as on a processor without VNNI
    amx      tiles of AMX for 16 rows and more, else as vnni. Tested on a model of the tiles, never run on a processor
             that has them, and so used only where it is asked for

Linux lets a process use tiles after it has asked for them (`arch_prctl`, Documentation/arch/x86/xstate.rst), since
their state makes the frames of signals 8 KiB larger. It refuses where a thread's stack for signals is too small.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
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
    """The value of `QC_INT8`, "vnni" by default. ArgumentError for one that is not in `UNITS`."""
    asked = os.environ.get("QC_INT8") or "vnni"
    if asked not in UNITS:
        known = ", ".join(UNITS)
        raise ArgumentError(f"QC_INT8={asked!r} names no instructions that multiply int8; choose from {known}")
    return asked


def int8_units(isa: str) -> int:
    """The `int8_units` of a context for kernels of an instruction set. ArgumentError as of `asked_units`.

    Where tiles are asked for and cannot be used, a note says why, and the default serves.
    """
    asked = asked_units()
    if asked == "amx":
        why = tiles_refused() if isa == "x86-64-v4" else f"kernels for {isa} have no tiles, those for x86-64-v4 do"
        if why is not None:
            note_once(f"QC_INT8=amx: {why}; int8 is multiplied as with QC_INT8=vnni")
            return UNITS["vnni"]
    return UNITS[asked]


@functools.cache
def tiles_refused(flags_needed: tuple[str, ...] = TILE_FLAGS) -> str | None:
    """Asks the system, once in this process, to let its threads use tiles. The reason if they cannot; else None."""
    flags = cpuinfo_flags(CPUINFO)
    if flags is None:
        return "this system does not tell which instructions its processor has"
    if lacks := [flag for flag in flags_needed if flag not in flags]:
        return f"this processor lacks {', '.join(lacks)}"
    if error := request_tiles():
        return f"the system refuses tiles: {os.strerror(error)} ({errno.errorcode.get(error, error)})"
    return None


def request_tiles() -> int:
    """0 if the system lets this process use tiles from now on, else its error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.syscall(*(ctypes.c_long(each) for each in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA)))
    return ctypes.get_errno() if asked != 0 else 0
