"""What a language model is compiled from: module, weights, tokenizer, and the arithmetic that a .gguf file leaves open.

A model says by its type how it multiplies: one in bf16 multiplies in bf16.  The codes of a .gguf file say nothing.
llama.cpp multiplies them by int8 rows of activations; here they multiply in bf16, which loses less, unless the recipe
names another arithmetic:

    on a CPU   `compute="bf16"`: linears, experts and attention round what they multiply, and all else is fp32
    on a GPU   a model in bf16, whatever the recipe's `compute` is but "exact"; in fp32 before sm_80, which has no bf16

`compute="exact"` gives fp32 on both.  A `Checkpoint` keeps its type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qcompiler.api import compile_target
from qcompiler.config import QuantConfig
from qcompiler.device_map import Devices, place
from qcompiler.errors import ArgumentError, TokenizerError
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint
from qcompiler.frontends.checkpoints.checkpoint_folder import from_checkpoint
from qcompiler.frontends.checkpoints.gguf_models import GgufWeights, from_gguf
from qcompiler.inspect.report import Choice
from qcompiler.kernels.cuda.engines import MMA_SINCE
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.lm.text import Text
from qcompiler.runtime.progress import note


@dataclass(frozen=True)
class Source:
    """A module of transformers, the source of its weights (None: its own parameters), the recipe to compile it with,
    and what was decided for it."""

    module: Any
    weights: Any
    recipe: QuantConfig
    choices: tuple[Choice, ...] = ()


def source_of(model: Any, recipe: QuantConfig, device: Devices | None, targets: Sequence[str] | None) -> Source:
    """`model` is a module, a Checkpoint, a folder of Hugging Face or a .gguf file; the rest is `compile_causal_lm`'s.

    ArgumentError for a compiled program; the errors of `from_gguf`, `from_checkpoint` and `compile_target`.
    """
    if not isinstance(model, str | Path) or Path(model).suffix != ".gguf" or recipe.compute == "exact":
        return Source(*model_and_weights(model), recipe)
    target = compile_target(place(device or "cpu").devices, targets)
    old = [arch for arch in target.isas if target.kind == "cuda" and arch_number(arch) < MMA_SINCE["bf16"]]
    in_bf16 = target.kind == "cuda" and not old
    read = from_gguf(model, of_codes=torch.bfloat16 if in_bf16 else torch.float32)
    if not is_of_codes(read.weights):
        return Source(read.module, read.weights, recipe)
    why = "codes name no arithmetic, and neither does the recipe; compute='exact' multiplies in fp32"
    if in_bf16:
        what, why = "a model in bf16", "codes name no type, and on a GPU other launches would round fp32 numbers"
    elif old:
        what, why = "a model in fp32", f"codes name no type, and {old[0]} has no tensor cores for bf16"
    elif recipe.compute is None and recipe.activations is None:
        mixture = any(".experts." in name for name, _ in read.module.named_parameters())
        what = f"linears{', experts' if mixture else ''} and attention multiply in bf16"
        recipe = replace(recipe, compute="bf16")
    else:
        return Source(read.module, read.weights, recipe)
    return Source(read.module, read.weights, recipe, (Choice("arithmetic", read.path.name, what, why),))


def is_of_codes(weights: Any) -> bool:
    """Whether weights are those of a .gguf file whose matrices are codes, which name no arithmetic."""
    return isinstance(weights, GgufWeights) and weights.holds_codes


def model_and_weights(model: Any) -> tuple[Any, Any]:
    """The module and the source of its weights (None: its own parameters)."""
    if isinstance(model, str | Path):
        path = Path(model)
        if path.suffix == ".qca":
            raise ArgumentError(f"{path} is compiled already: qc.load_causal_lm({str(path)!r}) loads it")
        model = from_gguf(path) if path.suffix == ".gguf" else from_checkpoint(path)
    if isinstance(model, Checkpoint):
        return model.module, model.weights
    return model, None


def text_of(model: Any) -> Text | None:
    """The tokenizer beside a model's weights; None for a model in memory and for files without one."""
    path = model.path if isinstance(model, Checkpoint) else Path(model) if isinstance(model, str | Path) else None
    if path is None or path.suffix == ".qca":
        return None
    if path.suffix == ".gguf":
        try:
            return Text.from_gguf(path)
        except TokenizerError as error:
            note(f"ids only: {error}")
            return None
    return Text.from_folder(path) if (path / "tokenizer.json").is_file() else None
