"""The caller's floating-point state does not reach kernels, and kernels do not reach the caller's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompiler as qc
from qcompiler.runtime import compiler, reset_simulated_gpu

torch = pytest.importorskip("torch")

STATE = r"""
#include <fenv.h>
#include <xmmintrin.h>
extern "C" unsigned get() { return _mm_getcsr(); }
extern "C" void set(unsigned value) { _mm_setcsr(value); }
"""
DEFAULT, FLUSH, UPWARD = 0x1F80, 0x1F80 | 0x8040, 0x1F80 | 0x4000

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the test reads and writes MXCSR")


@pytest.fixture(scope="module")
def mxcsr(own_cache: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiler.compile_library(STATE, "x86-64")))
    library.get.restype, library.set.argtypes, library.set.restype = ctypes.c_uint32, (ctypes.c_uint32,), None
    return library


@pytest.fixture(autouse=True)
def restored(mxcsr: ctypes.CDLL) -> Iterator[None]:
    before = mxcsr.get()
    yield
    mxcsr.set(before)


class Halves(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Results are denormal; a third of them is not representable, so that rounding shows."""

    def forward(self, x: Any) -> Any:
        return x * 0.3, (x + 1) / 3


X = np.linspace(1e-40, 1e-38, 1 << 18, dtype=np.float32).reshape(512, 512)


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("state", [FLUSH, UPWARD])
def test_the_callers_state_changes_no_bit_on_any_number_of_threads(
    own_cache: Path, mxcsr: ctypes.CDLL, device: str, state: int
) -> None:
    x = torch.from_numpy(X[:64, :64] if device != "cpu" else X)
    program = qc.qcompile(Halves(), (x,), device=device)
    mxcsr.set(DEFAULT)
    want = [each.numpy().tobytes() for each in program(x)]
    assert (np.frombuffer(want[0], np.float32) != 0).all(), "denormals are kept"
    for threads in (1, 2, 3) if device == "cpu" else (None,):
        from qcompiler.runtime import LoadedProgram

        mxcsr.set(state)  # before threads are made, which begin with the state of their maker
        run = LoadedProgram.from_image(program.image, device, num_threads=threads)
        for stepwise in (False, True) if device == "cpu" else (None,):
            session = run.session(stepwise=stepwise)
            for _ in range(5):
                mxcsr.set(state)
                found = session(x)
                kept = mxcsr.get()
                mxcsr.set(DEFAULT)
                assert [each.numpy().tobytes() for each in found] == want
                assert kept & ~0x3F == state, "the caller's own state is as it was (its flags aside)"
    if device != "cpu":
        reset_simulated_gpu(device)


@pytest.mark.slow
def test_workers_that_were_made_under_another_state_keep_denormals(own_cache: Path) -> None:
    """In a fresh process: the first call makes the workers, under torch.set_flush_denormal."""
    import subprocess
    import sys

    code = """
import numpy as np, torch, qcompiler as qc
class Halves(torch.nn.Module):
    def forward(self, x):
        return x * 0.3
x = torch.full((512, 512), 1e-39)
program = qc.qcompile(Halves(), (x,))
assert torch.set_flush_denormal(True)
from qcompiler.runtime import LoadedProgram
run = LoadedProgram.from_image(program.image, num_threads=3)
found = [run(x) for _ in range(20)]
torch.set_flush_denormal(False)
answers = {each.numpy().tobytes() for each in found}
assert len(answers) == 1, len(answers)
assert all((each != 0).all() for each in found), "flushed"
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
