"""Strict mypy and import-linter on the installed wheel, outside the source tree, with the module counts asserted.

Usage: python tests/lint/check_installed.py SITE

Run in the repository root these tools miss the packages that setuptools maps into `qcompiler`, and report success on
what is left; so both counts must equal the number of modules in the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qcompiler", "passes", "kernels", "runtime")


def modules() -> int:
    """Python modules of the repository that the wheel must hold."""
    return sum(1 for package in PACKAGES for _ in (ROOT / package).rglob("*.py"))


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
