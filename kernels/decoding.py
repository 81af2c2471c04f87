"""Facts about a format that the kernels of every target derive from its declaration."""

from __future__ import annotations

import math

from qcompiler.formats import Format
from qcompiler.formats.integer_product import first_of_integers

__all__ = ["ends_inside_groups", "first_of_integers", "shared_columns"]


def shared_columns(fmt: Format) -> int:
    """The number of columns after which some entry may change: the greatest common divisor of the columns that entries
    cover; 0 if each entry covers a whole row."""
    covers = [f.covers for f in fmt.declaration.fields if isinstance(f.covers, int) and f.covers > 1]
    return math.gcd(*covers) if covers else 0


def ends_inside_groups(fmt: Format, cols: int) -> bool:
    """Whether groups start at different columns in different rows: flat blocks whose size does not divide the row."""
    covers = shared_columns(fmt)
    return fmt.declaration.blocking == "flat" and covers > 0 and cols % covers != 0
