"""AWQ's scales in a working folder: after a kill, the search goes on behind the last group that is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qcompiler.frontends.quantise.calibrate import chained_digest
from qcompiler.frontends.quantise.graph_run import GraphRun
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.numbered_files import NumberedFiles
from qcompiler.frontends.quantise.rewrites import channel_statistics, scales
from qcompiler.frontends.quantise.rewrites.scale_groups import Group
from qcompiler.frontends.quantise.rewrites.scales import Chosen

VERSION = 1
_NAMES = ("scales", "text", "errors")


@dataclass(frozen=True)
class ScalesJournal:
    """``scales-<digest>-<number>.npz``: what was chosen for each group, in the order of the graph."""

    files: NumberedFiles

    @staticmethod
    def of(
        folder: Path,
        tensors: GraphTensors,
        weights: Sequence[GraphWeight],
        groups: Sequence[Group],
        inputs: Sequence[Any],
        *,
        int8_rows: bool,
    ) -> ScalesJournal:
        """The journal of a search that begins with the present values of `weights`."""
        run, chain = GraphRun(tensors.program, [], {}), ""
        for given in inputs:
            chain = chained_digest(chain, run.leaves(given))
        facts = [
            VERSION, scales.STEPS, scales.LARGEST_SCALE, channel_statistics.ROWS, int8_rows, str(tensors.program.graph),
            [_described(group) for group in groups], chain, tensors.identities(weights),
        ]  # fmt: skip
        return ScalesJournal(NumberedFiles.of(folder, "scales", facts, "its scales are searched again"))

    def read_all(self, groups: Sequence[Group]) -> dict[int, Chosen]:
        """What is known, by the number of the group."""
        known = {}
        for number, group in enumerate(groups):
            found = self.files.read(number, _NAMES)
            if found is None:
                continue
            vector, text, errors = found
            fits = vector.dtype == errors.dtype == np.float64 and vector.shape == (group.channels,)
            if not fits or errors.shape != (2,) or not (np.isfinite(vector) & (vector > 0)).all():
                self.files.refuse(number)
                continue
            known[number] = Chosen(torch.from_numpy(vector), str(text), float(errors[0]), float(errors[1]))
        return known

    def write(self, number: int, chosen: Chosen) -> None:
        errors = np.array([chosen.nearest_error, chosen.error])
        text = np.array(chosen.text)
        self.files.write(number, {"scales": chosen.scales.numpy(), "text": text, "errors": errors})


def _described(group: Group) -> list[Any]:
    """JSON that identifies a group, but for its values."""
    free = hashlib.sha256(group.free.numpy().tobytes()).hexdigest()
    readers = [(each.weight.targets[0], each.weight.format, each.axis) for each in group.readers]
    return [group.path, group.kind, free, readers]


__all__ = ["ScalesJournal"]
