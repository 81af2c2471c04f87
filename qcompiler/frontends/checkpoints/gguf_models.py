"""`from_gguf`: the model that a GGUF file describes, with the file's own codes as its weights.

    llama.block_count, llama.attention.head_count, …      LlamaConfig; with llama.expert_count MixtralConfig
    blk.3.attn_q.weight           (q4_K)                  model.layers.3.self_attn.q_proj.weight
    blk.3.ffn_gate_exps.weight    (experts, rows, cols)   model.layers.3.mlp.experts.gate_up_proj, with ffn_up_exps

gguf_architectures has names and configurations.  Some files hold rows in another order than transformers' model:
llama.cpp rotates pairs of neighbours, so that row (head, i, half) of q and k in files of arch llama is row (head,
half, i) here.  In every format of GGUF a row consists of whole blocks, so codes move and do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qcompiler.errors import WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign.json_text import shown
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint, CodesInFile, Order, ValuesInFile, gathered, selected
from qcompiler.frontends.checkpoints.described_model import TensorTotals, hollow, model_class
from qcompiler.frontends.checkpoints.gguf_architectures import (
    ARCHITECTURES,
    CONVOLUTION,
    INDEX,
    JOINED,
    LATENT,
    LOGARITHM,
    NOT_READ,
    ROPE_FACTORS,
    TIME_STEP,
    Architecture,
    Keys,
    architecture_of,
    configured,
    divisors,
    required,
    rows_of_key_heads,
)
from qcompiler.frontends.checkpoints.gguf_files import FLOATS, GgufFile, GgufTensor, read_gguf, type_name
from qcompiler.frontends.torch.common.empty_weights import empty_weights
from qcompiler.frontends.weights.weight_source import EXPERTS_TRANSPOSED, FileWeights, InFile, StoredCodes
from qcompiler.units import counted

_TORCH = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Types of plain values of weights, by GGUF's number of the type."""


def from_gguf(
    path: str | Path, *, dtype: torch.dtype | None = None, of_codes: torch.dtype = torch.float32
) -> Checkpoint:
    """The model of a GGUF file, of one of the architectures in `ARCHITECTURES` (docs/files.md has a table).  Of a model
    in several files (`…-00001-of-00003.gguf`), the first is given.

    Quantised tensors keep their codes, byte for byte; they are mapped, and never decoded as a whole.  `dtype` is the
    model's compute type, to which plain tensors are converted: by default bf16, fp16 or fp32 if most elements of the
    file's matrices have that type, and `of_codes` if most are codes.

    WeightsError for a damaged file (`read_gguf`), an architecture or a key that is not known, and for tensors that are
    missing, unexpected, or of a wrong shape.
    """
    file = read_gguf(path)
    name = required(file, "general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = f"; {NOT_READ[name]}" if isinstance(name, str) and name in NOT_READ else ""
        raise WeightsError(
            f"{file.path} is of the architecture {shown(name)}{reason}; there are: {', '.join(ARCHITECTURES)}. Other "
            "models: build the module yourself, and give its weights as safetensors (docs/large-models.md)"
        )
    keys = Keys(file, name)
    architecture = architecture_of(keys)
    held = TensorTotals.of((tensor.shape, tensor.nbytes) for tensor in file.tensors.values())
    config = configured(architecture, keys, held)
    model = model_class(architecture.model, file.path)
    module = hollow(model, config, dtype or _most(file) or of_codes, file.path, held)
    if architecture.transposed:
        _use_linears(module)
    _scale_frequencies(file, module)
    tensors = _Names(keys, config, architecture).tensors(module)
    return Checkpoint(module, GgufWeights(file, tensors), config, file.path)


class GgufWeights(FileWeights):
    """The tensors of a GGUF file under the names of a transformers model."""

    def __init__(self, file: GgufFile, tensors: Mapping[str, InFile]) -> None:
        super().__init__(file.path, tensors)
        self.file = file

    @property
    def holds_codes(self) -> bool:
        """Whether most elements of the file's matrices are codes of a format, and no plain values."""
        return _most(self.file) is None


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


def _most(file: GgufFile) -> torch.dtype | None:
    """The type of most elements of the matrices; None: they are codes."""
    counts: dict[torch.dtype | None, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            dtype = None if tensor.format is not None else _TORCH.get(tensor.type, torch.float32)
            counts[dtype] = counts.get(dtype, 0) + math.prod(tensor.shape)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


# --- the tensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """Maps parameters of the model to tensors of the file, with the order of their rows."""

    keys: Keys
    config: Any
    architecture: Architecture

    @property
    def file(self) -> GgufFile:
        return self.keys.file

    def tensors(self, module: nn.Module) -> dict[str, InFile]:
        """By parameter. WeightsError for tensors that no parameter reads, and for parameters without tensors."""
        found: dict[str, InFile] = {}
        used = set(self.architecture.beside)
        for name, shape in _stored(module):  # tied ones once
            key = self.architecture.in_keys.get(self.architecture.place(name)[1])
            if key is not None:
                found[name] = self._from_key(name, shape, key)
                continue
            listed = self.architecture.lists.get(self.architecture.place(name)[1])
            if listed is not None:
                found[name] = self._from_list(name, shape, listed)
                continue
            place = self.architecture.slice_of(name)
            if place is not None and place[0] in self.file.tensors:
                used.add(place[0])
                found[name] = _slice(name, shape, self.file.tensors[place[0]], place[1])
                continue
            parts = self._parts(name)
            used.update(parts)
            missing = [part for part in parts if part not in self.file.tensors]
            if missing:
                raise WeightsError(f"{self.file.path} lacks '{missing[0]}', the parameter '{name}' of the model")
            tensors = [self.file.tensors[part] for part in parts]
            if self.architecture.experts == "matrices" and ".experts." in name:
                found[name] = _experts_as_matrix(name, shape, tensors[0], self.config)
                continue
            if self.architecture.experts and ".experts." in name:
                found[name] = _turned_experts(name, shape, tensors, self.architecture.experts == "alternating")
                continue
            if len(tensors) > 1 and name.endswith(LATENT):
                found[name] = _latent(name, shape, tensors)
                continue
            limit = self.architecture.tables.get(self.architecture.place(name)[1])
            if limit is not None:
                found[name] = _table(name, shape, tensors[0], int(getattr(self.config, limit)))
                continue
            if len(tensors) > 1 and name.endswith((JOINED, CONVOLUTION, INDEX)):
                orders = rows_of_key_heads(self.config) if name.endswith(JOINED) else _in_a_row(tensors)
                found[name] = _joined(name, shape, tensors, orders)
                continue
            _check_shape(self.file, name, shape, tensors)
            found[name] = self._plain(name, shape, tensors)
        extra = sorted(name for name in set(self.file.tensors) - used if not self._is_spare(name))
        if extra:
            raise WeightsError(
                f"{self.file.path} holds {counted(len(extra), 'tensor')} that {self.architecture.model} does not have: "
                + ", ".join(map(shown, extra[:10]))
            )
        return found

    def _plain(self, name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> InFile:
        """A parameter whose numbers are the file's, in the model's order of rows and columns."""
        if len(tensors) > 1:
            return _item(name, shape, tensors, _one_after_the_other(tensors), 0.0)
        if name.endswith(LOGARITHM):
            return _logarithm(name, shape, tensors[0], self.architecture.rows(name, tensors[0].shape[0], self.config))
        if name.endswith(TIME_STEP) and tensors[0].format is not None:
            return _decoded(name, shape, tensors, lambda: torch.from_numpy(np.array(tensors[0].values())))
        factor = self.architecture.factor(name, shape[-1], self.config)
        if factor != 1:
            return _decoded(name, shape, tensors, lambda: torch.from_numpy(np.array(tensors[0].values())) / factor)
        order = self.architecture.rows(name, tensors[0].shape[0], self.config)
        item = _item(name, shape, tensors, [order], self.architecture.offset(name))
        columns = self.architecture.columns(name, shape[-1], self.config)
        return item if columns is None else _with_columns(item, columns)

    def _parts(self, name: str) -> tuple[str, ...]:
        """The tensors of a parameter. Some files have gate and up of all experts in one tensor, and older ones keys and
        values of latent attention, or all inputs of a delta net."""
        parts = self.architecture.names(name)
        if self.architecture.experts == "alternating":
            return parts  # llama.cpp has no joined form of these
        joined = parts[0].replace("ffn_gate_exps", "ffn_gate_up_exps").replace("attn_k_b.", "attn_kv_b.")
        if name.endswith(JOINED):
            joined = parts[0].replace("attn_qkv.", "ssm_in.")
        return (joined,) if joined != parts[0] and joined in self.file.tensors else parts

    def _from_key(self, name: str, shape: tuple[int, ...], key: str) -> ValuesInFile:
        """A parameter of one number, which the file keeps in a list with a number for each layer."""
        values = self.keys.layers(key, float)
        if values is None or math.prod(shape) != 1:
            raise WeightsError(f"{self.file.path} lacks the key '{key}', the parameter '{name}' of the model")
        value = torch.tensor(values[int(self.architecture.place(name)[0])]).reshape(shape)
        return ValuesInFile(name, shape, torch.float32, lambda: value, lambda: {"value": float(value)}, lambda: None)

    def _from_list(self, name: str, shape: tuple[int, ...], key: str) -> ValuesInFile:
        """A buffer of whole numbers, which the file keeps in a key."""
        values = self.file.metadata.get(key)
        if (
            not isinstance(values, list | tuple)
            or len(values) != math.prod(shape)
            or any(type(each) is not int or not -(1 << 63) <= each < 1 << 63 for each in values)
        ):
            raise WeightsError(
                f"{self.file.path}: the key '{key}' is {shown(values)}, and '{name}' of the model has "
                f"{math.prod(shape)} whole numbers of 64 bits"
            )
        made = torch.tensor(values, dtype=torch.int64).reshape(shape)
        return ValuesInFile(name, shape, torch.int64, lambda: made, lambda: {"values": made.tolist()}, lambda: None)

    def _is_spare(self, name: str) -> bool:
        """Whether a tensor belongs to a block behind the model's layers, which predicts further tokens, or holds keys
        or values of a layer that reuses those of an earlier layer."""
        kind, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        if kind != "blk" or not number.isdecimal():
            return False
        layer, layers = int(number), int(self.config.num_hidden_layers)
        if layers <= layer < self.keys.blocks():
            return True
        shared = self.keys.count("attention.shared_kv_layers", 0, least=0)
        return part.partition(".")[0] in ("attn_k", "attn_v", "attn_k_norm") and layers - shared <= layer < layers


def _stored(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of parameters, and of buffers that a checkpoint holds (the biases of a router's scores)."""
    for name, parameter in module.named_parameters():
        yield name, tuple(parameter.shape)
    kept = set(module.state_dict())
    yield from ((name, tuple(buffer.shape)) for name, buffer in module.named_buffers() if name in kept)


def _one_after_the_other(tensors: list[GgufTensor]) -> list[Order | None]:
    """The orders that put rows of several tensors (…, rows, cols) one after the other: gate and up of each expert."""
    *outer, rows, _ = tensors[0].shape
    places = np.arange(math.prod(outer) * len(tensors) * rows).reshape(-1, len(tensors), rows)
    return [np.ascontiguousarray(places[:, part]).reshape(-1) for part in range(len(tensors))]


def _turned_experts(name: str, shape: tuple[int, ...], tensors: list[GgufTensor], by_turns: bool) -> InFile:
    """An expert parameter of gpt-oss or Llama 4: (experts, in, out), or a bias (experts, out).

    The file has (experts, out, in).  Gate and up are tensors of their own there; here their outputs stand `by_turns` or
    one after the other.
    """
    turns = len(tensors)
    experts, outputs, inputs = shape[0], shape[-1], shape[1:-1]
    expected = (experts, outputs // turns, *inputs)
    if any(tensor.shape != expected for tensor in tensors):
        raise WeightsError(
            f"{' and '.join(f'{t.name!r}' for t in tensors)} in {tensors[0].file.path} has the shape "
            f"{' and '.join(str(list(t.shape)) for t in tensors)}, and not {list(expected)}, as '{name}' of the model"
        )
    places = np.arange(experts * outputs).reshape(experts, *((-1, turns) if by_turns else (turns, -1)))
    if not by_turns:
        places = places.swapaxes(1, 2)  # [expert, output, part]
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


def _experts_as_matrix(name: str, shape: tuple[int, ...], tensor: GgufTensor, config: Any) -> InFile:
    """An expert parameter of DBRX, (experts · inner, outer). The file has (experts, inner, outer), and of the matrices
    back to `outer`, which the model multiplies from the other side, (experts, outer, inner)."""
    count, inner, outer = config.ffn_config.moe_num_experts, config.ffn_config.ffn_hidden_size, shape[-1]
    is_turned = name.endswith(".w2")
    expected = (count, outer, inner) if is_turned else (count, inner, outer)
    if tensor.shape != expected:
        raise WeightsError(
            f"'{tensor.name}' in {tensor.file.path} has the shape {list(tensor.shape)}, and not {list(expected)}, as "
            f"'{name}' of the model"
        )
    item = _item(name, (count * expected[1], expected[2]), [tensor], [None], 0.0)
    if isinstance(item, CodesInFile):
        arrangement = EXPERTS_TRANSPOSED if is_turned else ""
        return replace(item, shape=shape, codes=replace(item.codes, arrangement=arrangement))

    def make() -> torch.Tensor:
        values = item.view().reshape(expected)
        return (values.transpose(1, 2) if is_turned else values).reshape(shape)

    return replace(item, shape=shape, make=make)


def _slice(name: str, shape: tuple[int, ...], tensor: GgufTensor, number: int) -> InFile:
    """One of the matrices that a tensor (matrices, rows, cols) holds."""
    if tensor.shape[1:] != shape or not number < tensor.shape[0]:
        raise WeightsError(
            f"'{tensor.name}' in {tensor.file.path} has the shape {list(tensor.shape)}; '{name}' of the model, its "
            f"number {number}, is {list(shape)}"
        )
    rows, cols = shape
    whole = _item(name, (tensor.shape[0] * rows, cols), [tensor], [None], 0.0)
    span = slice(number * rows, (number + 1) * rows)

    def identity() -> dict[str, Any]:
        return {**tensor.identity(), "number": number}

    if isinstance(whole, CodesInFile):
        codes = whole.codes
        where = f"{codes.where}, {number}"
        part = StoredCodes(where, codes.format, rows, cols, lambda: selected(codes.format, codes.read(), span))
        return CodesInFile(name, shape, part, identity, tensor.release)
    return replace(whole, shape=shape, make=lambda: whole.view()[span], source=identity)


def _latent(name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> ValuesInFile:
    """Keys and values of latent attention: (heads, short, key) and (heads, value, short) in the file, and of each head
    one after the other, (heads · (key + value), short), in the model.

    Blocks of codes lie along the keys there, and would along the short vector here: the values are decoded.
    """
    keys, values = tensors
    fits = len(keys.shape) == len(values.shape) == 3 and keys.shape[0] == values.shape[0]
    if (
        not fits
        or (keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1]) != shape
        or (keys.shape[1] != values.shape[2])
    ):
        raise WeightsError(
            f"'{keys.name}' and '{values.name}' in {keys.file.path} have the shapes {list(keys.shape)} and "
            f"{list(values.shape)}, and '{name}' of the model {list(shape)}"
        )

    def make() -> torch.Tensor:
        parts = [torch.from_numpy(np.array(keys.values())).transpose(1, 2), torch.from_numpy(np.array(values.values()))]
        return torch.cat(parts, dim=1).reshape(shape)

    return _decoded(name, shape, tensors, make)


def _joined(name: str, shape: tuple[int, ...], tensors: list[GgufTensor], orders: list[Order]) -> InFile:
    """The rows of several matrices, in the model's order.

    llama.cpp's mixtures of types may give them different ones; no matrix has rows of two formats, so that the values
    are decoded then."""
    expected = [(len(order), shape[-1]) for order in orders]
    if [_without_ones(tensor.shape) for tensor in tensors] != expected or sum(map(len, orders)) != shape[0]:
        wanted = " and ".join(str(list(each)) for each in expected)
        raise WeightsError(
            f"{' and '.join(f'{t.name!r}' for t in tensors)} in {tensors[0].file.path} have the shapes "
            f"{' and '.join(str(list(t.shape)) for t in tensors)}, and not {wanted}, as '{name}' of the model"
        )
    if len({tensor.type for tensor in tensors}) == 1:
        return _item(name, shape, tensors, [*orders], 0.0)

    def make() -> torch.Tensor:
        made = torch.empty(shape)
        for tensor, order in zip(tensors, orders, strict=True):
            made[torch.from_numpy(order)] = torch.from_numpy(np.array(tensor.values()))
        return made

    return _decoded(name, shape, tensors, make)


def _table(name: str, shape: tuple[int, ...], tensor: GgufTensor, limit: int) -> ValuesInFile:
    """A buffer of whole numbers from 0 to `limit` - 1: the experts of each token."""
    if tensor.shape != shape or tensor.type not in FLOATS or FLOATS[tensor.type].kind != "i":
        raise WeightsError(
            f"'{tensor.name}' in {tensor.file.path} is {type_name(tensor.type)} of the shape {list(tensor.shape)}, and "
            f"'{name}' of the model has whole numbers of the shape {list(shape)}"
        )

    def make() -> torch.Tensor:
        values = np.array(tensor.array(), np.int64)
        if values.size and not 0 <= values.min() <= values.max() < limit:
            raise WeightsError(
                f"'{tensor.name}' in {tensor.file.path} holds {values.min()} … {values.max()}, and the model counts "
                f"from 0 to {limit - 1}"
            )
        return torch.from_numpy(values)

    return ValuesInFile(name, shape, torch.int64, make, tensor.identity, tensor.release)


def _in_a_row(tensors: list[GgufTensor]) -> list[Order]:
    """The orders of matrices whose rows follow one another."""
    counts = [math.prod(tensor.shape[:-1]) for tensor in tensors]
    ends = np.cumsum(counts)
    return [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _logarithm(name: str, shape: tuple[int, ...], tensor: GgufTensor, order: Order | None) -> ValuesInFile:
    """The logarithms of a recurrence's decays, which files hold as -exp(A_log)."""

    def make() -> torch.Tensor:
        decays = torch.from_numpy(np.array(tensor.values(), np.float32)).reshape(shape)
        if not bool((decays <= 0).all()):
            raise WeightsError(f"'{tensor.name}' in {tensor.file.path} holds a number above 0, which is no decay")
        made = (-decays).log()
        if order is None:
            return made
        ordered = torch.empty_like(made)
        ordered[torch.from_numpy(order)] = made
        return ordered

    return _decoded(name, shape, [tensor], make)


def _decoded(
    name: str, shape: tuple[int, ...], tensors: list[GgufTensor], make: Callable[[], torch.Tensor]
) -> ValuesInFile:
    """A parameter in fp32 that `make` computes from tensors of the file."""

    def identity() -> dict[str, Any]:
        return {"parts": [tensor.identity() for tensor in tensors]}

    def release() -> None:
        for tensor in tensors:
            tensor.release()

    return ValuesInFile(name, shape, torch.float32, make, identity, release, is_made=True)


def _with_columns(item: CodesInFile | ValuesInFile, columns: Order) -> CodesInFile | ValuesInFile:
    """A matrix whose column i in the file is column `columns[i]` of the model. Codes stay in the file's order, and the
    program reorders the layer's input; plain values move."""
    if isinstance(item, CodesInFile):
        return replace(item, codes=replace(item.codes, permutation=columns))

    def make() -> torch.Tensor:
        values = item.view()
        made = torch.empty_like(values)
        made[..., torch.from_numpy(columns)] = values
        return made

    return replace(item, make=make, is_made=True)


def _check_shape(file: GgufFile, name: str, shape: tuple[int, ...], tensors: list[GgufTensor]) -> None:
    """WeightsError unless the parts, concatenated along the last but one dimension, have the model's shape."""
    first = tensors[0].shape
    if len(first) < len(shape) and first == _without_ones(shape):
        return  # llama.cpp drops dims of size 1: the row of a matrix that has one, the input of a channel's filter
    if ".ssm_" in tensors[0].name and len(_without_ones(shape)) == 1 and math.prod(first) == math.prod(shape):
        return  # vectors of recurrences are (heads, 1) or (groups, rows of a group)
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
    made = _values(number, cols, tensors, orders, offset)
    moves = len(tensors) > 1 or orders[0] is not None or bool(offset)
    return ValuesInFile(name, shape, _TORCH[number], made, identity, release, is_made=moves)


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
