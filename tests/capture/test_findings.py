"""A racy program and a sound one in one process: no wrong number, and no race that is found only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from qcompiler.errors import SimulationError
from qcompiler.plan.plan import Plan, Wait
from qcompiler.runtime import LoadedProgram, reset_simulated_gpu
from qcompiler.runtime.backends import registry
from qcompiler.runtime.placement import SlotDevice
from qcompiler.runtime.sim.device import captures, machine


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    captures().abandon_all()
    machine().drop_all()


def without_waits(plan: Plan) -> Plan:
    """y is computed beside h, which it reads."""
    entries = [
        msgspec.structs.replace(entry, steps=tuple(step for step in entry.steps if not isinstance(step, Wait)))
        for entry in plan.entries
    ]
    return msgspec.structs.replace(plan, entries=tuple(entries))


def load_unverified(image: Any, device: str) -> LoadedProgram:
    """As `from_image`, which would refuse the plan."""
    backend = registry.backend(device, image.target.isa)
    build = backend.build(image.plan)
    slots = {
        slot.name: SlotDevice(slot.name, backend, build, backend.load(image.plan, build)) for slot in image.plan.devices
    }
    return LoadedProgram(image, slots)


@pytest.mark.parametrize("captured", [False, True])
def test_a_racy_program_is_found_each_time_and_a_sound_one_is_right_or_refused(small: Any, captured: bool) -> None:
    racy_image = dataclasses.replace(small.image, plan=without_waits(small.image.plan))
    x = small.x(3)
    sound = LoadedProgram.from_image(small.image, "sim:0")
    want = {name: value.tobytes() for name, value in sound(x).items()}
    sound.reset()
    for round_ in range(4):
        machine().reseed(round_)
        racy = load_unverified(racy_image, "sim:0")
        with pytest.raises(SimulationError) as caught:
            racy.capture(x).replay(x) if captured else racy(x)
        assert caught.value.finding == "unordered-access"
        for program in (sound, racy):
            with pytest.raises(SimulationError, match="reset_simulated_gpu"):
                program(x)
        with pytest.raises(SimulationError, match="reset_simulated_gpu"):
            LoadedProgram.from_image(small.image, "sim:0")
        reset_simulated_gpu("sim:0")
        with pytest.raises(SimulationError, match="lost when sim:0 was reset"):
            sound(x)
        sound = LoadedProgram.from_image(small.image, "sim:0")
        assert {name: value.tobytes() for name, value in sound(x).items()} == want
        sound.reset()
