"""The weights that a search chooses formats for, the formats that can store each, and what must be stored alike.

layers.0.q_proj.weight    int4 2304 B, q4_K 2304 B, int8 4224 B ┐
layers.0.k_proj.weight    …                                     ├ one item: the passes make one linear of them
layers.0.v_proj.weight    …                                     ┘
embed.weight = head.weight                                        one item: one storage
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompiler.config import QuantConfig, choices, format_text, parse_format, resolve_format
from qcompiler.errors import BudgetError, FormatShapeError, RecipeError
from qcompiler.frontends.quantise.choose_formats import FormatChooser, Kind
from qcompiler.frontends.quantise.graph_weights import GraphWeight, described
from qcompiler.frontends.quantise.sensitivity import FLOAT
from qcompiler.recipes.budgets import Budget
from qcompiler.units import human_bytes

LAST_RESORT = "int8"
"""Stores any matrix: the format of a weight that no candidate can store, as at the end of a preset's chain."""

CANDIDATES = ("int3", "int4", "int8", "q3_K", "q4_K", "q5_K", "q6_K")
"""The default: 3.4 to 8.5 bits. Those with blocks of 256 are left out where they do not divide the columns."""


@dataclass(frozen=True)
class Layer:
    """A weight, or tied weights, with the bytes that it takes in each format that can store it.

    `fixed` says why it has no choice: "" if it has.
    """

    weight: GraphWeight = field(repr=False)
    kind: Kind
    options: Mapping[str, int]
    fixed: str = ""

    @property
    def path(self) -> str:
        return self.weight.targets[0]

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def elements(self) -> int:
        return math.prod(self.weight.tensor.shape)


@dataclass(frozen=True)
class Item:
    """Layers that are stored alike, with the formats that can store all of them."""

    layers: tuple[Layer, ...]
    texts: tuple[str, ...]

    @property
    def fixed(self) -> bool:
        """Whether it has no choice."""
        return any(layer.fixed for layer in self.layers)

    def nbytes(self, text: str) -> int:
        return sum(layer.options[text] for layer in self.layers)


MOST_BITS = 1024.0
"""More bits than any storage of a weight takes."""


@dataclass(frozen=True)
class Kept:
    """What no recipe changes: bytes of parameters that count as weights and their elements, and all other bytes."""

    counted: int
    elements: int
    others: int

    def bits(self, nbytes: int) -> float:
        """Bits per weight, as in the ledger, where the items take so many bytes."""
        return 8 * (nbytes + self.counted) / self.elements

    def total(self, nbytes: int) -> int:
        """The bytes of all stored tensors."""
        return nbytes + self.counted + self.others

    def room(self, budget: Budget, least: int, within: str = "") -> int:
        """The bytes of a size that are left for the items. BudgetError if they take `least` at least; `within` says of
        which of the recipes that is the smallest."""
        if budget.kind == "bits":
            found = math.floor(min(budget.amount, MOST_BITS) * self.elements / 8 + 1e-9) - self.counted
        else:
            found = math.floor(budget.amount) - self.counted - self.others
        if found < least:
            raise BudgetError(
                f"{budget.text}: the smallest recipe of these candidates{within} takes {self.bits(least):.3f} bits per "
                f"weight, {human_bytes(self.total(least))} in all ({human_bytes(self.counted + self.others)} of it are "
                "tensors that no recipe quantises). Add candidates of fewer bits, or give a larger budget"
            )
        return found


def checked_candidates(candidates: Iterable[str] | None) -> tuple[str, ...]:
    """The candidates, each once. RecipeError for none and for a mixture; UnknownFormatError."""
    if isinstance(candidates, str):
        raise RecipeError(f"candidates={candidates!r} is one format; give a list of them")
    if candidates is not None and not isinstance(candidates, Iterable):
        raise RecipeError(f"candidates={candidates!r}: give a list of formats, such as ['nf4', 'q4_K', 'int8']")
    found: dict[str, str] = {}
    for text in CANDIDATES if candidates is None else candidates:
        if not isinstance(text, str) or len(choices(text)) > 1:
            raise RecipeError(f"candidates: {text!r} is no single format; a candidate is a text such as 'q4_K'")
        found.setdefault(text if text == FLOAT else format_text(parse_format(text)), text)
    if not found:
        raise RecipeError("candidates is empty: name the formats to choose from, such as ['nf4', 'q4_K', 'int8']")
    return tuple(found.values())


def layers_of(
    weights: Sequence[GraphWeight], config: Any, candidates: Sequence[str], rules: Any, states: Collection[str] = ()
) -> tuple[list[Layer], Kept]:
    """The layers that a recipe may name, and what is kept. `rules` fix the format of those that they match. Buffers in
    `states`, which the model writes (a cache), are not counted: their size is not that of the weights.

    RecipeError for a rule that matches nothing, and for a model without weights to choose for.
    """
    open_ = [weight for weight in weights if weight.kinds and weight.codes is None]
    recipe = QuantConfig(FLOAT, rules=rules)
    recipe.check_rules([target for weight in open_ for target in weight.targets], _modules(weights))
    chooser = FormatChooser(recipe, config, [described(weight) for weight in open_])
    layers = [_layer(weight, candidates, recipe, chooser) for weight in open_]
    if not any(not layer.fixed for layer in layers):
        raise RecipeError(
            "there is nothing to choose: each linear, convolution and embedding in floats has a rule, or columns that "
            "no candidate can store"
        )
    counted = elements = others = 0
    for weight in weights:
        if weight.is_parameter and weight.tensor.ndim >= 2:
            elements += weight.tensor.numel()
            counted += 0 if weight.kinds and weight.codes is None else _stored_bytes(weight)
        elif weight.targets[0] not in states:
            others += _stored_bytes(weight)
    return layers, Kept(counted, elements, others)


def _layer(weight: GraphWeight, candidates: Sequence[str], recipe: QuantConfig, chooser: FormatChooser) -> Layer:
    kind = described(weight).kind
    if any(rule.matches(target) for rule in recipe.all_rules for target in weight.targets):
        text, why = chooser.choose(described(weight))
        text = text or FLOAT
        return Layer(weight, kind, _options(weight, [text]) or {text: _bytes(weight, text)}, why or "rules")
    found = _options(weight, candidates)
    if found:
        return Layer(weight, kind, found)
    why = f"no candidate can store its {weight.shape[1]} columns"
    return Layer(weight, kind, _options(weight, [LAST_RESORT]), why)


def _options(weight: GraphWeight, texts: Sequence[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        try:
            found[text] = _bytes(weight, text)
        except FormatShapeError:
            continue
    return found


def _bytes(weight: GraphWeight, text: str) -> int:
    if text == FLOAT:
        return weight.tensor.numel() * weight.tensor.element_size()
    return resolve_format(text).nbytes(*weight.shape)


def _stored_bytes(weight: GraphWeight) -> int:
    """Bytes of a weight that is kept: the source's codes, or the model's own values."""
    if weight.codes is not None:
        return weight.codes.format.nbytes(*weight.shape)
    return weight.tensor.numel() * weight.tensor.element_size()


def items_of(layers: Sequence[Layer], merged: Iterable[Sequence[str]]) -> list[Item]:
    """`merged` are groups of paths that are stored alike, if a format can store all of a group."""
    by_path = {target: layer for layer in layers for target in layer.weight.targets}
    taken: dict[str, Item] = {}
    for paths in merged:
        group = tuple({by_path[path].path: by_path[path] for path in paths if path in by_path}.values())
        group = tuple(layer for layer in group if not layer.fixed and layer.path not in taken)
        texts = tuple(text for text in (group[0].options if group else ()) if all(text in g.options for g in group))
        if len(group) > 1 and texts:
            taken.update(dict.fromkeys((layer.path for layer in group), Item(group, texts)))
    items = [taken.get(layer.path) or Item((layer,), tuple(layer.options)) for layer in layers]
    return list({id(item): item for item in items}.values())


def _modules(weights: Sequence[GraphWeight]) -> list[str]:
    found: dict[str, None] = {}
    for weight in weights:
        for target in weight.targets:
            parts = target.split(".")[:-1]
            found.update(dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1)))
    return list(found)


__all__ = ["CANDIDATES", "Item", "Kept", "Layer", "checked_candidates", "items_of", "layers_of"]
