"""Small steps on the CPU: one that is not worth handing over opens no parallel region, so it wakes no thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc
from qcompiler.runtime.profile import StepProfile


class Attends(nn.Module):
    """One query of four heads over keys and values of `kv_heads` heads, up to a position."""

    def __init__(self, kv_heads: int, keys: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(1, kv_heads, keys, 64))
        self.register_buffer("values", torch.randn(1, kv_heads, keys, 64))

    def forward(self, q: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(self.keys.shape[2])[None] <= at[:, None]
        return functional.scaled_dot_product_attention(q, self.keys, self.values, seen, enable_gqa=True)


def attention(folder: Path, model: nn.Module, inputs: tuple[Any, ...], threads: int = 2) -> StepProfile:
    qc.qcompile(model.eval(), inputs).save(folder / "attends.qca")
    found = qc.load(folder / "attends.qca", num_threads=threads).profile(*inputs, rounds=2)
    (step,) = [step for step in found.steps if step.kind == "attention"]
    return step


@pytest.mark.parametrize(
    ("kv_heads", "at", "tasks"),
    [
        (1, 50, 0),  # 51 keys of four heads take less than 2 us
        (4, 50, 0),
        (1, 3999, 13),  # all query heads of a key/value head, and the keys in 13 pieces
        (2, 3999, 26),
        (4, 3999, 4),  # two for each of two threads
    ],
)
def test_one_token_is_cut_by_the_keys_that_it_sees(tmp_path: Path, kv_heads: int, at: int, tasks: int) -> None:
    step = attention(tmp_path, Attends(kv_heads, 4000), (torch.randn(1, 4, 1, 64), torch.tensor([at])))
    assert (step.regions, step.tasks) == (1 if tasks else 0, tasks)


@pytest.mark.parametrize(("length", "regions"), [(5, 0), (300, 1)])
def test_a_prompt_is_handed_over_if_it_is_long(tmp_path: Path, length: int, regions: int) -> None:
    class Self(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    step = attention(tmp_path, Self(), (torch.randn(1, 4, length, 32),))
    assert step.regions == regions


def test_heads_of_one_key_value_head_give_the_same_bits_on_any_number_of_threads(tmp_path: Path) -> None:
    model, inputs = Attends(1, 3000).eval(), (torch.randn(1, 4, 1, 64), torch.tensor([2900]))
    qc.qcompile(model, inputs).save(tmp_path / "attends.qca")
    answers = [qc.load(tmp_path / "attends.qca", num_threads=threads)(*inputs) for threads in (1, 2, 3, 5)]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert torch.allclose(answers[0], model(*inputs), atol=1e-5)
