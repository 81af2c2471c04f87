"""Which ops are pure, which touch a state, and what goes when nobody reads it."""

from __future__ import annotations

import pytest
from xdsl.ir import Block, Operation
from xdsl.traits import IsTerminator, MemoryEffect, MemoryEffectKind

from qcompiler.ir.effects import effects_of, erase_dead, erase_if_dead, is_dead, is_pure, is_removable
from qcompiler.ir.module import main_func
from qcompiler.ir.qc import QC
from qcompiler.ir.text import parse_module


def block_of(body: str, results: str = "") -> Block:
    """The block of `@main(%x: tensor<4x8xf32>)` with these lines."""
    arrow = f" -> ({results})" if results else ""
    text = f"builtin.module {{\n func.func @main(%x: tensor<4x8xf32>){arrow} {{\n{body}\n }}\n}}"
    return main_func(parse_module(text)).body.block


def names(block: Block) -> list[str]:
    return [op.name for op in block.ops]


STATE = """
  %s = qc.state @kv : tensor<4x8xf32>
  %y = qc.softmax %s {axis = 1} : tensor<4x8xf32>
  qc.state_update @kv %y
  func.return
"""


def test_states_are_read_and_written_by_key() -> None:
    state, softmax, update, end = block_of(STATE).ops
    for op, kind in ((state, MemoryEffectKind.READ), (update, MemoryEffectKind.WRITE)):
        effects = effects_of(op)
        assert effects is not None
        (effect,) = effects
        assert (effect.kind, str(effect.value), effect.resource.name()) == (kind, "@kv", "state")
        assert not is_pure(op)
    assert is_pure(softmax)
    assert [is_removable(op) for op in (state, softmax, update, end)] == [True, True, False, False]


def test_what_writes_a_state_keeps_what_it_reads() -> None:
    block = block_of(STATE)
    assert erase_dead(block) == 0
    assert names(block) == ["qc.state", "qc.softmax", "qc.state_update", "func.return"]


@pytest.mark.parametrize("kind", list(QC.operations), ids=lambda kind: kind.name)
def test_every_op_of_qc_declares_its_effects(kind: type[Operation]) -> None:
    declared = any(isinstance(trait, MemoryEffect) for trait in kind.traits)
    assert declared or kind.has_trait(IsTerminator)


def test_an_op_of_unknown_effects_stays() -> None:
    (first, *_) = block_of('%0 = "test.op"(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>\n func.return').ops
    assert effects_of(first) is None
    assert not is_dead(first)
    erase_if_dead(first)
    assert first.parent is not None


def test_structured_ops_are_pure_on_tensors_and_not_on_memrefs() -> None:
    text = """
      %e = tensor.empty() : tensor<8x4xf32>
      %t = linalg.transpose ins(%x : tensor<4x8xf32>) outs(%e : tensor<8x4xf32>) permutation = [1, 0]
      %m = "test.op"() : () -> memref<4xf32>
      %c = arith.constant 0.0 : f32
      linalg.fill ins(%c : f32) outs(%m : memref<4xf32>)
      func.return
    """
    block = block_of(text)
    _, transpose, _, _, fill, _ = block.ops
    assert is_pure(transpose)
    assert not is_pure(fill)
    assert erase_dead(block) == 2
    assert names(block) == ["test.op", "arith.constant", "linalg.fill", "func.return"]


def test_a_chain_goes_with_its_last_reader_and_no_further() -> None:
    text = """
      %a = qc.softmax %x {axis = 0} : tensor<4x8xf32>
      %b = qc.softmax %a {axis = 1} : tensor<4x8xf32>
      %c = qc.softmax %b {axis = 0} : tensor<4x8xf32>
      func.return %a : tensor<4x8xf32>
    """
    block = block_of(text, "tensor<4x8xf32>")
    erased: list[str] = []

    def erase(op: Operation) -> None:
        erased.append(op.results[0].name_hint or op.name)
        block.erase_op(op)

    erase_if_dead(list(block.ops)[1], erase)
    assert erased == []  # %c reads it
    erase_if_dead(list(block.ops)[2], erase)
    assert erased == ["c", "b"]
    assert names(block) == ["qc.softmax", "func.return"]


def test_dead_ops_of_a_body_go_and_its_terminator_stays() -> None:
    text = """
      %e = tensor.empty() : tensor<4x8xf32>
      %y = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
             iterator_types = ["parallel", "parallel"]} ins(%x : tensor<4x8xf32>) outs(%e : tensor<4x8xf32>) {
        ^bb0(%a : f32, %b : f32):
          %i = linalg.index 0 : index
          %n = arith.negf %a : f32
          linalg.yield %a : f32
      } -> tensor<4x8xf32>
      func.return %y : tensor<4x8xf32>
    """
    block = block_of(text, "tensor<4x8xf32>")
    assert erase_dead(block) == 2
    assert names(list(block.ops)[1].regions[0].block) == ["linalg.yield"]
