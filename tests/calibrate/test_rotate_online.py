"""Transforms in front of the second linears of MLPs keep the float function, spread outliers, and run in programs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from rewritten_models import EXAMPLE, HIDDEN, SHAPES, Decoder, ids
from torch import nn

import qcompiler as qc
from qcompiler.errors import AdapterError, RecipeError
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.quantise.rewrites import online
from qcompiler.frontends.quantise.rewrites.moved_weights import Transformed
from qcompiler.frontends.torch.capture.export import export_model

X = torch.ops.qc.hadamard.default


class Mlp(nn.Module):
    """A layer of an MLP with a norm in front, in the order (in, out) or (out, in); `outlier` makes one large column."""

    def __init__(self, *, outlier: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.fc.weight[5] *= outlier
            self.out.weight[:, 5] /= outlier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.relu(self.fc(self.norm(x))))


def quantised(model: nn.Module, example: Any = None, shapes: Any = None, **options: Any) -> Quantized:
    example = (torch.randn(5, 32),) if example is None else example
    exported = export_model(model.eval(), example, {}, shapes or {"x": {0: ("n", 1, 64)}})
    options = {"linear": "int8", **options}
    return insert_qdq(exported, qc.QuantConfig("float", rotate_online=True, **options))


def error(model: nn.Module, found: Quantized) -> float:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((found.module(x) - model(x)).square().mean() / model(x).square().mean())


def test_the_second_linear_of_an_mlp_is_found_and_the_float_function_kept() -> None:
    model = Decoder()
    exported = export_model(model, EXAMPLE, {}, SHAPES)
    recipe = qc.QuantConfig("float", linear="int8", rotate_online=True)
    found = insert_qdq(exported, recipe, calibration=Calibration(ids()))
    made = [node for node in exported.program.graph.nodes if node.target is X]
    assert [node.args[1] for node in made] == [32, 32], f"{HIDDEN} = 3 * 32"
    said = [(path, what) for stage, path, what in found.decisions if stage == "rotate-online"]
    assert [path for path, _ in said[:-1]] == ["layers.0.down.weight", "layers.1.down.weight"]
    assert "runs of 32 of its 96 columns" in said[0][1] and "computes the same" in said[-1][1]


@pytest.mark.slow
def test_an_outlier_of_a_channel_is_spread() -> None:
    """One input of the second linear is 40 times the others: the scale of its rows of int8 follows it."""
    model = Mlp(outlier=40.0).eval()
    recipe = qc.QuantConfig("float", linear="int8", activations="int8")
    plain = insert_qdq(export_model(model, (torch.randn(5, 32),), {}, {"x": {0: ("n", 1, 64)}}), recipe)
    assert error(model, quantised(model, activations="int8")) < 0.5 * error(model, plain)


def test_columns_are_changed_in_pieces_as_in_one() -> None:
    values, change = torch.randn(3, 64, dtype=torch.float64), Transformed(1, 16)
    whole = change.apply(values)
    torch.testing.assert_close(change.apply(whole), values, atol=1e-13, rtol=0)  # H H = 1
    part = change.part(1, 16, 48)
    assert part is not None and torch.equal(part.apply(values[:, 16:48]), whole[:, 16:48])
    assert change.part(1, 8, 48) is None and change.part(0, 1, 2) is change


@pytest.mark.slow
def test_a_transform_that_changes_the_function_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "Transformed", lambda axis, block: Transformed(axis, block // 2))
    model = Mlp().eval()
    found = quantised(model)
    assert any("taken back" in what for stage, _, what in found.decisions if stage == "rotate-online")
    assert not any(node.target is X for node in found.exported.program.graph.nodes)
    assert error(model, found) < 1e-3


def test_what_cannot_be_transformed_is_refused_with_the_reason() -> None:
    class Linear(nn.Module):
        """Norm, linear, linear: nothing between that is not linear."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(2 * self.a(self.norm(x)))

    with pytest.raises(RecipeError, match="no quantised linear reads what operators that are not linear make"):
        quantised(Linear())
    odd = Mlp()
    odd.fc, odd.out = nn.Linear(32, 40), nn.Linear(40, 32)
    with pytest.raises(RecipeError, match=r"'out\.weight': its 40 columns are runs of 8, and 16 are the least"):
        quantised(odd)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_program_computes_what_its_oracle_does(device: str, tmp_path: Any) -> None:
    model, x = Mlp(outlier=40.0).eval(), torch.randn(7, 32)
    recipe = qc.QuantConfig("float", linear="int4:group=32", activations="int8", rotate_online=True)
    program = qc.qcompile(model, (x[:5],), quant=recipe, dynamic_shapes={"x": {0: ("n", 1, 64)}}, device=device)
    for rows in (1, 7):
        ours, oracle = np.asarray(program(x[:rows])), program.oracle(x[:rows]).detach().numpy()
        # A code of int8 that flips moves an output by a step: 1/127 of a row's largest number times a weight.
        np.testing.assert_allclose(ours, oracle, atol=0.02 * np.abs(oracle).max())
        assert np.abs(ours - oracle).mean() < 1e-3 * np.abs(oracle).mean()
    program.save(tmp_path / "p.qca")
    assert np.array_equal(np.asarray(qc.load(tmp_path / "p.qca", device=device)(x.numpy())), np.asarray(program(x)))


@pytest.mark.slow
def test_other_rewrites_algorithms_and_types_compose_with_it() -> None:
    for kind in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(Decoder("offset", tied=True)).to(kind)
        exported = export_model(model, EXAMPLE, {}, SHAPES)
        recipe = qc.QuantConfig(
            "float", linear="int4:group=32", rotate=True, rotate_online=True, smooth=0.5, correct_bias=True,
            algorithm="gptq", activations="int8", rounded_inputs=True,
        )  # fmt: skip
        found = insert_qdq(exported, recipe, calibration=Calibration(ids(12)))
        kept = [what for stage, _, what in found.decisions if stage in ("rotate-online", "rotate-hidden")]
        assert sum("computes the same" in what for what in kept) == 2
        with torch.no_grad():
            wanted, ours = model(ids()[0]).float(), found.module(ids()[0]).float()
        assert float((ours - wanted).square().mean() / wanted.square().mean()) < 0.1


@pytest.mark.slow
def test_an_adapter_is_not_merged_into_transformed_columns(tmp_path: Any) -> None:
    program = qc.qcompile(
        Mlp().eval(), (torch.randn(5, 32),), quant=qc.QuantConfig("float", linear="int8", rotate_online=True)
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["out"]}
    tensors = {
        "base_model.model.out.lora_A.weight": np.ones((2, 64), np.float32),
        "base_model.model.out.lora_B.weight": np.ones((32, 2), np.float32),
    }
    with pytest.raises(AdapterError, match=r"'out.weight' has other values than in the model \(rotate-online\)"):
        qc.merge_lora(program, tensors, config=config)
