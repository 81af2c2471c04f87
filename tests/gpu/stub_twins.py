"""Kernels for stub_driver.cpp: what a process compiles for the GPU runs there as the simulated GPU's twin of the text.

    stub_twins.folder(FOLDER)      FOLDER/libcuda.so.1 (the stub) and FOLDER/sitecustomize.py (calls `install`)

A process with FOLDER in LD_LIBRARY_PATH and PYTHONPATH then has a `cuda:0` of compute capability 9.0 whose results are
right: the whole of `make gpu-check` runs on it, benchmarks included. NVRTC compiles for sm_90a as ever; times are the
host's and mean nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import struct
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent

_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?qk_(\w+)\s*\(([^)]*)\)\s*\{')

_functions: dict[str, tuple[int, int]] = {}
"""Kernel -> (address of its `qs_call_…`, how many parameters it has)."""


_names: dict[tuple[int, bytes], ctypes.Array[ctypes.c_char]] = {}
"""(digest of a cubin, function in it) -> what the plan calls that kernel."""


def folder(where: Path) -> Path:
    """The folder, filled."""
    from qcompiler.runtime.compiler import compile_library

    text = (HERE / "stub_driver.cpp").read_text()
    shutil.copy(compile_library(text, "generic", name="stub", extra_flags=("-w",)), where / "libcuda.so.1")
    startup = f"import sys\nsys.path.append({str(HERE)!r})\nimport stub_twins\nstub_twins.install()\n"
    (where / "sitecustomize.py").write_text(startup)
    return where


def environment(where: Path) -> dict[str, str]:
    """What a process needs to run on the stub."""
    return {"LD_LIBRARY_PATH": str(where), "PYTHONPATH": str(where), "QC_SIM_CHECK": "0"}


# --- twins -----------------------------------------------------------------------------------------------------------


def twin_text(source: str, arch: str) -> tuple[str, dict[str, int]]:
    """The simulated GPU's translation unit of a text for NVRTC, and its kernels' numbers of parameters."""
    from qcompiler.kernels.cuda.emit import header
    from qcompiler.kernels.cuda.signature import arch_number

    counts, calls = {}, []
    for name, parameters in _KERNEL.findall(source):
        kinds = [re.sub(r"\s*\b\w+\s*$", "", part).strip() for part in parameters.split(",") if part.strip()]
        kinds = [re.sub(r"\s*(__restrict__|const)$", "", kind) if kind.endswith("const") else kind for kind in kinds]
        passed = ", ".join(f"*({kind} const*)args[{i}]" for i, kind in enumerate(kinds))
        calls.append(f'extern "C" void qs_call_{name}(void* const* args) {{ qk_{name}({passed}); }}')
        counts[name] = len(kinds)
    defines = f"#define QC_SIM 1\n#define __CUDA_ARCH__ {10 * arch_number(arch)}"
    return "\n".join([defines, header("shim.h", "qcompiler.kernels.sim"), source, *calls]), counts


def register(source: str, arch: str) -> None:
    """From now on launches of the text's kernels run."""
    from qcompiler.runtime.sim.engine import compile_sim, engine

    text, counts = twin_text(source, arch)
    if counts.keys() <= _functions.keys():
        return
    library = engine().load(compile_sim(text, checked=False, name="twin"))
    _functions.update({name: (library.function(name), count) for name, count in counts.items()})


# --- the process -----------------------------------------------------------------------------------------------------

_COUNT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)
)


_NAME = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)


@_NAME
def _name(cubin: int, function: bytes) -> int:
    """The address of the name, which stays."""
    known = _names.setdefault((cubin, function), ctypes.create_string_buffer(function))
    return ctypes.addressof(known)


def digest(cubin: bytes) -> int:
    """As stub_driver.cpp has it."""
    end, entry, entries = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 58)
    value = 0xCBF29CE484222325
    for byte in cubin[: end + entry * entries]:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


@_COUNT
def _count(name: bytes) -> int:
    return _functions.get(name.decode().removeprefix("qk_"), (0, -1))[1]


@_RUN
def _run(name: bytes, sizes: Any, shared: int, values: Any) -> int:
    from qcompiler.runtime.sim.engine import LaunchRequest, engine

    kernel = name.decode().removeprefix("qk_")
    function, count = _functions[kernel]
    grid, block = tuple(sizes[0:3]), tuple(sizes[3:6])
    try:
        engine().launch(
            LaunchRequest(
                device=0, function=function, name=kernel, grid=grid, block=block, args=list(values[0:count]),
                ranges=(), shared_bytes=shared,
            )
        )  # fmt: skip
    except Exception as error:
        print(f"stub: {error}", file=sys.stderr)
        return 1
    return 0


def install() -> None:
    """Called at the start of every process on the stub: the patch is made when qcompiler.runtime.nvrtc is imported."""
    sys.meta_path.insert(0, _AfterNvrtc())


def _patch(nvrtc: ModuleType) -> None:
    """Whoever gets a cubin gets its twins registered as well, from the cache or not."""
    stub = ctypes.CDLL("libcuda.so.1")
    stub.stub_runner(_count, _run)
    stub.stub_names(_name)
    compile_cubin: Callable[..., Any] = nvrtc.compile_cubin
    build_module: Callable[..., Any] = nvrtc.build_module

    def compiled(source: str, arch: str, **others: Any) -> Any:
        register(source, arch)
        return compile_cubin(source, arch, **others)

    def built(plan: Any, arch: str) -> Any:
        from qcompiler.kernels.cuda import emit

        library = build_module(plan, arch)
        cubin = digest(library.read())
        for number, spec in enumerate(plan.kernels):
            _names[cubin, f"qk_{number}".encode()] = ctypes.create_string_buffer(f"qk_{spec.name}".encode())
        register(emit.emit_module(plan.kernels, arch), arch)
        return library

    nvrtc.compile_cubin, nvrtc.build_module = compiled, built  # type: ignore[attr-defined]


class _AfterNvrtc(MetaPathFinder):
    """Lets the import of qcompiler.runtime.nvrtc happen as ever, and patches the module then."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        del target
        if name != "qcompiler.runtime.nvrtc":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader: Loader = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
