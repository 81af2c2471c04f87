"""Strict mypy and import-linter on the installed wheel, outside the source tree, with the module counts asserted.

Usage: python tests/lint/check_installed.py SITE

Run in the repository root these tools miss the packages that setuptools maps into `qcompiler`, and report success on
what is left; so both counts must equal the number of modules in the repository.  Ruff reads no C++: that its lines are
as short as Python's is checked here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qcompiler", "passes", "kernels", "runtime")
LINE_LENGTH = 120


def modules() -> int:
    """Python modules of the repository that the wheel must hold."""
    return sum(1 for package in PACKAGES for _ in (ROOT / package).rglob("*.py"))


def check_cpp_lines() -> None:
    """Exits, naming the places, if a line of C++ or CUDA is too long."""
    files = [
        f for folder in (*PACKAGES, "tests") for f in (ROOT / folder).rglob("*") if f.suffix in (".h", ".cuh", ".cpp")
    ]
    long = [
        f"{file.relative_to(ROOT)}:{number}: {len(line)} characters, {LINE_LENGTH} at most"
        for file in sorted(files)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > LINE_LENGTH
    ]
    if not files or long:
        sys.exit("\n".join(long) or "no C++ files were found")


def run(command: list[str], site: str) -> str:
    environment = {**os.environ, "PYTHONPATH": site, "MYPYPATH": site, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=ROOT / "build", env=environment, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, end="")
    if done.returncode:
        sys.exit(f"{Path(command[0]).name} failed")
    return done.stdout


def expect(tool: str, found: str | None, wanted: int) -> None:
    if found is None or int(found) != wanted:
        sys.exit(f"{tool} saw {found} modules, the repository has {wanted}: it did not look at the whole package")


def main() -> None:
    check_cpp_lines()
    site, tools, wanted = sys.argv[1], Path(sys.executable).parent, modules()
    config = str(ROOT / "pyproject.toml")
    out = run([str(tools / "mypy"), "--config-file", config, "-p", "qcompiler"], site)
    match = re.search(r"no issues found in (\d+) source files", out)
    expect("mypy", match and match[1], wanted)
    run([str(tools / "lint-imports"), "--config", config, "--no-cache"], site)
    # import-linter's own graph, without the external packages that its report counts too
    graph = "import grimp; print(len(grimp.build_graph('qcompiler', cache_dir=None).modules))"
    expect("import-linter", run([sys.executable, "-c", graph], site).strip(), wanted)


if __name__ == "__main__":
    main()
