"""Matrices that are made a piece at a time: encoded and decoded like whole ones, with a piece or two in memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.errors import FormatShapeError, FormatValueError
from qcompiler.formats import made
from qcompiler.formats.made import MadeMatrix


def variants() -> list[formats.Format]:
    """Every format with every value of its parameters."""
    found = []
    for name, kind in formats.FORMATS.items():
        names = [p.name for p in kind.parameters]
        for values in itertools.product(*(p.choices for p in kind.parameters)):
            found.append(formats.get(name, **dict(zip(names, values, strict=True))))
    return found


LONG = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq")
"""Formats that take NumPy long to encode."""
BRIEF = [pytest.param(f, marks=[pytest.mark.slow] * (f.name in LONG), id=str(f)) for f in variants()]


@pytest.mark.parametrize("fmt", BRIEF)
def test_made_in_pieces_it_has_the_bytes_of_the_whole(fmt: formats.Format, monkeypatch: pytest.MonkeyPatch) -> None:
    cols = 256 if fmt.declaration.tail == "refuse" else 193
    w = np.random.default_rng(7).normal(size=(301, cols)).astype(np.float32)
    monkeypatch.setattr(made, "PIECE", 40 * cols + 5)
    largest = 0

    def make(first: int, stop: int) -> np.ndarray:
        nonlocal largest
        largest = max(largest, stop - first)
        return w[first:stop]

    matrix = MadeMatrix(*w.shape, make)
    importance = np.linspace(0.1, 3, cols, dtype=np.float32) if fmt.takes_importance else None
    assert fmt.encode_made(matrix, importance=importance).to_bytes() == fmt.encode(w, importance=importance).to_bytes()
    assert largest == 40


@pytest.mark.parametrize("fmt", BRIEF)
def test_rows_decode_to_the_bits_of_the_whole(fmt: formats.Format) -> None:
    cols = 256 if fmt.declaration.tail == "refuse" else 193
    packed = fmt.encode(np.random.default_rng(8).normal(size=(301, cols)).astype(np.float32))
    whole = fmt.decode(packed)
    for first, stop in ((0, 301), (0, 1), (7, 7), (5, 130), (127, 300), (300, 301)):
        assert fmt.decode_rows(packed, first, stop).tobytes() == whole[first:stop].tobytes(), (first, stop)
    with pytest.raises(FormatShapeError, match=r"no rows 300…302"):
        fmt.decode_rows(packed, 300, 302)


@pytest.mark.parametrize("text", ["nf4", "nvfp4", "q4_0", "q4_K", "int8", "fp8_e4m3", "llm_int8", "mxfp4"])
def test_an_error_names_the_element_of_a_made_matrix(text: str) -> None:
    w = np.ones((9, 256), np.float32)
    w[6, 200] = np.nan
    with pytest.raises(FormatValueError, match="row 6, column 200"):
        formats.get(text).encode_made(MadeMatrix(9, 256, lambda first, stop: w[first:stop]))


def test_indices_read_what_an_array_would_give() -> None:
    w = np.arange(35, dtype=np.float32).reshape(7, 5)
    matrix = MadeMatrix(7, 5, lambda first, stop: w[first:stop])
    matrix._rows = 2
    for first, stop in itertools.combinations(range(0, 36, 3), 2):
        assert (matrix.reshape(-1)[first:stop] == w.reshape(-1)[first:stop]).all()
    assert (matrix[1:6] == w[1:6]).all()
    assert (matrix[5] == w[5]).all()
    assert matrix[4, 3] == 23
    assert matrix.rows(3, 3).shape == (0, 5)
