"""What an attention mask does: proven from its expression, or recognised by computing it where no input is needed.

A mask that is prefix-stable (see cones.py) is evaluated once at the largest sizes; what holds there holds for every
smaller size, whose masks are its upper left corners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Region, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.module import path_of, ranges_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.support import loops
from qcompiler.passes.support.cones import ConeBuilder
from qcompiler.passes.support.extras import as_extra, can_be_extra
from qcompiler.passes.support.mask_proof import CAUSAL, DROPS, constraints
from qcompiler.passes.support.trace import Tracer
from qcompiler.plan.dims import Range

Verdict = Literal["keeps all", "causal", "other"]
MAX_ELEMENTS = 1 << 26  # a causal mask of 8192 x 8192; larger ones are left to hoisting


def evaluate_at_maximum(value: SSAValue, ranges: Mapping[str, Range], context: QCContext) -> npt.NDArray[Any] | None:
    """An input-independent value at the largest sizes, size 1 along dims where it repeats; None if there is none."""
    block = Block()
    built = ConeBuilder(block, ranges).build(value)
    if built is None or int(np.prod(built.shape)) > MAX_ELEMENTS:
        return None
    constants = [op for op in block.ops if isinstance(op, qc.ConstOp)]
    if any(op.key not in context.weights or not context.weights[op.key].valued for op in constants):
        return None  # reads a result of @init, or a weight whose values are not there
    block.add_op(func.ReturnOp(built.value))
    module = ModuleOp([func.FuncOp("main", ([], [built.value.type]), Region(block))])
    return run(module, context.weights, [])[0]


def judge(mask: npt.NDArray[Any], query_repeats: bool, key_repeats: bool) -> Verdict:
    """What a (…, S, T) mask keeps: everything, keys j <= query i, or something else.

    A boolean mask keeps where true.  A float mask keeps where it adds 0 and drops where it adds what no score survives.
    """
    kept, dropped = (mask, ~mask) if mask.dtype == np.bool_ else _keeps(mask)
    if kept.all():
        return "keeps all"
    if query_repeats or key_repeats:
        return "other"
    queries, keys = np.ogrid[: mask.shape[-2], : mask.shape[-1]]
    lower = keys <= queries
    return "causal" if bool((kept == lower).all() and (dropped == ~lower).all()) else "other"


def _keeps(mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(adds nothing, drops): below -1e30, or the least fp16, exp(score + mask) is 0 beside the diagonal's."""
    limit = -6.5e4 if mask.dtype == np.float16 else DROPS
    values = mask if mask.dtype == np.float32 else mask.astype(np.float32)
    return values == 0, values <= limit


class MaskReader:
    """Verdicts on the masks of one function, each value evaluated once."""

    def __init__(self, function: func.FuncOp, context: QCContext) -> None:
        self._ranges = ranges_of(function)
        self._context = context
        self._tracer = Tracer(context)
        self._verdicts: dict[SSAValue, Verdict] = {}

    def verdict(self, mask: SSAValue) -> Verdict:
        """What a rank-4 mask operand keeps; "other" where it depends on inputs."""
        if mask not in self._verdicts:
            self._verdicts[mask] = self._proven(mask) or self._computed(mask)
        return self._verdicts[mask]

    def _proven(self, mask: SSAValue) -> Verdict | None:
        found = constraints(mask, self._tracer)
        if found is None or found - {CAUSAL}:
            return None
        return "causal" if found else "keeps all"

    def _computed(self, mask: SSAValue) -> Verdict:
        values = evaluate_at_maximum(mask, self._ranges, self._context)
        if values is None:
            return "other"
        shape = shape_of(mask.type)
        repeats = [size == 1 and wanted != 1 for size, wanted in zip(values.shape, shape, strict=True)]
        return judge(values, repeats[-2], repeats[-1])


def simplify_mask(op: qc.AttentionOp, reader: MaskReader, context: QCContext, stage: str) -> bool:
    """Drops a mask that keeps everything; replaces a causal one, alone or in a conjunction, by the `causal` flag."""
    if op.mask is None:
        return False
    verdict = reader.verdict(op.mask)
    if verdict == "keeps all":
        _set_mask(op, None)
        context.report.add(stage, path_of(op), "the mask is dropped", "it keeps everything")
        return True
    if verdict == "causal":
        _set_mask(op, None)
        op.properties["causal"] = UnitAttr()
        context.report.add(stage, path_of(op), "the mask becomes the flag `causal`", "it keeps keys j <= query i")
        return True
    return _split_conjunction(op, reader, context, stage)


def _split_conjunction(op: qc.AttentionOp, reader: MaskReader, context: QCContext, stage: str) -> bool:
    """`mask = a & b` with a constant, of which the flag `causal` or nothing remains."""
    assert op.mask is not None
    conjunction = loops.producer(op.mask)
    if not isinstance(conjunction, ops.GenericOp) or not _is_conjunction(conjunction):
        return False
    inputs = loops.inputs_of(conjunction)
    for (value, index), (other, other_index) in (inputs, reversed(inputs)):
        part = _as_mask(op, conjunction, value, index)
        rest = _as_mask(op, conjunction, other, other_index)
        verdict = reader.verdict(part) if part is not None and rest is not None else "other"
        if verdict == "other" or rest is None:
            continue
        _set_mask(op, rest)
        if verdict == "causal":
            op.properties["causal"] = UnitAttr()
        context.report.add(stage, path_of(op), f"a part of the mask {_EFFECT[verdict]}", f"that part {verdict}")
        return True
    return False


_EFFECT: dict[Verdict, str] = {"keeps all": "is dropped", "causal": "becomes the flag `causal`", "other": ""}


def _is_conjunction(op: ops.GenericOp) -> bool:
    """A pointwise nest that is `a & b` of two booleans and nothing else."""
    body = list(op.body.block.ops)
    return (
        loops.is_pointwise(op)
        and len(op.inputs) == 2
        and len(body) == 2
        and isinstance(body[0], arith.AndIOp)
        and set(body[0].operands) == set(op.body.block.args[:2])
    )


def _as_mask(op: qc.AttentionOp, conjunction: ops.GenericOp, value: SSAValue, index: loops.Index) -> SSAValue | None:
    """One input of the conjunction as a rank-4 mask, unit dims where it repeats; None if it is no such view."""
    inverse = loops.inverse_permutation(loops.output_index(conjunction))
    assert inverse is not None and op.mask is not None
    at = loops.compose(index, inverse)
    return as_extra(op, value, at, shape_of(op.mask.type)) if can_be_extra(value, at) else None


def _set_mask(op: qc.AttentionOp, mask: SSAValue | None) -> None:
    old = op.mask
    op.operands = [op.q, op.k, op.v, *([mask] if mask is not None else [])]
    owner = loops.producer(old) if old is not None else None
    if owner is not None:
        loops.erase_if_dead(owner)


def remove_useless_masks(function: func.FuncOp, context: QCContext) -> None:
    """Masks and flags that cannot change the result at this entry point's sizes."""
    reader = MaskReader(function, context)
    for op in list(function.body.block.ops):
        if not isinstance(op, qc.AttentionOp):
            continue
        while simplify_mask(op, reader, context, "hoist-constant-masks"):
            pass  # a conjunction loses one part at a time
        one_key = shape_of(op.k.type)[2] == 1
        if op.causal is not None and one_key:
            del op.properties["causal"]
            why = "there is one key, which every query sees"
            context.report.add("hoist-constant-masks", path_of(op), "the flag `causal` is dropped", why)
