"""Small random models of transformers with states beside keys and values, by `model_type`."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2Config",
        {**_SIZES, **_HEADS, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_SIZES, **_HEADS, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
            "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
        },
    ),
}  # fmt: skip
"""The configuration's class, and its values."""


def build(name: str) -> Any:
    """The model, with weights of a fixed seed."""
    kind, values = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def small() -> Any:
    """A model of two layers: one with a window of a convolution, one with keys and values."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, layer_types=["conv", "full_attention"],
        num_hidden_layers=2, max_position_embeddings=128, **_HEADS,
    )  # fmt: skip
    return transformers.Lfm2ForCausalLM(config).eval()
