"""With `out=` a repeated call allocates nothing: every allocator function is interposed and counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INTERPOSER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
extern void* __libc_malloc(size_t); extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t); extern void* __libc_memalign(size_t, size_t);
static atomic_int armed; static atomic_long count;
static void seen(void) { if (atomic_load(&armed)) atomic_fetch_add(&count, 1); }
void* malloc(size_t n) { seen(); return __libc_malloc(n); }
void* calloc(size_t n, size_t m) { seen(); return __libc_calloc(n, m); }
void* realloc(void* p, size_t n) { seen(); return __libc_realloc(p, n); }
void* aligned_alloc(size_t a, size_t n) { seen(); return __libc_memalign(a, n); }
void* memalign(size_t a, size_t n) { seen(); return __libc_memalign(a, n); }
int posix_memalign(void** p, size_t a, size_t n) { seen(); *p = __libc_memalign(a, n); return *p ? 0 : 12; }
void count_begin(void) { atomic_store(&count, 0); atomic_store(&armed, 1); }
long count_end(void) { atomic_store(&armed, 0); return atomic_load(&count); }
"""

PROGRAM = r"""
import ctypes, sys
import numpy as np
from qcompiler.runtime import load
counter = ctypes.CDLL(None)
begin, end = counter.count_begin, counter.count_end
begin.restype, end.restype = None, ctypes.c_long
run = load(sys.argv[1], num_threads=2)
x = np.ones((100, 64), np.float32)
out = {"y": np.empty((100, 48), np.float32), "n": np.empty(4, np.float32), "raw": np.empty((100, 64), np.float32)}
def calls(target):
    begin()
    for _ in range(100):
        run(x, out=target)
    return end()
calls(out), calls(out)
print("with out:", calls(out))
begin(); [run(x) for _ in range(10)]; print("without out:", end())
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="LD_PRELOAD with glibc's allocator")
def test_a_call_with_out_allocates_nothing(small: Any, own_cache: Path, tmp_path: Path) -> None:
    from qcompiler.runtime import LoadedProgram

    LoadedProgram.from_image(small.image).save(tmp_path / "p.qca")
    (tmp_path / "count.c").write_text(INTERPOSER)
    library = tmp_path / "count.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "count.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "p.qca")],
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(": ") for line in done.stdout.splitlines())
    assert lines["with out"] == "0"
    assert int(lines["without out"]) >= 10  # the counter does count
