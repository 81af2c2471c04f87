"""Mixtures of experts through `compile_causal_lm`: gpt-oss with its own checkpoints, Mixtral, Qwen3-MoE."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import load
from gguf import GGMLQuantizationType as Type
from oracle_logits import logits_limit, oracle_logits
from safetensors.torch import load_file, save_file

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import WeightsError
from qcompiler.formats.foreign.floats import write_mx

checked = load("tests/lm/test_gguf_models.py")
written = checked.written

_SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {**_PLAIN, "sliding_window": 4, "num_hidden_layers": 2},  # one layer with a window, one without
    "Mixtral": {},
    "Qwen3Moe": {"moe_intermediate_size": 256, "norm_topk_prob": True},
}


def build(kind: str, **options: Any) -> Any:
    """A random model; sinks and biases are as large as what they are added to."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**_SIZES | MODELS[kind] | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.7, 1.3)
            else:
                parameter.normal_(std=0.5 if "bias" in name or "sinks" in name else 0.1)
    return model


# --- gpt-oss's own checkpoints ----------------------------------------------------------------------------------------


def gpt_oss_folder(folder: Path) -> Any:
    """A folder as gpt-oss is published; the model with the values that transformers decodes from it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = build("GptOss")
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        values = state.pop(name)
        experts, cols, rows = values.shape
        packed = formats.get("mxfp4").encode(values.transpose(1, 2).reshape(-1, cols).contiguous().numpy())
        codes, scales = (torch.from_numpy(array) for array in write_mx(packed))
        state[f"{name}_blocks"] = codes.reshape(experts, rows, cols // 32, 16)
        state[f"{name}_scales"] = scales.reshape(experts, rows, cols // 32)
        with torch.no_grad():
            meant = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"], dtype=torch.float32)
            model.get_parameter(name).copy_(meant)
    save_file(state, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(described))
    return model


def test_a_folder_of_gpt_oss_keeps_its_codes_and_means_what_transformers_decodes(tmp_path: Path) -> None:
    model = gpt_oss_folder(tmp_path)
    lm = qc.compile_causal_lm(tmp_path, max_seq_len=40, chunk=5)
    checked.check(lm, model, checked.PROMPT, 8)
    assert lm.program is not None
    rows = {row.parameters[0]: row for row in lm.program.ledger if row.reason == "as stored"}
    assert set(rows) == {f"model.layers.{n}.mlp.experts.{part}_proj" for n in (0, 1) for part in ("gate_up", "down")}
    assert {row.format.partition(":")[0] for row in rows.values()} == {"mxfp4"}
    for item in qc.from_checkpoint(tmp_path).weights.tensors.values():
        assert torch.equal(item.view().float(), model.get_parameter(item.name).detach().float()), item.name


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("down_proj_scales", lambda t: None, r"down_proj_blocks' has no '.*down_proj_scales' beside it"),
    ("down_proj_blocks", lambda t: t[..., :8].contiguous(), r"shapes \[experts, rows, blocks, 16\]"),
    ("down_proj_scales", lambda t: t[:, 1:].contiguous(), r"down_proj_scales' torch.uint8 of shape \[4, 255, 8\]"),
    ("down_proj_scales", lambda t: t.float(), r"torch.float32"),
])  # fmt: skip
def test_damaged_experts_are_refused_by_name(name: str, damage: Any, message: str, tmp_path: Path) -> None:
    gpt_oss_folder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    full = f"model.layers.0.mlp.experts.{name}"
    changed = damage(state.pop(full))
    save_file(state if changed is None else {**state, full: changed}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        qc.from_checkpoint(tmp_path)


# --- routers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("router", [Type.F32, Type.F16])
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_routers_of_a_file_in_either_float(name: str, router: Type, tmp_path: Path) -> None:
    made = checked.recorded.write(
        tmp_path / "m.gguf", name, lambda part: router if "ffn_gate_inp" in part else checked.type_of(part)
    )
    lm = qc.compile_causal_lm(made.path, checked.EXACT, max_seq_len=40, chunk=5)
    checked.check(lm, made.model, checked.PROMPT, 8)


# --- recipes ----------------------------------------------------------------------------------------------------------

RECIPES = ("float", "nf4", "int4", "int8", "q4_K", "q8_0", "mxfp4", "fp8_e4m3", "q4_K_M")
CACHES = ("fp32", "fp16", "bf16", "int8", "int4")


def cases() -> list[Any]:
    """Each recipe with and without int8 activations on both devices; models and caches take turns."""
    turns = itertools.cycle(itertools.product(CACHES, MODELS))
    found = []
    for recipe, activations, device in itertools.product(RECIPES, (None, "int8"), ("cpu", "sim:0")):
        if recipe == "float" and activations:
            continue  # int8 activations need quantised weights
        cache, kind = next(turns)
        found.append(pytest.param(kind, recipe, activations, cache, device, marks=pytest.mark.slow))
    return found


@pytest.mark.parametrize(("kind", "recipe", "activations", "cache", "device"), cases())
def test_recipes_activations_caches_and_devices(
    kind: str, recipe: str, activations: Any, cache: Any, device: str
) -> None:
    # With int8 rows attention rounds to bf16 by default, which the oracle does not. Without quantised weights there is
    # no arithmetic to choose.
    compute = None if recipe == "float" else "exact"
    quant = qc.QuantConfig(recipe, activations=activations, compute=compute, promise_bits=None)
    lm = qc.compile_causal_lm(build(kind), quant, max_seq_len=24, chunk=8, kv_cache=cache, device=device)
    program = lm.program
    assert program is not None
    experts = [row for row in program.ledger if "experts" in row.parameters[0] and "bias" not in row.parameters[0]]
    assert len(experts) == (4 if kind == "GptOss" else 2)
    assert all(bool(row.format) == (recipe != "float") for row in experts)
    prompt = checked.PROMPT[:7]
    theirs = oracle_logits(lm, prompt)
    held = lm.conversation()
    ours = np.concatenate([held.read(prompt[:5], logits="all")[0], held.read(prompt[5:6])[0], held.read(prompt[6:])[0]])
    assert np.linalg.norm(ours - theirs) <= logits_limit(activations, cache) * np.linalg.norm(theirs)
