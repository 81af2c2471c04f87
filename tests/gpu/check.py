"""`make gpu-check`: everything that needs a GPU, in parts that fit into ten minutes each, on a machine without network.

    python3 tests/gpu/check.py [--wheels DIR] [--out DIR] [--part first second bench suites sanitizer]
                               [--budget SECONDS] [--device cuda:0|sim:0] [--resume DIR] [--jobs N]

`--wheels` is the folder that tests/gpu/bring.py fills on a machine with a network: wheels of what a bare image with
Python and torch lacks, cubins, references. The package itself is assembled into build/gpu-site from the source tree.

1. first      under nine minutes, what tells most: environment, clocks, copy bandwidth; PTX wrappers against their
              models; every template and every format eagerly, captured and replayed; capture rules; then the times
              of benchmarks/gpu_first.py
2. second     under nine minutes: ncu, memcheck and racecheck on the kernels of benchmarks/gpu_profile.py
3. suites     every other test that has a `cuda:0` case: kernels against float64, streams, sessions, models
4. sanitizer  compute-sanitizer's memcheck, racecheck, synccheck and initcheck on a selection of tests
   bench      benchmarks/gpu_first.py alone, as in `first`; only when named

Nothing begins or goes on after `--budget` seconds; the table and the JSON name what was left out, which is no failure.
gpu-check.json (benchmarks/gpu_schema.py) is written to `--out` after each step, so that a kill loses one step at most.
Parts that ran before with the same `--out`, tree and device stay in it. With `--resume` what passed in that folder's
run does not run again. With `--device sim:0` the simulated GPU stands in the GPU's place. Exit 1 if anything failed.
Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from by_path import ROOT, load

schema = load("benchmarks/gpu_schema.py")
machine = load("tests/gpu/machine.py")
assembly = load("tests/gpu/assembly.py")
processes = load("tests/gpu/processes.py")
ncu = load("tests/gpu/ncu.py")

Suite, DEVICE_CASES = processes.Suite, processes.DEVICE_CASES

PARTS = ("first", "second", "bench", "suites", "sanitizer")
DEFAULT = ("first", "second", "suites", "sanitizer")
BUDGETS = {"first": 540.0, "second": 540.0, "bench": 540.0}
"""Seconds of a part for which no budget is given: it must fit into a command of ten minutes, with its start."""

FIRST = ("tests/gpu/test_conformance_gpu.py", "tests/devices/test_capture_rules.py")
SUITES = (
    "tests/cuda", "tests/devices", "tests/capture", "tests/models/test_gpu_blocks.py",
    "tests/models/test_gpu_random.py", "tests/models/test_recurrent.py", "tests/models/test_states.py",
)  # fmt: skip
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED = {
    "tests/gpu/test_conformance_gpu.py": DEVICE_CASES,
    "tests/cuda/test_grouped_linear.py": f"{DEVICE_CASES} and (tensor_cores_multiply_the or one_token)",
    "tests/cuda/test_grouped_combined.py": f"{DEVICE_CASES} and sums_of_codes",
    "tests/cuda/test_im2col.py": DEVICE_CASES,
    "tests/cuda/test_linear_norm.py": f"{DEVICE_CASES} and (both_kernels or their_kernels or more_warps)",
    "tests/cuda/test_linear_statistics.py": f"{DEVICE_CASES} and another_one_wrote",
    "tests/cuda/test_linear_pairs.py": f"{DEVICE_CASES} and (engine or integer_products)",
    "tests/cuda/test_linear_fma.py": f"{DEVICE_CASES} and every_format_class_and_m",
    "tests/cuda/test_linear_mma.py": f"{DEVICE_CASES} and nf4 and not large",
    "tests/cuda/test_every_format.py": f"{DEVICE_CASES} and (beyond or rows_of_every_format)",
    "tests/cuda/test_attention.py": f"{DEVICE_CASES} and (plain or decode or bf16)",
    "tests/cuda/test_norm.py": DEVICE_CASES,
    "tests/cuda/test_softmax.py": DEVICE_CASES,
}
"""File -> which of its tests run under the sanitizer; it slows kernels down by ten to a hundred times."""

EXPECTED = (*SANITIZED, "tests/devices/test_capture_rules.py", "tests/capture/test_sessions.py")
"""Files that are known to have cases for a GPU: one that has none any more is a failure, not a shorter table."""

SECOND_TOOLS = ("memcheck", "racecheck")
SANITIZER = (
    "--error-exitcode", str(processes.SANITIZER_ERROR), "--print-limit", "20", "--report-api-errors", "no",
)  # fmt: skip
"""What kernels do is judged; the bindings ask the driver for much that it may lack."""
CORRECTNESS = 0.5
"""Of a part's time, what the matrix may take: the times of slow kernels tell more than a thirtieth format."""
RESERVE = 12.0
"""Seconds that the benchmark leaves of its time, for the report."""
LEAST_BENCH = 40.0


@dataclass
class Programs:
    """The benchmarks, which tests replace by shorter ones."""

    bench: Path = ROOT / "benchmarks" / "gpu_first.py"
    profile: Path = ROOT / "benchmarks" / "gpu_profile.py"


class Check:
    """One run: the report so far, and how each part adds to it."""

    def __init__(self, chosen: argparse.Namespace, report: Any, env: dict[str, str], clock: Any) -> None:
        self.chosen, self.report, self.env, self.clock = chosen, report, env, clock
        self.result: Path = chosen.out / "gpu-check.json"
        self.programs = Programs(*filter(None, chosen.programs)) if chosen.programs else Programs()
        self.earlier: dict[tuple[str, str], Any] = {}
        self.passed: dict[str, Any] = {}
        self.references: Path | None = None
        self.began = time.monotonic()
        self._lock = threading.RLock()
        self._written = 0.0

    # --- the report ---

    def write(self, at_once: bool = True) -> None:
        """The file as it stands; not more often than every two seconds unless `at_once`."""
        with self._lock:
            if at_once or time.monotonic() - self._written > 2.0:
                self.report.seconds = round(time.monotonic() - self.began, 1)
                schema.write(self.report, self.result)
                self._written = time.monotonic()

    def add(self, step: Any) -> None:
        with self._lock:
            if step is not None:
                self.report.steps.append(step)
                print(f"{step.part}: {step.name}: {describe(step)}", flush=True)
                self.write()

    def resumed(self, part: str, name: str) -> bool:
        """Whether the step passed in the run that is resumed; it is then in the report."""
        step = self.earlier.get((part, name))
        if step is None:
            return False
        step.resumed = True
        self.add(step)
        return True

    # --- parts ---

    def steps(self, part: str) -> Any:
        return processes.Steps(schema, self.env, self.clock.within(None if self.chosen.budget else BUDGETS.get(part)))

    def first(self, part: str) -> None:
        steps = self.steps(part)
        if self.report.kind in ("gpu", "stub"):
            self.probe(part, steps)
        suites = self.suites_of(FIRST)
        jobs = max(1, self.chosen.jobs - 1)
        with ThreadPoolExecutor(1 + jobs) as pool:
            matrix = pool.submit(self.matrix, part, steps, jobs)
            for step in pool.map(lambda suite: self.suite(part, steps, suite), suites):
                self.add(step)
            matrix.result()
        self.note_learned(steps)
        self.at("before bench")
        self.bench(part, steps)
        self.at("after bench")
        self.write()

    def at(self, moment: str) -> None:
        if self.report.kind == "gpu":
            self.report.environment.clocks[moment] = machine.clocks()

    def probe(self, part: str, steps: Any) -> None:
        size = ["--mib", "16", "--samples", "3"] if self.report.kind == "stub" else []
        command = [sys.executable, "-P", str(ROOT / "tests/gpu/probe.py"), *size]
        step, output = steps.program(part, "copy bandwidth", command, 60.0)
        line = next((each for each in output.splitlines() if each.startswith("{")), None)
        self.report.copy = schema.Copy(**json.loads(line)) if line else schema.Copy(reason=output.strip()[-500:])
        self.add(step)

    def suites_of(self, places: Sequence[str]) -> list[Any]:
        """What of these files can run on the device of this check."""
        found = []
        for file in files_of(places):
            if self.report.kind == "gpu":
                found.append(Suite(file))
            elif self.report.kind == "stub":  # it keeps few of the rules of captures: only what is not judged
                marks = "cuda_is_silent" if file.name == "test_capture_rules.py" else ""
                found.append(Suite(file, DEVICE_CASES, marks))
            elif file.name == "test_conformance_gpu.py":
                found.append(Suite(file.with_name("test_conformance_sim.py"), "model or every_twin"))
            else:
                found.append(Suite(file, "sim:0"))
        return found

    def suite(self, part: str, steps: Any, suite: Any) -> Any:
        if self.resumed(part, suite.name):
            return None
        return steps.pytest(part, suite, expected=EXPECTED if self.report.kind == "gpu" else ())

    def note_learned(self, steps: Any) -> None:
        with self._lock:
            cases = {each.case for each in steps.learned}
            self.report.learned = [each for each in self.report.learned if each.case not in cases] + steps.learned

    def matrix(self, part: str, steps: Any, jobs: int) -> None:
        """Every template and every format in `jobs` processes."""
        clock = steps.clock.within(CORRECTNESS * limit if (limit := steps.clock.limit(math.inf)) < math.inf else None)
        found = processes.Matrix(schema, self.env, clock, lambda: self.write(at_once=False))
        found.silence = self.chosen.silence
        found.kernels = self.report.kernels = list(self.passed.values())
        self.report.failures = found.failures
        options: list[str] = []
        if self.references is not None:
            options += ["--references", str(self.references)]
        if self.passed:
            names = processes.working("passed.txt")
            names.write_text("\n".join(self.passed))
            options += ["--passed", str(names)]
        if self.chosen.sample:
            options += ["--sample", *self.chosen.sample]

        def one(number: int) -> None:
            self.add(found.share(part, self.chosen.device, number, jobs, options))

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, range(jobs)))
        if not found.kernels and not found.failures and clock.limit(1.0) > 0:
            self.add(schema.Step(part, "gpu/matrix", False, 0.0, failures=["no kernel was run"]))
        cache = self.report.cache
        cache.references = found.references
        cache.hits = sum(each["hit"] for each in found.modules)
        cache.misses = sum(not each["hit"] for each in found.modules)
        cache.seconds = round(sum(each["seconds"] for each in found.modules if not each["hit"]), 1)
        self.write()

    def bench(self, part: str, steps: Any) -> None:
        """Alone on the machine. Whatever it wrote counts, also where it failed or was stopped."""
        name, report = "times", self.chosen.out / "bench.json"
        limit = steps.clock.limit(BUDGETS["bench"])
        if self.resumed(part, name):
            return
        if limit < LEAST_BENCH:
            self.add(steps.left_out(part, name, "not begun"))
            return
        if not self.programs.bench.exists():
            failures = [f"{self.programs.bench} is not there"]
            self.add(schema.Step(part, name, False, 0.0, failures=failures))
            return
        report.unlink(missing_ok=True)
        command = [sys.executable, "-P", str(self.programs.bench), "--json", str(report), "--device"]
        command += [self.chosen.device, "--budget", f"{limit - RESERVE:.0f}"]
        command += ["--small"] if self.report.kind == "stub" else []
        step, output = steps.program(part, name, command, limit)
        print(output, flush=True)
        self.take_bench(report, step)
        self.add(step)

    def take_bench(self, file: Path, step: Any) -> None:
        """The benchmark's document, however it ended; a step that failed for a wrong result alone has its failures."""
        try:
            document = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            step.ok, step.failures = step.left_out, [*step.failures, f"it wrote no JSON: {error}"]
            return
        self.report.bench = document
        self.report.peers_missing.update({str(k): str(v) for k, v in document.get("peers_missing", {}).items()})
        wrong = [json.dumps(each)[:200] for each in document.get("failures", [])]
        step.failures += wrong
        step.ok = step.ok and not wrong

    def second(self, part: str) -> None:
        """ncu on one kernel after the other, alone; then the sanitizers, several at a time."""
        steps = self.steps(part)
        profile = self.programs.profile
        if self.report.kind == "sim":
            self.skip_tools(part, "the simulated GPU checks every access itself and has no counters")
            return
        if not profile.exists():
            self.add(schema.Step(part, "kernels", False, 0.0, failures=[f"{profile} is not there"]))
            return
        step, output = steps.program(part, "kernels", [sys.executable, "-P", str(profile), "--list"], 60.0)
        kernels = output.split() if step.ok else []
        self.add(step)
        self.at("before second")
        for kernel in kernels:
            self.add(self.count(part, steps, kernel))
        work = [(tool, kernel) for tool in SECOND_TOOLS for kernel in kernels]
        with ThreadPoolExecutor(max(1, self.chosen.jobs // 2)) as pool:
            for made in pool.map(lambda each: self.sanitize(part, steps, *each), work):
                self.add(made)

    def skip_tools(self, part: str, reason: str) -> None:
        self.report.profile.append(schema.Profile("all", "ncu, memcheck, racecheck", True, reason=reason))
        self.add(schema.Step(part, "tools", True, 0.0, failures=[f"left out: {reason}"], left_out=True))

    def launch(self, kernel: str, tool: str) -> list[str]:
        """Full sizes for counters; small ones for the sanitizer, which slows kernels down by ten to a hundred times."""
        command = [sys.executable, "-P", str(self.programs.profile), "--kernel", kernel]
        command += ["--device", self.chosen.device]
        return command if tool == "ncu" and self.report.kind == "gpu" else [*command, "--small"]

    def tool(self, part: str, steps: Any, tool: str, program: str, kernel: str, prefix: list[str]) -> Any:
        """(step, profile entry, output) of a kernel under a tool; without the tool, an entry that says so."""
        name = f"{tool}: {kernel}"
        entry = schema.Profile(kernel, tool, False)
        if shutil.which(program) is None:
            entry.ok, entry.reason = True, f"{program} is not on PATH"
            return schema.Step(part, name, True, 0.0, failures=[f"left out: {entry.reason}"], left_out=True), entry, ""
        step, output = steps.program(part, name, [*prefix, *self.launch(kernel, tool)], 120.0)
        entry.ok, entry.seconds = step.ok and not step.left_out, round(step.seconds, 1)
        if step.left_out:
            entry.reason = step.failures[0]
        return step, entry, output

    def keep(self, entry: Any) -> None:
        with self._lock:
            same = (entry.kernel, entry.tool)
            self.report.profile = [e for e in self.report.profile if (e.kernel, e.tool) != same] + [entry]

    def count(self, part: str, steps: Any, kernel: str) -> Any:
        if self.resumed(part, f"ncu: {kernel}"):
            return None
        step, entry, output = self.tool(part, steps, "ncu", "ncu", kernel, list(ncu.COMMAND))
        if entry.ok and not entry.reason:
            entry.metrics = ncu.metrics(output)
            entry.ok = bool(entry.metrics)
        if not entry.ok and not entry.reason:
            entry.reason = ncu.why_none(output)
            if ncu.FORBIDDEN in output:  # the machine's owner forbids it: nothing of ours is wrong
                step.ok, step.failures = True, [f"left out: {entry.reason}"]
                step.left_out = True
            else:
                step.ok, step.failures = False, [entry.reason]
        self.keep(entry)
        return step

    def sanitize(self, part: str, steps: Any, tool: str, kernel: str) -> Any:
        if self.resumed(part, f"{tool}: {kernel}"):
            return None
        prefix = ["compute-sanitizer", "--tool", tool, *SANITIZER]
        step, entry, output = self.tool(part, steps, tool, "compute-sanitizer", kernel, prefix)
        if not step.ok:
            entry.findings = [line for line in output.splitlines() if line.startswith("=========")][:60]
            entry.reason = "" if entry.findings else output.strip()[-500:]
            step.failures = [*entry.findings[:3], *([entry.reason[:200]] if entry.reason else [])]
        self.keep(entry)
        return step

    def suites(self, part: str) -> None:
        steps = self.steps(part)
        with ThreadPoolExecutor(self.chosen.jobs) as pool:
            for step in pool.map(lambda suite: self.suite(part, steps, suite), self.suites_of(SUITES)):
                self.add(step)
        self.note_learned(steps)

    def sanitizer(self, part: str) -> None:
        path = shutil.which("compute-sanitizer")
        if path is None:
            self.add(schema.Step(part, "compute-sanitizer is not on PATH: not run", True, 0.0, left_out=True))
            return
        steps = self.steps(part)
        work = [(tool, ROOT / file, chosen) for tool in TOOLS for file, chosen in SANITIZED.items()]

        def one(each: tuple[str, Path, str]) -> Any:
            tool, file, chosen = each
            if self.resumed(part, f"{tool}: {file.stem}"):
                return None
            prefix = [path, "--tool", tool, *SANITIZER]
            return steps.pytest(part, Suite(file, chosen), prefix, tool, expected=EXPECTED)

        def templates(tool: str) -> Any:
            lines = processes.working(f"{tool}.jsonl")
            lines.unlink(missing_ok=True)
            command = [path, "--tool", tool, *SANITIZER, sys.executable, "-P"]
            command += [str(ROOT / "tests/gpu/matrix_worker.py"), "--only", "templates", "--lines", str(lines)]
            references = ["--references", str(self.references)] if self.references else []
            name = f"{tool}: templates"
            if self.resumed(part, name):
                return None
            return steps.program(part, name, [*command, *references], processes.TOOL_LIMIT)[0]

        with ThreadPoolExecutor(max(1, self.chosen.jobs // 2)) as pool:
            matrix = [pool.submit(templates, tool) for tool in TOOLS]
            for step in [*pool.map(one, work), *(each.result() for each in matrix)]:
                self.add(step)

    def part(self, name: str) -> None:
        calls: dict[str, Callable[[str], None]] = {
            "first": self.first, "second": self.second, "suites": self.suites, "sanitizer": self.sanitizer,
            "bench": lambda part: self.bench(part, self.steps(part)),
        }  # fmt: skip
        try:
            calls[name](name)
        except Exception as error:  # a mistake of the check's own must not cost the parts behind it
            text = traceback.format_exc()
            self.add(schema.Step(name, "the check itself", False, 0.0, failures=[repr(error)[:200]], output=text))
        self.report.parts.append(name)
        self.write()


# --- small things ----------------------------------------------------------------------------------------------------


def files_of(places: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += sorted(path.glob("test_*.py")) if path.is_dir() else [path]
    return found


def describe(step: Any) -> str:
    counts = ", ".join(f"{count} {word}" for word, count in step.counts.items() if count)
    how = "left out" if step.left_out else "passed before" if step.resumed else "ok" if step.ok else "FAILED"
    return f"{how}{f' ({counts})' if counts else ''}, {step.seconds:.1f} s"


def table(report: Any) -> str:
    lines = [f"{'part':<10} {'step':<44} {'passed':>6} {'failed':>6} {'skipped':>7} {'s':>7}"]
    for step in report.steps:
        passed, failed, skipped = (step.counts.get(key, "") for key in ("passed", "failed", "skipped"))
        counts = f"{passed:>6} {failed:>6} {skipped:>7} {step.seconds:>7.1f}"
        word = "" if step.ok and not step.left_out else "  left out" if step.left_out else "  FAILED"
        lines.append(f"{step.part:<10} {step.name:<44} {counts}{word}")
        lines += [f"{'':<11}  {failure}" for failure in step.failures[:8]]
    for each in report.failures[:40]:
        error = "no result" if each.error is None else f"error {each.error:.2e}"
        lines.append(
            f"wrong: {each.kernel} ({each.mode}): {error}, {each.mismatches} of {each.elements} differ; {each.shape}"
        )
    lines += [f"learned: {each.case}: {each.seen.splitlines()[0]}" for each in report.learned if not each.agrees]
    lines += [f"no peer {name}: {reason}" for name, reason in report.peers_missing.items()]
    return "\n".join(lines)


def headline(report: Any) -> str:
    """What the device is, and what stands in its place."""
    found, cache = report.environment, report.cache
    lines = [f"{report.device} ({report.kind}): {found.name}, capability {found.capability}, {found.memory_gib} GiB"]
    if report.kind == "stub":
        lines.append("a driver made of host memory: results are the simulated GPU's, times mean nothing")
    lines.append(f"compiler: {cache.compiled_by}")
    if cache.brought:
        lines.append(f"brought along: {cache.brought} cubins by {cache.brought_by}")
        if maker(cache.brought_by) != maker(cache.compiled_by):
            lines.append("they are not by this compiler and emitter: where the emitter differs, all are compiled again")
    lines += [f"clocks: {found.clocks}"] if found.clocks else []
    return "\n".join(lines)


def maker(text: str) -> list[str]:
    """NVRTC's version and the emitter's, without the library's path."""
    return text.split(", ")[:2]


def keep_others(check: Check, folder: Path) -> Any:
    """The report of an earlier run in the folder, on the same tree and device; None where there is none.

    Its other parts stand in this run's report as they were: a visit is one file, however many commands it takes.
    """
    file = folder / "gpu-check.json"
    here, chosen = check.report, check.chosen.part
    try:
        old = schema.read(file)
    except (OSError, ValueError) as error:
        if check.chosen.resume or file.exists():
            print(f"no earlier run is kept: {error}")
        return None
    if (old.kind, old.environment.tree, old.environment.name) != (
        here.kind,
        here.environment.tree,
        here.environment.name,
    ):
        print(f"not kept: {file} is of another tree or device ({old.environment.name}, {old.environment.tree})")
        return None
    here.parts = [part for part in old.parts if part not in chosen]
    here.steps = [step for step in old.steps if step.part not in chosen]
    here.learned, here.environment.clocks = old.learned, old.environment.clocks
    if "first" not in chosen:
        here.kernels, here.failures, here.cache, here.copy = old.kernels, old.failures, old.cache, old.copy
    if not {"first", "bench"} & set(chosen):
        here.bench, here.peers_missing = old.bench, {**old.peers_missing, **here.peers_missing}
    if "second" not in chosen:
        here.profile = old.profile
    return old


def resume(check: Check, folder: Path) -> None:
    """What passed there does not run again: steps by their names, and kernels of the matrix."""
    old, here = keep_others(check, folder), check.report
    if old is None:
        return
    check.earlier = {(step.part, step.name): step for step in old.steps if step.ok and not step.left_out}
    check.passed = {kernel.kernel: kernel for kernel in old.kernels}
    here.profile, here.bench, here.copy = old.profile, old.bench, old.copy
    here.peers_missing = {**old.peers_missing, **here.peers_missing}
    print(f"resumed: {len(check.earlier)} steps and {len(check.passed)} kernels passed before")


def arguments_of(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder that tests/gpu/bring.py filled")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="where gpu-check.json and bench.json go")
    parser.add_argument("--part", nargs="+", default=list(DEFAULT), choices=PARTS)
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--budget", type=float, help="seconds after which the rest is left out")
    parser.add_argument("--device", default="cuda:0", choices=("cuda:0", "sim:0"))
    parser.add_argument("--resume", type=Path, help="a folder with the gpu-check.json of an earlier run")
    parser.add_argument(
        "--silence", type=float, default=processes.SILENCE, help="seconds without a result after which a kernel hangs"
    )
    parser.add_argument("--sample", nargs="+", help="of the matrix, these kernels alone (for tests)")
    parser.add_argument(
        "--programs", type=Path, nargs=2, help="in place of gpu_first.py and gpu_profile.py (for tests)"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    chosen = arguments_of(given)
    chosen.out = chosen.out.resolve()
    chosen.out.mkdir(parents=True, exist_ok=True)
    report = schema.Report(device=chosen.device)
    if chosen.device == "cuda:0":
        count, report.reason = machine.gpus()
        if not count:
            print(f"no GPU: {report.reason}; nothing was checked (DEVICE=sim:0 runs it on the simulated one)")
            schema.write(report, chosen.out / "gpu-check.json")
            return 0
        report.kind = "stub" if machine.is_stub() else "gpu"
        report.environment = schema.Environment(**machine.device())
    else:
        report.kind, report.environment.name = "sim", "simulated GPU"
    site = ROOT / "build" / "gpu-site"
    if chosen.wheels:
        assembly.install_wheels(chosen.wheels.resolve(), site)
    assembly.assemble(site)
    env = assembly.environment(site)
    report.peers_missing = assembly.check_packages(env)
    for name, value in machine.software(site).items():
        setattr(report.environment, name, value)
    brought = assembly.install_cubins(chosen.wheels, Path(env["QC_CACHE_DIR"]))
    report.cache.brought, report.cache.brought_by = brought.cubins, brought.maker
    report.cache.compiled_by = report.environment.nvrtc = assembly.compiler(env)
    check = Check(chosen, report, env, processes.Clock(chosen.budget, began))
    check.began, check.references = began, brought.references
    if chosen.resume:
        resume(check, chosen.resume)
    else:
        keep_others(check, chosen.out)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop(check))
    return conclude(check)


def stop(check: Check) -> None:
    """Somebody ends the check: its processes end with it, and the report stands as it is."""
    processes.end_all()
    check.write()
    print(f"stopped from outside; written to {check.result}", flush=True)
    os._exit(processes.STOPPED)


def conclude(check: Check) -> int:
    """The chosen parts in the order of `PARTS`, then the table; the exit code."""
    report = check.report
    check.at("start")
    print(headline(report), flush=True)
    check.write()
    for part in [each for each in PARTS if each in check.chosen.part]:
        check.part(part)
    failed = [step for step in report.steps if not step.ok]
    for step in failed:
        print(f"\n--- {step.name} ---\n{step.output}")
    missing = sum(step.left_out for step in report.steps)
    cache = report.cache
    print(f"\n{headline(report)}\n{table(report)}")
    if report.copy.median is not None:
        print(f"copy: {report.copy.median:.3f} TB/s, bytes read and written")
    print(
        f"matrix: {len(report.kernels)} kernels right, {len({each.kernel for each in report.failures})} wrong; ", end=""
    )
    print(f"modules: {cache.hits} from the cache, {cache.misses} compiled in {cache.seconds} s of one core; ", end="")
    print("references: " + ", ".join(f"{count} {how}" for how, count in cache.references.items() if count))
    print(f"{len(failed)} of {len(report.steps)} steps failed, {missing} were left out; written to {check.result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
