"""Linears of many rows by warpgroups on sm_90a, against NumPy in float64: formats, types, tails, norms, orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from by_path import load

from qcompiler.kernels.cuda import emit, linear, linear_wgmma

mma = load("tests/cuda/test_linear_mma.py")
ARCH = "sm_90a"
TAILS = (65, 127, 128, 129, 300)
TILES = {f"{tile.tokens}x{tile.rows}": tile for tile in linear_wgmma.TILES}
"""By rows of x and of w."""


def run_all(sim_module: Callable[..., Any], cases: Sequence[Any], ms: tuple[int, ...], tile: str) -> None:
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
    monkeypatch.setattr(linear_wgmma, "tiles_of", lambda spec, arch: (TILES[request.param],))
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
