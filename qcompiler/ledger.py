"""The coverage ledger: every parameter with its format and bytes, or the reason it was left as it is.

`bits_per_weight` counts all stored bits (codes, scales, padding, tensors left alone) over the elements of all
parameters with two or more dimensions; a recipe's promise is checked against it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from qcompiler.errors import PromiseError


@dataclass(frozen=True)
class LedgerRow:
    """One stored tensor.

    `parameters` are its paths in the model (several for tied weights), `shape` and `dtype` what the model has, `format`
    the storage format ("" if kept as it is), `reason` why it was kept or which rule chose.  Bytes are whole tensors.
    `counts`: a parameter with two or more dimensions that the program stores, so part of bits per weight.
    """

    parameters: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    format: str
    reason: str
    bytes_before: int
    bytes_after: int
    counts: bool

    @property
    def elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

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

    def __iter__(self) -> Iterator[LedgerRow]:
        return iter(self.rows)

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows)

    def bits_per_weight(self) -> float:
        """Stored bits per element over parameters with two or more dimensions; 0.0 if there are none."""
        counted = [row for row in self.rows if row.counts]
        elements = sum(row.elements for row in counted)
        return 8 * sum(row.bytes_after for row in counted) / elements if elements else 0.0

    def check_promise(self) -> None:
        """PromiseError, naming the parameters that cost most, if the promised bits per weight are exceeded."""
        bits = self.bits_per_weight()
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
        """One line for people: `recipe nf4: 103 tensors, 90.9 MB -> 27.0 MB, 6.480 bits per weight (promised 6.5)`."""
        promise = "no promise" if self.promise_bits is None else f"promised {self.promise_bits}"
        sizes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        bits = f"{self.bits_per_weight():.3f} bits per weight ({promise})"
        return f"recipe {self.recipe}: {len(self.rows)} tensors, {sizes}, {bits}"

    def to_json(self) -> str:
        """Rows and totals as JSON."""
        totals = {
            "recipe": self.recipe,
            "bits_per_weight": self.bits_per_weight(),
            "promise_bits": self.promise_bits,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }
        return json.dumps({"totals": totals, "rows": [asdict(row) for row in self.rows]}, indent=1)

    def table(self) -> str:
        """Text for people: one line per row, totals last."""
        header = ("parameter", "shape", "dtype", "stored as", "bits", "bytes before", "bytes after", "why")
        body = [_cells(row) for row in self.rows]
        promise = "no promise" if self.promise_bits is None else f"promised {self.promise_bits}"
        totals = (
            "total",
            "",
            "",
            "",
            f"{self.bits_per_weight():.3f}",
            f"{self.bytes_before:,}",
            f"{self.bytes_after:,}",
            promise,
        )
        return _render([header, *body, totals])

    def __str__(self) -> str:
        return self.table()


def _ceil(bits: float) -> float:
    return round(-(-bits * 10 // 1) / 10, 1)


def _cells(row: LedgerRow) -> tuple[str, ...]:
    extra = f" (+{len(row.parameters) - 1} tied)" if len(row.parameters) > 1 else ""
    shape = "x".join(map(str, row.shape)) or "scalar"
    stored = row.format or row.dtype if row.bytes_after else "dropped"
    return (row.parameters[0] + extra, shape, row.dtype, stored, f"{row.bits:.3f}", f"{row.bytes_before:,}",
            f"{row.bytes_after:,}", row.reason)  # fmt: skip


def _render(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numeric = {4, 5, 6}

    def row(line: Sequence[str]) -> str:
        cells = (c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([row(lines[0]), rule, *map(row, lines[1:-1]), rule, row(lines[-1])])
