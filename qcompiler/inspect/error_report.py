"""Signal-to-noise ratios of a program on one input: of its results, of each layer, and of each stage of the compiler.

    print(prog.errors(x, model=model))
    prog.explore("model.html", error=prog.errors(x, model=model))

Three computations are compared: the float model in torch; the oracle, which is the quantised graph in torch; and the
program.  A value of the program is found by its numbers: a step computes a value of the graph if no other value of that
size is as near, and it is within `NEAR` decibels of the oracle's.  So a fused operator is not mistaken for another, and
a step that computes no value of the graph is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from qcompiler.inspect.explore.model import Db, Errors, LayerSnr, ResultSnr, StageSnr

Array = npt.NDArray[Any]

NEAR = 20.0
"""The least ratio, in decibels, at which a step's result counts as a value of the oracle's graph.

Two values of a network that merely have one shape are at about 0 dB.  The oracle rounds activations as the program
does, so the two differ by sums in another order, and by codes that such a difference moves by one.
"""

SAME = 0.1
"""Ratios that differ by less are those of one value: only the order in which it was summed differs."""

HUGE = 1e307
"""The difference of two numbers beyond this may overflow in float64."""

MOST_AXES = 5
"""A result that a step stores with its axes in another order is found for tensors of up to so many axes."""


class Value(Protocol):
    """A value of the model's graph (frontends/torch/capture/graph_values.py)."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def line(self) -> str: ...
    @property
    def values(self) -> Any: ...


def snr(reference: Array, value: Array) -> Db:
    """The ratio of two arrays of one shape; see `Db`."""
    given, found = np.asarray(reference), np.asarray(value)
    a, b = given.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "not finite"
    a, b = a[finite], b[finite]
    if np.array_equal(given, found) or (np.array_equal(a, b) and not _are_whole(given, found)):
        return "exact"
    # Half of numbers whose difference could overflow: a power of two changes no digit.
    scale = 0.5 if max(np.max(np.abs(a)), np.max(np.abs(b))) > HUGE else 1.0
    difference = a * scale - b * scale
    if not difference.any():  # integers of more digits than float64 has
        difference = (given.astype(object) - found.astype(object)).astype(np.float64)
    signal = _power(a * scale)
    return None if signal == -math.inf else signal - _power(difference)


def _are_whole(*arrays: Array) -> bool:
    return all(each.dtype.kind in "iu" for each in arrays)


def _power(values: Array) -> float:
    """The sum of squares in decibels: squares of fractions of the largest, which neither overflow nor vanish."""
    largest = float(np.max(np.abs(values)))
    return 20 * math.log10(largest) + 10 * math.log10(float(np.sum((values / largest) ** 2))) if largest else -math.inf


def worst(ratios: Iterable[Db]) -> Db:
    """The least of some ratios: "not finite" is less than every number, and "exact" is more. None if all are None."""
    return min((each for each in ratios if each is not None), key=_rank, default=None)


def _rank(ratio: Db) -> float:
    return ratio if isinstance(ratio, float) else math.inf if ratio == "exact" else -math.inf


# --- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A value of the oracle's graph in the program: the step that wrote it, and the array in the value's shape."""

    step: int
    values: Array


class Finder:
    """Finds the values of the oracle's graph among what the steps of a program write."""

    def __init__(self, nodes: Sequence[Value]) -> None:
        self._nodes = nodes
        self._by_size: dict[int, list[int]] = {}
        for number, node in enumerate(nodes):
            self._by_size.setdefault(node.values.size, []).append(number)
        self.found: dict[int, tuple[float, Found]] = {}
        """By the number of the node: the ratio, and what was found."""

    def see(self, step: int, values: Array) -> None:
        """What a step wrote. Several nodes may have that value, since some are views of others: all are found."""
        near: list[tuple[float, int, Array]] = []
        for number in self._by_size.get(values.size, ()) if values.size else ():
            wanted = self._nodes[number].values
            for turned in _forms(values, wanted.shape):
                if (
                    _rank(snr(_sample(wanted), _sample(turned))) >= NEAR
                    and (ratio := _rank(snr(wanted, turned))) >= NEAR
                ):
                    near.append((ratio, number, turned))
        best = max((ratio for ratio, _, _ in near), default=0.0)
        for ratio, number, turned in near:
            # The next value of a residual stream may be near, too. Views of one value have one ratio.
            if ratio >= best - SAME and (number not in self.found or ratio > self.found[number][0]):
                self.found[number] = ratio, Found(step, turned)


def _forms(values: Array, wanted: tuple[int, ...]) -> Iterable[Array]:
    """The stored array in the wanted shape: each order of its axes that gives it, else the elements as they follow."""
    shape = values.shape
    if sorted(shape) != sorted(wanted):
        return [values.reshape(wanted)]
    if len(shape) > MOST_AXES:
        return [values] if shape == wanted else []
    orders = itertools.permutations(range(len(shape)))
    return [values.transpose(axes) for axes in orders if tuple(shape[axis] for axis in axes) == wanted]


def _sample(values: Array) -> Array:
    """Up to 64 elements, at the same places of two arrays of one shape: enough to tell that they have no relation."""
    return values.reshape(-1)[:: max(1, values.size // 64)][:64]


def layer_rows(nodes: Sequence[Value], floats: Mapping[str, Array], finder: Finder, entry: str) -> tuple[LayerSnr, ...]:
    """A row for each value of the oracle's graph. `floats` are those of the float model, by the node's name."""
    rows = []
    for number, node in enumerate(nodes):
        if node.op.startswith("qc.dequantize"):  # a weight, not a layer
            continue
        _, found = finder.found.get(number, (0.0, None))
        wanted = floats.get(node.name)
        rows.append(LayerSnr(
            path=node.path, op=node.op, value=node.name,
            quantised=None if wanted is None else snr(wanted, node.values),
            oracle=None if found is None else snr(node.values, found.values),
            model=None if found is None or wanted is None else snr(wanted, found.values),
            entry="" if found is None else entry, step=-1 if found is None else found.step,
        ))  # fmt: skip
    return tuple(rows)


# --- stages and results ----------------------------------------------------------------------------------------------

Answers = Mapping[str, Sequence[Array]]
"""The results of a module by entry point, and behind them the states that it leaves."""


def answers_snr(reference: Answers, value: Answers) -> Db:
    """The worst result. An entry point that only one of them has is compared with the other's first."""
    first = next(iter(reference.values()))
    return worst(
        snr(a, b)
        for entry, results in value.items()
        for a, b in zip(reference.get(entry, first), results, strict=True)
        if a.shape == b.shape and np.size(a)
    )


def stage_row(
    stage: str, now: Answers, before: Answers | None, start: Answers | None, oracle: Sequence[Array],
    floats: Sequence[Array],
) -> StageSnr:  # fmt: skip
    """A stage's row. `oracle` and `floats` are the model's results, without states; the latter may be empty.

    `before` and `start` are None for the import, which is the first.
    """
    return StageSnr(
        stage=stage, before=None if before is None else answers_snr(before, now),
        start=None if start is None else answers_snr(start, now),
        oracle=_results_snr(oracle, now), model=_results_snr(floats, now) if floats else None,
    )  # fmt: skip


def _results_snr(wanted: Sequence[Array], now: Answers) -> Db:
    return worst(snr(a, b) for results in now.values() for a, b in zip(wanted, results, strict=False))


def result_rows(
    names: Sequence[str], results: Sequence[Array], oracle: Sequence[Array], floats: Sequence[Array]
) -> tuple[ResultSnr, ...]:
    """A row for each result of the program."""
    rows = []
    for number, (name, value) in enumerate(zip(names, results, strict=True)):
        wanted = [each[number] if number < len(each) else None for each in (oracle, floats)]
        a, b = (None if each is None else snr(each, value) for each in wanted)
        rows.append(ResultSnr(name=name, oracle=a, model=b))
    return tuple(rows)


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """What quantisation and compilation cost on one input: `print` it, or give it to `Program.explore(error=)`."""

    errors: Errors

    def noted(self, notes: Sequence[str]) -> ErrorReport:
        """The same with more notes."""
        return ErrorReport(msgspec.structs.replace(self.errors, notes=(*notes, *self.errors.notes)))

    def as_dict(self) -> dict[str, Any]:
        """JSON values; ratios in decibels, or "exact", "not finite" or null (`Db`)."""
        found: dict[str, Any] = msgspec.to_builtins(self.errors)
        return found

    def __str__(self) -> str:
        errors = self.errors
        lines = [f"signal-to-noise ratios in dB of {errors.entry}({', '.join(errors.inputs)})", ""]
        results = [(each.name, db(each.oracle), db(each.model)) for each in errors.results]
        lines += _table(("result", "program / oracle", "program / float"), results)
        lines += self._layers()
        if errors.stages:
            stages = [
                (each.stage, *map(db, (each.before, each.start, each.oracle, each.model))) for each in errors.stages
            ]
            head = ("stage", "against before", "against import", "against oracle", "against float")
            lines += ["", *_table(head, stages)]
        return "\n".join([*lines, *(f"note: {note}" for note in errors.notes)])

    def _layers(self) -> list[str]:
        """The lines of the layers that a step wrote."""
        written = [each for each in self.errors.layers if each.step >= 0]
        if not written:
            return []
        # Behind the first value of a step come views of it, and copies.
        first = list({each.step: each for each in reversed(written)}.values())[::-1]
        rows = [
            (f"{each.entry} {each.step}", each.path, each.op, *map(db, (each.quantised, each.oracle, each.model)))
            for each in first
        ]
        head = ("step", "module", "operator", "oracle / float", "program / oracle", "program / float")
        lines = ["", *_table(head, rows)]
        if hidden := len(self.errors.layers) - len(written):
            what = "1 value of the model is" if hidden == 1 else f"{hidden} values of the model are"
            lines.append(f"{what} in no step's result: fused, or a view")
        return lines


def db(ratio: Db) -> str:
    """`52.3`, `exact`, `-`."""
    return "-" if ratio is None else ratio if isinstance(ratio, str) else f"{ratio:.1f}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns of one width; ratios to the right."""
    wide = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    right = ["/" in name or name.startswith("against ") for name in head]
    lines = []
    for row in (head, *rows):
        cells = zip(row, wide, right, strict=True)
        lines.append("  ".join(cell.rjust(w) if is_right else cell.ljust(w) for cell, w, is_right in cells).rstrip())
    return lines


__all__ = [
    "NEAR",
    "Answers",
    "ErrorReport",
    "Finder",
    "answers_snr",
    "db",
    "layer_rows",
    "result_rows",
    "snr",
    "stage_row",
    "worst",
]
