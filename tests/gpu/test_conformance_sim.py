"""The simulator's twins against the models of conformance.py, so that the models are right before a GPU reads them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module", params=["sm_75", "sm_80"])
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checks(conformance: ModuleType, arch: str) -> list[Any]:
    return list(conformance.checks_for(int(arch[3:])))


@pytest.fixture(scope="module")
def verdicts(conformance: ModuleType, devices: ModuleType, checks: list[Any], arch: str) -> dict[str, str | None]:
    return dict(devices.judge_all(devices.SimDevice(checks, arch), checks))


def test_every_twin_does_what_its_instruction_does(verdicts: dict[str, str | None], checks: list[Any]) -> None:
    assert set(verdicts) == {check.name for check in checks}
    assert {name: wrong for name, wrong in verdicts.items() if wrong} == {}


def test_every_model_notices_a_wrong_answer(conformance: ModuleType) -> None:
    """A judge that accepts anything would prove nothing: zeros and a flipped bit are refused."""
    for check in conformance.CHECKS:
        case = check.case()
        assert case.judge([np.zeros_like(out) for out in case.outputs]), check.name
