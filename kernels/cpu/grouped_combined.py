"""What grouped.h calls with the sums of experts that are combined: pairs of rows, or the experts of a row.

qk_<name>_finish(job, tile, …)                              the epilogue, one rounding, store
qk_<name>_mix(job, sums, row, place, totals, count)         the next totals of a row, from the sums of one expert
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cpu import vector
from qcompiler.kernels.cpu.linear import finish_function, row_begin, row_lane, row_lanes, tile_of, used_symbols
from qcompiler.kernels.cpu.text import VECTOR_TYPES
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, indent
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

MOST_ROWS_FROM_CODES = 4

TURN = 32
"""grouped.h's QM_TURN."""

Extras = Sequence[tuple[str, Operand]]


def rows_from_codes(isa: str) -> int:
    """The most rows of an expert that are multiplied straight from codes: QM_FEW of grouped.h."""
    return min(tile_of(isa).few, MOST_ROWS_FROM_CODES)


def tile_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes of the sums of a kernel that combines them: grouped.h's QM_HALVES, or `qm_totals_scratch`."""
    assert isinstance(spec.body, GroupedLinearKernel)
    return 64 * (2 * TURN * rows_from_codes(isa) if spec.body.pairs else tile_of(isa).panels + TURN)


def functions_of(spec: KernelSpec) -> str:
    """The functions of a kernel that combines sums."""
    assert isinstance(spec.body, GroupedLinearKernel)
    return _pairs_finish(spec) if spec.body.pairs else _mix(spec, spec.body) + "\n" + _mixed_finish(spec)


def statements_of(spec: KernelSpec) -> list[str]:
    """The statements that name these functions in the kernel's job."""
    assert isinstance(spec.body, GroupedLinearKernel)
    lines = [f"job.op = op, job.sym = sym, job.finish = qk_{spec.name}_finish;"]
    return [*lines, f"job.top = {spec.body.top}, job.mix = qk_{spec.name}_mix;"] if spec.body.top else lines


def _pairs_finish(spec: KernelSpec) -> str:
    assert isinstance(spec.body, GroupedLinearKernel) and spec.body.epilogue is not None
    place = len(spec.operands) - 1
    lines = [
        "const qm_product* const product = (const qm_product*)job;",
        "for (int64_t i = 0; i < rows; i++) {",
        "    const int64_t m = product->rows[m0 + i];",
        f"    {row_begin(spec.operands[place], place, 'out')}",
        "    const float* const sums = tile + i * stride;",
        "    const float* const others = sums + QM_FEW * stride;",
        "    for (int64_t j = 0; j < cols; j += 16) {  // whole panels",
        "        const int64_t n = n0 - product->first + j;",
        *indent(_columns(spec.body.epilogue, {"sum": "sums + j", "other": "others + j"}, []), 2),
        "    }",
        "}",
    ]
    return finish_function(spec, lines)


def _mixed_finish(spec: KernelSpec) -> str:
    assert isinstance(spec.body, GroupedLinearKernel) and spec.body.epilogue is not None
    place = len(spec.operands) - 1
    extras = [(f"e{i}", operand) for i, operand in enumerate(spec.operands[4:place])]
    lines = [
        "const int64_t m = m0;  // one row",
        *(row_begin(operand, 4 + i, name) for i, (name, operand) in enumerate(extras)),
        row_begin(spec.operands[place], place, "out"),
        "for (int64_t j = 0; j < cols; j += 16) {  // whole panels",
        "    const int64_t n = n0 + j;",
        *indent(_columns(spec.body.epilogue, {"sum": "tile + j"}, extras)),
        "}",
    ]
    return finish_function(spec, lines)


def _columns(program: ScalarProgram, sums: dict[str, str], extras: Extras) -> list[str]:
    """Statements that finish 16 columns from n on. `sums`: inputs of the epilogue, and where each has its 16 sums."""
    if vector.vector_obstacle(program) is None:
        lines = ["const int lanes = 16;", *(f"const vf {name} = vload({at});" for name, at in sums.items())]
        for name, operand in extras:
            lines.append(f"const {VECTOR_TYPES[operand.dtype]} {name}_n = {row_lanes(operand, name)};")
        statements = vector.vector_statements(program, [*sums, *(f"{name}_n" for name, _ in extras)])
        return [*lines, *statements.lines, f"qg_store_lanes(out + n, {statements.results[0]}, lanes);"]
    lines = [f"const float {name} = ({at})[l];" for name, at in sums.items()]
    for name, operand in extras:
        lines.append(f"const {VALUE_TYPES[operand.dtype]} {name}_n = {row_lane(operand, name)};")
    statements = scalar_statements(program, [*sums, *(f"{name}_n" for name, _ in extras)])
    lines += [*statements.lines, f"qc_store(out + n + l, {statements.results[0]});"]
    return ["for (int l = 0; l < 16; l++) {", *indent(lines), "}"]


def _mix(spec: KernelSpec, body: GroupedLinearKernel) -> str:
    assert body.mix is not None
    weights, inputs = spec.operands[3], ("sum", "weight", "total")
    kind = STORAGE_TYPES[weights.dtype]
    row, step = (c_dim(stride) for stride in weights.strides)
    head = f"static void qk_{spec.name}_mix(const qm_job* job, const float* sums, int64_t row, int64_t place,"
    lines = [f"const float own = qc_load((const {kind}*)job->op[3] + row * {row} + place * {step});"]
    if vector.vector_obstacle(body.mix) is None:
        statements = vector.vector_statements(body.mix, inputs)
        each = [
            "const vf sum = vload(sums + j), weight = vset(own), total = vload(totals + j);",
            *statements.lines,
            f"vstore(totals + j, {statements.results[0]});",
        ]
    else:
        statements = scalar_statements(body.mix, inputs)
        each = [
            "const float sum = sums[j], weight = own, total = totals[j];",
            *statements.lines,
            f"totals[j] = {statements.results[0]};",
        ]
    width = 16 if vector.vector_obstacle(body.mix) is None else 1
    lines += [f"for (int64_t j = 0; j < count; j += {width}) {{", *indent(each), "}"]
    lines = [*used_symbols(spec, lines, "job->sym"), *lines]
    return "\n".join([head, "        float* totals, int64_t count) {", *indent(lines), "}\n"])
