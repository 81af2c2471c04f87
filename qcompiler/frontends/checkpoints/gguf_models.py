"""`from_gguf`: the model that a GGUF file describes, with the file's own codes as its weights.

    llama.block_count, llama.attention.head_count, …      LlamaConfig; with llama.expert_count MixtralConfig
    blk.3.attn_q.weight           (q4_K)                  model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_gate_exps.weight    (experts, rows, cols)   model.layers.3.mlp.experts.gate_up_proj, with ffn_up_exps

gguf_architectures.py has names and configurations.  Some files hold rows in another order than transformers' model:
llama.cpp rotates pairs of neighbours, so that row (head, i, half) of q and k in files of arch llama is row (head,
half, i) here.  In every format of GGUF a row consists of whole blocks, so codes move and do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qcompiler.errors import WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint, CodesInFile, Order, ValuesInFile, gathered
from qcompiler.frontends.checkpoints.described_model import TensorTotals, hollow, model_class
from qcompiler.frontends.checkpoints.gguf_architectures import (
    ARCHITECTURES,
    ROPE_FACTORS,
    Architecture,
    Keys,
    architecture_of,
    configured,
    divisors,
    required,
)
from qcompiler.frontends.checkpoints.gguf_files import FLOATS, GgufFile, GgufTensor, type_name
from qcompiler.frontends.torch.common.empty_weights import empty_weights
from qcompiler.frontends.weights.weight_source import EXPERTS_TRANSPOSED, FileWeights, InFile, StoredCodes

_TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of plain values of weights, by GGUF's number of the type."""


def from_gguf(path: str | Path, *, dtype: torch.dtype | None = None) -> Checkpoint:
    """The model of a GGUF file: Llama, Mistral and Mixtral (arch llama), Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Gemma 1 to
    3, Phi-3, GPT-2, GPT-NeoX, OLMo 2, StarCoder2, gpt-oss.

    Quantised tensors keep their codes, byte for byte; they are mapped, and never decoded as a whole.  `dtype` is the
    model's compute type, to which plain tensors are converted: by default bf16 or fp16 if most elements of the file's
    matrices have that type, else fp32.

    WeightsError for a damaged file (`GgufFile`), an architecture or a key that is not known, and for tensors that are
    missing, unexpected, or of a wrong shape.
    """
    file = GgufFile(path)
    name = required(file, "general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise WeightsError(
            f"{file.path} is of the architecture {shown(name)}; there are: {', '.join(ARCHITECTURES)}. Other models: "
            "build the module yourself, and give its weights as safetensors (docs/large-models.md)"
        )
    keys = Keys(file, name)
    architecture = architecture_of(keys)
    held = TensorTotals.of((tensor.shape, tensor.nbytes) for tensor in file.tensors.values())
    config = configured(architecture, keys, held)
    model = model_class(architecture.model, file.path)
    module = hollow(model, config, dtype if dtype is not None else _most(file), file.path, held)
    if architecture.transposed:
        _use_linears(module)
    _scale_frequencies(file, module)
    tensors = _Names(file, config, architecture).tensors(module)
    return Checkpoint(module, GgufWeights(file, tensors), config, file.path)


class GgufWeights(FileWeights):
    """The tensors of a GGUF file under the names of a transformers model."""

    def __init__(self, file: GgufFile, tensors: Mapping[str, InFile]) -> None:
        super().__init__(file.path, tensors)
        self.file = file


# --- the model --------------------------------------------------------------------------------------------------------


def _use_linears(module: nn.Module) -> None:
    """Puts a Linear, (out, in), where the model has transformers' Conv1D, (in, out): blocks of codes lie along `in`."""
    for name, old in list(module.named_modules()):
        if type(old).__name__ == "Conv1D":
            weight: Any = old.weight
            columns, rows = weight.shape
            with empty_weights():
                module.set_submodule(name, nn.Linear(columns, rows, dtype=weight.dtype).eval())


def _scale_frequencies(file: GgufFile, module: nn.Module) -> None:
    """Divides the rotary embedding's frequencies by the file's factors, if it has them."""
    tensor = file.tensors.get(ROPE_FACTORS)
    rotary: Any = getattr(getattr(module, "model", None), "rotary_emb", None)
    if tensor is None or not hasattr(rotary, "inv_freq"):  # `_Names` refuses a tensor that nothing reads
        return
    if tensor.shape != tuple(rotary.inv_freq.shape):
        raise WeightsError(
            f"'{ROPE_FACTORS}' in {file.path} has the shape {list(tensor.shape)}, the model {rotary.inv_freq.numel()} "
            "frequencies"
        )
    rotary.inv_freq = rotary.inv_freq / torch.from_numpy(divisors(file, ROPE_FACTORS))
    rotary.original_inv_freq = rotary.inv_freq.clone()


def _most(file: GgufFile) -> torch.dtype:
    """bf16 or fp16 if most elements of the matrices are; else fp32."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            dtype = _TORCH.get(tensor.type, torch.float32)
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


# --- the tensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Maps parameters of the model to tensors of the file, with the order of their rows."""

    file: GgufFile
    config: Any
    architecture: Architecture

    def tensors(self, module: nn.Module) -> dict[str, InFile]:
        """By parameter. WeightsError for tensors that no parameter reads, and for parameters without tensors."""
        found: dict[str, InFile] = {}
        used = set(self.architecture.beside)
        for name, parameter in module.named_parameters():  # tied ones once
            parts = self.architecture.names(name)
            used.update(parts)
            missing = [part for part in parts if part not in self.file.tensors]
            if missing:
                raise WeightsError(f"{self.file.path} lacks '{missing[0]}', the parameter '{name}' of the model")
            tensors = [self.file.tensors[part] for part in parts]
            if self.architecture.alternating and ".experts." in name:
                found[name] = _alternating(name, tuple(parameter.shape), tensors)
                continue
            _check_shape(self.file, name, tuple(parameter.shape), tensors)
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                orders = self._expert_orders(tensors)
            else:
                orders = [self.architecture.rows(name, tensors[0].shape[0], self.config)]
            found[name] = _item(name, tuple(parameter.shape), tensors, orders, self.architecture.offset(name))
        extra = sorted(set(self.file.tensors) - used)
        if extra:
            raise WeightsError(
                f"{self.file.path} holds {len(extra)} tensors that {self.architecture.model} does not have: "
                + ", ".join(map(shown, extra[:10]))
            )
        return found

    def _expert_orders(self, tensors: list[GgufTensor]) -> list[Order | None]:
        """The orders that put gate and up of each expert one after the other."""
        if len(tensors) == 1:
            return [None]
        experts, rows = tensors[0].shape[:2]
        places = np.arange(experts * 2 * rows).reshape(experts, 2, rows)
        return [np.ascontiguousarray(places[:, part]).reshape(-1) for part in range(2)]


def _alternating(name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> InFile:
    """An expert parameter of gpt-oss: (experts, in, out), or a bias (experts, out).

    The file has (experts, out, in); gate and up are tensors of their own there, and every other output here.
    """
    turns = len(tensors)
    experts, outputs, inputs = shape[0], shape[-1], shape[1:-1]
    expected = (experts, outputs // turns, *inputs)
    if any(tensor.shape != expected for tensor in tensors):
        raise WeightsError(
            f"{' and '.join(f'{t.name!r}' for t in tensors)} in {tensors[0].file.path} has the shape "
            f"{' and '.join(str(list(t.shape)) for t in tensors)}, and not {list(expected)}, as '{name}' of the model"
        )
    places = np.arange(experts * outputs).reshape(experts, outputs // turns, turns)
    orders: list[Order | None] = [None]
    if turns > 1:
        orders = [np.ascontiguousarray(places[:, :, part]).reshape(-1) for part in range(turns)]
    rows = (experts * outputs, *(inputs or (1,)))
    item = _item(name, rows, tensors, orders, 0.0)
    if isinstance(item, CodesInFile):
        return replace(item, shape=shape, codes=replace(item.codes, arrangement=EXPERTS_TRANSPOSED))

    def make() -> torch.Tensor:
        return item.view().reshape(experts, outputs, -1).transpose(1, 2).contiguous()

    return replace(item, shape=shape, make=make)


def _check_shape(file: GgufFile, name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> None:
    """WeightsError unless the parts, concatenated along the last but one dimension, have the model's shape."""
    first = tensors[0].shape
    if len(first) == 1 and shape == (1, *first):  # llama.cpp drops the row of a matrix that has one
        return
    fits = all(len(t.shape) == len(shape) and t.shape == first for t in tensors)
    joined = first if len(tensors) == 1 or not fits else (*first[:-2], sum(t.shape[-2] for t in tensors), first[-1])
    if not fits or joined != shape:
        raise WeightsError(
            f"{' and '.join(f'{t.name!r}' for t in tensors)} in {file.path} has the shape "
            f"{' and '.join(str(list(t.shape)) for t in tensors)}, and '{name}' of the model {list(shape)}"
        )


def _item(
    name: str, shape: tuple[int, ...], tensors: list[GgufTensor], orders: list[Order | None], offset: float
) -> CodesInFile | ValuesInFile:
    """A parameter: codes, or plain values, to which `offset` is added."""
    kinds = {tensor.type for tensor in tensors}
    if len(kinds) > 1:
        raise WeightsError(
            f"'{name}' of the model is {' and '.join(t.name for t in tensors)} in {tensors[0].file.path}, of different "
            f"types ({', '.join(type_name(k) for k in sorted(kinds))}); quantise both to one type"
        )

    def identity() -> dict[str, Any]:
        return {"parts": [tensor.identity() for tensor in tensors]}

    def release() -> None:
        for tensor in tensors:
            tensor.release()

    fmt = tensors[0].format
    if fmt is not None and offset:
        raise WeightsError(f"'{tensors[0].name}' in {tensors[0].file.path} is {fmt}; norms are plain values in a file")
    if fmt is not None:
        codes = _codes(fmt, math.prod(shape[:-1]), shape[-1], tensors, orders)
        return CodesInFile(name, shape, codes, identity, release)
    number = tensors[0].type
    if number not in _TORCH:
        raise WeightsError(
            f"'{tensors[0].name}' in {tensors[0].file.path} is {FLOATS[number].name}, which no weight is"
        )
    cols = shape[-1] if len(shape) > 1 else 1
    return ValuesInFile(name, shape, _TORCH[number], _values(number, cols, tensors, orders, offset), identity, release)


def _codes(fmt: Format, rows: int, cols: int, tensors: list[GgufTensor], orders: list[Order | None]) -> StoredCodes:
    where = f"{tensors[0].file.path} ({' and '.join(tensor.name for tensor in tensors)})"
    if len(tensors) == 1 and orders[0] is None:
        return StoredCodes(where, fmt, rows, cols, tensors[0].packed, mapped=True)

    def read() -> PackedTensor:
        return gathered(fmt, cols, [(t.packed(), order) for t, order in zip(tensors, orders, strict=True)])

    return StoredCodes(where, fmt, rows, cols, read)


def _values(
    number: int, cols: int, tensors: list[GgufTensor], orders: list[Order | None], offset: float
) -> Callable[[], torch.Tensor]:
    """Plain values: a view of the file, or a copy with rows in the model's order or with `offset` added."""

    def rows_of(tensor: GgufTensor) -> torch.Tensor:
        bytes_ = torch.from_numpy(tensor.bytes()).view(_TORCH[number])
        return bytes_.reshape(-1, cols)

    def make() -> torch.Tensor:
        if len(tensors) == 1 and orders[0] is None:
            return rows_of(tensors[0]) + offset if offset else rows_of(tensors[0])
        count = sum(math.prod(tensor.shape) for tensor in tensors) // cols
        made = torch.empty(count, cols, dtype=_TORCH[number])
        for tensor, order in zip(tensors, orders, strict=True):
            made[slice(None) if order is None else torch.from_numpy(order)] = rows_of(tensor)
        return made + offset if offset else made

    return make


__all__ = ["GgufWeights", "from_gguf"]
