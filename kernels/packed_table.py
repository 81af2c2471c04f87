"""C++ text, shared by all targets, that reads a packed table from canonical bytes.

An element (row, k) of canonical bytes is stored in one of three ways: in a record, in a block whose entries share
bytes, or in an array of its field. The expressions here are C++ in terms of `table` (bytes), `row`, `k`, `block` and
`inside`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Format, Section
from qcompiler.formats.codebook import Vectors
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
        """Elements of a block that is stored as one unit (a record, or entries that share bytes); 0 without such
        blocks."""
        d = self.fmt.declaration
        stands = self.layout == "canonical" and (d.interleaved or any(f.packing for f in d.fields))
        return d.block_size(self.cols) if stands else 0

    @property
    def column(self) -> str:
        """The C++ expression along which blocks are counted: the position in the flat stream, or the column."""
        return f"row * {self.cols} + k" if self.fmt.declaration.blocking == "flat" else "k"

    def find_block(self) -> str:
        """The C++ statement that declares the `block` of (row, k) and the position `inside` it."""
        before = "" if self.fmt.declaration.blocking == "flat" else f"row * {-(-self.cols // self.block)} + "
        column = self.column
        return f"const int64_t block = {before}({column}) / {self.block}, inside = ({column}) % {self.block};"

    def block_base(self, field: Field) -> str:
        """The C++ address of the field's bytes in `block`."""
        if field.offset is not None:
            return f"table + block * {self.fmt.declaration.record_bytes} + {field.offset}"
        assert field.packing is not None
        return f"table + {self.sections[field.name].offset} + block * {field.packing.nbytes}"

    def entries_of_a_row(self, field: Field) -> int:
        """Entries of a row as stored. Rows of blocks start at whole bytes."""
        section = self.sections[field.name]
        return section.shape[-1] * 8 * section.dtype.itemsize // field.bits

    def entry_index(self, field: Field) -> str:
        """The C++ index of the field's entry that serves (row, k), for entries stored in order."""
        if field.covers == "tensor":
            return "0"
        covers = field.covers if isinstance(field.covers, int) else 0
        if self.fmt.declaration.blocking == "flat":
            return f"(row * {self.cols} + k) / {covers}"
        beside = f" + k / {covers}" if covers else ""
        return f"row / {field.rows} * {self.entries_of_a_row(field)}{beside}"

    def packed_fields(self) -> list[Field]:
        """The fields that need a table of bit positions."""
        return [f for f in self.fmt.declaration.fields if f.packing is not None and self.block]

    def places_name(self, field: Field) -> str:
        """The name of the C++ table with the bit positions of a field's entries in a block."""
        return f"qk_{self.name}_{identifier(field.name)}_at"


@dataclass(frozen=True)
class BitPositions:
    """The bit positions of a block's entries, one C++ literal per entry. `most` is the largest number of pieces of an
    entry; 0 means base-3 digits."""

    most: int
    literals: tuple[str, ...]

    @property
    def type(self) -> str:
        """The C++ type, without the target's prefix: `trit` or `pieces<most>`."""
        return f"pieces<{self.most}>" if self.most else "trit"

    @property
    def rows(self) -> str:
        """The literals, four per line."""
        return ",\n".join("    " + ", ".join(self.literals[i : i + 4]) for i in range(0, len(self.literals), 4))


def bit_positions(packing: Packing, reader: str) -> BitPositions:
    """The bit positions of a packing's entries. KernelSelectionError, naming the `reader`, for an unknown packing.

    `places_tables` takes vectors of a codebook apart.
    """
    if isinstance(packing, Trits):
        found, first = [], 0
        for count, digits in packing.runs:
            found += [f"{{{first + byte}, {3**n}}}" for n in range(digits) for byte in range(count)]
            first += count
        return BitPositions(0, tuple(found))
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
    return BitPositions(most, tuple(found))


def places_tables(
    table: PackedTable, field: Field, prefix: str, array: Callable[[str, str, int], str], reader: str
) -> str:
    """C++ text: the tables that `place_in_block` names. `array` makes the head of a definition of (type, name, count),
    `prefix` is that of the target's types."""
    assert field.packing is not None
    name, made = table.places_name(field), f"// {field.name}: {field.packing.describe()}\n"

    def positions(packing: Packing, name: str) -> str:
        places = bit_positions(packing, reader)
        return f"{array(f'{prefix}_{places.type}', name, len(places.literals))} = {{\n{places.rows}}};\n"

    if not isinstance(field.packing, Vectors):
        return made + positions(field.packing, name)
    vectors = field.packing
    made += positions(vectors.index, f"{name}_index")
    if vectors.flags is not None:
        made += positions(vectors.flags, f"{name}_flags")
    words = [f"0x{word:04x}" for word in vectors.book.words]
    rows = ",\n".join("    " + ", ".join(words[i : i + 12]) for i in range(0, len(words), 12))
    return made + f"{array('uint16_t', f'{name}_words', len(words))} = {{\n{rows}}};\n"


def place_in_block(table: PackedTable, field: Field, prefix: str, index: str, base: str) -> str:
    """The C++ expression of the bits of entry `index` of a block at `base`, as an unsigned integer."""
    name = table.places_name(field)
    if not isinstance(field.packing, Vectors):
        return f"{prefix}_packed_entry({name}[{index}], {base})"
    book = field.packing.book
    flags = f"{name}_flags" if field.packing.flags is not None else f"(const {prefix}_pieces<1>*)0"
    of = f"{name}_words, {name}_index, {flags}, {index}, {base}"
    return f"{prefix}_vector_code<{book.size}, {book.width}>({of})"
