"""`rounded_inputs=True`: codes are chosen for the inputs that the program's linears multiply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import RecipeError
from qcompiler.frontends.quantise import solve_codes
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import insert_qdq
from qcompiler.frontends.torch.capture.export import export_model


def int8(x: torch.Tensor) -> torch.Tensor:
    """Rows as W8A8 reads them: codes from -127 to 127, a scale for each row. Written without the project's code."""
    scale = x.abs().amax(-1, keepdim=True) / torch.tensor(127.0)
    return (x / scale).round() * scale


@pytest.mark.parametrize("rounded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_moments_are_of_the_rows_that_the_quantised_graph_multiplies(
    rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    inputs = [torch.randn(50, 32) * torch.linspace(0.01, 3, 32) for _ in range(2)]
    moments: dict[str, np.ndarray] = {}
    decoded: dict[str, torch.Tensor] = {}
    choose = solve_codes.choose_codes

    def watched(path: str, fmt: Any, values: Any, of_inputs: Any, **options: Any) -> Any:
        solved, said = choose(path, fmt, values, of_inputs, **options)
        moments[path] = of_inputs[0].copy()
        decoded[path] = torch.from_numpy(solved.packed.format.decode(solved.packed))
        return solved, said

    monkeypatch.setattr(solve_codes, "choose_codes", watched)
    recipe = qc.QuantConfig(
        "float", linear="int4:group=32", activations="int8", algorithm="gptq", rounded_inputs=rounded
    )
    exported = export_model(model, (inputs[0][:5],), {}, {"input": {0: ("n", 1, 64)}})
    insert_qdq(exported, recipe, calibration=Calibration(inputs))
    read = int8 if rounded else lambda x: x
    with torch.no_grad():
        first = read(torch.cat(inputs))
        second = read(torch.relu(nn.functional.linear(first, decoded["0.weight"], model[0].bias)))
    for path, x in (("0.weight", first), ("2.weight", second)):
        wanted = (x.T @ x).numpy()
        # Sums of 100 products in fp32; a code that flips would move one product by a hundredth.
        np.testing.assert_allclose(moments[path], wanted, rtol=1e-5, atol=1e-5 * wanted.max())
    exact = torch.cat(inputs)
    away = np.abs(moments["0.weight"] - (exact.T @ exact).numpy()).max() / moments["0.weight"].max()
    assert (away > 1e-4) == rounded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "int8"}, "rounded_inputs=True is for algorithm='gptq' and algorithm='awq', not 'nearest'"),
        ({"algorithm": "gptq"}, "rounded_inputs=True needs activations='int8'"),
        ({"algorithm": "awq", "activations": "int8:static"}, "rounded_inputs=True needs activations='int8'"),
    ],
)
def test_recipes_that_round_no_inputs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        qc.QuantConfig("int4", rounded_inputs=True, **options)
