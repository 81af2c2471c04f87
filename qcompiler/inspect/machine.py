"""The machine as `qc doctor` finds it: processor, compilers, GPUs, and what they reach; reasons for what is missing."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qcompiler.errors import QCompilerError
from qcompiler.kernels.cost import device_cost
from qcompiler.runtime import nvrtc
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.cuda import CudaBackend, device_count
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.isa import cpuinfo_fields, cpuinfo_flags, resolve_isa
from qcompiler.runtime.limits import Limits, cpu_limits
from qcompiler.runtime.profile_device import Plug
from qcompiler.runtime.streams import Queue
from qcompiler.runtime.threads import cgroup_cpus, default_threads, usable_cpus

FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512vbmi", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "avx512_fp16",
)  # fmt: skip
"""Features by the names of /proc/cpuinfo. The last one is shown though no kernel uses it; those of AMX before it are
used where the system lets them (runtime/amx.py)."""

UNUSED = FEATURES[-1:]
CPUINFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Processor:
    """`features` and `lacks` divide those of FEATURES that kernels use; `unused` are there, and no kernel uses them."""

    name: str
    isa: str
    features: tuple[str, ...]
    lacks: tuple[str, ...]
    unused: tuple[str, ...]
    processors: int
    threads: int
    quota: float | None
    caches: dict[str, str]
    memory: int
    limits: Limits | None
    limits_missing: str


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that qcompiler looks for, in its order; `used` is the first that exists."""

    name: str
    path: str
    version: str
    used: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU: its bandwidth is that of copies, in bytes per second; its rates are published figures of `like`."""

    device: str
    name: str
    arch: str
    driver: str
    memory: int
    free: int
    bandwidth: float
    like: str
    fp32: float
    tensor: float


def processor(*, measure: bool = True) -> Processor:
    """The CPU; with `measure` also what it reaches on all threads, which takes a second or two the first time."""
    flags = cpuinfo_flags(CPUINFO)
    known, threads, isa = flags or frozenset(), default_threads(), resolve_isa(None)
    limits, missing = None, "not asked for"
    if measure:
        try:
            limits, missing = cpu_limits(threads, isa), ""
        except QCompilerError as error:
            missing = str(error)
    return Processor(
        _model(), isa, tuple(each for each in FEATURES if each in known and each not in UNUSED),
        tuple(each for each in FEATURES if each not in known and each not in UNUSED) if flags is not None else (),
        tuple(each for each in UNUSED if each in known), usable_cpus(), threads, cgroup_cpus(), _caches(),
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), limits, missing,
    )  # fmt: skip


def _model() -> str:
    return (cpuinfo_fields(CPUINFO) or {}).get("model name") or platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """The caches of the first processor: {"L1 data": "32K", "L2": "1024K"}. Some virtual machines name caches without a
    size, which are left out."""
    found = {}
    for folder in sorted(CACHES.glob("index*")):
        files = [folder / name for name in ("level", "type", "size")]
        if not all(file.is_file() for file in files):
            continue
        level, kind, size = (file.read_text().strip() for file in files)
        if kind != "Instruction":
            found[f"L{level}" + (" data" if kind == "Data" else "")] = size
    return found


def compilers() -> list[Compiler]:
    """The compilers that are there, in the order in which one is chosen. One that does not answer says so."""
    try:
        used = find_compiler().command
    except QCompilerError:
        used = ()
    found = []
    for name in ("QC_CXX", "CXX", "g++", "clang++", "c++"):
        try:
            command = shlex.split(os.environ.get(name, "")) if name.isupper() else [name]
        except ValueError as error:
            found.append(Compiler(name, os.environ[name], f"cannot be read: {error}", used=False))
            continue
        path = shutil.which(command[0]) if command else None
        if path is not None:
            same = (path if not name.isupper() else command[0], *command[1:]) == used
            found.append(Compiler(name, shlex.join([path, *command[1:]]), _version([path, *command[1:]]), same))
    return found


def _version(command: list[str]) -> str:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"
    return done.stdout.splitlines()[0] if done.stdout and not done.returncode else f"`--version` gave {done.returncode}"


def nvrtc_versions() -> dict[str, str]:
    """NVRTC for sm_75 and later, and CUDA 12's for sm_70: the version, or why there is none."""
    return {
        "sm_75 and later": _or_reason(lambda: nvrtc.compiler_version("sm_80")),
        "sm_70": _or_reason(lambda: nvrtc.compiler_version("sm_70")),
    }


def _or_reason(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except QCompilerError as error:
        return f"missing: {error}"


def gpus(*, measure: bool = True) -> tuple[list[Gpu], list[str]]:
    """The GPUs, and the reasons: why there is none, or why one cannot be used."""
    try:
        count = device_count()
    except QCompilerError as error:
        return [], [str(error)]
    found: list[Gpu] = []
    problems = [] if count else ["no GPU with an NVIDIA driver; sim:0 simulates one"]
    for index in range(count):
        try:
            found.append(_gpu(index, measure=measure))
        except QCompilerError as error:
            problems.append(f"cuda:{index}: {error}")
    return found, problems


def _gpu(index: int, *, measure: bool) -> Gpu:
    device = f"cuda:{index}"
    backend = registry.backend(device, registry.architecture(device))
    assert isinstance(backend, CudaBackend)
    name, memory, free, version = backend.facts()
    bandwidth = Plug(Queue(backend, backend.stream("doctor"))).bandwidth if measure else 0.0
    figures = device_cost(backend.isa)
    driver = f"{version // 1000}.{version % 1000 // 10}"
    return Gpu(device, name, backend.isa, driver, memory, free, bandwidth, figures.name, figures.fp32 * 1e6,
               figures.tensor * 1e6)  # fmt: skip
