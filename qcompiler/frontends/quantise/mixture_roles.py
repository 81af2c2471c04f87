"""Facts of a model for the rules of a mixture (qcompiler/format_mixtures.py): the role of each weight, and a few
numbers.

    model.layers.3.self_attn.v_proj.weight      attn_v of layer 3
    transformer.h.3.attn.c_attn.weight          attn_qkv of layer 3
    model.embed_tokens.weight                   token_embd

Roles come from transformers' module names; facts come from the model's `config`, or from the shapes of the weights if
there is none.  An unknown name has the role "other", which takes the format of most tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qcompiler.format_mixtures import Matrix, ModelFacts, Role

_NAMES: tuple[tuple[Role, str], ...] = (
    ("kept", r"wpe|embed_positions|position_embeddings?|token_type_embeddings|relative_attention_bias|router"
             r"|(?:mlp|block_sparse_moe|feed_forward)\.gate"),
    ("output", r"lm_head|embed_out"),
    ("token_embd", r"embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared|token_embd"),
    ("attn_qkv", r"qkv_proj|c_attn|query_key_value|[Ww]qkv|W_pack|attn_qkv"),
    ("attn_q", r"q_proj|query|q_lin|attn_q"),
    ("attn_k", r"k_proj|key|k_lin|attn_k"),
    ("attn_v", r"v_proj|value|v_lin|attn_v"),
    ("attn_output", r"o_proj|(?:self_attn|attention|attn)\.out_proj|attn\.c_proj|(?:self_)?attention\.dense"
                    r"|attention\.output\.dense|out_lin|attn_output"),
    ("ffn_gate", r"gate_proj|(?:experts\.\d+|feed_forward|mlp)\.w1|ffn_gate"),
    ("ffn_down", r"down_proj|fc2|mlp\.c_proj|dense_4h_to_h|output\.dense|(?:experts\.\d+|feed_forward|mlp)\.w2|lin2"
                 r"|ffn_down"),
    ("ffn_up", r"up_proj|gate_up_proj|fc1|c_fc|dense_h_to_4h|intermediate\.dense"
               r"|(?:experts\.\d+|feed_forward|mlp)\.w3|lin1|ffn_up"),
)  # fmt: skip
_PATTERNS = tuple((role, re.compile(rf"(?:^|\.)(?:{names})$")) for role, names in _NAMES)
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_FALCON = ("falcon", "RefinedWeb", "RefinedWebModel")
_80_LAYERS = ("llama", "mistral", "qwen2", "olmo")
"""Models whose variant of 80 layers has the rules of Llama 70B: llama.cpp's architecture llama if k and v have fewer
heads than q, the other two always."""


def matrix_of(paths: Sequence[str]) -> Matrix:
    """The role and the layer of a weight with these paths (several for tied weights: then the role of a table wins)."""
    found = [_role(path.removesuffix(".weight")) for path in paths]
    role = next((each for each in found if each == "token_embd"), found[0])
    number = _LAYER.search(paths[0])
    return Matrix(role, int(number[1]) if number is not None and role not in ("token_embd", "output") else None)


def _role(module: str) -> Role:
    return next((role for role, pattern in _PATTERNS if pattern.search(module)), "other")


def facts_of(config: Any, weights: Sequence[tuple[Matrix, tuple[int, ...]]]) -> ModelFacts:
    """The facts of a model with this `config` (None without one) and these matrices, in the model's shapes."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    numbers = {matrix.layer for matrix, _ in weights if matrix.layer is not None}
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers") or len(numbers)
    fused = [shape[0] for _, shape in weights if len(shape) == 3]
    experts = _number(text, "num_local_experts", "num_experts", "n_routed_experts") or (fused[0] if fused else 1)
    heads = _number(text, "num_attention_heads", "n_head") or 0
    per_kv = _heads_per_kv(text, heads) if heads else _by_rows(weights)
    kind = getattr(text, "model_type", "llama")
    large = layers == 80 and kind in _80_LAYERS and (per_kv > 1 or kind in ("qwen2", "olmo"))
    return ModelFacts(layers, experts, per_kv, kind in _FALCON, large)


def _number(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool) and value), None)


def _heads_per_kv(config: Any, heads: int) -> int:
    if getattr(config, "model_type", "") in _FALCON:  # `num_kv_heads` counts only in the newer of its two forms
        new = getattr(config, "new_decoder_architecture", False)
        kv = _number(config, "num_kv_heads") if new else 1 if getattr(config, "multi_query", True) else heads
    else:
        kv = _number(config, "num_key_value_heads", "num_kv_heads")
    return heads // (kv or heads)


def _by_rows(weights: Sequence[tuple[Matrix, tuple[int, ...]]]) -> int:
    """Heads of q per head of k, from the numbers of rows. 1 if they are stored together."""
    rows = {matrix.role: shape[0] for matrix, shape in reversed(weights) if matrix.role in ("attn_q", "attn_k")}
    return max(1, rows["attn_q"] // rows["attn_k"]) if len(rows) == 2 else 1
