"""Makes mixtures.json: the type that llama.cpp's own quantiser gives to every matrix of small models.

    python tests/files/golden/make_mixtures.py folder-of-libllama

The folder holds the shared libraries of a build of llama.cpp (`cmake -DBUILD_SHARED_LIBS=ON`, target `llama`).  Each
case is a GGUF file of zeros with the keys of its model; `llama_model_quantize` writes it in each mixture, and the types
are read from what it wrote.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

MIXTURES = {
    "q2_K_M": 10, "q3_K_S": 11, "q3_K_M": 12, "q3_K_L": 13, "q4_K_S": 14, "q4_K_M": 15, "q5_K_S": 16, "q5_K_M": 17,
    "q2_K_S": 21,
}  # fmt: skip
"""llama_ftype, from llama.h."""

BASE: dict[str, Any] = {"arch": "llama", "layers": 2, "hidden": 256, "ffn": 512, "heads": 8, "kv": 8, "tied": False}
CASES: dict[str, dict[str, Any]] = {
    **{f"llama-{layers}": {"layers": layers} for layers in (1, 2, 3, 7, 8, 9, 16, 17, 32, 33)},
    "llama-gqa2": {"layers": 9, "kv": 4},
    "llama-gqa4": {"layers": 9, "kv": 2},
    "llama-tied": {"layers": 9, "tied": True},
    "llama-288": {"layers": 9, "hidden": 288, "ffn": 512},
    "llama-ffn-352": {"layers": 9, "ffn": 352},
    "llama-ffn-360": {"layers": 9, "ffn": 360},
    "llama-80": {"layers": 80, "kv": 2},
    "llama-80-mha": {"layers": 80},
    "mixtral-8": {"layers": 9, "kv": 2, "experts": 8},
    "mixtral-4": {"layers": 17, "kv": 2, "experts": 4},
    "qwen2-80": {"arch": "qwen2", "layers": 80, "kv": 2},
    "qwen2-tied": {"arch": "qwen2", "layers": 9, "kv": 4, "tied": True},
    "qwen3": {"arch": "qwen3", "layers": 17, "kv": 2},
    "gpt2": {"arch": "gpt2", "layers": 12, "tied": True},
    "gptneox": {"arch": "gptneox", "layers": 17},
    "falcon": {"arch": "falcon", "layers": 32, "kv": 1},
    "falcon-tied": {"arch": "falcon", "layers": 9, "kv": 1, "tied": True},
    "phi3": {"arch": "phi3", "layers": 9, "kv": 2},
}


class Params(ctypes.Structure):
    """llama_model_quantize_params, from llama.h."""

    _fields_ = (
        [("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("output", ctypes.c_int), ("embedding", ctypes.c_int)]
        + [(name, ctypes.c_bool) for name in ("requantize", "head", "only_copy", "pure", "keep_split", "dry_run")]
        + [(name, ctypes.c_void_p) for name in ("imatrix", "kv", "tensors", "prune")]
        + [("max_buf_size", ctypes.c_size_t)]
    )  # fmt: skip


class Importance(ctypes.Structure):
    """llama_model_imatrix_data, from llama.h."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


def importance(case: dict[str, Any]) -> Any:
    """Ones for every matrix, which Q2_K_S asks for; it changes no type of these mixtures."""
    matrices = {name: shape for name, shape in tensors(case).items() if len(shape) > 1}
    made = (Importance * (len(matrices) + 1))()
    for each, (name, shape) in zip(made, matrices.items(), strict=False):
        count = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        each.name, each.data, each.size = name.encode(), (ctypes.c_float * count)(*([1.0] * count)), count
    return made


def tensors(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes (rows, cols) by GGUF's names."""
    d, f, head = case["hidden"], case["ffn"], case["hidden"] // case["heads"]
    kv, experts = case["kv"] * head, case.get("experts", 0)
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (96, d), "output_norm.weight": (d,)}
    if not case["tied"]:
        found["output.weight"] = (96, d)
    if case["arch"] == "gpt2":
        found["position_embd.weight"] = (64, d)
    fused = case["arch"] in ("gpt2", "gptneox", "falcon", "phi3")
    for i in range(case["layers"]):
        at = f"blk.{i}."
        found[at + "attn_norm.weight"] = (d,)
        if fused:
            found[at + "attn_qkv.weight"] = (d + 2 * kv, d)
        else:
            found |= {at + "attn_q.weight": (d, d), at + "attn_k.weight": (kv, d), at + "attn_v.weight": (kv, d)}
        found[at + "attn_output.weight"] = (d, d)
        if experts:
            found |= {
                at + "ffn_gate_inp.weight": (experts, d), at + "ffn_gate_exps.weight": (experts, f, d),
                at + "ffn_up_exps.weight": (experts, f, d), at + "ffn_down_exps.weight": (experts, d, f),
            }  # fmt: skip
            continue
        if not fused:
            found[at + "ffn_gate.weight"] = (f, d)
        found[at + "ffn_up.weight"] = (2 * f if case["arch"] == "phi3" else f, d)
        found[at + "ffn_down.weight"] = (d, f)
    return found


def write(path: Path, case: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, case["arch"])
    writer.add_context_length(128)
    writer.add_embedding_length(case["hidden"])
    writer.add_block_count(case["layers"])
    writer.add_feed_forward_length(case["ffn"])
    writer.add_head_count(case["heads"])
    writer.add_head_count_kv(case["kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_dimension_count(case["hidden"] // case["heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_parallel_residual(True)
    writer.add_bool("falcon.attention.causal", True)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(96)])
    writer.add_token_merges(["t 0"])
    if "experts" in case:
        writer.add_expert_count(case["experts"])
        writer.add_expert_used_count(2)
    for name, shape in tensors(case).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def library(folder: Path) -> ctypes.CDLL:
    for name in ("ggml-base", "ggml-cpu", "ggml"):
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(folder / "libllama.so"))
    found.llama_model_quantize_default_params.restype = Params
    found.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    found.llama_model_quantize.restype = ctypes.c_uint32
    found.llama_backend_init()
    return found


def main(folder: Path) -> None:
    llama = library(folder)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for name, options in CASES.items():
            case = BASE | options
            source, target = Path(work) / f"{name}.gguf", Path(work) / "out.gguf"
            write(source, case)
            types: dict[str, Any] = {}
            for mixture, number in MIXTURES.items():
                params = llama.llama_model_quantize_default_params()
                params.ftype, params.nthread = number, 1
                ones = importance(case) if mixture == "q2_K_S" else None
                params.imatrix = None if ones is None else ctypes.addressof(ones)
                if llama.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
                    sys.exit(f"{name}: llama.cpp refused {mixture}")
                read = gguf.GGUFReader(target).tensors
                types[mixture] = _by_layer({each.name: each.tensor_type.name for each in read if len(each.shape) > 1})
            source.unlink()
            found[name] = {"case": case, "types": types}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    Path(__file__).with_name("mixtures.json").write_text(f"{{\n{lines}\n}}\n")


LETTERS = {
    "Q2_K": "2", "Q3_K": "3", "Q4_K": "4", "Q5_K": "5", "Q6_K": "6", "Q8_0": "8", "Q4_0": "a", "Q5_0": "b", "Q5_1": "c",
    "F16": "h", "F32": "f",
}  # fmt: skip


def _by_layer(types: dict[str, str]) -> dict[str, str]:
    """{"blk.*.attn_v": "6446…"}: a letter for each layer, so that people can read the file, too."""
    found: dict[str, str] = {}
    for name, kind in sorted(types.items(), key=lambda item: [int(n) for n in item[0].split(".") if n.isdigit()]):
        place = ".".join("*" if part.isdigit() else part for part in name.removesuffix(".weight").split("."))
        found[place] = found.get(place, "") + LETTERS[kind]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
