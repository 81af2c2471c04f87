"""Compiles emitted C++ with the host's compiler, once: libraries stay in the user's cache under a content hash."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qcompiler.errors import CompileFailedError, CompilerMissingError
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import cache_dir, locked, write_atomically
from qcompiler.runtime.progress import note

LOG_LIMIT = 6000
"""Characters of a compiler's output that an error message carries."""


@dataclass(frozen=True)
class HostCompiler:
    """A compiler's command (with arguments it was given in `QC_CXX` or `CXX`) and the first line of its `--version`."""

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
            command = tuple(shlex.split(value))
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


def flags_for(isa: str) -> tuple[str, ...]:
    """Flags that decide the bits of kernels: no contraction of a*b+c (fused only where the source says so)."""
    # A compiler's own default may be above the baseline (that of some distributions is): it is named for generic code.
    baseline = ("-march=x86-64",) if platform.machine() in ("x86_64", "AMD64") else ()
    march = baseline if isa == "generic" else (f"-march={isa}",)
    wide = ("-mprefer-vector-width=512",) if isa == "x86-64-v4" else ()
    return ("-std=c++17", "-O3", *march, *wide, "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")


def cpu_flags(isa: str) -> tuple[str, ...]:
    """`flags_for`, with those of the sanitisers that `QC_SANITIZE` asks for: how kernels and pool are compiled."""
    return (*flags_for(isa), *sanitize.flags())


def _link_flags() -> tuple[str, ...]:
    # A library's own symbols win over equal names elsewhere, and a missing one fails here, not at load.
    return ("-Wl,-Bsymbolic", "-Wl,-z,defs") if platform.system() == "Linux" else ()


def compile_library(
    source: str,
    isa: str,
    *,
    name: str = "program",
    emitter_version: str = "",
    extra_flags: Sequence[str] = (),
    link_flags: Sequence[str] | None = None,
    announce: str | None = None,
) -> Path:
    """The path of a shared library made from `source`, from the cache if it was compiled before.

    The key covers the source, its emitter's version, the flags, the compiler's version and the target.  With
    `link_flags` the library is linked in a second step that sees those and not `extra_flags` (a sanitiser's hooks are
    wanted then, its library is not).  `announce` is printed to stderr with the seconds when compiling really happens.
    CompileFailedError carries the compiler's output and the path of the source.
    """
    compiler = find_compiler()
    flags = (*flags_for(isa), *extra_flags, *(() if link_flags is not None else _link_flags()))
    link = None if link_flags is None else ("-shared", "-fPIC", *link_flags, *_link_flags())
    steps = "\0".join(flags) if link is None else "\0".join((*flags, "--", *link))
    key = _digest(source, str(emitter_version), steps, compiler.version, isa, platform.machine())
    directory = cache_dir("native")
    library = directory / f"{name}-{key[:32]}.so"
    if library.exists():
        return library
    with locked(library):
        if not library.exists():
            began = time.monotonic()
            _compile(compiler, flags, link, source, library)
            if announce:
                note(f"{announce}: {time.monotonic() - began:.1f} s")
    return library


def _compile(
    compiler: HostCompiler, flags: Sequence[str], link: Sequence[str] | None, source: str, library: Path
) -> None:
    text = library.with_suffix(".cpp")
    write_atomically(text, source.encode())
    descriptor, output = tempfile.mkstemp(dir=library.parent, prefix=".building-", suffix=".so")
    os.close(descriptor)
    made = Path(output).with_suffix(".o")
    try:
        if link is None:
            _run([*compiler.command, *flags, "-o", output, str(text)], compiler, text)
        else:
            apart = [flag for flag in flags if flag != "-shared"]
            _run([*compiler.command, *apart, "-c", "-o", str(made), str(text)], compiler, text)
            _run([*compiler.command, "-o", output, str(made), *link], compiler, text)
        Path(output).replace(library)
    finally:
        Path(output).unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def _run(command: Sequence[str], compiler: HostCompiler, text: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
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
