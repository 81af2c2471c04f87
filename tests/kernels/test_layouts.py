"""Layouts are bijections, the same in NumPy and in C++, and place every code where kernels look for it."""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcompiler.kernels
from qcompiler import formats
from qcompiler.errors import LayoutError
from qcompiler.formats import Format
from qcompiler.formats.doc import variants
from qcompiler.formats.packing import Trits
from qcompiler.kernels import layouts
from qcompiler.kernels.layouts.pairs import obstacle
from qcompiler.kernels.layouts.panels import join_entries, plane_name, planes, split_entries, to_panels
from qcompiler.kernels.layouts.stored import StoredEntries
from qcompiler.plan.kernel import DType
from qcompiler.plan.pairs import PAIR_LAYOUTS, stored_rows
from qcompiler.plan.weights import NUMPY_DTYPES

P16, JOINED = layouts.get("cpu_p16_v1"), layouts.get("cpu_p16_v2")
PLAIN: tuple[DType, ...] = ("f32", "bf16", "f16")
ANY_K = (formats.get("nf4", block=64), formats.get("nf4", block=128), formats.get("int8"))
GROUPED = tuple(formats.get("int4", group=g, symmetric=s) for g in (32, 64, 128) for s in (True, False))
Bytes = npt.NDArray[np.uint8]


def canonical_bytes(fmt: Format | None, dtype: DType, rows: int, cols: int) -> Bytes:
    weights = np.random.default_rng(rows * 1000 + cols).standard_normal((rows, cols))
    if fmt is None:
        return weights.astype(NUMPY_DTYPES[dtype]).reshape(-1).view(np.uint8)
    return fmt.encode(weights.astype(np.float32)).data


def views(sections: tuple[formats.Section, ...], data: Bytes) -> dict[str, Any]:
    return {s.name: data[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape) for s in sections}


ALL = [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]
CHOICES = [cls(**{p.name: c}) for cls in formats.FORMATS.values() for p in cls.parameters for c in p.choices]


def any_bytes(fmt: Format, rows: int, cols: int, rng: np.random.Generator) -> Bytes:
    """Canonical bytes of which every stored bit is random, and no other one is set."""
    data = rng.integers(0, 256, fmt.nbytes(rows, cols), np.uint8)
    kept = np.zeros(data.size, np.uint8)
    for s in fmt.sections(rows, cols):
        kept[s.offset : s.offset + s.nbytes] = 255  # the gaps between sections are zero
    codes = fmt.declaration.codes
    unused = -rows * cols * codes.bits % 8
    if unused and codes.packing is None:  # of a last byte that is half full: the padding code stands there
        end = fmt.sections(rows, cols)[0].nbytes - 1
        high = codes.order == "high_first"
        data[end] = (data[end] & 240 if high else data[end] & 15) | fmt.declaration.pad_code << (0 if high else 4)
    return data & kept


def widths(fmt: Format) -> tuple[int, ...]:
    block = fmt.declaration.block
    whole = 32 if block == "row" else int(block)
    if fmt.declaration.tail == "refuse":
        return (whole, 3 * whole)
    return (1, 37, 128) if fmt.declaration.blocking == "row" else (33, whole // 2, whole, whole + 2)


@pytest.mark.parametrize("fmt", [*ALL, *CHOICES], ids=str)
def test_any_bytes_of_any_format_come_back_from_panels(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    ternary = any(isinstance(f.packing, Trits) for f in fmt.declaration.fields)
    for run in (1, 1 << 21):  # sixteen rows at a time, and all at once
        monkeypatch.setattr("qcompiler.kernels.layouts.panels.RUN", run)
        for cols in widths(fmt):
            for rows in (1, 35):
                data = any_bytes(fmt, rows, cols, rng)
                if ternary:
                    data = fmt.encode(rng.standard_normal((rows, cols)).astype(np.float32)).data
                for layout in (P16, JOINED):
                    packed = layout.pack(fmt, "f32", rows, cols, data)
                    np.testing.assert_array_equal(layout.unpack(fmt, "f32", rows, cols, packed), data)


def test_bytes_that_no_encoder_writes_are_refused_where_they_would_be_lost() -> None:
    fmt = formats.get("tq1_0")
    data = fmt.encode(np.ones((2, 256), np.float32)).data.copy()
    data[fmt.nbytes(1, 256) + 5] = 1  # the digits of byte 1 are those of byte 0
    with pytest.raises(LayoutError, match=r"'codes' of tq1_0.* holds bytes .*base-3 digits.* in rows 0…1 that no"):
        P16.pack(fmt, "f32", 2, 256, data)


def shapes_for(fmt: Format | None) -> st.SearchStrategy[tuple[int, int]]:
    step = int(fmt.params["group"]) if fmt is not None and fmt.name == "int4" else 1
    cols = st.integers(1, 6).map(lambda n: n * step) if step > 1 else st.integers(1, 200)
    return st.tuples(st.integers(1, 50), cols)


@pytest.mark.parametrize("layout", ["cpu_p16_v1", "cpu_p16_v2", "cuda_t16_v1", *PAIR_LAYOUTS])
@pytest.mark.parametrize("kind", [*ANY_K, GROUPED[1], *PLAIN], ids=str)
def test_bytes_do_not_depend_on_how_many_rows_are_rearranged_at_a_time(
    layout: str, kind: Format | DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, dtype = (kind, "f32") if isinstance(kind, Format) else (None, kind)
    sizes = [(50, 96), (33, 95), (16, 64), (5, 31), (25, 256)]
    if layout in PAIR_LAYOUTS:  # what they refuse: test_unpack_of_pack_gives_the_canonical_bytes
        sizes = [(2 * rows, cols) for rows, cols in sizes if obstacle(fmt, cols) is None]
        assert sizes
    for rows, cols in sizes:
        if fmt is not None and fmt.name == "int4" and cols % 32:
            continue
        canonical = canonical_bytes(fmt, dtype, rows, cols)
        at_once = layouts.get(layout).pack(fmt, dtype, rows, cols, canonical)
        monkeypatch.setattr("qcompiler.kernels.layouts.panels.RUN", 1)
        out = np.zeros(at_once.size, np.uint8)
        layouts.get(layout).pack_into(fmt, dtype, rows, cols, canonical, out)
        back = layouts.get(layout).unpack(fmt, dtype, rows, cols, out)
        monkeypatch.undo()
        np.testing.assert_array_equal(out, at_once)
        np.testing.assert_array_equal(back, canonical)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from((*ANY_K, *GROUPED, *PLAIN)))
def test_unpack_of_pack_gives_the_canonical_bytes(data: st.DataObject, kind: Format | DType) -> None:
    fmt, dtype = (kind, "f32") if isinstance(kind, Format) else (None, kind)
    rows, cols = data.draw(shapes_for(fmt))
    for name in layouts.names():
        layout = layouts.get(name)
        if name in PAIR_LAYOUTS:
            if obstacle(fmt, cols) is not None:
                with pytest.raises(LayoutError, match="cannot hold"):
                    layout.nbytes(fmt, dtype, 2 * rows, cols)
                continue
            rows = 2 * rows
        canonical = canonical_bytes(fmt, dtype, rows, cols)
        packed = layout.pack(fmt, dtype, rows, cols, canonical)
        assert packed.size == layout.nbytes(fmt, dtype, rows, cols)
        np.testing.assert_array_equal(layout.unpack(fmt, dtype, rows, cols, packed), canonical)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), kind=st.sampled_from((*ANY_K, *GROUPED)))
def test_every_element_decodes_from_the_place_the_kernels_read(data: st.DataObject, kind: Format) -> None:
    """An independent reader of cpu_p16_v1: lane r of panel p, nibble or byte j of group g, scale of block k // kb."""
    rows, cols = data.draw(shapes_for(kind))
    packed = kind.encode(np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32))
    at = views(P16.sections(kind, "f32", rows, cols), P16.pack(kind, "f32", rows, cols, packed.data))
    expected = kind.decode(packed)
    bits = 8 if kind.name == "int8" else 4
    per_word = 32 // bits
    block = {"nf4": kind.params.get("block"), "int8": cols, "int4": kind.params.get("group")}[kind.name]
    assert isinstance(block, int)
    for row in range(rows):
        panel, lane = divmod(row, 16)
        for k in {0, cols // 2, cols - 1, min(cols - 1, 7)}:
            code = int(at["codes"][panel, k // per_word, lane]) >> bits * (k % per_word) & (1 << bits) - 1
            if "absmax_flat" in at:
                assert cols % block
                scale = at["absmax_flat"][(row * cols + k) // block]
            else:
                scale = np.float32(at["absmax" if kind.name == "nf4" else "scales"][panel, k // block, lane])
            if kind.name == "nf4":
                value = formats.get("nf4").declaration.table_array[code] * scale  # type: ignore[index]
            elif kind.name == "int8":
                value = np.float32(code - 256 if code > 127 else code) * scale
            else:
                zero = int(at["zeros"][panel, k // block, lane]) if "zeros" in at else 8
                value = np.float32(code - zero) * scale
            assert value == expected[row, k]


def test_plain_values_are_panels_of_sixteen_rows() -> None:
    values = np.arange(18 * 3, dtype=np.float32).reshape(18, 3)
    packed = P16.pack(None, "f32", 18, 3, values.reshape(-1).view(np.uint8)).view(np.float32).reshape(2, 3, 16)
    assert packed[0, 2, 15] == values[15, 2]
    assert packed[1, 0, 1] == values[17, 0]
    assert (packed[1, :, 2:] == 0).all()


@given(data=st.data(), kind=st.sampled_from((*ANY_K, *GROUPED, *PLAIN)))
def test_sections_are_64_byte_aligned_and_do_not_overlap(data: st.DataObject, kind: Format | DType) -> None:
    fmt, dtype = (kind, "f32") if isinstance(kind, Format) else (None, kind)
    rows, cols = data.draw(shapes_for(fmt))
    end = 0
    for s in P16.sections(fmt, dtype, rows, cols):
        assert s.offset % 64 == 0
        assert end <= s.offset < end + 64
        end = s.offset + s.nbytes
    assert end == P16.nbytes(fmt, dtype, rows, cols)


@pytest.mark.parametrize(
    ("fmt", "rows", "cols", "expected"),
    [
        (None, 17, 5, [("values", "float32", (2, 5, 16))]),
        (ANY_K[0], 17, 128, [("codes", "uint32", (2, 16, 16)), ("absmax", "float32", (2, 2, 16))]),
        (ANY_K[0], 17, 100, [("codes", "uint32", (2, 13, 16)), ("absmax_flat", "float32", (27,))]),
        (ANY_K[2], 16, 9, [("codes", "uint32", (1, 3, 16)), ("scales", "float32", (1, 1, 16))]),
        (GROUPED[0], 3, 96, [("codes", "uint32", (1, 12, 16)), ("scales", "float16", (1, 3, 16))]),
        (
            GROUPED[1],
            3,
            96,
            [("codes", "uint32", (1, 12, 16)), ("scales", "float16", (1, 3, 16)), ("zeros", "uint8", (1, 3, 16))],
        ),
    ],
    ids=str,
)
def test_sections_of_cpu_p16_v1(fmt: Format | None, rows: int, cols: int, expected: list[Any]) -> None:
    assert [(s.name, s.dtype.name, s.shape) for s in P16.sections(fmt, "f32", rows, cols)] == expected


@pytest.mark.parametrize("name", list(PAIR_LAYOUTS))
@pytest.mark.parametrize("rows", [pytest.param(48, marks=pytest.mark.slow), 70, 34, 2])
def test_layouts_of_pairs_are_their_panels_of_rows_in_another_order(name: str, rows: int) -> None:
    """Every format: encoded in that order, padded with rows of zeros, and packed by the plain layout."""
    half, stored, taken = rows // 2, stored_rows(rows), 0
    for fmt in (*map(formats.get, formats.names()), None):
        cols = 512
        if obstacle(fmt, cols) is not None:
            assert fmt is not None
            with pytest.raises(LayoutError, match=f"'{name}' cannot hold {fmt.name}"):
                layouts.get(name).nbytes(fmt, "f32", rows, cols)
            continue
        canonical = canonical_bytes(fmt, "f32", rows, cols)
        packed = layouts.get(name).pack(fmt, "f32", rows, cols, canonical)
        np.testing.assert_array_equal(layouts.get(name).unpack(fmt, "f32", rows, cols, packed), canonical)
        plain = layouts.get(PAIR_LAYOUTS[name])
        assert packed.size == plain.nbytes(fmt, "f32", stored, cols)
        if fmt is not None and half % 8:
            continue  # a row of zeros is not zero bytes in every format
        order = [(n // 16 * 8 + n % 8) + half * (n % 16 // 8) for n in range(stored)]
        inside = [n for n in range(stored) if n // 16 * 8 + n % 8 < half]
        moved = np.zeros((stored, cols), np.float32)
        whole = (
            canonical.view(np.float32).reshape(rows, cols)
            if fmt is None
            else fmt.decode(formats.PackedTensor(fmt, rows, cols, canonical))
        )
        moved[inside] = whole[[order[n] for n in inside]]
        back = plain.unpack(fmt, "f32", stored, cols, packed)
        found = (
            back.view(np.float32).reshape(stored, cols)
            if fmt is None
            else fmt.decode(formats.PackedTensor(fmt, stored, cols, back))
        )
        np.testing.assert_array_equal(found, moved)
        taken += 1
    assert taken > (1 if half % 8 else len(formats.names()) // 2) - 1


def test_a_layout_of_pairs_needs_two_halves() -> None:
    with pytest.raises(LayoutError, match="two halves of rows; got 5 rows"):
        layouts.get("cpu_p16_pairs_v1").nbytes(None, "f32", 5, 8)


def test_canonical_layout_is_the_formats_own_bytes_of_any_dtype() -> None:
    canonical = layouts.get("canonical")
    assert canonical.sections(ANY_K[0], "bf16", 5, 7) == ANY_K[0].sections(5, 7)
    (values,) = canonical.sections(None, "i64", 5, 7)
    assert (values.name, values.shape, values.nbytes) == ("values", (5, 7), 280)


def test_errors_name_the_layout_and_what_it_holds() -> None:
    with pytest.raises(LayoutError, match=r"'cpu_p8'.*canonical, cpu_p16_v1"):
        layouts.get("cpu_p8")
    with pytest.raises(LayoutError, match="f32, bf16 and f16 values; got i64"):
        P16.sections(None, "i64", 4, 4)
    with pytest.raises(LayoutError, match=r"64 bytes .* is needed for values float32\[4, 4\]; got uint8"):
        P16.pack(None, "f32", 4, 4, np.zeros(63, np.uint8))
    with pytest.raises(LayoutError, match="256 bytes"):
        P16.unpack(None, "f32", 4, 4, np.zeros(64, np.uint8))
    with pytest.raises(LayoutError, match="no section 'zeros'; it has codes, scales"):
        P16.section(ANY_K[2], "f32", 4, 4, "zeros")


def test_packing_a_larger_matrix_takes_no_more_python_calls() -> None:
    fmt = formats.get("nf4")

    def calls(size: int) -> int:
        canonical = np.zeros(fmt.nbytes(size, size), np.uint8)
        profile = cProfile.Profile()
        profile.runcall(P16.pack, fmt, "f32", size, size, canonical)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    calls(64)  # what is computed once
    assert calls(1024) == calls(128)


# --- the C++ twin ---

DRIVER = """
#include "layout_pack.h"
using namespace qc_layout;
// In two parts where there is more than one panel, as two threads would do it.
#define HALVES(call) { const int64_t n = panels(rows), h = n / 2; { const int64_t b = 0, e = h; call; } \
                       { const int64_t b = h, e = n; call; } }
extern "C" {
#define ITEMS(T, S) \
void pack_items_##S(const T* s, int64_t rows, int64_t cols, T* d) { HALVES(p16_pack_items(s, rows, cols, d, b, e)) } \
void unpack_items_##S(const T* s, int64_t rows, int64_t cols, T* d) { HALVES(p16_unpack_items(s, rows, cols, d, b, e)) }
ITEMS(uint8_t, 1) ITEMS(uint16_t, 2) ITEMS(uint32_t, 4)
void pack_codes4(const uint8_t* s, int high, int64_t rows, int64_t cols, uint32_t* d)
    HALVES(p16_pack_codes4(s, high, rows, cols, d, b, e))
void unpack_codes4(const uint32_t* s, int high, int pad, int64_t rows, int64_t cols, uint8_t* d)
    HALVES(p16_unpack_codes4(s, high, (uint8_t)pad, rows, cols, d, b, e))
void pack_codes8(const uint8_t* s, int64_t rows, int64_t cols, uint32_t* d)
    HALVES(p16_pack_codes8(s, rows, cols, d, b, e))
void unpack_codes8(const uint32_t* s, int64_t rows, int64_t cols, uint8_t* d)
    HALVES(p16_unpack_codes8(s, rows, cols, d, b, e))
void pack_plane(const uint8_t* s, int shift, int bits, int64_t rows, int64_t cols, uint32_t* d)
    HALVES(p16_pack_plane(s, shift, bits, rows, cols, d, b, e))
void unpack_plane(const uint32_t* s, int shift, int bits, int64_t rows, int64_t cols, uint8_t* d)
    HALVES(p16_unpack_plane(s, shift, bits, rows, cols, d, b, e))
void pack_joined(const uint8_t* s, int bits, int64_t rows, int64_t count, uint8_t* d)
    HALVES(p16_pack_joined(s, bits, rows, count, d, b, e))
void unpack_joined(const uint8_t* s, int bits, int64_t rows, int64_t count, uint8_t* d)
    HALVES(p16_unpack_joined(s, bits, rows, count, d, b, e))
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("layout")
    (folder / "driver.cpp").write_text(DRIVER)
    include = Path(qcompiler.kernels.__file__).parent / "cpu"
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{include}"]
    subprocess.run([*command, "-o", folder / "driver.so", folder / "driver.cpp"], check=True)
    return ctypes.CDLL(str(folder / "driver.so"))


def call(function: Any, source: Any, flags: list[int], shape: tuple[int, int], out: Any) -> None:
    """function(source, flags…, rows, cols, out) on contiguous arrays."""
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (source, out)]
    dims = [ctypes.c_int64(n) for n in shape]
    function(pointers[0], *(ctypes.c_int(f) for f in flags), *dims, pointers[1])


CASES = [
    *((f, "f32", r, c) for f in ANY_K for r, c in [(1, 1), (3, 5), (17, 129), (16, 64), (33, 97), (50, 384)]),
    *((f, "f32", r, 256) for f in GROUPED for r in (1, 16, 19, 47)),
    *((None, d, r, c) for d in PLAIN for r, c in [(1, 1), (17, 33), (16, 8), (49, 65)]),
]


@pytest.mark.parametrize(("fmt", "dtype", "rows", "cols"), CASES, ids=str)
def test_cpp_packs_and_unpacks_the_same_bytes(
    library: ctypes.CDLL, fmt: Format | None, dtype: DType, rows: int, cols: int
) -> None:
    canonical = canonical_bytes(fmt, dtype, rows, cols)
    source = views(layouts.get("canonical").sections(fmt, dtype, rows, cols), canonical)
    sections = P16.sections(fmt, dtype, rows, cols)
    expected = views(sections, P16.pack(fmt, dtype, rows, cols, canonical))
    for (name, items), section in zip(source.items(), sections, strict=True):
        packed = np.full(section.shape, 0xAA, np.uint8).astype(section.dtype)
        back = np.full(items.shape, 0x55, np.uint8).astype(items.dtype)
        if name == "codes" and fmt is not None:
            codes = fmt.declaration.codes
            order = [int(codes.order == "high_first")] if codes.bits == 4 else []
            call(library[f"pack_codes{codes.bits}"], items, order, (rows, cols), packed)
            flags = [*order, fmt.declaration.pad_code] if codes.bits == 4 else []
            call(library[f"unpack_codes{codes.bits}"], packed, flags, (rows, cols), back)
        elif section.name.endswith("_flat"):
            np.testing.assert_array_equal(expected[section.name], items)
            continue
        else:
            per_row = section.shape[1]
            call(library[f"pack_items_{items.itemsize}"], items, [], (rows, per_row), packed)
            call(library[f"unpack_items_{items.itemsize}"], packed, [], (rows, per_row), back)
        assert packed.tobytes() == expected[section.name].tobytes(), section.name
        assert back.tobytes() == items.tobytes(), name


@pytest.mark.parametrize("name", ["int2", "int3", "q5_0", "q6_K", "q3_K"])
def test_cpp_packs_and_unpacks_the_same_planes_of_codes(library: ctypes.CDLL, name: str) -> None:
    fmt, rows, cols = formats.get(name), 35, 768
    codes = fmt.declaration.codes
    data = any_bytes(fmt, rows, cols, np.random.default_rng(3))
    source = StoredEntries(fmt, rows, cols, data).read(codes)
    expected = views(P16.sections(fmt, "f32", rows, cols), P16.pack(fmt, "f32", rows, cols, data))
    back = np.zeros((rows, cols), np.uint8)
    for shift, bits in planes(codes.bits):
        words = expected[plane_name(shift)]
        packed = np.full(words.shape, 0xAAAAAAAA, np.uint32)
        call(library.pack_plane, np.ascontiguousarray(source), [shift, bits], (rows, cols), packed)
        assert packed.tobytes() == words.tobytes()
        call(library.unpack_plane, packed, [shift, bits], (rows, cols), back)
    np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize("rows", [1, 16, 35])
@pytest.mark.parametrize("name", ["q2_K", "q3_K", "q4_K", "q5_K", "iq4_xs"])
def test_small_entries_share_bytes_as_the_description_says(library: ctypes.CDLL, name: str, rows: int) -> None:
    """The places of nibbles and of pairs of bits, read one by one; the same bytes in C++."""
    fmt = formats.get(name)
    data = any_bytes(fmt, rows, 768, np.random.default_rng(3))
    stored = StoredEntries(fmt, rows, 768, data)
    packed = views(JOINED.sections(fmt, "f32", rows, 768), JOINED.pack(fmt, "f32", rows, 768, data))
    small = [field for field in fmt.declaration.fields if field.bits in (4, 6) and field.covers != 1]
    assert small
    for field in small:
        source, joined = np.ascontiguousarray(stored.read(field)), packed[field.name]
        for row, e in ((0, 0), (rows - 1, source.shape[1] - 1), (rows // 2, 5), (rows // 3, 6)):
            lane = joined[row // 16, :, row % 16]
            byte = lane[e // 2 if field.bits == 4 else e // 4 * 3 + e % 4 // 2]
            entry = byte >> 4 * (e % 2) & 15
            if field.bits == 6:
                entry |= (lane[e // 4 * 3 + 2] >> 2 * (e % 4) & 3) << 4
            assert entry == source[row, e]
        check_joined(library, source, field.bits, joined)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_small_entries_of_any_number_share_bytes(library: ctypes.CDLL, bits: int, count: int) -> None:
    source = np.random.default_rng(count).integers(0, 1 << bits, (21, count), np.uint8)
    joined = join_entries(source, bits)
    np.testing.assert_array_equal(split_entries(joined, bits, count), source)
    panels = np.zeros((2, joined.shape[1], 16), np.uint8)
    to_panels(joined, panels)
    check_joined(library, source, bits, panels)


def check_joined(library: ctypes.CDLL, source: Bytes, bits: int, joined: Bytes) -> None:
    """That C++ packs the entries (rows, count) to these panels, and unpacks them."""
    found, back = np.full_like(joined, 0xAA), np.full_like(source, 0x55)
    call(library.pack_joined, source, [bits], source.shape, found)
    assert found.tobytes() == joined.tobytes()
    call(library.unpack_joined, found, [bits], source.shape, back)
    np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q2_K", 2.625), ("q3_K", 3.4375), ("q4_K", 4.5), ("q5_K", 5.5), ("q6_K", 6.5625), ("iq4_xs", 4.25)],
)
def test_small_entries_take_the_bytes_that_they_take_in_files(name: str, bits: float) -> None:
    fmt = formats.get(name)
    assert fmt.bits_per_weight(64, 2048) == bits
    assert JOINED.nbytes(fmt, "f32", 64, 2048) * 8 == bits * 64 * 2048


@pytest.mark.parametrize("name", layouts.names())
def test_bytes_of_sizes_that_no_memory_has_are_exact(name: str) -> None:
    """A product that wrapped at 64 bits gave 0 bytes for 2^70 values: a weight of nothing was read as a table."""
    layout = layouts.get(name)
    for fmt in (*ANY_K, *GROUPED, None):
        for rows, cols in ((1 << 50, 1 << 20), (1 << 40, 1 << 40), (1 << 62, 1 << 62), (3 << 30, 5 << 33)):
            try:
                nbytes = layout.nbytes(fmt, "f32", rows, cols)
            except LayoutError:  # no such format in this layout
                continue
            least = rows * cols * (4 if fmt is None else fmt.bits_per_weight(4096, 4096) / 8)
            assert nbytes >= least * 0.99, (name, fmt, rows, cols)
