"""What the command line says about itself, and what it refuses before it does any work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qcompiler
from qcompiler.cli import main
from qcompiler.inspect import doctor


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"qcompiler {qcompiler.__version__}"


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "qcompiler", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"qcompiler {qcompiler.__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "x.qca", "--rounds", "0"],
        ["bench", "x.qca", "--rounds", "-1"],
        ["bench", "x.qca", "--rounds", "many"],
        ["bench", "x.qca", "--dim", "b=0"],
        ["bench", "x.qca", "--dim", "b"],
        ["bench", "x.qca", "--num-threads", "0"],
        ["run", "x.qca", "--num-threads", "-2"],
        ["inspect", "x.qca", "--timeline", "--dim", "=3"],
        ["inspect", "x.qca", "--timeline", "--between", "5"],
        ["inspect", "x.qca", "--timeline", "--between", "9,3"],
        ["inspect", "x.qca", "--timeline", "--between", "a,b"],
    ],
    ids=" ".join,
)
def test_values_that_mean_nothing_are_usage_errors(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """x.qca is not there: the command line is judged before any file is opened."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and arguments[-2] in said and "usage: qc" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "small_model:never", "-o", "nowhere/x.qca"],
        ["run", "never.qca", "x.npy", "-o", "nowhere/y.npz"],
        ["inspect", "never.qca", "--perfetto", "nowhere/trace.json"],
        ["convert", "never.gguf", "nowhere/x.gguf"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_output_folder_that_is_not_there_is_said_before_any_work(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """What is to be read does not exist, and is not asked for."""
    assert main(arguments) == 1
    assert "there is no folder 'nowhere'" in capsys.readouterr().err


def test_a_program_is_not_saved_into_a_folder_that_is_not_there(program: Path, tmp_path: Path) -> None:
    with pytest.raises(qcompiler.errors.ArgumentError, match="there is no folder"):
        qcompiler.load(program).save(tmp_path / "nowhere" / "x.qca")


def test_a_trace_needs_no_chart(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert main(["inspect", str(program), "--perfetto", str(out), "--dim", "b=3"]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())


def test_what_belongs_to_a_timeline_is_not_ignored_without_one(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in (["--entry", "main"], ["--dim", "b=2"]):
        assert main(["inspect", str(program), *extra]) == 1
        assert "add --timeline or --perfetto" in capsys.readouterr().err
    assert main(["inspect", str(program), "--between", "1,2"]) == 1
    assert "--between is a part of the chart: add --timeline" in capsys.readouterr().err


BUCKETS = """
import torch, qcompiler
torch.manual_seed(0)
made = qcompiler.qcompile(
    torch.nn.Linear(16, 8).eval(), (torch.randn(5, 16),), dynamic_shapes=({0: ("b", 1, 64)},),
    buckets=[("one", {"b": (1, 1)}), ("many", {"b": (1, 64)})],
)
made.save("buckets.qca")
"""


def test_bench_times_the_entry_point_asked_for(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BUCKETS, "buckets", "exec"), {})
    found = {}
    for entry in ("one", "many"):
        assert main(["bench", "buckets.qca", "--entry", entry, "--rounds", "2", "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        found[entry] = (figures["entry"], figures["dims"])
    assert found == {"one": ("one", {}), "many": ("many", {"b": 64})}
    assert main(["bench", "buckets.qca", "--entry", "none"]) == 1
    assert "the entry points are one, many" in capsys.readouterr().err
    assert main(["bench", "buckets.qca", "--entry", "many", "--dim", "b=1"]) == 1
    assert "a call runs 'one'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "status"),
    [
        ((), 0),
        (("compiler",), 0),  # NVRTC compiles for a GPU
        (("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), 0),
        (("compiler", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), 1),
        (("torch",), 1),
    ],
)
def test_doctor_fails_where_nothing_could_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: tuple[str, ...], status: int
) -> None:
    names = ("compiler", "torch", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    facts = {name: "missing" if name in missing else "1" for name in names}
    monkeypatch.setattr(doctor, "examine", lambda: facts)
    assert main(["doctor", "--no-measure"]) == status
    assert ("no C++ compiler" in capsys.readouterr().err) == ("compiler" in missing)
