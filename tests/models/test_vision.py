"""Models with convolutions through the compiler, against the eager oracle (fp32) and a float64 oracle (bf16)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import qcompiler as qc

# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, an example to compile it with, and other inputs to run it with: a prime batch."""

    model: nn.Module
    example: tuple[torch.Tensor, ...]
    inputs: tuple[torch.Tensor, ...]
    dynamic_shapes: Any


class First(nn.Module):
    """The first result of a model: feature maps or hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[0]


def lively(model: nn.Module, gain: float = 1.0) -> nn.Module:
    """Weights that keep activations near unit size, and running statistics that are not those of a fresh model."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
                spread = gain * (2.0 / module.weight[0].numel()) ** 0.5
                module.weight.copy_(spread * torch.randn(module.weight.shape, generator=generator))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.copy_(0.3 * torch.randn(module.running_mean.shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
                module.weight.copy_(1 + 0.2 * torch.randn(module.weight.shape, generator=generator))
                module.bias.copy_(0.2 * torch.randn(module.bias.shape, generator=generator))
    return model.eval()


def images(model: nn.Module, *shape: int) -> Case:
    torch.manual_seed(1)
    dims = {"x": {0: ("b", 1, 8)}}
    return Case(model, (torch.randn(2, *shape),), (torch.randn(3, *shape),), dims)


TRUNK = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def resnet18() -> Case:
    """All 18 layers, narrow; widths and the image are no multiples of a vector."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 24, 40, 72], depths=[2, 2, 2, 2], layer_type="basic", num_labels=21)  # fmt: skip  # noqa: E501
    return images(First(lively(ResNetForImageClassification(config))), 3, 61, 45)


def vit() -> Case:
    from transformers import ViTConfig, ViTModel

    return images(First(lively(ViTModel(ViTConfig(image_size=32, patch_size=8, **TRUNK)))), 3, 32, 32)


def clip_vision() -> Case:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return images(First(lively(CLIPVisionModel(CLIPVisionConfig(image_size=32, patch_size=8, **TRUNK)))), 3, 32, 32)


def whisper() -> Case:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=96, num_mel_bins=16, max_source_positions=30)  # fmt: skip  # noqa: E501
    return images(First(lively(WhisperEncoder(config))), 16, 60)


class UNetStep(nn.Module):
    """A small conditional UNet of diffusers: residual blocks, cross attention, down and up."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel

        down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
        self.unet = UNet2DConditionModel(
            sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
            down_block_types=down, up_block_types=up, cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, t: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.unet(x, t, encoder_hidden_states=states, return_dict=False)[0]


def unet() -> Case:
    torch.manual_seed(1)
    model = lively(UNetStep())
    sizes = ((2, 16, 12), (3, 10, 24))
    batches = [(torch.randn(b, 4, h, w), torch.tensor([37]), torch.randn(b, 5, 32)) for b, h, w in sizes]
    b, h, w = (torch.export.Dim(name, min=1, max=most) for name, most in (("b", 8), ("h", 12), ("w", 12)))
    dims = {"x": {0: b, 2: 2 * h, 3: 2 * w}, "t": None, "states": {0: b}}
    return Case(model, batches[0], batches[1], dims)


MODELS: dict[str, Callable[[], Case]] = {
    "resnet18": resnet18, "vit": vit, "clip-vision": clip_vision, "whisper": whisper, "unet": unet,
}  # fmt: skip
QUANTS = (None, "nf4", "int8")
QUICK = {("whisper", "int8")}


def grid(quick: set[tuple[str, str | None]]) -> list[Any]:
    cases = [(m, q) for m in MODELS for q in QUANTS]
    return [pytest.param(m, q, id=f"{m}-{q}", marks=[] if (m, q) in quick else pytest.mark.slow) for m, q in cases]


@cache
def compiled(name: str, quant: str | None, dtype: torch.dtype) -> tuple[Case, qc.Program]:
    case = MODELS[name]()
    example = converted(case.example, dtype)
    recipe = qc.QuantConfig(quant, promise_bits=None) if quant else None
    return case, qc.qcompile(case.model.to(dtype), example, quant=recipe, dynamic_shapes=case.dynamic_shapes)


def converted(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


# --- the oracle's graph in float64 -----------------------------------------------------------------------------------


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


class Float64(fx.Interpreter):
    """Runs a graph with every floating value in float64, weights at the values that the graph decodes."""

    def run_node(self, n: fx.Node) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, super().run_node(n)
        )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        narrow = isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point
        return super().call_function(target, args, {**kwargs, "dtype": torch.float64} if narrow else kwargs)


def float64_result(program: qc.Program, inputs: tuple[torch.Tensor, ...]) -> np.ndarray:
    oracle = program.oracle
    assert isinstance(oracle, fx.GraphModule)
    with torch.no_grad():
        results = Float64(oracle).run(*map(widened, inputs), enable_io_processing=False)
    return pytree.tree_leaves(results)[0].numpy()


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "quant"), grid(QUICK))
def test_fp32_equals_the_eager_oracle(name, quant):
    case, program = compiled(name, quant, torch.float32)
    with torch.no_grad():
        theirs = program.oracle(*case.inputs).double().numpy()
    ours = program(*case.inputs).double().numpy()
    assert not program.image.torch_calls
    assert theirs.std() >= 0.05, "outputs too small to show errors"
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    assert np.abs(ours - theirs).max() <= 1e-4 * np.sqrt((theirs**2).mean())


@pytest.mark.parametrize(("name", "quant"), grid(set()))
def test_bf16_is_as_close_to_float64_as_torch(name, quant):
    case, program = compiled(name, quant, torch.bfloat16)
    inputs = converted(case.inputs, torch.bfloat16)
    truth = float64_result(program, inputs)
    with torch.no_grad():
        eager = program.oracle(*inputs).double().numpy()
    ours = program(*inputs).double().numpy()
    assert np.linalg.norm(ours - truth) <= 1.5 * np.linalg.norm(eager - truth)
    squares = ((ours - truth) ** 2).reshape(-1, truth.shape[-1])
    rms = np.sqrt(squares.mean())
    assert np.sqrt(squares.mean(1)).max() <= 8 * rms, "one row is far worse than the rest"
    assert np.sqrt(squares.mean(0)).max() <= 4 * rms, "one column is far worse than the rest"


def test_resnet_keeps_nothing_but_convolutions_with_their_norms_folded():
    _, program = compiled("resnet18", "nf4", torch.float32)
    rows = {row.parameters[0]: row for row in program.ledger}
    weights = [row for row in rows.values() if len(row.shape) == 4]
    assert len(weights) == 20 and all(row.format == "nf4:block=64" for row in weights)
    assert rows["model.resnet.embedder.embedder.normalization.running_mean"].reason.startswith("folded into")
    assert not [row for row in rows.values() if "running" in row.parameters[0] and row.bytes_after]
    kernels = [spec for spec in program.plan.kernels if spec.template == "linear"]
    assert len({spec.body.window for spec in kernels}) > 5, "3 x 3 windows are read in the image"
    steps = [step for step in program.plan.entries[0].steps if hasattr(step, "kernel")]
    copies = [step.kernel for step in steps if step.kernel.startswith(("copy", "loop"))]
    # the image, the border of the pool (twice), three strided shortcuts, the divisor of the mean
    assert len(copies) <= 7, f"activations stay channels last and activations are epilogues; there are {copies}"


@pytest.mark.slow
def test_a_float_resnet_is_the_torch_model_it_was_made_from():
    case, program = compiled("resnet18", None, torch.float32)
    with torch.no_grad():
        theirs = case.model(*case.inputs)
    assert torch.linalg.norm(program(*case.inputs) - theirs) <= 1e-5 * torch.linalg.norm(theirs)


@pytest.mark.slow
def test_a_resnet_multiplies_codes_where_pixels_have_24_channels():
    case, plain = compiled("resnet18", "int8", torch.float32)
    recipe = qc.QuantConfig("int8", activations="int8", promise_bits=None)
    program = qc.qcompile(
        case.model, case.example, quant=recipe, dynamic_shapes=case.dynamic_shapes, verify_each="numerics"
    )
    linears = [spec.body for spec in program.plan.kernels if spec.template == "linear"]
    narrow = {3 * 49, 16 * 9, 16}  # K of convolutions of 3 and of 16 channels
    assert sum(body.codes for body in linears) >= 10 and {body.k for body in linears if not body.codes} == narrow
    with torch.no_grad():
        truth, theirs = case.model(*case.inputs), program.oracle(*case.inputs)
    ours, weights = program(*case.inputs), plain(*case.inputs)
    # A code whose value lies beside a tie may come out as its neighbour, and the layers behind it amplify that.
    away = torch.linalg.norm(ours - theirs, dim=1) / torch.linalg.norm(theirs, dim=1)
    assert away.median() <= 1e-5 and away.max() <= 0.05, away
    error, of_weights = (torch.linalg.norm(each - truth) / torch.linalg.norm(truth) for each in (ours, weights))
    assert error < 1.5 * of_weights < 0.03  # 0.0175 and 0.0150
