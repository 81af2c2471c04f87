"""Which keys an attention mask keeps: proven from its expression, or computed if it depends on no input.

A mask that is prefix-stable (see cones.py) is evaluated once, at the largest sizes. Smaller masks are its upper left
corners, so the result holds for them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import DenseArrayBase, IntegerAttr, ModuleOp, UnitAttr, i32, i64
from xdsl.dialects.linalg import ops
from xdsl.ir import Block, Region, SSAValue

from qcompiler.ir import qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.interpreter import run
from qcompiler.ir.module import path_of, ranges_of
from qcompiler.ir.types import shape_of
from qcompiler.passes.hoisting.cones import ConeBuilder
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.masks.mask_bounds import Bound, BoundReader
from qcompiler.passes.masks.mask_proof import CAUSAL, DROPS, Linear, constraints
from qcompiler.passes.views.trace import Tracer
from qcompiler.plan.dims import Dim, Range, dim


@dataclass(frozen=True)
class Band:
    """The keys a mask keeps: all keys, or keys j <= query i (`causal`), or keys j > i - `window`, or both."""

    causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        parts = ["j <= i"] * self.causal + ([f"j > i - {self.window}"] if self.window is not None else [])
        return f"keeps keys {' and '.join(parts)} of query i" if parts else "keeps everything"

    @staticmethod
    def of(constraints: set[Linear]) -> Band | None:
        """The band that these constraints describe; None if they describe none."""
        windows = [1 - c for a, b, c in constraints if (a, b) == (1, -1)]
        if any(each != CAUSAL and each[:2] != (1, -1) for each in constraints) or min(windows, default=1) < 1:
            return None
        return Band(CAUSAL in constraints, min(windows, default=None))


MAX_ELEMENTS = 1 << 26  # a causal mask of 8192 x 8192; larger masks are hoisted as they are


def evaluate_at_maximum(value: SSAValue, ranges: Mapping[str, Range], context: QCContext) -> npt.NDArray[Any] | None:
    """An input-independent value at the largest sizes. Dims along which it repeats have size 1. None if it cannot be
    computed."""
    block = Block()
    built = ConeBuilder(block, ranges).build(value)
    if built is None or int(np.prod(built.shape)) > MAX_ELEMENTS:
        return None
    constants = [op for op in block.ops if isinstance(op, qc.ConstOp)]
    if any(op.key not in context.weights or not context.weights[op.key].valued for op in constants):
        return None  # reads a result of @init, or a weight without values
    block.add_op(func.ReturnOp(built.value))
    module = ModuleOp([func.FuncOp("main", ([], [built.value.type]), Region(block))])
    return run(module, context.weights, [])[0]


def judge(mask: npt.NDArray[Any], query_repeats: bool, key_repeats: bool) -> Band | None:
    """The band that a (…, S, T) mask keeps; None if it keeps something else.

    A boolean mask keeps where it is true. A float mask keeps where it adds 0, and drops where it adds a number so low
    that no score survives it.
    """
    kept, dropped = (mask, ~mask) if mask.dtype == np.bool_ else _keeps(mask)
    if kept.all():
        return Band()
    if query_repeats or key_repeats or not mask.size:
        return None
    queries, keys = np.ogrid[: mask.shape[-2], : mask.shape[-1]]
    first = kept.reshape(-1, *mask.shape[-2:])[0]
    lower = keys <= queries
    # the last row above a corner of the mask gives the window; the whole mask is then compared with that band
    row = min(mask.shape[-2], mask.shape[-1]) - 1
    window = int(first[row, : row + 1].sum())
    near = keys > queries - window
    for band, wanted in ((Band(True), lower), (Band(True, window), lower & near), (Band(False, window), near)):
        if (band.window is None or band.window >= 1) and bool((kept == wanted).all() and (dropped == ~wanted).all()):
            return band
    return None


def _keeps(mask: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(keeps, drops). A mask drops at or below -1e30 (-6.5e4 for fp16): exp(score + mask) is then 0 beside the
    diagonal's."""
    limit = -6.5e4 if mask.dtype == np.float16 else DROPS
    values = mask if mask.dtype == np.float32 else mask.astype(np.float32)
    return values == 0, values <= limit


class MaskReader:
    """Bands of the masks of one function. Each value is evaluated once."""

    def __init__(self, function: func.FuncOp, context: QCContext) -> None:
        self._ranges = ranges_of(function)
        self._context = context
        self._tracer = Tracer(context)
        self._bands: dict[SSAValue, Band | None] = {}
        self.bounds = BoundReader(self._tracer, lambda value: evaluate_at_maximum(value, self._ranges, context))

    def band(self, mask: SSAValue) -> Band | None:
        """The band of a rank-4 mask operand; None if it is not a band or depends on inputs."""
        if mask not in self._bands:
            self._bands[mask] = self._proven(mask) or self._computed(mask)
        return self._bands[mask]

    def longest(self, size: Dim) -> int:
        """The largest size that a dim can have."""
        return dim(size).bounds(self._ranges)[1]

    def _proven(self, mask: SSAValue) -> Band | None:
        found = constraints(mask, self._tracer)
        return None if found is None else Band.of(found)

    def _computed(self, mask: SSAValue) -> Band | None:
        values = evaluate_at_maximum(mask, self._ranges, self._context)
        if values is None:
            return None
        shape = shape_of(mask.type)
        repeats = [size == 1 and wanted != 1 for size, wanted in zip(values.shape, shape, strict=True)]
        return judge(values, repeats[-2], repeats[-1])


def simplify_mask(op: qc.AttentionOp, reader: MaskReader, context: QCContext, stage: str) -> bool:
    """Simplifies the mask of `op`; returns whether it did. A mask that keeps everything is dropped. A band, alone or in
    a conjunction, becomes `causal` and `window`. A mask whose limits are data becomes the operand `last`."""
    if op.mask is None:
        return False
    band = _band(op, op.mask, reader)
    if band is None:
        bound = reader.bounds.bound(op.mask, op)
        if bound is None:
            return _split_conjunction(op, reader, context, stage)
        _set_bound(op, bound, None, reader, context, stage)
        return True
    _set_mask(op, None)
    _restrict(op, band)
    context.report.add(stage, path_of(op), f"the mask {_effect(band)}", f"it {band}")
    return True


def _band(op: qc.AttentionOp, mask: SSAValue, reader: MaskReader) -> Band | None:
    """The band of a mask. With `last`, which sets the queries' positions, only the band that keeps everything
    counts."""
    band = reader.band(mask)
    return band if op.last is None or band == Band() else None


def _set_bound(
    op: qc.AttentionOp, bound: Bound, rest: SSAValue | None, reader: MaskReader, context: QCContext, stage: str
) -> None:
    """Replaces the mask by `last` and `window`, or by these and the remaining part `rest`."""
    last = op.last if bound.last is None else reader.bounds.last(bound.last, op)
    _restrict(op, Band(bound.causal, bound.window))
    _set_mask(op, rest, last)
    flags = (["the operand `last`"] if bound.last is not None else []) + (
        ["the flag `window`"] if bound.window is not None else []
    )
    subject = "the mask becomes" if rest is None else "a part of the mask becomes"
    why = "it keeps keys up to a number that is data" if bound.last is not None else "it ends where `last` says"
    context.report.add(stage, path_of(op), f"{subject} {' and '.join(flags)}", why)


def _restrict(op: qc.AttentionOp, band: Band) -> None:
    """Narrows the op's flags to the band."""
    if band.causal:
        op.properties["causal"] = UnitAttr()
    if band.window is not None:
        op.properties["window"] = IntegerAttr(min(band.window, op.keys_back or band.window), i64)


def _effect(band: Band) -> str:
    flags = ["`causal`"] * band.causal + ["`window`"] * (band.window is not None)
    return f"becomes the flag {' and '.join(flags)}" if flags else "is dropped"


def _split_conjunction(op: qc.AttentionOp, reader: MaskReader, context: QCContext, stage: str) -> bool:
    """Handles `mask = a & b` where one part is a band: that part becomes flags or disappears."""
    assert op.mask is not None
    conjunction = loops.producer(op.mask)
    if not isinstance(conjunction, ops.GenericOp) or not _is_conjunction(conjunction):
        return False
    inputs = loops.inputs_of(conjunction)
    for (value, index), (other, other_index) in (inputs, reversed(inputs)):
        part = _as_mask(op, conjunction, value, index)
        rest = _as_mask(op, conjunction, other, other_index)
        if part is None or rest is None:
            continue
        band = _band(op, part, reader)
        bound = reader.bounds.bound(part, op) if band is None else None
        if bound is not None:
            _set_bound(op, bound, rest, reader, context, stage)
            return True
        if band is None:
            continue
        _set_mask(op, rest)
        _restrict(op, band)
        context.report.add(stage, path_of(op), f"a part of the mask {_effect(band)}", f"that part {band}")
        return True
    return False


def _is_conjunction(op: ops.GenericOp) -> bool:
    """Whether a pointwise nest is `a & b` of two booleans and nothing else."""
    body = list(op.body.block.ops)
    return (
        loops.is_pointwise(op)
        and len(op.inputs) == 2
        and len(body) == 2
        and isinstance(body[0], arith.AndIOp)
        and set(body[0].operands) == set(op.body.block.args[:2])
    )


def _as_mask(op: qc.AttentionOp, conjunction: ops.GenericOp, value: SSAValue, index: loops.Index) -> SSAValue | None:
    """One input of the conjunction as a rank-4 mask, with size 1 where it repeats. None if it is not such a view."""
    inverse = loops.inverse_permutation(loops.output_index(conjunction))
    assert inverse is not None and op.mask is not None
    at = loops.compose(index, inverse)
    return as_extra(op, value, at, shape_of(op.mask.type)) if can_be_extra(value, at) else None


def _set_mask(op: qc.AttentionOp, mask: SSAValue | None, last: SSAValue | None = None) -> None:
    old, last = op.mask, last if last is not None else op.last
    more = (mask, last, op.sinks)
    op.operands = [op.q, op.k, op.v, *(value for value in more if value is not None)]
    sizes = [1, 1, 1, *(int(value is not None) for value in more)]
    op.properties["operandSegmentSizes"] = DenseArrayBase.from_list(i32, sizes)
    owner = loops.producer(old) if old is not None else None
    if owner is not None:
        erase_if_dead(owner)


def remove_useless_masks(function: func.FuncOp, context: QCContext) -> None:
    """Removes masks and flags that cannot change the result at this entry point's sizes."""
    reader = MaskReader(function, context)
    for op in list(function.body.block.ops):
        if not isinstance(op, qc.AttentionOp):
            continue
        while simplify_mask(op, reader, context, "hoist-constant-masks"):
            pass  # a conjunction loses one part at a time
        queries, keys = shape_of(op.q.type)[2], shape_of(op.k.type)[2]
        if op.keys_back is not None and op.last is None and reader.longest(queries) <= op.keys_back:
            del op.properties["window"]
            why = f"no query is further than {op.keys_back} from the first key"
            context.report.add("hoist-constant-masks", path_of(op), "the flag `window` is dropped", why)
        if op.causal is not None and keys == 1:
            del op.properties["causal"]
            why = "there is one key, which every query sees"
            context.report.add("hoist-constant-masks", path_of(op), "the flag `causal` is dropped", why)
