"""A checkpoint folder as a GGUF file: tensors under GGUF's names, the configuration as keys, the tokenizer.

    model.layers.3.self_attn.q_proj.weight   bfloat16     blk.3.attn_q.weight   q4_K, rows in llama.cpp's order
    config.json                                           llama.block_count, llama.attention.head_count, …
    tokenizer.json, tokenizer.model                       tokenizer.ggml.… (gguf_tokenizer.py)

The inverse of gguf_models.py, with the same names (gguf_architectures.py).  Matrices become codes one at a time, when
they are written.  Sources: the keys of gguf-py 0.19 (constants.py), and those that llama.cpp reads when it loads a
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qcompiler.config import format_text, resolve_format
from qcompiler.errors import FormatError, FormatShapeError, WeightsError
from qcompiler.format_mixtures import ALTERNATIVE_FORMAT, MIXTURES, choose
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.foreign.arrays import Array
from qcompiler.formats.foreign.json_text import shown
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.formats.integers import IntegerFormat
from qcompiler.formats.transcode import Loss, loss_of, require, transcode
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint
from qcompiler.frontends.checkpoints.gguf_architectures import ARCHITECTURES, ROPE_FACTORS
from qcompiler.frontends.checkpoints.gguf_files import FLOATS, NewTensor
from qcompiler.frontends.checkpoints.gguf_tokenizer import tokenizer_keys
from qcompiler.frontends.checkpoints.program_codes import NO_CODES, ProgramCodes
from qcompiler.frontends.quantise.mixture_roles import facts_of, matrix_of
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import InFile
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.weights import Bytes
from qcompiler.runtime.encoder import encode

_MODELS = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip
"""Model classes of transformers, by the GGUF architecture that is supported for each."""

FILE_TYPES = {
    "float32": 0, "float16": 1, "bfloat16": 32, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_K_M": 10,
    "q3_K_S": 11, "q3_K_M": 12, "q3_K_L": 13, "q4_K_S": 14, "q4_K_M": 15, "q5_K_S": 16, "q5_K_M": 17, "q6_K": 18,
    "iq2_xxs": 19, "iq2_xs": 20, "q2_K_S": 21, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26, "iq2_s": 29,
    "iq4_xs": 30, "iq1_m": 31, "tq1_0": 36, "tq2_0": 37, "mxfp4_ggml": 38,
    "q2_K": 10, "q3_K": 12, "q4_K": 15, "q5_K": 17,
}  # fmt: skip
"""`general.file_type`: llama.cpp's name of the main format of a file (LlamaFileType of gguf-py).

A single format has the number that llama.cpp guesses for a file of which most is that format: its mixture "M"."""

_FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
_LOSSLESS = {"int4": "q4_0", "int8": "q8_0"}
"""The GGUF formats of integers in symmetric groups of 32."""

_COMPILE_WITH = (
    'compile it with one of their formats, such as "q4_K" or "q8_0", or with "int4:group=32,scale=fp16"; a recipe with '
    'alternatives names them, as "q4_K, else q5_0" does'
)

Lost = Callable[[str, str, str, Loss], None]
"""Called for each tensor: its name, its old format, its new format, the loss."""


@dataclass(frozen=True)
class GgufFolder:
    """The tensors and keys of a file to be written, and a line for each tensor that has not the program's codes."""

    tensors: dict[str, NewTensor]
    metadata: dict[str, Any]
    notes: list[str]


def folder_to_gguf(
    checkpoint: Checkpoint, quant: str | None, *, lossy: bool, told: Lost, own: ProgramCodes = NO_CODES
) -> GgufFolder:
    """A folder's checkpoint as GGUF. `quant` is a mixture or a format of GGUF; without it tensors keep their type, and
    codes become GGUF's if that loses nothing (or `lossy` allows it).  `own` has the codes of a program, which stand in
    place of the folder's values and lose nothing.

    WeightsError for a model or a tokenizer that GGUF files of this reader do not have, FormatError for a format.
    """
    model = type(checkpoint.module).__name__
    if model not in _MODELS:
        raise WeightsError(f"{checkpoint.path} holds a {model}; models that become GGUF files are {', '.join(_MODELS)}")
    own = own.for_model(checkpoint.module)
    own.require_all([name for name, _ in checkpoint.module.named_parameters()])
    tensors = _Tensors(checkpoint, model, _MODELS[model], quant, lossy, told, own)
    made = tensors.make()
    keys = _keys(checkpoint, _MODELS[model], tensors.file_type())
    vocabulary = made["token_embd.weight"].shape[0]
    keys |= tokenizer_keys(checkpoint.path, vocabulary, checkpoint.config)
    factors = _rope_factors(checkpoint)
    if factors is not None:
        made = {ROPE_FACTORS: NewTensor.of(ROPE_FACTORS, factors), **made}
    return GgufFolder(made, keys, tensors.notes)


# --- tensors ---------------------------------------------------------------------------------------------------------


@dataclass
class _Tensors:
    """The parameters of a checkpoint as tensors of GGUF."""

    checkpoint: Checkpoint
    model: str
    architecture: str
    quant: str | None
    lossy: bool
    told: Lost
    own: ProgramCodes = NO_CODES
    types: dict[str, int] = field(default_factory=dict)
    """Elements of matrices by storage format."""
    notes: list[str] = field(default_factory=list)

    def make(self) -> dict[str, NewTensor]:
        config, items = self.checkpoint.config, self.checkpoint.weights.tensors
        parameters = [name for name, _ in self.checkpoint.module.named_parameters()]
        missing = [name for name in parameters if name not in items]
        if missing:
            raise WeightsError(f"{self.checkpoint.path} lacks the parameter '{missing[0]}' of {self.model}")
        chosen = self._chosen(parameters)
        found: dict[str, NewTensor] = {}
        architecture = ARCHITECTURES[self.architecture]
        for name in parameters:
            (there,) = architecture.names(name)
            order = architecture.rows(name, items[name].shape[0], config)
            found[there] = self._of_program(name, there, items[name], order) or self._tensor(
                there, items[name], chosen[name], order
            )
        return found

    def _of_program(self, name: str, there: str, item: InFile, order: Array | None) -> NewTensor | None:
        """The program's codes as a tensor of the file. None if the folder's values stand there: for what the program
        has in floating point, and for an embedding or a head in a format that GGUF does not hold.

        FormatError for a linear in such a format; `make` raises it for codes that GGUF's format cannot express.
        """
        self.own.check_plain(name, item)
        own = self.own.format_of(name)
        if own is None:
            return None
        fmt, given = _of_gguf(own), _text(own)
        if fmt is None and self._is_table(name):
            self.own.codes(name, item)  # refuses a program of another folder
            item.release()
            self.notes.append(
                f"'{name}' is {given} in the program, which GGUF files do not hold: the folder's values stand there "
                '(a recipe with embedding="q6_K" or "q8_0" has codes for it; quant= encodes them anew)'
            )
            return None
        if fmt is None:
            raise FormatError(f"'{name}' is {given} in the program, which GGUF files do not hold: {_COMPILE_WITH}")
        self._count(fmt.name, item.shape)
        return NewTensor(item.shape, fmt.ggml_type, partial(self._moved, name, there, item, fmt, order))

    def _moved(self, name: str, there: str, item: InFile, fmt: GgmlFormat, order: Array | None) -> Bytes:
        codes = self.own.codes(name, item)
        packed, loss = transcode(codes, fmt, encode=encode)
        if loss:
            raise FormatError(
                f"'{name}' is {_text(codes.format)} in the program, which {fmt.name} holds with a {loss}: "
                f"{_COMPILE_WITH}"
            )
        self.told(there, str(item.dtype).removeprefix("torch."), fmt.name, loss)
        item.release()
        return packed.data if order is None else _in_order(packed, order)

    def _is_table(self, name: str) -> bool:
        """Whether the parameter is the embedding's or the head's."""
        module: Any = self.checkpoint.module
        tables = (module.get_input_embeddings(), module.get_output_embeddings())
        return any(table is not None and module.get_parameter(name) is table.weight for table in tables)

    def _chosen(self, parameters: list[str]) -> dict[str, str | None]:
        """The format of each parameter; None if it keeps its type."""
        shapes = {name: self.checkpoint.weights.tensors[name].shape for name in parameters}
        large = [name for name in parameters if len(shapes[name]) > 1]
        matrices = [matrix_of([name]) for name in large]
        found: dict[str, str | None] = dict.fromkeys(parameters)
        if self.quant is None:
            return found
        if self.quant in MIXTURES:
            facts = facts_of(self.checkpoint.config, [(m, shapes[n]) for m, n in zip(matrices, large, strict=True)])
            texts = choose(self.quant, matrices, facts)
        else:
            if not isinstance(resolve_format(self.quant), GgmlFormat):
                raise FormatError(
                    f"GGUF files do not hold {self.quant}; name a mixture ({', '.join(MIXTURES)}) or one of their "
                    "formats, such as q4_0 or q8_0"
                )
            texts = [None if matrix.role == "kept" else self.quant for matrix in matrices]
        for name, text in zip(large, texts, strict=True):
            found[name] = self._fitting(text, shapes[name][-1])
        return found

    @staticmethod
    def _fitting(text: str | None, cols: int) -> str | None:
        """The format, or the next alternative whose blocks divide the columns, as in llama.cpp; None if none does."""
        while text is not None:
            try:
                resolve_format(text).nbytes(1, cols)
                return text
            except FormatShapeError:
                text = ALTERNATIVE_FORMAT.get(text)
        return None

    def _tensor(self, name: str, item: InFile, wanted: str | None, order: Array | None) -> NewTensor:
        """One tensor of the file; `order` gives the model's row for each row of the file."""
        shape, codes = item.shape, item.codes
        before = codes.format.name if codes is not None else str(item.dtype).removeprefix("torch.")
        if wanted is None and codes is not None and len(shape) == 2:
            wanted = self._native(name, item)
        if wanted is None:
            number = self._plain_type(shape, item)
            after = FLOATS[number].name
            self._count(after, shape)
            return NewTensor(shape, number, lambda: self._plain(name, item, number, order))
        fmt = resolve_format(wanted)
        assert isinstance(fmt, GgmlFormat)
        self._count(wanted, shape)

        def make() -> Bytes:
            packed, loss = self._packed(name, item, fmt)
            self.told(name, before, fmt.name, loss)
            item.release()
            return packed.data if order is None else _in_order(packed, order)

        return NewTensor(shape, fmt.ggml_type, make)

    def _count(self, kind: str, shape: tuple[int, ...]) -> None:
        if len(shape) > 1:
            self.types[kind] = self.types.get(kind, 0) + math.prod(shape)

    def _native(self, name: str, item: InFile) -> str | None:
        """The GGUF format of a folder's codes. FormatError if GGUF has none for them."""
        assert item.codes is not None
        fmt = item.codes.format
        if isinstance(fmt, GgmlFormat):
            return fmt.name
        found = _LOSSLESS.get(fmt.name)
        if found is None:
            raise FormatError(
                f"'{name}' is {fmt}, which GGUF files do not hold; choose its new format with --quant (quant=), "
                "such as q4_K_M or q8_0"
            )
        return found

    def _plain_type(self, shape: tuple[int, ...], item: InFile) -> int:
        """The type of plain values: fp32 for vectors, as llama.cpp requires; matrices keep their type."""
        if len(shape) == 1 or item.dtype is None:
            return 0
        if item.dtype not in _FLOAT_TYPES:
            raise WeightsError(f"'{item.name}' in {self.checkpoint.path} is {item.dtype}, which no matrix of GGUF is")
        return _FLOAT_TYPES[item.dtype]

    def _plain(self, name: str, item: InFile, number: int, order: Array | None) -> Bytes:
        wanted = next(dtype for dtype, each in _FLOAT_TYPES.items() if each == number)
        before = item.codes.format.name if item.codes is not None else str(item.dtype).removeprefix("torch.")
        values = to_numpy(item.view().to(wanted).contiguous())
        self.told(name, before, FLOATS[number].name, Loss())
        item.release()
        return np.ascontiguousarray(values if order is None else values[order]).reshape(-1).view(np.uint8)

    def _packed(self, name: str, item: InFile, fmt: GgmlFormat) -> tuple[PackedTensor, Loss]:
        codes = item.codes
        if codes is not None and codes.permutation is None:
            given = codes.read()
            packed, loss = transcode(given, fmt, encode=encode)
            require(loss, name, given, fmt, allowed=self.lossy)
            return packed, loss
        values = np.ascontiguousarray(to_numpy(item.view().float().contiguous()))
        packed = encode(fmt, values)
        loss = loss_of(values, fmt.decode(packed))
        if loss and not self.lossy:
            raise FormatError(
                f"'{name}' is written as {fmt.name} with a {loss}. Say lossy=True (`--lossy`), or name the format as "
                "quant= (`--quant`), if that is wanted"
            )
        return packed, loss

    def file_type(self) -> int:
        """The format of most of the file."""
        if self.quant is not None and self.quant in FILE_TYPES and not self.own.places:
            return FILE_TYPES[self.quant]
        most = max(self.types, key=lambda kind: self.types[kind], default="float32")
        return FILE_TYPES.get(most, 0)


def _text(fmt: Format) -> str:
    """A format as a recipe names it."""
    return format_text(FormatRef(fmt.name, dict(fmt.params)))


def _of_gguf(fmt: Format) -> GgmlFormat | None:
    """The format of GGUF with the same codes, whose scales may be of a narrower type; None if there is none."""
    if isinstance(fmt, GgmlFormat):
        return fmt
    found = "mxfp4_ggml" if fmt.name == "mxfp4" else None
    if isinstance(fmt, IntegerFormat) and fmt.setting("symmetric") and fmt.setting("group") == 32:
        found = _LOSSLESS.get(fmt.name)
    made = None if found is None else resolve_format(found)
    assert made is None or isinstance(made, GgmlFormat)
    return made


def _in_order(packed: PackedTensor, order: Array) -> Bytes:
    """The codes with row `order[i]` as row i; in every format of GGUF a row consists of whole blocks."""
    rows = packed.section("blocks").reshape(packed.rows, -1)
    return np.ascontiguousarray(rows[order]).reshape(-1)


# --- keys ------------------------------------------------------------------------------------------------------------


def _keys(checkpoint: Checkpoint, architecture: str, file_type: int) -> dict[str, Any]:
    """The configuration under GGUF's names. WeightsError for a setting that GGUF cannot express."""
    config = checkpoint.config
    heads, width = int(config.num_attention_heads), int(config.hidden_size)
    dim = int(getattr(config, "head_dim", None) or width // heads)
    own: dict[str, Any] = {
        "vocab_size": int(config.vocab_size),
        "context_length": int(config.max_position_embeddings),
        "embedding_length": width,
        "block_count": int(config.num_hidden_layers),
        "feed_forward_length": int(config.intermediate_size),
        "attention.head_count": heads,
        "attention.head_count_kv": int(config.num_key_value_heads),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": dim,
        **_rope_keys(checkpoint),
    }
    window = getattr(config, "sliding_window", None) if architecture == "llama" else None
    if window is not None and int(window) < own["context_length"]:
        raise WeightsError(
            f"{checkpoint.path} has a sliding window of {window} positions in a context of {own['context_length']}, "
            "but llama.cpp has none for the architecture llama: it would give other answers beyond the window. If that "
            'is acceptable, set "sliding_window": null in config.json'
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise WeightsError(f"{checkpoint.path}: hidden_act is {shown(config.hidden_act)}; GGUF files have silu")
    if architecture.startswith("qwen") and getattr(config, "use_sliding_window", False):
        raise WeightsError(f"{checkpoint.path} slides its window in some layers, for which GGUF files have no key")
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": checkpoint.path.resolve().name,
        "general.file_type": file_type,
        "general.quantization_version": 2,
        **{f"{architecture}.{name}": value for name, value in own.items()},
    }


def _rope_parameters(checkpoint: Checkpoint) -> Mapping[str, Any]:
    found = getattr(checkpoint.config, "rope_parameters", None) or {}
    if not isinstance(found, Mapping):
        raise WeightsError(f"{checkpoint.path}: rope_parameters is {shown(found)}, no JSON object")
    return found


def _rope_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    rope = _rope_parameters(checkpoint)
    keys: dict[str, Any] = {"rope.freq_base": float(rope.get("rope_theta", 10000.0))}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            original = rope.get("original_max_position_embeddings") or checkpoint.config.max_position_embeddings
            keys["rope.scaling.original_context_length"] = int(original)
            extra = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"} & {
                name for name, value in rope.items() if value is not None
            }
            if extra:
                raise WeightsError(f"{checkpoint.path}: yarn with {', '.join(sorted(extra))}, which is not written")
    elif kind not in ("default", "llama3"):
        raise WeightsError(
            f"{checkpoint.path}: positions are scaled as {shown(kind)}; GGUF files are written with linear, yarn and "
            "llama3"
        )
    return keys


def _rope_factors(checkpoint: Checkpoint) -> Array | None:
    """The divisors of the frequencies in Llama 3.1's scaling, which GGUF files hold as a tensor."""
    rope = _rope_parameters(checkpoint)
    if rope.get("rope_type") != "llama3":
        return None
    rotary: Any = checkpoint.module.get_submodule("model.rotary_emb")
    scaled = rotary.inv_freq.double()
    places = torch.arange(scaled.numel(), dtype=torch.float64) / scaled.numel()
    plain = float(rope.get("rope_theta", 10000.0)) ** -places
    return np.asarray((plain / scaled).float().numpy(), np.float32)


def require_folder(path: Path) -> None:
    """WeightsError unless the folder has a tokenizer, before anything is read."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise WeightsError(
            f"{path} has neither tokenizer.json nor tokenizer.model, and a GGUF file holds the tokenizer: save it "
            "there (tokenizer.save_pretrained), or name a folder as the target"
        )


__all__ = ["FILE_TYPES", "GgufFolder", "folder_to_gguf", "require_folder"]
