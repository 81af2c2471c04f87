"""The bytes of a format's blocks as text, from its declaration, for docs/formats.md.

    record of 18 bytes per block of 32
      0…1            d, fp16
      2 + i, i < 16  | codes[i + 16] | codes[i] |

In a line, the highest bits of a byte are on the left.  Codes that come from vectors of a codebook are shown as what is
stored: `index[v]` of vector v, and `flags[g]`, the stored flags of eight elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.formats.base import Declaration, Field, Format
from qcompiler.formats.codebook import Vectors
from qcompiler.formats.packing import Piece, Pieces, Trits


@dataclass(frozen=True)
class _Stored:
    """Entries of `bits` bits in bytes from `offset` on, by their pieces."""

    name: str
    bits: int
    offset: int
    pieces: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class _Cell:
    """Bits [shift, shift + width) of a byte, which hold the bits of an entry from `place` on."""

    shift: int
    width: int
    stored: _Stored
    entry: int
    place: int

    def text(self, step: int) -> str:
        """`step` is the difference between the entries of one byte and of the next; 0 for a single byte."""
        index = str(self.entry)
        if step:
            index = ("i" if step == 1 else f"{step} i") + (f" + {self.entry}" if self.entry else "")
        whole = self.width == self.stored.bits
        bits = "" if whole else f" bit{'s' * (self.width > 1)} {_range(self.place, self.width)}"
        return f"{self.stored.name}[{index}]{bits}"


def diagram(fmt: Format) -> list[str]:
    """Lines of text that show what every byte of a block holds."""
    d = fmt.declaration
    if d.interleaved:
        return [f"record of {d.record_bytes} bytes per block of {d.block}", *_aligned(_record(d))]
    lines = []
    for f in d.fields:
        if f.bits >= 8:
            lines.append(f"section {f.name}: {entry_type(f)} for each {served(f)}")
            continue
        per_block = d.entries_per_block(f, 4096)
        lines.append(f"section {f.name}: {f.nbytes(per_block)} bytes per block of {d.block_size(4096)}")
        lines += _aligned(_shared_bytes(_stored(f, 0, per_block), (3,) if f.bits == 3 else ()))
    return lines


def entry_type(f: Field) -> str:
    """The type of an entry: fp16, int8, uint6, …"""
    return {"f16": "fp16", "f32": "fp32"}.get(f.kind, f.kind if f.kind not in ("uint", "int") else f"{f.kind}{f.bits}")


def served(f: Field) -> str:
    """The elements that one entry serves."""
    if f.covers == "tensor":
        return "tensor"
    if f.covers == "row":
        return "row" if f.rows == 1 else f"{f.rows} rows"
    if f.rows > 1:
        return f"{f.rows} x {f.covers} elements"
    return "element" if f.covers == 1 else f"{f.covers} elements"


def _record(d: Declaration) -> list[tuple[str, str]]:
    """Lines (bytes, contents) of a block's record, in order of their bytes."""
    lines: list[tuple[int, tuple[str, str]]] = []
    packed: dict[int, list[_Stored]] = {}
    periods: tuple[int, ...] = ()
    for f in d.fields:
        count, offset = d.entries_per_block(f, 0), int(f.offset or 0)
        if isinstance(f.packing, Trits):
            lines += [(first, line) for first, line in _digits(f, f.packing, offset)]
        elif f.bits >= 8 and f.packing is None:
            name = f.name if count == 1 else f"{f.name}[0…{count - 1}]"
            lines.append((offset, (_range(offset, f.nbytes(count)), f"{name}, {entry_type(f)}")))
        else:
            packed.setdefault(offset, []).extend(_stored(f, offset, count))  # fields that share bytes begin together
            periods = (2, 4, 8) if isinstance(f.packing, Vectors) else periods
    for offset, stored in packed.items():
        lines += [(offset + k, line) for k, line in enumerate(_shared_bytes(stored, periods))]
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _digits(f: Field, packing: Trits, offset: int) -> list[tuple[int, tuple[str, str]]]:
    lines, first = [], 0
    for count, digits in packing.runs:
        entries = ", ".join(f"{f.name}[i{f' + {e}' if e else ''}]" for e in range(first, first + count * digits, count))
        lines.append((offset, (_place(offset, count), f"base-3 digits, highest first: {entries}")))
        offset, first = offset + count, first + count * digits
    return lines


def _shared_bytes(stored: list[_Stored], periods: tuple[int, ...]) -> list[tuple[str, str]]:
    """Lines for entries that share bytes; bytes with the same kinds of pieces share a line, if they follow each other
    or stand one of these periods apart."""
    cells: dict[int, list[_Cell]] = {}
    for each in stored:
        for e, pieces in enumerate(each.pieces):
            place = 0
            for byte, shift, width in pieces:
                cells.setdefault(each.offset + byte, []).append(_Cell(shift, width, each, e, place))
                place += width
    for of_byte in cells.values():
        of_byte.sort(key=lambda cell: -cell.shift)
    lines, byte, end = [], min(cells), max(cells) + 1
    while byte < end:
        counts = {period: _repeats(cells, byte, period) for period in (1, *periods)}
        period = max(counts, key=lambda p: (p * counts[p] * (counts[p] > 1), -p))
        for first in range(byte, byte + period):
            lines.append((_place(first, counts[period], period), _contents(cells, first, counts[period], period)))
        byte += period * counts[period]
    return lines


def _repeats(cells: dict[int, list[_Cell]], first: int, period: int) -> int:
    """How often `period` bytes follow each other from `first` on, with the same pieces of ever the next entries."""
    count = 1
    while True:
        following = range(first + count * period, first + (count + 1) * period)
        runs = [[cells[b] for b in range(byte - count * period, byte, period) if b in cells] for byte in following]
        if not all(b in cells and run and _continues(run, cells[b]) for b, run in zip(following, runs, strict=True)):
            return count
        count += 1


def _contents(cells: dict[int, list[_Cell]], first: int, count: int, period: int) -> str:
    mine = cells[first]
    steps = _steps(mine, cells[first + period]) if count > 1 else [0] * len(mine)
    contents = [cell.text(step) for cell, step in zip(mine, steps, strict=True)]
    if len(contents) == 8 and len(set(_steps(mine[:-1], mine[1:]))) == 1:
        contents[2:-1] = ["…"]
    return f"| {' | '.join(contents)} |"


def _stored(f: Field, offset: int, count: int) -> list[_Stored]:
    if not isinstance(f.packing, Vectors):
        return [_Stored(f.name, f.bits, offset, _pieces(f, count))]
    found = [_Stored("index", f.packing.index.bits, offset, f.packing.index.pieces)]
    if f.packing.flags is not None:
        of_eight = tuple(_bits_of_eight(f.packing.flags, e) for e in range(0, count, 8))
        found.append(_Stored("flags", sum(width for _, _, width in of_eight[0]), offset, of_eight))
    return found


def _bits_of_eight(flags: Pieces, first: int) -> tuple[Piece, ...]:
    """The stored bits of the flags of eight elements: pieces of one bit, joined where they lie side by side."""
    bits = [of[0] for of in flags.pieces[first : first + 8] if sum(width for _, _, width in of) == 1]
    joined: list[Piece] = []
    for byte, shift, _ in dict.fromkeys(bits):
        if joined and joined[-1][0] == byte:
            joined[-1] = (byte, joined[-1][1], joined[-1][2] + 1)
        else:
            joined.append((byte, shift, 1))
    return tuple(joined)


def _pieces(f: Field, count: int) -> tuple[tuple[Piece, ...], ...]:
    if isinstance(f.packing, Pieces):
        return f.packing.pieces
    per_byte = 8 // f.bits
    places = range(per_byte) if f.order == "low_first" else range(per_byte - 1, -1, -1)
    return tuple(((e // per_byte, places[e % per_byte] * f.bits, f.bits),) for e in range(count))


def _continues(run: list[list[_Cell]], following: list[_Cell]) -> bool:
    """Whether the byte after a run holds the same bits of entries, at the run's constant distance between entries; all
    its entries have to change."""
    last = run[-1]
    if [(c.shift, c.width, c.stored.name, c.place) for c in last] != [
        (c.shift, c.width, c.stored.name, c.place) for c in following
    ]:
        return False
    steps = _steps(last, following)
    return min(steps) > 0 and (len(run) == 1 or steps == _steps(run[-2], last))


def _steps(cells: list[_Cell], following: list[_Cell]) -> list[int]:
    return [after.entry - before.entry for before, after in zip(cells, following, strict=True)]


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}…{first + count - 1}"


def _place(first: int, count: int, period: int = 1) -> str:
    index = "i" if period == 1 else f"{period} i"
    return str(first) if count == 1 else f"{f'{first} + {index}' if first else index}, i < {count}"


def _aligned(lines: list[tuple[str, str]]) -> list[str]:
    width = max(len(where) for where, _ in lines)
    return [f"  {where:<{width}}  {contents}" for where, contents in lines]
