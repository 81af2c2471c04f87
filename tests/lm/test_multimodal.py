"""Folders of models that read images, too, as most language models are published: their text part generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import qcompiler as qc
from qcompiler.errors import ArgumentError
from qcompiler.lm.compile import example_inputs, inputs_to_trace, sizes_of
from qcompiler.lm.step import prepared

PROMPT = [5, 17, 80, 3, 3, 61, 44, 9, 12, 70, 33]
_TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_IMAGES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_QWEN = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def _llama4() -> Any:
    text = {
        **_TEXT, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 64,
    }  # fmt: skip
    images = {
        **_IMAGES, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
        "projector_output_dim": 32,
    }  # fmt: skip
    return t.Llama4Config(text_config=text, vision_config=images)


def _gemma4() -> Any:
    text = {**_TEXT, "sliding_window": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    images = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    return t.Gemma4Config(text_config={**text, "vocab_size_per_layer_input": 97}, vision_config=images)


def _qwen3_5(kind: Any = t.Qwen3_5Config, **more: Any) -> Any:
    text = {
        **_TEXT, **more, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    return kind(text_config=text, vision_config=_QWEN)


MODELS: dict[str, Callable[[], Any]] = {
    "Gemma3": lambda: t.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16}, vision_config=_IMAGES,
        mm_tokens_per_image=4),
    "Gemma4": _gemma4,
    "Llama4": _llama4,
    "Llava": lambda: t.LlavaConfig(
        text_config=t.LlamaConfig(**_TEXT).to_dict(), vision_config=t.CLIPVisionConfig(**_IMAGES).to_dict()),
    "Mistral3": lambda: t.Mistral3Config(
        text_config=t.MistralConfig(**_TEXT).to_dict(),
        vision_config=t.PixtralVisionConfig(**_IMAGES, head_dim=16).to_dict()),
    "Qwen2_5_VL": lambda: t.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config={**_QWEN, "fullatt_block_indexes": [0]}),
    "Qwen3VL": lambda: t.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": _ROPE}, vision_config={**_QWEN, "deepstack_visual_indexes": [0]}),
    "Qwen3_5": _qwen3_5,
    "Qwen3_5Moe": lambda: _qwen3_5(
        t.Qwen3_5MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32),
}  # fmt: skip


def saved(name: str, folder: Path) -> Any:
    """The model, whose folder transformers wrote."""
    torch.manual_seed(0)
    model: Any = getattr(t, f"{name}ForConditionalGeneration")(MODELS[name]()).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.12)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        found = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()
    assert found.std() > 0.5, "logits that all are alike would show nothing"
    return found


def assert_same(ours: Any, theirs: Any) -> None:
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("Gemma3", "Qwen3_5Moe") else pytest.mark.slow) for name in MODELS]
)
def test_a_folder_has_every_number_and_a_step_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    checkpoint = qc.from_checkpoint(tmp_path)
    assert sizes_of(checkpoint.module, 64, 1, None) == (64, 64), "a part that reads images has positions of its own"
    for path, tensor in model.state_dict().items():
        if not path.startswith("lm_head"):
            assert torch.equal(checkpoint.weights.tensors[path].view().to(tensor.dtype), tensor), path
    with prepared(model, 1, 40, None, 40, 8) as step, torch.no_grad():
        inputs_to_trace(step, 40, 8)
        found = []
        for start in range(0, len(PROMPT), 4):
            ids = torch.tensor([PROMPT[start : start + 4]])
            places = torch.arange(start, start + ids.shape[1])[None]
            inputs = example_inputs(1, 40, 8, step.has_states) | {"ids": ids, "positions": places, "rows": places}
            if step.has_states:
                inputs["counts"] = torch.tensor([ids.shape[1]])
            found.append(step(**(inputs | {"wanted": torch.arange(ids.shape[1])}))[0].numpy())
    assert_same(np.concatenate(found), logits_of(model))


def test_positions_of_the_text_are_still_counted() -> None:
    config = t.GPT2Config(n_embd=32, n_head=2, n_layer=1, n_positions=16, vocab_size=97)
    with pytest.raises(ArgumentError, match=r"max_seq_len=17: 'transformer.wpe' has 16 positions"):
        sizes_of(t.GPT2LMHeadModel(config), 17, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_generates_text(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    lm = qc.compile_causal_lm(tmp_path, qc.QuantConfig("float"), max_seq_len=32, chunk=5)
    assert_same(lm.conversation().read(PROMPT, logits="all")[0], logits_of(model))
    made = model.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert lm.generate(PROMPT, max_new_tokens=10, eos_token_id=-1) == made[0].tolist()
