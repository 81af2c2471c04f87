"""Stacks the rows of matrices of one format: the bytes of the stack from the bytes of its parts, and back.

    a (4, K), b (2, K)   ->   one (6, K): rows 0…3 decode to a's values and rows 4…5 to b's, bit for bit

Rows are only moved, nothing is encoded again.  That needs every stored entry to belong to one part: a format with a
statistic of the whole tensor cannot be stacked, nor can one whose blocks would run from one part into the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qcompiler.formats.base import Bytes, Format


def obstacle(fmt: Format, rows: Sequence[int], cols: int) -> str | None:
    """Why matrices of so many rows cannot be stacked, or None."""
    declared = fmt.declaration
    shared = next((field.name for field in declared.fields if field.covers == "tensor"), None)
    if shared is not None:
        return f"{fmt.name} stores '{shared}' once for a whole tensor"
    for field in declared.fields:
        if any(count % field.rows for count in rows[:-1]):
            return f"an entry of '{field.name}' serves {field.rows} rows, and a part has another number of rows"
        if declared.blocking == "flat" and isinstance(field.covers, int):
            for count in rows[:-1]:
                entries, rest = divmod(count * cols, field.covers)
                if rest or entries * field.bits % 8:
                    return (
                        f"blocks of '{field.name}' ({field.covers} elements) run across rows, and {count} rows of "
                        f"{cols} elements do not end with one"
                    )
    return None


def stack(fmt: Format, parts: Sequence[tuple[int, Bytes]], cols: int, out: Bytes) -> None:
    """Canonical bytes of the whole into `out`, from (rows, canonical bytes) of each part, which have no `obstacle`."""
    counts = [count for count, _ in parts]
    for (_, data), places in zip(parts, _places(fmt, counts, cols), strict=True):
        for whole, part in places:
            out[whole] = data[part]


def take(fmt: Format, rows: Sequence[int], cols: int, number: int, whole: Bytes) -> Bytes:
    """The canonical bytes of part `number` of a stacked matrix: a new array."""
    made = np.empty(fmt.nbytes(rows[number], cols), np.uint8)
    for source, part in list(_places(fmt, rows, cols))[number]:
        made[part] = whole[source]
    return made


def put(fmt: Format, rows: Sequence[int], cols: int, number: int, part: Bytes, whole: Bytes) -> None:
    """Writes part `number` into the canonical bytes of a stacked matrix."""
    for target, source in list(_places(fmt, rows, cols))[number]:
        whole[target] = part[source]


def _places(fmt: Format, rows: Sequence[int], cols: int) -> Iterator[list[tuple[slice, slice]]]:
    """For each part, where each of its sections stands: (in the whole's bytes, in its own)."""
    sections = fmt.sections(sum(rows), cols)
    at = [section.offset for section in sections]
    for count in rows:
        found = []
        for number, section in enumerate(fmt.sections(count, cols)):
            begin = at[number]
            at[number] += section.nbytes
            found.append((slice(begin, at[number]), slice(section.offset, section.offset + section.nbytes)))
        yield found
    ends = [section.offset + section.nbytes for section in sections]
    assert at == ends, f"{fmt} of {list(rows)} rows of {cols} does not stack"
