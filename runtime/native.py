"""The compiled form of a plan: found in the user's cache, else emitted from the KernelSpecs and compiled here."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import re
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from qcompiler.errors import CompileFailedError, IndexOutOfRangeError, RuntimeFailure
from qcompiler.kernels.cpu.entry import function_name, kernel_name
from qcompiler.kernels.text import identifier
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import EntryPoint, Plan, to_json
from qcompiler.runtime.cache import cache_dir, write_atomically
from qcompiler.runtime.compiler import compile_library, find_compiler, flags_for
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.memory import align_up
from qcompiler.runtime.support import Context

QC_INDEX_OUT_OF_RANGE = 1
"""What a kernel writes into the context's error code (kernels/cpu/abi.h)."""

_LIBRARY_NAME = re.compile(r"program-[0-9a-f]{32}\.so\Z")


@functools.cache
def emitter_version() -> str:
    """The emitter's version and a digest of its own text, shared parts included: a changed template never meets an old
    library."""
    from qcompiler.kernels.cpu import emit

    state = hashlib.sha256()
    for package in ("qcompiler.kernels", "qcompiler.kernels.layouts", "qcompiler.kernels.cpu"):
        for file in sorted(resources.files(package).iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".h", ".cpp")):
                state.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{emit.EMITTER_VERSION}+{state.hexdigest()[:16]}"


def plan_key(plan: Plan, isa: str) -> str:
    """Identity of a plan's native form: the plan without its weights' names and digests, emitter, flags, target."""
    bare = msgspec.structs.replace(plan, weights=())
    state = hashlib.sha256(to_json(bare))
    state.update(json.dumps([emitter_version(), flags_for(isa), isa, platform.machine()]).encode())
    return state.hexdigest()


def build_native(plan: Plan, isa: str) -> NativeLibrary:
    """The plan's library for `isa`. A plan seen before needs neither the emitter nor a compiler."""
    record = cache_dir("plans") / f"{plan_key(plan, isa)}.json"
    if (known := _read_record(record, isa)) is not None:
        return known
    from qcompiler.kernels.cpu import emit

    source = emit.emit_program(plan, isa)
    compiler = find_compiler()
    path = compile_library(
        source, isa, emitter_version=emitter_version(), announce=f"compiled {len(plan.kernels)} kernels for {isa}"
    )
    write_atomically(record, json.dumps({"library": path.name, "compiler": compiler.version}).encode())
    return NativeLibrary(isa, path, emitter_version(), compiler.version)


def scratch_stride(plan: Plan, isa: str) -> int:
    """Bytes of scratch per thread: what the neediest kernel of the plan asks for, to full cache lines."""
    from qcompiler.kernels.cpu import emit

    return align_up(max((emit.scratch_bytes(spec, isa) for spec in plan.kernels), default=0), 64)


def _read_record(record: Path, isa: str) -> NativeLibrary | None:
    try:
        data: Any = json.loads(record.read_bytes())
    except (OSError, ValueError):  # no record yet (or a damaged one): compiling writes it anew
        return None
    name, compiler = data.get("library"), data.get("compiler")
    if not isinstance(name, str) or not isinstance(compiler, str) or not _LIBRARY_NAME.match(name):
        return None
    path = cache_dir("native") / name
    return NativeLibrary(isa, path, emitter_version(), compiler) if path.exists() else None


class Library:
    """A loaded native library: its entry functions and kernels as ctypes functions that release the GIL."""

    def __init__(self, native: NativeLibrary) -> None:
        self.native = native
        try:
            self._library = ctypes.CDLL(str(native.path))
        except OSError as error:
            raise CompileFailedError(f"cannot load the compiled kernels {native.path}: {error}") from error

    def entry(self, plan: Plan, point: EntryPoint) -> Any:
        """`qc_entry` of an entry point: (ctx, arenas, symbols) -> error code."""
        return self._function(function_name(plan, point), f"qe_{identifier(point.name)}", ctypes.c_int32)

    def kernel(self, number: int, spec: KernelSpec) -> Any:
        """`qc_kernel` of the kernel that has this place in the plan: (ctx, operands, symbols)."""
        return self._function(kernel_name(number), f"qk_{spec.name}", None)

    def _function(self, symbol: str, old: str, restype: Any) -> Any:
        """The function; under its `old` name in a build from a file that was made before functions had numbers."""
        try:
            function = self._library[old if self.native.scratch is not None and not self._has(symbol) else symbol]
        except AttributeError as error:
            raise CompileFailedError(f"the compiled kernels {self.native.path} lack the function '{symbol}'") from error
        function.restype = restype
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        return function

    def _has(self, symbol: str) -> bool:
        return hasattr(self._library, symbol)


def kernel_error(context: Context, plan: Plan) -> RuntimeFailure:
    """What a kernel reported through the context, in words."""
    number = context.error_kernel
    where = "a kernel"
    if 0 <= number < len(plan.kernels):
        spec = plan.kernels[number]
        where = f"kernel '{spec.name}'" + (f" ({spec.serves})" if spec.serves else "")
    if context.error_code == QC_INDEX_OUT_OF_RANGE:
        return IndexOutOfRangeError(
            f"{where} met the index {context.error_value}, which is outside 0…{context.error_limit - 1}; "
            "check the ids or positions that were passed in"
        )
    return RuntimeFailure(f"{where} failed with code {context.error_code}")
