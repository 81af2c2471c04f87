"""An encoded matrix as a sum of its floating-point scales, each times what the codes and the other fields make of it.

    int4     (codes - 8) * scales                    scales * (codes - 8)
    nf4      table[codes] * absmax                   absmax * table[codes]
    q4_K     d * scales * codes - dmin * mins        d * (scales * codes) + dmin * (-mins)

The terms follow from the declaration alone: a term is what the decode equation gives when its field is 1 and the other
floating-point fields are 0.  That the equation is such a sum is checked with the matrix's own values.  Formats whose
scales are exponents or small floats have no such field, and keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.formats import Format, PackedTensor
from qcompiler.formats.declaration import Field

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

KINDS = ("f16", "bf16", "f32")
"""Fields that a gradient can move: a step of these types is small beside what a scale moves by."""
ROWS = 1 << 10
"""Rows whose terms are computed at a time."""
SAMPLE = 1 << 16
"""Elements in which the different values of a term are looked for."""
TOLERANCE = 1e-5
"""Of the largest value: how far the sum may be from the decoded values. fp32 has 24 bits."""


@dataclass(frozen=True)
class Term:
    """A floating-point field, whose entries in fp32 are `start` (n,).

    Each entry serves `repeats` runs of `run` consecutive elements, and the last one those that are left.  `values`
    (rows, K) is what they are multiplied with, in fp32; or, where it has at most 256 values, these as `table`
    and the places in it as bytes.
    """

    field: Field
    run: int
    repeats: int
    start: Float32
    values: Float32 | Bytes
    table: Float32 | None


def float_fields(fmt: Format) -> list[Field]:
    """The fields of scales and offsets in floating point."""
    return [field for field in fmt.declaration.fields if field.kind in KINDS and field.covers != 1]


def why_fixed(fmt: Format, cols: int) -> str:
    """Why no scale of a matrix with so many columns can be moved: "" if one can."""
    found = float_fields(fmt)
    if not found:
        kinds = sorted({str(field.kind) for field in fmt.declaration.fields if field.covers != 1})
        return f"the scales of {fmt.name} are {' and '.join(kinds) or 'a part of its codes'}, not fp16, bf16 or fp32"
    if any(field.rows > 1 for field in found):
        return f"a scale of {fmt} serves tiles of several rows"
    block = fmt.declaration.block_size(cols)
    return f"its {cols} columns are not whole blocks of {block}" if cols % block else ""


class FloatScales:
    """The terms of one matrix. Its codes, and the fields that are no floats, stay as they are."""

    def __init__(self, packed: PackedTensor) -> None:
        """Asserts `why_fixed` == ""; ValueError if the decode equation is no sum of terms."""
        fmt = packed.format
        assert not why_fixed(fmt, packed.cols)
        self.packed = packed
        self.terms = [self._term(field) for field in float_fields(fmt)]
        self._check()

    def _term(self, field: Field) -> Term:
        packed, fmt = self.packed, self.packed.format
        values = np.empty((packed.rows, packed.cols), np.float32)
        for first in range(0, packed.rows, ROWS):
            stop = min(first + ROWS, packed.rows)
            entries = fmt.entries_of_rows(packed, first, stop)
            for each in float_fields(fmt):
                entries[each.name] = np.full_like(entries[each.name], each.name == field.name)
            values[first:stop] = fmt.declaration.decode.evaluate(entries, fmt.declaration.table_arrays)
        size = packed.rows * packed.cols
        covers = field.covers if isinstance(field.covers, int) else {"row": packed.cols, "tensor": size}[field.covers]
        run = math.gcd(covers, size)
        start = np.ascontiguousarray(fmt.entries(packed, field.name)).reshape(-1).astype(np.float32)
        table = np.unique(values.reshape(-1)[:SAMPLE])
        places = np.clip(np.searchsorted(table, values), 0, len(table) - 1)
        if len(table) <= 256 and np.array_equal(table[places], values):
            return Term(field, run, covers // run, start, places.astype(np.uint8), table)
        return Term(field, run, covers // run, start, values, None)

    def _check(self) -> None:
        packed = self.packed
        for first in range(0, packed.rows, ROWS):
            stop = min(first + ROWS, packed.rows)
            wanted = packed.format.decode_rows(packed, first, stop)
            found = np.zeros_like(wanted)
            for term in self.terms:
                values = term.values[first:stop] if term.table is None else term.table[term.values[first:stop]]
                begin, end = first * packed.cols, stop * packed.cols
                covers = term.run * term.repeats
                of = np.repeat(term.start[begin // covers : -(-end // covers)], covers)[begin % covers :]
                found += values * of[: end - begin].reshape(values.shape)
            if np.abs(found - wanted).max(initial=0) > TOLERANCE * np.abs(wanted).max(initial=0):
                raise ValueError(f"the values of {packed.format} are no sum of its scales")

    def stored(self, term: Term, entries: Float32) -> Float32:
        """Entries as they are stored, in fp32; one that would become 0, as one that is not finite, stays as it was."""
        return stored(term.field, entries, term.start)

    def assemble(self, entries: Sequence[Float32]) -> PackedTensor:
        """The matrix with these entries (n,) of each term, which are `stored` already."""
        return with_entries(self.packed, {term.field: each for term, each in zip(self.terms, entries, strict=True)})


def stored(field: Field, entries: npt.NDArray[np.floating[Any]], otherwise: npt.NDArray[np.floating[Any]]) -> Float32:
    """Entries in fp32, rounded once to the field's type; `otherwise` where they would become 0, or are not finite."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found = entries.astype(field.dtype).astype(np.float32)
    return np.where(np.isfinite(found) & (found != 0), found, otherwise).astype(np.float32, copy=False)


def with_entries(packed: PackedTensor, entries: Mapping[Field, Float32]) -> PackedTensor:
    """A copy of an encoded matrix with other entries (n,) of these fields, which are `stored` already."""
    fmt = packed.format
    made = PackedTensor(fmt, packed.rows, packed.cols, packed.data.copy())
    for field, each in entries.items():
        values = each.astype(field.dtype)
        assert values.size == fmt.entries(packed, field.name).size  # one would be spread over all
        if field.offset is None:
            made.section(field.name).reshape(-1)[:] = values
        else:
            per_block = fmt.declaration.entries_per_block(field, packed.cols)
            fmt.store(made, 0, {field.name: values.reshape(-1, per_block)})
    return made


__all__ = ["FloatScales", "Term", "float_fields", "stored", "why_fixed", "with_entries"]
