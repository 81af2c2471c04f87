"""The tutorial and the walk through a dump are taken as they are written: files are made, commands are run, and the
lines that a page shows are found in what the commands print, in this order. `…` stands for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def missing(expected: str, printed: str) -> str | None:
    """The first line of a page that is not in the output, behind the line before it. None if all are."""
    at = 0
    for line in expected.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.strip().split("…"))
        found = re.compile(pattern).search(printed, at)
        if found is None:
            return line
        at = found.end()
    return None


def command(kind: str, block: str) -> list[str]:
    return [sys.executable, "-c", block] if kind == "python" else ["bash", "-euo", "pipefail", "-c", block]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["tutorial.md", "reading-dumps.md"])
def test_the_page_is_true_command_by_command(page: str, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "qc").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m qcompiler "$@"\n')
    (tools / "qc").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "QC_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path[1:])]),
    }  # fmt: skip
    printed, compared = "", 0
    for kind, block in BLOCK.findall((ROOT / "docs" / page).read_text()):
        if kind == "text":
            assert missing(block, printed) is None, f"{missing(block, printed)!r} is not in:\n{printed}"
            compared += 1
        elif kind == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (folder / name[1]).write_text(block)
        else:
            done = subprocess.run(
                command(kind, block), cwd=folder, env=environment, text=True, timeout=300, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            printed = done.stdout
            assert done.returncode == 0, f"{block}\n{printed}"
    assert compared >= 8


def test_a_line_that_is_not_printed_is_found_missing() -> None:
    assert missing("a…c\nd", "abc\nd\n") is None
    assert missing("d\na", "abc\nd\n") == "a"
    assert missing("a…d", "abc\nd\n") == "a…d"
