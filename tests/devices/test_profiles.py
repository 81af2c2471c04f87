"""Profiles on a device: an event before and after each launch, and nothing else is different from a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import CaptureRuleError, DeviceError, DeviceUnavailableError
from qcompiler.plan.plan import Launch, Select
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.sim import sim_stream

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_launches_are_timed_in_the_order_of_their_stream(device: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(2, 16)
    program = qc.qcompile(model, (x,), device=device)
    before = program(x)
    found = program.profile(x, rounds=2)
    launches = [n for n, step in enumerate(program.plan.entries[0].steps) if isinstance(step, Launch | Select)]
    assert [step.step for step in found.steps] == launches and all(step.us > 0 for step in found.steps)
    first, last = found.steps
    assert 0 <= first.begin_us < first.begin_us + first.us <= last.begin_us
    assert (first.paths, last.paths, found.device) == (("0",), ("2",), device)
    if device.startswith("sim"):
        assert found.machine is None and "they say nothing about a GPU" in str(found)
    else:
        assert found.machine is not None and found.machine.limits.bandwidth > 1e10
    assert torch.equal(program(x), before)


class Branches(nn.Module):
    """Two branches, which get a stream each, and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("sums", torch.zeros(2, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sums.add_(1)
        both = torch.softmax(self.left(x), -1) @ torch.softmax(self.right(x.flip(0)), -1).T
        return both, self.sums.clone()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_several_streams_are_profiled_with_their_waits_and_states_stay(device: str) -> None:
    x = torch.randn(2, 64)
    session = qc.qcompile(Branches().eval(), (x,), device=device).session()
    first, _ = session(x)
    found = session.profile(x, rounds=1)
    assert len(found.streams) > 1 and {step.stream for step in found.steps} == set(found.streams)
    second, sums = session(x)
    assert torch.equal(first, second) and (sums == 2).all()  # those of two calls, and not of many


@pytest.mark.slow
def test_a_profile_inside_a_capture_is_refused() -> None:
    x = torch.randn(2, 16)
    program = qc.qcompile(nn.Linear(16, 8).eval(), (x,), device="sim:0")
    backend = registry.backend("sim:0", program.run.isa)
    stream = backend.stream("theirs")
    with sim_stream(stream):
        backend.begin_capture(stream)
        with pytest.raises(CaptureRuleError, match="nothing can be timed"):
            program.profile(x)


def test_timers_need_records_that_are_over(rig: Any) -> None:
    begin, end = rig.backend.timer("begin"), rig.backend.timer("end")
    with pytest.raises(DeviceError):
        rig.backend.elapsed(begin, end)
    stream = rig.backend.stream("timed")
    rig.backend.record(begin, stream)
    rig.backend.record(end, stream)
    rig.backend.synchronize(stream)
    assert rig.backend.elapsed(begin, end) >= 0


def test_the_cpu_has_no_timers() -> None:
    backend = registry.backend("cpu", "generic")
    with pytest.raises(DeviceUnavailableError, match="host's clock"):
        backend.timer()
