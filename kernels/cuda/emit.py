"""CUDA C++ text of kernels: one translation unit for NVRTC, and the same text for the simulated GPU.

    emit_module(specs, "sm_90a")        what the kernels use of the headers, every kernel
    emit_sim_module(specs, "sm_90a")    the same kernels behind kernels/sim/shim.h, with one `qs_call_<kernel>` each

A kernel is emitted for one architecture because choices inside templates depend on it (sm_75 has no bf16 products). For
one spec and one architecture, both units contain the same text.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.contract import require_contract, require_declared
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, check_grid
from qcompiler.kernels.numbered import numbered
from qcompiler.kernels.text import STORAGE_TYPES, identifier, symbol
from qcompiler.kernels.used_definitions import Header, used
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.plan import Plan

EMITTER_VERSION = 5
"""Part of the cache key of compiled modules. Increase it whenever the emitted text of an unchanged spec changes."""

ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""Architectures that programs compile for. CUDA 13's NVRTC has dropped sm_70; CUDA 12's compiles it."""

TEMPLATES = (
    "argmax", "attention", "batch_matmul", "embedding", "gather", "grouped_linear", "index_update", "linear", "loop",
    "norm", "order", "quantize_rows", "recurrent", "scan", "scatter", "softmax",
)  # fmt: skip
"""One module of this folder each, with `emit(spec, arch) -> CudaKernel`."""

require_declared(TEMPLATES)

HEADERS = (
    "device.cuh", "scalar.cuh", "decode.cuh", "lookup.cuh", "rows.cuh", "loop.cuh", "scan.cuh", "tile.cuh",
    "attention.cuh", "linear.cuh", "linear_fma.cuh", "linear_mma.cuh", "window.cuh", "linear_mma_rows.cuh",
    "grouped.cuh", "int8.cuh", "recurrent.cuh",
)  # fmt: skip
"""The headers that kernels may use, in dependency order. A module contains only the definitions that its kernels
reach."""


def arch_number(arch: str) -> int:
    """75 for "sm_75", 90 for "sm_90a". KernelSelectionError for an architecture that programs do not compile for."""
    if arch not in ARCHS:
        raise KernelSelectionError(f"no CUDA architecture is called {arch[:40]!r}; there are: {', '.join(ARCHS)}")
    return int(arch[3:].rstrip("af"))


def _template(spec: KernelSpec) -> Any:
    if spec.template not in TEMPLATES:
        raise KernelSelectionError(
            f"kernel '{spec.name}': CUDA has no template '{spec.template}' (there are: {', '.join(TEMPLATES)})"
        )
    return importlib.import_module(f"qcompiler.kernels.cuda.{spec.template}")


def emit_kernel(spec: KernelSpec, arch: str) -> CudaKernel:
    """One kernel's text (without headers) and geometry. KernelSelectionError for a spec that breaks its contract
    (plan/contracts.py) or that no kernel for `arch` serves."""
    arch_number(arch)
    template = _template(spec)
    require_contract(spec)
    kernel: CudaKernel = template.emit(spec, arch)
    check_grid(spec, kernel.geometry)
    return kernel


@functools.lru_cache(maxsize=4096)
def _emitted(spec_json: bytes, arch: str) -> CudaKernel:
    import msgspec

    return emit_kernel(msgspec.json.decode(spec_json, type=KernelSpec), arch)


def geometry(spec: KernelSpec, arch: str) -> Geometry:
    """How a kernel is launched on `arch`."""
    return engine_and_geometry(spec, arch)[1]


def engine_and_geometry(spec: KernelSpec, arch: str) -> tuple[str, Geometry]:
    """The engine of a kernel on `arch` ("fma" or "mma"), and how it is launched."""
    import msgspec

    emitted = _emitted(msgspec.json.encode(spec), arch)
    return emitted.engine, emitted.geometry


def pointer_type(operand: Operand) -> str:
    """The C type of an operand's parameter. Packed operands are bytes; read-only operands are const."""
    element = "uint8_t" if operand.format is not None else STORAGE_TYPES[operand.dtype]
    return f"const {element}*" if operand.access == "r" else f"{element}*"


def parameters(spec: KernelSpec) -> list[tuple[str, str]]:
    """(type, name) of each kernel parameter: operands, then symbols."""
    pointers = [(pointer_type(operand), identifier(operand.name)) for operand in spec.operands]
    return [*pointers, *(("int64_t", symbol(name)) for name in spec.symbols)]


def signature(spec: KernelSpec, threads: int, min_blocks: int | None = None, names: Sequence[str] | None = None) -> str:
    """The head of a kernel's definition, up to and including the opening brace. `names` are the operands' C++ names."""
    bounds = f"{threads}" if min_blocks is None else f"{threads}, {min_blocks}"
    own = [name for _, name in parameters(spec)]
    if names is not None:
        own[: len(names)] = names
    kinds = [kind for kind, _ in parameters(spec)]
    listed = ",\n        ".join(f"{kind} const {name}" for kind, name in zip(kinds, own, strict=True))
    return f'extern "C" __global__ void __launch_bounds__({bounds}) qk_{spec.name}(\n        {listed}) {{'


@functools.cache
def header(name: str, package: str = "qcompiler.kernels.cuda") -> str:
    """The text of one header, without `#pragma once` and without includes of our other headers."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return re.sub(r'^#(pragma once|include ".*")[^\n]*\n', "", text, flags=re.M)


@functools.cache
def _parsed_headers() -> tuple[Header, ...]:
    return tuple(Header.parse(header(name)) for name in HEADERS)


def prelude(kernels: Sequence[str]) -> list[str]:
    """The definitions of the headers that the kernels' texts use."""
    return used(_parsed_headers(), "\n".join(kernels))


def emit_module(specs: Sequence[KernelSpec], arch: str) -> str:
    """The translation unit that NVRTC compiles for `arch`, with kernels under their own names."""
    return _module(specs, [emit_kernel(spec, arch).text for spec in specs], arch)


def _module(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> str:
    title = f"// {len(specs)} kernels for {arch}, emitted by qcompiler (emitter {EMITTER_VERSION})."
    return "\n".join([title, *prelude(texts), *texts])


def emit_sim_module(specs: Sequence[KernelSpec], arch: str) -> str:
    """The translation unit that the host's compiler compiles for the simulated GPU, which stands in for `arch`."""
    return _sim_module(specs, [emit_kernel(spec, arch).text for spec in specs], arch)


def _sim_module(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> str:
    title = f"// {len(specs)} kernels for {arch}, for the simulated GPU (emitter {EMITTER_VERSION})."
    defines = f"#define QC_SIM 1\n#define __CUDA_ARCH__ {10 * arch_number(arch)}"
    shim = header("shim.h", "qcompiler.kernels.sim")
    return "\n".join([title, defines, shim, *prelude([shim, *texts]), *texts, *(_call(spec) for spec in specs)])


def _numbered(plan: Plan, arch: str) -> tuple[list[KernelSpec], list[str]]:
    """The plan's kernels, renamed to numbers, and their texts. KernelSelectionError uses the plan's kernel names."""
    specs = [numbered(spec, number) for number, spec in enumerate(plan.kernels)]
    texts: list[str] = []
    for own, named in zip(specs, plan.kernels, strict=True):
        try:
            texts.append(emit_kernel(own, arch).text)
        except KernelSelectionError:
            emit_kernel(named, arch)
            raise
    return specs, texts


def emit_program(plan: Plan, arch: str) -> str:
    """`emit_module` of a plan's kernels, renamed to numbers: see kernels/numbered.py."""
    return _module(*_numbered(plan, arch), arch)


def emit_sim_program(plan: Plan, arch: str) -> str:
    """`emit_sim_module` of a plan's kernels, renamed to numbers."""
    return _sim_module(*_numbered(plan, arch), arch)


def _call(spec: KernelSpec) -> str:
    """The function by which the simulator calls a kernel: parameters by address, as for cuLaunchKernel."""
    arguments = ", ".join(f"*({kind} const*)args[{i}]" for i, (kind, _) in enumerate(parameters(spec)))
    return f'extern "C" void qs_call_{spec.name}(void* const* args) {{ qk_{spec.name}({arguments}); }}'
