"""A process of its own that compiles a file and reports how much anonymous memory that took, as JSON.

    measure.py PATH      a .gguf file or a folder of from_checkpoint

Growth is RssAnon of /proc/self/status (no pages of files), sampled every 2 ms, from before the file is opened to after
a run and a save; a small file of the same kind was compiled and run before.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from anonymous_memory import Peak, anonymous

import qcompiler as qc

DIMS = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 32)}}


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
