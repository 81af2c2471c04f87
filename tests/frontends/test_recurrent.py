"""Recurrent layers of torch: every combination of their options imports, and the interpreter gives what torch gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from by_path import load
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

from qcompiler.errors import PromiseError, UnsupportedOperatorError
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.survey import doctor
from qcompiler.ir import qc
from qcompiler.ir.interpreter import run

interpret = load("tests/frontends/conftest.py").interpret
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}), "projected": (nn.LSTM, {"proj_size": 3}), "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}), "relu": (nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip
STEPS, BATCH, WIDTH, HIDDEN = 5, 2, 6, 7


class Given(nn.Module):
    """A layer whose state comes in."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *state: torch.Tensor) -> Any:
        return self.layer(x, tuple(state) if len(state) > 1 else state[0])


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [each for part in result for each in leaves(part)]


def recurrent(result: Any) -> list[qc.RecurrentOp]:
    return [op for op in result.module.walk() if isinstance(op, qc.RecurrentOp)]


EVERY = tuple(itertools.product((False, True), (1, 2), (False, True), (False, True)))
SAMPLE = ((False, 1, False, True), (True, 2, True, True), (False, 2, True, False), (True, 1, False, False))
"""Both directions, layers, batch first, bias."""


@pytest.mark.parametrize("options", [
    pytest.param(SAMPLE, id="sample"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)
])  # fmt: skip
@pytest.mark.parametrize("given", [False, True], ids=["from-zero", "state-given"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_options_equals_torch(kind: str, given: bool, options: Any) -> None:
    torch.manual_seed(0)
    cls, own = KINDS[kind]
    for both, layers, batch_first, bias in options:
        layer = cls(WIDTH, HIDDEN, layers, bidirectional=both, batch_first=batch_first, bias=bias, **own).eval()
        x = torch.randn((BATCH, STEPS, WIDTH) if batch_first else (STEPS, BATCH, WIDTH))
        states = [torch.randn(layers * (1 + both), BATCH, own.get("proj_size", HIDDEN))]
        states += [torch.randn(layers * (1 + both), BATCH, HIDDEN)] * (cls is nn.LSTM)
        model, args = (Given(layer), (x, *states)) if given else (layer, (x,))
        result = import_torch(model, args)
        assert len(recurrent(result)) == layers * (1 + both)
        with torch.no_grad():
            wanted = leaves(model(*args))
        for found, expected in zip(interpret(result, *args), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=f"{layer}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_layers_equal_torch_within_their_roundings(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(WIDTH, HIDDEN, 2, proj_size=3).eval().to(dtype)
    x = torch.randn(STEPS, BATCH, WIDTH).to(dtype)
    with torch.no_grad():
        wanted = leaves(layer(x))
    for found, expected in zip(interpret(import_torch(layer, (x,)), x), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_one_sequence_without_a_batch_equals_torch() -> None:
    layer, x = nn.GRU(WIDTH, HIDDEN, 2).eval(), torch.randn(STEPS, WIDTH)
    with torch.no_grad():
        wanted = leaves(layer(x))
    for found, expected in zip(interpret(import_torch(layer, (x,)), x), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_graph_does_not_grow_with_the_length() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, bidirectional=True).eval()
    short, long = (import_torch(layer, (torch.randn(steps, 1, WIDTH),)) for steps in (3, 1000))
    assert len(list(short.module.walk())) == len(list(long.module.walk()))


def test_length_and_batch_are_dynamic() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, 2, bidirectional=True, batch_first=True).eval()
    sizes = {0: ("b", 1, 9), 1: ("t", 1, 300)}
    result = import_torch(layer, (torch.randn(2, 7, WIDTH),), dynamic_shapes={"input": sizes})
    for batch, steps in ((1, 1), (9, 2), (3, 50)):
        x = torch.randn(batch, steps, WIDTH)
        with torch.no_grad():
            wanted = leaves(layer(x))
        for found, expected in zip(interpret(result, x), wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_program_that_was_exported_elsewhere_equals_torch() -> None:
    """It holds torch's own operators; those of the number of steps that it was traced with."""
    layer, x = nn.GRU(WIDTH, HIDDEN, 2, bidirectional=True).eval(), torch.randn(STEPS, BATCH, WIDTH)
    program = torch.export.export(layer, (x,), strict=False)
    assert "aten.gru.input" in [str(node.target) for node in program.graph.nodes]
    result = import_torch(program)
    assert len(recurrent(result)) == 4
    with torch.no_grad():
        wanted = leaves(layer(x))
    for found, expected in zip(interpret(result, x), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_input_state_and_projection_are_quantised_and_named() -> None:
    layer, x = nn.LSTM(64, 96, proj_size=32, num_layers=2).eval(), torch.randn(STEPS, BATCH, 64)
    result = import_torch(layer, (x,), quant="nf4")
    rows = {row.parameters[0]: row.format for row in result.ledger}
    for part in ("ih", "hh", "hr"):
        assert [rows[f"weight_{part}_l{layer}"] for layer in (0, 1)] == ["nf4:block=64"] * 2
    assert rows["bias_hh_l0"] == ""
    (found, *_), (wanted, *_) = interpret(result, x), leaves(result.quantized.module(x))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_rule_may_leave_the_weight_of_the_state_alone() -> None:
    model = Given(nn.LSTM(64, 64)).eval()
    args = (torch.randn(3, 1, 64), torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
    from qcompiler.config import QuantConfig

    result = import_torch(model, args, quant=QuantConfig("nf4", rules={"layer.weight_hh_l0": None}, promise_bits=None))
    formats = {row.parameters[0]: row.format for row in result.ledger}
    assert formats["layer.weight_hh_l0"] == "" and formats["layer.weight_ih_l0"]


def test_int8_activations_say_that_the_state_is_not_quantised() -> None:
    from qcompiler.config import QuantConfig

    layer = nn.LSTM(128, 128).eval()
    x = torch.randn(3, 2, 128)
    result = import_torch(layer, (x,), quant=QuantConfig("int8", activations="int8"))
    said = {path: what for stage, path, what in result.quantized.decisions if stage == "activations"}
    assert "multiplied as integers" in said["weight_ih_l0"]
    assert said["weight_hh_l0"] == "not quantised: it is multiplied with a state"
    (found, *_), (wanted, *_) = interpret(result, x), leaves(result.quantized.module(x))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_calibration_measures_what_linears_read_and_not_the_state() -> None:
    from qcompiler.frontends.quantise.calibrate import Calibration

    layer, x = nn.LSTM(256, 256).eval(), torch.randn(9, 2, 256)
    result = import_torch(layer, (x,), quant="q4_K", calibration=Calibration([(x,)]))
    measured = {path for stage, path, _ in result.quantized.decisions if stage == "calibrate"}
    assert measured == {"weight_ih_l0"}


# --- refusals --------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out: torch.Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        return out


def test_a_packed_sequence_is_refused_with_its_line() -> None:
    args = (torch.randn(2, 5, WIDTH), torch.tensor([5, 3]))
    with pytest.raises(UnsupportedOperatorError, match=r"packed sequence.*pack_padded_sequence\(x.*padded tensor"):
        import_torch(Packed().eval(), args)


def test_a_packed_argument_is_refused() -> None:
    packed = pack_sequence([torch.randn(4, WIDTH), torch.randn(2, WIDTH)])
    with pytest.raises(UnsupportedOperatorError, match="packed sequence"):
        import_torch(nn.LSTM(WIDTH, HIDDEN).eval(), (packed,))


def test_dropout_in_training_is_refused() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN, 2, dropout=0.5).train()
    with pytest.raises(UnsupportedOperatorError, match=r"call model\.eval\(\) first"):
        import_torch(layer, (torch.randn(3, 1, WIDTH),))
    assert import_torch(layer.eval(), (torch.randn(3, 1, WIDTH),)).ledger.rows


class Unknown(nn.Module):
    """An operator without a lowering reads a weight, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(128, 128))
        self.linear = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        singular: torch.Tensor = torch.linalg.svd(self.matrix)[1]
        return self.linear(x) + singular


def test_what_cannot_be_lowered_is_said_before_a_promise_that_it_breaks() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"svd.*torch\.linalg\.svd\(self\.matrix\)") as caught:
        import_torch(Unknown().eval(), (torch.randn(2, 128),), quant="int8")
    assert isinstance(caught.value.__cause__, PromiseError)


def test_a_promise_that_is_broken_by_itself_is_said() -> None:
    with pytest.raises(PromiseError, match=r"weight_ih_l0 at 12\.00 bits"):
        import_torch(nn.LSTM(8, 16).eval(), (torch.randn(3, 1, 8),), quant="int8")


def test_the_layer_is_as_it_was_before() -> None:
    layer, x = nn.LSTM(WIDTH, HIDDEN).eval(), torch.randn(STEPS, BATCH, WIDTH)
    with torch.no_grad():
        before = leaves(layer(x))
    import_torch(layer, (x,), dynamic_shapes={"input": {0: ("t", 1, 9)}})
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(leaves(layer(x)), before, strict=True))


def test_a_layer_that_keeps_its_state_in_an_attribute_has_a_state() -> None:
    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(WIDTH, HIDDEN, batch_first=True)
            self.hidden = (torch.zeros(1, 2, HIDDEN), torch.zeros(1, 2, HIDDEN))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, self.hidden = self.layer(x, self.hidden)
            return out

    model, chunks = Streaming().eval(), torch.randn(3, 2, 4, WIDTH)
    result = import_torch(model, (chunks[0],))
    assert len(result.states) == 2
    states = {key: value.copy() for key, value in result.states.items()}
    for chunk in chunks:
        with torch.no_grad():
            wanted = model(chunk)
        (found,) = run(result.module, result.weights, [chunk.numpy()], states=states)
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-6)


def test_doctor_judges_layers_behind_an_operator_that_it_does_not_know() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(WIDTH, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(torch.linalg.svd(x)[0][..., :WIDTH])[0]
            return out

    x = torch.randn(STEPS, WIDTH, WIDTH)
    assert doctor(nn.GRU(WIDTH, HIDDEN).eval(), (x,)).ok
    found = doctor(Behind().eval(), (x,)).findings
    assert ["svd" in finding.operator for finding in found] == [True]


def test_layers_of_double_precision_are_refused_by_name() -> None:
    (finding,) = doctor(nn.LSTM(WIDTH, HIDDEN).double().eval(), (torch.randn(3, 1, WIDTH).double(),)).findings
    assert finding.operator == "qc.recurrent" and "f64" in finding.why and ".float()" in finding.why
