"""Matrices of one format, one below the other: every value of every part, bit for bit, or a reason why not."""

from __future__ import annotations

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.formats import Format, stacking
from qcompiler.runtime.encoder import encode

ROWS, COLS = (16, 48, 5), 512


def every() -> list[Format]:
    """Each format, with its defaults and with each value of a flag."""
    found = []
    for name in formats.names():
        default = formats.get(name)
        found.append(default)
        for parameter in type(default).parameters:
            if isinstance(parameter.default, bool):
                found.append(formats.get(name, **{parameter.name: not parameter.default}))
    return found


def encoded(fmt: Format, rows: tuple[int, ...], cols: int) -> list[formats.PackedTensor]:
    rng = np.random.default_rng(0)
    return [encode(fmt, rng.standard_normal((count, cols)).astype(np.float32)) for count in rows]


@pytest.mark.parametrize("fmt", every(), ids=str)
def test_a_stack_decodes_to_its_parts_and_gives_them_back(fmt: Format) -> None:
    why = stacking.obstacle(fmt, ROWS, COLS)
    fields = fmt.declaration.fields
    if any(field.covers == "tensor" for field in fields):
        assert why is not None and "once for a whole tensor" in why
        return
    assert why is None
    parts = encoded(fmt, ROWS, COLS)
    whole = fmt.allocate(sum(ROWS), COLS)
    stacking.stack(fmt, [(part.rows, part.data) for part in parts], COLS, whole.data)
    assert fmt.decode(whole).tobytes() == b"".join(fmt.decode(part).tobytes() for part in parts)
    for number, part in enumerate(parts):
        assert np.array_equal(stacking.take(fmt, ROWS, COLS, number, whole.data), part.data)
    other = encode(fmt, np.full((ROWS[1], COLS), 0.25, np.float32))
    stacking.put(fmt, ROWS, COLS, 1, other.data, whole.data)
    changed = fmt.decode(whole)
    assert changed[ROWS[0] : ROWS[0] + ROWS[1]].tobytes() == fmt.decode(other).tobytes()
    assert changed[: ROWS[0]].tobytes() == fmt.decode(parts[0]).tobytes()
    assert changed[ROWS[0] + ROWS[1] :].tobytes() == fmt.decode(parts[2]).tobytes()


@pytest.mark.parametrize(("rows", "cols", "fits"), [
    ((1, 1), 64, True), ((1, 1), 96, False), ((2, 1), 96, True), ((2, 3), 96, True), ((3, 2), 96, False),
    ((7, 64), 31, False), ((64, 7), 31, True), ((1, 1), 1, False),
])  # fmt: skip
def test_a_block_that_would_run_into_the_next_part_is_refused(rows: tuple[int, int], cols: int, fits: bool) -> None:
    fmt = formats.get("nf4", block=64)
    why = stacking.obstacle(fmt, rows, cols)
    assert (why is None) == fits, why
    if fits:
        parts = encoded(fmt, rows, cols)
        whole = fmt.allocate(sum(rows), cols)
        stacking.stack(fmt, [(part.rows, part.data) for part in parts], cols, whole.data)
        assert fmt.decode(whole).tobytes() == b"".join(fmt.decode(part).tobytes() for part in parts)
    else:
        assert "do not end with one" in str(why)
