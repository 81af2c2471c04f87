"""Small loops in one launch: each part is a loop kernel, and the launch has the tasks of all.

    part 0: tasks [0, ends[0])      part 1: tasks [ends[0], ends[1])      …

Parts that are one task each run one after another on the calling thread; a parallel region would cost more than they
take.  A part with a norm has a row in each of its items (normed_rows.py).  Row numbers are compared with their limits
before anything is written.
"""

from __future__ import annotations

from qcompiler.kernels.cpu import loop, normed_rows
from qcompiler.kernels.cpu.items import check_indices
from qcompiler.kernels.cpu.text import entry_function, pointer
from qcompiler.kernels.items import Index
from qcompiler.kernels.normed_part import NormedPart, numbers_of
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.parts import Part
from qcompiler.plan.parts_contract import ROWS, part_specs, parts_body


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    return max(loop.scratch_bytes(each, isa) for each in part_specs(spec))


def emit(spec: KernelSpec, isa: str) -> str:
    parts, loops = parts_body(spec).parts, part_specs(spec)
    calls, last = f"qk_{spec.name}_calls", len(parts) - 1
    launch = [line for part in parts for line in _check(spec, part)]
    for number, part in enumerate(parts):
        launch += _operands(spec, number, part)
    launch += [f"{calls} calls = {{{{", *indent([f"{{ctx, op{n}, sym}}," for n in range(len(parts))]), "}, {}};"]
    launch.append("int64_t tasks = 0;")
    launch += [f"calls.ends[{n}] = tasks += qk_{each.name}_tasks(sym);" for n, each in enumerate(loops)]
    launch += [
        f"if (tasks > {len(parts)}) {{",
        f"    ctx->parallel(ctx, tasks, qk_{spec.name}_task, &calls);",
        "    return;",
        "}",
        *(f"qk_{each.name}_task(&calls.parts[{n}], 0, ctx->scratch);" for n, each in enumerate(loops)),
    ]
    dispatch = [
        f"if (task < calls->ends[{n}]) return qk_{each.name}_task(&calls->parts[{n}], "
        f"task{f' - calls->ends[{n - 1}]' if n else ''}, scratch);"
        for n, each in enumerate(loops[:-1])
    ]
    rest = f"task{f' - calls->ends[{last - 1}]' if last else ''}"
    dispatch.append(f"qk_{loops[-1].name}_task(&calls->parts[{last}], {rest}, scratch);")
    return "\n".join(
        [
            *(_emit_part(spec, number, each) for number, each in enumerate(loops)),
            header_comment(spec, f"{len(parts)} parts, each with tasks of its own"),
            f"struct {calls} {{\n    qc_call parts[{len(parts)}];\n    int64_t ends[{len(parts)}];\n}};",
            f"static void qk_{spec.name}_task(void* arg, int64_t task, char* scratch) {{",
            *indent([f"{calls}* const calls = ({calls}*)arg;", *dispatch]),
            "}\n",
            entry_function(spec, launch),
        ]
    )


def _emit_part(spec: KernelSpec, number: int, own: KernelSpec) -> str:
    """The tasks of a part, and how many they are."""
    normed = NormedPart.of(spec, number)
    return loop.emit_part(own) if normed is None else normed_rows.emit_part(normed)


def _check(spec: KernelSpec, part: Part) -> list[str]:
    """Statements that report a row number that is out of range, and leave."""
    if part.index is None:
        return []
    index, x = spec.operands[part.index], spec.operands[part.operands[-1]]
    row = Index(("i",), x.shape[ROWS], from_end=False)
    lines = [pointer(index, part.index, "index"), *check_indices(row, index, {"i": 1})]
    return ["{", *indent(lines), "}"]


def _operands(spec: KernelSpec, number: int, part: Part) -> list[str]:
    """Declares the addresses of a part's operands; that of a row, where the row begins."""
    addresses = [f"op[{place}]" for place in numbers_of(spec, number)]
    lines = []
    if part.index is not None:
        index, x = spec.operands[part.index], spec.operands[part.operands[-1]]
        at, kind = f"(int64_t)index{number}[{offset(index, ['0'])}]", STORAGE_TYPES[x.dtype]
        lines.append(pointer(index, part.index, f"index{number}"))
        addresses[-1] = f"({kind}*)op[{part.operands[-1]}] + {at} * {c_dim(x.strides[ROWS])}"
    return [*lines, f"void* const op{number}[] = {{{', '.join(addresses)}}};"]
