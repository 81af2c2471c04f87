"""`from_checkpoint`: a folder of transformers (config.json, safetensors) whose weights are quantised already.

    quant_method         settings                            arrays of a layer
    bitsandbytes                                             weight, weight.quant_state.…, …; or weight, SCB
    gptq                 bits, group_size, checkpoint_format qweight, qzeros, scales, g_idx
    awq                  bits, group_size, zero_point        qweight, qzeros, scales
    compressed-tensors   config_groups, format               weight_packed, weight_scale, …
    fp8                  weight_block_size                   weight, weight_scale_inv
    torchao                                                  _weight_qdata, _weight_scale, …; and the files' metadata
    mxfp4 (gpt-oss)                                          gate_up_proj_blocks, gate_up_proj_scales, …

The arrays of one layer become one packed tensor with unchanged codes.  The files decide which layers are quantised: a
layer with a plain `weight` stays in floating point.  Activations are in floating point, even if the checkpoint was made
for quantised ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from qcompiler.errors import FormatError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign import awq, bitsandbytes, compressed_tensors, floats, gptq, torchao
from qcompiler.formats.foreign.arrays import Array, Arrays
from qcompiler.formats.foreign.json_text import json_object, read_json_object, shown
from qcompiler.formats.foreign.patterns import PatternError, compiled, matches
from qcompiler.frontends.checkpoints import mxfp4_experts
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint, CodesInFile, Order, ValuesInFile
from qcompiler.frontends.checkpoints.described_model import (
    TensorTotals,
    config_class,
    configuration,
    hollow,
    model_class,
)
from qcompiler.frontends.checkpoints.published_names import under_the_models_names
from qcompiler.frontends.weights.safetensors_files import FileTensor, ShardFile, read_tensors
from qcompiler.frontends.weights.weight_source import FileWeights, InFile, StoredCodes

Layer = tuple[PackedTensor, Order | None]
Read = Callable[[str, Mapping[str, Array]], Layer]

IGNORED = ("*.rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias")
"""Names of tensors that models once saved and now compute."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
MAX_GROUP = 1 << 24

_PROBE = 32
"""The number of a layer's columns that determines its format: codes of any width fill words."""


def from_checkpoint(folder: str | Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """The model of a folder with config.json and safetensors, quantised by one of the systems named above.

    Stored codes are kept unchanged, and one layer is processed at a time.  A folder without quantization_config is
    read, too.  If a file sorted the columns of a layer by group (act-order), the program takes the layer's input in
    that order.  `dtype` is the model's compute type, by default that of config.json.

    WeightsError for a folder, a method or a setting that is not read; FormatError names the layer and the array.
    """
    folder = Path(folder)
    where = folder / "config.json"
    described = read_json_object(where, WeightsError)
    method = described.get("quantization_config") or {}
    if not isinstance(method, dict):
        raise WeightsError(f"{where}: quantization_config is {shown(method)}, no JSON object")
    _refuse_pickles(folder, method)
    names = described.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise WeightsError(f"{where} names the architectures {shown(names)}; transformers has to know one")
    model, kind = model_class(names[0], where), config_class(described.get("model_type"), where)
    tensors = read_tensors(folder, codes=bool(method))
    system = _system(folder, method, tensors)
    held = TensorTotals.of((tensor.shape, tensor.nbytes) for tensor in tensors.values())
    # The model is built in floating point; the codes carry the quantisation.
    plain = {key: value for key, value in described.items() if key != "quantization_config"}
    items = _items(tensors, system)
    config = configuration(kind, plain, where, held)
    module = hollow(model, config, dtype or _dtype(getattr(config, "dtype", None), where), where, held)
    return Checkpoint(module, FolderWeights(folder, under_the_models_names(module, items)), config, folder)


def _dtype(stored: Any, where: Path) -> torch.dtype:
    """The compute type in a configuration; fp32 if it has none."""
    found = _DTYPES.get(stored) if isinstance(stored, str) else stored
    if found is None and stored is None:
        return torch.float32
    if found not in _DTYPES.values():
        raise WeightsError(f"{where} says dtype is {shown(stored)}; there are: {', '.join(_DTYPES)}. Give dtype=")
    assert isinstance(found, torch.dtype)
    return found


class FolderWeights(FileWeights):
    """The tensors of a folder's safetensors by the names of the model."""

    def __init__(self, folder: Path, items: Mapping[str, InFile]) -> None:
        super().__init__(folder, items, ignore=IGNORED)


# --- systems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """How one system's layers are found and read.

    `marks` are name endings that only a quantised layer has, `arrays` all that it may have; `read` takes the layer's
    path and its arrays.  `probe` cuts arrays down to a part that has the same format, or is None if reading is cheap.
    """

    marks: tuple[str, ...]
    arrays: tuple[str, ...]
    read: Read
    probe: Callable[[Mapping[str, Array]], Mapping[str, Array]] | None = None
    decode: Callable[[str, Mapping[str, Array]], Array | None] | None = None
    """The values in fp32 of a layer that has no format here; None for all other layers."""
    together: Callable[[Mapping[str, FileTensor]], tuple[dict[str, InFile], set[str]]] | None = None
    """For a system whose arrays are not named like a layer's: the parameters, and the tensors that they consist of."""


def _refuse_pickles(folder: Path, method: Mapping[str, Any]) -> None:
    """WeightsError for a folder whose weights are pickles: pickles are programs, and are never read."""
    pickles = sorted(path.name for path in folder.glob("*.bin") if path.name != "training_args.bin")
    if not pickles or any(folder.glob("*.safetensors")):
        return
    how = "model.save_pretrained(folder)"
    if method.get("quant_method") == "torchao":
        how += " with torchao 0.15 or later, which writes safetensors"
    raise WeightsError(
        f"{folder} holds pickles ({', '.join(pickles[:3])}), which are programs and not read. Where you trust them, "
        f"load the model in transformers and save it again: {how}"
    )


def _system(folder: Path, method: Mapping[str, Any], tensors: Mapping[str, FileTensor]) -> System | None:
    """WeightsError for an unsupported method."""
    if not method:
        return None
    name = method.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in method else "")
    if not isinstance(name, str) or name not in SYSTEMS:
        raise WeightsError(
            f"{folder} is quantised by {shown(name or 'an unnamed method')}; there are: {', '.join(SYSTEMS)}. Import "
            "the model's floating-point checkpoint instead"
        )
    notes = {key: value for file in _files(tensors) for key, value in file.notes.items()}
    return SYSTEMS[name](_Settings(folder, name, method, notes))


def _files(tensors: Mapping[str, FileTensor]) -> list[ShardFile]:
    return list({id(tensor.file): tensor.file for tensor in tensors.values()}.values())


@dataclass(frozen=True)
class _Settings:
    """A quantization_config."""

    folder: Path
    method: str
    found: Mapping[str, Any]
    notes: Mapping[str, Any]
    """The metadata of all files."""

    def integer(self, key: str, low: int, high: int) -> int:
        return self.checked(self.found.get(key), key, low, high)

    def checked(self, value: Any, key: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.error(f"{key} is {shown(value)}, no integer from {low} to {high}")
        return value

    def bits(self, key: str) -> int:
        return self.integer(key, 1, 16)

    def group(self, key: str) -> int:
        """Columns that share a scale; -1: all of a row."""
        return self.integer(key, -1, MAX_GROUP)

    def text(self, found: Mapping[str, Any], key: str) -> str | None:
        value = found.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key} is {shown(value)}, no text")
        return value

    def flag(self, found: Mapping[str, Any], key: str) -> bool | None:
        value = found.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}, neither true nor false")
        return value

    def refuse(self, key: str, *fine: Any) -> None:
        if self.found.get(key) not in (None, *fine):
            raise self.error(f"{key} is {shown(self.found[key])}, which is not read")

    def error(self, message: str) -> WeightsError:
        return WeightsError(f"the quantization_config of {self.folder} ({self.method}): {message}")


def _gptq(settings: _Settings) -> System:
    bits, group = settings.bits("bits"), settings.group("group_size")
    settings.refuse("dynamic", {})
    kind = settings.text(settings.found, "checkpoint_format") or settings.text(settings.found, "format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise settings.error(f"checkpoint_format is {shown(kind)}; there are gptq and gptq_v2")
    version: Literal[1, 2] = 1 if kind == "gptq" else 2
    symmetric, act_order = settings.flag(settings.found, "sym"), settings.flag(settings.found, "desc_act")

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return gptq.read(
            arrays, bits=bits, group=group, version=version, symmetric=symmetric, act_order=act_order, layer=layer
        )

    def probe(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {
            name: a if a.ndim != 2 else a[:, : -(-bits * _PROBE // 32) if name == "qzeros" else _PROBE]
            for name, a in arrays.items()
        }

    return System(("qweight",), gptq.NAMES, read, probe if symmetric is not None else None)


def _awq(settings: _Settings) -> System:
    bits = settings.bits("bits" if "bits" in settings.found else "w_bit")
    group = settings.group("group_size" if "group_size" in settings.found else "q_group_size")
    settings.refuse("version", "gemm", "GEMM")
    points = settings.flag(settings.found, "zero_point")
    symmetric = None if points is None else not points

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return awq.read(arrays, group=group, bits=bits, symmetric=symmetric, layer=layer), None

    def probe(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {
            name: a if a.ndim != 2 else a[:, : _PROBE if name == "scales" else _PROBE // 8]
            for name, a in arrays.items()
        }

    return System(("qweight",), awq.NAMES, read, probe if symmetric is not None else None)


def _bitsandbytes(settings: _Settings) -> System:
    del settings  # each layer describes itself

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


def _torchao(settings: _Settings) -> System:
    """Reads torchao's layers; the metadata describes each weight under its name."""

    def described(layer: str) -> Mapping[str, Any]:
        text = settings.notes.get(f"{layer}.weight")
        if not isinstance(text, str):
            raise settings.error(f"the files' metadata says nothing of {shown(f'{layer}.weight')}")
        return json_object(text.encode(), f"the metadata of {layer}.weight in {settings.folder}", WeightsError)

    def bare(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {name.removeprefix(torchao.PREFIX): array for name, array in arrays.items()}

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        return torchao.read(bare(arrays), described(layer), layer), None

    def decode(layer: str, arrays: Mapping[str, Array]) -> Array | None:
        found, about = bare(arrays), described(layer)
        return torchao.values(found, about, layer) if torchao.is_decoded(found, about, layer) else None

    names = tuple(torchao.PREFIX + name for name in torchao.NAMES)
    return System((torchao.PREFIX + "qdata",), names, read, decode=decode)


def _mxfp4(settings: _Settings) -> System:
    del settings  # the arrays' names tell what is quantised

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        raise AssertionError("no tensor has a mark of this system")

    return System((), (), read, together=mxfp4_experts.experts)


# --- compressed-tensors ----------------------------------------------------------------------------------------------

_BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")


@dataclass(frozen=True)
class _Group:
    """A checked config_group: the layers it names, and how their weights are stored."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    kind: compressed_tensors.Kind
    bits: int
    group: compressed_tensors.Shared | None
    symmetric: bool | None

    def has(self, layer: str) -> bool:
        return layer in self.names or any(matches(pattern, layer) for pattern in self.patterns)


def _compressed_tensors(settings: _Settings) -> System:
    found = settings.found.get("config_groups")
    if not isinstance(found, dict) or not found or not all(isinstance(g, dict) for g in found.values()):
        raise settings.error("there are no config_groups")
    for key in ("sparsity_config", "transform_config"):
        settings.refuse(key, {}, {"format": "dense"})
    groups = [_group(settings, each) for each in found.values()]

    def read(layer: str, arrays: Mapping[str, Array]) -> Layer:
        group = _group_of(settings, layer, groups)
        return compressed_tensors.read(
            arrays, kind=group.kind, bits=group.bits, group=group.group, symmetric=group.symmetric, layer=layer
        )

    names = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
             "weight_global_scale", *_BESIDE)  # fmt: skip
    return System(("weight_scale",), names, read)


def _group(settings: _Settings, found: Mapping[str, Any]) -> _Group:
    weights = found.get("weights") or {}
    targets = found.get("targets") or ["Linear"]
    if not isinstance(weights, dict) or not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise settings.error(f"a config_group has the weights {shown(weights)} and the targets {shown(targets)}")
    kind = settings.text(found, "format") or settings.text(settings.found, "format")
    if kind not in compressed_tensors.KINDS:
        raise settings.error(f"the format of a config_group is {shown(kind)}; there are: {compressed_tensors.KINDS}")
    bits = weights.get("num_bits")
    return _Group(
        frozenset(target for target in targets if not target.startswith("re:")),
        tuple(_pattern(settings, target[3:]) for target in targets if target.startswith("re:")),
        kind,
        8 if bits is None else settings.checked(bits, "num_bits", 1, 16),
        _shared(settings, weights),
        settings.flag(weights, "symmetric"),
    )


def _pattern(settings: _Settings, text: str) -> re.Pattern[str]:
    try:
        return compiled(text)
    except PatternError as error:
        raise settings.error(f"the target {shown('re:' + text)}: {error}. Name the layers instead") from error


def _group_of(settings: _Settings, layer: str, groups: Sequence[_Group]) -> _Group:
    """The group that names the layer, by path or `re:` pattern; else the first for all linears."""
    for group in groups:
        if group.has(layer):
            return group
    for group in groups:
        if "Linear" in group.names:
            return group
    raise settings.error(f"no config_group has {shown(layer)} among its targets")


def _shared(settings: _Settings, weights: Mapping[str, Any]) -> compressed_tensors.Shared | None:
    """The elements that share a scale, in our terms."""
    strategy = settings.text(weights, "strategy")
    if strategy in ("group", "tensor_group"):
        size = weights.get("group_size")
        if size is None or strategy == "tensor_group":
            return None
        return settings.checked(size, "group_size", 1, MAX_GROUP)
    known: dict[Any, compressed_tensors.Shared | None] = {
        None: None, "channel": "row", "tensor": "tensor", "block": "block"
    }  # fmt: skip
    if strategy not in known:
        raise settings.error(
            f"weights have the strategy {shown(strategy)}; there are: group, {', '.join(filter(None, known))}"
        )
    return known[strategy]


SYSTEMS: dict[str, Callable[[_Settings], System]] = {
    "bitsandbytes": _bitsandbytes, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8,
    "torchao": _torchao, "mxfp4": _mxfp4,
}  # fmt: skip


# --- layers ----------------------------------------------------------------------------------------------------------


def _items(tensors: Mapping[str, FileTensor], system: System | None) -> dict[str, InFile]:
    """Layers under the names of their weights, and all other tensors unchanged."""
    found: dict[str, InFile] = {}
    taken: set[str] = set()
    if system is not None and system.together is not None:
        found, taken = system.together(tensors)
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
    """The codes of a layer. A part of the layer determines the format; FormatError names what does not fit."""

    def arrays() -> dict[str, Array]:
        return {name: tensor.array() for name, tensor in tensors.items() if name not in _BESIDE}

    def release() -> None:
        for tensor in tensors.values():
            tensor.release()

    if system.decode is not None and (first := system.decode(layer, arrays())) is not None:
        shape = first.shape
        del first
        release()
        return _decoded(layer, shape, arrays, system.decode, tensors, release)
    fmt, rows, cols, permutation = _examined(layer, arrays(), system)
    release()

    def read() -> PackedTensor:
        packed, again = system.read(layer, arrays())
        if (packed.format, packed.rows, packed.cols) != (fmt, rows, cols) or not _same(again, permutation):
            raise FormatError(
                f"{layer}: its arrays do not fit one another: {packed.rows} x {packed.cols} of {packed.format}, and "
                f"{rows} x {cols} of {fmt} by its scales"
            )
        return packed

    def identity() -> dict[str, Any]:
        return {"arrays": [tensor.identity() for tensor in tensors.values()]}

    files = " and ".join(sorted({str(tensor.file.path) for tensor in tensors.values()}))
    codes = StoredCodes(f"{files} ({layer}: {', '.join(tensors)})", fmt, rows, cols, read, permutation=permutation)
    return CodesInFile(f"{layer}.weight", (rows, cols), codes, identity, release)


def _decoded(
    layer: str,
    shape: tuple[int, ...],
    arrays: Callable[[], dict[str, Array]],
    decode: Callable[[str, Mapping[str, Array]], Array | None],
    tensors: Mapping[str, FileTensor],
    release: Callable[[], None],
) -> InFile:
    """A layer as plain values in fp32, decoded at each request."""

    def make() -> torch.Tensor:
        values = decode(layer, arrays())
        if values is None or values.shape != shape:
            raise FormatError(f"{layer}: its arrays have changed since they were looked at")
        return torch.from_numpy(values)

    def identity() -> dict[str, Any]:
        return {"arrays": [tensor.identity() for tensor in tensors.values()], "decoded": True}

    return ValuesInFile(f"{layer}.weight", shape, torch.float32, make, identity, release)


def _examined(layer: str, arrays: Mapping[str, Array], system: System) -> tuple[Format, int, int, Order | None]:
    """Format, rows, columns and permutation of a layer; the codes themselves are dropped."""
    if system.probe is None:
        packed, permutation = system.read(layer, arrays)
        return packed.format, packed.rows, packed.cols, permutation
    packed, permutation = system.read(layer, system.probe(arrays))  # this checks that there are two dimensions
    return packed.format, arrays["scales"].shape[1], packed.cols, permutation


def _same(one: Order | None, other: Order | None) -> bool:
    return other is None if one is None else other is not None and np.array_equal(one, other)


__all__ = ["SYSTEMS", "FolderWeights", "from_checkpoint"]
