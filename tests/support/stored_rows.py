"""Which rows of a stored weight are which parameter of the model."""

from __future__ import annotations

from collections.abc import Iterator

from qcompiler.plan.plan import WeightEntry


def parameter_rows(entry: WeightEntry) -> Iterator[tuple[str, slice]]:
    """Each parameter that a weight holds, and its rows there: all of them but where linears were merged."""
    begin = 0
    for part in entry.named:
        for parameter in part.parameters:
            yield parameter, slice(begin, begin + part.rows)
        begin += part.rows
