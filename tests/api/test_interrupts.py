"""Ctrl-C while a model is compiled or converted: the model is as it was, and the same call works afterwards."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupting import count, interrupt_at, places
from torch import nn

import qcompiler as qc
from qcompiler.runtime.interrupts import uninterrupted


class Model(nn.Module):
    """A state, a norm and a linear: what the frontend watches, renames and puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        return self.linear(self.norm(x)) + self.seen


def look(model: nn.Module) -> dict[str, Any]:
    """What an interrupt could leave changed."""
    return {
        "state": {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()},
        "names": [sorted(vars(each)) for each in model.modules()],
        "hooks": [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()],
        "training": model.training,
        "gc": gc.isenabled(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "shield": uninterrupted._depth,
    }


def same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    old, new = before["state"], now["state"]
    equal = old.keys() == new.keys() and all(
        new[key][0] == identity and torch.equal(new[key][1], value) for key, (identity, value) in old.items()
    )
    return equal and {**before, "state": None} == {**now, "state": None}


@pytest.mark.slow
def test_a_model_compiles_after_interrupts_and_is_as_it_was() -> None:
    """At 12 of some millions of bytecodes, most of them torch's."""
    model, x = Model().eval(), torch.randn(3, 64)

    def compile_it() -> None:
        qc.qcompile(model, (x,), quant="nf4")

    compile_it()
    want = qc.qcompile(model, (x,), quant="nf4")(x)
    before = look(model)
    total = count(compile_it)
    hit = 0
    for at in places(total, 12):
        hit += interrupt_at(compile_it, at)
        gc.collect()
        assert same(before, look(model)), f"changed by an interrupt at bytecode {at} of {total}"
    assert hit > 6
    assert torch.equal(qc.qcompile(model, (x,), quant="nf4")(x), want)


@pytest.mark.slow
def test_write_gguf_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    tensors = {"w": torch.ones(4, 32).numpy()}

    def write() -> None:
        qc.write_gguf(target, tensors, {})

    write()
    whole = target.read_bytes()
    for at in places(count(write), 300):
        target.write_bytes(b"old")
        interrupt_at(write, at)
        assert target.read_bytes() in (b"old", whole)
    write()
    assert target.read_bytes() == whole
    assert [path for path in tmp_path.iterdir() if path != target] == []
