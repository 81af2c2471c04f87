"""split-attention: on GPUs, divides the keys of an attention of few queries over blocks, and joins what they sum.

    %y = qc.attention %q, %k, %v last(%n) {…} : tensor<1x32x1x128xbf16>
    ->
    %p = qc.attention %q, %k, %v last(%n) {…, parts = 32} : tensor<1x32x1x32x130xf32>
    %y = qc.join_attention %p : tensor<1x32x1x128xbf16>

A block of one query reads all keys of its head, so a model of 8 key heads keeps 8 multiprocessors of a GPU busy. The
parts are a value of the program like any other: its memory is planned, and no kernel has a workspace. Sums are joined
in the order of the parts, so the bits are the same on every run, but not those of the whole attention.

An attention stays whole if
- the program is for a CPU, whose threads share it;
- the number of queries is known only at run time, or is more than four;
- it sees too few keys for two parts, or its sequences and heads make blocks enough;
- the estimate says that joining takes longer than is saved (kernels/attention_split.py);
- `separate` has a pattern of its module path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import Target, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, is_named, path_of, ranges_of
from qcompiler.ir.types import shape_of, tensor, tensor_dtype
from qcompiler.kernels.attention_split import SplitQuery, verdict
from qcompiler.kernels.cuda.attention_decode import rows_of_part, value_width
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.plan.attention_parts import COLUMNS_BEHIND
from qcompiler.plan.dims import Range, dim
from qcompiler.plan.kernel import ITEMSIZE


@dataclass(frozen=True)
class SplitAttentionPass(ModulePass):
    """Divides the keys of attentions into parts."""

    name = "split-attention"
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the sums over keys run part by part
    separate: tuple[str, ...] = ()
    arch: str = ""
    """The architecture to decide for, such as "sm_90a"; the program's target if empty."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        target = Target("cuda", self.arch) if self.arch else context.target
        if target.kind == "cpu":
            return
        for function in functions(op):
            ranges = ranges_of(function)
            for each in [each for each in function.body.block.ops if isinstance(each, qc.AttentionOp)]:
                if each.parts is not None:
                    continue
                path = path_of(each)
                if is_named(path, self.separate):
                    context.report.add_once(self.name, path, "attention: whole", "the recipe keeps it separate")
                    continue
                chosen = verdict(_query(each, ranges), target.kind, target.isas)
                what = "attention: whole"
                if chosen.parts > 1:
                    what = f"attention: {chosen.parts} parts of its keys"
                    _split(each, chosen.parts)
                context.report.add_once(self.name, path, what, chosen.why)


def _query(op: qc.AttentionOp, ranges: dict[str, Range]) -> SplitQuery:
    batch, heads, queries, _ = shape_of(op.q.type)
    _, kv_heads, kv_len, _ = shape_of(op.k.type)
    return SplitQuery(
        batch=dim(batch).bounds(ranges),
        heads=int(heads),
        kv_heads=int(kv_heads),
        queries=queries if isinstance(queries, int) else None,
        keys=min(dim(kv_len).bounds(ranges)[1], _most_seen(op, queries)),
        key_bytes=sum(int(shape_of(x.type)[3]) * ITEMSIZE[tensor_dtype(x.type)] for x in (op.k, op.v)),
        part_rows=rows_of_part(int(op.value_dim), value_width(tensor_dtype(op.v.type), op.rows_of)),
    )


def _most_seen(op: qc.AttentionOp, queries: object) -> int:
    """A limit of the keys that the queries of a call see, other than how many there are."""
    if op.last is not None and op.keys_back is not None and isinstance(queries, int):
        return op.keys_back + queries - 1  # of queries at consecutive positions
    if op.causal is not None and isinstance(queries, int):
        return queries
    return 2**63


def _split(op: qc.AttentionOp, parts: int) -> None:
    builder = build.with_path(InsertPoint.before(op), path_of(op))
    lead, columns = shape_of(op.q.type)[:3], int(op.value_dim) + COLUMNS_BEHIND
    type_ = tensor((*lead, parts, columns), "f32")
    divided = op.rebuilt(op.q, op.k, op.v, op.mask, op.last, op.sinks, type_, parts=parts)
    divided.attributes.update(op.attributes)
    builder.insert(divided)
    joined = qc.JoinAttentionOp(divided.result, op.result.type)
    joined.attributes.update(op.attributes)
    builder.insert(joined)
    op.result.replace_all_uses_with(joined.result)
    erase_if_dead(op)
