"""Files and folders that are written atomically; the temporaries of killed processes are removed.

    with replacing(path) as file:
        file.write(data)                       # a temporary beside `path`; it is on the disk before it gets the name

A temporary is called ``.<name>.<16 hexadecimal digits>.qctmp``.  The process that makes it holds a lock (flock) on it,
which the system releases when that process ends in any way.  So an unlocked temporary may be removed, and every later
write of the same name does so.  A mapping of the old file under the name stays valid: the name moves to another inode,
and no file is ever written in place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from qcompiler.errors import FileWriteError
from qcompiler.runtime.interrupts import uninterrupted

SUFFIX = ".qctmp"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def replacing(path: str | Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A new file, open for writing, that takes the place of `path` when the block ends; after an error there is none.

    Once this has returned, the new file also survives a loss of power.  Its mode is 0600 with `private`, else what the
    process's umask gives.  FileWriteError (an OSError) names the path and the failure; the old file is then unchanged.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        with _as_write_errors(path):
            sweep(path.parent, path.name)
            with _new_file(path, 0o600 if private else 0o666) as file:
                temporary = Path(file.name)
                yield file
                file.flush()
                os.fsync(file.fileno())  # before the rename: after a loss of power, the old file or the new one
                temporary.replace(path)
                sync(path.parent)
    except BaseException:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(path: str | Path, *, over: bool = False) -> Iterator[Path]:
    """A new folder that gets the name `path` when the block ends.

    `path` must not exist or be an empty folder, unless `over` allows to replace the folder there.  The old folder is
    renamed until the new one has its place, and comes back if that fails.  The contents are on the disk before the
    folder gets the name.  FileWriteError as in `replacing`.
    """
    path = Path(path)
    work: Path | None = None
    try:
        with _as_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            sweep(path.parent, path.name)
            work = path.parent / _temporary_name(path.name)
            work.mkdir(0o777)
            with held(work):
                yield work
                for each in [*work.rglob("*"), work]:
                    sync(each)
                _take_place(work, path, over)
                sync(path.parent)
    except BaseException:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _take_place(work: Path, path: Path, over: bool) -> None:
    if not path.exists():
        work.rename(path)
    elif not over or not any(path.iterdir()):
        path.rmdir()  # raises if it is not empty
        work.rename(path)
    else:
        old = path.with_name(f".{path.name}.before-{os.getpid()}")
        path.rename(old)
        try:
            work.rename(path)
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old)


def write_private(path: Path, data: bytes) -> None:
    """`data` as a file of mode 0600: readers see the old content or the new, never a part."""
    with replacing(path, private=True) as file:
        file.write(data)


class LockedPath:
    """An open file or folder with a lock on it, which ends when this is closed or dropped, or with the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> LockedPath:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def held(path: Path) -> LockedPath:
    """Locks a file or folder. BlockingIOError if another process has it.

    On a file system without locks the result is open and holds nothing; `sweep` finds nothing to remove there.
    """
    handle = LockedPath(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return handle


def locked(path: Path) -> BinaryIO:
    """Waits for the lock on a file, which is made if needed, and holds it until the result is closed; for ``with``.

    The result is a file object, which ``with`` closes in C: an interrupt cannot leave the lock held.
    """
    handle = _opened(path, "ab", 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except BaseException as error:
        if not (isinstance(error, OSError) and error.errno in _NO_LOCKS):
            handle.close()
            raise
    return handle


def sweep(folder: Path, name: str) -> None:
    """Removes this user's temporaries for `name` (for all names, if it is empty) that no process holds any more."""
    with uninterrupted, contextlib.suppress(OSError):  # nothing can be removed in a folder that cannot be listed
        for entry in os.scandir(folder):
            if entry.name.startswith(_stem(name) if name else ".") and entry.name.endswith(SUFFIX):
                _sweep_one(Path(entry.path))


def sync(path: Path) -> None:
    """Writes a file's bytes to the disk; for a folder, the names of its files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _sweep_one(path: Path) -> None:
    with contextlib.suppress(OSError), LockedPath(path) as handle:  # locked by its maker, or already removed
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle.fileno()).st_uid != os.geteuid():
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _new_file(path: Path, mode: int) -> BinaryIO:
    """A locked temporary for `path`. If a sweep removes it before it is locked, it is made again."""
    while True:
        temporary = path.parent / _temporary_name(path.name)
        file = _opened(temporary, "xb", mode)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _opened(path: Path, how: Literal["ab", "xb"], mode: int) -> BinaryIO:
    return open(path, how, opener=lambda name, flags: os.open(name, flags, mode))


def _temporary_name(name: str) -> str:
    return f"{_stem(name)}{secrets.token_hex(8)}{SUFFIX}"


def _stem(name: str) -> str:
    """The beginning of the names of temporaries. Names have at most 255 bytes, and a temporary's must fit, too."""
    return f".{name}." if len(name.encode()) <= 200 else f".{name[:50]}."


@contextlib.contextmanager
def _as_write_errors(path: Path) -> Iterator[None]:
    """OSErrors of writing `path` become FileWriteErrors; those of other files, which the block reads, stay."""
    try:
        yield
    except FileWriteError:
        raise
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else str(error.filename or "")
        if name and SUFFIX not in name and Path(name) not in (path, path.parent):
            raise
        raise FileWriteError.of(str(path), error) from error
