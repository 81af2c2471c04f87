"""Models as upstream MLIR without a host compiler: the frontend, the stages up to the one that is lowered, the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qcompiler.frontends.common.imported import Imported
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.inspect.upstream import STAGE, UpstreamModule, Weights, upstream
from qcompiler.ir.context import QCContext
from qcompiler.ir.text import print_module
from qcompiler.passes.pipeline import run_pipeline, upto


def lowered(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: Weights = "arguments",
    **options: Any,
) -> tuple[ImportResult, UpstreamModule]:
    """What `qcompile(model, args, kwargs, **options).to_mlir(weights=weights)` gives, and the imported model."""
    imported = import_torch(model, args, kwargs, **options)
    return imported, of_stage(imported, weights)


def of_stage(imported: Imported, weights: Weights) -> UpstreamModule:
    """The text of a model that a frontend has imported."""
    run_pipeline(imported.module, QCContext.default(weights=imported.weights), stages=upto(STAGE))
    return upstream(print_module(imported.module), imported.weights, imported.states, weights)


def leaves(result: Any) -> list[np.ndarray[Any, Any]]:
    """Every tensor of a result."""
    return [
        to_numpy(leaf.detach()) for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)
    ]
