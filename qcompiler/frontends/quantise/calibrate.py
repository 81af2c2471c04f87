"""`qcompile(calibrate=…)`: runs the float graph over inputs and measures the inputs of its linears.

    before   linear = aten.linear(x, p_q_weight)           q.weight: to be stored as q4_K
    run      for each input: x -> squares += (x * x).sum(rows)
    after    encode(q.weight, importance=squares / rows)

The graph is the exported graph before quantisation, in eager torch (graph_run.py).  One input is processed at a time,
and only a few vectors per linear are kept (observers.py).

With a working folder, the statistics are written there every few inputs: after a kill, the next compile continues
behind the last write.  The file is used if graph and weights are the same, and for as many inputs as are the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from qcompiler.calibrate.chosen_codes import NO_INPUTS, ROWS
from qcompiler.errors import CalibrationError, WorkdirError
from qcompiler.frontends.quantise.graph_run import GraphRun, Watched
from qcompiler.frontends.quantise.observers import InputStatistics, Magnitudes
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.runtime.files import write_private
from qcompiler.runtime.progress import note

VERSION = 1
COMMIT = 8
"""Inputs between two writes of the statistics."""

UNREADABLE = (
    OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, MemoryError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
"""What NumPy and zipfile raise for a damaged file."""


@dataclass
class Calibration:
    """The request of `calibrate=`.

    `inputs` are model inputs, each a tensor, a tuple of arguments or a dict of keywords; `folder` is where progress is
    kept, or None.  `ran` and `reused` count inputs.
    """

    inputs: Iterable[Any]
    folder: Path | None = None
    ran: int = field(default=0, init=False)
    reused: int = field(default=0, init=False)

    @property
    def inputs_seen(self) -> int:
        """The number of inputs."""
        return self.ran + self.reused

    def held(self) -> list[Any]:
        """The inputs as a list, which can be read again."""
        found = list(self.inputs)
        self.inputs, self.ran = found, len(found)
        return found

    def measure(
        self,
        program: ExportedProgram,
        watched: Sequence[Watched],
        values: Mapping[str, Callable[[], torch.Tensor]],
        identity: Callable[[], Any],
        *,
        magnitudes: bool = False,
    ) -> dict[str, InputStatistics]:
        """Statistics by the paths of `watched`.

        `values` gives the tensor of each placeholder that is not an input of the model.  `identity` is JSON that
        identifies the weights' values.  Errors: ArgumentError for inputs that do not fit the model, CalibrationError
        for no inputs or values that are not finite, WorkdirError.
        """
        self.ran = self.reused = 0
        run = GraphRun(program, watched, values)
        fresh = {each.path: InputStatistics.of(each.cols, magnitudes=magnitudes) for each in watched}
        journal = _Journal(self.folder, run, identity, magnitudes) if self.folder is not None else None
        known, found = journal.read(fresh) if journal is not None else ([], fresh)
        try:
            found = self._over(run, known, found, journal)
        except _OtherInputsError:
            if iter(self.inputs) is self.inputs:
                assert journal is not None
                raise WorkdirError(
                    f"{journal.path} holds a calibration with other inputs, and `calibrate` can be read only once; "
                    "remove that file, or give a list of inputs"
                ) from None
            note("the inputs for calibration are not those of the working folder: it begins anew")
            self.ran = self.reused = 0
            fresh = {each.path: InputStatistics.of(each.cols, magnitudes=magnitudes) for each in watched}
            found = self._over(run, [], fresh, journal)
        if not self.inputs_seen:
            raise CalibrationError(NO_INPUTS)
        if self.reused:
            note(f"{self.reused} of {self.inputs_seen} calibration inputs were measured before")
        return found

    def _over(
        self, run: GraphRun, known: list[str], found: dict[str, InputStatistics], journal: _Journal | None
    ) -> dict[str, InputStatistics]:
        chain, digests = "", list(known)
        for number, given in enumerate(self.inputs):
            leaves = run.leaves(given)
            if journal is not None:
                chain = chained_digest(chain, leaves)
            if number < len(known):
                if known[number] != chain:
                    raise _OtherInputsError
                self.reused += 1
                continue
            run.feed(leaves, lambda path, x: _measure(path, x, found[path]))
            self.ran += 1
            digests.append(chain)
            if journal is not None and self.ran % COMMIT == 0:
                journal.write(digests, found)
        if self.reused < len(known):
            raise _OtherInputsError
        if journal is not None and self.ran:
            journal.write(digests, found)
        return found


class _OtherInputsError(Exception):
    """The journal's statistics were measured with other inputs."""


def _measure(path: str, x: torch.Tensor, into: InputStatistics) -> None:
    rows = x.reshape(-1, x.shape[-1])
    for part in rows.split(ROWS):  # type: ignore[no-untyped-call]
        into.add(path, part.to(torch.float32).cpu().contiguous().numpy())


# --- the journal -----------------------------------------------------------------------------------------------------


class _Journal:
    """``calibration-<digest>.npz`` in the working folder: statistics, and a chained digest for each input in them."""

    def __init__(self, folder: Path, run: GraphRun, identity: Callable[[], Any], magnitudes: bool) -> None:
        facts = [VERSION, str(run.program.graph), [(w.path, w.cols) for w in run.watched], magnitudes, identity()]
        name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        self.path = folder / f"calibration-{name}.npz"

    def read(self, fresh: dict[str, InputStatistics]) -> tuple[list[str], dict[str, InputStatistics]]:
        """The digests of the inputs so far, and the statistics; both empty if there is no file yet."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                digests = [str(each) for each in file["inputs"]]
                return digests, {path: _load(file, number) for number, path in enumerate(fresh)}
        except FileNotFoundError:
            return [], fresh
        except UNREADABLE as error:
            note(f"{self.path} cannot be read ({error}): calibration begins anew")
            return [], fresh

    def write(self, digests: Sequence[str], found: Mapping[str, InputStatistics]) -> None:
        arrays: dict[str, Any] = {"inputs": np.array(digests)}
        for number, each in enumerate(found.values()):
            arrays[f"squares{number}"], arrays[f"rows{number}"] = each.squares, np.int64(each.rows)
            if each.magnitudes is not None:
                arrays[f"counts{number}"] = each.magnitudes.counts
                arrays[f"range{number}"] = np.array([each.magnitudes.limit, each.magnitudes.largest])
        data = io.BytesIO()
        np.savez(data, **arrays)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_private(self.path, data.getvalue())
        except OSError as error:
            raise WorkdirError(f"cannot write {self.path}: {error}") from error


def _load(file: Any, number: int) -> InputStatistics:
    magnitudes = None
    if f"counts{number}" in file:
        limit, largest = (float(each) for each in file[f"range{number}"])
        magnitudes = Magnitudes(file[f"counts{number}"], limit, largest)
    return InputStatistics(file[f"squares{number}"], int(file[f"rows{number}"]), magnitudes)


def chained_digest(before: str, leaves: Sequence[Any]) -> str:
    """A digest of an input's flat arguments and of all inputs before it, whose digest is `before`."""
    digest = hashlib.sha256(before.encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            digest.update(to_numpy(leaf.detach().cpu().contiguous()).reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


__all__ = ["COMMIT", "UNREADABLE", "Calibration", "chained_digest"]
