"""CUDA C++ text to cubins by NVRTC, once: cubins stay in the user's cache under a content hash.

Needs neither a driver nor a toolkit: the compiler comes as a wheel (`pip install qcompiler[cuda]`).  CUDA 13's NVRTC
has dropped sm_70; CUDA 12's compiles it (`pip install qcompiler[sm70]`) in a process of its own, since the bindings can
load only one version per process: runtime/nvrtc_sm70.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from qcompiler.errors import CompileFailedError, MissingDependencyError
from qcompiler.plan.plan import Plan
from qcompiler.runtime.cache import cache_dir, has_private_dir, keep, private_dir
from qcompiler.runtime.code import Code, read_code, read_record
from qcompiler.runtime.compile_rate import compiling
from qcompiler.runtime.compiler import LOG_LIMIT
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.files import locked, write_private
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.progress import note, note_once
from qcompiler.units import counted

UNUSED = (177, 550)
"""NVRTC's numbers of "declared but never referenced" and "set but never used": a kernel uses only part of its headers.
"""

_CUBIN_NAME = re.compile(r"program-sm_\d+a?-[0-9a-f]{32}\.cubin\Z")
_INSTALL = "pip install 'qcompiler[cuda]'"
_INSTALL_SM70 = "pip install 'qcompiler[sm70]'"


@dataclass(frozen=True)
class Resources:
    """A kernel's resources from ptxas: registers per thread; bytes of static shared memory and constant bank 0 per
    kernel; bytes of local memory (stack frame) and spilled per thread."""

    registers: int
    shared_static: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    constant: int = 0

    @property
    def uses_local_memory(self) -> bool:
        return bool(self.stack or self.spill_stores or self.spill_loads)


@dataclass(frozen=True)
class Cubin:
    """A compiled module: file and bytes, each kernel's (``qk_<name>``) resources, the compiler's log and version."""

    code: Code
    arch: str
    resources: Mapping[str, Resources]
    log: str
    compiler_version: str

    @property
    def path(self) -> Path:
        return self.code.path

    def read(self) -> bytes:
        return self.code.data


def compile_cubin(
    source: str, arch: str, *, name: str = "program", emitter_version: str = "", announce: str | None = None
) -> Cubin:
    """The cubin of `source` for `arch` ("sm_90a"), from the cache if it was compiled before.

    The key covers the source, its emitter's version, the options, NVRTC's version and the architecture.  a*b + c is not
    contracted (`--fmad=false`), so a kernel computes the same here and on the simulated GPU.  CompileFailedError
    carries the log and the path of the source; MissingDependencyError the command that installs NVRTC.
    """
    version = compiler_version(arch)
    key = _digest(source, emitter_version, json.dumps(options(arch)), version, arch)
    file = f"{name}-{arch}-{key[:32]}.cubin"
    if (known := _intact(file, arch)) is not None:
        return known
    try:
        return _made(cache_dir("cuda"), file, source, arch, version, announce)
    except OSError as error:
        folder = private_dir("cuda")
        note_once(f"the cache takes no files ({error}): kernels are compiled in {folder}, for this process alone")
        return _made(folder, file, source, arch, version, announce)


def _made(folder: Path, file: str, source: str, arch: str, version: str, announce: str | None) -> Cubin:
    """The cubin, compiled into `folder`. OSError if the folder takes no files."""
    with locked(folder / f"{file}.lock"):
        if (known := _intact(file, arch)) is not None:
            return known
        began = time.monotonic()
        what = f"compile {announce.removeprefix('compiled ') if announce else f'for {arch}'}"
        with compiling(what, source, folder, (version, *options(arch))):
            cubin = _compile(source, arch, folder / file, version)
        if announce:
            note(f"{announce}: {time.monotonic() - began:.1f} s")
    return cubin


def options(arch: str) -> tuple[str, ...]:
    """NVRTC's options, as text: part of the key, and passed to the worker of sm_70."""
    suppressed = (f"--diag-suppress={number}" for number in UNUSED)
    return (f"-arch={arch}", "--std=c++17", "--fmad=false", "--ptxas-options=-v", *suppressed)


def compiler_version(arch: str) -> str:
    """ "NVRTC 13.0": the compiler that serves `arch`."""
    if arch == "sm_70":
        return _sm70_version(_require_sm70())
    _cuda_core()
    from cuda.bindings import nvrtc

    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as cause:  # cuda.bindings loads the library at the first call
        raise MissingDependencyError(f"NVRTC's library was not found ({cause}); install it with {_INSTALL}") from cause
    if int(error):
        raise CompileFailedError(f"nvrtcVersion failed with {error!r}")
    return f"NVRTC {major}.{minor}"


# --- a plan's kernels ------------------------------------------------------------------------------------------------


def kernel_symbol(name: str) -> str:
    """The function of a kernel. In a program, kernels have numbers for names: kernels/numbered.py."""
    return f"qk_{name}"


def build_module(plan: Plan, arch: str) -> NativeLibrary:
    """The cubin of a plan's kernels. A plan that was compiled before needs neither the emitter nor NVRTC's library."""
    record = cache_dir("plans") / f"{_plan_key(plan, arch)}.json"
    if (known := _read_plan(record, arch)) is not None:
        return known
    from qcompiler.kernels.cuda import emit

    source = emit.emit_program(plan, arch)
    announce = f"compiled {counted(len(plan.kernels), 'kernel')} for {arch}"
    cubin = compile_cubin(source, arch, emitter_version=emitter_version("cuda"), announce=announce)
    facts = {"cubin": cubin.path.name, "sha256": cubin.code.sha256, "compiler": cubin.compiler_version}
    keep(record, json.dumps(facts).encode())
    return NativeLibrary(arch, cubin.path, emitter_version("cuda"), cubin.compiler_version, code=cubin.code)


def _plan_key(plan: Plan, arch: str) -> str:
    """Identity of a plan's cubin: its kernels, the emitter, the options, the architecture."""
    kernels = msgspec.json.encode(plan.kernels, order="deterministic")
    return _digest(kernels.decode(), emitter_version("cuda"), json.dumps(options(arch)), arch)


def _read_plan(record: Path, arch: str) -> NativeLibrary | None:
    facts = read_record(record)
    name = facts.get("cubin")
    if not isinstance(name, str) or not _CUBIN_NAME.match(name):
        return None
    code = _find(name, facts.get("sha256"))
    if code is None:
        return None
    return NativeLibrary(arch, code.path, emitter_version("cuda"), str(facts.get("compiler", "")), code=code)


def _find(name: str, sha256: object) -> Code | None:
    """A cubin of this digest, from the cache or this process's own folder."""
    folders = (cache_dir("cuda"), *((private_dir("cuda"),) if has_private_dir() else ()))
    return next((code for folder in folders if (code := read_code(folder / name, sha256)) is not None), None)


# --- the compiler ----------------------------------------------------------------------------------------------------


importing_cuda = threading.Lock()
"""cuda.core and cuda.bindings import each other: if two threads import them at once, one gets half of a package."""


def _cuda_core() -> Any:
    """cuda.core; before 0.5 its contents were in cuda.core.experimental."""
    try:
        with importing_cuda:
            core = importlib.import_module("cuda.core")
            return core if hasattr(core, "Program") else importlib.import_module("cuda.core.experimental")
    except ImportError as error:
        raise MissingDependencyError(f"CUDA kernels need cuda-core ({error}); install it with {_INSTALL}") from error


def _compile(source: str, arch: str, path: Path, version: str) -> Cubin:
    text = path.with_suffix(".cu")
    write_private(text, source.encode())
    try:
        code, log = _compile_sm70(source) if arch == "sm_70" else _compile_here(source, arch)
    except _RefusedError as refused:
        raise CompileFailedError(
            f"{version} refused {text} for {arch}\n{' '.join(options(arch))}\n{refused.log[:LOG_LIMIT]}"
        ) from None
    cubin = Cubin(Code(path, code), arch, parse_resources(log), log, version)
    write_private(path, code)
    kernels = {kernel: asdict(resource) for kernel, resource in cubin.resources.items()}
    # The record comes last: without it the cubin does not count.
    record = {"sha256": cubin.code.sha256, "compiler": version, "log": log, "kernels": kernels}
    write_private(path.with_suffix(".json"), json.dumps(record).encode())
    return cubin


class _RefusedError(Exception):
    """The compiler refused the source; `log` is its output."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log


def program_options(arch: str) -> Any:
    """`options` as cuda.core's type."""
    return _cuda_core().ProgramOptions(
        name="kernels.cu", arch=arch, std="c++17", fma=False, diag_suppress=list(UNUSED), ptxas_options=["-v"]
    )


def _compile_here(source: str, arch: str) -> tuple[bytes, str]:
    """(cubin, log) by NVRTC in this process."""
    core = _cuda_core()
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", program_options(arch))
        try:
            code = program.compile("cubin", logs=log).code
        finally:
            program.close()
    except Exception as error:  # cuda.core's NVRTCError is not public; its message holds the log
        if type(error).__name__ not in ("NVRTCError", "CUDAError"):
            raise
        raise _RefusedError(f"{error}\n{log.getvalue()}".strip()) from error
    return bytes(code), log.getvalue()


def _intact(file: str, arch: str) -> Cubin | None:
    """A cubin that was compiled before, if it is intact."""
    for folder in (cache_dir("cuda"), *((private_dir("cuda"),) if has_private_dir() else ())):
        facts = read_record((folder / file).with_suffix(".json"))
        code = read_code(folder / file, facts.get("sha256"))
        if code is None:
            continue
        with contextlib.suppress(KeyError, TypeError, AttributeError):  # another version's record: it is compiled anew
            kernels = {kernel: Resources(**fields) for kernel, fields in facts["kernels"].items()}
            return Cubin(code, arch, kernels, str(facts["log"]), str(facts["compiler"]))
    return None


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


# --- ptxas -v --------------------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '\w+'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_CONSTANT = re.compile(r"(\d+) bytes cmem\[0\]")


def parse_resources(log: str) -> dict[str, Resources]:
    """The resources of each entry function that `ptxas -v` reported, with those of functions that are not inlined."""
    found: dict[str, Resources] = {}
    _, *parts = _ENTRY.split(log)
    for kernel, part in zip(parts[::2], parts[1::2], strict=True):
        used, shared, constant = _USED.search(part), _SHARED.search(part), _CONSTANT.search(part)
        if used is None:  # a function's properties alone
            continue
        frames = [(int(frame[1]), int(frame[2]), int(frame[3])) for frame in _FRAME.finditer(part)]
        stack, stores, loads = (sum(frame[i] for frame in frames) for i in range(3))
        found[kernel] = Resources(
            registers=int(used[1]),
            shared_static=int(shared[1]) if shared else 0,
            stack=stack,
            spill_stores=stores,
            spill_loads=loads,
            constant=int(constant[1]) if constant else 0,
        )
    return found


# --- sm_70 -----------------------------------------------------------------------------------------------------------


def sm70_available() -> bool:
    """Whether CUDA 12's NVRTC is installed."""
    return _sm70_library() is not None


def _sm70_library() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:  # not even the package above it
        return None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for library in sorted(Path(folder, "lib").glob("libnvrtc.so.12*")):
            return library
    return None


def _require_sm70() -> Path:
    library = _sm70_library()
    if library is None:
        raise MissingDependencyError(
            f"CUDA 13's NVRTC has dropped sm_70 and CUDA 12's is not installed; install it with {_INSTALL_SM70}"
        )
    return library


@functools.cache
def _sm70_version(library: Path) -> str:
    return _ask_worker(library, (), b"")[0]


def _compile_sm70(source: str) -> tuple[bytes, str]:
    """(cubin, log) by CUDA 12's NVRTC in a process of its own."""
    _, log, code = _ask_worker(_require_sm70(), options("sm_70"), source.encode())
    return code, log


def _ask_worker(library: Path, arguments: tuple[str, ...], source: bytes) -> tuple[str, str, bytes]:
    """(version, log, cubin)."""
    worker = Path(__file__).with_name("nvrtc_sm70.py")
    command = [sys.executable, "-I", str(worker), str(library), *arguments]
    done = subprocess.run(command, input=source, capture_output=True, check=False)
    head, _, code = done.stdout.partition(b"\n")
    if done.returncode:
        raise _RefusedError(f"the process of CUDA 12's NVRTC failed (exit {done.returncode})\n{done.stderr.decode()}")
    answer: Any = json.loads(head)
    if answer["error"] is not None:
        raise _RefusedError(f"{answer['error']}\n{answer['log']}")
    return answer["version"], answer["log"], code
