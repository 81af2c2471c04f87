"""Prints an `Items` for the CPU: tasks share the items, and an item computes a block of neighbours.

All indices are checked before anything is written, in order and on the calling thread. So the index in the error
message does not depend on the number of threads. A walk stands around the loop over the neighbours: they are read and
written side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.items import Copy, Index, Items, by_role
from qcompiler.kernels.text import c_dim, header_comment, indent, offset, unravel
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec, Operand


def write(spec: KernelSpec, form: Items) -> str:
    """The task function that walks its share of the items, and the function that launches it."""
    operands = by_role(spec)
    sizes = [c_dim(axis.size) for axis in form.outer]
    count, place, columns = [], "item", c_dim(form.run.size)
    if width_of(form) is None:
        count = [f"const int64_t blocks = {c_dim((dim(form.run.size) + (form.block - 1)) // form.block)};"]
        sizes, place, columns = [*sizes, "blocks"], "item / blocks", f"qc_min({form.block}, {columns})"
    items = " * ".join(sizes)
    cost = " * ".join([str(form.cost), *([c_dim(form.walk.size)] if form.walk else []), columns])
    task = [
        *(pointer(operand, i, name, "call->op") for i, (name, operand) in enumerate(operands.items())),
        *count,
        f"const int64_t items = {items}, tasks = qc_tasks(items, {cost});",
        "for (int64_t item = qc_share(items, task, tasks); item < qc_share(items, task + 1, tasks); item++) {",
        *indent(unravel(place, [axis.name for axis in form.outer], [axis.size for axis in form.outer])),
        *indent([*(f"(void){axis.name};" for axis in form.outer), *_item(form, operands)]),
        "}",
    ]
    launch = [*count, f"qc_run(ctx, op, sym, qc_tasks({items}, {cost}), qk_{spec.name}_task);"]
    if form.index:
        index = operands["index"]
        checked = check_indices(form.index, index, form.axes)
        launch = [pointer(index, list(operands).index("index"), "index"), *checked, *launch]
    note = f"{form.note}; indices checked first, on the caller" if form.index else form.note
    return "\n".join([header_comment(spec, note), task_function(spec, task), entry_function(spec, launch)])


def width_of(form: Items) -> int | None:
    """The places along `run` in every item, if one block covers the axis for certain."""
    size = form.run.size
    return size if isinstance(size, int) and size <= form.block else None


def _item(form: Items, operands: Mapping[str, Operand]) -> list[str]:
    """The state, the walk and the results of one block."""
    run, walk, width = form.run.name, form.walk, width_of(form)
    if width is None:
        last = f"qc_min(first + {form.block}, {c_dim(form.run.size)})"
        span = [f"const int64_t first = item % blocks * {form.block}, last = {last};"]
    elif width == 1:
        span = [f"const int64_t {run} = 0;", f"(void){run};"]
    else:
        span = [f"const int64_t first = 0, last = {width};"]
    before, position = [], form.index.lines(operands["index"]) if form.index else []
    if form.index and not _reads(operands["index"], form.index.axes, run):
        before, position = position, before
    if isinstance(form.step, Copy):
        step = _copy(form, form.step, operands, position)
    else:
        step = _each(form, [*position, *form.step])
    lines = [*before, *step]
    if walk:
        loop = f"for (int64_t {walk.name} = 0; {walk.name} < {c_dim(walk.size)}; {walk.name}++) {{"
        lines = [loop, *indent(lines), "}"]
    state = [f"{kind} {name}{'' if width == 1 else f's[{width or form.block}]'} = {{}};" for kind, name in form.state]
    return [*span, *state, *lines, *(_each(form, form.result) if form.result else [])]


def _reads(operand: Operand, axes: tuple[str, ...], name: str) -> bool:
    """Whether another place on an axis is another element of the operand."""
    return any(axis == name and stride != 0 for axis, stride in zip(axes, operand.strides, strict=True))


def _each(form: Items, lines: Sequence[str]) -> list[str]:
    """`lines` for every place of the block, with the names of its own state."""
    run, text = form.run.name, "\n".join(lines)
    if width_of(form) == 1:
        return list(lines)
    own = [f"auto& {name} = {name}s[{run} - first];" for _, name in form.state if re.search(rf"\b{name}\b", text)]
    return [f"for (int64_t {run} = first; {run} < last; {run}++) {{", *indent([*own, *lines]), "}"]


def _copy(form: Items, copy: Copy, operands: Mapping[str, Operand], position: list[str]) -> list[str]:
    """One memcpy, if all places read one index and lie side by side in both operands."""
    target, source, run = operands[copy.target], operands[copy.source], form.run.name
    steps = [target.strides[copy.at.index(run)], source.strides[copy.read.index(run)] if run in copy.read else None]
    if position or steps != [1, 1] or width_of(form) == 1:
        element = f"{copy.target}[{offset(target, copy.at)}] = {copy.source}[{offset(source, copy.read)}];"
        return _each(form, [*position, element])
    at, read = (["first" if name == run else name for name in names] for names in (copy.at, copy.read))
    return [
        f"memcpy({copy.target} + {offset(target, at)}, {copy.source} + {offset(source, read)}, "
        f"sizeof(*{copy.target}) * (size_t)(last - first));"
    ]


def check_indices(index: Index, operand: Operand, sizes: Mapping[str, Dim]) -> list[str]:
    """Statements that report the first index out of range and leave the kernel."""
    lines = [
        f"const int64_t value = (int64_t)index[{offset(operand, index.axes)}];",
        f"if (value < {index.least} || value >= {c_dim(index.length)}) {{",
        "    ctx->error_code = QC_INDEX_OUT_OF_RANGE;",
        "    ctx->error_value = value;",
        f"    ctx->error_limit = {c_dim(index.length)};",
        "    return;",
        "}",
    ]
    for name, stride in reversed(list(zip(index.axes, operand.strides, strict=True))):
        once = f"{name} < 1 && " if stride == 0 else ""  # a broadcast index list is checked once
        lines = [f"for (int64_t {name} = 0; {once}{name} < {c_dim(sizes[name])}; {name}++) {{", *indent(lines), "}"]
    return lines
