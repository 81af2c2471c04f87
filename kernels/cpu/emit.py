"""C++ text of kernels and of whole programs for the CPU.

A program is one translation unit: a header comment, the text of the headers it needs, every kernel, and one function
per entry point that prints the verified plan step by step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Protocol, cast

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.contract import require_contract
from qcompiler.kernels.cpu import entry, items, rows
from qcompiler.kernels.cpu.flags import OF_BITS, tuning
from qcompiler.kernels.items import Items
from qcompiler.kernels.kinds import FORMS, Form
from qcompiler.kernels.numbered import numbered
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds import KINDS, modules_of
from qcompiler.plan.plan import Plan

NATIVE_ABI = 2
"""The version of the interface between the runtime and compiled programs: abi.h, and the names and argument order of
exported functions. A later version of qcompiler runs the builds in program files only if this number is the same.
Increase it with every change of the interface."""

ISAS = ("x86-64", "x86-64-v3", "x86-64-v4", "generic")


class CpuTemplate(Protocol):
    """What the module of a kind in this folder has, and `Printed`."""

    def emit(self, spec: KernelSpec, isa: str) -> str:
        """The C++ text of the kernel."""

    def scratch_bytes(self, spec: KernelSpec, isa: str) -> int:
        """Bytes of memory for intermediate values that one thread needs."""

    def headers(self, spec: KernelSpec) -> tuple[str, ...]:
        """Headers (of `HEADERS`) that the text needs beside the common ones."""


@dataclass(frozen=True)
class Printed:
    """The template of a kind without a module in this folder: what kernels/kinds says of it, printed for the CPU."""

    form: Callable[[KernelSpec], Form]

    def emit(self, spec: KernelSpec, isa: str) -> str:
        del isa
        form = self.form(spec)
        return items.write(spec, form) if isinstance(form, Items) else rows.write(spec, form)

    def scratch_bytes(self, spec: KernelSpec, isa: str) -> int:
        del spec, isa
        return 0

    def headers(self, spec: KernelSpec) -> tuple[str, ...]:
        del spec
        return ()


_OWN = modules_of("qcompiler.kernels.cpu", ("emit", "scratch_bytes", "headers"), "cpu", printed=FORMS)
_TEMPLATES = {
    kind: cast(CpuTemplate, _OWN[kind] if kind in _OWN else Printed(FORMS[kind]))
    for kind, body in KINDS.items()
    if "cpu" not in body.lacks
}
TEMPLATES = tuple(_TEMPLATES)

_COMMON = ("abi.h", "task.h", "vec.h", "vmath.h", "scalar.h", "rows.h")

HEADERS = (
    *_COMMON, "cache.h", "attention.h", "bf16.h", "attention_bf16.h", "amx.h", "attention_amx.h",
    "attention_decode_amx.h", "decode.h", "gemm.h",
    "few_rows.h", "columns.h", "gemm_bf16.h", "bf16_blocks.h", "bf16_tiles.h", "bf16_kept.h", "fp32_tiles.h",
    "bf16_run.h",
    "int8_rows.h", "int8.h", "int8_tiles.h", "int8_run.h", "lookup.h", "grouped.h", "grouped_bf16.h", "grouped_int8.h",
    "order.h", "recurrent.h", "im2col.h", "im2col_int8.h", "hadamard.h", "linear_attention.h",
)  # fmt: skip
"""The headers that templates may ask for, in dependency order. Every program has the first six."""


def _template(spec: KernelSpec, isa: str) -> CpuTemplate:
    if isa not in ISAS:
        raise KernelSelectionError(f"the CPU emitter knows no ISA {isa!r} (it has {', '.join(ISAS)})")
    if spec.template not in _TEMPLATES:
        reason = spec.body.lacks.get("cpu", "no kind is called so")
        raise KernelSelectionError(f"the CPU emitter knows no template {spec.template!r}: {reason}")
    return _TEMPLATES[spec.template]


def emit_kernel(spec: KernelSpec, isa: str) -> str:
    """The C++ text of one kernel, without headers: static helpers and ``qk_<name>``.

    KernelSelectionError for a spec that breaks its contract (plan/contracts.py) or that no kernel for `isa` serves.
    """
    template = _template(spec, isa)
    require_contract(spec)
    return template.emit(spec, isa)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Bytes of scratch that one thread needs for this kernel, whatever the shapes."""
    return _template(spec, isa).scratch_bytes(spec, isa)


@functools.cache
def header(name: str) -> str:
    """`alone` of one header of this folder."""
    return alone(resources.files("qcompiler.kernels.cpu").joinpath(name).read_text(encoding="utf-8"))


def alone(text: str) -> str:
    """The text of a header without `#pragma once` and without includes of others in its folder."""
    return re.sub(r'^#(pragma once|include ".*")[^\n]*\n', "", text, flags=re.M)


def prelude(specs: tuple[KernelSpec, ...]) -> str:
    """The headers that `specs` need, each once, in dependency order."""
    needed = {*_COMMON, *(name for spec in specs for name in _TEMPLATES[spec.template].headers(spec))}
    return "\n".join(header(name) for name in sorted(needed, key=HEADERS.index))


def emit_numbered(spec: KernelSpec, number: int, isa: str) -> str:
    """The text of the kernel at this position in a plan: ``qk_<number>``, without any name from the plan."""
    try:
        return emit_kernel(numbered(spec, number), isa)
    except KernelSelectionError:
        emit_kernel(spec, isa)  # raises the same error with the kernel's name
        raise


def emit_kernels(specs: tuple[KernelSpec, ...], isa: str) -> str:
    """A translation unit with `specs` and no entry points."""
    return "\n".join([prelude(specs), *(emit_kernel(spec, isa) for spec in specs)])


def emit_program(plan: Plan, isa: str) -> str:
    """The whole program of `plan` as one translation unit. Its identifiers are numbers: see kernels/numbered.py."""
    functions = [entry.emit_entry(plan, point) for point in entry.entry_points(plan)]
    march = () if isa == "generic" else (f"-march={isa}",)
    title = [
        f"// A program of {len(plan.kernels)} kernels for {isa}, emitted by qcompiler.",
        f"// Compile: g++ -std=c++17 -O3 {' '.join([*march, *tuning(isa), *OF_BITS])} -fPIC -shared",
        *(f"//   {line}" for line in entry.summary(plan)),
    ]
    kernels = [emit_numbered(spec, number, isa) for number, spec in enumerate(plan.kernels)]
    return "\n".join(["\n".join(title), prelude(plan.kernels), *kernels, *functions])
