"""Programs for a GPU built by hand, on every simulated device and on cuda:0 where there is one.

`small` (tests/support/hand_plans.py): two streams, an event, a state, an init table, a packed weight, a select.

`double`: y = 2 x over 0 to 64 values.    `total`: a + b.    `hop`: 2 (x + 1), the product on a second device.

`split`: (x + 1) + 2 x, the product there, both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_plans import Small, arguments, constant, loop, op, operand, small_on_gpu, view

from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    DeviceSlot,
    EntryPoint,
    Event,
    Launch,
    Plan,
    Record,
    Signature,
    Stream,
    Symbol,
    TensorSig,
    Wait,
)
from qcompiler.plan.weights import WeightStore
from qcompiler.runtime import LoadedProgram, ProgramImage, ProgramTarget, build_image
from qcompiler.runtime.backends import registry

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels are compiled into a cache of this test run."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("cache")
    patch.setenv("QC_CACHE_DIR", str(path))
    patch.delenv("QC_SIM_CHECK", raising=False)
    yield path
    patch.undo()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def small(own_cache: Path) -> Small:
    return small_on_gpu()


@pytest.fixture
def run(small: Small, device: str) -> LoadedProgram:
    """The small program on the device, with states of its own."""
    return LoadedProgram.from_image(small.image, device)


# --- double and hop --------------------------------------------------------------------------------------------------


def scale(name: str, operation: str, value: float) -> KernelSpec:
    return loop(
        name, ("n",), (operand("x", ("n",), "r"), operand("y", ("n",), "w")), ((1,), (1,)),
        constant(value), op("v", operation, "in0", "c"), symbols=("n",),
    )  # fmt: skip


ADD = loop(
    "add", ("n",), (operand("a", ("n",), "r"), operand("b", ("n",), "r"), operand("y", ("n",), "w")),
    ((1,), (1,), (1,)), op("v", "arith.addf", "in0", "in1"), symbols=("n",),
)  # fmt: skip


def vectors(
    plan: dict[str, Any], steps: tuple[Any, ...], places: dict[str, tuple[str, Any]], signature: Signature | None = None
) -> ProgramImage:
    """A program over vectors -> y of n in 0…64 values; `places` maps buffers to (slot, arena kind)."""
    inputs = tuple(
        TensorSig(name=name, arena=name, dtype="f32", shape=("n",))
        for name, (_, kind) in places.items()
        if kind == "input"
    )
    plan = plan | {
        "arenas": tuple(
            Arena(name=name, device=slot, kind=kind, nbytes=256, entry="main") for name, (slot, kind) in places.items()
        ),
        "buffers": tuple(Buffer(name=name, arena=name, offset=0, nbytes=256) for name in places),
        "kernels": (scale("twice", "arith.mulf", 2.0), scale("plus_one", "arith.addf", 1.0), ADD),
        "entries": (
            EntryPoint(
                name="main",
                symbols=(Symbol(name="n", min=0, max=64),),
                inputs=inputs,
                outputs=(TensorSig(name="y", arena="y", dtype="f32", shape=("n",)),),
                steps=steps,
            ),
        ),
    }
    return build_image(
        Plan(**plan), signature or arguments(), WeightStore(), target=ProgramTarget(kind="cuda", isa="sm_80")
    )


@pytest.fixture(scope="session")
def double(own_cache: Path) -> ProgramImage:
    plan = {
        "devices": (DeviceSlot(name="gpu", kind="cuda"),),
        "streams": (Stream(name="s0", device="gpu"),),
        "events": (),
    }
    step = Launch(kernel="twice", stream="s0", operands=(view("x", "n"), view("y", "n")))
    return vectors(plan, (step,), {"x": ("gpu", "input"), "y": ("gpu", "output")})


@pytest.fixture(scope="session")
def total(own_cache: Path) -> ProgramImage:
    """f(a, b) -> a + b"""
    plan = {
        "devices": (DeviceSlot(name="gpu", kind="cuda"),),
        "streams": (Stream(name="s0", device="gpu"),),
        "events": (),
    }
    step = Launch(kernel="add", stream="s0", operands=(view("a", "n"), view("b", "n"), view("y", "n")))
    places: dict[str, tuple[str, Any]] = {"a": ("gpu", "input"), "b": ("gpu", "input"), "y": ("gpu", "output")}
    return vectors(plan, (step,), places, arguments(2))


@pytest.fixture(scope="session")
def hop(own_cache: Path) -> ProgramImage:
    plan = {
        "devices": (DeviceSlot(name="near", kind="cuda"), DeviceSlot(name="far", kind="cuda", index=1)),
        "streams": (Stream(name="s", device="near"), Stream(name="t", device="far")),
        "events": (Event(name="there"), Event(name="back")),
    }
    steps = (
        Launch(kernel="plus_one", stream="s", operands=(view("x", "n"), view("a", "n"))),
        Record(stream="s", event="there"),
        Wait(stream="t", event="there"),
        Copy(stream="t", source=view("a", "n"), target=view("b", "n")),
        Launch(kernel="twice", stream="t", operands=(view("b", "n"), view("c", "n"))),
        Record(stream="t", event="back"),
        Wait(stream="s", event="back"),
        Copy(stream="s", source=view("c", "n"), target=view("y", "n")),
    )
    places: dict[str, tuple[str, Any]] = {
        "x": ("near", "input"), "a": ("near", "activations"), "b": ("far", "activations"),
        "c": ("far", "activations"), "y": ("near", "output"),
    }  # fmt: skip
    return vectors(plan, steps, places)


@pytest.fixture(scope="session")
def split(own_cache: Path) -> ProgramImage:
    """(x + 1) + 2 x, the product on a second device, which waits for nothing that the first one computes."""
    plan = {
        "devices": (DeviceSlot(name="near", kind="cuda"), DeviceSlot(name="far", kind="cuda", index=1)),
        "streams": (Stream(name="s", device="near"), Stream(name="t", device="far")),
        "events": (Event(name="back"),),
    }
    steps = (
        Copy(stream="t", source=view("x", "n"), target=view("b", "n")),
        Launch(kernel="twice", stream="t", operands=(view("b", "n"), view("c", "n"))),
        Record(stream="t", event="back"),
        Launch(kernel="plus_one", stream="s", operands=(view("x", "n"), view("a", "n"))),
        Wait(stream="s", event="back"),
        Copy(stream="s", source=view("c", "n"), target=view("d", "n")),
        Launch(kernel="add", stream="s", operands=(view("a", "n"), view("d", "n"), view("y", "n"))),
    )
    places: dict[str, tuple[str, Any]] = {
        "x": ("near", "input"), "a": ("near", "activations"), "b": ("far", "activations"),
        "c": ("far", "activations"), "d": ("near", "activations"), "y": ("near", "output"),
    }  # fmt: skip
    return vectors(plan, steps, places)


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Whether two result trees are equal to the bit."""

    def check(a: Any, b: Any) -> bool:
        return a.keys() == b.keys() and all(np.asarray(a[k]).tobytes() == np.asarray(b[k]).tobytes() for k in a)

    return check
