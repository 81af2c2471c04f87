"""Every declared format in CPU kernels: fused linears in fp64's bounds, decoded values and embedding rows to the bit.

The cases come from `formats.FORMATS`, so that a new format is met here by being registered.  Stored bytes are made from
random entries of every field, not by encoders: kernels must read whatever a file may hold.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.formats import Field, Format, PackedTensor
from qcompiler.formats.codebook import Vectors
from qcompiler.formats.doc import variants
from qcompiler.formats.packing import Trits
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.linear import packed_format
from qcompiler.kernels.cpu.weights import panel_weight
from qcompiler.kernels.layouts.stored import StoredEntries
from qcompiler.kernels.select import weight_layout
from qcompiler.plan.kernel import DType, FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.linear import LinearKernel

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
PANELS = None
"""The layout that selection gives a format."""

OLDER = "cpu_p16_v1"
"""The layout in panels of every format before cpu_p16_v2: saved programs have it."""

MS = (1, 2, 7, 8, 33)

DENORMAL = 2.0**-125
"""Numbers that bf16 products may take for zero, times factors of tests."""
N = 147
"""Rows of the weights: no multiple of a panel, and more than one block of 128 rows."""

ALL = [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]
RELATIVES = ("iq3_s", "iq2_xs", "iq2_xxs")
"""Formats of which others have the equation, the codes and the packing; the slow tests have them as well."""
BRIEF = [fmt for fmt in ALL if fmt.name not in RELATIVES]
AFTER_OLDER = ("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs")
"""Formats with small entries that no saved program has in the older layout."""


def widths(fmt: Format) -> tuple[int, ...]:
    """Columns to try: three odd blocks where rows are of whole ones, else also a K that is a multiple of nothing."""
    d = fmt.declaration
    if d.tail == "refuse":
        return (3 * int(d.block_size(0) if d.block == "row" else d.block),)
    return (139,) if d.blocking == "row" else (192, 203)


def entries_of(field: Field, count: int, rng: np.random.Generator) -> Array:
    """Random entries as unsigned bits: any code, and scales with which values fit into fp16."""
    if field.kind in ("f16", "bf16", "f32"):
        values = (rng.uniform(0.02, 0.2, count) * rng.choice([-1, 1], count)).astype(np.float32)
        return values.astype(field.dtype).view(f"u{field.dtype.itemsize}")
    if field.kind == "e8m0":
        return rng.integers(122, 130, count, np.uint8)
    if field.kind in ("e4m3", "e5m2"):
        finite = 0x7F if field.kind == "e4m3" else 0x58  # numbers that fp16 holds, times a scale
        found = rng.integers(0, finite, count, np.uint8)
        return found | rng.integers(0, 2, count, np.uint8) << np.uint8(7)
    if isinstance(field.packing, Vectors):
        raw = rng.integers(0, 256, (count // field.packing.entries, field.packing.nbytes), np.uint8)
        return field.packing.unpack(raw).reshape(-1)
    top = 3 if isinstance(field.packing, Trits) else 1 << field.bits
    return rng.integers(0, top, count).astype(np.uint8)


def random_tensor(fmt: Format, rows: int, cols: int, draw: int = 0) -> PackedTensor:
    """A tensor whose every field holds random entries."""
    rng = np.random.default_rng(zlib.crc32(f"{fmt} {rows} {cols}".encode()) + draw)
    packed = fmt.allocate(rows, cols)
    stored = StoredEntries(fmt, rows, cols, packed.data)
    for field in fmt.declaration.fields:
        there = stored.read(field)
        stored.write(field, entries_of(field, there.size, rng).reshape(there.shape))
    return packed


@dataclass
class Case:
    """A weight in a layout: its operand, its bytes, its elements in fp32, and these rounded to its type."""

    name: str
    operand: Operand
    data: Array
    elements: Array
    values: Array


def finite_tensor(fmt: Format, rows: int, cols: int, dtype: DType) -> tuple[PackedTensor, Array]:
    """The first random tensor that stays within the type's range (scales of tensors may lead out of f16's), and its
    elements in fp32."""
    for draw in range(20):
        packed = random_tensor(fmt, rows, cols, draw)
        with np.errstate(over="ignore"):
            values = fmt.decode(packed)
            fits = np.isfinite(values.astype(DTYPES[dtype])).all()
        if fits:
            return packed, values
    raise AssertionError(f"{fmt}: twenty random tensors of {rows} x {cols} beyond {dtype}")


def case_of(fmt: Format, cols: int, dtype: DType, layout: str | None) -> Case:
    packed, elements = finite_tensor(fmt, N, cols, dtype)
    ref = FormatRef(name=fmt.name, params=fmt.params)
    layout = layout or weight_layout("cpu", ref)
    data = layouts.get(layout).pack(fmt, dtype, N, cols, packed.data)
    operand = Operand(name="w", dtype=dtype, access="r", shape=(N, cols), format=ref, layout=layout)
    name = f"{fmt.name}_{zlib.crc32(f'{fmt} {cols} {dtype} {layout}'.encode()):08x}"
    return Case(name, operand, aligned(data), elements, elements.astype(DTYPES[dtype]))


def aligned(data: Array) -> Array:
    """A copy that starts at a multiple of 64 bytes, as weights do in an arena."""
    buffer = np.zeros(data.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]


def cases(dtype: DType, layout: str | None, some: list[Format]) -> Iterator[Case]:
    for fmt in some:
        for cols in widths(fmt):
            yield case_of(fmt, cols, dtype, layout)


def linear(case: Case, m_class: Any) -> KernelSpec:
    n, k = (int(d) for d in case.operand.shape)
    dtype = case.operand.dtype
    operands = (
        Operand(name="x", dtype=dtype, access="r", shape=("m", k), strides=(k, 1)),
        case.operand,
        Operand(name="out", dtype="f32", access="w", shape=("m", n), strides=(n, 1)),
    )
    body = LinearKernel(m="m", n=n, k=k, m_class=m_class, has_bias=False)
    name = f"{case.name}_{m_class.replace('-', '_')}"
    return KernelSpec(name=name, symbols=("m",), operands=operands, body=body)


def check_products(kernels: Any, case: Case, m_class: str, ms: tuple[int, ...]) -> None:
    """x @ w.T against fp64: each product and each addition rounds once, in whatever order; a factor in bf16 once."""
    n, k = case.elements.shape
    w = case.elements.astype(np.float64)
    for m in ms:
        x = np.random.default_rng(m).standard_normal((m, k)).astype(DTYPES[case.operand.dtype])
        out = np.full((m, n), np.nan, np.float32)
        out = kernels.run_both(linear(case, m_class).name, lambda x=x, o=out: [x, case.data, o.copy()], (m,))[2]
        expected = x.astype(np.float64) @ w.T
        terms = np.abs(x.astype(np.float64)) @ np.abs(w.T)
        bound = terms * ((k + 2) * 2.0**-24 + factor_error(case)) + k * DENORMAL
        assert (np.abs(out - expected) <= bound).all(), f"{case.operand.format} at M = {m}, class {m_class}"


def check_values(kernels: Any, case: Case, m_class: str) -> None:
    """x = identity: each output is one weight times 1, plus zeros, so that rounding cannot hide another decode. In bf16
    it is the element, rounded or not, or the code's rounded value times the scale."""
    n, k = case.values.shape
    x, out = np.eye(k).astype(DTYPES[case.operand.dtype]), np.zeros((k, n), np.float32)
    kernels.run(linear(case, m_class).name, [x, case.data, out], (k,))
    wanted = case.elements.T
    if case.operand.dtype != "bf16":
        np.testing.assert_array_equal(out, wanted, str(case.operand.format))
        return
    bound = np.abs(wanted) * factor_error(case) + DENORMAL
    scaled = scales_sums(case.operand)
    if scaled:  # code * scale + offset: a small difference of two numbers, each at most about twice the largest element
        bound = bound + np.abs(wanted).max(0) * 2.0**-22
    assert (np.abs(out - wanted) <= bound).all(), str(case.operand.format)
    if m_class == "large" and k >= 48 and not scaled:
        rounded = wanted.astype(DTYPES["bf16"]).astype(np.float32)
        assert ((out == wanted) | (np.abs(out - rounded) <= DENORMAL)).all(), str(case.operand.format)


def scales_sums(operand: Operand) -> bool:
    """Whether a scale may multiply sums of codes for 48 rows and more, too: bf16_blocks.h's `qb_block_policy`."""
    if operand.format is None or operand.layout is None:
        return False
    n, k = (int(d) for d in operand.shape)
    made = panel_weight(packed_format(operand.format), operand.dtype, n, k, operand.layout).definitions
    if "SCALED = true" not in made:
        return False
    (covers,) = (int(number) for number in re.findall(r" COVERS = (\d+)", made))
    in_planes = re.search(r"typedef \S+ codes;", made) is None
    return not (0 < covers <= 32 and in_planes)


def factor_error(case: Case) -> float:
    """How far off a factor may be: half an ulp of bf16, by processors that multiply these."""
    return 2.0**-8 if case.operand.dtype == "bf16" else 0.0


def best_isa(harness: Any) -> str:
    return [isa for isa in harness.ISAS if harness.runnable(isa)][-1]


def one_of_each() -> list[Format]:
    """Formats of which every field, width and equation occurs once: the first variant of each name, and nested ones."""
    seen: dict[tuple[Any, ...], Format] = {}
    for fmt in BRIEF:
        d = fmt.declaration
        seen.setdefault((d.decode.text, d.codes.kind, d.codes.bits, d.blocking, len(d.fields)), fmt)
    return list(seen.values())


def one_of_each_code() -> list[Format]:
    """Formats of which every kind and width of code occurs once, with a table and without, and q4_K."""
    seen: dict[tuple[Any, ...], Format] = {}
    for fmt in one_of_each():
        d = fmt.declaration
        seen.setdefault((d.codes.kind, d.codes.bits, "table" in d.decode.text, fmt.name == "q4_K"), fmt)
    return list(seen.values())


def build_linears(build: Callable[..., Any], isa: str, made: list[Case], classes: tuple[str, ...]) -> Any:
    return build([linear(case, m_class) for case in made for m_class in classes], isa)


def check_all(build: Callable[..., Any], isa: str, made: list[Case], classes: tuple[str, ...]) -> None:
    kernels = build_linears(build, isa, made, classes)
    for case in made:
        for m_class in classes:
            check_products(kernels, case, m_class, MS)
            check_values(kernels, case, m_class)


def test_every_code_is_decoded_once_for_many_rows(build: Callable[..., Any], harness: Any) -> None:
    """The other equations in `test_every_format_on_every_isa`: each costs a second of the compiler."""
    made = list(cases("bf16", PANELS, one_of_each_code()))
    assert {case.operand.format.name for case in made if case.operand.format} >= {"nf4", "int4", "q4_K", "q6_K"}
    check_all(build, best_isa(harness), made, ("large",))


@pytest.mark.parametrize("made", [one_of_each_code, pytest.param(one_of_each, marks=pytest.mark.slow)])
def test_equations_are_decoded_in_registers_for_few_rows(
    build: Callable[..., Any], harness: Any, made: Callable[[], list[Format]]
) -> None:
    """Of each kind and width of code; in the full run, each equation."""
    check_all(build, best_isa(harness), list(cases("f32", PANELS, made())), ("1",))


def of_two_layouts() -> list[Format]:
    """Formats whose bytes differ between the layouts."""
    older = [fmt for fmt in ALL if fmt.name not in AFTER_OLDER]
    return [f for f in older if weight_layout("cpu", FormatRef(name=f.name, params=f.params)) != OLDER]


@pytest.mark.parametrize("m_class", ["1", pytest.param("large", marks=pytest.mark.slow)])
def test_kernels_of_saved_programs_read_the_layout_that_their_weights_have(
    build: Callable[..., Any], harness: Any, m_class: str
) -> None:
    assert {fmt.name for fmt in of_two_layouts()} >= {"q2_K", "q3_K", "q4_K", "q5_K", "iq4_xs"}
    check_all(build, best_isa(harness), list(cases("f32", OLDER, of_two_layouts())), (m_class,))
    check_rows(build, best_isa(harness), list(cases("f32", OLDER, of_two_layouts())))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_format_on_every_isa(build: Callable[..., Any], isa: str, dtype: DType) -> None:
    check_all(build, isa, list(cases(dtype, PANELS, ALL)), ("1", "2-8", "large"))


@pytest.mark.slow
@pytest.mark.parametrize("name", formats.names())
def test_every_choice_of_every_parameter(build: Callable[..., Any], harness: Any, name: str) -> None:
    cls = formats.FORMATS[name]
    made = list(dict.fromkeys(cls(**{p.name: choice}) for p in cls.parameters for choice in p.choices))
    check_all(build, best_isa(harness), list(cases("f32", PANELS, made)), ("large",))


def test_codes_that_are_no_numbers_decode_to_none(build: Callable[..., Any], harness: Any) -> None:
    """NaN and infinity are looked for in a whole group of columns; their neighbours keep their values."""
    made, expected = [], []
    for name in ("fp8_e4m3", "fp8_e5m2"):
        fmt = formats.get(name)
        packed = random_tensor(fmt, N, 139)
        codes = packed.section("codes").view(np.uint8)
        codes[3, 5], codes[20, 138], codes[40, 7] = 0x7F, 0xFF, 0x7C  # 0x7c is infinity as e5m2, 320 as e4m3
        ref = FormatRef(name=name, params=fmt.params)
        operand = Operand(name="w", dtype="f32", access="r", shape=(N, 139), format=ref, layout=OLDER)
        data = layouts.get(OLDER).pack(fmt, "f32", N, 139, packed.data)
        made.append(Case(name, operand, aligned(data), fmt.decode(packed), fmt.decode(packed)))
        with np.errstate(invalid="ignore"):
            expected.append(fmt.decode(packed) @ np.ones(139, np.float32))
    kernels = build_linears(build, best_isa(harness), made, ("1", "large"))
    for case, sums in zip(made, expected, strict=True):
        for m_class in ("1", "large"):
            out = np.zeros((1, N), np.float32)
            kernels.run(linear(case, m_class).name, [np.ones((1, 139), np.float32), case.data, out], (1,))
            assert np.isnan(out[0, [3, 20]]).all()
            np.testing.assert_allclose(out[0], sums, rtol=1e-3, atol=1e-2)


# --- rows of tables --------------------------------------------------------------------------------------------------


def embedding(case: Case) -> KernelSpec:
    rows, cols = (int(d) for d in case.operand.shape)
    operands = (
        Operand(name="ids", dtype="i64", access="r", shape=("m",), strides=(1,)),
        case.operand,
        Operand(name="out", dtype=case.operand.dtype, access="w", shape=("m", cols), strides=(cols, 1)),
    )
    body = EmbeddingKernel(count="m", rows=rows, cols=cols)
    return KernelSpec(name=case.name, symbols=("m",), operands=operands, body=body)


def check_rows(build: Callable[..., Any], isa: str, made: list[Case]) -> None:
    kernels = build([embedding(case) for case in made], isa)
    ids = np.random.default_rng(0).permutation(N)
    for case in made:
        out = np.zeros((N, case.values.shape[1]), case.values.dtype)
        kernels.run(case.name, [ids, case.data, out], (N,))
        assert out.tobytes() == case.values[ids].tobytes(), f"{case.operand.format} in {case.operand.layout}"


@pytest.mark.parametrize("layout", ["canonical", PANELS], ids=["canonical", "panels"])
def test_rows_of_every_format_equal_the_decoder_to_the_bit(
    build: Callable[..., Any], harness: Any, layout: str | None
) -> None:
    check_rows(build, best_isa(harness), list(cases("f32", layout, BRIEF)))


@pytest.mark.slow
def test_rows_of_narrow_types_on_every_isa(build: Callable[..., Any], isa: str) -> None:
    made = [case for dtype in ("bf16", "f16") for layout in ("canonical", PANELS) for case in cases(dtype, layout, ALL)]
    check_rows(build, isa, made)


# --- texts -----------------------------------------------------------------------------------------------------------


def test_weights_of_one_format_share_their_decoder() -> None:
    """What is instantiated from it is most of what a program's compilation takes."""
    for fmt in one_of_each():
        layout = weight_layout("cpu", FormatRef(name=fmt.name, params=fmt.params))
        narrow, wide = (panel_weight(fmt, "f32", rows, widths(fmt)[0] * 2, layout) for rows in (16, 300))
        assert (narrow.decoder, narrow.definitions) == (wide.decoder, wide.definitions)
        assert narrow.decoder.partition("<")[2].rstrip(">") in narrow.definitions
