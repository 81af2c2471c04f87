"""A process with the products of one project, which takes turns with matmul_cpu.py: JSON in, JSON out, line by line.

    python process.py onnxruntime --threads 2

    (at the start)                                                  {"version": …, "engines": {name: kind}}
    {"do": "make", "engine": …, "m", "n", "k", "bytes", "most"}     {"bytes": of a weight, "copies", "error"}
    {"do": "run", "engine": …, "seconds": 0.01}                     {"seconds": of a product}
    {"do": "drop"}                                                  {}     forgets what it made
    {"do": "cpu"}                                                   {"seconds": of processor time of all its threads}

An answer may be {"failed": reason} instead.  Engines multiply the same rows by several weights, one after another: as
many as take `bytes` together, so that none is in the caches when its turn comes, as in a model.  The weights are those
of shared.Case.  `error` is that of the results, relative to the product in fp32: it shows that an engine computes what
it should.  `kind` names the arithmetic (qcompiler/runtime/limits.py).

This folder needs no more than the project's own package and NumPy.  A project's file, with_<project>.py, has VERSION
and ENGINES.  What libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import shared

WORST = 0.35
"""The largest relative error of a product: int2 has 0.3, and a wrong one is above 1."""


class Turns:
    """What the commands do."""

    def __init__(self, engines: dict[str, shared.Engine], threads: int) -> None:
        self.engines, self.threads = engines, threads
        self.drop()

    def drop(self) -> dict[str, Any]:
        self.made: dict[str, tuple[Callable[[], Any], int]] = {}
        self.weights: tuple[tuple[int, ...], shared.Case] | None = None
        return {}

    def make(self, engine: str, m: int, n: int, k: int, bytes: int, most: int) -> dict[str, Any]:
        chosen = self.engines[engine]
        nbytes = int(n * k * chosen.bits / 8)
        copies = max(2, min(most, -(-bytes // nbytes)))
        if self.weights is None or self.weights[0] != (m, n, k):
            self.weights = (m, n, k), shared.Case(m, n, k, self.threads)
        case = self.weights[1].with_copies(copies)
        run, read = chosen.make(case)
        results = run()
        error = max(case.error(read(results[copy]), copy) for copy in (0, copies - 1))
        if not error < WORST:
            raise shared.UnableError(f"its results have an error of {error:.2f}")
        self.made[engine] = run, copies
        return {"bytes": nbytes, "copies": copies, "error": error}

    def run(self, engine: str, seconds: float) -> dict[str, Any]:
        call, copies = self.made[engine]
        return {"seconds": shared.per_product(call, copies, seconds)}

    def cpu(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}


def serve(engines: dict[str, shared.Engine], threads: int, answers: Any) -> None:
    turns = Turns(engines, threads)
    for line in sys.stdin:
        given = json.loads(line)
        try:
            found = getattr(turns, given.pop("do"))(**given)
        except Exception as error:  # what a library cannot do is part of the table
            found = {"failed": shared.reason(error)}
        print(json.dumps(found), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("project")
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    module = importlib.import_module(f"with_{chosen.project}")
    module.use_threads(chosen.threads)
    kinds = {name: engine.kind for name, engine in module.ENGINES.items()}
    print(json.dumps({"version": module.VERSION, "engines": kinds, "numpy": np.__version__}), file=answers, flush=True)
    serve(module.ENGINES, chosen.threads, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
