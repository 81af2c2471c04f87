"""How a sum of a linear becomes a result: bias, epilogue, one rounding, store. Every engine of linears does it so.

finish_of(spec)            the function `qk_<name>_finish`: bias, epilogue, one rounding, store, within bounds
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.signature import parameters
from qcompiler.kernels.cuda.weights import block
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel


def linear_body(spec: KernelSpec) -> LinearKernel:
    """The spec's body, checked to be a linear."""
    if not isinstance(spec.body, LinearKernel):
        raise KernelSelectionError(f"kernel '{spec.name}' is a {spec.template}, not a linear")
    return spec.body


@dataclass(frozen=True)
class Finish:
    """How a kernel finishes its sums.

    `definition` defines ``qk_<name>_finish(sum, m, n, …)``, which stores element (m, n) if it lies inside the result,
    and ``qk_<name>_finish_group(sums, m, n, …)``, which stores `group` elements from there on along n: 16 bytes at a
    time where they are inside and aligned.
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
    """Bias, epilogue, one rounding, store. The arguments are the kernel's own parameters, under their names."""
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
    """(statements, expression) of a result from `sum`, before rounding."""
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
