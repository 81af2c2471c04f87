"""A process with the work of one project, which takes turns with a benchmark: JSON in, JSON out, line by line.

    python process.py products onnxruntime --threads 2              for matmul_cpu.py
    python process.py models onnxruntime --threads 2                for model_cpu.py

    (at the start)                                                  {"version": …, "engines": {name: kind}}
    {"do": "make", "engine": …, "m", "n", "k", "bytes", "most"}     {"bytes": of a weight, "copies", "error"}
    {"do": "run", "engine": …, "seconds": 0.01}                     {"seconds": of a product}
    {"do": "load", "engine": …, "program", "inputs", "result"}      {}     of a model; `result` is written
    {"do": "call", "engine": …}                                     {"seconds": of a call, after one that is not timed}
    {"do": "drop"}                                                  {}     forgets what it made
    {"do": "cpu"}                                                   {"seconds": of processor time of all its threads}

An answer may be {"failed": reason} instead.  `kind` names the arithmetic (qcompiler/runtime/limits.py).

Products: engines multiply the same rows by several weights, one after another: as many as take `bytes` together, so
that none is in the caches when its turn comes, as in a model.  The weights are those of shared.Case.  `error` is that
of the results, relative to the product in fp32: it shows that an engine computes what it should.

Models: `program` is a file of torch.export, with the model's weights and sizes; `inputs` an .npz file with its arrays
in the order of its parameters; `result` the .npy file for the first tensor that it gives.

This folder needs no more than the project's own package and NumPy, for models torch as well.  A project's file,
with_<project>.py or models_<project>.py, has VERSION, ENGINES and `use_threads`.  What libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import shared

WORST = 0.35
"""The largest relative error of a product: int2 has 0.3, and a wrong one is above 1."""


class Work:
    """What the commands do: its methods, and those of the kind of work."""

    def cpu(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}


class Products(Work):
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


class Models(Work):
    def __init__(self, engines: dict[str, shared.ModelEngine], threads: int) -> None:
        self.engines, self.threads = engines, threads
        self.drop()

    def drop(self) -> dict[str, Any]:
        self.made: dict[str, Callable[[], shared.Array]] = {}
        return {}

    def load(self, engine: str, program: str, inputs: str, result: str) -> dict[str, Any]:
        with np.load(inputs) as arrays:
            call = self.engines[engine].make(Path(program), [arrays[name] for name in arrays.files], self.threads)
        np.save(result, np.asarray(call(), np.float32))
        self.made[engine] = call
        return {}

    def call(self, engine: str) -> dict[str, Any]:
        call = self.made[engine]
        call()
        begin = time.perf_counter()
        call()
        return {"seconds": time.perf_counter() - begin}


WORKS: dict[str, tuple[str, Callable[[Any, int], Work]]] = {
    "products": ("with", Products),
    "models": ("models", Models),
}
"""(how the projects' files begin, what answers)."""


def serve(work: Work, answers: Any) -> None:
    for line in sys.stdin:
        given = json.loads(line)
        try:
            found = getattr(work, given.pop("do"))(**given)
        except Exception as error:  # what a library cannot do is part of the table
            found = {"failed": shared.reason(error)}
        print(json.dumps(found), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("project")
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    begins, work = WORKS[chosen.work]
    module = importlib.import_module(f"{begins}_{chosen.project}")
    module.use_threads(chosen.threads)
    kinds = {name: engine.kind for name, engine in module.ENGINES.items()}
    print(json.dumps({"version": module.VERSION, "engines": kinds, "numpy": np.__version__}), file=answers, flush=True)
    serve(work(module.ENGINES, chosen.threads), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
