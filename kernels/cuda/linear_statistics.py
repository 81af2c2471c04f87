"""Statistics of rows in linears of many rows, over linear_statistics.cuh: written for another linear, and read.

written(spec, …)        the statements behind the last store, which write the statistics of the block's rows
room(shared, spec, …)   the shared memory of a norm whose statistics are given
definition(spec, …)     struct qk_<name>_norm: what a norm makes of an element, by the equation of the norm's kernel
declaration(spec, …)    the statement that declares `norm`
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.cuda.geometry import SharedMemory
from qcompiler.kernels.cuda.linear_finish import linear_body
from qcompiler.kernels.cuda.signature import pointer_type
from qcompiler.kernels.cuda.weights import block
from qcompiler.kernels.norm_prologue import Stage, stages_of
from qcompiler.kernels.rows import expression
from qcompiler.kernels.scalar import SCALAR_FORM, float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, DType, KernelSpec
from qcompiler.plan.kinds.linear import STATISTICS

VALUE_BYTES = 8
"""A row's mean and scale."""

MOST_ROWS = 128
"""Rows of the largest tile on tensor cores (linear_mma.py, `LARGE`)."""


def written(spec: KernelSpec, rows: int, columns: int, threads: int, m0: str, n0: str) -> list[str]:
    """The statements for a block of `rows` x `columns` elements of the result from (m0, n0) on. None without
    statistics."""
    body = linear_body(spec)
    if body.statistics is None:
        return []
    parts, out = spec.operands[-2:]
    centred = str(body.statistics == "layer").lower()
    return [
        f"qc_write_parts<{rows}, {columns}, {threads}, {out.shape[-1]}, {centred}>(",
        f"    {identifier(out.name)}, {c_dim(out.strides[0])}, {identifier(parts.name)}, {c_dim(parts.strides[0])},",
        f"    {m0}, {n0}, {c_dim(body.m)});",
    ]


def reserved(columns: int, vectors: Sequence[DType]) -> int:
    """Bytes of shared memory that a given norm of rows of `columns` elements takes on tensor cores, at most: the values
    of the rows of the largest tile, and vectors of these types."""
    padded = -(-columns // 8) * 8
    return MOST_ROWS * VALUE_BYTES + sum(-(-padded * ITEMSIZE[dtype] // 128) * 128 for dtype in vectors)


def reserved_by(spec: KernelSpec) -> int:
    """The same for a kernel; 0 without such a norm."""
    body = linear_body(spec)
    if body.given is None:
        return 0
    return reserved(body.k, [spec.operands[place].dtype for place in _vectors(spec).values()])


def room(shared: SharedMemory, spec: KernelSpec, rows: int, *, vectors: bool) -> None:
    """Adds the ranges of a norm of `rows` rows: their values, and with `vectors` its weight and bias."""
    shared.add("norm_values", "float2", rows, VALUE_BYTES)
    for role, place in _vectors(spec).items() if vectors else ():
        operand = spec.operands[place]
        padded = -(-linear_body(spec).k // 8) * 8
        shared.add(f"shared_{role}", STORAGE_TYPES[operand.dtype], padded, ITEMSIZE[operand.dtype])


def definition(spec: KernelSpec, *, in_pieces: bool) -> str:
    """The struct: with `in_pieces` for qm_normed_x, which rounds, else for qc_normed_step."""
    body, stage, vectors = linear_body(spec), _stage(spec), _vectors(spec)
    assert body.norm is not None
    kinds = {role: pointer_type(spec.operands[place]) for role, place in vectors.items()}
    members = [f"{kind} {role};" for role, kind in kinds.items()]
    begin = [
        f"qc_join_parts<ROWS, THREADS, {body.k}, {str(body.norm.kind == 'layer').lower()}>(",
        f"    parts + first * parts_row, parts_row, live, {float_literal(body.norm.eps, 'f32')}, values);",
    ]
    if in_pieces:
        members += [f"{kind.removeprefix('const ')} kept_{role};" for role, kind in kinds.items()]
        begin += [f"qc_keep_vector<{body.k}, THREADS>({role}, kept_{role});" for role in vectors]
    lines = [
        f"struct qk_{spec.name}_norm {{  // {stage.form.note}; the statistics of the rows are given",
        *indent(members),
        "    const float* parts;",
        "    int64_t parts_row;",
        "    float2* values;  // of the block's rows: mean and scale",
        "    template <int ROWS, int THREADS> QC_DEVICE void begin(int64_t first, int live) const {",
        *indent(begin, 2),
        "    }",
        *indent(_pieces(stage, vectors) if in_pieces else _elements(spec, stage, vectors)),
        "};",
    ]
    return block(lines)


def declaration(spec: KernelSpec, *, in_pieces: bool) -> str:
    """The statement that declares `norm`, in the kernel."""
    vectors, given = _vectors(spec), spec.operands[_stage(spec).places[STATISTICS]]
    members = [identifier(spec.operands[place].name) for place in vectors.values()]
    members += [f"shared_{role}" for role in vectors] * in_pieces
    members += [identifier(given.name), c_dim(given.strides[0]), "norm_values"]
    return f"const qk_{spec.name}_norm norm = {{{', '.join(members)}}};"


def note(spec: KernelSpec) -> str:
    """For a comment."""
    return f"after a norm of the rows of x, by statistics that are given: {_stage(spec).form.note}"


_ARRAYS = {"weight": "weights", "bias": "biases"}
"""The arrays of eight elements that a piece of x meets."""


def _pieces(stage: Stage, vectors: dict[str, int]) -> list[str]:
    """`read` and `apply`. What a norm does not have is zero, and nothing reads it."""
    lines = [f"qc_read_eight(kept_{role} + k, {array});" for role, array in _ARRAYS.items() if role in vectors]
    unread = [f"{array}[i] = 0.0f" for role, array in _ARRAYS.items() if role not in vectors]
    if unread:
        lines += ["#pragma unroll", f"for (int i = 0; i < 8; i++) {', '.join(unread)};"]
    names = {"x": "x", "center": "of.x", "scale": "of.y", "weight": "weight", "bias": "bias"}
    return [
        "QC_DEVICE void read(int k, float (&weights)[8], float (&biases)[8]) const {",
        *indent(lines),
        "}",
        "QC_DEVICE float apply(float2 of, float x, float weight, float bias) const {",
        f"    return {expression(stage.form.result, {**stage.form.literals(), **names}, SCALAR_FORM)};",
        "}",
    ]


def _elements(spec: KernelSpec, stage: Stage, vectors: dict[str, int]) -> list[str]:
    names = {"x": "x", "center": "of.x", "scale": "of.y", **{role: f"qc_load({role} + k)" for role in vectors}}
    made = expression(stage.form.result, {**stage.form.literals(), **names}, SCALAR_FORM)
    dtype = spec.operands[0].dtype
    return [
        "QC_DEVICE float at(int row, int64_t k, float x) const {",
        "    const float2 of = values[row];",
        f"    return {made if dtype == 'f32' else f'qc_round_{dtype}({made})'};",
        "}",
    ]


def _stage(spec: KernelSpec) -> Stage:
    (stage,) = stages_of(spec)
    return stage


def _vectors(spec: KernelSpec) -> dict[str, int]:
    """The places of the weight and the bias."""
    return {role: place for role, place in _stage(spec).places.items() if role != STATISTICS}
