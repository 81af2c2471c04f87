"""CUDA C++ text of kernels: one translation unit for NVRTC, and the same text for the simulated GPU.

    emit_module(specs, "sm_90a")        what the kernels use of the headers, every kernel
    emit_sim_module(specs, "sm_90a")    the same kernels behind kernels/sim/shim.h, with one `qs_call_<kernel>` each

A kernel is emitted for one architecture because choices inside templates depend on it (sm_75 has no bf16 products). For
one spec and one architecture, both units contain the same text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol, cast

import msgspec

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.contract import require_contract
from qcompiler.kernels.cuda import items, rows
from qcompiler.kernels.cuda.engines import CUDA_CORES, Engine
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, check_grid
from qcompiler.kernels.cuda.signature import arch_number, parameters
from qcompiler.kernels.items import Items
from qcompiler.kernels.kinds import FORMS, Form
from qcompiler.kernels.numbered import numbered
from qcompiler.kernels.used_definitions import CppHeader, used
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds import KINDS, modules_of
from qcompiler.plan.plan import Plan

HEADERS = (
    "device.cuh", "scalar.cuh", "decode.cuh", "lookup.cuh", "rows.cuh", "loop.cuh", "scan.cuh", "tile.cuh",
    "cache.cuh", "attention.cuh", "linear.cuh", "linear_fma.cuh", "linear_mma.cuh", "im2col.cuh",
    "linear_mma_rows.cuh", "linear_statistics.cuh", "linear_wgmma.cuh", "grouped.cuh", "int8.cuh", "int8_tiles.cuh",
    "im2col_int8.cuh", "recurrent.cuh", "hadamard.cuh",
)  # fmt: skip
"""The headers that kernels may use, in dependency order. A module contains only the definitions that its kernels
reach."""


class CudaTemplate(Protocol):
    """What the module of a kind in this folder has, and `Printed`."""

    ENGINES: tuple[Engine, ...]
    """The kind's kernels in order of preference, each with what it requires; the last one requires nothing."""

    def emit(self, spec: KernelSpec, arch: str) -> CudaKernel:
        """The kernel's text and geometry."""


@dataclass(frozen=True)
class Printed:
    """The template of a kind without a module in this folder: what kernels/kinds says of it, printed for CUDA."""

    form: Callable[[KernelSpec], Form]
    ENGINES: tuple[Engine, ...] = CUDA_CORES

    def emit(self, spec: KernelSpec, arch: str) -> CudaKernel:
        del arch
        form = self.form(spec)
        return items.write(spec, form) if isinstance(form, Items) else rows.write(spec, form)


_OWN = modules_of("qcompiler.kernels.cuda", ("emit", "ENGINES"), "cuda", printed=FORMS)
_TEMPLATES = {
    kind: cast(CudaTemplate, _OWN[kind] if kind in _OWN else Printed(FORMS[kind]))
    for kind, body in KINDS.items()
    if "cuda" not in body.lacks
}
TEMPLATES = tuple(_TEMPLATES)

ENGINES = {kind: template.ENGINES for kind, template in _TEMPLATES.items()}
"""By kind."""


def _template(spec: KernelSpec) -> CudaTemplate:
    if spec.template not in _TEMPLATES:
        reason = spec.body.lacks.get("cuda", f"there are: {', '.join(TEMPLATES)}")
        raise KernelSelectionError(f"kernel '{spec.name}': CUDA has no template '{spec.template}' ({reason})")
    return _TEMPLATES[spec.template]


def emit_kernel(spec: KernelSpec, arch: str) -> CudaKernel:
    """One kernel's text (without headers) and geometry. KernelSelectionError for a spec that breaks its contract
    (plan/contracts.py) or that no kernel for `arch` serves."""
    arch_number(arch)
    template = _template(spec)
    require_contract(spec)
    kernel = template.emit(spec, arch)
    check_grid(spec, kernel.geometry)
    return kernel


@functools.lru_cache(maxsize=4096)
def _emitted(spec_json: bytes, arch: str) -> CudaKernel:
    return emit_kernel(msgspec.json.decode(spec_json, type=KernelSpec), arch)


def geometry(spec: KernelSpec, arch: str) -> Geometry:
    """How a kernel is launched on `arch`."""
    return engine_and_geometry(spec, arch)[1]


def engine_and_geometry(spec: KernelSpec, arch: str) -> tuple[str, Geometry]:
    """Which arithmetic a kernel uses on `arch` ("fma" or "mma"), and how it is launched."""
    emitted = _emitted(msgspec.json.encode(spec), arch)
    return emitted.engine, emitted.geometry


@functools.cache
def header(name: str, package: str = "qcompiler.kernels.cuda") -> str:
    """The text of one header, without `#pragma once` and without includes of our other headers."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return re.sub(r'^#(pragma once|include ".*")[^\n]*\n', "", text, flags=re.M)


@functools.cache
def _parsed_headers() -> tuple[CppHeader, ...]:
    return tuple(CppHeader.parse(header(name)) for name in HEADERS)


def prelude(kernels: Sequence[str]) -> list[str]:
    """The definitions of the headers that the kernels' texts use."""
    return used(_parsed_headers(), "\n".join(kernels))


def emit_module(specs: Sequence[KernelSpec], arch: str) -> str:
    """The translation unit that NVRTC compiles for `arch`, with kernels under their own names."""
    return _module(specs, [emit_kernel(spec, arch).text for spec in specs], arch)


def _module(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> str:
    title = f"// {len(specs)} kernels for {arch}, emitted by qcompiler."
    return "\n".join([title, *prelude(texts), *texts])


def emit_sim_module(specs: Sequence[KernelSpec], arch: str) -> str:
    """The translation unit that the host's compiler compiles for the simulated GPU, which stands in for `arch`."""
    return _sim_module(specs, [emit_kernel(spec, arch).text for spec in specs], arch)


def _sim_module(specs: Sequence[KernelSpec], texts: Sequence[str], arch: str) -> str:
    title = f"// {len(specs)} kernels for {arch}, for the simulated GPU."
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
