"""The architectures of GGUF files that are read: transformers' classes for them, their names, and their configuration.

qwen3moe, qwen3moe.block_count, qwen3moe.expert_count, …      Qwen3MoeConfig
blk.3.ffn_gate_exps.weight                                    model.layers.3.mlp.experts.gate_up_proj
"""

from __future__ import annotations

from qcompiler.frontends.checkpoints.gguf_architectures.architecture import LATENT, Architecture, configured
from qcompiler.frontends.checkpoints.gguf_architectures.dense import DENSE, MISTRAL, OLMO3, hrm_names
from qcompiler.frontends.checkpoints.gguf_architectures.gemmas import GEMMAS
from qcompiler.frontends.checkpoints.gguf_architectures.hybrids import HYBRIDS
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    ROPE_FACTORS,
    Keys,
    divisors,
    required,
)
from qcompiler.frontends.checkpoints.gguf_architectures.mixtures import (
    DEEPSEEK_V2,
    GRANITE_MOE_WINDOWS,
    GRANITE_SHARED,
    MIXTRAL,
    MIXTURES,
)
from qcompiler.frontends.checkpoints.gguf_architectures.older import OLDER

ARCHITECTURES = {**DENSE, **GEMMAS, **HYBRIDS, **MIXTURES, **OLDER}
"""By `general.architecture`."""

_STATES = (
    "its layers keep states beside keys and values, and files of it are not read yet: compile the folder that the file "
    "was made from"
)
_SPARSE = "its attention chooses tokens by an index of its own, and `compile_causal_lm` takes no such model"
NOT_READ = {
    **dict.fromkeys(
        ("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "mamba", "mamba2", "nemotron_h", "qwen3next", "qwen35",
         "qwen35moe"),
        _STATES,
    ),
    **dict.fromkeys(("deepseek32", "deepseek4", "dots3note", "glm-dsa", "hy_v4", "qwen4exp"), _SPARSE),
    "dbrx": "its experts find their tokens by value (`nonzero`), which no program can hold",
    "bitnet": "llama.cpp's converter does not write transformers' BitNet",
    "gemma4-assistant": "it drafts tokens for another model, whose cache it reads",
}  # fmt: skip
"""Other architectures that llama.cpp's converter and transformers share: why their files are not read."""


def architecture_of(keys: Keys) -> Architecture:
    """The architecture of a file; some names stand for several classes of transformers."""
    has_experts = bool(keys.count("expert_count", 0, least=0))
    has_window = bool(keys.count("attention.sliding_window", 0, least=0))
    match keys.architecture:
        case "llama" if has_experts:
            return MIXTRAL
        case "llama" if has_window:
            return MISTRAL
        case "olmo2" if has_window:
            return OLMO3
        case "deepseek2" if has_experts and keys.count("expert_gating_func", 1) == 1:
            return DEEPSEEK_V2
        case "granitemoe" if keys.has("expert_shared_feed_forward_length"):
            return GRANITE_SHARED
        case "granite_swa" if has_experts:
            return GRANITE_MOE_WINDOWS
        case "hrm_text":
            return hrm_names(keys)
    return ARCHITECTURES[keys.architecture]


__all__ = [
    "ARCHITECTURES", "LATENT", "NOT_READ", "ROPE_FACTORS", "Architecture", "Keys", "architecture_of", "configured",
    "divisors", "required",
]  # fmt: skip
