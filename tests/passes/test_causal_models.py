"""Real causal models: no mask, rope table or position grid is computed per call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import main_func
from qcompiler.passes.pipeline import run_pipeline, upto


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=40, n_embd=32, n_layer=1, n_head=2, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_nothing_input_independent_is_computed_per_call(build: Any, per_call: Any) -> None:
    torch.manual_seed(0)
    model = Logits(build()).eval()
    dims = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 37)}}
    imported = import_torch(model, (), {"input_ids": torch.randint(0, 61, (3, 7))}, dynamic_shapes=dims)
    assert per_call(imported.module), "the check must find the masks that import leaves"
    ctx = QCContext.default(weights=imported.weights)
    tokens = torch.randint(0, 61, (2, 11)).numpy()
    run_pipeline(imported.module, ctx, stages=upto("fuse-elementwise"), verify_each="numerics", sample_inputs=[tokens])
    assert per_call(imported.module) == []
    counts = Counter(op.name for op in main_func(imported.module).body.block.ops)
    assert counts["qc.attention"] == 1 and counts["qc.batch_matmul"] == 0
    (attention,) = (op for op in main_func(imported.module).body.block.ops if op.name == "qc.attention")
    assert "causal" in attention.properties and len(attention.operands) == 3, "causal needs no mask operand"
