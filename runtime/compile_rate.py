"""How long a compiler will take: it is one call that says nothing, so its last rate on this machine is the estimate.

The rate is in bytes of source per second.  It is kept in the cache for each compiler and its flags.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qcompiler.runtime.cache import keep
from qcompiler.runtime.code import read_record
from qcompiler.runtime.progress import expecting
from qcompiler.units import human_bytes

SLOWEST, FASTEST = 1.0, 1e12
"""Bytes per second. A rate beyond these is of a damaged record."""


@contextmanager
def compiling(what: str, source: str, folder: Path, compiler: Sequence[str]) -> Iterator[None]:
    """While it is entered, progress names `what` with the time left, if this compiler has compiled here before.

    `folder` is that of the compiled files, in the cache. If the work succeeds, its rate is kept beside that folder.
    """
    record = folder.parent / f"rate-{hashlib.sha256(json.dumps(list(compiler)).encode()).hexdigest()[:32]}.json"
    rate = _rate(record)
    began = time.monotonic()
    expected, said = (len(source) / rate, f"{human_bytes(int(rate))}/s") if rate is not None else (None, "")
    with expecting(what, expected, said):
        yield
    took = time.monotonic() - began
    if took > 0 and source:
        keep(record, json.dumps({"bytes_per_second": len(source) / took}).encode())


def _rate(record: Path) -> float | None:
    """The rate of the last time; None without a record, or with a damaged one."""
    rate = read_record(record).get("bytes_per_second")
    return rate if isinstance(rate, float) and SLOWEST <= rate <= FASTEST else None
