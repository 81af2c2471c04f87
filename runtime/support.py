"""The runtime's own library: `pool.cpp`, compiled once per machine and loaded once per process."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from importlib import resources
from typing import Any

from qcompiler.errors import ArgumentError, CompilerMissingError, RuntimeFailure
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.code import Code, load, remember
from qcompiler.runtime.compiler import compile_code, cpu_flags, recorded

DEFAULT_SPIN_US = 50
"""How long an idle worker spins before it sleeps: regions of one call follow each other faster than this."""


class Context(ctypes.Structure):
    """`qc_ctx` of kernels/cpu/abi.h."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
        ("error_code", ctypes.c_int32),
        ("error_value", ctypes.c_int64),
        ("error_limit", ctypes.c_int64),
        ("error_kernel", ctypes.c_int32),
        ("int8_units", ctypes.c_int32),
        ("bf16_units", ctypes.c_int32),
    )


_FLAGS = ("-pthread",)
_loaded: list[ctypes.CDLL] = []
_loading = threading.Lock()


def support(trusted: Code | None = None) -> ctypes.CDLL:
    """The loaded library (never unloaded: its workers run in it), one per process.

    It is the user's own, from the cache or freshly compiled.  Only if there is neither, nor a compiler, the one of a
    trusted build (`trusted`) is used.  CompilerMissingError without it.
    """
    with _loading:
        if not _loaded:
            try:
                code = support_library()
            except CompilerMissingError:
                if trusted is None:
                    raise
                code = trusted
            _loaded.append(_open(code))
    return _loaded[0]


def support_library() -> Code:
    """The compiled library. If it was compiled before, no compiler is needed."""
    source, isa = _source(), "x86-64" if os.uname().machine == "x86_64" else "generic"
    key = hashlib.sha256(json.dumps([source, isa, os.uname().machine, cpu_flags(isa), _FLAGS]).encode()).hexdigest()
    record = cache_dir("plans") / f"pool-{key}.json"
    if (known := recorded(record, "qcpool")) is not None:
        return known
    code = compile_code(source, isa, name="qcpool", extra_flags=(*_FLAGS, *sanitize.flags()))
    remember(record, code)
    return code


def _source() -> str:
    text = resources.files("qcompiler.runtime").joinpath("pool.cpp").read_text()
    for name in ("abi.h", "float_state.h"):
        header = resources.files("qcompiler.kernels.cpu").joinpath(name).read_text()
        text = text.replace(f'#include "{name}"\n', header.replace("#pragma once\n", ""), 1)
    return text


def _open(code: Code) -> ctypes.CDLL:
    library = load(code)
    library.qc_pool_parallel.restype = None
    library.qc_pool_set_spin.argtypes = (ctypes.c_int64,)
    library.qc_pool_set_spin.restype = None
    library.qc_pool_set_spin(_spin_us() * 1000)
    return library


def parallel_address() -> int:
    """The address of the pool's `qc_parallel`."""
    return ctypes.cast(support().qc_pool_parallel, ctypes.c_void_p).value or 0


def entry_caller() -> Any:
    """``(entry, ctx, arenas, symbols) -> error code``: calls an entry point in the pool's floating-point state."""
    return _caller("qc_pool_entry", ctypes.c_int32)


def kernel_caller() -> Any:
    """``(kernel, ctx, operands, symbols)``: calls a kernel in the pool's floating-point state."""
    return _caller("qc_pool_kernel", None)


def profiler() -> Any:
    """``(steps, count, ctx, figures, counts) -> error code``: `qc_pool_profile`, see pool.cpp.

    RuntimeFailure for a pool of an earlier version, from a trusted build on a machine without a compiler.
    """
    library = support()
    if not hasattr(library, "qc_pool_profile"):
        raise RuntimeFailure(
            "the thread pool comes from a trusted native build of an earlier version, which cannot profile; compile "
            "the program with this version again, or install a C++ compiler"
        )
    function = library.qc_pool_profile
    function.restype = ctypes.c_int32
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
    return function


def _caller(name: str, restype: Any) -> Any:
    library = support()
    if not hasattr(library, name):  # a pool of an earlier version, from a trusted build: keeps the caller's state
        prototype = ctypes.CFUNCTYPE(restype, *(ctypes.c_void_p,) * 3)
        return lambda function, *arguments: prototype(function)(*arguments)
    caller = library[name]
    caller.restype, caller.argtypes = restype, (ctypes.c_void_p,) * 4
    return caller


def _spin_us() -> int:
    text = os.environ.get("QC_SPIN_US", str(DEFAULT_SPIN_US))
    if not text.isdigit() or int(text) > 1_000_000:
        raise ArgumentError(f"QC_SPIN_US={text!r} is not a number of microseconds between 0 and 1000000")
    return int(text)
