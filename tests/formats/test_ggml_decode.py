"""GGUF's block formats: decoders, bytes and declarations against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType

from qcompiler import formats
from qcompiler.formats.diagram import diagram
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.formats.packing import Pieces

NAMES = tuple(name for name, cls in formats.FORMATS.items() if issubclass(cls, GgmlFormat))


def ggml(name: str) -> GgmlFormat:
    found = formats.get(name)
    assert isinstance(found, GgmlFormat)
    return found


def gguf_type(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name.removesuffix("_ggml").upper()]


def random_blocks(name: str, count: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Blocks of random bytes whose fp16 scales are finite numbers, and whose e8m0 scale is not NaN."""
    declaration = formats.get(name).declaration
    raw = np.random.default_rng(seed).integers(0, 256, (count, declaration.record_bytes), np.uint8)
    for f in declaration.fields:
        if f.kind == "f16" and f.packing is not None:  # iq1_m's scale, in four nibbles
            assert isinstance(f.packing, Pieces)
            byte, shift, width = f.packing.pieces[0][-1]
            raw[:, int(f.offset or 0) + byte] &= 0xFF ^ 1 << shift + width - 2
        elif f.kind == "f16":
            high = raw[:, int(f.offset or 0) + 1]
            high[high & 0x7C == 0x7C] &= 0x83
        elif f.kind == "e8m0":
            scale = raw[:, int(f.offset or 0)]
            scale[scale == 255] = 254
    return raw


def test_all_of_ggmls_formats_are_there() -> None:
    assert set(NAMES) == {
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "iq3_s",
        "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq1_0", "tq2_0", "mxfp4_ggml",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_blocks_have_the_sizes_and_the_type_number_of_gguf_files(name: str) -> None:
    fmt = ggml(name)
    assert fmt.ggml_type == gguf_type(name).value
    assert (fmt.block, fmt.declaration.record_bytes) == gguf.GGML_QUANT_SIZES[gguf_type(name)]
    assert fmt.bits_per_weight(3, 1024) == 8 * fmt.declaration.record_bytes / fmt.block


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_bits_of_gguf_for_any_bytes(name: str) -> None:
    fmt, raw = ggml(name), random_blocks(name, 2000)
    packed = formats.from_bytes(fmt, 4, 500 * fmt.block, raw.tobytes())
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw.reshape(4, -1), gguf_type(name))
        decoded = fmt.decode(packed)
    np.testing.assert_array_equal(decoded.view(np.uint32), expected.view(np.uint32))
    assert packed.to_bytes() == raw.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_that_kernels_use_give_the_same_bits(name: str) -> None:
    fmt, raw = ggml(name), random_blocks(name, 300, seed=1)
    packed = formats.from_bytes(fmt, 1, 300 * fmt.block, raw.tobytes())
    split = fmt.declaration.split
    spread = {
        f.name: np.repeat(fmt.entries(packed, f.name), f.covers, axis=1)
        for f in fmt.declaration.fields
        if isinstance(f.covers, int)
    }
    with np.errstate(all="ignore"):
        parts = {g: part.evaluate(spread, fmt.declaration.table_arrays) for g, part in split.per_entry.items()}
        parts["code"] = fmt.declaration.code_values[spread["codes"].view(np.uint8)]
        values = split.per_element.evaluate(parts)
        np.testing.assert_array_equal(values.view(np.uint32), fmt.decode(packed).view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_fields_that_share_bytes_are_stored_one_after_another(name: str) -> None:
    fmt, raw = ggml(name), random_blocks(name, 64, seed=2)
    packed = formats.from_bytes(fmt, 2, 32 * fmt.block, raw.tobytes())
    fields = {f.name: fmt.entries(packed, f.name).reshape(64, -1) for f in fmt.declaration.fields}
    again = formats.from_bytes(fmt, 2, 32 * fmt.block, bytearray(random_blocks(name, 64, seed=3).tobytes()))
    for field, entries in reversed(fields.items()):
        fmt.store(again, 0, {field: entries})
    for field, entries in fields.items():
        np.testing.assert_array_equal(fmt.entries(again, field).reshape(64, -1), entries)
    if name != "tq1_0":  # its bytes have values that no five digits give
        assert again.to_bytes() == packed.to_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_of_the_bytes_accounts_for_all_of_them(name: str) -> None:
    fmt = ggml(name)
    title, *lines = diagram(fmt)
    assert title == f"record of {fmt.declaration.record_bytes} bytes per block of {fmt.block}"
    seen: list[int] = []
    for line in lines:
        where = line.split("  ")[1]
        if ", i < " in where:
            first, count = where.split(", i < ")
            begin, _, step = first.rpartition(" + ") if " + " in first else ("0", "", first)
            period = int(step.removesuffix("i").strip() or 1)
            seen += range(int(begin), int(begin) + period * int(count), period)
        else:
            begin, _, last = where.partition("…")
            seen += range(int(begin), int(last or begin) + 1)
    assert sorted(seen) == list(range(fmt.declaration.record_bytes))


def test_pictures_say_where_pieces_of_entries_lie() -> None:
    assert diagram(formats.get("q4_K"))[3:6] == [
        "  4 + i, i < 4     | scales[i + 4] bits 4…5 | scales[i] |",
        "  8 + i, i < 4     | mins[i + 4] bits 4…5 | mins[i] |",
        "  12 + i, i < 4    | mins[i + 4] bits 0…3 | scales[i + 4] bits 0…3 |",
    ]
    assert diagram(formats.get("nf4")) == [
        "section codes: 32 bytes per block of 64",
        "  i, i < 32  | codes[2 i] | codes[2 i + 1] |",
        "section absmax: fp32 for each 64 elements",
    ]
