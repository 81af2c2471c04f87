"""The emitter's digest: whatever may change a kernel's text changes it."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qcompiler.runtime import emitter

FILES = [
    ("kernels/cpu/order.py", "cpu", True),
    ("kernels/kinds/argmax.py", "cpu", True),
    ("kernels/kinds/argmax.py", "cuda", True),
    ("kernels/cpu/gemm.h", "cpu", True),
    ("kernels/cuda/linear.cuh", "cuda", True),
    ("kernels/layouts/panels.py", "cpu", True),
    ("kernels/scalar.py", "cuda", True),
    ("plan/kinds/linear.py", "cpu", True),
    ("plan/dims.py", "cuda", True),
    ("formats/nf4.py", "cpu", True),
    ("formats/nf4.py", "cuda", True),
    ("kernels/cuda/linear.cuh", "cpu", False),
    ("kernels/cpu/gemm.h", "cuda", False),
    ("kernels/sim/shim.h", "cuda", False),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages that emit, in a folder where they may be edited."""
    root = tmp_path_factory.mktemp("emitter")
    for name in ("kernels", "plan", "formats"):
        with resources.as_file(resources.files(f"qcompiler.{name}")) as folder:
            shutil.copytree(folder, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize(("file", "target", "counts"), FILES)
def test_an_edit_gives_another_digest(
    copied: Path, monkeypatch: pytest.MonkeyPatch, file: str, target: Any, counts: bool
) -> None:
    monkeypatch.setattr(
        emitter, "resources", SimpleNamespace(files=lambda package: copied / package.rpartition(".")[2])
    )
    compute = emitter.emitter_version.__wrapped__
    assert compute(target) == emitter.emitter_version(target)
    before = (copied / file).read_bytes()
    (copied / file).write_bytes(before + b"\n")
    try:
        assert (compute(target) != emitter.emitter_version(target)) == counts
    finally:
        (copied / file).write_bytes(before)
