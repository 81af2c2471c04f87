"""Models without values: built for nothing, compiled for their plan and sizes, and refused where values are needed."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import qcompiler as qc
from qcompiler.errors import ArgumentError, NarrowedDimError, WeightsError
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.common.empty_weights import is_empty
from qcompiler.frontends.torch.frontend import import_torch


def llama(layers: int = 2, **changes: object) -> transformers.LlamaForCausalLM:
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "num_key_value_heads": 2, "num_hidden_layers": layers, "use_cache": False, **changes}
    )
    return transformers.LlamaForCausalLM(config).eval()


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


IDS = torch.arange(21).reshape(3, 7)
SIZES = {"input_ids": {0: ("b", 1, 8), 1: ("s", 1, 64)}}


def empty(model: nn.Module) -> bool:
    return all(is_empty(p) for p in model.parameters())


# --- building --------------------------------------------------------------------------------------------------------


def test_parameters_are_fake_and_what_is_computed_is_real() -> None:
    with qc.empty_weights():
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.MultiheadAttention(16, 2), nn.Embedding(9, 4, 0))
        rotary = llama(1).model.rotary_emb
    assert empty(model) and not is_empty(rotary.inv_freq)
    assert model[1].running_var.tolist() == [1] * 16 and float(rotary.inv_freq[0]) == 1
    assert model[0].weight.shape == (16, 8) and model[0].weight.device.type == "cpu"


def test_a_model_of_sixteen_billion_parameters_is_built_in_no_memory() -> None:
    with qc.empty_weights():
        model = nn.ModuleList(nn.Linear(1 << 15, 1 << 15) for _ in range(16))
    assert sum(p.numel() for p in model.parameters()) > 16 << 30 and empty(model)


def test_only_this_thread_and_only_inside_builds_without_values() -> None:
    built: list[nn.Module] = []
    with qc.empty_weights():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(4, 4)))
        thread.start()
        thread.join()
        with qc.empty_weights():
            inner = nn.Linear(4, 4)
        outer = nn.Linear(4, 4)
    assert empty(inner) and empty(outer)
    assert not empty(built[0]) and not empty(nn.Linear(4, 4))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), copy.deepcopy])
def test_a_model_without_values_can_be_cast_and_copied_and_stays_tied(cast: object) -> None:
    with qc.empty_weights():
        model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8, bias=False), "n": nn.BatchNorm1d(8)})
        model["b"].weight = model["a"].weight
    model = cast(model)  # type: ignore[operator]
    assert model["a"].weight is model["b"].weight and empty(model)
    assert model["a"].weight.dtype == model["a"].bias.dtype == model["n"].running_mean.dtype
    other = nn.Linear(8, 8).to(torch.bfloat16)  # a model with values is none of our business
    assert other.weight.dtype == torch.bfloat16 and not empty(other)


# --- compiling -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without() -> qc.Program:
    with qc.empty_weights():
        model = Logits(llama())
    return qc.qcompile(model, (IDS,), quant="nf4", dynamic_shapes=SIZES, weights="none")


def test_a_program_without_values_is_the_program_with_them_but_for_the_bytes(without: qc.Program) -> None:
    program = qc.qcompile(Logits(llama()), (IDS,), quant="nf4", dynamic_shapes=SIZES)
    assert without.plan == program.plan
    assert str(without.ledger) == str(program.ledger)
    assert without.stages == program.stages
    assert all(without.ir(stage) == program.ir(stage) for stage in program.stages if stage != "export")


def test_a_program_without_values_is_not_run_saved_or_asked_for_its_oracle(without: qc.Program, tmp_path: Path) -> None:
    actions = [
        lambda: without(IDS), lambda: without.save(tmp_path / "p.qca"), lambda: without.oracle(IDS),
        lambda: without.to("cpu"), without.session, lambda: without.save(tmp_path / "p.qca", layout="canonical"),
    ]  # fmt: skip
    for action in actions:
        with pytest.raises(WeightsError, match='compiled with weights="none"'):
            action()
    assert not list(tmp_path.iterdir())


def test_the_report_says_what_could_not_be_compared(without: qc.Program) -> None:
    text = str(without.report())
    assert "b = 1" in text and "s = 1" in text and "hold no values; the shapes of the results agree" in text


def test_float_weights_and_models_with_values_may_be_left_without_them_too() -> None:
    model = nn.Linear(64, 32)
    with_values = import_torch(model, (torch.randn(3, 64),), weights=None)
    for quant in (None, "int8"):
        program = qc.qcompile(model, (torch.randn(3, 64),), quant=quant, weights="none")
        assert program.plan.weights and program.image.weights.nbytes == 0
    assert with_values.weights.valued


def test_a_model_without_values_says_where_to_get_them() -> None:
    with qc.empty_weights():
        model = nn.Linear(64, 32)
    for quant in (None, "nf4"):
        with pytest.raises(WeightsError, match=r"'weight' holds no values.*weights=\"none\""):
            qc.qcompile(model, (torch.randn(3, 64),), quant=quant)


def test_numbers_cannot_be_verified_without_values() -> None:
    with pytest.raises(ArgumentError, match="verify_each"):
        qc.qcompile(nn.Linear(8, 8), (torch.randn(3, 8),), weights="none", verify_each="numerics")


def test_models_on_the_meta_device_compile_if_their_buffers_have_values() -> None:
    with torch.device("meta"):
        model, normed = nn.Linear(64, 32), nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).eval()
    exported = export_model(model, (torch.randn(3, 64),), {}, {"input": {0: ("b", 1, 8)}})
    assert "meta" not in exported.text()
    with pytest.raises(WeightsError, match=r"3 buffers hold no values \(1.running_mean.*empty_weights"):
        export_model(normed, (torch.randn(3, 64),))
    assert all(p.is_meta for p in model.parameters())  # the model is left as it was


class Branch(nn.Module):
    """Takes another path for one row, which torch.export does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            return self.linear(x)
        return self.linear(x).sum(-1)


def test_a_path_of_another_shape_is_found_without_values() -> None:
    with qc.empty_weights():
        model = Branch()
    with pytest.raises(NarrowedDimError, match=r"test_empty_weights\.py:\d+"):
        export_model(model, (torch.randn(3, 8),), {}, {"x": {0: ("b", 1, 8)}})


class Asks(nn.Module):
    """Looks at values, except while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool(x.sum() > 1e9):
            return x
        return self.linear(x)


def test_a_model_that_asks_for_values_is_not_run_without_them_and_the_report_says_so() -> None:
    with qc.empty_weights():
        model = Asks()
    exported = export_model(model, (torch.randn(3, 8),), {}, {"x": {0: ("b", 1, 8)}})
    assert "nor were shapes compared: the model asks for values" in exported.notes[0].why
