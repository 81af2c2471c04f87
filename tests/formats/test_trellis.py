"""tq: windows and values by the document, the search against all neighbours of its result, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.calibrate.free_scales import why_no_scales
from qcompiler.calibrate.levels import why_no_levels
from qcompiler.errors import FormatShapeError, FormatValueError
from qcompiler.formats.integer_product import integer_product
from qcompiler.formats.tq import TQ
from qcompiler.formats.trellis_search import choose

Array = npt.NDArray[Any]
BITS = (2, 3, 4)
MULTIPLIERS = {4: 0x35D08399, 3: 0xC55EC2CD, 2: 0x2618B891}
CODES = {4: 3, 3: 4, 2: 6}


def value_of(bits: int, newest_first: list[int]) -> float:
    """The value of a window, by the document."""
    window = sum(code << bits * (CODES[bits] - 1 - back) for back, code in enumerate(newest_first))
    product = window * MULTIPLIERS[bits] % 2**32
    return sum(int.from_bytes([product >> 8 * i & 255], signed=True) for i in range(4)) / 128


@pytest.mark.parametrize("bits", BITS)
def test_an_element_is_decoded_from_the_codes_before_it_in_its_circle(bits: int) -> None:
    fmt = TQ(bits=bits)
    packed = fmt.allocate(1, 512)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, 256)).astype(np.uint8)
    scales = np.array([[0.5], [-2]], np.float16)
    fmt.store(packed, 0, {"codes": codes, "scales": scales})
    decoded = fmt.decode(packed).reshape(2, 256)
    columns = [[16 * j + 2 * t + at for j in range(16) for at in (0, 1, 8, 9)] for t in range(4)]
    for block, each in enumerate(codes):
        for sequence in columns:
            for place, column in enumerate(sequence):
                newest_first = [int(each[sequence[place - back]]) for back in range(CODES[bits])]
                assert decoded[block, column] == value_of(bits, newest_first) * scales[block, 0]


@pytest.mark.parametrize(("bits", "least", "most"), [(4, 2**-8, 0.0054), (3, 2**-6, 0.0205), (2, 2**-4, 0.081)])
def test_normal_weights_have_an_error_between_the_bound_and_a_few_percent_above_the_searched_one(
    bits: int, least: float, most: float
) -> None:
    """`least` is the rate-distortion bound, 2^(-2 * bits). The searched errors are 0.0050, 0.0187 and 0.0739; 16 blocks
    of 256 give the mean square within 2 % of it. The best code of single weights has 0.0095, 0.0345 and 0.1175."""
    weights = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    fmt = TQ(bits=bits)
    error = float(((fmt.decode(fmt.encode(weights)) - weights) ** 2).mean() / (weights**2).mean())
    assert least < error < most


@pytest.mark.parametrize("bits", BITS)
def test_no_other_code_anywhere_in_a_path_lowers_its_error(bits: int) -> None:
    """Viterbi's algorithm gives the best of all paths with its ends, so of those that differ in one code."""
    trellis = TQ(bits=bits).trellis
    rng = np.random.default_rng(bits)
    wanted = rng.standard_normal((2, 64)).astype(np.float32) * np.float32(147 * 1.1)
    weights = rng.random((2, 64), np.float32)
    found = choose(trellis, wanted, weights).astype(np.int64)

    def errors(codes: Array) -> Array:
        windows = sum(np.roll(codes, b, axis=-1) << bits * (trellis.codes - 1 - b) for b in range(trellis.codes))
        return np.asarray(
            (weights.astype(np.float64)[:, None] * (wanted[:, None] - trellis.values[windows]) ** 2).sum(-1)
        )

    free = 64 - (trellis.codes - 1)  # later codes belong to the state in which the circle begins
    others = np.repeat(found[:, None], free << bits, axis=1)
    for place in range(free):
        others[:, place << bits : (place + 1) << bits, place] = np.arange(1 << bits)
    assert (errors(others) >= errors(found[:, None]) * (1 - 1e-6)).all()


def test_an_importance_moves_the_error_to_other_columns() -> None:
    weights = np.random.default_rng(4).standard_normal((8, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 32 < 8, 25, 1).astype(np.float32)
    fmt = TQ(bits=3)
    plain, weighted = ((fmt.decode(fmt.encode(weights, importance=i)) - weights) ** 2 for i in (None, importance))
    some = importance > 1
    assert weighted[:, some].mean() < 0.7 * plain[:, some].mean()
    assert weighted[:, ~some].mean() > plain[:, ~some].mean()


@pytest.mark.parametrize("bits", BITS)
def test_blocks_without_a_scale_are_zero_and_others_keep_theirs(bits: int) -> None:
    weights = np.zeros((3, 512), np.float32)
    weights[1, 300], weights[2, :256] = 1.0, 1e-9  # one weight in a block; a scale below fp16's smallest
    fmt = TQ(bits=bits)
    decoded = fmt.decode(fmt.encode(weights))
    assert not decoded[0].any() and not decoded[1, :256].any() and not decoded[2].any()
    assert decoded[1, 256:].any()


def test_what_it_cannot_store_is_refused_by_row_and_column() -> None:
    fmt = TQ()
    weights = np.ones((2, 512), np.float32)
    weights[1, 256:] = 1e6
    with pytest.raises(FormatValueError, match=r"row 1, columns 256…511: the scale .* exceeds fp16's largest value"):
        fmt.encode(weights)
    with pytest.raises(FormatShapeError, match="whole blocks of 256, and K = 384 is not a multiple of it"):
        fmt.encode(np.ones((2, 384), np.float32))
    with pytest.raises(FormatValueError, match="may overflow"):
        fmt.encode(np.ones((2, 256), np.float32), importance=np.full(256, 1e20))


def test_what_it_cannot_do_has_a_reason() -> None:
    fmt = formats.get("tq", bits=2)
    assert "stand for values of a table" in str(integer_product(fmt))
    assert "paths through a trellis" in why_no_levels(fmt, 512)
    assert why_no_scales(fmt, 512)
