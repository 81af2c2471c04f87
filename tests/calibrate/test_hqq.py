"""algorithm="hqq": scales and zero points by the error of the weights, without data, in formats with free scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.calibrate import hqq
from qcompiler.calibrate.free_scales import FreeScales, assemble, scales_of, why_no_scales
from qcompiler.config import resolve_format
from qcompiler.errors import RecipeError
from qcompiler.frontends.torch.frontend import import_torch

TEXTS = (
    "int2", "int3:group=64", "int4:group=128", "int8", "int8:group=32,scale=bf16", "int4:group=row",
    "int2:symmetric=False", "int3:group=128,symmetric=False", "int4:symmetric=False,scale=fp32", "int8:symmetric=False",
    "nf4", "nf4:block=128", "fp4",
)  # fmt: skip


def weights(rows: int = 6, cols: int = 256) -> np.ndarray:
    """Heavy tails, so that clipping pays."""
    return np.random.default_rng(0).standard_t(4, (rows, cols)).astype(np.float32)


def errors(values: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray:
    return np.asarray((np.abs(values.astype(np.float64) - wanted) ** hqq.NORM).reshape(-1, size).sum(1))


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_taken_apart_and_put_together_is_the_same_matrix(text: str) -> None:
    fmt, w = resolve_format(text), weights()
    packed = fmt.encode(w)
    scheme, (scales, zeros) = FreeScales.of(fmt, w.shape[1]), scales_of(packed)
    places = scheme.nearest(w.reshape(-1, scheme.size), scales, zeros)
    values = (scheme.of_code[places] - zeros[:, None]) * scales[:, None]
    again = assemble(fmt, *w.shape, scheme.codes[places].reshape(w.shape), scales, zeros)
    np.testing.assert_array_equal(fmt.decode(again).reshape(values.shape), values)
    np.testing.assert_allclose(
        np.square(values - w.reshape(values.shape)).sum(), np.square(fmt.decode(packed) - w).sum()
    )


@pytest.mark.parametrize("text", TEXTS)
def test_no_group_is_worse_and_the_whole_is_better_than_with_the_encoders_scales(text: str) -> None:
    fmt, w = resolve_format(text), weights()
    nearest = fmt.encode(w)
    size = FreeScales.of(fmt, w.shape[1]).size
    solved = hqq.solve(w, nearest)
    before, after = (errors(fmt.decode(each), w, size) for each in (nearest, solved))
    assert (after <= before * (1 + 1e-5)).all(), "1e-5: sums of fp32"
    assert after.sum() < before.sum()
    assert solved.format == fmt and solved.data.nbytes == nearest.data.nbytes


@pytest.mark.parametrize("text", ["int3:symmetric=False", "int4", "nf4:block=32", "int2:symmetric=False"])
def test_the_scales_are_nearly_the_best_there_are(text: str) -> None:
    """Beside a search of 300 scales, of both signs where codes are whole numbers, and all zero points, for each group
    of 32. An absmax (nf4) is not negative."""
    fmt, w = resolve_format(text), weights(2, 128)
    scheme, solved = FreeScales.of(fmt, 128), hqq.solve(w, resolve_format(text).encode(w))
    groups = w.reshape(-1, 32)
    best = np.full(len(groups), np.inf)
    zeros = np.arange(scheme.last + 1) if scheme.zeros else [0.0]
    top = np.abs(groups).max() * 2 / np.abs(scheme.of_code).max()
    scales = np.linspace(top / 300, top, 300)
    for scale in [*scales, *(-scales if scheme.whole else [])]:
        for zero in zeros:
            shaped = (np.full(len(groups), each, np.float32) for each in (scale, zero))
            values = (scheme.of_code[scheme.nearest(groups, *shaped)] - zero) * scale
            best = np.minimum(best, errors(values, groups, 32))
    assert errors(fmt.decode(solved), w, 32).sum() < 1.1 * best.sum()


@pytest.mark.parametrize("text", ["int4", "int4:symmetric=False", "int8", "nf4", "fp4"])
def test_zeros_single_values_and_the_ends_of_the_range(text: str) -> None:
    fmt, w = resolve_format(text), np.zeros((7, 64), np.float32)
    w[1, 3], w[2], w[3], w[4, 5], w[5] = 1e-30, 1e-38, 3e4, -6e4, -2.5
    w[6] = np.linspace(-1e-7, 3e4, 64)
    solved = fmt.decode(hqq.solve(w, fmt.encode(w)))
    assert np.isfinite(solved).all()
    np.testing.assert_array_equal(solved[0], 0)
    assert np.abs(solved - w).sum() <= np.abs(fmt.decode(fmt.encode(w)) - w).sum() * (1 + 1e-5)


def test_formats_with_encoders_of_their_own_say_so() -> None:
    assert "codes themselves" in why_no_scales(resolve_format("nf4:double_quant"), 256)
    assert "encoder of its own" in why_no_scales(resolve_format("q4_K"), 256)
    assert "not whole blocks of 64" in why_no_scales(resolve_format("nf4"), 100)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.embed(ids))))


def imported(**fields: Any) -> Any:
    quant = qc.QuantConfig("float", **{"linear": "int3", "embedding": "int8", "algorithm": "hqq"} | fields)
    return import_torch(Model().eval(), (torch.zeros(2, 5, dtype=torch.int64),), quant=quant)


def test_linears_of_a_model_get_its_codes_and_the_rest_is_reported() -> None:
    result, model, fmt = imported(rules={"second": "q4_0"}), Model(), resolve_format("int3")
    w = model.first.weight.detach().numpy()
    np.testing.assert_array_equal(result.weights["first.weight"].data, hqq.solve(w, fmt.encode(w)).data)
    table = resolve_format("int8")
    of_table = table.encode(model.embed.weight.detach().numpy())
    np.testing.assert_array_equal(result.weights["embed.weight"].data, of_table.data)
    said = {path: what for stage, path, what in result.quantized.decisions if stage == "codes"}
    assert said["first.weight"] == "scales by hqq, without data"
    assert said["embed.weight"] == "scales of the encoder: it is an embedding"
    assert "encoder of its own" in said["second.weight"]


def test_it_refuses_a_recipe_that_it_cannot_serve() -> None:
    with pytest.raises(RecipeError, match=r"algorithm='hqq' serves nothing here: .*encoder of its own"):
        imported(linear="q4_0")
    with pytest.raises(RecipeError, match="`calibrate` was given, and nothing here uses it"):
        qc.qcompile(nn.Linear(64, 64), (torch.ones(1, 64),), quant=qc.QuantConfig("int4", algorithm="hqq"),
                    calibrate=[torch.ones(1, 64)])  # fmt: skip


@pytest.mark.slow
def test_a_working_folder_of_nearest_codes_is_not_taken(tmp_path: Path) -> None:
    model, x = nn.Linear(64, 64).eval(), torch.randn(3, 64)
    found = []
    for algorithm, folder in (("nearest", tmp_path), ("hqq", tmp_path), ("hqq", None)):
        quant = qc.QuantConfig("int3", algorithm=algorithm)
        program = qc.qcompile(model, (x,), quant=quant, workdir=folder, device="cpu")
        np.testing.assert_allclose(program(x), program.oracle(x).detach(), atol=1e-4)
        found.append(program(x).numpy())
    np.testing.assert_array_equal(found[1], found[2])
    assert (found[0] != found[1]).any()


def test_every_format_either_has_free_scales_or_a_reason() -> None:
    for name in formats.FORMATS:
        fmt = resolve_format(name)
        if not why_no_scales(fmt, 256):
            assert fmt.name in {"int2", "int3", "int4", "int8", "nf4", "fp4"}
