"""Sound inputs, small, made anew each time from fixed random numbers. None of them needs a compile."""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from filefuzz.documents import Files
from qcompiler.formats.foreign import awq, bitsandbytes, compressed_tensors, gptq

ROOT = Path(__file__).resolve().parents[3]

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 64, 96, 4, 2, 48
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 16,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "float32", "use_cache": True,
}  # fmt: skip


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    generator = np.random.default_rng(sum(name.encode()))
    return (generator.standard_normal(shape) * 0.5).astype(np.float32)


# --- safetensors and folders -----------------------------------------------------------------------------------------

_NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def safetensors(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}  # fmt: skip
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _plain() -> dict[str, Any]:
    return {
        "model.embed_tokens.weight": _values("embed", (VOCABULARY, HIDDEN)),
        "model.layers.0.input_layernorm.weight": _values("in", (HIDDEN,)),
        "model.layers.0.post_attention_layernorm.weight": _values("post", (HIDDEN,)),
        "model.norm.weight": _values("norm", (HIDDEN,)), "lm_head.weight": _values("head", (VOCABULARY, HIDDEN)),
    }  # fmt: skip


def _folder(
    quantization: dict[str, Any] | None, layer: Callable[[str, Any], Mapping[str, Any]], shards: int = 1
) -> Files:
    tensors = _plain()
    for name, shape in LINEARS.items():
        for part, array in layer(name, _values(name, shape)).items():
            tensors[f"model.layers.0.{name}.{part}"] = array
    config = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    files: Files = {"config.json": json.dumps(config).encode()}
    if shards == 1:
        files["model.safetensors"] = safetensors(tensors)
        return files
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    parts: list[dict[str, Any]] = [{} for _ in names]
    for index, (name, array) in enumerate(tensors.items()):
        parts[index % shards][name] = array
    for name, part in zip(names, parts, strict=True):
        files[name] = safetensors(part)
    places = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()
    return files


def _packed(text: str, values: Any) -> Any:
    from qcompiler.config import resolve_format

    fmt = resolve_format(text)
    return fmt.encode(values)


def folder_gptq() -> Files:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    order = np.random.default_rng(5)

    def layer(name: str, values: Any) -> Mapping[str, Any]:
        packed = _packed("int4:group=32,symmetric=False", values)
        return gptq.write(packed, version=2, permutation=order.permutation(values.shape[1]))

    return _folder({**settings, "checkpoint_format": "gptq_v2"}, layer)


def folder_awq() -> Files:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return _folder(settings, lambda _, values: awq.write(_packed("int4:group=32,symmetric=False", values)))


def folder_bitsandbytes() -> Files:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def layer(name: str, values: Any) -> Mapping[str, Any]:
        if name.startswith("mlp"):
            return bitsandbytes.write(_packed("llm_int8", values))
        return bitsandbytes.write(_packed("nf4:block=64,double_quant=True", values), dtype="float32")

    return _folder(settings, layer)


def folder_compressed() -> Files:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, "type": "int"}
    rows = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    groups = {
        "group_0": {"targets": ["re:.*self_attn.*_proj"], "weights": weights, "format": "pack-quantized"},
        "group_1": {"targets": ["Linear"], "weights": rows, "format": "float-quantized"},
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }

    def layer(name: str, values: Any) -> Mapping[str, Any]:
        if name.startswith("mlp"):
            scale = np.abs(values).max(1, keepdims=True) / 448
            return {
                "weight": (values / scale).astype(ml_dtypes.float8_e4m3fn),
                "weight_scale": scale.astype(np.float32),
            }
        return compressed_tensors.write(_packed("int4:group=32,scale=fp32", values), kind="pack-quantized")

    return _folder(settings, layer, shards=2)


def folder_torchao() -> Files:
    files = _folder({"quant_method": "torchao"}, _torchao_layer)
    about = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32], "dtype": {"_type": "torch.dtype"}}}
    notes = {f"model.layers.0.{name}.weight": json.dumps(about) for name in LINEARS}
    tensors = _plain()
    for name, shape in LINEARS.items():
        for part, array in _torchao_layer(name, _values(name, shape)).items():
            tensors[f"model.layers.0.{name}.{part}"] = array
    return {**files, "model.safetensors": safetensors(tensors, notes)}


def _torchao_layer(name: str, values: Any) -> Mapping[str, Any]:
    del name
    groups = values.reshape(len(values), -1, 32)
    scale = np.abs(groups).max(-1) / 127
    codes = np.round(groups / scale[..., None]).astype(np.int8).reshape(values.shape)
    return {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": np.zeros(scale.shape, np.int8)}


def folder_fp8() -> Files:
    def layer(name: str, values: Any) -> Mapping[str, Any]:
        return {"weight": values.astype(ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((1, 1), np.float32)}

    return _folder({"quant_method": "fp8", "weight_block_size": [128, 128]}, layer)


def folder_plain() -> Files:
    return _folder(None, lambda _, values: {"weight": values}, shards=2)


# --- GGUF ------------------------------------------------------------------------------------------------------------


def gguf(arch: str, kinds: tuple[str, ...], **more: Any) -> Files:
    from qcompiler.frontends.checkpoints.gguf_files import write_gguf

    experts = int(more.get("expert_count", 0))
    keys: dict[str, Any] = {
        "general.architecture": arch, "general.name": "small", f"{arch}.context_length": 64,
        f"{arch}.embedding_length": HIDDEN, f"{arch}.block_count": 1, f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS, f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5, f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.rope.dimension_count": 16, "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)],
        "tokenizer.ggml.scores": [0.5] * VOCABULARY, "tokenizer.ggml.bos_token_id": 1,
        **{f"{arch}.{key}": value for key, value in more.items()},
    }  # fmt: skip
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    tensors: dict[str, Any] = {
        "token_embd.weight": _values("embed", (VOCABULARY, HIDDEN)), "output_norm.weight": _values("norm", (HIDDEN,)),
        "output.weight": _values("head", (VOCABULARY, HIDDEN)), "blk.0.attn_norm.weight": _values("in", (HIDDEN,)),
        "blk.0.ffn_norm.weight": _values("post", (HIDDEN,)), "rope_freqs.weight": np.ones(8, np.float32),
    }  # fmt: skip
    for number, (name, shape) in enumerate(LINEARS.items()):
        fmt, values = kinds[number % len(kinds)], _values(name, shape)
        if experts and name.startswith("mlp"):
            tensors[f"blk.0.{names[name]}_exps.weight"] = _values(name, (experts, *shape))
        elif fmt == "f16":
            tensors[f"blk.0.{names[name]}.weight"] = values.astype(np.float16)
        else:
            tensors[f"blk.0.{names[name]}.weight"] = _packed(fmt, values)
    if arch == "qwen2":
        for name in ("attn_q", "attn_k", "attn_v"):
            tensors[f"blk.0.{name}.bias"] = _values(name, (HIDDEN if name == "attn_q" else HIDDEN // 2,))
    if arch == "qwen3":
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors[f"blk.0.{name}.weight"] = _values(name, (HIDDEN // HEADS,))
    if experts:
        tensors["blk.0.ffn_gate_inp.weight"] = _values("router", (experts, HIDDEN))
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "model.gguf", tensors, keys)
        return {"model.gguf": (Path(folder) / "model.gguf").read_bytes()}


# --- LoRA, context, arrays -------------------------------------------------------------------------------------------


def adapter() -> Files:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
              "use_dora": False, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 4}}  # fmt: skip
    tensors = {}
    for name, rank in (("q_proj", 4), ("v_proj", 2)):
        path = f"base_model.model.model.layers.0.self_attn.{name}"
        tensors[f"{path}.lora_A.weight"] = _values("a", (rank, HIDDEN))
        tensors[f"{path}.lora_B.weight"] = _values("b", (HIDDEN, rank)).astype(np.float16)
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": safetensors(tensors)}


def context() -> Files:
    weight = {"key": "w", "dtype": "f32", "shape": [4, 8], "nbytes": 128, "format": None, "layout": "canonical",
              "parameters": ["w"]}  # fmt: skip
    packed = {**weight, "key": "p", "shape": [4, 64], "nbytes": 144, "format": ["nf4", {"block": 64}]}
    facts = {"target": ["cpu", "x86-64-v4"], "devices": ["cpu"], "device_map": {}, "weights": [weight, packed]}
    kept = {"w": np.ones(128, np.uint8)}
    text = "func.func @main(%x: tensor<2x8xf32>) -> tensor<2x8xf32> {\n  func.return %x : tensor<2x8xf32>\n}\n"
    return {"context.safetensors": safetensors(kept, {"qcompiler": json.dumps(facts)}), "input.mlir": text.encode()}


def arrays_npz() -> Files:
    stream = io.BytesIO()
    np.savez(stream, ids=np.arange(10).reshape(2, 5), shift=np.zeros((2, 5), np.float32))
    return {"inputs.npz": stream.getvalue()}


def arrays_npy() -> Files:
    files: Files = {}
    for name, array in (("ids", np.arange(10).reshape(2, 5)), ("shift", np.zeros((2, 5), np.float32))):
        stream = io.BytesIO()
        np.save(stream, array)
        files[f"{name}.npy"] = stream.getvalue()
    return files


# --- IR --------------------------------------------------------------------------------------------------------------


@functools.cache
def texts() -> dict[str, str]:
    """The inputs of the filecheck tests, cut at their separators; and stages of a program file."""
    found = {}
    for path in sorted((ROOT / "tests/filecheck").rglob("*.mlir")):
        parts = re.split(r"^// -----$", path.read_text(), flags=re.MULTILINE)
        for number, part in enumerate(parts):
            lines = [line for line in part.splitlines() if not line.strip().startswith("//") and line.strip()]
            passes = re.findall(r"-p (\S+)", part.splitlines()[0]) if part.strip() else []
            if lines:
                head = f"// passes: {','.join(passes)}\n"
                found[f"{path.parent.name}/{path.stem}#{number}"] = head + "\n".join(lines) + "\n"
    return found


def _golden(kind: str) -> Callable[[], Files]:
    def read() -> Files:
        (path,) = sorted((ROOT / "tests/golden").glob(f"0.1.0-format1-{kind}.qca"))
        return {"program.qca": path.read_bytes()}

    return read


SEEDS: dict[str, dict[str, Callable[[], Files]]] = {
    "qca": {kind: _golden(kind) for kind in ("target", "canonical", "cuda")},
    "gguf": {
        "llama": lambda: gguf("llama", ("q4_0", "q8_0", "f16")),
        "qwen2": lambda: gguf("qwen2", ("q5_1", "iq4_nl", "q4_1")),
        "qwen3": lambda: gguf("qwen3", ("mxfp4_ggml", "q5_0")),
        "mixtral": lambda: gguf("llama", ("q8_0",), expert_count=2, expert_used_count=1),
    },
    "folder": {
        "gptq": folder_gptq, "awq": folder_awq, "bitsandbytes": folder_bitsandbytes, "compressed": folder_compressed,
        "fp8": folder_fp8, "plain": folder_plain, "torchao": folder_torchao,
    },
    "safetensors": {"plain": lambda: {"model.safetensors": folder_gptq()["model.safetensors"]}, "adapter": adapter},
    "opt": {"context": context},
    "arrays": {"npz": arrays_npz, "npy": arrays_npy},
}  # fmt: skip
"""By target, then by name. Those of `opt` are also all of `texts`."""


@functools.cache
def seed(target: str, name: str) -> Files:
    if target == "opt" and name not in SEEDS["opt"]:
        return {"input.mlir": texts()[name].encode()}
    return SEEDS[target][name]()


def names(target: str) -> list[str]:
    return [*SEEDS[target], *(texts() if target == "opt" else ())]
