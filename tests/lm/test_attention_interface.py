"""What transformers' models say of their attention is heeded, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import load

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.lm.compile import example_inputs
from qcompiler.lm.step import prepared
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.softmax import SoftmaxKernel

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SIZES | more)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12)
    return model


@pytest.mark.parametrize("parts", [(20,), (7, 7, 6)], ids=str)
@pytest.mark.parametrize("kind", ["inkling_text", "inkling2_text"])
def test_inklings_sinks_and_position_biases_are_part_of_attention(kind: str, parts: tuple[int, ...]) -> None:
    """Inkling 2 hands over sinks under a name of its own, which gave other logits and no error.  Both add a number for
    each distance of positions, in layers with a window as well: those keep no ring, whose rows have another order."""
    model = build(
        kind, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=5, sliding_window_size=5,
    )  # fmt: skip
    ids = np.random.default_rng(1).integers(3, 97, 20).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    found, start = [], 0
    with prepared(model, 1, 40, None, 40, 8) as step, torch.no_grad():
        assert step.ring is None
        for count in parts:
            places = torch.arange(start, start + count)[None]
            inputs = example_inputs(1, 40, 8, step.has_states)
            inputs |= {"ids": torch.tensor([ids[start : start + count]]), "positions": places, "rows": places}
            inputs |= {"counts": torch.tensor([count])} if step.has_states else {}
            found.append(step(**(inputs | {"wanted": torch.arange(count)}))[0].numpy())
            start += count
    assert np.linalg.norm(np.concatenate(found) - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_eager_attention_with_sinks_is_one_operator(dtype: torch.dtype) -> None:
    """gpt-oss's own, which subtracts the maximum in front of the softmax."""
    model = load("tests/lm/test_moe.py").build("GptOss", num_hidden_layers=1).to(dtype)
    model.set_attn_implementation("eager")
    x, keep = torch.randn(1, 7, 256, dtype=dtype), torch.ones(7, 7).tril().bool()
    mask = torch.where(keep, 0, torch.finfo(dtype).min).to(dtype)[None, None]
    cos, sin = model.model.rotary_emb(x, torch.arange(7)[None])

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.model.layers[0].self_attn

        def forward(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
            return self.inner(x, (cos, sin), mask)[0]

    program = qc.qcompile(Attention(), (x, cos, sin, mask), quant=None)
    found = [each.body for each in program.plan.kernels if isinstance(each.body, AttentionKernel)]
    assert [each.sinks for each in found] == [True]
    with torch.no_grad():
        theirs = Attention()(x, cos, sin, mask).float().numpy()
    ours = program.run(x, cos, sin, mask).float().numpy()
    limit = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sinks_of_half_models_are_part_of_attention(dtype: torch.dtype) -> None:
    """The least number of fp16 is no number that hides a score beside another one."""
    lm = qc.compile_causal_lm(load("tests/lm/test_moe.py").build("GptOss").to(dtype), max_seq_len=40, chunk=8)
    assert lm.program is not None
    kinds = [type(each.body) for each in lm.program.plan.kernels]
    assert AttentionKernel in kinds and SoftmaxKernel not in kinds


@pytest.mark.parametrize("value", [torch.ones(1), 0.5, 30, (torch.ones(1), None)], ids=str)
def test_an_argument_that_is_not_known_is_refused(value: Any) -> None:
    model = build("llama")

    def say(_: Any, args: Any, how: dict[str, Any]) -> Any:
        return args, how | {"tilt": value}

    model.model.layers[0].self_attn.register_forward_pre_hook(say, with_kwargs=True)
    with pytest.raises(ExportError, match="LlamaAttention calls attention with `tilt`, which is not known"):
        qc.compile_causal_lm(model, max_seq_len=16)


def test_attention_without_a_mask_is_refused() -> None:
    """Every row of the cache would be seen, those of later tokens, too."""
    model = build("llama")

    def unmasked(_: Any, args: Any, how: dict[str, Any]) -> Any:
        return args, how | {"attention_mask": None}

    model.model.layers[0].self_attn.register_forward_pre_hook(unmasked, with_kwargs=True)
    with pytest.raises(ExportError, match="LlamaAttention calls attention without a mask"):
        qc.compile_causal_lm(model, max_seq_len=16)


@pytest.mark.parametrize("kind", ["bert", "roformer", "rembert"])
def test_a_model_that_shows_later_tokens_is_no_causal_one(kind: str) -> None:
    """transformers warns, and its logits with a cache are others than without one.  BERT's attention is that of the
    interface; RoFormer and RemBERT compute their own."""
    with pytest.raises(ExportError, match=r"shows a token those that follow it.*is_decoder=True"):
        qc.compile_causal_lm(build(kind), max_seq_len=16)
