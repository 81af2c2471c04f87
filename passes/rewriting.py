"""Rewrite patterns, and the driver that applies them.

    @pattern
    def drop_whole_slice(op: tensor.ExtractSliceOp, rewriter: PatternRewriter) -> SSAValue | None:
        return op.source if op.source.type == op.result.type else None

    rewrite(function.body.block, [drop_whole_slice])

A pattern is an xDSL `RewritePattern`. Its function gets an op of the type in its signature, and a rewriter. The
rewriter inserts new ops in front of that op and gives them its `qc.path`. The function returns

    None                the pattern does not apply, and nothing was changed
    a value             replaces the op's only result; ops without readers are erased
    the op's own result the op was changed in place

The driver is not xDSL's walker. That one replaces the errors that users see by its own, and does not notice two
patterns that undo each other.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from xdsl.ir import Block, Operation, SSAValue
from xdsl.pattern_rewriter import PatternRewriter, RewritePattern
from xdsl.rewriter import InsertPoint

from qcompiler.errors import PassError
from qcompiler.ir import build
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import path_of

OpT = TypeVar("OpT", bound=Operation)
_VISITS_PER_OP = 50  # an op is rewritten a few times; more visits mean that two patterns undo each other


class Pattern(RewritePattern):
    """A pattern that calls a function. `kinds` are the types of ops that it may apply to."""

    def __init__(
        self, rule: Callable[[Any, PatternRewriter], SSAValue | None], kinds: Iterable[type[Operation]]
    ) -> None:
        self.rule = rule
        self.kinds = tuple(kinds)
        self.__doc__ = rule.__doc__

    def match_and_rewrite(self, op: Operation, rewriter: PatternRewriter, /) -> None:
        value = self.rule(op, rewriter) if isinstance(op, self.kinds) else None
        if value is None:
            return
        if value is op.results[0]:
            rewriter.notify_op_modified(op)
        else:
            rewriter.replace_all_uses_with(op.results[0], value)
            erase_if_dead(op, rewriter.erase)
        rewriter.has_done_action = True


def pattern(rule: Callable[[OpT, PatternRewriter], SSAValue | None]) -> Pattern:
    """Makes a pattern of a function, for the op types in its signature. See the module's docstring."""
    first = next(iter(inspect.signature(rule, eval_str=True).parameters.values())).annotation
    return Pattern(rule, typing.get_args(first) or (first,))


def rewrite(
    ops: Block | Iterable[Operation], patterns: Sequence[Pattern], *, again: bool = True, backward: bool = False
) -> int:
    """Applies to each op the first pattern that fits. Returns the number of rewrites.

    For a block, all its ops are visited in order, and the ops of a body before the op that has it. With `again`, the
    ops that a pattern inserts or changes, and the readers of a replaced value, are visited again until no pattern
    applies. `backward` visits the last op first.
    """
    listed = list(ops.walk(region_first=True) if isinstance(ops, Block) else ops)
    stack = listed if backward else listed[::-1]
    waiting = set(stack)
    budget = 1000 + _VISITS_PER_OP * len(stack)
    by_kind: dict[type[Operation], list[Pattern]] = {}
    count = 0
    while stack:
        op = stack.pop()
        waiting.discard(op)
        kind = type(op)
        if kind not in by_kind:
            by_kind[kind] = [each for each in patterns if issubclass(kind, each.kinds)]
        if not by_kind[kind] or op.parent is None:  # no parent: the op was erased
            continue
        budget -= 1
        if budget < 0:
            message = f"two patterns undo each other at {op.name} of '{path_of(op)}'; please report this as a bug"
            raise PassError(message, stage="rewriting")
        touched = _apply_first(op, by_kind[kind])
        if touched is None:
            continue
        count += 1
        for each in reversed(touched) if again else ():
            if each not in waiting:
                waiting.add(each)
                stack.append(each)
    return count


def _apply_first(op: Operation, patterns: Sequence[Pattern]) -> list[Operation] | None:
    """Applies the first pattern that fits. Returns the inserted and changed ops in order, or None if none fits."""
    inserted: list[Operation] = []
    changed: list[Operation] = []
    rewriter = PatternRewriter(InsertPoint.before(op))
    rewriter.operation_insertion_handler = [build.stamp(lambda: path_of(op)), inserted.append]
    rewriter.operation_modification_handler = [changed.append]
    for each in patterns:
        each.match_and_rewrite(op, rewriter)
        if rewriter.has_done_action:
            return [*inserted, *changed]
    return None
