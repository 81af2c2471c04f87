"""Reductions as CUDA C++: the part of a loop kernel that folds.

A body of the form ``acc = combine(acc, value)`` can be split (kernels/loop_fold.py):

    warp     32 lanes share one output, eight outputs per block; shuffles combine the lanes
    block    256 threads share one output: few outputs, or long reductions
    columns  a thread per output along a contiguous parallel loop, with eight slices of the reduction side by side

Any other body (argmax, accumulators that read each other), and reductions too short to share, run *in order*, one
thread per output. The spec alone decides the form of a kernel and the order in which it combines, so results do not
depend on scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.kernels.cuda.geometry import CudaKernel, SharedMemory
from qcompiler.kernels.cuda.loop_form import (
    THREADS,
    Group,
    count_of,
    index_type,
    kernel,
    shared_kernel,
    up,
    used_inputs,
    value_bytes,
    value_type,
    variables,
)
from qcompiler.kernels.loop_fold import Fold, find_folds, initial
from qcompiler.kernels.loop_nest import Loop, Nest, guess
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import VALUE_TYPES, c_dim, indent, needed
from qcompiler.plan.dims import product

_WARP = 32
_WARPS = THREADS // _WARP
_LONG_REDUCTION = 1024  # reductions of this many elements are shared by a block, shorter ones by a warp
_FEW_OUTPUTS = 128  # with one warp for each of so few outputs, most of a GPU is idle
_SHORT_REDUCTION = 8  # one thread folds so few elements faster than a warp
_FEW_COLUMNS = 8  # too few columns for the columns form


@dataclass(frozen=True)
class _Plan:
    """A reduction that folds: the order of its loops, and the group along the last loop."""

    nest: Nest
    folds: list[Fold]
    kind: str
    group: Group

    @property
    def walk(self) -> list[Loop]:
        """The loops over the units of the reduction."""
        return [*self._around, *self.group.walk]

    @property
    def _around(self) -> list[Loop]:
        return [loop for loop in self.nest.reduction if loop is not self.group.loop]


def emit(nest: Nest) -> CudaKernel:
    """A nest with reduction iterators."""
    folds = find_folds(nest)
    if folds is None or not nest.reduction:
        return _in_order(nest, "not a plain fold" if folds is None else "nothing to reduce")
    if _is_short(nest):
        return _in_order(nest, f"at most {_SHORT_REDUCTION} elements each")
    column = _columns_loop(nest)
    if column is not None:
        return _columns(nest, folds, column)
    last = _spread_loop(nest)
    around = tuple(loop for loop in nest.loops if loop is not last)
    plan = _Plan(nest, folds, index_type(nest), Group.of(nest, last, around, used_inputs(nest)))
    return _block(plan) if _is_long(nest) else _warp(plan)


# --- choices ---------------------------------------------------------------------------------------------------------


def _main_input(nest: Nest) -> int | None:
    """The used input that moves along the most loops: it dominates the traffic."""
    return max(used_inputs(nest), key=lambda i: sum(loop.steps[i] != 0 for loop in nest.loops), default=None)


def _columns_loop(nest: Nest) -> Loop | None:
    """A parallel loop along which the main input is contiguous, so that a warp reads one line."""
    main = _main_input(nest)
    for loop in nest.parallel:
        narrow = loop.extent.is_static and loop.extent.value < _FEW_COLUMNS
        if main is not None and loop.steps[main] == 1 and not narrow:
            return loop
    return None


def _spread_loop(nest: Nest) -> Loop:
    """The reduction loop that adjacent threads walk together: where the main input is contiguous, or the longest."""
    main = _main_input(nest)
    for loop in nest.reduction:
        if main is not None and loop.steps[main] == 1:
            return loop
    return max(nest.reduction, key=lambda loop: guess(loop.extent))


def _is_short(nest: Nest) -> bool:
    reduced = product(loop.extent for loop in nest.reduction)
    return reduced.is_static and reduced.value <= _SHORT_REDUCTION


def _is_long(nest: Nest) -> bool:
    reduced, outputs = (product(loop.extent for loop in loops) for loops in (nest.reduction, nest.parallel))
    if reduced.is_static:
        return reduced.value > _LONG_REDUCTION
    return outputs.is_static and outputs.value <= _FEW_OUTPUTS


# --- pieces ----------------------------------------------------------------------------------------------------------


def _accumulators(plan: _Plan) -> list[str]:
    width = plan.group.width
    lines = []
    for i, fold in enumerate(plan.folds):
        kind = VALUE_TYPES[fold.dtype]
        if width == 1:
            lines.append(f"{kind} a{i} = {fold.neutral};")
        else:
            lines.append(f"{kind} a{i}[{width}] = {{{', '.join([fold.neutral] * width)}}};")
    return lines


def _fold_units(plan: _Plan, start: str, step: int) -> list[str]:
    """Folds the units start, start + step, … of the reduction into the accumulators."""
    nest, group = plan.nest, plan.group
    loops = (*nest.parallel, *nest.reduction)
    loads: list[str] = []
    values: dict[int, str] = {}
    for i in used_inputs(nest):
        statements, values[i] = group.load(i, loops)
        loads += statements
    names = [f"a{i}[v]" if group.width > 1 else f"a{i}" for i in range(len(plan.folds))]
    inputs = [values.get(i, "?") for i in range(nest.inputs)] + names
    body = scalar_statements(nest.program, inputs, group.indices())
    lines = [*body.lines, *(f"{name} = {result};" for name, result in zip(names, body.results, strict=True))]
    if group.width > 1 and not group.even:
        lines = ["if (v < n) {", *indent(lines), "}"]
    work = [*loads, *group.each(lines)]
    position = needed([*variables("unit", plan.walk, plan.kind), *group.declarations(plan.kind)], work)
    return [
        f"const {plan.kind} units = {count_of(plan.walk)};",
        *group.alignment(),
        "#pragma unroll 4",
        f"for ({plan.kind} unit = {start}; unit < units; unit += {step}) {{",
        *indent([*position, *work]),
        "}",
        *_fold_group(plan),
    ]


def _fold_group(plan: _Plan) -> list[str]:
    """Folds the accumulators of a group into the first one."""
    if plan.group.width == 1:
        return []
    lines = [line for i, fold in enumerate(plan.folds) for line in _combine(fold, f"a{i}[0]", f"a{i}[v]", f"c{i}_")]
    return ["#pragma unroll", f"for (int v = 1; v < {plan.group.width}; v++) {{", *indent(lines), "}"]


def _first(plan: _Plan, i: int) -> str:
    return f"a{i}[0]" if plan.group.width > 1 else f"a{i}"


def _combine(fold: Fold, target: str, value: str, prefix: str) -> list[str]:
    """``target = op(target, value)``."""
    statements = scalar_statements(fold.combine, (target, value), (), prefix)
    return [*statements.lines, f"{target} = {statements.results[0]};"]


def _fold_lanes(plan: _Plan) -> list[str]:
    """Folds every lane's accumulators into those of lane 0, by halves: 16, 8, 4, 2, 1."""
    lines = []
    for i, fold in enumerate(plan.folds):
        mine = _first(plan, i)
        lines += [
            f"const {VALUE_TYPES[fold.dtype]} other{i} = qc_exchange({mine}, mask);",
            *_combine(fold, mine, f"other{i}", f"c{i}_"),
        ]
    return ["#pragma unroll", f"for (int mask = {_WARP // 2}; mask > 0; mask /= 2) {{", *indent(lines), "}"]


def _write(plan: _Plan) -> list[str]:
    """Combines the initial value with the folded result, in this order, and stores it."""
    nest = plan.nest
    lines = []
    for i, fold in enumerate(plan.folds):
        last = scalar_statements(fold.combine, (initial(nest, i), _first(plan, i)), (), f"r{i}_")
        lines += [*last.lines, f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, {last.results[0]});"]
    return lines


def _partials(plan: _Plan, count: int) -> SharedMemory:
    shared = SharedMemory()
    for i, fold in enumerate(plan.folds):
        shared.add(f"partial{i}", VALUE_TYPES[fold.dtype], count, value_bytes(fold.dtype))
    return shared


def _outputs(nest: Nest, kind: str) -> list[str]:
    """Declares the parallel loops' variables from `output`."""
    return variables("output", nest.parallel, kind)


# --- warp and block: threads along the reduction ---------------------------------------------------------------------


def _note(plan: _Plan, threads: int) -> str:
    along = f"{plan.group.width} neighbours along {plan.group.loop.name}" if plan.group.width > 1 else "one element"
    return f"{threads} threads per output, {along} at a time"


def _warp(plan: _Plan) -> CudaKernel:
    nest, kind = plan.nest, plan.kind
    work = [*_accumulators(plan), *_fold_units(plan, "lane", _WARP), *_fold_lanes(plan)]
    work += ["if (lane == 0) {", *indent(_write(plan)), "}"]
    lines = [
        f"const {kind} outputs = {count_of(nest.parallel)};",
        f"const {kind} output = ({kind})blockIdx.x * {_WARPS} + threadIdx.x / {_WARP};",
        "if (output >= outputs) return;  // a whole warp",
        f"const int lane = threadIdx.x % {_WARP};",
        *needed(_outputs(nest, kind), work),
        *work,
    ]
    grid = up(product(loop.extent for loop in nest.parallel), _WARPS)
    return kernel(nest, [_note(plan, _WARP)], grid, THREADS, lines, plan.group.limits())


def _block(plan: _Plan) -> CudaKernel:
    nest, kind = plan.nest, plan.kind
    combine = []
    for i, fold in enumerate(plan.folds):
        combine += _combine(fold, _first(plan, i), f"partial{i}[warp]", f"d{i}_")
    work = [
        *_accumulators(plan),
        *_fold_units(plan, "threadIdx.x", THREADS),
        *_fold_lanes(plan),
        f"if (threadIdx.x % {_WARP} == 0) {{",
        *(f"    partial{i}[threadIdx.x / {_WARP}] = {_first(plan, i)};" for i in range(len(plan.folds))),
        "}",
        "__syncthreads();",
        "if (threadIdx.x == 0) {",
        f"    for (int warp = 1; warp < {_WARPS}; warp++) {{",
        *indent(combine, 2),
        "    }",
        *indent(_write(plan)),
        "}",
    ]
    lines = [*needed([f"const {kind} output = blockIdx.x;", *_outputs(nest, kind)], work), *work]
    grid = product(loop.extent for loop in nest.parallel)
    shared = _partials(plan, _WARPS)
    return shared_kernel(nest, [_note(plan, THREADS)], grid, THREADS, lines, plan.group.limits(), shared)


# --- columns: threads along a parallel loop --------------------------------------------------------------------------


def _columns(nest: Nest, folds: list[Fold], column: Loop) -> CudaKernel:
    kind = index_type(nest)
    last = nest.reduction[-1]
    plan = _Plan(nest, folds, kind, Group(nest, last, (), (), 1))
    tiles = Loop("chunk", up(column.extent, _WARP), (), None)
    walk = [*(loop for loop in nest.parallel if loop is not column), tiles]
    combine = []
    for i, fold in enumerate(folds):
        combine += _combine(fold, f"a{i}", f"partial{i}[other * {_WARP} + lane]", f"d{i}_")
    inside = f"{column.name} < {column.limit}"
    lines = [
        f"const {kind} total = blockIdx.x;",
        *variables("total", walk, kind),
        f"const int lane = threadIdx.x % {_WARP};",
        f"const int slice = threadIdx.x / {_WARP};",
        f"const {kind} {column.name} = chunk * {_WARP} + lane;",
        *_accumulators(plan),
        f"if ({inside}) {{",
        *indent(_fold_units(plan, "slice", _WARPS)),
        "}",
        *(f"partial{i}[threadIdx.x] = a{i};" for i in range(len(folds))),
        "__syncthreads();",
        f"if (slice == 0 && {inside}) {{",
        f"    for (int other = 1; other < {_WARPS}; other++) {{",
        *indent(combine, 2),
        "    }",
        *indent(_write(plan)),
        "}",
    ]
    note = f"a warp covers {_WARP} outputs along {column.name}, {_WARPS} slices of the reduction"
    limits = [f"const int64_t chunk_end = {c_dim(tiles.extent)};"]
    grid = product(loop.extent for loop in walk)
    return shared_kernel(nest, [note], grid, THREADS, lines, limits, _partials(plan, THREADS))


# --- in order --------------------------------------------------------------------------------------------------------


def _in_order(nest: Nest, why: str) -> CudaKernel:
    """One output per thread, with the body in the order of the loops."""
    kind = index_type(nest)
    used = used_inputs(nest)
    values = [f"v_{nest.names[i]}" if i in used else "?" for i in range(nest.inputs)]
    values += [f"a{i}" for i in range(len(nest.outputs))]
    statements = scalar_statements(nest.program, values, nest.indices)
    work = [
        *(
            f"const {value_type(nest.spec.operands[i])} v_{nest.names[i]} = qc_load({nest.address(i, nest.loops)});"
            for i in used
        ),
        *statements.lines,
        *_assign(statements.results, values[nest.inputs :]),
    ]
    for loop in reversed(nest.reduction):
        head = f"for ({kind} {loop.name} = 0; {loop.name} < {loop.limit}; {loop.name}++) {{"
        work = [head, *indent(work), "}"]
    work = [*(f"{value_type(o)} a{i} = {initial(nest, i)};" for i, o in enumerate(nest.outputs)), *work]
    for i in range(len(nest.outputs)):
        work.append(f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, a{i});")
    lines = [
        f"const {kind} outputs = {count_of(nest.parallel)};",
        f"const {kind} output = ({kind})blockIdx.x * {THREADS} + threadIdx.x;",
        "if (output >= outputs) return;",
        *needed(_outputs(nest, kind), work),
        *work,
    ]
    grid = up(product(loop.extent for loop in nest.parallel), THREADS)
    return kernel(nest, [f"in order, a thread per output ({why})"], grid, THREADS, lines)


def _assign(results: Sequence[str], accumulators: Sequence[str]) -> list[str]:
    """Assigns the new accumulators. If a result is itself an accumulator, all are read before any is written."""
    swapped = any(r in accumulators and r != a for r, a in zip(results, accumulators, strict=True))
    if not swapped:
        return [f"a{i} = {result};" for i, result in enumerate(results) if result != f"a{i}"]
    reads = [f"const auto next{i} = {result};" for i, result in enumerate(results)]
    return [*reads, *(f"a{i} = next{i};" for i in range(len(results)))]
