"""`QC_SANITIZE=address,undefined`: the CPU build of kernels and pool under the compiler's AddressSanitizer and UBSan.

The compiled text is the same; only the flags and the key in the cache differ.  AddressSanitizer's runtime must be in
the process before Python, since it replaces malloc.  One command arranges that:

    python -m qcompiler.runtime.sanitized pytest tests/kernels

Memory of arenas and scratch (`Block`) is then mapped between guard pages, and the rest of its last page is poisoned: an
access behind the last byte is reported like one behind a malloc.  A report ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import os

from qcompiler.errors import RuntimeFailure

KINDS = ("address", "undefined")
GUARD = 64 << 10
"""Bytes of inaccessible memory before and behind a guarded block."""

COMMAND = "python -m qcompiler.runtime.sanitized COMMAND [ARGUMENT…]"


def wanted() -> tuple[str, ...]:
    """The sanitisers that `QC_SANITIZE` names, sorted. RuntimeFailure for an unknown name."""
    return parse(os.environ.get("QC_SANITIZE", ""))


@functools.cache
def parse(text: str) -> tuple[str, ...]:
    names = tuple(sorted({name.strip() for name in text.split(",") if name.strip()}))
    if unknown := [name for name in names if name not in KINDS]:
        raise RuntimeFailure(f"QC_SANITIZE={text!r} names {unknown[0]!r}; it is 'address', 'undefined' or both")
    return names


def flags() -> tuple[str, ...]:
    """Extra flags for the compiler; none if no sanitiser is wanted."""
    kinds = wanted()
    if not kinds:
        return ()
    # -O0: with the checks, -O1 takes four times as long to compile a large unit, and no bit depends on the level.
    return (f"-fsanitize={','.join(kinds)}", "-fno-sanitize-recover=all", "-O0", "-g1", "-fno-omit-frame-pointer")


def compiler_environment() -> dict[str, str]:
    """The environment for a compiler, without the sanitiser's runtime, which would make it many times slower."""
    kept = dict(os.environ)
    if wanted():
        kept.pop("LD_PRELOAD", None)
    return kept


def require_runtime() -> None:
    """RuntimeFailure before sanitised code is loaded into a process that lacks AddressSanitizer's runtime: the loader
    would end the process."""
    if "address" in wanted() and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise RuntimeFailure(
            "QC_SANITIZE=address: AddressSanitizer's runtime must be loaded before Python. Start the program as "
            f"`{COMMAND}`"
        )


# --- memory ----------------------------------------------------------------------------------------------------------


def guarding() -> bool:
    """Whether blocks of memory are guarded: AddressSanitizer is wanted and present."""
    return "address" in wanted() and hasattr(ctypes.CDLL(None), "__asan_poison_memory_region")


def protect(address: int, nbytes: int) -> None:
    """Makes whole pages inaccessible."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if library.mprotect(address, nbytes, 0):
        raise OSError(ctypes.get_errno(), f"cannot protect {nbytes} bytes of guard pages")


def poison(address: int, nbytes: int) -> None:
    """Makes the sanitiser report accesses to these bytes from now on."""
    _region("__asan_poison_memory_region", address, nbytes)


def unpoison(address: int, nbytes: int) -> None:
    """Makes the bytes ordinary memory again."""
    _region("__asan_unpoison_memory_region", address, nbytes)


def _region(function: str, address: int, nbytes: int) -> None:
    call = ctypes.CDLL(None)[function]
    call.restype, call.argtypes = None, (ctypes.c_void_p, ctypes.c_size_t)
    call(address, nbytes)
