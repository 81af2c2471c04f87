"""qcompile(calibrate=…): inputs of linears are measured, weights are encoded for them, and a kill costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from killed_runs import KILLED, killed_run
from torch import nn
from turned_linear import Conv1D

import qcompiler as qc
from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentShapeError,
    ArgumentStructureError,
    CalibrationError,
    RecipeError,
    WorkdirError,
)
from qcompiler.frontends.quantise import calibrate
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.torch.frontend import import_torch

K = 256


class Model(nn.Module):
    """An embedding, a tied head, a linear used twice, a transposed one, and a state that the model writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.twice = nn.Embedding(64, K), nn.Linear(K, K)
        self.down, self.head = Conv1D(K, K), nn.Linear(K, 64, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(K))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = torch.relu(self.twice(x)) * torch.linspace(0, 3, K)
        x = self.twice(x) + self.seen
        self.seen.add_(x.mean((0, 1)))
        return self.head(self.down(x))


SHAPES = {"ids": {0: ("b", 1, 4), 1: ("s", 1, 32)}}
RECIPE = qc.QuantConfig("q3_K", embedding="q4_K", promise_bits=None)


def inputs(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (1 + i % 4, 5 + i), generator=generator) for i in range(count)]


def imported(calibration: Calibration | None, quant: Any = RECIPE) -> Any:
    return import_torch(Model().eval(), (torch.zeros(2, 7, dtype=torch.int64),), quant=quant, dynamic_shapes=SHAPES,
                        calibration=calibration)  # fmt: skip


def seen_by_hooks(given: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """The mean squares of what the eager modules are called with, each input from the model's first state."""
    squares: dict[str, list[torch.Tensor]] = {}
    for ids in given:
        model = Model().eval()
        for name in ("twice", "down", "head"):
            model.get_submodule(name).register_forward_pre_hook(
                lambda _m, args, name=name: squares.setdefault(name, []).append(args[0].double().reshape(-1, K) ** 2)
            )
        with torch.no_grad():
            model(ids)
    return {name: torch.cat(parts).mean(0).numpy() for name, parts in squares.items()}


def test_weights_are_encoded_for_what_their_linears_read() -> None:
    calibration = Calibration(inputs(6))
    store = imported(calibration).weights
    expected, model = seen_by_hooks(inputs(6)), Model()
    for key, name, values in (
        ("twice.weight", "twice", model.twice.weight),
        ("down.weight", "down", model.down.weight.t()),
        ("embed.weight", "head", model.embed.weight),
    ):
        ref = store[key].format
        fmt = qc.formats.get(ref.name, **ref.params)
        matrix = values.detach().contiguous().numpy()
        importance = expected[name].astype(np.float32)
        found = fmt.decode(qc.formats.from_bytes(fmt, *matrix.shape, store[key].data))
        wanted, plain = fmt.decode(fmt.encode(matrix, importance=importance)), fmt.decode(fmt.encode(matrix))
        # Sums in another order (torch on one thread or two) move an importance by an ulp, which may decide a block's
        # scale: two of the embedding's 64 blocks here. What they are worth is compared below.
        assert (found != wanted).mean() < 0.07
        assert (found != plain).mean() > 0.5
        error, best, without = (float(((each - matrix) ** 2 * importance).sum()) for each in (found, wanted, plain))
        assert error == pytest.approx(best, rel=1e-3)
        assert error < 0.95 * without, key
    assert (calibration.ran, calibration.reused) == (6, 0)


def test_the_report_says_what_was_calibrated() -> None:
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K)).eval()
    recipe = qc.QuantConfig("q4_K", rules={"1": "q8_0"}, promise_bits=None)
    x = torch.randn(3, K)
    program = qc.qcompile(model, (x,), quant=recipe, calibrate=[x, (x,)])
    report = str(program.report())
    assert "importance of columns, of 6 rows" in report and "2 inputs" in report
    assert sum(choice.stage == "calibrate" for choice in program._choices) == 1
    assert torch.isfinite(program(x)).all()


def test_what_nothing_uses_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"nothing here uses it: .*q8_0, nf4"):
        imported(Calibration(inputs(2)), "nf4")
    with pytest.raises(RecipeError, match="the weights have no values"):
        qc.qcompile(nn.Linear(K, K), (torch.ones(1, K),), quant="q4_K", calibrate=[torch.ones(1, K)], weights="none")
    with pytest.raises(CalibrationError, match="no inputs"):
        imported(Calibration([]))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(2, 7), ArgumentDtypeError, r"float32 for 'ids'.*int64"),
        (torch.zeros(7, dtype=torch.int64), ArgumentShapeError, r"\[7\] for 'ids'"),
        ({"ids": torch.zeros(2, 7, dtype=torch.int64)}, ArgumentStructureError, "a dict where"),
        ((1, 2), ArgumentStructureError, "a tuple for several"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        imported(Calibration([given]))


def test_known_inputs_are_not_run_again_and_others_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "COMMIT", 2)
    first = Calibration(inputs(3), tmp_path)
    expected = imported(first).weights["twice.weight"].data.tobytes()
    longer = Calibration(iter(inputs(5)), tmp_path)
    assert imported(longer).weights["twice.weight"].data.tobytes() != expected
    assert (first.ran, longer.ran, longer.reused) == (3, 2, 3)
    other = Calibration(inputs(4, seed=2), tmp_path)
    found = imported(other).weights["twice.weight"].data.tobytes()
    assert (other.ran, other.reused) == (4, 0)
    assert found == imported(Calibration(inputs(4, seed=2))).weights["twice.weight"].data.tobytes()
    with pytest.raises(WorkdirError, match="remove that file"):
        imported(Calibration(iter(inputs(4)), tmp_path))
    (path,) = tmp_path.glob("calibration-*.npz")
    path.write_bytes(path.read_bytes()[:100])  # a torn file
    again = Calibration(iter(inputs(3)), tmp_path)
    assert imported(again).weights["twice.weight"].data.tobytes() == expected and again.ran == 3


SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import qcompiler as qc
from qcompiler.frontends.quantise import calibrate

calibrate.COMMIT = 2
folder, die_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
runs, feed = 0, calibrate.GraphRun.feed

def counted(self, leaves, see):
    global runs
    runs += 1
    if runs == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    feed(self, leaves, see)

calibrate.GraphRun.feed = counted
inputs = (torch.randn(3, 256) * torch.linspace(0, 2, 256) for _ in range(9))
program = qc.qcompile(model, (torch.ones(3, 256),), quant="q2_K", calibrate=inputs, workdir=folder + "/work")
program.save(folder + "/p.qca")
print(runs)
"""


@pytest.mark.slow
def test_a_killed_calibration_goes_on_and_ends_in_the_same_file(tmp_path: Path) -> None:
    def compiled(name: str, die_at: int) -> tuple[int, str]:
        return killed_run(SCRIPT, tmp_path / name, die_at)

    assert compiled("whole", 0) == (0, "9")
    assert compiled("broken", 6)[0] == KILLED  # five ran, four are written
    assert compiled("broken", 0) == (0, "5")
    assert (tmp_path / "broken" / "p.qca").read_bytes() == (tmp_path / "whole" / "p.qca").read_bytes()
    assert compiled("broken", 0) == (0, "0")
