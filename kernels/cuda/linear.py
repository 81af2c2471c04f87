"""The `linear` template: which engine serves a spec, and how a sum becomes a result.

    decision_of(spec, arch)    which of engines.LINEAR: "mma" is linear_mma.py, the others linear_fma.py
    weight_of(name, operand)   the struct `qk_<name>_w` (weights.py), from which both engines decode tiles
    finish_of(spec)            the function `qk_<name>_finish`: bias, epilogue, one rounding, store, within bounds

Nothing here depends on a format: weights.py takes codes, entries and arithmetic from its declaration.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Literal

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import engines, windows
from qcompiler.kernels.cuda.geometry import CudaKernel, check_extent
from qcompiler.kernels.cuda.weights import FLOATS, LAYOUT, Weight, block, weight_of
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, DType, KernelSpec, LinearKernel, Operand

__all__ = [
    "FLOATS",
    "LAYOUT",
    "Finish",
    "Weight",
    "check",
    "decision_of",
    "emit",
    "engine_of",
    "facts_of",
    "finish_of",
    "linear_body",
    "weight_of",
]

Engine = Literal["fma", "mma"]


def linear_body(spec: KernelSpec) -> LinearKernel:
    """The spec's body; KernelSelectionError if it is not a linear."""
    if not isinstance(spec.body, LinearKernel):
        raise KernelSelectionError(f"kernel '{spec.name}' is a {spec.template}, not a linear")
    return spec.body


def facts_of(x: DType, weight: Weight, m_class: str, *, windows: bool) -> engines.Facts:
    """The facts for engines.LINEAR."""
    from qcompiler.kernels.cuda.linear_mma import least_shared, takes

    return engines.linear_facts(
        x, weight, m_class, windows=windows, groups=takes(weight), shared=least_shared(m_class, windows=windows)
    )


def decision_of(spec: KernelSpec, arch: str) -> engines.Decision:
    """The engine of a linear on `arch`, and why not the others."""
    from qcompiler.kernels.cuda.emit import arch_number

    body, (x, w) = linear_body(spec), spec.operands[:2]
    facts = facts_of(x.dtype, weight_of(spec.name, w), body.m_class, windows=body.window is not None)
    return engines.choose(engines.LINEAR, facts, arch_number(arch))


def engine_of(spec: KernelSpec, arch: str) -> Engine:
    """The module that emits the kernel: "mma" for many rows on tensor cores, else "fma"."""
    return "mma" if decision_of(spec, arch).key == "mma" else "fma"


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of one linear on `arch`. KernelSelectionError for operands without a kernel."""
    if linear_body(spec).codes:
        made: CudaKernel = importlib.import_module("qcompiler.kernels.cuda.linear_int8").emit(spec, arch)
        return made
    check(spec)
    engine = importlib.import_module(f"qcompiler.kernels.cuda.linear_{engine_of(spec, arch)}")
    kernel: CudaKernel = engine.emit(spec, arch)
    return kernel


def check(spec: KernelSpec) -> None:
    """KernelSelectionError for weights or im2col windows too large for the 32-bit counts of CUDA kernels."""
    body = linear_body(spec)
    check_extent(spec, spec.operands[1], 0)
    check_extent(spec, spec.operands[1], 1)
    if body.window is not None:
        windows.check(spec, body.window)


# --- finish ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finish:
    """How a kernel finishes its sums.

    `definition` defines ``qk_<name>_finish(sum, m, n, …)``, which stores element (m, n) if it is inside the result, and
    ``qk_<name>_finish_group(sums, m, n, …)``, which stores `group` elements from there on along n, 16 bytes at a time
    if they are inside and aligned.
    """

    definition: str
    name: str
    arguments: tuple[str, ...]
    group: int

    def call(self, total: str, m: str, n: str) -> str:
        """The statement that finishes the fp32 sum `total` of element (m, n)."""
        return f"{self.name}({', '.join((total, m, n, *self.arguments))});"

    def call_group(self, sums: str, m: str, n: str) -> str:
        """The statement that finishes the array `sums` of elements (m, n), (m, n + 1) …"""
        return f"{self.name}_group({', '.join((sums, m, n, *self.arguments))});"


def finish_of(spec: KernelSpec) -> Finish:
    """Bias, epilogue, one rounding, store. The arguments are the kernel's own parameters, by name."""
    from qcompiler.kernels.cuda.emit import parameters

    body, out = linear_body(spec), spec.operands[-1]
    lines, result = _value(spec)
    target = f"{identifier(out.name)} + {_place(out)}"
    inside = f"m >= {c_dim(body.m)} || n >= {body.n}"
    used = set(re.findall(r"\w+", " ".join((*lines, target, inside))))
    passed = [(kind, name) for kind, name in parameters(spec) if name in used]
    name, group = f"qk_{spec.name}_finish", 16 // ITEMSIZE[out.dtype]
    head = "".join(f", {kind} {argument}" for kind, argument in passed)
    arguments = tuple(argument for _, argument in passed)
    given = "".join(f", {argument}" for argument in arguments)
    values = VALUE_TYPES[out.dtype]
    definition = [
        f"QC_DEVICE {values} {name}_value(float sum, int64_t m, int64_t n{head}) {{",
        *indent([*lines, f"return {result};"]),
        "}",
        f"QC_DEVICE void {name}(float sum, int64_t m, int64_t n{head}) {{",
        f"    if ({inside}) return;",
        f"    qc_store({target}, {name}_value(sum, m, n{given}));",
        "}",
        f"QC_DEVICE void {name}_group(const float (&sums)[{group}], int64_t m, int64_t n{head}) {{",
        f"    {STORAGE_TYPES[out.dtype]}* const to = {target};",
        f"    if (m < {c_dim(body.m)} && n + {group} <= {body.n} && ((uint64_t)to & 15) == 0) {{",
        f"        {values} v[{group}];",
        "#pragma unroll",
        f"        for (int i = 0; i < {group}; i++) v[i] = {name}_value(sums[i], m, n + i{given});",
        "        qc_store_16(to, v);",
        "    } else {",
        "#pragma unroll 1",
        f"        for (int i = 0; i < {group}; i++) {name}(qc_pick(sums, i), m, n + i{given});",
        "    }",
        "}",
    ]
    return Finish(block(definition), name, arguments, group)


def _value(spec: KernelSpec) -> tuple[list[str], str]:
    """(statements, expression) of a result before rounding, from `sum`."""
    body, lines, total = linear_body(spec), list[str](), "sum"
    if body.has_bias:
        bias = spec.operands[2]
        step = _times("n", c_dim(bias.strides[0]) if bias.strides else "1")
        lines.append(f"const float biased = sum + {_element(bias, step)};")
        total = "biased"
    if body.epilogue is None:
        return lines, total
    inputs = [total]
    for i, operand in enumerate(_extras(spec)):
        lines.append(f"const {VALUE_TYPES[operand.dtype]} e{i} = {_element(operand, _place(operand))};")
        inputs.append(f"e{i}")
    statements = scalar_statements(body.epilogue, inputs)
    (result,) = statements.results
    return [*lines, *statements.lines], result


def _extras(spec: KernelSpec) -> tuple[Operand, ...]:
    return spec.operands[3 if linear_body(spec).has_bias else 2 : -1]


def _element(operand: Operand, place: str) -> str:
    return f"qc_load({identifier(operand.name)} + {place})"


def _place(operand: Operand) -> str:
    """The element offset of (m, n); a stride of 0 broadcasts."""
    terms = [_times(index, c_dim(stride)) for index, stride in zip("mn", operand.strides, strict=True)]
    return " + ".join(t for t in terms if t != "0") or "0"


def _times(index: str, stride: str) -> str:
    return "0" if stride == "0" else index if stride == "1" else f"{index} * {stride}"


def row_offset(operand: Operand, m: str) -> str:
    """The element offset of row `m` of an (m, k) operand with unit stride along k."""
    return _times(m, c_dim(operand.strides[0]))
