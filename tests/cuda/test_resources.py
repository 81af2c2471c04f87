"""Every kernel of the slice compiles for every architecture; linears, mixtures and attention keep all their numbers in
registers.

Each architecture compiles a share of the kernels in one module, so that together they cover the list; the whole product
is marked slow.  `make docs` prints the same kernels' table into docs/kernel-resources.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from by_path import load

from qcompiler.kernels.cuda import signature
from qcompiler.kernels.cuda.geometry import MAX_THREADS, SHARED_LIMIT
from qcompiler.plan.kernel import KernelSpec

resources = load("benchmarks/kernel_resources.py")

SPECS: tuple[KernelSpec, ...] = tuple(spec for part in resources.PARTS for spec in resources.specs(part))
ARCHS: tuple[str, ...] = resources.archs()
HOT = ("linear", "grouped_linear", "attention", "join_attention")
SHARES = 8
"""An architecture's part of the list in `make test`."""


def share(arch: str) -> list[KernelSpec]:
    """Every eighth kernel, others on the next architecture."""
    return [spec for i, spec in enumerate(SPECS) if (i + i // SHARES) % SHARES == ARCHS.index(arch) % SHARES]


def check(arch: str, kernels: list[KernelSpec]) -> None:
    number = signature.arch_number(arch)
    table: dict[str, dict[str, Any]] = resources.measure(kernels, arch)
    assert set(table) == {spec.name for spec in kernels}
    for name, row in table.items():
        where = f"{name} on {arch}: {row}"
        assert row["threads"] <= MAX_THREADS, where
        assert row["shared"] <= SHARED_LIMIT[number], where
        assert row["registers"] * row["threads"] <= 65536, where
    local = {name: row["stack"] for name, row in table.items() if name.startswith(HOT) and row["local"]}
    assert local == {}, f"hot kernels with local memory on {arch}, in bytes per thread"


def test_shares_cover_every_kernel() -> None:
    together = {spec.name for arch in ARCHS for spec in share(arch)}
    assert together == {spec.name for spec in SPECS}
    templates = {"linear", "grouped_linear", "norm", "softmax", "attention", "join_attention", "loop"}
    assert templates == {spec.template for spec in SPECS}


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_and_hot_ones_spill_nothing(arch: str) -> None:
    check(arch, share(arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles_and_no_hot_one_spills(arch: str) -> None:
    check(arch, list(SPECS))


def test_a_spill_is_seen() -> None:
    """The table's `local` comes from ptxas: a kernel bound to too few registers shows it."""
    from qcompiler.runtime import nvrtc

    body = (
        "float v[64]; for (int i = 0; i < 64; ++i) v[i] = x[i]; for (int i = 0; i < 64; ++i) x[i] = v[i] * v[63 - i];"
    )
    source = f'extern "C" __global__ void __launch_bounds__(1024, 2) qk_a(volatile float* x) {{ {body} }}'
    assert nvrtc.compile_cubin(source, "sm_80").resources["qk_a"].uses_local_memory
