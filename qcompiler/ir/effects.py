"""The side effects of ops: which ops are pure, which may be removed, and which read or write a state.

Effects are traits of the ops: xDSL's `Pure`, and here `ReadsState` and `WritesState`. xDSL declares no effects for
`linalg`, and this project does not change xDSL's classes, so the table `_ON_TENSORS` replaces the missing traits. An op
of unknown effects is never pure and never dead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass

from xdsl.dialects.builtin import SymbolRefAttr
from xdsl.dialects.linalg import Linalg
from xdsl.ir import Block, Operation, OpResult
from xdsl.traits import (
    EffectInstance,
    IsTerminator,
    MemoryEffect,
    MemoryEffectKind,
    NoMemoryEffect,
    Resource,
    get_effects,
)

_ON_TENSORS = frozenset(Linalg.operations)
"""The ops of `linalg`. With results they compute new tensors; without results they write memrefs, or are yields."""

_NONE: Set[EffectInstance] = frozenset()


@dataclass(frozen=True)
class _States(Resource):
    def name(self) -> str:
        return "state"


class _StateEffect(MemoryEffect):
    """An effect on the state that the op's property `sym` names."""

    @classmethod
    def effects_of_kind(cls, op: Operation, kind: MemoryEffectKind) -> Set[EffectInstance]:
        key = op.properties["sym"]
        assert isinstance(key, SymbolRefAttr)
        return frozenset({EffectInstance(kind, key, _States())})


class ReadsState(_StateEffect):
    """The results depend on the value of a state."""

    @classmethod
    def get_effects(cls, op: Operation) -> Set[EffectInstance]:
        return cls.effects_of_kind(op, MemoryEffectKind.READ)


class WritesState(_StateEffect):
    """The op changes a state."""

    @classmethod
    def get_effects(cls, op: Operation) -> Set[EffectInstance]:
        return cls.effects_of_kind(op, MemoryEffectKind.WRITE)


def effects_of(op: Operation) -> Set[EffectInstance] | None:
    """What an op reads and writes besides its operands and results. None if that is unknown."""
    if type(op) in _ON_TENSORS:
        return _NONE if op.results else None
    return _NONE if _declares_none(type(op)) else get_effects(op)


@functools.cache
def _declares_none(kind: type[Operation]) -> bool:
    """Whether a class of ops declares that it has no effects. The answer is cached, since passes ask often."""
    declared = [trait for trait in kind.traits if isinstance(trait, MemoryEffect)]
    return bool(declared) and all(isinstance(trait, NoMemoryEffect) for trait in declared)


def is_pure(op: Operation) -> bool:
    """Whether the results depend only on operands and attributes, and the op has no other effect."""
    return effects_of(op) == _NONE and not op.has_trait(IsTerminator)


def is_removable(op: Operation) -> bool:
    """Whether the op may be removed if its results have no readers: it changes nothing."""
    effects = effects_of(op)
    reads = effects is not None and all(effect.kind is MemoryEffectKind.READ for effect in effects)
    return reads and not op.has_trait(IsTerminator)


def is_dead(op: Operation) -> bool:
    """Whether the op's results have no readers, and the op may be removed."""
    return all(result.first_use is None for result in op.results) and is_removable(op)


def erase_dead(block: Block) -> int:
    """Erases every dead op of a block and of the bodies in it, from last to first. Returns their number."""
    erased = 0
    for op in reversed(list(block.ops)):
        if is_dead(op):
            block.erase_op(op)
            erased += 1
            continue
        for region in op.regions:
            erased += sum(erase_dead(inner) for inner in region.blocks)
    return erased


def erase_if_dead(op: Operation, erase: Callable[[Operation], None] | None = None) -> None:
    """Erases an op if it is dead, then its producers that become dead. `erase` may be a rewriter's method."""
    stack = [op]
    while stack:
        each = stack.pop()
        block = each.parent
        if block is None or not is_dead(each):
            continue
        producers = [value.op for value in each.operands if isinstance(value, OpResult)]
        (erase or block.erase_op)(each)
        stack += producers
