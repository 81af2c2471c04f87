"""qc.linear: a kernel for each class of rows, chosen at run time among the cases that select-kernels wrote."""

from __future__ import annotations

from xdsl.builder import Builder
from xdsl.dialects.builtin import ArrayAttr, StringAttr
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import path_of
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.qc_prologue import prologue_region
from qcompiler.ir.types import QTensorType, shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda import linear as cuda
from qcompiler.kernels.cuda.linear_statistics import reserved as reserved_bytes
from qcompiler.kernels.select import Case, LinearQuery, choose_linear
from qcompiler.passes.devices.engine_report import engine_weight, report_engines
from qcompiler.passes.devices.extents import check_counted
from qcompiler.passes.lowering import views
from qcompiler.passes.lowering.drafts import Draft, ValueMemory, matrix_of, unit_last, unit_vector_of
from qcompiler.passes.lowering.rule import Lowering, Operands, Ranges, is_stored, named
from qcompiler.passes.lowering.scalar_body import program_of
from qcompiler.passes.pack_weights import WANTED_LAYOUT
from qcompiler.passes.views.im2col import windows_of
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import Operand
from qcompiler.plan.kinds.linear import RESIDUAL, STATISTICS, LinearKernel, RowCodes, RowNorm, Window
from qcompiler.plan.row_statistics import Kind

CASES = "qc.cases"
M_CLASS = "qc.m_class"


def select(op: qc.LinearOp, ranges: Ranges, context: QCContext) -> None:
    """Sets, as attributes, the cases that cover the range of M, and the layout of a constant weight."""
    check_counted(op, op.w, ("rows", "columns"), context)
    n, k = shape_of(op.w.type)
    query = LinearQuery(
        m=product(shape_of(op.x.type)[:-1]).bounds(ranges),
        n=int(n),
        k=int(k),
        x_dtype=tensor_dtype(op.x.type),
        out_dtype=tensor_dtype(op.result.type),
        format=op.w.type.format.ref if isinstance(op.w.type, QTensorType) else None,
        constant_weight=is_stored(op.w, context),
        kind=context.target.kind,
        isas=context.target.isas,
        codes=op.multiplies_codes,
        pairs=op.combines_pairs,
    )
    choice = choose_linear(query)
    op.attributes[CASES] = ArrayAttr([StringAttr(_case_text(case)) for case in choice.cases])
    if choice.layout is not None:
        op.attributes[WANTED_LAYOUT] = StringAttr(choice.layout)
    chosen = ", ".join(f"{c.m_class}" + ("" if c.max is None else f" (M <= {c.max})") for c in choice.cases)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.rejected)
    what = ("int8 linear" if op.multiplies_codes else "linear") + " of pairs" * op.combines_pairs
    context.report.add("select-kernels", path_of(op), f"{what} {chosen}", reasons)
    if context.target.kind == "cuda" and not op.multiplies_codes:
        weight, windows = engine_weight(op.w.type, in_tiles=query.constant_weight), windows_of(op.x) is not None
        vectors = [tensor_dtype(value.type) for norm in given_norms(op) for value in norm.operands[1:-1]]
        reserved = reserved_bytes(int(k), vectors) if given_norms(op) else 0
        facts = {
            f"M class {case.m_class}": cuda.facts_of(
                query.x_dtype, weight, case.m_class, windows=windows, reserved=reserved
            )
            for case in choice.cases
        }
        report_engines(op, context, cuda.ENGINES, facts)


def given_norms(op: qc.LinearOp) -> list[qc.RmsNormOp | qc.LayerNormOp]:
    """The norms of its prologue whose statistics are given: one at most."""
    return [norm for norm in op.norms if norm.statistics is not None]


def _case_text(case: Case) -> str:
    return f"{'' if case.max is None else case.max}:{case.m_class}"


def cases_of(op: qc.LinearOp) -> list[tuple[int | None, str]]:
    """The cases set by select-kernels: (largest M, row class), in ascending order. The last one has no largest M."""
    attribute = op.attributes.get(CASES)
    if not isinstance(attribute, ArrayAttr):
        raise KernelSelectionError(f"qc.linear at '{path_of(op)}' has no kernel; run select-kernels before lower-to-rt")
    cases: list[tuple[int | None, str]] = []
    for each in attribute:
        assert isinstance(each, StringAttr)
        limit, _, m_class = each.data.partition(":")
        cases.append((int(limit) if limit else None, m_class))
    return cases


def draft(op: qc.LinearOp, memory: ValueMemory) -> Draft:
    weight = memory.view(op.w)
    kind = ("int_linear" if op.multiplies_codes else "linear") + "_pairs" * op.combines_pairs
    kind = "added_" * (op.residual_norm is not None) + "normed_" * (op.norm is not None) + kind
    stem = f"{kind}_{weight.format.name if weight.format else weight.dtype}_{weight.shape[0]}x{weight.shape[1]}"
    out_draft = Draft(stem, path_of(op))
    out_shape = shape_of(op.result.type)
    windows = windows_of(op.x)
    if windows is None:
        x = out_draft.add("x", "r", matrix_of(op.x, op, memory))
    else:
        x = out_draft.add("x", "r", unit_last(windows.x, op, memory))
    w = out_draft.add("w", "r", weight if weight.layout else unit_last(op.w, op, memory))
    bias = out_draft.add("bias", "r", unit_vector_of(op.bias, op, memory)) if op.bias is not None else None
    extras = []
    for index, extra in enumerate(op.extras):
        view = memory.view(extra)
        matrix = views.broadcast_as_matrix(view, out_shape)
        if matrix is None:
            matrix = views.broadcast_as_matrix(memory.contiguous_copy(views.spread(view, out_shape), op), out_shape)
        assert matrix is not None
        extras.append(out_draft.add(f"extra{index}", "r", matrix))
    affine = []
    for name, value in zip((name for norm in op.norms for name in _norm(norm).names), op.affine, strict=True):
        view = (matrix_of if name in (RESIDUAL, STATISTICS) else unit_vector_of)(value, op, memory)
        affine.append(out_draft.add(name, "r", view))
    for value in op.beside:
        rows = views.as_matrix(memory.result(value, shape_of(value.type)))
        assert rows is not None
        out_draft.add({"norm": "rows", "codes": "kept_codes", None: "parts"}[op.keeps], "w", rows)
    out = views.as_matrix(memory.result(op.result, out_shape))
    assert out is not None
    out_draft.add("out", "w", out)
    epilogue = op.epilogue.clone() if op.epilogue.blocks else Region()
    if windows is not None:
        x = _rows_of_windows(out_draft, windows, x)
    prologue = None
    if op.prologue.blocks:
        prologue = prologue_region(op.norms, op.quantised, x, affine, keeps=op.keeps)
    made = qc.LinearOp(
        x, w, bias, tensor(out.shape, out.dtype), extras, epilogue, pairs=op.combines_pairs, affine=affine,
        prologue=prologue, statistics=statistics_of(op),
    )  # fmt: skip
    out_draft.body.add_op(made)
    out_draft.written = [*made.beside, made.result]
    return out_draft


def _rows_of_windows(out_draft: Draft, windows: qc.WindowsOp, image: SSAValue) -> SSAValue:
    """The windows of the operand `image` as the (M, K) matrix that the linear reads. The kernel reads them in place."""
    builder = Builder(InsertPoint.at_end(out_draft.body))
    made = windows.clone()
    made.operands[0] = image
    rows = builder.insert(made).results[0]
    return build.collapse(builder, rows, [(0, 1, 2), (3,)])


def body(op: qc.LinearOp, operands: Operands, serves: str) -> LinearKernel:
    x, w, out = (named(operands, name) for name in ("x", "w", "out"))
    m_class = op.attributes.get(M_CLASS)
    if not isinstance(m_class, StringAttr):
        raise KernelSelectionError(f"the linear at '{serves}' has no row class; run select-kernels before lower-to-rt")
    return LinearKernel(
        m=out.shape[0],
        n=int(w.shape[0]),
        k=int(w.shape[1]),
        m_class=m_class.data,  # type: ignore[arg-type]
        has_bias=op.bias is not None,
        epilogue=program_of(op.epilogue.block, serves) if op.epilogue.blocks else None,
        window=_window(op, x),
        codes=op.multiplies_codes,
        pairs=op.combines_pairs,
        norm=_norm(op.norm, op) if op.norm is not None else None,
        added=_norm(op.residual_norm, op) if op.residual_norm is not None else None,
        statistics=statistics_of(op),
        rows=_codes(op),
    )


def _codes(op: qc.LinearOp) -> RowCodes | None:
    """The record of the rows of int8 that a linear makes."""
    made = op.quantised
    if made is None:
        return None
    return RowCodes(kind=made.kind.data, value=made.value.value.data, keeps=op.keeps == "codes")  # type: ignore[arg-type]


def statistics_of(op: qc.LinearOp) -> Kind | None:
    """The kind of statistics that it gives beside its rows."""
    if op.statistics is None:
        return None
    return "layer" if op.statistics.data == "layer" else "rms"


def _norm(norm: qc.RmsNormOp | qc.LayerNormOp, linear: qc.LinearOp | None = None) -> RowNorm:
    """The record of a norm in the prologue of a linear. The linear may keep the rows of its first one."""
    return RowNorm(
        kind="rms" if isinstance(norm, qc.RmsNormOp) else "layer",
        eps=norm.eps.value.data,
        has_weight=norm.weight is not None,
        has_bias=isinstance(norm, qc.LayerNormOp) and norm.bias is not None,
        keeps=linear is not None and linear.keeps == "norm" and norm is linear.norms[0],
        has_residual=norm.residual is not None,
        given=norm.statistics is not None,
    )


def _window(op: qc.LinearOp, x: Operand) -> Window | None:
    """The `Window` of a linear that reads its rows from an image; None for any other linear."""
    windows = windows_of(op.x)
    if windows is None:
        return None
    batch, height, width, _ = x.shape
    rows, columns = shape_of(windows.result.type)[1:3]
    kernel, strides, dilation = (numbers(p) for p in (windows.kernel, windows.strides, windows.dilation))
    return Window(
        image=(batch, height, width, windows.depth),
        size=(rows, columns),
        kernel=(kernel[0], kernel[1]),
        strides=(strides[0], strides[1]),
        padding=numbers(windows.padding)[:2],  # type: ignore[arg-type]
        dilation=(dilation[0], dilation[1]),
    )


def with_m_class(original: Draft, m_class: str) -> Draft:
    """The draft for one row class, which its stem and its op name."""
    copy = Draft(f"{original.stem}_m{m_class.replace('-', '_')}", original.path)
    copy.operands, copy.views = original.operands, original.views
    copy.body = Block(arg_types=[argument.type for argument in original.body.args])
    mapping: dict[SSAValue, SSAValue] = dict(zip(original.body.args, copy.body.args, strict=True))
    for op in original.body.ops:
        clone = op.clone(mapping)
        clone.attributes[M_CLASS] = StringAttr(m_class)
        copy.body.add_op(clone)
        mapping |= dict(zip(op.results, clone.results, strict=True))
    copy.written = [mapping[value] for value in original.written]
    return copy


LOWERING = Lowering(LinearKernel, (qc.LinearOp,), draft, body, only_floats=True, select=select)
