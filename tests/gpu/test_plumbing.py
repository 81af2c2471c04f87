"""The cuda backend through the real cuda.core and cuda.bindings, on a driver made of host memory (stub_driver.cpp).

What the backend asks and gets back has the types that the bindings take and give; only the GPU is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.softmax import SoftmaxKernel
from qcompiler.plan.plan import Plan, to_json
from qcompiler.runtime import nvrtc
from qcompiler.runtime.compiler import compile_library

FOLDER = Path(__file__).parent


def plan() -> Plan:
    x = Operand(name="x", dtype="f32", access="r", shape=("r", "c"), strides=("c", 1))
    y = Operand(name="y", dtype="f32", access="w", shape=("r", "c"), strides=("c", 1))
    spec = KernelSpec(name="soft", symbols=("c", "r"), operands=(x, y), body=SoftmaxKernel(rows="r", cols="c"))
    return Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=(spec,), entries=())


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the stub under the driver's name."""
    library = compile_library((FOLDER / "stub_driver.cpp").read_text(), "generic", name="stub", extra_flags=("-w",))
    folder = tmp_path_factory.mktemp("driver")
    shutil.copy(library, folder / "libcuda.so.1")
    return folder


def test_the_backend_works_through_the_real_bindings(stub: Path, tmp_path: Path) -> None:
    nvrtc.build_module(plan(), "sm_90a")
    (tmp_path / "plan.json").write_bytes(to_json(plan()))
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub), "STUB_LAUNCHES": str(tmp_path / "launches")}
    command = [sys.executable, "-P", str(FOLDER / "plumbing.py"), str(tmp_path / "plan.json")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-1000:]
    assert done.stdout.strip() == "plumbing works"
