"""The bytes of a format's blocks as text, from its declaration, for docs/formats.md.

    record of 18 bytes per block of 32
      0…1            d, fp16
      2 + i, i < 16  | codes[i + 16] | codes[i] |

In a line, the highest bits of a byte are on the left.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.formats.base import Declaration, Field, Format
from qcompiler.formats.packing import Pieces, Trits


@dataclass(frozen=True)
class _Cell:
    """Bits [shift, shift + width) of a byte, which hold the bits of an entry from `place` on."""

    shift: int
    width: int
    field: Field
    entry: int
    place: int

    def text(self, step: int) -> str:
        """`step` is the difference between the entries of one byte and of the next; 0 for a single byte."""
        index = str(self.entry)
        if step:
            index = ("i" if step == 1 else f"{step} i") + (f" + {self.entry}" if self.entry else "")
        bits = "" if self.width == self.field.bits else f" bit{'s' * (self.width > 1)} {_range(self.place, self.width)}"
        return f"{self.field.name}[{index}]{bits}"


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
        lines += _aligned(_shared_bytes([(0, f, per_block)]))
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
    packed: dict[int, list[tuple[int, Field, int]]] = {}
    for f in d.fields:
        count, offset = d.entries_per_block(f, 0), int(f.offset or 0)
        if isinstance(f.packing, Trits):
            lines += [(first, line) for first, line in _digits(f, f.packing, offset)]
        elif f.bits >= 8:
            name = f.name if count == 1 else f"{f.name}[0…{count - 1}]"
            lines.append((offset, (_range(offset, f.nbytes(count)), f"{name}, {entry_type(f)}")))
        else:
            packed.setdefault(offset, []).append((offset, f, count))  # fields that share bytes begin at the same byte
    for offset, fields in packed.items():
        lines += [(offset + k, line) for k, line in enumerate(_shared_bytes(fields))]
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _digits(f: Field, packing: Trits, offset: int) -> list[tuple[int, tuple[str, str]]]:
    lines, first = [], 0
    for count, digits in packing.runs:
        entries = ", ".join(f"{f.name}[i{f' + {e}' if e else ''}]" for e in range(first, first + count * digits, count))
        lines.append((offset, (_place(offset, count), f"base-3 digits, highest first: {entries}")))
        offset, first = offset + count, first + count * digits
    return lines


def _shared_bytes(fields: list[tuple[int, Field, int]]) -> list[tuple[str, str]]:
    """Lines for fields of less than 8 bits; bytes with the same kinds of pieces share a line."""
    cells: dict[int, list[_Cell]] = {}
    for offset, f, count in fields:
        for e, pieces in enumerate(_pieces(f, count)):
            place = 0
            for byte, shift, width in pieces:
                cells.setdefault(offset + byte, []).append(_Cell(shift, width, f, e, place))
                place += width
    lines, run = [], [min(cells)]
    for byte in sorted(cells):
        cells[byte].sort(key=lambda cell: -cell.shift)
    for byte in [*sorted(cells)[1:], -1]:
        if byte == run[-1] + 1 and _continues([cells[b] for b in run], cells[byte]):
            run.append(byte)
            continue
        steps = _steps(cells[run[0]], cells[run[1]]) if len(run) > 1 else [0] * len(cells[run[0]])
        contents = [cell.text(step) for cell, step in zip(cells[run[0]], steps, strict=True)]
        if len(contents) == 8 and len(set(_steps(cells[run[0]][:-1], cells[run[0]][1:]))) == 1:
            contents[2:-1] = ["…"]
        lines.append((_place(run[0], len(run)), f"| {' | '.join(contents)} |"))
        run = [byte]
    return lines


def _pieces(f: Field, count: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    if isinstance(f.packing, Pieces):
        return f.packing.pieces
    per_byte = 8 // f.bits
    places = range(per_byte) if f.order == "low_first" else range(per_byte - 1, -1, -1)
    return tuple(((e // per_byte, places[e % per_byte] * f.bits, f.bits),) for e in range(count))


def _continues(run: list[list[_Cell]], following: list[_Cell]) -> bool:
    """Whether the byte after a run holds the same bits of entries, at the run's constant distance between entries; all
    its entries have to change."""
    last = run[-1]
    if [(c.shift, c.width, c.field.name, c.place) for c in last] != [
        (c.shift, c.width, c.field.name, c.place) for c in following
    ]:
        return False
    steps = _steps(last, following)
    return min(steps) > 0 and (len(run) == 1 or steps == _steps(run[-2], last))


def _steps(cells: list[_Cell], following: list[_Cell]) -> list[int]:
    return [after.entry - before.entry for before, after in zip(cells, following, strict=True)]


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}…{first + count - 1}"


def _place(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{f'{first} + i' if first else 'i'}, i < {count}"


def _aligned(lines: list[tuple[str, str]]) -> list[str]:
    width = max(len(where) for where, _ in lines)
    return [f"  {where:<{width}}  {contents}" for where, contents in lines]
