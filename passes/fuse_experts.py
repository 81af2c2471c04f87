"""fuse-experts: what is computed of the products with chosen experts becomes a part of these.

    %h = qc.grouped_linear %x, %gate_up, %i          %y = qc.grouped_linear %x, %gate_up, %i {pairs} {
    %g = tensor.extract_slice %h[…, 0]               ^bb0(%g: f32, %u: f32):
    %u = tensor.extract_slice %h[…, F]         ->      silu, mulf … }
    %y = linalg.generic ins(%g, %u) { silu, mulf … }

    %d = qc.grouped_linear %y, %down, %i             %z = qc.grouped_linear %y, %down, %i weights(%p) extras(%r) {top}
    %t = linalg.generic ins(%d, %p) { mulf, addf }     mix { ^bb0(%sum, %weight, %total: f32): mulf, addf }
    %z = linalg.generic ins(%t, %r) { addf }   ->      { ^bb0(%total: f32, %r: f32): addf }

The kernels are for few pairs of a row and an expert, and the number of rows must be known. With more rows, experts have
several rows each, which a kernel multiplies at once and scatters; what reads them is then better apart. The weight's
layout does not change, so an entry point for one token fuses what one for prompts leaves apart.

A row's experts are summed in the order in which the top-k gives them, as before, and roundings stay where they are. For
one token on the CPU results in fp32 are the same to the bit; in bf16, the sum over a row's experts leaves out the
rounding of weights. With several rows, how many of an expert's rows are multiplied together decides the order of a sum
over K, and on a GPU how many warps share K: both may differ from before. Sums of products of int8 codes are exact: they
have the same bits, however many rows, warps or experts are multiplied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, is_named, path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor, tensor_dtype
from qcompiler.kernels.cuda.grouped_combined import MOST_GROUPS
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.fuse_epilogues import MAX_EXTRAS, combining_reader, pointwise_accesses, rounding
from qcompiler.passes.fuse_glu import halves_of
from qcompiler.passes.linears.constants import finish
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.loops import Index
from qcompiler.passes.loops.sums import adds_from_zero, dims_of, reduced
from qcompiler.passes.lowering.rule import is_stored
from qcompiler.passes.views.views import Reshape
from qcompiler.plan.dims import Dim, dim, product
from qcompiler.plan.kinds.grouped_linear import PANEL

MOST_ROWS, MOST_PAIRS = 8, 64
"""The most rows of x, and pairs, of a kernel that combines sums."""

Access = tuple[SSAValue, Index]


@dataclass(frozen=True)
class FuseExpertsPass(ModulePass):
    """Makes the GLU of experts, and the weighted sum over a row's experts, epilogues of their products."""

    name = "fuse-experts"
    separate: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # NumPy may add up a reduction in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            for each in list(function.body.block.ops):
                if not isinstance(each, qc.GroupedLinearOp) or each.epilogue.blocks:
                    continue
                found = _glu_of(each) or _mixture_of(each)
                if found is None:
                    continue
                why = "the recipe keeps it separate" if self._is_named(each, context) else found.obstacle(context)
                what = found.what if why is None else f"{found.what}: apart"
                context.report.add_once(self.name, path_of(each), what, why or found.why)
                if why is None:
                    found.fuse()

    def _is_named(self, op: qc.GroupedLinearOp, context: QCContext) -> bool:
        names = {path_of(op)}
        if isinstance(op.w.owner, qc.ConstOp) and op.w.owner.key in context.weights:
            names |= set(context.weights[op.w.owner.key].paths)
        return any(is_named(name, self.separate) for name in names)


def _pairs_of(op: qc.GroupedLinearOp) -> int | None:
    """The number of pairs, if it is known."""
    pairs = dim(shape_of(op.index.type)[0])
    return pairs.value if pairs.is_static else None


def _obstacle(op: qc.GroupedLinearOp, unit: int, rows: int | None, context: QCContext) -> str | None:
    """Why no kernel combines the sums of a product with `rows` rows of the model, or None."""
    pairs, width = _pairs_of(op), int(shape_of(op.w.type)[0]) // op.experts.value.data
    if pairs is None or rows is None:
        return "the number of rows is known only at run time"
    if pairs > MOST_PAIRS or rows > MOST_ROWS:
        return f"{rows} rows with {pairs} pairs are more than {MOST_ROWS} rows, or {MOST_PAIRS} pairs"
    if not is_stored(op.w, context):
        return "its weight is computed"
    if width % unit:
        return f"the {width} rows of an expert are no multiple of {unit}"
    return None


# --- GLU -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Glu:
    """A product, and the nest that alone reads the two halves of its columns."""

    op: qc.GroupedLinearOp
    halves: tuple[SSAValue, SSAValue]
    reader: ops.GenericOp
    what = "experts with a GLU"
    why = "what is computed of a pair of rows is the epilogue"

    def obstacle(self, context: QCContext) -> str | None:
        pairs = _pairs_of(self.op)
        rows = None if pairs is None else pairs // self.op.repeat.value.data
        return _obstacle(self.op, 2 * PANEL, rows, context)

    def fuse(self) -> None:
        op, body = self.op, _body(["f32", "f32"])
        sums = {half: _rounded(op, body.args[n], body) for n, half in enumerate(self.halves)}
        _end(body, _inlined(self.reader.body.block, [sums[v] for v, _ in pointwise_accesses(self.reader)], body))
        made = qc.GroupedLinearOp(
            op.x, op.w, op.index, self.reader.res[0].type, experts=op.experts.value.data,
            repeat=op.repeat.value.data, pairs=True, epilogue=Region(body),
        )  # fmt: skip
        loops.insert_before(self.reader, made)
        finish(made, self.reader, path_of(op))
        self.reader.res[0].replace_all_uses_with(made.result)
        erase_if_dead(self.reader)


def _glu_of(op: qc.GroupedLinearOp) -> _Glu | None:
    slices = halves_of(op)
    reader = combining_reader([each.result for each in slices]) if slices is not None else None
    if slices is None or reader is None:
        return None
    halves = (slices[0].result, slices[1].result)
    own = loops.identity(len(shape_of(reader.res[0].type)))
    alone = all(value in halves and index == own for value, index in pointwise_accesses(reader))
    return _Glu(op, halves, reader) if alone else None


# --- the sum over a row's experts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Mixture:
    """A product; what weighs its rows, if that is a nest of its own; what sums them; and what reads the sums, if it is
    one nest that reads nothing else but tensors of the same shape."""

    op: qc.GroupedLinearOp
    weights: SSAValue
    weighing: ops.GenericOp | None
    summing: ops.GenericOp
    reader: ops.GenericOp | None
    top: int
    what = "experts of a row, summed"
    why = "the weighted sum of a row's experts is the epilogue"

    @property
    def rows(self) -> int | None:
        pairs = _pairs_of(self.op)
        return None if pairs is None else pairs // self.top

    def obstacle(self, context: QCContext) -> str | None:
        why, rows, experts = _obstacle(self.op, PANEL, self.rows, context), self.rows, self.op.experts.value.data
        if why is not None or rows is None:
            return why
        if context.target.kind == "cuda" and self.top > MOST_GROUPS and not self.op.multiplies_codes:
            return f"a block sums at most {MOST_GROUPS} experts of a row, not {self.top}"
        if context.target.kind == "cpu" and rows > 1 and rows * self.top > experts:
            return f"{rows * self.top} pairs share {experts} experts, which are decoded once for the rows of each"
        return None

    def fuse(self) -> None:
        last = self.reader if self.reader is not None else self.summing
        assert self.rows is not None
        op, shape = self.op, (self.rows, shape_of(self.op.result.type)[1])
        builder = build.with_path(InsertPoint.before(last), path_of(op))
        weights = build.reshape(builder, self.weights, (self.rows, self.top))
        epilogue = _body(["f32"])
        extras = list[SSAValue]()
        total: SSAValue = epilogue.args[0]
        if self.reader is not None:
            known: dict[SSAValue, SSAValue] = {}
            for value, _ in pointwise_accesses(self.reader):
                if _below(value) is self.summing:
                    known[value] = epilogue.args[0]
                elif value not in known:
                    extras.append(build.reshape(builder, value, shape))
                    known[value] = _argument(epilogue, value)
            accesses = pointwise_accesses(self.reader)
            total = _inlined(self.reader.body.block, [known[value] for value, _ in accesses], epilogue)
        _end(epilogue, total)
        made = builder.insert(qc.GroupedLinearOp(
            op.x, op.w, op.index, tensor(shape, tensor_dtype(last.results[0].type)), experts=op.experts.value.data,
            repeat=op.repeat.value.data, top=self.top, weights=weights, extras=extras, mix=Region(self._mix()),
            epilogue=Region(epilogue),
        ))  # fmt: skip
        result = build.reshape(builder, made.result, shape_of(last.results[0].type))
        finish(made, last, path_of(op))
        last.results[0].replace_all_uses_with(result)
        erase_if_dead(last)

    def _mix(self) -> Block:
        body = _body(["f32", tensor_dtype(self.weights.type), "f32"])
        own, weight, total = body.args
        value = _rounded(self.op, own, body)
        if self.weighing is not None:
            given = [value if v is self.op.result else weight for v, _ in loops.inputs_of(self.weighing)]
            value = _inlined(self.weighing.body.block, given, body)
        inputs = [weight if v is self.weights else value for v, _ in loops.inputs_of(self.summing)]
        _end(body, _inlined(self.summing.body.block, [*inputs, total], body))
        return body


def _mixture_of(op: qc.GroupedLinearOp) -> _Mixture | None:
    value: SSAValue = op.result
    weights: SSAValue | None = None
    weighing = combining_reader([value])
    if weighing is not None:
        others = [access for access in pointwise_accesses(weighing) if access[0] is not value]
        inside = all(i == loops.identity(2) for v, i in pointwise_accesses(weighing) if v is value)
        if not inside or len(others) != 1 or dims_of(*others[0]) != [0]:
            return None
        weights, value = others[0][0], weighing.res[0]
    value = _through_reshapes(value)
    summing = value.get_user_of_unique_use()
    if not isinstance(summing, ops.GenericOp) or not adds_from_zero(summing):
        return None
    (axis,) = reduced(summing)
    kept = dims_of(summing.res[0], loops.output_index(summing))
    if kept is None or not kept:
        return None
    order = {value: [*kept[:-1], axis, kept[-1]]}
    others = [access for access in loops.inputs_of(summing) if access[0] is not value]
    if (weights is None) != (len(others) == 1) or len(others) > 1:
        return None
    if weights is None:
        weights = others[0][0]
        order[weights] = [*kept[:-1], axis]
    if any(dims_of(v, i) != order[v] for v, i in loops.inputs_of(summing)):
        return None
    extents = loops.loop_extents(summing)
    top = extents[axis]
    if not isinstance(top, int) or tensor_dtype(weights.type) not in ("f32", "bf16", "f16"):
        return None
    if not _sums_over_experts(op, [extents[d] for d in kept], top):
        return None
    return _Mixture(op, weights, weighing, summing, _reader_of_sums(summing), top)


def _sums_over_experts(op: qc.GroupedLinearOp, kept: Sequence[Dim], top: int) -> bool:
    """Whether a sum of `top` entries that keeps dims of these sizes adds whole rows of pairs that follow each other.

    A reshape may also part the columns of a pair (heads, say), and sum over those parts.
    """
    pairs = _pairs_of(op)
    return dim(kept[-1]) == dim(shape_of(op.result.type)[1]) and (pairs is None or product(kept[:-1]) * top == pairs)


def _reader_of_sums(summing: ops.GenericOp) -> ops.GenericOp | None:
    """The nest that alone reads the sums, in step with its result, as it does everything else it reads."""
    sums = _through_reshapes(summing.res[0])
    reader = sums.get_user_of_unique_use()
    if not isinstance(reader, ops.GenericOp) or not loops.is_pointwise(reader):
        return None
    indexed = any(isinstance(each, ops.IndexOp) for each in reader.body.block.ops)
    shape: Sequence[Dim] = shape_of(reader.res[0].type)
    own = [n for n, size in enumerate(shape) if size != 1]
    accesses = pointwise_accesses(reader)
    whole = all(dims_of(value, index) == own for value, index in accesses)
    few = len({value for value, _ in accesses}) - 1 <= MAX_EXTRAS
    stored = tensor_dtype(reader.res[0].type) in ("f32", "bf16", "f16")
    return reader if whole and few and stored and not indexed else None


def _through_reshapes(value: SSAValue) -> SSAValue:
    """The value behind the reshapes that alone read it."""
    while isinstance(reader := value.get_user_of_unique_use(), Reshape):
        value = reader.result
    return value


def _below(value: SSAValue) -> Operation | None:
    """What makes a value, before it is reshaped."""
    while isinstance(value.owner, Reshape):
        value = value.owner.operands[0]
    return loops.producer(value)


# --- bodies ----------------------------------------------------------------------------------------------------------


def _body(types: Sequence[str]) -> Block:
    """A region with these arguments that is not written yet."""
    body = Block(arg_types=[ELEMENT_TYPES[each] for each in types])  # type: ignore[index]
    body.add_op(qc.YieldOp(body.args[0]))
    return body


def _argument(body: Block, extra: SSAValue) -> SSAValue:
    return body.insert_arg(ELEMENT_TYPES[tensor_dtype(extra.type)], len(body.args))


def _rounded(op: qc.GroupedLinearOp, total: SSAValue, body: Block) -> SSAValue:
    """The element of the product's result that the fp32 sum becomes."""
    return _inlined(rounding(op), [total], body)


def _inlined(source: Block, arguments: Sequence[SSAValue], body: Block) -> SSAValue:
    """What `source` yields, computed at the end of `body`."""
    end = body.last_op
    assert end is not None
    return loops.inline_body(source, arguments, None, end, move=False)


def _end(body: Block, result: SSAValue) -> None:
    end = body.last_op
    assert end is not None
    end.operands = [result]
    loops.tidy_body(body)
