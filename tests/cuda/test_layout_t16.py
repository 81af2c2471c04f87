"""cuda_t16_v1 places every element where a lane of the kernels looks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import LayoutError
from qcompiler.formats import Format
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

T16 = layouts.get("cuda_t16_v1")
PLAIN: tuple[DType, ...] = ("f32", "bf16", "f16")
FORMATS = (
    formats.get("nf4", block=64), formats.get("nf4", block=128), formats.get("int8"),
    *(formats.get("int4", group=g, symmetric=s) for g in (32, 64, 128) for s in (True, False)),
)  # fmt: skip


def sections_of(fmt: Format | None, dtype: DType, rows: int, cols: int, packed: Any) -> dict[str, Any]:
    sections = T16.sections(fmt, dtype, rows, cols)
    return {s.name: packed[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape) for s in sections}


def code_at(words: Any, bits: int, row: int, k: int) -> int:
    """The code of (row, k), as the layout's description has it: written apart from `pack`, one element at a time."""
    panel, r = divmod(row, 16)
    g, upper = r % 8, r // 8
    tile, inside = divmod(k, 64 if bits == 4 else 32)
    piece, k16 = divmod(inside, 16)
    q, k8 = divmod(k16, 8)
    t, h = divmod(k8, 2)
    pair = upper + 2 * q
    lane = words[panel, tile, 4 * g + t]
    if bits == 4:
        return int(lane[piece]) >> 4 * (pair + 4 * h) & 15
    return int(lane[2 * piece + pair // 2]) >> 8 * (2 * (pair % 2) + h) & 255


def value_at(values: npt.NDArray[Any], row: int, k: int) -> Any:
    """The plain value of (row, k)."""
    panel, r = divmod(row, 16)
    g, upper = r % 8, r // 8
    if values.dtype.itemsize == 4:
        tile, inside = divmod(k, 8)
        q, t = divmod(inside, 4)
        return values[panel, tile, 4 * g + t, upper + 2 * q]
    tile, inside = divmod(k, 16)
    q, k8 = divmod(inside, 8)
    t, h = divmod(k8, 2)
    return values[panel, tile, 4 * g + t, 2 * (upper + 2 * q) + h]


def shapes(fmt: Format | None) -> st.SearchStrategy[tuple[int, int]]:
    step = int(fmt.params["group"]) if fmt is not None and fmt.name == "int4" else 1
    cols = (
        st.integers(1, 6).map(lambda n: n * step) if step > 1 else st.integers(1, 200) | st.sampled_from((64, 128, 192))
    )
    return st.tuples(st.integers(1, 40), cols)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), fmt=st.sampled_from(FORMATS))
def test_every_element_decodes_from_the_word_its_lane_loads(data: st.DataObject, fmt: Format) -> None:
    rows, cols = data.draw(shapes(fmt))
    encoded = fmt.encode(np.random.default_rng(rows + 100 * cols).standard_normal((rows, cols)).astype(np.float32))
    packed = T16.pack(fmt, "f32", rows, cols, encoded.data)
    np.testing.assert_array_equal(T16.unpack(fmt, "f32", rows, cols, packed), encoded.data)
    at = sections_of(fmt, "f32", rows, cols, packed)
    expected = fmt.decode(encoded)
    bits, block = fmt.declaration.codes.bits, fmt.declaration.block_size(cols)
    columns = sorted({0, cols - 1, *data.draw(st.lists(st.integers(0, cols - 1), max_size=8))})
    for row in range(rows):
        for k in columns:
            code = code_at(at["codes"], bits, row, k)
            if cols % block:
                scale = at["absmax_flat"][(row * cols + k) // block]
            else:
                scale = np.float32(at["scales" if "scales" in at else "absmax"][row // 16, k // block, row % 16])
            if fmt.declaration.table_array is not None:
                value = fmt.declaration.table_array[code] * scale
            elif bits == 8:
                value = np.float32(code - 256 if code > 127 else code) * scale
            else:
                zero = int(at["zeros"][row // 16, k // block, row % 16]) if "zeros" in at else 8
                value = np.float32(code - zero) * scale
            assert value == expected[row, k], (row, k)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), cols=st.integers(0, 70), dtype=st.sampled_from(PLAIN))
def test_plain_values_lie_where_their_lane_loads_them(rows: int, cols: int, dtype: DType) -> None:
    values = np.random.default_rng(0).standard_normal((rows, cols)).astype(NUMPY_DTYPES[dtype])
    canonical = values.reshape(-1).view(np.uint8)
    packed = T16.pack(None, dtype, rows, cols, canonical)
    np.testing.assert_array_equal(T16.unpack(None, dtype, rows, cols, packed), canonical)
    at = sections_of(None, dtype, rows, cols, packed)["values"]
    for row in range(rows):
        for k in range(cols):
            assert value_at(at, row, k) == values[row, k]


@pytest.mark.parametrize("fmt", [*FORMATS, None], ids=str)
def test_a_lane_loads_sixteen_aligned_bytes(fmt: Format | None) -> None:
    sections = T16.sections(fmt, "bf16", 33, 384)
    assert all(s.offset % 64 == 0 for s in sections)
    first = sections[0]
    panels, tiles, lanes, items = first.shape
    assert (panels, lanes, items * first.dtype.itemsize) == (3, 32, 16)
    bits = 16 if fmt is None else fmt.declaration.codes.bits
    assert tiles * 512 * 8 // (16 * bits) == 384


@given(fmt=st.sampled_from(FORMATS), rows=st.integers(1, 33))
def test_what_lies_outside_the_matrix_is_zero(fmt: Format, rows: int) -> None:
    """A panel is filled up with zero bytes: kernels may read whole tiles and must not meet a NaN scale."""
    cols = int(fmt.params.get("group", 1)) * 3
    ones = np.full(fmt.nbytes(rows, cols), 255, np.uint8)
    at = sections_of(fmt, "f32", rows, cols, T16.pack(fmt, "f32", rows, cols, ones))
    bits = fmt.declaration.codes.bits
    codes = np.array([[code_at(at["codes"], bits, r, k) for k in range(cols)] for r in range(-(-rows // 16) * 16)])
    assert (codes[:rows] == (1 << bits) - 1).all()
    assert not codes[rows:].any()
    assert np.unpackbits(at["codes"].view(np.uint8)).sum() == rows * cols * bits


def test_a_dtype_without_tiles_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"cuda_t16_v1.*f32, bf16 and f16 values; got i64"):
        T16.sections(None, "i64", 4, 4)
