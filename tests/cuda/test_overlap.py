"""Kernels that may start before those before them have ended: none touches what another one writes before it waits."""

from __future__ import annotations

import pytest
import torch

import qcompiler as qc
from qcompiler.errors import SimulationError
from qcompiler.kernels.cuda import emit
from qcompiler.plan.plan import Plan
from qcompiler.runtime import LoadedProgram, reset_simulated_gpu

X = torch.ones(1, 64)
WAITS = "qc_wait_for_kernels();"


def test_a_kernel_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1)).eval()
    program = qc.qcompile(model, (X,), quant="nf4", device="sim:0")
    assert program.run(X).shape == (1, 64)
    whole = emit.emit_sim_program

    def without(plan: Plan, arch: str) -> str:
        text = whole(plan, arch)
        assert text.count(f"    {WAITS}\n") >= 2  # in the linear, behind its first tiles, and in the softmax
        return text.replace(f"    {WAITS}\n", "")

    monkeypatch.setattr(emit, "emit_sim_program", without)
    broken = LoadedProgram.from_image(program.image, "sim:0")
    with pytest.raises(SimulationError, match=r"qc_wait_for_kernels\(\) was not called"):
        broken(X)
    reset_simulated_gpu("sim:0")
