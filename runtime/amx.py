"""Whether this process may use the tiles of AMX, which multiply int8 and bf16.

Linux lets a process use tiles after it has asked for them (`arch_prctl`, Documentation/arch/x86/xstate.rst), since
their state makes the frames of signals 8 KiB larger. It refuses where a thread's stack for signals is too small.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from pathlib import Path

from qcompiler.runtime.isa import cpuinfo_flags

INT8_FLAGS = ("amx_tile", "amx_int8", "avx512_vnni", "avx512vbmi")
"""What a processor needs to multiply int8 by tiles, by the names of /proc/cpuinfo: AVX-512 makes the bytes that tiles
multiply."""

BF16_FLAGS = ("amx_tile", "amx_bf16", "avx512_bf16")
"""What it needs to multiply bf16 by tiles."""

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
CPUINFO = Path("/proc/cpuinfo")


def tiles_lacking(flags: tuple[str, ...]) -> str | None:
    """Which of `flags` the processor does not have, in words; None if it has them all."""
    found = cpuinfo_flags(CPUINFO)
    if found is None:
        return "this system does not tell which instructions its processor has"
    lacks = [flag for flag in flags if flag not in found]
    return f"this processor lacks {', '.join(lacks)}" if lacks else None


@functools.cache
def tiles_refused(flags: tuple[str, ...]) -> str | None:
    """Asks the system, once for each `flags`, to let this process use tiles. The reason if it cannot; else None."""
    if lacking := tiles_lacking(flags):
        return lacking
    if error := request_tiles():
        return f"the system refuses tiles: {os.strerror(error)} ({errno.errorcode.get(error, error)})"
    return None


def tiles_refused_to(isa: str, flags: tuple[str, ...]) -> str | None:
    """`tiles_refused`, or that kernels for this instruction set have no tiles."""
    if isa != "x86-64-v4":
        return f"kernels for {isa} have no tiles, those for x86-64-v4 do"
    return tiles_refused(flags)


def request_tiles() -> int:
    """0 if the system lets this process use tiles from now on, else its error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked = libc.syscall(*(ctypes.c_long(each) for each in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA)))
    return ctypes.get_errno() if asked != 0 else 0
