"""The kernel of a group of small steps: one region with the op of each, on operands that the steps share.

rt.kernel @parts_0 (%qkv_q, %cos, %sin, %qkv_k, %at, %qkv_v, %out0, %out1, %out2) {
  %0 = linalg.generic ins(%qkv_q, …) outs(%out0)
  %1 = linalg.generic ins(%qkv_k, …) outs(tensor.empty)
  %2 = qc.index_update %out1, %at, (%1 reshaped)
  %3 = qc.index_update %out2, %at, %qkv_v
  rt.yield %0, %2, %3
}

A loop that has a norm reads the result of that norm's op in the same region:

  %0 = qc.rms_norm %qkv_q weight(%weight)
  %1 = tensor.expand_shape %0
  %2 = linalg.generic ins(%1, %1, %cos, %sin) outs(%out0)
"""

from __future__ import annotations

from xdsl.builder import Builder
from xdsl.dialects.builtin import AffineMapAttr, ArrayAttr
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.qc_norm import with_type
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.lowering.drafts import Draft
from qcompiler.passes.schedule.head_norms import HeadNorm, reordered, row_major
from qcompiler.passes.schedule.launch_groups import Candidate, Group, Member
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.plan import View


def draft_of(group: Group, schedule: Schedule) -> Draft:
    """What is read comes first, each view once; then what is written, in the order of the parts."""
    paths = [schedule.kernels[step.kernel_name].serves_text for step in group.steps]
    draft = Draft("parts", joined_paths(list(dict.fromkeys(paths))))
    read: dict[View, SSAValue] = {}
    for member in group.members:
        for view in _inputs(member):
            if view not in read:
                read[view] = draft.add(f"in{len(read)}", "r", view)
    written = [_written(member, draft) for member in group.members]
    for member, arguments in zip(group.members, written, strict=True):
        draft.written += _ops(member, read, arguments, draft)
    return draft


def _inputs(member: Member) -> tuple[View, ...]:
    """The views that a part reads."""
    index = (member.update.views[1],) if member.update is not None else ()
    if member.loop is None:
        assert member.update is not None
        return (*index, member.update.views[2])
    norm, views = member.loop.norm, member.loop.views[: len(generic_of(member.loop).inputs)]
    if norm is None:
        return (*views, *index)
    return (*norm.views[:-1], *(view for view in views if view.buffer != norm.result), *index)


def _written(member: Member, draft: Draft) -> list[SSAValue]:
    if member.x is not None:
        return [draft.add(f"out{len(draft.operands)}", "rw", member.x)]
    assert member.loop is not None
    outputs = member.loop.views[len(generic_of(member.loop).inputs) :]
    views = outputs if member.out is None else (member.out,)
    return [draft.add(f"out{len(draft.operands)}", "w", view) for view in views]


def generic_of(loop: Candidate) -> GenericOp:
    assert isinstance(loop.op, GenericOp)
    return loop.op


def _loop_inputs(
    builder: Builder, loop: Candidate, read: dict[View, SSAValue]
) -> tuple[list[SSAValue], list[AffineMapAttr]]:
    """What a loop reads, with the norm in front of it, and the maps by which it does."""
    op, norm = generic_of(loop), loop.norm
    maps = list(op.indexing_maps)
    if norm is None:
        return [read[view] for view in loop.views[: len(op.inputs)]], maps
    made = _norm(builder, norm, read)
    shaped: dict[View, SSAValue] = {}
    inputs: list[SSAValue] = []
    for i, view in enumerate(loop.views[: len(op.inputs)]):
        if view.buffer != norm.result:
            inputs.append(read[view])
            continue
        order = row_major(norm.views[-1], view)
        assert order is not None
        if view not in shaped:
            shaped[view] = build.reshape(builder, made, [view.shape[axis] for axis in order])
        inputs.append(shaped[view])
        maps[i] = AffineMapAttr(reordered(maps[i].data, order))
    return inputs, maps


def _norm(builder: Builder, norm: HeadNorm, read: dict[View, SSAValue]) -> SSAValue:
    """The norm's op on the operands of the launch."""
    op = with_type(norm.op, [read[view] for view in norm.views[:-1]], norm.op.result.type)
    return builder.insert(op).result


def _ops(member: Member, read: dict[View, SSAValue], written: list[SSAValue], draft: Draft) -> list[SSAValue]:
    """Adds the ops of a part; what it writes."""
    builder = Builder(InsertPoint.at_end(draft.body))
    made = None
    if member.loop is not None:
        op = generic_of(member.loop)
        inputs, maps = _loop_inputs(builder, member.loop, read)
        outputs = written
        if member.update is not None:
            result = op.results[0].type
            outputs = [build.empty(builder, shape_of(result), tensor_dtype(result))]
        types = [value.type for value in outputs]
        made = GenericOp(inputs, outputs, op.body.clone(), ArrayAttr(maps), op.iterator_types, types)
        builder.insert(made)
        if member.update is None:
            return list(made.results)
    assert member.update is not None and member.x is not None
    _, index, rows = member.update.views
    outer, _, inner = member.x.shape
    source = read[rows] if made is None else build.reshape(builder, made.results[0], (outer, 1, inner))
    updated = qc.IndexUpdateOp(written[0], read[index], source, written[0].type, axis=1)
    builder.insert(updated)
    return [updated.results[0]]
