"""Compiles emitted C++ with the host's compiler, once: libraries stay in the user's cache under a content hash."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qcompiler.errors import ArgumentError, CompileFailedError, CompilerMissingError
from qcompiler.kernels.cpu.flags import OF_BITS, ZEN4, tuning
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import cache_dir, has_private_dir, private_dir
from qcompiler.runtime.code import Code, read_code, read_record
from qcompiler.runtime.compile_rate import compiling
from qcompiler.runtime.files import SUFFIX, held, locked, sweep, write_private
from qcompiler.runtime.isa import host_is_zen4
from qcompiler.runtime.progress import note, note_once

LOG_LIMIT = 6000
"""Maximum characters of a compiler's output in an error message."""


@dataclass(frozen=True)
class HostCompiler:
    """A compiler's command (with arguments from `QC_CXX` or `CXX`) and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version.lower()


def find_compiler() -> HostCompiler:
    """`QC_CXX`, `CXX`, `g++`, `clang++`, `c++`: the first that exists. CompilerMissingError names a package."""
    return _find_compiler(os.environ.get("QC_CXX"), os.environ.get("CXX"), os.environ.get("PATH"))


@functools.cache
def _find_compiler(qc_cxx: str | None, cxx: str | None, path: str | None) -> HostCompiler:
    for variable, value in (("QC_CXX", qc_cxx), ("CXX", cxx)):
        if value:
            try:
                command = tuple(shlex.split(value))
            except ValueError as error:
                raise CompilerMissingError(f"{variable}={value!r} cannot be read as a command: {error}") from error
            if not command or shutil.which(command[0], path=path) is None:
                raise CompilerMissingError(f"{variable}={value!r} names no program that exists; {_install_hint()}")
            return HostCompiler(command, _version(command))
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name, path=path):
            return HostCompiler((found,), _version((found,)))
    raise CompilerMissingError(
        f"no C++ compiler was found (looked for g++, clang++, c++); {_install_hint()}, or point QC_CXX to a compiler"
    )


def _install_hint() -> str:
    if platform.system() == "Darwin":
        return "install one with `xcode-select --install`"
    for manager, command in (
        ("apt-get", "apt install g++"),
        ("dnf", "dnf install gcc-c++"),
        ("zypper", "zypper install gcc-c++"),
        ("pacman", "pacman -S gcc"),
        ("apk", "apk add g++"),
    ):
        if shutil.which(manager):
            return f"install one with `{command}`"
    return "install one (`apt install g++`, `dnf install gcc-c++`)"


def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise CompilerMissingError(f"the compiler {shlex.join(command)} cannot be run: {error}") from error
    if done.returncode or not done.stdout:
        raise CompilerMissingError(f"`{shlex.join(command)} --version` failed: {(done.stderr or done.stdout)[:500]}")
    return done.stdout.splitlines()[0]


def optimisation() -> str:
    """The compiler's level: `-O3`, or the one in `QC_OPTIMISE`. With the flags below no result depends on it."""
    level = os.environ.get("QC_OPTIMISE", "3")
    if level not in ("g", "1", "2", "3"):
        raise ArgumentError(f"QC_OPTIMISE is '{level}'; it is g (compiles fastest), 1, 2 or 3 (runs fastest)")
    return f"-O{level}"


def flags_for(isa: str) -> tuple[str, ...]:
    """The flags of kernels (kernels/cpu/flags.py) for this machine and `optimisation`."""
    # A compiler's default may be above the baseline (in some distributions it is), so generic code names the baseline.
    baseline = ("-march=x86-64",) if platform.machine() in ("x86_64", "AMD64") else ()
    march = baseline if isa == "generic" else (f"-march={isa}",)
    processor = ZEN4 if host_is_zen4() else ()
    return ("-std=c++17", optimisation(), *march, *tuning(isa), *processor, *OF_BITS, "-fPIC", "-shared")


def cpu_flags(isa: str) -> tuple[str, ...]:
    """`flags_for`, and the flags of the sanitisers in `QC_SANITIZE`: for compiling kernels and pool."""
    return (*flags_for(isa), *sanitize.flags())


def _link_flags() -> tuple[str, ...]:
    # A library's own symbols win over equal names elsewhere, and a missing symbol is an error here, not at load.
    return ("-Wl,-Bsymbolic", "-Wl,-z,defs") if platform.system() == "Linux" else ()


def compile_library(source: str, isa: str, **options: Any) -> Path:
    """The file of `compile_code`'s result."""
    return compile_code(source, isa, **options).path


def compile_code(
    source: str,
    isa: str,
    *,
    name: str = "program",
    emitter_version: str = "",
    extra_flags: Sequence[str] = (),
    link_flags: Sequence[str] | None = None,
    announce: str | None = None,
) -> Code:
    """A shared library made from `source`, or an intact earlier one from the cache.

    The key covers the source, its emitter's version, the flags, the compiler's version and the target.  With
    `link_flags` the library is linked in a second step with these flags and without `extra_flags` (to have a
    sanitizer's hooks without its library).  `announce` is printed to stderr with the seconds if compiling was needed.
    If the cache takes no files, the library is in a folder of this process.
    CompileFailedError carries the compiler's output and the path of the source.
    """
    compiler = find_compiler()
    flags = (*flags_for(isa), *extra_flags, *(() if link_flags is not None else _link_flags()))
    link = None if link_flags is None else ("-shared", "-fPIC", *link_flags, *_link_flags())
    steps = "\0".join(flags) if link is None else "\0".join((*flags, "--", *link))
    key = _digest(source, str(emitter_version), steps, compiler.version, isa, platform.machine())
    file = f"{name}-{key[:32]}.so"
    for folder in (cache_dir("native"), *_private_folders()):
        if (found := _intact(folder / file)) is not None:
            return found
    job = _Job(compiler, flags, link, source, file, announce)
    try:
        return job.run(cache_dir("native"))
    except OSError as error:
        folder = private_dir("native")
        note_once(f"the cache takes no files ({error}): kernels are compiled in {folder}, for this process alone")
        return job.run(folder)


def recorded(record: Path, name: str) -> Code | None:
    """The library that a record of the cache names, if it is intact; no compiler is needed."""
    facts = read_record(record)
    file = facts.get("library")
    if not isinstance(file, str) or re.fullmatch(rf"{name}-[0-9a-f]{{32}}\.so", file) is None:
        return None
    for folder in (cache_dir("native"), *_private_folders()):
        if (code := read_code(folder / file, facts.get("sha256"))) is not None:
            return code
    return None


def _private_folders() -> tuple[Path, ...]:
    """This process's own folder, if it has compiled there."""
    return (private_dir("native"),) if has_private_dir() else ()


def _intact(library: Path) -> Code | None:
    """A library of the cache, if its bytes are those that the compiler wrote."""
    return read_code(library, read_record(library.with_suffix(".json")).get("sha256"))


@dataclass(frozen=True)
class _Job:
    """A compilation: its source, its flags, and the name of the library."""

    compiler: HostCompiler
    flags: Sequence[str]
    link: Sequence[str] | None
    source: str
    file: str
    announce: str | None

    def run(self, folder: Path) -> Code:
        """The library in `folder`. OSError if the folder takes no files."""
        library = folder / self.file
        with locked(Path(f"{library}.lock")):
            if (found := _intact(library)) is not None:  # another process was faster
                return found
            began = time.monotonic()
            what = self.file.rpartition("-")[0] if self.announce is None else self.announce.removeprefix("compiled ")
            with compiling(
                f"compile {what}", self.source, folder, (self.compiler.version, *self.flags, *(self.link or ()))
            ):
                code = Code(library, self._compile(library))
            # The record comes last: without it the library does not count.
            write_private(library, code.data)
            write_private(library.with_suffix(".json"), json.dumps({"sha256": code.sha256}).encode())
            if self.announce:
                note(f"{self.announce}: {time.monotonic() - began:.1f} s")
            return code

    def _compile(self, library: Path) -> bytes:
        text = library.with_suffix(".cpp")
        write_private(text, self.source.encode())
        work = library.parent / f".building.{secrets.token_hex(8)}{SUFFIX}"
        sweep(library.parent, "building")  # left by killed processes
        work.mkdir(0o700)
        try:
            with held(work):
                return self._compiled(text, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compiled(self, text: Path, work: Path) -> bytes:
        output, made = work / "library.so", work / "library.o"
        command = self.compiler.command
        if self.link is None:
            steps = [[*command, *self.flags, "-o", str(output), str(text)]]
        else:
            apart = [flag for flag in self.flags if flag != "-shared"]
            steps = [
                [*command, *apart, "-c", "-o", str(made), str(text)],
                [*command, "-o", str(output), str(made), *self.link],
            ]
        for step in steps:
            try:
                _run(step, self.compiler, text, work)
            except CompileFailedError:
                if not _has_room(work):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work)) from None
                raise
        return output.read_bytes()


def _has_room(folder: Path) -> bool:
    """Whether there is room on the disk. If not, a compiler's failure may have nothing to do with the source."""
    try:
        with (folder / "room").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _run(command: Sequence[str], compiler: HostCompiler, text: Path, work: Path) -> None:
    """Runs the compiler with its temporary files in `work`, which is removed afterwards."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            env={**sanitize.compiler_environment(), "TMPDIR": str(work)},
        )  # fmt: skip
    except OSError as error:
        raise CompileFailedError(f"cannot run `{shlex.join(command)}`: {error}") from error
    if done.returncode:
        log = (done.stderr + done.stdout).strip()[:LOG_LIMIT]
        raise CompileFailedError(
            f"{compiler.version} refused {text} (exit {done.returncode})\n$ {shlex.join(command)}\n{log}"
        )


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()
