"""The thread pool under ThreadSanitizer: no data race, and each of two planted ones is found."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

DRIVER = r"""
#include "pool.cpp"

#include <cstdlib>
#include <thread>
#include <vector>

struct Work { int64_t* out; int64_t round; };

// Plain stores: each task has its own element, each thread its own scratch.
static void body(void* argument, int64_t task, char* scratch) {
    Work* const work = static_cast<Work*>(argument);
    work->out[task] += work->round + task;
    scratch[0] = scratch[63] = char(task);
}

// Regions of 1 to 40 tasks, one after the other; at times workers have fallen asleep in between.
static void caller(int id, int rounds) {
    std::vector<char> scratch(64 * 4);
    std::vector<int64_t> out(40), wanted(40);
    qc_ctx ctx = {};
    ctx.parallel = qc_pool_parallel, ctx.num_threads = 2 + id % 3;
    ctx.scratch = scratch.data(), ctx.scratch_stride = 64;
    for (int round = 0; round < rounds; round++) {
        Work work = {out.data(), round};
        const int64_t tasks = 1 + (round * 7 + id) % 40;
        ctx.parallel(&ctx, tasks, body, &work);
        for (int64_t task = 0; task < tasks; task++) wanted[task] += round + task;
        if (out != wanted) abort();
        const timespec pause = {0, 200000};
        if (round % 50 == 0) nanosleep(&pause, nullptr);
    }
}

int main(int, char** arguments) {
    qc_pool_set_spin(atol(arguments[1]));
    caller(0, 500);
    std::vector<std::thread> callers;
    for (int id = 0; id < 4; id++) callers.emplace_back(caller, id, 1000);
    for (auto& each : callers) each.join();
}
"""

PLANTED = {
    "no wait for workers": ("    wait_until_empty();\n    pool.owned", "    pool.owned"),
    "a gate that publishes nothing": (
        "(uint64_t(threads) << 12), std::memory_order_seq_cst", "(uint64_t(threads) << 12), std::memory_order_relaxed"
    ),
}  # fmt: skip


def run(folder: Path, pool: str, spin_ns: int) -> subprocess.CompletedProcess[str]:
    """Four callers at once. A sanitizer's report makes the exit status 66."""
    for name in ("abi.h", "float_state.h"):
        (folder / name).write_text(resources.files("qcompiler.kernels.cpu").joinpath(name).read_text())
    (folder / "pool.cpp").write_text(pool)
    (folder / "driver.cpp").write_text(DRIVER)
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    command = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "driver.cpp", "-o", "driver", "-pthread"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "libtsan" in built.stderr or "libclang_rt.tsan" in built.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return subprocess.run(
        ["./driver", str(spin_ns)], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )


def pool_text() -> str:
    return resources.files("qcompiler.runtime").joinpath("pool.cpp").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("spin_ns", [0, 3_000, 50_000])
def test_callers_and_workers_race_for_nothing(tmp_path: Path, spin_ns: int) -> None:
    """Workers that sleep at once, that yield, and that spin."""
    done = run(tmp_path, pool_text(), spin_ns)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_race_is_found(tmp_path: Path, bug: str) -> None:
    before, after = PLANTED[bug]
    assert pool_text().count(before) == 1
    done = run(tmp_path, pool_text().replace(before, after), 50_000)
    assert "ThreadSanitizer: data race" in done.stderr
