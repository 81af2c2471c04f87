"""What scales of channels are chosen by: the largest and the mean magnitude of each column, and some rows of inputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qcompiler.errors import CalibrationError
from qcompiler.frontends.quantise.graph_run import GraphRun, Watched
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.rewrites.scale_groups import Group
from qcompiler.runtime.progress import Counted

ROWS = 512
"""Rows that are kept of each group's inputs, over all inputs."""


@dataclass
class ColumnStatistics:
    """Of the inputs x (rows, K) of one linear: max|x| and the sum of |x| by column, in fp64, and rows in fp32."""

    largest: torch.Tensor
    total: torch.Tensor
    rows: int = 0
    sample: list[torch.Tensor] = field(default_factory=list)

    def add(self, path: str, x: torch.Tensor, keep: int) -> None:
        """Adds rows, and keeps `keep` of them, evenly spaced. CalibrationError for values that are not finite."""
        flat = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).cpu()
        if not flat.numel():
            return
        magnitudes = flat.abs()
        largest = magnitudes.amax(0).double()
        if not torch.isfinite(largest).all():
            column = int((~torch.isfinite(largest)).nonzero()[0])
            raise CalibrationError(
                f"an input of '{path}' holds NaN or infinity (column {column}); leave that input out of `calibrate`, "
                "or repair the model"
            )
        self.largest = torch.maximum(self.largest, largest)
        self.total += magnitudes.sum(0, dtype=torch.float64)
        self.rows += len(flat)
        if keep:
            places = torch.linspace(0, len(flat) - 1, min(keep, len(flat))).round().long()
            self.sample.append(flat[places].clone())

    @property
    def mean(self) -> torch.Tensor:
        return self.total / max(self.rows, 1)


def measure(
    tensors: GraphTensors, weights: Sequence[GraphWeight], groups: Sequence[Group], inputs: Sequence[Any], *, keep: bool
) -> dict[str, ColumnStatistics]:
    """Statistics of the inputs of every reader of `groups`, by the path of its weight; `keep` keeps rows, too."""
    watched, found, axes = [], {}, {}
    for group in groups:
        for reader in group.readers:
            path, cols = reader.weight.targets[0], len(reader.read.channels)
            axes[path] = reader.channel_axis
            reads = (reader.read, *reader.others)
            watched.append(Watched(path, cols, tuple((read.node, read.x) for read in reads)))
            found[path] = ColumnStatistics(
                torch.zeros(cols, dtype=torch.float64), torch.zeros(cols, dtype=torch.float64)
            )
    values = {node.name: functools.partial(tensors.value, weight) for weight in weights for node in weight.nodes}
    run = GraphRun(tensors.program, watched, values)
    each = -(-ROWS // max(len(inputs), 1)) if keep else 0
    with Counted("measuring channels", len(inputs), "inputs") as progress:
        for given in inputs:
            run.feed(run.leaves(given), lambda path, x: found[path].add(path, x.movedim(axes[path], -1), each))
            progress.step(1)
    return found


__all__ = ["ColumnStatistics", "measure"]
