"""Every declared format in CUDA kernels: products against float64, decoded values and embedding rows to the bit.

The cases come from `formats.FORMATS` (tests/kernels/test_every_format.py makes them for CPU kernels as well), so that a
new format is met here by being registered.  Formats that nobody ships stand in for what a declaration may say beyond
those: groups of odd sizes, codes of 7 bits, tables of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.formats import Field, Format
from qcompiler.formats.base import Encoding, Numerics
from qcompiler.formats.declaration import Declaration
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.packing import Packing, stream
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import linear, linear_mma, weights
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.kernels.layouts.panels import plane_name, planes
from qcompiler.plan.kernel import KernelSpec

every = load("tests/kernels/test_every_format.py")
Array = npt.NDArray[Any]
T16 = layouts.get(weights.LAYOUT)
DEFAULTS = [cls() for cls in formats.FORMATS.values()]
BRIEF = [fmt for fmt in DEFAULTS if fmt.name not in every.RELATIVES]
MS: dict[str, tuple[int, ...]] = {"1": (1, 2, 33), "2-8": (1, 2, 7, 8), "9-64": (33,), "large": (33, 70)}
N = every.N


# --- formats that nobody ships ----------------------------------------------------------------------------------------


class _Odd(Format):
    """``value(codes) * scales``: a table of the codes' values, or integers."""

    fields: tuple[Field, Field]
    block: int
    blocking: Any = "row"
    tail: Any = "refuse"
    values: tuple[float, ...] | None = None
    equation = "table[codes] * scales"

    def declare(self) -> Declaration:
        return Declaration(
            summary="a test's",
            block=self.block,
            blocking=self.blocking,
            tail=self.tail,
            fields=self.fields,
            decode=Equation(self.equation),
            numerics=Numerics("-", "-", "-", "-", "-"),
            reference="-",
            table=self.values,
        )

    def _encode_tile(self, job: Encoding, start: int, tile: Float32) -> None:
        raise NotImplementedError("tests make its bytes")


def odd(
    name: str, bits: int, scale: tuple[Any, int], block: int, *, packing: Packing | None = None, **other: Any
) -> type[Format]:
    fields = (Field("codes", "uint", bits, packing=packing), Field("scales", *scale, covers=block))
    return type(name, (_Odd,), {"name": name, "fields": fields, "block": block, **other})


def curve(count: int) -> tuple[float, ...]:
    """Values of codes that no arithmetic gives."""
    return tuple(float(np.float32(np.sin(i + 0.5))) for i in range(count))


ODD = [
    odd("eights_of_256_values", 8, ("bf16", 16), 8, tail="short", values=curve(256)),
    odd("forty_eights_of_32_values", 5, ("e5m2", 8), 48, packing=stream(5, 48), values=curve(32)),
    odd("sixty_fours_of_8_values", 3, ("e4m3", 8), 64, packing=stream(3, 64), values=curve(8)),
    odd("seven_bits", 7, ("f16", 16), 64, packing=stream(7, 64), equation="(codes - 50) * scales"),
    odd("one_bit", 1, ("f16", 16), 64, equation="(codes - 1) * scales"),
    odd("stream_of_24", 4, ("e4m3", 8), 24, blocking="flat", tail="short", equation="(codes - 3) * scales"),
    odd("stream_of_8", 4, ("f32", 32), 8, blocking="flat", tail="short", values=curve(16)),
]
ODD_COLUMNS = {"eights_of_256_values": 139, "forty_eights_of_32_values": 144, "stream_of_24": 101, "stream_of_8": 101}


@pytest.fixture
def odd_formats(monkeypatch: pytest.MonkeyPatch) -> list[Format]:
    for cls in ODD:
        monkeypatch.setitem(formats.FORMATS, cls.name, cls)
    return [cls() for cls in ODD]


# --- products and values ----------------------------------------------------------------------------------------------


def cases(dtype: Any, some: Iterable[Format]) -> list[Any]:
    with np.errstate(over="ignore"):
        return list(every.cases(dtype, weights.LAYOUT, list(some)))


def in_range(w: Array) -> Array:
    """Rows without a weight beyond fp16, which random scales may make: most of them."""
    finite: Array = np.isfinite(w).all(axis=1)
    assert finite.mean() > 0.7
    return finite


def check_products(module: Any, case: Any, m_class: str, m: int) -> None:
    """x @ w.T against float64: each product and each addition rounds once, in whatever order."""
    n, k = case.values.shape
    x = np.random.default_rng(m).standard_normal((m, k)).astype(every.DTYPES[case.operand.dtype])
    out = np.zeros((m, n), np.float32)
    (out,) = module.run(every.linear(case, m_class).name, [x, case.data, out], {"m": m})
    w = case.values.astype(np.float64)
    finite = in_range(w)
    w, out = w[finite], out[:, finite]
    error, bound = np.abs(out - x.astype(np.float64) @ w.T), np.abs(x.astype(np.float64)) @ np.abs(w.T)
    assert (error <= bound * (k + 2) * 2.0**-23).all(), f"{case.operand.format} at M = {m}, class {m_class}"


def check_values(module: Any, case: Any, m_class: str) -> None:
    """x = identity: each output is one weight times 1, plus zeros, so that rounding cannot hide another decode."""
    n, k = case.values.shape
    x, out = np.eye(k).astype(every.DTYPES[case.operand.dtype]), np.zeros((k, n), np.float32)
    (out,) = module.run(every.linear(case, m_class).name, [x, case.data, out], {"m": k})
    finite = in_range(case.values)
    np.testing.assert_array_equal(out[:, finite], case.values[finite].T.astype(np.float32), str(case.operand.format))


def check(
    sim_module: Callable[..., Any], made: Sequence[Any], classes: Sequence[str], arch: str = "sm_80", **how: Any
) -> None:
    module = sim_module([every.linear(case, m_class) for case in made for m_class in classes], arch, **how)
    for case in made:
        for m_class in classes:
            for m in MS[m_class]:
                check_products(module, case, m_class, m)
            check_values(module, case, m_class)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_code_by_warpgroups(sim_module: Callable[..., Any], dtype: str) -> None:
    made = cases(dtype, every.one_of_each_code())
    assert {linear.decision_of(every.linear(case, "large"), "sm_90a").key for case in made} == {"wgmma"}
    check(sim_module, made, ("large",), "sm_90a", checked=False)


def test_every_format_with_few_rows_on_cuda_cores(sim_module: Callable[..., Any]) -> None:
    check(sim_module, cases("f32", BRIEF), ("2-8",), checked=False)


def test_every_code_with_more_rows_on_tensor_cores(sim_module: Callable[..., Any]) -> None:
    made = cases("bf16", every.one_of_each_code())
    assert {linear.engine_of(every.linear(case, "9-64"), "sm_80") for case in made} == {"mma"}
    check(sim_module, made, ("9-64",), checked=False)


def test_what_a_declaration_may_say_beyond_the_registry(
    sim_module: Callable[..., Any], odd_formats: list[Format], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(every, "widths", lambda fmt: (ODD_COLUMNS.get(fmt.name, 192),))
    nf4 = formats.get("nf4", block=32)
    made = cases("bf16", odd_formats)
    monkeypatch.setattr(every, "widths", lambda fmt: (97,))
    made += cases("bf16", [nf4])  # a chunk of 64 columns meets three blocks, elsewhere in each row
    engines = {case.operand.format.name: linear.engine_of(every.linear(case, "9-64"), "sm_80") for case in made}
    assert {name for name, engine in engines.items() if engine == "fma"} == {
        "eights_of_256_values", "forty_eights_of_32_values", "stream_of_24", "stream_of_8",
    }  # fmt: skip
    check(sim_module, made, ("2-8", "9-64"))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", "f32"), ("sm_80", "bf16"), ("sm_75", "f16"), ("sm_70", "f16")])
@pytest.mark.parametrize("name", formats.names())
def test_every_format_type_class_and_m(sim_module: Callable[..., Any], name: str, arch: str, dtype: str) -> None:
    check(sim_module, cases(dtype, [fmt for fmt in every.ALL if fmt.name == name]), tuple(MS), arch)


@pytest.mark.slow
@pytest.mark.parametrize("name", formats.names())
def test_every_choice_of_every_parameter(sim_module: Callable[..., Any], name: str) -> None:
    cls = formats.FORMATS[name]
    made = cases("bf16", dict.fromkeys(cls(**{p.name: choice}) for p in cls.parameters for choice in p.choices))
    check(sim_module, made, ("2-8", "9-64"), checked=False)


def test_codes_past_the_last_column_are_no_weights(sim_module: Callable[..., Any]) -> None:
    """NF4's code 0 is -absmax, beyond fp16 here; that infinity must not meet the zeros that fill up x."""
    fmt = formats.get("nf4")
    made = [every.case_of(fmt, 77, "f16", weights.LAYOUT)]
    packed = fmt.encode(np.where(np.arange(77) == 70, 7e4, 0.5)[None].repeat(N, 0).astype(np.float32))
    data = T16.pack(fmt, "f16", N, 77, packed.data)
    specs = [every.linear(made[0], m_class) for m_class in ("2-8", "9-64")]
    module = sim_module(specs, "sm_70")  # both on CUDA cores
    for spec in specs:
        (out,) = module.run(spec.name, [np.ones((9, 77), np.float16), data, np.zeros((9, N), np.float32)], {"m": 9})
        assert np.isposinf(out).all()


def test_codes_that_are_no_numbers_decode_to_none(sim_module: Callable[..., Any]) -> None:
    for name in ("fp8_e4m3", "fp8_e5m2"):
        fmt = formats.get(name)
        packed = every.random_tensor(fmt, N, 139)
        codes = packed.section("codes").view(np.uint8)
        codes[3, 5], codes[20, 138] = 0x7F, 0xFF
        case = every.case_of(fmt, 139, "bf16", weights.LAYOUT)
        specs = [every.linear(case, m_class) for m_class in ("2-8", "9-64")]
        module = sim_module(specs, "sm_80")
        data = T16.pack(fmt, "bf16", N, 139, packed.data)
        for spec in specs:
            x = np.ones((9, 139), every.DTYPES["bf16"])
            (out,) = module.run(spec.name, [x, data, np.zeros((9, N), np.float32)], {"m": 9})
            assert np.isnan(out[:, [3, 20]]).all()
            assert np.isfinite(np.delete(out, [3, 20], axis=1)).all()


# --- embeddings -------------------------------------------------------------------------------------------------------


def embedding(case: Any) -> KernelSpec:
    spec = every.embedding(case)
    return msgspec.structs.replace(spec, name=f"{spec.name}_{'t' if case.operand.layout == weights.LAYOUT else 'c'}")


def check_rows(sim_module: Callable[..., Any], made: Sequence[Any]) -> None:
    module = sim_module([embedding(case) for case in made])
    ids = np.array([0, N - 1, 7, 15, 16, 127, 128])
    for case in made:
        out = np.zeros((len(ids), case.values.shape[1]), case.values.dtype)
        (got,) = module.run(embedding(case).name, [ids, case.data, out], {"m": len(ids)})
        assert got.tobytes() == case.values[ids].tobytes(), f"{case.operand.format} in {case.operand.layout}"


def test_rows_of_every_format_equal_the_decoder_to_the_bit(
    sim_module: Callable[..., Any], odd_formats: list[Format], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts_and_types = (("canonical", "f32"), (weights.LAYOUT, "bf16"))
    made = [case for layout, dtype in layouts_and_types for case in every.cases(dtype, layout, every.BRIEF)]
    monkeypatch.setattr(every, "widths", lambda fmt: (ODD_COLUMNS.get(fmt.name, 192),))
    made += [case for layout, dtype in layouts_and_types for case in every.cases(dtype, layout, odd_formats)]
    check_rows(sim_module, made)


@pytest.mark.slow
def test_rows_of_every_type(sim_module: Callable[..., Any]) -> None:
    layouts_and_types = (("canonical", "bf16"), ("canonical", "f16"), (weights.LAYOUT, "f32"), (weights.LAYOUT, "f16"))
    check_rows(sim_module, [c for layout, dtype in layouts_and_types for c in every.cases(dtype, layout, every.ALL)])


# --- layout -----------------------------------------------------------------------------------------------------------


def code_at(sections: dict[str, Array], bits: int, row: int, k: int) -> int:
    """The code of (row, k) as the layout's description has it: written apart from `pack`, one element at a time."""
    panel, g, upper = row // 16, row % 8, row % 16 // 8
    tile, inside = divmod(k, 32 if bits == 8 else 64)
    piece, t, h = inside // 16, inside % 8 // 2, inside % 2
    pair = upper + 2 * (inside % 16 // 8)
    code = 0
    for shift, width in planes(bits):
        lane = sections[plane_name(shift)][panel, tile, 4 * g + t]
        if width == 8:
            found = int(lane[2 * piece + pair // 2]) >> 8 * (2 * (pair % 2) + h)
        else:
            word, place = divmod(4 * piece + pair, 16 // width)
            found = int(lane[word]) >> width * place + 16 * h
        code |= (found & (1 << width) - 1) << shift
    return code


def code_of_a_trellis_at(sections: dict[str, Array], bits: int, row: int, k: int) -> int:
    """The same for a trellis, from the stream of the 16 codes of a row that a lane owns."""
    lane, half = row % 8 * 4 + k % 8 // 2, row % 16 // 8
    place = k % 64 // 16 * 4 + k % 16 // 8 * 2 + k % 2
    words = sections["codes"][row // 16, k // 64, lane]
    if bits == 4:
        return int(words[place // 4]) >> (16 * half + place % 4 * 4) & 15
    stream = int(words[half])
    if bits == 3:
        stream |= (int(sections["codes_2"][row // 16, k // 64, lane, 0]) >> 16 * half & 0xFFFF) << 32
    return stream >> bits * place & ((1 << bits) - 1)


@pytest.mark.parametrize("fmt", every.ALL, ids=str)
def test_codes_lie_where_their_lane_loads_them_and_give_back_every_byte(fmt: Format) -> None:
    for cols in every.widths(fmt):
        packed = every.random_tensor(fmt, 35, cols)
        data = T16.pack(fmt, "bf16", 35, cols, packed.data)
        assert T16.unpack(fmt, "bf16", 35, cols, data).tobytes() == packed.data.tobytes()
        sections = {
            s.name: data[s.offset : s.offset + s.nbytes].view(s.dtype).reshape(s.shape)
            for s in T16.sections(fmt, "bf16", 35, cols)
        }
        codes = np.ascontiguousarray(fmt.entries(packed, fmt.declaration.codes.name)).view(np.uint8)
        codes = codes.reshape(-1)[: 35 * cols].reshape(35, cols)
        for row in (0, 7, 8, 17, 34):
            for k in {*range(0, cols, 11), cols - 1}:
                found = code_at if fmt.declaration.trellis is None else code_of_a_trellis_at
                assert found(sections, fmt.declaration.codes.bits, row, k) == codes[row, k], (row, k)


# --- what is emitted --------------------------------------------------------------------------------------------------


def test_exact_products_become_one_fma_and_others_do_not() -> None:
    folded = {"int4", "int3", "int2", "q4_0", "q5_0", "q3_K", "q6_K", "tq1_0", "tq2_0"}
    sums = {"q4_1", "q5_1", "q2_K", "q4_K", "q5_K"}
    for fmt in DEFAULTS:
        case = every.case_of(fmt, every.widths(fmt)[0], "bf16", weights.LAYOUT)
        text = weights.weight_of("k", case.operand).definitions
        assert ("return fmaf(biased, " in text) == (fmt.name in folded), fmt
        assert ("return fmaf(biased - " in text) == (fmt.name in sums), fmt


def test_pairs_are_decoded_at_once_where_that_is_exact() -> None:
    """In bf16 and f16, where an element is one f16 scale times a small integer; in fp32 never."""
    paired = {"int4", "int3", "int2", "q4_0", "q5_0", "tq1_0", "tq2_0"}
    for fmt in DEFAULTS:
        for dtype in every.DTYPES:
            case = every.case_of(fmt, 768, dtype, weights.LAYOUT)
            text = weights.weight_of("k", case.operand).definitions
            assert ("pairs = true" in text) == (fmt.name in paired and dtype != "f32"), (fmt, dtype)


@pytest.mark.parametrize("span", [range(-8, 8), range(-15, 16), range(-16, 16)], ids=["int4", "zero points", "q5_0"])
def test_pairs_have_the_bits_of_decoding_for_every_scale_and_code(span: range) -> None:
    """What weights.py claims of `q * high + (q * low)`: every step but the last is exact, and the last rounds once."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)].astype(np.float32)
    high = (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    low = scales - high
    assert np.array_equal(low.astype(ml_dtypes.bfloat16).astype(np.float32), low), "the rest is a bf16"
    for q in np.array(span, np.float32):
        part = q * low
        assert np.array_equal(part.astype(ml_dtypes.bfloat16).astype(np.float32), part), "q * low is exact"
        total = q.astype(np.float64) * high + part
        assert np.array_equal(total.astype(np.float32), total), "fp32 holds the sum, so that bf16 rounds it once"
        made, want = total.astype(np.float32).astype(ml_dtypes.bfloat16), (q * scales).astype(ml_dtypes.bfloat16)
        assert np.array_equal(made.astype(np.float32), want.astype(np.float32))


def test_entries_are_computed_once_and_elements_by_what_is_left() -> None:
    text = weights.weight_of("k", every.case_of(formats.get("q4_K"), 768, "bf16", weights.LAYOUT).operand).definitions
    assert "{{(qc_float(e.d) * qc_float(e.scales)), (qc_float(e.dmin) * qc_float(e.mins))}}" in text
    assert "float element(float code, const parts& p) { return ((p.of[0] * code) - p.of[1]); }" in text


def compiles(nvrtc: Callable[..., Any], arch: str, dtype: str, some: Sequence[Format], classes: Sequence[str]) -> None:
    specs = [every.linear(case, m_class) for case in cases(dtype, some) for m_class in classes]
    for name, used in nvrtc(specs, arch).items():
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0), (name, arch, used)


@pytest.mark.parametrize(
    ("arch", "m_class"), [pytest.param("sm_75", "2-8", marks=pytest.mark.slow), ("sm_90a", "9-64")]
)
def test_every_format_compiles_without_spills(nvrtc: Callable[..., Any], arch: str, m_class: str) -> None:
    """Half of the formats on an old architecture, the others on a new one."""
    some = every.one_of_each()[arch != "sm_75" :: 2]
    compiles(nvrtc, arch, "f16" if arch == "sm_75" else "bf16", some, (m_class,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_format_and_class_compiles_without_spills(nvrtc: Callable[..., Any], arch: str, dtype: str) -> None:
    compiles(nvrtc, arch, dtype, every.ALL, tuple(MS))


def test_no_format_is_refused() -> None:
    for fmt in every.ALL:
        for dtype in ("f32", "bf16", "f16"):
            with np.errstate(over="ignore"):
                case = every.case_of(fmt, every.widths(fmt)[-1], dtype, weights.LAYOUT)
            for m_class in MS:
                assert emit_kernel(every.linear(case, m_class), "sm_80").engine in ("fma", "mma")
    assert linear_mma.takes(weights.weight_of("k", case.operand))
