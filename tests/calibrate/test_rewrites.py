"""Rewrites of the float graph: they keep the function, mend outliers, and say what stops them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from by_path import ROOT
from rewritten_models import EXAMPLE, SHAPES, WIDTH, Decoder, ids, outlier_twin
from torch import nn

import qcompiler as qc
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.quantise.rewrites import rewrites
from qcompiler.frontends.quantise.rewrites.channels import along, reshaped
from qcompiler.frontends.quantise.rewrites.moved_weights import MovedWeights, Rotated, Scaled
from qcompiler.frontends.quantise.rewrites.orthogonal import Rotation
from qcompiler.frontends.quantise.rewrites.scale_groups import Found, find_groups
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.weights.weight_files import InMemory
from qcompiler.frontends.weights.weight_source import ModuleWeights


def quantised(
    model: nn.Module, given: Any = None, shapes: Any = SHAPES, example: Any = EXAMPLE, **options: Any
) -> Quantized:
    calibration = Calibration(ids() if given is None else given) if given is not False else None
    recipe = qc.QuantConfig("float", **options)
    return insert_qdq(export_model(model, example, {}, shapes), recipe, calibration=calibration)


def groups(model: nn.Module, example: Any = EXAMPLE, shapes: Any = SHAPES) -> Found:
    tensors = GraphTensors(export_model(model, example, {}, shapes), ModuleWeights(), InMemory().room)
    return find_groups(tensors, [weight for weight in tensors.grouped() if weight.users])


def error(model: nn.Module, found: Quantized) -> float:
    """The squared error of the outputs as a share of their squares, on inputs that calibration did not see."""
    lost = whole = 0.0
    with torch.no_grad():
        for each in ids(3, seed=9):
            expected = model(each)
            lost += float(((found.module(each) - expected) ** 2).sum())
            whole += float((expected**2).sum())
    return lost / whole


def said(found: Quantized, stage: str) -> str:
    return "\n".join(f"{path}: {what}" for where, path, what in found.decisions if where == stage)


# --- structure -------------------------------------------------------------------------------------------------------


def test_channels_pass_reshapes_with_symbolic_sizes() -> None:
    import sympy

    b, s = sympy.symbols("b s", positive=True, integer=True)
    labels = along(-1, 3, 32)
    heads = reshaped(labels, [b, s, 32], [b, s, 2, 16])
    assert heads.shape == (1, 1, 2, 16) and int(heads[0, 0, 1, 3]) == 19
    repeated = reshaped(heads.transpose(1, 2)[:, :, None], [b, 2, 3, s, 16], [b, 6, s, 16])
    assert repeated.shape == (1, 6, 1, 16) and repeated[0, :, 0, 3].tolist() == [3, 3, 3, 19, 19, 19]
    assert torch.equal(reshaped(labels, [b, s, 32], [b * s, 32]), along(-1, 2, 32))


@pytest.mark.parametrize("form", ["written", "aten", "offset", "layer"])
def test_groups_are_found_in_every_form_of_a_norm(form: str) -> None:
    found = groups(Decoder(form, bias=form == "layer"))
    readers = {group.path: [r.weight.targets[0].rpartition(".")[0] for r in group.readers] for group in found.groups}
    for layer in ("layers.0", "layers.1"):
        assert readers[f"{layer}.first"] == [f"{layer}.{name}" for name in "qkv"]
        assert readers[f"{layer}.second"] == [f"{layer}.gate", f"{layer}.up"]
        assert readers[f"{layer}.v"] == [f"{layer}.o"]
        assert readers[f"{layer}.up"] == [f"{layer}.down"]
    assert readers["norm"] == ["head"] and not found.reasons
    grouped = next(group for group in found.groups if group.path == "layers.0.v").readers[0].read.channels
    assert grouped.reshape(4, 16)[:, 0].tolist() == [0, 0, 16, 16]  # two heads read each head of the values


def test_a_tied_head_keeps_its_columns_and_the_reason_is_given() -> None:
    found = groups(Decoder(tied=True))
    assert "norm" not in [group.path for group in found.groups]
    assert "also read by aten.embedding in embed" in found.reasons["embed.weight"]


class Fused(nn.Module):
    """One projection of queries, keys and values; ReLU between linears; a norm that is also added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.post, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, -1)
        x = self.o(nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        u = self.post(x)
        return u + self.out(torch.relu(self.fc(u)))


def test_of_a_fused_projection_only_the_values_channels_move() -> None:
    found = groups(Fused().eval(), (torch.randn(2, 5, WIDTH),), None)
    by_path = {group.path: group for group in found.groups}
    assert sorted(by_path) == ["fc", "norm", "qkv"]
    free = by_path["qkv"].free
    assert not free[: 2 * WIDTH].any() and free[2 * WIDTH :].all()
    assert by_path["fc"].readers[0].weight.targets == ["out.weight"]  # ReLU commutes with positive scales
    assert "added to a value that has another scale" in found.reasons["fc.weight"]


class Twice(nn.Module):
    """Operators that have channels in two operands, round to integers, or sum channels, behind linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.a(x), self.b(x), self.c(x)
        return self.out(torch.stack([a / a, b @ b, c.to(torch.int32).float(), (x @ self.d(x)[0]).expand(WIDTH, -1)]))


def test_what_does_not_commute_with_a_scale_is_no_way_for_it() -> None:
    found = groups(Twice().eval(), (torch.randn(WIDTH, WIDTH),), None)
    assert not found.groups and "out.weight" in found.reasons


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 12, 48, 64, 384])
@pytest.mark.parametrize("keeps_ones", [False, True])
def test_a_rotation_is_orthogonal_and_spreads(size: int, keeps_ones: bool) -> None:
    rotation = Rotation(size, 1, keeps_ones)
    matrix = rotation.rows(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-14, rtol=0)
    if keeps_ones:
        ones = torch.ones(1, size, dtype=torch.float64)
        torch.testing.assert_close(rotation.rows(ones), ones, atol=1e-13, rtol=0)
    if size >= 48:
        assert float(matrix.abs().max()) < 0.6  # an outlier of one channel is spread


def test_changes_are_made_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.randn(24, 16))
    source = MovedWeights(ModuleWeights())
    source.change("equalise", "w", Scaled(1, torch.rand(16, dtype=torch.float64) + 0.5), Rotated(0, Rotation(24, 0)))
    source.change("equalise", "w", Scaled(0, torch.rand(24, dtype=torch.float64) + 0.5))
    whole, identity = source.read(["w"], weight), source.identity(["w"], weight)
    monkeypatch.setattr("qcompiler.frontends.quantise.rewrites.moved_weights.AT_A_TIME", 70)
    assert torch.equal(source.read(["w"], weight), whole)
    assert identity == source.identity(["w"], weight) != ModuleWeights().identity(["w"], weight)


KEPT = [pytest.param("written", False, marks=pytest.mark.slow), pytest.param("offset", False, marks=pytest.mark.slow),
        ("layer", True)]  # fmt: skip

# --- the function is kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "tied"), KEPT)
def test_a_rotation_keeps_the_float_function(form: str, tied: bool) -> None:
    """Nothing is quantised. Outputs are sums of 64 products behind 2 layers, in fp32: some 2^-24 of their size each."""
    model = Decoder(form, tied=tied)
    found = quantised(model, rotate=True)
    assert "computes the same" in said(found, "rotate-hidden")
    assert ("untied" in said(found, "rotate-hidden")) == tied
    assert error(model, found) < (32 * 2.0**-24) ** 2
    assert not torch.equal(found.module(ids()[0]), model(ids()[0]))  # it did something


class Direct(nn.Module):
    """A linear without a bias reads the stream behind a norm with one, and writes it; `twice` puts another before it,
    which has the same weight and only reads."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.norm, self.fc, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        nn.init.normal_(self.norm.bias)
        self.twice = twice

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        u = self.fc(self.norm(h))
        return self.head(self.last(h + (self.fc(torch.tanh(u)) if self.twice else u)))


def test_a_bias_that_is_made_for_a_writer_turns_with_it() -> None:
    assert "computes the same" in said(quantised(Direct(False).eval(), rotate=True), "rotate-hidden")
    with pytest.raises(RecipeError, match=r"'fc\.weight' is read in several ways"):
        quantised(Direct(True).eval(), rotate=True)


def test_awq_rounds_the_rows_that_the_program_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(rewrites, "awq", lambda *_, int8_rows: seen.append(int8_rows))
    model, x = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).eval(), torch.randn(5, WIDTH)
    for how in ({"compute": "int8"}, {}):
        quantised(model, [x], None, (x,), linear="int8", algorithm="awq", **how)
    assert seen == [True, False]


@pytest.mark.slow
def test_scales_move_without_a_change_of_the_outputs() -> None:
    model = Decoder("offset", bias=True)
    found = quantised(model, linear=None, embedding=None, rules={"head": "int8"}, smooth=0.7, equalise=True)
    with torch.no_grad():
        same = quantised(model, False, linear=None, embedding=None, rules={"head": "int8"})
    assert error(model, found) < 4 * error(model, same) + 1e-9
    assert "computes the same" in said(found, "smooth-scales") and "computes the same" in said(found, "equalise")


def test_a_rewrite_that_changes_the_function_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of one reader is off by 1/1000."""
    move = rewrites.Group.move

    def wrong(group: Any, source: MovedWeights, scales: torch.Tensor, by: Any) -> None:
        move(group, source, scales, by)
        off = torch.ones(group.channels, dtype=torch.float64)
        off[3] = 1.001
        reader = group.readers[0]
        source.change(by, reader.weight.targets[0], Scaled(reader.axis, off[reader.read.channels]))

    monkeypatch.setattr(rewrites.Group, "move", wrong)
    found = quantised(Decoder(), linear="int8", smooth=0.5)
    assert "taken back: outputs moved by" in said(found, "smooth-scales")
    plain = quantised(Decoder(), False, linear="int8")
    x = ids()[0]
    assert torch.equal(found.module(x), plain.module(x))


@pytest.mark.slow
def test_scales_of_a_model_in_bf16_are_powers_of_two_and_change_no_bit() -> None:
    model = Decoder("written").to(torch.bfloat16)
    found = quantised(model, linear=None, embedding=None, rules={"layers.0.down": "int8"}, smooth=0.5)
    assert "outputs moved by 0 of what" in said(found, "smooth-scales")


# --- outliers --------------------------------------------------------------------------------------------------------

RECIPES = [
    ({"linear": "int4:group=32"}, {"smooth": 0.5}),
    ({"linear": "int4:group=32"}, {"algorithm": "awq"}),
    ({"linear": "int4:group=32"}, {"rotate": True}),
    ({"linear": "int8", "activations": "int8"}, {"smooth": 0.5}),
    ({"linear": "int8", "activations": "int8"}, {"rotate": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "rewrite"), RECIPES)
def test_outliers_are_mended(storage: dict[str, Any], rewrite: dict[str, Any]) -> None:
    """The twin computes the same floats and collapses when it is rounded; a rewrite brings the error back."""
    model = Decoder()
    twin = outlier_twin(copy.deepcopy(model))
    plain, collapsed = error(model, quantised(model, False, **storage)), error(model, quantised(twin, False, **storage))
    mended = error(model, quantised(twin, **storage, **rewrite))
    assert collapsed > 2 * plain
    assert mended < 1.3 * plain


@pytest.mark.slow
@pytest.mark.parametrize("storage", [{"linear": "int8", "activations": "int8"}, {"linear": "int4:group=128"}], ids=str)
def test_the_twin_of_the_trained_model_is_mended(storage: dict[str, Any]) -> None:
    """KL from fp32 on 16 windows of held-out text: a rewrite of the twin comes close to the untouched model."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
    import rewrites as benchmark  # its own folder is on the path only here
    import tiny_llama

    model, windows = tiny_llama.load_model(), tiny_llama.held_out(8193)
    reference = [base.float() for base, _ in tiny_llama.log_probabilities(model, windows)]
    shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
    example = (torch.zeros(3, 37, dtype=torch.int64),)
    plain, twin = (export_model(m, example, {}, shapes) for m in (model, benchmark.outlier_twin(model)))
    inputs = benchmark.calibration(8)

    def kl(exported: Any, **rewrite: Any) -> float:
        graph = benchmark.oracle(exported, storage, rewrite, inputs)
        return float(benchmark.divergences(graph, windows, reference).mean())

    own = kl(plain)
    assert kl(twin) > 3 * own
    smoothed = 1.2 if "activations" in storage else 1.35  # at 4 bits s = 0.5 costs the untouched model 15 % as well
    for rewrite, most in (({"smooth": 0.5}, smoothed), ({"algorithm": "awq"}, 1.2), ({"rotate": True}, 1.2)):
        assert kl(twin, **rewrite) < most * own, rewrite


@pytest.mark.slow
def test_rewrites_compose_with_gptq_and_with_each_other() -> None:
    twin = outlier_twin(Decoder(tied=True))
    found = quantised(twin, ids(12), linear="int4:group=32", rotate=True, smooth=0.5, algorithm="gptq")
    assert "untied" in said(found, "rotate-hidden") and "codes by gptq" in said(found, "codes")
    nearest = quantised(twin, ids(12), linear="int4:group=32", rotate=True, smooth=0.5)
    assert error(twin, found) < error(twin, nearest)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dead_channels_have_the_scale_one() -> None:
    model = Decoder()
    with torch.no_grad():
        model.layers[0].first.weight[:3] = 0  # no activation
        model.layers[0].up.weight[5] = 0
        for each in (model.layers[0].gate, model.layers[0].up):
            each.weight[:, 7] = 0  # no weight
    for options in ({"smooth": 0.5}, {"algorithm": "awq"}, {"equalise": True}):
        found = quantised(model, linear="int4:group=32", **options)
        assert torch.isfinite(found.module(ids()[0])).all()
        assert error(model, found) < 0.05


def test_inputs_that_are_not_finite_are_an_error() -> None:
    model = Decoder()
    with torch.no_grad():
        model.embed.weight[7] = torch.nan
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        quantised(model, [torch.full((1, 4), 7)], linear="int8", smooth=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smooth": 0.5}, "smooth=0.5 needs calibration data"),
        ({"algorithm": "awq"}, "algorithm='awq' needs calibration data"),
        ({"smooth": 1.5}, "exponent from 0 to 1"),
        ({"smooth": True}, "exponent from 0 to 1"),
        ({"rotate": 1}, "write True or False"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        quantised(Decoder(), False, linear="int8", **options)


def test_a_model_without_the_structure_is_refused_with_the_reason() -> None:
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
            self.embed = nn.Embedding(50, WIDTH)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embed(ids))
            return self.norm(x + torch.sigmoid(self.fc(x)))

    with pytest.raises(RecipeError, match=r"no residual stream was found\..*norm"):
        quantised(PostNorm().eval(), linear="int8", rotate=True)
    with pytest.raises(RecipeError, match=r"no scale can move in this model: 'fc\.weight'"):
        quantised(PostNorm().eval(), linear="int8", smooth=0.5)
