"""The thread pool: every task once, no wrong scratch, no dependence between callers, alive after a fork."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.runtime.compiler import compile_library
from qcompiler.runtime.session import make_context
from qcompiler.runtime.support import support
from qcompiler.runtime.threads import usable_cpus

SOURCE = r"""
#include <atomic>
#include <cstring>
struct Job { int32_t* counts; std::atomic<int64_t>* bad; qc_ctx* ctx; int64_t work; };
static void task(void* arg, int64_t i, char* scratch) {
    Job* job = (Job*)arg;
    int64_t* mine = (int64_t*)scratch;
    mine[0] = i;
    for (volatile int64_t k = 0; k < job->work; ++k) {}
    if (mine[0] != i) job->bad->fetch_add(1);  // another thread wrote here: scratch is not the thread's own
    __atomic_fetch_add(&job->counts[i], 1, __ATOMIC_RELAXED);
}
extern "C" int64_t regions(qc_ctx* ctx, int32_t* counts, int64_t tasks, int64_t repeats, int64_t work) {
    std::atomic<int64_t> bad{0};
    for (int64_t r = 0; r < repeats; ++r) {
        Job job{counts, &bad, ctx, work};
        ctx->parallel(ctx, tasks, task, &job);
        for (int64_t i = 0; i < tasks; ++i) if (counts[i] != r + 1) return -1 - i;
    }
    return bad.load();
}
static void nest(void* arg, int64_t i, char*) {
    Job* job = (Job*)arg;
    Job inner{job->counts + i * 8, job->bad, job->ctx, 0};
    job->ctx->parallel(job->ctx, 8, task, &inner);
}
extern "C" int64_t nested(qc_ctx* ctx, int32_t* counts, int64_t tasks) {
    std::atomic<int64_t> bad{0};
    Job job{counts, &bad, ctx, 0};
    ctx->parallel(ctx, tasks, nest, &job);
    return bad.load();
}
"""


@pytest.fixture(scope="module")
def library() -> Any:
    abi = resources.files("qcompiler.kernels.cpu").joinpath("abi.h").read_text().replace("#pragma once\n", "")
    lib = ctypes.CDLL(str(compile_library(abi + SOURCE, "x86-64" if os.uname().machine == "x86_64" else "generic")))
    lib.regions.restype = lib.nested.restype = ctypes.c_int64
    return lib


def regions(library: Any, threads: int, tasks: int, repeats: int, work: int = 0) -> int:
    context = make_context(threads, 64)
    counts = np.zeros(tasks, np.int32)
    result: int = library.regions(
        ctypes.byref(context), ctypes.c_void_p(counts.ctypes.data), *map(ctypes.c_int64, (tasks, repeats, work))
    )
    return result


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [1, 2, 3, 64])
def test_each_task_runs_once_in_each_region(library: Any, threads: int, tasks: int) -> None:
    assert regions(library, threads, tasks, 300) == 0


def test_tasks_of_different_threads_never_share_scratch(library: Any) -> None:
    assert regions(library, 4, 16, 100, work=2000) == 0


def test_a_smaller_limit_of_threads_after_a_larger_one_is_kept(library: Any) -> None:
    assert regions(library, 6, 32, 20) == 0
    assert support().qc_pool_workers() >= 5
    assert regions(library, 2, 32, 200, work=200) == 0  # scratch for two threads only


def test_sleeping_workers_are_woken(library: Any) -> None:
    for _ in range(5):
        time.sleep(0.01)  # far longer than the workers spin
        assert regions(library, 2, 8, 2, work=1000) == 0


def test_nested_regions_run_inline(library: Any) -> None:
    context = make_context(3, 64)
    counts = np.zeros(16 * 8, np.int32)
    address = ctypes.c_void_p(counts.ctypes.data)
    assert library.nested(ctypes.byref(context), address, ctypes.c_int64(16)) == 0
    assert (counts == 1).all()


def test_two_callers_both_progress(library: Any) -> None:
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(regions(library, 3, 16, 200, work=500))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [0, 0, 0]


def in_child(function: Any) -> int:
    """The exit status of a forked child that runs `function` (which must return 0), killed after 30 s."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 99
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(sys.platform != "linux" or usable_cpus() < 2, reason="needs Linux and two processors")
def test_a_worker_leaves_the_processor_of_its_caller(library: Any) -> None:
    """And it may still run on all that it might run on before: nobody is bound. A child has no other threads."""
    every = os.sched_getaffinity(0)
    here = min(every)

    def child() -> int:
        os.sched_setaffinity(0, {here})
        regions(library, 2, 8, 20, work=1000)
        (worker,) = {int(thread.name) for thread in Path("/proc/self/task").iterdir()} - {os.getpid()}
        if os.sched_getaffinity(worker) != {here}:
            return 1
        os.sched_setaffinity(worker, every)
        elsewhere = 0
        for _ in range(40):
            time.sleep(0.001)
            regions(library, 2, 8, 50, work=1000)
            elsewhere += processor_of(worker) != here
        for _ in range(1000):  # it may be about to move
            if os.sched_getaffinity(worker) == every:
                return 0 if elsewhere >= 20 else 100 + elsewhere
            time.sleep(0.001)
        return 2

    assert in_child(child) == 0


def processor_of(thread: int) -> int:
    """The one that a thread ran on last: field 39 of its `stat`, see proc_pid_stat(5)."""
    return int(Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[36])


def test_pool_works_in_a_forked_child(library: Any) -> None:
    assert regions(library, 2, 16, 10) == 0
    assert in_child(lambda: regions(library, 2, 16, 50, work=200)) == 0
    assert regions(library, 2, 16, 10) == 0  # and in the parent still


def test_fork_while_another_thread_is_inside_a_region(library: Any) -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            regions(library, 2, 8, 20, work=1000)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            assert in_child(lambda: regions(library, 2, 16, 20, work=100)) == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are tied to processors on Linux only")
def test_a_spinning_worker_leaves_its_processor_to_who_needs_it(library: Any) -> None:
    def spun() -> int:
        """1 if, on one processor, a worker that waits takes as much of it as the thread that has work."""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        support().qc_pool_set_spin(10**9)
        assert regions(library, 2, 8, 1) == 0 and support().qc_pool_workers() == 1
        before = time.process_time() - time.thread_time()
        begin = time.thread_time()
        while time.thread_time() - begin < 0.2:
            pass
        return int(time.process_time() - time.thread_time() - before > 0.1)

    assert in_child(spun) == 0
