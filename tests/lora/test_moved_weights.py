"""A program records which weights are not the model's own, and what takes a stored weight for the model's asks it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from rewritten_models import EXAMPLE, SHAPES, Decoder, ids
from torch import nn

import qcompiler as qc
from qcompiler.config import ALGORITHMS, resolve_format
from qcompiler.errors import AdapterError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.inspect.files import describe, summary
from qcompiler.plan.plan import Rewrite
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.program_file import load_image

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "0.1.0-format1-target.qca"
CONFIG = {"r": 2, "lora_alpha": 2}

# --- the record, against the values ----------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, ...]] = {
    "preset": (), "linear": (), "embedding": (), "rules": (), "promise_bits": (), "observer": (), "separate": (),
    "rounded_inputs": (),
    "activations": ("int8",), "compute": ("bf16",), "algorithm": ALGORITHMS[1:], "smooth": (0.5,), "rotate": (True,),
    "rotate_online": (True,), "equalise": (True,), "correct_bias": (True,), "tune_scales": (True,),
}  # fmt: skip
"""Values for each field of a recipe. Those of the first lines only choose formats, arithmetic and kernels."""
NAMES: dict[str, Rewrite] = {
    "smooth": "smooth-scales", "rotate": "rotate-hidden", "rotate_online": "rotate-online", "equalise": "equalise",
    "correct_bias": "correct-bias", "awq": "awq-scales",
}  # fmt: skip
"""The record's name of what a field, or an algorithm, asks for."""
BY_DATA = ("smooth", "correct_bias", "tune_scales", "gptq", "round", "awq")
CASES = [(field, value) for field, values in SETTINGS.items() for value in values]


def test_every_field_of_a_recipe_and_every_rewrite_is_placed_above() -> None:
    """A new field must be placed, and one that moves weights without a record fails the test below."""
    assert SETTINGS.keys() == {field.name for field in dataclasses.fields(qc.QuantConfig)}
    assert {*NAMES.values(), "fold-batch-norm", "column-order"} == set(get_args(Rewrite))


def held(found: Quantized) -> dict[str, np.ndarray]:
    """What the stored parameters mean, by path, in the model's order."""
    values: dict[str, np.ndarray] = {}
    for tensor in found.weights:
        assert tensor.format is not None
        fmt = qc.formats.get(tensor.format.name, **tensor.format.params)
        packed = PackedTensor(fmt, tensor.shape[0], tensor.shape[1], np.asarray(tensor.data))
        values |= dict.fromkeys(tensor.parameters, fmt.decode(packed))
    state = found.exported.program.state_dict
    return values | {name: each.detach().numpy() for name, each in state.items() if not name.endswith("_packed")}


def differing(model: nn.Module, found: Quantized, linear: str) -> set[str]:
    """The stored parameters that are neither the model's values nor their codes in the format `linear`.

    A code of int8 in groups of 32 is off by 1/254 of the group's largest value: by 0.5 % of a normal weight's norm. So
    codes that data chose, which may be a step off, are within 2 %.
    """
    own, fmt, moved = dict(model.named_parameters(remove_duplicate=False)), resolve_format(linear), set()
    for name, values in held(found).items():
        if name not in own:
            moved |= {name} if values.any() else set()  # a bias of zeros that the model does not have
            continue
        wanted = own[name].detach().numpy()
        near = values.ndim == 2 and np.array_equal(values, fmt.decode(fmt.encode(wanted)))
        close = values.ndim == 2 and np.linalg.norm(values - wanted) < 0.02 * np.linalg.norm(wanted)
        if not (np.array_equal(values, wanted) or near or close):
            moved.add(name)
    return moved


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        ("mlp", "equalise", True),
        *(pytest.param(make, *case, marks=pytest.mark.slow) for make in ("tied", "untied") for case in CASES),
    ],
)
def test_each_parameter_with_other_values_is_in_the_record(make: str, field: str, value: Any) -> None:
    linear, name = "int8:group=32", value if value == "awq" else field
    model = Mlp().eval() if make == "mlp" else Decoder("layer", bias=True, tied=make == "tied")
    exported = export_model(model, (X,), {}) if make == "mlp" else export_model(model, EXAMPLE, {}, SHAPES)
    recipe = qc.QuantConfig("float", linear=linear, **{field: value})
    data = Calibration(ids()) if name in BY_DATA or value in BY_DATA else None
    found = insert_qdq(exported, recipe, calibration=data)
    moved = found.weights.moved
    assert moved is not None
    others = differing(model, found, linear)
    assert others <= moved.keys(), f"without a record: {sorted(others - moved.keys())}"
    assert {by for each in moved.values() for by in each} == ({NAMES[name]} if name in NAMES else set())
    if name != "awq":  # its scales may be 1
        assert moved.keys() <= others, f"not moved: {sorted(moved.keys() - others)}"
    said = {row.parameters[0]: row.reason for row in found.ledger}
    first = next((path for path in moved if path in said), None)
    assert first is None or f"moved by {NAMES[name]}" in said[first]


@pytest.mark.slow
def test_folded_norms_of_batches_are_in_the_record_with_the_biases_that_they_make() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.linear = nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8), normed()
            nn.init.normal_(self.norm.weight, 1.0, 0.3)
            nn.init.normal_(self.norm.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.norm(self.conv(x[:, :, None, None])).mean((1, 2, 3))[:, None]

    model, linear = Both().eval(), "int8:group=32"
    found = insert_qdq(export_model(model, (X,), {}), qc.QuantConfig("float", linear=linear))
    assert found.weights.moved is not None and set(found.weights.moved.values()) == {("fold-batch-norm",)}
    assert found.weights.moved.keys() == {"conv.weight", "conv.bias", "linear.0.weight", "linear.0.bias"}
    model.conv.weight = nn.Parameter(model.conv.weight[:, :, 0, 0])  # as it is stored
    assert differing(model, found, linear) == found.weights.moved.keys()


@pytest.mark.slow
def test_rewrites_are_listed_in_their_order() -> None:
    recipe = qc.QuantConfig("float", linear="int8", rotate=True, smooth=0.5, rotate_online=True)
    found = insert_qdq(export_model(Decoder(), EXAMPLE, {}, SHAPES), recipe, calibration=Calibration(ids()))
    assert found.weights.moved is not None
    assert found.weights.moved["layers.0.o.weight"] == ("rotate-hidden", "smooth-scales")
    assert found.weights.moved["layers.0.down.weight"] == ("rotate-hidden", "rotate-online")


# --- merges ----------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Norm, linear, linear. Channels of very different sizes, so that every rewrite has something to move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        with torch.no_grad():
            self.norm.weight *= torch.logspace(-1, 1, 32)
            self.norm.bias += torch.linspace(0.1, 0.2, 32)
            self.fc.weight *= torch.logspace(-1, 1, 64)[:, None]
            self.out.weight *= torch.logspace(1, -1, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.relu(self.fc(self.norm(x))))


X = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))


def normed() -> nn.Module:
    """A linear, and a norm of batches that insert-qdq folds into it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)).eval()
    with torch.no_grad():
        model[1].weight *= torch.logspace(-1, 1, 64)
    return model


def factors(path: str, rows: int, cols: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        f"base_model.model.{path}.lora_A.weight": rng.normal(size=(2, cols)).astype(np.float32),
        f"base_model.model.{path}.lora_B.weight": (0.1 * rng.normal(size=(rows, 2))).astype(np.float32),
    }


def merged_in_float(model: nn.Module, path: str) -> nn.Module:
    weight = model.get_submodule(path).weight
    a, b = factors(path, *weight.shape).values()
    with torch.no_grad():
        weight += torch.from_numpy(b @ a)
    return model


MERGES = [
    ("fold-batch-norm", normed, {}, "0", "3"),
    ("equalise", Mlp, {"equalise": True}, "out", None),
    ("smooth-scales", Mlp, {"smooth": 0.5}, "fc", None),
    ("awq-scales", Mlp, {"algorithm": "awq"}, "fc", None),
    ("rotate-online", Mlp, {"rotate_online": True}, "out", "fc"),
    ("correct-bias", Mlp, {"correct_bias": True}, "out", None),
]  # fmt: skip
"""(what moves, model, recipe, a target that it moves, one that it leaves)"""
ELSEWHERE: dict[str, Any] = {"device": "cuda:0", "targets": ["sm_80"]}
"""A GPU that is not here, so that no kernel is compiled."""


def compiled(model: nn.Module, options: dict[str, Any], **target: Any) -> qc.Program:
    recipe = qc.QuantConfig("float", linear="int8:group=32", **options)
    data = [(X,)] if {"smooth", "algorithm", "correct_bias"} & options.keys() else None
    return qc.qcompile(model.eval(), (X,), quant=recipe, calibrate=data, **target)


def without_record(program: qc.Program) -> LoadedProgram:
    """The program as if nothing had been recorded: an attack, and what merges did before."""
    image = program.image
    kept = msgspec.structs.replace(image.plan, moved=())
    return LoadedProgram.from_image(dataclasses.replace(image, plan=kept))


@pytest.mark.parametrize(
    ("by", "make", "options", "target"),
    [pytest.param(*case[:4], marks=[pytest.mark.slow] * (case[0] != "equalise")) for case in MERGES],
)
def test_a_moved_weight_takes_no_adapter(by: str, make: Any, options: dict[str, Any], target: str) -> None:
    model = make()
    program = compiled(model, options, **ELSEWHERE)
    adapter = factors(target, *model.get_submodule(target).weight.shape)
    with pytest.raises(AdapterError, match=rf"'{target}' is not what .* has other values .*{by}.*merge into the model"):
        qc.merge_lora(program, adapter, config=CONFIG)
    assert by in str(program.report()) and by in program.report().as_dict()["moved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "make", "options", "target"), [each[:4] for each in MERGES if each[0] != "correct-bias"]
)
def test_without_the_record_a_merge_into_a_moved_weight_is_wrong(
    by: str, make: Any, options: dict[str, Any], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it is refused: the oracle is the merge in floating point, compiled by the same recipe. int8 rounds to 1 %."""
    monkeypatch.setattr("qcompiler.plan.verify.check_moved", lambda plan: None)
    adapter = factors(target, *make().get_submodule(target).weight.shape)
    oracle = compiled(merged_in_float(make(), target), options)(X)
    wrong = qc.merge_lora(without_record(compiled(make(), options)), adapter, config=CONFIG).weights(X)
    assert (wrong - oracle).norm() > 0.05 * oracle.norm(), by


@pytest.mark.slow
@pytest.mark.parametrize(("by", "make", "options", "target"), [(*case[:3], case[4]) for case in MERGES if case[4]])
def test_a_weight_that_stayed_takes_its_adapter(by: str, make: Any, options: dict[str, Any], target: str) -> None:
    """Weights are rounded twice, by 0.5 % of their norm each, and so are those of the oracle once."""
    adapter = factors(target, *make().get_submodule(target).weight.shape)
    oracle = compiled(merged_in_float(make(), target), options)(X)
    base = compiled(make(), options)
    ours = qc.merge_lora(base, adapter, config=CONFIG).weights(X)
    assert (base(X) - oracle).norm() > 0.05 * oracle.norm(), by
    assert (ours - oracle).norm() < 0.02 * oracle.norm(), by


@pytest.mark.slow
def test_a_rotated_stream_takes_no_adapter_for_any_of_its_linears() -> None:
    recipe = qc.QuantConfig("float", linear="int8", rotate=True)
    program = qc.qcompile(Decoder(), EXAMPLE, dynamic_shapes=SHAPES, quant=recipe, **ELSEWHERE)
    for path, rows, cols in (("layers.0.q", 64, 64), ("layers.1.down", 64, 96), ("layers.1.up", 96, 64)):
        with pytest.raises(AdapterError, match=f"'{path}' is not what .*rotate-hidden"):
            qc.merge_lora(program, factors(path, rows, cols), config=CONFIG)


@pytest.mark.slow
def test_a_weight_that_is_stored_in_two_orders_takes_no_adapter() -> None:
    """Merged into one of them, the other reader would have the old weight."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(32, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x).relu() @ self.lin.weight

    program = qc.qcompile(Twice().eval(), (X,), **ELSEWHERE)
    with pytest.raises(AdapterError, match="'lin' is stored 2 times, in the order of each reader"):
        qc.merge_lora(program, factors("lin", 32, 32), config=CONFIG)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_without_a_record_takes_no_adapter() -> None:
    """It is older than the record, so nobody knows. It runs as before (tests/golden)."""
    image, _ = load_image(GOLDEN)
    if image.plan.moved is None:  # the files of this version are written again before its release
        assert "moved       not recorded: the file is older" in summary(GOLDEN)
    path, entry = next((e.paths[0], e) for e in image.plan.weights if e.format is not None and len(e.paths) == 1)
    unknown = dataclasses.replace(image, plan=msgspec.structs.replace(image.plan, moved=None))
    program: Any = SimpleNamespace(image=unknown, devices=("cpu",))  # nothing of it is compiled
    with pytest.raises(AdapterError, match=r"does not record which .* are the model's own.*compile it again"):
        qc.merge_lora(program, factors(path.removesuffix(".weight"), *entry.shape), config=CONFIG)


@pytest.mark.slow
def test_a_file_keeps_the_record_and_inspect_shows_it(tmp_path: Path) -> None:
    program = compiled(Mlp(), {"rotate_online": True})
    program.save(tmp_path / "moved.qca")
    again = qc.load(tmp_path / "moved.qca")
    assert again.plan.moved == program.plan.moved and again.plan.moved
    with pytest.raises(AdapterError, match="rotate-online"):
        qc.merge_lora(again, factors("out", 32, 64), config=CONFIG)
    assert describe(tmp_path / "moved.qca")["moved"] == {"rotate-online": 1}
    assert "moved       1 parameter by rotate-online" in summary(tmp_path / "moved.qca")
    merged = qc.merge_lora(again, factors("fc", 64, 32), config=CONFIG).weights  # a merge keeps the record
    merged.save(tmp_path / "merged.qca")
    with pytest.raises(AdapterError, match="rotate-online"):
        qc.merge_lora(qc.load(tmp_path / "merged.qca"), factors("out", 32, 64), config=CONFIG)


@pytest.mark.slow
def test_layers_are_compared_with_the_float_model_only_where_they_are_its_own() -> None:
    smoothed, model = compiled(Mlp(), {"smooth": 0.5}), Mlp().eval()
    report = smoothed.errors(X, model=model).errors
    assert all(row.quantised is None and row.model is None for row in report.layers)
    assert any("smooth-scales moved weights" in note for note in report.notes)
    assert report.results[0].model is not None
    plain = normed()
    rows = {row.path: row for row in compiled(normed(), {}).errors(X, model=plain).errors.layers}
    assert rows["0"].quantised is None and rows["3"].quantised is not None and rows["3"].quantised > 30
