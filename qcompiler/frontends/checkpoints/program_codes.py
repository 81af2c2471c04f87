"""The codes of a compiled program in place of a folder's values, for checkpoints that are written from it.

A program holds the codes that its compilation chose (`algorithm="gptq"`, say) beside tensors in floating point.  They
may stand in a folder or a file of that model only if every tensor is the model's own, so all of them are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from qcompiler.errors import ArgumentError, WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.transcode import loss_of
from qcompiler.frontends.quantise.stored_places import Matrix, places_of
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import InFile
from qcompiler.plan.moved import why_moved
from qcompiler.runtime.image import ProgramImage

FARTHEST = 0.8
"""The largest relative error of a program's codes: 2 bits have 0.5; of two unrelated matrices it is 1.4."""

WITHOUT_REWRITES = (
    "; compile the folder without smooth, equalise, rotate, rotate_online, correct_bias and algorithm='awq'"
)
_NO_PROGRAM_OF_IT = "it is no program of this folder"


@dataclass(frozen=True)
class ProgramCodes:
    """The tensors of a program of `folder` by parameter. Reading one makes its canonical bytes."""

    folder: Path
    quantised: Mapping[str, Format] = field(default_factory=dict)
    """The format of each parameter that the program holds as codes."""
    read: Mapping[str, Callable[[], Matrix]] = field(default_factory=dict)
    """All vectors and matrices of the program."""

    @classmethod
    def of(cls, program: Any, folder: Path) -> Self:
        """ArgumentError if it is no program, WeightsError if it holds no values, or moved ones."""
        image = getattr(getattr(program, "program", program), "image", None)
        if not isinstance(image, ProgramImage):
            raise ArgumentError(
                f"program={program!r:.60} is no program: give what qcompile or compile_causal_lm returns"
            )
        image.require_values()
        if moved := why_moved(image.plan):  # columns times s belong to a norm whose gain is divided by s
            way_out = WITHOUT_REWRITES if image.plan.moved else ""
            raise WeightsError(f"the codes of a program go into a folder with its model's weights: {moved}{way_out}")
        places = {name: each for name, each in places_of(image.plan).items() if len(each.entry.shape) in (1, 2)}
        formats = {name: each.format for name, each in places.items()}
        return cls(
            folder, {name: each for name, each in formats.items() if each is not None},
            {name: partial(each.read, image.weights) for name, each in places.items()},
        )  # fmt: skip

    def require_parameters_of(self, module: Any) -> None:
        """WeightsError if the program has a parameter that the folder's model lacks, by any name of a tied one."""
        for name in self.read:  # constants of the graph have no dot
            path, _, attribute = name.rpartition(".")
            holder = module
            for part in path.split(".") if path else ():
                holder = getattr(holder, part, None)
            if path and getattr(holder, attribute, None) is None:
                raise WeightsError(
                    f"the program has '{name}', and the model of {self.folder} has no such parameter: "
                    f"{_NO_PROGRAM_OF_IT}"
                )

    def codes(self, name: str, item: InFile) -> PackedTensor:
        """The program's codes of a quantised tensor. WeightsError if they are not those of the folder's weight."""
        if item.codes is not None:
            raise WeightsError(f"'{name}' has codes in {self.folder}, which a program keeps: leave program= out")
        packed, values = self.read[name](), to_numpy(item.view().float())
        assert isinstance(packed, PackedTensor)
        if (packed.rows, packed.cols) != values.shape:
            raise WeightsError(
                f"'{name}' is {packed.rows} x {packed.cols} in the program and {list(values.shape)} in {self.folder}: "
                f"{_NO_PROGRAM_OF_IT}"
            )
        error = loss_of(values, packed.format.decode(packed)).relative
        if error > FARTHEST:
            raise WeightsError(
                f"'{name}' of the program is {100 * error:.0f} % from the weight in {self.folder}: "
                f"{_NO_PROGRAM_OF_IT}, or its passes changed the weight"
            )
        return packed

    def check_plain(self, name: str, item: InFile) -> None:
        """WeightsError for a tensor in floating point that is other than in the program: codes beside it would be for
        other inputs."""
        if name not in self.read or name in self.quantised or item.codes is not None:
            return
        made = self.read[name]()
        assert isinstance(made, np.ndarray)
        values = to_numpy(item.view().float()).astype(made.dtype)
        if values.size != made.size:
            return  # stored in another shape
        values = values.reshape(made.shape)
        same = np.array_equal(values, made, equal_nan=True)
        if not same and not (made.ndim == 2 and len(made) == len(made.T) and np.array_equal(values.T, made)):
            raise WeightsError(f"'{name}' has other values in the program than in {self.folder}: {_NO_PROGRAM_OF_IT}")


NO_CODES = ProgramCodes(Path())


__all__ = ["FARTHEST", "NO_CODES", "WITHOUT_REWRITES", "ProgramCodes"]
