"""`qc doctor`: what this machine offers to qcompiler, and what it lacks."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qcompiler.errors import ArgumentError, CompilerMissingError
from qcompiler.inspect.kernel_table import Served, kernel_table, table_text
from qcompiler.inspect.machine import CPUINFO, Compiler, Gpu, Processor, compilers, gpus, nvrtc_versions, processor
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.runtime import amx, bf16_units, int8_units
from qcompiler.runtime.backends import registry
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.isa import buildable_isas, cpuinfo_flags, resolve_isa, supported_isas
from qcompiler.runtime.threads import default_threads
from qcompiler.units import human_bytes

_PACKAGES = (
    "qcompiler", "torch", "numpy", "ml_dtypes", "xdsl", "msgspec", "safetensors", "transformers", "tokenizers",
    "jinja2", "jax", "torch-mlir", "cuda-core", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
)  # fmt: skip

_EXTRAS = (
    ("cuda", ("cuda-core", "nvidia-cuda-nvrtc"), "programs for NVIDIA GPUs; compiling for them needs no GPU"),
    ("sm70", ("nvidia-cuda-nvrtc-cu12",), "programs for V100, which CUDA 13 has dropped"),
    ("files", ("transformers",), "compiling Hugging Face checkpoints"),
    ("lm", ("tokenizers", "jinja2"), "text in and out of language models"),
    ("jax", ("jax",), "compiling functions of JAX"),
    ("mlir", ("torch-mlir",), "checking the IR by upstream MLIR"),
)
"""Extra, the packages that show whether it is there, and what it is for."""


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
        found.append(_no_compiler())
    if facts["torch"] == "missing":
        found.append("no torch: saved programs run, but models cannot be compiled; pip install 'qcompiler[torch]'")
    return found


def _no_compiler() -> str:
    """With the reason: QC_CXX or CXX may hide a compiler that is installed."""
    why = "apt install g++"
    try:
        find_compiler()
    except CompilerMissingError as error:
        why = str(error)
    return f"no C++ compiler: programs cannot be built here; {why}"


def extras(facts: dict[str, str]) -> list[str]:
    """What could be installed, and for what."""
    return [
        f"pip install 'qcompiler[{extra}]': {purpose} (missing: {', '.join(missing)})"
        for extra, packages, purpose in _EXTRAS
        if (missing := [each for each in packages if facts.get(each) == "missing"])
    ]


@dataclass(frozen=True)
class Diagnosis:
    """The machine and the kernels that serve it. `str()` is the text, `as_dict()` the same as JSON values."""

    facts: dict[str, str]
    processor: Processor
    compilers: list[Compiler]
    nvrtc: dict[str, str]
    gpus: list[Gpu]
    no_gpus: list[str]
    kernels: list[list[Served]]
    """By target: this CPU, the GPUs' architectures, and what else was asked for."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.facts,
            "processor": asdict(self.processor),
            "compilers": [asdict(each) for each in self.compilers],
            "nvrtc": self.nvrtc,
            "gpu_details": [asdict(each) for each in self.gpus],
            "gpu_problems": self.no_gpus,
            "kernels": [each.as_dict() for rows in self.kernels for each in rows],
            "problems": problems(self.facts),
            "could_install": extras(self.facts),
        }

    def __str__(self) -> str:
        lines = [f"{name:22} {value}" for name, value in (*self.facts.items(), *self._machine())]
        tables = [table_text(rows) for rows in self.kernels]
        more = [f"to install for more:\n  {text}" for text in ["\n  ".join(extras(self.facts))] if text]
        return "\n\n".join(["\n".join(lines), *tables, *more])

    def _machine(self) -> Iterator[tuple[str, str]]:
        cpu = self.processor
        quota = "" if cpu.quota is None else f", a quota of {cpu.quota:g}"
        count = f"{cpu.processors} processor{'s' * (cpu.processors != 1)}"
        yield "processor", f"{cpu.name}; {count}{quota}, {human_bytes(cpu.memory)} of memory"
        yield "features", ", ".join(cpu.features) or "not known"
        if cpu.lacks:
            yield "lacks", ", ".join(cpu.lacks)
        if cpu.unused:
            yield "has, no kernel uses", ", ".join(cpu.unused)
        if cpu.caches:
            yield "caches", ", ".join(f"{level} {size}" for level, size in cpu.caches.items())
        yield (
            "reaches",
            f"not measured: {cpu.limits_missing}"
            if cpu.limits is None
            else (f"{cpu.limits}, on {cpu.threads} thread{'s' * (cpu.threads != 1)}"),
        )
        for each in self.compilers:
            yield f"{'* ' * each.used}{each.name}", f"{each.version} ({each.path})"
        for archs, version in self.nvrtc.items():
            yield f"NVRTC, {archs}", version
        for gpu in self.gpus:
            yield gpu.device, f"{gpu.name}, {gpu.arch}, driver {gpu.driver}; {_gpu_text(gpu)}"
        for problem in self.no_gpus:
            yield "GPU", problem


def _gpu_text(gpu: Gpu) -> str:
    bandwidth = f"{gpu.bandwidth / 1e9:.0f} GB/s measured" if gpu.bandwidth else "bandwidth not measured"
    return (
        f"{human_bytes(gpu.memory)} of memory, {human_bytes(gpu.free)} free; {bandwidth}; "
        f"{gpu.tensor / 1e12:.0f} TFLOP/s published for {gpu.like}"
    )


def diagnose(facts: dict[str, str], targets: Sequence[str] = (), *, measure: bool = True) -> Diagnosis:
    """Looks at this machine; with `measure` also at what it reaches.  `targets` are further instruction sets and
    architectures whose kernels are wanted. ArgumentError for one that is none."""
    for target in targets:
        if target not in (*ARCHS, *buildable_isas()):
            known = ", ".join((*buildable_isas(), *ARCHS))
            raise ArgumentError(f"--target {target}: kernels are compiled for {known}")
    cpu, (found, none) = processor(measure=measure), gpus(measure=measure)
    flags = cpuinfo_flags(CPUINFO)
    wanted = dict.fromkeys((cpu.isa, *(gpu.arch for gpu in found), *targets))
    int8, bf16, refused = int8_units.asked_units(), bf16_units.asked_units(), amx.tiles_refused(("amx_tile",))
    tables = [
        kernel_table("cuda" if each in ARCHS else "cpu", each, flags, int8=int8, bf16=bf16, refused=refused)
        for each in wanted
    ]
    return Diagnosis(facts, cpu, compilers(), nvrtc_versions(), found, none, tables)
