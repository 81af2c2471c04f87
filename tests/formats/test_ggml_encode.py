"""GGUF's encoders: against the `gguf` package, at the edges, and in every way that a matrix is cut into tiles."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats import base
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.formats.ggml_search import search_affine
from qcompiler.formats.k_quants import Q4_K

Float32 = npt.NDArray[np.float32]

NAMES = tuple(name for name, cls in formats.FORMATS.items() if issubclass(cls, GgmlFormat))
BY_GGUF = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq1_0", "tq2_0", "mxfp4_ggml")
BY_VECTORS = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s")
SEARCHED = tuple(name for name in NAMES if formats.get(name).takes_importance)

KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]] = {
    "normal": lambda rng, shape: 0.02 * rng.standard_normal(shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, shape),
    "halves": lambda rng, shape: rng.integers(-16, 17, shape) / 2,
    "sparse": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    "constant blocks": lambda rng, shape: np.repeat(rng.standard_normal((shape[0], shape[1] // 32)), 32, axis=1),
    "orders of magnitude": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.integers(-25, 4, (shape[0], 1)),
    "denormals": lambda rng, shape: rng.standard_normal(shape) * 1e-40,
    "huge": lambda rng, shape: rng.uniform(-60000, 60000, shape),
}


def ggml(name: str) -> GgmlFormat:
    found = formats.get(name)
    assert isinstance(found, GgmlFormat)
    return found


def by_gguf(name: str, weights: Float32) -> bytes:
    with np.errstate(all="ignore"):
        made: bytes = gguf.quants.quantize(weights, GGMLQuantizationType[name.removesuffix("_ggml").upper()]).tobytes()
    return made


# gguf's scale byte wraps: test_blocks_below_the_smallest_scale_of_mxfp4_round_to_it
PAIRS = [(name, kind) for name in BY_GGUF for kind in KINDS if (name, kind) != ("mxfp4_ggml", "denormals")]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_encoding_gives_the_bytes_of_gguf(name: str, kind: str) -> None:
    weights = KINDS[kind](np.random.default_rng(0), (20, 512)).astype(np.float32) + np.float32(0)  # no -0: see below
    assert formats.get(name).encode(weights).to_bytes() == by_gguf(name, weights)


@pytest.mark.parametrize("name", BY_GGUF)
@given(
    block=hnp.arrays(
        np.float32, 32, elements=st.floats(-60000, 60000, width=32).map(lambda v: v if abs(v) > 1e-36 else 0.0)
    )
)
@settings(max_examples=40, deadline=None)
def test_encoding_gives_the_bytes_of_gguf_for_any_block(name: str, block: Float32) -> None:
    fmt = formats.get(name)
    weights = np.tile(block, int(fmt.declaration.block) // 32)[None]
    assert fmt.encode(weights).to_bytes() == by_gguf(name, weights)


def test_mxfp4_scales_at_powers_of_two_are_those_of_gguf() -> None:
    powers = np.ldexp(1.0, np.arange(-124, 126)).astype(np.float32)
    near = np.concatenate([(powers.view(np.int32) + ulps).astype(np.int32) for ulps in range(-12, 13)]).view(np.float32)
    weights = np.zeros((near.size, 32), np.float32)
    weights[:, 5], weights[:, 7] = near, -near / 3
    assert formats.get("mxfp4_ggml").encode(weights).to_bytes() == by_gguf("mxfp4_ggml", weights)


def test_blocks_below_the_smallest_scale_of_mxfp4_round_to_it() -> None:
    fmt = formats.get("mxfp4_ggml")
    weights = np.linspace(-(2.0**-126), 2.0**-126, 32, dtype=np.float32)[None]
    packed = fmt.encode(weights)
    assert fmt.entries(packed, "scale").view(np.uint8).tolist() == [[0]]
    assert np.abs(fmt.decode(packed) - weights).max() <= 2.0**-129


def test_mxfp4_never_decodes_to_infinity() -> None:
    fmt = formats.get("mxfp4_ggml")
    weights = np.full((1, 32), np.finfo(np.float32).max)
    decoded = fmt.decode(fmt.encode(weights))
    assert np.isfinite(decoded).all()
    assert (decoded > 0.7 * weights).all()


@pytest.mark.parametrize("name", ("q4_0", "q5_0"))
def test_a_block_of_both_zeros_has_the_scale_of_ggml(name: str) -> None:
    """ggml begins its search for the extreme at 0, which -0 does not exceed, and 0 / -8 is -0."""
    weights = np.zeros((1, 64), np.float32)
    weights[0, :40] = -0.0
    assert formats.get(name).entries(formats.get(name).encode(weights), "d").view(np.uint16).tolist() == [[0x8000] * 2]


@pytest.mark.parametrize("importance", (False, True))
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str, importance: bool) -> None:
    fmt = formats.get(name)
    given_importance = np.ones(512) if importance and fmt.takes_importance else None
    assert not fmt.decode(fmt.encode(np.zeros((2, 512), np.float32), importance=given_importance)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_at_most_what_the_format_allows(name: str, kind: str) -> None:
    """A step is the range of a block divided by the number of codes; small scales cost another part of it."""
    fmt = ggml(name)
    rows = 2 if name in BY_VECTORS else 12
    weights = KINDS[kind](np.random.default_rng(1), (rows, 512)).astype(np.float32)
    packed = fmt.encode(weights)
    assert packed.to_bytes() == formats.from_bytes(fmt, rows, 512, packed.to_bytes()).to_bytes()
    error = np.abs(fmt.decode(packed) - weights).reshape(-1, fmt.block)
    largest = np.abs(weights).reshape(-1, fmt.block).max(axis=1)
    allowed = {"q2_K": 0.55, "q3_K": 0.3, "tq1_0": 0.51, "tq2_0": 0.51, "mxfp4_ggml": 0.26}
    if name in BY_VECTORS:  # least squares of vectors may give up one element for seven: only the sum is bounded
        assert (np.square(error).sum(axis=1) <= np.square(weights.reshape(-1, fmt.block)).sum(axis=1) * 1.01).all()
        return
    step = {"q8_0": 0.005, "q6_K": 0.06, "q5_K": 0.12, "q4_K": 0.16, "q5_0": 0.07, "q5_1": 0.04}
    fraction = allowed.get(name, step.get(name, 0.17))
    floor = 2.0**-24 * ggml(name).reach / 65504  # what fp16 scales leave of very small blocks
    assert (error.max(axis=1) <= fraction * largest + floor).all()


@pytest.mark.parametrize("name", NAMES)
def test_bytes_do_not_depend_on_threads_tiles_dtypes_or_neighbours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = formats.get(name)
    rng = np.random.default_rng(2)
    rows = 3 if name in BY_VECTORS else 6
    weights = (0.02 * rng.standard_normal((rows, 512))).astype(ml_dtypes.bfloat16)
    importance = rng.exponential(1, 512) if fmt.takes_importance else None
    whole = fmt.encode(weights, importance=importance)
    np.testing.assert_array_equal(fmt.encode(weights.astype(np.float32), importance=importance).data, whole.data)
    alone = [fmt.encode(weights[row : row + 1], importance=importance).to_bytes() for row in range(rows)]
    assert b"".join(alone) == whole.to_bytes()
    if name not in ("q4_0", "q4_1", "q5_0", "q5_1"):  # with an importance their errors depend on the row's mean square
        half = None if importance is None else importance[:256]
        first = fmt.encode(np.ascontiguousarray(weights[:1, :256]), importance=half).to_bytes()
        assert whole.to_bytes()[: len(first)] == first
    monkeypatch.setattr(base, "TILE", 256)
    monkeypatch.setattr(base, "THREAD_SHARE", 512)
    assert fmt.encode(weights, importance=importance, threads=3).to_bytes() == whole.to_bytes()


@pytest.mark.parametrize("name", SEARCHED)
def test_important_columns_are_stored_better(name: str) -> None:
    fmt = formats.get(name)
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((8 if name in BY_VECTORS else 64, 512)).astype(np.float32)
    importance = np.where(rng.random(512) < 0.1, 100.0, 1.0)

    def error(given_importance: npt.NDArray[np.float64] | None) -> float:
        off = fmt.decode(fmt.encode(weights, importance=given_importance)) - weights
        return float((importance * off**2).mean())

    assert error(importance) < 0.9 * error(None)


def test_a_falling_line_through_one_important_weight_gives_way_to_the_range() -> None:
    """ggml stores the low bits of such a sub-block's negative scale, and the others run into the scale of another."""
    rng = np.random.default_rng(7)
    weights = -rng.uniform(0.5, 1, (64, 256)).astype(np.float32)
    importance = np.zeros(256)
    importance[5::32] = 1
    x = np.ascontiguousarray(weights.reshape(-1, 32).T)
    of_x = np.ascontiguousarray(np.tile(importance.reshape(8, 32), (64, 1)).T.astype(np.float32) * np.abs(x))
    assert (search_affine(x, of_x, 15, Q4_K.weighted_trials)[0] < 0).any()
    for name in ("q2_K", "q4_K", "q5_K"):
        fmt = formats.get(name)
        decoded = fmt.decode(fmt.encode(weights, importance=importance))
        assert np.abs(decoded - weights).max() < 0.4, name


def test_the_largest_magnitude_that_a_format_stores() -> None:
    expected = {
        "q4_0": 8, "q4_1": 16, "q5_0": 16, "q5_1": 32, "q8_0": 128, "q2_K": 45, "q3_K": 128, "q4_K": 945, "q5_K": 1953,
        "q6_K": 4096, "iq4_nl": 127, "iq4_xs": 4064, "tq1_0": 2, "tq2_0": 2,
    }  # fmt: skip
    assert {name: ggml(name).reach / 65504 for name in expected} == expected
    assert ggml("mxfp4_ggml").reach == np.inf


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_not_finite_are_named(name: str, bad: float) -> None:
    weights = np.ones((3, 512), np.float32)
    weights[2, 300] = bad
    with pytest.raises(FormatValueError, match="row 2, column 300"):
        formats.get(name).encode(weights)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mxfp4_ggml"])
def test_scales_beyond_fp16_are_named(name: str) -> None:
    fmt = ggml(name)
    for size in (1.2 * fmt.reach, 2.1 * fmt.reach, 1e30, 3e38):
        weights = np.ones((3, 512), np.float32)
        weights[1, 300] = size
        weights[1, 301] = -size / 2
        column = 300 // fmt.block * fmt.block
        for importance in (None, np.ones(512)) if fmt.takes_importance and size > 2 * fmt.reach else (None,):
            with pytest.raises(FormatValueError, match=rf"row 1, columns {column}…{column + fmt.block - 1}: .*fp16"):
                fmt.encode(weights, importance=importance)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_fit_name_formats_that_do(name: str) -> None:
    fmt = formats.get(name)
    with pytest.raises(FormatShapeError, match="K = 100 is not a multiple of it; nf4 and int8 take K = 100"):
        fmt.encode(np.zeros((2, 100), np.float32))
    if fmt.declaration.block == 256:
        with pytest.raises(FormatShapeError, match=r"K = 96 .*q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl"):
            fmt.encode(np.zeros((2, 96), np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_an_importance_is_checked(name: str) -> None:
    fmt, weights = formats.get(name), np.ones((2, 256), np.float32)
    if not fmt.takes_importance:
        with pytest.raises(FormatError, match="importance"):
            fmt.encode(weights, importance=np.ones(256))
        return
    with pytest.raises(FormatValueError, match="only ratios matter"):
        fmt.encode(weights, importance=np.full(256, 1e16))
    for bad in (np.ones(255), -np.ones(256), np.full(256, np.nan)):
        with pytest.raises(FormatValueError, match="256 columns"):
            fmt.encode(weights, importance=bad)
    assert np.isfinite(fmt.decode(fmt.encode(weights, importance=np.zeros(256)))).all()
