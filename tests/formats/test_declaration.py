"""What follows from a declaration: sections, sizes, the generic decoder, errors; and the registry."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError, UnknownFormatError
from qcompiler.formats import Declaration, Field, Format, Numerics, PackedTensor
from qcompiler.formats.base import Encoding
from qcompiler.formats.doc import pages, variants
from qcompiler.formats.equation import Equation

ALL = [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]
IDS = [str(f) for f in ALL]
LONG = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq")
"""Formats that NumPy compares with every vector of a codebook, or with every window of a trellis: large matrices of
them are for the full run."""
BRIEF = [pytest.param(f, marks=[pytest.mark.slow] * (f.name in LONG), id=str(f)) for f in ALL]


# --- sections and sizes ---


def test_nf4_sections_of_a_small_odd_matrix() -> None:
    codes, absmax = formats.get("nf4", block=64).sections(3, 43)  # 129 elements
    assert (codes.name, codes.dtype.name, codes.shape, codes.offset, codes.nbytes) == ("codes", "uint8", (65,), 0, 65)
    assert (absmax.name, absmax.dtype.name, absmax.shape, absmax.offset) == ("absmax", "float32", (3,), 68)
    assert formats.get("nf4").nbytes(3, 43) == 80


def test_int4_sections_with_zero_points() -> None:
    sections = formats.get("int4", group=32, symmetric=False).sections(5, 96)
    assert [(s.name, s.dtype.name, s.shape, s.offset) for s in sections] == [
        ("codes", "uint8", (5, 48), 0),
        ("scales", "float16", (5, 3), 240),
        ("zeros", "uint8", (5, 3), 270),
    ]


def test_int8_sections_align_scales_after_odd_rows() -> None:
    codes, scales = formats.get("int8").sections(3, 7)
    assert (codes.dtype.name, codes.shape) == ("int8", (3, 7))
    assert (scales.dtype.name, scales.shape, scales.offset, scales.nbytes) == ("float32", (3, 1), 24, 12)


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        (formats.get("nf4"), 4.5),
        (formats.get("nf4", block=4096), 4 + 32 / 4096),
        (formats.get("int8"), 8 + 32 / 4096),
        (formats.get("int4"), 4.5),
        (formats.get("int4", group=128, symmetric=False), 4 + 24 / 128),
    ],
    ids=str,
)
def test_bits_per_weight_counts_every_stored_bit(fmt: Format, bits: float) -> None:
    assert fmt.bits_per_weight(4096, 4096) == bits
    assert fmt.encode(np.ones((64, 4096), np.float32)).data.size * 8 == fmt.bits_per_weight(64, 4096) * 64 * 4096


@given(rows=st.integers(1, 10**6), cols=st.integers(1, 10**6))
def test_sections_never_overlap_and_fill_the_tensor(rows: int, cols: int) -> None:
    for fmt in ALL:
        if fmt.declaration.tail == "refuse" and cols % fmt.declaration.block_size(cols):
            continue
        end = 0
        for s in fmt.sections(rows, cols):
            assert end <= s.offset < end + s.dtype.itemsize
            assert s.offset % s.dtype.itemsize == 0
            assert s.nbytes == int(np.prod(s.shape)) * s.dtype.itemsize
            end = s.offset + s.nbytes
        assert end == fmt.nbytes(rows, cols)


def test_more_than_two_gibi_elements_do_not_overflow() -> None:
    assert formats.get("nf4").nbytes(2**20, 2**16) == 2**35 + 2**30 * 4
    assert formats.get("int8").nbytes(2**20, 2**16) == 2**36 + 2**22


# --- values ---


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_bytes_round_trip_without_a_copy(fmt: Format) -> None:
    packed = fmt.encode(np.random.default_rng(0).standard_normal((9, 256)).astype(np.float32))
    again = formats.from_bytes(fmt, 9, 256, packed.to_bytes())
    np.testing.assert_array_equal(fmt.decode(again), fmt.decode(packed))
    assert np.shares_memory(formats.from_bytes(fmt, 9, 256, packed.data).data, packed.data)


def _keeps_its_values(fmt: Format) -> bool:
    """True where a block's largest value is stored exactly and sets the scale, so that encoding again finds the same.

    Not so for asymmetric integers, whose scale shrinks when the ends of the range were not hit exactly, nor for nested
    statistics.
    """
    largest_sets_the_scale = ("nf4", "fp4", "int8", "int4", "int3", "int2", "llm_int8")
    return fmt.name in largest_sets_the_scale and fmt.params.get("symmetric", True) and "double_quant" not in fmt.params


@pytest.mark.parametrize("fmt", [f for f in ALL if _keeps_its_values(f)], ids=str)
def test_decoding_then_encoding_again_changes_no_value(fmt: Format) -> None:
    values = fmt.decode(fmt.encode(np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)))
    np.testing.assert_array_equal(fmt.decode(fmt.encode(values)), values)


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_every_input_dtype_encodes_as_its_float32_value(fmt: Format, dtype: Any) -> None:
    weights = np.random.default_rng(0).standard_normal((7, 256)).astype(dtype)
    assert fmt.encode(weights).to_bytes() == fmt.encode(weights.astype(np.float32)).to_bytes()


@pytest.mark.parametrize("fmt", BRIEF)
def test_transposed_and_sliced_weights_encode_as_their_copies(fmt: Format) -> None:
    base = np.random.default_rng(0).standard_normal((256, 600)).astype(np.float32)
    for view in (base.T[:300], base[::3, 5:261]):
        assert fmt.encode(view).to_bytes() == fmt.encode(view.copy()).to_bytes()


@pytest.mark.parametrize("fmt", BRIEF)
def test_encoding_takes_at_most_the_output_and_a_few_tiles(fmt: Format) -> None:
    weights = np.ones((1024, 2048), np.float32)  # a copy of all of it takes 8 MB
    fmt.encode(weights[:8])
    tracemalloc.start()
    packed = fmt.encode(weights)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < packed.data.size + (4 << 20)


@pytest.mark.parametrize("fmt", BRIEF)
@pytest.mark.parametrize("shape", [(33, 256), (7, 768), pytest.param((129, 256), marks=pytest.mark.slow)])
def test_bytes_do_not_depend_on_threads_nor_on_whose_memory_they_are_written_to(
    fmt: Format, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 256)
    weights = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    out = np.zeros(fmt.nbytes(*shape) + 64, np.uint8)[64:]
    packed = fmt.encode(weights, out=out, threads=5)
    assert packed.data is out
    assert packed.to_bytes() == fmt.encode(weights).to_bytes()


def test_a_short_last_block_is_encoded_alike_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 64)
    weights = np.random.default_rng(0).standard_normal((37, 31)).astype(np.float32)
    for threads in (2, 3, 8):
        assert (
            formats.get("nf4").encode(weights, threads=threads).to_bytes()
            == formats.get("nf4").encode(weights).to_bytes()
        )


def test_of_several_bad_values_the_first_is_named_whatever_thread_met_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompiler.formats.base.THREAD_SHARE", 256)
    weights = np.ones((64, 128), np.float32)
    weights[20, 3] = weights[50, 7] = np.nan
    with pytest.raises(FormatValueError, match="row 20, column 3"):
        formats.get("int8").encode(weights, threads=4)


@pytest.mark.parametrize("fmt", BRIEF)
@pytest.mark.parametrize(
    ("bad", "place"),
    [(np.nan, (0, 0)), (np.inf, (700, 77)), (-np.inf, (999, 255))]
    + [
        pytest.param(bad, place, marks=pytest.mark.slow)
        for bad in (np.nan, np.inf, -np.inf) for place in ((0, 0), (700, 77), (999, 255))
    ],
)  # fmt: skip
def test_a_value_that_is_not_finite_is_named_by_row_and_column(fmt: Format, bad: float, place: tuple[int, int]) -> None:
    weights = np.ones((1000, 256), np.float32)
    weights[place] = bad
    with pytest.raises(FormatValueError, match=f"row {place[0]}, column {place[1]} is {bad}"):
        fmt.encode(weights)


def test_nan_in_the_short_last_block_is_named() -> None:
    weights = np.ones((3, 43), np.float32)
    weights[2, 42] = np.nan
    with pytest.raises(FormatValueError, match="row 2, column 42"):
        formats.get("nf4").encode(weights)


def test_float64_beyond_fp32_is_an_error_that_says_so() -> None:
    with pytest.raises(FormatValueError, match=r"row 0, column 1 is 1e\+300, which exceeds the range of fp32"):
        formats.get("int8").encode(np.array([[1.0, 1e300]]))


def test_wrong_rank_dtype_and_emptiness_are_refused() -> None:
    fmt = formats.get("nf4")
    with pytest.raises(FormatShapeError, match=r"shape \(2, 3, 4\)"):
        fmt.encode(np.zeros((2, 3, 4), np.float32))
    with pytest.raises(FormatShapeError, match="empty"):
        fmt.encode(np.zeros((0, 4), np.float32))
    with pytest.raises(FormatValueError, match="int64"):
        fmt.encode(np.zeros((2, 4), np.int64))


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    fmt = formats.get("int8")
    with pytest.raises(FormatError, match="takes 44 bytes, and the buffer has 43"):
        formats.from_bytes(fmt, 4, 7, bytes(43))
    with pytest.raises(FormatError, match="44 bytes"):
        PackedTensor(fmt, 4, 7, np.zeros(45, np.uint8))


def test_a_tensor_of_another_format_is_not_decoded() -> None:
    packed = formats.get("nf4", block=64).encode(np.ones((2, 64), np.float32))
    with pytest.raises(FormatError, match=r"block=128.*block=64"):
        formats.get("nf4", block=128).decode(packed)
    with pytest.raises(FormatError, match="no section 'scales'; it has codes, absmax"):
        packed.section("scales")


# --- the registry ---


def test_unknown_names_and_parameters_list_the_choices() -> None:
    with pytest.raises(UnknownFormatError, match=r"'nf5'.*did you mean 'nf4'.*nf4, int8, int4"):
        formats.get("nf5")
    with pytest.raises(UnknownFormatError, match="no parameter 'group'; it takes: block"):
        formats.get("nf4", group=64)
    with pytest.raises(UnknownFormatError, match="no parameter 'block'; it takes: group, symmetric, scale"):
        formats.get("int8", block=64)
    with pytest.raises(UnknownFormatError, match="block=96 is not one of 32, 64, 128, 256"):
        formats.get("nf4", block=96)
    with pytest.raises(UnknownFormatError, match="symmetric=1 is not one of True, False"):
        formats.get("int4", symmetric=1)


def test_defaults_are_part_of_a_formats_identity() -> None:
    assert formats.get("nf4") == formats.get("nf4", block=64)
    assert hash(formats.get("nf4")) == hash(formats.get("nf4", block=64))
    assert formats.get("nf4") != formats.get("nf4", block=128)
    assert formats.names()[:3] == ("nf4", "int8", "int4")


def test_parameters_that_came_later_leave_names_and_files_as_they_were() -> None:
    """At their defaults they are not part of `params`, of the text, nor of what a saved program holds."""
    assert formats.get("int4").params == {"group": 32, "symmetric": True}
    assert formats.get("nf4").params == {"block": 64}
    assert formats.get("int8").params == {}
    assert str(formats.get("int8", group="row", symmetric=True, scale="fp32")) == "int8()"
    assert formats.get("int4", scale="fp16") == formats.get("int4")
    assert hash(formats.get("nf4", double_quant=False)) == hash(formats.get("nf4"))
    assert formats.get("nf4", double_quant=True) != formats.get("nf4")
    assert formats.get("int4", scale="fp32").params == {"group": 32, "symmetric": True, "scale": "fp32"}
    assert formats.get("int4").setting("scale") == "fp16"


def test_importing_formats_pulls_in_neither_torch_nor_xdsl() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['xdsl'] = None\n"
        "import numpy, qcompiler.formats as f, qcompiler.formats.doc, qcompiler.kernels.layouts\n"
        "fmt = f.get('nf4'); print(fmt.decode(fmt.encode(numpy.ones((2, 3), 'f4'))).sum())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "6.0", done.stderr


# --- the declaration itself ---


NO_RULES = Numerics("", "", "", "", "")


class Interleaved(Format):
    """A format that only decodes: fields alternate inside a record per block, as in GGUF's files."""

    name = "interleaved"
    parameters = ()

    def declare(self) -> Declaration:
        return Declaration(
            summary="test",
            block=32,
            blocking="row",
            tail="refuse",
            fields=(
                Field("d", "f16", 16, covers=32, offset=0),
                Field("sub", "uint", 4, covers=8, offset=2),
                Field("codes", "uint", 2, offset=4, order="high_first"),
            ),
            decode=Equation("(codes - 2) * (d * sub)"),
            numerics=NO_RULES,
            reference="",
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Any) -> None:
        raise NotImplementedError


def test_an_interleaved_declaration_with_two_levels_of_scales_decodes() -> None:
    fmt = Interleaved()
    assert fmt.declaration.record_bytes == 12
    (section,) = fmt.sections(3, 64)
    assert (section.name, section.shape, fmt.nbytes(3, 64)) == ("blocks", (3, 2, 12), 72)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 72, np.uint8)
    records = data.reshape(6, 12)
    scales = rng.standard_normal(6).astype(np.float16)
    records[:, :2] = scales.view(np.uint8).reshape(6, 2)
    decoded = fmt.decode(formats.from_bytes(fmt, 3, 64, data)).reshape(6, 32)
    for b in range(6):
        for e in range(32):
            sub = records[b, 2 + e // 16] >> 4 * (e // 8 % 2) & 15
            code = records[b, 4 + e // 4] >> 2 * (3 - e % 4) & 3
            assert decoded[b, e] == np.float32(int(code) - 2) * (np.float32(scales[b]) * np.float32(sub))


@pytest.mark.parametrize("text", ["codes // scale", "f(codes)", "codes + (1, 2)", "codes ** 2", "-codes", "codes[1]"])
def test_equations_outside_the_grammar_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="outside the grammar"):
        Equation(text)


def _declare(**changes: Any) -> Declaration:
    page: dict[str, Any] = {
        "summary": "",
        "block": 32,
        "blocking": "row",
        "tail": "refuse",
        "fields": (Field("codes", "uint", 4), Field("scales", "f16", 16, covers=32)),
        "decode": Equation("codes * scales"),
        "numerics": NO_RULES,
        "reference": "",
    }
    return Declaration(**{**page, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode": Equation("codes * scale")}, "does not read exactly"),
        ({"table": (0.0, 1.0)}, "does not read exactly"),
        ({"fields": (Field("scales", "f16", 16, covers=32),)}, "exactly one field of codes"),
        ({"block": "row"}, "whole bytes"),
        ({"block": 16}, "do not fill whole bytes"),
        ({"fields": (Field("codes", "uint", 4, offset=0), Field("scales", "f16", 16, covers=32))}, "either every"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _declare(**changes)


def test_a_field_of_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="no 3-bit uint"):
        Field("codes", "uint", 3)


def test_the_pages_of_formats_are_what_the_declarations_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for path, text in pages().items():
        assert (docs / path).read_text() == text, f"docs/{path} is old; run: make docs"
    assert {f"formats/{page.name}" for page in (docs / "formats").iterdir()} == pages().keys() - {"formats.md"}


def test_every_format_is_on_one_page() -> None:
    for name in formats.FORMATS:
        assert sum(f"\n## {name}\n" in text for text in pages().values()) == 1, name
