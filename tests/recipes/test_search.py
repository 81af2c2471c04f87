"""`qc.search`: what it measures is what quantised models compute, and its recipes keep their budgets."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageColor
from torch import nn

import qcompiler as qc
from qcompiler.config import resolve_format
from qcompiler.errors import (
    ArgumentError,
    ArgumentShapeError,
    BudgetError,
    CalibrationError,
    ExportError,
    MissingDependencyError,
    QCompilerError,
    RecipeError,
)
from qcompiler.frontends.quantise.insert_qdq import insert_qdq
from qcompiler.frontends.quantise.sensitivity import Study
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.recipes import charts
from qcompiler.recipes.budgets import Budget
from qcompiler.recipes.drawing import SCALE, Circle
from qcompiler.recipes.result import SearchResult

K, WORDS = 64, 96
CANDIDATES = ("int3", "int4", "int8")


class Small(nn.Module):
    """An embedding with a tied head; q, k and v of the same rows, and a linear behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, K)
        self.q, self.k, self.v, self.o = (nn.Linear(K, K, bias=False) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(K), nn.Linear(K, WORDS, bias=False)
        self.head.weight = self.embed.weight
        for each, scale in ((self.embed, 0.2), (self.q, 3.0), (self.k, 3.0), (self.v, 1.0), (self.o, 3.0)):
            each.weight.data *= scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        seen = (self.q(x) @ self.k(x).transpose(1, 2) / 8).softmax(-1) @ self.v(x)
        return self.head(x + self.o(seen))


class Images(nn.Module):
    """Convolutions, one of them transposed and one with a batch norm, and a recurrent layer. No logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.rows = nn.GRU(64, 32, batch_first=True)
        self.norm.running_mean.data.normal_()
        self.norm.running_var.data.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.up(torch.relu(self.norm(self.first(x))))
        return image, self.rows(image.flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 64))[0]


SHAPES = {"ids": {0: ("b", 1, 4), 1: ("s", 1, 64)}}
EXAMPLE = (torch.zeros(2, 7, dtype=torch.int64),)


@functools.cache
def tokens() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, WORDS, (2, 20 + i), generator=generator) for i in range(3))


def searched(budget: str = "4.25 bits", model: nn.Module | None = None, data: Any = None, **how: Any) -> SearchResult:
    options = {"candidates": CANDIDATES, "merged": False, "args": EXAMPLE, "dynamic_shapes": SHAPES} | how
    return qc.search((model or Small()).eval(), tokens() if data is None else data, budget, **options)


@functools.cache
def shared() -> SearchResult:
    return searched()


def quantised(model: nn.Module, formats: dict[str, str]) -> nn.Module:
    """The eager model with decoded weights in place of its own."""
    for path, text in formats.items():
        weight, fmt = model.get_parameter(path), resolve_format(text)
        weight.data = torch.from_numpy(fmt.decode(fmt.encode(weight.detach().numpy())))
    return model.eval()


def divergence(model: nn.Module) -> float:
    """The mean KL from the float model in eager torch, in nats."""
    total, rows, plain = 0.0, 0, Small().eval()
    for ids in tokens():
        with torch.no_grad():
            p, q = (each(ids).double().log_softmax(-1) for each in (plain, model))
        total += float((p.exp() * (p - q)).sum())
        rows += ids.numel()
    return total / rows


# --- what is measured ------------------------------------------------------------------------------------------------


def test_each_sensitivity_is_the_divergence_of_the_eager_model_with_that_weight_alone() -> None:
    result = shared()
    assert result.measure == "kl" and len(result.effects) == 5 * len(CANDIDATES)
    for (path, text), effect in result.effects.items():
        assert effect.cost == pytest.approx(divergence(quantised(Small(), {path: text})), rel=1e-3, abs=1e-9)


def test_the_error_of_a_layer_and_its_worst_channel() -> None:
    effect, model = shared().effects["v.weight", "int3"], Small().eval()
    with torch.no_grad():
        x = torch.cat([model.norm(model.embed(ids)).flatten(0, 1) for ids in tokens()]).double()
        plain = model.v.weight.double()
        stored = quantised(Small(), {"v.weight": "int3"}).v.weight.double()
        squares, errors = (x @ plain.T).square().sum(0), (x @ (stored - plain).T).square().sum(0)
    assert effect.weight_error == pytest.approx(float((stored - plain).square().sum() / plain.square().sum()))
    assert effect.output_error == pytest.approx(float(errors.sum() / squares.sum()), rel=1e-4)
    assert effect.channel == int((errors / squares).argmax())
    assert effect.channel_error == pytest.approx(float((errors / squares).max()), rel=1e-4)


def test_the_true_divergence_is_that_of_all_weights_together() -> None:
    point = shared().chosen
    assert point.measured == pytest.approx(divergence(quantised(Small(), dict(point.formats))), rel=1e-3)
    assert point.measured == pytest.approx(point.estimate, rel=0.5)


@pytest.mark.slow
def test_convolutions_and_recurrent_layers_are_stored_as_a_compile_stores_them() -> None:
    """The whole recipe is as far from the float graph as the graph that `insert-qdq` makes."""
    x, model = (torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2)),), Images().eval()
    result = qc.search(model, [x], "5 bits", ("int3", "int4", "int8"), merged=False)
    assert result.measure == "error" and {each.kind for item in result.items for each in item.layers} == {
        "conv", "linear"}  # fmt: skip
    made = insert_qdq(export_model(model, x), result.recipe)
    with torch.no_grad():
        plain, own = model(*x), made.module(*x)
    far = [float((b - a).square().sum() / a.square().sum()) for a, b in zip(plain, own, strict=True)]
    assert result.chosen.measured == pytest.approx(sum(far) / 2, rel=1e-3)
    assert made.ledger.bits_per_weight() == pytest.approx(result.chosen.bits)


def test_sizes_are_those_of_the_ledger() -> None:
    for point in shared().front[1:2]:
        ledger = insert_qdq(export_model(Small().eval(), EXAMPLE, dynamic_shapes=SHAPES), point.recipe).ledger
        assert (ledger.bits_per_weight(), ledger.bytes_after) == (pytest.approx(point.bits), point.nbytes)
        stored = {row.parameters[0]: row.format.partition(":")[0] for row in ledger if row.format}
        assert stored == point.formats


@pytest.mark.slow
def test_by_output_one_candidate_of_each_weight_runs_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    full: list[str] = []
    effect = Study._effect

    def counted(self: Study, weight: Any, text: str, place: int, envs: Any, whole: bool) -> Any:
        full.extend([weight.targets[0]] * whole)
        return effect(self, weight, text, place, envs, whole)

    monkeypatch.setattr(Study, "_effect", counted)
    result = searched(sensitivity="output")
    assert sorted(full) == ["embed.weight", "k.weight", "o.weight", "q.weight", "v.weight"]
    for key, each in result.effects.items():
        assert each.cost == pytest.approx(shared().effects[key].cost, rel=1.0)  # KL is proportional only nearly


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_a_size_is_kept_and_is_spent_well() -> None:
    result = shared()
    costs = [each.estimate for each in result.front]
    assert costs == sorted(costs, reverse=True)
    assert result.chosen.bits <= 4.25 and result.chosen.name == "4.25 bits"
    smaller, same = result.point("3.9 bits"), result.point(f"{result.chosen.nbytes} B")
    assert smaller.bits <= 3.9 and smaller.estimate > result.chosen.estimate == same.estimate
    assert result.point("kl<1").name == "kl<1" and result.point("least").bits == result.front[0].bits


def test_a_bound_is_met_by_a_true_run_and_no_much_smaller_recipe_meets_it() -> None:
    result = searched("kl<0.0004", candidates=("int3", "int4", "int8", "float"))
    chosen = result.chosen
    assert chosen.measured is not None and chosen.measured < 0.0004
    assert divergence(quantised(Small(), {p: t for p, t in chosen.formats.items() if t != "float"})) < 0.0004
    runs = [each for each in result.front if each.measured is not None and each.nbytes < chosen.nbytes]
    assert runs and all(each.measured >= 0.0004 for each in runs if each.measured is not None)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("3 bits", r"3 bits: the smallest recipe of these candidates takes 3\.5"),
        pytest.param("2 kB", "takes .* kB in all", marks=pytest.mark.slow),
        pytest.param("kl<1e-9", "kl<1e-09: no recipe of these candidates was found", marks=pytest.mark.slow),
        pytest.param("error<0.1", "this search measures kl .*linear.*96.*measure='error'", marks=pytest.mark.slow),
        ("4.25", "write bits per weight"), ("-1 bits", "write bits per weight"), ("kl<x", "write bits per weight"),
    ],
)  # fmt: skip
def test_a_budget_that_no_recipe_meets_is_an_error(budget: str, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        searched(budget)


@pytest.mark.slow
def test_an_impossible_size_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "effects", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(BudgetError):
        searched("3 bits", workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


# --- constraints -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_the_passes_make_one_linear_gets_one_format() -> None:
    result = searched(merged=True)
    assert ["q.weight", "k.weight", "v.weight"] in [[each.path for each in item.layers] for item in result.items]
    assert all(len({each.formats[f"{name}.weight"] for name in "qkv"}) == 1 for each in result.front)
    assert any(len({each.formats[f"{name}.weight"] for name in "qkv"}) > 1 for each in shared().front)


@pytest.mark.slow
def test_rules_fix_formats_and_candidates_that_do_not_fit_are_left_out() -> None:
    result = searched(
        "11 bits", rules={"o": "int8", "q": None}, candidates=("q4_K", "int4")
    )  # blocks of 256 do not divide 64
    formats = result.chosen.formats
    assert (formats["o.weight"], formats["q.weight"], formats["v.weight"]) == ("int8", "float", "int4")
    made = insert_qdq(export_model(Small().eval(), EXAMPLE, dynamic_shapes=SHAPES), result.recipe)
    assert {row.parameters[0]: row.format.partition(":")[0] for row in made.ledger if row.counts} == {
        "embed.weight": "int4", "q.weight": "", "k.weight": "int4", "v.weight": "int4", "o.weight": "int8"}  # fmt: skip
    with pytest.raises(RecipeError, match="rule 'p' matches no module"):
        searched(rules={"p": "int8"})


@pytest.mark.slow
def test_what_no_candidate_can_store_takes_int8_and_is_noted() -> None:
    model = nn.Sequential(nn.Linear(60, 64), nn.Linear(64, 32)).eval()
    result = qc.search(model, [torch.randn(8, 60)], "7.5 bits", ("q4_0", "q8_0"), merged=False)
    assert result.chosen.formats == {"0.weight": "int8", "1.weight": "q4_0"}
    assert "0.weight: no candidate can store its 60 columns" in result.table()
    with pytest.raises(RecipeError, match="there is nothing to choose"):
        qc.search(model, [torch.randn(8, 60)], "7 bits", ("q4_K",), merged=False)


@pytest.mark.parametrize("wrong", [[], ["q4_K_M"], ["int4, else int8"], "int4"], ids=str)
def test_candidates_are_single_formats(wrong: Any) -> None:
    with pytest.raises(QCompilerError, match=r"candidates|q4_K_M"):
        searched(candidates=wrong)


# --- interruptions and bad data --------------------------------------------------------------------------------------


def test_a_killed_search_goes_on_behind_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    effect = Study._effect

    def counted(self: Study, weight: Any, text: str, *rest: Any) -> Any:
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(text)
        return effect(self, weight, text, *rest)

    monkeypatch.setattr(Study, "_effect", counted)
    with pytest.raises(KeyboardInterrupt):
        searched(workdir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:-9])  # the last line was cut: it is measured again
    calls.clear()
    monkeypatch.setattr(Study, "_effect", lambda *given: (calls.append(given[2]), effect(*given))[1])
    result = searched(workdir=tmp_path)
    assert len(calls) == 15 - 6 and result.effects == shared().effects


@pytest.mark.slow
def test_what_was_measured_serves_other_budgets_and_more_candidates_but_not_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    effect = Study._effect
    monkeypatch.setattr(Study, "_effect", lambda *given: (calls.append(given[2]), effect(*given))[1])
    searched(workdir=tmp_path, candidates=CANDIDATES[:2])
    calls.clear()
    assert searched("5 bits", workdir=tmp_path).effects == shared().effects and calls == ["int8"] * 5
    calls.clear()
    searched(workdir=tmp_path, data=tokens()[:2])
    assert len(calls) == 15


class Floats(nn.Module):
    """x in floats; the second linear gets `scale` times what the first gives."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(64, 64, bias=False), nn.Linear(64, 32), scale
        self.first.weight.data[5] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.scale * self.first(x))


def floats(*data: torch.Tensor, model: nn.Module | None = None, **how: Any) -> SearchResult:
    return qc.search((model or Floats()).eval(), data, "6 bits", CANDIDATES, merged=False, **how)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))


def broken(what: str) -> nn.Module:
    model = Floats(0.0 if what == "silent" else 1.0)
    if what == "nothing":
        model.second.weight.data.zero_()
        model.second.bias.data.zero_()
    elif what == "infinite":
        model.first.weight.data[0, 0] = math.inf
    return model


BAD = X.clone()
BAD[2, 3] = math.nan


@pytest.mark.parametrize(
    ("kind", "message", "data", "model"),
    [
        (CalibrationError, r"data\[1\] holds NaN or infinity for 'x'", (X, BAD), ""),
        pytest.param(
            ArgumentShapeError, r"data\[1\]: .* has \[8, 63\] for 'x'", (X, X[:, 1:]), "", marks=pytest.mark.slow
        ),
        pytest.param(
            ArgumentError, r"data\[1\]: .* has torch.int64 for 'x'", (X, X.long()), "", marks=pytest.mark.slow
        ),
        (CalibrationError, "the data has no inputs", (), ""),
        (CalibrationError, "'second.weight' are zero for all data.*rules=", (X,), "silent"),
        pytest.param(
            CalibrationError, "output 'linear_1' is zero for all data", (X,), "nothing", marks=pytest.mark.slow
        ),
        pytest.param(
            CalibrationError, r"data\[0\]: the float model's output 'linear_1' holds NaN", (X,), "infinite",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_bad_data_is_an_error_that_names_the_input(
    kind: type[QCompilerError], message: str, data: tuple[torch.Tensor, ...], model: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        floats(*data, model=broken(model), workdir=tmp_path / "work")
    assert not list(tmp_path.iterdir())


class Fixed(nn.Module):
    """Takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear = nn.Parameter(X), nn.Linear(64, 64)

    def forward(self) -> torch.Tensor:
        return self.linear(self.rows)


def test_an_empty_tuple_has_the_arguments_of_a_model_that_takes_none() -> None:
    result = qc.search(Fixed().eval(), [()], "8 bits", ("int4", "int8"), merged=False)
    assert result.chosen.formats == {"linear.weight": "int4"} and result.chosen.measured


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "data", [X[:, 1:], pytest.param((X, X), marks=SLOW), pytest.param({"y": X}, marks=SLOW), None, ()],
    ids=["shape", "two", "name", "none", "empty"],
)  # fmt: skip
def test_a_first_input_that_the_model_does_not_take_is_named(data: Any) -> None:
    """It is the example; nothing is measured, and nothing is written."""
    with pytest.raises(ExportError, match=r"The model is exported with data\[0\]; args= or kwargs= give another"):
        floats(data)


def test_texts_are_for_language_models() -> None:
    with pytest.raises(ExportError, match="data of texts or token ids is for language models"):
        qc.search(Floats(), ["a text"], "6 bits")


def test_a_dead_channel_is_reported_and_is_not_the_worst() -> None:
    row = floats(X).report().rows[0]
    assert (row.parameters, row.dead) == (("first.weight",), 1)
    assert row.channel != 5 and math.isfinite(row.snr) and math.isfinite(row.channel_snr)


# --- what is given out -----------------------------------------------------------------------------------------------


def test_the_recipe_file_compiles_to_the_chosen_point(tmp_path: Path) -> None:
    result = shared()
    result.save(tmp_path / "recipe.toml")
    text = (tmp_path / "recipe.toml").read_text()
    assert text.startswith("# made by qc.search for 4.25 bits") and 'reason = "alone kl ' in text
    assert qc.QuantConfig.of(str(tmp_path / "recipe.toml")) == result.recipe
    program = qc.qcompile(Small().eval(), EXAMPLE, quant=str(tmp_path / "recipe.toml"), dynamic_shapes=SHAPES,
                          weights="none", device="cpu")  # fmt: skip
    assert program.ledger.without_padding().bits_per_weight() == pytest.approx(result.chosen.bits)
    with pytest.raises(ArgumentError, match=r"ends in \.toml"):
        result.save(tmp_path / "recipe.json")


def test_tables_drawings_and_reports_say_what_was_found(tmp_path: Path) -> None:
    result = shared()
    (line,) = [line for line in result.table().splitlines() if line.startswith("->")]
    assert "4.25 bits" in line and f"{result.chosen.measured:.3e}" in line and result.chosen.summary in line
    report = result.report("least")
    found = json.loads(report.to_json())
    assert len(found["layers"]) == 5 and len(found["worst"]) == 5
    first = found["worst"][0]
    assert first["weight"] == max(found["layers"], key=lambda row: row["cost"])["parameters"][0]
    gains = {text: (result.effects[first["weight"], "int3"].cost - result.effects[first["weight"], text].cost)
             for text in ("int4", "int8")}  # fmt: skip
    more = {text: item.nbytes(text) - item.nbytes("int3") for item in result.items for text in gains
            if item.layers[0].path == first["weight"]}  # fmt: skip
    assert first["mend"]["format"] == max(gains, key=lambda text: gains[text] / more[text])
    assert "dB" in str(report) and "instead of int3" in str(report) and "(+1 tied)" in str(report)
    result.plot(tmp_path / "front.svg")
    report.plot(tmp_path / "layers.svg")
    assert (tmp_path / "front.svg").read_text().count("<circle") == len(result.front)
    assert (tmp_path / "layers.svg").read_text().count("<rect") == 1 + 5
    with pytest.raises(ArgumentError, match="drawings are SVG or PNG"):
        result.plot(tmp_path / "front.gif")


def test_a_drawing_as_png_has_the_marks_of_the_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen point is red, where the SVG has it; and without Pillow the error names what to install."""
    result = shared()
    result.plot(tmp_path / "front.png")
    result.report("least").plot(tmp_path / "layers.png")
    image = Image.open(tmp_path / "front.png").convert("RGB")
    drawing = charts.front(result.front, result.chosen_name, result.measure)
    (circle,) = (each for each in drawing.shapes if isinstance(each, Circle) and each.colour == charts.MARK)
    assert image.getpixel((round(circle.x * SCALE), round(circle.y * SCALE))) == ImageColor.getrgb(charts.MARK)
    assert Image.open(tmp_path / "layers.png").size[1] > 5 * charts.BAR * SCALE
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'qcompiler\[plot\]'"):
        result.plot(tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


@pytest.mark.slow
def test_a_point_can_be_measured_later() -> None:
    point = searched().verify("least")
    assert point.measured == pytest.approx(divergence(quantised(Small(), dict(point.formats))), rel=1e-3)


def test_a_budget_of_many_digits_is_kept_to_the_byte() -> None:
    for text in ("1118207 B", "104857599 B", "4.1234567 bits", "123.4567 MB", "kl<0.0123456789"):
        budget = Budget.of(text)
        assert Budget.of(budget.text) == budget, text
    assert Budget.of("4.50 bits").text == "4.5 bits"


def test_a_model_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    with pytest.raises(ArgumentError, match="training mode"):
        qc.search(model, [torch.randn(8, 64)], "9 bits", ("int4", "int8"), merged=False)


@pytest.mark.parametrize("effect", ['{"cost": NaN}', '{"cost": -5.0}', '{"cost": "x"}'])
def test_what_a_journal_cannot_hold_is_measured_again(tmp_path: Path, effect: str) -> None:
    model, data = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)).eval(), [torch.randn(8, 64)]
    true = qc.search(model, data, "9 bits", ("int4", "int8"), merged=False, workdir=tmp_path)
    (journal,) = tmp_path.glob("sensitivity-*.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line]
    lines[0][2].update(json.loads(effect))
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = qc.search(model, data, "9 bits", ("int4", "int8"), merged=False, workdir=tmp_path)
    assert again.table() == true.table()
