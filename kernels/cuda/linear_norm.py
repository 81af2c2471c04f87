"""A norm as the prologue of a linear of few rows: every block normalises the rows on their way to shared memory.

    struct qk_<name>_norm      what qc_linear_few (linear_fma.cuh) takes as its prologue
        prepare(x, x_row, live)    the statistics of each row, by all warps of the block
        apply(row, k, v)           16 elements of a row, from column k on

The statistics are summed as in the norm's own kernel (rows.py): the columns of one of its lanes in order, then the
lanes of a warp, then the warps. If a block has fewer warps than that kernel, a warp takes the share of several, one
after the other. So the bits are the same.

Rows that others read as well are written by all blocks: block b of B writes columns 16 b … 16 b + 15, and so on after
every 16 B.
"""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda.geometry import SharedMemory
from qcompiler.kernels.cuda.linear_finish import linear_body, row_offset
from qcompiler.kernels.cuda.rows import KEPT, WARP, RowWalk
from qcompiler.kernels.cuda.signature import pointer_type
from qcompiler.kernels.cuda.weights import block
from qcompiler.kernels.norm_prologue import affine_of, form_of, kept_of
from qcompiler.kernels.rows import Fold, Rows, Value, expression
from qcompiler.kernels.scalar import SCALAR_FORM
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import KernelSpec

UNROLLED = 8
"""Loads of a lane under way. More would need registers that the tiles of the weight occupy."""


def check(spec: KernelSpec, engine: str) -> None:
    """KernelSelectionError if an engine cannot begin with the norm of a spec."""
    if linear_body(spec).norm is not None and engine not in ("few_mma", "few_fma"):
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}): the engine {engine} takes no norm as its prologue; engines for up "
            "to eight rows of x, with a constant weight, do"
        )


def room(shared: SharedMemory, spec: KernelSpec, rows: int) -> None:
    """Adds the ranges of a norm of up to `rows` rows at a time."""
    form, warps = form_of(spec), _warps(spec)
    shared.add("norm_sums", "float", len(_folds(form)) * rows * warps, 4)
    shared.add("norm_values", "float", rows * len(_values(form)), 4)


def declaration(spec: KernelSpec, m0: str) -> str:
    """The statement that declares `norm`, in the kernel, for rows from `m0` on."""
    members, kept = [identifier(spec.operands[place].name) for _, place in affine_of(spec)], kept_of(spec)
    if kept is not None:
        rows = spec.operands[kept]
        members += [f"{identifier(rows.name)} + {row_offset(rows, m0)}", c_dim(rows.strides[0])]
    return f"const qk_{spec.name}_norm norm = {{{', '.join((*members, 'norm_sums', 'norm_values'))}}};"


def definition(spec: KernelSpec, warps: int, rows: int, blocks: int) -> str:
    """The struct, for `blocks` blocks of `warps` warps and up to `rows` rows at a time."""
    form, kind, kept = form_of(spec), STORAGE_TYPES[spec.operands[0].dtype], kept_of(spec)
    members = [f"{pointer_type(spec.operands[place])} {role};" for role, place in affine_of(spec)]
    if kept is not None:
        members += [f"static constexpr uint32_t blocks = {blocks};", f"{kind}* rows;", "int64_t rows_row;"]
    lines = [
        f"struct qk_{spec.name}_norm {{  // {form.note}",
        f"    static constexpr bool norms = true, keeps = {str(kept is not None).lower()};",
        *indent(members),
        "    float* sums;    // [fold][row][warp of the norm's kernel]",
        "    float* values;  // [row][value]",
        f"    QC_DEVICE void prepare(const {kind}* x, int64_t x_row, int live) const {{",
        "        const int lane = threadIdx.x % 32;",
        *indent(indent(_prepare(spec, form, warps, rows))),
        "    }",
        "    QC_DEVICE void apply(int row, int64_t k, float (&v)[16]) const {",
        *indent(indent(_apply(spec, form))),
        "    }",
        "};",
    ]
    return block(lines)


def _warps(spec: KernelSpec) -> int:
    """Warps that share a row in the norm's own kernel."""
    form = form_of(spec)
    return RowWalk.of(form.rows, form.cols).threads // WARP


def _folds(form: Rows) -> list[Fold]:
    return [step for step in form.steps if isinstance(step, Fold)]


def _values(form: Rows) -> list[Value]:
    return [step for step in form.steps if isinstance(step, Value)]


def _prepare(spec: KernelSpec, form: Rows, warps: int, rows: int) -> list[str]:
    """Each fold by all warps, with what is known of the row before it; then the values of each row by one thread."""
    own, lines = _warps(spec), list[str]()
    names, known = {**form.literals(), "x": "qc_load(row + j)"}, list[str]()
    folds = 0
    for step in form.steps:
        if isinstance(step, Value):
            known.append(f"const float {step.name} = {expression(step.of, names, SCALAR_FORM)};")
        elif isinstance(step, Fold):
            begin = f"sums + {folds * rows * own}" if folds else "sums"
            lines += _fold(step, expression(step.of, names, SCALAR_FORM), known, begin, spec, warps)
            known.append(f"const float {step.name} = qc_total<{own}>({begin} + number * {own});")
            folds += 1
        else:
            raise KernelSelectionError(f"kernel '{spec.name}': a norm keeps no column")
        names[step.name] = step.name
    return [
        *lines,
        f"for (int number = threadIdx.x; number < live; number += {32 * warps}) {{",
        *indent(known),
        *indent([f"values[number * {len(_values(form))} + {i}] = {v.name};" for i, v in enumerate(_values(form))]),
        "}",
        "__syncthreads();",
    ]


def _fold(fold: Fold, value: str, known: list[str], begin: str, spec: KernelSpec, warps: int) -> list[str]:
    """The sum of each of the norm kernel's warps for each row. A warp of the block takes every `warps`-th of them."""
    own, cols = _warps(spec), linear_body(spec).k
    name, threads = fold.name, WARP * own
    each = {
        "sum": [f"{name} += {value};"],
        "squares": [f"const float each = {value};", f"{name} = fmaf(each, each, {name});"],
    }[fold.kind]
    return [
        f"for (int share = threadIdx.x / 32; share < live * {own}; share += {warps}) {{",
        *indent(
            [
                f"const int number = share / {own};",
                "const auto row = x + number * x_row;",
                *known,
                f"float {name} = 0.0f;",
                f"#pragma unroll {min(UNROLLED, KEPT, -(-cols // threads))}",
                f"for (int j = share % {own} * {WARP} + lane; j < {cols}; j += {threads}) {{",
                *indent(each),
                "}",
                f"{name} = qc_warp_sum({name});",
                f"if (lane == 0) ({begin})[share] = {name};",
            ]
        ),
        "}",
        "__syncthreads();",
    ]


def _apply(spec: KernelSpec, form: Rows) -> list[str]:
    cols, values = linear_body(spec).k, _values(form)
    lines = [f"const float {v.name} = values[row * {len(values)} + {i}];" for i, v in enumerate(values)]
    names = {**form.literals(), **{v.name: v.name for v in values}, "x": "v[i]"}
    for role, _ in affine_of(spec):
        lines += [f"float {role}s[16];", f"qc_read_floats({role}, k, {cols}, {role}s);"]
        names[role] = f"{role}s[i]"
    result = expression(form.result, names, SCALAR_FORM)
    inside = result if cols % 16 == 0 else f"k + i < {cols} ? {result} : 0.0f"
    return [*lines, "#pragma unroll", f"for (int i = 0; i < 16; i++) v[i] = {inside};"]
