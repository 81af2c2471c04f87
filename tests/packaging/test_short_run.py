"""The recorded costs of `make test` stay within its budget. Nothing is timed here."""

from __future__ import annotations

from by_path import ROOT, load

short = load("tests/support/short_run.py")
COSTS = {"tests/a/test_dear.py": 40.0, "tests/a/test_cheap.py": 1.0, "tests/b/test_gone.py": 9.0}
FILES = ["tests/a/test_cheap.py", "tests/a/test_dear.py", "tests/b/test_new.py"]


def test_the_short_run_stays_within_its_budget() -> None:
    files, costs = short.files_of_the_run(), short.read_costs()
    assert short.seconds(files, costs) <= short.BUDGET, (
        f"{short.report(files, costs)}\nmark what another case covers as slow, share what is compiled, and measure "
        "with `make test COSTS=1` (docs/testing.md)"
    )


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    costs = short.read_costs()
    table = short.folder_table([file for file in short.files_of_the_run() if file in costs], costs)
    assert table in page, f"docs/testing.md should have this table:\n{table}"


def test_a_file_without_a_row_counts_and_is_named() -> None:
    assert short.seconds(FILES, COSTS) == 41.0 + short.UNMEASURED
    said = short.report(FILES, COSTS)
    assert said.splitlines()[1].split() == ["40.0", "tests/a/test_dear.py"]
    assert "not measured" in said.splitlines()[-1] and "tests/b/test_new.py" in said.splitlines()[-1]


def test_what_passed_is_taken_and_what_is_gone_is_dropped() -> None:
    row = {"failed": 0, "processor": 3.21}
    record = {"tests/b/test_new.py": row, "tests/a/test_dear.py": {"failed": 1, "processor": 2.0}}
    taken = short.take(record, COSTS, FILES)
    assert taken == {"tests/a/test_dear.py": 40.0, "tests/a/test_cheap.py": 1.0, "tests/b/test_new.py": 3.2}
