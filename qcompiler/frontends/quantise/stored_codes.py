"""Weights that are quantised in the file: which uses can read their codes, and reordered inputs for sorted columns.

    before   linear = aten.linear(x, dequantize, p_q_bias)
    after    index_select = aten.index_select(x, -1, b_q_weight_columns)          if the file sorted W's columns
             linear = aten.linear(index_select, dequantize, p_q_bias)

The product is the same: column j of the stored codes is column `permutation[j]` of the layer, and a sum over columns
does not depend on their order (except for rounding: the order of the sum is the stored one).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from qcompiler.config import QuantConfig, resolve_format
from qcompiler.errors import RecipeError, WeightsError
from qcompiler.frontends.weights.weight_source import StoredCodes
from qcompiler.ledger import LedgerRow
from qcompiler.runtime.progress import note

aten = torch.ops.aten

AS_STORED = "as stored"
"""The ledger's reason for a weight whose codes are the file's."""

COLUMNS = "_columns"
"""The name of a permutation's buffer is its parameter's name with this suffix."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a tensor whose last dimension is the columns."""
    return math.prod(shape[:-1]), shape[-1]


def check_use(
    codes: StoredCodes,
    targets: Sequence[str],
    shape: Sequence[int],
    kinds: Collection[str],
    arrangement: str,
    recipe: QuantConfig,
) -> None:
    """WeightsError if the graph cannot read the codes as they are, RecipeError if a rule asks for another format."""
    held = f"'{targets[0]}' is {codes.format} in {codes.where}"
    if not kinds or arrangement != codes.arrangement:
        raise WeightsError(
            f"{held}, and the model uses it as {arrangement or 'something else than a linear or an embedding'}, which "
            "cannot read codes as they are stored. Convert the file with this tensor in floating point"
        )
    if codes.permutation is not None and "embedding" in kinds:
        raise WeightsError(f"{held} with its columns in another order, and the model reads rows of it")
    if (codes.rows, codes.cols) != matrix_shape(shape):
        raise WeightsError(f"{held} with {codes.rows} x {codes.cols} codes, and the model stores {list(shape)}")
    for rule in recipe.all_rules:
        if any(rule.matches(target) for target in targets):
            if rule.format is not None and resolve_format(rule.format) != codes.format:
                raise RecipeError(
                    f"{rule.text} asks for {rule.format}, but {held}: recipes decide about weights that are floating "
                    "point in the file. Convert the file (`qc convert`), or leave the rule out"
                )
            return


def say_unused(recipe: QuantConfig, rows: Sequence[LedgerRow]) -> None:
    """Says on stderr that a recipe chose the format of no weight, since the file has codes of all that it is for."""
    quantises = recipe.linear is not None or recipe.embedding is not None
    held = [row for row in rows if row.reason == AS_STORED]
    if quantises and len(held) == sum(bool(row.format) for row in rows) > 0:
        note(
            f"the recipe '{recipe.preset}' changes nothing: the file has codes of all {len(held)} weights that it is "
            "for, which are kept. `qc convert` changes the formats of a file"
        )


def add_permutation(
    graph: fx.Graph,
    specs: list[InputSpec],
    state: dict[str, Any],
    nodes: Sequence[fx.Node],
    target: str,
    permutation: npt.NDArray[np.intp],
) -> None:
    """Inserts an index_select in front of every linear that reads one of `nodes`, and adds its index to the program."""
    first, name = nodes[0], target + COLUMNS
    index = torch.from_numpy(permutation.astype(np.int64))
    with graph.inserting_before(first):
        columns = graph.placeholder(f"{first.name}{COLUMNS}")
    with first.meta["val"].fake_mode:
        columns.meta["val"] = torch.empty(index.shape, dtype=torch.int64)
    place = next(i for i, spec in enumerate(specs) if spec.arg.name == first.name)
    specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(columns.name), name, persistent=True))
    state[name] = index
    for user in {user: None for node in nodes for user in node.users}:
        x = user.args[0]
        if user.target is not aten.linear.default or not isinstance(x, fx.Node):
            raise WeightsError(
                f"the columns of '{target}' are stored in another order, and the model reads it in {user.target}, too; "
                "only linears can take their inputs in that order"
            )
        with graph.inserting_before(user):
            chosen = graph.call_function(aten.index_select.default, (x, -1, columns))
        chosen.meta = {**user.meta, "val": x.meta["val"].clone()}
        user.args = (chosen, *user.args[1:])


__all__ = ["AS_STORED", "add_permutation", "check_use", "matrix_shape", "say_unused"]
