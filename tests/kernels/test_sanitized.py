"""The sanitised build (`QC_SANITIZE=address,undefined`): it finds planted faults, and nothing in the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qcompiler.errors import RuntimeFailure
from qcompiler.runtime import sanitize
from qcompiler.runtime.sanitized import EXIT_STATUS

FOLDER = Path(__file__).parent
PLANTED = r"""
import ctypes, sys
from qcompiler.runtime import compiler, sanitize
from qcompiler.runtime.memory import Block
source = '''#include <cstdint>
extern "C" int64_t f(const unsigned char* p, int64_t i) { return p[i]; }
extern "C" int64_t g(const unsigned char* p, int64_t i) { return (int64_t)(((uint64_t)1 << 63) - 1) + i; }'''
sanitize.require_runtime()
path = compiler.compile_library(source, "x86-64", extra_flags=sanitize.flags())
function = ctypes.CDLL(str(path))[sys.argv[1]]
function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_int64)
block = Block(100)
function(block.address, int(sys.argv[2]))
print("went well")
"""


def sanitized(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "qcompiler.runtime.sanitized", *command],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def planted(function: str, index: int, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-P", "-c", PLANTED, function, str(index))
    return sanitized(*command, QC_CACHE_DIR=str(tmp_path), **environment)


@pytest.mark.slow
def test_accesses_beside_a_block_are_reported_and_those_inside_are_not(tmp_path: Path) -> None:
    for inside in (0, 99):
        done = planted("f", inside, tmp_path)
        assert (done.returncode, done.stdout) == (0, "went well\n"), done.stderr
    for outside in (100, 4095, 4096, 20000, -1, -4096):
        done = planted("f", outside, tmp_path)
        assert done.returncode == EXIT_STATUS, (outside, done.stdout, done.stderr)
        assert "AddressSanitizer" in done.stderr


@pytest.mark.slow
def test_an_overflow_of_integers_is_reported(tmp_path: Path) -> None:
    assert planted("g", 0, tmp_path).returncode == 0
    done = planted("g", 1, tmp_path)
    assert done.returncode == EXIT_STATUS
    assert "signed integer overflow" in done.stderr
    assert planted("g", 1, tmp_path, QC_SANITIZE="address").returncode == 0, "only what was asked for"


def test_without_its_runtime_the_mode_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_SANITIZE", "address")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with pytest.raises(RuntimeFailure, match=r"python -m qcompiler\.runtime\.sanitized"):
        sanitize.require_runtime()
    monkeypatch.setenv("QC_SANITIZE", "adress")
    with pytest.raises(RuntimeFailure, match="'adress'; it is 'address', 'undefined' or both"):
        sanitize.flags()


def test_sanitised_kernels_have_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompiler.runtime.compiler import cpu_flags

    monkeypatch.delenv("QC_SANITIZE", raising=False)
    plain = cpu_flags("generic")
    monkeypatch.setenv("QC_SANITIZE", "undefined")
    assert cpu_flags("generic") != plain


@pytest.mark.slow
@pytest.mark.skipif("QC_SANITIZE" in os.environ, reason="this run is the sanitised one")
def test_kernels_show_nothing_under_the_sanitisers() -> None:
    """All tests of the kernels again; those at real sizes are no others than the quick ones to a sanitiser."""
    # A report ends the process, so pytest must not hold back what it wrote.
    command = (sys.executable, "-P", "-m", "pytest", "-qs", "-m", "not slow", "-p", "no:cacheprovider", str(FOLDER))
    done = sanitized(*command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
