"""The machine code of a plan's CUDA kernels, as NVRTC compiles it here; no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.plan.plan import Plan
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.nvrtc import Cubin, compile_cubin, kernel_symbol
from qcompiler.runtime.sass import listings
from qcompiler.units import counted


@dataclass(frozen=True)
class MachineCode:
    """A kernel's listing, and its registers and local memory in words."""

    text: str
    resources: str


def machine_code(plan: Plan, arch: str) -> Mapping[int, MachineCode]:
    """The code of each kernel by its number in the plan. A module that was compiled before comes from the cache.

    The cubin is always this machine's: one that a file brings is not read.
    KernelSelectionError for an unknown architecture; MissingDependencyError names what to install (NVRTC, nvdisasm);
    CompileFailedError; SassError.
    """
    arch_number(arch)  # a file names it, and it becomes a part of a file's name: only a known one may
    source = emit.emit_program(plan, arch)
    announce = f"compiled {counted(len(plan.kernels), 'kernel')} for {arch}"
    cubin = compile_cubin(source, arch, emitter_version=emitter_version("cuda"), announce=announce)
    found = listings(cubin.path)
    return {
        number: MachineCode(found[symbol], _resources(cubin, symbol))
        for number in range(len(plan.kernels))
        if (symbol := kernel_symbol(str(number))) in found
    }


def _resources(cubin: Cubin, symbol: str) -> str:
    used = cubin.resources.get(symbol)
    if used is None:
        return f"{cubin.compiler_version} reports none"
    spills = used.spill_stores + used.spill_loads
    memory = f"{used.stack} bytes of stack, {spills} bytes of spills" if used.uses_local_memory else "no local memory"
    return f"{used.registers} registers per thread, {memory} ({cubin.compiler_version} for {cubin.arch})"
