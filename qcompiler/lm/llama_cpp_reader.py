"""llama.cpp as a reader of tokens beside ours, for `qc eval --llama-cpp`: needs the package llama-cpp-python."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qcompiler.errors import ArgumentError, MissingDependencyError, WeightsError
from qcompiler.lm.evaluate import Logits


class LlamaCpp:
    """A .gguf file in llama.cpp, with its default settings (a cache in fp16) and room for `window` tokens.

    MissingDependencyError without the package; WeightsError for a file that llama.cpp does not load; ArgumentError for
    a vocabulary of another size.
    """

    def __init__(self, path: Path, window: int, chunk: int, vocabulary: int) -> None:
        if not path.is_file():
            raise ArgumentError(f"there is no file {path}; --llama-cpp names the .gguf file that llama.cpp reads")
        try:
            package: Any = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise MissingDependencyError(
                "--llama-cpp needs the package llama-cpp-python: pip install llama-cpp-python"
            ) from error
        try:
            self._model = package.Llama(
                model_path=str(path), n_ctx=window, n_batch=chunk, logits_all=True, verbose=False
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise WeightsError(f"llama.cpp does not load {path}: {error}") from error
        self.version = str(package.__version__)
        theirs = int(self._model.n_vocab())
        if theirs != vocabulary:
            raise ArgumentError(f"{path} has {theirs} tokens, and the model {vocabulary}: name a file of that model")

    def reset(self) -> None:
        self._model.reset()

    def read(self, new: Sequence[int], *, logits: Literal["all"]) -> list[Logits]:
        before = int(self._model.n_tokens)
        self._model.eval(list(new))
        return [np.array(self._model.scores[before : before + len(new)], np.float32)]


__all__ = ["LlamaCpp"]
