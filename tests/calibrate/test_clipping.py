"""AWQ's clipping of scales, and what a working folder keeps of AWQ's search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.calibrate import clipping
from qcompiler.calibrate.free_scales import FreeScales, assemble, scales_of
from qcompiler.config import resolve_format
from qcompiler.errors import RecipeError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.quantise.rewrites import rewrites
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.runtime.encoder import encode

FORMATS = ["int3:group=32", "int4:group=32,symmetric=False", "nf4:block=32"]


def problem(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights with a few large entries, and inputs (60, cols) with a mean and with columns of different sizes."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((rows, cols)) * np.where(rng.random((rows, cols)) < 0.03, 4, 1)
    x = (rng.standard_normal((60, cols)) + 0.5) * np.linspace(0.2, 2, cols)
    return weights.astype(np.float32), x


def lost(weights: np.ndarray, packed: PackedTensor, x: np.ndarray) -> np.ndarray:
    """The squared error of each row's outputs: of the products themselves, and not by moments."""
    return np.square(x @ (weights.astype(np.float64) - packed.format.decode(packed)).T).sum(0)


@pytest.mark.parametrize("text", FORMATS)
def test_one_group_takes_the_factor_that_trying_all_of_them_finds(text: str) -> None:
    fmt, (weights, x) = resolve_format(text), problem(6, 32)
    nearest = encode(fmt, weights)
    scheme, (scales, zeros) = FreeScales.of(fmt, 32), scales_of(nearest)
    least = lost(weights, nearest, x)
    for factor in clipping.factors_of(scheme):
        tried = scheme.storable(scales * np.float32(factor))
        codes = scheme.codes[scheme.nearest(weights, tried, zeros)]
        least = np.minimum(least, lost(weights, assemble(fmt, 6, 32, codes, tried, zeros), x))
    found = clipping.clip(weights, nearest, x.T @ x)
    np.testing.assert_allclose(lost(weights, found.packed, x), least, rtol=1e-9)
    assert (least < lost(weights, nearest, x)).any(), "something was there to be clipped"


@pytest.mark.parametrize("text", FORMATS)
def test_no_row_becomes_worse_and_the_errors_are_those_of_the_outputs(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clipping, "ROWS", 5)  # pieces of rows, the last one shorter
    weights, x = problem(12, 160)
    nearest = encode(resolve_format(text), weights)
    found = clipping.clip(weights, nearest, x.T @ x)
    before, after = lost(weights, nearest, x), lost(weights, found.packed, x)
    assert (after <= before * (1 + 1e-9)).all() and after.sum() < 0.95 * before.sum()
    whole = np.square(x @ weights.astype(np.float64).T).sum()
    np.testing.assert_allclose([found.nearest_error, found.error], [before.sum() / whole, after.sum() / whole])
    assert np.array_equal(scales_of(found.packed)[1], scales_of(nearest)[1]), "zero points stay"


def test_a_group_without_inputs_keeps_its_scales() -> None:
    weights, x = problem(4, 64)
    x[:, 32:] = 0
    nearest = encode(resolve_format("int3:group=32"), weights)
    found = clipping.clip(weights, nearest, x.T @ x)
    assert np.array_equal(scales_of(found.packed)[0][1::2], scales_of(nearest)[0][1::2])
    none = clipping.clip(weights, nearest, np.zeros((64, 64)))
    assert np.array_equal(none.packed.data, nearest.data) and none.error == 0


# --- in a model ------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)).eval()


def awq(folder: Path | None, model: nn.Module | None = None, **options: Any) -> Quantized:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(20, 32, generator=generator) for _ in range(2)]
    shapes = {"input": {0: ("n", 1, 64)}}
    exported = export_model(model or small(), (inputs[0][:5],), {}, shapes)
    recipe = qc.QuantConfig("float", **{"linear": "int3:group=32", "algorithm": "awq", **options})
    return insert_qdq(exported, recipe, calibration=Calibration(inputs, folder))


def stored(found: Quantized) -> list[bytes]:
    return [np.asarray(each.data).tobytes() for each in found.weights]


def test_a_killed_search_goes_on_behind_the_last_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, search, calls = stored(awq(None)), rewrites.awq, 0

    def dies(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return search(*arguments, **options)

    monkeypatch.setattr(rewrites, "awq", dies)
    with pytest.raises(KeyboardInterrupt):
        awq(tmp_path)
    assert len(list(tmp_path.glob("scales-*.npz"))) == 1
    assert stored(awq(tmp_path)) == whole and calls == 3, "the second group alone was searched again"
    monkeypatch.setattr(rewrites, "measure", None)  # nothing is measured when all groups are known
    assert stored(awq(tmp_path)) == whole and calls == 3


@pytest.mark.slow
def test_scales_that_are_damaged_or_of_another_recipe_are_searched_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = stored(awq(tmp_path))
    first, second = sorted(tmp_path.glob("scales-*.npz"))
    second.write_bytes(b"PK nothing")
    with np.load(first) as file:
        held = {name: file[name] for name in file.files}
    np.savez(first, **{**held, "scales": -held["scales"]})
    capsys.readouterr()
    assert stored(awq(tmp_path)) == whole
    said = capsys.readouterr().err
    assert f"{second} cannot be read" in said and f"{first} holds other data: its scales are searched again" in said
    assert stored(awq(tmp_path, linear="int4:group=32")) == stored(awq(None, linear="int4:group=32"))


def test_where_no_scale_of_channels_can_move_scales_of_weights_are_clipped() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(32, 32)).eval()
    said = [what for stage, _, what in awq(None, alone).decisions if stage == "codes"]
    assert len(said) == 1 and "of the scales clipped: squared error of the outputs" in said[0]
    for options in ({"smooth": 0.5}, {"linear": "q8_0"}):
        with pytest.raises(RecipeError, match="no scale can move in this model"):
            awq(None, alone, **options)
