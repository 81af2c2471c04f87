"""Runs programs compiled with AddressSanitizer and UBSan, every arena and argument between guards: harness.cpp.

Many programs go into one executable.  A kernel is called by the digest of its text, so that programs that differ in
their memory and calls alone share it, and it is compiled once; entry points get the program's number before their own.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompiler.errors import KernelSelectionError, QCompilerError
from qcompiler.kernels.cpu import emit
from qcompiler.kernels.cpu.entry import emit_entry, entry_points, function_name
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import EntryPoint, Plan
from qcompiler.runtime.compiler import find_compiler
from qcompiler.runtime.image import ProgramImage, constants_nbytes
from qcompiler.runtime.native import scratch_stride
from qcompiler.runtime.placement import weight_parts

ISA = "x86-64-v3"
FLAGS = ("-std=c++17", "-O1", "-g0", f"-march={ISA}", "-ffp-contract=off", "-fno-math-errno", "-w",
         "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DQC_TASK_COST=64")  # fmt: skip
MOST_BYTES = 1 << 26
"""Of an argument, of constants and of scratch: programs with more are not run."""

MOST_ADDRESSED = 1 << 44
"""Of another arena, which takes memory only where it is used."""

_KINDS = {"constants": "c", "init": "t", "activations": "a", "state": "s", "input": "i", "output": "o"}
_TYPES = {"f32": "f", "f64": "d", "bf16": "b", "f16": "h", "i64": "l", "i32": "w", "i16": "z", "i8": "y", "ui8": "y",
          "i1": "t"}  # fmt: skip


class NotRunError(Exception):
    """A program is too large for the judge."""


@dataclass(frozen=True)
class Job:
    """A program's text, and what the harness is told of its memory and calls."""

    kernels: tuple[str, ...]
    points: str
    entries: tuple[str, ...]
    init: str | None
    memory: str
    specs: tuple[object, ...]

    @property
    def key(self) -> str:
        """Equal for programs that do the same."""
        return hashlib.sha256("\0".join([*self.kernels, self.points, self.memory]).encode()).hexdigest()


def job_of(image: ProgramImage) -> Job:
    """QCompilerError if the emitter refuses the program, NotRunError if it is too large."""
    plan = image.plan
    kernels, called = [], {}
    for number, spec in enumerate(plan.kernels):
        text = _bare(emit.emit_numbered(spec, number, ISA))
        own = re.compile(rf"\bqk_{number}(?=_|\b)")
        digest = hashlib.sha256(own.sub("qk_", text).encode()).hexdigest()[:16]
        called[number] = f"qk_{digest}"
        kernels.append(own.sub(called[number], text))
    points = "\n".join(_bare(emit_entry(plan, point)) for point in entry_points(plan))
    points = re.sub(r"\bqk_(\d+)(?=\()", lambda found: called[int(found[1])], points)
    names = tuple(function_name(plan, entry) for entry in plan.entries)
    init = function_name(plan, plan.init) if plan.init is not None else None
    return Job(tuple(kernels), points, names, init, _memory(image), plan.kernels)


def _bare(text: str) -> str:
    """Without comments, which hold names."""
    return re.sub(r"//[^\n]*", "", text)


def _memory(image: ProgramImage) -> str:
    plan = image.plan
    calls = [line for number, entry in enumerate(plan.entries) for line in _calls(plan, number, entry)]
    scratch = scratch_stride(plan, ISA)
    arenas = []
    sigs = {sig.arena: sig for entry in plan.entries for sig in (*entry.inputs, *entry.outputs)}
    for arena in plan.arenas:
        dtype = sigs[arena.name].dtype if arena.name in sigs else "ui8"
        nbytes, text = arena.nbytes, ""
        most = MOST_ADDRESSED
        if arena.kind == "constants":
            content = _constants(image, arena)
            nbytes, text, most = len(content), content.hex() or "00", MOST_BYTES
        if nbytes > most or scratch > MOST_BYTES:
            raise NotRunError(f"{max(nbytes, scratch)} bytes")
        arenas.append(f"{_KINDS[arena.kind]} {nbytes} {_TYPES[dtype]} {ITEMSIZE[dtype]} {text}")
    return "\n".join([f"{int(plan.init is not None)} {scratch} {len(arenas)} {len(calls)}", *arenas, *calls])


def _constants(image: ProgramImage, arena: object) -> bytes:
    """What stands there when kernels run: the weights as they are mapped, or gathered."""
    parts = weight_parts(image.plan, arena)  # type: ignore[arg-type]
    if all(target == source for target, source, _ in parts):
        return image.weights[: constants_nbytes(image.plan)].tobytes()
    held = bytearray(arena.nbytes)  # type: ignore[attr-defined]
    for target, source, nbytes in parts:
        held[target : target + nbytes] = image.weights[source : source + nbytes].tobytes()
    return bytes(held)


def _calls(plan: Plan, number: int, entry: EntryPoint) -> list[str]:
    """Calls with the smallest, the largest and middle sizes; outputs as the runtime allocates them."""
    lines = []
    ends = [{s.name: v for s, v in zip(entry.symbols, values, strict=True)} for values in (
        [s.min for s in entry.symbols], [s.max for s in entry.symbols], [(s.min + s.max) // 2 for s in entry.symbols],
        [s.max if i % 2 else s.min for i, s in enumerate(entry.symbols)],
    )]  # fmt: skip
    for symbols in {tuple(each.items()): each for each in ends}.values():
        sizes = {}
        for sig in (*entry.inputs, *entry.outputs):
            count = ITEMSIZE[sig.dtype]
            for extent in sig.shape:
                count *= dim(extent).evaluate(symbols)
            sizes[sig.arena] = count
        if all(0 <= size <= MOST_BYTES for size in sizes.values()):
            values = " ".join(map(str, symbols.values()))
            room = " ".join(str(sizes.get(arena.name, -1)) for arena in plan.arenas)
            lines.append(f"{number} {len(symbols)} {values} {room}")
    return lines


def judge(jobs: Sequence[Job], folder: Path, *flags: str) -> list[str]:
    """ "clean", or what was found, for each job. One executable for all; a job that does not compile is found out.
    `flags` go to the compiler, behind its own."""
    try:
        executable = _build(jobs, folder, flags)
    except subprocess.CalledProcessError as error:
        if len(jobs) == 1:
            return [f"the compiler refuses it: {error.stderr[:300]}"]
        middle = len(jobs) // 2
        return judge(jobs[:middle], folder, *flags) + judge(jobs[middle:], folder, *flags)
    told = folder / "memory.txt"
    told.write_text("\n".join([str(len(jobs)), *(f"{number} {job.memory}" for number, job in enumerate(jobs))]))
    options = {"ASAN_OPTIONS": "detect_leaks=0:exitcode=9", "UBSAN_OPTIONS": "print_stacktrace=0"}
    done = subprocess.run([executable, told], capture_output=True, text=True, errors="replace", check=False,
                          env={**os.environ, **options})  # fmt: skip
    found = {
        int(words[1]): " ".join(words[2:]) for words in map(str.split, done.stdout.splitlines()) if words[0] == "@"
    }
    assert len(found) == len(jobs), done.stderr[-2000:]
    executable.unlink()
    reports = re.findall(r"(?:ERROR: AddressSanitizer: [^\n]*|runtime error: [^\n]*)", done.stderr)
    verdicts = [found[number] for number in range(len(jobs))]
    said = iter(reports)
    return [f"{v}: {next(said, '')[:200]}" if v == "sanitizer" else v for v in verdicts]


def _build(jobs: Sequence[Job], folder: Path, flags: Sequence[str]) -> Path:
    specs = tuple(spec for job in jobs for spec in job.specs)
    parts = [emit.prelude(specs), *dict.fromkeys(text for job in jobs for text in job.kernels)]  # type: ignore[arg-type]
    for number, job in enumerate(jobs):
        parts.append(re.sub(r"\bqe_(?=\d|init)", f"qe_p{number}_", job.points))
    rows = ", ".join(
        "{" + ", ".join(name.replace("qe_", f"qe_p{number}_") for name in job.entries) + "}"
        for number, job in enumerate(jobs)
    )
    inits = ", ".join(f"qe_p{number}_init" if job.init else "nullptr" for number, job in enumerate(jobs))
    parts.append(f"static const std::vector<std::vector<qc_entry>> entries = {{{rows}}};")
    parts.append(f"static const qc_entry inits[] = {{{inits}}};")
    harness = (Path(__file__).parent / "harness.cpp").read_text()
    source = folder / "batch.cpp"
    source.write_text("\n".join(["#include <vector>", *parts, harness]))
    executable = folder / "batch"
    command = [*find_compiler().command, *FLAGS, *flags, "-o", str(executable), str(source)]
    subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return executable


__all__ = ["Job", "KernelSelectionError", "NotRunError", "QCompilerError", "job_of", "judge"]
