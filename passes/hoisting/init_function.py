"""Builds `@init`, the function that computes what depends on no input, once per device at load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue

from qcompiler.ir.effects import erase_dead
from qcompiler.ir.module import INIT, init_func, result_keys, return_op, set_result_keys, update_function_type
from qcompiler.passes.hoisting.cones import Built


@dataclass
class InitBuilder:
    """Collects the results of `@init`. Entry points that need equal results share one."""

    module: ModuleOp
    block: Block
    keys: list[str]
    values: list[SSAValue]
    known: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(module: ModuleOp) -> InitBuilder:
        existing = init_func(module)
        if existing is None:
            return InitBuilder(module, Block(), [], [])
        keys, last = list(result_keys(existing)), return_op(existing)
        values = list(last.operands)
        block = existing.body.detach_block(0)
        block.erase_op(last)
        module.body.block.erase_op(existing)
        return InitBuilder(module, block, keys, values)

    def add(self, built: Built, text: str) -> str:
        """Adds a value to the results; returns its key. `text` describes what the value is computed from."""
        if text not in self.known:
            key = f"{INIT}.{len(self.keys)}"
            self.known[text] = key
            self.keys.append(key)
            self.values.append(built.value)
        return self.known[text]

    def finish(self) -> None:
        """Inserts `@init` before the entry points, if it has results."""
        if not self.keys:
            return
        self.block.add_op(func.ReturnOp(*self.values))
        erase_dead(self.block)
        function = func.FuncOp(INIT, ([], [v.type for v in self.values]), Region(self.block))
        set_result_keys(function, self.keys)
        update_function_type(function)
        first = self.module.body.block.first_op
        assert first is not None
        self.module.body.block.insert_op_before(function, first)


def cone_text(value: SSAValue) -> str:
    """What a value is computed from, as text: equal texts mean equal values."""
    order: list[Operation] = []
    seen: set[Operation] = set()

    def visit(op: Operation) -> None:
        if op in seen:
            return
        seen.add(op)
        for operand in op.operands:
            if isinstance(operand.owner, Operation):
                visit(operand.owner)
        order.append(op)

    assert isinstance(value.owner, Operation)
    visit(value.owner)
    return _text_of(order)


def _text_of(ops_: Iterable[Operation], arguments: Sequence[SSAValue] = ()) -> str:
    """Ops as lines. A value is named by its line number, or by its place among the arguments of a body."""
    number: dict[SSAValue, int] = {argument: -n for n, argument in enumerate(arguments, 1)}
    lines: list[str] = []
    for op in ops_:
        bodies = []
        for region in op.regions:
            bodies += [_text_of(block.ops, block.args) for block in region.blocks]
        reads = [number[v] for v in op.operands]
        properties = {key: str(value) for key, value in sorted(op.properties.items())}
        lines.append(f"{op.name}{reads}{properties}{bodies}{[str(t) for t in op.result_types]}")
        number.update((result, len(lines)) for result in op.results)
    return "\n".join(lines)
