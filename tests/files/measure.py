"""A process of its own that compiles a file and reports how much anonymous memory that took, as JSON.

    measure.py PATH      a .gguf file or a folder of from_checkpoint

Growth is RssAnon of /proc/self/status (no pages of files), sampled every 2 ms, from before the file is opened to after
a run and a save; a small file of the same kind was compiled and run before.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch

import qcompiler as qc

DIMS = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 32)}}


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The largest RssAnon between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._running = 0, True

    def run(self) -> None:
        while self._running:
            self.peak = max(self.peak, anonymous())
            time.sleep(0.002)

    def stop(self) -> int:
        self._running = False
        self.join()
        return self.peak


def compiled(path: Path) -> qc.Program:
    checkpoint = qc.from_checkpoint(path) if path.is_dir() else qc.from_gguf(path)
    ids = torch.randint(3, 90, (2, 7))
    program = qc.qcompile(checkpoint, (), {"input_ids": ids}, dynamic_shapes=DIMS)
    program(input_ids=ids)
    program.save(path.parent / "saved.qca")
    return program


def main(small: Path, large: Path) -> None:
    compiled(small)
    gc.collect()
    before, peak = anonymous(), Peak()
    peak.start()
    program = compiled(large)
    rows = [row for row in program.ledger if row.reason.startswith("as stored")]
    elements = [row.elements for row in rows]
    print(json.dumps({
        "growth": peak.stop() - before,
        "packed": sum(row.bytes_after for row in rows),
        "float": 4 * sum(elements),
        "largest": 4 * max(elements),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
