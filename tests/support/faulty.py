"""Disks that fail, and processes that are killed, at a chosen call that writes: every such call of an action in turn.

A library that is loaded before libc's (LD_PRELOAD) counts the calls that create, write, cut, sync, name or remove
something below a folder, in this process and in those that it starts (a compiler), and fails the n-th: with EIO once,
with ENOSPC or EROFS from then on (removing still works then), or by SIGKILL.

A test starts a process under it (`start`), which prepares and then calls `every_write`: that forks for each n.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from by_path import environment as with_support

SOURCE = r"""
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char root[4096], report[4096];
static int fault = -2, at = 0;  // fault: -2 none, 0 kill, else an errno
static int* seen;               // shared by all processes of an action

extern "C" void fault_arm(int kind, int number, const char* folder, const char* file) {
    char path[4200];
    snprintf(root, sizeof root, "%s", folder);
    snprintf(report, sizeof report, "%s", file);
    at = number, fault = -2;
    if (kind == -2) return;
    snprintf(path, sizeof path, "%s.count", report);
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    syscall(SYS_ftruncate, fd, 4096);
    seen = (int*)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    fault = kind;
}
__attribute__((constructor)) static void begin() {
    const char* kind = getenv("FAULT_KIND");
    if (kind && getenv("FAULT_AT") && getenv("FAULT_ROOT") && getenv("FAULT_REPORT"))
        fault_arm(atoi(kind), atoi(getenv("FAULT_AT")), getenv("FAULT_ROOT"), getenv("FAULT_REPORT"));
}
static bool below(const char* path) { return path && !strncmp(path, root, strlen(root)); }
static bool below_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return false;
    path[n] = 0;
    return below(path);
}
// True where the call is to fail with errno.
static bool fails(bool removes) {
    if (fault == -2) return false;
    const int number = __atomic_add_fetch(seen, 1, __ATOMIC_SEQ_CST);
    if (number < at || (number > at && (fault == EIO || fault == 0))) return false;
    if (removes && fault && fault != EIO) return false;
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd >= 0) syscall(SYS_write, fd, "x", 1), syscall(SYS_close, fd);
    if (!fault) kill(getpid(), SIGKILL), pause();
    errno = fault;
    return true;
}
#define TRUE_CALL(name) static auto call = (decltype(&name))dlsym(RTLD_NEXT, #name)
extern "C" {
ssize_t write(int fd, const void* p, size_t n) {
    TRUE_CALL(write);
    return below_fd(fd) && fails(false) ? -1 : call(fd, p, n);
}
ssize_t pwrite64(int fd, const void* p, size_t n, off64_t o) {
    TRUE_CALL(pwrite64);
    return below_fd(fd) && fails(false) ? -1 : call(fd, p, n, o);
}
int fsync(int fd) {
    TRUE_CALL(fsync);
    return below_fd(fd) && fails(false) ? -1 : call(fd);
}
int ftruncate64(int fd, off64_t n) noexcept {
    TRUE_CALL(ftruncate64);
    return below_fd(fd) && fails(false) ? -1 : call(fd, n);
}
int posix_fallocate64(int fd, off64_t o, off64_t n) {
    TRUE_CALL(posix_fallocate64);
    return below_fd(fd) && fails(false) ? errno : call(fd, o, n);
}
int rename(const char* a, const char* b) noexcept {
    TRUE_CALL(rename);
    return below(b) && fails(false) ? -1 : call(a, b);
}
int mkdir(const char* path, mode_t mode) noexcept {
    TRUE_CALL(mkdir);
    return below(path) && fails(false) ? -1 : call(path, mode);
}
int unlink(const char* path) noexcept {
    TRUE_CALL(unlink);
    return below(path) && fails(true) ? -1 : call(path);
}
int rmdir(const char* path) noexcept {
    TRUE_CALL(rmdir);
    return below(path) && fails(true) ? -1 : call(path);
}
#define OPEN(name) \
    int name(const char* path, int flags, ...) { \
        TRUE_CALL(name); \
        va_list more; \
        va_start(more, flags); \
        const mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && below(path) && fails(false)) return -1; \
        return call(path, flags, mode); \
    }
#define FOPEN(name) \
    FILE* name(const char* path, const char* how) { \
        TRUE_CALL(name); \
        return strpbrk(how, "wa+") && below(path) && fails(false) ? nullptr : call(path, how); \
    }
OPEN(open64)
OPEN(open)
FOPEN(fopen64)
FOPEN(fopen)
size_t fwrite(const void* p, size_t size, size_t n, FILE* file) {
    TRUE_CALL(fwrite);
    return below_fd(fileno(file)) && fails(false) ? 0 : call(p, size, n, file);
}
}
"""
KINDS = {"kill": 0, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS}


def start(code: str, folder: Path, *arguments: object, **environment: str) -> dict[str, Any]:
    """What `code`, run under the library, prints last, as JSON. It finds this module and `arguments` in sys.argv."""
    source, library = folder / "faulty.cpp", folder / "faulty.so"
    source.write_text(SOURCE)
    command = ["g++", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**with_support(), "LD_PRELOAD": str(library), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def every_write(
    root: Path,
    action: Callable[[], object],
    check: Callable[[str], object],
    *,
    kinds: tuple[str, ...] = tuple(KINDS),
    most: int = 10_000,
    must_succeed: tuple[str, ...] = (),
) -> dict[str, dict[str, int]]:
    """Runs the action in a child for each kind and (at most `most`) calls that write; then `check` in another child.

    `check` gets what became of the action: "done", "refused" (a QCompilerError) or "killed"; anything else fails, and
    so does a refusal under one of the kinds that `must_succeed`.  How often what became of it, by kind, and of how many
    calls.
    """
    report = root.parent / "fault-report"
    counter = Path(f"{report}.count")
    assert _in_child(action, KINDS["EIO"], 1 << 30, root, report) == "done"
    total = int.from_bytes(counter.read_bytes()[:4], "little")
    assert _in_child(lambda: check("done"), None, 0, root, report) == "done"
    counts: dict[str, dict[str, int]] = {"calls": {"all": total}}
    for kind in kinds:
        counts[kind] = {"done": 0, "refused": 0, "killed": 0}
        for at in range(1, total + 1, -(-total // most)):
            for left in (report, counter):
                left.unlink(missing_ok=True)
            how = _in_child(action, KINDS[kind], at, root, report)
            fired = report.exists()
            how, _, why = how.partition(": ")
            assert how in counts[kind], f"{kind} at {at}: {how}: {why}"
            assert how != "refused" or kind not in must_succeed, f"{kind} at {at} was refused: {why}"
            after = _in_child(lambda how=how: check(how), None, 0, root, report)
            assert after == "done", f"{kind} at {at} ({how}), afterwards: {after}"
            assert fired or how == "done", f"nothing failed, and yet: {how}"
            counts[kind][how] += fired
    return counts


def _in_child(action: Callable[[], object], kind: int | None, at: int, root: Path, report: Path) -> str:
    from qcompiler.errors import QCompilerError

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        text = "done"
        try:
            if kind is not None:
                os.environ |= {"FAULT_KIND": str(kind), "FAULT_AT": str(at), "FAULT_ROOT": str(root),
                               "FAULT_REPORT": str(report)}  # fmt: skip
                ctypes.CDLL(None).fault_arm(kind, at, os.fsencode(root), os.fsencode(report))
            action()
        except QCompilerError as error:
            text = f"refused: {error}"
        except BaseException:
            text = traceback.format_exc()
        ctypes.CDLL(None).fault_arm(-2, 0, b"", b"")
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return text
