"""Runs programs on the simulated GPU, which checks every access: uninitialised memory, bounds, races, alignment.

The kernels of many programs are compiled together.  They run in a forked child, since what a wrong program does to the
process is not known; the child says which program it has begun and how each ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any
from unittest import mock

import numpy as np
from handmade import replace

from qcompiler.errors import (
    ArgumentError,
    DeviceError,
    IndexOutOfRangeError,
    KernelSelectionError,
    OutOfMemoryError,
    QCompilerError,
    SimulationError,
)
from qcompiler.kernels.cuda import emit
from qcompiler.plan.dims import dim
from qcompiler.plan.plan import Plan
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import loaded
from qcompiler.runtime.backends import registry
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.placement import SlotDevice
from qcompiler.runtime.sim import engine
from qcompiler.runtime.sim.device import captures, machine

ARCH = "sm_80"
SEEDS = (0, 3)
MOST_BYTES = 1 << 22
NOT_FINDINGS = (KernelSelectionError, ArgumentError, IndexOutOfRangeError)
"""What a call may say before anything is launched, or about an index."""


def text_of(image: ProgramImage) -> str:
    """What would be compiled. QCompilerError if the emitter refuses the program."""
    return emit.emit_sim_program(image.plan, ARCH)


def judge(images: Sequence[ProgramImage]) -> list[str]:
    """ "clean", "not run" or what was found, for each program."""
    kernels = [
        replace(spec, name=f"m{number}_{i}")
        for number, image in enumerate(images)
        for i, spec in enumerate(image.plan.kernels)
    ]
    backend = registry.backend("sim:0", ARCH)
    build = backend.build(replace(images[0].plan, kernels=tuple(kernels)))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            ready = backend.load(replace(images[0].plan, kernels=tuple(kernels)), build)
            for number, image in enumerate(images):
                os.write(writer, f"{number} began\n".encode())
                own = {spec.name: ready[f"m{number}_{i}"] for i, spec in enumerate(image.plan.kernels)}
                verdict = _run(image, SlotDevice(image.plan.devices[0].name, backend, build, own))
                os.write(writer, f"{number} {verdict}\n".replace("\n", " ").encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        lines = [line.split(" ", 1) for line in said.read().splitlines() if line]
    _, status = os.waitpid(child, 0)
    found = {int(number): verdict.strip() for number, verdict in lines}
    last = max(found, default=-1)
    if found.get(last) == "began":
        found[last] = f"the process ended with status {status}"
    rest = list(images[last + 1 :])
    return [found[i] for i in range(last + 1)] + (judge(rest) if rest else [])


def _sizes(plan: Plan) -> list[dict[str, int]]:
    entry = plan.entries[0]
    lows, highs = ({s.name: getattr(s, end) for s in entry.symbols} for end in ("min", "max"))
    return [lows, highs] if lows != highs else [highs]


def _arguments(plan: Plan, symbols: dict[str, int], seed: int) -> list[Any] | None:
    rng = np.random.default_rng(seed)
    found = []
    for sig in (*plan.entries[0].inputs, *plan.entries[0].outputs):
        shape = tuple(dim(extent).evaluate(symbols) for extent in sig.shape)
        if min(shape, default=0) < 0 or int(np.prod(shape)) > MOST_BYTES:
            return None
        whole = sig.dtype in ("i64", "i32", "i16", "i8", "ui8", "i1")
        values = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
        if whole and seed == SEEDS[-1] and sig.dtype in ("i64", "i32"):
            values = rng.choice(np.array([-1, 7, 1 << 20, -(1 << 31), (1 << 31) - 1]), shape)  # wild indices
        found.append(np.ascontiguousarray(values.astype(NUMPY_DTYPES[sig.dtype])))
    return found[: len(plan.entries[0].inputs)]


def _run(image: ProgramImage, slot: SlotDevice) -> str:
    plan = image.plan
    if any(arena.nbytes > MOST_BYTES and arena.kind not in ("input", "output") for arena in plan.arenas):
        return "not run"
    try:
        with mock.patch.object(engine, "_source_lines", lambda library, offset: []):
            for symbols in _sizes(plan):
                answers = []
                for order in SEEDS:
                    machine().reseed(order)
                    program = loaded.LoadedProgram(changed(image), {slot.name: slot})
                    arguments = _arguments(plan, symbols, 0)
                    if arguments is None:
                        return "not run"
                    answers.append([np.asarray(each).tobytes() for each in program(*arguments)])
                if answers[0] != answers[1]:
                    return "another answer in another order"
                wild = _arguments(plan, symbols, SEEDS[-1])
                if wild is not None:
                    loaded.LoadedProgram(changed(image), {slot.name: slot})(*wild)
    except SimulationError as error:
        return f"{getattr(error, 'finding', 'finding')}: {str(error)[:250]}"
    except NOT_FINDINGS:
        return "clean"
    except OutOfMemoryError:  # an argument that may be of a terabyte
        return "not run"
    except DeviceError as error:
        return f"device error: {str(error)[:200]}"
    except QCompilerError as error:
        return f"refused late, {type(error).__name__}: {str(error)[:200]}"
    except Exception as error:
        return f"escaped, {type(error).__name__}: {str(error)[:200]}"
    finally:
        with machine().entry():
            captures().abandon_all()
        machine().drop_all()
    return "clean"
