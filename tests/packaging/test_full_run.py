"""`make test-full` in parts: nothing is left out, nothing that failed counts as passed, nothing runs twice."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from by_path import load

full = load("tests/support/full_run.py")
GOOD = """
import subprocess, sys

def test_one():
    open('{log}', 'a').write('one ')
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.3: pass"], check=True)

def test_two():
    pass
"""
BAD = "def test_bad():\n    open('{log}', 'a').write('bad ')\n    assert 1 == 2\n"
BROKEN = "import nothing_of_this_name\n\ndef test_never():\n    pass\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of its own, with a good, a failing and a broken file of tests."""
    root = tmp_path / "tree"
    for name, text in {"a/test_good.py": GOOD, "a/test_bad.py": BAD, "b/test_broken.py": BROKEN}.items():
        file = root / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{log}", str(tmp_path / "log")))
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n")
    (root / ".gitignore").write_text("build\n__pycache__\n.pytest_cache\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    monkeypatch.setattr(full, "ROOT", root)
    monkeypatch.setattr(full, "COSTS", root / "tests" / "costs.json")
    monkeypatch.setattr(full, "SUPPORT", Path(full.__file__).parent)
    monkeypatch.chdir(root)
    return root


def row(root: Path, file: str) -> dict | None:
    [record] = (root / "build" / "test-full").glob("*.json")
    return json.loads(record.read_text()).get(f"tests/{file}")


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_what_passed_is_not_run_again_and_what_failed_is(tree: Path, tmp_path: Path, jobs: str) -> None:
    log = tmp_path / "log"
    assert full.main(["tests/a", "--jobs", jobs]) == 1
    assert sorted(log.read_text().split()) == ["bad", "one"]
    good, bad = row(tree, "a/test_good.py"), row(tree, "a/test_bad.py")
    assert good is not None and (good["passed"], good["failed"]) == (2, 0)
    assert bad is not None and bad["failures"] == ["tests/a/test_bad.py::test_bad"]
    log.write_text("")
    assert full.main(["tests/a", "--jobs", jobs]) == 1
    assert log.read_text().split() == ["bad"]
    file = tree / "tests" / "a" / "test_bad.py"
    file.write_text(file.read_text().replace("1 == 2", "1 == 1"))
    log.write_text("")
    assert not full.COSTS.exists(), "parts would be dealt anew while some have run"
    assert full.main(["tests/a", "--jobs", jobs]) == 0
    assert sorted(log.read_text().split()) == ["bad", "one"], "an edit begins a new record"
    costs = json.loads(full.COSTS.read_text())
    assert sorted(costs) == ["tests/a/test_bad.py", "tests/a/test_good.py"]
    assert costs["tests/a/test_good.py"] >= 0.3, "the time of a child process counts"


def test_a_file_that_cannot_be_collected_has_not_passed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert full.main(["tests/b", "--jobs", "1"]) != 0
    assert "0 of 1 files have passed" in capsys.readouterr().out


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
def test_every_file_is_in_exactly_one_part(parts: int) -> None:
    files = [f"tests/x/test_{i}.py" for i in range(7)]
    dealt = full.deal(files, {files[3]: 600.0, files[5]: 60.0}, parts)
    assert sorted(file for part in dealt for file in part) == files
    assert parts == 1 or dealt[0] == [files[3]], "the longest stands alone"


def test_the_tables_say_what_is_not_measured(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full.write_json(full.COSTS, {"tests/a/test_good.py": 70.0})
    assert full.main(["tests", "--costs", "--part", "1/2"]) == 0
    printed = capsys.readouterr().out
    assert "| a | 1 | 70 | test_good.py, 70 |" in printed
    assert "| 1/2 | 1 | 70 | 0 at 20 each |" in printed
    assert "| 2/2 | 2 | 0 | 2 at 20 each |" in printed


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "-1/2", "1/"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        full.main(["tests", "--part", text])
