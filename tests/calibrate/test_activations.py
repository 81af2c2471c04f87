"""Activations in int8: what linears read are the values of their codes, in eager torch, in programs and in replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import RecipeError
from qcompiler.formats import llm_int8

K = 64
SHAPES = {"x": {0: ("b", 1, 4), 1: ("s", 1, 16)}}
CLIP = 3.5


class Reads(nn.Module):
    """Gives what its linear reads: nf4 holds 0 and 1 exactly, and a sum with zeros is exact."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(K, K, bias=False)
        self.linear.weight = nn.Parameter(torch.eye(K))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def values(seed: int, batch: int = 2, rows: int = 9) -> torch.Tensor:
    """Rows of many magnitudes, a row of zeros, ties, and an outlier in two columns."""
    x = torch.randn(batch, rows, K, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 0, rows)[:, None]
    if rows < 3 or batch < 2:
        return x
    x[0, 1] = 0
    x[1, 2, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5]) / 64
    x[1, 2, 4:] = 0
    x[0, rows - 1, 5], x[-1, 0, 40] = 9.25, -6.0
    return x


def token(x: np.ndarray) -> np.ndarray:
    fmt = qc.formats.get("int8")
    return fmt.decode(fmt.encode(x))


def tensor(x: np.ndarray) -> np.ndarray:
    codes = np.clip(np.rint(x * np.float32(127 / CLIP)), -127, 127)
    return codes.astype(np.float32) * np.float32(CLIP / 127)


def outliers(x: np.ndarray) -> np.ndarray:
    rows = llm_int8.quantise_rows(x, 6.0)
    return np.where(rows.outliers, x, rows.codes.astype(np.float32) * (rows.absmax / np.float32(127)))


KINDS = {"int8": token, "int8:static": tensor, "llm_int8": outliers}


def compiled(model: nn.Module, kind: str, device: str = "cpu", linear: str = "nf4", **more: Any) -> qc.Program:
    recipe = qc.QuantConfig(linear, activations=kind, promise_bits=None)
    if kind == "int8:static":
        seen = torch.zeros(1, 2, K)
        seen[0, 1, 3] = -CLIP
        more["calibrate"] = [seen.to(next(model.parameters()).dtype)]
    x = values(0).to(next(model.parameters()).dtype)
    return qc.qcompile(model, (x,), quant=recipe, dynamic_shapes=SHAPES, device=device, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_reads_what_its_codes_stand_for(kind: str) -> None:
    program = compiled(Reads(), kind, verify_each="numerics")
    for batch, rows in ((2, 9), (1, 1), (4, 16)):
        x = values(3, batch, rows)
        expected = KINDS[kind](x.reshape(-1, K).numpy()).reshape(x.shape)
        assert (program.oracle(x).numpy() == expected).all()
        assert (program(x).numpy() == expected).all()
        assert (expected != x.numpy()).mean() > 0.4
    report = str(program.report())
    assert "activations: int8, " in report
    if kind == "int8:static":
        assert "calibrate: range, of 2 rows" in report
    if kind == "llm_int8":  # a column with an outlier is whole
        x = values(3)
        assert torch.equal(program(x)[..., [5, 40]], x[..., [5, 40]])


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "int8" else [pytest.mark.slow]) for k in KINDS])
def test_captured_and_replayed_with_fresh_inputs_it_is_eager(kind: str) -> None:
    program = compiled(Reads(), kind, "sim:0")
    graph = program.capture(values(0).numpy())
    for seed in range(3):  # other rows and other columns hold the outliers each time
        x = values(seed).roll(seed, 0).roll(3 * seed, 2).numpy()
        expected = KINDS[kind](x.reshape(-1, K)).reshape(x.shape)
        assert (np.asarray(graph.replay(x)) == expected).all(), f"replay {seed}"
        assert (np.asarray(program(x)) == expected).all()


def test_half_precision_is_quantised_in_fp32() -> None:
    program = compiled(Reads(torch.bfloat16), "int8")
    x = values(5).to(torch.bfloat16)
    expected = torch.from_numpy(token(x.float().reshape(-1, K).numpy())).to(torch.bfloat16).reshape(x.shape)
    assert torch.equal(program(x), expected) and torch.equal(program.oracle(x), expected)


class Block(nn.Module):
    """Two linears that read one x, and a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(K, 128), nn.Linear(K, 128), nn.Linear(128, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.a(x)) * self.b(x))


@pytest.mark.parametrize("linear", ["int8", "int4"])
def test_products_are_those_of_the_codes_scaled_once(linear: str) -> None:
    model = nn.Linear(K, 96).eval()
    x = values(7)
    program = qc.qcompile(model, (x,), quant=qc.QuantConfig(linear, activations="int8", promise_bits=None))
    fmt, act = qc.formats.get(linear), qc.formats.get("int8")
    w = fmt.encode(model.weight.detach().numpy())
    rows = act.encode(x.reshape(-1, K).numpy())
    a, sa = rows.section("codes").astype(np.int64), rows.section("scales").astype(np.float64)
    if linear == "int8":
        sums = (a @ w.section("codes").astype(np.int64).T) * sa * w.section("scales").astype(np.float64).T
    else:  # a scale for each group of 32: integer sums of groups, each scaled once
        codes = fmt.entries(w, "codes").astype(np.int64) - 8
        scales = fmt.entries(w, "scales").astype(np.float64)
        parts = np.einsum("mgk,ngk->mng", a.reshape(len(a), -1, 32), codes.reshape(96, -1, 32))
        sums = (parts * scales).sum(-1) * sa
    expected = (sums + model.bias.detach().double().numpy()).reshape(2, 9, 96)
    scale = np.abs(expected).max()
    assert np.abs(program(x).numpy() - expected).max() < 2e-6 * scale
    assert np.abs(program.oracle(x).detach().numpy() - expected).max() < 2e-6 * scale


def test_linears_that_read_one_input_share_its_codes_and_rules_leave_linears_out() -> None:
    recipe = qc.QuantConfig("int8", rules={"c": None}, activations="int8", promise_bits=None)
    program = qc.qcompile(Block().eval(), (values(0),), quant=recipe)
    text = program.ir("insert-qdq")
    assert text.count("qc.quantize_rows.default(") == 1 and text.count("qc.dequantize_rows.default(") == 1
    assert program.ir("fuse-dequant-matmul").count("qc.quantize_rows") == 1
    report = str(program.report())
    assert "a.weight" in report and report.count("activations: int8") >= 1
    assert torch.allclose(program(values(1)), program.oracle(values(1)), atol=1e-5)


def test_recipes_that_cannot_be_followed_are_refused() -> None:
    for text in ("int4", "llm_int8:0", "llm_int8:x", "int8:dynamic"):
        with pytest.raises(RecipeError, match="choose 'int8'"):
            qc.QuantConfig("nf4", activations=text)
    with pytest.raises(RecipeError, match="needs calibration data"):
        qc.qcompile(Reads(), (values(0),), quant=qc.QuantConfig("nf4", activations="int8:static"))
    with pytest.raises(RecipeError, match="none of them has a quantised weight"):
        qc.qcompile(Reads(), (values(0),), quant=qc.QuantConfig("float", activations="int8"))


def test_a_threshold_is_a_parameter() -> None:
    program = qc.qcompile(Reads(), (values(0),), quant=qc.QuantConfig("nf4", activations="llm_int8:1.5"))
    x = values(4)
    rows = llm_int8.quantise_rows(x.reshape(-1, K).numpy(), 1.5)
    assert 2 < rows.outliers.sum() < K
    assert torch.equal(program(x)[..., torch.from_numpy(rows.outliers)], x[..., torch.from_numpy(rows.outliers)])
