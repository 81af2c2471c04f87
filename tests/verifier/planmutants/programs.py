"""The real programs whose schedules are mutated: models compiled by `qcompile` for the simulated GPU.

`llama` is one layer with a static cache and the entry points prefill and decode; `mixtral` one layer with its routing;
`split` a Llama of two layers, the second with its cache on another device; `block` a small split model without
transformers, whose compiling takes a second or two.  Sizes are such that a simulated call takes hundredths of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import qcompiler as qc
from qcompiler.runtime.image import ProgramImage

Arguments = dict[str, Any]
"""Keyword arguments of one call, as NumPy arrays."""

VOCABULARY, CACHE_LENGTH, PROMPT = 32, 12, 6


@dataclass(frozen=True)
class Case:
    """A program and two different sequences of calls; each begins with every entry point at its largest size.

    The largest size matters: that is where a plan has given every byte away.
    """

    name: str
    image: ProgramImage
    devices: tuple[str, ...]
    scripts: tuple[tuple[Arguments, ...], ...]


def randomised(model: nn.Module) -> nn.Module:
    """Different values in every parameter, spread so that no change of an input disappears on its way."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread, mean = (1.5 / parameter.shape[-1] ** 0.5, 0.0) if parameter.ndim > 1 else (0.2, 1.0)
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def compiled(
    model: nn.Module,
    kwargs: Arguments,
    dynamic_shapes: Any,
    *,
    quant: str,
    buckets: Any = None,
    device_map: Mapping[str, str] | None = None,
) -> ProgramImage:
    """`qcompile` for the simulated GPU, or for two with a map of module paths."""
    program = qc.qcompile(
        model, kwargs=kwargs, dynamic_shapes=dynamic_shapes, quant=quant, buckets=buckets,
        device={"": "sim:0", **device_map} if device_map else "sim:0",
    )  # fmt: skip
    return program.image


# --- language models -------------------------------------------------------------------------------------------------


def _decoder(kind: str, layers: int, **others: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, **others,
    )  # fmt: skip
    return randomised(getattr(transformers, f"{kind}ForCausalLM")(config))


def _tokens(generator: np.random.Generator, *shape: int) -> Any:
    return generator.integers(0, VOCABULARY, shape, dtype=np.int64)


def _cached(name: str, layers: int, quant: Any, device_map: Mapping[str, str] | None = None) -> Case:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model = _decoder("Llama", layers)
    model.generation_config.cache_implementation = "static"
    size = ("s", 1, PROMPT)
    image = compiled(
        TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=CACHE_LENGTH),
        {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cache_position": torch.arange(5)},
        {"input_ids": {1: size}, "cache_position": {0: size}},
        quant=quant,
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, PROMPT)})],
        device_map=device_map,
    )
    scripts = []
    for seed in (1, 2):
        generator = np.random.default_rng(seed)
        spans = ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 4))
        scripts.append(tuple(
            {"input_ids": _tokens(generator, 1, end - start), "cache_position": np.arange(start, end)}
            for start, end in spans
        ))  # fmt: skip
    return Case(name, image, ("sim:0", "sim:1")[: 1 + bool(device_map)], tuple(scripts))


def _llama() -> Case:
    return _cached("llama", 1, qc.QuantConfig("nf4", separate=("*",)))  # q, k and v are branches: one has none


def _split() -> Case:
    return _cached("split", 2, "nf4", {"model.model.layers.1": "sim:1"})


def _mixtral() -> Case:
    model = _decoder("Mixtral", 1, num_local_experts=4, num_experts_per_tok=2)
    model.config.use_cache = False
    image = compiled(
        model,
        {"input_ids": torch.ones(2, 5, dtype=torch.int64)},
        {"input_ids": {0: ("b", 1, 2), 1: ("s", 1, PROMPT)}},
        quant="q8_0",
    )
    scripts = []
    for seed in (1, 2):
        generator = np.random.default_rng(seed)
        scripts.append(tuple({"input_ids": _tokens(generator, *size)} for size in ((2, PROMPT), (1, 1), (1, 5))))
    return Case("mixtral", image, ("sim:0",), tuple(scripts))


# --- a small split model ---------------------------------------------------------------------------------------------


class Half(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Block(nn.Module):
    """Two halves, and a running mean between them that is kept from call to call."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Half(32, 48), Half(32, 48)
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        self.mean.lerp_(y.mean(0), 0.25)
        return self.second(y - self.mean)


def _block() -> Case:
    image = compiled(
        randomised(Block()), {"x": torch.randn(5, 32)}, {"x": {0: ("b", 1, 6)}}, quant="nf4",
        device_map={"second": "sim:1"},
    )  # fmt: skip
    scripts = []
    for seed in (1, 2):
        generator = np.random.default_rng(seed)
        scripts.append(tuple({"x": generator.standard_normal((b, 32), np.float32)} for b in (6, 1, 4)))
    return Case("block", image, ("sim:0", "sim:1"), tuple(scripts))


MAKERS: dict[str, Callable[[], Case]] = {"llama": _llama, "mixtral": _mixtral, "split": _split, "block": _block}


@cache
def case(name: str) -> Case:
    """The compiled program of a name."""
    return MAKERS[name]()
