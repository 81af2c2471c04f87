"""The instruction sets of this machine: the psABI levels of x86-64, or `generic` elsewhere.

`QC_ISA` overrides the choice (to a level the machine has): useful to reproduce another machine's bits.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path

from qcompiler.errors import CompilerMissingError, TargetMismatchError

X86_LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")

# /proc/cpuinfo's names of the features of psABI levels ("abm" is lzcnt, "pni" SSE3). Level 2 has no kernels of its own.
_V2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs, plainest first, e.g. ``("x86-64", "x86-64-v3")``."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("generic",)
    flags = cpuinfo_flags(Path("/proc/cpuinfo"))
    if flags is None:  # not Linux, or /proc is hidden: ask the processor itself
        from qcompiler.runtime.support import support

        try:
            return X86_LEVELS[: max(1, support().qc_host_level() - 1)]
        except CompilerMissingError:  # no way to ask: assume the baseline of x86-64
            return X86_LEVELS[:1]
    return X86_LEVELS[: level_of(flags)]


def cpuinfo_fields(path: Path) -> dict[str, str] | None:
    """What the file says of the first processor, e.g. ``{"vendor_id": "AuthenticAMD", …}``; None without a file."""
    try:
        text = path.read_text()
    except OSError:
        return None
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def cpuinfo_flags(path: Path) -> frozenset[str] | None:
    """The flags of the first processor; None without such a file."""
    flags = (cpuinfo_fields(path) or {}).get("flags")
    return None if flags is None else frozenset(flags.split())


def is_zen4(fields: Mapping[str, str]) -> bool:
    """Whether /proc/cpuinfo says so. A Zen 3, the other member of its family, has no AVX-512."""
    family = fields.get("vendor_id"), fields.get("cpu family")
    return family == ("AuthenticAMD", "25") and "avx512f" in fields.get("flags", "").split()


@functools.cache
def host_is_zen4() -> bool:
    """`is_zen4` of this machine; False where it does not say."""
    return is_zen4(cpuinfo_fields(Path("/proc/cpuinfo")) or {})


def level_of(flags: frozenset[str]) -> int:
    """The number of `X86_LEVELS` that a processor with these flags runs."""
    if not flags >= _V3:
        return 1
    return 3 if flags >= _V4 else 2


def missing_for(isa: str, flags: Collection[str]) -> list[str]:
    """The features of a level of x86-64 that a processor with these flags lacks."""
    needed = {"x86-64-v3": _V3, "x86-64-v4": _V3 | _V4}.get(isa, set())
    return sorted(needed - set(flags))


def host_isa() -> str:
    """The best instruction set of this machine, or the one in `QC_ISA`."""
    return resolve_isa(None)


def runnable_isas() -> tuple[str, ...]:
    """The builds that run here, plainest first: up to the level in `QC_ISA`, if it is set.

    `generic` code uses only instructions that every processor of the machine's kind has.
    """
    have = ("generic", *(isa for isa in supported_isas() if isa != "generic"))
    return have[: have.index(resolve_isa(None)) + 1]


def buildable_isas() -> tuple[str, ...]:
    """The targets that this machine's compiler can build for, whether or not the processor runs them."""
    return ("generic", *X86_LEVELS) if platform.machine() in ("x86_64", "AMD64") else ("generic",)


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
