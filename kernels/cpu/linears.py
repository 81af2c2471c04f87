"""Several linears in one launch: the functions of the linears, one after another. Each shares its work among the
threads."""

from __future__ import annotations

from qcompiler.kernels.cpu import linear
from qcompiler.kernels.cpu.text import entry_function
from qcompiler.kernels.linears import linear_specs, places
from qcompiler.kernels.text import header_comment
from qcompiler.plan.kernel import KernelSpec


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in linear_specs(spec) for name in linear.headers(each)))


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return max(linear.scratch_bytes(each, isa) for each in linear_specs(spec))


def emit(spec: KernelSpec, isa: str) -> str:
    specs = linear_specs(spec)
    calls = [f"qk_{each.name}(ctx, op + {place.start}, sym);" for each, place in zip(specs, places(specs), strict=True)]
    head = header_comment(spec, f"{len(specs)} linears, one after another")
    return "\n".join([*(linear.emit(each, isa) for each in specs), head, entry_function(spec, calls)])
