"""Reductions: the part of a loop kernel that folds.

A body of the form ``acc = combine(acc, value)`` can be split. *across* keeps 16 partial results along a contiguous
reduction loop and folds them in one fixed order at the end. *beside* computes 16 outputs at once along a contiguous
parallel loop. Any other body (argmax, accumulators that read each other) runs in order, one output at a time. The spec
alone decides the form of a kernel and the order of its sums, never the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cpu.loop_form import CHUNK, LANES, SCALAR_COST, Columns, LoopForm, bases, chunked, load, store
from qcompiler.kernels.cpu.text import VECTOR_TYPES
from qcompiler.kernels.cpu.vector import vector_obstacle, vector_statements
from qcompiler.kernels.loop_fold import Fold, find_folds, initial
from qcompiler.kernels.loop_nest import Loop, Nest
from qcompiler.kernels.scalar import scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, indent

_INTEGERS = ("i32", "i1")  # integer types whose folds have a vector form


def choose(nest: Nest, obstacle: str | None) -> LoopForm:
    """The form of a reduction. `obstacle` says why its body has no vector form; None if it has one."""
    folds = find_folds(nest, _INTEGERS)
    if obstacle is not None or folds is None or not nest.reduction:
        why = obstacle or ("not a plain fold" if folds is None else "nothing to reduce")
        return _in_order(nest, f"scalar, in order ({why})")
    if any(vector_obstacle(fold.combine) for fold in folds):
        return _in_order(nest, "scalar, in order (the fold has no vector form)")
    loop = _contiguous_loop(nest)
    if loop is not None and loop in nest.reduction:
        return _across(nest, folds, loop)
    if loop is not None and all(loop.steps[i] == 1 for i in range(nest.inputs, len(loop.steps))):
        return _beside(nest, folds, loop)
    return _in_order(nest, "scalar, in order (no contiguous loop)")


def _contiguous_loop(nest: Nest) -> Loop | None:
    """A loop along which the input that moves in the most loops is contiguous, and every other input is contiguous or
    fixed."""
    inputs = [i for i in range(nest.inputs) if nest.used(i)]
    if not inputs:
        return None
    main = max(inputs, key=lambda i: sum(loop.steps[i] != 0 for loop in nest.loops))
    for loop in nest.loops:
        if loop.steps[main] == 1 and all(loop.steps[i] in (0, 1) for i in inputs):
            return loop
    return None


def _nested(loops: Sequence[Loop], lines: Sequence[str]) -> list[str]:
    """Puts `for` loops over whole extents around `lines`."""
    for loop in reversed(loops):
        lines = [
            f"for (int64_t {loop.name} = 0; {loop.name} < {loop.limit}; {loop.name}++) {{",
            *indent(lines),
            "}",
        ]
    return list(lines)


def _step(nest: Nest, inner: Loop, loops: Sequence[Loop]) -> list[str]:
    """``step(a0, …, j, n)``: folds the columns [j, j + n) at the variables of `loops` into the accumulators a0…"""
    used = [i for i in range(nest.inputs) if nest.used(i)]
    declarations, rows = bases(nest, loops, used)
    values = [f"v_{nest.names[i]}" if i in used else "?" for i in range(nest.inputs)]
    accumulators = [f"a{i}" for i in range(len(nest.outputs))]
    statements = vector_statements(nest.program, values + accumulators)
    parameters = ", ".join(f"{VECTOR_TYPES[o.dtype]}& {a}" for o, a in zip(nest.outputs, accumulators, strict=True))
    body = [
        *declarations,
        *(f"const auto v_{nest.names[i]} = {load(nest, i, Columns(inner), rows[i])};" for i in used),
        *statements.lines,
        *(f"{a} = {result};" for a, result in zip(accumulators, statements.results, strict=True)),
    ]
    return [f"const auto step = [&]({parameters}, int64_t j, int n) QC_BODY {{", *indent(body), "};"]


def _combine(fold: Fold, target: str, first: str, second: str, prefix: str) -> list[str]:
    statements = vector_statements(fold.combine, (first, second), prefix)
    return [*statements.lines, f"{target} = {statements.results[0]};"]


def _items_cost(nest: Nest, inner: str, factor: int = 1) -> str:
    return " * ".join(
        [str(nest.cost() * factor), *(loop.limit for loop in nest.reduction), *([inner] if inner else [])]
    )


# --- across: SIMD lanes along a reduction loop -----------------------------------------------------------------------


def _across(nest: Nest, folds: list[Fold], inner: Loop) -> LoopForm:
    rest = [loop for loop in nest.reduction if loop is not inner]
    parts = 4 if len(folds) == 1 else 1  # independent accumulators hide the latency of the fold
    names = [[f"p{i}_{k}" for k in range(parts)] for i in range(len(folds))]
    lines = [
        f"{VECTOR_TYPES[fold.dtype]} {', '.join(f'{name} = {_splat(fold.neutral, fold.dtype)}' for name in mine)};"
        for fold, mine in zip(folds, names, strict=True)
    ]

    def step(k: int, column: str, count: str) -> str:
        return f"step({', '.join(mine[k] for mine in names)}, {column}, {count});"

    loop = [*_step(nest, inner, (*nest.parallel, *rest)), "int64_t j = 0;"]
    if parts > 1:
        loop.append(f"for (; j + {parts * LANES} <= {inner.limit}; j += {parts * LANES}) {{")
        loop += [f"    {step(k, f'j + {k * LANES}', str(LANES))}" for k in range(parts)]
        loop.append("}")
    loop.append(f"for (; j + {LANES} <= {inner.limit}; j += {LANES}) {step(0, 'j', str(LANES))}")
    tail = [f"const int n = (int)({inner.limit} - j);"]
    tail += [f"const auto before{i} = {mine[-1]};" for i, mine in enumerate(names)]
    tail.append(step(parts - 1, "j", "n"))
    tail += [f"{mine[-1]} = vsel(vfirst(n), {mine[-1]}, before{i});" for i, mine in enumerate(names)]
    loop += [f"if (j < {inner.limit}) {{", *indent(tail), "}"]
    lines += _nested(rest, loop)
    for i, (fold, mine) in enumerate(zip(folds, names, strict=True)):
        lines += _fold_lanes(nest, i, fold, mine)
    note = f"16 partial results along {inner.name}, folded in one order"
    return LoopForm(note, nest.parallel, _items_cost(nest, ""), tuple(lines))


def _splat(literal: str, dtype: str) -> str:
    return f"vset((int32_t){literal})" if VECTOR_TYPES[dtype] == "vi" else f"vset({literal})"


def _fold_lanes(nest: Nest, i: int, fold: Fold, parts: Sequence[str]) -> list[str]:
    """Folds the accumulators pairwise, then the SIMD lanes pairwise (j with j + 8, + 4, + 2, + 1), then the initial
    value."""
    lines: list[str] = []
    left = list(parts)
    while len(left) > 1:
        for k in range(0, len(left), 2):
            lines += _combine(fold, left[k], left[k], left[k + 1], f"c{i}_{len(left)}{k}_")
        left = left[::2]
    storage = {"bf16": "float", "f16": "float"}.get(fold.dtype, STORAGE_TYPES[fold.dtype])
    pair = scalar_statements(fold.combine, (f"lane{i}[k]", f"lane{i}[k + half]"))
    last = scalar_statements(fold.combine, (initial(nest, i), f"lane{i}[0]"), (), f"r{i}_")
    address = nest.address(nest.inputs + i, nest.parallel)
    return [
        *lines,
        f"{storage} lane{i}[{LANES}];",
        f"vstore(lane{i}, {left[0]});",
        f"for (int half = {LANES // 2}; half > 0; half /= 2)",
        "    for (int k = 0; k < half; k++) {",
        *indent([*pair.lines, f"lane{i}[k] = {pair.results[0]};"], 2),
        "    }",
        *last.lines,
        f"qc_store({address}, {last.results[0]});",
    ]


# --- beside: SIMD lanes along a parallel loop ------------------------------------------------------------------------


def _beside(nest: Nest, folds: list[Fold], inner: Loop) -> LoopForm:
    outer = tuple(loop for loop in nest.parallel if loop is not inner)
    chunks, span = chunked(inner, CHUNK // LANES)
    outputs = range(nest.inputs, nest.inputs + len(folds))
    declarations, rows = bases(nest, outer, list(outputs))
    lines = [*declarations, *span, "int64_t j = first;"]
    if len(folds) == 1:  # 64 columns at once fill whole cache lines and hide the latency of the fold
        lines.append(f"for (; j + {4 * LANES} <= last; j += {4 * LANES}) {{")
        lines += [*indent(_columns(nest, folds, (inner, outer), rows, 4)), "}"]
    lines += [
        f"for (; j < last; j += {LANES}) {{",
        f"    const int n = (int)qc_min({LANES}, last - j);",
        *indent(_columns(nest, folds, (inner, outer), rows, 1)),
        "}",
    ]
    cost = _items_cost(nest, f"qc_min({CHUNK // LANES}, {inner.limit})")
    return LoopForm(f"16 outputs at once along {inner.name}", (*outer, *chunks), cost, tuple(lines))


def _columns(
    nest: Nest, folds: list[Fold], loops: tuple[Loop, Sequence[Loop]], rows: dict[int, str], groups: int
) -> list[str]:
    """Reduces `groups` vectors of columns from `j` on. A single vector may have fewer than 16 columns (`n`)."""
    inner, outer = loops
    count = str(LANES) if groups > 1 else "n"
    names = [[f"p{i}_{k}" for k in range(groups)] for i in range(len(folds))]
    lines = [
        f"{VECTOR_TYPES[fold.dtype]} "
        + ", ".join(f"{name} = {_splat(initial(nest, i), fold.dtype)}" for name in names[i])
        + ";"
        for i, fold in enumerate(folds)
    ]
    calls = [f"step({', '.join(mine[k] for mine in names)}, {_column(k)}, {count});" for k in range(groups)]
    lines += _nested(nest.reduction, [*_step(nest, inner, (*outer, *nest.reduction)), *calls])
    for i, mine in enumerate(names):
        for k, name in enumerate(mine):
            columns = Columns(inner, _column(k), count)
            lines.append(store(nest, nest.inputs + i, columns, rows[nest.inputs + i], name))
    return lines


def _column(k: int) -> str:
    return f"j + {k * LANES}" if k else "j"


# --- in order --------------------------------------------------------------------------------------------------------


def _in_order(nest: Nest, note: str) -> LoopForm:
    """Computes one output element at a time, with the body in the order of the loops."""
    lines = []
    for i, operand in enumerate(nest.outputs):
        lines.append(f"{VALUE_TYPES[operand.dtype]} a{i} = {initial(nest, i)};")
    used = [i for i in range(nest.inputs) if nest.used(i)]
    values = [f"v_{nest.names[i]}" if i in used else "?" for i in range(nest.inputs)]
    values += [f"a{i}" for i in range(len(nest.outputs))]
    statements = scalar_statements(nest.program, values, nest.indices)
    body = [
        *(f"const auto v_{nest.names[i]} = qc_load({nest.address(i, nest.loops)});" for i in used),
        *statements.lines,
        *_assign(statements.results, values),
    ]
    lines += _nested(nest.reduction, body)
    for i in range(len(nest.outputs)):
        lines.append(f"qc_store({nest.address(nest.inputs + i, nest.parallel)}, a{i});")
    return LoopForm(note, nest.parallel, _items_cost(nest, "", SCALAR_COST), tuple(lines))


def _assign(results: Sequence[str], values: Sequence[str]) -> list[str]:
    """Assigns the new accumulators. If a result is itself an accumulator, all are read before any is written."""
    accumulators = values[len(values) - len(results) :]
    swapped = any(r in accumulators and r != a for r, a in zip(results, accumulators, strict=True))
    if not swapped:
        return [f"a{i} = {result};" for i, result in enumerate(results) if result != f"a{i}"]
    reads = [f"const auto next{i} = {result};" for i, result in enumerate(results)]
    return [*reads, *(f"a{i} = next{i};" for i in range(len(results)))]
