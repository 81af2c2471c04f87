"""Norms as the prologue of a linear of few rows: every block normalises the rows on their way to shared memory.

    struct qk_<name>_norm      what qc_linear_few (linear_fma.cuh) takes as its prologue
        prepare(x, x_row, live)    the statistics of each row, by all warps of the block
        add(row, k, v)             16 elements of a row, from column k on: a first norm and its residual
        apply(row, k, v)           the same of the last norm

The statistics are summed as in the norm's own kernel (rows.py): the columns of one of its lanes in order, then the
lanes of a warp, then the warps. If a block has fewer warps than that kernel, a warp takes the share of several: one
after the other, or of so many rows that they would be many trips to memory, eight side by side. So the bits are the
same. Those of a second norm are sums over what the first one makes of each element, which is computed again where it is
read.

Rows that others read as well are written by all blocks: block b of B writes columns 16 b … 16 b + 15, and so on after
every 16 B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.geometry import SharedMemory
from qcompiler.kernels.cuda.linear_finish import linear_body, row_offset
from qcompiler.kernels.cuda.rows import KEPT, WARP, RowWalk
from qcompiler.kernels.cuda.signature import pointer_type
from qcompiler.kernels.cuda.weights import block
from qcompiler.kernels.norm_prologue import Stage, kept_of, note_of, stages_of
from qcompiler.kernels.rows import Fold, Rows, Value, expression
from qcompiler.kernels.scalar import SCALAR_FORM
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import RESIDUAL

UNROLLED = 8
"""Loads of a lane under way. More would need registers that the tiles of the weight occupy."""

SIDE_BY_SIDE = 8
"""Shares of a warp under way at once, of more rows than `FEW_ROWS`."""

FEW_ROWS = 8
"""The most rows of which a warp takes the shares one after the other."""


def check(spec: KernelSpec, engine: str) -> None:
    """KernelSelectionError if an engine cannot begin with the norms of a spec."""
    body = linear_body(spec)
    if body.norms and body.given is None and engine not in ("few_mma", "few_fma"):
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}): the engine {engine} takes no norm as its prologue; engines for up "
            "to eight rows of x, with a constant weight, do"
        )


def room(shared: SharedMemory, spec: KernelSpec, rows: int) -> None:
    """Adds the ranges of norms of up to `rows` rows at a time."""
    forms, warps = [stage.form for stage in stages_of(spec)], _warps(spec)
    shared.add("norm_sums", "float", sum(len(_folds(form)) for form in forms) * rows * warps, 4)
    shared.add("norm_values", "float", rows * sum(len(_values(form)) for form in forms), 4)


def declaration(spec: KernelSpec, m0: str) -> str:
    """The statement that declares `norm`, in the kernel, for rows from `m0` on."""
    members, rows = list[str](), [kept] if (kept := kept_of(spec)) is not None else []
    members += ["(uint32_t)panel"] * len(rows)
    for place in (*(place for stage in stages_of(spec) for place in stage.places.values()), *rows):
        operand = spec.operands[place]
        if len(operand.shape) == 1:
            members.append(identifier(operand.name))
        else:
            members += [f"{identifier(operand.name)} + {row_offset(operand, m0)}", c_dim(operand.strides[0])]
    return f"const qk_{spec.name}_norm norm = {{{', '.join((*members, 'norm_sums', 'norm_values'))}}};"


def definition(spec: KernelSpec, warps: int, rows: int, blocks: int) -> str:
    """The struct, for `blocks` blocks of `warps` warps and up to `rows` rows at a time."""
    kind, kept, stages = STORAGE_TYPES[spec.operands[0].dtype], kept_of(spec), _printed(spec)
    members = list[str]() if kept is None else ["uint32_t panel;"]
    for stage in stages:
        for role, place in stage.of.places.items():
            members.append(f"{pointer_type(spec.operands[place])} {stage.member(role)};")
            members += [f"int64_t {RESIDUAL}_row;"] * (role == RESIDUAL)
    if kept is not None:
        members += [f"static constexpr uint32_t blocks = {blocks};", f"{kind}* rows;", "int64_t rows_row;"]
    flags = {"norms": True, "adds": len(stages) == 2, "keeps": kept is not None}
    lines = [
        f"struct qk_{spec.name}_norm {{  // {note_of(spec)}",
        f"    static constexpr bool {', '.join(f'{name} = {str(flag).lower()}' for name, flag in flags.items())};",
        *indent(members),
        "    float* sums;    // [fold][row][warp of the norm's kernel]",
        "    float* values;  // [row][value]",
        f"    QC_DEVICE void prepare(const {kind}* x, int64_t x_row, int live) const {{",
        "        const int lane = threadIdx.x % 32;",
        *indent(indent(_prepare(spec, stages, warps, rows))),
        "    }",
    ]
    for stage, name in zip(stages, ("add", "apply")[-len(stages) :], strict=True):
        head = f"    QC_DEVICE void {name}(int row, int64_t k, float (&v)[16]) const {{"
        lines += [head, *indent(indent(_apply(spec, stage, sum(len(_values(each.form)) for each in stages)))), "    }"]
    return block([*lines, "};"])


@dataclass(frozen=True)
class _Printed:
    """A norm, and what is its own in the struct: the names of its members and values, and where the values begin."""

    of: Stage
    prefix: str
    first_value: int

    @property
    def form(self) -> Rows:
        return self.of.form

    def member(self, role: str) -> str:
        """The member that points to an operand."""
        return role if role == RESIDUAL else f"{self.prefix}{role}"


def _printed(spec: KernelSpec) -> list[_Printed]:
    stages, values = list[_Printed](), 0
    for number, stage in enumerate(stages_of(spec)):
        stages.append(_Printed(stage, f"norm{number}_", values))
        values += len(_values(stage.form))
    return stages


def _warps(spec: KernelSpec) -> int:
    """Warps that share a row in the norm's own kernel."""
    body = linear_body(spec)
    return RowWalk.of(body.m, body.k).threads // WARP


def _folds(form: Rows) -> list[Fold]:
    return [step for step in form.steps if isinstance(step, Fold)]


def _values(form: Rows) -> list[Value]:
    return [step for step in form.steps if isinstance(step, Value)]


def _prepare(spec: KernelSpec, stages: Sequence[_Printed], warps: int, rows: int) -> list[str]:
    """Each fold by all warps, with what is known of the row before it; then the values of each row by one thread."""
    own, lines, known, values = _warps(spec), list[str](), list[str](), list[str]()
    element, column = "qc_load(row + j)", list[str]()
    folds = 0
    for stage in stages:
        names = {**stage.form.literals(), "x": element}
        for step in stage.form.steps:
            name = f"{stage.prefix}{step.name}"
            if isinstance(step, Value):
                known.append(f"const float {name} = {expression(step.of, names, SCALAR_FORM)};")
                values.append(name)
            elif isinstance(step, Fold):
                begin = f"sums + {folds * rows * own}" if folds else "sums"
                fold = Fold(name, step.kind, expression(step.of, names, SCALAR_FORM))
                lines += (_fold if rows <= FEW_ROWS else _folds_at_once)(fold, column, known, begin, spec, warps)
                known.append(f"const float {name} = qc_total<{own}>({begin} + number * {own});")
                folds += 1
            else:
                raise KernelSelectionError(f"kernel '{spec.name}': a norm keeps no column")
            names[step.name] = name
        names |= {role: f"qc_load({stage.member(role)} + j)" for role in stage.of.places if role != RESIDUAL}
        names[RESIDUAL] = f"qc_load({RESIDUAL} + number * {RESIDUAL}_row + j)"
        made, dtype = expression(stage.form.result, names, SCALAR_FORM), spec.operands[0].dtype
        made = made if dtype == "f32" else f"qc_round_{dtype}({made})"
        element, column = f"{stage.prefix}result", [*column, f"const float {stage.prefix}result = {made};"]
    return [
        *lines,
        f"for (int number = threadIdx.x; number < live; number += {32 * warps}) {{",
        *indent(known),
        *indent([f"values[number * {len(values)} + {i}] = {name};" for i, name in enumerate(values)]),
        "}",
        "__syncthreads();",
    ]


def _fold(
    fold: Fold, column: Sequence[str], known: Sequence[str], begin: str, spec: KernelSpec, warps: int
) -> list[str]:
    """The sum of each of the norm kernel's warps for each row. A warp of the block takes every `warps`-th of them.

    `fold.of` is the value of column `j` as C++ text; `column` are statements in front of it."""
    own, cols = _warps(spec), linear_body(spec).k
    name, threads = fold.name, WARP * own
    each = {
        "sum": [f"{name} += {fold.of};"],
        "squares": [f"const float each = {fold.of};", f"{name} = fmaf(each, each, {name});"],
    }[fold.kind]
    return [
        f"for (int share = threadIdx.x / 32; share < live * {own}; share += {warps}) {{",
        *indent(
            [
                f"const int number = share / {own};",
                "const auto row = x + number * x_row;",
                *known,
                f"float {name} = 0.0f;",
                f"#pragma unroll {min(UNROLLED // (3 if column else 1), KEPT, -(-cols // threads))}",
                f"for (int j = share % {own} * {WARP} + lane; j < {cols}; j += {threads}) {{",
                *indent([*column, *each]),
                "}",
                f"{name} = qc_warp_sum({name});",
                f"if (lane == 0) ({begin})[share] = {name};",
            ]
        ),
        "}",
        "__syncthreads();",
    ]


def _folds_at_once(
    fold: Fold, column: Sequence[str], known: Sequence[str], begin: str, spec: KernelSpec, warps: int
) -> list[str]:
    """The same for many rows: nothing is summed over lanes, or stored, before all loads of a warp are under way."""
    own, cols = _warps(spec), linear_body(spec).k
    name, threads = f"{fold.name}s[i]", WARP * own
    each = {
        "sum": [f"{name} += {fold.of};"],
        "squares": [f"const float each = {fold.of};", f"{name} = fmaf(each, each, {name});"],
    }[fold.kind]
    every = ["#pragma unroll", f"for (int i = 0; i < {SIDE_BY_SIDE}; i++)"]
    begin_of_warp, step = f"threadIdx.x / 32 * {SIDE_BY_SIDE}", warps * SIDE_BY_SIDE
    return [
        f"for (int first = {begin_of_warp}; first < live * {own}; first += {step}) {{",
        *indent(
            [
                f"float {fold.name}s[{SIDE_BY_SIDE}];",
                every[0],
                f"{every[1]} {{",
                *indent(
                    [
                        f"const int share = qc_min(first + i, live * {own} - 1), number = share / {own};",
                        "const auto row = x + number * x_row;",
                        *known,
                        f"{name} = 0.0f;",
                        f"#pragma unroll {min(2, -(-cols // threads))}",
                        f"for (int j = share % {own} * {WARP} + lane; j < {cols}; j += {threads}) {{",
                        *indent([*column, *each]),
                        "}",
                    ]
                ),
                "}",
                *every,
                f"    {name} = qc_warp_sum({name});",
                *every,
                f"    if (lane == 0 && first + i < live * {own}) ({begin})[first + i] = {name};",
            ]
        ),
        "}",
        "__syncthreads();",
    ]


def _apply(spec: KernelSpec, stage: _Printed, count: int) -> list[str]:
    """What a norm makes of 16 elements. There are `count` values for each row."""
    cols, form, lines = linear_body(spec).k, stage.form, list[str]()
    for i, value in enumerate(_values(form)):
        lines.append(f"const float {value.name} = values[row * {count} + {stage.first_value + i}];")
    names = {**form.literals(), **{v.name: v.name for v in _values(form)}, "x": "v[i]"}
    for role in stage.of.places:
        begin = f"{RESIDUAL} + row * {RESIDUAL}_row" if role == RESIDUAL else stage.member(role)
        lines += [f"float {role}s[16];", f"qc_read_floats({begin}, k, {cols}, {role}s);"]
        names[role] = f"{role}s[i]"
    result = expression(form.result, names, SCALAR_FORM)
    inside = result if cols % 16 == 0 else f"k + i < {cols} ? {result} : 0.0f"
    return [*lines, "#pragma unroll", f"for (int i = 0; i < 16; i++) v[i] = {inside};"]
