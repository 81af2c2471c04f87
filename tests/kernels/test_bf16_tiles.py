"""Products of bf16 by tiles of AMX, on a processor that has them and on a model of its tiles.

Both are held to what other kernels of bf16 are held to (test_linear_bf16.py), and to each other's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import bf16_linears
import numpy as np
import pytest
import window_cases
from bf16_linears import FEW, WEIGHTS, check, rows_of, spec_of, weight
from by_path import load
from kernel_cases import aligned
from tile_counts import check_counts, tile_counts

from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.weights import NUMPY_DTYPES

Tiles = Callable[[Sequence[KernelSpec]], Any]

MS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 131)
"""Around a tile, a block of rows, and the last number of rows that are multiplied by codes."""

SOME = (2, 17, 65)

WIDE = {  # several tasks, blocks of columns and of scales, with tails of all; both ways through the codes
    "nf4:block=64": (19, 576), "int4:group=128": (19, 1024), "int4:group=32,symmetric=False": (307, 1088),
    "int4:group=row": (37, 1056), "int2:group=64": (19, 640), "int3:group=64": (37, 1152), "q5_K": (37, 1280),
    "plain": (307, 1101), "int8": (51, 2085), "int8:symmetric=False": (51, 2080), "q8_0": (83, 1056),
    "int8:group=128": (51, 2304), "int8:group=64,symmetric=False": (51, 1088), "mxfp8": (35, 1056),
}  # fmt: skip
SHORT = ("nf4:block=64", "int4:group=row", "int8:group=128")
"""Those of the short run."""


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    monkeypatch.setattr(bf16_linears, "WEIGHTS", WIDE)
    return WIDE


def test_products_are_those_of_factors_in_bf16(bf16_tiles: Tiles) -> None:
    kernels = bf16_tiles([spec_of(text, "f32", "large") for text in FEW])
    before = tile_counts(kernels)
    for text in FEW:
        for m in SOME:
            check(kernels, text, "f32", "large", m)
    check_counts(kernels, before)


@pytest.mark.slow
@pytest.mark.parametrize("x", ["bf16", "f32", "f16"])
def test_products_of_every_way_through_the_codes(bf16_tiles: Tiles, x: Any) -> None:
    kernels = bf16_tiles([spec_of(text, x, "large") for text in WEIGHTS])
    for text in WEIGHTS:
        for m in MS:
            check(kernels, text, x, "large", m)


@pytest.mark.parametrize("text", [pytest.param(each, marks=[pytest.mark.slow] * (each not in SHORT)) for each in WIDE])
def test_blocks_of_columns_and_of_scales_have_tails(
    bf16_tiles: Tiles, wide: dict[str, tuple[int, int]], text: str
) -> None:
    kernels = bf16_tiles([spec_of(text, "bf16", "large")])
    for m in (5, 40, 70):  # sums stay, by codes and by elements; words stay, up to 2048 columns
        check(kernels, text, "bf16", "large", m)


BYTES = {"int8": (51, 1120), "int8:symmetric=False": (35, 1056), "int8:group=128": (51, 1152), "q8_0": (35, 608)}
"""(N, K) of weights of whole tiles, whose codes are bytes."""


@pytest.mark.parametrize(
    "text", ["int8", "int8:symmetric=False", *(pytest.param(text, marks=pytest.mark.slow) for text in [*BYTES][2:])]
)
def test_bytes_are_not_rounded(bf16_tiles: Tiles, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Elements rounded to bf16 would be up to 2^-9 apart from these products; up to 32 rows, or with one scale any."""
    monkeypatch.setattr(bf16_linears, "WEIGHTS", BYTES)
    specs = {m_class: spec_of(text, "bf16", m_class) for m_class in ("2-8", "large")}
    kernels, (n, k), (_, data, w) = bf16_tiles(list(specs.values())), BYTES[text], weight(text)
    for m in (5, 8, 16, 17, 32, *((65,) if text in ("int8", "int8:symmetric=False") else ())):
        rows, before = rows_of(text, "bf16", m), tile_counts(kernels)
        given = lambda rows=rows, m=m: [rows, data, np.full((m, n), np.nan, np.float32)]  # noqa: E731
        out = kernels.run_both(specs["2-8" if m <= 8 else "large"].name, given, (m,))[2]
        wanted = rows[:, :k].astype(np.float64) @ w.astype(np.float64).T
        assert np.linalg.norm(out - wanted) <= 2e-6 * np.linalg.norm(wanted), m
        check_counts(kernels, before)


@pytest.mark.parametrize(
    "text, kinds",
    [
        ("int8", [("f32", "2-8", (2, 3, 4)), ("bf16", "2-8", (2, 3, 4)), ("f32", "1", (1,))]),
        ("int4:group=32", [("f32", "1", (1,)), ("bf16", "2-8", (1, 2))]),
        pytest.param("q4_K", [("bf16", "1", (1,)), ("f32", "2-8", (1, 2))], marks=pytest.mark.slow),
    ],
)
def test_few_rows_are_multiplied_in_floats(bf16_tiles: Tiles, text: str, kinds: list[Any]) -> None:
    """Where there are tiles, `vdpbf16ps` is slow: x is rounded to bf16, and elements are not."""
    kernels = bf16_tiles([spec_of(text, x, m_class) for x, m_class, _ in kinds])
    (n, k), (_, data, w) = WEIGHTS[text], weight(text)
    for x, m_class, counts in kinds:
        name = spec_of(text, x, m_class).name
        for m in counts:

            def products(rows: Any, name: str = name, m: int = m) -> Any:
                return kernels.run_both(name, lambda: [rows, data, np.full((m, n), np.nan, np.float32)], (m,))[2]

            rows = rows_of(text, x, m)
            given = rows[:, :k].astype(NUMPY_DTYPES["bf16"]).astype(np.float64)
            bound = np.abs(given) @ np.abs(w.astype(np.float64)).T * (k + 2) * 2.0**-24
            assert (np.abs(products(rows) - given @ w.astype(np.float64).T) <= bound).all(), (x, m)
            if x == "bf16":  # numbers that `vdpbf16ps` takes for zero
                assert products(np.full_like(rows, 2.0**-130)).any(), m


@pytest.mark.parametrize("k", [2048, pytest.param(2080, marks=pytest.mark.slow)])
def test_more_rows_than_a_chunk(bf16_tiles: Tiles, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """A chunk has at most 4 MiB of x, here 1024 and 992 rows, whether words stay or sums; the second is not full."""
    monkeypatch.setattr(bf16_linears, "WEIGHTS", {"int8:symmetric=False": (35, k)})
    kernels = bf16_tiles([spec_of("int8:symmetric=False", "bf16", "large")])
    before = tile_counts(kernels)
    check(kernels, "int8:symmetric=False", "bf16", "large", 1100)
    check_counts(kernels, before)


STAYING = {
    "nf4:block=64": (307, 448),
    "int8:symmetric=False": (307, 480),
    "int8": (275, 2048),
    "plain": (83, 511),
    "int4:group=row": (83, 512),
}
"""(N, K) of weights whose words stay in several units, and of more units than stay; K on both sides of where x leaves
the L1 cache."""


@pytest.mark.parametrize(
    "text", [pytest.param(each, marks=[pytest.mark.slow] * (each not in list(STAYING)[:3])) for each in STAYING]
)
def test_words_that_stay(bf16_tiles: Tiles, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Tasks of several units and blocks; the last block has one row, half a tile's, a tile's, two tiles'."""
    monkeypatch.setattr(bf16_linears, "WEIGHTS", STAYING)
    kernels = bf16_tiles([spec_of(text, "bf16", "large")])
    before = tile_counts(kernels)
    for m in (65, 72, 80, 96, 300):
        check(kernels, text, "bf16", "large", m)
    check_counts(kernels, before)
    if before:
        assert tile_counts(kernels)["once"] > before["once"], "words did not stay"


def test_bias_epilogue_and_pairs_between_products(bf16_tiles: Tiles) -> None:
    """Rows are finished some at a time, with what the epilogue reads and rounds: the same sums, to the bit."""
    pairs = load("tests/support/pair_cases.py")
    cases = list(pairs.cases("cpu_p16_pairs_v2", ["bf16"], ("int4", "q4_K", "int8"), ("large",)))
    kernels = bf16_tiles([spec for case in cases for spec in (case.paired, case.plain)])
    before = tile_counts(kernels)
    assert any(case.has_bias for case in cases)
    for case in cases:
        for m in (81, 128):
            pairs.check(kernels, case, m)
    check_counts(kernels, before)


@pytest.mark.slow
def test_few_rows_take_tiles_too(bf16_tiles: Tiles) -> None:
    kernels = bf16_tiles([spec_of("q4_K", "f32", "2-8")])
    before = tile_counts(kernels)
    for m in (1, 2, 8, 40):  # any number of rows is right
        check(kernels, "q4_K", "f32", "2-8", m)
    check_counts(kernels, before)


def test_windows_of_images(bf16_tiles: Tiles) -> None:
    narrow = next(case for case in window_cases.CASES if case.name == "narrow")
    window_cases.check(bf16_tiles([window_cases.spec_of(narrow)]), narrow)


@pytest.mark.parametrize("m", [40, 80])
@pytest.mark.parametrize("text", ["nf4:block=64", "int8:symmetric=False"])
def test_numbers_that_are_none_stay_in_their_rows(
    bf16_tiles: Tiles, monkeypatch: pytest.MonkeyPatch, text: str, m: int
) -> None:
    """An infinity gives one where the sum has one sign, a NaN a NaN, and neighbours are as they were; where sums stay
    and where words stay."""
    if text in BYTES:
        monkeypatch.setattr(bf16_linears, "WEIGHTS", BYTES)
    n, (_, data, w), spec = bf16_linears.WEIGHTS[text][0], weight(text), spec_of(text, "bf16", "large")
    kernels, rows = bf16_tiles([spec]), rows_of(text, "bf16", m)

    def products() -> Any:
        return kernels.run_both(spec.name, lambda: [rows, data, np.zeros((m, n), np.float32)], (m,))[2]

    plain = products()
    rows[1, 5], rows[37, 7] = np.inf, np.nan
    out = products()
    others = [i for i in range(m) if i not in (1, 37)]
    assert out[others].tobytes() == plain[others].tobytes()
    assert np.isnan(out[37]).all()
    there = w[:, 5] != 0
    assert (out[1][there] == np.sign(w[there, 5]) * np.inf).all()
    assert np.isnan(out[1][~there]).all()


def test_the_model_has_the_bits_of_the_processor(harness: Any, build_folder: Any) -> None:
    """The model is what the manual says. Where a processor has tiles, it agrees, tiny numbers included."""
    refused = harness.tiles_refused(harness.BF16_FLAGS)
    if refused is not None:
        pytest.skip(refused)
    text, m = "plain", 45
    (n, k), spec, outs = WEIGHTS[text], spec_of(text, "bf16", "large"), []
    data = np.random.default_rng(3).integers(0, 1 << 16, weight(text)[1].size // 2, np.uint16)
    rows = np.random.default_rng(4).integers(0, 1 << 16, (m, k + 3), np.uint16)
    for bits in (data, rows):  # magnitudes from 2^-127 to 1, so that no sum overflows
        np.bitwise_and(bits, np.uint16(0xBFFF), out=bits)
    for before in (harness.TILES_OF_BF16["model"][1], ""):
        kernels = harness.Kernels([spec], "x86-64-v4", build_folder, before)
        kernels.bf16_units = 1
        given = [rows.view(np.uint8).view("V2"), aligned(data.view(np.uint8)), np.zeros((m, n), np.float32)]
        kernels.run(spec.name, given, (m,))
        outs.append(given[2])
    assert outs[0].tobytes() == outs[1].tobytes() and np.abs(outs[0]).max() > 0
