"""Linears of many rows by warpgroups on sm_90a, against NumPy in float64: formats, types, tails, norms, orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.kernels.cuda import emit, linear, linear_wgmma
from qcompiler.plan.kernel import FormatRef
from qcompiler.runtime import nvrtc

mma = load("tests/cuda/test_linear_mma.py")
ARCH = "sm_90a"
TAILS = (65, 127, 128, 129, 300)
TILES = {f"{tile.tokens}x{tile.rows}": tile for tile in linear_wgmma.TILES}
"""By rows of x and of w."""


def run_all(sim_module: Callable[..., Any], cases: Sequence[Any], ms: tuple[int, ...], tile: str = "any") -> None:
    for case in cases:  # modules are kept by the kernels' names
        case.spec = msgspec.structs.replace(case.spec, name=f"{case.spec.name}_{tile}")
    module = sim_module([case.spec for case in cases], ARCH)
    for case in cases:
        assert linear.decision_of(case.spec, ARCH).key == "wgmma"
        for m in (case.body.m,) if isinstance(case.body.m, int) else ms:
            mma.check(module, case, m)


@pytest.fixture(params=list(TILES))
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every linear has blocks of one size."""
    monkeypatch.setattr(linear_wgmma, "tiles_of", lambda spec, arch: (linear_wgmma.Choice(TILES[request.param]),))
    emit._emitted.cache_clear()
    yield str(request.param)
    emit._emitted.cache_clear()


def test_blocks_of_each_size(sim_module: Callable[..., Any], tile: str) -> None:
    """Tails in all three directions: 8 of 64 or 128 rows of w, 70 of 64 to 256 rows of x, K that ends inside a
    chunk."""
    kind, n, k = {
        "256x128": ("nf4", 136, 416), "256x64": ("int4_32", 72, 224), "128x64": ("int4_32", 72, 224),
        "64x64": ("nf4", 72, 320),
    }[tile]  # fmt: skip
    run_all(sim_module, [mma.make_case(kind, (n, k), "bf16", "large", m=70)], (), tile)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", list(mma.SHAPES))
def test_every_format_size_and_tail(sim_module: Callable[..., Any], tile: str, kind: str, dtype: str) -> None:
    cases = [
        mma.make_case(kind, shape, dtype, "large", epilogue=epilogue, x_row=x_row)
        for shape in ((200, 896), mma.SHAPES[kind][-1])
        for epilogue, x_row in ((False, 0), (True, 5))
    ]
    run_all(sim_module, cases, TAILS, tile)


def test_no_depth_gives_zeros(sim_module: Callable[..., Any]) -> None:
    case = mma.make_case("plain", (35, 0), "bf16", "large", m=70)
    run_all(sim_module, [case], ())


# --- tiles that are chosen --------------------------------------------------------------------------------------------


def test_a_kernel_for_any_number_of_rows_of_x_has_three_tiles(sim_module: Callable[..., Any]) -> None:
    """Smaller ones as long as their blocks run at a time on 132 multiprocessors: beside 64 blocks of 64 rows of w, two
    of 64 or of 256 rows of x do."""
    spec = mma.make_spec("nf4", (4096, 320), "bf16", "large")
    choices = linear_wgmma.tiles_of(spec, ARCH)
    assert [(each.tile.tokens, each.most) for each in choices] == [(64, 128), (256, 512), (256, None)]
    assert len({each.tile.threads for each in choices}) == 1
    grids = [emit.geometry(spec, ARCH).at({"s": m})[:2] for m in (65, 128, 129, 256, 257, 512, 513, 1024, 1025)]
    assert grids == [(4, 32)] * 8 + [(5, 32)]  # 64 rows of w: two to a row of the grid
    case = mma.make_case("nf4", (72, 320), "bf16", "large")
    run_all(sim_module, [case], (129,))


@pytest.mark.slow
def test_borders_between_tiles(sim_module: Callable[..., Any]) -> None:
    """Short ones: 2 x 64 rows of x beside 64 panels of w; 256, and 512 of the next, beside 33."""
    cases = [mma.make_case("int4_32", (n, 96), "bf16", "large") for n in (4096, 2072)]
    run_all(sim_module, cases, (128, 129, 257, 513, 1025))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(mma.SHAPES))
def test_any_number_of_rows_of_every_format(sim_module: Callable[..., Any], kind: str) -> None:
    run_all(sim_module, [mma.make_case(kind, (200, 896), "bf16", "large", epilogue=True)], (*TAILS, 513))


@pytest.mark.slow
def test_two_orders_and_a_second_run_give_the_same_bits(sim_module: Callable[..., Any]) -> None:
    cases = [mma.make_case("nf4", (136, 2112), "bf16", "large", m=m) for m in (70, 200, 300)]
    module = sim_module([case.spec for case in cases], ARCH)
    for case in cases:
        first, second, again = (mma.check(module, case, case.body.m, seed=seed) for seed in (1, 2, 2))
        assert first.tobytes() == second.tobytes() == again.tobytes()


@pytest.mark.slow
def test_views_of_x_off_16_bytes_give_the_same_bits(sim_module: Callable[..., Any]) -> None:
    plain, odd = (mma.make_case("nf4", (72, 192), "bf16", "large", x_row=row) for row in (0, 3))
    module = sim_module([plain.spec, odd.spec], ARCH)
    first = mma.check(module, plain, 70)
    for case, offset in ((plain, 1), (odd, 0), (odd, 5)):
        assert mma.check(module, case, 70, offset=offset).tobytes() == first.tobytes(), (case.spec.name, offset)


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        (65, 4096, "64x64"), (128, 4096, "64x64"), (256, 4096, "128x64"), (512, 4096, "256x64"),
        (4096, 4096, "256x128"), (128, 14336, "128x64"), (4096, 1024, "256x128"),
    ],
)  # fmt: skip
def test_tiles_by_sizes(m: int, n: int, tile: str) -> None:
    (found,) = linear_wgmma.tiles_of(mma.make_spec("nf4", (n, 4096), "bf16", "large", m=m), ARCH)
    assert f"{found.tile.tokens}x{found.tile.rows}" == tile


def test_no_number_of_rows_waits_1_3_times_as_long_for_a_kernel_for_any() -> None:
    """By the times that tiles took: the kernel for any number of rows of x against the one for this number."""

    def time(tile: linear_wgmma.Tile, m: int, n: int) -> float:
        blocks = -(-m // tile.tokens) * -(-n // tile.rows)
        return -(-blocks // linear_wgmma.MULTIPROCESSORS) * tile.time

    for n in (1024, 2048, 4096, 6144, 8192, 11008, 14336, 28672):
        choices = linear_wgmma.tiles_of(mma.make_spec("nf4", (n, 4096), "bf16", "large"), ARCH)
        for m in (65, 128, 129, 200, 256, 257, 512, 1024, 2048, 4096, 8192):
            any_m = linear_wgmma.tile_for(choices, m)
            (known,) = linear_wgmma.tiles_of(mma.make_spec("nf4", (n, 4096), "bf16", "large", m=m), ARCH)
            assert time(any_m, m, n) <= 1.3 * time(known.tile, m, n), (m, n)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", ARCH])
def test_what_is_no_number_stays_in_its_row_of_x(sim_module: Callable[..., Any], arch: str) -> None:
    """16 rows of w, K that ends inside a piece, M at the edges of tiles: zeros behind the ends meet no infinity."""
    case = mma.make_case("nf4", (16, 77), "bf16", "large")
    case.spec = msgspec.structs.replace(case.spec, name=f"alone_{arch}")
    module = sim_module([case.spec], arch)
    for m in (1, 65, 127, 128, 129):
        x, *others = mma.draw(case, m)
        (clean,) = module.run(case.spec.name, [x, *others], {"s": m})
        spoiled = x.copy()
        spoiled[m // 2, 0], spoiled[m - 1, 76] = np.nan, -np.inf
        (out,) = module.run(case.spec.name, [spoiled, *others], {"s": m})
        rows = [m // 2, m - 1]
        assert np.delete(out, rows, 0).tobytes() == np.delete(clean, rows, 0).tobytes(), m
        assert np.isnan(out[m // 2].astype(np.float32)).all()
        if m > 1:  # nf4 has a value of zero
            found, last = out[m - 1].astype(np.float32), -np.sign(case.values[:, 76])
            assert np.array_equal(found, np.where(last == 0, np.nan, last * np.inf), equal_nan=True)


# --- when it is chosen, and what the compiler makes of it -------------------------------------------------------------


def test_other_architectures_and_few_rows_keep_their_engines() -> None:
    large = mma.make_spec("nf4", (72, 320), "bf16", "large", m=70)
    reason = "Hopper's tensor cores: it takes sm_90 alone"
    for arch in ("sm_80", "sm_100", "sm_120"):
        decision = linear.decision_of(large, arch)
        assert decision.key == "mma" and reason in decision.why_not
    decision = linear.decision_of(mma.make_spec("nf4", (72, 320), "bf16", "9-64", m=33), ARCH)
    assert decision.key == "mma" and "rows is 9-64, it takes rows: large" in decision.why_not


def compiled(specs: Sequence[Any]) -> nvrtc.Cubin:
    return nvrtc.compile_cubin(emit.emit_module(specs, ARCH), ARCH, name="test-wgmma")


def check_compiled(specs: Sequence[Any]) -> None:
    """ptxas waits for each product (C7510 and others) where it cannot prove that registers are left alone."""
    cubin = compiled(specs)
    assert "wgmma.mma_async instructions are serialized" not in cubin.log
    for name, found in cubin.resources.items():
        assert not found.uses_local_memory, f"{name}: {found}"


def test_no_product_waits_for_the_one_before() -> None:
    check_compiled([mma.make_spec("plain", (768, 768), "bf16", "large", m=200)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", list(mma.SHAPES))
def test_no_product_waits_and_none_spills(kind: str, dtype: str) -> None:
    """Every tile, K whole and with a tail, with and without an epilogue."""
    check_compiled([
        mma.make_spec(kind, (n, k), dtype, "large", m=m, epilogue=epilogue)
        for n, k, epilogue in ((4096, 4096, False), (768, mma.SHAPES[kind][0][1], True))
        for m in (128, 256, 512, 4096, "s")
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("m", [128, 256, 512, 4096])
def test_no_format_spills_in_any_tile(m: int) -> None:
    specs = []
    for name in formats.FORMATS:
        spec = mma.make_spec("nf4", (4096, 4096), "bf16", "large", m=m)
        x, w, out = spec.operands
        w = msgspec.structs.replace(w, format=FormatRef(name=name))
        specs.append(msgspec.structs.replace(spec, name=f"{name}_{m}", operands=(x, w, out)))
    assert {linear.decision_of(spec, ARCH).key for spec in specs} == {"wgmma"}
    check_compiled(specs)
