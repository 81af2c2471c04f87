"""`QuantConfig(correct_bias=True)`: the mean of each linear's outputs is the float model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rewritten_models import EXAMPLE, SHAPES, Decoder, ids
from torch import nn

import qcompiler as qc
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.torch.capture.export import export_model

WIDTH = 64


def quantised(model: nn.Module, given: Any, example: Any, shapes: Any = None, **options: Any) -> Quantized:
    recipe = qc.QuantConfig("float", **options)
    calibration = Calibration(given) if given is not None else None
    return insert_qdq(export_model(model, example, {}, shapes), recipe, calibration=calibration)


def said(found: Quantized) -> dict[str, str]:
    return {path: what for stage, path, what in found.decisions if stage == "bias"}


class Forms(nn.Module):
    """A linear with a bias, one without, `x @ W`, and addmm, each behind a ReLU; their outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.fourth, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = self.first(x)
        b = self.second(a.relu())
        c = b.relu() @ self.third
        return a, b, c, torch.addmm(self.bias, c.relu(), self.fourth)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_every_form_of_a_linear_has_the_mean_of_the_float_model(dtype: torch.dtype, close: float) -> None:
    """The means are taken over two inputs of different lengths, in the program that the compiler goes on with.

    In bf16 a bias between 2 and 4 is rounded by up to 2^-7 = 0.008; the roundings of outputs nearly cancel in a mean.
    """
    model = Forms().eval().to(dtype)
    inputs = [torch.randn(rows, WIDTH).to(dtype) + 1 for rows in (40, 7)]
    shapes = {"x": {0: ("rows", 1, 64)}}
    options = {"linear": "int3:group=32", "correct_bias": True}
    found = quantised(model, inputs, (inputs[0],), shapes, **options)
    plain = quantised(model, None, (inputs[0],), shapes, linear="int3:group=32")
    with torch.no_grad():
        expected, ours, before = (
            [torch.cat(each).double().mean(0) for each in zip(*(run(x) for x in inputs), strict=True)]
            for run in (model, found.module, plain.module)
        )
    for right, corrected, wrong in zip(expected, ours, before, strict=True):
        assert (right - corrected).abs().max() < close
        assert (right - wrong).abs().max() > 3 * close
    assert said(found).keys() == {"first.weight", "second.weight", "third", "fourth"}
    assert all("was an error of their mean, over 47 rows" in what for what in said(found).values())
    assert {row.parameters[0]: row.format for row in found.ledger.rows}["second.bias"] == ""


def test_a_decoder_keeps_the_means_of_its_logits() -> None:
    """Each algorithm's final codes are those that are corrected: the logits keep their means."""
    model = Decoder("offset")
    model.embed.weight.data += 0.5  # a mean that goes through the residual stream to the head
    for options in ({}, {"algorithm": "hqq"}, {"algorithm": "awq"}):
        found = quantised(model, ids(), EXAMPLE, SHAPES, linear="int3:group=32", correct_bias=True, **options)
        with torch.no_grad():
            right, ours = (
                torch.cat([run(x).reshape(-1, run(x).shape[-1]) for x in ids()]) for run in (model, found.module)
            )
        assert (right.mean(0) - ours.mean(0)).abs().max() < 1e-5 * right.abs().max()
        assert all(what.startswith("corrected: ") for what in said(found).values())


def test_weights_that_cannot_be_corrected_say_why() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.shared(self.shared(x)))

    x = torch.randn(9, WIDTH) + 1
    found = quantised(Twice().eval(), [x], (x,), linear="int4:group=32", correct_bias=True)
    assert said(found)["shared.weight"] == "not corrected: 2 linears read it"
    assert said(found)["last.weight"].startswith("corrected: ")
    with pytest.raises(RecipeError, match="correct_bias=True serves nothing here: 2 linears read it"):
        rules = {"last": None}
        quantised(Twice().eval(), [x], (x,), linear="int4:group=32", correct_bias=True, rules=rules)


class Borrowed(nn.Module):
    """A linear whose bias is a buffer, a constant or an argument, or is read by another one, and a second linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight, self.last = kind, nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("held", torch.randn(WIDTH))
        self.constant = torch.randn(WIDTH)
        self.shared = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        computed = self.shared.exp()
        bias = {"buffer": self.held, "constant": self.constant, "input": given, "computed": computed}
        x = nn.functional.linear(x, self.weight, bias.get(self.kind, self.shared)).relu()
        return self.last(x), given + self.shared


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("buffer", "its bias is a buffer or a constant"),
        pytest.param("constant", "its bias is a buffer or a constant", marks=pytest.mark.slow),
        pytest.param("input", "its bias is an input of the model", marks=pytest.mark.slow),
        pytest.param("computed", "its bias is computed", marks=pytest.mark.slow),
        pytest.param("shared", "others read its bias, too", marks=pytest.mark.slow),
    ],
)
def test_a_bias_that_cannot_change_is_not_said_to_be_corrected(kind: str, why: str) -> None:
    model, inputs = Borrowed(kind).eval(), (torch.randn(40, WIDTH) + 1, torch.randn(WIDTH))
    found = quantised(model, [inputs], inputs, linear="int3:group=32", correct_bias=True)
    assert said(found)["weight"] == f"not corrected: {why}"
    with torch.no_grad():
        right, ours = (run(*inputs)[0].double().mean(0) for run in (model, found.module))
    assert (right - ours).abs().max() < 1e-4  # the next linear takes back what this one keeps; values up to 100


@pytest.mark.slow
def test_convolutions_have_a_reason() -> None:
    model, x = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(7, WIDTH)).eval(), torch.randn(2, WIDTH, 9)
    rules = {"0": "int8"}
    found = quantised(model, [x], (x,), linear="int8", correct_bias=True, rules=rules)
    assert said(found)["0.weight"] == "not corrected: a convolution reads it"


def test_a_mean_that_few_rows_do_not_show_is_not_corrected(capfd: pytest.CaptureFixture[str]) -> None:
    """A correction by one row would take its error away, and double that of others."""
    model, rows = nn.Linear(WIDTH, WIDTH).eval(), torch.randn(400, WIDTH)
    for many in (rows[:1], rows[:40]):  # rows without a mean
        found = quantised(model, [many], (many,), linear="int4:group=32", correct_bias=True)
        plain = quantised(model, None, (many,), linear="int4:group=32")
        assert said(found)["weight"].startswith("not corrected: ")
        assert torch.equal(found.module(many), plain.module(many))
        assert "no bias is corrected" in capfd.readouterr().err
    with pytest.raises(CalibrationError, match="gave no rows to 'weight': give inputs that are not empty"):
        shapes = {"input": {0: ("rows", 1, 64)}}
        quantised(model, [rows[:0]], (rows[:40],), shapes, linear="int4:group=32", correct_bias=True)


def test_data_is_needed_and_must_be_finite() -> None:
    model, x = Forms().eval(), torch.randn(9, WIDTH)
    options = {"linear": "int8", "correct_bias": True}
    with pytest.raises(RecipeError, match="correct_bias=True needs calibration data"):
        quantised(model, None, (x,), **options)
    with pytest.raises(CalibrationError, match="gave no inputs"):
        quantised(model, [], (x,), **options)
    with pytest.raises(CalibrationError, match=r"outputs of 'first\.weight' are not finite"):
        quantised(model, [x * float("nan")], (x,), **options)
    with pytest.raises(RecipeError, match="correct_bias='yes': write True or False"):
        qc.QuantConfig("int8", correct_bias="yes")  # type: ignore[arg-type]
