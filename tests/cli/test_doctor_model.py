"""`qc doctor --model` and `qc.doctor`: everything that would not lower is named at once, with its places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) + torch.special.bessel_j0(x)


class Mixed(nn.Module):
    """Supported operators around five that are not, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.second = nn.Linear(8, 8), Odd(), Odd()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.up(x)
        y = self.first(y) + self.second(y)
        places = y.nonzero().cumsum(0)
        basis = torch.linalg.qr(y)[0].relu()
        chosen = torch.cond(y.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))
        return y.softmax(-1), places, basis, chosen, y.double().softmax(-1)


def diagnose() -> Any:
    return qc.doctor(Mixed().eval(), (torch.randn(8, 8),))


def test_all_problems_are_reported_with_their_places_and_counts() -> None:
    diagnosis = diagnose()
    found = {finding.operator: finding for finding in diagnosis.findings}
    assert set(found) == {
        "aten.lgamma.default", "aten.special_bessel_j0.default", "aten.nonzero.default", "aten.linalg_qr.default",
        "cond", "qc.softmax",
    }  # fmt: skip
    assert found["aten.lgamma.default"].count == 2
    assert [place.split()[0] for place in found["aten.lgamma.default"].places] == ["'first'", "'second'"]
    assert "test_doctor_model.py:" in found["aten.linalg_qr.default"].places[0]
    assert "use a mask" in found["aten.nonzero.default"].why
    assert "torch.where" in found["cond"].why
    assert "f64" in found["qc.softmax"].why
    assert diagnosis.operators["aten.linear.default"] == 1
    assert not diagnosis.ok


def test_what_follows_from_an_unknown_size_is_not_reported_again() -> None:
    assert "cumsum" not in " ".join(finding.operator for finding in diagnose().findings)


def test_a_model_that_lowers_is_told_so_also_without_weights() -> None:
    with qc.empty_weights():
        model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Conv1d(4, 4, 3))
    diagnosis = qc.doctor(model.eval(), (torch.randn(2, 4, 64),), dynamic_shapes=({0: ("b", 1, 8)},), device="sim:0")
    assert diagnosis.ok and "everything lowers" in str(diagnosis)


def test_what_stops_the_export_is_a_finding() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.sum() > 0 else x

    (finding,) = qc.doctor(Branch(), (torch.randn(3),)).findings
    assert finding.operator == "torch.export" and "use a mask or torch.where" in finding.why


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cpu, cuda:N and sim:N"):
        qc.doctor(nn.Linear(2, 2), (torch.randn(1, 2),), device="tpu")


def test_the_command_prints_and_exits_by_what_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "small_model:model"]) == 0
    assert "everything lowers" in capsys.readouterr().out
    assert main(["doctor", "--model", "small_model:unsupported", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [finding["operator"] for finding in report["findings"]] == ["aten.special_bessel_j0.default"]


def test_the_command_reads_a_file_of_torch_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.pt2"
    torch.export.save(torch.export.export(Odd(), (torch.randn(3),)), path)
    assert main(["doctor", "--model", str(path)]) == 1
    assert "aten.lgamma.default" in capsys.readouterr().out
    assert main(["doctor", "--model", str(tmp_path / "none.pt2")]) == 1
    assert "there is no file" in capsys.readouterr().err
