"""A verifier that looks at changed ops finds what a verification of the whole module finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from xdsl.dialects.builtin import FunctionType, ModuleOp, StringAttr, f64, i1
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation
from xdsl.utils.exceptions import VerifyException

from qcompiler import qcompile
from qcompiler.ir import types
from qcompiler.ir.text import parse_module, print_module
from qcompiler.ir.verified import Verifier

STAGES = ("import", "fuse-elementwise", "lower-to-rt")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 8)).eval()
    program = qcompile(model, (torch.zeros(3, 16),), quant=None)
    return {stage: program.ir(stage) for stage in STAGES}


def outcome(verify: Callable[[], object]) -> str:
    try:
        verify()
    except (VerifyException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def ops(module: ModuleOp) -> list[Operation]:
    return [op for op in module.walk() if op is not module]


def without_a_property(op: Operation) -> bool:
    if op.properties:
        op.properties.pop(next(iter(op.properties)))
    return bool(op.properties)


def with_another_type(op: Operation) -> bool:
    if op.results:
        op.results[0]._type = types.tensor((5, 7), "f32") if op.results[0].type != f64 else i1
    return bool(op.results)


def with_other_operands(op: Operation) -> bool:
    if len(op.operands) > 1:
        op.operands = [*op.operands[1:], op.operands[0]]
    return len(op.operands) > 1


def with_an_empty_block(op: Operation) -> bool:
    blocks = [block for region in op.regions for block in region.blocks]
    for block in blocks:
        for child in reversed(list(block.ops)):
            child.detach()
    return bool(blocks)


def without_an_operand(op: Operation) -> bool:
    if op.operands:
        op.operands = op.operands[:-1]
    return bool(op.operands)


def last_in_its_block(op: Operation) -> bool:
    block = op.parent
    if block is None or op.next_op is None:
        return False
    op.detach()
    block.add_op(op)
    return True


MUTATIONS = (
    without_a_property, with_another_type, with_other_operands, with_an_empty_block, without_an_operand,
    last_in_its_block,
)  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
def test_what_breaks_one_op_is_found_as_by_a_whole_verification(
    mutate: Callable[[Operation], bool], stage: str, texts: dict[str, str]
) -> None:
    refused = 0
    start = parse_module(texts[stage])
    count = len(ops(start))
    for number in range(0, count, max(count // 12, 1)):
        module = start.clone()
        verifier = Verifier()
        assert verifier.verify(module)
        assert not verifier.verify(module)
        before = print_module(module)
        if not mutate(ops(module)[number]):
            continue
        expected = outcome(module.verify)
        assert outcome(lambda v=verifier, m=module: v.verify(m)) == expected
        refused += expected != "fine"
        if expected == "fine" and print_module(module) != before:
            again = Verifier()
            again.verify(module)
            assert not again.verify(module)
    assert refused or mutate in (with_other_operands, with_another_type, without_an_operand)


def test_a_terminator_is_checked_again_when_its_function_changes(texts: dict[str, str]) -> None:
    module = parse_module(texts["import"])
    verifier = Verifier()
    verifier.verify(module)
    function = next(op for op in module.walk() if isinstance(op, FuncOp))
    assert isinstance(function.body.block.last_op, ReturnOp)
    function.properties["function_type"] = FunctionType.from_lists(function.function_type.inputs, [])
    with pytest.raises(VerifyException):
        verifier.verify(module)


def test_what_failed_fails_again_and_a_name_is_a_change(texts: dict[str, str]) -> None:
    module = parse_module(texts["import"])
    verifier = Verifier()
    verifier.verify(module)
    op = next(op for op in ops(module) if op.results and op.properties)
    removed = dict(op.properties)
    op.properties.clear()
    for _ in range(2):
        with pytest.raises(VerifyException):
            verifier.verify(module)
    op.properties.update(removed)
    verifier.verify(module)
    op.results[0].name_hint = "another"
    assert verifier.verify(module)
    op.attributes["note"] = StringAttr("new")
    assert verifier.verify(module)
    assert not verifier.verify(module)
