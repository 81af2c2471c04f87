"""Other people's models: whether each compiles, its error against eager torch, and its time beside torch's.

    python benchmarks/foreign_models.py --results build/foreign.jsonl [--path DIR] [--only transformers/Swin]
    python benchmarks/foreign_models.py --results build/foreign.jsonl --page docs/foreign-models.md
    python benchmarks/foreign_models.py --list

This script installs no packages: a model whose package is missing is listed with that as its error; `--path` names a
folder with packages.  Each model runs in a process of its own, which is forked after the imports and ended after
`--limit` seconds.  Each model appends a line to the results; models with a line are not run again.
Error: the largest difference of any result, divided by the largest magnitude of that result.  Time: the median
CPU time of rounds that alternate between torch (eager, no_grad) and the program, each with one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from foreign.page import page
from foreign.zoo import Foreign, Made, every
from torch.utils import _pytree as pytree

ROUNDS, LEAST_SECONDS = 15, 0.3
"""Rounds of a timing; the calls per round are chosen so that a round takes at least this long."""


def stand_in_for_torchvision() -> Any:
    """Declares the operators that torchvision's wheel has only for CUDA; its models need nothing more of them."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def preload() -> None:
    """Imports the packages that all models share, once. A missing package is reported as an error of its models."""
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    for name in ("qcompiler.api", "transformers.modeling_utils", "torchvision", "timm"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def results_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a result: dicts and dataclasses in order, None left out."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def difference(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; 0 or 1 for integers, infinite for another shape."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.is_floating_point():
        return float(not torch.equal(wanted, found))
    a, b = wanted.double(), found.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a[a.isfinite()], b[b.isfinite()]
    largest = float(a.abs().max()) if a.numel() else 0.0
    return float((a - b).abs().max()) / (largest or 1.0) if a.numel() else 0.0


def timed(made: Made, program: Any) -> dict[str, float]:
    """Median CPU seconds of a call of each side, and the median of the rounds' ratios.

    This is CPU time of the one thread: on a shared machine, wall time would favour short calls, which fit into one
    slice of the scheduler.
    """
    kwargs = made.kwargs or {}
    runners = [lambda: made.module(*made.args, **kwargs), lambda: program(*made.args, **kwargs)]
    times: list[list[float]] = [[], []]
    for runner in runners:
        runner()
    start = time.process_time()
    runners[0]()
    repeats = max(1, min(50, int(LEAST_SECONDS / ROUNDS / max(time.process_time() - start, 1e-6))))
    for _ in range(ROUNDS):
        for runner, taken in zip(runners, times, strict=True):
            start = time.process_time()
            for _ in range(repeats):
                runner()
            taken.append((time.process_time() - start) / repeats)
    ratio = median(ours / theirs for theirs, ours in zip(*times, strict=True))
    return {"torch_s": median(times[0]), "ours_s": median(times[1]), "ratio": ratio}


def examine(foreign: Foreign) -> dict[str, Any]:
    """The line of one model: its outcome, in this process."""
    import qcompiler as qc

    stage, line = "build", dict[str, Any]()
    try:
        torch.set_num_threads(1)
        made = foreign.make()
        mine, kwargs = copy.deepcopy(made.module), made.kwargs or {}  # a call may change the model
        line["parameters"] = sum(p.numel() for p in made.module.parameters())
        stage = "eager"
        with torch.no_grad():
            wanted = results_of(made.module(*made.args, **kwargs))
            stage, start = "compile", time.perf_counter()
            program = qc.qcompile(mine, made.args, made.kwargs)
            line["compile_s"] = time.perf_counter() - start
            stage = "run"
            found = results_of(program(*made.args, **kwargs))
            if len(found) != len(wanted):
                raise AssertionError(f"{len(found)} results, not {len(wanted)}")
            line["error"] = max(map(difference, wanted, found), default=0.0)
            stage = "time"
            line |= timed(made, program)
    except BaseException as error:  # any exception of a foreign model is its result
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        return {**line, "stage": stage, "failure": text[:300]}
    return {**line, "stage": "done"}


def in_a_process(foreign: Foreign, limit: float) -> dict[str, Any]:
    """`examine` in a forked process, ended after `limit` seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.setpgid(0, 0)
        line = examine(foreign)
        with os.fdopen(write, "w") as out:
            json.dump(line, out)
        os._exit(0)
    os.close(write)
    os.set_blocking(read, False)
    text, deadline, status = b"", time.monotonic() + limit, None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return {"stage": "compile", "failure": f"not done within {limit:.0f} s"}
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read() or b""
    if not text:
        return {"stage": "compile", "failure": f"the process ended with status {status}"}
    found: dict[str, Any] = json.loads(text)
    return found


def main() -> None:
    os.environ.setdefault("QC_NUM_THREADS", "1")
    os.environ.setdefault("QC_QUIET", "1")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("build/foreign.jsonl"))
    parser.add_argument("--path", type=Path, help="a folder with more packages (pip install --target)")
    parser.add_argument("--only", nargs="*", default=[], help="models whose package/name contains one of these")
    parser.add_argument("--again", action="store_true", help="run models again that failed")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a model")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no model is begun")
    parser.add_argument("--page", type=Path, help="write the page from the results and end")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.page is not None:
        options.page.write_text(page(lines))
        return
    if options.path is not None:
        sys.path.append(str(options.path))
    library = stand_in_for_torchvision()
    preload()
    warnings.simplefilter("ignore")
    models = [each for each in every() if not options.only or any(part in each.key for part in options.only)]
    known = {line["key"] for line in lines if not (options.again and "failure" in line)}
    if options.list:
        print("\n".join(each.key for each in models))
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    for each in models:
        if each.key in known or time.monotonic() > end:
            continue
        line = {"key": each.key, "package": each.package, "name": each.name, "real": each.real}
        line |= in_a_process(each, options.limit)
        with options.results.open("a") as out:
            out.write(json.dumps(line) + "\n")
        shown = line.get("failure") or f"error {line['error']:.1e}, {line['ratio']:.2f} x torch"
        print(f"{each.key}: {shown}", flush=True)
    del library


if __name__ == "__main__":
    main()
