"""`qc.search`: the recipe that spends a budget best, for a model of torch or a language model of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qcompiler.errors import ArgumentError, CalibrationError, ExportError
from qcompiler.frontends.checkpoints.checkpoint import Checkpoint, transformers
from qcompiler.lm.compile import (
    calibration_inputs,
    inputs_to_trace,
    ranges_of,
    sizes_of,
    with_counts,
)
from qcompiler.lm.sources import is_of_codes, model_and_weights, text_of
from qcompiler.lm.text import Text
from qcompiler.recipes.result import SearchResult
from qcompiler.recipes.search import Asked, Options, search_model

WINDOW = 512
"""Tokens of a piece of text: the default of `max_seq_len`."""

IN_FP32 = (
    "measured with products in fp32, so that nothing but the formats counts; compiled from this file, linears multiply "
    "in bf16 unless the recipe says compute='exact'"
)
"""Of a .gguf file of codes, whose arithmetic is chosen when it is compiled (lm/sources.py)."""


def search(
    model: Any,
    data: Iterable[Any],
    budget: str,
    candidates: Iterable[str] | None = None,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    weights: Any = None,
    rules: Any = (),
    merged: bool = True,
    sensitivity: str = "kl",
    measure: str = "auto",
    workdir: str | Path | None = None,
    speed: str | None = None,
    num_threads: int | None = None,
    text: Text | None = None,
    max_seq_len: int | None = None,
) -> SearchResult:
    """Chooses a format for each weight of a model, so that its outputs change least within a budget.

    `model` is what `qcompile` takes, except functions of JAX and texts of MLIR, and `data` what `calibrate=` takes:
    an iterable of inputs.  The first is the example that the model is exported with, unless `args` or `kwargs` are
    given; sizes that vary are named by `dynamic_shapes`.  For a language model of transformers, or a folder or a .gguf
    file with one, `data` may be texts or sequences of token ids; they are read in pieces of `max_seq_len` tokens
    (default 512), and each piece has logits for all its tokens.

    `budget` is "4.25 bits" per weight, "700 MB" of all weights, "kl<0.01" or, for outputs without logits,
    "error<0.001".  `candidates` are formats; "float" keeps a weight.  `rules` are as for `QuantConfig`: what they match
    has no choice.  With `merged`, weights that the passes store as one (q, k and v; gate and up) get one format.

    `measure` is "kl", the mean KL of the logits in nats, "error", the relative squared error of all outputs, or
    "auto": the KL if an output's last dimension is the vocabulary.  `sensitivity` is "kl", which runs the model to its
    end for each weight and candidate, or "output", which does so once for each weight and takes the other candidates
    in proportion to the squared error of the layer's output.  With `workdir`, a killed search goes on where it was.

    `speed` is a second budget, for the linears of a call with one row of x: "3 ms", "1.2 x int4" (1.2 times what they
    take in int4), "3 ms at 32 rows".  Each linear is timed in each candidate on this machine's CPU, on `num_threads`
    threads (default as for a program), once: times are kept in the user's cache.

    A bound is met on the data by true runs; for a size the true distance is measured once.

    BudgetError if no recipe meets the budgets; CalibrationError for data without rows, for values that are not finite,
    and for a layer whose inputs are all zero; RecipeError, ArgumentError.
    """
    options = Options.of(budget, candidates, rules, merged, sensitivity, measure, workdir, speed, num_threads)
    if isinstance(data, str | bytes):
        raise ArgumentError("data is one text: give a list of texts, or of inputs")
    if not isinstance(data, Iterable):
        raise ArgumentError(f"data={data!r}: give a list of inputs of the model, or of texts for a language model")
    inputs = list(data)
    if not inputs:
        raise CalibrationError("the data has no inputs; it is an iterable of inputs of the model")
    if isinstance(model, str | Path) or _are_tokens(inputs, model):
        return _search_language_model(model, inputs, options, text, max_seq_len)
    if isinstance(model, Checkpoint):
        model, weights = model.module, model.weights if weights is None else weights
    from_data = args is None and kwargs is None
    if from_data:
        args, kwargs = _example(inputs[0])
    asked = Asked(model, args or (), kwargs or {}, dynamic_shapes, weights, from_data)
    return search_model(asked, inputs, options)


def _are_tokens(inputs: Sequence[Any], model: Any) -> bool:
    """Whether all inputs are texts or sequences of token ids.

    An empty tuple alone is neither: it has the arguments of a model that takes none, unless the model has words.
    """
    some = any(isinstance(each, str) or len(each) for each in inputs if _is_tokens(each))
    has_words = hasattr(model.module if isinstance(model, Checkpoint) else model, "get_input_embeddings")
    return (some or has_words) and all(map(_is_tokens, inputs))


def _is_tokens(given: Any) -> bool:
    """Whether an input is a text or a sequence of token ids: no tensor, and no tuple of arguments."""
    return isinstance(given, str) or (
        isinstance(given, list | tuple | np.ndarray) and all(isinstance(token, int | np.integer) for token in given)
    )


def _example(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def _search_language_model(
    model: Any, data: Sequence[Any], options: Options, text: Text | None, max_seq_len: int | None
) -> SearchResult:
    pretrained = transformers().PreTrainedModel
    from qcompiler.lm.step import prepared

    text = text if text is not None else text_of(model)
    module, source = model_and_weights(model)
    if not isinstance(module, pretrained):
        raise ExportError(
            f"data of texts or token ids is for language models of transformers, not for {type(module).__name__}: give "
            "inputs of the model, tensors for one argument, tuples for several, or dicts"
        )
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    length, chunk = sizes_of(module, max_seq_len or min(WINDOW, positions), 1, None)
    words: Any = module.get_input_embeddings()
    with prepared(module, 1, length, None, length, chunk) as step:
        pieces = calibration_inputs(data, text, chunk, vocabulary=int(words.weight.shape[0]), name="data")
        inputs = [{**each, "wanted": torch.arange(each["ids"].shape[1])} for each in with_counts(pieces, step)]
        if not inputs:
            raise CalibrationError("the data has no tokens")
        notes = (IN_FP32,) if isinstance(model, str | Path) and is_of_codes(source) else ()
        traced, sizes = inputs_to_trace(step, length, chunk), ranges_of(1, chunk, step.has_states)
        asked = Asked(step, (), traced, sizes, source, notes=notes)
        return search_model(asked, inputs, options)


__all__ = ["search"]
