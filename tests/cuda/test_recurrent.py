"""Recurrent layers on the device against float64: cells, formats, projections, directions, rows per block, limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import FORMATS
from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.runtime.nvrtc import sm70_available

cases = load("tests/kernels/recurrent_cases.py")
KINDS = ("lstm", "gru", "tanh", "relu")


def make(*arguments: Any, **options: Any) -> Any:
    return cases.make_case(*arguments, layout="cuda_t16_v1", **options)


def run(module: Any, case: Any, steps: int, batch: int, **options: Any) -> list[Any]:
    symbols = {"b": batch, "t": steps}
    found: list[Any] = module.run(
        case.spec.name, cases.operands_of(case, steps, batch), {s: symbols[s] for s in case.spec.symbols}, **options
    )
    return found


def check(module: Any, case: Any, steps: int, batch: int) -> list[Any]:
    wanted = cases.answers(case, cases.operands_of(case, steps, batch))
    found = run(module, case, steps, batch)
    written = iter(found)
    arrays = [next(written) if operand.access == "w" else None for operand in case.spec.operands]
    cases.assert_close(case, arrays, wanted)
    return found


SIZES = [(1, 1), (3, 2), (2, 4), (2, 5), (4, 9)]
"""(steps, batch): blocks of four rows, and what is left of them."""


def test_every_kind_of_cell_equals_float64(sim_module: Callable[..., Any]) -> None:
    made = [make(kind, 19, "packed") for kind in KINDS] + [make(kind, 37, "rows", bias=False) for kind in KINDS]
    made += [make("lstm", 21, "packed", width=13), make("lstm", 34, "columns", width=16, reverse=True)]
    made += [make("gru", 1, "columns", reverse=True), make("lstm", 32, "packed", batch_first=True)]
    module = sim_module([case.spec for case in made])
    for case in made:
        for steps, batch in SIZES:
            check(module, case, steps, batch)


def test_a_known_batch_has_a_block_for_each_row(sim_module: Callable[..., Any]) -> None:
    made = [make("lstm", 40, "int8", batch=3), make("gru", 33, "packed", batch=1),
            make("tanh", 32, "q4_0", batch=65)]  # fmt: skip
    module = sim_module([case.spec for case in made])
    for case in made:
        check(module, case, 3, int(case.body.batch))


QUICK = ("nf4", "int8", "q4_K", "q8_0")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
def test_every_format_is_decoded_in_each_step(sim_module: Callable[..., Any], name: str) -> None:
    """K = 256, and 97 where formats take it: blocks that run across rows."""
    if FORMATS[name]().declaration.blocking == "flat":
        made = [make("gru", 97, name), make("lstm", 12, name, width=33, dtype="bf16")]
    else:
        made = [make("tanh", 256, name), make("relu", 256, name, dtype="bf16", batch=2)]
    module = sim_module([case.spec for case in made])
    for case in made:
        check(module, case, 3, 2)


def test_narrow_types_round_the_state_in_each_step(sim_module: Callable[..., Any]) -> None:
    made = [make("lstm", 19, "packed", dtype="bf16"), make("gru", 64, "int8", dtype="f16"),
            make("lstm", 20, "rows", dtype="bf16", width=9)]  # fmt: skip
    module = sim_module([case.spec for case in made])
    for case in made:
        for steps, batch in ((1, 1), (4, 3)):
            check(module, case, steps, batch)


def test_no_step_leaves_the_cells_as_they_were(sim_module: Callable[..., Any]) -> None:
    made = [make("lstm", 19, "packed"), make("lstm", 21, "packed", width=13)]
    module = sim_module([case.spec for case in made])
    for case in made:
        check(module, case, 0, 3)


def test_the_order_of_threads_changes_no_bit(sim_module: Callable[..., Any]) -> None:
    case = make("lstm", 40, "nf4", width=23)
    module = sim_module([case.spec])
    first = check(module, case, 4, 6)
    for seed in (1, 2):
        again = run(module, case, 4, 6, seed=seed)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_compiles_without_spilling(nvrtc: Any, arch: str) -> None:
    if arch == "sm_70" and not sm70_available():
        pytest.skip("CUDA 12's NVRTC, which compiles for sm_70, is not installed")
    made = [make("lstm", 128, "nf4", batch=1), make("gru", 256, "q4_K"), make("lstm", 64, "packed", width=32)]
    taken = nvrtc([case.spec for case in made], arch)
    for case in made:
        resources = taken[case.spec.name]
        assert resources.registers <= 128 and not resources.uses_local_memory, f"{case.spec.body}: {resources}"


def test_a_layer_whose_sums_do_not_fit_is_refused_with_a_way_out() -> None:
    large = make("lstm", 4096, "packed", width=8)
    with pytest.raises(KernelSelectionError, match=r"4096 units keeps .* shared memory.*compile this one for the CPU"):
        emit_kernel(large.spec, "sm_75")
    for arch, units in (("sm_75", 3000), ("sm_70", 4700), ("sm_120", 4700), ("sm_80", 8000)):
        assert emit_kernel(make("lstm", units, "packed", width=8).spec, arch).geometry.grid == ("b", 1, 1)
