"""The wheel, built from a copy of the sources, and a new environment that holds nothing of qcompiler but that wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., str]


def _checked(command: list[str], cwd: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command[:4]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no stale build/lib of the repository leaks into it and none is left there."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("qcompiler", "passes", "kernels", "runtime"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _checked([*command, "--wheel-dir", str(target), str(source)], target, _clean_environment())
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a virtual environment with the wheel installed.

    Its dependencies are those of the running environment: a .pth line adds that folder's modules, but none of its own
    .pth files is read, so an editable qcompiler there cannot be imported.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(with_pip=False).create(folder)
    python = str(folder / "bin" / "python")
    site = Path(_checked([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder, {}).strip())
    libraries = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("\n".join(libraries) + "\n")
    command = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index"]
    _checked([*command, "--no-compile", "--disable-pip-version-check", str(wheel)], folder, _clean_environment())
    return folder


@pytest.fixture(scope="session")
def run_installed(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run_installed(program, *arguments)`: standard output of one of the environment's programs, run elsewhere."""
    cwd, cache = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("cache")

    def run(program: str, *arguments: str) -> str:
        environment = {**_clean_environment(), "QC_CACHE_DIR": str(cache)}
        return _checked([str(installed / "bin" / program), *arguments], cwd, environment)

    return run


def _clean_environment() -> dict[str, str]:
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}
