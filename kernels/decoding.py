"""What kernels of every target derive from a declaration before they print it."""

from __future__ import annotations

import math

import numpy as np

from qcompiler.formats import Format
from qcompiler.formats.base import Declaration


def first_of_integers(declaration: Declaration) -> int | None:
    """The smallest value of a code where values are consecutive integers in the order of the codes, else None.

    The order of signed codes is that of their two's complement: it counts up once the sign bit is flipped.
    """
    values, kind = declaration.code_values, declaration.codes.kind
    if kind not in ("uint", "int"):
        return None
    ascending = np.roll(values, values.size // 2) if kind == "int" else values
    first = float(ascending[0])
    counted = np.array_equal(ascending, np.float32(first) + np.arange(values.size, dtype=np.float32))
    whole = counted and first.is_integer() and abs(first) < 1 << 16
    return int(first) if whole and not np.signbit(values[values == 0]).any() else None


def shared_columns(fmt: Format) -> int:
    """Columns after which an entry may change: the greatest common divisor of what entries cover; 0 if rows do."""
    covers = [f.covers for f in fmt.declaration.fields if isinstance(f.covers, int) and f.covers > 1]
    return math.gcd(*covers) if covers else 0


def ends_inside_groups(fmt: Format, cols: int) -> bool:
    """Whether entries begin at other columns in each row: in streams whose rows hold no whole entries."""
    covers = shared_columns(fmt)
    return fmt.declaration.blocking == "flat" and covers > 0 and cols % covers != 0
