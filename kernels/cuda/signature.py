"""What every CUDA template says of its target and of its own function: architectures, parameters, the head."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.text import STORAGE_TYPES, identifier, indent, symbol
from qcompiler.plan.kernel import KernelSpec, Operand

ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
"""Architectures that programs compile for. CUDA 13's NVRTC has dropped sm_70: CUDA 12's compiles that one."""


def arch_number(arch: str) -> int:
    """75 of "sm_75", 90 of "sm_90a". KernelSelectionError for an architecture that programs do not compile for."""
    if arch not in ARCHS:
        raise KernelSelectionError(f"no CUDA architecture is called {arch[:40]!r}; there are: {', '.join(ARCHS)}")
    return int(arch[3:].rstrip("af"))


def pointer_type(operand: Operand) -> str:
    """The C type of an operand's parameter: packed operands are bytes; what is only read is const."""
    element = "uint8_t" if operand.format is not None else STORAGE_TYPES[operand.dtype]
    return f"const {element}*" if operand.access == "r" else f"{element}*"


def parameters(spec: KernelSpec) -> list[tuple[str, str]]:
    """(type, name) of each kernel parameter: operands, then symbols."""
    pointers = [(pointer_type(operand), identifier(operand.name)) for operand in spec.operands]
    return [*pointers, *(("int64_t", symbol(name)) for name in spec.symbols)]


def signature(
    spec: KernelSpec,
    threads: int,
    min_blocks: int | None = None,
    names: Sequence[str] | None = None,
    *,
    waits: bool = True,
) -> str:
    """The head of a kernel's definition: up to the statements by which it follows other kernels (device.cuh).

    `names` are the operands' C++ names.  Without `waits` the kernel itself calls `qc_wait_for_kernels`, behind loads of
    what no kernel writes.
    """
    bounds = f"{threads}" if min_blocks is None else f"{threads}, {min_blocks}"
    listed = ",\n        ".join(_declared(spec, names))
    calls = ["qc_let_next_start();", *(["qc_wait_for_kernels();"] if waits else [])]
    head = f'extern "C" __global__ void __launch_bounds__({bounds}) qk_{spec.name}(\n        {listed}) {{'
    return "\n".join([head, *indent(calls)])


def part_signature(spec: KernelSpec, names: Sequence[str], block: str) -> str:
    """The head of a function that is one part of a launch, and takes the number of its own block."""
    listed = ",\n        ".join([*_declared(spec, names), f"int64_t const {block}"])
    return f"QC_DEVICE void qk_{spec.name}(\n        {listed}) {{"


def _declared(spec: KernelSpec, names: Sequence[str] | None) -> list[str]:
    """The parameters' declarations."""
    own = [name for _, name in parameters(spec)]
    if names is not None:
        own[: len(names)] = names
    kinds = [kind for kind, _ in parameters(spec)]
    return [f"{kind} const {name}" for kind, name in zip(kinds, own, strict=True)]
