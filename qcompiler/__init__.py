"""qcompiler: a quantisation compiler.

    import qcompiler as qc

    prog = qc.qcompile(model, (x,), quant="nf4")
    y = prog(x)
    prog.save("model.qca")
    run = qc.load("model.qca")          # needs neither torch nor xdsl

Exports are lazy (PEP 562): importing a lower layer imports neither the API nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qcompiler.errors import QCompilerError
from qcompiler.import_noise import without_import_noise

if TYPE_CHECKING:
    from qcompiler import errors as errors
    from qcompiler import formats as formats
    from qcompiler.api import qcompile as qcompile
    from qcompiler.config import QuantConfig as QuantConfig
    from qcompiler.config import Rule as Rule
    from qcompiler.frontends.checkpoints.checkpoint import Checkpoint as Checkpoint
    from qcompiler.frontends.checkpoints.checkpoint_folder import from_checkpoint as from_checkpoint
    from qcompiler.frontends.checkpoints.convert import convert as convert
    from qcompiler.frontends.checkpoints.gguf_files import write_gguf as write_gguf
    from qcompiler.frontends.checkpoints.gguf_models import from_gguf as from_gguf
    from qcompiler.frontends.mlir.model import MlirModel as MlirModel
    from qcompiler.frontends.mlir.model import from_mlir as from_mlir
    from qcompiler.frontends.quantise.merge_lora import merge_lora as merge_lora
    from qcompiler.frontends.torch.common.empty_weights import empty_weights as empty_weights
    from qcompiler.frontends.torch.survey import doctor as doctor
    from qcompiler.frontends.weights.weight_source import Shards as Shards
    from qcompiler.lm.compile import compile_causal_lm as compile_causal_lm
    from qcompiler.lm.for_transformers import for_transformers as for_transformers
    from qcompiler.lm.model import CausalLM as CausalLM
    from qcompiler.lm.model import load_causal_lm as load_causal_lm
    from qcompiler.lm.search import search as search
    from qcompiler.program import Program as Program
    from qcompiler.recipes.result import SearchResult as SearchResult
    from qcompiler.runtime import load as load
    from qcompiler.runtime.jax_callable import jax_callable as jax_callable

__version__ = "0.1.0"

_EXPORTS = {
    "CausalLM": "qcompiler.lm.model",
    "Checkpoint": "qcompiler.frontends.checkpoints.checkpoint",
    "compile_causal_lm": "qcompiler.lm.compile",
    "convert": "qcompiler.frontends.checkpoints.convert",
    "for_transformers": "qcompiler.lm.for_transformers",
    "from_checkpoint": "qcompiler.frontends.checkpoints.checkpoint_folder",
    "from_gguf": "qcompiler.frontends.checkpoints.gguf_models",
    "from_mlir": "qcompiler.frontends.mlir.model",
    "MlirModel": "qcompiler.frontends.mlir.model",
    "write_gguf": "qcompiler.frontends.checkpoints.gguf_files",
    "qcompile": "qcompiler.api",
    "search": "qcompiler.lm.search",
    "SearchResult": "qcompiler.recipes.result",
    "Program": "qcompiler.program",
    "QuantConfig": "qcompiler.config",
    "Rule": "qcompiler.config",
    "Shards": "qcompiler.frontends.weights.weight_source",
    "doctor": "qcompiler.frontends.torch.survey",
    "empty_weights": "qcompiler.frontends.torch.common.empty_weights",
    "jax_callable": "qcompiler.runtime.jax_callable",
    "load": "qcompiler.runtime",
    "load_causal_lm": "qcompiler.lm.model",
    "merge_lora": "qcompiler.frontends.quantise.merge_lora",
}
_MODULES = ("errors", "formats")

__all__ = [
    "CausalLM",
    "Checkpoint",
    "MlirModel",
    "Program",
    "QCompilerError",
    "QuantConfig",
    "Rule",
    "SearchResult",
    "Shards",
    "compile_causal_lm",
    "convert",
    "doctor",
    "empty_weights",
    "errors",
    "for_transformers",
    "formats",
    "from_checkpoint",
    "from_gguf",
    "from_mlir",
    "jax_callable",
    "load",
    "load_causal_lm",
    "merge_lora",
    "qcompile",
    "search",
    "write_gguf",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        with without_import_noise():  # those for language models import transformers
            return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"qcompiler.{name}")
    raise AttributeError(f"module 'qcompiler' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
