"""`from_checkpoint`: a folder of transformers (config.json, safetensors) whose weights are quantised already.

    quant_method         settings                            arrays of a layer
    bitsandbytes                                             weight, weight.quant_state.…, …; or weight, SCB
    gptq                 bits, group_size, checkpoint_format qweight, qzeros, scales, g_idx
    awq                  bits, group_size, zero_point        qweight, qzeros, scales
    compressed-tensors   config_groups, format               weight_packed, weight_scale, …
    fp8                  weight_block_size                   weight, weight_scale_inv

The arrays of one layer become one packed tensor with the codes as they are.  Which layers are quantised is what the
files say: one that has a plain `weight` stays in floating point.  Activations are floating point here, also where a
checkpoint was made for quantised ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from qcompiler.errors import FormatError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign import awq, bitsandbytes, compressed_tensors, floats, gptq
from qcompiler.formats.foreign.arrays import Array, Arrays
from qcompiler.frontends.checkpoint import Checkpoint, CodesInFile, Order, hollow, transformers
from qcompiler.frontends.safetensors_files import FileTensor, read_tensors
from qcompiler.frontends.weight_source import FileWeights, InFile, StoredCodes

Layer = tuple[PackedTensor, Order | None]
Read = Callable[[str, Mapping[str, Array]], Layer]

IGNORED = ("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias")
"""Names in files that models once saved and compute today."""

_PROBE = 32
"""Columns of a layer that say what format all of it is: codes of any width fill words."""


def from_checkpoint(folder: str | Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """The model of a folder with config.json and safetensors, quantised by one of the systems named above.

    Stored codes are kept as they are, one layer in work at a time.  A folder without quantization_config is read, too.
    Where a file sorted the columns of a layer by group (act-order), the program takes the layer's input in that order.
    `dtype` is what the model computes in, by default what config.json says.

    WeightsError for a folder, a method or a setting that is not read; FormatError names the layer and the array.
    """
    folder = Path(folder)
    described = _described(folder)
    method = described.get("quantization_config") or {}
    system = _system(folder, method)
    names = described.get("architectures") or []
    classes = transformers()
    if len(names) != 1 or not hasattr(classes, names[0]):
        raise WeightsError(f"{folder / 'config.json'} names the architectures {names}; transformers has to know one")
    config = classes.AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the model is built in floating point; what it means is in the codes
    stored = getattr(config, "dtype", None) or torch.float32
    module = hollow(names[0], config, dtype or (getattr(torch, stored) if isinstance(stored, str) else stored))
    tensors = read_tensors(folder, codes=bool(method))
    return Checkpoint(module, FolderWeights(folder, tensors, system), config, folder)


class FolderWeights(FileWeights):
    """The tensors of a folder's safetensors, those of a quantised layer together under the name of its weight."""

    def __init__(self, folder: Path, tensors: Mapping[str, FileTensor], system: System | None) -> None:
        super().__init__(folder, _items(tensors, system), ignore=IGNORED)


def _described(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{folder / 'config.json'} is no JSON object")
    return found


# --- systems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """How one system's layers are found and read.

    `marks` are endings of names that only a quantised layer has, `arrays` all that it may have; `read` takes the
    layer's path and its arrays.  `probe` cuts arrays down to what says the same about the format, or is None where
    reading does no work.
    """

    marks: tuple[str, ...]
    arrays: tuple[str, ...]
    read: Read
    probe: Callable[[Mapping[str, Array]], Mapping[str, Array]] | None = None


def _system(folder: Path, method: Mapping[str, Any]) -> System | None:
    """WeightsError for a method that is not read."""
    if not method:
        return None
    name = str(method.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in method else ""))
    if name not in SYSTEMS:
        raise WeightsError(
            f"{folder} is quantised by {name or 'an unnamed method'!r}; there are: {', '.join(SYSTEMS)}. Import the "
            "model's floating-point checkpoint instead"
        )
    return SYSTEMS[name](_Settings(folder, name, method))


@dataclass(frozen=True)
class _Settings:
    """A quantization_config."""

    folder: Path
    method: str
    found: Mapping[str, Any]

    def integer(self, key: str) -> int:
        value = self.found.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} is {value!r}, no integer")
        return value

    def refuse(self, key: str, *fine: Any) -> None:
        if self.found.get(key) not in (None, *fine):
            raise self.error(f"{key} is {str(self.found[key])[:80]}, which is not read")

    def error(self, message: str) -> WeightsError:
        return WeightsError(f"the quantization_config of {self.folder} ({self.method}): {message}")


def _gptq(settings: _Settings) -> System:
    bits, group = settings.integer("bits"), settings.integer("group_size")
    settings.refuse("dynamic", {})
    kind = str(settings.found.get("checkpoint_format") or settings.found.get("format") or "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise settings.error(f"checkpoint_format is {kind!r}; there are gptq and gptq_v2")
    version: Literal[1, 2] = 1 if kind == "gptq" else 2
    symmetric = settings.found.get("sym")
    act_order = None if settings.found.get("desc_act") is None else bool(settings.found["desc_act"])

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return gptq.read(
            arrays, bits=bits, group=group, version=version, symmetric=symmetric, act_order=act_order, layer=layer
        )

    def probe(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {
            name: a if a.ndim != 2 else a[:, : bits * _PROBE // 32 if name == "qzeros" else _PROBE]
            for name, a in arrays.items()
        }

    return System(("qweight",), gptq.NAMES, read, probe if isinstance(symmetric, bool) else None)


def _awq(settings: _Settings) -> System:
    bits = settings.integer("bits" if "bits" in settings.found else "w_bit")
    group = settings.integer("group_size" if "group_size" in settings.found else "q_group_size")
    settings.refuse("version", "gemm", "GEMM")
    points = settings.found.get("zero_point")
    symmetric = None if points is None else not points

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return awq.read(arrays, group=group, bits=bits, symmetric=symmetric, layer=layer), None

    def probe(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: a[:, : _PROBE if name == "scales" else _PROBE // 8] for name, a in arrays.items()}

    return System(("qweight",), awq.NAMES, read, probe if symmetric is not None else None)


def _bitsandbytes(settings: _Settings) -> System:
    del settings  # each layer says what it is

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return bitsandbytes.read(arrays, layer=layer)[0], None

    state = "weight.quant_state.bitsandbytes__"
    names = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB",
             "weight_format", *(state + kind for kind in bitsandbytes.TABLES))  # fmt: skip
    return System(("SCB", *(state + kind for kind in bitsandbytes.TABLES)), names, read)


def _fp8(settings: _Settings) -> System:
    settings.refuse("weight_block_size", [128, 128])

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        found = Arrays(arrays, layer, "fp8")
        return floats.read_fp8(found, "weight", "weight_scale_inv", "block"), None

    return System(("weight_scale_inv",), ("weight", "weight_scale_inv"), read)


# --- compressed-tensors ----------------------------------------------------------------------------------------------

_BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


def _compressed_tensors(settings: _Settings) -> System:
    groups = settings.found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise settings.error("there are no config_groups")
    for key in ("sparsity_config", "transform_config"):
        settings.refuse(key, {}, {"format": "dense"})

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        group = _group_of(settings, layer, groups)
        weights = group.get("weights") or {}
        kind = group.get("format") or settings.found.get("format")
        if kind not in compressed_tensors.KINDS:
            raise settings.error(f"the format of '{layer}' is {kind!r}; there are: {compressed_tensors.KINDS}")
        return compressed_tensors.read(
            arrays,
            kind=kind,
            bits=int(weights.get("num_bits") or 8),
            group=_shared(settings, weights),
            symmetric=weights.get("symmetric"),
            layer=layer,
        )

    names = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
             "weight_global_scale", *_BESIDE)  # fmt: skip
    return System(("weight_scale",), names, read)


def _group_of(settings: _Settings, layer: str, groups: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group that names the layer, by path or `re:` pattern; else the one for all linears."""
    general: Mapping[str, Any] | None = None
    for group in groups.values():
        for target in group.get("targets") or ["Linear"]:
            if target == layer or (target.startswith("re:") and re.match(target[3:], layer)):
                found: Mapping[str, Any] = group
                return found
            if target == "Linear":
                general = general or group
    if general is None:
        raise settings.error(f"no config_group has '{layer}' among its targets")
    return general


def _shared(settings: _Settings, weights: Mapping[str, Any]) -> compressed_tensors.Shared | None:
    """What shares a scale, in our words."""
    strategy = weights.get("strategy")
    if strategy in ("group", "tensor_group"):
        size = weights.get("group_size")
        return size if isinstance(size, int) and strategy == "group" else None
    known: dict[Any, compressed_tensors.Shared | None] = {
        None: None, "channel": "row", "tensor": "tensor", "block": "block"
    }  # fmt: skip
    if strategy not in known:
        raise settings.error(
            f"weights have the strategy {strategy!r}; there are: group, {', '.join(filter(None, known))}"
        )
    return known[strategy]


SYSTEMS: dict[str, Callable[[_Settings], System]] = {
    "bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8,
}  # fmt: skip


# --- layers ----------------------------------------------------------------------------------------------------------


def _items(tensors: Mapping[str, FileTensor], system: System | None) -> dict[str, InFile]:
    """Layers under the names of their weights, and everything else as it is."""
    found: dict[str, InFile] = {}
    taken: set[str] = set()
    for name in tensors if system is not None else ():
        assert system is not None
        mark = next((m for m in system.marks if name.endswith("." + m)), None)
        if mark is None:
            continue
        layer = name.removesuffix("." + mark)
        arrays = {a: tensors[f"{layer}.{a}"] for a in system.arrays if f"{layer}.{a}" in tensors}
        found[f"{layer}.weight"] = _layer(layer, arrays, system)
        taken.update(f"{layer}.{a}" for a in arrays)
    plain: dict[str, InFile] = {name: tensor for name, tensor in tensors.items() if name not in taken}
    for name, tensor in plain.items():
        if tensor.dtype is not None and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise WeightsError(f"'{name}' is {tensor.dtype} without a scale: what it means cannot be known")
    return {**plain, **found}


def _layer(layer: str, tensors: Mapping[str, FileTensor], system: System) -> InFile:
    """The codes of a layer. What format they are is asked of a part of it; FormatError names what does not fit."""

    def arrays() -> dict[str, Array]:
        return {name: tensor.array() for name, tensor in tensors.items() if name not in _BESIDE}

    def release() -> None:
        for tensor in tensors.values():
            tensor.release()

    fmt, rows, cols, permutation = _examined(layer, arrays(), system)
    release()

    def read() -> PackedTensor:
        packed, again = system.read(layer, arrays())
        if (packed.format, packed.rows, packed.cols) != (fmt, rows, cols) or not _same(again, permutation):
            raise FormatError(f"{layer}: read as {packed.format} after {fmt}; its file has changed meanwhile")
        return packed

    def identity() -> dict[str, Any]:
        return {"arrays": [tensor.identity() for tensor in tensors.values()]}

    files = " and ".join(sorted({str(tensor.file.path) for tensor in tensors.values()}))
    codes = StoredCodes(f"{files} ({layer}: {', '.join(tensors)})", fmt, rows, cols, read, permutation=permutation)
    return CodesInFile(f"{layer}.weight", (rows, cols), codes, identity, release)


def _examined(layer: str, arrays: Mapping[str, Array], system: System) -> tuple[Format, int, int, Order | None]:
    """Format, rows, columns and permutation of a layer; the codes themselves are dropped."""
    if system.probe is None:
        packed, permutation = system.read(layer, arrays)
        return packed.format, packed.rows, packed.cols, permutation
    packed, permutation = system.read(layer, system.probe(arrays))
    return packed.format, arrays["scales"].shape[1] if "scales" in arrays else packed.rows, packed.cols, permutation


def _same(one: Order | None, other: Order | None) -> bool:
    return other is None if one is None else other is not None and np.array_equal(one, other)


__all__ = ["SYSTEMS", "FolderWeights", "from_checkpoint"]
