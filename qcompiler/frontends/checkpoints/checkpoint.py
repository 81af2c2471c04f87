"""A checkpoint: the model that a file or a folder describes, without values, and the source of its weights.

checkpoint = qc.from_gguf("model.gguf")
program = qc.qcompile(checkpoint, (ids,))         # qcompile(checkpoint.module, (ids,), weights=checkpoint.weights)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from qcompiler.errors import MissingDependencyError
from qcompiler.formats import Format, PackedTensor
from qcompiler.frontends.weights.weight_source import EXPERTS_TRANSPOSED, FileWeights, Identity, StoredCodes
from qcompiler.import_noise import without_import_noise
from qcompiler.plan.weights import Bytes

Order = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Checkpoint:
    """The result of `from_gguf` and `from_checkpoint`.

    `module` is the transformers model, its parameters without values, in `eval` and without a cache: it returns logits.
    `weights` is the argument of `qcompile(weights=…)`.  `config` is the model's, and `path` the file or folder.
    """

    module: nn.Module
    weights: FileWeights
    config: Any
    path: Path

    def formats(self) -> dict[str, int]:
        """The number of tensors in each format: `{"q4_K": 24, "q6_K": 5, "float32": 9}`."""
        found: dict[str, int] = {}
        for tensor in self.weights.tensors.values():
            codes = tensor.codes
            name = codes.format.name if codes is not None else str(tensor.dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + 1
        return found

    def __getattr__(self, name: str) -> Any:
        """AttributeError for attributes of a model; it says where the model is."""
        raise AttributeError(
            f"a Checkpoint has no attribute {name!r}: its model is checkpoint.module. A module around that one "
            "compiles with qcompile(…, weights=checkpoint.weights)"
        )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in self.formats().items())
        return f"Checkpoint({type(self.module).__name__} of {self.path}: {kinds})"


def transformers() -> Any:
    """The package; MissingDependencyError has the command that installs it."""
    try:
        with without_import_noise():
            import transformers as package

            # Every model class imports this, with all quantisers that transformers knows.
            importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        raise MissingDependencyError(
            "the model of a checkpoint is built by transformers: pip install 'qcompiler[files]'"
        ) from error
    return package


# --- a file's data for a parameter -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodesInFile:
    """Codes for a parameter of this shape; `codes.read` gets them."""

    name: str
    shape: tuple[int, ...]
    codes: StoredCodes
    source: Callable[[], Identity] = field(repr=False)
    let_go: Callable[[], None] = field(repr=False)
    dtype: None = None
    is_made: bool = True

    def view(self) -> torch.Tensor:
        """Decoded, in fp32, with columns in the model's order."""
        values = torch.from_numpy(self.codes.format.decode(self.codes.read()))
        if self.codes.permutation is not None:
            ordered = torch.empty_like(values)
            ordered[:, torch.from_numpy(self.codes.permutation)] = values
            values = ordered
        if self.codes.arrangement == EXPERTS_TRANSPOSED:
            values = values.reshape(-1, self.shape[-1], self.codes.cols).transpose(1, 2)
        return values.reshape(self.shape)

    def identity(self) -> Identity:
        return {**self.source(), "format": str(self.codes.format)}

    def release(self) -> None:
        self.let_go()


@dataclass(frozen=True)
class ValuesInFile:
    """Plain values for a parameter; `make` returns them, from the mapped file unless they are made (`is_made`): rows
    move, or something is computed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor] = field(repr=False)
    source: Callable[[], Identity] = field(repr=False)
    let_go: Callable[[], None] = field(repr=False)
    codes: None = None
    is_made: bool = False

    def view(self) -> torch.Tensor:
        return self.make().reshape(self.shape)

    def identity(self) -> Identity:
        return self.source()

    def release(self) -> None:
        self.let_go()


def _rows_of(packed: PackedTensor) -> Bytes:
    """The bytes of a matrix of blocks, row by row: (rows, bytes of a row)."""
    return packed.section("blocks").reshape(packed.rows, -1)


def gathered(fmt: Format, cols: int, parts: Sequence[tuple[PackedTensor, Order | None]]) -> PackedTensor:
    """One matrix of the rows of several: row i of a part goes to row `order[i]` (None: the order is kept).

    For formats whose rows are blocks of one section, such as GGUF's.
    """
    rows = sum(part.rows for part, _ in parts)
    made = fmt.allocate(rows, cols)
    out = _rows_of(made)
    for part, order in parts:
        out[slice(0, rows) if order is None else order] = _rows_of(part)
    return made


def selected(fmt: Format, packed: PackedTensor, rows: slice) -> PackedTensor:
    """Some rows of a matrix, for the same formats."""
    chosen = _rows_of(packed)[rows]
    made = fmt.allocate(len(chosen), packed.cols)
    _rows_of(made)[:] = chosen
    return made


__all__ = ["Checkpoint", "CodesInFile", "Order", "ValuesInFile", "gathered", "selected", "transformers"]
