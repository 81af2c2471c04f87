"""Every kernel, as capture could break it: eagerly on a stream of its own, captured, replayed three times.

Each replay meets fresh inputs and an output filled with other bytes, and must give the bits of an eager run with the
same inputs.  On the simulated GPU every access is checked as well; on cuda:0 this is `make gpu-check`'s first suite of
kernels.  tests/cuda compares the same kernels with float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from by_path import load

from qcompiler import formats
from qcompiler.plan.plan import DeviceSlot, Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend

PARTS = 4
"""Shares of the formats, each a process of its own in `make gpu-check`."""

GPU = ["cuda:0"] if registry.is_available("cuda:0") else []
SHORT = ("nf4",)


class Runner:
    """The cases' kernels on one device, with a stream that is not the default one."""

    def __init__(self, backend: Backend, cases: Sequence[Any]) -> None:
        self.backend, self.stream = backend, backend.stream("matrix")
        plan = Plan(
            devices=(DeviceSlot(name="d0", kind="cuda"),), streams=(), events=(), arenas=(), buffers=(),
            kernels=tuple(case.spec for case in cases), entries=(),
        )  # fmt: skip
        self.kernels = backend.load(plan, backend.build(plan))

    def check(self, case: Any) -> None:
        """AssertionError that names the case and the replay that gave other bits than an eager run."""
        first = case.operands(0)
        memories = [self.backend.allocate(max(1, array.nbytes), label=case.name) for array in first]
        addresses = [memory.address for memory in memories]
        kernel = self.kernels[case.spec.name]

        def run(seed: int, filling: int, graph: Any = None) -> list[bytes]:
            arrays = [np.ascontiguousarray(array) for array in case.operands(seed)]
            for operand, array, address in zip(case.spec.operands, arrays, addresses, strict=True):
                if operand.access == "w":
                    array.view(np.uint8).reshape(-1)[:] = filling
                self.backend.upload(self.stream, address, array.ctypes.data, array.nbytes)
            if graph is None:
                self.backend.launch(self.stream, kernel, addresses, ())
            else:
                graph.launch(self.stream)
            results = []
            for operand, array, address in zip(case.spec.operands, arrays, addresses, strict=True):
                if operand.access != "r":
                    found = np.zeros_like(array)
                    self.backend.download(self.stream, found.ctypes.data, address, array.nbytes)
                    results.append(found)
            self.backend.synchronize(self.stream)
            return [found.tobytes() for found in results]

        eager = {seed: run(seed, 0) for seed in range(4)}
        assert len({tuple(each) for each in eager.values()}) > 1, f"{case.name}: no input matters"
        self.backend.begin_capture(self.stream)
        self.backend.launch(self.stream, kernel, addresses, ())
        graph = self.backend.end_capture(self.stream)
        assert graph.shape.nodes == {"kernel": 1}
        for seed in (1, 2, 3):
            assert run(seed, 1, graph) == eager[seed], f"{case.name}: replay {seed} is not the eager run"
        graph.close()
        for memory in memories:
            memory.close()


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    return load("tests/gpu/matrix.py")


def check_all(device: str, cases: Sequence[Any]) -> None:
    runner = Runner(registry.backend(device, registry.architecture(device)), cases)
    for case in cases:
        runner.check(case)


def one_per_template(cases: Iterator[Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for case in cases:
        found.setdefault(case.spec.template, case)
    return list(found.values())


def test_one_kernel_of_each_template_replays_what_it_runs(matrix: ModuleType) -> None:
    cases = one_per_template(matrix.templates())
    assert {case.spec.template for case in cases} == set(matrix.agree.BODIES)
    check_all("sim:0", cases)


def test_kernels_of_a_format_replay_what_they_run(matrix: ModuleType) -> None:
    for name in SHORT:
        cases = [case for case in matrix.of_format(name) if case.spec.template == "grouped_linear"]
        check_all("sim:0", cases)


@pytest.mark.parametrize("device", [pytest.param("sim:0", marks=pytest.mark.slow), *GPU])
def test_every_template_replays_what_it_runs(matrix: ModuleType, device: str) -> None:
    check_all(device, list(matrix.templates()))


@pytest.mark.parametrize("device", [pytest.param("sim:0", marks=pytest.mark.slow), *GPU])
@pytest.mark.parametrize("part", [f"part{i}" for i in range(PARTS)])
def test_every_format_replays_what_it_runs(matrix: ModuleType, device: str, part: str) -> None:
    for name in list(formats.FORMATS)[int(part[4:]) :: PARTS]:
        check_all(device, list(matrix.of_format(name)))
