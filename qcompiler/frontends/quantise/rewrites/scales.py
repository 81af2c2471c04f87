"""Chooses the scales of channels: SmoothQuant, AWQ and equalisation. Each gives s (channels,), fp64 and positive.

    smooth      s = max|x|^a / max|w|^(1 - a)                        SmoothQuant, arXiv 2211.10438
    equalise    s = sqrt(r1 * r2) / r2 with the ranges r1 of the producer's rows and r2 of the readers' columns:
                both ranges become equal                             arXiv 1906.04721, no data needed
    awq         the s of a grid with the least squared error of the readers' outputs when their weights are quantised
                (and their inputs, where the recipe quantises those) AWQ, arXiv 2306.00978

The producer's channels are divided by s, the readers' columns are multiplied.  A channel that may not move, or that is
zero for all inputs or in all weights, has s = 1.  For models in bf16 and fp16 the scales are powers of two: then moving
them changes no bit, where a rounded product would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from qcompiler.config import resolve_format
from qcompiler.formats import Format
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear
from qcompiler.frontends.quantise.rewrites.channel_statistics import ColumnStatistics
from qcompiler.frontends.quantise.rewrites.scale_groups import Group, Reader
from qcompiler.frontends.torch.common.values import row_major, to_numpy
from qcompiler.runtime.encoder import encode

LARGEST_SCALE = 2.0**14
"""Scales stay within its inverse and itself: products with them neither overflow nor vanish in fp32."""

STEPS = 20
"""Steps of AWQ's exponent between 0 and 1, as in the paper's implementation."""

Values = Callable[[GraphWeight], torch.Tensor]
Statistics = Mapping[str, ColumnStatistics]


def settled(scales: torch.Tensor, group: Group) -> torch.Tensor:
    """Scales that can be used: one where a channel may not move or has no finite scale, and within the limits."""
    usable = group.free & scales.isfinite() & (scales > 0)
    if bool(group.free.all()) and bool(usable.any()):  # a common factor changes no error; it keeps the gain's size
        scales = scales / scales[usable].log().mean().exp()
    scales = torch.where(usable, scales, 1.0).clamp(1 / LARGEST_SCALE, LARGEST_SCALE)
    if group.dtype != torch.float32:
        scales = scales.log2().round().exp2()
    return scales


def by_channel(group: Group, found: Sequence[tuple[Reader, torch.Tensor]], how: str) -> torch.Tensor:
    """Values of columns (K,) of several readers, the largest or the sum for each channel of the group."""
    total = torch.zeros(group.channels, dtype=torch.float64)
    for reader, columns in found:
        total = total.scatter_reduce(0, reader.read.channels, columns.double(), how)
    return total


def smooth(group: Group, values: Values, statistics: Statistics, exponent: float) -> torch.Tensor:
    """SmoothQuant's scales."""
    largest_x = by_channel(group, [(r, statistics[r.weight.targets[0]].largest) for r in group.readers], "amax")
    columns = [(r, r.by_column(values(r.weight)).abs().amax(0)) for r in group.readers]
    largest_w = by_channel(group, columns, "amax")
    scales = largest_x**exponent / largest_w ** (1 - exponent)
    return settled(torch.where((largest_x > 0) & (largest_w > 0), scales, torch.nan), group)


def equalise(group: Group, values: Values) -> torch.Tensor:
    """The scales that make the ranges of the producer's rows and the readers' columns equal."""
    vector = group.vectors[0]
    rows = values(vector.weight).double().movedim(vector.axis, 0).reshape(group.channels, -1)
    first = (rows + vector.offset).abs().amax(1)
    second = by_channel(group, [(r, r.by_column(values(r.weight)).abs().amax(0)) for r in group.readers], "amax")
    scales = (first / second).sqrt()
    return settled(torch.where((first > 0) & (second > 0), scales, torch.nan), group)


# --- AWQ -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The scales of a group, how they were made, and squared errors of the outputs as a share of their squares."""

    scales: torch.Tensor
    text: str
    nearest_error: float
    error: float


@dataclass(frozen=True, eq=False)
class _Product:
    """A reader whose weight is encoded: w (N, K) in stored order, rows of its inputs, and what they give."""

    reader: Reader
    format: Format
    weight: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor

    @staticmethod
    def of(reader: Reader, values: Values, sample: Sequence[torch.Tensor]) -> _Product:
        assert reader.weight.format is not None
        weight = row_major(reader.weight.arranged(values(reader.weight))).to(torch.float32)
        x = torch.cat(list(sample))
        return _Product(reader, resolve_format(reader.weight.format), weight, x, x @ weight.T)

    def error(self, scales: torch.Tensor, int8_rows: bool) -> float:
        """The squared error of the outputs if columns have these scales (of channels)."""
        columns = scales[self.reader.read.channels].to(torch.float32)
        x = self.x / columns
        importance = to_numpy((x**2).mean(0)) if self.format.takes_importance else None
        packed = encode(self.format, to_numpy(self.weight * columns), importance=importance)
        decoded = torch.from_numpy(np.ascontiguousarray(self.format.decode(packed), dtype=np.float32))
        if int8_rows:
            step = x.abs().amax(1, keepdim=True) / 127
            step = torch.where(step > 0, step, 1.0)
            x = (x / step).round() * step
        return float(((x @ decoded.T - self.y) ** 2).sum(dtype=torch.float64))


def awq(group: Group, values: Values, statistics: Statistics, *, int8_rows: bool) -> Chosen | None:
    """The best scales of the grid: s = m(x)^a and m(x)^a / m(w)^(1 - a), m the mean magnitude of a channel.

    The second family does not depend on how the model divides a scale between activations and weights.  None if no
    reader of the group is a quantised linear.
    """
    quantised = [each for each in group.readers if is_quantised_linear(each.weight) and each.weight.codes is None]
    if not quantised:
        return None
    products = [_Product.of(each, values, statistics[each.weight.targets[0]].sample) for each in quantised]
    total = max(sum(float((each.y**2).sum(dtype=torch.float64)) for each in products), 1e-300)

    def error(scales: torch.Tensor) -> float:
        return sum(each.error(scales, int8_rows) for each in products) / total

    none = torch.ones(group.channels, dtype=torch.float64)
    best = Chosen(none, "no scales", error(none), 0.0)
    best = Chosen(none, "no scales", best.nearest_error, best.nearest_error)
    for text, scales in _grid(group, products, statistics):
        found = error(scales)
        if found < best.error:
            best = Chosen(scales, text, best.nearest_error, found)
    return best


def _grid(group: Group, products: Sequence[_Product], statistics: Statistics) -> list[tuple[str, torch.Tensor]]:
    x = by_channel(group, [(p.reader, statistics[p.reader.weight.targets[0]].mean) for p in products], "amax")
    rows = sum(len(each.weight) for each in products)
    w = by_channel(group, [(p.reader, p.weight.abs().sum(0)) for p in products], "sum") / rows
    alive = (x > 0) & (w > 0)
    found = []
    for step in range(STEPS + 1):
        a = step / STEPS
        found.append((f"x^{a:g} / w^{1 - a:g}", torch.where(alive, x**a / w ** (1 - a), torch.nan)))
        if 0 < step < STEPS:
            found.append((f"x^{a:g}", torch.where(alive, x**a, torch.nan)))
    settle = functools.partial(settled, group=group)
    return [(text, settle(scales)) for text, scales in found]


__all__ = ["Chosen", "awq", "equalise", "settled", "smooth"]
