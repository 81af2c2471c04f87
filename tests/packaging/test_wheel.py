"""What users install: a wheel with all modules and data, no stray top-level package, and a program that compiles."""

from __future__ import annotations

import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "qcompiler": "qcompiler",
    "passes": "qcompiler/passes",
    "kernels": "qcompiler/kernels",
    "runtime": "qcompiler/runtime",
}
DATA = (".h", ".cpp", ".cuh", ".typed")
BUNDLE = ("qcompiler/inspect/explore/explorer.js", "qcompiler/inspect/explore/explorer.css")
"""Built from sources that stay out of the wheel, as do the tools that build it (node_modules)."""


def repository_files() -> set[str]:
    """Modules and package data, under the names that the wheel must give them."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if (path.suffix in (".py", *DATA) and not {"__pycache__", "node_modules"} & set(path.parts))
        or path.relative_to(ROOT).as_posix() in BUNDLE
    }


def repository_packages() -> set[str]:
    """Folders that hold Python files, as dotted names."""
    return {str(Path(name).parent).replace("/", ".") for name in repository_files() if name.endswith(".py")}


@pytest.fixture(scope="session")
def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(member).decode()


def test_no_package_is_missing_from_the_declaration() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert len(declared) == len(set(declared))
    assert set(declared) == repository_packages()


def test_the_wheel_holds_the_modules_and_data_of_the_repository_and_nothing_else(members: set[str]) -> None:
    code = {name for name in members if ".dist-info/" not in name}
    assert code == repository_files()
    assert {Path(name).suffix for name in code} >= {".py", ".h", ".typed"}


def test_the_license_travels_with_the_wheel(wheel: Path) -> None:
    assert "Apache License" in _metadata(wheel, "licenses/LICENSE")
    assert Parser().parsestr(_metadata(wheel, "METADATA"))["License-Expression"] == "Apache-2.0"


def test_no_top_level_kernels_passes_or_runtime_is_installed(wheel: Path, members: set[str]) -> None:
    assert _metadata(wheel, "top_level.txt").split() == ["qcompiler"]
    assert {name.partition("/")[0] for name in members if ".dist-info/" not in name} == {"qcompiler"}


def test_running_needs_no_torch_by_its_declared_dependencies(wheel: Path) -> None:
    required = Parser().parsestr(_metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    base = {line.split(">")[0].split("<")[0].strip() for line in required if "extra ==" not in line}
    assert base == {"numpy", "ml_dtypes", "msgspec", "rich", "safetensors", "xdsl"}


COMPILE = """
import sys
import numpy as np, torch
import qcompiler as qc
assert qc.__file__.startswith(sys.prefix), qc.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).eval()
x = torch.randn(3, 64)
program = qc.qcompile(model, (x,), quant="nf4")
y = program(x)
assert torch.allclose(y, program.oracle(x), rtol=1e-4, atol=1e-5), (y - program.oracle(x)).abs().max()
program.save(sys.argv[1])
np.savez(sys.argv[2], x=x.numpy(), y=y.numpy())
"""

RELOAD = """
import sys
import numpy as np

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl", "transformers"):
            raise ImportError(f"{name} is blocked in this process")

sys.meta_path.insert(0, Refuse())
import qcompiler as qc
known = np.load(sys.argv[2])
y = qc.load(sys.argv[1])(known["x"])
assert np.array_equal(y.view(np.uint32), known["y"].view(np.uint32)), "other bits after a reload"
"""


@pytest.fixture(scope="session")
def compiled(run_installed: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("compiled")
    paths = str(folder / "model.qca"), str(folder / "known.npz")
    run_installed("python", "-c", COMPILE, *paths)
    return paths


def test_a_model_compiles_in_a_new_environment_and_its_file_runs_without_torch(
    compiled: tuple[str, str], run_installed: Callable[..., str]
) -> None:
    run_installed("python", "-c", RELOAD, *compiled)


def test_the_installed_command_reads_the_file(compiled: tuple[str, str], run_installed: Callable[..., str]) -> None:
    assert "recipe nf4" in run_installed("qc", "inspect", compiled[0])


def test_plain_xdsl_opt_finds_the_dialects_and_passes(run_installed: Callable[..., str]) -> None:
    script = "from xdsl.universe import Universe; u = Universe.get_multiverse(); print(*u.all_dialects, *u.all_passes)"
    names = run_installed("python", "-c", script).split()
    assert {"qc", "rt", "fuse-dequant-matmul", "verify-schedule"} <= set(names)
