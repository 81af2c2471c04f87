"""What `qc.search` found: the front of recipes, the one that was chosen, and reports of both."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qcompiler.calibrate.knapsack import Front
from qcompiler.calibrate.two_budgets import LimitedFront
from qcompiler.config import QuantConfig, Rule
from qcompiler.errors import ArgumentError, BudgetError
from qcompiler.frontends.quantise.judge import Distance
from qcompiler.frontends.quantise.sensitivity import FLOAT, Effect
from qcompiler.recipe_files import recipe_text
from qcompiler.recipes import charts, drawing
from qcompiler.recipes.budgets import Budget
from qcompiler.recipes.layer_report import LayerReport, report_of
from qcompiler.recipes.layers import Item, Kept, Layer
from qcompiler.recipes.speed import Times
from qcompiler.runtime.files import replacing
from qcompiler.units import human_bytes, human_nanoseconds

POINTS = 16
"""The most points of the printed front."""
RUNS = 12
"""The most runs of whole recipes for a bound."""
STEPS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Bits between two points."""
PADDING_BITS = 0.05
"""Bits per weight beyond its own that a recipe allows for the padding of layouts, before a compile is an error."""

Effects = Mapping[tuple[str, str], Effect]


@dataclass(frozen=True)
class Point:
    """A recipe of the front: its size, the estimated distance from the float model, and the true one if it was run.

    `bits` are bits per weight as in the ledger, `nbytes` all stored tensors, both without a layout's padding.
    `formats` has the format of each weight by its first path.  `error` is one standard error over the inputs.  `ns` is
    the measured time of the linears of a call in nanoseconds, in a search with a budget of speed.
    """

    name: str
    bits: float
    nbytes: int
    estimate: float
    formats: Mapping[str, str] = field(repr=False)
    recipe: QuantConfig = field(repr=False)
    measured: float | None = None
    error: float | None = None
    ns: int | None = None

    @property
    def summary(self) -> str:
        """How many weights have each format: "12 q4_K, 9 q6_K"."""
        found = collections.Counter(self.formats.values()).most_common()
        return ", ".join(f"{count} {text}" for text, count in found)


@dataclass
class SearchResult:
    """The front of recipes for one model and its data. `chosen` is the point for the budget.

    `measure` is "kl" (nats) or "error" (squared, relative); `compared` says of which outputs.
    """

    items: Sequence[Item]
    effects: Effects
    kept: Kept
    solved: Front | LimitedFront
    measure: str
    compared: str
    run: Callable[[Mapping[str, str]], Distance]
    notes: tuple[str, ...] = ()
    times: Times | None = None
    front: list[Point] = field(default_factory=list)
    chosen_name: str = ""

    def __post_init__(self) -> None:
        self.front = self._grid()

    # --- points ---

    @property
    def _within_speed(self) -> str:
        return "" if self.times is None else f" that keep {self.times.speed.text!r}"

    @property
    def chosen(self) -> Point:
        """The point for the budget."""
        return self.point(self.chosen_name)

    @property
    def recipe(self) -> QuantConfig:
        """The chosen recipe, for `quant=`."""
        return self.chosen.recipe

    def point(self, name: str) -> Point:
        """The point of that name, or the best one for a budget. A bound takes the estimates.

        BudgetError for a budget that no recipe meets.
        """
        for each in self.front:
            if each.name == name:
                return each
        budget = Budget.of(name)
        return next((each for each in self.front if each.name == budget.text), None) or self._within(budget)

    def point_of(self, chosen: Sequence[int]) -> Point:
        """The point of a choice of one's own: for each item of `items` the number of its format."""
        return self._made("", chosen)

    def verify(self, name: str) -> Point:
        """The point with its true distance on the data, measured by a run of the whole quantised graph."""
        point = self.point(name)
        if point.measured is None:
            found = self.run(point.formats)
            point = replace(point, measured=found.mean, error=found.error)
        self._keep(point)
        return point

    def choose(self, budget: Budget) -> None:
        """Makes the best point for a size the chosen one, and measures it."""
        self.chosen_name = self.verify(budget.text).name

    def choose_measured(self, budget: Budget) -> None:
        """Makes the smallest point that was found to meet a bound the chosen one.

        True runs narrow the sizes between one that misses the bound and one that meets it, down to a hundredth of the
        front.  The next size is where the estimate, scaled by the last run, meets the bound, else the middle.
        BudgetError if the largest recipe misses the bound.
        """
        low, high, best = self.solved.least - 1, self.solved.most, None
        close = max((high - low) // 100, self.solved.unit)
        at = self._reaching(budget.amount)
        for _ in range(RUNS):
            found = self._measured(at)
            assert found.measured is not None
            if found.measured < budget.amount:
                best, high = found, at if self.solved.slack else self._items_bytes(found)
            else:
                low = at
            if high - low <= close and (best is not None or at == self.solved.most):
                break
            at = self._reaching(found.estimate * budget.amount / found.measured) if found.measured else low + 1
            if not low < at < high:
                at = (low + high) // 2 if best is not None or high - low > close else self.solved.most
        if best is None and at != self.solved.most:
            found = self._measured(self.solved.most)
            best = found if (found.measured or 0.0) < budget.amount else None
        if best is None:
            raise BudgetError(
                f"{budget.text}: no recipe of these candidates{self._within_speed} was found that meets it. With "
                f"{found.bits:.2f} bits per weight {self.measure} is {found.measured:.3g} on the data. Add "
                "candidates of more bits, such as 'int8', or 'float'"
            )
        self.front = [each for each in self.front if each.name != best.name]
        self._keep(replace(best, name=budget.text))
        self.chosen_name = budget.text

    def _reaching(self, estimate: float) -> int:
        """The smallest budget with this estimate; that of the largest recipe if none has it."""
        chosen = self.solved.reaching(estimate)
        return self.solved.most if chosen is None else self.solved.budget(chosen)

    def _measured(self, nbytes: int) -> Point:
        """The best point of this size, measured, under the name of its size."""
        chosen = self.solved.within(nbytes)
        assert chosen is not None
        point = self._made("", chosen)
        found = self.run(point.formats)
        name = f"{math.ceil(1000 * point.bits) / 1000:.3f} bits"  # rounded up: a budget that the point meets
        point = replace(point, name=name, measured=found.mean, error=found.error)
        self._keep(point)
        return point

    def _keep(self, point: Point) -> None:
        others = [each for each in self.front if each.name != point.name]
        self.front = sorted([*others, point], key=lambda each: (each.nbytes, each.name))

    def _within(self, budget: Budget) -> Point:
        if not budget.is_size:
            if budget.kind != self.measure:
                raise BudgetError(f"{budget.text}: this search measures {self.measure} ({self.compared})")
            chosen = self.solved.reaching(budget.amount)
            if chosen is None:
                raise BudgetError(
                    f"{budget.text}: the least estimate of these candidates is {self.solved.lowest:.3g}. Add "
                    "candidates of more bits, such as 'int8', or 'float'"
                )
            return self._made(budget.text, chosen)
        chosen = self.solved.within(self.kept.room(budget, self.solved.least, self._within_speed))
        assert chosen is not None
        return self._made(budget.text, chosen)

    def _items_bytes(self, point: Point) -> int:
        return point.nbytes - self.kept.total(0)

    def _made(self, name: str, chosen: Sequence[int]) -> Point:
        nbytes = self.solved.nbytes(chosen)
        formats = {
            layer.path: item.texts[place]
            for item, place in zip(self.items, chosen, strict=True)
            for layer in item.layers
        }
        bits, total = self.kept.bits(nbytes), self.kept.total(nbytes)
        texts = [item.texts[place] for item, place in zip(self.items, chosen, strict=True)]
        ns = None if self.times is None else self.times.total(texts)
        return Point(name, bits, total, self.solved.cost(chosen), formats, self._recipe(formats, bits), ns=ns)

    def _grid(self) -> list[Point]:
        """Points at round numbers of bits, with the smallest and the largest recipe."""
        least, most = (self._made(name, self.solved.within(at) or []) for name, at in
                       (("least", self.solved.least), ("most", self.solved.most)))  # fmt: skip
        step = next((each for each in STEPS if (most.bits - least.bits) / each <= POINTS - 2), STEPS[-1])
        points = [least]
        for number in range(math.ceil(least.bits / step), math.ceil(most.bits / step)):
            point = self._within(Budget.of(f"{number * step:.2f} bits"))
            if points[-1].formats != point.formats:
                points.append(point)
        return [*points, most] if most.formats != points[-1].formats else points

    # --- recipes ---

    def _recipe(self, formats: Mapping[str, str], bits: float) -> QuantConfig:
        """The most common format of each kind as the default, and a rule for each weight of another."""
        layers = [layer for item in self.items for layer in item.layers]
        embedding = _most_common(formats[layer.path] for layer in layers if layer.kind == "embedding")
        linear = _most_common(formats[layer.path] for layer in layers if layer.kind != "embedding")
        modules = collections.Counter(layer.module for layer in layers)
        rules = []
        for layer in layers:
            text = formats[layer.path]
            if text != (embedding if layer.kind == "embedding" else linear):
                alone = modules[layer.module] == 1 and layer.module
                pattern = _escaped(layer.module if alone else layer.path)
                rules.append(Rule(pattern, _as_format(text), self._reason(layer, text)))
        promise = math.ceil(bits * 1000) / 1000 + PADDING_BITS
        return QuantConfig(
            FLOAT, linear=_as_format(linear), embedding=_as_format(embedding), rules=tuple(rules),
            promise_bits=round(promise, 3),
        )  # fmt: skip

    def _reason(self, layer: Layer, text: str) -> str:
        if layer.fixed:
            return layer.fixed
        effect = self.effects[layer.path, text]
        return f"alone {self.measure} {effect.cost:.2e}"

    # --- output ---

    def table(self) -> str:
        """The front as text, the chosen point with an arrow."""
        timed = ("linears",) if self.times is not None else ()
        head = ("", "name", "bits", "bytes", *timed, f"{self.measure}, estimate", f"{self.measure}, true", "weights")
        rows = [head]
        for each in self.front:
            true = "" if each.measured is None else f"{each.measured:.3e}"
            if each.error is not None and not math.isnan(each.error):
                true += f" ± {each.error:.0e}"
            mark = "->" if each.name == self.chosen_name else ""
            taken = () if each.ns is None else (human_nanoseconds(each.ns),)
            rows.append((mark, each.name, f"{each.bits:.3f}", human_bytes(each.nbytes), *taken,
                         f"{each.estimate:.3e}", true, each.summary))  # fmt: skip
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._speed_notes(), *self.notes])

    def _speed_notes(self) -> list[str]:
        """The limit, and the bound of what a better solution could gain."""
        if self.times is None or not isinstance(self.solved, LimitedFront):
            return []
        rows, limit = self.times.speed.rows, human_nanoseconds(self.times.limit)
        return [
            f"linears: at most {limit} ({self.times.speed.text}), measured on this machine with {rows} "
            f"row{'s' * (rows != 1)} of x; no recipe within both budgets has an estimate lower by more than "
            f"{self.solved.gap:.2g} %"
        ]

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | Path, name: str | None = None) -> None:
        """Writes the chosen recipe, or that of the point `name`, as a file that `quant=` takes."""
        path = Path(path)
        if path.suffix != ".toml":
            raise ArgumentError(f"{path}: a recipe's name ends in .toml, by which quant= knows it")
        point = self.point(name) if name is not None else self.chosen
        true = "" if point.measured is None else f", on the data {point.measured:.3e}"
        speed = ""
        if point.ns is not None and self.times is not None:
            speed = f", linears {human_nanoseconds(point.ns)} (at most {self.times.speed.text})"
        heading = (
            f"made by qc.search for {point.name}: {point.bits:.3f} bits per weight, {human_bytes(point.nbytes)}{speed}",
            f"{self.measure}: estimate {point.estimate:.3e}{true} (of {self.compared})",
        )
        with replacing(path) as file:
            file.write(recipe_text(point.recipe, heading).encode())

    def plot(self, path: str | Path) -> None:
        """Draws the front as .svg or .png: bits per weight, and the distance on a logarithmic scale."""
        drawing.save(path, charts.front(self.front, self.chosen_name, self.measure))

    def report(self, name: str | None = None) -> LayerReport:
        """What each layer does to the chosen point, or to the point `name`, and what would mend the worst."""
        point = self.point(name) if name is not None else self.chosen
        return report_of(self.items, self.effects, point.formats, self.measure, point.name)


def _most_common(texts: object) -> str:
    found = collections.Counter(texts)  # type: ignore[call-overload]
    return str(found.most_common(1)[0][0]) if found else FLOAT


def _as_format(text: str) -> str | None:
    return None if text == FLOAT else text


def _escaped(path: str) -> str:
    """A glob that matches the path alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in path)


__all__ = ["Point", "SearchResult"]
