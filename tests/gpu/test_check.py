"""`make gpu-check` itself, as far as it can be seen without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import load

import qcompiler
from qcompiler.runtime import nvrtc
from qcompiler.runtime.backends import registry

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("check.py")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load("tests/gpu/check.py")


@pytest.fixture(scope="module")
def assembly() -> ModuleType:
    return load("tests/gpu/assembly.py")


@pytest.fixture(scope="module")
def processes() -> ModuleType:
    return load("tests/gpu/processes.py")


@pytest.fixture
def steps(check: ModuleType, assembly: ModuleType, processes: ModuleType, tmp_path: Path) -> Any:
    return processes.Steps(check.schema, assembly.environment(tmp_path), processes.Clock(None))


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    if registry.is_available("cuda:0"):
        pytest.skip("this machine has a GPU; `make gpu-check` itself runs there")
    # The bare interpreter: nothing but the standard library may be needed to find out.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU: ")
    written = load("benchmarks/gpu_schema.py").read(tmp_path / "gpu-check.json")
    assert (written.kind, written.steps) == ("none", [])
    assert written.reason in done.stdout


def test_the_assembled_package_is_the_wheel(assembly: ModuleType, tmp_path: Path) -> None:
    assembly.assemble(tmp_path)
    made = {str(file.relative_to(tmp_path / "qcompiler")) for file in tmp_path.rglob("*") if file.is_file()}
    package = Path(qcompiler.__file__).parent
    if (package.parent / "pyproject.toml").exists():
        pytest.skip("qcompiler is installed editable here; `make test` compares with the wheel")
    wheel = {
        str(file.relative_to(package))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert made == wheel


def test_the_assembled_package_is_importable(assembly: ModuleType, tmp_path: Path) -> None:
    assembly.assemble(tmp_path)
    code = "import qcompiler.runtime.nvrtc, qcompiler.kernels.cuda.emit, qcompiler; print(qcompiler.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=assembly.environment(tmp_path), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == tmp_path / "qcompiler" / "__init__.py"


def test_a_missing_package_is_named(assembly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = assembly.MISSING.replace("find_spec(name)", "find_spec(name + '_not_there')")
    monkeypatch.setattr(assembly, "MISSING", absent)
    with pytest.raises(SystemExit, match=r"lacks .*msgspec.*WHEELS"):
        assembly.check_packages(assembly.environment(tmp_path))


def test_without_torch_the_check_goes_on_and_names_it(
    assembly: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = assembly.MISSING.replace("find_spec(name)", "find_spec(name.replace('torch', 'not_there'))")
    monkeypatch.setattr(assembly, "MISSING", absent)
    assert "not installed" in assembly.check_packages(assembly.environment(tmp_path))["torch"]


def test_what_the_sanitizer_runs_exists(check: ModuleType) -> None:
    for file, chosen in check.SANITIZED.items():
        assert (ROOT / file).exists(), file
        assert check.DEVICE_CASES in chosen
    assert all((ROOT / place).exists() for place in (*check.FIRST, *check.SUITES, *check.EXPECTED))


ELSEWHERE = {
    "tests/models/test_gpu_models.py": "needs transformers, which a bare image lacks; slow, for `make test-full`",
}


def test_every_file_with_cases_for_a_gpu_is_in_the_suites(check: ModuleType) -> None:
    """A parameter `cuda:0` exists where there is a GPU; each test that has one must run in the check."""
    parameter = re.compile(r"""\["cuda:0"\] if|params=\["cuda:0"\]|"sim:0", "cuda:0"\] if""")
    chosen = {str(file.relative_to(ROOT)) for file in check.files_of((*check.FIRST, *check.SUITES))}
    found = {
        str(file.relative_to(ROOT)) for file in ROOT.glob("tests/**/test_*.py") if parameter.search(file.read_text())
    }
    assert "tests/models/test_gpu_blocks.py" in found
    assert found - chosen == set(ELSEWHERE)


def test_an_expected_file_without_cases_is_a_failure(steps: Any, check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_empty.py"
    file.write_text("def test_it():\n    pass\n")
    step = steps.pytest("suites", check.Suite(file), expected=[str(file)])
    assert not step.ok
    assert "no test matches" in step.failures[0]


@pytest.fixture(scope="module")
def collected(check: ModuleType) -> list[str]:
    """The ids of the tests of every file that the check picks tests from by their names."""
    files = [file for file in check.SANITIZED if not file.endswith("_gpu.py")]
    command = [sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--collect-only", "-q"]
    done = subprocess.run([*command, *(str(ROOT / file) for file in files)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_selections_of_the_sanitizer_select_something(check: ModuleType, collected: list[str]) -> None:
    """With the simulated device in place of the GPU: the words of the expressions are in the tests' names."""
    for file in [file for file in check.SANITIZED if not file.endswith("_gpu.py")]:
        chosen = check.SANITIZED[file].replace(check.DEVICE_CASES, "sim:0")
        words = re.sub(r"[^\s()]+", lambda m: m[0] if m[0] in ("and", "or", "not") else f"({m[0]!r} in name)", chosen)
        names = [line for line in collected if line.startswith(file)]
        assert any(eval(words, {"name": name.partition("::")[2]}) for name in names), f"{file} -k {chosen!r}"


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1), ("dies", 1), ("none", None)])
def test_a_step_tells_passed_failed_dead_and_absent(
    steps: Any, check: ModuleType, tmp_path: Path, name: str, code: int
) -> None:
    """The steps run pytest by device names in the tests' ids, in processes that may die."""
    file = tmp_path / "test_probe.py"
    body = {"good": "pass", "bad": "assert 1 == 2, 'no'", "dies": "import os; os._exit(3)", "none": "pass"}[name]
    device = "sim:0" if name == "none" else "cuda:0"
    file.write_text(
        f"import pytest\n@pytest.mark.parametrize('d', ['{device}', 'sim:0'])\ndef test_it(d):\n    {body}\n"
    )
    step = steps.pytest("suites", check.Suite(file))
    if code is None:
        assert step is None
        return
    assert step.ok is (code == 0)
    assert step.counts.get("passed", 0) == (1 if name == "good" else 0)
    assert len(step.failures) == (0 if name == "good" else 1)
    assert step.name in check.table(check.schema.Report(steps=[step]))


def test_a_spent_budget_leaves_steps_out_and_says_so(steps: Any, check: ModuleType, processes: ModuleType) -> None:
    steps.clock = processes.Clock(0.0)
    step = steps.pytest("suites", check.Suite(SCRIPT))
    assert (step.ok, step.left_out) == (True, True)
    assert "left out: not begun" in check.table(check.schema.Report(steps=[step]))


def test_a_budget_stops_a_step_that_would_outlast_it(
    steps: Any, check: ModuleType, processes: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import time, pytest\n@pytest.mark.parametrize('d', ['cuda:0'])\ndef test_it(d):\n    time.sleep(600)\n"
    )
    steps.clock = processes.Clock(3.0)
    step = steps.pytest("suites", check.Suite(file))
    assert (step.ok, step.left_out) == (True, True)
    assert "stopped after" in step.failures[0]


def goes(number: int) -> bool:
    """Whether a process that was killed ends, as soon as the machine lets it."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_stopped_process_takes_its_children_along(processes: ModuleType, tmp_path: Path) -> None:
    """compute-sanitizer and ncu start the program as a child: left alone it would keep the GPU."""
    child = "import os, time; open('child', 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        f"import os, subprocess, sys; os.chdir({str(tmp_path)!r}); subprocess.run([sys.executable, '-c', {child!r}])"
    )
    with (tmp_path / "output").open("wb") as output:
        process = processes.start([sys.executable, "-c", parent], dict(os.environ), output)
        while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        processes.end(process)
    assert goes(int((tmp_path / "child").read_text()))


def test_parts_without_a_budget_fit_into_ten_minutes(check: ModuleType, processes: ModuleType) -> None:
    assert all(check.BUDGETS[part] <= 540 for part in ("first", "second", "bench"))
    assert processes.Clock(None).within(check.BUDGETS["first"]).limit(10_000) <= 540
    assert processes.Clock(100.0).within(540).limit(10_000) <= 100


def resumed(check: ModuleType, folder: Path, tree: str, *parts: str) -> Any:
    chosen = check.arguments_of(["--out", str(folder), "--resume", str(folder), "--part", *parts])
    report = check.schema.Report(kind="gpu", environment=check.schema.Environment(name="H", tree=tree))
    made = check.Check(chosen, report, {}, check.processes.Clock(None))
    check.resume(made, folder)
    return made


def test_a_second_part_keeps_what_the_first_found(check: ModuleType, tmp_path: Path) -> None:
    schema = check.schema
    old = schema.Report(
        kind="gpu", parts=["first"], environment=schema.Environment(name="H", tree="t"),
        steps=[schema.Step("first", "times", True, 1.0), schema.Step("second", "ncu: a", True, 1.0),
               schema.Step("second", "ncu: b", False, 1.0)],
        kernels=[schema.Kernel("norm", "f32", "", "good", 0.0)], bench={"cells": []},
        failures=[schema.Failure("norm", "f32", "", "eager", "bad")],
    )  # fmt: skip
    schema.write(old, tmp_path / "gpu-check.json")
    second = resumed(check, tmp_path, "t", "second")
    assert [step.name for step in second.report.steps] == ["times"]
    assert (second.report.kernels, second.report.failures, second.report.bench) == (
        old.kernels, old.failures, old.bench,
    )  # fmt: skip
    assert second.resumed("second", "ncu: a")
    assert not second.resumed("second", "ncu: b"), "it failed"
    first = resumed(check, tmp_path, "t", "first")
    assert (list(first.passed), first.report.failures) == (["good"], [])
    other = resumed(check, tmp_path, "another tree", "second")
    assert (other.report.steps, other.earlier, other.passed) == ([], {}, {})


def test_a_mistake_of_the_checks_own_costs_one_part(check: ModuleType, tmp_path: Path) -> None:
    made = resumed(check, tmp_path, "t", "first")

    def broken(part: str) -> None:
        raise ZeroDivisionError(part)

    made.first, made.second = broken, lambda part: made.add(check.schema.Step(part, "kernels", True, 0.0))
    made.part("first")
    made.part("second")
    assert [(step.name, step.ok) for step in made.report.steps] == [("the check itself", False), ("kernels", True)]
    assert "ZeroDivisionError" in made.report.steps[0].output


def test_half_a_report_is_a_failure(processes: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "r.xml").write_text("<testsuites><testsuite><testcase name='a'")
    assert processes.read_report(tmp_path / "r.xml").failures == ["the process died before its report"]


# --- the matrix' processes -------------------------------------------------------------------------------------------

WORKER = """
import json, sys, time
lines = open(sys.argv[sys.argv.index("--lines") + 1], "a+", buffering=1)
lines.seek(0)
done = {json.loads(line)["case"] for line in lines.read().splitlines()}
verdict = {"template": "t", "format": "f", "shape": "s", "error": 0.0, "bits": True, "failures": []}
for case in CASES:
    if case not in done:
        lines.write(json.dumps({"case": case, "mode": "eager"}) + "\\n")
        if case == "hangs":
            time.sleep(600)
        if case == "dies":
            sys.exit(3)
        lines.write(json.dumps({"case": case, **verdict}) + "\\n")
sys.exit(END)
"""


@pytest.fixture
def matrix(check: ModuleType, processes: ModuleType, steps: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(processes, "SILENCE", 5.0)
    return processes.Matrix(check.schema, steps.env, steps.clock, lambda: None)


def worker(
    processes: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, cases: list[str], end: int = 0
) -> None:
    place = folder / "tests" / "gpu" / "matrix_worker.py"
    place.parent.mkdir(parents=True)
    place.write_text(WORKER.replace("CASES", repr(cases)).replace("END", str(end)))
    monkeypatch.setattr(processes, "ROOT", folder)


def test_kernels_behind_one_that_hangs_or_dies_still_run(
    matrix: Any, processes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(processes, tmp_path, monkeypatch, ["one", "hangs", "two", "dies", "three"])
    step = matrix.share("first", "cuda:0", 0, 1, [])
    assert [kernel.kernel for kernel in matrix.kernels] == ["one", "two", "three"]
    assert {each.kernel: each.reason.split(":")[0] for each in matrix.failures} == {
        "hangs": "it ran without end", "dies": "its process ended with 3",
    }  # fmt: skip
    assert not step.ok
    assert step.counts == {"passed": 3, "failed": 2, "skipped": 0}


def test_a_worker_that_always_ends_before_its_first_case_is_not_started_for_ever(
    matrix: Any, processes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker(processes, tmp_path, monkeypatch, [], end=5)
    step = matrix.share("first", "cuda:0", 0, 1, [])
    assert not step.ok
    assert "ends with 5 before its first case" in step.failures[0]


# --- the folder that is brought along --------------------------------------------------------------------------------


def test_a_cut_wheel_installs_with_one_library(tmp_path: Path) -> None:
    bring, whole, cut = load("tests/gpu/bring.py"), tmp_path / "bnb-1.0-py3-none-any.whl", tmp_path / "cut"
    cut.mkdir()
    with zipfile.ZipFile(whole, "w") as archive:
        for version in ("121", "130"):
            archive.writestr(f"bitsandbytes/libbitsandbytes_cuda{version}.so", b"code of " + version.encode())
        archive.writestr("bitsandbytes/__init__.py", "")
        archive.writestr("bnb-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: bnb\nVersion: 1.0\n")
        archive.writestr("bnb-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("bnb-1.0.dist-info/RECORD", "")
    bring.cut_wheel(whole, cut / whole.name, "130")
    load("tests/gpu/assembly.py").install_wheels(cut, tmp_path / "site")
    assert [each.name for each in (tmp_path / "site").rglob("*.so")] == ["libbitsandbytes_cuda130.so"]
    with pytest.raises(SystemExit, match=r"no libbitsandbytes_cuda999\.so; it has .*cuda121"):
        bring.cut_wheel(whole, tmp_path / "none.whl", "999")


def test_wheels_of_other_pythons_stay_where_they_are(assembly: ModuleType) -> None:
    names = {
        "a-1-cp312-cp312-manylinux_2_28_x86_64.whl": [12], "b-1-cp310-abi3-manylinux_2_17_x86_64.whl": [12, 13],
        "c-1-py3-none-any.whl": [12, 13], "d-1-py2.py3-none-any.whl": [12, 13],
        "e-1-cp313-cp313-linux_x86_64.whl": [13],
        "f-1-cp39-cp39-any.whl": [], "g-1-cp313-abi3-any.whl": [13],
    }  # fmt: skip
    assert {name: [n for n in (12, 13) if assembly.fits(name, (3, n))] for name in names} == names


def test_brought_cubins_are_found_by_their_keys(assembly: ModuleType, tmp_path: Path) -> None:
    """A cache that was packed on one machine serves the next: same plan, same emitter, no NVRTC."""
    bring, plumbing = load("tests/gpu/bring.py"), load("tests/gpu/test_plumbing.py")
    here, there, folder = tmp_path / "here", tmp_path / "there", tmp_path / "folder"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QC_CACHE_DIR", str(here))
        nvrtc.build_module(plumbing.plan(), "sm_90a")
        bring.pack(here, folder / assembly.CUBINS, "NVRTC 13.0, emitter 1, a library")
        patch.setenv("QC_CACHE_DIR", str(there))
        brought = assembly.install_cubins(folder, there)
        patch.setattr(nvrtc, "_compile", None)  # it would be called where the key is another
        library = nvrtc.build_module(plumbing.plan(), "sm_90a")
    assert (brought.cubins, brought.maker) == (1, "NVRTC 13.0, emitter 1, a library")
    assert library.path.parent == there / "cuda"
    assert not list(there.rglob("*.cu")), "sources are not brought"


def test_the_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    schema = load("benchmarks/gpu_schema.py")
    report = schema.Report(
        kind="gpu", steps=[schema.Step("first", "one", False, 1.5, {"passed": 1}, ["two"])],
        failures=[schema.Failure("linear", "nf4", "x", "replayed", "k", 0.5, 0.0, 1, 2)],
        kernels=[schema.Kernel("norm", "f32", "y", "n", None)], learned=[schema.Learned("c", "900", "901")],
        bench={"cells": [1]}, profile=[schema.Profile("k", "ncu", True, metrics={"a": 1.0})],
    )  # fmt: skip
    schema.write(report, tmp_path / "r.json")
    assert schema.read(tmp_path / "r.json") == report
    data = json.loads((tmp_path / "r.json").read_text())
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"schema": 1}, "has schema 1"),
        ({"steps": [{"ok": "yes"}]}, r"steps\[0\]: ok: 'yes' is no bool"),
        ({"colour": 1}, "Report has no colour"),
    )
    for change, message in wrong:
        (tmp_path / "bad.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(ValueError, match=message):
            schema.read(tmp_path / "bad.json")
