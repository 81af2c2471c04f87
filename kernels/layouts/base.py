"""The interface of layouts, and the canonical layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from qcompiler.errors import LayoutError
from qcompiler.formats.base import Bytes, Format, Section, place_sections
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

ALIGNMENT = 64
"""Bytes: one cache line, which is also the widest vector load."""

Items = npt.NDArray[Any]


class Layout(ABC):
    """One bijection. Sizes are in bytes; `sections` describes the bytes that `pack` returns."""

    name: ClassVar[str]

    @abstractmethod
    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        """The typed ranges of a tensor of (rows, cols), in storage order."""

    def nbytes(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> int:
        """Bytes of a tensor of (rows, cols), padding included."""
        last = self.sections(fmt, dtype, rows, cols)[-1]
        return last.offset + last.nbytes

    def section(self, fmt: Format | None, dtype: DType, rows: int, cols: int, name: str) -> Section:
        """The section of that name. LayoutError lists the available ones."""
        sections = self.sections(fmt, dtype, rows, cols)
        for s in sections:
            if s.name == name:
                return s
        known = ", ".join(s.name for s in sections)
        raise LayoutError(f"{fmt or dtype} in layout '{self.name}' has no section {name!r}; it has {known}")

    def pack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes) -> Bytes:
        """Converts canonical bytes (uint8, 1-D) to this layout's. LayoutError if their number is wrong."""
        out = np.zeros(self.nbytes(fmt, dtype, rows, cols), np.uint8)
        self.pack_into(fmt, dtype, rows, cols, canonical, out)
        return out

    @abstractmethod
    def pack_into(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes, out: Bytes) -> None:
        """Packs into zeroed bytes, for instance of a mapped file. Needs a few MiB of extra memory."""

    @abstractmethod
    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        """Converts this layout's bytes (uint8, 1-D) to canonical ones. LayoutError if their number is wrong."""


def views(data: Bytes, sections: tuple[Section, ...]) -> dict[str, Items]:
    """A typed view of each section. LayoutError unless `data` has exactly the size that the sections describe."""
    expected = sections[-1].offset + sections[-1].nbytes
    if data.dtype != np.uint8 or data.shape != (expected,):
        described = ", ".join(f"{s.name} {s.dtype.name}{list(s.shape)}" for s in sections)
        raise LayoutError(
            f"a buffer of {expected} bytes (uint8, one dimension) is needed for {described}; "
            f"got {data.dtype} of shape {data.shape}"
        )
    return {s.name: data[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape) for s in sections}


def zeros(sections: tuple[Section, ...]) -> tuple[Bytes, dict[str, Items]]:
    """Zeroed bytes and the views of their sections, to be filled."""
    data = np.zeros(sections[-1].offset + sections[-1].nbytes, np.uint8)
    return data, views(data, sections)


class Canonical(Layout):
    """The format's own bytes. Plain values are one section "values" = [rows][cols]."""

    name = "canonical"

    def sections(self, fmt: Format | None, dtype: DType, rows: int, cols: int) -> tuple[Section, ...]:
        if fmt is not None:
            return fmt.sections(rows, cols)
        return place_sections([("values", NUMPY_DTYPES[dtype], (rows, cols))], 1)

    def pack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes) -> Bytes:
        views(canonical, self.sections(fmt, dtype, rows, cols))
        return canonical

    def pack_into(self, fmt: Format | None, dtype: DType, rows: int, cols: int, canonical: Bytes, out: Bytes) -> None:
        views(canonical, self.sections(fmt, dtype, rows, cols))
        out[...] = canonical

    def unpack(self, fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Bytes) -> Bytes:
        views(packed, self.sections(fmt, dtype, rows, cols))
        return packed


CANONICAL = Canonical()
