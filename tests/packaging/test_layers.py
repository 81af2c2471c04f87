"""What may be imported without what: the runtime without torch and xdsl, the passes without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"qcompiler.passes": "passes", "qcompiler.kernels": "kernels", "qcompiler.runtime": "runtime"}

BLOCKED_IMPORT = """
import importlib, sys
blocked = set(sys.argv[1].split(","))

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked in this process")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
"""


def modules_of(*packages: str) -> list[str]:
    """Every module of the packages, from the repository's files (a mapped package cannot be walked when editable)."""
    names = []
    for package in packages:
        folder = ROOT / FOLDERS.get(package, package.replace(".", "/"))
        for path in [folder.with_suffix(".py")] if folder.with_suffix(".py").exists() else sorted(folder.rglob("*.py")):
            inside = [] if path.parent == folder.parent else path.relative_to(folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in inside if part != "__init__")]))
    return names


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True, check=False, timeout=120)


def import_without(blocked: str, *modules: str) -> None:
    done = run("-c", BLOCKED_IMPORT, blocked, *modules)
    assert done.returncode == 0, done.stderr


def test_module_lists_are_not_empty() -> None:
    names = modules_of("qcompiler.errors", "qcompiler.kernels")
    assert {"qcompiler.errors", "qcompiler.kernels", "qcompiler.kernels.cpu.emit"} <= set(names)


def test_what_runs_a_program_needs_neither_torch_nor_xdsl() -> None:
    packages = ("errors", "ledger", "formats", "plan", "kernels", "runtime")
    modules = modules_of(*(f"qcompiler.{name}" for name in packages))
    import_without("torch,xdsl,transformers", "qcompiler", *modules)


def test_ir_and_passes_need_no_torch() -> None:
    import_without("torch,transformers", *modules_of("qcompiler.ir", "qcompiler.passes"))


def test_reading_a_file_needs_neither_torch_nor_xdsl() -> None:
    import_without("torch,xdsl,transformers", "qcompiler.cli", "qcompiler.inspect.files", "qcompiler.inspect.doctor")


def test_importing_the_root_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'xdsl', 'numpy', 'ml_dtypes', 'transformers'}"
    done = run("-c", f"import sys, qcompiler; print(*{heavy} & set(sys.modules))")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_loading_a_program_file_does_not_import_torch_where_torch_is_installed() -> None:
    done = run("-c", "import sys, qcompiler as qc; qc.load; print(*{'torch', 'xdsl'} & set(sys.modules))")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("name", ["kernels", "passes", "runtime"])
def test_the_mapped_folders_are_no_top_level_packages(name: str, tmp_path: Path) -> None:
    """A top-level `kernels` would shadow the package that transformers and bitsandbytes import."""
    script = f"import importlib.util as u; s = u.find_spec({name!r}); print(s.origin if s else '')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(ROOT) not in done.stdout
