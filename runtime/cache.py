"""The user's own cache: compiled kernels and the record of checked files. Private, and safe between processes.

The directory is `$QC_CACHE_DIR`, else `$XDG_CACHE_HOME/qcompiler`, else `~/.cache/qcompiler`.  Code from it is
executed, so a folder or file that another user owns or may write to is not used.  Then a message says so once, and this
process uses a private folder, which is removed when the process ends.  The same happens if the cache is full or
read-only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from qcompiler.errors import RuntimeFailure
from qcompiler.runtime.files import SUFFIX, LockedPath, held, sweep, write_private
from qcompiler.runtime.progress import note_once

_WAY_OUT = "set QC_CACHE_DIR to a folder that only you can write to"


def cache_dir(sub: str = "") -> Path:
    """The cache directory, or one inside it, made with mode 0700; if it cannot be used, a private one instead."""
    root = _root()
    for path in (root, root / sub) if sub else (root,):
        why = _make_private(path)
        if why is not None:
            note_once(
                f"the cache folder {path} is not used: {why}. Kernels are compiled anew in each process; {_WAY_OUT}"
            )
            return private_dir(sub)
    return root / sub if sub else root


def _root() -> Path:
    if own := os.environ.get("QC_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "qcompiler"
    return Path("~/.cache/qcompiler").expanduser()


def _make_private(path: Path) -> str | None:
    """Why the folder cannot be used; None if it can be, perhaps for reading only."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            return "it is no folder"
        if (why := _untrusted(status)) is not None:
            return why
        if stat.S_IMODE(status.st_mode) & 0o077:
            with contextlib.suppress(OSError):  # owned by root, or read-only: its mode stays as it is
                path.chmod(0o700)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _untrusted(status: os.stat_result) -> str | None:
    """Why code from a folder or file with this status must not run."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


# --- files -----------------------------------------------------------------------------------------------------------


def read_own(path: Path) -> bytes | None:
    """The bytes of a file of the cache; None if it is missing, cannot be read, or is not this user's alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            if (why := _untrusted(status)) is not None:
                note_once(f"{path} is not used: {why}")
                return None
            return file.read()
    except OSError:  # missing, or unreadable: it is made anew
        return None


def keep(path: Path, data: bytes) -> bool:
    """Writes a file of the cache; False if that is not possible (full, read-only), which is reported once."""
    try:
        write_private(path, data)
    except OSError as error:
        note_once(
            f"{path.parent} cannot be written ({error.strerror or error}): files that are missing there are made anew"
        )
        return False
    return True


# --- a folder of this process ----------------------------------------------------------------------------------------


def private_dir(sub: str = "") -> Path:
    """A folder that only this process uses, and one inside it; removed when the process ends.

    Folders left by killed processes are removed first.  RuntimeFailure if none can be made.
    """
    folder, _ = _private(os.getpid())
    path = folder / sub if sub else folder
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def has_private_dir() -> bool:
    """Whether this process has made a folder of its own."""
    return os.getpid() in _private_of


def _private(process: int) -> tuple[Path, LockedPath]:
    if process in _private_of:
        return _private_of[process]
    parent = Path(tempfile.gettempdir())
    sweep(parent, "qcompiler")
    try:
        folder = Path(tempfile.mkdtemp(prefix=".qcompiler.", suffix=SUFFIX, dir=parent))
        lock = held(folder)
    except OSError as error:
        raise RuntimeFailure(
            f"neither the cache nor {parent} can be written to ({error.strerror}); kernels need a folder to be "
            f"compiled in: {_WAY_OUT}, or TMPDIR"
        ) from error
    atexit.register(_remove, folder, process)
    _private_of[process] = folder, lock
    return folder, lock


_private_of: dict[int, tuple[Path, LockedPath]] = {}


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
