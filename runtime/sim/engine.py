"""The engine of the simulated GPU: compiles emitted CUDA C++ for this machine, owns device memory, runs launches.

    library = engine().load(compile_sim(emit_sim_module(specs, "sm_80"), checked=True, name="demo"))
    x = engine().allocate(0, 4096, "x")                       # an address that NumPy may view
    engine().launch(LaunchRequest(device=0, function=library.function("qk_scale"), name="qk_scale", grid=(4, 1, 1),
                                  block=(256, 1, 1), args=[x, n], ranges=[Range(x, x + 4096, "rw", "x")]))

The C++ side is in kernels/sim/; docs/simulated-gpu.md describes what each check finds.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from qcompiler.errors import DeviceUnavailableError, OutOfMemoryError, RuntimeFailure, SimulationError
from qcompiler.runtime.compiler import compile_library, find_compiler
from qcompiler.runtime.isa import host_isa

Access = Literal["r", "w", "rw"]

_SOURCES = (
    "float_state.h", "fiber.h", "memory.h", "state.h", "schedule.h", "warp.h", "check.h", "wgmma.h", "launch.h",
    "engine.cpp",
)  # fmt: skip
_ACCESS_BITS: dict[str, int] = {"r": 1, "w": 2, "rw": 3}
_CONSTANT_BIT = 4
_WRAPPED = ("memcpy", "memmove", "memset")


def checks_wanted() -> bool:
    """False if `QC_SIM_CHECK=0` asks for the build without access checks."""
    return os.environ.get("QC_SIM_CHECK", "1") != "0"


@dataclass(frozen=True)
class Range:
    """Bytes [lo, hi) that a launch may read ("r"), must write before it reads them ("w"), or both.

    No kernel writes what is `constant`.
    """

    lo: int
    hi: int
    access: Access
    label: str
    constant: bool = False


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch is simulated.

    `early_copies`: a cp.async may complete when it is issued instead of at its wait, at random (a device may do
    either).  `resident_blocks`: how many blocks may wait for each other at once; more become resident only when those
    before them poll.  `time_limit` and `spin_limit` are seconds: of the whole launch, and of polling without any other
    progress.
    """

    early_copies: bool = False
    resident_blocks: int = 64
    time_limit: float = 120.0
    spin_limit: float = 2.0


@dataclass(frozen=True)
class LaunchRequest:
    """One launch: `args` are pointers and int64 values in the kernel's order, `ranges` all memory it may touch.

    Where it `overlaps`, the kernels before it may still run when it starts.
    """

    device: int
    function: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: Sequence[int]
    ranges: Sequence[Range]
    shared_bytes: int = 0
    seed: int = 0
    overlaps: bool = False
    options: LaunchOptions = field(default_factory=LaunchOptions)


@dataclass(frozen=True)
class LaunchReport:
    """The result of a launch: merged byte intervals (lo, hi, "r" | "w") that it touched, bytes of "w" ranges that no
    thread wrote, the number of checked accesses, and seconds. Without checks, no accesses are seen: all are empty."""

    accesses: tuple[tuple[int, int, str], ...]
    unwritten: int
    checked_accesses: int
    seconds: float


def _bits_of(given: Range) -> int:
    return _ACCESS_BITS[given.access] | (_CONSTANT_BIT if given.constant else 0)


class _CRange(ctypes.Structure):
    _fields_ = (
        ("low", ctypes.c_uint64), ("high", ctypes.c_uint64), ("access", ctypes.c_uint64), ("label", ctypes.c_char_p),
    )  # fmt: skip


class _CLaunch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64), ("name", ctypes.c_char_p), ("args", ctypes.POINTER(ctypes.c_uint64)),
        ("ranges", ctypes.POINTER(_CRange)), ("arg_count", ctypes.c_uint64), ("range_count", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64), ("seed", ctypes.c_uint64), ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3), ("device", ctypes.c_int32), ("checked", ctypes.c_int32),
        ("early_copies", ctypes.c_int32), ("resident_blocks", ctypes.c_int32),
        ("overlaps", ctypes.c_int32), ("time_limit", ctypes.c_double),
        ("spin_limit", ctypes.c_double),
    )  # fmt: skip


class _CSite(ctypes.Structure):
    _fields_ = (("what", ctypes.c_char_p), ("address", ctypes.c_uint64), ("line", ctypes.c_uint64))


class _CInterval(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64), ("written", ctypes.c_uint64))


class _CReport(ctypes.Structure):
    _fields_ = (
        ("finding", ctypes.c_char * 32), ("message", ctypes.c_char * 4096), ("sites", _CSite * 6),
        ("site_count", ctypes.c_uint64), ("interval_count", ctypes.c_uint64), ("unwritten", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64), ("intervals", ctypes.POINTER(_CInterval)), ("seconds", ctypes.c_double),
    )  # fmt: skip


class _CModule(ctypes.Structure):
    """glibc's and musl's Dl_info."""

    _fields_ = (
        ("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("at", ctypes.c_void_p),
    )  # fmt: skip


@functools.cache
def _engine_source() -> str:
    """The engine as one text: its headers first, without their includes of each other."""
    folders = {"float_state.h": "cpu"}
    parts = []
    for name in _SOURCES:
        package = resources.files(f"qcompiler.kernels.{folders.get(name, 'sim')}")
        text = package.joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
        lines = ["" if line.startswith('#include "') else line for line in text.splitlines()]
        parts += [f'#line 1 "kernels/sim/{name}"', *lines]
    return "\n".join(parts) + "\n"


@functools.cache
def engine_library() -> Path:
    """The engine's shared library, compiled once per machine. With `QC_SIM_FIBERS=ucontext` it switches threads by
    swapcontext, as it does on processors without a switch of our own."""
    if platform.system() != "Linux":
        raise DeviceUnavailableError(f"the simulated GPU runs on Linux; this is {platform.system()}")
    fibers = os.environ.get("QC_SIM_FIBERS", "own")
    if fibers not in ("own", "ucontext"):
        raise RuntimeFailure(f"QC_SIM_FIBERS={fibers!r}: it is 'own' or 'ucontext'")
    define = ("-DQS_UCONTEXT",) if fibers == "ucontext" else ()
    return compile_library(
        _engine_source(), host_isa(), name="sim-engine",
        extra_flags=("-fvisibility=hidden", "-fno-exceptions", *define),
        announce="compiled the engine of the simulated GPU",
    )  # fmt: skip


def compile_sim(source: str, *, checked: bool, name: str) -> Path:
    """The library of a translation unit that begins with kernels/sim/shim.h; from the cache if it was compiled before.

    `checked` makes the compiler place a hook before each load and store (the hooks of its thread sanitizer, without
    that sanitizer's library).
    """
    engine_path = str(engine_library())
    common = (
        "-g1",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-builtin",
        "-fno-strict-aliasing",
        "-Wno-unknown-pragmas",
    )
    if not checked:
        flags = ("-O2", *common)
        return compile_library(source, host_isa(), name=name, extra_flags=flags, link_flags=(engine_path,))
    hooks = (
        ("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-distinguish-volatile=1")
        if find_compiler().is_clang
        else ("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1")
    )
    # -Og: with the hooks its code runs as fast as -O1's, and it compiles in little more than half the time.
    return compile_library(
        source, host_isa(), name=f"{name}-checked",
        extra_flags=("-Og", *common, "-fsanitize=thread", *hooks),
        link_flags=(*(f"-Wl,--wrap={each}" for each in _WRAPPED), engine_path),
    )  # fmt: skip


class SimLibrary:
    """A compiled translation unit of kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.checked = path.name.rpartition("-")[0].endswith("-checked")

    def function(self, kernel: str) -> int:
        """The address of the function that runs one thread of `kernel` ("qk_scale" or "scale")."""
        name = f"qs_call_{kernel.removeprefix('qk_')}"
        try:
            found = getattr(self._library, name)
        except AttributeError:
            raise RuntimeFailure(f"{self.path} holds no kernel '{kernel}' (it has no symbol {name})") from None
        address = ctypes.cast(found, ctypes.c_void_p).value
        assert address is not None
        return address


class SimEngine:
    """Device memory and launches of every simulated GPU in this process; `engine()` returns the only one."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(engine_library()))
        u64, p64 = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)
        for name, result, arguments in (
            ("qs_reserve", ctypes.c_int, (ctypes.c_int,)),
            ("qs_allocate", u64, (ctypes.c_int, u64, ctypes.c_char_p)),
            ("qs_free", ctypes.c_int, (u64,)),
            ("qs_device_of", ctypes.c_int, (u64,)),
            ("qs_allocation_of", ctypes.c_int, (u64, p64, p64, ctypes.c_char_p, u64)),
            ("qs_mark_initialised", ctypes.c_int, (u64, u64)),
            ("qs_is_initialised", ctypes.c_int, (u64, u64)),
            ("qs_broken_red_zone", u64, (ctypes.c_int,)),
            ("qs_launch", None, (ctypes.POINTER(_CLaunch), ctypes.POINTER(_CReport))),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._launching = threading.Lock()
        self._libraries: dict[Path, SimLibrary] = {}
        self._checked: dict[int, bool] = {}

    # memory

    def reserve(self, device: int) -> None:
        """Reserves the addresses of device number `device` (no memory yet)."""
        if not self._library.qs_reserve(device):
            raise OutOfMemoryError(f"no address range is left for sim:{device}", 2, "cudaErrorMemoryAllocation")

    def allocate(self, device: int, nbytes: int, label: str = "") -> int:
        """A 256-byte aligned address of `nbytes` zero bytes that count as uninitialised, with red zones around them."""
        address = self._library.qs_allocate(device, nbytes, label.encode())
        if not address:
            raise OutOfMemoryError(f"sim:{device} has no room for {nbytes} bytes", 2, "cudaErrorMemoryAllocation")
        return int(address)

    def free(self, address: int) -> None:
        """Frees an allocation. `address` is a result of `allocate`."""
        if not self._library.qs_free(address):
            raise SimulationError(f"free: nothing is allocated at 0x{address:x}", finding="out-of-bounds")

    def device_of(self, address: int) -> int | None:
        """The number of the device that `address` belongs to."""
        device = int(self._library.qs_device_of(address))
        return None if device < 0 else device

    def allocation_of(self, address: int) -> tuple[int, int, str] | None:
        """(base, bytes, label) of the live allocation that holds `address`."""
        base, nbytes, label = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.create_string_buffer(512)
        if not self._library.qs_allocation_of(address, ctypes.byref(base), ctypes.byref(nbytes), label, len(label)):
            return None
        return base.value, nbytes.value, label.value.decode(errors="replace")

    def mark_initialised(self, address: int, nbytes: int) -> None:
        """Marks the bytes as written (after an upload, a copy or a fill by the host)."""
        if not self._library.qs_mark_initialised(address, nbytes):
            raise SimulationError(f"{nbytes} bytes at 0x{address:x} lie in no live allocation", finding="out-of-bounds")

    def is_initialised(self, address: int, nbytes: int) -> bool:
        """Whether a kernel or the host ever wrote every byte."""
        answer = int(self._library.qs_is_initialised(address, nbytes))
        if answer < 0:
            raise SimulationError(f"{nbytes} bytes at 0x{address:x} lie in no live allocation", finding="out-of-bounds")
        return bool(answer)

    def check_red_zones(self, device: int) -> None:
        """SimulationError if bytes next to one of the device's allocations were overwritten (by host code; kernels are
        stopped before)."""
        if broken := self._library.qs_broken_red_zone(device):
            raise SimulationError(f"the byte at 0x{broken:x}, beside an allocation of sim:{device}, was overwritten",
                                  finding="out-of-bounds")  # fmt: skip

    # kernels

    def load(self, path: Path) -> SimLibrary:
        """Loads a library of `compile_sim`."""
        with self._launching:
            if path not in self._libraries:
                self._libraries[path] = SimLibrary(path)
            return self._libraries[path]

    def launch(self, request: LaunchRequest) -> LaunchReport:
        """Runs a kernel to its end. SimulationError names the finding, the threads, the operand and the source line."""
        with self._launching:
            report = _CReport()
            self._library.qs_launch(ctypes.byref(self._c_launch(request)), ctypes.byref(report))
            if report.finding:
                raise SimulationError(_explain(request, report), finding=report.finding.decode())
            return LaunchReport(_merged(report), int(report.unwritten), int(report.accesses), float(report.seconds))

    def _c_launch(self, request: LaunchRequest) -> _CLaunch:
        arguments = (ctypes.c_uint64 * max(1, len(request.args)))(*(value & (2**64 - 1) for value in request.args))
        ranges = (_CRange * max(1, len(request.ranges)))(
            *(_CRange(each.lo, each.hi, _bits_of(each), each.label.encode()) for each in request.ranges)
        )
        options = request.options
        return _CLaunch(
            request.function, request.name.encode(), arguments, ranges, len(request.args), len(request.ranges),
            request.shared_bytes, request.seed & (2**64 - 1), (ctypes.c_uint32 * 3)(*request.grid),
            (ctypes.c_uint32 * 3)(*request.block), request.device, self._is_checked(request.function),
            options.early_copies, options.resident_blocks, request.overlaps, options.time_limit, options.spin_limit,
        )  # fmt: skip

    def _is_checked(self, function: int) -> bool:
        if function not in self._checked:
            path, _ = _module_of(function)
            self._checked[function] = path is not None and path.name.rpartition("-")[0].endswith("-checked")
        return self._checked[function]


@functools.cache
def engine() -> SimEngine:
    """The process's engine, compiled on first use."""
    return SimEngine()


def _merged(report: _CReport) -> tuple[tuple[int, int, str], ...]:
    found = sorted((int(i.written), int(i.low), int(i.high)) for i in report.intervals[: report.interval_count])
    merged: list[tuple[int, int, int]] = []
    for written, low, high in found:
        if merged and merged[-1][0] == written and low <= merged[-1][2]:
            merged[-1] = (written, merged[-1][1], max(high, merged[-1][2]))
        else:
            merged.append((written, low, high))
    return tuple((low, high, "w" if written else "r") for written, low, high in merged)


# --- reports ---------------------------------------------------------------------------------------------------------


def _explain(request: LaunchRequest, report: _CReport) -> str:
    grid, block = (" x ".join(map(str, each)) for each in (request.grid, request.block))
    lines = [
        f"{report.finding.decode()} in kernel '{request.name}' (grid {grid}, block {block}, seed {request.seed}): "
        f"{report.message.decode(errors='replace')}"
    ]
    for site in report.sites[: report.site_count]:
        places = list(_places(request.function, int(site.address), int(site.line)))
        what = (site.what or b"").decode(errors="replace")
        lines += [f"  {what}{' at ' if places else ''}{places[0] if places else ''}"]
        lines += [f"      called from {place}" for place in places[1:]]
    return "\n".join(lines)


def _places(function: int, address: int, line: int) -> Iterator[str]:
    """`file:line: text` of a site, innermost first; none if neither an address nor a line is known."""
    if line:
        path, _ = _module_of(function)
        if path is not None:
            yield _quoted(path.with_suffix(".cpp"), line)
    elif address:
        path, offset = _module_of(address)
        if path is not None:
            quoted = [_quoted(source, number) for source, number in _source_lines(path, offset)]
            yield from (each for each in quoted if ": QS_VECTOR_" not in each)  # the shim's copy of a vector


def _quoted(source: Path, line: int) -> str:
    lines = source.read_text(encoding="utf-8", errors="replace").splitlines() if source.exists() else []
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{source.name}:{line}: {text}"


def _source_lines(library: Path, offset: int) -> list[tuple[Path, int]]:
    """The source lines of the instruction at `offset`, innermost frame first, from addr2line."""
    program = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if program is None:
        return []
    command = [program, "-i", "-e", str(library), hex(offset)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    places = []
    for row in done.stdout.splitlines():
        name, _, number = row.split(" ")[0].rpartition(":")
        if number.isdigit():
            places.append((Path(name), int(number)))
    return places


def _module_of(address: int) -> tuple[Path | None, int]:
    """The library that holds a code address, and the address's offset in it."""
    info = _CModule()
    library = ctypes.CDLL(None)
    library.dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_CModule))
    if not library.dladdr(ctypes.c_void_p(address), ctypes.byref(info)) or not info.path:
        return None, 0
    return Path(os.fsdecode(info.path)), address - (info.base or 0)
