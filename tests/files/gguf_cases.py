"""Small random models of every architecture that GGUF files may have, for tests and for record_gguf.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 256,
    "n_embd": 256, "n_layer": 2, "n_head": 8, "n_inner": 512, "n_positions": 128,
}  # fmt: skip
"""What every case begins with, as far as its configuration has these names."""

_GEMMA = {"tie_word_embeddings": True, "sliding_window": 4, "query_pre_attn_scalar": 32}
_NEOX = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
_OSS = {"sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_GRANITE = {
    "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip

_GEMMA_3N = {
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 32, "num_hidden_layers": 5, "laurel_rank": 32,
    "altup_num_inputs": 4, "activation_sparsity_pattern": None, "tie_word_embeddings": True, "sliding_window": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_GEMMA_4 = {
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 32, "num_hidden_layers": 5,
    "tie_word_embeddings": True, "sliding_window": 4, "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 8, "head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_CHOOSING = {**_LATENT, "index_head_dim": 32, "index_n_heads": 16, "index_topk": 6}
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8,
}  # fmt: skip
_MULTIPLIERS = {
    "attention_in_multiplier": 0.75, "attention_out_multiplier": 1.25, "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.5, "key_multiplier": 0.625, "lm_head_multiplier": 0.875, "embedding_multiplier": 2.5,
    "mlp_multipliers": [1.125, 0.375], "ssm_multipliers": [0.25, 1.75, 0.6875, 1.375, 0.8125],
}  # fmt: skip
_NEMOTRON_H = {
    "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 16,
    "chunk_size": 8, "moe_shared_expert_intermediate_size": 256, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DELTA = {
    "head_dim": 32, "linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}  # fmt: skip

_QWEN_4 = {
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "hc_count": 2, "hc_lowrank": 32,
    "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 4,
    "indexer_compress_ratio": 2, "shared_expert_intermediate_size": 256, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True},
}  # fmt: skip

_DEEPSEEK_4 = {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 64, "o_groups": 2,
    "o_lora_rank": 32, "index_n_heads": 32, "index_head_dim": 32, "index_topk": 2, "sliding_window": 5,
    "hc_sinkhorn_iters": 3, "partial_rotary_factor": 0.5, "compress_rope_theta": 1e5, "num_hash_layers": 1,
    "swiglu_limit": 1.5, "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "heavily_compressed_attention", *2 * ["compressed_sparse_attention"]],
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled frequencies": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "mistral": ("Mistral", {"sliding_window": None}),  # files do not say its window
    "mixtral": ("Mixtral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "qwen3moe": ("Qwen3Moe", {"norm_topk_prob": True}),
    "qwen2moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 512}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 4, "num_hidden_layers": 5}),  # the fourth layer has no window
    "arcee": ("Arcee", {}),
    "seed_oss": ("SeedOss", {"head_dim": 64}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 64, "tie_word_embeddings": True}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {"moe_layer_start_index": 1, "moe_num_shared_experts": 1}),
    "olmo": ("Olmo", {"clip_qkv": 0.5}),
    "olmoe": ("Olmoe", {}),
    "command-r": ("Cohere", {"tie_word_embeddings": True, "logit_scale": 2.0}),
    "cohere2": ("Cohere2", {"tie_word_embeddings": True, "logit_scale": 2.0, "sliding_window": 4,
                            "num_hidden_layers": 5}),
    "cohere2moe": ("Cohere2Moe", {"tie_word_embeddings": True, "logit_scale": 2.0, "sliding_window": 4,
                                  "num_hidden_layers": 5, "intermediate_size": 256, "head_dim": 32,
                                  "prefix_dense_intermediate_size": 512, "num_shared_experts": 1}),
    "phi2": ("Phi", {"num_key_value_heads": 8, "intermediate_size": 1024}),
    "granite": ("Granite", _GRANITE),
    "granitemoe": ("GraniteMoe", _GRANITE),
    "granitemoe with a shared expert": ("GraniteMoeShared", {**_GRANITE, "shared_intermediate_size": 512}),
    "granite_swa": ("GraniteSWA", _GRANITE),
    "granite_swa with experts": ("GraniteMoeSWA", _GRANITE),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),  # the fourth layer has no positions
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm in parallel": ("StableLm", {"use_parallel_residual": True}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "starcoder": ("GPTBigCode", {"n_inner": 1024}),
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": True}),
    "starcoder2 without biases": ("Starcoder2", {"sliding_window": None, "use_bias": False}),
    "gpt-oss": ("GptOss", {**_OSS, "rope_parameters": {**_YARN, "truncate": False}}),
    "gpt-oss in plain numbers": ("GptOss", _OSS),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "num_hidden_layers": 6}),  # the sixth layer has no window
    "gemma3n": ("Gemma3nText", {**_GEMMA_3N, "num_kv_shared_layers": 2}),
    "gemma3n with thin MLPs": ("Gemma3nText", {
        **_GEMMA_3N, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0]}),
    "gemma4": ("Gemma4Text", {**_GEMMA_4, "num_kv_shared_layers": 2}),
    "gemma4 with heads of two sizes": ("Gemma4Text", {
        **_GEMMA_4, "num_kv_shared_layers": 0, "global_head_dim": 64, "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}),
    "gemma4 with experts": ("Gemma4Text", {
        **_GEMMA_4, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 256, "hidden_size_per_layer_input": 0}),
    "phi3": ("Phi3", {"sliding_window": 5}),
    "phi3 without a window": ("Phi3", {"sliding_window": None}),
    "phimoe": ("Phimoe", {}),
    "gpt2": ("GPT2", {"n_inner": 1024}),
    "gptneox": ("GPTNeoX", _NEOX),
    "gptneox in series": ("GPTNeoX", {**_NEOX, "use_parallel_residual": False}),
    "falcon": ("Falcon", {}),
    "falcon in groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon in groups with one norm": ("Falcon", {
        "new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
    "bloom": ("Bloom", {}),
    "apertus": ("Apertus", {}),
    "dbrx": ("Dbrx", {
        "d_model": 256, "n_heads": 8, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 0.5, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 2}}),
    "afmoe": ("Afmoe", {"num_dense_layers": 1, "num_hidden_layers": 5, "sliding_window": 4, "num_shared_experts": 1,
                        "mup_enabled": True}),
    "chatglm": ("Glm", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "glm4": ("Glm4", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "glm4moe": ("Glm4Moe", {"first_k_dense_replace": 1, "use_qk_norm": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "solar-open": ("SolarOpen", {}),
    "dots1": ("Dots1", {"first_k_dense_replace": 1, "n_shared_experts": 1}),
    "exaone4": ("Exaone4", {}),
    "exaone4 with windows": ("Exaone4", {"sliding_window": 4, "sliding_window_pattern": 4, "num_hidden_layers": 5}),
    "exaone-moe": ("ExaoneMoe", {"num_shared_experts": 1, "num_hidden_layers": 5, "sliding_window": 4}),
    "hunyuan-dense": ("HunYuanDenseV1", {}),
    "hunyuan-moe": ("HunYuanMoEV1", {"moe_topk": 2}),
    "hy_v3": ("HYV3", {}),
    "jais2": ("Jais2", {}),
    "laguna": ("Laguna", {
        "num_hidden_layers": 5, "sliding_window": 4, "moe_intermediate_size": 256,
        "layer_types": ["full_attention", *3 * ["sliding_attention"], "full_attention"],
        "num_attention_heads_per_layer": [8, 4, 4, 4, 8], "gating": "per-head"}),
    "mellum": ("Mellum", {}),
    "minicpm3": ("MiniCPM3", {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
                              "v_head_dim": 32, "num_key_value_heads": 8}),
    "minimax-m2": ("MiniMaxM2", {}),
    "mistral3": ("Ministral3", {"rope_parameters": {
        **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0,
        "beta_slow": 1.0}}),
    "llama4": ("Llama4Text", {
        "intermediate_size": 256, "intermediate_size_mlp": 512, "num_hidden_layers": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2}),
    "deepseek2 of V2": ("DeepseekV2", _LATENT),
    "deepseek2": ("DeepseekV3", _LATENT),
    "deepseek2 with scaled positions": ("DeepseekV3", {**_LATENT, "rope_parameters": {
        **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek2 without experts": ("Youtu", _LATENT),
    "deepseek2 of GLM": ("Glm4MoeLite", _LATENT),
    "deepseek32": ("DeepseekV32", _CHOOSING),
    "glm-dsa": ("GlmMoeDsa", _CHOOSING),
    "glm-dsa with shared choices": ("GlmMoeDsa", {**_CHOOSING, "indexer_types": ["full", "shared"]}),
    "hy_v4": ("HYV4", {**_CHOOSING, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
                       "mlp_layer_types": ["dense", "sparse", "sparse"], "hc_mult": 2, "swiglu_limit": 1.5}),
    "dots3note": ("Dots3NoteText", {
        **_CHOOSING, "num_hidden_layers": 4, "sliding_window": 4, "shared_experts_intermediate_size": 256,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 64, "swa_kv_lora_rank": 32,
        "swa_head_dim": 48, "swa_qk_nope_head_dim": 32, "swa_v_head_dim": 64, "swa_rope_theta": 1e4,
        "rope_theta": 1e5}),
    "mimo2": ("MiMoV2Flash", {
        "num_hidden_layers": 5, "num_key_value_heads": 2, "v_head_dim": 16, "sliding_window": 5,
        "layer_types": ["full_attention", *3 * ["sliding_attention"], "full_attention"],
        "mlp_layer_types": ["dense", *4 * ["sparse"]], "attention_value_scale": 0.75, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}}),
    "lfm2": ("Lfm2", {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "tie_word_embeddings": True}),
    "lfm2moe": ("Lfm2Moe", {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4,
        "num_dense_layers": 1, "norm_eps": 1e-5, "tie_word_embeddings": True}),
    "mamba": ("Mamba", {}),
    "mamba of Falcon": ("FalconMamba", {"time_step_rank": 32}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 16, "chunk_size": 8}),
    "jamba": ("Jamba", {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_dt_rank": 16}),
    "falcon-h1": ("FalconH1", {**_MAMBA_2, **_MULTIPLIERS, "mamba_d_ssm": 512}),
    "falcon-h1 with norms": ("FalconH1", {
        **_MAMBA_2, "mamba_d_ssm": 256, "mamba_d_head": 32, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "granitehybrid": ("GraniteMoeHybrid", {
        **_GRANITE, **_MAMBA_2, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
        "num_local_experts": 0, "shared_intermediate_size": 512}),
    "granitehybrid with experts": ("GraniteMoeHybrid", {
        **_GRANITE, **_MAMBA_2, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3,
        "shared_intermediate_size": 256}),
    "granitehybrid of Bamba": ("Bamba", {**_MAMBA_2, "attn_layer_indices": [1], "num_hidden_layers": 3}),
    "nemotron_h": ("NemotronH", {
        **_NEMOTRON_H, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]}),
    "nemotron_h_moe": ("NemotronH", {
        **_NEMOTRON_H, "layers_block_type": ["mamba", "moe", "attention", "moe"], "routed_scaling_factor": 2.5}),
    "nemotron_h_moe with latent experts": ("NemotronH", {
        **_NEMOTRON_H, "layers_block_type": ["mamba", "moe", "attention", "mamba"], "moe_latent_size": 256,
        "norm_topk_prob": True}),
    "kimi-linear": ("KimiLinear", {
        "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 8,
        "linear_head_dim": 32, "linear_num_heads": 8, "num_hidden_layers": 3, "num_local_experts": 4,
        "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "max_position_embeddings": 128,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
    "qwen3next": ("Qwen3Next", {**_DELTA, "shared_expert_intermediate_size": 256}),
    "qwen35": ("Qwen3_5Text", _DELTA),
    "qwen35moe": ("Qwen3_5MoeText", {**_DELTA, "shared_expert_intermediate_size": 256}),
    "qwen4exp": ("Qwen4ExpText", {
        **_DELTA, **_QWEN_4, "ple_layer_ids": [1], "ple_embed_dim": 128, "heads_per_ngram": 2,
        "ngram_vocab_size_base": 101, "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 8}),
    "qwen4exp without n-grams": ("Qwen4ExpText", {**_DELTA, **_QWEN_4}),
    "deepseek4": ("DeepseekV4", _DEEPSEEK_4),
    "deepseek4 with scaled positions": ("DeepseekV4", {**_DEEPSEEK_4, "rope_parameters": _YARN}),
    "bitnet": ("BitNet", {"hidden_act": "silu", "tie_word_embeddings": True}),
    "hrm_text": ("HrmText", {"H_cycles": 2, "L_cycles": 2, "embedding_scale": 3.0, "prefix_lm": False}),
}  # fmt: skip
"""Configuration class and options, by case."""

_CONFIGS = {"Mpt": "MptConfig", "GPTBigCode": "GPTBigCodeConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel", "HrmText": "HrmTextForCausalLM"}


_DEEPSEEK_4_PUBLISHED = {"compress_ratios": [0, 128, 4, 4], "num_hash_layers": 1, "num_nextn_predict_layers": 0}

PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 128},
    "gptneox": {"rotary_pct": 0.25, "rotary_emb_base": 10000.0},
    "gptneox in series": {"rotary_pct": 0.25, "rotary_emb_base": 10000.0},
    "cohere2": {"rotary_pct": 1.0},
    "falcon": {"num_kv_heads": 1},
    "falcon-h1": {"head_dim": 32},
    "falcon-h1 with norms": {"head_dim": 32},
    "minimax-m2": {"rotary_dim": 32},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 128},
    "hunyuan-moe": {"moe_intermediate_size": [512, 512], "moe_topk": [2, 2], "num_shared_expert": [1, 1]},
    "deepseek2 of V2": {"scoring_func": "softmax"},
    "deepseek2": {"scoring_func": "sigmoid"},
    "deepseek2 with scaled positions": {"scoring_func": "sigmoid"},
    "deepseek2 of GLM": {"scoring_func": "sigmoid"},
    "deepseek32": {"scoring_func": "sigmoid"},
    "glm-dsa": {"scoring_func": "sigmoid"},
    "glm-dsa with shared choices": {"scoring_func": "sigmoid"},
    "solar-open": {"partial_rotary_factor": 1.0},
    "gemma4": {"global_head_dim": 32},
    "gemma4 with experts": {"global_head_dim": 32},
    "chatglm": {"seq_length": 128},
    "nemotron_h": {"hybrid_override_pattern": "M*M-"},
    "nemotron_h_moe": {"hybrid_override_pattern": "ME*E"},
    "nemotron_h_moe with latent experts": {"hybrid_override_pattern": "ME*M"},
    "kimi-linear": {
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "moe_router_activation_func": "sigmoid",
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "head_dim": 32,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
    },
    "dots3note": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window_size": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 64,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 48,
        "swa_qk_nope_head_dim": 32,
        "swa_qk_rope_head_dim": 16,
        "swa_v_head_dim": 64,
        "rope_parameters": None,
        "rope_theta": 1e5,
        "swa_rope_theta": 1e4,
        "first_k_dense_replace": 1,
        "moe_shared_expert_intermediate_size": 256,
        "scoring_func": "sigmoid",
        "apply_mla_qkv_lora_rescale": True,
    },
    "qwen4exp": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "qwen4exp without n-grams": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "deepseek4": _DEEPSEEK_4_PUBLISHED,
    "deepseek4 with scaled positions": {
        **_DEEPSEEK_4_PUBLISHED,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 32,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "granitehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitehybrid with experts": {"layer_types": ["mamba", "attention", "mamba"]},
    "granitehybrid of Bamba": {"attn_rotary_emb": 16},
    "mimo2": {  # its window does not count the token itself
        "hybrid_layer_pattern": [0, 1, 1, 1, 0],
        "sliding_window": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_v_head_dim": 16,
        "topk_method": "noaux_tc",
        "layernorm_epsilon": 1e-5,
        "rope_parameters": None,
        "rope_theta": 1e5,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
"""Keys of published configurations that llama.cpp's converter asks for and that transformers no longer writes."""

UNPUBLISHED: dict[str, set[str]] = {
    "nemotron_h": {"num_experts_per_tok"},  # the converter takes a model with this key for one with experts
}
"""Keys that transformers writes and published configurations of such models do not have."""
_DEEPSEEK_4_NAMES = {
    "model.embed_tokens.": "embed.", "model.norm.": "norm.", "model.hc_head.hc_": "hc_head_",
    "model.layers.": "layers.", ".attn.norm.": ".attn.kv_norm.",
}  # fmt: skip
PUBLISHED_NAMES: dict[str, dict[str, str]] = {
    "bitnet": {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"},
    "kimi-linear": {"layers.0.block_sparse_moe.": "layers.0.mlp."},  # transformers saves an MLP by the name of experts
    "deepseek4": _DEEPSEEK_4_NAMES,
    "deepseek4 with scaled positions": _DEEPSEEK_4_NAMES,
    "hy_v4": {
        "model.hc_pre.hc_head.": "model.hc_head.",
        ".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.",
        ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
        "mlp.linear_gate.": "mlp.gate_proj.",
        "shared_experts.linear_gate.": "shared_experts.gate_proj.",
    },
}
"""Parts of names that transformers saves, and what published folders have in their place."""
NO_FACTORS: dict[str, Any] = {
    **{name: [1.0] * len(value) if isinstance(value, list) else 1.0 for name, value in _MULTIPLIERS.items()},
    "apply_mla_qkv_lora_rescale": False,
}
"""Values of keys with which the converter multiplies no weight."""


def configuration(case: str, **changed: Any) -> Any:
    """The configuration of a case, with some values `changed`."""
    kind, options = CASES[case]
    class_ = getattr(transformers, _CONFIGS.get(kind, f"{kind}Config"))
    usual, renamed = class_().to_dict(), getattr(class_, "attribute_map", {})
    sizes = {name: value for name, value in SIZES.items() if name in usual and name not in renamed}
    config = class_(**{**sizes, **options, **changed})
    config.use_cache = False
    return config


def build(case: str, **changed: Any) -> nn.Module:
    """A random model, with weights large enough that its logits differ between tokens."""
    torch.manual_seed(0)
    kind = CASES[case][0]
    name = _MODELS.get(kind, f"{kind.removesuffix('Text')}ForCausalLM")
    model: nn.Module = getattr(transformers, name)(configuration(case, **changed)).eval().float()
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            if tensor.ndim > 1:
                tensor.normal_(std=0.08)
            elif name.endswith(("bias", "sinks")):
                tensor.normal_(std=0.5)
            else:
                tensor.uniform_(0.7, 1.3)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of each token
                table.copy_(torch.rand(len(table), SIZES["num_experts"]).argsort(1)[:, : table.shape[1]])
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that a checkpoint has."""
    kept = {name for name in model.state_dict() if "rotary" not in name}
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in kept and tensor.is_floating_point()}
    return {**{name: parameter.data for name, parameter in model.named_parameters()}, **buffers}
