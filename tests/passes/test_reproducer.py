"""The command that a failing pass leaves does repeat it, whatever stage it is and whatever that stage reads."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import KernelSelectionError, NumericsError, PassError
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.text import parse_module
from qcompiler.passes import pipeline
from qcompiler.passes.checks.reproducer import LARGEST_KEPT, read_all, read_context, write_context
from qcompiler.passes.pipeline import STAGES, Stage, parse_passes, with_options
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.weights import StoredTensor


class Small(nn.Module):
    def __init__(self, last: Any = torch.tanh) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(64, 32), last

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.layer(x))


def command_of(path: Path) -> list[str]:
    """The arguments of `qc` in the first line of a reproducer."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("// RUN: qc ")
    return shlex.split(first.removeprefix("// RUN: qc "))


def test_the_command_of_a_refusing_pass_gives_the_same_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    model = Small(lambda y: torch.softmax(y.double(), dim=-1)).eval()
    with pytest.raises(KernelSelectionError, match=r"qc\.softmax .* is f64") as caught:
        qc.qcompile(model, (torch.randn(3, 64),), quant="nf4")
    note = caught.value.__notes__[0]
    assert note.startswith("in stage 'select-kernels'; to reproduce: ")
    capsys.readouterr()
    assert main(command_of(Path(note.rpartition(" ")[2]))) == 1
    assert str(caught.value) in capsys.readouterr().err


def test_a_disk_without_room_for_a_reproducer_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    monkeypatch.setattr(pipeline, "STAGES", failing("cse"))
    ctx = QCContext.default()
    with pytest.raises(PassError, match="stage 'cse' failed: a bug\nno reproducer could be written: ") as caught:
        pipeline.run_pipeline(parse_module("builtin.module {}"), ctx)
    assert caught.value.reproducer is None


def failing(at: str) -> tuple[Stage, ...]:
    """The pipeline with a stage that fails after doing its work: what a bug in a real pass looks like."""
    real = next(stage for stage in STAGES if stage.name == at)

    @dataclass(frozen=True)
    class Failing(ModulePass):
        name: ClassVar[str] = at

        def apply(self, ctx: Context, op: ModuleOp) -> None:
            real.make().apply(ctx, op)
            raise ValueError("a bug")

    return tuple(Stage(at, Failing) if stage.name == at else stage for stage in STAGES)


@pytest.mark.parametrize("at", [stage.name for stage in STAGES])
def test_the_command_of_every_stage_runs_that_stage(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "STAGES", failing(at))
    with pytest.raises(PassError, match=f"stage '{at}' failed: a bug") as caught:
        qc.qcompile(Small().eval(), (torch.randn(3, 64),), quant="int8")
    assert caught.value.reproducer is not None
    command = command_of(Path(caught.value.reproducer))
    monkeypatch.undo()
    assert main(command) == 0, capsys.readouterr().err  # the real pass has no bug, so it runs to its end
    assert "builtin.module" in capsys.readouterr().out


def test_a_wrong_rewrite_in_a_whole_compilation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Wrong(ModulePass):
        name: ClassVar[str] = "fuse-epilogues"

        def apply(self, ctx: Context, op: ModuleOp) -> None:
            for each in op.walk():
                if each.name == "math.tanh":
                    each.result.replace_all_uses_with(each.operands[0])  # type: ignore[attr-defined]

    stages = tuple(Stage(s.name, Wrong) if s.name == "fuse-epilogues" else s for s in STAGES)
    monkeypatch.setattr(pipeline, "STAGES", stages)
    model, x = Small().eval(), torch.randn(3, 64)
    with pytest.raises(NumericsError, match="stage 'fuse-epilogues' changed the program's answer") as caught:
        qc.qcompile(model, (x,), quant="nf4", verify_each="numerics")
    assert caught.value.stage == "fuse-epilogues" and caught.value.reproducer is not None
    folder = Path(caught.value.reproducer).parent
    report = (folder / "report.txt").read_text()
    assert f"qc reduce {caught.value.reproducer}" in report and "changed the program's answer" in report
    assert command_of(Path(caught.value.reproducer))[-2:] == ["--verify-each", "numerics"]
    context, samples = read_all(folder / "context.safetensors")
    assert samples is not None and np.array_equal(samples.inputs[0], x.numpy())
    assert all(weight.data.any() for weight in context.weights), "a wrong answer needs the values of weights"
    qc.qcompile(model, (x,), quant="nf4")  # nothing else notices


def test_a_context_comes_back_with_small_weights_by_value_and_the_rest_by_size(tmp_path: Path) -> None:
    ctx = QCContext.default(target=Target("cpu", "x86-64-v3"), devices=("cpu", "sim:0"), device_map={"a": "sim:0"})
    mask = np.tril(np.ones((5, 5), np.bool_))
    ctx.weights.add_array("mask", mask, ("model.mask",))
    ctx.weights.add_array("large", np.ones(LARGEST_KEPT // 4 + 1, np.float32))
    packed = np.full(3 * 40, 7, np.uint8)
    ctx.weights.add(StoredTensor("w", "bf16", (3, 32), packed, FormatRef("int8"), "canonical", ("w", "tied")))
    write_context(ctx, tmp_path / "context")
    back = read_context(tmp_path / "context")
    assert (back.target, back.devices, back.device_map) == (ctx.target, ctx.devices, ctx.device_map)
    assert np.array_equal(back.weights["mask"].array(), mask)
    assert not back.weights["large"].array().any() and back.weights["large"].shape == ctx.weights["large"].shape
    again = back.weights["w"]
    assert (again.format, again.parameters, again.data.nbytes) == (FormatRef("int8"), ("w", "tied"), packed.nbytes)


def test_a_file_that_is_no_context_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.mlir").write_text("builtin.module {\n}\n")
    (tmp_path / "other").write_bytes(b"something else")
    assert main(["opt", str(tmp_path / "empty.mlir"), "--context", str(tmp_path / "other")]) == 1
    assert "is not the context file of a reproducer" in capsys.readouterr().err


def test_a_reproducer_names_the_options_of_its_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = next(stage for stage in STAGES if stage.name == "specialize").make().__class__

    @dataclass(frozen=True)
    class Failing(real):  # type: ignore[misc,valid-type]
        def apply(self, ctx: Context, op: ModuleOp) -> None:
            raise ValueError("a bug")

    stages = tuple(Stage(s.name, Failing) if s.name == "specialize" else s for s in STAGES)
    monkeypatch.setattr(pipeline, "STAGES", stages)
    sizes, buckets = {"x": {0: ("b", 1, 9)}}, [("it's one", {"b": (1, 1)}), ("all", {"b": (1, 9)})]
    with pytest.raises(PassError, match="stage 'specialize' failed: a bug") as caught:
        qc.qcompile(Small().eval(), (torch.randn(3, 64),), dynamic_shapes=sizes, buckets=buckets)
    assert caught.value.reproducer is not None
    command = command_of(Path(caught.value.reproducer))
    monkeypatch.undo()
    assert main(command) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert 'func.func @"it\'s one"' in shown and "func.func @all" in shown


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("cse,nothing", "no pass 'nothing'"),
        ("assign-streams{compute-streams=many}", "the pass 'assign-streams' does not take these options"),
        ("assign-streams{streams=4}", "the pass 'assign-streams' does not take these options"),
        ("assign-streams{compute-streams=99}", "it is a number from 1 to 16"),
        ("cse{", "'cse{' is no list of passes"),
        ('specialize{buckets="decode s"}', "'decode s' is no bucket"),
    ],
)
def test_passes_and_options_that_there_are_not_are_refused(
    passes: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.mlir"
    file.write_text(
        "func.func @main(%x: tensor<2x8xf32>) -> tensor<2x8xf32> {\n  func.return %x : tensor<2x8xf32>\n}\n"
    )
    assert main(["opt", str(file), "-p", passes]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_text_of_every_pass_is_read_back(stage: Stage) -> None:
    options: dict[str, Any] = {
        "assign-streams": {"compute_streams": 3},
        "specialize": {"buckets": ("a b: s=1..2 b=3..4",)},
    }
    (made,) = [each.make() for each in with_options([stage], options)]
    assert parse_passes(str(made)) == [made]
    assert made != stage.make() or stage.name not in options
