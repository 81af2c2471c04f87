"""docs/hot-loops.md is what the compiler makes of the kernels, and comments that quote it tell the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_path import ROOT, load

from qcompiler.runtime import nvrtc

hot_loops = load("benchmarks/hot_loops.py")

PAGE = ROOT / "docs" / "hot-loops.md"
QUOTING = (*sorted((ROOT / "kernels" / "cuda").glob("*.cuh")), *sorted((ROOT / "docs").glob("*.md")))


def rows(text: str) -> dict[str, dict[tuple[str, int], str]]:
    """The page's rows by architecture, format and M."""
    found: dict[str, dict[tuple[str, int], str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            arch = found.setdefault(line[3:], {})
        elif line.startswith("| ") and not line.startswith("| format"):
            name, m = line.strip("| ").split(" | ")[:2]
            arch[name, int(m)] = line
    return found


def check(arch: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert nvrtc.compiler_version(arch) in text, "docs/hot-loops.md was made by another compiler; run `make docs`"
    made = {(each.format, each.rows): hot_loops.row(each) for each in hot_loops.measure(FORMATS, ROWS, arch)}
    assert rows(text)[arch] == made, "kernels have changed; `make docs` writes docs/hot-loops.md anew"


FORMATS, ROWS = tuple(hot_loops.FORMATS), hot_loops.ROWS


def test_the_table_of_hot_loops_is_out_of_date() -> None:
    check("sm_90a")


@pytest.mark.slow
def test_the_table_of_hot_loops_on_sm_80_is_out_of_date() -> None:
    check("sm_80")


def test_the_table_has_every_kernel_once() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(rows(text)) == set(hot_loops.ARCHS)
    for arch in hot_loops.ARCHS:
        assert set(rows(text)[arch]) == {(name, m) for name in FORMATS for m in ROWS}


@pytest.mark.parametrize("file", QUOTING, ids=lambda file: file.name)
def test_a_comment_quotes_another_figure_than_the_table(file: Path) -> None:
    table = rows(PAGE.read_text(encoding="utf-8"))
    for name, m, arch, figure in hot_loops.quotes(file.read_text(encoding="utf-8")):
        assert table[arch][name, m].split(" | ")[2] == figure, f"{file.name}: {name}, M = {m}, {arch}"


def test_the_kernels_headers_quote_the_table() -> None:
    for name in ("linear_fma.cuh", "linear_mma.cuh"):
        assert hot_loops.quotes((ROOT / "kernels" / "cuda" / name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "q4_K" else pytest.mark.slow) for n in FORMATS])
def test_results_of_nine_rows_and_more_are_stored_16_bytes_at_a_time(name: str) -> None:
    for each in hot_loops.measure((name,), ROWS, "sm_90a"):
        assert each.stores == ((2,) if each.rows <= 8 else (16, 2)), each
