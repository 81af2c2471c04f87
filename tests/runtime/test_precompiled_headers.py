"""tests/support/precompiled_g++, through which the short run compiles, makes what g++ makes."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

WRAPPER = Path(__file__).resolve().parents[1] / "support" / "precompiled_g++"
FLAGS = ["-std=c++17", "-O1", "-march=x86-64-v3", "-ffp-contract=off", "-fPIC", "-shared", "-Wl,-z,defs"]
SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <immintrin.h>
extern "C" void halve(float* x) { _mm256_storeu_ps(x, _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(0.5f))); }
extern "C" int32_t bits(float x) { int32_t u; memcpy(&u, &x, 4); return u + (int32_t)fabsf(x); }
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="<immintrin.h> is for x86-64")
def test_a_precompiled_header_changes_no_byte_and_hides_no_error(tmp_path: Path) -> None:
    source, headers = tmp_path / "kernel.cpp", tmp_path / "headers"
    headers.mkdir()
    source.write_text(SOURCE)

    def compile_by(compiler: str) -> tuple[int, bytes]:
        output = tmp_path / "kernel.so"
        output.unlink(missing_ok=True)
        command = [compiler, *FLAGS, "-o", str(output), str(source)]
        environment = os.environ | {"QC_PRECOMPILED": str(headers)}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        return done.returncode, output.read_bytes() if done.returncode == 0 else done.stderr

    plain = compile_by("g++")
    assert plain[0] == 0, plain[1]
    made = []
    for _ in range(3):
        assert compile_by(str(WRAPPER)) == plain
        made.append(len(list(headers.glob("*/*.gch"))))
    assert made == [0, 1, 1]  # the second use of the same flags makes it, the third finds it

    source.write_text(SOURCE + "int wrong() { return no_such_name; }\n")
    code, message = compile_by(str(WRAPPER))
    assert code != 0 and b"no_such_name" in message
    source.write_text("#include <math.h>\nstatic int abs2(int v) { return v * v; }\nint f(int v) { return abs2(v); }\n")
    assert compile_by(str(WRAPPER)) == compile_by("g++")
