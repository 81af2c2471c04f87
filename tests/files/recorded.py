"""Writes GGUF files of the models in gguf_cases.py as llama.cpp's converter does: from its record in converted.json."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from by_path import load
from gguf import GGMLQuantizationType as Type

written = load("tests/files/writing.py")
cases = load("tests/files/gguf_cases.py")


@functools.cache
def record() -> dict[str, Any]:
    """By case: the converter's keys and tensors (record_gguf.py describes them)."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "converted.json").read_text())
    return found


def places(first: int, sizes: list[int], strides: list[int]) -> np.ndarray:
    """The places of a run in the flattened parameter, in order."""
    found = np.full(1, first)
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + stride * np.arange(size)).reshape(-1)
    return found


def write(path: Path, case: str, kind_of: Callable[[str], Type], parts_of: int = 0) -> Any:
    """The file of a case, with tensors of the types that `kind_of` gives for their names (vectors are f32), and the
    model with the values that the file means.  With `parts_of` it is written in parts of so many tensors."""
    made, model = record()[case], cases.build(case)
    tensors = {name: tensor.reshape(-1) for name, tensor in cases.tensors_of(model).items()}
    _take_keys(made, tensors)
    writer = gguf.GGUFWriter(path, made["keys"]["general.architecture"][1], split_max_tensors=parts_of)
    for key, (kind, *inner, value) in made["keys"].items():
        if key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType[kind], *(gguf.GGUFValueType[name] for name in inner))
    writer.add_token_list([f"token {i}" for i in range(cases.SIZES["vocab_size"])])
    writer.add_bos_token_id(1)
    raw: dict[str, bytes] = {}
    names: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in made["tensors"].items():
        kind = kind_of(name) if len(tensor["shape"]) > 1 else Type.F32
        raw[name] = _add(writer, name, tensor, kind, tensors)
        for source, *_ in tensor.get("of", []):
            names.setdefault(source, {})[name] = tensors[source]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written.Written(path, model, raw, names)


def _take_keys(made: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Gives parameters that the file keeps in keys (Apertus) the values of the record."""
    for name in made.get("unread", []):
        inside = name.rpartition(".")[2]
        layer = int(name.split(".layers.")[1].partition(".")[0])
        made["keys"][f"xielu.{inside}"][-1][layer] = float(tensors[name])


def _add(
    writer: gguf.GGUFWriter, name: str, tensor: dict[str, Any], kind: Type, tensors: dict[str, torch.Tensor]
) -> bytes:
    """Adds a tensor, and gives the model's numbers the values that the file has for them."""
    if "whole" in tensor:
        table = np.array(tensor["whole"], np.int32).reshape(tensor["shape"])
        writer.add_tensor(name, table)
        return table.tobytes()
    if "values" in tensor:
        values = np.array(tensor["values"], np.float32).reshape(tensor["shape"])
        writer.add_tensor(name, values)
        return values.tobytes()
    runs = [(source, places(*run[:3]), np.float32(*run[3:] or [1])) for source, *run in tensor["of"]]
    added, is_minus_exp = np.float32(tensor.get("added", 0.0)), tensor.get("minus_exp", False)
    values = np.concatenate([tensors[source].numpy()[at] * factor for source, at, factor in runs])
    values = (-np.exp(values) if is_minus_exp else values).reshape(tensor["shape"]) + added
    data = written.quantized(values, kind)
    writer.add_tensor(name, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    meant = (gguf.quants.dequantize(data, kind) if kind != Type.F32 else data).reshape(-1) - added
    assert meant.size == math.prod(tensor["shape"])
    meant = np.log(-meant) if is_minus_exp else meant
    for source, at, factor in runs:
        tensors[source][torch.from_numpy(at)] = torch.from_numpy(np.array(meant[: at.size] / factor, np.float32))
        meant = meant[at.size :]
    raw: bytes = data.tobytes()
    return raw
