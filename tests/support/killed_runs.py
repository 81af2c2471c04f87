"""Runs of a script that kills itself at a chosen call: what a working folder is worth after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

KILLED = -signal.SIGKILL


def killed_run(script: str, folder: Path, die_at: int) -> tuple[int, str]:
    """(exit status, what it printed) of `script`, whose arguments are the folder, which is made, and the call at which
    it dies (0: never). It may end well or be killed; anything else fails with its errors."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(folder), str(die_at)],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "QC_QUIET": "1"},
    )  # fmt: skip
    assert done.returncode in (0, KILLED), done.stderr[-3000:]
    return done.returncode, done.stdout.strip()
