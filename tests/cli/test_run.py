"""`qc run` and `qc bench`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import qcompiler as qc
from qcompiler.cli import main


@pytest.fixture
def x(workspace: Path) -> np.ndarray:
    """An input that fits, in `x.npy` and `inputs.npz`; `wide`, `many` and `double` do not fit."""
    values = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    np.save(workspace / "x.npy", values)
    np.savez(workspace / "inputs.npz", x=values)
    np.save(workspace / "wide.npy", np.zeros((3, 65), np.float32))
    np.save(workspace / "many.npy", np.zeros((17, 64), np.float32))
    np.save(workspace / "double.npy", np.zeros((3, 64), np.float64))
    return values


@pytest.mark.parametrize("given", [["x=x.npy"], ["inputs.npz"]])
def test_results_are_written_under_their_names(program: Path, x: np.ndarray, workspace: Path, given: list[str]) -> None:
    assert main(["run", str(program), *given, "-o", "y.npz"]) == 0
    assert np.array_equal(np.load(workspace / "y.npz")["y"], qc.load(program)(x=x)["y"])


def test_without_an_output_file_shapes_and_statistics_go_to_stdout(
    program: Path, x: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(program), "x=x.npy", "--num-threads", "1", "--verify", "full"]) == 0
    assert capsys.readouterr().out.startswith("y: float32 [3, 8], mean ")


def test_native_code_of_the_file_runs_only_when_trusted(
    program: Path, x: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(program), "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["native"][0]["sha256"]
    assert main(["run", str(program), "x=x.npy", "--trust-native", f"sha256:{digest}"]) == 0
    assert main(["run", str(program), "x=x.npy", "--trust-native", "yes"]) == 0
    assert main(["run", str(program), "x=x.npy", "--trust-native", f"sha256:{'0' * 64}"]) == 1
    assert "TrustError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["missing.npy"], "ArgumentError: cannot read the input 'missing.npy'"),
        (["small_model.py"], "ArgumentError: cannot read the input 'small_model.py'"),
        ([], "ArgumentStructureError"),
        (["z=x.npy"], "ArgumentStructureError"),
        (["x=wide.npy"], "ArgumentShapeError"),
        (["x=many.npy"], "ArgumentShapeError"),
        (["x=double.npy"], "ArgumentDtypeError"),
    ],
)
def test_wrong_inputs_are_one_message_and_status_1(
    program: Path, x: np.ndarray, capsys: pytest.CaptureFixture[str], given: list[str], error: str
) -> None:
    status = main(["run", str(program), *given])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith("qc: ") and error in err


@pytest.mark.parametrize("command", ["run", "inspect", "bench"])
@pytest.mark.parametrize(
    ("data", "error"), [(None, "nowhere.qca"), (b"GGUF" + bytes(64), "ForeignFileError"), (b"", "TruncatedFileError")]
)
def test_a_file_that_is_no_program_is_one_message_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, data: bytes | None, error: str
) -> None:
    path = tmp_path / "nowhere.qca"
    if data is not None:
        path.write_bytes(data)
    status = main([command, str(path)])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith("qc: ") and error in err and "Traceback" not in err


def test_bench_times_the_sizes_asked_for(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--dim", "b=3", "--rounds", "5", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["dims"], figures["rounds"]) == ({"b": 3}, 5)
    assert 0 < figures["min_s"] <= figures["median_s"]


def test_bench_profiles_the_steps(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--dim", "b=3", "--rounds", "3", "--profile"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("b=3: median ") and "outside of steps" in out and "\nlinear " in out
    assert main(["bench", str(program), "--dim", "b=3", "--rounds", "3", "--profile", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    assert (profile["symbols"], profile["rounds"]) == ({"b": 3}, 3) and profile["steps"]


def test_bench_writes_the_chart_and_the_trace_of_a_profile(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, trace = tmp_path / "p.svg", tmp_path / "p.json"
    options = ["--profile", "--steps", "--rounds", "1", "--svg", str(svg), "--perfetto", str(trace)]
    assert main(["bench", str(program), *options]) == 0
    assert "\nstep  kernel" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())["otherData"]["times"] == "measured"
    for wrong, message in (
        (["--svg", str(svg)], "--svg is of a profile: add --profile"),
        (["--steps"], "--steps is of a profile: add --profile"),
        (["--profile", "--svg", str(trace)], "name a file that ends in .svg"),
        (["--profile", "--perfetto", str(tmp_path / "none" / "p.json")], "there is no folder"),
    ):
        assert main(["bench", str(program), *wrong]) == 1
        assert message in capsys.readouterr().err


def test_bench_takes_the_largest_sizes_by_default(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--rounds", "2"]) == 0
    assert capsys.readouterr().out.startswith("b=16: median ")


def test_bench_refuses_a_dimension_that_the_program_lacks(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(program), "--dim", "c=3"]) == 1
    assert "the dimensions of 'main' are b" in capsys.readouterr().err
