"""`QuantConfig(algorithm="gptq")`: chooses the codes of linears one after the other, each for the inputs that it gets
when all weights before it are quantised.

    run      all inputs together, node by node, in the float graph
    linear   moments += X^T X over the inputs of the linear that comes next; codes = gptq(weight, moments)
    run on   with the decoded codes in place of the weight

So one pass over the graph quantises every linear for what the quantised model really computes.  Values live until their
last use, once for each input: for a transformer that is a hidden state and the values inside one layer.

With a working folder, the codes of each weight are written there as soon as they are known: after a kill, the next
compile runs the graph with them, and goes on behind the last one.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import ExportedProgram

from qcompiler.calibrate import gptq
from qcompiler.calibrate.levels import Float64
from qcompiler.errors import CalibrationError, WorkdirError
from qcompiler.formats import Format, PackedTensor
from qcompiler.frontends.quantise.calibrate import UNREADABLE, chained_digest
from qcompiler.frontends.quantise.graph_run import GraphRun, Watched
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.files import write_private
from qcompiler.runtime.progress import Progress, note

VERSION = 1
ROWS = 1 << 12
"""Rows whose moments are summed up in fp32, in one product."""
FEW = 4
"""With fewer rows than this many for each column, the note says so: the codes would fit the inputs, not the model."""


@dataclass(frozen=True)
class Matrix:
    """A weight whose codes are chosen. `values` gives its fp32 matrix (rows, K)."""

    watched: Watched
    format: Format
    rows: int
    values: Callable[[], npt.NDArray[np.float32]]

    @property
    def path(self) -> str:
        return self.watched.path


@dataclass
class Solver:
    """Chooses the codes of `matrices` over `inputs`. `packed` and `found` have codes and remarks by path."""

    matrices: Sequence[Matrix]
    folder: Path | None = None
    packed: dict[str, PackedTensor] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        program: ExportedProgram,
        inputs: Sequence[Any],
        values: Mapping[str, Callable[[], torch.Tensor]],
        identity: Callable[[], Any],
    ) -> None:
        """`values` gives the tensor of each placeholder that is no input, and decodes the weights in `packed`.

        `identity` is JSON that identifies the weights' values, and the formats of those that keep nearest codes.

        Errors: ArgumentError for inputs that do not fit the model; CalibrationError for no inputs, for values that are
        not finite and for too few rows; WorkdirError.
        """
        graph = GraphRun(program, [each.watched for each in self.matrices], values)
        leaves = [graph.leaves(given) for given in inputs]
        if not leaves:
            raise CalibrationError("`calibrate` gave no inputs; it is an iterable of inputs of the model")
        journal = _Journal.of(self.folder, graph, self.matrices, leaves, identity) if self.folder is not None else None
        by_path = {each.path: number for number, each in enumerate(self.matrices)}
        last = _Moments()
        with Progress("choosing codes (gptq)", sum(map(_nbytes, self.matrices))) as progress:

            def see(path: str, x: list[torch.Tensor]) -> None:
                if path in self.packed:  # a weight that several linears read
                    return
                number = by_path[path]
                matrix = self.matrices[number]
                known = journal.read(number, matrix) if journal is not None else None
                if known is not None:
                    self.packed[path], self.found[path] = known
                else:
                    self._solve(matrix, last.of(path, x))
                    if journal is not None:
                        journal.write(number, self.packed[path], self.found[path])
                progress.step(_nbytes(matrix))

            graph.together(leaves, see)

    def _solve(self, matrix: Matrix, moments: tuple[Float64, int]) -> None:
        """The codes of one matrix. CalibrationError names its path."""
        sums, rows = moments
        path, cols = matrix.path, matrix.watched.cols
        if rows < cols // FEW:
            raise CalibrationError(
                f"`calibrate` gave {rows} rows to '{path}', which has {cols} columns; gptq needs at least "
                f"{cols // FEW}, and {FEW * cols} or more to be of use. Give more or longer inputs, or "
                "algorithm='nearest'"
            )
        if rows < FEW * cols:
            note(f"'{path}' has {cols} columns, and `calibrate` gave it {rows} rows; {FEW * cols} or more are better")
        values = matrix.values()
        importance = (np.diag(sums) / rows).astype(np.float32) if matrix.format.takes_importance else None
        nearest = encode(matrix.format, values, importance=importance)
        try:
            solved = gptq.solve(values, nearest, sums)
        except CalibrationError as error:
            raise CalibrationError(f"'{path}': {error}") from None
        self.packed[path] = solved.packed
        uses = len(matrix.watched.reads)
        shared = f", by the inputs of the first of its {uses} uses" if uses > 1 else ""
        self.found[path] = (
            f"codes by gptq: squared error of the outputs {100 * solved.nearest_error:.2g} % -> "
            f"{100 * solved.error:.2g} %, of {rows} rows{shared}"
        )


def _nbytes(matrix: Matrix) -> int:
    """Bytes of its values in fp32, for progress."""
    return 4 * matrix.rows * matrix.watched.cols


class _Moments:
    """X^T X of the inputs of a linear. Linears that read the same tensors (q, k and v) share it."""

    def __init__(self) -> None:
        self.x: list[torch.Tensor] = []
        self.known: tuple[Float64, int] | None = None

    def of(self, path: str, x: list[torch.Tensor]) -> tuple[Float64, int]:
        """The sums (K, K) in fp64, and the number of rows. CalibrationError for values that are not finite."""
        if self.known is not None and len(x) == len(self.x) and all(a is b for a, b in zip(x, self.x, strict=True)):
            return self.known
        self.known = None  # before the next one is made: a matrix of moments may be large
        cols = x[0].shape[-1]
        total, rows = torch.zeros(cols, cols, dtype=torch.float64), 0
        for each in x:
            flat = each.reshape(-1, cols)
            rows += flat.shape[0]
            for part in flat.split(ROWS):  # type: ignore[no-untyped-call]
                wide = part.to(torch.float32).cpu()
                total += (wide.T @ wide).double()
        if not torch.isfinite(total).all():
            raise CalibrationError(f"the inputs of '{path}' are not finite, or too large for fp32, while calibrating")
        self.x, self.known = x, (total.numpy(), rows)
        return self.known


@dataclass(frozen=True)
class _Journal:
    """``codes-<digest>-<number>.npz`` in the working folder: the codes of each weight, and what is said of them."""

    stem: Path

    @staticmethod
    def of(
        folder: Path, run: GraphRun, matrices: Sequence[Matrix], leaves: Sequence[Any], identity: Callable[[], Any]
    ) -> _Journal:
        chain = ""
        for each in leaves:
            chain = chained_digest(chain, each)
        named = [(m.path, m.rows, m.watched.cols, repr(m.format)) for m in matrices]
        facts = [VERSION, "gptq", gptq.DAMPING, str(run.program.graph), named, chain, identity()]
        return _Journal(folder / f"codes-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}")

    def _path(self, number: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}-{number}.npz")

    def read(self, number: int, matrix: Matrix) -> tuple[PackedTensor, str] | None:
        try:
            with np.load(self._path(number), allow_pickle=False) as file:
                data, remark = np.array(file["data"]), str(file["remark"])
        except FileNotFoundError:
            return None
        except UNREADABLE as error:
            note(f"{self._path(number)} cannot be read ({error}): its codes are chosen again")
            return None
        rows, cols = matrix.rows, matrix.watched.cols
        if data.dtype != np.uint8 or data.shape != (matrix.format.nbytes(rows, cols),):
            note(f"{self._path(number)} holds other data: its codes are chosen again")
            return None
        return PackedTensor(matrix.format, rows, cols, data), remark

    def write(self, number: int, packed: PackedTensor, remark: str) -> None:
        data = io.BytesIO()
        np.savez(data, data=packed.data, remark=np.array(remark))
        try:
            self.stem.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._path(number), data.getvalue())
        except OSError as error:
            raise WorkdirError(f"cannot write {self._path(number)}: {error}") from error


__all__ = ["Matrix", "Solver"]
