"""Chooses the storage format of each weight: the recipe's chains and mixtures, applied to shapes.

    "q4_K, else q5_0, else int8"    K = 512: q4_K    K = 288: q5_0    K = 100: int8
    "q4_K_M"                        model.layers.0.mlp.down_proj: q6_K (ffn_down of layer 0)

The ledger, the report and the promise account for each use of an alternative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from qcompiler.config import QuantConfig, choices, format_text, parse_format, resolve_format
from qcompiler.errors import FormatShapeError
from qcompiler.format_mixtures import ALTERNATIVE_FORMAT, MIXTURES
from qcompiler.format_mixtures import choose as choose_mixture
from qcompiler.frontends.quantise.mixture_roles import facts_of, matrix_of
from qcompiler.ledger import LedgerRow

Kind = Literal["linear", "embedding", "conv"]


@dataclass(frozen=True)
class Described:
    """A weight that can be quantised: its paths, its use, the shape it is stored in and the model's own; of a
    convolution the number of taps, which share its columns with the channels."""

    targets: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    original: tuple[int, ...]
    taps: int = 1


class FormatChooser:
    """Chooses formats for the weights of one model; a mixture looks at all of them first."""

    def __init__(self, recipe: QuantConfig, config: Any, weights: Sequence[Described]) -> None:
        self.recipe = recipe
        self.later: dict[str, str] = {}
        """Parameters that the first choice cannot store, and the formats that store them."""
        self.decisions: list[tuple[str, str, str]] = []
        self._mixed = {name: _mix(name, config, weights) for name in recipe.mixtures}

    def choose(self, weight: Described) -> tuple[str | None, str]:
        """The first of the recipe's formats that can store the weight (None: it is not quantised), and the reason.

        A convolution without a rule of its own takes int8 per row as the last alternative.  If no choice fits, the
        result is the first, whose own error names the way out.
        """
        text, why = self.recipe.choose(weight.targets, weight.kind)
        if text is None:
            return text, why
        if text in MIXTURES:
            text, role = self._mixed[text][weight.targets[0]]
            why = f"{why}; {role}" if why else role
        elif weight.kind == "conv" and not why:
            text += ", else int8"
        refused: list[str] = []
        for name in choices(text):
            if name != "float":
                try:
                    resolve_format(name).nbytes(*weight.shape)
                except FormatShapeError:
                    refused.append(f"{format_text(parse_format(name))} does not divide its {_columns(weight)}")
                    continue
            if refused:
                self.later[weight.targets[0]] = name
                self.decisions.append(("insert-qdq", weight.targets[0], f"stored as {name}: {refused[-1]}"))
            return None if name == "float" else name, "; ".join(filter(None, [why, *refused]))
        return choices(text)[0], why

    def promise(self, rows: Sequence[LedgerRow]) -> float | None:
        """The promised bits per weight. A preset's promise assumes the first choice for each weight, and the extra bits
        of alternatives are added; a promise of the user's own does not change."""
        promise = self.recipe.promise_bits
        assert promise is None or isinstance(promise, int | float)
        if promise is None or not self.later or not self.recipe.promises_by_preset:
            return promise
        counted = [row for row in rows if row.counts]
        later = [row for row in counted if row.parameters[0] in self.later]
        more = sum(max(8.0 * row.bytes_after - promise * row.elements, 0.0) for row in later)
        return promise + math.ceil(1000 * more / sum(row.elements for row in counted)) / 1000


def _columns(weight: Described) -> str:
    """`144 columns`; for a convolution with what they are, since blocks lie along taps and channels together."""
    columns = weight.shape[1]
    return f"{columns} columns" + (f" ({weight.taps} taps of {columns // weight.taps} channels)" * (weight.taps > 1))


def _mix(name: str, config: Any, weights: Sequence[Described]) -> dict[str, tuple[str, str]]:
    """By parameter: the formats in order, and the role that decided."""
    matrices = [matrix_of(weight.targets) for weight in weights]
    facts = facts_of(config, [(matrix, weight.original) for matrix, weight in zip(matrices, weights, strict=True)])
    found: dict[str, tuple[str, str]] = {}
    for weight, matrix, text in zip(weights, matrices, choose_mixture(name, matrices, facts), strict=True):
        where = matrix.role if matrix.layer is None else f"{matrix.role} of layer {matrix.layer}"
        later = f", else {ALTERNATIVE_FORMAT[text]}" if text in ALTERNATIVE_FORMAT else ""
        found[weight.targets[0]] = ("float" if text is None else f"{text}{later}, else float", f"{name}: {where}")
    return found
