"""`qc compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qcompiler as qc
from qcompiler.cli import main


def test_a_model_becomes_a_file_without_a_word_on_stdout(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["compile", "small_model:model", "-o", "plain.qca", "--quant", "nf4", "--layout", "canonical"])
    out, err = capsys.readouterr()
    assert (status, out) == (0, "")
    assert "wrote plain.qca" in err
    assert qc.load(workspace / "plain.qca").plan.entries[0].symbols[0].max == 16


def test_timing_prints_every_stage(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compile", "small_model:model", "-o", "timed.qca", "--quant", "nf4", "--timing", "--dump-ir", "stages"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    stages = [line.split()[-1] for line in lines[:-1]]
    assert lines[-1].endswith("in all")
    assert stages[:3] == ["export", "insert-qdq", "import"] and stages[-1] == "emit-kernels"
    files = sorted(path.name for path in (workspace / "stages").iterdir())
    assert [name.partition("-")[2].partition(".")[0] for name in files] == stages


def test_a_compile_names_every_stage_as_it_begins(workspace: Path) -> None:
    steps: list[Any] = []
    made = qc.qcompile(torch.nn.Linear(8, 4).eval(), (torch.randn(3, 8),), progress=steps.append)
    assert [step.stage for step in steps] == [*made.stages, "compile-kernels"]
    assert [step.number for step in steps] == [*range(1, steps[-1].of + 1)]


def test_stage_texts_can_be_left_out(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "small_model:model", "-o", "bare.qca", "--no-stages"]) == 0
    assert main(["inspect", "bare.qca"]) == 0
    assert "IR inside   none" in capsys.readouterr().out


def test_the_arithmetic_is_an_option(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "small_model:model", "-o", "a.qca", "--quant", "nf4", "--compute", "bf16"]) == 0
    linears = [kernel for kernel in qc.load(workspace / "a.qca").plan.kernels if kernel.template == "linear"]
    assert linears and {kernel.operands[1].dtype for kernel in linears} == {"bf16"}
    assert main(["compile", "small_model:model", "-o", "b.qca", "--compute", "bf16"]) != 0
    assert "no linear has a quantised weight" in capsys.readouterr().err


def test_numerics_are_checked_after_each_pass_on_request(workspace: Path) -> None:
    assert main(["compile", "small_model:model", "-o", "v.qca", "--quant", "nf4", "--verify-each", "numerics"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small_model"], "'small_model' must be package.module:function"),
        (["small_model:nothing"], "cannot find 'small_model:nothing'"),
        (["no_such_module:model"], "cannot find 'no_such_module:model'"),
        (["no_such_module:model", "--quant", "nf5"], "no recipe is called 'nf5'"),  # said before a model is made
        (["no_such_module:model", "--device", "gpu"], "there is no device 'gpu'"),
        (["small_model:model", "--quant", "nf5"], "nf5"),
        (["small_model:model", "--quant", "nf4:block=63"], "block"),
        (["small_model:model", "--target", "sparc"], "sparc"),
        (["small_model:unsupported"], "bessel_j0"),
    ],
)
def test_what_cannot_be_compiled_is_one_message_and_status_1(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status = main(["compile", *arguments, "-o", "never.qca"])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith("qc: ") and message in err and "Traceback" not in err
    assert not (workspace / "never.qca").exists()
