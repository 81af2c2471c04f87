"""Verifies a module after each stage, and only the ops that the stage changed.

A compilation verifies its module thirty times, and most passes change few ops.  `Verifier` keeps what an op was when it
was last verified: its place, operands, types, properties, attributes and blocks.  All of these are immutable objects,
so that an op whose record holds the same objects is the same op.
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from xdsl.ir import Block, Operation
from xdsl.traits import NoTerminator, SymbolUserOpInterface
from xdsl.utils.exceptions import VerifyException

_Record = tuple[Any, ...]


class Verifier:
    """Verifies one module again and again."""

    def __init__(self) -> None:
        self._known: dict[Operation, _Record] = {}

    def verify(self, module: Operation) -> bool:
        """Verifies what changed since the last call. Returns whether anything did.

        Raises what `module.verify()` raises: VerifyException, or ValueError for links that do not fit together.
        """
        found: dict[Operation, _Record] = {}
        changed = self._verify(module, found)
        self._known = found
        return changed

    def _verify(self, op: Operation, found: dict[Operation, _Record]) -> bool:
        """An op whose region changed is verified as well: its checks look into its blocks."""
        changed = False
        for region in op.regions:
            for block in region.blocks:
                if block.parent is not region:
                    raise ValueError("Parent pointer of block does not refer to containing region")
                _check_end(op, block, len(region.blocks))
                for child in block.ops:
                    if child.parent is not block:
                        raise ValueError("Parent pointer of operation does not refer to containing region")
                    changed |= self._verify(child, found)
        record = found[op] = _record(op)
        if changed or not _same(record, self._known.get(op, ())) or op.has_trait(SymbolUserOpInterface):
            op.verify(verify_nested_ops=False)
            return True
        return False


def _check_end(op: Operation, block: Block, blocks: int) -> None:
    if block.first_op is None and blocks == 1 and not op.has_trait(NoTerminator):
        raise VerifyException(
            f"Operation {op.name} contains empty block in single-block region that expects at least a terminator"
        )


def _record(op: Operation) -> _Record:
    """All that the checks of an op read, and its text shows."""
    values = (
        *op.operands,
        *op.results,
        *(arg for region in op.regions for block in region.blocks for arg in block.args),
    )
    parts: list[Any] = [op.parent, op.next_op, *op.successors, *values]
    parts += [each for value in values for each in (value.type, value.name_hint)]
    parts += chain.from_iterable(op.properties.items())
    parts += chain.from_iterable(op.attributes.items())
    parts += [each for region in op.regions for block in region.blocks for each in (block, block.first_op)]
    if op.next_op is None and (parent := op.parent_op()) is not None:
        parts += parent.properties.values()  # a terminator is checked against them
    return tuple(parts)


def _same(record: _Record, known: _Record) -> bool:
    """Identity, since 0.0 equals -0.0."""
    return len(record) == len(known) and all(map(operator.is_, record, known))


__all__ = ["Verifier"]
