"""What pages of 2 MiB of a program's file are worth: two copies of a file, in huge pages and in pages of 4 KiB.

    python benchmarks/huge_pages.py [--rounds 15] [--folder DIR]

A program of eight linears of 4096 x 4096 is saved and copied, and both files leave the page cache.  One is loaded as
`qc.load` does.  The other is first read page by page without reading ahead, so that each of its pages lies alone in
memory, and huge pages are refused for its mapping (MADV_NOHUGEPAGE).  Both compute one row in turns, on one thread;
then the bytes of both mappings are read in turns.  The table has the medians of the rounds' ratios of processor time,
pages of 4 KiB over huge ones, and how much of each mapping the system says lies in huge pages (FilePmdMapped of
/proc/self/smaps).  Where the file system has none for files, that is nothing, and the ratios are about 1.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import qcompiler as qc
from qcompiler.runtime import image
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.memory import address_of

WIDTH, LINEARS, CALLS = 4096, 8, 5
RECIPES = {"exact": "exact", "bf16": "bf16", "int8 rows": "int8"}
"""The names of docs/performance.md, and `QuantConfig.compute`."""


def saved(compute: str, path: Path) -> None:
    """A file of eight linears in q4_K."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS))).eval()
        recipe = qc.QuantConfig("float", linear="q4_K", compute=compute)
        qc.qcompile(model, (torch.randn(1, WIDTH),), quant=recipe).save(path, stages=False)


def forgotten(path: Path) -> None:
    """The file is on the disk, and no longer in the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def in_small_pages(path: Path) -> Iterator[None]:
    """Reads a file's pages one by one; files that are loaded inside are mapped in pages of 4 KiB."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, path.stat().st_size, mmap.PAGESIZE):
            os.pread(file.fileno(), mmap.PAGESIZE, at)
    asks = image.ask_for_huge_pages
    image.ask_for_huge_pages = lambda mapping: mapping.madvise(mmap.MADV_NOHUGEPAGE)
    try:
        yield
    finally:
        image.ask_for_huge_pages = asks


def huge_bytes(program: LoadedProgram) -> int:
    """How many bytes of the mapping of the weights lie in huge pages."""
    at, inside, found = address_of(program.image.weights), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        last = rest.partition(" ")[0]
        if rest and all(each and set(each) <= set("0123456789abcdef") for each in (first, last)):
            inside = int(first, 16) <= at < int(last, 16)
        elif inside and line.startswith("FilePmdMapped:"):
            found += 1024 * int(line.split()[1])
    return found


def in_turns(calls: tuple[Callable[[], object], Callable[[], object]], rounds: int) -> tuple[float, float]:
    """(the second's processor time over the first's, the first's seconds for a call): medians over the rounds, behind
    one that warms up. Whoever begins changes from round to round."""
    times = []
    for number in range(rounds + 1):
        own = {}
        for which in (0, 1) if number % 2 else (1, 0):
            begin = time.process_time()
            for _ in range(CALLS):
                calls[which]()
            own[which] = time.process_time() - begin
        times.append((own[0] / CALLS, own[1] / CALLS))
    del times[0]
    return statistics.median(b / a for a, b in times), statistics.median(a for a, _ in times)


def measured(name: str, path: Path, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    copy = path.with_suffix(".copy")
    saved(RECIPES[name], path)
    shutil.copyfile(path, copy)
    for each in (path, copy):
        forgotten(each)
    huge = qc.load(path, num_threads=1)
    with in_small_pages(copy):
        small = qc.load(copy, num_threads=1)
    x = torch.randn(1, WIDTH).numpy()
    same = np.array_equal(huge(x), small(x))  # and every page is touched
    assert same, "two copies of one file gave different results"
    ratio, seconds = in_turns((lambda: huge(x), lambda: small(x)), rounds)
    words = [each.image.weights[: each.image.weights.nbytes // 8 * 8].view(np.uint64) for each in (huge, small)]
    reading, _ = in_turns((words[0].max, words[1].max), rounds)
    pages = [huge_bytes(each) / each.image.weights.nbytes for each in (huge, small)]
    return (name, *(f"{share:.0%}" for share in pages), f"{1e6 * seconds:.0f} µs", f"{ratio:.2f}", f"{reading:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where the file lies; its file system decides (default: $TMPDIR)")
    options = parser.parse_args()
    columns = ("q4_K, one row", "huge", "huge where refused", "a call", "4 KiB / huge", "reading, 4 KiB / huge")
    table = Table(*columns)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in RECIPES:
            table.add_row(*measured(name, Path(folder) / f"{name}.qca", options.rounds))
    Console().print(table)


if __name__ == "__main__":
    main()
