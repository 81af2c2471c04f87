"""`make gpu-check` from end to end on the stub driver, whose kernels run by their simulated twins.

One run with faults of every kind, so that what the check says about a bad GPU is seen before there is one; then its
resumption without faults.  ncu and compute-sanitizer are scripts that print what those print.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import ROOT, load

from qcompiler.runtime.cache import cache_dir

pytestmark = pytest.mark.slow

BENCH = """
import argparse, json, os, signal, sys, time
parser = argparse.ArgumentParser()
for name in ("--json", "--budget", "--device"):
    parser.add_argument(name)
parser.add_argument("--small", action="store_true")
chosen = parser.parse_args()
assert chosen.device == "cuda:0" and chosen.small and 0 < float(chosen.budget) <= 540
document = {"cells": [{"name": "nf4", "seconds": [1e-6]}], "failures": [], "peers_missing": {"bitsandbytes": "absent"}}
open(chosen.json, "w").write(json.dumps(document))
print("a cell", flush=True)
if "BENCH_DIES" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
if "BENCH_SLEEPS" in os.environ:
    open(os.environ["BENCH_SLEEPS"], "w").write(str(os.getpid()))
    time.sleep(600)
"""
PROFILE = """
import sys
if "--list" in sys.argv:
    print("gemv\\nattention")
"""
NCU = """#!/bin/sh
case "$*" in
*gemv*) printf '%s\\n' '==PROF== Connected' '"ID","Kernel Name","dram__bytes_read.sum"' '"","","byte"' \\
    '"0","qk_gemv","1,024"' '"1","qk_gemv","2048"';;
*) echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1;;
esac
"""
SANITIZER = """#!/bin/sh
case "$*" in
*racecheck*attention*) echo '========= Error: Race reported between Write access and Read access'; exit 99;;
esac
"""


@pytest.fixture(scope="module")
def schema() -> ModuleType:
    return load("benchmarks/gpu_schema.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub and the stand-ins of the tools; those of the programs in a folder of their own, since processes import
    from this one and a `profile.py` there would be taken for Python's."""
    where = load("tests/gpu/stub_twins.py").folder(tmp_path_factory.mktemp("stub"))
    (where / "programs").mkdir()
    (where / "programs/bench.py").write_text(BENCH)
    (where / "programs/profile.py").write_text(PROFILE)
    for name, text in (("ncu", NCU), ("compute-sanitizer", SANITIZER)):
        (where / name).write_text(text)
        (where / name).chmod(0o755)
    return where


@pytest.fixture(scope="module")
def sample() -> dict[str, list[str]]:
    """Small kernels, two of each of these: what they are is in their names."""
    matrix = load("tests/gpu/matrix.py")
    found: dict[str, list[str]] = {}
    for case in (*matrix.templates(), *matrix.of_format("nf4")):
        found.setdefault(case.name.rpartition("_")[0], []).append(case.name)
    return {word: found[word][:2] for word in ("argmax", "embedding_nf4", "norm", "softmax")}


def command(folder: Path, out: Path, *options: str) -> list[str]:
    programs = ["--programs", str(folder / "programs/bench.py"), str(folder / "programs/profile.py")]
    check = [sys.executable, "-P", str(ROOT / "tests/gpu/check.py"), "--out", str(out), "--silence", "1000"]
    return [*check, *programs, *options]


def environment(folder: Path, **others: str) -> dict[str, str]:
    stub = load("tests/gpu/stub_twins.py").environment(folder)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {**os.environ, **stub, "PATH": path, "QC_CACHE_DIR": str(cache_dir()), **others}


@dataclasses.dataclass
class Run:
    code: int
    output: str
    report: Any

    def step(self, name: str) -> Any:
        (found,) = [step for step in self.report.steps if step.name.startswith(name)]
        return found


def run(schema: ModuleType, folder: Path, out: Path, *options: str, **others: str) -> Run:
    done = subprocess.run(
        command(folder, out, *options), env=environment(folder, **others), capture_output=True, text=True, check=False,
        timeout=1500,
    )  # fmt: skip
    assert (out / "gpu-check.json").exists(), done.stdout + done.stderr
    return Run(done.returncode, done.stdout + done.stderr, schema.read(out / "gpu-check.json"))


@pytest.fixture(scope="module")
def faulty(
    schema: ModuleType, folder: Path, sample: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    faults = {
        "STUB_WRONG": sample["softmax"][0], "STUB_REPLAY": sample["embedding_nf4"][0],
        "STUB_FAULT": sample["norm"][0], "STUB_DIE": sample["argmax"][0], "BENCH_DIES": "1",
    }  # fmt: skip
    names = [name for pair in sample.values() for name in pair]
    out = tmp_path_factory.mktemp("out")
    return run(schema, folder, out, "--part", "first", "second", "--jobs", "1", "--sample", *names, **faults)


def test_every_bad_kernel_is_named_with_its_mode_and_the_good_ones_still_ran(
    faulty: Run, sample: dict[str, list[str]]
) -> None:
    modes = {failure.kernel: failure.mode for failure in faulty.report.failures}
    assert modes == {
        sample["softmax"][0]: "eager", sample["embedding_nf4"][0]: "replayed", sample["norm"][0]: "eager",
        sample["argmax"][0]: "eager",
    }, faulty.output  # fmt: skip
    assert {kernel.kernel for kernel in faulty.report.kernels} == {pair[1] for pair in sample.values()}
    assert all(kernel.error == 0 and kernel.bits for kernel in faulty.report.kernels)
    assert (faulty.code, faulty.report.kind) == (1, "stub")


def test_a_failure_says_how_wrong_or_why_there_is_nothing(faulty: Run, sample: dict[str, list[str]]) -> None:
    failures = {failure.kernel: failure for failure in faulty.report.failures}
    wrong, replay = failures[sample["softmax"][0]], failures[sample["embedding_nf4"][0]]
    assert wrong.error is not None and wrong.error > wrong.tolerance
    assert 0 < wrong.mismatches < wrong.elements
    assert (replay.format, replay.mismatches > 0, replay.tolerance) == ("nf4", True, 0.0)
    assert "cudaErrorIllegalAddress" in failures[sample["norm"][0]].reason
    assert "its process ended with 9" in failures[sample["argmax"][0]].reason
    assert all(name in faulty.output for name in failures)


def test_wrappers_and_the_copy_probe_ran(faulty: Run) -> None:
    step = faulty.step("gpu/test_conformance_gpu")
    assert (step.ok, step.counts) == (True, {"passed": 2, "failed": 0, "skipped": 0}), step.output
    assert len(faulty.report.copy.terabytes_per_second) == 3


def test_what_cuda_leaves_open_is_learned_and_fails_nothing(faulty: Run) -> None:
    assert faulty.step("devices/test_capture_rules").ok
    learned = {each.case: each for each in faulty.report.learned}
    legacy = learned["test_the_legacy_stream_cannot_be_captured[cuda:0]"]
    assert (legacy.expected, legacy.seen, legacy.agrees) == ("900", "900", True)
    module = learned["test_no_module_is_loaded_by_the_capturing_thread[cuda:0]"]
    assert not module.agrees
    assert "DID NOT RAISE" in module.seen


def test_the_cells_of_a_benchmark_that_died_are_kept(faulty: Run) -> None:
    assert not faulty.step("times").ok
    assert faulty.report.bench["cells"] == [{"name": "nf4", "seconds": [1e-6]}]
    assert faulty.report.peers_missing["bitsandbytes"] == "absent"


def test_counters_findings_and_their_absence_are_in_the_profile(faulty: Run) -> None:
    profile = {(each.tool, each.kernel): each for each in faulty.report.profile}
    assert len(profile) == 6
    metrics = profile["ncu", "gemv"].metrics
    assert (metrics["dram__bytes_read.sum"], metrics["Kernel Name"], len(metrics["launches"])) == (2048.0, "qk_gemv", 2)
    assert "ERR_NVGPUCTRPERM" in profile["ncu", "attention"].reason
    assert faulty.step("ncu: attention").left_out, "not ours to mend"
    race = profile["racecheck", "attention"]
    assert (race.ok, "Race reported" in race.findings[0]) == (False, True)
    assert profile["memcheck", "gemv"].ok


def test_a_resumed_run_does_what_failed_and_nothing_else(
    faulty: Run, schema: ModuleType, folder: Path, sample: dict[str, list[str]], tmp_path: Path
) -> None:
    schema.write(faulty.report, tmp_path / "gpu-check.json")
    names = [name for pair in sample.values() for name in pair]
    options = ("--resume", str(tmp_path), "--part", "first", "second", "--jobs", "1", "--sample", *names)
    again = run(schema, folder, tmp_path, *options)
    assert {step.name for step in again.report.steps if step.resumed} >= {
        "gpu/test_conformance_gpu", "devices/test_capture_rules", "ncu: gemv", "memcheck: gemv",
    }  # fmt: skip
    assert again.report.failures == []
    assert {kernel.kernel for kernel in again.report.kernels} == set(names)
    matrix = [step for step in again.report.steps if step.name.startswith("gpu/matrix")]
    assert sum(step.counts["passed"] for step in matrix) == 4, "the other four passed before"
    assert [each.case for each in again.report.learned] == [each.case for each in faulty.report.learned]
    assert again.step("times").ok
    assert not again.step("racecheck: attention").ok


def test_a_check_that_is_ended_leaves_its_report_and_no_process(
    schema: ModuleType, folder: Path, tmp_path: Path
) -> None:
    sleeping = tmp_path / "sleeping"
    env = environment(folder, BENCH_SLEEPS=str(sleeping))
    check = subprocess.Popen(command(folder, tmp_path, "--part", "bench"), env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (sleeping.exists() and sleeping.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    check.send_signal(signal.SIGTERM)
    assert check.wait(60) == load("tests/gpu/processes.py").STOPPED
    assert schema.read(tmp_path / "gpu-check.json").kind == "stub"
    assert json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert load("tests/gpu/test_check.py").goes(int(sleeping.read_text()))


def test_the_benchmarks_themselves_run_on_the_stub(schema: ModuleType, folder: Path, tmp_path: Path) -> None:
    """gpu_first.py and gpu_profile.py, at small sizes, with their own comparisons with float64."""
    command = [sys.executable, "-P", str(ROOT / "tests/gpu/check.py"), "--out", str(tmp_path)]
    subprocess.run(
        [*command, "--part", "second", "bench", "--budget", "150"], env=environment(folder), check=False, timeout=500
    )
    report = schema.read(tmp_path / "gpu-check.json")
    cells = {status: [cell for cell in report.bench["cells"] if cell["status"] == status] for status in ("ok", "wrong")}
    assert len(cells["ok"]) >= 5
    assert cells["wrong"] == report.bench["failures"] == []
    memcheck = [each for each in report.profile if each.tool == "memcheck"]
    assert len(memcheck) >= 10
    assert sum(each.ok for each in memcheck) >= 1


def test_the_simulated_gpu_takes_the_gpus_place(
    schema: ModuleType, folder: Path, sample: dict[str, list[str]], tmp_path: Path
) -> None:
    bench = (folder / "programs/bench.py").read_text().replace('"cuda:0" and chosen.small', '"sim:0"')
    (tmp_path / "bench.py").write_text(bench)
    programs = ["--programs", str(tmp_path / "bench.py"), str(folder / "programs/profile.py")]
    names = [name for pair in sample.values() for name in pair]
    options = ["--device", "sim:0", "--part", "first", "second", *programs, "--sample", *names]
    done = run(schema, folder, tmp_path, *options)
    assert (done.code, done.report.kind) == (0, "sim"), done.output
    assert {kernel.kernel for kernel in done.report.kernels} == set(names)
    assert done.step("gpu/test_conformance_sim").counts["passed"] > 2
    assert done.step("devices/test_capture_rules").counts["passed"] > 30
    assert "no counters" in done.report.profile[0].reason


def test_a_matrix_of_which_nothing_ran_has_failed(schema: ModuleType, folder: Path, tmp_path: Path) -> None:
    options = ["--device", "sim:0", "--part", "first", "--sample", "no_such_kernel"]
    done = run(schema, folder, tmp_path, *options)
    assert done.code == 1
    (empty,) = [step for step in done.report.steps if step.name == "gpu/matrix"]
    assert empty.failures == ["no kernel was run"]
