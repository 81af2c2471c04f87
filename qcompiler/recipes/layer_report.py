"""What each layer does to a quantised model, and what would mend the layers that hurt most."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qcompiler.frontends.quantise.sensitivity import Effect
from qcompiler.recipes import charts, drawing
from qcompiler.recipes.layers import Item
from qcompiler.units import human_bytes

WORST = 5
"""Layers that are named with what would mend them."""


@dataclass(frozen=True)
class LayerRow:
    """One weight in its format.

    `cost` is the distance of the model's outputs when only this weight is quantised.  `weight_error` is the relative
    root mean square error of the weight, `snr` the signal-to-noise ratio of the layer's output in decibels (infinite
    without an error), `channel` its output channel of the lowest ratio, `channel_snr`.  `dead` channels are zero for
    all data.
    """

    parameters: tuple[str, ...]
    format: str
    nbytes: int
    bits: float
    cost: float
    weight_error: float
    snr: float
    channel: int
    channel_snr: float
    dead: int


@dataclass(frozen=True)
class Mend:
    """A format for a layer, and those that are stored alike, that lowers the cost most for each byte."""

    layers: tuple[str, ...]
    format: str
    instead_of: str
    cost: float
    gain: float
    more_bytes: int

    @property
    def text(self) -> str:
        alike = f" with {', '.join(self.layers[1:])}" if len(self.layers) > 1 else ""
        sign, size = "-" if self.more_bytes < 0 else "+", human_bytes(abs(self.more_bytes))
        return f"{self.format} instead of {self.instead_of}{alike}: -{self.gain:.2e} for {sign}{size}"


@dataclass(frozen=True)
class LayerReport:
    """The rows in the model's order. `mends` has an entry for each of the layers that hurt most; None: no candidate
    has a lower cost."""

    name: str
    measure: str
    rows: tuple[LayerRow, ...]
    mends: tuple[tuple[str, Mend | None], ...]

    def table(self) -> str:
        """Text: a line for each layer, and the worst with what would mend each."""
        head = ("weight", "format", "bits", f"{self.measure} alone", "weight error", "output SNR", "worst channel")
        rows = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", f"the {len(self.mends)} weights that hurt most, and what would mend each:"]
        for path, mend in self.mends:
            lines.append(f"  {path}: {'no candidate is better' if mend is None else mend.text}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """The rows and the worst, as JSON has them: null for an infinite ratio."""
        rows = [{key: _finite(value) for key, value in asdict(row).items()} for row in self.rows]
        worst = [{"weight": path, "mend": None if mend is None else asdict(mend)} for path, mend in self.mends]
        return {"point": self.name, "measure": self.measure, "layers": rows, "worst": worst}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1)

    def plot(self, path: str | Path) -> None:
        """Draws the cost of each layer alone as .svg or .png, with a logarithmic scale."""
        bars = [(row.parameters[0], row.format, row.cost) for row in self.rows]
        drawing.save(path, charts.bars(bars, f"{self.measure}, one weight quantised ({self.name})"))


def report_of(
    items: Sequence[Item],
    effects: Mapping[tuple[str, str], Effect],
    formats: Mapping[str, str],
    measure: str,
    name: str,
) -> LayerReport:
    """The report of the recipe that stores each weight in its format of `formats`."""
    rows = []
    for item in items:
        for layer in item.layers:
            text = formats[layer.path]
            effect, nbytes = effects[layer.path, text], layer.options[text]
            rows.append(
                LayerRow(
                    tuple(layer.weight.targets), text, nbytes, 8 * nbytes / layer.elements, effect.cost or 0.0,
                    math.sqrt(effect.weight_error), _decibels(effect.output_error), effect.channel,
                    _decibels(effect.channel_error), effect.dead,
                )
            )  # fmt: skip
    worst = sorted(rows, key=lambda row: -row.cost)[:WORST]
    of_path = {layer.path: item for item in items for layer in item.layers}
    mends = tuple((row.parameters[0], _mend(of_path[row.parameters[0]], row, effects)) for row in worst)
    return LayerReport(name, measure, tuple(rows), mends)


def _mend(item: Item, row: LayerRow, effects: Mapping[tuple[str, str], Effect]) -> Mend | None:
    def cost(text: str) -> float:
        return math.fsum(effects[layer.path, text].cost or 0.0 for layer in item.layers)

    found: list[tuple[float, Mend]] = []
    paths = (row.parameters[0], *(each.path for each in item.layers if each.path != row.parameters[0]))
    for text in item.texts:
        gain, more = cost(row.format) - cost(text), item.nbytes(text) - item.nbytes(row.format)
        if gain > 0:
            per_byte = gain / more if more > 0 else math.inf
            found.append((per_byte, Mend(paths, text, row.format, cost(text), gain, more)))
    return max(found, key=lambda each: (each[0], each[1].gain))[1] if found else None


def _decibels(error: float) -> float:
    """The signal-to-noise ratio for a squared relative error."""
    return -10 * math.log10(error) if error > 0 else math.inf


def _cells(row: LayerRow) -> tuple[str, ...]:
    tied = f" (+{len(row.parameters) - 1} tied)" if len(row.parameters) > 1 else ""
    dead = f"; {row.dead} dead" if row.dead else ""
    worst = f"{row.channel}: {_text(row.channel_snr)}{dead}"
    error = f"{100 * row.weight_error:.2f} %"
    return (row.parameters[0] + tied, row.format, f"{row.bits:.2f}", f"{row.cost:.2e}", error, _text(row.snr), worst)


def _text(decibels: float) -> str:
    return "exact" if math.isinf(decibels) else f"{decibels:.1f} dB"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["LayerReport", "LayerRow", "Mend", "report_of"]
