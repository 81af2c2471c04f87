"""benchmarks/page_marks.py: figures of one run go into a table of a page, and what others measured stays."""

from __future__ import annotations

import pytest
from by_path import load

marks = load("benchmarks/page_marks.py")
PAGE = "a\n<!-- b -->\n| f | KL | old |\n|---|---:|---:|\n| p | 1 | 2 |\n| q | 3 | 4 |\n<!-- e -->\nz\n"


def test_a_run_writes_its_cells_and_keeps_the_others() -> None:
    page = marks.rows_between(
        PAGE, "<!-- b -->", "<!-- e -->", ["f", "KL", "new"], [["q", "5", "6"], ["r", "7", "8"]], ""
    )
    assert page == (
        "a\n<!-- b -->\n| f | KL | old | new |\n|---|---:|---:|---:|\n| p | 1 | 2 | not measured |\n"
        "| q | 5 | 4 | 6 |\n| r | 7 | not measured | 8 |\n<!-- e -->\nz\n"
    )


def test_two_cells_may_name_a_row_and_a_table_may_be_new() -> None:
    page = marks.rows_between("<!-- b -->\n<!-- e -->", "<!-- b -->", "<!-- e -->", "fak", ["p12", "p34"], "", keys=2)
    assert page == "<!-- b -->\n| f | a | k |\n|---|---|---:|\n| p | 1 | 2 |\n| p | 3 | 4 |\n<!-- e -->"
    assert "| p | 3 | 5 |" in marks.rows_between(page, "<!-- b -->", "<!-- e -->", "fak", ["p35"], "", keys=2)


def test_marks_that_are_not_there_are_an_error_that_names_the_page() -> None:
    with pytest.raises(ValueError, match=r"page\.md needs the line <!-- c -->"):
        marks.rows_between(PAGE, "<!-- c -->", "<!-- e -->", ["f"], [], "page.md")
