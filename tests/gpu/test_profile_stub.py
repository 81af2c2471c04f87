"""Profiles and `qc doctor` on the stub driver: the CUDA backend calls as on a GPU, and times mean nothing.

The stub carries work out at once, so that each launch is late: the profile has to say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from by_path import load

PROFILE = """
import torch, qcompiler as qc
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)).eval()
x = torch.randn(3, 64)
program = qc.qcompile(model, (x,), quant="nf4", device="cuda:0")
before = program(x)
found = program.profile(x, rounds=2)
assert torch.equal(before, program(x))
print(found.to_json())
"""
DOCTOR = "from qcompiler.cli import main; main(['doctor', '--json'])"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    twins = load("tests/gpu/stub_twins.py")
    return {**os.environ, **twins.environment(twins.folder(tmp_path_factory.mktemp("stub")))}


def answer(code: str, environment: dict[str, str], folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_program_on_the_stub_is_timed_by_its_events(stub: dict[str, str], tmp_path: Path) -> None:
    found = answer(PROFILE, stub, tmp_path)
    assert [step["kind"] for step in found["steps"]] == ["linear", "linear"]
    assert all(step["us"] > 0 and step["late"] and step["limit_us"] > 0 for step in found["steps"])
    assert found["machine"]["rates"] == "published" and found["machine"]["limits"]["bandwidth"] > 0
    assert any("submitted late" in note for note in found["notes"])


@pytest.mark.slow
def test_doctor_names_the_gpu_of_the_stub(stub: dict[str, str], tmp_path: Path) -> None:
    found = answer(DOCTOR, stub, tmp_path)
    (gpu,) = found["gpu_details"]
    assert (gpu["name"], gpu["arch"], gpu["driver"]) == ("a stub", "sm_90a", "13.0") and gpu["bandwidth"] > 0
    assert found["gpu_problems"] == [] and "sm_90a" in {row["target"] for row in found["kernels"]}
