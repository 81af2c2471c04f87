"""i-quants: codebooks against gguf's, what a codebook cannot hold, and errors against those of ggml's encoder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from by_path import load
from gguf import quants

from qcompiler import formats
from qcompiler.calibrate.levels import Levels
from qcompiler.errors import FormatError, FormatValueError
from qcompiler.formats import codebooks_ggml as books
from qcompiler.formats.codebook import Codebook, Vectors, parity
from qcompiler.formats.i_quants import _IQuant
from qcompiler.formats.vector_search import signs_and_sizes

NAMES = [name for name, cls in formats.FORMATS.items() if issubclass(cls, _IQuant)]
GOLDEN = Path(__file__).parent / "golden"
make_ggml = load("tests/formats/golden/make_ggml.py")
ERRORS: dict[str, float] = json.loads((GOLDEN / "i_quants.json").read_text())
"""Sums of importance times squared error that ggml's encoder leaves, by "iq3_s/bell" (`make_ggml.errors`)."""


def packing_of(name: str) -> Vectors:
    packing = formats.get(name).declaration.codes.packing
    assert isinstance(packing, Vectors)
    return packing


@pytest.mark.parametrize("name", NAMES)
def test_a_codebook_has_the_vectors_of_gguf_in_their_order(name: str) -> None:
    theirs = getattr(quants, name.upper())
    theirs.init_grid()
    d, book = formats.get(name).declaration, packing_of(name).book
    values = d.code_values[: 1 << book.width][book.points]
    shift = {"iq1_m": 0.125}.get(name, 0)  # it is part of the codes' values there, and of the equation in iq1_s
    np.testing.assert_array_equal(values - np.float32(shift), theirs.grid.reshape(-1, book.size))


def test_a_codebook_with_another_number_of_vectors_is_refused() -> None:
    with pytest.raises(ValueError, match="codebook 'short': 2048 vectors, not 2047"):
        _ = Codebook("short", 3, 8, 2047, books.IQ1.text).points


def test_the_eighth_sign_makes_the_number_of_minus_signs_even() -> None:
    """ggml lists the eighth sign of each seven (ksigns_iq2xs); gguf's list is the same."""
    listed = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    seven = np.arange(128, dtype=np.uint8)
    np.testing.assert_array_equal(listed, seven | parity(seven) << np.uint8(7))


def test_codes_that_no_vector_and_no_signs_give_are_refused() -> None:
    packing = packing_of("iq2_xxs")
    codes = packing.unpack(np.random.default_rng(0).integers(0, 256, (2, packing.nbytes), np.uint8))
    other = codes.copy()
    other[1, 9] ^= 1 << packing.book.width  # one sign alone
    with pytest.raises(FormatError, match="no vector of the codebook iq2_xxs and no flags give"):
        packing.pack(other)
    other = codes.copy()
    other[0, :8] = 3  # a digit that no vector has
    with pytest.raises(FormatError, match="iq2_xxs"):
        packing.pack(other)
    shared = packing_of("iq1_m")
    codes = shared.unpack(np.zeros((1, shared.nbytes), np.uint8))
    codes[0, 17] ^= 4  # the shift of one element of eight
    with pytest.raises(FormatError, match="iq1"):
        shared.pack(codes)


def test_codes_cannot_be_chosen_one_by_one() -> None:
    packed = formats.get("iq3_s").allocate(1, 256)
    with pytest.raises(FormatError, match="iq3_s stores vectors of a codebook"):
        Levels.of(packed)


def test_an_odd_number_of_minus_signs_changes_the_least_important_one() -> None:
    values = np.array([[-3, 1, 2, 0.5, -2, 4, -1, 2, -1, -1, 1, 1, 1, 1, 1, 1]], np.float32)
    weights = np.ones_like(values)
    weights[0, 0] = 0.1  # 0.1 * 3 is less than 1 * 0.5
    signs, sizes = signs_and_sizes(values, weights, even=True)
    assert signs.tolist() == [[0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert sizes[0, :4].tolist() == [-3, 1, 2, 0.5]
    np.testing.assert_array_equal(np.where(signs == 1, -sizes, sizes), values)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "iq1_s")) for n in NAMES])
def test_errors_are_no_larger_than_those_of_ggmls_encoder(name: str) -> None:
    """Squared errors under the importance (or 1), over matrices of several kinds: no single one above ggml's."""
    for case, weights, importance, key in make_ggml.weighted_cases():
        decoded = formats.get(name).decode(formats.get(name).encode(weights, importance=importance))
        error = float((importance * np.square(decoded.astype(np.float64) - weights)).sum())
        assert error <= ERRORS[f"{name}/{key}"], f"{name}, {case}: {error / ERRORS[f'{name}/{key}']:.3f} of ggml's"


@pytest.mark.parametrize("name", ["iq2_xxs", "iq1_m"])
def test_what_a_codebook_cannot_reach_is_refused_and_not_cut_off(name: str) -> None:
    fmt = formats.get(name)
    assert isinstance(fmt, _IQuant)
    weights = np.ones((2, 256), np.float32)
    weights[1, 7] = 1.01 * fmt.reach
    with pytest.raises(FormatValueError, match="row 1, columns 0…255"):
        fmt.encode(weights)


def test_every_format_is_one_of_gguf() -> None:
    assert {gguf.GGMLQuantizationType[name.upper()].value for name in NAMES} == {16, 17, 18, 19, 21, 22, 29}
