"""One compute op as a kernel draft: normalised operands, the op rebuilt on block arguments, the views to launch it on.

Each rule takes an op whose inputs already have places (strided views), asks the `Places` for whatever the kernel
requires (a matrix, a contiguous copy), allocates the result, and returns a `Draft`.  Adding an op to the CPU road is
one rule here and one in `specs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xdsl.builder import Builder
from xdsl.dialects.builtin import AffineMapAttr, StringAttr, TensorType
from xdsl.dialects.linalg.attrs import IteratorType, IteratorTypeAttr
from xdsl.dialects.linalg.ops import FillOp, GenericOp, YieldOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineMap
from xdsl.rewriter import InsertPoint

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import build, qc
from qcompiler.ir.module import path_of
from qcompiler.ir.types import QTensorType, shape_of, tensor
from qcompiler.passes.lowering import views
from qcompiler.passes.views.windows import windows_of
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import Access, Operand
from qcompiler.plan.plan import View

M_CLASS = "qc.m_class"


class Places(Protocol):
    """What a rule may ask of the lowering: where values are, copies, and room for results."""

    def view(self, value: SSAValue) -> View: ...
    def contiguous_copy(self, view: View, op: Operation) -> View: ...
    def result(self, value: SSAValue, shape: Sequence[Dim]) -> View: ...
    def updated(self, op: Operation, base: SSAValue) -> View: ...


@dataclass
class Draft:
    """A kernel before it has a name: `body` holds the one op on block arguments that match `operands`."""

    stem: str
    path: str
    operands: list[Operand] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    body: Block = field(default_factory=Block)

    def add(self, name: str, access: Access, view: View) -> SSAValue:
        """One more operand; returns the block argument that stands for it."""
        self.operands.append(
            Operand(
                name=name,
                dtype=view.dtype,
                access=access,
                shape=view.shape,
                strides=view.strides,
                format=view.format,
                layout=view.layout,
            )
        )
        self.views.append(view)
        return self.body.insert_arg(operand_type(self.operands[-1]), len(self.body.args))


def operand_type(operand: Operand) -> Attribute:
    """The tensor type of a kernel operand."""
    if operand.format is None:
        return tensor(operand.shape, operand.dtype)
    rows, cols = operand.shape
    return QTensorType.of((int(rows), int(cols)), operand.dtype, operand.format, operand.layout or "canonical")


def draft(op: Operation, places: Places) -> Draft:
    """The kernel draft of one compute op; KernelSelectionError names an op without a rule."""
    rule = RULES.get(type(op))
    if rule is None:
        raise KernelSelectionError(f"lower-to-rt has no rule for {op.name} at '{path_of(op)}'")
    return rule(op, places)


# --- helpers ---------------------------------------------------------------------------------------------------------


def _matrix(value: SSAValue, op: Operation, places: Places) -> View:
    """The value as (rows, cols), copied if its strides do not allow that."""
    view = places.view(value)
    matrix = views.as_matrix(view)
    if matrix is None:
        matrix = views.as_matrix(places.contiguous_copy(view, op))
    assert matrix is not None
    return matrix


def _vector(value: SSAValue, op: Operation, places: Places) -> View:
    view = places.view(value)
    vector = views.as_vector(view) or views.as_vector(places.contiguous_copy(view, op))
    assert vector is not None
    return vector


def _unit_last(value: SSAValue, op: Operation, places: Places) -> View:
    """The value with unit stride along its last dim, copied if need be."""
    view = places.view(value)
    return view if view.strides[-1] == 1 or view.shape[-1] == 1 else places.contiguous_copy(view, op)


def _collapsed(view: View, groups: Sequence[Sequence[int]], op: Operation, places: Places) -> View:
    result = views.collapse(view, groups) or views.collapse(places.contiguous_copy(view, op), groups)
    assert result is not None
    return result


def _axis_groups(rank: int, axis: int) -> list[Sequence[int]]:
    """(outer, axis, inner) as groups of dims."""
    return [tuple(range(axis)), (axis,), tuple(range(axis + 1, rank))]


def _along_groups(x: View, index: View, axis: int) -> list[Sequence[int]]:
    """Groups that need no copy if there are such: each element is picked for itself, so the dims beside the axis may
    be put in front of it or behind it as both operands lie. An index that repeats over heads is read where it is."""
    others = [n for n in range(len(x.shape)) if n != axis]
    usual = _axis_groups(len(x.shape), axis)
    candidates: list[list[Sequence[int]]] = [usual]
    candidates += [[tuple(others[:n]), (axis,), tuple(others[n:])] for n in range(len(others), -1, -1)]
    for groups in candidates:
        if views.collapse(x, groups) is not None and views.collapse(index, groups) is not None:
            return groups
    return usual


# --- rules -----------------------------------------------------------------------------------------------------------


def _linear(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.LinearOp)
    weight = places.view(op.w)
    kind = "int_linear" if op.multiplies_codes else "linear"
    stem = f"{kind}_{weight.format.name if weight.format else weight.dtype}_{weight.shape[0]}x{weight.shape[1]}"
    out_draft = Draft(stem, path_of(op))
    out_shape = shape_of(op.result.type)
    windows = windows_of(op.x)
    if windows is None:
        x = out_draft.add("x", "r", _matrix(op.x, op, places))
    else:
        x = out_draft.add("x", "r", _unit_last(windows.x, op, places))
    w = out_draft.add("w", "r", weight if weight.layout else _unit_last(op.w, op, places))
    bias = out_draft.add("bias", "r", _vector(op.bias, op, places)) if op.bias is not None else None
    extras = []
    for index, extra in enumerate(op.extras):
        view = places.view(extra)
        matrix = views.broadcast_as_matrix(view, out_shape)
        if matrix is None:
            matrix = views.broadcast_as_matrix(places.contiguous_copy(views.spread(view, out_shape), op), out_shape)
        assert matrix is not None
        extras.append(out_draft.add(f"extra{index}", "r", matrix))
    out = views.as_matrix(places.result(op.result, out_shape))
    assert out is not None
    out_draft.add("out", "w", out)
    epilogue = op.epilogue.clone() if op.epilogue.blocks else Region()
    if windows is not None:
        x = _rows_of_windows(out_draft, windows, x)
    out_draft.body.add_op(qc.LinearOp(x, w, bias, tensor(out.shape, out.dtype), extras, epilogue))
    return out_draft


def _rows_of_windows(out_draft: Draft, windows: qc.WindowsOp, image: SSAValue) -> SSAValue:
    """The windows of the kernel's operand as the (M, K) matrix that its linear reads: no copy, the kernel makes it."""
    builder = Builder(InsertPoint.at_end(out_draft.body))
    made = windows.clone()
    made.operands[0] = image
    rows = builder.insert(made).results[0]
    return build.collapse(builder, rows, [(0, 1, 2), (3,)])


def _quantize_rows(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.QuantizeRowsOp)
    result = Draft(f"quantize_rows_{op.kind.data}", path_of(op))
    x = result.add("x", "r", _matrix(op.x, op, places))
    columns = None
    if op.columns is not None:
        flags = result.add("columns", "r", _vector(op.columns, op, places))
        columns = build.reshape(Builder(InsertPoint.at_end(result.body)), flags, (1, shape_of(flags.type)[0]))
    out = views.as_matrix(places.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    type_, value = tensor(out.shape, out.dtype), op.value.value.data
    result.body.add_op(qc.QuantizeRowsOp(x, columns, type_, kind=op.kind.data, value=value))
    return result


def _grouped_linear(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.GroupedLinearOp)
    weight, experts = places.view(op.w), op.experts.value.data
    kind = weight.format.name if weight.format else weight.dtype
    result = Draft(f"grouped_linear_{kind}_{experts}x{int(weight.shape[0]) // experts}x{weight.shape[1]}", path_of(op))
    x = result.add("x", "r", _matrix(op.x, op, places))
    w = result.add("w", "r", weight if weight.layout else _unit_last(op.w, op, places))
    index = result.add("index", "r", _vector(op.index, op, places))
    out = views.as_matrix(places.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    type_, repeat = tensor(out.shape, out.dtype), op.repeat.value.data
    result.body.add_op(qc.GroupedLinearOp(x, w, index, type_, experts=experts, repeat=repeat))
    return result


def _recurrent(op: Operation, places: Places) -> Draft:
    """All operands are read in place where rows lie side by side, so that batch-first layers need no copy."""
    assert isinstance(op, qc.RecurrentOp)
    weight = places.view(op.w)
    kind = weight.format.name if weight.format else weight.dtype
    result = Draft(f"{op.kind.data}_{kind}_{weight.shape[0]}x{weight.shape[1]}", path_of(op))

    def read(name: str, value: SSAValue | None, *, stored: bool = False) -> SSAValue | None:
        if value is None:
            return None
        view = places.view(value)
        return result.add(name, "r", view if stored and view.layout else _unit_last(value, op, places))

    x, w = read("x", op.x), read("w", op.w, stored=True)
    projection, bias = read("projection", op.projection, stored=True), read("bias", op.bias)
    start, cell_start = read("start", op.start), read("cell_start", op.cell_start)
    kinds: list[Attribute] = []
    for name, value in zip(op.result_names, op.results, strict=True):
        out = places.result(value, shape_of(value.type))
        result.add(name, "w", out)
        kinds.append(tensor(out.shape, out.dtype))
    assert x is not None and w is not None and start is not None
    result.body.add_op(op.rebuilt(x, w, start, kinds, projection=projection, bias=bias, cell_start=cell_start))
    return result


def _batch_matmul(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.BatchMatmulOp)
    result = Draft("batch_matmul", path_of(op))
    a = result.add("a", "r", places.view(op.a))
    b = result.add("b", "r", places.view(op.b))
    out = places.result(op.result, shape_of(op.result.type))
    result.add("out", "w", out)
    result.body.add_op(qc.BatchMatmulOp(a, b, tensor(out.shape, out.dtype)))
    return result


def _attention(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.AttentionOp)
    result = Draft("attention", path_of(op))
    q, k, v = (result.add(name, "r", _unit_last(x, op, places)) for name, x in (("q", op.q), ("k", op.k), ("v", op.v)))
    mask = None
    if op.mask is not None:
        view, full = places.view(op.mask), (*shape_of(op.q.type)[:3], shape_of(op.k.type)[2])
        mask = result.add("mask", "r", views.spread(view, full))
    last = None
    if op.last is not None:
        rows = (shape_of(op.q.type)[0], shape_of(op.q.type)[2])
        last = result.add("last", "r", views.spread(places.view(op.last), rows))
    out = places.result(op.result, shape_of(op.result.type))
    result.add("out", "w", out)
    result.body.add_op(op.rebuilt(q, k, v, mask, last, tensor(out.shape, out.dtype)))
    return result


def _norm(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.LayerNormOp | qc.RmsNormOp)
    result = Draft("layer_norm" if isinstance(op, qc.LayerNormOp) else "rms_norm", path_of(op))
    x = result.add("x", "r", _matrix(op.x, op, places))
    weight = result.add("weight", "r", _vector(op.weight, op, places)) if op.weight is not None else None
    bias = None
    if isinstance(op, qc.LayerNormOp) and op.bias is not None:
        bias = result.add("bias", "r", _vector(op.bias, op, places))
    out = views.as_matrix(places.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    type_, eps = tensor(out.shape, out.dtype), op.eps.value.data
    if isinstance(op, qc.LayerNormOp):
        result.body.add_op(qc.LayerNormOp(x, weight, bias, type_, eps=eps))
    else:
        result.body.add_op(qc.RmsNormOp(x, weight, type_, eps=eps))
    return result


def _softmax(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.SoftmaxOp)
    rank, axis = len(shape_of(op.x.type)), op.axis.value.data
    last = [i for i in range(rank) if i != axis] + [axis]
    result = Draft("softmax", path_of(op))
    source = views.transpose(places.view(op.x), last)
    matrix = views.as_matrix(source) or views.as_matrix(places.contiguous_copy(source, op))
    assert matrix is not None
    x = result.add("x", "r", matrix)
    # The result lies in memory with its axis last, so that its rows are contiguous; the value is a view of that.
    out = views.as_matrix(views.transpose(places.result(op.result, shape_of(op.result.type)), last))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.SoftmaxOp(x, tensor(out.shape, out.dtype), axis=1))
    return result


def _embedding(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.EmbeddingOp)
    result = Draft("embedding", path_of(op))
    ids = result.add("ids", "r", _vector(op.ids, op, places))
    table = places.view(op.table)
    table_argument = result.add("table", "r", table if table.layout else _unit_last(op.table, op, places))
    out = views.as_matrix(places.result(op.result, shape_of(op.result.type)))
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.EmbeddingOp(ids, table_argument, tensor(out.shape, out.dtype)))
    return result


def _gather(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.GatherOp)
    result = Draft("gather", path_of(op))
    shape, axis, along = shape_of(op.x.type), op.axis.value.data, op.mode.data == "along"
    groups = _axis_groups(len(shape), axis)
    if along:
        groups = _along_groups(places.view(op.x), places.view(op.index), axis)
    x = result.add("x", "r", _collapsed(places.view(op.x), groups, op, places))
    index = places.view(op.index)
    index = _collapsed(index, groups, op, places) if along else _vector(op.index, op, places)
    index_argument = result.add("index", "r", index)
    index_rank = 1 if along else len(shape_of(op.index.type))
    out_groups = (
        groups
        if along
        else [
            tuple(range(axis)),
            tuple(range(axis, axis + index_rank)),
            tuple(range(axis + index_rank, len(shape) - 1 + index_rank)),
        ]
    )
    out = views.collapse(places.result(op.result, shape_of(op.result.type)), out_groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.GatherOp(x, index_argument, tensor(out.shape, out.dtype), axis=1, mode=op.mode.data))
    return result


def _index_update(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.IndexUpdateOp)
    result = Draft("index_update", path_of(op))
    groups = _axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    target = views.collapse(places.updated(op, op.x), groups)
    assert target is not None
    x = result.add("x", "rw", target)
    index = result.add("index", "r", _vector(op.index, op, places))
    src = result.add("src", "r", _collapsed(places.view(op.src), groups, op, places))
    result.body.add_op(qc.IndexUpdateOp(x, index, src, tensor(target.shape, target.dtype), axis=1))
    return result


def _cumsum(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.CumsumOp)
    result = Draft("cumsum", path_of(op))
    groups = _axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    x = result.add("x", "r", _collapsed(places.view(op.x), groups, op, places))
    out = views.collapse(places.result(op.result, shape_of(op.result.type)), groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.CumsumOp(x, tensor(out.shape, out.dtype), axis=1, reduce=op.fold))
    return result


def _scatter(op: Operation, places: Places) -> Draft:
    """The result begins as x, in x's memory where that is a state, else as a copy, and the kernel writes into it."""
    assert isinstance(op, qc.ScatterOp)
    result = Draft("scatter", path_of(op))
    shape, axis = shape_of(op.x.type), op.axis.value.data
    count = shape_of(op.index.type)[axis]
    wanted = (*shape[:axis], count, *shape[axis + 1 :])
    if shape_of(op.index.type) != wanted or shape_of(op.src.type) != wanted:
        raise KernelSelectionError(
            f"qc.scatter at '{path_of(op)}' writes a part of x only (index {shape_of(op.index.type)}, x {shape}); "
            "cut x to the index's shape first and insert the result"
        )
    groups = _axis_groups(len(shape), axis)
    target = views.collapse(places.updated(op, op.x), groups)
    assert target is not None
    index = result.add("index", "r", _collapsed(places.view(op.index), groups, op, places))
    src = result.add("src", "r", _collapsed(places.view(op.src), groups, op, places))
    out = result.add("out", "rw", target)
    type_ = tensor(target.shape, target.dtype)
    result.body.add_op(qc.ScatterOp(out, index, src, type_, axis=1, reduce=op.reduce.data))
    return result


def _order(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.SortOp | qc.TopkOp)
    result = Draft("sort" if isinstance(op, qc.SortOp) else "topk", path_of(op))
    groups = _axis_groups(len(shape_of(op.x.type)), op.axis.value.data)
    x = result.add("x", "r", _collapsed(places.view(op.x), groups, op, places))
    kinds = []
    for name, value in (("values", op.values), ("indices", op.indices)):
        out = views.collapse(places.result(value, shape_of(value.type)), groups)
        assert out is not None
        result.add(name, "w", out)
        kinds.append(tensor(out.shape, out.dtype))
    if isinstance(op, qc.SortOp):
        made: Operation = qc.SortOp(x, kinds, axis=1, descending=bool(op.descending.value.data))
    else:
        made = qc.TopkOp(x, kinds, k=op.k.value.data, axis=1)
    result.body.add_op(made)
    return result


def _argmax(op: Operation, places: Places) -> Draft:
    assert isinstance(op, qc.ArgmaxOp)
    result = Draft("argmax", path_of(op))
    rank, axis = len(shape_of(op.x.type)), op.axis.value.data
    x = result.add("x", "r", _collapsed(places.view(op.x), _axis_groups(rank, axis), op, places))
    groups: list[Sequence[int]] = [tuple(range(axis)), tuple(range(axis, rank - 1))]
    out = views.collapse(places.result(op.result, shape_of(op.result.type)), groups)
    assert out is not None
    result.add("out", "w", out)
    result.body.add_op(qc.ArgmaxOp(x, tensor(out.shape, out.dtype), axis=1))
    return result


def _generic(op: Operation, places: Places) -> Draft:
    assert isinstance(op, GenericOp)
    reduces = any(kind.data == IteratorType.REDUCTION for kind in op.iterator_types)
    result = Draft("reduce" if reduces else "loop", path_of(op))
    inputs = [result.add(f"in{i}", "r", places.view(value)) for i, value in enumerate(op.inputs)]
    outputs: list[SSAValue] = []
    for index, (value, initial) in enumerate(zip(op.results, op.outputs, strict=True)):
        argument = result.add(f"out{index}", "w", places.result(value, shape_of(value.type)))
        fill = initial.owner
        if isinstance(fill, FillOp):
            constant = fill.inputs[0].owner
            assert isinstance(constant, Operation)
            scalar = constant.clone()
            result.body.add_op(scalar)
            result.body.add_op(FillOp([scalar.results[0]], [argument], [argument.type]))
            argument = result.body.last_op.results[0]  # type: ignore[union-attr]
        elif reduces and op.body.block.args[len(inputs) + index].uses:
            raise KernelSelectionError(f"the reduction at '{path_of(op)}' starts from a tensor; only a fill is lowered")
        outputs.append(argument)
    result.body.add_op(
        GenericOp(
            inputs, outputs, op.body.clone(), op.indexing_maps, op.iterator_types, [value.type for value in outputs]
        )
    )
    return result


def _fill(op: Operation, places: Places) -> Draft:
    """A constant tensor that some op reads as a value."""
    assert isinstance(op, FillOp)
    result = Draft("fill", path_of(op))
    value = op.results[0]
    out = result.add("out0", "w", places.result(value, shape_of(value.type)))
    constant = op.inputs[0].owner
    assert isinstance(constant, Operation)
    type_ = value.type
    assert isinstance(type_, TensorType)
    body = Block(arg_types=[type_.element_type])
    scalar = constant.clone()
    body.add_ops([scalar, YieldOp(scalar.results[0])])
    result.body.add_op(_parallel([], [out], body, len(shape_of(type_))))
    return result


def copy_draft(source: View, target: View, path: str) -> Draft:
    """An elementwise copy between views of one shape."""
    result = Draft("copy", path)
    read = result.add("in0", "r", source)
    write = result.add("out0", "w", target)
    element = tensor((), source.dtype).element_type
    body = Block(arg_types=[element, element])
    body.add_op(YieldOp(body.args[0]))
    result.body.add_op(_parallel([read], [write], body, len(source.shape)))
    return result


def _parallel(inputs: Sequence[SSAValue], outputs: Sequence[SSAValue], body: Block, rank: int) -> Operation:
    identity = AffineMapAttr(AffineMap.identity(rank))
    parallel = IteratorTypeAttr(IteratorType.PARALLEL)
    return GenericOp(
        inputs,
        outputs,
        Region(body),
        [identity] * (len(inputs) + len(outputs)),
        [parallel] * rank,
        [value.type for value in outputs],
    )


RULES: dict[type[Operation], Callable[[Operation, Places], Draft]] = {
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
    GenericOp: _generic,
    FillOp: _fill,
}


def with_m_class(original: Draft, m_class: str) -> Draft:
    """The same linear for one row class; its stem and its op say which."""
    copy = Draft(f"{original.stem}_m{m_class.replace('-', '_')}", original.path)
    copy.operands, copy.views = original.operands, original.views
    copy.body = Block(arg_types=[argument.type for argument in original.body.args])
    mapping: dict[SSAValue, SSAValue] = dict(zip(original.body.args, copy.body.args, strict=True))
    for op in original.body.ops:
        clone = op.clone(mapping)
        clone.attributes[M_CLASS] = StringAttr(m_class)
        copy.body.add_op(clone)
    return copy
