"""`compile_causal_lm`: from a model, a folder or a GGUF file to a program that generates text (torch, transformers)."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from qcompiler.api import qcompile
from qcompiler.config import QuantConfig
from qcompiler.device_map import Devices, place
from qcompiler.errors import ArgumentError, ExportError
from qcompiler.formats import cache_rows
from qcompiler.frontends.checkpoints.checkpoint import transformers
from qcompiler.frontends.checkpoints.checkpoint_folder import from_checkpoint
from qcompiler.frontends.checkpoints.gguf_models import from_gguf
from qcompiler.inspect.report import Choice
from qcompiler.lm.adapter import adapted
from qcompiler.lm.model import CausalLM
from qcompiler.lm.probe import ring_rows
from qcompiler.lm.reads import check_reads
from qcompiler.lm.record import LanguageModel
from qcompiler.lm.sources import source_of, text_of
from qcompiler.lm.text import Text
from qcompiler.plan.kinds.sample import WORDS
from qcompiler.runtime.backends.registry import is_available
from qcompiler.runtime.progress import OnStep

if TYPE_CHECKING:
    from qcompiler.lm.step import CacheKind, DecoderStep

CacheType = Literal["auto", "fp32", "bf16", "fp16", "int8", "fp8", "int4"]
CACHE_TYPES: dict[str, torch.dtype | cache_rows.Kind | None] = {
    "auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": "int8",
    "fp8": "fp8", "int4": "int4",
}  # fmt: skip

CHUNK = 512
"""Tokens of a sequence that one call reads at most: enough rows to be bound by arithmetic, in little memory."""

LENGTH = 4096
"""The default of `max_seq_len`, where the model was trained for as many."""


def compile_causal_lm(
    model: Any,
    quant: str | QuantConfig | None = None,
    *,
    max_seq_len: int | None = None,
    max_batch: int = 1,
    device: Devices | None = None,
    kv_cache: CacheType = "auto",
    chunk: int | None = None,
    text: Text | None = None,
    adapter: str | Path | None = None,
    merge: bool = True,
    targets: Sequence[str] | None = None,
    verify_each: Literal["ir", "numerics"] | None = None,
    dump_ir: str | Path | None = None,
    workdir: str | Path | None = None,
    progress: OnStep | None = None,
    calibrate: Iterable[str | Sequence[int]] | None = None,
) -> CausalLM:
    """Quantises and compiles a causal language model of transformers, with its cache, for generation.

    `model` is a model (`LlamaForCausalLM`, …), a `Checkpoint`, a folder of Hugging Face (config.json and safetensors),
    or a .gguf file.  Any decoder runs that takes a cache; no list of architectures decides.  `quant` is as for
    `qc.qcompile`; codes in a file are kept as they are.  Products of a .gguf file of codes are in bf16 where
    `quant` names no arithmetic (docs/language-models.md, Arithmetic).

    Layers may keep other states than keys and values: windows of convolutions, states of recurrences (Mamba, gated
    delta nets).  They belong to a conversation as its cache does.

    `max_seq_len` is the number of tokens, prompt included, that a sequence may have (default: the model's own, at most
    4096), `max_batch` how many sequences may run together, each of its own length.  The cache takes
    2 · layers · kv heads · head dim · max_batch · max_seq_len numbers of `kv_cache`: "fp32", "bf16", "fp16", "int8" or
    "fp8" (each head of each token with its own scale: 144 bytes for 128 numbers), "int4" (a step for each 32 numbers:
    80 bytes for 128), or "auto": on a CPU bf16 where the recipe has attention round to it, else the model's type.  A
    prompt is read in pieces of at most `chunk` tokens (default 512).

    `adapter` is a folder of PEFT with a LoRA or a DoRA.  It is merged into the weights before they are quantised, or
    with `merge=False` kept beside them as two small products per linear (LoRA), whatever the weights are stored as.

    `calibrate` are texts, or sequences of token ids, for recipes that need data (`qc.qcompile`).  A long one is cut
    into pieces of `chunk` tokens, each of which is read as the beginning of a text.

    `text` is the tokenizer that a saved file carries; a folder and a .gguf file bring their own.

    Rotary frequencies that follow the length of the text ("dynamic", "longrope") are those of `max_seq_len` tokens.

    The rest is as for `qc.qcompile`.  ExportError for a model without a cache; ArgumentError for sizes that do not fit;
    AdapterError lists the targets of an adapter that do not fit.
    """
    pretrained = transformers().PreTrainedModel
    from qcompiler.lm.step import prepared

    text = text if text is not None else text_of(model)
    given = source_of(model, QuantConfig.of(quant), device, targets)
    model, weights = given.module, given.weights
    if not isinstance(model, pretrained):
        raise ExportError(
            f"compile_causal_lm takes a model of transformers, a folder or a .gguf file, not {type(model).__name__}; "
            "qc.qcompile compiles any module, and docs/state.md shows how a module keeps a cache"
        )
    length, chunk = sizes_of(model, max_seq_len, max_batch, chunk)
    if kv_cache not in CACHE_TYPES:
        raise ArgumentError(f"kv_cache={kv_cache!r}: choose from {', '.join(CACHE_TYPES)}")
    rows = length if max_batch == 1 else length + chunk
    words: Any = model.get_input_embeddings()
    inputs = None
    if calibrate is not None:
        inputs = list(calibration_inputs(calibrate, text, chunk, vocabulary=int(words.weight.shape[0])))
        if given.recipe.tune_scales:  # it learns from the logits of every token
            inputs = [{**each, "wanted": torch.arange(each["ids"].shape[1])} for each in inputs]
    with (
        adapted(model, weights, adapter, merge) as source,
        prepared(model, max_batch, rows, _cache_type(kv_cache, model, given.recipe, device), length, chunk) as step,
    ):
        program = qcompile(
            step, (), inputs_to_trace(step, rows, chunk),
            dynamic_shapes=ranges_of(max_batch, chunk, step.has_states),
            buckets=_buckets(max_batch, chunk), quant=given.recipe, device=device, targets=targets,
            verify_each=verify_each, dump_ir=dump_ir, workdir=workdir, progress=progress, weights=source,
            calibrate=None if inputs is None else with_counts(inputs, step),
        )  # fmt: skip
        rings: dict[str, Any] = {}
        if step.ring is not None:
            rings = {"window": step.ring.window, "ring": step.ring.rows, "ring_layers": tuple(sorted(step.ring.layers))}
        program.decided([*given.choices, *_cache_choices(step, length, chunk)])
        dtype = step.cache_dtype
    start = getattr(model.config.get_text_config(), "bos_token_id", None)
    record = LanguageModel(
        vocabulary=int(program.plan.entries[0].outputs[0].shape[1]), max_seq_len=length, max_batch=max_batch, rows=rows,
        chunk=chunk, cache_dtype=dtype, architecture=type(model).__name__, end_ids=end_ids(model),
        start_id=start if isinstance(start, int) else None, samples=True,
        counts=step.has_states, **rings,
    )  # fmt: skip
    run = program.run if all(map(is_available, program.devices)) else None
    return CausalLM(run, record, program, text)


def _cache_type(kv_cache: CacheType, model: Any, recipe: QuantConfig, device: Devices | None) -> CacheKind:
    """What a cache stores.  CPU kernels round what attention multiplies where the recipe says so, those for GPUs have
    the types of their operands."""
    rounds = recipe.attention in ("bf16", "int8") and place(device or "cpu").slots == ("cpu",)
    return "rounded" if kv_cache == "auto" and rounds and model.dtype == torch.float32 else CACHE_TYPES[kv_cache]


def _cache_choices(step: DecoderStep, length: int, chunk: int) -> list[Choice]:
    """The rows of each layer's cache, whether its keys are rotated, and its other states, with the reasons."""
    why = "each token changes them: `truncate` reads the tokens that remain again"
    choices = [
        Choice("kv-cache", f"layer {each.layer}", f"a state of {list(each.shape)} for each sequence ({each.kind})", why)
        for each in step.states
    ]
    for layer in step.shapes:
        rows = step.rows_of(layer)
        what, why = f"{rows} rows for each sequence", step.reasons.get(layer, "")
        if layer in step.windows:
            window, least = step.windows[layer], ring_rows(max(step.windows.values()), chunk)
            why = f"its window is {window} tokens, and a call reads up to {chunk}"
            if step.ring is None:
                why += f": a ring would have {least} rows, and max_seq_len is {length}"
            else:
                what = f"a ring of {what}"
        choices.append(Choice("kv-cache", f"layer {layer}", what, why))
        if step.kind == "int4":
            what, why = "keys as they are", "their size has no power of two, or others than attention read them"
            if layer in step.rotated:
                what, why = "keys are rotated, and queries", "a few large columns would take the steps of all others"
            choices.append(Choice("kv-cache", f"layer {layer}", what, why))
    return choices


def in_fp32(path: Path, max_seq_len: int, chunk: int, device: Devices | None = None) -> CausalLM:
    """A folder or a .gguf file as a reference for others: fp32 weights, arithmetic and cache; codes mean what they are.

    Weights of bf16 and fp16 become fp32, which changes no value.
    """
    read = from_gguf if path.suffix == ".gguf" else from_checkpoint
    return compile_causal_lm(
        read(path, dtype=torch.float32), max_seq_len=max_seq_len, chunk=chunk, kv_cache="fp32", device=device
    )


def sizes_of(model: Any, max_seq_len: int | None, max_batch: int, chunk: int | None) -> tuple[int, int]:
    """The length of a sequence, and that of a call."""
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = max_seq_len if max_seq_len is not None else min(trained or LENGTH, LENGTH)
    piece = chunk if chunk is not None else min(CHUNK, length)
    for name, value, least in (("max_seq_len", length, 2), ("max_batch", max_batch, 1), ("chunk", piece, 2)):
        if value < least:
            raise ArgumentError(f"{name}={value}: choose {least} or more")
    words = model.get_input_embeddings()
    of_text = set(_part_with(model, words).modules())
    for name, table in model.named_modules():
        is_positions = isinstance(table, torch.nn.Embedding) and table is not words and re.search(r"pos|wpe", name)
        if is_positions and table in of_text and table.num_embeddings < length:
            raise ArgumentError(
                f"max_seq_len={length}: '{name}' has {table.num_embeddings} positions; choose at most as many"
            )
    if piece > length:
        raise ArgumentError(f"chunk={piece} is more than max_seq_len={length}; a call reads part of a sequence")
    return length, piece


def _part_with(model: Any, words: Any) -> Any:
    """The part of a model that reads tokens: a part that reads images has positions of its own."""
    parts = [each for each in model.modules() if isinstance(each, transformers().PreTrainedModel)]
    return [each for each in parts if any(inside is words for inside in each.modules())][-1]


def example_inputs(batch: int, rows: int, chunk: int, counts: bool = False) -> dict[str, torch.Tensor]:
    """Arguments to trace with: sizes above 1, and unlike each other where the ranges allow. `counts`: the step takes
    how many tokens each sequence reads."""
    b, s = (1, min(7, chunk)) if batch == 1 else (min(3, batch), min(7, chunk))
    positions = torch.arange(s).repeat(b, 1)
    more = {"counts": torch.full((b,), s, dtype=torch.int64)} if counts else {}
    return {
        "ids": torch.ones(b, s, dtype=torch.int64),
        "positions": positions,
        "rows": positions + torch.arange(b)[:, None] * rows,
        "wanted": torch.zeros(min(5, b * chunk), dtype=torch.int64),
        "how": torch.full((b, WORDS), -1, dtype=torch.int64),
        **more,
    }


def inputs_to_trace(step: DecoderStep, rows: int, chunk: int) -> dict[str, torch.Tensor]:
    """`example_inputs` of a step. ExportError if what the logits of such a call depend on would be wrong
    (lm/reads.py)."""
    inputs = example_inputs(step.batch, rows, chunk, step.has_states)
    check_reads(step, inputs)
    return inputs


def calibration_inputs(
    given: Iterable[str | Sequence[int]], text: Text | None, chunk: int, vocabulary: int, name: str = "calibrate"
) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments for the data `name`: pieces of at most `chunk` tokens, each at the beginning of the sequence's rows.

    ArgumentError for what is neither text nor ids of the vocabulary, and for text without a tokenizer.
    """
    if isinstance(given, str):
        raise ArgumentError(f"{name} is one text: give a list of texts, or of sequences of token ids")
    for number, each in enumerate(given):
        ids = _ids(each, text, f"{name}[{number}]")
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ArgumentError(f"{name}[{number}] holds {min(ids)} … {max(ids)}; tokens are 0 … {vocabulary - 1}")
        for start in range(0, len(ids), chunk):
            piece = torch.tensor([ids[start : start + chunk]], dtype=torch.int64)
            places = torch.arange(piece.shape[1])[None]
            yield {
                "ids": piece,
                "positions": places,
                "rows": places,
                "wanted": torch.tensor([piece.shape[1] - 1]),
                "how": torch.full((1, WORDS), -1, dtype=torch.int64),
            }


def with_counts(inputs: Iterable[dict[str, torch.Tensor]], step: DecoderStep) -> list[dict[str, torch.Tensor]]:
    """Arguments with `counts` for a step that takes them."""
    if not step.has_states:
        return list(inputs)
    return [{**each, "counts": torch.full(each["ids"].shape[:1], each["ids"].shape[1])} for each in inputs]


def _ids(given: Any, text: Text | None, what: str) -> list[int]:
    """The tokens of a text, a sequence, an array or a tensor."""
    if isinstance(given, str):
        if text is None:
            raise ArgumentError(f"{what} is a text, and the model has no tokenizer: give token ids, or text=")
        return text.encode(given)
    values = given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given
    try:
        return [operator.index(token) for token in values]
    except TypeError:
        raise ArgumentError(f"{what} is {given!r:.60}: give texts, or sequences of token ids") from None


def ranges_of(batch: int, chunk: int, counts: bool = False) -> dict[str, Any]:
    tokens: dict[int, Any] = {1: ("s", 1, chunk)}
    if batch > 1:
        tokens[0] = ("b", 1, batch)
    how: dict[int, Any] = {0: ("b", 1, batch)} if batch > 1 else {}
    wanted = {0: ("k", 1, batch * chunk)}
    more = {"counts": how} if counts else {}
    return {**dict.fromkeys(("ids", "positions", "rows"), tokens), "wanted": wanted, "how": how, **more}


def _buckets(batch: int, chunk: int) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Entry points: one token of one sequence, one token of several, and any number of tokens."""
    single: dict[str, tuple[int, int]] = {"s": (1, 1), "k": (1, 1)}
    if batch == 1:
        return [("decode", single), ("prefill", {"s": (1, chunk)})]
    return [
        ("decode", {"b": (1, 1), **single}),
        ("decode_batch", {"s": (1, 1), "k": (1, batch)}),
        ("prefill", {"s": (1, chunk)}),
    ]


def end_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a text: those of the generation configuration, else of the model's."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            listed = [found] if isinstance(found, int) else list(found)
            return tuple(int(token) for token in listed if 0 <= int(token) < model.config.get_text_config().vocab_size)
    return ()
