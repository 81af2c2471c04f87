"""`make gpu-check`: everything that needs a GPU, in one command, on a bare CUDA 13 image without network.

    python3 tests/gpu/check.py [--wheels DIR] [--out DIR] [--part first bench suites sanitizer] [--jobs N]
                               [--budget SECONDS]

Needs Python >= 3.11 with NumPy, torch, pytest, hypothesis, cuda-core and cuda-bindings; what else qcompiler needs
comes from the environment, or as wheels from a folder. The package itself is assembled into build/gpu-site from the
source tree.

1. first      what tells most: PTX wrappers against their models, the backend, and every template and format on a stream
              of its own, captured, replayed three times with fresh inputs
2. bench      benchmarks/matmul_cuda.py: products with packed weights beside torch's and other projects' kernels
3. suites     every other test that has a `cuda:0` case: kernels against float64, streams, capture, sessions, models
4. sanitizer  compute-sanitizer's memcheck, racecheck, synccheck and initcheck on a selection, if it is on PATH

With `--budget` nothing begins, and nothing goes on, after so many seconds; the table and the JSON name what was left
out, which is no failure. Prints a table and writes gpu-check.json to the folder `--out` (default build/), again after
each part. Exit 1 if anything failed. Without a GPU it says so and exits 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("first", "bench", "suites", "sanitizer")
FIRST = ("tests/gpu",)
SUITES = (
    "tests/cuda", "tests/devices", "tests/capture", "tests/models/test_gpu_blocks.py",
    "tests/models/test_gpu_random.py", "tests/models/test_states.py",
)  # fmt: skip
DEVICE_CASES = "cuda:0"
SHARES = {"tests/gpu/test_matrix.py": ("not part", *(f"part{i}" for i in range(4)))}
"""Files whose tests go to several processes, by words in the tests' names."""
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED = {
    "tests/gpu/test_conformance_gpu.py": DEVICE_CASES,
    "tests/gpu/test_matrix.py": f"{DEVICE_CASES} and every_template",
    "tests/cuda/test_grouped_linear.py": f"{DEVICE_CASES} and (tensor_cores_multiply_the or one_token)",
    "tests/cuda/test_windows.py": DEVICE_CASES,
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

REQUIRED = (
    "numpy", "torch", "pytest", "hypothesis", "cuda-core", "cuda-bindings", "ml_dtypes", "msgspec", "safetensors",
    "xdsl",
)  # fmt: skip
SANITIZER_ERROR = 99
STOPPED = 124  # what `run` gives for a process that ran out of time
LEAST_BENCH = 60  # seconds: compiling its kernels takes a part of them
NOTHING_SELECTED = 5  # pytest's exit code


@dataclass
class Step:
    """One process of the check. `counts` are tests by outcome; `failures` name them with their first line."""

    part: str
    name: str
    ok: bool
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    output: str = ""
    left_out: bool = False


class Clock:
    """The time that is left: all of it without a budget of seconds."""

    def __init__(self, budget: float | None) -> None:
        self.end = None if budget is None else time.monotonic() + budget

    def limit(self, wanted: float) -> float:
        """Seconds that a step may take, `wanted` at most; 0 or less where none are left."""
        return wanted if self.end is None else min(wanted, self.end - time.monotonic())


# --- is there a GPU? --------------------------------------------------------------------------------------------------


def gpus() -> tuple[int, str]:
    """(how many, why not): asked of the driver itself, before anything is installed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"no CUDA driver ({error})"
    if status := driver.cuInit(0):
        return 0, f"the driver does not start (cuInit gave {status})"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value, "" if count.value else "the driver sees no device"


def device_report() -> dict[str, object]:
    """The device and the versions of everything that matters."""
    driver = ctypes.CDLL("libcuda.so.1")
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    device, version, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetName(name, 256, device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR, _MINOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return {
        "name": name.value.decode(), "capability": f"{major.value}.{minor.value}", "memory_gib": memory.value >> 30,
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "python": platform.python_version(),
        "packages": {each: installed(each) for each in (*REQUIRED, "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")},
    }  # fmt: skip


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- the package ------------------------------------------------------------------------------------------------------


def assemble(site: Path) -> None:
    """The package as a wheel would unpack it: folders of the source tree under the names they are imported by."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    target = site / "qcompiler"
    shutil.rmtree(target, ignore_errors=True)
    mapped: dict[str, str] = setuptools["package-dir"]
    for package in setuptools["packages"]:
        root = max((each for each in mapped if f"{package}.".startswith(f"{each}.")), key=len)
        source = ROOT / mapped[root] / package[len(root) + 1 :].replace(".", "/")
        patterns = ["*.py", *setuptools["package-data"].get(package, [])]
        for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
            path = site / package.replace(".", "/") / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, path)


def install_wheels(folder: Path, site: Path) -> None:
    """Every wheel of a folder, without an index."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"there are no wheels in {folder}")
    stamp, wanted = site / ".wheels", "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(site), *map(str, wheels)]
    subprocess.run(command, check=True)
    stamp.write_text(wanted)


def environment(site: Path) -> dict[str, str]:
    """Where the tests find the package, and a cache of their own."""
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])]),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "QC_CACHE_DIR": str(ROOT / "build" / "gpu-cache"),
    }


MISSING = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None:
        print(name)
"""


def check_packages(env: dict[str, str]) -> None:
    """SystemExit that names what cannot be imported."""
    modules = ["numpy", "torch", "pytest", "cuda.core", "cuda.bindings.driver", "ml_dtypes", "msgspec", "safetensors"]
    command = [sys.executable, "-c", MISSING, *modules, "xdsl", "rich", "hypothesis"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    if missing := done.stdout.split():
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(missing)}; put their wheels into a folder and pass WHEELS=folder"
        )


# --- the parts --------------------------------------------------------------------------------------------------------


def run(command: Sequence[str], env: dict[str, str], limit: float) -> tuple[int, str, float]:
    """(exit code, output, seconds); `STOPPED` after the time limit."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, cwd=ROOT / "build", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit,
            check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = STOPPED, (late.stdout or b"") + f"\nstopped after {limit:.0f} s".encode()
    return code, output.decode(errors="replace"), time.monotonic() - began


def pytest_step(
    part: str,
    file: Path,
    chosen: str,
    env: dict[str, str],
    prefix: Sequence[str] = (),
    tool: str = "",
    clock: Clock | None = None,
) -> Step | None:
    """The chosen tests of one file in a process of their own: a kernel that faults takes its process' context with it.

    None where the file has no such test and need not have one.
    """
    share = re.sub(r"\W+", "-", chosen)
    report = ROOT / "build" / "gpu-reports" / f"{tool or 'suite'}-{file.stem}-{file.parent.name}-{share}.xml"
    report.unlink(missing_ok=True)
    command = [*prefix, sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir"]
    command += [str(ROOT), "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", chosen]
    command += [f"--junitxml={report}", str(file)]
    name = f"{tool}: {file.stem}" if tool else f"{file.parent.name}/{file.stem}"
    if part_of := chosen.removeprefix(DEVICE_CASES).removeprefix(" and ") if not tool else "":
        name += f" ({part_of})"
    wanted = 900.0 if tool else 420.0
    limit = (clock or Clock(None)).limit(wanted)
    if limit <= 0:
        return left_out(part, name, "not begun")
    code, output, seconds = run(command, env, limit)
    if code == STOPPED and limit < wanted:
        return left_out(part, name, f"stopped after {seconds:.0f} s")
    if code == NOTHING_SELECTED:
        expected = file in [ROOT / each for each in EXPECTED]
        return Step(part, name, False, seconds, failures=[f"no test matches {chosen!r}"]) if expected else None
    counts, failures = read_report(report)
    if tool and code == SANITIZER_ERROR:
        failures += [line for line in output.splitlines() if line.startswith("========= ") and "ERROR SUMMARY" in line]
    return Step(part, name, code == 0, seconds, counts, failures, "" if code == 0 else output[-6000:])


def left_out(part: str, name: str, how: str) -> Step:
    """A step for which the budget left no time."""
    return Step(part, name, True, 0.0, failures=[f"left out: {how}, the budget is spent"], left_out=True)


def read_report(report: Path) -> tuple[dict[str, int], list[str]]:
    """Outcomes of a JUnit report; empty where pytest did not live to write one."""
    if not report.exists():
        return {}, ["the process died before its report"]
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ET.parse(report).getroot().iter("testcase"):
        wrong = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped") is not None
        counts["failed" if wrong is not None else "skipped" if skipped else "passed"] += 1
        if wrong is not None:
            first = (wrong.get("message") or "").strip().splitlines()[:1]
            failures.append(f"{case.get('name')}: {first[0][:200] if first else wrong.tag}")
    return counts, failures


def files_of(places: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += sorted(path.glob("test_*.py")) if path.is_dir() else [path]
    return found


def shares_of(places: Sequence[str]) -> list[tuple[Path, str]]:
    """(file, which of its tests): one for each process."""
    found = []
    for file in files_of(places):
        shares = SHARES.get(file.relative_to(ROOT).as_posix())
        found += [(file, f"{DEVICE_CASES} and {share}") for share in shares or ()] or [(file, DEVICE_CASES)]
    return found


def suites(part: str, places: Sequence[str], env: dict[str, str], jobs: int, clock: Clock) -> list[Step]:
    def one(each: tuple[Path, str]) -> Step | None:
        return pytest_step(part, *each, env, clock=clock)

    with ThreadPoolExecutor(jobs) as pool:
        return [step for step in pool.map(one, shares_of(places)) if step is not None]


def sanitizer(env: dict[str, str], jobs: int, clock: Clock) -> list[Step]:
    path = shutil.which("compute-sanitizer")
    if path is None:
        return [Step("sanitizer", "compute-sanitizer is not on PATH: not run", True, 0.0)]
    work = [(tool, ROOT / file, chosen) for tool in TOOLS for file, chosen in SANITIZED.items()]

    def one(each: tuple[str, Path, str]) -> Step | None:
        tool, file, chosen = each
        prefix = [path, "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR), "--print-limit", "20"]
        return pytest_step("sanitizer", file, chosen, env, prefix, tool, clock)

    with ThreadPoolExecutor(max(1, jobs // 2)) as pool:
        return [step for step in pool.map(one, work) if step is not None]


def bench(env: dict[str, str], out: Path, clock: Clock) -> tuple[Step, object]:
    """Alone on the machine; it stops beginning sizes in time for what it has measured to be written."""
    report, limit = out / "matmul-cuda.json", clock.limit(420)
    if limit < LEAST_BENCH:
        return left_out("bench", "matrix products", "not begun"), None
    report.unlink(missing_ok=True)
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "matmul_cuda.py"), "--json", str(report)]
    code, output, seconds = run([*command, "--budget", f"{limit * 0.6:.0f}"], env, limit)
    print(output, flush=True)
    measured = json.loads(report.read_text()) if report.exists() else None
    if code == STOPPED and limit < 420:
        return left_out("bench", "matrix products", f"stopped after {seconds:.0f} s"), measured
    return Step("bench", "matrix products", code == 0, seconds, output="" if code == 0 else output[-6000:]), measured


# --- the report -------------------------------------------------------------------------------------------------------


def table(steps: Sequence[Step]) -> str:
    lines = [f"{'part':<10} {'step':<44} {'passed':>6} {'failed':>6} {'skipped':>7} {'s':>7}"]
    for step in steps:
        passed, failed, skipped = (step.counts.get(key, "") for key in ("passed", "failed", "skipped"))
        counts = f"{passed:>6} {failed:>6} {skipped:>7} {step.seconds:>7.1f}"
        lines.append(f"{step.part:<10} {step.name:<44} {counts}{'' if step.ok else '  FAILED'}")
        lines += [f"{'':<11}  {failure}" for failure in step.failures[:8]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="where gpu-check.json goes")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="test processes at a time")
    parser.add_argument("--budget", type=float, help="seconds after which the rest is left out")
    chosen = parser.parse_args(arguments)
    clock = Clock(chosen.budget)
    chosen.out.mkdir(parents=True, exist_ok=True)
    result = chosen.out / "gpu-check.json"
    count, reason = gpus()
    if not count:
        print(f"no GPU: {reason}; nothing was checked")
        result.write_text(json.dumps({"gpu": None, "reason": reason}))
        return 0
    site = ROOT / "build" / "gpu-site"
    if chosen.wheels:
        install_wheels(chosen.wheels, site)
    assemble(site)
    sys.path.insert(0, str(site))
    (ROOT / "build" / "gpu-reports").mkdir(parents=True, exist_ok=True)
    env = environment(site)
    check_packages(env)
    return check(chosen, env, clock, result)


def check(chosen: argparse.Namespace, env: dict[str, str], clock: Clock, result: Path) -> int:
    """The chosen parts in the order of `PARTS`, then the table; the exit code."""
    device = device_report()
    print(json.dumps(device, indent=1), flush=True)
    steps: list[Step] = []
    measured: object = None
    for part in [each for each in PARTS if each in chosen.part]:
        if part == "bench":
            step, measured = bench(env, chosen.out, clock)
            steps.append(step)
        elif part == "sanitizer":
            steps += sanitizer(env, chosen.jobs, clock)
        else:
            steps += suites(part, FIRST if part == "first" else SUITES, env, chosen.jobs, clock)
        document = {"gpu": device, "steps": [asdict(step) for step in steps], "matmul": measured}
        result.write_text(json.dumps(document, indent=1))
    failed = [step for step in steps if not step.ok]
    for step in failed:
        print(f"\n--- {step.name} ---\n{step.output}")
    missing = sum(step.left_out for step in steps)
    print(f"\n{table(steps)}\n\n{len(failed)} of {len(steps)} steps failed", end="")
    print(f", {missing} were left out for lack of time; written to {result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
