"""`qc search`: a recipe file that `qc compile` takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qcompiler import cli
from qcompiler.config import QuantConfig

MODEL = """
import torch


def model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    return net, (torch.zeros(2, 64),), {}, ({0: ("batch", 1, 64)},)


def alone():
    return model()[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "searched_model.py").write_text(MODEL)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32))
    return tmp_path


def search(*more: str, model: str = "searched_model:model", data: str = "x.npy") -> int:
    return cli.main(["search", model, "--data", data, "--candidates", "int4", "int8", "--separate", *more])


def test_a_recipe_is_written_that_compile_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search("--budget", "6 bits", "-o", "r.toml", "--plot", "f.svg", "--report", "r.json") == 0
    out = capsys.readouterr().out
    assert "-> " in out and "6 bits" in out and "hurt most" in out
    assert {each["format"] for each in json.loads((folder / "r.json").read_text())["layers"]} == {"int4", "int8"}
    assert (folder / "f.svg").read_text().startswith("<svg")
    assert QuantConfig.of("r.toml").rules
    assert cli.main(["compile", "searched_model:model", "--quant", "r.toml", "--weights", "none"]) == 0
    assert "bits per weight (promised" in capsys.readouterr().out


def test_a_function_that_gives_the_model_alone_takes_the_first_input_as_example(folder: Path) -> None:
    assert search("--budget", "6 bits", "-o", "r.toml", model="searched_model:alone") == 0
    assert QuantConfig.of("r.toml").rules


def test_errors_leave_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.load("x.npy")
    np.save("thin.npy", rows[:, 1:])
    rows[3, 5] = np.nan
    np.save("nan.npy", rows)
    before = sorted(folder.iterdir())
    for more, message in (
        (("--budget", "6 bits", "-o", "none/r.toml"), "there is no folder 'none'"),
        (("--budget", "6 bits", "-o", "r.json"), "must end in .toml"),
        (("--budget", "6", "-o", "r.toml"), "write bits per weight"),
        (("--budget", "1 bits", "-o", "r.toml"), "BudgetError: 1 bits: the smallest recipe"),
        (("--budget", "6 bits", "-o", "r.toml", "--speed", "fast"), "speed='fast': write a time"),
        (("--budget", "6 bits", "-o", "r.toml", "--plot", "f.gif"), "must end in .svg or .png"),
        (("--budget", "6 bits", "-o", "r.toml", "--data", "nan.npy"), "data[0] holds NaN or infinity"),
        (("--budget", "6 bits", "-o", "r.toml", "--data", "thin.npy"), "has [32, 63]"),
        (("--budget", "error<1e-9", "-o", "r.toml", "--plot", "f.png"), "no recipe of these candidates was found"),
    ):
        assert search(*more) == 1
        assert message in capsys.readouterr().err
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before
