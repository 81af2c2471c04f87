"""Programs of functions of JAX beside jax.jit on the CPU, in one interleaved run.

    python benchmarks/jax_cpu.py [--rounds 31] [--threads 2] [--formats float int8 nf4] [--json FILE] [--write PAGE]

MiniLM (examples/jax_minilm.py, its true weights) with 1 x 32 and 32 x 128 tokens, and a block of Llama (width 2048, 32
heads, 4 heads of keys, FFN 5632) with batches of 1 and 32 of 1 token and of 32. For each: the median of jax.jit, and
that of each of our programs as a share of it (medians of the ratios round by round). `float` has no recipe. `--write`
puts the table between the markers of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from page_marks import between

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("<!-- jax figures -->", "<!-- end of jax figures -->")
WIDTH, HEADS, KEY_HEADS, FFN = 2048, 32, 4, 5632
DEPTH = WIDTH // HEADS


@dataclass(frozen=True)
class Job:
    """A function of (params, *inputs)."""

    name: str
    function: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """Milliseconds; `ratio` is our time by jax.jit's; `difference` that of the results, relative to the largest."""

    name: str
    format: str
    jit: float
    ours: float
    ratio: float
    difference: float


def with_threads(count: int) -> None:
    """Both run on this many processors. XLA makes its threads when JAX starts, one for each that it sees."""
    os.environ["QC_NUM_THREADS"] = str(count)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def block_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, KEY_HEADS * DEPTH), "v": (WIDTH, KEY_HEADS * DEPTH), "o": (WIDTH, WIDTH),
        "gate": (WIDTH, FFN), "up": (WIDTH, FFN), "down": (FFN, WIDTH), "first": (WIDTH,), "second": (WIDTH,),
    }  # fmt: skip
    scale = {name: 1 / np.sqrt(shape[0]) if len(shape) == 2 else 1.0 for name, shape in shapes.items()}
    return {name: (rng.standard_normal(shape) * scale[name]).astype(np.float32) for name, shape in shapes.items()}


def llama_block(p: dict[str, Any], x: Any) -> Any:
    """(batch, tokens, WIDTH) to the same; attention is causal over the tokens given."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight

    def rotated(x: Any) -> Any:
        angles = jnp.arange(x.shape[1])[:, None] * (1e4 ** (-jnp.arange(0, DEPTH, 2) / DEPTH))
        cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    h = norm(x, p["first"])
    q, k, v = ((h @ p[n]).reshape(*x.shape[:2], -1, DEPTH) for n in "qkv")
    attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + attended.reshape(x.shape) @ p["o"]
    h = norm(x, p["second"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def jobs() -> list[Job]:
    import importlib.util

    spec = importlib.util.spec_from_file_location("example_jax_minilm", ROOT / "examples" / "jax_minilm.py")
    assert spec is not None and spec.loader is not None
    minilm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minilm)
    rng, params, found = np.random.default_rng(0), minilm.load_params(), []
    for batch, length in ((1, 32), (32, 128)):
        ids = rng.integers(1000, 30000, (batch, length)).astype(np.int32)
        found.append(Job(f"MiniLM {batch} x {length}", minilm.encode, params, (ids, np.ones_like(ids))))
    weights = block_params()
    for batch, length in ((1, 1), (1, 32), (32, 1), (32, 32)):
        x = rng.standard_normal((batch, length, WIDTH)).astype(np.float32)
        found.append(Job(f"Llama block {batch} x {length}", llama_block, weights, (x,)))
    return found


def measured(job: Job, formats: Sequence[str], rounds: int) -> list[Row]:
    """jax.jit and a program for each format, in turn in every round."""
    import jax

    import qcompiler as qc

    jitted = jax.jit(job.function)
    params = jax.device_put(job.params)
    programs = {
        name: qc.qcompile(
            job.function, (job.params, *job.inputs),
            quant=None if name == "float" else qc.QuantConfig(name, promise_bits=None),
        )
        for name in formats
    }  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {"jit": lambda: np.asarray(jitted(params, *job.inputs))}
    calls |= {name: (lambda program=program: program(*job.inputs)) for name, program in programs.items()}
    reference = calls["jit"]()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if number >= 3:
                times[name].append((time.perf_counter() - began) * 1e3)
    rows = []
    for name in formats:
        ratio = median(ours / theirs for ours, theirs in zip(times[name], times["jit"], strict=True))
        difference = float(np.abs(np.asarray(calls[name]()) - reference).max() / np.abs(reference).max())
        rows.append(Row(job.name, name, median(times["jit"]), median(times[name]), ratio, difference))
    return rows


def table(rows: Sequence[Row], formats: Sequence[str]) -> str:
    lines = [
        f"| | jax.jit, ms | {' | '.join(f'`{name}`' for name in formats)} |",
        "|---|" + "---|" * (len(formats) + 1),
    ]
    for name in dict.fromkeys(row.name for row in rows):
        own = [row for row in rows if row.name == name]
        lines.append(f"| {name} | {own[0].jit:.2f} | {' | '.join(f'{row.ratio:.2f}' for row in own)} |")
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Replaces what stands between the markers of a page."""
    try:
        page.write_text(between(page.read_text(), *MARKS, text, str(page)))
    except ValueError as error:
        raise SystemExit(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=["float", "int8", "nf4"])
    parser.add_argument("--only", default="", help="jobs whose name has this text")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with_threads(options.threads)
    rows = []
    for job in jobs():
        if options.only in job.name:
            rows += measured(job, options.formats, options.rounds)
            print(table(rows[-len(options.formats) :], options.formats).splitlines()[-1], flush=True)
    text = table(rows, options.formats)
    print(text)
    if options.json is not None:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    if options.write is not None:
        write(options.write, text)


if __name__ == "__main__":
    main()
