"""What is left of a finding: the device it was found on is broken until it is reset, and then nothing of it is left."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from by_path import ROOT

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError, SimulationError
from qcompiler.runtime import reset_simulated_gpu
from qcompiler.runtime.sim.device import machine, sim_device
from qcompiler.runtime.sim.queue import Work

KINDS = (
    "race", "barrier-divergence", "exited-before-barrier", "uninitialised-read", "cp-async-pending", "wgmma-order",
    "out-of-bounds", "undeclared-access", "before-wait", "wrong-device", "unwritten-output",
    "shuffle-mask", "misaligned", "bad-launch", "timeout", "self-check", "trap", "unordered-access", "use-after-free",
)  # fmt: skip
"""As docs/simulated-gpu.md lists them."""


def test_these_are_the_kinds_of_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "simulated-gpu.md").read_text(), re.MULTILINE)
    assert [kind for row in rows for kind in re.findall(r"`([^`]+)`", row)] == list(KINDS)
    assert f"{len(KINDS)} kinds" in (ROOT / "docs" / "security.md").read_text()


def found(device: int, kind: str) -> SimulationError:
    """An operation of the device ends with a finding of this kind; what raises when somebody waits."""

    def run(seed: int) -> Iterator[Any]:
        raise SimulationError(f"planted {kind}", kind)

    owner = sim_device(device)
    owner.enqueue(owner.stream("planted", "nonblocking"), Work("kernel", "a planted kernel", device, action=run))
    with pytest.raises(SimulationError) as caught:
        owner.synchronize(None)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_a_finding_stays_with_its_device_until_that_is_reset(sim: Any, other: Any, kind: str) -> None:
    x, y, stream = sim.full(3), sim.empty("y"), sim.stream()
    event = sim.mark(stream)
    assert found(0, kind).finding == kind
    uses: dict[str, Callable[[], object]] = {
        "launch": lambda: sim.double(stream, x, y), "allocate": lambda: sim.empty("more"),
        "copy": lambda: sim.copy(stream, y, x), "upload": lambda: sim.fill(stream, y, 1.0),
        "download": lambda: sim.read(y, stream), "record": lambda: sim.mark(stream),
        "wait": lambda: sim.backend.wait(stream, event), "synchronize": sim.backend.synchronize,
        "query": lambda: sim.backend.query(stream), "ask": lambda: sim.backend.query(event),
        "capture": lambda: sim.backend.begin_capture(stream),
    }  # fmt: skip
    for name, use in uses.items():
        for _ in range(2):
            with pytest.raises(SimulationError, match="planted") as caught:
                use()
            assert caught.value.finding == kind, name
            assert "reset_simulated_gpu('sim:0')" in str(caught.value)
    assert (other.read(other.full(2)) == 2).all(), "the other device goes on"
    reset_simulated_gpu("sim:0")
    x, y, stream = sim.full(3), sim.empty("y"), sim.stream()
    sim.double(stream, x, y)
    assert (sim.read(y, stream) == 6).all()


def test_what_lay_on_a_device_is_lost_by_its_reset(sim: Any) -> None:
    x, y, stream = sim.full(3, "before"), sim.empty("y"), sim.stream()
    reset_simulated_gpu("sim:0")
    with pytest.raises(SimulationError, match=r"'before \(lost when sim:0 was reset\)'") as caught:
        sim.double(stream, x, y)
    assert caught.value.finding == "use-after-free"
    x.close()
    del y
    assert (sim.read(sim.full(2)) == 2).all()


def test_what_was_under_way_never_happens_after_a_finding(sim: Any) -> None:
    """A download would write to host memory that the caller has freed by now."""
    x, stream, host = sim.full(3), sim.stream(), np.zeros(sim.n, np.float32)
    raw, y = sim.empty("raw"), sim.empty("y")
    one = sim.stream("one")
    sim.double(one, raw, y)
    sim.backend.download(stream, host.ctypes.data, x.address, host.nbytes)
    machine().run_now(one.tail)
    with pytest.raises(SimulationError):
        machine().raise_findings(0)
    reset_simulated_gpu("sim:0")
    machine().drop_all()
    assert not host.any()


def test_a_device_that_waits_for_a_broken_one_is_broken(sim: Any, other: Any) -> None:
    """Its operation was not carried out, so its memory lacks what the program thinks it holds."""
    first, second = sim.stream("first"), other.stream("second")
    raw, y, z = sim.empty("raw"), sim.empty("y"), other.full(5)
    sim.double(first, raw, y)
    sim.order(first, second)
    other.fill(second, z, 1.0)
    with pytest.raises(SimulationError, match=r"stream 'first' of sim:0.*uninitialised-read"):
        other.backend.synchronize()
    with pytest.raises(SimulationError, match=r"sim:1 cannot be used after a finding.*stream 'first' of sim:0"):
        other.read(z)
    for device in ("sim:1", "sim:0"):
        reset_simulated_gpu(device)
    assert (other.read(other.full(2)) == 2).all()


@pytest.mark.parametrize("kind", ["out-of-bounds", "use-after-free", "wrong-device"])
def test_a_call_that_is_refused_before_it_runs_breaks_nothing(sim: Any, other: Any, kind: str) -> None:
    x, y, stream = sim.full(3), sim.empty("y"), sim.stream()
    gone = sim.empty("gone")
    address = gone.address
    gone.close()
    there = other.full(1)
    refused: dict[str, Callable[[], object]] = {
        "out-of-bounds": lambda: sim.backend.copy(stream, y.address, x.address, 4 * sim.n + 4),
        "use-after-free": lambda: sim.backend.copy(stream, y.address, address, 4 * sim.n),
        "wrong-device": lambda: sim.double(stream, there, y),
    }
    with pytest.raises(SimulationError) as caught:
        refused[kind]()
    assert caught.value.finding == kind
    sim.double(stream, x, y)
    assert (sim.read(y, stream) == 6).all()


def test_a_broken_device_lets_a_capture_end(sim: Any) -> None:
    stream = sim.stream()
    sim.backend.begin_capture(stream)
    machine()._broken[0] = SimulationError("planted", "race")
    with pytest.raises(CaptureRuleError, match="end the capture before"):
        reset_simulated_gpu("sim:0")
    sim.finish(stream)
    reset_simulated_gpu("sim:0")
    assert (sim.read(sim.full(2)) == 2).all()


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "sim:9", "sim", "sim:x"])
def test_only_simulated_gpus_are_reset(name: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="sim:0 … sim:7"):
        reset_simulated_gpu(name)


def test_the_engine_reports_an_overwritten_red_zone_each_time(sim: Any) -> None:
    memory = sim.empty("guarded")
    byte = (ctypes.c_uint8).from_address(memory.address + 4 * sim.n)
    kept = byte.value
    byte.value = kept ^ 0xFF
    for _ in range(2):
        with pytest.raises(SimulationError, match="was overwritten"):
            sim.backend.synchronize()
    byte.value = kept
    sim.backend.synchronize()
