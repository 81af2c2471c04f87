"""The architectures of GGUF files that are read: transformers' classes for them, their names, and their configuration.

qwen3moe, qwen3moe.block_count, qwen3moe.expert_count, …      Qwen3MoeConfig
blk.3.ffn_gate_exps.weight                                    model.layers.3.mlp.experts.gate_up_proj
"""

from __future__ import annotations

from qcompiler.frontends.checkpoints.gguf_architectures.architecture import (
    CONVOLUTION,
    INDEX,
    JOINED,
    LATENT,
    LOGARITHM,
    TIME_STEP,
    Architecture,
    configured,
    rows_of_key_heads,
)
from qcompiler.frontends.checkpoints.gguf_architectures.blocks import BLOCKS, qwen4_names
from qcompiler.frontends.checkpoints.gguf_architectures.dense import DENSE, MISTRAL, OLMO3, hrm_names
from qcompiler.frontends.checkpoints.gguf_architectures.gemmas import GEMMAS
from qcompiler.frontends.checkpoints.gguf_architectures.hybrids import HYBRIDS
from qcompiler.frontends.checkpoints.gguf_architectures.keys import (
    ROPE_FACTORS,
    Keys,
    divisors,
    required,
)
from qcompiler.frontends.checkpoints.gguf_architectures.latent import DEEPSEEK_V2, LATENTS
from qcompiler.frontends.checkpoints.gguf_architectures.mixtures import (
    GRANITE_MOE_WINDOWS,
    GRANITE_SHARED,
    MIXTRAL,
    MIXTURES,
)
from qcompiler.frontends.checkpoints.gguf_architectures.older import OLDER
from qcompiler.frontends.checkpoints.gguf_architectures.recurrent import (
    BAMBA,
    FALCON_MAMBA,
    GRANITE_HYBRID_MOE,
    RECURRENT,
)

ARCHITECTURES = {**BLOCKS, **DENSE, **GEMMAS, **HYBRIDS, **LATENTS, **MIXTURES, **OLDER, **RECURRENT}
"""By `general.architecture`."""

NOT_READ = {
    "gemma4-assistant": (
        "it drafts tokens for another model: it takes that model's hidden states and keys, where others take tokens "
        "and a cache"
    ),
}
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
        case "mamba" if keys.flag("ssm.dt_b_c_rms", False):
            return FALCON_MAMBA
        case "granitehybrid" if not keys.has("attention.scale") and keys.flag("rope.scaling.finetuned", True):
            return BAMBA
        case "granitehybrid" if has_experts:
            return GRANITE_HYBRID_MOE
        case "hrm_text":
            return hrm_names(keys)
        case "qwen4exp":
            return qwen4_names(keys)
    return ARCHITECTURES[keys.architecture]


__all__ = [
    "ARCHITECTURES", "CONVOLUTION", "INDEX", "JOINED", "LATENT", "LOGARITHM", "NOT_READ", "ROPE_FACTORS", "TIME_STEP",
    "Architecture", "Keys", "architecture_of", "configured", "divisors", "required", "rows_of_key_heads",
]  # fmt: skip
