"""The compiled form of a plan: found in the user's cache, else emitted from the KernelSpecs and compiled here."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform

import msgspec

from qcompiler.errors import CompileFailedError, IndexOutOfRangeError, RuntimeFailure
from qcompiler.kernels.cpu.entry import function_name, kernel_name, segment_name
from qcompiler.kernels.text import identifier
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import EntryPoint, Plan, to_json
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.code import Code, load, read_record, remember
from qcompiler.runtime.compiler import compile_code, cpu_flags, find_compiler, recorded
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.memory import align_up
from qcompiler.runtime.support import Context
from qcompiler.units import counted

QC_INDEX_OUT_OF_RANGE = 1
"""A kernel's values for the context's error code (kernels/cpu/abi.h)."""


def plan_key(plan: Plan, isa: str) -> str:
    """Identity of a plan's native form: the plan without its weights' names and digests, emitter, flags, target."""
    bare = msgspec.structs.replace(plan, weights=())
    state = hashlib.sha256(to_json(bare))
    state.update(json.dumps([emitter_version("cpu"), cpu_flags(isa), isa, platform.machine()]).encode())
    return state.hexdigest()


def build_native(plan: Plan, isa: str) -> NativeLibrary:
    """The plan's library for `isa`. A plan that was compiled before needs neither the emitter nor a compiler."""
    record = cache_dir("plans") / f"{plan_key(plan, isa)}.json"
    if (known := recorded(record, "program")) is not None:
        return NativeLibrary(
            isa, known.path, emitter_version("cpu"), str(read_record(record).get("compiler", "")), code=known
        )
    from qcompiler.kernels.cpu import emit

    source = emit.emit_program(plan, isa)
    compiler = find_compiler()
    code = compile_code(
        source, isa, emitter_version=emitter_version("cpu"), extra_flags=sanitize.flags(),
        announce=f"compiled {counted(len(plan.kernels), 'kernel')} for {isa}",
    )  # fmt: skip
    remember(record, code, compiler=compiler.version)
    return NativeLibrary(isa, code.path, emitter_version("cpu"), compiler.version, code=code)


def scratch_stride(plan: Plan, isa: str) -> int:
    """Bytes of scratch per thread: the maximum over the plan's kernels, rounded up to full cache lines."""
    from qcompiler.kernels.cpu import emit

    return align_up(max((emit.scratch_bytes(spec, isa) for spec in plan.kernels), default=0), 64)


class Library:
    """A loaded native library: its entry functions and kernels, as addresses for `entry_caller` and `kernel_caller`."""

    def __init__(self, native: NativeLibrary) -> None:
        self.native = native
        self._library = load(native.code or Code(native.path, native.path.read_bytes()))

    def entry(self, plan: Plan, point: EntryPoint) -> int:
        """The address of an entry point's `qc_entry`: (ctx, arenas, symbols) -> error code."""
        return self._address(function_name(plan, point), f"qe_{identifier(point.name)}")

    def segment(self, plan: Plan, point: EntryPoint, number: int) -> int:
        """The same for one run of an entry point's steps between torch calls."""
        name = segment_name(function_name(plan, point), number)
        return self._address(name, name)

    def kernel(self, number: int, spec: KernelSpec) -> int:
        """The address of the `qc_kernel` with this number in the plan: (ctx, operands, symbols)."""
        return self._address(kernel_name(number), f"qk_{spec.name}")

    def _address(self, symbol: str, old: str) -> int:
        """The function; under its `old` name in a build from before functions had numbers.

        CompileFailedError if the library has no such function.
        """
        try:
            function = self._library[old if self.native.scratch is not None and not self._has(symbol) else symbol]
        except AttributeError as error:
            raise CompileFailedError(f"the compiled kernels {self.native.path} lack the function '{symbol}'") from error
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    def _has(self, symbol: str) -> bool:
        return hasattr(self._library, symbol)


def kernel_error(context: Context, plan: Plan) -> RuntimeFailure:
    """The error that a kernel reported through the context."""
    number = context.error_kernel
    where = kernel_title(plan, number) if 0 <= number < len(plan.kernels) else "a kernel"
    if context.error_code == QC_INDEX_OUT_OF_RANGE:
        return IndexOutOfRangeError(
            f"{where} met the index {context.error_value}, which is outside 0…{context.error_limit - 1}; "
            "check the ids or positions that were passed in"
        )
    return RuntimeFailure(f"{where} failed with code {context.error_code}")


def kernel_title(plan: Plan, number: int) -> str:
    """What errors call a kernel: its name, and the module that it serves."""
    spec = plan.kernels[number]
    return f"kernel '{spec.name}'" + (f" ({spec.serves})" if spec.serves else "")
