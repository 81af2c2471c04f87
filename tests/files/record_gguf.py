"""Records what llama.cpp's converter writes for small models of every case in gguf_cases.py: keys, names, and the place
in the model from which each number of a tensor comes.

    python tests/files/record_gguf.py --llama-cpp FOLDER [CASE ...]       writes tests/files/converted.json
    python tests/files/record_gguf.py --llama-cpp FOLDER --shared         writes tests/files/shared_architectures.json

The second lists GGUF's architectures of the causal language models that both the converter and transformers have.

FOLDER is llama.cpp's source with `conversion/` and `gguf-py/`, such as `vendor/llama.cpp` in the source package of
llama-cpp-python.  Each number of the model that is converted is a number of its own, a multiple of 2, so that a tensor
of the file says where it was taken from, and a constant that the converter adds remains as a remainder.

A run of a tensor's numbers is recorded as [name, first, sizes, strides]: the numbers at `first` + the sum of
index · stride in the flattened parameter, over all indices in C order.  A fifth entry is a factor that the converter
multiplies them with (gguf_cases.NO_FACTORS says without which keys it multiplies nothing).  Of `A_log` files have
-exp(A_log), which is recorded as "minus_exp"; the model that is converted has logarithms of numbers there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gguf_cases  # noqa: E402

STEP = 2
"""Distance of the numbers that stand for places; a constant that is added to a tensor is 0 or 1."""


def number(model: torch.nn.Module) -> list[tuple[str, int, int]]:
    """Gives each number of the model a value of its own; (name, first place, places) of each tensor."""
    found, start = [], 1  # 0 would be every zero that the converter writes
    held = gguf_cases.tensors_of(model)
    with torch.no_grad():
        for name in sorted(held, key=lambda each: not each.endswith("A_log")):  # small numbers: exp(log(n)) is exact
            tensor, count = held[name], held[name].numel()
            values = STEP * torch.arange(start, start + count, dtype=torch.float64).reshape(tensor.shape)
            tensor.copy_(values.log() if name.endswith("A_log") else values)
            found.append((name, start, count))
            start += count
    assert STEP * start < 1 << 24, f"{start} numbers: fp32 does not tell them apart"
    return found


def run_at(places: np.ndarray, owner: np.ndarray, factors: np.ndarray) -> tuple[list[int], list[int], int]:
    """The longest regular run at the beginning: sizes, strides (outermost first), and how many places it covers."""
    same = (owner == owner[0]) & (factors == factors[0])
    places = places[: len(same) if same.all() else int(np.argmin(same))]
    sizes: list[int] = []
    strides: list[int] = []
    block = 1
    while len(places) >= 2 * block:
        blocks = places[: len(places) // block * block].reshape(-1, block)
        stride = int(blocks[1, 0] - blocks[0, 0])
        wanted = blocks[0] + stride * np.arange(len(blocks))[:, None]
        fits = (blocks == wanted).all(axis=1)
        count = len(fits) if fits.all() else int(np.argmin(fits))
        if count == 1:
            break
        sizes.insert(0, count)
        strides.insert(0, stride)
        block *= count
    return sizes or [1], strides or [0], block


def runs(places: np.ndarray, factors: np.ndarray, tensors: list[tuple[str, int, int]]) -> list[list[Any]]:
    """The runs of a tensor's places. ValueError for a place that no tensor of the model has."""
    starts = np.array([start for _, start, _ in tensors])
    owner = np.searchsorted(starts, places, side="right") - 1
    if places.min() < 1 or places.max() >= tensors[-1][1] + tensors[-1][2]:
        raise ValueError("numbers that the model does not have")
    found: list[list[Any]] = []
    at = 0
    while at < len(places):
        if len(found) > 64:
            raise ValueError("an order without regular runs")
        sizes, strides, count = run_at(places[at:], owner[at:], factors[at:])
        name, start, _ = tensors[owner[at]]
        factor = float(factors[at])
        found.append([name, int(places[at]) - start, sizes, strides, *([] if factor == 1 else [factor])])
        at += count
    return found


def recorded(name: str, values: np.ndarray, scaled: np.ndarray, tensors: list[tuple[str, int, int]]) -> dict[str, Any]:
    """What of the model a tensor of the file holds. `scaled` are the values with the converter's factors."""
    if values.dtype.kind == "i":
        return {"shape": list(values.shape), "whole": values.reshape(-1).tolist()}
    shape, flat = list(values.shape), values.reshape(-1).astype(np.float64)
    factors = np.round(scaled.reshape(-1).astype(np.float64) / np.where(flat == 0, 1, flat), 6)
    is_minus_exp = bool((flat < 0).all()) and name.endswith("ssm_a")
    flat, slack = (-flat, 0.05) if is_minus_exp else (flat, 0.0)
    added = 0.0 if is_minus_exp else float(flat[0] % STEP)
    places = (flat - added) / STEP
    whole = np.round(places).astype(np.int64)
    try:
        if np.abs(places - whole).max() > slack:
            raise ValueError("numbers that are no sums of the model's and a constant")
        found: dict[str, Any] = {"shape": shape, "of": runs(whole, factors, tensors)}
    except ValueError as error:
        if len(flat) > 4096:
            raise ValueError(f"{name} {shape} holds {error}: {flat[:6]}") from error
        return {"shape": shape, "values": [float(np.float32(value)) for value in flat]}
    return found | ({"added": added} if added else {}) | ({"minus_exp": True} if is_minus_exp else {})


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def record(case: str, conversion: Any, gguf: Any) -> dict[str, Any]:
    """One case: the converter's keys (without those of the tokenizer) and tensors."""
    model = gguf_cases.build(case)
    tensors = number(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        rename(Path(folder) / "model.safetensors", gguf_cases.PUBLISHED_NAMES.get(case, {}))
        vocabulary = {f"token {each}": each for each in range(gguf_cases.SIZES["vocab_size"])}
        tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(f"{folder}/tokenizer.json")
        described = Path(folder) / "config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | gguf_cases.PUBLISHED.get(case, {})))
        hparams = conversion.ModelBase.load_hparams(Path(folder), False) | gguf_cases.PUBLISHED.get(case, {})
        hparams = {key: hparams[key] for key in hparams if key not in gguf_cases.UNPUBLISHED.get(case, ())}
        read = converted(Path(folder), hparams, conversion, gguf)
        keys = {
            key: [gguf.GGUFValueType(field.types[0]).name, *(t.name for t in field.types[1:]), plain(field.contents())]
            for key, field in read.fields.items()
            if not key.startswith(("GGUF.", "tokenizer.")) and (key == "general.architecture" or "general." not in key)
        }
        values = scaled = arrays(read)
        if without := {key: value for key, value in gguf_cases.NO_FACTORS.items() if key in hparams}:
            values = arrays(converted(Path(folder), hparams | without, conversion, gguf))
        held = {name: recorded(name, values[name], scaled[name], tensors) for name in values}
    unread = {name for name, _, _ in tensors} - {run[0] for t in held.values() for run in t.get("of", [])}
    return {"keys": keys, "tensors": held} | ({"unread": sorted(unread)} if unread else {})


def converted(folder: Path, hparams: dict[str, Any], conversion: Any, gguf: Any) -> Any:
    """The file that the converter writes for a folder and these keys of its config.json."""
    kind = conversion.get_model_class(conversion.get_model_architecture(hparams, conversion.ModelType.TEXT))
    if hasattr(kind, "opt_num_mtp_layers"):
        kind.no_mtp = True  # else these want blocks that predict further tokens, which the models here do not have
    out = folder / "model.gguf"
    with torch.inference_mode():
        kind(folder, gguf.LlamaFileType.ALL_F32, out, hparams=dict(hparams)).write()
    return gguf.GGUFReader(out)


def rename(path: Path, parts: dict[str, str]) -> None:
    """Replaces parts of names in a file of safetensors."""
    held = safetensors.torch.load_file(path) if parts else {}
    for old, new in parts.items():
        held = {name.replace(old, new): tensor for name, tensor in held.items()}
    if held:
        safetensors.torch.save_file(held, path, {"format": "pt"})


def without_rounding(kind: type) -> None:
    """Lets the converter's BitNet write weights as they are: rounded ones would say no place."""
    for each in kind.__subclasses__():
        if "weight_quant" in vars(each):
            setattr(each, "weight_quant", lambda self, weight: weight)  # noqa: B010
        without_rounding(each)


def with_plain_experts(kind: type) -> None:
    """Lets the converter's DeepSeek V4 stack experts in plain numbers: it knows those of published folders alone, whose
    codes of mxfp4 would say no place."""

    def write(self: Any, layer: int, part: str, key: Any) -> list[str]:
        names = [f"layers.{layer}.ffn.experts.{i}.{part}.weight" for i in range(self.hparams["n_routed_experts"])]
        lazy = sys.modules[type(self).__module__].LazyTorchTensor
        stacked = np.stack([lazy.to_eager(self.model_tensors[name]()).numpy() for name in names])
        self.gguf_writer.add_tensor(self.format_tensor_name(key, layer), stacked)
        return names

    for each in kind.__subclasses__():
        if "_write_mxfp4_expert_tensor" in vars(each):
            setattr(each, "_write_mxfp4_expert_tensor", write)  # noqa: B010
        with_plain_experts(each)


def arrays(file: Any) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data).reshape(tensor.shape[::-1]) for tensor in file.tensors}


def without_tokenizers(kind: type) -> None:
    """Lets the converter's classes write no tokenizer: the models here have none."""
    for each in kind.__subclasses__():
        if "set_vocab" in vars(each):
            setattr(each, "set_vocab", lambda self: None)  # noqa: B010
        without_tokenizers(each)


def shared(conversion: Any, gguf: Any) -> dict[str, list[str]]:
    """The classes of transformers that the converter takes, by the architecture that it writes."""
    from transformers.models.auto import modeling_auto

    causal: set[str] = set()
    for names in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        causal.update([names] if isinstance(names, str) else names)
    found: dict[str, list[str]] = {}
    for name, kind in conversion.ModelBase._model_classes[conversion.ModelType.TEXT].items():
        if name in causal:
            found.setdefault(gguf.MODEL_ARCH_NAMES[kind.model_arch], []).append(name)
    return {architecture: sorted(found[architecture]) for architecture in sorted(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="llama.cpp's source")
    parser.add_argument("--output", type=Path, default=HERE / "converted.json")
    parser.add_argument("--shared", action="store_true", help="list the architectures that both have")
    parser.add_argument("cases", nargs="*", help="cases to record anew; the others stay")
    arguments = parser.parse_args()
    sys.path[:0] = [str(arguments.llama_cpp / "gguf-py"), str(arguments.llama_cpp)]
    import conversion
    import gguf

    logging.disable(logging.WARNING)
    conversion.load_all_models()
    without_tokenizers(conversion.ModelBase)
    without_rounding(conversion.ModelBase)
    with_plain_experts(conversion.ModelBase)
    if arguments.shared:
        text = json.dumps(shared(conversion, gguf), indent=1)
        (HERE / "shared_architectures.json").write_text(text + "\n")
        return
    found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    failed = 0
    for case in arguments.cases or gguf_cases.CASES:
        try:
            found[case] = record(case, conversion, gguf)
            print(f"{case}: {len(found[case]['keys'])} keys, {len(found[case]['tensors'])} tensors "
                  f"{found[case].get('unread', '')}", flush=True)  # fmt: skip
        except Exception as error:
            failed += 1
            print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    kept = {case: found[case] for case in gguf_cases.CASES if case in found}
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(made)}" for case, made in kept.items())
    arguments.output.write_text("{\n" + lines + "\n}\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
