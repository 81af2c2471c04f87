"""Which instruction sets this machine runs: the psABI levels of x86-64, or `generic` elsewhere.

`QC_ISA` overrides the choice (to a level the machine has): useful to reproduce another machine's bits.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from qcompiler.errors import TargetMismatchError

X86_LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")

# /proc/cpuinfo's names for what the psABI levels add ("abm" is lzcnt).
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """What this machine runs, plainest first, e.g. ``("x86-64", "x86-64-v3")``."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("generic",)
    flags = cpuinfo_flags(Path("/proc/cpuinfo"))
    if flags is None:  # no Linux, or /proc is hidden: ask the processor itself
        from qcompiler.runtime.support import support

        return X86_LEVELS[: max(1, support().qc_host_level() - 1)]
    return X86_LEVELS[: level_of(flags)]


def cpuinfo_flags(path: Path) -> frozenset[str] | None:
    """The flags of the first processor; None where there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return None


def level_of(flags: frozenset[str]) -> int:
    """How many of `X86_LEVELS` a processor with these flags runs."""
    if not flags >= _V3:
        return 1
    return 3 if flags >= _V4 else 2


def host_isa() -> str:
    """The best instruction set of this machine, or what `QC_ISA` asks for."""
    return resolve_isa(None)


def resolve_isa(requested: str | None) -> str:
    """`requested`, else `QC_ISA`, else the machine's best. TargetMismatchError if the machine cannot run it."""
    wanted, source = requested, "asked for"
    if wanted is None and (wanted := os.environ.get("QC_ISA") or None) is not None:
        source = "QC_ISA asks for"
    have = supported_isas()
    if wanted is None:
        return have[-1]
    if wanted not in (*have, "generic"):
        raise TargetMismatchError(
            f"{source} the instruction set {wanted!r}, but this machine ({platform.machine()}) runs "
            f"{', '.join(have)} only; choose one of these"
        )
    return wanted
