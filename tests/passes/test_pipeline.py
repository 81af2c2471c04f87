"""The pipeline names the pass that fails or lies, and leaves what repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, ModuleOp, bf16, f16, f32
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass

from qcompiler.errors import KernelSelectionError, NumericsError, PassError, QCompilerError
from qcompiler.ir.text import parse_module
from qcompiler.passes.checks.answers import answers, unrounded_answers
from qcompiler.passes.checks.numerics import Exact, Numerics, Reordered, Ulps, difference
from qcompiler.passes.fuse_elementwise import FuseElementwisePass
from qcompiler.passes.pipeline import ALL_PASSES, PASS_NAMES, STAGES, Stage, load_pass, run_pipeline, upto


@dataclass(frozen=True)
class PlantedPass(ModulePass):
    """Turns additions into subtractions: the wrong rewrite that the check must find."""

    name = "planted"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for each in list(op.walk()):
            if isinstance(each, arith.AddfOp):
                block = each.parent_block()
                assert block is not None
                wrong = arith.SubfOp(each.lhs, each.rhs)
                block.insert_op_before(wrong, each)
                each.result.replace_all_uses_with(wrong.result)
                block.erase_op(each)


@dataclass(frozen=True)
class BreakingPass(ModulePass):
    """Fails after it has changed the module."""

    name = "breaking"
    error: ClassVar[type[Exception]] = ValueError

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        PlantedPass().apply(ctx, op)
        raise self.error("no such thing")


@dataclass(frozen=True)
class RefusingPass(BreakingPass):
    name = "refusing"
    error: ClassVar[type[Exception]] = KernelSelectionError


def with_planted(wrong: type[ModulePass], name: str) -> list[Stage]:
    before = [s for s in STAGES if s.name in ("canonicalize", "fuse-elementwise")]
    return [before[0], Stage(name, wrong), before[1]]


def addition(make: Any) -> list[np.ndarray[Any, Any]]:
    x = make.arg(("s", 8))
    make.finish(make.pointwise(math.ExpOp, make.pointwise(arith.AddfOp, x, make.const(8))))
    return [np.ones((3, 8), np.float32)]


def test_a_wrong_rewrite_is_named_with_its_stage(make: Any) -> None:
    inputs = addition(make)
    with pytest.raises(NumericsError, match="stage 'planted' changed the program's answer") as caught:
        stages = with_planted(PlantedPass, "planted")
        run_pipeline(make.module, make.ctx, stages=stages, verify_each="numerics", sample_inputs=inputs)
    assert caught.value.stage == "planted"


def test_without_the_check_the_wrong_rewrite_goes_unseen(make: Any) -> None:
    addition(make)
    run_pipeline(make.module, make.ctx, stages=with_planted(PlantedPass, "planted"))


@dataclass(frozen=True)
class LyingPass(ModulePass):
    """Fuses nests, which deletes roundings, and puts operations behind exponentials, of which it says nothing."""

    numerics: ClassVar[Numerics] = Ulps(2)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        FuseElementwisePass().apply(ctx, op)
        for each in [e for e in op.walk() if isinstance(e, math.ExpOp)]:
            block, added = each.parent_block(), self.behind(each.result)
            assert block is not None
            block.insert_ops_after(added, each)
            each.result.replace_uses_with_if(added[-1].results[0], lambda use, added=added: use.operation not in added)

    def behind(self, value: SSAValue) -> list[Operation]:
        raise NotImplementedError


@dataclass(frozen=True)
class DriftingPass(LyingPass):
    """Makes them larger by a quarter of a last place of bf16."""

    name = "drifting"

    def behind(self, value: SSAValue) -> list[Operation]:
        factor = arith.ConstantOp(FloatAttr(1 + 2.0**-9, f32))
        return [factor, arith.MulfOp(value, factor.result)]


def rounded_sum(make: Any, *then: Any) -> list[np.ndarray[Any, Any]]:
    """x + w in bf16, and then the operations."""
    x = make.arg(("s", 8), "bf16")
    value = make.pointwise(arith.AddfOp, x, make.const(8, values=np.full(8, 0.1, ml_dtypes.bfloat16)))
    for each in then:
        value = make.pointwise(each, value) if each is math.ExpOp else make.pointwise(each, value, x)
    make.finish(value)
    return [np.linspace(1, 3, 24).reshape(3, 8).astype(ml_dtypes.bfloat16)]


def test_a_rewrite_that_hides_behind_a_deleted_rounding_is_named(make: Any) -> None:
    """Results without any rounding show it: with roundings it moves none further than the deletion may."""
    inputs = rounded_sum(make, math.ExpOp)
    with pytest.raises(NumericsError, match=r"without roundings to 16 bits: result 0 differs by 0\.00"):
        stages = with_planted(DriftingPass, "drifting")
        run_pipeline(make.module, make.ctx, stages=stages, verify_each="numerics", sample_inputs=inputs)


def test_a_deleted_rounding_may_change_all_that_follows(make: Any) -> None:
    """(x + 0.1) - x is 0.09375 to 0.109375 in bf16 where x is small, and 0.1 without the rounding between them."""
    inputs = rounded_sum(make, arith.SubfOp)
    before = answers(make.module, make.ctx, inputs, {})["main"][0].astype(np.float32)
    run_pipeline(make.module, make.ctx, stages=upto("fuse-elementwise"), verify_each="numerics", sample_inputs=inputs)
    after = answers(make.module, make.ctx, inputs, {})["main"][0].astype(np.float32)
    assert np.abs(after - before).max() > 2 * 2.0**-7 * np.sqrt((before**2).mean())


@dataclass(frozen=True)
class NarrowingPass(LyingPass):
    """Rounds them to fp16, in which large ones are infinite."""

    name = "narrowing"

    def behind(self, value: SSAValue) -> list[Operation]:
        half = arith.TruncFOp(value, f16)
        return [half, arith.ExtFOp(half.result, f32)]


@pytest.mark.parametrize("largest", [3.0, 12.0])
def test_a_rounding_to_another_type_is_named(make: Any, largest: float) -> None:
    """Results without roundings would not show it."""
    inputs = rounded_sum(make, math.ExpOp)
    inputs = [(inputs[0].astype(np.float32) * (largest / 3)).astype(ml_dtypes.bfloat16)]
    stages = with_planted(NarrowingPass, "narrowing")
    with pytest.raises(NumericsError, match="stage 'narrowing'"):
        run_pipeline(make.module, make.ctx, stages=stages, verify_each="numerics", sample_inputs=inputs)


@pytest.mark.parametrize("between", ["f32", "bf16"])
def test_fp64_is_compared_with_its_roundings(make: Any, between: str) -> None:
    """x is rounded to fp32 or bf16 between two nests in fp64: without 16-bit roundings it would still be, to fp32."""
    narrow, wide = {"f32": f32, "bf16": bf16}[between], "f64"
    text = f"""
    func.func @main(%x: tensor<8xf64>) -> tensor<8xf64> {{
      %e = tensor.empty() : tensor<8x{between}>
      %y = linalg.generic {{indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
          iterator_types = ["parallel"]}} ins(%x : tensor<8xf64>) outs(%e : tensor<8x{between}>) {{
      ^bb0(%a: f64, %b: {narrow}):
        %c = arith.mulf %a, %a : f64
        %d = arith.truncf %c : f64 to {narrow}
        linalg.yield %d : {narrow}
      }} -> tensor<8x{between}>
      %f = tensor.empty() : tensor<8x{wide}>
      %z = linalg.generic {{indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
          iterator_types = ["parallel"]}} ins(%y : tensor<8x{between}>) outs(%f : tensor<8x{wide}>) {{
      ^bb0(%a: {narrow}, %b: f64):
        %c = arith.extf %a : {narrow} to f64
        %d = arith.addf %c, %c : f64
        linalg.yield %d : f64
      }} -> tensor<8x{wide}>
      func.return %z : tensor<8x{wide}>
    }}"""
    module = parse_module(text)
    inputs = [np.linspace(1, 2, 8)]
    run_pipeline(module, make.ctx, stages=upto("fuse-epilogues"), verify_each="numerics", sample_inputs=inputs)
    assert not [op for op in module.walk() if isinstance(op, arith.TruncFOp)], "nothing was deleted"


def test_a_program_that_reads_bits_has_no_results_without_roundings(make: Any) -> None:
    text = """
    func.func @main(%x: tensor<8xbf16>) -> tensor<8xi16> {
      %e = tensor.empty() : tensor<8xi16>
      %y = linalg.generic {indexing_maps = [affine_map<(i) -> (i)>, affine_map<(i) -> (i)>],
          iterator_types = ["parallel"]} ins(%x : tensor<8xbf16>) outs(%e : tensor<8xi16>) {
      ^bb0(%a: bf16, %b: i16):
        %bits = arith.bitcast %a : bf16 to i16
        linalg.yield %bits : i16
      } -> tensor<8xi16>
      func.return %y : tensor<8xi16>
    }"""
    module = parse_module(text)
    x = [np.arange(8).astype(ml_dtypes.bfloat16)]
    assert answers(module, make.ctx, x, {})["main"][0][1] == 0x3F80
    assert unrounded_answers(module, make.ctx, x, {}) is None


def test_a_failing_pass_leaves_the_ir_before_it_and_the_command(make: Any) -> None:
    addition(make)
    with pytest.raises(PassError, match="stage 'breaking' failed: no such thing") as caught:
        run_pipeline(make.module, make.ctx, stages=with_planted(BreakingPass, "breaking"))
    assert caught.value.reproducer is not None
    text = Path(caught.value.reproducer).read_text()
    assert text.startswith(f"// RUN: qc opt -p breaking {caught.value.reproducer}")
    assert "arith.addf" in text and "arith.subf" not in text, "the IR must be the one before the pass"
    parse_module(text).verify()


def test_errors_with_a_class_of_their_own_keep_it_and_name_the_stage(make: Any) -> None:
    addition(make)
    with pytest.raises(KernelSelectionError) as caught:
        run_pipeline(make.module, make.ctx, stages=with_planted(RefusingPass, "refusing"))
    assert "in stage 'refusing'; to reproduce:" in caught.value.__notes__[0]


def test_each_stage_is_reported_with_its_time(make: Any) -> None:
    addition(make)
    seen: list[str] = []
    times = run_pipeline(
        make.module,
        make.ctx,
        stages=upto("fuse-elementwise"),
        on_stage=lambda name, module, seconds, changed: seen.append(name),
    )
    assert seen == [t.name for t in times] == [s.name for s in upto("fuse-elementwise")]
    assert all(t.seconds >= 0 for t in times)


def test_inputs_that_fit_no_entry_point_are_refused(make: Any) -> None:
    addition(make)
    with pytest.raises(QCompilerError, match="no entry point takes the sample inputs"):
        run_pipeline(
            make.module, make.ctx, stages=[], verify_each="numerics", sample_inputs=[np.ones((99, 8), np.float32)]
        )


def test_numerics_without_inputs_is_an_error(make: Any) -> None:
    addition(make)
    with pytest.raises(QCompilerError, match="needs sample inputs"):
        run_pipeline(make.module, make.ctx, stages=[], verify_each="numerics")


def test_unknown_names_are_listed() -> None:
    with pytest.raises(PassError, match="there is no pass 'fuse'"):
        load_pass("fuse")
    with pytest.raises(PassError, match="there is no stage 'fuse'"):
        upto("fuse")


@pytest.mark.parametrize("name", PASS_NAMES)
def test_every_pass_is_found_under_its_name(name: str) -> None:
    assert ALL_PASSES[name]().name == name


@pytest.mark.parametrize(
    ("numerics", "deleted", "shift", "fine"),
    [
        (Exact(), 0, 0.0, True),
        (Exact(), 0, 1e-7, False),
        (Ulps(2), 0, 1e-7, False),
        (Ulps(2), 1, 2.0**-7, True),
        (Ulps(2), 1, 2.0**-4, False),
        (Reordered(1e-5), 0, 1e-6, True),
    ],
)
def test_what_each_promise_allows(numerics: Numerics, deleted: int, shift: float, fine: bool) -> None:
    old = np.ones(4, np.float32)
    epsilon = 2.0**-7 if isinstance(numerics, Ulps) else 2.0**-23
    found = difference([old], [old + np.float32(shift)], numerics, roundings_deleted=deleted, epsilon=epsilon)
    assert (found is None) == fine


def test_a_new_nan_is_a_difference_whatever_is_promised() -> None:
    old = np.ones(4, ml_dtypes.bfloat16)
    new = old.copy()
    new[2] = np.nan
    assert difference([old], [new], Reordered(1.0), roundings_deleted=9, epsilon=2.0**-7) is not None
