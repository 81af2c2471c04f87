"""Recurrent layers through the compiler: cells, formats, lengths and batches, states, files, devices."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.plan.kinds.recurrent import RecurrentKernel
from qcompiler.runtime.backends import registry

DEVICES = ["cpu", "sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]
WIDTH = 64


class Layers(nn.Module):
    """One layer of each kind beside each other: directions, layers, projections, biases, batch first or not."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(WIDTH, hidden, 2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(WIDTH, hidden, proj_size=hidden // 2, bidirectional=True)
        self.gru = nn.GRU(WIDTH, hidden, 2, bias=False)
        self.tanh = nn.RNN(WIDTH, hidden, batch_first=True)
        self.relu = nn.RNN(WIDTH, hidden, bidirectional=True, nonlinearity="relu")

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        """x (batch, time, WIDTH); the state of `gru` and of half of `projected` comes in."""
        first = x.transpose(0, 1)
        given = (h[:2, :, : h.shape[2] // 2], c)
        return self.lstm(x), self.projected(first, given), self.gru(first, h), self.tanh(x), self.relu(first)


def arguments(hidden: int, batch: int, steps: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(batch * 100 + steps)
    return torch.randn(batch, steps, WIDTH), torch.randn(2, batch, hidden), torch.randn(2, batch, hidden)


def leaves(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [each for part in result for each in leaves(part)]


@cache
def compiled(
    quant: str | None, device: str, *, dynamic: bool = True, hidden: int = WIDTH
) -> tuple[nn.Module, qc.Program]:
    model = Layers(hidden).eval()
    b, t = ("b", 1, 9), ("t", 1, 50)
    sizes = {"x": {0: b, 1: t}, "h": {1: b}, "c": {1: b}} if dynamic else None
    return model, qc.qcompile(
        model, arguments(hidden, 3, 7), quant=quant, dynamic_shapes=sizes, device=device if device != "cpu" else None
    )


SIZES = ((1, 1), (3, 7), (9, 2), (2, 50))
QUANTS = (None, "nf4", "int8", "q4_K, else q5_0, else int8", "q8_0", "mxfp8")
QUICK = {(None, "cpu"), ("nf4", "cpu"), ("q4_K, else q5_0, else int8", "sim:0")}


@pytest.mark.parametrize(("quant", "device"), [
    pytest.param(quant, device, id=f"{(quant or 'float').partition(',')[0]}-{device}",
                 marks=[] if (quant, device) in QUICK else [pytest.mark.slow])
    for quant in QUANTS for device in DEVICES
])  # fmt: skip
def test_every_layer_equals_the_eager_oracle_at_every_size(quant: str | None, device: str) -> None:
    """One step, one row, and more; in float also against the model itself."""
    model, program = compiled(quant, device)
    for batch, steps in SIZES[: 3 if device.startswith("sim") else None]:
        args = arguments(WIDTH, batch, steps)
        with torch.no_grad():
            exact = leaves(program.oracle(*args))
            wanted = leaves(model(*args))
        found = leaves(program(*args))
        for got, expected, own in zip(found, exact, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
            if quant is None:
                torch.testing.assert_close(got, own, rtol=1e-5, atol=2e-6)
            else:
                assert (got - own).norm() <= 0.6 * own.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_the_weight_of_the_state_is_packed_and_read_by_one_kernel(device: str) -> None:
    """One launch for each direction of each layer, whatever the length; no full tensor is decoded."""
    quant = "nf4" if device == "cpu" else "q4_K, else q5_0, else int8"
    _, program = compiled(quant, device)
    kernels = {k.name: k for k in program.plan.kernels if isinstance(k.body, RecurrentKernel)}
    launched = [s.kernel for s in program.plan.entries[0].steps if getattr(s, "kernel", "") in kernels]
    assert len(launched) == 4 + 2 + 2 + 1 + 2
    for kernel in kernels.values():
        weights = [o for o in kernel.operands if o.name in ("w", "projection")]
        assert len(weights) == 1 + kernel.body.projects and all(o.format is not None for o in weights)
    rows = {row.parameters[0]: row.format for row in program.ledger}
    assert all(rows[f"{name}.weight_hh_l0"] for name in ("lstm", "projected", "gru", "tanh", "relu"))
    assert rows["projected.weight_hr_l0_reverse"]


def test_int8_activations_multiply_the_input_as_integers_and_the_state_not() -> None:
    model = Layers(WIDTH).eval()
    config = qc.QuantConfig("int8", activations="int8")
    program = qc.qcompile(model, arguments(WIDTH, 3, 7), quant=config)
    args = arguments(WIDTH, 3, 7)
    with torch.no_grad():
        exact = leaves(program.oracle(*args))
    for got, expected in zip(leaves(program(*args)), exact, strict=True):
        assert (got - expected).norm() <= 2e-2 * expected.norm()
    report = str(program.report())
    assert "multiplied as integers" in report and "not quantised: it is multiplied with a state" in report


@pytest.mark.parametrize("device", DEVICES)
def test_fixed_sizes_and_odd_ones(device: str) -> None:
    model, program = compiled(None, device, dynamic=False, hidden=38)
    args = arguments(38, 3, 7)
    with torch.no_grad():
        wanted = leaves(model(*args))
    for got, expected in zip(leaves(program(*args)), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_captured_call_sees_new_input(device: str) -> None:
    _, program = compiled("q4_K, else q5_0, else int8", device)
    args = arguments(WIDTH, 2, 5)
    graph = program.capture(*args)
    for seed in range(3):
        torch.manual_seed(seed)
        fresh = tuple(torch.randn_like(each) for each in args)
        for got, expected in zip(leaves(graph.replay(*fresh)), leaves(program(*fresh)), strict=True):
            assert torch.equal(got, expected)


RUN = r"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
import qcompiler as qc
given = np.load(sys.argv[2])
found = qc.load(sys.argv[1])(given["x"], given["h"], given["c"])
flat = lambda tree: [tree] if isinstance(tree, np.ndarray) else [each for part in tree for each in flat(part)]
np.savez(sys.argv[3], *flat(found))
"""


def test_a_saved_file_runs_without_torch_to_the_bit(tmp_path: Path) -> None:
    _, program = compiled("nf4", "cpu")
    args = arguments(WIDTH, 4, 11)
    program.save(tmp_path / "p.qca", layout="canonical")
    np.savez(tmp_path / "x.npz", **dict(zip(("x", "h", "c"), (each.numpy() for each in args), strict=True)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, tmp_path / "p.qca", tmp_path / "x.npz", tmp_path / "y.npz"],
        env=os.environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there = np.load(tmp_path / "y.npz")
    for number, here in enumerate(leaves(program(*args))):
        assert there[f"arr_{number}"].tobytes() == here.numpy().tobytes()


class Streaming(nn.Module):
    """Keeps its state in an attribute, as speech models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.hidden: Any = (torch.zeros(2, 1, WIDTH), torch.zeros(2, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.hidden = self.layer(x, self.hidden)
        result: torch.Tensor = out
        return result


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_in_an_attribute_goes_on_from_call_to_call(device: str) -> None:
    model, chunks = Streaming().eval(), torch.randn(4, 1, 6, WIDTH)
    run = qc.qcompile(
        Streaming().eval(), (chunks[0],), dynamic_shapes={"x": {1: ("t", 1, 20)}},
        device=device if device != "cpu" else None,
    )  # fmt: skip
    for number, chunk in enumerate(chunks):
        given = chunk[:, : 6 - number]
        with torch.no_grad():
            wanted = model(given)
        torch.testing.assert_close(run(given), wanted, rtol=1e-5, atol=2e-6)


def test_the_program_does_not_grow_with_the_number_of_steps() -> None:
    """Steps are a number in the kernel."""
    layer = nn.LSTM(32, 32).eval()
    programs = [qc.qcompile(layer, (torch.randn(steps, 1, 32),), quant="nf4") for steps in (3, 1000)]
    short, long = ([len(entry.steps) for entry in program.plan.entries] for program in programs)
    assert short == long
    lines = [len(program.ir("emit-kernels").splitlines()) for program in programs]
    assert abs(lines[1] - lines[0]) <= 0.01 * lines[0]


def test_weights_that_are_computed_are_read_under_any_strides() -> None:
    """torch's parametrizations: the weight of the state is no constant of the program."""

    class Halved(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 0.5

    for device in DEVICES:
        layer = nn.GRU(19, 21).eval()
        nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", Halved())
        x = torch.randn(4, 2, 19)
        with torch.no_grad():
            wanted = leaves(layer(x))
        found = leaves(qc.qcompile(layer, (x,), device=device if device != "cpu" else None)(x))
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_no_pass_changes_an_answer() -> None:
    layer, x = nn.LSTM(64, 64, 2, bidirectional=True, proj_size=32).eval(), torch.randn(5, 3, 64)
    sizes = {0: ("t", 1, 30), 1: ("b", 1, 9)}
    qc.qcompile(layer, (x,), quant="nf4", dynamic_shapes={"input": sizes}, verify_each="numerics")


def test_a_layer_runs_on_the_device_of_its_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.GRU(64, 64), nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.layer(x)[0])
            return result

    model, x = Model().eval(), torch.randn(4, 2, 64)
    program = qc.qcompile(model, (x,), quant="nf4", device={"layer": "sim:1", "": "sim:0"})
    with torch.no_grad():
        torch.testing.assert_close(program(x), program.oracle(x), rtol=1e-5, atol=2e-6)
