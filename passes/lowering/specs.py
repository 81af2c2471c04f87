"""From the one op of an `rt.kernel` and its operands to a `KernelSpec`: the translation inside emit-kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from xdsl.dialects import arith
from xdsl.dialects.builtin import StringAttr
from xdsl.dialects.linalg.attrs import IteratorType
from xdsl.dialects.linalg.ops import FillOp, GenericOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.ir.affine import AffineBinaryOpExpr, AffineBinaryOpKind, AffineConstantExpr, AffineDimExpr, AffineExpr

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.types import shape_of
from qcompiler.passes.lowering.drafts import M_CLASS
from qcompiler.passes.lowering.scalar_body import constant_text, program_of
from qcompiler.passes.views.windows import windows_of
from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import KernelBody, KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.argmax import ArgmaxKernel
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.linear import LinearKernel, Window
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.kinds.norm import NormKernel
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.kinds.recurrent import RecurrentKernel
from qcompiler.plan.kinds.scan import ScanKernel
from qcompiler.plan.kinds.scatter import ScatterKernel
from qcompiler.plan.kinds.softmax import SoftmaxKernel

Operands = Sequence[Operand]


def spec_of(name: str, symbols: tuple[str, ...], operands: Operands, block: Block, serves: str) -> KernelSpec:
    """The spec of a kernel with the region `block`; KernelSelectionError names an op without a template."""
    compute = [op for op in block.ops if type(op) in BODIES]
    if len(compute) != 1:
        names = ", ".join(op.name for op in block.ops)
        raise KernelSelectionError(f"kernel '{name}' must hold exactly one op that has a template, it holds: {names}")
    body = BODIES[type(compute[0])](compute[0], operands, serves)
    return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body, serves=serves)


def _named(operands: Operands, name: str) -> Operand:
    return next(operand for operand in operands if operand.name == name)


def _linear(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.LinearOp)
    x, w, out = (_named(operands, name) for name in ("x", "w", "out"))
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
    )


def _quantize_rows(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.QuantizeRowsOp)
    x = _named(operands, "x")
    kind = op.kind.data
    return QuantizeRowsKernel(rows=x.shape[0], cols=int(x.shape[1]), kind=kind, value=op.value.value.data)  # type: ignore[arg-type]


def _window(op: qc.LinearOp, x: Operand) -> Window | None:
    """How the operand x is read, where it is an image whose windows are the rows."""
    windows = windows_of(op.x)
    if windows is None:
        return None
    batch, height, width, channels = x.shape
    rows, columns = shape_of(windows.result.type)[1:3]
    kernel, strides, dilation = (numbers(p) for p in (windows.kernel, windows.strides, windows.dilation))
    return Window(
        image=(batch, height, width, int(channels)),
        size=(rows, columns),
        kernel=(kernel[0], kernel[1]),
        strides=(strides[0], strides[1]),
        padding=numbers(windows.padding)[:2],  # type: ignore[arg-type]
        dilation=(dilation[0], dilation[1]),
    )


def _grouped_linear(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.GroupedLinearOp)
    x, w = _named(operands, "x"), _named(operands, "w")
    experts = op.experts.value.data
    return GroupedLinearKernel(
        rows=x.shape[0],
        repeat=op.repeat.value.data,
        experts=experts,
        n=int(w.shape[0]) // experts,
        k=int(w.shape[1]),
    )


def _recurrent(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.RecurrentOp)
    x, w = _named(operands, "x"), _named(operands, "w")
    return RecurrentKernel(
        kind=op.kind.data,  # type: ignore[arg-type]
        steps=x.shape[0],
        batch=x.shape[1],
        hidden=op.hidden,
        width=int(w.shape[1]),
        reverse=op.reverse is not None,
        projects=op.projection is not None,
        has_bias=op.bias is not None,
    )


def _batch_matmul(op: Operation, operands: Operands, serves: str) -> KernelBody:
    a, out = _named(operands, "a"), _named(operands, "out")
    return BatchMatmulKernel(batch=out.shape[:-2], m=out.shape[-2], n=out.shape[-1], k=a.shape[-1])


def _attention(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.AttentionOp)
    q, k, v = (_named(operands, name) for name in "qkv")
    masks = [operand.dtype for operand in operands if operand.name == "mask"]
    return AttentionKernel(
        batch=q.shape[0],
        heads=int(q.shape[1]),
        kv_heads=int(k.shape[1]),
        q_len=q.shape[2],
        kv_len=k.shape[2],
        head_dim=int(q.shape[3]),
        value_dim=int(v.shape[3]),
        scale=op.scale.value.data,
        causal=op.causal is not None,
        mask="none" if not masks else "bool" if masks[0] == "i1" else "float",
        window=op.keys_back,
        softcap=op.cap,
        last=op.last is not None,
    )


def _norm(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.LayerNormOp | qc.RmsNormOp)
    x = _named(operands, "x")
    return NormKernel(
        kind="layer" if isinstance(op, qc.LayerNormOp) else "rms",
        rows=x.shape[0],
        cols=int(x.shape[1]),
        eps=op.eps.value.data,
        has_weight=op.weight is not None,
        has_bias=isinstance(op, qc.LayerNormOp) and op.bias is not None,
    )


def _softmax(op: Operation, operands: Operands, serves: str) -> KernelBody:
    x = _named(operands, "x")
    return SoftmaxKernel(rows=x.shape[0], cols=x.shape[1])


def _embedding(op: Operation, operands: Operands, serves: str) -> KernelBody:
    ids, table = _named(operands, "ids"), _named(operands, "table")
    return EmbeddingKernel(count=ids.shape[0], rows=int(table.shape[0]), cols=int(table.shape[1]))


def _gather(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.GatherOp)
    x, out = _named(operands, "x"), _named(operands, "out")
    return GatherKernel(
        mode=op.mode.data,  # type: ignore[arg-type]
        outer=x.shape[0],
        length=x.shape[1],
        count=out.shape[1],
        inner=x.shape[2],
    )


def _index_update(op: Operation, operands: Operands, serves: str) -> KernelBody:
    x, src = _named(operands, "x"), _named(operands, "src")
    return IndexUpdateKernel(outer=x.shape[0], length=x.shape[1], count=src.shape[1], inner=x.shape[2])


def _cumsum(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.CumsumOp)
    x = _named(operands, "x")
    return ScanKernel(outer=x.shape[0], length=x.shape[1], inner=x.shape[2], fold=op.fold)  # type: ignore[arg-type]


def _scatter(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.ScatterOp)
    out, src = _named(operands, "out"), _named(operands, "src")
    return ScatterKernel(
        outer=out.shape[0],
        length=out.shape[1],
        count=src.shape[1],
        inner=out.shape[2],
        fold=op.reduce.data,  # type: ignore[arg-type]
    )


def _order(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, qc.SortOp | qc.TopkOp)
    x, values = _named(operands, "x"), _named(operands, "values")
    descending = isinstance(op, qc.TopkOp) or bool(op.descending.value.data)
    outer, length, inner = x.shape
    return OrderKernel(outer=outer, length=length, count=values.shape[1], inner=inner, descending=descending)


def _argmax(op: Operation, operands: Operands, serves: str) -> KernelBody:
    x = _named(operands, "x")
    return ArgmaxKernel(outer=x.shape[0], length=x.shape[1], inner=x.shape[2])


# --- loops -----------------------------------------------------------------------------------------------------------


def _loop(op: Operation, operands: Operands, serves: str) -> KernelBody:
    assert isinstance(op, GenericOp)
    kinds = [kind.data for kind in op.iterator_types]
    maps = [attribute.data for attribute in op.indexing_maps]
    # Parallel iterators first, so that a template meets one order only.
    order = sorted(range(len(kinds)), key=lambda i: kinds[i] != IteratorType.PARALLEL)
    accesses = [_access(m.results, operand, order) for m, operand in zip(maps, operands, strict=True)]
    extents = _extents([m.results for m in maps], operands, len(kinds), serves)
    body = program_of(op.body.block, serves)
    if order != list(range(len(order))):
        position = {old: new for new, old in enumerate(order)}
        body = _with_axes(body, position)
    return LoopKernel(
        extents=tuple(extents[i] for i in order),
        iterators=tuple("parallel" if kinds[i] == IteratorType.PARALLEL else "reduction" for i in order),
        accesses=tuple(accesses),
        body=body,
        init=tuple(text for value in op.outputs if (text := _initial(value)) is not None),
    )


def _with_axes(body: ScalarProgram, position: dict[int, int]) -> ScalarProgram:
    ops = tuple(op if op.axis is None else msgspec.structs.replace(op, axis=position[op.axis]) for op in body.ops)
    return msgspec.structs.replace(body, ops=ops)


def _initial(value: SSAValue) -> str | None:
    """The constant an output starts from, or None if it is not filled."""
    fill = value.owner
    if not isinstance(fill, FillOp):
        return None
    constant = fill.inputs[0].owner
    assert isinstance(constant, arith.ConstantOp)
    return constant_text(constant.value)


def _access(results: Sequence[AffineExpr], operand: Operand, order: Sequence[int]) -> AffineAccess:
    """Element offset of an operand over the loop nest: its map composed with its strides."""
    offset = Expr.constant(0)
    coefficients = [Expr.constant(0)] * len(order)
    for expression, stride in zip(results, operand.strides, strict=True):
        constant, by_dim = _linear_form(expression)
        offset = offset + dim(stride) * constant
        for axis, factor in by_dim.items():
            coefficients[axis] = coefficients[axis] + dim(stride) * factor
    return AffineAccess(offset=offset.to_dim(), coefficients=tuple(coefficients[i].to_dim() for i in order))


def _linear_form(expression: AffineExpr) -> tuple[int, dict[int, int]]:
    """An affine expression as (constant, factor of each dim)."""
    if isinstance(expression, AffineConstantExpr):
        return expression.value, {}
    if isinstance(expression, AffineDimExpr):
        return 0, {expression.position: 1}
    if isinstance(expression, AffineBinaryOpExpr):
        (a, left), (b, right) = _linear_form(expression.lhs), _linear_form(expression.rhs)
        if expression.kind == AffineBinaryOpKind.Add:
            return a + b, {axis: left.get(axis, 0) + right.get(axis, 0) for axis in {*left, *right}}
        if expression.kind == AffineBinaryOpKind.Mul and not (left and right):
            factor, form, constant = (b, left, a) if not right else (a, right, b)
            return constant * factor, {axis: value * factor for axis, value in form.items()}
    raise KernelSelectionError(f"the indexing map result {expression} is not affine with constant factors")


def _extents(maps: Sequence[Sequence[AffineExpr]], operands: Operands, rank: int, serves: str) -> list[Dim]:
    """The extent of each loop, from an operand that it indexes alone; output operands are asked first."""
    found: dict[int, Dim] = {}
    for results, operand in reversed(list(zip(maps, operands, strict=True))):
        for expression, size in zip(results, operand.shape, strict=True):
            if isinstance(expression, AffineDimExpr):
                found.setdefault(expression.position, size)
    missing = [axis for axis in range(rank) if axis not in found]
    if missing:
        raise KernelSelectionError(
            f"loop {missing[0]} of the linalg.generic at '{serves}' has no operand that sizes it"
        )
    return [found[axis] for axis in range(rank)]


BODIES: dict[type[Operation], Callable[[Operation, Operands, str], KernelBody]] = {
    qc.LinearOp: _linear,
    qc.GroupedLinearOp: _grouped_linear,
    qc.QuantizeRowsOp: _quantize_rows,
    qc.RecurrentOp: _recurrent,
    qc.BatchMatmulOp: _batch_matmul,
    qc.AttentionOp: _attention,
    qc.LayerNormOp: _norm,
    qc.RmsNormOp: _norm,
    qc.SoftmaxOp: _softmax,
    qc.EmbeddingOp: _embedding,
    qc.GatherOp: _gather,
    qc.IndexUpdateOp: _index_update,
    qc.CumsumOp: _cumsum,
    qc.ScatterOp: _scatter,
    qc.SortOp: _order,
    qc.TopkOp: _order,
    qc.ArgmaxOp: _argmax,
    GenericOp: _loop,
}
