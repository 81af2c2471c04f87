"""The user's own cache: compiled kernels and the record of checked files. Private, and safe between processes.

The directory is `$QC_CACHE_DIR`, else `$XDG_CACHE_HOME/qcompiler`, else `~/.cache/qcompiler`.  Code from it is
executed, so it must belong to the user and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qcompiler.errors import RuntimeFailure


def cache_dir(sub: str = "") -> Path:
    """The cache directory, or one inside it; made with mode 0700. RuntimeFailure if it is not the user's own."""
    root = _root()
    _make_private(root)
    if not sub:
        return root
    path = root / sub
    _make_private(path)
    return path


def _root() -> Path:
    if own := os.environ.get("QC_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "qcompiler"
    return Path("~/.cache/qcompiler").expanduser()


def _make_private(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.stat()
    except OSError as error:
        raise RuntimeFailure(
            f"cannot use the cache directory {path}: {error.strerror}; set QC_CACHE_DIR to a directory of your own"
        ) from error
    if status.st_uid != os.geteuid():
        raise RuntimeFailure(
            f"the cache directory {path} belongs to another user (uid {status.st_uid}); "
            "set QC_CACHE_DIR to a directory of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file so that readers see the old content or the new, never a part."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(name, mode)  # noqa: PTH101  (mkstemp gives a string)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `<path>.lock` between processes (released by the system if the holder dies)."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
