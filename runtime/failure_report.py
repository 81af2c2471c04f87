"""The report of a failure: everything that a person who was not there needs, as one text file.

It holds the message, what was run, versions, machine and traceback, and whatever lines the caller adds.  It holds no
weights and no environment variables but those of qcompiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qcompiler import __version__

_PACKAGES = ("torch", "jax", "xdsl", "numpy", "ml_dtypes", "transformers")

MOST_LINES = 400
"""The most lines of each part that the caller adds, so that the report of a large model can still be read."""


def write_report(folder: Path, error: BaseException, lines: Sequence[str] = ()) -> Path:
    """Writes `report.txt` to the folder. Returns its path."""
    more = [f"… and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    text = "\n".join([*_facts(error), "", *lines[:MOST_LINES], *more, "", "Traceback", _traceback(error)])
    path = folder / "report.txt"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def report_alone(error: BaseException) -> Path:
    """Writes a report to a new folder of its own, for failures that leave nothing else."""
    return write_report(Path(tempfile.mkdtemp(prefix="qc-report-")), error)


def _facts(error: BaseException) -> list[str]:
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("QC_")}
    return [
        f"{type(error).__name__}: {error}",
        "",
        f"command    {shlex.join(sys.argv)}",
        f"folder     {Path.cwd()}",
        f"settings   {' '.join(f'{name}={shlex.quote(value)}' for name, value in settings.items()) or 'none'}",
        f"qcompiler  {__version__}",
        f"python     {platform.python_version()} on {platform.platform()}",
        f"packages   {', '.join(_versions())}",
    ]


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return found


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


__all__ = ["report_alone", "write_report"]
