"""Buffers that a model writes: what they begin as, and that old and new values are not mixed up."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.runtime.backends import registry

GPUS = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


class States(nn.Module):
    """Swaps two buffers, turns one around, counts, keeps a window, and returns old values beside new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(4.0))
        self.register_buffer("b", torch.arange(4.0) * 10)
        self.register_buffer("square", torch.arange(9.0).reshape(3, 3))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("window", torch.zeros(3, 4, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, False, True]))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        old = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(old)
        self.square.copy_(self.square.t().clone())
        before = self.window.clone()
        self.window.copy_(self.window.roll(1, 0))
        self.window[0] = x[0]
        self.count += 1
        self.flags.logical_xor_(x[0] > 0)
        return {
            "old": old, "a": self.a, "sum": x + self.b, "square": self.square * 1, "before": before.flip(0),
            "window": self.window.float(), "count": self.count, "flags": self.flags,
        }  # fmt: skip


@cache
def compiled_for(device: str) -> tuple[nn.Module, qc.Program]:
    torch.manual_seed(0)
    model = States().eval()
    x = torch.randn(3, 4)
    return copy.deepcopy(model), qc.qcompile(
        model, (x,), dynamic_shapes={"x": {0: ("n", 1, 6)}}, verify_each="numerics", device=device
    )


@pytest.fixture(params=["cpu", *GPUS])
def compiled(request: pytest.FixtureRequest) -> tuple[nn.Module, qc.Program]:
    return compiled_for(request.param)


@pytest.fixture(params=GPUS)
def on_gpu(request: pytest.FixtureRequest) -> tuple[nn.Module, qc.Program]:
    return compiled_for(request.param)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("stepwise", [False, True])
def test_states_follow_the_model_over_calls(compiled: Any, stepwise: bool) -> None:
    model, program = copy.deepcopy(compiled[0]), compiled[1]
    session = program.run.session(stepwise=stepwise)
    for rows in (3, 1, 6):
        x = torch.randn(rows, 4)
        assert_same(session(x), copy.deepcopy(model(x)))


def test_reset_puts_back_what_buffers_began_as(compiled: Any) -> None:
    model, program = compiled
    session, x = program.run.session(), torch.randn(2, 4)
    session(x)
    session.reset()
    assert_same(session(x), copy.deepcopy(model)(x))


def test_a_saved_program_begins_with_the_buffers_of_the_model(compiled: Any, tmp_path: Path) -> None:
    model, program = compiled
    x = torch.randn(2, 4)
    for layout in ("target", "canonical"):
        program.save(tmp_path / "states.qca", layout=layout)
        loaded = qc.load(tmp_path / "states.qca", device=program.device)
        assert_same(loaded(x), copy.deepcopy(model)(x))


def test_states_go_on_between_calls_and_graphs_of_several_shapes(on_gpu: Any) -> None:
    model, program = copy.deepcopy(on_gpu[0]), on_gpu[1]
    session = program.run.session()
    graphs = {rows: session.capture(torch.randn(rows, 4)) for rows in (2, 5)}
    for rows in (2, 5, 5, 3, 2, 6, 5):
        x = torch.randn(rows, 4)
        result = graphs[rows].replay(x) if rows in graphs else session(x)
        assert_same(result, copy.deepcopy(model(x)))


def test_states_move_to_another_device(on_gpu: Any) -> None:
    model, program = copy.deepcopy(on_gpu[0]), on_gpu[1]
    program.run.reset()
    x = torch.randn(2, 4)
    assert_same(program(x), copy.deepcopy(model(x)))
    assert_same(program.to("sim:1")(x), copy.deepcopy(model(x)))


def test_compiling_leaves_the_model_as_it_was() -> None:
    model, untouched = States().eval(), States()
    qc.qcompile(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: ("n", 1, 6)}})
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), untouched.buffers(), strict=True))
