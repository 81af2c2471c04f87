"""`qc convert`: converts quantised files to other formats and other systems' layouts, one tensor at a time.

    convert("model.gguf", "out.gguf", to="q8_0")                       a GGUF file, codes in another format
    convert("model.gguf", "folder", layout="gptq", to="int4:group=32")  a folder that GPTQ's loaders read
    convert("awq-folder", "folder", layout="compressed-tensors")        the same codes in another packing
    convert("folder", "out.gguf", quant="q4_K_M")                       a folder with its tokenizer

Conversions without loss move the codes (formats/transcode.py); conversions with loss must be allowed.  The result gets
its name when it is completely on the disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from qcompiler.config import resolve_format
from qcompiler.errors import ArgumentError, FormatError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign import awq, bitsandbytes, compressed_tensors, gptq
from qcompiler.formats.foreign.arrays import Array
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.formats.integers import IntegerFormat
from qcompiler.formats.transcode import Loss, loss_of, require, transcode
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint, Order
from qcompiler.frontends.checkpoints.checkpoint_folder import from_checkpoint
from qcompiler.frontends.checkpoints.folder_to_gguf import folder_to_gguf, require_folder
from qcompiler.frontends.checkpoints.gguf_files import GgufTensor, NewTensor, read_gguf, write_gguf
from qcompiler.frontends.checkpoints.gguf_models import from_gguf
from qcompiler.frontends.checkpoints.program_codes import NO_CODES, ProgramCodes
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import InFile
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.files import replacing_folder
from qcompiler.runtime.progress import Progress
from qcompiler.units import counted

LAYOUTS = ("gguf", "gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes")

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """One tensor: its old format ("float32" for plain values), its new one, and the loss."""

    name: str
    before: str
    after: str
    loss: Loss


@dataclass
class Conversion:
    """The outcome of `convert`, tensor by tensor."""

    path: Path
    tensors: list[Converted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What `program=` did not bring: tensors of the program that the file holds otherwise, and why."""

    @property
    def lossy(self) -> list[Converted]:
        return [each for each in self.tensors if each.loss]

    def __str__(self) -> str:
        moved = sum(1 for each in self.tensors if each.before != each.after and not each.loss)
        kept = len(self.tensors) - moved - len(self.lossy)
        same = counted(kept, "tensor as it was", "tensors as they were")
        text = f"{self.path}: {same}, {moved} in another format without loss"
        if self.lossy:
            worst = max(self.lossy, key=lambda each: each.loss.relative)
            text += f", {len(self.lossy)} with a loss, the most in '{worst.name}': {worst.loss}"
        return "\n".join([text, *self.notes])


def convert(
    source: str | Path, target: str | Path, *, to: str | None = None, layout: str | None = None, lossy: bool = False,
    force: bool = False, quant: str | None = None, program: Any = None,
) -> Conversion:  # fmt: skip
    """Converts a GGUF file or a folder with a checkpoint.

    `to` is the format of the result ("q8_0", "int4:group=128"); without it each weight keeps its own, in the layout's
    packing.  `layout` is "gguf" (the default if `target` ends in .gguf; the keys of a GGUF file are copied, or made
    from the configuration and the tokenizer of a folder) or a system's folder: "gptq", "gptq_v2", "awq",
    "compressed-tensors", "bitsandbytes".  In folders, linears are quantised, and other tensors are written as plain
    values of one dtype: the model's if it holds all of them exactly, else fp32, as for tensors that the source has as
    codes.

    `quant` is for a folder that becomes a GGUF file: a mixture ("q4_K_M"), which chooses a format for each tensor as
    llama.cpp's quantiser does, or one format for all matrices.  It allows the loss.

    `program` is a program that was compiled from the folder, or a language model: its linears that are quantised are
    written with the program's codes, such as those that `algorithm="gptq"` chose, in place of the folder's values.  A
    GGUF file gets the codes of embedding and head, too, if it can hold their format; `quant` is then for what has no
    codes, and `to` is refused.  WeightsError for a program that is not of this folder, and for one whose weights were
    moved (plan/moved.py); FormatError for a linear in a format that a GGUF file does not hold.

    With `to`, all linears that the source has in floating point are encoded, too.  FormatError, saying how much is
    lost, for a tensor that would lose precision unless `lossy` allows it; WeightsError and ArgumentError if something
    cannot be read or written.  A failed conversion leaves nothing behind.

    An existing target is an ArgumentError unless `force` allows to replace it; a folder is replaced only if it holds a
    checkpoint (config.json and safetensors).  The old one stays until the new one is complete.
    """
    source, target = Path(source), Path(target)
    layout = layout or ("gguf" if target.suffix == ".gguf" else None)
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout={layout!r}: {target} is a folder; choose its layout: {', '.join(LAYOUTS[1:])}")
    wanted = None if to is None else resolve_format(to)
    if source.resolve() == target.resolve():
        raise ArgumentError(f"{source} would be converted onto itself; name another target")
    _check_target(target, layout, force)
    if quant is not None and not (layout == "gguf" and source.is_dir() and to is None):
        raise ArgumentError(
            "quant= (`--quant`) is for a folder that becomes a GGUF file, without to=; else name the format with to= "
            "(`--to`)"
        )
    if program is not None and not source.is_dir():
        raise ArgumentError(f"program= gives the codes of the folder it was compiled from, and {source} is a file")
    own = NO_CODES if program is None else ProgramCodes.of(program, source)
    if layout == "gguf" and source.is_dir():
        if program is not None and to is not None:
            raise ArgumentError(
                "with program= (`--program`) a GGUF file keeps the program's formats: leave to= (`--to`) out, or name "
                "one with quant= (`--quant`) for what the program has in floating point"
            )
        return _folder_to_gguf(source, target, quant or to, lossy or quant is not None, own)
    if layout == "gguf":
        return _to_gguf(source, target, wanted, lossy)
    checkpoint = from_checkpoint(source) if source.is_dir() else from_gguf(source)
    return _Folder(checkpoint, target, layout, wanted, lossy, own).write()


def _check_target(target: Path, layout: str, force: bool) -> None:
    """ArgumentError for a target that may not be written, before anything is read."""
    if layout == "gguf" and not target.parent.is_dir():
        raise ArgumentError(f"there is no folder '{target.parent}' to write {target.name} to: make it first")
    if not target.exists():
        return
    if target.is_dir() != (layout != "gguf"):
        raise ArgumentError(f"{target} is a {'folder' if target.is_dir() else 'file'}; name another target")
    if target.is_dir() and not any(target.iterdir()):
        return
    if not force:
        raise ArgumentError(f"{target} exists; name another target, or pass force=True (`--force`)")
    if target.is_dir() and not ((target / "config.json").is_file() and any(target.glob("*.safetensors"))):
        raise ArgumentError(f"{target} holds no checkpoint, and only checkpoints are replaced; name another target")


# --- to a GGUF file --------------------------------------------------------------------------------------------------


def _folder_to_gguf(source: Path, target: Path, quant: str | None, lossy: bool, own: ProgramCodes) -> Conversion:
    require_folder(source)
    done = Conversion(target)

    def told(name: str, before: str, after: str, loss: Loss) -> None:
        done.tensors.append(Converted(name, before, after, loss))

    made = folder_to_gguf(from_checkpoint(source), quant, lossy=lossy, told=told, own=own)
    done.notes += made.notes
    write_gguf(target, made.tensors, made.metadata)
    return done


def _to_gguf(source: Path, target: Path, to: Format | None, lossy: bool) -> Conversion:
    if to is not None and not isinstance(to, GgmlFormat):
        raise FormatError(f"GGUF files do not hold {to}; name one of their formats, such as q4_0 or q8_0")
    file, done = read_gguf(source), Conversion(target)
    tensors: dict[str, NewTensor] = {}
    for name, tensor in file.tensors.items():
        if to is None or not _converts(tensor):
            tensors[name] = NewTensor(tensor.shape, tensor.type, tensor.bytes)
            done.tensors.append(Converted(name, _text(tensor), _text(tensor), Loss()))
        else:
            to.check_shape(tensor.rows, tensor.cols)
            make = _gguf_maker(tensor, to, lossy, done)
            tensors[name] = NewTensor(tensor.shape, to.ggml_type, make)
    write_gguf(target, tensors, file.metadata)
    return done


def _converts(tensor: GgufTensor) -> bool:
    """Whether the tensor is converted: codes, and matrices of linears; float tables and routers are not."""
    if tensor.format is not None:
        return True
    return len(tensor.shape) > 1 and tensor.name.endswith(".weight") and not tensor.name.startswith(
        ("token_embd", "output")
    ) and "ffn_gate_inp" not in tensor.name  # fmt: skip


def _text(tensor: GgufTensor) -> str:
    return tensor.format.name if tensor.format is not None else tensor.array().dtype.name


def _gguf_maker(tensor: GgufTensor, to: Format, lossy: bool, done: Conversion) -> Callable[[], Any]:
    def make() -> Any:
        packed = _packed(tensor.packed() if tensor.format is not None else tensor.values(), tensor.name, to, lossy)
        done.tensors.append(Converted(tensor.name, _text(tensor), to.name, packed[1]))
        tensor.release()
        return packed[0].data

    return make


def _packed(given: PackedTensor | Array, name: str, to: Format, lossy: bool) -> tuple[PackedTensor, Loss]:
    """Codes or values in the format; FormatError names the tensor if precision would be lost."""
    if isinstance(given, PackedTensor):
        made, loss = transcode(given, to, encode=encode)
        require(loss, name, given, to, allowed=lossy)
        return made, loss
    values = np.asarray(given, np.float32).reshape(-1, given.shape[-1])
    made = encode(to, values)
    loss = loss_of(values, to.decode(made))
    if loss and not lossy:
        raise FormatError(
            f"'{name}' is floating point, and {to} holds it with a {loss}. Say lossy=True (`--lossy`) if that is wanted"
        )
    return made, loss


# --- to a folder -----------------------------------------------------------------------------------------------------

Writer = Callable[[PackedTensor, Order | None], Mapping[str, Array]]


@dataclass
class _Folder:
    """Writes a checkpoint as config.json and model.safetensors in one system's layout."""

    checkpoint: Checkpoint
    target: Path
    layout: str
    to: Format | None
    lossy: bool
    own: ProgramCodes
    """The codes of a program for the folder's values."""
    kinds: dict[Any, list[str]] = field(default_factory=dict)
    """The settings of the written layers, and their paths."""
    dtype: torch.dtype = torch.float32
    """The dtype of all plain values in the folder, and the compute type of its layers: two dtypes would not run."""

    def write(self) -> Conversion:
        done = Conversion(self.target)
        with replacing_folder(self.target, over=True) as work:
            with (work / "model.safetensors").open("wb") as file:
                self._write_tensors(file, done)
            described = self.checkpoint.config.to_dict()
            described["dtype"] = str(self.dtype).removeprefix("torch.")
            described["architectures"] = [type(self.checkpoint.module).__name__]
            described.pop("quantization_config", None)
            if self.kinds:
                described["quantization_config"] = _described(self.layout, self.kinds, self.dtype)
            (work / "config.json").write_text(json.dumps(described, indent=2, default=str))
            self._copy_others(work)
        return done

    def _write_tensors(self, file: BinaryIO, done: Conversion) -> None:
        items = list(self.checkpoint.weights.tensors.items())
        declared = {name: tuple(parameter.shape) for name, parameter in self.checkpoint.module.named_parameters()}
        for name, item in items:
            if item.shape != declared.get(name, item.shape):
                raise WeightsError(
                    f"{name!r} in {self.checkpoint.path} has the shape {list(item.shape)}, and the model of its "
                    f"configuration {list(declared[name])}"
                )
        self.own = self.own.for_model(self.checkpoint.module)
        linears = {name for name, module in self.checkpoint.module.named_modules() if isinstance(module, nn.Linear)}
        find_head = self.checkpoint.module.get_output_embeddings
        assert callable(find_head)  # a transformers model
        head = find_head()
        linears -= {name for name, module in self.checkpoint.module.named_modules() if module is head}
        plain = [item for name, item in items if not self._becomes(name, item, linears)]
        self.dtype = _one_dtype(self.checkpoint, plain)
        sizes = [4 * math.prod(item.shape) for _, item in items]  # as fp32
        writer = _Safetensors(file, 8 * len(items))
        with Progress(f"converting {self.checkpoint.path.name}", sum(sizes)) as progress:
            for (name, item), size in zip(items, sizes, strict=True):
                for part, array in self._arrays(name, item, linears, done):
                    writer.add(part, array)
                item.release()
                progress.step(size)
        writer.close()

    def _arrays(self, name: str, item: InFile, linears: set[str], done: Conversion) -> Iterator[tuple[str, Array]]:
        layer = name.rpartition(".")[0]
        codes = item.codes
        before = codes.format.name if codes is not None else str(item.dtype).removeprefix("torch.")
        self.own.check_plain(name, item)
        if not self._becomes(name, item, linears):
            if codes is not None and len(item.shape) != 2:
                raise WeightsError(f"'{name}' holds the codes of experts, which folders of {self.layout} do not have")
            plain = item.view()
            values = to_numpy(plain.to(self.dtype) if plain.is_floating_point() else plain)
            done.tensors.append(Converted(name, before, values.dtype.name, Loss()))
            yield name, values
            return
        if self.own.format_of(name) is not None:
            given: PackedTensor | Array = self.own.codes(name, item)
        else:
            given = codes.read() if codes is not None else to_numpy(item.view().float())
        order = codes.permutation if codes is not None else None
        wanted = self.to or _native(self.layout, given)
        packed, loss = _packed(given, name, wanted, self.lossy)
        done.tensors.append(Converted(name, before, packed.format.name, loss))
        self.kinds.setdefault(_setting(self.layout, packed, order), []).append(layer)
        try:
            arrays = _arrays_of(self.layout, packed, order, self.dtype)
        except FormatError as error:
            raise type(error)(f"'{name}' as {self.layout}: {error}") from error
        yield from ((f"{layer}.{suffix}", array) for suffix, array in arrays.items())

    def _becomes(self, name: str, item: InFile, linears: set[str]) -> bool:
        """Whether the tensor is written as codes."""
        layer, _, kind = name.rpartition(".")
        return (
            kind == "weight"
            and layer in linears
            and (item.codes is not None or self.to is not None or self.own.format_of(name) is not None)
        )

    def _copy_others(self, work: Path) -> None:
        """Copies the tokenizer and the generation settings of a folder."""
        if self.checkpoint.path.is_dir():
            for path in sorted(self.checkpoint.path.glob("*")):
                weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
                if path.is_file() and not weights and path.name != "config.json":
                    shutil.copyfile(path, work / path.name)


def _native(layout: str, given: Any) -> Format:
    """The format that GGUF's codes become in a folder; other formats stay."""
    assert isinstance(given, PackedTensor)
    fmt = given.format
    if layout != "bitsandbytes" and fmt.name == "q4_0":
        return resolve_format("int4:group=32")
    if layout != "bitsandbytes" and fmt.name == "q8_0":
        return resolve_format("int8:group=32,scale=fp16")
    return fmt


def _one_dtype(checkpoint: Checkpoint, plain: Sequence[InFile]) -> torch.dtype:
    """The model's dtype if it holds every plain value exactly, else fp32, which holds them all.

    The norms of an f16 GGUF are fp32, and an fp16 layer does not accept the result of an fp32 norm.
    """
    wanted: torch.dtype = next(p.dtype for p in checkpoint.module.parameters())
    for item in plain:
        if item.codes is not None:
            return torch.float32  # decoded values
        values = item.view()
        if values.is_floating_point() and values.dtype != wanted and not bool(
            (values.to(wanted).to(values.dtype) == values).all()
        ):  # fmt: skip
            return torch.float32
        item.release()
    return wanted


def _arrays_of(layout: str, packed: PackedTensor, order: Order | None, dtype: torch.dtype) -> Mapping[str, Array]:
    if layout in ("gptq", "gptq_v2"):
        return gptq.write(packed, version=1 if layout == "gptq" else 2, permutation=order)
    if layout == "compressed-tensors":
        kind = "pack-quantized" if isinstance(packed.format, IntegerFormat) else None
        return compressed_tensors.write(packed, kind=kind, permutation=order)  # type: ignore[arg-type]
    if order is not None:
        raise FormatError(f"columns are in another order (act-order), which {layout} cannot store")
    if layout == "awq":
        return awq.write(packed)
    compute = str(dtype).removeprefix("torch.")
    return bitsandbytes.write(packed, dtype=None if packed.format.name == "llm_int8" else compute)


# --- config.json -----------------------------------------------------------------------------------------------------


def _setting(layout: str, packed: PackedTensor, order: Order | None) -> tuple[Any, ...]:
    """The part of a layer that config.json describes; layers with the same setting share it."""
    fmt = packed.format
    if layout == "bitsandbytes":
        return (fmt.name, fmt.params.get("double_quant", False))
    if isinstance(fmt, IntegerFormat):
        return (fmt.bits, fmt.setting("group"), bool(fmt.setting("symmetric")), order is not None)
    return (fmt.name, *fmt.params.items())


def _described(layout: str, kinds: Mapping[tuple[Any, ...], list[str]], dtype: torch.dtype) -> dict[str, Any]:
    """quantization_config. FormatError if layers differ and the layout has one setting for all."""
    if layout == "compressed-tensors":
        groups = {f"group_{i}": _group(setting, layers) for i, (setting, layers) in enumerate(kinds.items())}
        kind = next(iter(groups.values()))["format"] if len({g["format"] for g in groups.values()}) == 1 else "mixed"
        return {"quant_method": layout, "format": kind, "config_groups": groups, "quantization_status": "compressed"}
    if layout == "bitsandbytes":
        eight = {setting[0] == "llm_int8" for setting in kinds}
        if len(kinds) > 1:
            raise FormatError(f"bitsandbytes has one setting for a model, and the layers have {list(kinds)}: name one")
        ((name, nested),) = kinds
        four = {
            "bnb_4bit_quant_type": name,
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        }
        return {"quant_method": layout, "load_in_4bit": not eight.pop(), **(four if name != "llm_int8" else {}),
                "load_in_8bit": name == "llm_int8"}  # fmt: skip
    odd = [kind[0] for kind in kinds if not isinstance(kind[0], int)]
    if odd:
        raise FormatError(f"{layout} holds integer formats, and layers are {odd[0]}: name one with to= (`--to`)")
    common = {(bits, group) for bits, group, _, _ in kinds}
    if len(common) > 1:
        raise FormatError(
            f"{layout} has one width and group for a model, and the layers have {sorted(map(str, common))}: name one "
            "with to= (`--to`)"
        )
    ((bits, group),) = common
    size = -1 if group == "row" else group
    symmetric = all(kind[2] for kind in kinds)
    if layout == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "zero_point": not symmetric, "version": "gemm"}
    return {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric,
        "desc_act": any(kind[3] for kind in kinds), "checkpoint_format": layout,
    }  # fmt: skip


def _group(setting: tuple[Any, ...], layers: list[str]) -> dict[str, Any]:
    """A config_group of compressed-tensors, for layers named one by one."""
    if isinstance(setting[0], int):
        bits, group, symmetric, ordered = setting
        weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        weights |= {"strategy": "channel"} if group == "row" else {"strategy": "group", "group_size": group}
        weights |= {"actorder": "group"} if ordered else {}
        return {"format": "pack-quantized", "targets": layers, "weights": weights}
    name, params = setting[0], dict(setting[1:])
    if name.startswith("fp8"):
        strategy = {"tensor": "tensor", "row": "channel", "block": "block"}[params["per"]]
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        return {"format": "float-quantized", "targets": layers, "weights": weights}
    kind = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}[name]
    size, bits = (16 if name == "nvfp4" else 32), (8 if name == "mxfp8" else 4)
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": "tensor_group" if name == "nvfp4"
               else "group", "group_size": size}  # fmt: skip
    return {"format": kind, "targets": layers, "weights": weights}


# --- safetensors, tensor by tensor -----------------------------------------------------------------------------------

_HEADER_PER_NAME = 512  # bytes; a name, its shape and offsets take a quarter of it


class _Safetensors:
    """A safetensors file whose tensors become known one by one: space for the header is reserved in front."""

    def __init__(self, file: BinaryIO, names: int) -> None:
        self._file, self._room = file, -(-_HEADER_PER_NAME * (names + 1) // 8) * 8
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        file.seek(8 + self._room)

    def add(self, name: str, array: Array) -> None:
        flat = np.ascontiguousarray(array)
        facts = {"dtype": _DTYPES[flat.dtype.name], "shape": list(array.shape)}
        self._header[name] = {**facts, "data_offsets": [self._end, self._end + flat.nbytes]}
        self._file.write(flat.reshape(-1).view(np.uint8).data)
        self._end += flat.nbytes

    def close(self) -> None:
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if len(header) > self._room:
            raise WeightsError(
                f"the names of {len(self._header)} tensors take {len(header)} bytes, and {self._room} fit"
            )
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())


__all__ = ["LAYOUTS", "Conversion", "Converted", "convert"]
