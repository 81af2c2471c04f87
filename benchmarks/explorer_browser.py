"""Runs a script on explorer pages in headless Chromium: for the figures and the pictures of docs/explorer.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WEB = HERE.parent / "qcompiler" / "inspect" / "explore" / "web"
CHROMIUM = os.environ.get("QC_CHROMIUM", "/usr/bin/chromium")


def missing_tools() -> list[str]:
    """What is not there of node, npm and Chromium, with the way to have it."""
    missing = [f"{tool} (apt install nodejs npm)" for tool in ("node", "npm") if shutil.which(tool) is None]
    return missing + ([] if Path(CHROMIUM).exists() else [f"{CHROMIUM} (apt install chromium, or set QC_CHROMIUM)"])


def prepared(folder: Path) -> Path:
    """Installs the pinned packages of the explorer's sources, playwright-core among them, in a copy in `folder`."""
    web = folder / "web"
    shutil.copytree(WEB, web, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(HERE / "explorer_page.mjs", web)
    _run(web, "npm", "ci", "--no-audit", "--no-fund")
    return web


def run(web: Path, script: str, *arguments: str | Path) -> Any:
    """What a script of this folder prints as JSON."""
    shutil.copy(HERE / script, web)
    return json.loads(_run(web, "node", script, *map(str, arguments)))


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout
