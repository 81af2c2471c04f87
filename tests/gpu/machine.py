"""The machine that `make gpu-check` runs on, as it is found: asked of the driver and of nvidia-smi, never set.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = (
    "numpy", "torch", "triton", "pytest", "hypothesis", "cuda-core", "cuda-bindings", "cuda-pathfinder", "ml_dtypes",
    "msgspec", "safetensors", "xdsl", "rich", "bitsandbytes", "transformers", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip
TOOLS = ("g++", "nvcc", "ncu", "compute-sanitizer", "nvidia-smi")

ATTRIBUTES = {
    "multiprocessors": 16, "l2_bytes": 38, "shared_per_block_optin": 97, "shared_per_multiprocessor": 81,
    "registers_per_multiprocessor": 82, "clock_khz": 13, "memory_clock_khz": 36, "bus_bits": 37,
}  # fmt: skip
"""Our name -> CUdevice_attribute."""

CLOCKS = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit", "temperature.gpu",
    "utilization.gpu", "memory.used", "clocks_event_reasons.active", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
"""What nvidia-smi is asked for."""

TREE = ("qcompiler", "passes", "kernels", "runtime", "benchmarks", "tests")
TREE_FILES = (".py", ".h", ".cpp", ".cuh")


def driver() -> Any:
    """libcuda. OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def gpus() -> tuple[int, str]:
    """(how many, why not): asked of the driver itself, before anything is installed."""
    try:
        found = driver()
    except OSError as error:
        return 0, f"no CUDA driver ({error})"
    if status := found.cuInit(0):
        return 0, f"the driver does not start (cuInit gave {status})"
    count = ctypes.c_int()
    found.cuDeviceGetCount(ctypes.byref(count))
    return count.value, "" if count.value else "the driver sees no device"


def is_stub() -> bool:
    """Whether tests/gpu/stub_driver.cpp stands in the driver's place."""
    return hasattr(driver(), "stub_calls")


def device() -> dict[str, Any]:
    """The GPU's fields of the schema's Environment."""
    found = driver()
    name, number = ctypes.create_string_buffer(256), ctypes.c_int()
    version, memory = ctypes.c_int(), ctypes.c_size_t()
    found.cuDeviceGet(ctypes.byref(number), 0)
    found.cuDeviceGetName(name, 256, number)
    found.cuDeviceTotalMem_v2(ctypes.byref(memory), number)
    found.cuDriverGetVersion(ctypes.byref(version))

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        found.cuDeviceGetAttribute(ctypes.byref(value), which, number)
        return value.value

    return {
        "name": name.value.decode(),
        "capability": f"{attribute(75)}.{attribute(76)}",  # COMPUTE_CAPABILITY_MAJOR, _MINOR
        "memory_gib": memory.value >> 30,
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "attributes": {each: attribute(which) for each, which in ATTRIBUTES.items()},
    }


def software(site: Path) -> dict[str, Any]:
    """The other fields of Environment; what is installed in `site` counts first."""
    return {
        "python": platform.python_version(),
        "packages": {each: version_of(each, site) for each in PACKAGES},
        "tools": {each: shutil.which(each) for each in TOOLS},
        "cores": len(os.sched_getaffinity(0)),
        "tree": tree_digest(),
        "commit": commit(),
    }


def version_of(package: str, site: Path) -> str | None:
    path = [str(site), *sys.path]
    return next((found.version for found in metadata.distributions(name=package, path=path)), None)


def clocks() -> dict[str, str]:
    """What nvidia-smi says now; empty without it. A field that this driver does not know is left out by asking again
    one at a time."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    if (all_at_once := _query(program, CLOCKS)) is not None:
        return all_at_once
    found: dict[str, str] = {}
    for name in CLOCKS:
        found.update(_query(program, (name,)) or {})
    return found


def _query(program: str, names: tuple[str, ...]) -> dict[str, str] | None:
    command = [program, f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    values = [each.strip() for each in done.stdout.strip().split(",")]
    return dict(zip(names, values, strict=True)) if not done.returncode and len(values) == len(names) else None


def tree_digest() -> str:
    """Of every source file: a step that passed on this tree need not run again."""
    state = hashlib.sha256()
    for folder in TREE:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in TREE_FILES and "__pycache__" not in file.parts:
                state.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:16]


def commit() -> str:
    """Empty outside a checkout."""
    program = shutil.which("git")
    if program is None:
        return ""
    command = [program, "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if not done.returncode else ""
