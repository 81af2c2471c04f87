"""What kernels of every target derive from a declaration before they print it."""

from __future__ import annotations

import math

from qcompiler.formats import Format
from qcompiler.formats.integer_product import first_of_integers

__all__ = ["ends_inside_groups", "first_of_integers", "shared_columns"]


def shared_columns(fmt: Format) -> int:
    """Columns after which an entry may change: the greatest common divisor of what entries cover; 0 if rows do."""
    covers = [f.covers for f in fmt.declaration.fields if isinstance(f.covers, int) and f.covers > 1]
    return math.gcd(*covers) if covers else 0


def ends_inside_groups(fmt: Format, cols: int) -> bool:
    """Whether entries begin at other columns in each row: in streams whose rows hold no whole entries."""
    covers = shared_columns(fmt)
    return fmt.declaration.blocking == "flat" and covers > 0 and cols % covers != 0
