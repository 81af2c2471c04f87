"""A program file in a process that has neither torch nor xdsl: equal to the bit, and started fast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from qcompiler.runtime import LoadedProgram

BLOCKED = r"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "xdsl"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
"""

RUN = (
    BLOCKED
    + r"""
import time
import numpy as np
began = time.perf_counter()
from qcompiler.runtime import load
run = load(sys.argv[1], num_threads=2)
y = run(np.load(sys.argv[2]))["y"]
print(time.perf_counter() - began)
np.save(sys.argv[3], y)
assert not {"torch", "xdsl"} & set(sys.modules)
"""
)

EVERY_MODULE = (
    BLOCKED
    + r"""
import importlib, pkgutil
for package in ("qcompiler.errors", "qcompiler.formats", "qcompiler.plan", "qcompiler.kernels", "qcompiler.runtime"):
    module = importlib.import_module(package)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), package + "."):
        importlib.import_module(info.name)
"""
)


def python(code: str, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_without_torch_and_xdsl_gives_the_same_bits(small: Any, tmp_path: Path) -> None:
    run = LoadedProgram.from_image(small.image)
    run.save(tmp_path / "p.qca")
    x = small.x(31)
    np.save(tmp_path / "x.npy", x)
    python(RUN, tmp_path / "p.qca", tmp_path / "x.npy", tmp_path / "y.npy")
    assert np.load(tmp_path / "y.npy").tobytes() == run(x)["y"].tobytes()


def test_a_machine_that_never_saw_the_program_compiles_it_again(small: Any, tmp_path: Path) -> None:
    run = LoadedProgram.from_image(small.image)
    run.save(tmp_path / "p.qca")
    x = small.x(31)
    np.save(tmp_path / "x.npy", x)
    cache = str(tmp_path / "cache")
    python(RUN, tmp_path / "p.qca", tmp_path / "x.npy", tmp_path / "y.npy", QC_CACHE_DIR=cache)
    assert np.load(tmp_path / "y.npy").tobytes() == run(x)["y"].tobytes()
    assert len(list((tmp_path / "cache" / "native").glob("program-*.so"))) == 1


def test_no_lower_layer_needs_torch_or_xdsl() -> None:
    python(EVERY_MODULE)
