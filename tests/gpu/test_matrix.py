"""Every kernel, as capture could break it: eagerly on a stream of its own, captured, replayed three times.

Each replay meets fresh inputs and an output filled with other bytes, and must give the bits of an eager run with the
same inputs.  Here on the simulated GPU, where every access is checked as well; on cuda:0 the same worker is what
`make gpu-check` begins with.  tests/cuda compares the same kernels with float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from by_path import ROOT, load

from qcompiler import formats
from qcompiler.errors import DeviceError
from qcompiler.formats import cache_rows, int8_rows
from qcompiler.runtime.backends import registry

PARTS = 4
"""Shares of the formats, so that they run side by side."""

SHORT = ("nf4",)


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    return load("tests/gpu/matrix_worker.py")


@pytest.fixture(scope="module")
def matrix(worker: ModuleType) -> Any:
    return worker.matrix


def check_all(worker: ModuleType, cases: Sequence[Any]) -> None:
    """AssertionError that names every case that failed, with what failed of it."""
    runner = worker.Runner(registry.backend("sim:0", registry.architecture("sim:0")), None)
    kernels = runner.kernels(cases)
    verdicts = [runner.check(case, kernels[case.spec.name], cases) for case in cases]
    assert {verdict.case: verdict.failures for verdict in verdicts if verdict.failures} == {}


def one_per_template(cases: Iterator[Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for case in cases:
        found.setdefault(case.spec.template, case)
    return list(found.values())


def test_one_kernel_of_each_template_replays_what_it_runs(worker: ModuleType, matrix: Any) -> None:
    cases = one_per_template(matrix.templates())
    assert {case.spec.template for case in cases} == set(matrix.agree.BODIES)
    check_all(worker, cases)


def test_kernels_of_a_format_replay_what_they_run(worker: ModuleType, matrix: Any) -> None:
    for name in SHORT:
        cases = [case for case in matrix.of_format(name) if case.spec.template == "grouped_linear"]
        check_all(worker, cases)


def test_every_choice_and_type_that_cuda_takes_is_in_the_matrix(matrix: Any) -> None:
    """Also of the templates of which every eleventh spec is taken."""
    for template in ("quantize_rows", "norm", "scatter"):
        taken = [s for s in matrix.agree.SPECS[template]() if matrix.agree.refusal(s, "cuda") is None]
        wanted = {choice for spec in taken if all(map(matrix.dense, spec.operands)) for choice in matrix.choices(spec)}
        of_template = (case.spec for case in matrix.templates() if case.spec.template == template)
        assert {choice for spec in of_template for choice in matrix.choices(spec)} == wanted, template
    kinds = {(s.body.kind, s.body.cols % 64 > 0) for s in matrix.agree.SPECS["quantize_rows"]()}
    assert len(kinds) == 2 * len(int8_rows.KINDS), "rows of every kind with whole and with cut blocks of codes"


def test_rows_of_a_cache_hold_numbers(matrix: Any) -> None:
    """Random bytes would have NaNs and numbers near zero as scales, with which no output depends on an input."""
    found = set()
    for case in matrix.templates():
        for operand, rows in zip(case.spec.operands, case.operands(1), strict=True):
            if (cached := case.cached(operand)) is not None:
                cols, kind = cached
                values = cache_rows.dequantise(rows, cols, kind)
                assert np.abs(values).max() < 10 and 0.8 < values.std() < 1.2, case.name
                found.add((case.spec.template, kind))
    assert found == {(t, kind) for t in ("attention", "dequantize_cache") for kind in cache_rows.KINDS}


@pytest.mark.slow
def test_every_template_replays_what_it_runs(worker: ModuleType, matrix: Any) -> None:
    check_all(worker, list(matrix.templates()))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_format_replays_what_it_runs(worker: ModuleType, matrix: Any, part: int) -> None:
    for name in list(formats.FORMATS)[part::PARTS]:
        check_all(worker, list(matrix.of_format(name)))


# --- the worker itself -----------------------------------------------------------------------------------------------


def test_differences_are_counted_in_bits_and_measured_by_the_norm(worker: ModuleType) -> None:
    wanted = [np.array([3.0, 4.0], np.float32), np.array([7], np.int32)]
    assert worker.difference(wanted, wanted) == worker.Found(0.0, 0, 3)
    found = worker.difference([np.array([3.0, 4.5], np.float32), wanted[1]], wanted)
    assert (found.mismatches, found.elements) == (1, 3)
    assert found.error == pytest.approx(0.5 / np.sqrt(9 + 16 + 49))
    lost = worker.difference([np.array([np.nan, 4.0], np.float32), wanted[1]], wanted)
    assert lost.error is None, "NaN never passes"
    both = [np.array([np.nan, 4.0], np.float32)]
    assert worker.difference(both, both) == worker.Found(0.0, 0, 2)


def test_every_piece_of_work_is_in_one_share(worker: ModuleType) -> None:
    groups = worker.chunks()
    names = [case.name for group in groups for case in group]
    assert len(set(names)) == len(names)
    shares = [case.name for number in range(3) for chunk in worker.share(groups, number, 3) for case in chunk]
    assert sorted(shares) == sorted(names)
    assert f"at odd sizes: {len(names)} kernels" in (ROOT / "docs" / "gpu.md").read_text()


class Faulty:
    """A backend whose kernels fail in one way: the wrapped one otherwise."""

    def __init__(self, backend: Any, code: int) -> None:
        self._backend, self._code = backend, code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def launch(self, *arguments: Any) -> None:
        raise DeviceError("launching failed", self._code, "cudaErrorOfATest")


@pytest.mark.parametrize("code", [701, 1])
def test_a_lost_context_ends_the_process_and_any_other_error_the_case(
    worker: ModuleType, matrix: Any, code: int
) -> None:
    case = next(matrix.templates())
    backend = registry.backend("sim:0", registry.architecture("sim:0"))
    runner = worker.Runner(backend, None)
    kernel = runner.kernels([case])[case.spec.name]
    runner.backend = Faulty(backend, code)
    if code == 701:
        with pytest.raises(DeviceError) as caught:
            runner.check(case, kernel, [case])
        verdict = caught.value.verdict  # type: ignore[attr-defined]
    else:
        verdict = runner.check(case, kernel, [case])
    assert [(each["mode"], "cudaErrorOfATest" in each["reason"]) for each in verdict.failures] == [("eager", True)]
