"""Language and speech models of transformers: each class with a small configuration and random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from foreign.zoo import Foreign, Made, enliven

WORDS, LENGTH = 99, 12
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_ff": 48, "d_kv": 8, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "embedding_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_routed_experts": 4, "decoder_start_token_id": 1, "rotary_dim": 8, "ffn_hidden_size": 48, "hidden_dim": 48,
    "n_layers": 2, "n_heads": 4, "dim": 32, "emb_dim": 32, "sliding_window": 8, "use_cache": False,
}  # fmt: skip
"""Values for those of these fields that a configuration class has."""

Call = Callable[[], dict[str, Any]]


def ids(count: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (count, length), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Any]:
    """Tokens, some of the second row hidden."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, -4:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def plain_text() -> dict[str, Any]:
    return {"input_ids": ids()}


def pairs() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 7)}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(1))}


def small(name: str, **more: Any) -> Any:
    """The configuration of that class, with small values for the fields it has."""
    import transformers

    kind = getattr(transformers, name)
    known = set(vars(kind())) | set(kind.attribute_map)
    given = {*more, *(key for key, other in kind.attribute_map.items() if other in more)}
    named = {key: value for key, value in SMALL.items() if key in known and key not in given}
    return kind(**named, **more)


def build(model: str, config: str, call: Call, more: dict[str, Any]) -> Made:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model)(small(config, **more))
    return Made(enliven(made), (), call())


def one(model: str, config: str | None = None, call: Call = text, **more: Any) -> Foreign:
    """A model; its configuration class has the same name without the suffix of its use."""
    if config is None:
        stem = model
        for end in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "EncoderModel", "Model"):
            stem = stem.removesuffix(end)
        config = stem + "Config"
    return Foreign("transformers", model, partial(build, model, config, call, more))


CONV = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2}  # fmt: skip

ENCODERS = [
    one("BertModel"), one("RobertaModel"), one("DistilBertModel"), one("AlbertModel"), one("ElectraModel"),
    one("DebertaV2Model", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8),
    one("DebertaModel", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8),
    one("MPNetModel"), one("XLMRobertaModel"), one("CamembertModel"), one("FNetModel", call=plain_text),
    one("ModernBertModel", local_attention=8), one("ConvBertModel"), one("MobileBertModel"), one("RoFormerModel"),
    one("SqueezeBertModel"), one("NystromformerModel", num_landmarks=4, segment_means_seq_len=12),
    one("MegatronBertModel"), one("ErnieModel"), one("LayoutLMModel"), one("IBertModel"), one("EsmModel"),
    one("XLMModel"), one("FlaubertModel"), one("RemBertModel", input_embedding_size=32, output_embedding_size=32),
    one("CanineModel"), one("FunnelModel", block_sizes=[1, 1], d_head=8, n_head=4), one("LongformerModel"),
    one("T5EncoderModel"), one("UMT5EncoderModel"), one("MT5EncoderModel"), one("NomicBertModel"),
    one("XLNetModel", n_layer=2, n_head=4, d_inner=48), one("BigBirdModel", attention_type="original_full"),
    one("YosoModel", use_expectation=True), one("LukeModel", entity_vocab_size=9, entity_emb_size=8),
]  # fmt: skip

DECODERS = [
    one("GPT2LMHeadModel"), one("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], window_size=8),
    one("GPTNeoXForCausalLM"), one("GPTJForCausalLM"), one("OPTForCausalLM"), one("BloomForCausalLM"),
    one("FalconForCausalLM"), one("MptForCausalLM"), one("LlamaForCausalLM"), one("MistralForCausalLM"),
    one("MixtralForCausalLM"), one("Qwen2ForCausalLM"), one("Qwen3ForCausalLM"), one("Qwen2MoeForCausalLM"),
    one("Qwen3MoeForCausalLM"), one("GemmaForCausalLM"), one("Gemma2ForCausalLM"),
    one("Gemma3ForCausalLM", "Gemma3TextConfig"), one("PhiForCausalLM"), one("Phi3ForCausalLM", pad_token_id=0),
    one("StableLmForCausalLM"), one("Starcoder2ForCausalLM"), one("CodeGenForCausalLM"), one("CohereForCausalLM"),
    one("Olmo2ForCausalLM"), one("OlmoForCausalLM"), one("GraniteForCausalLM"), one("NemotronForCausalLM"),
    one("PersimmonForCausalLM"), one("XGLMForCausalLM"), one("CTRLLMHeadModel", n_layer=2, n_head=4, dff=48),
    one("OpenAIGPTLMHeadModel"), one("BioGptForCausalLM"), one("DeepseekV2ForCausalLM", kv_lora_rank=16,
    q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1),
    one("Glm4ForCausalLM"), one("SmolLM3ForCausalLM"), one("MambaForCausalLM", call=plain_text, state_size=4),
    one("Mamba2ForCausalLM", call=plain_text, state_size=4, head_dim=16, expand=2, n_groups=1, num_heads=4,
    chunk_size=8), one("RwkvForCausalLM", call=plain_text, attention_hidden_size=32),
    one("RecurrentGemmaForCausalLM", lru_width=32, attention_window_size=8), one("OlmoeForCausalLM"),
    one("GptOssForCausalLM"), one("Lfm2ForCausalLM"), one("ArceeForCausalLM"), one("Ernie4_5ForCausalLM"),
    one("HeliumForCausalLM"), one("JetMoeForCausalLM"), one("BambaForCausalLM"), one("TrOCRForCausalLM"),
]  # fmt: skip

PAIRS = [
    one("T5Model", call=pairs), one("BartModel", call=pairs), one("MarianModel", call=pairs),
    one("PegasusModel", call=pairs), one("MBartModel", call=pairs), one("MvpModel", call=pairs),
    one("M2M100Model", call=pairs), one("LEDModel", call=pairs, attention_window=4), one("ProphetNetModel", call=pairs,
    num_encoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4), one("BlenderbotModel",
    call=pairs), one("PLBartModel", call=pairs), one("LongT5Model", call=pairs), one("SwitchTransformersModel",
    call=pairs), one("FSMTModel", call=pairs, langs=["en", "de"], src_vocab_size=WORDS, tgt_vocab_size=WORDS),
]  # fmt: skip

SOUND = [
    one("Wav2Vec2Model", call=sound, **CONV), one("HubertModel", call=sound, **CONV),
    one("WavLMModel", call=sound, **CONV),
    one("Data2VecAudioModel", call=sound, **{**CONV, "conv_pos_kernel_size": 5}),
    one("UniSpeechModel", call=sound, **CONV), one("SEWModel", call=sound, squeeze_factor=1, **CONV),
    one("ASTModel", call=lambda: {"input_values": torch.randn(2, 48, 32)}, max_length=48, num_mel_bins=32),
    one("WhisperModel", call=lambda: {"input_features": torch.randn(2, 16, 60), "decoder_input_ids": ids(2, 7)},
        num_mel_bins=16, max_source_positions=30, max_target_positions=40),
    one("Speech2TextModel", call=lambda: {"input_features": torch.randn(2, 40, 16), "decoder_input_ids": ids(2, 7)},
        input_feat_per_channel=16, conv_channels=16, max_source_positions=60, max_target_positions=40),
    one("EncodecModel", call=lambda: {"input_values": torch.randn(1, 1, 640)}, num_filters=4, hidden_size=16,
        codebook_size=16, upsampling_ratios=[4, 2]),
    one("VitsModel", call=plain_text),
]  # fmt: skip

FAMILIES = [ENCODERS, DECODERS, PAIRS, SOUND]
