"""Products of fp32 by tiles of AMX, on a processor that has them and on a model of its tiles."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import window_cases
from by_path import load
from kernel_cases import aligned
from msgspec.structs import replace
from tile_counts import check_counts, tile_counts

from qcompiler import formats
from qcompiler.config import parse_format
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu import fp32_tiles
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES

Tiles = Callable[[Sequence[KernelSpec]], Any]
PANELS = "cpu_p16_v2"

WEIGHTS = {  # (N, K): odd panels, several tasks, tails of blocks of columns
    "int4:group=32": (83, 736), "int4:group=32,symmetric=False": (40, 96), "q4_K": (307, 1280), "q5_0": (18, 160),
    "int8": (37, 1056), "int8:group=32": (19, 32), "q8_0": (51, 288), "int4:group=128": (49, 1408),
    "int4:group=row": (35, 1184), "int3:group=64": (21, 320), "int2:group=64": (33, 192), "fp8_e4m3": (20, 96),
    "q5_K": (16, 256), "iq4_nl": (34, 352),
}  # fmt: skip
OTHERS = (
    "int3", "int2", "llm_int8", "fp8_e5m2", "mxfp4", "mxfp8", "q4_0", "q4_1", "q5_1", "iq4_xs", "iq3_s", "iq3_xxs",
    "iq2_xxs", "iq1_s", "mxfp4_ggml",
)  # fmt: skip
"""The other formats that tiles take, as they are by default."""
WEIGHTS["q4_0:wide"] = (18, 8192)
WEIGHTS |= dict.fromkeys(OTHERS, (35, 512))
QUICK = ("int4:group=32,symmetric=False", "q4_K", "int8", "fp8_e4m3")
MS = (1, 8, 9, 16, 17, 33, 131)
"""Around a block of rows. (The kernel takes any number; tiles have those from nine on.)"""


@cache
def weight(text: str) -> tuple[Operand, Any, Any]:
    """(operand, bytes, elements in fp32)."""
    n, k = WEIGHTS[text]
    ref = parse_format(text.removesuffix(":wide"))
    fmt = formats.get(ref.name, **ref.params)
    packed = fmt.encode(np.random.default_rng(zlib.crc32(text.encode())).standard_normal((n, k)).astype(np.float32))
    data = layouts.get(PANELS).pack(fmt, "f32", n, k, packed.data)
    operand = Operand(name="w", dtype="f32", access="r", shape=(n, k), format=ref, layout=PANELS)
    return operand, aligned(data), fmt.decode(packed).astype(np.float64)


def spec_of(text: str, x: DType = "f32") -> KernelSpec:
    n, k = WEIGHTS[text]
    operands = (
        Operand(name="x", dtype=x, access="r", shape=("m", k), strides=(k + 3, 1)),
        weight(text)[0],
        Operand(name="out", dtype="f32", access="w", shape=("m", n), strides=(n, 1)),
    )
    body = LinearKernel(m="m", n=n, k=k, m_class="large", has_bias=False)
    name = f"f{zlib.crc32(f'{text} {x}'.encode()):08x}"
    return KernelSpec(name=name, symbols=("m",), operands=operands, body=body)


def rows_of(text: str, m: int, x: DType = "f32") -> Any:
    k = WEIGHTS[text][1]
    rows = np.full((m, k + 3), np.nan, NUMPY_DTYPES[x])  # what lies between rows is no number
    rows[:, :k] = np.random.default_rng(m).standard_normal((m, k)).astype(rows.dtype)
    return rows


def product(kernels: Any, text: str, rows: Any, x: DType = "f32") -> Any:
    """On one thread and on several, whose bits are the same."""
    n, m = WEIGHTS[text][0], len(rows)
    return kernels.run_both(
        spec_of(text, x).name, lambda: [rows, weight(text)[1], np.full((m, n), np.nan, np.float32)], (m,)
    )[2]


def check(kernels: Any, text: str, rows: Any, x: DType = "f32") -> None:
    """The error is that of sums in fp32: no number of x or w is rounded."""
    k, w = WEIGHTS[text][1], weight(text)[2]
    given = rows[:, :k].astype(np.float64)
    error = np.abs(product(kernels, text, rows, x) - given @ w.T)
    assert (error <= np.abs(given) @ np.abs(w).T * (k / 16 + 12) * 2.0**-24 + 1e-35).all(), text


def test_few_formats(bf16_tiles: Tiles) -> None:
    kernels = bf16_tiles([spec_of(text) for text in QUICK])
    for text in QUICK:
        before = tile_counts(kernels)
        for m in (9, 40):
            check(kernels, text, rows_of(text, m))
        check_counts(kernels, before)


@pytest.mark.slow
@pytest.mark.parametrize("x", ["f32", "bf16", "f16"])
def test_every_kind_of_codes(bf16_tiles: Tiles, x: DType) -> None:
    kernels = bf16_tiles([spec_of(text, x) for text in WEIGHTS])
    for text in WEIGHTS:
        assert fp32_tiles.multiplies(weight(text)[0], "x86-64-v4"), text
        before = tile_counts(kernels)
        for m in MS:
            check(kernels, text, rows_of(text, m, x), x)
        check_counts(kernels, before)


def test_more_rows_than_a_chunk(bf16_tiles: Tiles) -> None:
    """A chunk has at most 512 rows; the second one is not full."""
    kernels = bf16_tiles([spec_of("int8:group=32")])
    check(kernels, "int8:group=32", rows_of("int8:group=32", 530))


def test_chunks_of_wide_rows(bf16_tiles: Tiles) -> None:
    """Of 8192 columns a chunk has at most 128 rows: two have 96, and the third has 85, in a last block of five."""
    kernels = bf16_tiles([spec_of("q4_0:wide")])
    check(kernels, "q4_0:wide", rows_of("q4_0:wide", 277))


def test_tiles_are_what_multiplies(bf16_tiles: Tiles) -> None:
    """On a processor, where nothing counts them: the last bits differ from those of FMA."""
    kernels, rows = bf16_tiles([spec_of("int8")]), rows_of("int8", 16)
    by_tiles = product(kernels, "int8", rows)
    kernels.bf16_units = 0
    assert by_tiles.tobytes() != product(kernels, "int8", rows).tobytes()


def test_a_large_number_at_a_zero_weight_leaves_nothing(bf16_tiles: Tiles) -> None:
    """Where elements have no offset. With an offset, the sum of codes and that of x cancel but for their roundings."""
    kernels, rows = bf16_tiles([spec_of("int8")]), rows_of("int8", 9)
    w = weight("int8")[2]
    row, column = np.argwhere(w == 0)[0]
    before = product(kernels, "int8", rows)
    rows[:, column] = 2000 * np.sign(rows[:, column])
    given = rows[:, : w.shape[1]].astype(np.float64)
    found = product(kernels, "int8", rows)
    assert (np.abs(found - given @ w.T) <= np.abs(given) @ np.abs(w).T * 2.0**-18)[:, row].all()
    assert before.tobytes() != found.tobytes()


def test_bias_epilogue_and_pairs(bf16_tiles: Tiles) -> None:
    """The same sums, finished in another way, to the bit; pairs of rows from two layouts."""
    pairs = load("tests/support/pair_cases.py")
    cases = list(pairs.cases("cpu_p16_pairs_v2", ["f32"], ("int4", "q4_K"), ("large",)))
    assert cases
    kernels = bf16_tiles([spec for case in cases for spec in (case.paired, case.plain)])
    for case in cases:
        before = tile_counts(kernels)
        m = 21 if case.paired.symbols else case.paired.operands[0].shape[0]
        pairs.check(kernels, case, m)
        check_counts(kernels, before)


def test_all_bits_of_x_count(bf16_tiles: Tiles) -> None:
    """Numbers with the last bit of their mantissa, of either sign, far apart, or near the ends of the range."""
    text = "int8"
    kernels = bf16_tiles([spec_of(text)])
    rows = rows_of(text, 16)
    rows[0] = np.float32(1 + 2.0**-23)
    rows[1] = -np.float32(2 - 2.0**-23)
    rows[2] *= np.float32(2.0**100)
    rows[3] *= np.float32(2.0**-100)
    rows[4, ::2] *= np.float32(2.0**-30)
    rows[5] = np.float32(1 + 2.0**-16)
    check(kernels, text, rows)


@pytest.mark.parametrize("text", ["int8", pytest.param("int4:group=32,symmetric=False", marks=pytest.mark.slow)])
def test_numbers_that_are_none_stay_in_their_rows(bf16_tiles: Tiles, text: str) -> None:
    """As of FMA: an infinity gives one where elements have a sign, a NaN a NaN; neighbours keep their bits."""
    kernels, rows, w = bf16_tiles([spec_of(text)]), rows_of(text, 20), weight(text)[2]
    before = product(kernels, text, rows)
    rows[3, 5], rows[7, 0], rows[18, 9] = np.inf, np.nan, np.finfo(np.float32).max
    after = product(kernels, text, rows)
    assert np.isnan(after[7]).all()
    with np.errstate(invalid="ignore"):
        expected = np.where(w[:, 5] == 0, np.nan, np.inf * np.sign(w[:, 5]))
    np.testing.assert_array_equal(after[3], expected)
    clear = np.abs(np.abs(w[:, 9]) - 1) > 1e-3
    assert clear.any()
    np.testing.assert_array_equal(np.isfinite(after[18])[clear], (np.abs(w[:, 9]) < 1)[clear])
    others = [i for i in range(20) if i not in (3, 7, 18)]
    assert after[others].tobytes() == before[others].tobytes()


def operand_of(text: str, k: int) -> Operand:
    ref = None if text == "float" else parse_format(text)
    return Operand(name="w", dtype="f32", access="r", shape=(32, k), format=ref, layout=PANELS)


def test_formats_that_tiles_take_are_all_here() -> None:
    """As they are by default; a kernel of a format that tiles take by Python's word alone would not compile."""
    taken = {name for name in formats.names() if fp32_tiles.multiplies(operand_of(name, 512), "x86-64-v4")}
    assert taken == {text.partition(":")[0] for text in WEIGHTS}


@pytest.mark.parametrize(
    "text, k",
    [
        ("nf4:block=64", 256),
        ("q6_K", 256),
        ("int8", 40),
        ("int4:group=32", 48),
        ("float", 64),
        ("int8:symmetric=False", 64),
    ],
)
def test_what_tiles_do_not_take(text: str, k: int) -> None:
    """Values that bf16 rounds, scales of half a tile, rows that end inside of a tile, have no codes or one offset."""
    assert not fp32_tiles.multiplies(operand_of(text, k), "x86-64-v4")


def test_tiles_are_for_avx512_and_weights_in_fp32() -> None:
    w = weight("int8")[0]
    assert fp32_tiles.multiplies(w, "x86-64-v4")
    assert not fp32_tiles.multiplies(w, "x86-64-v3")
    assert not fp32_tiles.multiplies(replace(w, dtype="bf16"), "x86-64-v4")


def test_windows_of_images(bf16_tiles: Tiles) -> None:
    case = window_cases.Case("packed", 32, (3, 3), (2, 1), (1, 1))
    plain, fmt = window_cases.spec_of(case), formats.get("int8")
    (_, k), rng = plain.operands[1].shape, np.random.default_rng(1)
    packed = fmt.encode(rng.standard_normal((case.n, int(k))).astype(np.float32))
    data = aligned(layouts.get(PANELS).pack(fmt, "f32", case.n, int(k), packed.data))
    w = Operand(
        name="w", dtype="f32", access="r", shape=(case.n, k), format=parse_format("int8"), layout=PANELS
    )  # fmt: skip
    spec = replace(plain, operands=(plain.operands[0], w, plain.operands[2]))
    kernels, size = bf16_tiles([spec]), case.size(9, 11)
    image = rng.standard_normal((2, 9, 11, 32)).astype(np.float32)
    wanted = window_cases.rows_of(case, image.astype(np.float64), size) @ fmt.decode(packed).astype(np.float64).T
    before = tile_counts(kernels)
    found = kernels.run_both(
        case.name, lambda: [image, data, np.full(wanted.shape, np.nan, np.float32)], (2, 9, 11, *size)
    )[-1]
    check_counts(kernels, before)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)
