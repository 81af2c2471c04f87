"""fuse-routing: the choice of each row's experts, and their weights, become one op.

    %p = qc.softmax %x {axis = 1}                               %w, %i = qc.route %x {k = 2, scores = "all", normalise}
    %v, %i = qc.topk %p {k = 2, axis = 1}                ->
    %s = linalg.generic ins(%v) { addf }
    %w = linalg.generic ins(%v, %s) { divf }

    %v, %i = qc.topk %x {k = 4, axis = 1}                ->     %w, %i = qc.route %x {k = 4, scores = "chosen"}
    %w = qc.softmax %v {axis = 1}

The division may round its result. Without the last two ops of the first form the weights are not normalised. On the
CPU the bits of a softmax and a top-k stay what they were. The sum of the weights runs from the largest one: with two
experts a row that is the only order, with more it may differ from that of a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.ir import qc
from qcompiler.ir.context import qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, is_named, path_of
from qcompiler.ir.qc_index import RouteOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.fuse_epilogues import pointwise_accesses
from qcompiler.passes.linears.constants import finish
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.sums import adds_from_zero, dims_of, reduced
from qcompiler.passes.views.views import Reshape, permutation_of, unreshaped
from qcompiler.plan.kernel_body import FLOATS
from qcompiler.plan.kinds.route import MOST_CHOSEN, MOST_EXPERTS, Scores


@dataclass(frozen=True)
class FuseRoutingPass(ModulePass):
    """Makes one op of softmax, top-k and the normalisation of the weights."""

    name = "fuse-routing"
    separate: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the sum of the weights; NumPy has an order of its own

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            for each in list(function.body.block.ops):
                found = _routing(each) if isinstance(each, qc.TopkOp) else None
                if found is None:
                    continue
                path, why = path_of(each), found if isinstance(found, str) else None
                if is_named(path, self.separate):
                    why = "the recipe keeps it separate"
                if isinstance(found, _Routing) and why is None:
                    context.report.add_once(self.name, path, "routing of experts", found.why)
                    found.fuse()
                else:
                    context.report.add_once(self.name, path, "routing of experts: apart", why or "")


@dataclass(frozen=True)
class _Routing:
    """A top-k, the scores that it chooses from, and the op that computes the weights, which may be the top-k itself."""

    op: qc.TopkOp
    x: SSAValue
    scores: Scores
    weights: SSAValue
    normalise: bool
    why: str

    def fuse(self) -> None:
        op = self.op
        made = RouteOp(
            self.x, [self.weights.type, op.indices.type], k=op.k.value.data, scores=self.scores,
            normalise=self.normalise,
        )  # fmt: skip
        loops.insert_before(op, made)
        finish(made, op, path_of(op))
        last = self.weights.owner
        assert isinstance(last, Operation)
        self.weights.replace_all_uses_with(made.weights)
        op.indices.replace_all_uses_with(made.indices)
        for dead in (last, op):
            if dead.parent is not None:
                erase_if_dead(dead)


def _routing(op: qc.TopkOp) -> _Routing | str | None:
    """The routing around a top-k; why it is none that a kernel computes, if it looks like one; else None."""
    before, after = loops.producer(op.x), op.values.get_user_of_unique_use()
    first = before if isinstance(before, qc.SoftmaxOp) else None
    last = after if isinstance(after, qc.SoftmaxOp) else None
    turned = last is None and isinstance(before, ops.TransposeOp) and _turns_a_softmax(before)
    if first is None and last is None and not turned:
        return "its scores are no softmax" if _chooses_experts(op) else None
    why = _obstacle(op)
    if why is not None:
        return why
    if turned:
        return "its softmax runs along another dim than the choice"
    if first is not None:
        return _among_all(op, first)
    assert last is not None
    if last.axis.value.data != op.axis.value.data:
        return "its softmax runs along another dim than the choice"
    return _Routing(op, op.x, "chosen", last.result, False, "a softmax of the chosen scores")


def _turns_a_softmax(op: ops.TransposeOp) -> bool:
    """Whether the last dim of a softmax is another one now: along other dims, one runs between two transposes."""
    rank = len(shape_of(op.results[0].type))
    return isinstance(loops.producer(op.inputs[0]), qc.SoftmaxOp) and permutation_of(op)[-1] != rank - 1


def _obstacle(op: qc.TopkOp) -> str | None:
    """Why no kernel makes this choice, or None."""
    shape, k = shape_of(op.x.type), op.k.value.data
    count = shape[-1]
    if op.axis.value.data != len(shape) - 1:
        return "the choice is not made along the last dim"
    if not isinstance(count, int) or count > MOST_EXPERTS:
        return f"it has {count} scores; a kernel keeps at most {MOST_EXPERTS}"
    if k > MOST_CHOSEN:
        return f"it chooses {k}; a kernel keeps at most {MOST_CHOSEN}"
    if tensor_dtype(op.x.type) not in FLOATS:
        return f"its scores are {tensor_dtype(op.x.type)}"
    return None


def _among_all(op: qc.TopkOp, softmax: qc.SoftmaxOp) -> _Routing | str:
    if softmax.axis.value.data != op.axis.value.data:
        return "its softmax runs along another dim than the choice"
    if softmax.result.get_user_of_unique_use() is not op:
        return "other ops read the softmax, too"
    if tensor_dtype(softmax.result.type) != "f32" or tensor_dtype(softmax.x.type) not in FLOATS:
        return f"its softmax is {tensor_dtype(softmax.result.type)}, and so is what is chosen from"
    divided = _normalised(op)
    if divided is None:
        return _Routing(op, softmax.x, "all", op.values, False, "a softmax, and its largest entries")
    return _Routing(op, softmax.x, "all", divided, True, "a softmax, and its largest entries over their sum")


def _normalised(op: qc.TopkOp) -> SSAValue | None:
    """The values of a top-k over their sum, if nothing else reads the values. None for anything else."""
    values, shape = op.values, shape_of(op.values.type)
    readers = {use.operation for use in values.uses}
    summing = [each for each in readers if isinstance(each, ops.GenericOp) and not loops.is_pointwise(each)]
    dividing = [each for each in readers if isinstance(each, ops.GenericOp) and loops.is_pointwise(each)]
    if len(readers) != 2 or len(summing) != 1 or len(dividing) != 1 or shape[-1] == 1:
        return None
    if not _sums_last_dim(summing[0], values) or not _divides(dividing[0]):
        return None
    own = [n for n, size in enumerate(shape) if size != 1]
    (value, index), (total, other) = pointwise_accesses(dividing[0])
    source = unreshaped(total)
    alone = source is summing[0].res[0] and len({use.operation for use in source.uses}) == 1
    in_step = dims_of(value, index) == own and dims_of(total, other) == own[:-1]
    result = dividing[0].res[0]
    stored = shape_of(result.type) == shape and tensor_dtype(result.type) in FLOATS
    return result if value is values and alone and in_step and stored else None


def _sums_last_dim(op: ops.GenericOp, values: SSAValue) -> bool:
    """Whether a nest adds the elements of each row, and nothing else."""
    if not adds_from_zero(op) or [v for v, _ in loops.inputs_of(op)] != [values]:
        return False
    kept = dims_of(op.res[0], loops.output_index(op))
    walked = dims_of(values, loops.inputs_of(op)[0][1])
    body = op.body.block
    first = body.first_op
    adds = isinstance(first, arith.AddfOp) and set(first.operands) == set(body.args) and _yields(body, first.result)
    return adds and kept is not None and walked == [*kept, *reduced(op)]


def _divides(op: ops.GenericOp) -> bool:
    """Whether a nest divides its first input by its second, and may round the quotient."""
    body = op.body.block
    first = body.first_op
    if len(op.inputs) != 2 or not isinstance(first, arith.DivfOp) or list(first.operands) != list(body.args[:2]):
        return False
    rounded = first.next_op
    if isinstance(rounded, arith.TruncFOp) and rounded.input is first.result:
        return _yields(body, rounded.result)
    return _yields(body, first.result)


def _yields(body: Block, value: SSAValue) -> bool:
    """Whether a body ends with `value`, computed by the op before the last one."""
    end = body.last_op
    assert end is not None
    return list[SSAValue](end.operands) == [value] and end.prev_op is value.owner


def _chooses_experts(op: qc.TopkOp) -> bool:
    """Whether the indices choose the experts of products."""
    reached: Sequence[SSAValue] = [op.indices]
    while reached:
        users = [use.operation for value in reached for use in value.uses]
        if any(isinstance(user, qc.GroupedLinearOp) for user in users):
            return True
        reached = [user.result for user in users if isinstance(user, Reshape)]
    return False
