"""Activations in int8 in a language model: every recipe, with and without a static cache, at fixed and dynamic lengths.

A dynamic length has an entry point or a case for one token, whose rows are views of another shape.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.format_mixtures import MIXTURES
from qcompiler.formats import FORMATS

transformers = pytest.importorskip("transformers")

RECIPES = (*FORMATS, *MIXTURES)
WIDTH = 256  # every format's blocks divide it
QUICK = {
    ("int8", "static", "buckets"), ("int4", "static", "dynamic"), ("q4_K_M", "static", "fixed"),
    ("int8", "none", "dynamic"),
}  # fmt: skip
CASES = [
    pytest.param(recipe, memory, sizes, marks=[] if (recipe, memory, sizes) in QUICK else [pytest.mark.slow])
    for recipe in RECIPES
    for memory in ("none", "static")
    for sizes in ("fixed", "dynamic", "buckets")
]


class Plain(nn.Module):
    """The model without a cache, called as the one with a cache is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, position_ids=cache_position[None], use_cache=False).logits
        return logits


def step(memory: str) -> nn.Module:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.cache_implementation = "static"
    return Plain(model) if memory == "none" else TorchExportableModuleWithStaticCache(model, 1, 24)


def call(start: int, count: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (1, count), generator=torch.Generator().manual_seed(start))
    return {"input_ids": ids, "cache_position": torch.arange(start, start + count)}


@pytest.mark.parametrize(("recipe", "memory", "sizes"), CASES)
def test_int8_activations_with_every_recipe_cache_and_length(recipe: str, memory: str, sizes: str) -> None:
    size = ("s", 1, 12)
    program = qc.qcompile(
        step(memory),
        kwargs=call(0, 7),
        dynamic_shapes=None if sizes == "fixed" else {"input_ids": {1: size}, "cache_position": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 12)})] if sizes == "buckets" else None,
        quant=qc.QuantConfig(recipe, activations="int8", promise_bits=None),
    )
    assert "activations: int8" in str(program.report())
    session, start = program.session(), 0
    for count in (7, 7) if sizes == "fixed" else (7, 1, 1, 5):
        given = call(start, count)
        with torch.no_grad():
            wanted = program.oracle(**given)
        # a code that rounds the other way moves one of 256 numbers by 1/127 of the largest; the factors of attention
        # are rounded to bf16, by up to 2**-8, and codes behind it round the other way more often
        assert float((session(**given) - wanted).norm() / wanted.norm()) <= 2e-2
        start += count
