"""The kernel of a group of small steps: one region with the op of each, on operands that the steps share.

    rt.kernel @parts_0 (%qkv_q, %cos, %sin, %qkv_k, %at, %qkv_v, %out0, %out1, %out2) {
      %0 = linalg.generic ins(%qkv_q, …) outs(%out0)
      %1 = linalg.generic ins(%qkv_k, …) outs(tensor.empty)
      %2 = qc.index_update %out1, %at, (%1 reshaped)
      %3 = qc.index_update %out2, %at, %qkv_v
      rt.yield %0, %2, %3
    }
"""

from __future__ import annotations

from xdsl.builder import Builder
from xdsl.dialects.linalg.ops import GenericOp
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.rt import KernelOp
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.lowering.drafts import Draft
from qcompiler.passes.schedule.launch_groups import Candidate, Group, Member
from qcompiler.plan.paths import joined_paths
from qcompiler.plan.plan import View


def draft_of(group: Group, schedule: Schedule) -> Draft:
    """What is read comes first, each view once; then what is written, in the order of the parts."""
    paths = [schedule.kernels[step.kernel_name].serves_text for step in group.steps]
    draft = Draft("parts", joined_paths(list(dict.fromkeys(paths))))
    read: dict[View, SSAValue] = {}
    for candidate in (each for member in group.members for each in member.candidates):
        for view in _inputs(candidate, group):
            if view not in read:
                read[view] = draft.add(f"in{len(read)}", "r", view)
    written = [_written(member, draft) for member in group.members]
    for member, arguments in zip(group.members, written, strict=True):
        draft.written += _ops(member, read, arguments, draft)
    return draft


def _inputs(candidate: Candidate, group: Group) -> tuple[View, ...]:
    """The views that a step reads, without what another part of its member computes."""
    if isinstance(candidate.op, GenericOp):
        return candidate.views[: len(candidate.op.inputs)]
    x, index, source = candidate.views
    alone = all(member.update is not candidate or member.loop is None for member in group.members)
    return (index, source) if alone else (index,)


def _written(member: Member, draft: Draft) -> list[SSAValue]:
    if member.update is not None:
        return [draft.add(f"out{len(draft.operands)}", "rw", member.update.views[0])]
    assert member.loop is not None and isinstance(member.loop.op, GenericOp)
    outputs = member.loop.views[len(member.loop.op.inputs) :]
    return [draft.add(f"out{len(draft.operands)}", "w", view) for view in outputs]


def _ops(member: Member, read: dict[View, SSAValue], written: list[SSAValue], draft: Draft) -> list[SSAValue]:
    """Adds the ops of a part; what it writes."""
    builder = Builder(InsertPoint.at_end(draft.body))
    loop, update = member.loop, member.update
    source: SSAValue | None = None
    if loop is not None:
        assert isinstance(loop.op, GenericOp)
        inputs = [read[view] for view in loop.views[: len(loop.op.inputs)]]
        outputs = written
        if update is not None:
            result = loop.op.results[0].type
            outputs = [build.empty(builder, shape_of(result), tensor_dtype(result))]
        made = GenericOp(
            inputs, outputs, loop.op.body.clone(), loop.op.indexing_maps, loop.op.iterator_types,
            [value.type for value in outputs],
        )  # fmt: skip
        builder.insert(made)
        if update is None:
            return list(made.results)
        source = made.results[0]
    assert update is not None
    x, index, rows = update.views
    source = read[rows] if source is None else build.reshape(builder, source, rows.shape)
    updated = qc.IndexUpdateOp(written[0], read[index], source, written[0].type, axis=1)
    builder.insert(updated)
    return [updated.results[0]]
