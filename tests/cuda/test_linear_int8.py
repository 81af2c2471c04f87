"""Products of codes and rows of int8 on the device, to the bit what formats/integer_product.py says; both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import int8_rows, integer_product
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import int8_tile, linear_int8_tiles
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.kernels.cuda.weights import LAYOUT
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel

cases = load("tests/kernels/test_linear_int8.py")
CLASSES = {"2-8": (1, 2, 7, 8, 33), "large": (1, 33, 65), "9-64": (33,)}
ENGINES = {"sm_70": "dp4a", "sm_75": "mma", "sm_90a": "mma"}
FAST = ("int8", "int8_odd", "int4_zeros", "q4_K", "q6_K", "mxfp4")


def linear_spec(case: str, m_class: Any) -> KernelSpec:
    import msgspec

    spec = cases.linear_spec(case, LAYOUT)
    body = msgspec.structs.replace(spec.body, m_class=m_class)
    return msgspec.structs.replace(spec, name=f"{spec.name}_{m_class.replace('-', '_')}", body=body)


def check_products(run: Callable[..., Any], case: str, m_class: str, ms: tuple[int, ...]) -> None:
    packed, (_, _, n, k, dtype) = cases.packed_weight(case), cases.WEIGHTS[case]
    data = layouts.get(LAYOUT).pack(packed.format, "f32", n, k, packed.data)
    bias = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    name = linear_spec(case, m_class).name
    for m in ms:
        rows = int8_rows.quantise(cases.activations(m, k, m), "token", 0.0, None)
        (out,) = run(name, [rows, data, bias, np.zeros((m, n), cases.DTYPES[dtype])], [m])
        assert cases.same_bits(out, cases.expected(case, packed, rows, bias)), (case, m_class, m)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_70", marks=pytest.mark.slow)])
def test_products_have_the_bits_of_their_definition(sim_module: Callable[..., Any], arch: str) -> None:
    many = ("int8", "q4_K", "q6_K")
    few = [linear_spec(case, "2-8") for case in FAST]
    kernels = sim_module([*few, *(linear_spec(case, "large") for case in many)], arch)
    for case in FAST:
        check_products(kernels.run, case, "2-8", (1, 7, 33))
    for case in many:
        check_products(kernels.run, case, "large", (33, 65) if case == "int8" else (33,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80"])
@pytest.mark.parametrize("case", cases.WEIGHTS)
def test_every_weight_has_the_bits_of_its_definition(sim_module: Callable[..., Any], arch: str, case: str) -> None:
    kernels = sim_module([linear_spec(case, m_class) for m_class in CLASSES], arch)
    for m_class, ms in CLASSES.items():
        check_products(kernels.run, case, m_class, ms)


def plain_spec(name: str, kind: str, params: dict[str, Any], n: int, k: int, m: Any, m_class: Any) -> KernelSpec:
    """x, w, out in fp32 for a known number of rows, or for "m"."""
    width = int8_rows.row_bytes(k)
    weight = Operand(
        name="w", dtype="f32", access="r", shape=(n, k), format=FormatRef(name=kind, params=params), layout=LAYOUT
    )
    operands = (
        Operand(name="x", dtype="i8", access="r", shape=(m, width), strides=(width, 1)),
        weight,
        Operand(name="out", dtype="f32", access="w", shape=(m, n), strides=(n, 1)),
    )
    body = LinearKernel(m=m, n=n, k=k, m_class=m_class, has_bias=False, codes=True)
    return KernelSpec(name=name, symbols=() if isinstance(m, int) else (m,), operands=operands, body=body)


def check_plain(run: Callable[..., Any], spec: KernelSpec, spoil: Callable[[Any], None] | None = None) -> None:
    """The kernel's results have the bits of the definition; `spoil` changes entries of the weight."""
    (m, n, k), reference = (spec.body.m, spec.body.n, spec.body.k), spec.operands[1].format  # type: ignore[union-attr]
    fmt = formats.get(reference.name, **reference.params)  # type: ignore[union-attr]
    packed = fmt.encode(np.random.default_rng(n).standard_normal((n, k)).astype(np.float32))
    if spoil is not None:
        spoil(packed)
    data = layouts.get(LAYOUT).pack(fmt, "f32", n, k, packed.data)
    rows = int8_rows.quantise(np.random.default_rng(m).standard_normal((m, k)).astype(np.float32), "token", 0.0, None)
    (out,) = run(spec.name, [rows, data, np.zeros((m, n), np.float32)], [])
    codes, scales = int8_rows.codes_of(rows, k), int8_rows.scales_of(rows, k)
    assert cases.same_bits(out, integer_product.multiply(codes, scales, packed)), spec.name


def test_eight_warps_share_long_rows_in_rounds(sim_module: Callable[..., Any]) -> None:
    """2,048 columns: several rounds of terms, which are handed over in two buffers."""
    specs = [
        plain_spec("wide_32", "int4", {"group": 32}, 20, 2176, 3, "2-8"),
        plain_spec("wide_256", "tq2_0", {}, 17, 4096, 9, "9-64"),
    ]
    kernels = sim_module(specs, "sm_80")
    for spec in specs:
        check_plain(kernels.run, spec)


ALL_TILES = sorted(
    {
        *(tile for table in (int8_tile.ONE_GROUP, int8_tile.GROUPED) for choice in table.values() for tile in choice),
        *(tile for table in (int8_tile.LARGE_ONE, int8_tile.LARGE_GROUPED, int8_tile.LARGE_SMALL_GROUPS,
                             int8_tile.LARGE_AFFINE) for choice in table for tile in choice),
        *int8_tile.ALONE.values(),
    },
    key=lambda tile: tile.arguments,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda tile: tile.arguments.replace(", ", "_"))
def test_every_tile_has_the_bits_of_the_definition(
    sim_module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tile: int8_tile.Tile
) -> None:
    monkeypatch.setattr(linear_int8_tiles, "cases_of", lambda *_: (linear_int8_tiles.Case(tile, None),))
    name = tile.arguments.replace(", ", "_")  # geometry is kept by the spec
    kinds: list[tuple[str, dict[str, Any], int]] = [
        ("int8", {}, 330), ("int4", {"group": 128}, 640), ("q4_K", {}, 256), ("q6_K", {}, 512), ("mxfp4", {}, 160)
    ]  # fmt: skip
    specs = [
        plain_spec(f"k{i}_{name}", kind, params, tile.rows + 19, k, tile.tokens + 3, "large")
        for i, (kind, params, k) in enumerate(kinds)
        if tile.shared(linear_int8_tiles.groups_of(plain_spec("k", kind, params, 16, k, 9, "large"))) < 160000
    ]
    kernels = sim_module(specs, "sm_80")
    for spec in specs:
        check_plain(kernels.run, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "params", "k"),
    [
        ("int4", {"group": 64, "symmetric": False}, 320),
        ("int4", {"group": 128}, 384),
        ("q6_K", {}, 256),
        ("int8", {}, 72),
    ],
)
def test_any_number_of_rows_at_the_edges_of_tiles_has_the_bits_of_the_definition(
    sim_module: Callable[..., Any], kind: str, params: dict[str, Any], k: int
) -> None:
    """16 rows of w, or one panel more than a block of 128; rows of x that are zero, and rows of 1e30."""
    classes = {"2-8": (1, 9), "9-64": (9, 64, 65), "large": (1, 65, 127, 128, 129)}
    specs = [
        plain_spec(f"edges_{kind}_{k}_{n}_{m_class.replace('-', '_')}", kind, params, n, k, "m", m_class)
        for n in (16, 144)
        for m_class in classes
    ]
    kernels, rng, fmt = sim_module(specs, "sm_80"), np.random.default_rng(0), formats.get(kind, **params)
    for spec in specs:
        assert isinstance(spec.body, LinearKernel)
        packed = fmt.encode(rng.standard_normal((spec.body.n, k)).astype(np.float32))
        data = layouts.get(LAYOUT).pack(fmt, "f32", spec.body.n, k, packed.data)
        for m in classes[spec.body.m_class]:
            x = rng.standard_normal((m, k)).astype(np.float32)
            x[m // 2], x[0] = 0.0, 1e30
            rows = int8_rows.quantise(x, "token", 0.0, None)
            (out,) = kernels.run(spec.name, [rows, data, np.zeros((m, spec.body.n), np.float32)], [m])
            wanted = integer_product.multiply(int8_rows.codes_of(rows, k), int8_rows.scales_of(rows, k), packed)
            assert cases.same_bits(out, wanted), (spec.name, m)


def test_infinite_scales_have_the_bits_of_the_definition(sim_module: Callable[..., Any]) -> None:
    """The fused step of finite slopes would make NaN of them."""
    spec = plain_spec("infinite", "int4", {"group": 32}, 18, 128, 9, "9-64")

    def spoil(packed: formats.PackedTensor) -> None:
        packed.section("scales")[1, 2] = np.inf

    kernels = sim_module([spec], "sm_80")
    with np.errstate(invalid="ignore"):
        check_plain(kernels.run, spec, spoil)


def test_any_number_of_rows_takes_the_tile_of_a_known_number() -> None:
    def spec(m: Any, m_class: str) -> KernelSpec:
        return plain_spec("l", "int8", {}, 4096, 4096, m, m_class)

    for m_class, ms in (("9-64", (9, 16, 17, 64)), ("large", (65, 256, 257, 512, 4096))):
        free = spec("m", m_class)
        cases_of_any = linear_int8_tiles.cases_of(free, "sm_90a")
        for m in ms:
            (one,) = linear_int8_tiles.cases_of(spec(m, m_class), "sm_90a")
            taken = next(case.tile for case in cases_of_any if case.most is None or m <= case.most)
            assert one.tile in (taken, int8_tile.ALONE.get(taken))
            blocks, *_ = emit_kernel(free, "sm_90a").geometry.at({"m": m})
            assert blocks >= -(-m // taken.tokens) * -(-4096 // taken.rows)


def test_rows_have_the_bits_of_their_definition(sim_module: Callable[..., Any]) -> None:
    kernels = sim_module(cases.ROWS, "sm_80")
    for spec in cases.ROWS:
        body = spec.body
        assert isinstance(body, QuantizeRowsKernel)
        held = np.zeros((9, body.cols + 3), cases.DTYPES[spec.operands[0].dtype])
        held[:, : body.cols] = cases.activations(9, body.cols, 9).astype(held.dtype)
        columns = np.arange(body.cols) % 7 == 3
        middle = [columns] if body.kind == "outliers" else []
        out = np.zeros((9, int8_rows.row_bytes(body.cols)), np.int8)
        (found,) = kernels.run(spec.name, [held[:, : body.cols], *middle, out], [9])
        want = int8_rows.quantise(held[:, : body.cols], body.kind, body.value, columns if middle else None)
        assert found.tobytes() == want.tobytes(), spec.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles_them_without_spills(nvrtc: Callable[..., Any], arch: str) -> None:
    wanted = ("int4_zeros",) if arch == "sm_90a" else ("int8", "int4_zeros", "q6_K", "iq4_xs")
    specs = [linear_spec(case, m_class) for case in wanted for m_class in CLASSES]
    resources = nvrtc([*specs, cases.ROWS[0]], arch)
    for spec in specs:
        assert emit_kernel(spec, arch).engine == ENGINES.get(arch, "mma")
        assert resources[spec.name].spill_stores == 0, (spec.name, resources[spec.name])


def test_rows_that_are_not_aligned_are_refused() -> None:
    import msgspec

    spec = linear_spec("int8", "large")
    x = msgspec.structs.replace(spec.operands[0], strides=(int8_rows.row_bytes(101) + 4, 1))
    with pytest.raises(KernelSelectionError, match="multiples of 16 bytes"):
        emit_kernel(msgspec.structs.replace(spec, operands=(x, *spec.operands[1:])), "sm_80")
