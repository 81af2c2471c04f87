"""The codes of a compiled program in place of a folder's values, for checkpoints that are written from it.

A program holds the codes that its compilation chose (`algorithm="gptq"`, say) beside tensors in floating point.  They
may stand in a folder or a file of that model only if the rest is the model's own.  So a tensor in floating point must
have the folder's values, and codes must be nearer to the folder's weight than zeros are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from qcompiler.errors import ArgumentError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.transcode import loss_of
from qcompiler.frontends.quantise.stored_places import StoredPlace, places_of
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import InFile
from qcompiler.plan.moved import why_moved
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.memory import Bytes

FARTHEST = 1.0
"""Codes of a matrix W have a relative error below this, which is that of zeros; tq1_0 and tq2_0 have 0.8, q2_K has 0.3.

Codes of an unrelated matrix V have sqrt(|W|² + |V|²) / |W|.
"""

WITHOUT_REWRITES = (
    "; compile the folder without smooth, equalise, rotate, rotate_online, correct_bias and algorithm='awq'"
)
_NO_PROGRAM_OF_IT = "it is no program of this folder"


@dataclass(frozen=True)
class ProgramCodes:
    """The weights of a program of `folder`, by parameter."""

    folder: Path
    places: Mapping[str, StoredPlace] = field(default_factory=dict)
    weights: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    """The program's file of weights."""

    @classmethod
    def of(cls, program: Any, folder: Path) -> Self:
        """ArgumentError if it is no program, WeightsError if it holds no values, or moved ones."""
        image = program
        if not isinstance(program, ProgramImage):
            image = getattr(getattr(program, "program", program), "image", None)
        if not isinstance(image, ProgramImage):
            raise ArgumentError(
                f"program={program!r:.60} is no program: give what qcompile or compile_causal_lm returns"
            )
        image.require_values()
        image.require_unchanged()
        if moved := why_moved(image.plan):  # columns times s belong to a norm whose gain is divided by s
            way_out = WITHOUT_REWRITES if image.plan.moved else ""
            raise WeightsError(f"the codes of a program go into a folder with its model's weights: {moved}{way_out}")
        return cls(folder, places_of(image.plan), image.weights)

    def for_model(self, module: torch.nn.Module) -> Self:
        """The same with every name that a tied parameter has in the folder's model.

        WeightsError for a parameter that the model lacks, and for a tied one that the program stores as two tensors.
        """
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        places: dict[str, StoredPlace] = {}
        for name, place in self.places.items():
            tied = names.get(id(self._in_model(module, name)), [name])
            self._require_same(tied, places.get(tied[0], place), place)
            places |= dict.fromkeys(tied, place)
        return replace(self, places=places)

    def _in_model(self, module: Any, name: str) -> Any:
        """The model's tensor of that name; None for a constant of the graph, whose name has no dot."""
        path, _, attribute = name.rpartition(".")
        holder = module
        for part in path.split(".") if path else ():
            holder = getattr(holder, part, None)
        found = getattr(holder, attribute, None)
        if path and found is None:
            raise WeightsError(
                f"the program has '{name}', and the model of {self.folder} has no such parameter: {_NO_PROGRAM_OF_IT}"
            )
        return found

    def _require_same(self, tied: Sequence[str], first: StoredPlace, second: StoredPlace) -> None:
        if first == second:
            return
        ours, theirs = (
            each.data if isinstance(each, PackedTensor) else each
            for each in (first.read(self.weights), second.read(self.weights))
        )
        if first.format != second.format or not np.array_equal(ours, theirs):
            raise WeightsError(
                f"{' and '.join(tied)} are one tensor in {self.folder} and two in the program, with different codes or "
                f"values: {_NO_PROGRAM_OF_IT}"
            )

    def require_all(self, names: Collection[str]) -> None:
        """WeightsError if the program lacks one of the model's parameters."""
        missing = [name for name in names if name not in self.places]
        if self.places and missing:
            raise WeightsError(
                f"the model of {self.folder} has '{missing[0]}', which the program does not hold: it is a program of "
                "another model, or that part of it runs in torch (fallback=)"
            )

    def format_of(self, name: str) -> Format | None:
        """The format of a parameter that the program holds as a matrix of codes; None for any other."""
        place = self.places.get(name)
        return None if place is None or len(place.entry.shape) != 2 else place.format

    def codes(self, name: str, item: InFile) -> PackedTensor:
        """The program's codes of a quantised tensor. WeightsError if they are not those of the folder's weight."""
        if item.codes is not None:
            raise WeightsError(f"'{name}' has codes in {self.folder}, which a program keeps: leave program= out")
        packed, values = self.places[name].read(self.weights), to_numpy(item.view().float())
        assert isinstance(packed, PackedTensor)
        if (packed.rows, packed.cols) != values.shape:
            raise WeightsError(
                f"'{name}' is {packed.rows} x {packed.cols} in the program and {list(values.shape)} in {self.folder}: "
                f"{_NO_PROGRAM_OF_IT}"
            )
        error = loss_of(values, packed.format.decode(packed)).relative
        if values.any() and not error < FARTHEST:
            raise WeightsError(
                f"'{name}' of the program is {100 * error:.0f} % from the weight in {self.folder}: "
                f"{_NO_PROGRAM_OF_IT}, or its passes changed the weight"
            )
        return packed

    def check_plain(self, name: str, item: InFile) -> None:
        """WeightsError for a tensor in floating point that is other than in the program: codes beside it would be for
        other inputs."""
        place = self.places.get(name)
        if place is None or place.format is not None or item.codes is not None:
            return
        made = place.read_plain(self.weights)
        if made is None:
            return
        values = to_numpy(item.view().float()).astype(made.dtype)
        if values.size != made.size:
            raise WeightsError(
                f"'{name}' is {list(place.entry.shape)} in the program and {list(values.shape)} in {self.folder}: "
                f"{_NO_PROGRAM_OF_IT}"
            )
        if not _agree(values, made):
            raise WeightsError(f"'{name}' has other values in the program than in {self.folder}: {_NO_PROGRAM_OF_IT}")


def _agree(values: npt.NDArray[Any], made: npt.NDArray[Any]) -> bool:
    """Whether a program's plain tensor has the values of a folder's: as they are, transposed (`x @ W`), or, for filters
    of convolutions and matrices of experts, in any order (frontends/quantise/conv_weights.py has theirs)."""
    if np.array_equal(values.reshape(-1), made.reshape(-1), equal_nan=True):
        return True
    if values.ndim == 2:
        return values.T.shape == made.shape and np.array_equal(values.T, made, equal_nan=True)
    if values.ndim < 3:
        return False
    ours, theirs = np.sort(values.astype(np.float32), axis=None), np.sort(made.astype(np.float32), axis=None)
    return np.array_equal(ours, theirs, equal_nan=True)


NO_CODES = ProgramCodes(Path())


__all__ = ["FARTHEST", "NO_CODES", "WITHOUT_REWRITES", "ProgramCodes"]
