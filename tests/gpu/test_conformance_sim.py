"""The simulator's twins against the models of conformance.py, so that the models are right before a GPU reads them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from qcompiler.kernels.cuda.emit import header
from qcompiler.kernels.cuda.signature import ARCHS, arch_number
from qcompiler.runtime import nvrtc


@pytest.fixture(scope="module", params=["sm_75", "sm_90a"])
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checks(conformance: ModuleType, arch: str) -> list[Any]:
    return list(conformance.checks_for(arch_number(arch)))


@pytest.fixture(scope="module")
def verdicts(conformance: ModuleType, devices: ModuleType, checks: list[Any], arch: str) -> dict[str, str | None]:
    return dict(devices.judge_all(devices.SimDevice(checks, arch), checks))


def test_every_twin_does_what_its_instruction_does(verdicts: dict[str, str | None], checks: list[Any]) -> None:
    assert set(verdicts) == {check.name for check in checks}
    assert {name: wrong for name, wrong in verdicts.items() if wrong} == {}


@pytest.mark.parametrize("target", [name for name in ARCHS if name != "sm_70" or nvrtc.sm70_available()])
def test_every_check_compiles_for_hardware(conformance: ModuleType, target: str) -> None:
    checks = conformance.checks_for(arch_number(target))
    cubin = nvrtc.compile_cubin(header("device.cuh") + "".join(check.text for check in checks), target)
    assert set(cubin.resources) == {f"qk_{check.name}" for check in checks}


def test_every_model_notices_a_wrong_answer(conformance: ModuleType, devices: ModuleType) -> None:
    """A judge that accepts anything would prove nothing: one flipped bit (of the exponent, in floats) is refused."""
    sim = devices.SimDevice(conformance.CHECKS, "sm_90a")
    for check in conformance.CHECKS:
        case = check.case()
        right = sim.run(check, case)
        for number, out in enumerate(right):
            for place in np.random.default_rng(number).integers(0, out.size, 5):
                wrong = [each.copy() for each in right]
                wrong[number].reshape(-1)[place : place + 1].view(np.uint8)[-1] ^= 0x40
                assert case.judge(wrong), f"{check.name}: output {number}, element {place}"
