"""What kernels of every target print to read a packed table where its canonical bytes keep codes and entries.

An element (row, k) of canonical bytes stands in a record, in a block whose entries share bytes, or in order behind the
others of its field.  The expressions here are C++ in terms of `table` (bytes), `row`, `k`, `block` and `inside`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Format, Section
from qcompiler.formats.packing import Packing, Pieces, Trits
from qcompiler.kernels import layouts
from qcompiler.kernels.text import identifier
from qcompiler.plan.kernel import DType


@dataclass(frozen=True)
class PackedTable:
    """A packed table: its format, layout and sizes, and the name of the kernel that reads it."""

    name: str
    fmt: Format
    layout: str
    dtype: DType
    rows: int
    cols: int

    @property
    def sections(self) -> dict[str, Section]:
        return {s.name: s for s in layouts.get(self.layout).sections(self.fmt, self.dtype, self.rows, self.cols)}

    @property
    def block(self) -> int:
        """Elements of a block that is stored as one piece (a record, entries that share bytes); 0 if there is none."""
        d = self.fmt.declaration
        stands = self.layout == "canonical" and (d.interleaved or any(f.packing for f in d.fields))
        return d.block_size(self.cols) if stands else 0

    @property
    def column(self) -> str:
        """What blocks are counted along: the place in the stream of elements, or the column."""
        return f"row * {self.cols} + k" if self.fmt.declaration.blocking == "flat" else "k"

    def find_block(self) -> str:
        """The statement that declares the `block` of (row, k) and the place `inside` of it."""
        before = "" if self.fmt.declaration.blocking == "flat" else f"row * {-(-self.cols // self.block)} + "
        column = self.column
        return f"const int64_t block = {before}({column}) / {self.block}, inside = ({column}) % {self.block};"

    def block_base(self, field: Field) -> str:
        """Where the field's bytes of `block` begin."""
        if field.offset is not None:
            return f"table + block * {self.fmt.declaration.record_bytes} + {field.offset}"
        assert field.packing is not None
        return f"table + {self.sections[field.name].offset} + block * {field.packing.nbytes}"

    def entries_of_a_row(self, field: Field) -> int:
        """Entries of a row as stored: rows of blocks begin at whole bytes."""
        section = self.sections[field.name]
        return section.shape[-1] * 8 * section.dtype.itemsize // field.bits

    def entry_index(self, field: Field) -> str:
        """Which of a field's entries, stored in order, serves (row, k)."""
        if field.covers == "tensor":
            return "0"
        covers = field.covers if isinstance(field.covers, int) else 0
        if self.fmt.declaration.blocking == "flat":
            return f"(row * {self.cols} + k) / {covers}"
        beside = f" + k / {covers}" if covers else ""
        return f"row / {field.rows} * {self.entries_of_a_row(field)}{beside}"

    def packed_fields(self) -> list[Field]:
        """The fields that need a table of places."""
        return [f for f in self.fmt.declaration.fields if f.packing is not None and self.block]

    def places_name(self, field: Field) -> str:
        """The C++ table with the places of a field's entries in a block."""
        return f"qk_{self.name}_{identifier(field.name)}_at"


@dataclass(frozen=True)
class Places:
    """Where the entries of a block stand: `most` pieces of bits each, 0 for base-3 digits; a C++ literal per entry."""

    most: int
    literals: tuple[str, ...]

    @property
    def type(self) -> str:
        """The C++ type behind the target's prefix: `trit` or `pieces<most>`."""
        return f"pieces<{self.most}>" if self.most else "trit"

    @property
    def rows(self) -> str:
        """The literals, four to a line."""
        return ",\n".join("    " + ", ".join(self.literals[i : i + 4]) for i in range(0, len(self.literals), 4))


def places_of(packing: Packing, reader: str) -> Places:
    """The places of a packing's entries. KernelSelectionError, which names the `reader`, for an unknown packing."""
    if isinstance(packing, Trits):
        found, first = [], 0
        for count, digits in packing.runs:
            found += [f"{{{first + byte}, {3**n}}}" for n in range(digits) for byte in range(count)]
            first += count
        return Places(0, tuple(found))
    if not isinstance(packing, Pieces):
        raise KernelSelectionError(
            f"{reader} reads entries packed as {packing.describe()} in canonical bytes; tables in the target's own "
            "layout are read whatever their packing"
        )
    most, found = max(len(entry) for entry in packing.pieces), []
    for entry in packing.pieces:
        place, pieces = 0, []
        for byte, shift, width in entry:
            pieces.append(f"{{{byte}, {shift}, {(1 << width) - 1}, {place}}}")
            place += width
        pieces += ["{0, 0, 0, 0}"] * (most - len(pieces))
        found.append(f"{{{{{', '.join(pieces)}}}}}")
    return Places(most, tuple(found))
