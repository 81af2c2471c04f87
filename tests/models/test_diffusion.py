"""A Flux transformer of diffusers through the compiler: batch, image and text lengths dynamic, guidance on and off."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc

oracles = load("tests/models/oracles.py")
zoo = oracles.zoo

SIZES = ((3, 16, 6), (1, 1, 1), (4, 24, 12), (1, 24, 1))
"""(batch, image tokens, text tokens)"""


def inputs(batch: int, image: int, text: int, guidance: float | None) -> dict[str, torch.Tensor]:
    """What the model takes; timesteps from 0 to 1."""
    generator = torch.Generator().manual_seed(batch * 1000 + image * 10 + text)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {
        "hidden_states": normal(batch, image, 4), "encoder_hidden_states": normal(batch, text, 32),
        "pooled_projections": normal(batch, 32), "timestep": torch.rand(batch, generator=generator),
        "img_ids": torch.randint(0, 9, (image, 3), generator=generator).float(), "txt_ids": torch.zeros(text, 3),
    }  # fmt: skip
    return given if guidance is None else {**given, "guidance": torch.full((batch,), guidance)}


@cache
def compiled(guided: bool, quant: str | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, qc.Program]:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=guided,
    )  # fmt: skip
    b, n, t = ("b", 1, 4), ("n", 1, 24), ("t", 1, 12)
    dims = {"hidden_states": {0: b, 1: n}, "encoder_hidden_states": {0: b, 1: t}, "pooled_projections": {0: b},
            "timestep": {0: b}, "img_ids": {0: n}, "txt_ids": {0: t}, "guidance": {0: b}}  # fmt: skip
    example = cast(inputs(2, 11, 5, 0.3 if guided else None), dtype)
    case = zoo.Case(zoo.scaled(model, 4.0).to(dtype), example, example, {name: dims[name] for name in example})
    recipe = qc.QuantConfig("int4:group=32", rules={"x_embedder": "int8"}) if quant == "int4" else quant  # K is 4 there
    return case, qc.qcompile(case.model, kwargs=example, quant=recipe, dynamic_shapes=case.dynamic_shapes)


def cast(given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Activations in the model's type; positions stay in fp32, as pipelines have them."""
    return {k: v if k.endswith("_ids") else v.to(dtype) for k, v in given.items()}


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("quant", [None, "nf4", "int4", "int8"])
def test_fp32_equals_the_eager_oracle(guided, quant):
    _, program = compiled(guided, quant)
    each = [inputs(*size, 0.3 if guided else None) for size in SIZES]
    oracles.assert_equals_the_oracle(program, each, least=1.0)


@pytest.mark.parametrize("quant", [None, "nf4", "int8"])
def test_bf16_is_as_close_to_float64_as_torch(quant):
    case, program = compiled(False, quant, torch.bfloat16)
    oracles.assert_as_close_to_float64_as_torch(case, program, cast(inputs(*SIZES[0], None), torch.bfloat16))


class Sinusoids(torch.nn.Module):
    """diffusers' `get_timestep_embedding` for `Timesteps(n, flip_sin_to_cos=True, downscale_freq_shift=0)` in float64,
    which diffusers computes in float32 whatever the model's type is."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
        angles = timesteps[:, None].double() * frequencies
        return torch.cat([angles.cos(), angles.sin()], -1)


GUIDANCES = (0.3, 1.0, 3.5, 7.0)


def test_guidance_is_as_close_to_float64_as_eager_torch():
    """sin(1000 * guidance * f) moves by 2e-4 at guidance 3.5 when f moves by one bit, so that two answers in fp32
    differ by more than 1e-5, and the question is how far each is from the truth.  Which of the 128 frequencies an exp
    rounds to the other neighbour is chance: errors are joined over sizes, and over guidances for the narrow bound."""
    case, program = compiled(True)
    exact = copy.deepcopy(case.model).double()
    exact.time_text_embed.time_proj = Sinusoids(exact.time_text_embed.time_proj.num_channels)
    errors = np.zeros((len(GUIDANCES), len(SIZES), 2))
    for row, guidance in enumerate(GUIDANCES):
        for column, size in enumerate(SIZES):
            given = inputs(*size, guidance)
            with torch.no_grad():
                (truth,) = oracles.leaves(exact(**{k: v.double() for k, v in given.items()}))
                (eager,) = oracles.leaves(program.oracle(**given))
            (ours,) = oracles.leaves(program(**given))
            errors[row, column] = [np.linalg.norm(each - truth) / np.linalg.norm(truth) for each in (ours, eager)]
    assert errors[..., 1].max() <= 2e-4, "the truth is that of another model"
    ours, eager = np.sqrt((errors**2).mean(1)).T
    assert (ours <= 2 * eager).all(), errors
    assert np.linalg.norm(ours) <= 1.25 * np.linalg.norm(eager), errors


def test_the_rotation_of_pairs_is_one_loop_for_each_of_q_and_k():
    """Two attentions; rope of interleaved pairs in rows is raised, so nothing stacks or negates halves of heads."""
    _, program = compiled(False)
    raised = program.ir("raise-idioms")
    assert raised.count("= qc.rope ") == 4 and raised.count("interleaved") == 4
    assert raised.count("= qc.attention ") == 2 and raised.count("= qc.rms_norm ") == 6
    assert oracles.shape_of_the_program(program)["constant"] == 0
