"""Values of parameters after rewrites of the graph: changes that are applied whenever a tensor is read.

    norm.weight      divided by s             Scaled(0, 1 / s)
    q_proj.weight    columns times s          Scaled(1, s)
    o_proj.weight    rows rotated             Rotated(0, Q)
    down_proj.weight columns transformed      Transformed(1, 512)

Nothing is held but vectors, so a model whose weights come from files is rewritten one tensor at a time.  All changes of
a tensor are computed in fp64 and rounded once to the tensor's type.  An identity holds the digests of its changes:
calibrations, codes and packed weights of a working folder are those of the rewritten values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from qcompiler.frontends.quantise.rewrites.orthogonal import Rotation, hadamard_of_runs
from qcompiler.frontends.weights.weight_source import Identity, StoredCodes, WeightSource
from qcompiler.plan.plan import Rewrite

AT_A_TIME = 1 << 22
"""Elements that are computed in fp64 at a time: 32 MiB."""


class Change(Protocol):
    """A change of a tensor's values. Axes are those of the model's tensor."""

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The changed values of a tensor in fp64."""

    def part(self, axis: int, first: int, stop: int) -> Change | None:
        """The change for the slice [first, stop) of an axis; None if a slice needs the others."""

    def identity(self) -> list[Any]:
        """JSON that identifies the change."""


def _digest(vector: torch.Tensor) -> str:
    return hashlib.sha256(vector.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Scaled:
    """Slices of `axis` times `factors` (n,) in fp64."""

    axis: int
    factors: torch.Tensor

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        shape = [1] * values.ndim
        shape[self.axis] = -1
        return values * self.factors.reshape(shape)

    def part(self, axis: int, first: int, stop: int) -> Change:
        return Scaled(self.axis, self.factors[first:stop]) if axis == self.axis else self

    def identity(self) -> list[Any]:
        return ["scaled", self.axis, _digest(self.factors)]


@dataclass(frozen=True, eq=False)
class Added:
    """A vector in fp64 added to a tensor of one dimension, or to each row."""

    vector: torch.Tensor

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.vector

    def part(self, axis: int, first: int, stop: int) -> Change:
        del first, stop
        return self if axis == 0 else Added(self.vector)

    def identity(self) -> list[Any]:
        return ["added", _digest(self.vector)]


@dataclass(frozen=True)
class Filled:
    """All values replaced by one."""

    value: float

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        return torch.full_like(values, self.value)

    def part(self, axis: int, first: int, stop: int) -> Change:
        del axis, first, stop
        return self

    def identity(self) -> list[Any]:
        return ["filled", self.value]


@dataclass(frozen=True)
class Rotated:
    """Rows along `axis` times an orthogonal matrix."""

    axis: int
    rotation: Rotation

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        return self.rotation.rows(values.movedim(self.axis, -1)).movedim(-1, self.axis)

    def part(self, axis: int, first: int, stop: int) -> Change | None:
        del first, stop
        return None if axis == self.axis else self

    def identity(self) -> list[Any]:
        return ["rotated", self.axis, self.rotation.size, self.rotation.seed, self.rotation.keeps_ones]


@dataclass(frozen=True)
class Transformed:
    """Runs of `block` along `axis` times the orthonormal Hadamard matrix of that size, a power of two."""

    axis: int
    block: int

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        moved = values.movedim(self.axis, -1)
        return hadamard_of_runs(moved, self.block).movedim(-1, self.axis)

    def part(self, axis: int, first: int, stop: int) -> Change | None:
        return self if axis != self.axis or not (first % self.block or stop % self.block) else None

    def identity(self) -> list[Any]:
        return ["transformed", self.axis, self.block]


@dataclass
class MovedWeights:
    """A source of values whose tensors have `changes`, by their first path, each with the rewrite that made it. It is a
    `WeightSource`.

    A rewrite changes values here and nowhere else, so the record of a program (plan/moved.py) follows from `changes`.
    """

    source: WeightSource
    changes: dict[str, tuple[tuple[Rewrite, Change], ...]] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For a tensor that was tied: all paths under which the source may have it."""
    made: set[str] = field(default_factory=set)
    """Biases that the model does not have; before changes they are zeros."""
    valued: bool = field(init=False)
    streams: bool = field(init=False)

    def __post_init__(self) -> None:
        self.valued, self.streams = self.source.valued, self.source.streams

    def bind(self, program: ExportedProgram) -> Mapping[str, torch.Tensor]:
        return self.source.bind(program)

    def change(self, by: Rewrite, path: str, *changes: Change) -> None:
        """Adds changes of the rewrite `by`, which come after those so far."""
        self.changes[path] = (*self.changes.get(path, ()), *((by, each) for each in changes))

    def of(self, targets: Sequence[str]) -> tuple[Change, ...]:
        """The changes of a tensor."""
        return tuple(change for _, change in self._of(targets))

    def moved_by(self, targets: Sequence[str]) -> tuple[Rewrite, ...]:
        """The rewrites that changed a tensor, each once."""
        return tuple(dict.fromkeys(by for by, _ in self._of(targets)))

    def _of(self, targets: Sequence[str]) -> tuple[tuple[Rewrite, Change], ...]:
        return next((self.changes[target] for target in targets if target in self.changes), ())

    def changed(self, targets: Sequence[str]) -> bool:
        """Whether a tensor's values are not those of the source."""
        return bool(self.of(targets))

    def _names(self, targets: Sequence[str]) -> Sequence[str]:
        return self.origins.get(targets[0], targets)

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        if targets[0] in self.made:
            values = torch.zeros(tensor.shape, dtype=tensor.dtype)
        else:
            values = self.source.read(self._names(targets), tensor)
        changes = self.of(targets)
        return _changed(values, changes) if changes else values

    def identity(self, targets: Sequence[str], tensor: torch.Tensor) -> Identity:
        known: Identity = {"made": list(tensor.shape)}
        if targets[0] not in self.made:
            known = self.source.identity(self._names(targets), tensor)
        changes = self.of(targets)
        return {**known, "changes": [each.identity() for each in changes]} if changes else known

    def packed(self, targets: Sequence[str], tensor: torch.Tensor) -> StoredCodes | None:
        return None if targets[0] in self.made else self.source.packed(self._names(targets), tensor)

    def release(self, targets: Sequence[str]) -> None:
        if targets[0] not in self.made:
            self.source.release(self._names(targets))


def _changed(values: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """All changes in fp64, rounded once to the type of `values`; in pieces along the first axis that allows it."""
    if values.ndim < 2 or values.numel() <= AT_A_TIME:
        return _applied(values, changes)
    for axis in range(2):
        step = max(1, AT_A_TIME * values.shape[axis] // values.numel())
        out = torch.empty(values.shape, dtype=values.dtype)
        for first in range(0, values.shape[axis], step):
            stop = min(first + step, values.shape[axis])
            parts = [each.part(axis, first, stop) for each in changes]
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                break
            out.narrow(axis, first, stop - first).copy_(_applied(values.narrow(axis, first, stop - first), whole))
        else:
            return out
    return _applied(values, changes)


def _applied(values: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    wide = values.to(torch.float64)
    for each in changes:
        wide = each.apply(wide)
    return wide.to(values.dtype)


__all__ = ["Added", "Change", "Filled", "MovedWeights", "Rotated", "Scaled", "Transformed"]
