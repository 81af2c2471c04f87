"""Decodes canonical bytes of any declared format in plain torch, for programs that run in eager torch.

The bytes are read as declared (fields, their packing, the elements of an entry), and the decode equation is evaluated
with torch tensors in fp32, one rounding per operation.  The result has the bits of `Format.decode`, on any torch
device, and this code shares only the declaration with it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

import torch

from qcompiler.config import resolve_format
from qcompiler.errors import UnknownFormatError
from qcompiler.formats import Field, Format
from qcompiler.formats.codebook import Vectors
from qcompiler.formats.packing import Pieces, Trits
from qcompiler.formats.trellis import Trellis

Tensor = torch.Tensor

_DTYPES: dict[tuple[str, int], torch.dtype] = {
    ("uint", 8): torch.uint8, ("int", 8): torch.int8, ("f16", 16): torch.float16, ("bf16", 16): torch.bfloat16,
    ("f32", 32): torch.float32, ("e4m3", 8): torch.float8_e4m3fn, ("e5m2", 8): torch.float8_e5m2,
    ("e8m0", 8): torch.float8_e8m0fnu,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def decode(packed: Tensor, text: str, rows: int, cols: int) -> Tensor:
    """The fp32 values (rows, cols) of canonical bytes (uint8, 1-D) of the format named by `text`.

    UnknownFormatError for a name or parameter that does not exist.
    """
    fmt = resolve_format(text)
    entries = {f.name: _of_elements(fmt, f, packed, rows, cols) for f in fmt.declaration.fields}
    tables = {name: torch.from_numpy(t).to(packed.device) for name, t in fmt.declaration.table_arrays.items()}
    value = _evaluate(ast.parse(fmt.declaration.decode.text, mode="eval").body, entries, tables)
    return value.reshape(rows, cols)


def _evaluate(node: ast.expr, entries: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> Tensor:
    match node:
        case ast.Name(name):
            return entries[name].to(torch.float32)
        case ast.Constant(value=int(value) | float(value)):
            return torch.tensor(value, dtype=torch.float32)
        case ast.Subscript(ast.Name(table), ast.Name(name)):
            return tables[table][entries[name].long()]
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_evaluate(left, entries, tables), _evaluate(right, entries, tables))
        case _:
            raise ValueError(f"'{ast.unparse(node)}' is outside the grammar of decode equations")


def _of_elements(fmt: Format, f: Field, packed: Tensor, rows: int, cols: int) -> Tensor:
    """A field's entry for each element: (rows * cols,) if blocks run across rows, else (rows, cols); or (1,)."""
    entries = _unpack(f, _stored(fmt, f, packed, rows, cols))
    if f.covers == "tensor":
        return entries
    if fmt.declaration.blocking == "flat":
        return entries.repeat_interleave(int(f.covers))[: rows * cols]
    by_row = entries.reshape(-(-rows // f.rows), -1)
    if f.covers == 1 and fmt.declaration.trellis is not None:
        return _windows(fmt.declaration.trellis, by_row.to(torch.int32))
    by_row = by_row.repeat_interleave(f.rows, dim=0)[:rows] if f.rows > 1 else by_row
    if f.covers == "row":
        return by_row[:, :1].expand(rows, cols)
    return by_row.repeat_interleave(int(f.covers), dim=1)[:, :cols]


def _stored(fmt: Format, f: Field, packed: Tensor, rows: int, cols: int) -> Tensor:
    """The bytes of a field, 1-D."""
    d, sections = fmt.declaration, fmt.sections(rows, cols)
    if f.offset is None:
        section = next(s for s in sections if s.name == f.name)
        return packed[section.offset : section.offset + section.nbytes].clone()
    records = packed[: sections[0].nbytes].reshape(-1, d.record_bytes)
    return records[:, f.offset : f.offset + f.nbytes(d.entries_per_block(f, cols))].reshape(-1)


def _unpack(f: Field, raw: Tensor) -> Tensor:
    """Entries, 1-D, in their own dtype."""
    match f.packing:
        case Pieces() if f.kind == "f16":
            bits = _pieces(f.packing, raw.reshape(-1, f.packing.nbytes).to(torch.int32)).reshape(-1)
            return bits.to(torch.int16).view(torch.float16)
        case Pieces():
            return _pieces(f.packing, raw.reshape(-1, f.packing.nbytes).to(torch.int32)).reshape(-1)
        case Vectors():
            return _vectors(f.packing, raw.reshape(-1, f.packing.nbytes).to(torch.int32)).reshape(-1)
        case Trits():
            return _trits(f.packing, raw.reshape(-1, f.packing.nbytes).to(torch.int32)).reshape(-1)
        case None if f.bits >= 8:
            return raw.contiguous().view(_DTYPES[f.kind, f.bits])
        case None:
            places = torch.arange(0, 8, f.bits, device=raw.device, dtype=torch.uint8)
            places = places if f.order == "low_first" else places.flip(0)
            return ((raw[:, None] >> places) & ((1 << f.bits) - 1)).reshape(-1)
        case other:
            raise UnknownFormatError(f"torch.ops.qc cannot read entries packed as {type(other).__name__}")


def _pieces(packing: Pieces, raw: Tensor) -> Tensor:
    out = torch.zeros((len(raw), packing.entries), dtype=torch.int32, device=raw.device)
    places = [0] * packing.entries
    for turn in range(max(len(entry) for entry in packing.pieces)):
        which = [e for e, entry in enumerate(packing.pieces) if turn < len(entry)]
        byte, shift, width = zip(*(packing.pieces[e][turn] for e in which), strict=True)
        found = raw[:, list(byte)] >> torch.tensor(shift, device=raw.device)
        found &= (1 << torch.tensor(width, device=raw.device)) - 1
        out[:, which] |= (found << torch.tensor([places[e] for e in which], device=raw.device)).to(torch.int32)
        for e, bits in zip(which, width, strict=True):
            places[e] += bits
    return out


def _windows(trellis: Trellis, codes: Tensor) -> Tensor:
    """The window that ends at each code (rows, cols): the code at place p of a sequence comes from column `columns[p]`
    of its block, with the sequence's number times two added."""
    place = torch.arange(64, device=codes.device)
    columns = place // 4 * 16 + place % 4 // 2 * 8 + place % 2
    blocks = codes.reshape(len(codes), -1, 256)
    found = torch.zeros_like(blocks)
    for sequence in range(0, 8, 2):
        for back in range(trellis.codes):
            earlier = blocks[..., columns[(place - back) % 64] + sequence]
            found[..., columns + sequence] |= earlier << trellis.bits * (trellis.codes - 1 - back)
    return found.reshape(codes.shape)


def _trits(packing: Trits, raw: Tensor) -> Tensor:
    parts, first = [], 0
    for count, digits in packing.runs:
        run = raw[:, first : first + count]
        parts += [((run * 3**n & 255) * 3) >> 8 for n in range(digits)]
        first += count
    return torch.cat(parts, dim=1)


def _vectors(packing: Vectors, raw: Tensor) -> Tensor:
    points = torch.from_numpy(packing.book.points.copy()).to(raw.device, torch.int32)
    digits = points[_pieces(packing.index, raw).long()].reshape(len(raw), -1)
    if packing.flags is None:
        return digits
    bits, flags = _pieces(packing.flags, raw), torch.zeros_like(digits)
    for place in range(8):
        flags ^= bits >> place & 1
    return digits | flags << packing.book.width
