"""Weights from safetensors: the program is that of the module's own values, and what does not fit is named."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from by_path import load
from safetensors.torch import save_file
from torch import nn

import qcompiler as qc
from qcompiler.config import QuantConfig
from qcompiler.errors import ArgumentError, FormatValueError, PromiseError, WeightsError
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.frontends.weights.safetensors_files import read_tensors
from qcompiler.frontends.weights.weight_files import ByNeed, InMemory
from qcompiler.frontends.weights.weight_source import NoValues

models = load("tests/streaming/models.py")
Mixed, IDS, imported, stored, saved_state = models.Mixed, models.IDS, models.imported, models.stored, models.saved_state

SaveShards = Callable[..., Path]
LOOSE = QuantConfig("nf4", promise_bits=None)


class Convolutions(nn.Module):
    """Batch norms fold into the weights in front of them, whose values are rearranged; one convolution is grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.deep, self.after = nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.deep(torch.relu(self.norm(self.first(x)))))


def trained(model: nn.Module) -> nn.Module:
    """Statistics of its own for each batch norm."""
    generator = torch.Generator().manual_seed(1)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model.eval()


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [LOOSE, None], ids=["nf4", "float"])
def test_a_program_from_shards_stores_what_the_modules_own_values_give(shards: SaveShards, quant: object) -> None:
    model = Mixed().eval()
    folder = shards(saved_state(model))
    with qc.empty_weights():
        hollow = Mixed().eval()
    expected = imported(model, IDS, quant)
    for target in (hollow, Mixed().eval()):  # other values of its own change nothing
        found = imported(target, IDS, quant, qc.Shards(folder))
        assert stored(found) == stored(expected)
        assert str(found.ledger) == str(expected.ledger)
        assert torch.equal(found.quantized.module(*IDS), expected.quantized.module(*IDS))


@pytest.mark.parametrize("quant", [LOOSE, None], ids=["nf4", "float"])
def test_batch_norms_fold_with_the_files_values(shards: SaveShards, quant: object) -> None:
    model, args = trained(Convolutions()), (torch.randn(2, 4, 9, 9),)
    folder = shards(saved_state(model))
    with qc.empty_weights():
        hollow = Convolutions().eval()
    expected = imported(model, args, quant)
    for target in (hollow, Convolutions().eval()):
        found = imported(target, args, quant, qc.Shards(folder))
        assert stored(found) == stored(expected)
    if quant is None:
        with torch.no_grad():
            torch.testing.assert_close(found.quantized.module(*args), model(*args), rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """A block of a ResNet with a strided shortcut; of its last norms one has no parameters, one is a linear's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(4, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.short, self.norm3 = nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8)
        self.head, self.norm4 = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        y = torch.relu(y + self.norm3(self.short(x)))
        return self.norm4(self.head(y.mean((2, 3))))


def ops_of(result: ImportResult) -> list[str]:
    return [op.name for op in result.module.walk() if op.name not in ("qc.const", "qc.dim", "tensor.empty")]


@pytest.mark.parametrize("quant", [LOOSE, None], ids=["nf4", "float"])
@pytest.mark.parametrize(
    ("saved", "declared"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str,
)  # fmt: skip
def test_a_residual_block_from_shards_is_that_of_the_module(
    shards: SaveShards, saved: torch.dtype, declared: torch.dtype, quant: object
) -> None:
    """Also where the file's type is not the model's: what folds is converted first. Without values it folds, too."""
    model = trained(Residual(saved))
    args = (torch.randn(2, 4, 8, 8).to(declared),)
    folder = shards(saved_state(model))
    with qc.empty_weights():
        hollow = Residual(declared).eval()
    expected = imported(model.to(declared), args, quant)
    found = imported(hollow, args, quant, qc.Shards(folder))
    assert stored(found) == stored(expected)
    assert torch.equal(found.quantized.module(*args), expected.quantized.module(*args))
    assert str(found.ledger) == str(expected.ledger)
    folded = {row.parameters[0]: row.reason for row in found.ledger if row.parameters[0].endswith("running_var")}
    into = {"norm1": "first", "norm2": "second", "norm3": "short", "norm4": "head"}
    assert folded == {f"{norm}.running_var": f"folded into {name}.weight" for norm, name in into.items()}
    planned = imported(hollow, args, quant, NoValues())
    assert str(planned.ledger) == str(expected.ledger) and ops_of(planned) == ops_of(expected)
    assert "math.sqrt" not in ops_of(planned), "a norm is left"


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUICK = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32))
"""(saved, declared): each type once on either side."""


@pytest.mark.parametrize(
    ("saved", "declared"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow], id=f"{pair[0]}-{pair[1]}")
        for pair in itertools.product(FLOATS, FLOATS)
    ],
)
def test_values_are_converted_to_what_the_model_declares(
    shards: SaveShards, saved: torch.dtype, declared: torch.dtype
) -> None:
    model = Mixed(saved).eval()
    folder = shards(saved_state(model))
    with qc.empty_weights():
        hollow = Mixed(declared).eval()
    for quant in (LOOSE, None):
        assert stored(imported(hollow, IDS, quant, qc.Shards(folder))) == stored(
            imported(model.to(declared), IDS, quant)
        )


def test_a_buffer_that_the_model_writes_begins_as_the_file_says_or_as_the_model_made_it(shards: SaveShards) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.sum(0))
            return self.linear(x) + self.seen

    state = {**Counts().state_dict(), "seen": torch.full((8,), 7.0)}
    for tensors, begins in ((state, 7), ({k: v for k, v in state.items() if k != "seen"}, 1)):
        with qc.empty_weights():
            hollow = Counts()
        found = imported(hollow, (torch.randn(3, 8),), None, qc.Shards(shards(tensors)))
        assert found.states["seen"].tolist() == [begins] * 8


# --- files -----------------------------------------------------------------------------------------------------------


def test_an_index_a_plain_folder_and_one_file_are_the_same(shards: SaveShards, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    folder = shards(model.state_dict(), per_file=1)
    assert len(list(folder.glob("*.safetensors"))) == 4
    save_file(model.state_dict(), tmp_path / "one.safetensors")
    expected = stored(imported(model, (torch.randn(3, 64),), "nf4"))
    for step in range(3):
        if step == 1:
            (folder / "model.safetensors.index.json").unlink()
        path = tmp_path / "one.safetensors" if step == 2 else folder
        with qc.empty_weights():
            hollow = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        assert stored(imported(hollow, (torch.randn(3, 64),), "nf4", qc.Shards(path))) == expected


def _broken(folder: Path, how: str) -> None:
    file, index = folder / "model-00001.safetensors", folder / "model.safetensors.index.json"
    text = file.read_bytes()
    (size,) = struct.unpack("<Q", text[:8])
    header = json.loads(text[8 : 8 + size])
    name = next(iter(header))
    if how == "gone":
        file.unlink()
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(text[:-1])
    elif how == "cut in its header":
        file.write_bytes(text[: size // 2])
    elif how == "no safetensors":
        file.write_bytes(b"PK" * 500)
    elif how == "index without the name":
        index.write_text(json.dumps({"weight_map": {"other": file.name}}))
    elif how == "no index":
        index.write_text("[]")
    else:
        if how == "dtype":
            header[name]["dtype"] = "F8_E4M3"
        elif how == "offsets":
            header[name]["data_offsets"][1] -= 4
        elif how == "negative":
            header[name]["shape"] = [-header[name]["shape"][0]]
        new = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(new)) + new + text[8 + size :])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("gone", "names files that are not there: 'model-00001.safetensors'"),
        ("empty", "no safetensors file, or was cut off in its header"),
        ("cut", "was cut off: '.*' ends at byte"),
        ("cut in its header", "cut off in its header"),
        ("no safetensors", "no safetensors file"),
        ("index without the name", "tensors that their files do not hold: 'other'"),
        ("no index", "no index of shards"),
        ("dtype", "has the dtype F8_E4M3"),
        ("offsets", "has offsets"),
        ("negative", r"and the shape \[-"),
    ],
)
def test_a_damaged_checkpoint_is_named(shards: SaveShards, how: str, says: str) -> None:
    folder = shards(nn.Linear(64, 64).state_dict(), per_file=1)
    _broken(folder, how)
    with pytest.raises(WeightsError, match=says):
        qc.Shards(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "nowhere", "no such file"), (tmp_path, "holds no .*safetensors")):
        with pytest.raises(WeightsError, match=says):
            qc.qcompile(nn.Linear(8, 8), (torch.randn(3, 8),), weights=path)
    for number in (1, 2):
        save_file({"weight": torch.zeros(8, 8)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(WeightsError, match=r"both 1\.safetensors and 2\.safetensors"):
        qc.Shards(tmp_path)


def test_a_file_that_changes_while_it_is_used_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.zeros(8, 8)}, file)
    tensors = read_tensors(file)
    save_file({"weight": torch.zeros(8, 9)}, file)
    with pytest.raises(WeightsError, match="has changed"):
        tensors["weight"].view()


# --- names -----------------------------------------------------------------------------------------------------------


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped = Mixed()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wrapped(ids)


def test_a_prefix_on_either_side_and_a_renaming_are_followed(shards: SaveShards) -> None:
    model = Mixed().eval()
    state = saved_state(model)
    expected = {key: value[4] for key, value in stored(imported(model, IDS, LOOSE)).items()}
    with qc.empty_weights():
        hollow, inside = Mixed().eval(), Inside().eval()
    found = stored(imported(inside, IDS, LOOSE, qc.Shards(shards(state))))
    assert {key.removeprefix("wrapped."): value[4] for key, value in found.items()} == expected
    found = stored(imported(hollow, IDS, LOOSE, qc.Shards(shards({f"a.b.{k}": v for k, v in state.items()}))))
    assert {key: value[4] for key, value in found.items()} == expected
    renamed = {k.replace("first", "fc1"): v for k, v in state.items()}
    source = qc.Shards(shards(renamed), rename=lambda name: name.replace("first", "fc1"))
    assert {key: value[4] for key, value in stored(imported(hollow, IDS, LOOSE, source)).items()} == expected


def test_either_name_of_a_tied_weight_serves(shards: SaveShards) -> None:
    model = Mixed().eval()
    state = saved_state(model)
    other = {("head.weight" if k == "table.weight" else k): v for k, v in state.items()}
    with qc.empty_weights():
        hollow = Mixed().eval()
    expected = stored(imported(model, IDS, LOOSE))
    for tensors in (state, other, state | other):
        assert stored(imported(hollow, IDS, LOOSE, qc.Shards(shards(tensors)))) == expected


def test_everything_that_does_not_fit_is_listed_at_once(shards: SaveShards) -> None:
    state = saved_state(Mixed())
    del state["first.bias"], state["table.weight"]
    state |= {"norm.weight": torch.ones(127), "lm.bias": torch.zeros(3), "cls.weight": torch.zeros(3)}
    with qc.empty_weights():
        hollow = Mixed().eval()
    with pytest.raises(WeightsError) as caught:
        imported(hollow, IDS, None, qc.Shards(shards(state)))
    text = str(caught.value)
    assert "lacks 2 of the model's parameters: table.weight = head.weight, first.bias" in text
    assert "2 tensors that the model does not have: lm.bias, cls.weight" in text
    assert "1 shapes differ: 'norm.weight' is 127, the model has 128" in text
    assert "rename" in text and "ignore" in text


def test_names_to_ignore_and_parameters_that_no_path_uses_may_be_there_or_not(shards: SaveShards) -> None:
    model = Mixed().eval()
    state = {k: v for k, v in saved_state(model).items() if not k.startswith("unused")} | {"cls.bias": torch.zeros(1)}
    found = imported(Mixed().eval(), IDS, LOOSE, qc.Shards(shards(state), ignore=["cls.*"]))
    assert stored(found) == stored(imported(model, IDS, LOOSE))


# --- what goes wrong later -------------------------------------------------------------------------------------------


def test_a_broken_promise_is_refused_before_anything_is_encoded(shards: SaveShards) -> None:
    class Never(InMemory):
        def begin(self, entries: object, kept: int) -> None:
            raise AssertionError("encoding has begun")

    with pytest.raises(PromiseError):
        imported(
            Mixed().eval(), IDS, QuantConfig("nf4", promise_bits=4.0), qc.Shards(shards(saved_state(Mixed()))), Never()
        )


def test_a_value_that_is_not_finite_names_the_parameter(shards: SaveShards) -> None:
    state = saved_state(Mixed())
    state["first.weight"][5, 7] = float("nan")
    with pytest.raises(FormatValueError, match=r"'first.weight' \(128 x 64\): the weight at row 5, column 7 is nan"):
        imported(Mixed().eval(), IDS, LOOSE, qc.Shards(shards(state)))


def test_a_source_of_ones_own_may_be_given_and_anything_else_is_refused() -> None:
    with pytest.raises(ArgumentError, match="weights=3"):
        qc.qcompile(nn.Linear(8, 8), (torch.randn(3, 8),), weights=3)  # type: ignore[arg-type]


def test_small_programs_stay_in_memory_and_others_go_to_files() -> None:
    class Many:
        nbytes, arrangement = 10 << 20, ""

    for largest, entries, kept, in_memory in [
        (0, 0, 16 << 20, True), (0, 1, 0, False), (12 << 20, 1, 2 << 20, True), (12 << 20, 1, 3 << 20, False),
        (100 << 20, 9, 18 << 20, True), (100 << 20, 10, 0, False),
    ]:  # fmt: skip
        files = ByNeed(largest)
        files.begin([Many()] * entries, kept)  # type: ignore[list-item]
        assert isinstance(files._files, InMemory) == in_memory, (largest, entries, kept)
