"""`qc doctor`: what this machine offers to qcompiler, and what it lacks."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from qcompiler.errors import CompilerMissingError
from qcompiler.runtime.backends import registry
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.isa import resolve_isa, supported_isas
from qcompiler.runtime.threads import default_threads

_PACKAGES = (
    "qcompiler", "torch", "numpy", "ml_dtypes", "xdsl", "msgspec", "safetensors", "transformers", "torch-mlir",
    "cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip


def examine() -> dict[str, str]:
    """Facts by name; a missing package or compiler reads "missing"."""
    try:
        compiler = find_compiler().version
    except CompilerMissingError:
        compiler = "missing"
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "isa": f"{resolve_isa(None)} (this machine runs {', '.join(supported_isas())})",
        "threads": str(default_threads()),
        "compiler": compiler,
        "cache": str(cache_dir()),
        "gpus": _gpus(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "missing"
    return facts


def _gpus() -> str:
    from qcompiler.runtime.backends.cuda import device_count

    found = [f"cuda:{index} ({registry.architecture(f'cuda:{index}')})" for index in range(device_count())]
    return ", ".join(found) or "none; sim:0 simulates one"


def compiles(facts: dict[str, str]) -> bool:
    """Whether a model can be compiled here for anything: torch, and a C++ compiler, or NVRTC for a GPU."""
    compilers = ("compiler", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    return facts["torch"] != "missing" and any(facts[each] != "missing" for each in compilers)


def problems(facts: dict[str, str]) -> list[str]:
    """What prevents a task, with the command that fixes it."""
    found = []
    if facts["compiler"] == "missing":
        found.append("no C++ compiler: programs cannot be built here; apt install g++")
    if facts["torch"] == "missing":
        found.append("no torch: saved programs run, but models cannot be compiled; pip install 'qcompiler[torch]'")
    return found
