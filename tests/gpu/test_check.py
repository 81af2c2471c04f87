"""`make gpu-check` itself, as far as it can be seen without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from by_path import load

import qcompiler
from qcompiler.runtime.backends import registry

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("check.py")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return load("tests/gpu/check.py")


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    if registry.is_available("cuda:0"):
        pytest.skip("this machine has a GPU; `make gpu-check` itself runs there")
    # The bare interpreter: nothing but the standard library may be needed to find out.
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU: ")
    assert json.loads((tmp_path / "gpu-check.json").read_text())["gpu"] is None


def test_the_assembled_package_is_the_wheel(check: ModuleType, tmp_path: Path) -> None:
    check.assemble(tmp_path)
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


def test_the_assembled_package_is_importable(check: ModuleType, tmp_path: Path) -> None:
    check.assemble(tmp_path)
    code = "import qcompiler.runtime.nvrtc, qcompiler.kernels.cuda.emit, qcompiler; print(qcompiler.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=check.environment(tmp_path), capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "qcompiler" / "__init__.py"


def test_a_missing_package_is_named(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MISSING", check.MISSING.replace("find_spec(name)", "find_spec(name + '_not_there')"))
    with pytest.raises(SystemExit, match=r"lacks .*msgspec.*WHEELS"):
        check.check_packages(check.environment(tmp_path))


def test_what_the_sanitizer_runs_exists(check: ModuleType) -> None:
    for file, chosen in check.SANITIZED.items():
        assert (ROOT / file).exists(), file
        assert check.DEVICE_CASES in chosen
    assert all((ROOT / place).exists() for place in (*check.FIRST, *check.SUITES, *check.EXPECTED, *check.SHARES))


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


def test_an_expected_file_without_cases_is_a_failure(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_empty.py"
    file.write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(check, "EXPECTED", (str(file),))
    (ROOT / "build" / "gpu-reports").mkdir(parents=True, exist_ok=True)
    step = check.pytest_step("suites", file, check.DEVICE_CASES, dict(check.environment(tmp_path)))
    assert not step.ok
    assert "no test matches" in step.failures[0]


@pytest.fixture(scope="module")
def collected(check: ModuleType) -> list[str]:
    """The ids of the tests of every file that the check picks tests from by their names."""
    files = [file for file in {**check.SANITIZED, **check.SHARES} if not file.endswith("_gpu.py")]
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
def test_a_step_tells_passed_failed_dead_and_absent(check: ModuleType, tmp_path: Path, name: str, code: int) -> None:
    """The steps run pytest by device names in the tests' ids, in processes that may die."""
    file = tmp_path / "test_probe.py"
    body = {"good": "pass", "bad": "assert 1 == 2, 'no'", "dies": "import os; os._exit(3)", "none": "pass"}[name]
    device = "sim:0" if name == "none" else "cuda:0"
    file.write_text(
        f"import pytest\n@pytest.mark.parametrize('d', ['{device}', 'sim:0'])\ndef test_it(d):\n    {body}\n"
    )
    (ROOT / "build" / "gpu-reports").mkdir(parents=True, exist_ok=True)
    step = check.pytest_step("suites", file, check.DEVICE_CASES, dict(check.environment(tmp_path)))
    if code is None:
        assert step is None
        return
    assert step.ok is (code == 0)
    assert step.counts.get("passed", 0) == (1 if name == "good" else 0)
    assert len(step.failures) == (0 if name == "good" else 1)
    assert step.name in check.table([step])


def test_the_shares_of_a_file_hold_each_of_its_tests_once(check: ModuleType, collected: list[str]) -> None:
    for file, shares in check.SHARES.items():
        names = [line.partition("::")[2] for line in collected if line.startswith(file) and "sim:0" in line]
        assert any("part0" in name for name in names)
        words = [share.removeprefix("not ") for share in shares]
        for name in names:
            taken = [share for share, word in zip(shares, words, strict=True) if (word in name) == (share == word)]
            assert len(taken) == 1, f"{name} is in {taken}"


def test_a_spent_budget_leaves_steps_out_and_says_so(check: ModuleType, tmp_path: Path) -> None:
    env = check.environment(tmp_path)
    step = check.pytest_step("suites", SCRIPT, check.DEVICE_CASES, env, clock=check.Clock(0.0))
    assert (step.ok, step.left_out) == (True, True)
    assert "left out: not begun" in check.table([step])
    assert check.bench(env, tmp_path, check.Clock(30.0))[0].left_out


def test_a_budget_stops_a_step_that_would_outlast_it(check: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text(
        "import time, pytest\n@pytest.mark.parametrize('d', ['cuda:0'])\ndef test_it(d):\n    time.sleep(600)\n"
    )
    (ROOT / "build" / "gpu-reports").mkdir(parents=True, exist_ok=True)
    step = check.pytest_step("suites", file, check.DEVICE_CASES, check.environment(tmp_path), clock=check.Clock(3.0))
    assert (step.ok, step.left_out) == (True, True)
    assert "stopped after" in step.failures[0]
