"""The coverage ledger: every parameter with its format and bytes, or the reason it was left as it is.

`bits_per_weight` is all stored bits (codes, scales, padding, unquantised tensors) divided by the elements of all
parameters with two or more dimensions; a recipe's promise is checked against it.  A target's layout pads rows to whole
panels.  That padding is listed and counted too, but causes an error only from `PADDING_ALLOWANCE` bytes on: less of it
only means that the model is tiny (a layer with 5 outputs has 11 rows of padding).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from qcompiler.errors import PromiseError
from qcompiler.units import counted, human_bytes

PADDING_ALLOWANCE = 64 << 10
"""Bytes of layout padding in a whole model, up to which the promise is checked without padding."""

STATE = "a state, which calls change"
"""The reason of a buffer that the model writes, such as a cache: it is no weight, and no recipe makes it smaller."""

REASONS = 5
"""The reasons that the summary names under each type."""


@dataclass(frozen=True)
class LedgerRow:
    """One stored tensor.

    `parameters` are its paths in the model (several for tied weights); `shape` and `dtype` are the model's; `format` is
    the storage format ("" if kept as it is); `reason` says why it was kept or which rule chose.  Bytes are for the
    whole tensor.
    `counts`: a stored parameter with two or more dimensions, so part of bits per weight.
    `padding`: the part of `bytes_after` that the target's layout adds to the format's own bytes.
    `devices`: the device slots that hold a whole copy, in a program for several devices.
    """

    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    format: str
    reason: str
    bytes_before: int
    bytes_after: int
    counts: bool
    padding: int = 0
    devices: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def is_state(self) -> bool:
        return self.reason.startswith(STATE)

    @property
    def bits(self) -> float:
        """Stored bits per element."""
        return 8 * self.bytes_after / max(self.elements, 1)


@dataclass(frozen=True)
class Ledger:
    """All rows of a model, in the model's order, and the recipe's promise (None: none was made)."""

    rows: tuple[LedgerRow, ...]
    recipe: str = "float"
    promise_bits: float | None = None
    later: int = 0
    """The number of tensors that use an alternative of the recipe; the promise allows for their bits."""

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows)

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    @property
    def padding(self) -> int:
        """Bytes that the target's layouts add in total."""
        return sum(row.padding for row in self.rows)

    def bits_per_weight(self) -> float:
        """Stored bits per element over parameters with two or more dimensions; 0.0 if there are none."""
        counted = [row for row in self.rows if row.counts]
        elements = sum(row.elements for row in counted)
        return 8 * sum(row.bytes_after for row in counted) / elements if elements else 0.0

    def as_stored(self, nbytes: Mapping[str, int], devices: Mapping[str, tuple[str, ...]] | None = None) -> Ledger:
        """The ledger of a program that stores `nbytes` per parameter path, in its target's layout, on `devices`."""
        rows = [_as_stored(row, nbytes.get(row.parameters[0])) for row in self.rows]
        found = devices or {}
        return replace(self, rows=tuple(replace(row, devices=found.get(row.parameters[0], ())) for row in rows))

    def remarked(self, remarks: Mapping[str, str]) -> Ledger:
        """The ledger with a remark in the last column of each row whose first parameter is in `remarks`."""
        return replace(self, rows=tuple(_remarked(row, remarks.get(row.parameters[0])) for row in self.rows))

    def without_padding(self) -> Ledger:
        """The ledger with the formats' own bytes, which are the same on every target."""
        rows = (replace(row, bytes_after=row.bytes_after - row.padding, padding=0) for row in self.rows)
        return replace(self, rows=tuple(rows))

    def check_promise(self) -> None:
        """PromiseError, naming the largest parameters, if the promised bits per weight are exceeded."""
        judged = self.without_padding() if self.padding <= PADDING_ALLOWANCE else self
        bits = judged.bits_per_weight()
        if self.promise_bits is None or bits <= self.promise_bits:
            return
        worst = sorted(
            (r for r in self.rows if r.counts), key=lambda r: r.elements * (self.promise_bits or 0) - 8 * r.bytes_after
        )
        named = "; ".join(f"{r.parameters[0]} at {r.bits:.2f} bits ({r.format or r.reason})" for r in worst[:3])
        raise PromiseError(
            f"recipe '{self.recipe}' promises {self.promise_bits} bits per weight, and this model takes {bits:.3f}. "
            f"The largest excess: {named}. Choose another format for them by a rule, or state what you accept: "
            f"QuantConfig({self.recipe!r}, promise_bits={_ceil(bits)}) or promise_bits=None"
        )

    def totals(self) -> str:
        """One line: `recipe nf4: 103 tensors, 90.9 MB -> 27.0 MB, 6.480 bits per weight (promised 6.5)`. States are
        counted by themselves, behind it."""
        states = [row for row in self.rows if row.is_state]
        kept = [row for row in self.rows if not row.is_state]
        sizes = f"{human_bytes(sum(row.bytes_before for row in kept))} -> {_bytes_of(kept)}"
        bits = f"{self.bits_per_weight():.3f} bits per weight ({self._promise()})"
        more = f"; {counted(len(states), 'state')} of {_bytes_of(states)}" if states else ""
        return f"recipe {self.recipe}: {counted(len(kept), 'tensor')}, {sizes}, {bits}{more}"

    def _promise(self) -> str:
        promise = "no promise" if self.promise_bits is None else f"promised {self.promise_bits}"
        if self.later:
            promise += f"; {self.later} tensors in a later choice of the recipe"
        if not self.padding:
            return promise
        bits = self.without_padding().bits_per_weight()
        return f"{promise}; {bits:.3f} without {self.padding:,} bytes of padding"

    def summary(self) -> str:
        """The totals, then a line per format with the number and the bytes of its tensors, largest first. Under the
        types of tensors that are not quantised stand the reasons, with the number and the bytes of the tensors of
        each."""
        lines = [self.totals()]
        for stored, rows in _grouped(self.rows, _stored):
            before = human_bytes(sum(row.bytes_before for row in rows))
            lines.append(f"  {stored}: {counted(len(rows), 'tensor')}, {before} -> {_bytes_of(rows)}")
            kept = _grouped([row for row in rows if not row.format and row.reason], _reason)
            lines += [f"    {len(each)} x {why}, {_bytes_of(each)}" for why, each in kept[:REASONS]]
            if len(kept) > REASONS:
                lines.append(f"    and {counted(len(kept) - REASONS, 'other reason')}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Rows and totals as JSON."""
        totals = {
            "recipe": self.recipe,
            "bits_per_weight": self.bits_per_weight(),
            "promise_bits": self.promise_bits,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "padding": self.padding,
            "later": self.later,
        }
        return json.dumps({"totals": totals, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def table(self) -> str:
        """A table with one line per row, totals last."""
        header = ("parameter", "shape", "dtype", "stored as", "bits", "bytes before", "bytes after", "why")
        body = [_cells(row) for row in self.rows]
        totals = (
            "total",
            "",
            "",
            "",
            f"{self.bits_per_weight():.3f}",
            f"{self.bytes_before:,}",
            f"{self.bytes_after:,}",
            self._promise(),
        )
        return _render([header, *body, totals])

    def __str__(self) -> str:
        return self.table()


def _as_stored(row: LedgerRow, nbytes: int | None) -> LedgerRow:
    if nbytes is None or nbytes == row.bytes_after:
        return row
    padding = nbytes - row.bytes_after
    why = f"{padding:,} bytes of padding by the layout"
    return _remarked(replace(row, bytes_after=nbytes, padding=padding), why)


def _remarked(row: LedgerRow, why: str | None) -> LedgerRow:
    return row if why is None else replace(row, reason=f"{row.reason}; {why}" if row.reason else why)


def _ceil(bits: float) -> float:
    return round(-(-bits * 10 // 1) / 10, 1)


def _cells(row: LedgerRow) -> tuple[str, ...]:
    extra = f" (+{len(row.parameters) - 1} tied)" if len(row.parameters) > 1 else ""
    extra += f" on {', '.join(row.devices)}" if row.devices else ""
    shape = "x".join(map(str, row.shape)) or "scalar"
    return (row.parameters[0] + extra, shape, row.dtype, _stored(row), f"{row.bits:.3f}", f"{row.bytes_before:,}",
            f"{row.bytes_after:,}", row.reason)  # fmt: skip


def _grouped(rows: Sequence[LedgerRow], key: Callable[[LedgerRow], str]) -> list[tuple[str, list[LedgerRow]]]:
    """The rows by key, largest first."""
    groups: dict[str, list[LedgerRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return sorted(groups.items(), key=lambda group: -sum(row.bytes_after for row in group[1]))


def _bytes_of(rows: Sequence[LedgerRow]) -> str:
    return human_bytes(sum(row.bytes_after for row in rows))


def _reason(row: LedgerRow) -> str:
    """Its first part: what follows is about the one tensor."""
    return row.reason.partition("; ")[0]


def _stored(row: LedgerRow) -> str:
    """The format, or the type of a tensor that is not quantised; "dropped" for one that takes no bytes."""
    return row.format or row.dtype if row.bytes_after else "dropped"


def _render(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = {4, 5, 6}

    def row(line: Sequence[str]) -> str:
        cells = (c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:-1]), rule, row(lines[-1])])
