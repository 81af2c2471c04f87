"""Every inline-PTX wrapper on hardware against its model, and against the simulator's twin.

Collected where there is a GPU; elsewhere the same kernels run in test_conformance_sim.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.runtime.backends import registry


@pytest.fixture(scope="module", params=["cuda:0"])
def checks(request: pytest.FixtureRequest, conformance: ModuleType) -> list[Any]:
    return list(conformance.checks_for(arch_number(registry.architecture(request.param))))


@pytest.fixture(scope="module")
def gpu(checks: list[Any], devices: ModuleType) -> Any:
    return devices.GpuDevice(checks)


def test_every_instruction_does_what_its_model_says(gpu: Any, checks: list[Any], devices: ModuleType) -> None:
    verdicts = devices.judge_all(gpu, checks)
    assert {name: wrong for name, wrong in verdicts.items() if wrong} == {}


def test_twins_and_instructions_agree(gpu: Any, checks: list[Any], devices: ModuleType) -> None:
    """Bit for bit, but for products (another order of summation), fast exponentials and the payload of NaNs."""
    sim = devices.SimDevice(checks, "sm_80")
    loose = {"mma_f16", "mma_bf16", "exp2_fast"}
    different = {}
    for check in checks:
        if check.name in loose:
            continue
        case = check.case()
        for mine, theirs in zip(gpu.run(check, case), sim.run(check, case), strict=True):
            same = np.array_equal(without_nans(check, mine), without_nans(check, theirs))
            different.update({} if same else {check.name: "differs"})
    assert different == {}


def without_nans(check: Any, array: Any) -> Any:
    """Zeros for NaNs, where the output holds floats."""
    kinds = {"f32_of_f16": np.float32, "f16_of_f32": np.float16, "pack_f16": np.float16,
             "pack_bf16": ml_dtypes.bfloat16}  # fmt: skip
    kind = kinds.get(check.name)
    if kind is None:
        return array
    values = array.view(kind)
    return np.where(np.isnan(values), kind(0), values).view(np.uint8)
