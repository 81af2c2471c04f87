"""Models that make sizes of what their cache holds: a kind refusal, and the step that gives positions and a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import DataDependentShapeError
from qcompiler.inspect.checks import copied_bytes
from qcompiler.plan.kinds.attention import AttentionKernel

pytest.importorskip("transformers")
from given_positions import GivenPositions
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

LENGTH, SIZE = 40, ("s", 1, 24)
NAMES = ["opt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3", "neox", "phi3"))]


def build(name: str) -> Any:
    model = load("tests/models/zoo.py").DECODERS[name].build(num_hidden_layers=2).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    return model


def compiled(step: Any) -> Any:
    return qc.qcompile(
        step,
        kwargs={"input_ids": torch.full((1, 7), 5), "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: SIZE}, "cache_position": {0: SIZE}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})],
    )


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_tokens_match_the_model_without_a_cache(name: str) -> None:
    model = build(name)
    program = compiled(GivenPositions(model, batch_size=1, max_cache_len=LENGTH))
    ids = torch.randint(0, 97, (1, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    session, found, position = program.session(), [], 0
    for count in (5, 1, 1, 3, 1, 5):
        positions = torch.arange(position, position + count)
        found.append(session(input_ids=ids[:, positions], cache_position=positions))
        position += count
    assert float((torch.cat(found, 1) - want).norm() / want.norm()) <= 1e-5
    assert copied_bytes(program.plan) == {"decode": {}, "prefill": {}}
    # A mask of ones costs nothing: attention reads up to a position, without a mask.
    bodies = [kernel.body for kernel in program.plan.kernels if isinstance(kernel.body, AttentionKernel)]
    assert bodies and all(body.last and body.mask == "none" for body in bodies)


def test_a_size_of_what_the_cache_holds_is_refused_with_the_way_out() -> None:
    step = TorchExportableModuleWithStaticCache(build("opt"), batch_size=1, max_cache_len=LENGTH)
    with pytest.raises(DataDependentShapeError) as caught:
        compiled(step)
    text = str(caught.value)
    assert "computed from the state 'cumulative_length_0' in" in text and "docs/state.md" in text


def test_a_size_of_an_argument_has_no_advice_about_caches() -> None:
    class Picks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x[x > 0] + 1

    with pytest.raises(DataDependentShapeError) as caught:
        qc.qcompile(Picks().eval(), (torch.randn(3),))
    assert "the values of a tensor (" in str(caught.value) and "docs/state.md" not in str(caught.value)
