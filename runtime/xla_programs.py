"""Programs that XLA calls on the CPU: the handler (`xla_handler.cpp`), compiled once, and what is registered with it.

A registration has no session: the handler keeps activations and scratch of its own for each call that runs at the same
time, and programs with states are refused before they come here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import weakref
from collections.abc import Mapping
from importlib import resources
from typing import Any

from qcompiler.plan.dims import Expr, dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import EntryPoint, to_json
from qcompiler.runtime import sanitize
from qcompiler.runtime.bf16_units import bf16_units
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.code import load, remember
from qcompiler.runtime.compiler import compile_code, cpu_flags, recorded
from qcompiler.runtime.executor import EntryArenas
from qcompiler.runtime.int8_units import int8_units
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.native import kernel_title
from qcompiler.runtime.placement import activation_offsets
from qcompiler.runtime.support import parallel_address, support

_FLAGS = ("-pthread",)


class _Entry(ctypes.Structure):
    """`qx_entry` of xla_handler.cpp."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("arenas", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("input_count", ctypes.c_int32),
        ("output_count", ctypes.c_int32),
        ("symbol_count", ctypes.c_int32),
        ("operation_count", ctypes.c_int32),
    )


class _Program(ctypes.Structure):
    """`qx_program` of xla_handler.cpp."""

    _fields_ = (
        ("call", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        ("activation_nbytes", ctypes.c_int64),
        ("scratch_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
        ("arena_count", ctypes.c_int32),
        ("entry_count", ctypes.c_int32),
        ("kernel_count", ctypes.c_int32),
        ("int8_units", ctypes.c_int32),
        ("bf16_units", ctypes.c_int32),
        ("entries", ctypes.c_void_p),
        ("kernels", ctypes.c_void_p),
    )


@functools.cache
def handler(include: str, version: str) -> ctypes.CDLL:
    """The loaded handler, for XLA's headers in the folder `include` of jaxlib `version`; never unloaded.

    If it was compiled before, no compiler is needed. CompilerMissingError, CompileFailedError.
    """
    source, isa = _source(version), "x86-64" if os.uname().machine == "x86_64" else "generic"
    key = hashlib.sha256(json.dumps([source, isa, os.uname().machine, cpu_flags(isa), _FLAGS]).encode()).hexdigest()
    record = cache_dir("plans") / f"xla-{key}.json"
    code = recorded(record, "qcxla")
    if code is None:
        flags = (*_FLAGS, f"-I{include}", *sanitize.flags())
        code = compile_code(source, isa, name="qcxla", extra_flags=flags, announce="compiled the handler for XLA")
        remember(record, code)
    library = load(code)
    library.qx_register.restype = ctypes.c_void_p
    library.qx_register.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    library.qx_unregister.restype = None
    library.qx_unregister.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    library.qx_free_frames.restype = ctypes.c_int64
    library.qx_free_frames.argtypes = (ctypes.c_void_p,)
    return library


def _source(version: str) -> str:
    """The text without an include of our own; the version makes it another text for other headers."""
    text = resources.files("qcompiler.runtime").joinpath("xla_handler.cpp").read_text()
    header = resources.files("qcompiler.kernels.cpu").joinpath("abi.h").read_text()
    return f"// jaxlib {version}\n" + text.replace('#include "abi.h"\n', header.replace("#pragma once\n", ""), 1)


class Registered:
    """A program as the handler knows it, under `key`. Its memory and its code live until this object is dropped and no
    call runs any more: whoever may call it keeps it."""

    def __init__(self, program: LoadedProgram, library: ctypes.CDLL) -> None:
        self.key = program_key(program)
        self._library = library
        self._handle: int = library.qx_register(self.key.encode(), ctypes.byref(_described(program)))
        if not self._handle:
            raise MemoryError("the system gives no memory to register the program with XLA")
        # The finaliser holds the program, so that its memory outlives the last call. At exit nothing is freed: XLA's
        # threads may still run.
        weakref.finalize(self, _unregister, library, self.key, self._handle, program).atexit = False

    @property
    def free_frames(self) -> int:
        """Sets of activations that no call uses now: as many as calls have run at the same time."""
        return int(self._library.qx_free_frames(self._handle))


def _unregister(library: ctypes.CDLL, key: str, handle: int, program: LoadedProgram) -> None:
    library.qx_unregister(key.encode(), handle)  # waits for calls, without the GIL


def program_key(program: LoadedProgram) -> str:
    """A digest of all that decides a call's results: the plan, with the digests of its weights, and the kernels."""
    state = hashlib.sha256(to_json(program.plan))
    state.update(json.dumps([program.isa, program.native.emitter_version, program.num_threads]).encode())
    return state.hexdigest()


def _described(program: LoadedProgram) -> _Program:
    """The C description of a program; what it points to lives as long as it."""
    plan = program.plan
    offsets, totals = activation_offsets(plan, plan.entries)
    entries = [_entry(program, entry, offsets[entry.name]) for entry in plan.entries]
    table = (_Entry * len(entries))(*entries)
    names = [kernel_title(plan, number).encode() for number in range(len(plan.kernels))]
    kernels = (ctypes.c_char_p * max(len(names), 1))(*names)
    made = _Program(
        call=ctypes.cast(support().qc_pool_entry, ctypes.c_void_p).value,
        parallel=parallel_address(),
        activation_nbytes=sum(totals.values()),
        scratch_stride=program.scratch_stride,
        num_threads=program.num_threads,
        arena_count=len(plan.arenas),
        entry_count=len(entries),
        kernel_count=len(names),
        int8_units=int8_units(program.isa),
        bf16_units=bf16_units(program.isa),
        entries=ctypes.addressof(table),
        kernels=ctypes.addressof(kernels),
    )
    made.held = (entries, table, names, kernels)
    return made


def _entry(program: LoadedProgram, entry: EntryPoint, offsets: Mapping[str, int]) -> _Entry:
    plan, library = program.plan, program.library
    assert library is not None
    placeholder = dict.fromkeys(offsets, 1)  # the check of `EntryArenas` that every arena of the entry has memory
    frame = EntryArenas(plan, entry, program.shared_bases | placeholder)
    count = len(plan.arenas)
    arenas: Any = (ctypes.c_void_p * max(count, 1))(*frame.arenas)
    activations = (ctypes.c_int64 * max(count, 1))(*[offsets.get(arena.name, -1) for arena in plan.arenas])
    inputs, outputs = ((ctypes.c_int32 * max(len(each), 1))(*each) for each in (frame.inputs, frame.outputs))
    bounds = [bound for symbol in entry.symbols for bound in (symbol.min, symbol.max)]
    code = _sizes(entry)
    ranges, sizes = ((ctypes.c_int64 * max(len(each), 1))(*each) for each in (bounds, code))
    names = [sig.dtype.encode() for sig in (*entry.inputs, *entry.outputs)]
    types = (ctypes.c_char_p * max(len(names), 1))(*names)
    held = (arenas, activations, inputs, outputs, ranges, sizes, types)
    made = _Entry(
        library.entry(plan, entry), *map(ctypes.addressof, held),
        len(frame.inputs), len(frame.outputs), len(entry.symbols), len(code) // 2,
    )  # fmt: skip
    made.held = held
    return made


# --- sizes of buffers, as the handler computes them ------------------------------------------------------------------

_NUMBER, _SYMBOL, _ADD, _MULTIPLY, _END = 0, 1, 2, 3, 8  # `qx_operation` of xla_handler.cpp
_CALLS = {"//": 4, "%": 5, "max": 6, "min": 7}


def _sizes(entry: EntryPoint) -> list[int]:
    """The bytes of each argument and then of each result, in the handler's postfix code: pairs of numbers, flat."""
    places = {symbol.name: place for place, symbol in enumerate(entry.symbols)}
    code: list[int] = []
    for sig in (*entry.inputs, *entry.outputs):
        code += (_NUMBER, ITEMSIZE[sig.dtype])
        for extent in sig.shape:
            code += (*_postfix(dim(extent), places), _MULTIPLY, 0)
        code += (_END, 0)
    return code


def _postfix(size: Expr, places: Mapping[str, int]) -> list[int]:
    code = [_NUMBER, 0]
    for monomial, coefficient in size.terms.items():
        code += (_NUMBER, coefficient)
        for atom in monomial:
            if isinstance(atom, str):
                code += (_SYMBOL, places[atom], _MULTIPLY, 0)
                continue
            lhs, rhs = (_postfix(dim(part), places) for part in (atom.lhs, atom.rhs))
            code += (*lhs, *rhs, _CALLS[atom.kind], 0, _MULTIPLY, 0)
        code += (_ADD, 0)
    return code
