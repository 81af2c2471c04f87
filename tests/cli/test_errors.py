"""`qc inspect --error` beside figures that this test works out itself; source lines in files."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.input_files import read_inputs
from qcompiler.runtime.backends.registry import is_available


def decibels(reference: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> float:
    return float(20 * np.log10(np.linalg.norm(reference) / np.linalg.norm(value - reference)))


@pytest.fixture(scope="module")
def data(workspace: Path) -> Path:
    path = workspace / "x.npz"
    np.savez(path, x=np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32))
    return path


def test_the_ratios_are_those_of_the_model_and_the_program(
    program: Path, data: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import small_model  # type: ignore[import-not-found]
    import torch

    page = workspace / "errors.html"
    asked = ["inspect", str(program), "--error", str(data), "--model", "small_model:model"]
    assert main([*asked, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    x = np.load(data)["x"]
    model = small_model.model()[0]
    with torch.no_grad():
        wanted = model(torch.from_numpy(x))["y"].numpy().astype(np.float64)
    y = qc.load(program)(x=x)["y"].astype(np.float64)
    (result,) = found["results"]
    # Sums of the float model in fp32 differ in the last places from those here: 1e-7 of values that differ by 1e-1.
    assert result["model"] == pytest.approx(decibels(wanted, y), abs=1e-3)
    assert result["oracle"] > 110  # fp32: 2**-24 of a value is 144 dB, and 64 products were added
    gelu, down = (next(row for row in found["layers"] if row["op"].startswith(op)) for op in ("gelu", "linear"))
    assert gelu["step"] == 0 and gelu["model"] == pytest.approx(gelu["quantised"], abs=1e-3)
    assert 5 < gelu["model"] < 60
    assert down["step"] == -1  # `up` itself is fused with the GELU behind it
    assert found["stages"][0]["stage"] == "import" and all(row["before"] in (None, "exact") or row["before"] > 110
                                                           for row in found["stages"])  # fmt: skip
    packed = re.search(r'id="model">([^<]*)<', page.read_text())
    assert packed is not None
    shown = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    assert shown["errors"] == found


def test_what_a_file_cannot_say_alone_is_asked_for(
    program: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["inspect", str(program), "--error", str(data)]
    assert main(asked) == 1 and "add --model package.module:function" in capsys.readouterr().err
    assert main(["inspect", str(program), "--model", "small_model:model"]) == 1
    assert "add --error" in capsys.readouterr().err
    assert main([*asked, "--op", "qc.linear"]) == 1 and "--error prints none" in capsys.readouterr().err


def test_a_folder_may_have_an_equals_sign_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lr=0.1").mkdir()
    np.save(tmp_path / "lr=0.1" / "x.npy", np.arange(3))
    monkeypatch.chdir(tmp_path)
    for text in ("lr=0.1/x.npy", Path("lr=0.1/x.npy")):
        (found,), named = read_inputs([text])
        assert found.tolist() == [0, 1, 2] and named == {}
    assert read_inputs(["x=lr=0.1/x.npy"])[1]["x"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_a_model_that_is_not_that_of_the_file_is_refused(
    program: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(program), "--error", str(data), "--model", "small_model:other"]) == 1
    assert "small_model:other compiles to other weights than small.qca has" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_has_source_lines_only_if_it_was_asked_for_them(
    program: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(workspace)
    with_lines = workspace / "lines.qca"
    made = ["compile", "small_model:model", "-o", str(with_lines), "--quant", "nf4", "--source-lines"]
    assert main(made) == 0
    pages = []
    for file in (program, with_lines):
        assert main(["inspect", str(file), "--html", str(workspace / "page.html")]) == 0
        packed = re.search(r'id="model">([^<]*)<', (workspace / "page.html").read_text())
        assert packed is not None
        pages.append(json.loads(zlib.decompress(base64.b64decode(packed[1]))))
    without, shown = pages
    assert without["lines"] == {} and any("saved without them" in each for each in without["absent"])
    (line,) = shown["lines"]["up"]
    assert line["text"].startswith(f"{here}/small_model.py:13 in forward: return {{") and line["ops"] == [
        "linear.default"
    ]
    # The list of stages, and the program itself, know nothing of it.
    capsys.readouterr()
    stages = []
    for file in (program, with_lines):
        assert main(["inspect", str(file), "--json"]) == 0
        stages.append(json.loads(capsys.readouterr().out)["stages"])
    assert stages[0] == stages[1]
    assert here.encode() not in b"".join(text.encode() for text in _texts(program))
    assert any(here in text for text in _texts(with_lines))
    assert main([*made, "--no-stages"]) == 1 and "--no-stages leaves out" in capsys.readouterr().err


def _texts(path: Path) -> list[str]:
    from qcompiler.runtime.program_file import read_program

    header, texts = read_program(path)
    return [json.dumps(header.ledger), json.dumps(header.report), *(texts[name] for name in texts)]


@pytest.mark.slow
def test_a_file_for_a_gpu_is_measured_layer_by_layer_on_the_simulated_one(
    data: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = workspace / "gpu.qca"
    made = ["compile", "small_model:model", "-o", str(file), "--quant", "nf4", "--device", "cuda:0"]
    assert main([*made, "--targets", "sm_80"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(file), "--error", str(data), "--model", "small_model:model", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["results"]] == ["y"]
    (gelu,) = (row for row in found["layers"] if row["op"].startswith("gelu"))
    assert gelu["step"] == 0 and gelu["oracle"] > 110
    assert 5 < gelu["model"] < 60 and gelu["model"] == pytest.approx(gelu["quantised"], abs=1e-3)
    if not is_available("cuda:0"):
        assert any("cuda:0 is not here: the program ran on the simulated GPU" in each for each in found["notes"])
