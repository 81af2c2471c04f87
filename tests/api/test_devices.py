"""`device=` of qcompile: which names there are, and how a program for an absent GPU runs all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qcompiler as qc
from qcompiler.errors import DeviceUnavailableError, TargetMismatchError, TrustError
from qcompiler.runtime.backends import registry

X = torch.randn(2, 8)


def compiled(device: str, *targets: str) -> qc.Program:
    torch.manual_seed(0)
    return qc.qcompile(torch.nn.Linear(8, 4), (X,), device=device, targets=targets or None)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("sim:99", r"sim:99 is not available .* the last one is sim:7"),
        ("cpu:1", r"cpu:1 is not available .* there is one cpu"),
        ("sim:²", "there is no device 'sim:²'"),
        ("gpu", "there are cpu, cuda:N and sim:N"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_before_compiling(device: str, why: str) -> None:
    targets = [] if device.startswith("cpu") else ["sm_80"]
    with pytest.raises(DeviceUnavailableError, match=why):
        compiled(device, *targets)


@pytest.mark.skipif(registry.is_available("cuda:0"), reason="for machines without a GPU")
def test_a_program_for_an_absent_gpu_goes_to_the_simulated_one(tmp_path: Path) -> None:
    program = compiled("cuda:0", "sm_90a")
    with pytest.raises(DeviceUnavailableError, match='device="sim:0"'):
        program(X)
    simulated = program.to("sim:1")
    assert (simulated.device, simulated.isa) == ("sim:1", "sm_90a")
    assert torch.allclose(simulated(X), program.oracle(X), atol=1e-5)
    with pytest.raises(TargetMismatchError, match="device='cpu'"):
        program.to("cpu")
    program.save(tmp_path / "gpu.qca")
    with pytest.raises(TargetMismatchError, match="needs sm_90a, sim:0 runs none but its own"):
        qc.load(tmp_path / "gpu.qca", device="sim:0", trust_native=True)
    simulated.save(tmp_path / "simulated.qca")
    with pytest.raises(TrustError, match="holds no native build to trust; load it without trust_native"):
        qc.load(tmp_path / "simulated.qca", device="sim:0", trust_native=True)
    assert torch.equal(qc.load(tmp_path / "gpu.qca", device="sim:0")(X), simulated(X))
