"""Finds values that depend on no input, and builds each once at the largest size of every symbol.

A *cone* is a value with everything it is computed from. A value may be built at its maximum only if it is
*prefix-stable*: its element at an index does not depend on the extents. Iotas, comparisons of positions and gathers
from tables are prefix-stable; a reversed range or a sum over a symbolic dim is not. Dims along which a value repeats
are built with size 1 (`repeats`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, BlockArgument, Operation, OpResult, Region, SSAValue
from xdsl.ir.affine import AffineExpr
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.effects import is_pure
from qcompiler.ir.module import path_of, set_path
from qcompiler.ir.scalar_ops import ARITH_OPS
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.ir.types import tensor as tensor_type
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import ZERO
from qcompiler.passes.loops.substitute import substitute_in_ops
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim, Range, dim

FREE = (qc.ConstOp, qc.DimOp, arith.ConstantOp, tensor.EmptyOp)
"""Ops that compute nothing at run time."""

_IN_CALLS = (qc.DequantizeOp, qc.QuantizeOp, qc.TorchCallOp)
"""Pure, but not for load time: decoding there would undo the quantisation, and torch runs in calls only."""


def _may_run_at_load(op: Operation) -> bool:
    return is_pure(op) and not isinstance(op, _IN_CALLS)


def input_independent(block: Block) -> set[Operation]:
    """The ops of a function's block that depend on no argument, no state and no decoded weight."""
    found: set[Operation] = set()
    for op in block.ops:
        if not op.results or not _may_run_at_load(op):
            continue
        reads = [op.ids] if isinstance(op, qc.EmbeddingOp) and packed_table(op) is not None else op.operands
        producers = (v.owner if isinstance(v, OpResult) else None for v in reads)
        if all(p is not None and p in found for p in producers):
            found.add(op)
    return found


def packed_table(op: qc.EmbeddingOp) -> qc.ConstOp | None:
    """The quantised table that an embedding reads, whether its decode is fused or not.

    A few of its rows may be decoded at load; that does not undo the quantisation.
    """
    table = op.table
    if isinstance(table.owner, qc.DequantizeOp):
        table = table.owner.input
    return table.owner if _is_quantised(table) and isinstance(table.owner, qc.ConstOp) else None


@dataclass(frozen=True)
class Built:
    """A value at its maximum. `repeats[i]`: the value is constant along dim i, which was built with size 1."""

    value: SSAValue
    repeats: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in shape_of(self.value.type))


class ConeBuilder:
    """Builds input-independent values in another block, each once, with all symbols at their maximum."""

    def __init__(self, block: Block, ranges: Mapping[str, Range]) -> None:
        self._block = block
        self._ranges = ranges
        self._maximum = {symbol: high for symbol, (_, high) in ranges.items()}
        self._built: dict[SSAValue, Built | None] = {}
        self._scalars: dict[SSAValue, SSAValue | None] = {}

    def build(self, value: SSAValue) -> Built | None:
        """`value` at its maximum; None if it is not prefix-stable or depends on an input."""
        if value not in self._built:
            self._built[value] = self._make(value)
        return self._built[value]

    def full(self, value: SSAValue) -> SSAValue | None:
        """`value` at its maximum with every dim at full size."""
        built = self.build(value)
        sizes = self._sizes(value)
        if built is None or sizes is None:
            return None
        if not any(built.repeats):
            return built.value
        builder = self._builder("")
        return build.broadcast_in(builder, built.value, sizes, range(len(sizes)))

    # --- sizes ---

    def _size(self, entry: Dim) -> int | None:
        """A dim at the maximum of its symbols; None if another point of their ranges makes it larger."""
        expr = dim(entry)
        at_maximum = expr.evaluate(self._maximum)
        return at_maximum if expr.bounds(self._ranges)[1] == at_maximum else None

    def _sizes(self, value: SSAValue) -> tuple[int, ...] | None:
        sizes = [self._size(d) for d in shape_of(value.type)]
        return None if None in sizes else tuple(s for s in sizes if s is not None)

    def _builder(self, path: str) -> Builder:
        return build.with_path(InsertPoint.at_end(self._block), path)

    # --- rules ---

    def _make(self, value: SSAValue) -> Built | None:
        if isinstance(value, BlockArgument):
            return None
        op = value.owner
        assert isinstance(op, Operation)
        rule = _RULES.get(type(op), ConeBuilder._static_copy)
        return rule(self, op)

    def scalar(self, value: SSAValue) -> SSAValue | None:
        """A scalar outside loop bodies; None if it depends on an extent."""
        if value in self._scalars:
            return self._scalars[value]
        op = value.owner
        made: SSAValue | None = None
        if isinstance(op, Operation) and type(op) in ARITH_OPS:
            operands = [self.scalar(v) for v in op.operands]
            if None not in operands:
                mapping = {old: new for old, new in zip(op.operands, operands, strict=True) if new is not None}
                copy = op.clone(mapping)
                self._block.add_op(copy)
                made = copy.results[0]
        self._scalars[value] = made
        return made

    def _const(self, op: Operation) -> Built | None:
        copy = op.clone()
        self._block.add_op(copy)
        return Built(copy.results[0], (False,) * len(shape_of(copy.results[0].type)))

    def _fill(self, op: Operation) -> Built | None:
        assert isinstance(op, ops.FillOp)
        item = self.scalar(op.inputs[0])
        if item is None:
            return None
        shape = shape_of(op.res[0].type)
        made = build.fill(self._builder(path_of(op)), item, [1] * len(shape), tensor_dtype(op.res[0].type))
        return Built(made, tuple(size != 1 for size in shape))

    def _generic(self, op: Operation) -> Built | None:
        assert isinstance(op, ops.GenericOp)
        if not loops.is_pointwise(op):
            return self._reduction(op)
        inputs = [(self.build(v), index) for v, index in loops.inputs_of(op)]
        extents = [self._size(e) for e in loops.loop_extents(op)]
        if any(built is None for built, _ in inputs) or None in extents:
            return None
        needed = {each.dim.value.data for each in op.body.block.ops if isinstance(each, ops.IndexOp)}
        accesses: list[tuple[SSAValue, loops.Index]] = []
        for built, index in inputs:
            assert built is not None
            moved: list[AffineExpr] = [ZERO if r else e for e, r in zip(index, built.repeats, strict=True)]
            needed |= {d for expr in moved for d in expr.used_dims()}
            accesses.append((built.value, tuple(moved)))
        sizes = [size if n in needed else 1 for n, size in enumerate(extents)]
        order = [next(iter(e.used_dims())) for e in loops.output_index(op)]
        return self._loops(op, accesses, [sizes[n] or 1 for n in range(len(sizes))], order, needed)

    def _loops(
        self,
        op: ops.GenericOp,
        accesses: list[tuple[SSAValue, loops.Index]],
        sizes: list[int],
        order: list[int],
        needed: set[int],
    ) -> Built:
        """The same nest, where loops that nothing depends on run once."""
        builder = self._builder(path_of(op))
        out = build.empty(builder, [sizes[n] for n in order], tensor_dtype(op.res[0].type))
        rank = len(sizes)
        maps = [loops.map_attr(rank, index) for _, index in accesses]
        maps.append(loops.map_attr(rank, loops.output_index(op)))
        body = Region()
        op.body.clone_into(body)
        made = ops.GenericOp([v for v, _ in accesses], [out], body, maps, [loops.PARALLEL] * rank, [out.type])
        set_path(made, path_of(op))
        self._block.add_op(made)
        shape = shape_of(op.res[0].type)
        return Built(made.res[0], tuple(n not in needed and s != 1 for n, s in zip(order, shape, strict=True)))

    def _reduction(self, op: ops.GenericOp) -> Built | None:
        """Any other nest. Every reducing loop must have a static size."""
        extents = loops.loop_extents(op)
        reducing = [e for e, it in zip(extents, op.iterator_types.data, strict=True) if it != loops.PARALLEL]
        return self._copy(op) if all(isinstance(e, int) for e in reducing) else None

    def _transpose(self, op: Operation) -> Built | None:
        assert isinstance(op, ops.TransposeOp)
        built = self.build(op.inputs[0])
        if built is None:
            return None
        order = views.permutation_of(op)
        value = build.transpose(self._builder(path_of(op)), built.value, order)
        return Built(value, tuple(built.repeats[n] for n in order))

    def _broadcast(self, op: Operation) -> Built | None:
        assert isinstance(op, ops.BroadcastOp)
        built = self.build(op.input)
        if built is None:
            return None
        sizes, repeats = iter(built.shape), iter(built.repeats)
        added = views.added_dims(op)
        shape = shape_of(op.result[0].type)
        wanted = [1 if n in added else next(sizes) for n in range(len(shape))]
        value = build.reshape(self._builder(path_of(op)), built.value, wanted)
        return Built(value, tuple(s != 1 if n in added else next(repeats) for n, s in enumerate(shape)))

    def _reshape(self, op: Operation) -> Built | None:
        """Splitting or joining dims is prefix-stable where only the first dim of each group is symbolic."""
        assert isinstance(op, views.Reshape)
        built = self.build(op.src)
        expands = isinstance(op, tensor.ExpandShapeOp)
        large = shape_of(op.result.type if expands else op.src.type)
        groups = views.groups_of(op)
        wide = [[n for n in group if large[n] != 1] for group in groups]
        if built is None or any(not isinstance(large[n], int) for group in wide for n in group[1:]):
            return None
        sizes = self._sizes(op.result)
        if sizes is None:
            return None
        if expands:
            repeats = tuple(built.repeats[g] and large[n] != 1 for g, group in enumerate(groups) for n in group)
            wanted = [1 if r else s for r, s in zip(repeats, sizes, strict=True)]
            return Built(build.reshape(self._builder(path_of(op)), built.value, wanted), repeats)
        mixed = any(len({built.repeats[n] for n in group if large[n] != 1}) > 1 for group in groups)
        source = self.full(op.src) if mixed else built.value
        assert source is not None
        kept = (False,) * len(large) if mixed else built.repeats
        repeats = tuple(any(kept[n] for n in group) for group in groups)
        wanted = [1 if r else s for r, s in zip(repeats, sizes, strict=True)]
        return Built(build.reshape(self._builder(path_of(op)), source, wanted), repeats)

    def _slice(self, op: Operation) -> Built | None:
        assert isinstance(op, tensor.ExtractSliceOp)
        built, parts, sizes = self.build(op.source), views.slice_of(op), self._sizes(op.result)
        if built is None or parts is None or sizes is None or any(not isinstance(o, int) for o in parts[0]):
            return None
        offsets = [0 if r else o for r, o in zip(built.repeats, parts[0], strict=True)]
        wanted = [1 if r else s for r, s in zip(built.repeats, sizes, strict=True)]
        steps = [1 if r else s for r, s in zip(built.repeats, parts[2], strict=True)]
        value = build.extract_slice(self._builder(path_of(op)), built.value, offsets, wanted, steps)
        return Built(value, tuple(r and s != 1 for r, s in zip(built.repeats, shape_of(op.result.type), strict=True)))

    def _embedding(self, op: Operation) -> Built | None:
        assert isinstance(op, qc.EmbeddingOp)
        ids, packed = self.build(op.ids), packed_table(op)
        if packed is not None:
            rows = self._packed(packed.result)
        else:
            table = self.build(op.table)
            rows = table.value if table is not None else None
        if ids is None or rows is None:
            return None
        out = tensor_type((*ids.shape, shape_of(op.result.type)[-1]), tensor_dtype(op.result.type))
        made = qc.EmbeddingOp(ids.value, rows, out)
        set_path(made, path_of(op))
        self._block.add_op(made)
        return Built(made.result, (*ids.repeats, False))

    def _packed(self, value: SSAValue) -> SSAValue | None:
        op = value.owner
        if not isinstance(op, qc.ConstOp):
            return None
        copy = op.clone()
        self._block.add_op(copy)
        return copy.result

    def _gather(self, op: Operation) -> Built | None:
        """Picks along a static axis. In mode "along", a dim stays repeated if both x and index repeat along it."""
        assert isinstance(op, qc.GatherOp)
        x, index, axis = self.build(op.x), self.build(op.index), op.axis.value.data
        if x is None or index is None or not isinstance(shape_of(op.x.type)[axis], int):
            return None
        if op.mode.data == "take":
            rows = self.full(op.x)
            sizes = [s for n, s in enumerate(self._sizes(op.x) or ()) if n != axis]
            repeats = (*(False,) * axis, *index.repeats, *(False,) * (len(sizes) - axis))
            picked, shape = index.value, (*sizes[:axis], *index.shape, *sizes[axis:])
        else:
            repeats = tuple(
                a and b and n != axis for n, (a, b) in enumerate(zip(x.repeats, index.repeats, strict=True))
            )
            # along the axis, index has its own size and x is picked from; all other dims are shared
            rows = self._widen(op.x, x, repeats)
            widened = self._widen(op.index, index, repeats)
            if widened is None:
                return None
            picked, shape = widened, tuple(int(d) for d in shape_of(widened.type))
        if rows is None:
            return None
        type_ = tensor_type(shape, tensor_dtype(op.result.type))
        made = qc.GatherOp(rows, picked, type_, axis=axis, mode=op.mode.data)
        set_path(made, path_of(op))
        self._block.add_op(made)
        return Built(made.result, repeats)

    def _widen(self, value: SSAValue, built: Built, repeats: tuple[bool, ...]) -> SSAValue | None:
        """`built` at full size in every dim except those in `repeats`."""
        sizes = self._sizes(value)
        if sizes is None:
            return None
        wanted = [1 if r else s for r, s in zip(repeats, sizes, strict=True)]
        return build.broadcast_in(self._builder(""), built.value, wanted, range(len(wanted)))

    def _stable_copy(self, op: Operation) -> Built | None:
        return self._copy(op) if _STABLE[type(op)](op) else None

    def _static_copy(self, op: Operation) -> Built | None:
        """Copies an op that has no rule of its own, only if every shape is static."""
        types = [v.type for v in (*op.operands, *op.results)]
        static = all(isinstance(d, int) for t in types if hasattr(t, "get_shape") for d in shape_of(t))
        return self._copy(op) if static and _may_run_at_load(op) else None

    def _copy(self, op: Operation) -> Built | None:
        """The op on full-size operands, with its types at the maximum."""
        if len(op.results) != 1 or self._sizes(op.results[0]) is None:
            return None
        mapping: dict[SSAValue, SSAValue] = {}
        for value in op.operands:
            made = self._operand(value)
            if made is None:
                return None
            mapping[value] = made
        copy = op.clone(mapping)
        self._block.add_op(copy)
        substitute_in_ops([copy], self._maximum)
        return Built(copy.results[0], (False,) * len(shape_of(copy.results[0].type)))

    def _operand(self, value: SSAValue) -> SSAValue | None:
        op = value.owner
        if _is_quantised(value):
            return self._packed(value)
        if not hasattr(value.type, "get_shape"):
            return self.scalar(value)
        if isinstance(op, tensor.EmptyOp):
            sizes = self._sizes(value)
            return build.empty(self._builder(""), sizes, tensor_dtype(value.type)) if sizes is not None else None
        if isinstance(op, ops.FillOp):  # the initial value of a reduction has to stay a fill
            sizes, item = self._sizes(value), self.scalar(op.inputs[0])
            if sizes is None or item is None:
                return None
            return build.fill(self._builder(path_of(op)), item, sizes, tensor_dtype(value.type))
        return self.full(value)


def _is_quantised(value: SSAValue) -> bool:
    return value.type.name == "qc.qtensor"


def _static_inner_axis(op: Operation) -> bool:
    """Whether every part of a concatenation but the last has a static size along the axis."""
    assert isinstance(op, tensor.ConcatOp)
    axis = op.dim.value.data
    return all(isinstance(shape_of(v.type)[axis], int) for v in op.inputs[:-1])


def _static_last(op: Operation) -> bool:
    return isinstance(shape_of(op.operands[0].type)[-1], int)


def _always(op: Operation) -> bool:
    return True


_STABLE: dict[type[Operation], Callable[[Operation], bool]] = {
    tensor.ConcatOp: _static_inner_axis,
    qc.BatchMatmulOp: _static_last,
    qc.LinearOp: _static_last,
    qc.LayerNormOp: _static_last,
    qc.RmsNormOp: _static_last,
    qc.CumsumOp: _always,
    qc.RopeOp: _static_last,
}

_RULES: dict[type[Operation], Callable[[ConeBuilder, Operation], Built | None]] = {
    qc.ConstOp: ConeBuilder._const,
    ops.FillOp: ConeBuilder._fill,
    ops.GenericOp: ConeBuilder._generic,
    ops.TransposeOp: ConeBuilder._transpose,
    ops.BroadcastOp: ConeBuilder._broadcast,
    tensor.ExpandShapeOp: ConeBuilder._reshape,
    tensor.CollapseShapeOp: ConeBuilder._reshape,
    tensor.ExtractSliceOp: ConeBuilder._slice,
    qc.EmbeddingOp: ConeBuilder._embedding,
    qc.GatherOp: ConeBuilder._gather,
    **dict.fromkeys(_STABLE, ConeBuilder._stable_copy),
}
