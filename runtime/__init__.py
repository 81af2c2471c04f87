"""Loads and runs programs, without torch and without xdsl.

run = qcompiler.runtime.load("model.qca")
y = run(x)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qcompiler.errors import DeviceUnavailableError
from qcompiler.runtime.image import NativeLibrary, ProgramImage, Target, build_image
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.loaded import LoadedProgram, check_device
from qcompiler.runtime.program_file import Verify, load_image, save_image
from qcompiler.runtime.session import Session

__all__ = [
    "LoadedProgram",
    "NativeLibrary",
    "ProgramImage",
    "Session",
    "Target",
    "build_image",
    "host_isa",
    "load",
    "save_image",
]


def load(
    path: str | Path,
    *,
    device: str | None = None,
    stream: Any = None,
    num_threads: int | None = None,
    trust_native: bool | str = False,
    verify: Verify = "auto",
    stepwise: bool = False,
) -> LoadedProgram:
    """Loads a `.qca` file and makes it ready to run.

    Its weights are mapped. Its kernels come from the user's own cache, or are emitted again from the plan and compiled;
    the native build inside the file runs only with `trust_native=True` or `"sha256:<its digest>"`.  `verify="full"`
    checks all weights' digests, `"auto"` does so unless the file is known and unchanged since.  `num_threads` defaults
    to `QC_NUM_THREADS`, else to what affinity and the cgroup's quota allow.  `stepwise` walks the plan from Python.

    Raises ProgramFileError's subclasses for a file that cannot be used, PlanError and ScheduleError for a plan that is
    not safe, DeviceUnavailableError, CompilerMissingError, CompileFailedError.
    """
    check_device(device)
    if stream is not None:
        raise DeviceUnavailableError("stream= belongs to a GPU; on cpu a call is done when it returns")
    image, native = load_image(path, verify=verify, trust_native=trust_native)
    return LoadedProgram.from_image(image, device, num_threads=num_threads, native=native, stepwise=stepwise)
