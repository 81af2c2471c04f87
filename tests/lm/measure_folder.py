"""A process of its own that compiles language models of folders and reports its anonymous memory, as JSON.

    measure_folder.py SMALL LARGE QUANT

Growth is RssAnon of /proc/self/status (no pages of files), sampled every 2 ms, from before LARGE is opened to after it
was compiled and saved; SMALL is a folder of the same kind, compiled and run before.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from anonymous_memory import Peak, anonymous

import qcompiler as qc


def compiled(path: Path, quant: str) -> qc.CausalLM:
    lm = qc.compile_causal_lm(path, quant, max_seq_len=32, chunk=8)
    lm.save(path.parent / "saved.qca")
    return lm


def main(small: Path, large: Path, quant: str) -> None:
    compiled(small, quant).generate([5, 6, 7], max_new_tokens=4)
    gc.collect()
    before, peak = anonymous(), Peak()
    peak.start()
    lm = compiled(large, quant)
    growth = peak.stop() - before
    assert lm.program is not None
    rows = list(lm.program.ledger)
    print(json.dumps({
        "growth": growth,
        "artifact": (large.parent / "saved.qca").stat().st_size,
        "packed": sum(row.bytes_after for row in rows),
        "float": sum(4 * row.elements for row in rows),
        "largest": max(4 * row.elements for row in rows),
        "shard": max(file.stat().st_size for file in large.glob("*.safetensors")),
        "shards": len(list(large.glob("*.safetensors"))),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
