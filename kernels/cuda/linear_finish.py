"""How a sum of a linear becomes a result: bias, epilogue, one rounding, store. Every engine of linears does it so.

finish_of(spec)            the function `qk_<name>_finish`: bias, epilogue, one rounding, store, within bounds
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.signature import parameters
from qcompiler.kernels.cuda.weights import block
from qcompiler.kernels.paired import columns_of
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
    time where they are inside and aligned.  Where the epilogue combines `pairs` of rows, both take a second sum (an
    array of them) behind the first: of the pair's row in the other half.  `n` is then the pair's number.
    """

    definition: str
    name: str
    arguments: tuple[str, ...]
    group: int
    pairs: bool = False

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the arrays that `call_group` finishes."""
        return ("sums", "others") if self.pairs else ("sums",)

    def call(self, totals: tuple[str, ...], m: str, n: str) -> str:
        """The statement that finishes the fp32 sum, or the two of a pair, of element (m, n)."""
        return f"{self.name}({', '.join((*totals, m, n, *self.arguments))});"

    def call_group(self, sums: tuple[str, ...], m: str, n: str) -> str:
        """The statement that finishes the array, or the two arrays, of sums of elements (m, n), (m, n + 1) …"""
        return f"{self.name}_group({', '.join((*sums, m, n, *self.arguments))});"

    def arrays(self, sums: tuple[str, ...]) -> str:
        """The parameters that such arrays are."""
        return ", ".join(f"const float (&{name})[{self.group}]" for name in sums)

    def by_groups(self) -> list[str]:
        """The statements that declare `finish`, which finishes arrays of sums from (m, n) on."""
        return [
            f"const auto finish = [&]({self.arrays(self.sums)}, int64_t m, int64_t n) QC_INLINED {{",
            f"    {self.call_group(self.sums, 'm', 'n')}",
            "};",
        ]


def finish_of(spec: KernelSpec) -> Finish:
    """Bias, epilogue, one rounding, store. The arguments are the kernel's own parameters, under their names."""
    body, out = linear_body(spec), spec.operands[-1]
    lines, result = _value(spec)
    columns = columns_of(spec)
    target = f"{identifier(out.name)} + {_place(out)}"
    inside = f"m >= {c_dim(body.m)} || n >= {columns}"
    used = set(re.findall(r"\w+", " ".join((*lines, target, inside))))
    passed = [(kind, name) for kind, name in parameters(spec) if name in used]
    name, group = f"qk_{spec.name}_finish", 16 // ITEMSIZE[out.dtype]
    head = "".join(f", {kind} {argument}" for kind, argument in passed)
    arguments = tuple(argument for _, argument in passed)
    given = "".join(f", {argument}" for argument in arguments)
    values = VALUE_TYPES[out.dtype]
    finish = Finish("", name, arguments, group, body.pairs)
    one, each = ("sum", "other")[: body.sums], finish.sums
    taken = ", ".join(f"float {total}" for total in one)
    definition = [
        f"QC_DEVICE {values} {name}_value({taken}, int64_t m, int64_t n{head}) {{",
        *indent([*lines, f"return {result};"]),
        "}",
        f"QC_DEVICE void {name}({taken}, int64_t m, int64_t n{head}) {{",
        f"    if ({inside}) return;",
        f"    qc_store({target}, {name}_value({', '.join(one)}, m, n{given}));",
        "}",
        f"QC_DEVICE void {name}_group({finish.arrays(each)}, int64_t m, int64_t n{head}) {{",
        f"    {STORAGE_TYPES[out.dtype]}* const to = {target};",
        f"    if (m < {c_dim(body.m)} && n + {group} <= {columns} && ((uint64_t)to & 15) == 0) {{",
        f"        {values} v[{group}];",
        "#pragma unroll",
        f"        for (int i = 0; i < {group}; i++)",
        f"            v[i] = {name}_value({', '.join(f'{sums}[i]' for sums in each)}, m, n + i{given});",
        "        qc_store_16(to, v);",
        "    } else {",
        "#pragma unroll 1",
        f"        for (int i = 0; i < {group}; i++)",
        f"            {name}({', '.join(f'qc_pick({sums}, i)' for sums in each)}, m, n + i{given});",
        "    }",
        "}",
    ]
    return replace(finish, definition=block(definition))


def _value(spec: KernelSpec) -> tuple[list[str], str]:
    """(statements, expression) of a result from `sum`, or from the `sum` and the `other` of a pair, before rounding."""
    body, lines, inputs = linear_body(spec), list[str](), ["sum", "other"][: linear_body(spec).sums]
    if body.has_bias:
        bias = spec.operands[2]
        stride = c_dim(bias.strides[0]) if bias.strides else "1"
        for number, (total, n) in enumerate(zip(inputs, ("n", f"(n + {columns_of(spec)})"), strict=False)):
            inputs[number] = ("biased", "other_biased")[number]
            lines.append(f"const float {inputs[number]} = {total} + {_element(bias, _times(n, stride))};")
    if body.epilogue is None:
        return lines, inputs[0]
    for i, operand in enumerate(_extras(spec)):
        lines.append(f"const {VALUE_TYPES[operand.dtype]} e{i} = {_element(operand, _place(operand))};")
        inputs.append(f"e{i}")
    statements = scalar_statements(body.epilogue, inputs)
    (result,) = statements.results
    return [*lines, *statements.lines], result


def _extras(spec: KernelSpec) -> tuple[Operand, ...]:
    return tuple(spec.operands[place] for place in linear_body(spec).extras(len(spec.operands)))


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
