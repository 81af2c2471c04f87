"""One process of the matrix: kernels one after the other on one device, each eagerly, captured, and replayed.

    python -P matrix_worker.py --device cuda:0 --share 0 8 --lines FILE [--references FILE]
    python -P matrix_worker.py --compile sm_90a --references FILE       every cubin and every reference, without a GPU

A line of JSON is added to `--lines` when a module is loaded, when a case begins a mode and when it ends. Cases that
the file names are not run again, so that the next process goes on behind a case that took this one with it: a fault
destroys the CUDA context, and this process then ends with `LOST`. tests/gpu/processes.py starts these processes.

The reference is what the simulated GPU computes with the same kernel's text; eager runs are held to it by
‖out − ref‖ / ‖ref‖, replays to the bits of eager runs with the same inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from by_path import load

from qcompiler import formats
from qcompiler.errors import CompilerMissingError, DeviceError, QCompilerError
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import DeviceSlot, Plan
from qcompiler.runtime import nvrtc
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend, Kernel
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.emitter import emitter_version

matrix = load("tests/gpu/matrix.py")

LOST = 77
"""Exit code: an earlier kernel's fault destroyed the CUDA context."""

FAULTS = range(700, 720)
SEEDS = (1, 2, 3)
REFERENCE_SEED = 1

TOLERANCES = {"f32": 1e-4, "f16": 2.0**-10, "bf16": 2.0**-7 / 2}
"""By the least precise output: as if every element were one unit in the last place off (f32: fast exponentials and the
order of sums in tensor cores). Other outputs are compared exactly."""


@dataclass
class Found:
    """How one array differs from another."""

    error: float | None
    mismatches: int
    elements: int

    @property
    def reason(self) -> str:
        return "" if self.error is not None else "NaN or infinity in other places than the reference"


@dataclass
class Verdict:
    """A case's last line. `failures` are the fields of a schema's Failure that depend on the mode."""

    case: str
    template: str
    format: str
    shape: str
    error: float | None = None
    bits: bool = False
    reference: str = ""
    failures: list[dict[str, Any]] = field(default_factory=list)


def difference(found: Sequence[Any], wanted: Sequence[Any]) -> Found:
    """All outputs together."""
    squares, norm, mismatches, elements = 0.0, 0.0, 0, 0
    finite = True
    for mine, theirs in zip(found, wanted, strict=True):
        same = mine.view(np.uint8).reshape(-1, mine.itemsize) == theirs.view(np.uint8).reshape(-1, mine.itemsize)
        mismatches += int((~same.all(axis=1)).sum())
        elements += mine.size
        one, two = mine.astype(np.float64).reshape(-1), theirs.astype(np.float64).reshape(-1)
        odd = ~np.isfinite(two)
        finite &= bool(np.array_equal(one[odd], two[odd], equal_nan=True) and np.isfinite(one[~odd]).all())
        squares += float(np.square(one[~odd] - two[~odd]).sum()) if finite else 0.0
        norm += float(np.square(two[~odd]).sum())
    if not finite:
        return Found(None, mismatches, elements)
    return Found(float(np.sqrt(squares / norm)) if norm else float(squares > 0), mismatches, elements)


def tolerance(spec: KernelSpec) -> float:
    """What the error of a kernel's outputs may be."""
    return max((TOLERANCES.get(operand.dtype, 0.0) for operand in spec.operands if operand.access != "r"), default=0.0)


def shape_of(spec: KernelSpec) -> str:
    def text(operand: Any) -> str:
        kind = operand.format.name if operand.format is not None else operand.dtype
        return f"{operand.name} {kind} {'x'.join(map(str, operand.shape))}"

    return ", ".join(text(operand) for operand in spec.operands)


def format_of(spec: KernelSpec) -> str:
    """The packed operand's format, else the first operand's type."""
    packed = next((each.format.name for each in spec.operands if each.format is not None), None)
    return packed or spec.operands[0].dtype


# --- cases -----------------------------------------------------------------------------------------------------------


def chunks() -> list[list[Any]]:
    """All cases, those that share a module together: a template's, or a format's."""
    groups: dict[str, list[Any]] = {}
    for name in formats.FORMATS:
        groups[name] = list(matrix.of_format(name))
    for case in matrix.templates():
        groups.setdefault(case.spec.template, []).append(case)
    return list(groups.values())


def share(groups: list[list[Any]], number: int, count: int) -> list[list[Any]]:
    """Every `count`-th module, of modules in pieces of eight kernels: the pieces take about the same time."""
    pieces = [group[at : at + 8] for group in groups for at in range(0, len(group), 8)]
    return pieces[number::count]


def plan_of(cases: Sequence[Any]) -> Plan:
    return Plan(
        devices=(DeviceSlot(name="d0", kind="cuda"),), streams=(), events=(), arenas=(), buffers=(),
        kernels=tuple(case.spec for case in cases), entries=(),
    )  # fmt: skip


# --- references ------------------------------------------------------------------------------------------------------


class References:
    """Outputs of the simulated GPU for one seed: from a file that was brought along, else simulated here."""

    def __init__(self, arch: str, file: Path | None = None) -> None:
        self.arch = arch
        self.brought = zipfile.ZipFile(file) if file is not None and file.exists() else None
        self._names = set(self.brought.namelist()) if self.brought else set()
        self._kernels: dict[str, Kernel] = {}
        self.missing = ""
        self.how = ""
        self.sim = SimBackend(0, arch)

    def key(self, case: Any) -> str:
        """Covers the kernel's text and its inputs: another NumPy, or another emitter, must not meet old outputs."""
        inputs = zlib.crc32(b"".join(np.ascontiguousarray(each).tobytes() for each in case.operands(REFERENCE_SEED)))
        return f"{case.name}-{self.arch}-{emitter_version('cuda')}-{inputs:08x}"

    def of(self, case: Any, chunk: Sequence[Any]) -> list[Any] | None:
        """The case's outputs; None where there is neither a file nor a compiler. `how` and `missing` say which."""
        key = self.key(case)
        if self.brought is not None and key in self._names:
            self.how = "brought"
            data = np.load(io.BytesIO(self.brought.read(key)))
            shapes = [each for each, operand in zip(case.operands(1), case.spec.operands, strict=True)
                      if operand.access != "r"]  # fmt: skip
            return [data[f"arr_{i}"].view(shape.dtype).reshape(shape.shape) for i, shape in enumerate(shapes)]
        if case.name not in self._kernels:
            try:
                self._kernels.update(self._built(plan_of(chunk)))
            except CompilerMissingError as error:
                self.missing = str(error)
                return None
        self.how = "simulated"
        return Session(self.sim, self._kernels[case.spec.name], case).run(REFERENCE_SEED, 0)

    def _built(self, plan: Plan) -> dict[str, Kernel]:
        """Without checks of every access, which tests/gpu/test_matrix.py makes: here it is only arithmetic."""
        before = os.environ.get("QC_SIM_CHECK")
        os.environ["QC_SIM_CHECK"] = "0"
        try:
            return self.sim.load(plan, self.sim.build(plan))
        finally:
            os.environ.pop("QC_SIM_CHECK")
            os.environ.update({"QC_SIM_CHECK": before} if before is not None else {})

    def write(self, groups: Sequence[Sequence[Any]], file: Path) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for chunk in groups:
                for case in chunk:
                    outputs = self.of(case, chunk)
                    assert outputs is not None, self.missing
                    data = io.BytesIO()
                    np.savez(data, *(each.view(np.uint8).reshape(-1) for each in outputs))
                    archive.writestr(self.key(case), data.getvalue())


# --- running ---------------------------------------------------------------------------------------------------------


class Session:
    """One kernel with its memory on a stream that is not the default one."""

    def __init__(self, backend: Backend, kernel: Kernel, case: Any) -> None:
        self.backend, self.kernel, self.case = backend, kernel, case
        self.stream = backend.stream("matrix")
        self.memories = [backend.allocate(max(1, each.nbytes), label=case.name) for each in case.operands(0)]
        self.addresses = [memory.address for memory in self.memories]

    def run(self, seed: int, filling: int, graph: Any = None) -> list[Any]:
        """The outputs of one launch, or of a replay, with the inputs of `seed`; what is written held `filling`."""
        operands = self.case.spec.operands
        arrays = [np.ascontiguousarray(array) for array in self.case.operands(seed)]
        for operand, array, address in zip(operands, arrays, self.addresses, strict=True):
            if operand.access == "w":
                array.view(np.uint8).reshape(-1)[:] = filling
            self.backend.upload(self.stream, address, array.ctypes.data, array.nbytes)
        if graph is None:
            self.backend.launch(self.stream, self.kernel, self.addresses, ())
        else:
            graph.launch(self.stream)
        results = []
        for operand, array, address in zip(operands, arrays, self.addresses, strict=True):
            if operand.access != "r":
                found = np.zeros_like(array)
                self.backend.download(self.stream, found.ctypes.data, address, array.nbytes)
                results.append(found)
        self.backend.synchronize(self.stream)
        return results

    def capture(self) -> Any:
        self.backend.begin_capture(self.stream)
        try:
            self.backend.launch(self.stream, self.kernel, self.addresses, ())
        except QCompilerError:
            with contextlib.suppress(QCompilerError):  # the launch's own error is the one to tell
                self.backend.end_capture(self.stream)
            raise
        return self.backend.end_capture(self.stream)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class Runner:
    """Cases on one device, each as far as it gets."""

    def __init__(self, backend: Backend, references: References | None, say: Any = None) -> None:
        self.backend, self.references = backend, references
        self.say = say or (lambda case, mode: None)

    def kernels(self, chunk: Sequence[Any]) -> dict[str, Kernel | QCompilerError]:
        """The chunk's kernels; where their module does not compile or load, each alone, to find the bad one."""
        try:
            plan = plan_of(chunk)
            return dict(self.backend.load(plan, self.backend.build(plan)))
        except QCompilerError as error:
            if lost(error) or len(chunk) == 1:
                return {case.spec.name: error for case in chunk}
        found: dict[str, Kernel | QCompilerError] = {}
        for case in chunk:
            found.update(self.kernels([case]))
        return found

    def check(self, case: Any, kernel: Kernel | QCompilerError, chunk: Sequence[Any]) -> Verdict:
        """Raises only what destroyed the context, with the verdict so far as its `verdict`."""
        verdict = Verdict(case.name, case.spec.template, format_of(case.spec), shape_of(case.spec))
        mode = "eager"
        try:
            if isinstance(kernel, QCompilerError):
                raise kernel
            self.say(case, mode)
            session = Session(self.backend, kernel, case)
            eager = {seed: session.run(seed, 0) for seed in SEEDS}
            self._judge_eager(verdict, case, eager, chunk)
            mode = "captured"
            self.say(case, mode)
            graph = session.capture()
            if graph.shape.nodes != {"kernel": 1}:
                verdict.failures.append({"mode": mode, "reason": f"the graph holds {graph.shape.nodes}"})
            mode = "replayed"
            self.say(case, mode)
            for seed in SEEDS:
                found = difference(session.run(seed, 1, graph), eager[seed])
                if found.mismatches:
                    reason = f"with inputs {seed}: not the bits of an eager run"
                    verdict.failures.append({"mode": mode, **asdict(found), "tolerance": 0.0, "reason": reason})
                    break
            graph.close()
            session.close()
        except QCompilerError as error:
            verdict.failures.append({"mode": mode, "reason": f"{type(error).__name__}: {str(error)[:1500]}"})
            if lost(error):
                error.verdict = verdict  # type: ignore[attr-defined]
                raise
        return verdict

    def _judge_eager(self, verdict: Verdict, case: Any, eager: dict[int, list[Any]], chunk: Sequence[Any]) -> None:
        if len({tuple(each.tobytes() for each in outputs) for outputs in eager.values()}) == 1:
            verdict.failures.append({"mode": "eager", "reason": "the outputs depend on no input"})
        if not any(np.isfinite(each.astype(np.float64)).any() for each in eager[REFERENCE_SEED]):
            verdict.failures.append({"mode": "eager", "reason": "the outputs are no numbers, which equal any others"})
        reference = self.references.of(case, chunk) if self.references is not None else None
        if reference is None or self.references is None:
            return
        verdict.reference = self.references.how
        found, allowed = difference(eager[REFERENCE_SEED], reference), tolerance(case.spec)
        verdict.error, verdict.bits = found.error, not found.mismatches
        if found.error is None or found.error > allowed:
            verdict.failures.append({"mode": "eager", **asdict(found), "tolerance": allowed, "reason": found.reason})


def lost(error: BaseException) -> bool:
    """Whether the CUDA context is gone with it."""
    return isinstance(error, DeviceError) and error.code in FAULTS


# --- the process -----------------------------------------------------------------------------------------------------


def known(lines: Path) -> set[str]:
    """Cases that an earlier process has begun."""
    if not lines.exists():
        return set()
    found = (json.loads(line) for line in lines.read_text().splitlines() if line.endswith("}"))
    return {each["case"] for each in found if "case" in each}


def is_built(plan: Plan, arch: str) -> bool:
    """Whether the cache holds the plan's cubin."""
    record = cache_dir("plans") / f"{nvrtc._plan_key(plan, arch)}.json"
    return nvrtc._read_plan(record, arch) is not None


def run(chosen: argparse.Namespace) -> int:
    arch = registry.architecture(chosen.device)
    backend = registry.backend(chosen.device, arch)
    done = known(chosen.lines)
    if chosen.passed:
        done |= set(chosen.passed.read_text().split())
    with chosen.lines.open("a", buffering=1) as out:

        def say(case: Any, mode: str) -> None:
            out.write(json.dumps({"case": case.name, "mode": mode}) + "\n")

        references = References(arch, chosen.references)
        runner = Runner(backend, references, say)
        for chunk in share(chosen_chunks(chosen), *chosen.share):
            rest = [case for case in chunk if case.name not in done]
            if not rest:
                continue
            began, brought = time.monotonic(), is_built(plan_of(chunk), arch)
            kernels = runner.kernels(chunk)
            seconds = round(time.monotonic() - began, 2)
            out.write(json.dumps({"module": len(chunk), "hit": brought, "seconds": seconds}) + "\n")
            for case in rest:
                try:
                    verdict = runner.check(case, kernels[case.spec.name], chunk)
                except DeviceError as error:
                    out.write(json.dumps(asdict(error.verdict)) + "\n")  # type: ignore[attr-defined]
                    return LOST
                out.write(json.dumps(asdict(verdict)) + "\n")
        if references.missing:
            print(f"without references: {references.missing}")
    return 0


def chosen_chunks(chosen: argparse.Namespace) -> list[list[Any]]:
    """All, or those of `--only` and `--sample`."""
    groups = chunks()
    if chosen.only:
        groups = [
            group for group in groups if (format_of(group[0].spec) in formats.FORMATS) == (chosen.only == "formats")
        ]
    if chosen.sample:
        groups = [[case for case in group if case.name in chosen.sample] for group in groups]
    return [group for group in groups if group]


def compile_all(chosen: argparse.Namespace) -> int:
    """Every module for an architecture into the cache, in chunks as `run` asks for them, and the references."""
    groups = share(chosen_chunks(chosen), *chosen.share)
    if not chosen.share[0]:
        conformance, devices = load("tests/gpu/conformance.py"), load("tests/gpu/devices.py")
        devices.compile_checks(conformance.checks_for(arch_number(chosen.compile)), chosen.compile)
    for chunk in groups:
        nvrtc.build_module(plan_of(chunk), chosen.compile)
    if chosen.references:
        References(chosen.compile).write(groups, chosen.references)
    print(f"{sum(map(len, groups))} kernels in {len(groups)} modules for {chosen.compile}")
    return 0


def names(chosen: argparse.Namespace) -> Iterator[str]:
    for group in chosen_chunks(chosen):
        yield from (case.name for case in group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("NUMBER", "COUNT"))
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--references", type=Path)
    parser.add_argument("--passed", type=Path, help="names of cases that need not run again")
    parser.add_argument("--compile", metavar="ARCH")
    parser.add_argument("--only", choices=("templates", "formats"))
    parser.add_argument("--sample", nargs="+", help="these cases alone")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    if chosen.list:
        print("\n".join(names(chosen)))
        return 0
    if chosen.compile:
        return compile_all(chosen)
    if chosen.lines is None:
        parser.error("--lines is needed")
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
