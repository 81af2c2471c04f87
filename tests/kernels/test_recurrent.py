"""Recurrent layers against float64: cells, formats, sizes around every tile, directions, places of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from by_path import load

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu.emit import emit_kernel

cases = load("tests/kernels/recurrent_cases.py")
PANELS = "cpu_p16_v2"
KINDS = ("lstm", "gru", "tanh", "relu")


def make(*arguments: Any, **options: Any) -> Any:
    return cases.make_case(*arguments, layout=PANELS, **options)


def check(kernels: Any, case: Any, steps: int, batch: int) -> None:
    wanted = cases.answers(case, cases.operands_of(case, steps, batch))
    symbols = (batch, steps) if case.spec.symbols == ("b", "t") else (steps,)
    found = kernels.run_both(case.spec.name, lambda: cases.operands_of(case, steps, batch), symbols)
    cases.assert_close(case, found, wanted)
    for operand, array in zip(case.spec.operands, found, strict=True):
        if operand.access == "w" and array.base is not None:
            assert (array.base[..., -3:] == 7).all(), f"{operand.name}: wrote beside its rows"


SIZES = [(1, 1), (3, 1), (2, 2), (2, 7), (5, 8), (2, 9), (1, 57), (2, 61)]
"""(steps, batch): rows that are multiplied straight from codes and by panels, several items of rows."""


@pytest.fixture(scope="module")
def kinds() -> list[Any]:
    """Every kind of cell; units that end inside of panels and of items."""
    made = [make(kind, 19, "packed") for kind in KINDS] + [make(kind, 67, "rows", bias=False) for kind in KINDS]
    made += [make("lstm", 21, "packed", width=13), make("lstm", 130, "rows", width=16, reverse=True)]
    return [*made, make("gru", 1, "columns", reverse=True), make("lstm", 64, "packed", batch_first=True)]


def test_every_kind_of_cell_equals_float64(build: Callable[..., Any], isa: str, kinds: list[Any]) -> None:
    kernels = build([case.spec for case in kinds], isa)
    for case in kinds:
        for steps, batch in SIZES:
            check(kernels, case, steps, batch)


FAMILIES = {
    "across rows": ("lstm", 97, "nf4", {}), "bytes": ("gru", 64, "q8_0", {"reverse": True}),
    "superblocks": ("tanh", 256, "q4_K", {}), "rows": ("relu", 35, "int8", {}),
    "projection": ("lstm", 32, "q5_0", {"width": 64}), "one row": ("gru", 32, "mxfp4", {"batch": 1}),
}  # fmt: skip
QUICK = ("across rows", "one row")


@pytest.mark.parametrize("families", [QUICK, pytest.param(tuple(set(FAMILIES) - set(QUICK)), marks=pytest.mark.slow)])
def test_weights_of_every_family_of_formats_are_decoded_in_each_step(
    build: Callable[..., Any], isa: str, families: tuple[str, ...]
) -> None:
    """nf4 with K = 97 has blocks that run across rows; projections have a format of their own shape."""
    made = [make(*FAMILIES[name][:3], **FAMILIES[name][3]) for name in sorted(families)]
    kernels = build([case.spec for case in made], isa)
    for case in made:
        for steps, batch in [(9, 1)] if case.body.batch == 1 else SIZES:
            check(kernels, case, steps, batch)


def test_narrow_types_round_the_state_in_each_step(build: Callable[..., Any], isa: str) -> None:
    made = [make("lstm", 19, "packed", dtype="bf16"), make("gru", 64, "int8", dtype="f16"),
            make("lstm", 20, "rows", dtype="bf16", width=9)]  # fmt: skip
    kernels = build([case.spec for case in made], isa)
    for case in made:
        for steps, batch in [(1, 1), (4, 3), (3, 30)]:
            check(kernels, case, steps, batch)


def test_many_steps_stay_exact(build: Callable[..., Any], isa: str) -> None:
    case = make("lstm", 64, "packed", batch=2)
    check(build([case.spec], isa), case, 300, 2)


def test_nan_and_infinity_go_through_every_cell(build: Callable[..., Any], isa: str, kinds: list[Any]) -> None:
    kernels = build([case.spec for case in kinds], isa)
    for case in kinds[:4]:
        operands = cases.operands_of(case, 2, 3)
        operands[0][0, 0, :] = np.nan
        operands[0][0, 1, :] = np.inf
        kernels.run(case.spec.name, operands, (3, 2))
        out = next(a for o, a in zip(case.spec.operands, operands, strict=True) if o.name == "out")
        assert np.isnan(out[:, 0]).all() and np.isfinite(out[:, 2]).all()
        assert np.isinf(out[0, 1]).all() if case.body.kind == "relu" else np.isfinite(out[0, 1]).all()


def test_no_step_leaves_the_cells_as_they_were(build: Callable[..., Any], isa: str, kinds: list[Any]) -> None:
    kernels = build([case.spec for case in kinds], isa)
    for case in kinds:
        check(kernels, case, 0, 3)
        check(kernels, case, 3, 0)


def test_a_step_is_dealt_to_threads_where_that_pays(build: Callable[..., Any], isa: str) -> None:
    case = make("gru", 256, "packed")
    kernels = build([case.spec], isa)
    tasks = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).in_dll(kernels.library, "test_tasks"))
    tasks[0] = 0
    kernels.run(case.spec.name, cases.operands_of(case, 2, 8), (8, 2), threads=2)
    assert tasks[0] >= 2


@pytest.mark.parametrize(("name", "change", "message"), [
    ("out", {"strides": ("20*b", 1, 30)}, "unit stride"), ("start", {"dtype": "bf16"}, "must be one type"),
    ("cell", {"dtype": "f16"}, "must be one type"), ("w", {"shape": (76, 20)}, "runs over"),
    ("x", {"dtype": "i32"}, "is i32"),
])  # fmt: skip
def test_wrong_operands_are_named(name: str, change: dict[str, Any], message: str) -> None:
    spec = make("lstm", 19, "rows").spec
    operands = [msgspec.structs.replace(o, **change) if o.name == name else o for o in spec.operands]
    with pytest.raises(KernelSelectionError, match=message):
        emit_kernel(msgspec.structs.replace(spec, operands=tuple(operands)), "x86-64-v3")


@pytest.mark.parametrize(("change", "message"), [
    ({"kind": "gru"}, "projection, which only an LSTM has"), ({"width": 0}, "both must be positive"),
    ({"projects": False}, "equal without a projection"),
])  # fmt: skip
def test_wrong_bodies_are_refused(change: dict[str, Any], message: str) -> None:
    spec = make("lstm", 19, "rows", width=7).spec
    with pytest.raises(KernelSelectionError, match=message):
        emit_kernel(msgspec.structs.replace(spec, body=msgspec.structs.replace(spec.body, **change)), "x86-64-v3")
