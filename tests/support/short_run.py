"""What `make test` costs, file by file, and whether that stays within its budget.

    python tests/support/short_run.py                              # prints the table of docs/testing.md
    python tests/support/short_run.py --take build/short-run.json  # keeps what `make test COSTS=1` measured

tests/costs_short.json holds processor seconds of each file's tests in the short run, child processes included, with
empty caches.  Nothing here takes a time: tests/packaging/test_short_run.py adds up what the file says, so the answer is
the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from full_run import ROOT, files_of, has_passed, read_record, write_json

COSTS = ROOT / "tests" / "costs_short.json"
BUDGET = 660
"""Processor seconds of all tests, measured on an idle machine (a Zen 5)."""

UNMEASURED = 2.0
"""Seconds that a file counts before it was measured."""

DEAREST = 10
LEFT_OUT = ("lint", "mlir")
"""Folders that `make test` does not take."""


def files_of_the_run() -> list[str]:
    tests = ROOT / "tests"
    return files_of([each for each in sorted(tests.iterdir()) if each.is_dir() and each.name not in LEFT_OUT], ROOT)


def read_costs() -> dict[str, float]:
    found: dict[str, float] = json.loads(COSTS.read_text())
    return found


def seconds(files: Sequence[str], costs: Mapping[str, float]) -> float:
    return sum(costs.get(file, UNMEASURED) for file in files)


def folder_table(files: Sequence[str], costs: Mapping[str, float]) -> str:
    """Markdown: processor seconds of each folder, the dearest first, with its dearest file."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(file.split("/")[1], []).append(file)
    lines = ["| folder | files | processor seconds | dearest file |", "|---|---|---|---|"]
    for folder, mine in sorted(folders.items(), key=lambda each: (-round(seconds(each[1], costs)), each[0])):
        dearest = max(mine, key=lambda file: (costs.get(file, UNMEASURED), file))
        cost = costs.get(dearest, UNMEASURED)
        lines.append(f"| {folder} | {len(mine)} | {seconds(mine, costs):.0f} | {Path(dearest).name}, {cost:.0f} |")
    return "\n".join([*lines, f"| all | {len(files)} | {seconds(files, costs):.0f} | |"])


def report(files: Sequence[str], costs: Mapping[str, float]) -> str:
    """The sum beside the budget, the dearest files, and the files that count as unmeasured."""
    dearest = sorted(files, key=lambda file: (-costs.get(file, UNMEASURED), file))[:DEAREST]
    unmeasured = [file for file in files if file not in costs]
    return "\n".join([
        f"{seconds(files, costs):.0f} of {BUDGET} processor seconds",
        *(f"{costs.get(file, UNMEASURED):6.1f}  {file}" for file in dearest),
        *(f"not measured, counted as {UNMEASURED:.0f}: {file}" for file in unmeasured),
    ])  # fmt: skip


def take(record: Mapping[str, Mapping[str, Any]], costs: Mapping[str, float], files: Sequence[str]) -> dict[str, float]:
    """The costs with what passed now, without files that are no more."""
    measured = {file: round(row["processor"], 1) for file, row in record.items() if has_passed(row)}
    return {file: cost for file, cost in {**costs, **measured}.items() if file in set(files)}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--take", type=Path, metavar="RECORD", help="write what a run measured to tests/costs_short.json"
    )
    chosen = parser.parse_args(given)
    files = files_of_the_run()
    costs = read_costs() if COSTS.exists() else {}
    if chosen.take is not None:
        if not chosen.take.exists():
            parser.error(f"{chosen.take} is not there; `make test COSTS=1` writes it")
        costs = take(read_record(chosen.take), costs, files)
        write_json(COSTS, costs)
    print(f"{folder_table(files, costs)}\n\n{report(files, costs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
