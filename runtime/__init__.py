"""Loads and runs programs, without torch and without xdsl.

run = qcompiler.runtime.load("model.qca")
y = run(x)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qcompiler.errors import CompilerMissingError, MissingDependencyError
from qcompiler.runtime.builds import Trust
from qcompiler.runtime.device_array import DeviceArray
from qcompiler.runtime.graph import CapturedGraph
from qcompiler.runtime.image import NativeLibrary, ProgramImage, ProgramTarget, build_image
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.program_file import Verify, load_image, offers, save_image
from qcompiler.runtime.session import Session

__all__ = [
    "CapturedGraph",
    "DeviceArray",
    "LoadedProgram",
    "NativeLibrary",
    "ProgramImage",
    "ProgramTarget",
    "Session",
    "build_image",
    "host_isa",
    "load",
    "reset_simulated_gpu",
    "save_image",
]


def load(
    path: str | Path,
    *,
    device: str | None = None,
    devices: Sequence[str] | None = None,
    stream: Any = None,
    num_threads: int | None = None,
    trust_native: Trust = False,
    verify: Verify = "auto",
    stepwise: bool = False,
    copy: bool = False,
    trust_operators: Sequence[str] = (),
) -> LoadedProgram:
    """Loads a `.qca` file and makes it ready to run on `device`: "cpu", "cuda:1", or "sim:0", the simulated GPU.

    Its weights are mapped.  If the file is overwritten in place, the program changes; `session()` and `save` detect
    this and raise ChangedFileError.  If the file is cut, the process ends.  With `copy=True` the weights are read into
    memory first, all digests are checked there, and the file is not needed any more.  A new file under the same name,
    as written by `save`, does not affect a loaded program.

    Its kernels come from the user's own cache, or are emitted again from the plan and compiled.  A native build inside
    the file runs only with `trust_native=True`, `"sha256:<its digest>"`, or several digests; then the best trusted
    build for this machine runs, without a compiler.  `verify="full"` checks all weights' digests; `"auto"` does so
    unless the file is recorded as checked and unchanged.

    Without `device` a program runs on the kind it was compiled for: cpu, or cuda:0.  A program for several devices uses
    those after `device`, or those that `devices` names.  `stream` is the caller's stream for every call, if it is
    neither torch's current one nor the default one.  `num_threads` (cpu) defaults to `QC_NUM_THREADS`, else to what
    affinity and the cgroup's quota allow.  `stepwise` runs the plan from Python on the CPU, too.

    A program that was compiled with `fallback="torch"` needs torch.  The torch operators that it names must be on the
    list of operators that only compute (docs/fallback.md), or among `trust_operators`, such as ["mylib.foo.default"],
    whose definitions the caller imports.

    Raises ProgramFileError's subclasses for a file that cannot be used, PlanError and ScheduleError for a plan that is
    not safe, DeviceUnavailableError, CompilerMissingError, CompileFailedError.
    """
    image, native = load_image(
        path, verify=verify, trust_native=trust_native, device=device, devices=devices, copy=copy
    )
    image = replace(image, trusted_operators=frozenset(trust_operators))
    try:
        return LoadedProgram.from_image(
            image, device, devices=devices, stream=stream, num_threads=num_threads, native=native, stepwise=stepwise
        )
    except (CompilerMissingError, MissingDependencyError) as error:
        raise type(error)(f"{path}: {error}{offers(path, device, devices)}") from error


def reset_simulated_gpu(device: str = "sim:0") -> None:
    """Makes a simulated GPU usable again after a finding; programs loaded there before are lost.

    A finding stays with its device, as a GPU's error stays with its context: every later call there raises it.
    """
    from qcompiler.runtime.sim.device import reset

    reset(device)
