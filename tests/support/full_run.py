"""`make test-full` in parts that can be resumed: what passed once for this tree is not run again for it.

    python tests/support/full_run.py [--part 3/8] [--jobs 2] [--again] [--costs] tests/kernels tests/cuda …

The files of the folders are dealt to the parts by what they cost (tests/costs.json), the longest first, so that parts
take about the same time.  Each file's outcome is written to build/test-full/<tree>.json as soon as its last test
ended; `<tree>` is a digest of every file of the repository, so that any edit begins a new record.  A run that was
killed goes on with the files that have not passed.  The run after which every file has passed writes tests/costs.json
(not before: parts of one tree must be dealt by the same costs).  A cost is processor time, child processes included,
which depends on other processes less than the time that passed does.  `--costs` prints what each folder and each part
costs by that file, and runs nothing.

This file is also the plugin that pytest loads to keep the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
COSTS = ROOT / "tests" / "costs.json"
RECORD = "QC_FULL_RUN_RECORD"
"""The environment variable that tells the plugin where the record lies."""

UNKNOWN = 20.0
"""Seconds that a file is taken to cost before it ran once."""

NO_TESTS = 5
"""pytest's exit code where every file was left out by a marker."""


# --- the record -------------------------------------------------------------------------------------------------------


def tree_digest(root: Path) -> str:
    """Of the names and contents of all files that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.split(b"\0")
    digest = hashlib.sha256()
    for name in sorted(set(names) - {b""}):
        path = root / os.fsdecode(name)
        if path.is_file() and path != root / COSTS.relative_to(ROOT):
            digest.update(name + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def has_passed(row: Mapping[str, Any] | None) -> bool:
    return row is not None and not row["failed"]


# --- what runs --------------------------------------------------------------------------------------------------------


def files_of(places: Sequence[Path], root: Path) -> list[str]:
    """Test files below the places, as paths from the root."""
    found = {file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place])}
    return sorted(file.resolve().relative_to(root).as_posix() for file in found)


def deal(files: Sequence[str], costs: Mapping[str, float], parts: int) -> list[list[str]]:
    """The longest file first, each to the part that has least; every file is in exactly one."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    for file in sorted(files, key=lambda each: (-costs.get(each, UNKNOWN), each)):
        least = sums.index(min(sums))
        dealt[least].append(file)
        sums[least] += costs.get(file, UNKNOWN)
    return dealt


def part_of(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"'{text}' is no part; write 3/8 for the third of eight")
    return int(number), int(parts)


def command_of(files: Sequence[str], jobs: int) -> list[str]:
    here = [os.path.relpath(ROOT / file) for file in files]
    command = [str(Path(sys.executable).with_name("pytest")), "-c", str(ROOT / "pyproject.toml"), "--rootdir"]
    command += [str(ROOT), "-q", "-p", "full_run"]
    return [*command, *(["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []), *here]


def report(files: Sequence[str], record: Mapping[str, Mapping[str, Any]]) -> str:
    """How much of these files has passed, and what has failed."""
    lines = [
        f"failed: {name}" for file in files if file in record for name in record[file].get("failures", ())
    ]  # fmt: skip
    passed = [file for file in files if has_passed(record.get(file))]
    tests = sum(record[file]["passed"] for file in passed)
    seconds = sum(record[file]["seconds"] for file in passed)
    lines.append(f"{len(passed)} of {len(files)} files have passed for this tree: {tests} tests, {seconds:.0f} s")
    return "\n".join(lines)


def cost_table(files: Sequence[str], costs: Mapping[str, float], parts: int) -> str:
    """Two tables of Markdown: processor seconds of each folder with its longest file, and of each of `parts` parts."""
    folders: dict[str, list[tuple[float, str]]] = {}
    for file in files:
        if file in costs:
            folders.setdefault(file.split("/")[1], []).append((costs[file], file))
    lines = ["| folder | files | processor seconds | longest file |", "|---|---|---|---|"]
    for folder, rows in sorted(folders.items(), key=lambda each: -sum(row[0] for row in each[1])):
        seconds, longest = max(rows)
        total = sum(row[0] for row in rows)
        lines.append(f"| {folder} | {len(rows)} | {total:.0f} | {Path(longest).name}, {seconds:.0f} |")
    lines += ["", "| part | files | processor seconds | of files not measured yet |", "|---|---|---|---|"]
    for number, mine in enumerate(deal(files, costs, parts), 1):
        known = sum(costs[file] for file in mine if file in costs)
        unknown = sum(file not in costs for file in mine)
        lines.append(f"| {number}/{parts} | {len(mine)} | {known:.0f} | {unknown} at {UNKNOWN:.0f} each |")
    return "\n".join(lines)


def write_costs(costs: Mapping[str, float], record: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds what passed now, and drops files that are no more."""
    passed = {file: round(row["processor"], 1) for file, row in record.items() if has_passed(row)}
    write_json(COSTS, {file: cost for file, cost in {**costs, **passed}.items() if (ROOT / file).exists()})


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", type=Path, help="folders or files of tests")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="k/n: the k-th of n parts")
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--again", action="store_true", help="also what has passed for this tree")
    parser.add_argument("--costs", action="store_true", help="run nothing: print the tables of costs")
    chosen = parser.parse_args(given)
    costs: dict[str, float] = json.loads(COSTS.read_text()) if COSTS.exists() else {}
    path = ROOT / "build" / "test-full" / f"{tree_digest(ROOT)}.json"
    everything = files_of(chosen.places, ROOT)
    number, parts = chosen.part
    if chosen.costs:
        print(cost_table(everything, costs, parts))
        return 0
    mine = deal(everything, costs, parts)[number - 1]
    todo = [file for file in mine if chosen.again or not has_passed(read_record(path).get(file))]
    code = 0
    if todo:
        support = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, RECORD: str(path), "PYTHONPATH": support}
        code = subprocess.run(command_of(todo, chosen.jobs), env=environment, check=False).returncode
    record = read_record(path)
    if all(has_passed(record.get(file)) for file in everything):
        write_costs(costs, record)
    print(f"\npart {number} of {parts}, tree {path.stem}\n{report(mine, record)}")
    if parts > 1:
        done = sum(has_passed(record.get(file)) for file in everything)
        print(f"all parts: {done} of {len(everything)} files have passed")
    return 0 if all(has_passed(record.get(file)) for file in mine) else code or 1


# --- the plugin -------------------------------------------------------------------------------------------------------


class Recorder:
    """Counts the tests of each file as they end, and writes the file's row when none is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left: Counter[str] = Counter()
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: set[str] = set()
        self.broken: set[str] = set()
        """Files that could not be collected."""

    def expect(self, ids: Sequence[str], files: Sequence[str]) -> None:
        """Called once per worker with the same tests; a file that has none is done at once."""
        if self.rows:
            return
        self.left = Counter(file_of(each) for each in ids)
        empty = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "processor": 0.0}
        self.rows = {file: {**empty, "failures": []} for file in {*files, *self.left}}
        for file in self.rows:
            if not self.left[file] and file not in self.broken:
                self._write(file)

    def ended(self, report: Any) -> None:
        """One phase of a test: set-up, call or tear-down, which is the last."""
        file = file_of(report.nodeid)
        row = self.rows[file]
        row["seconds"] += report.duration
        row["processor"] += report.processor
        if report.failed and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)
            row["failed"] += 1
            row["failures"].append(report.nodeid)
        elif report.skipped:
            row["skipped"] += 1
        elif report.when == "call" and report.passed:
            row["passed"] += 1
        if report.when == "teardown":
            self.left[file] -= 1
            if not self.left[file]:
                self._write(file)

    def _write(self, file: str) -> None:
        write_json(self.path, {**read_record(self.path), file: self.rows[file]})


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


_recorder: Recorder | None = None


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


_measured = processor_seconds()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, None]:
    """In the process that runs the test: what its phase cost goes along with the report."""
    global _measured
    outcome: Any = yield
    now = processor_seconds()
    outcome.get_result().processor = now - _measured
    _measured = now


def pytest_configure(config: Any) -> None:
    global _recorder
    if RECORD in os.environ and not hasattr(config, "workerinput"):
        _recorder = Recorder(Path(os.environ[RECORD]))


def pytest_collectreport(report: Any) -> None:
    if _recorder is not None and report.failed:
        _recorder.broken.add(file_of(report.nodeid))


def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    if _recorder is not None:
        _recorder.expect(ids, files_of([Path(each) for each in node.config.args], node.config.rootpath))


def pytest_collection_finish(session: Any) -> None:
    global _measured
    _measured = processor_seconds()  # the imports of all files are no cost of the first one
    if _recorder is not None and session.items:
        files = files_of([Path(each) for each in session.config.args], session.config.rootpath)
        _recorder.expect([item.nodeid for item in session.items], files)


def pytest_runtest_logreport(report: Any) -> None:
    if _recorder is not None:
        _recorder.ended(report)


if __name__ == "__main__":
    sys.exit(main())
