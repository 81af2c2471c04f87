"""Why a W8A8 program and its oracle lie apart: codes of activations that round the other way.

    python benchmarks/code_flips.py [--batches 4] [--recipe int8]

all-MiniLM-L6-v2 with weights and activations in int8, compiled with each quantisation of rows as a launch of its own.
The program runs step by step, and the codes that it makes are read from its memory.  Its oracle, the same graph in
eager torch, runs twice over the same sentences: with its own codes, and with the program's codes in the place of its
own ("forced").  The table has, for each quantisation in the order of the graph, how many codes differ from the
program's in both runs.  Below it stand the distances of the embeddings.  If flipped codes are all that separates the
two, the forced distance is that of fp32 roundings.

The program's attention rounds to bf16, as W8A8 recipes do by default, and its oracle's does not: codes of attention's
results then differ in the forced run, too.  With `--compute exact` the program's attention computes in fp32.

A code flips if x / scale lies next to a half.  `from a half` is the largest distance from it among the codes that
flip in the forced run, where x differs by fp32 roundings only.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import minilm

import qcompiler as qc
from qcompiler.formats.int8_rows import padded, row_bytes
from qcompiler.plan.dims import dim
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.plan import Launch
from qcompiler.runtime.executor import Addressed, PlanExecutor

QUANTIZE = "qc.quantize_rows.default"
Rows = list[torch.Tensor]


@contextmanager
def recorded(program: qc.Program) -> Iterator[Rows]:
    """While this is entered, the rows of int8 that a stepwise call makes are appended, (rows, row_bytes(K)) each."""
    found: Rows = []
    specs = {spec.name: spec for spec in program.plan.kernels}
    run = PlanExecutor.run

    def watched(self: PlanExecutor, context: Any, arenas: Any, binding: Any) -> None:
        places = {each.number: each for each in self.addressed(binding, arenas) if isinstance(each, Addressed)}
        for step in self.prepare(binding).steps:
            step.issue(context, arenas)
            launch = self._entry.steps[step.number]
            spec = specs.get(launch.kernel) if isinstance(launch, Launch) else None
            if spec is not None and isinstance(spec.body, QuantizeRowsKernel):
                place = places[step.number]
                rows = dim(spec.body.rows).evaluate(dict(zip(spec.symbols, place.values, strict=True)))
                width = row_bytes(int(spec.body.cols))
                data = ctypes.string_at(place.operands[-1], rows * width)
                found.append(torch.frombuffer(bytearray(data), dtype=torch.int8).reshape(rows, width))

    PlanExecutor.run = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PlanExecutor.run = run  # type: ignore[method-assign]


@dataclass
class Layer:
    """A quantisation of rows: its codes, those that differ with the oracle's own inputs and with forced ones, and the
    largest distance of a forced one from a half."""

    cols: int
    codes: int = 0
    own: int = 0
    forced: int = 0
    from_half: float = 0.0


@dataclass
class Oracle(fx.Interpreter):
    """The oracle's graph beside the program's rows; with `force` it goes on with the program's."""

    module: fx.GraphModule
    rows: Rows
    layers: list[Layer]
    force: bool
    at: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        fx.Interpreter.__init__(self, self.module)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = super().call_function(target, args, kwargs)
        if str(target) != QUANTIZE:
            return made
        x, theirs = args[0], self.rows[self.at].reshape(made.shape)
        cols = x.shape[-1]
        if self.at == len(self.layers):
            self.layers.append(Layer(cols))
        layer = self.layers[self.at]
        self.at += 1
        differ = made[..., :cols] != theirs[..., :cols]
        if self.force:
            layer.codes += differ.numel()
            layer.forced += int(differ.sum())
            scale = theirs[..., padded(cols) : padded(cols) + 4].contiguous().view(torch.float32)
            exact = (x.double() / scale.double())[differ]
            if exact.numel():
                layer.from_half = max(layer.from_half, float((exact.frac().abs() - 0.5).abs().max()))
            return theirs
        layer.own += int(differ.sum())
        return made


def measure(
    weights: str, compute: str | None, batches: Sequence[dict[str, torch.Tensor]]
) -> tuple[list[Layer], list[np.ndarray]]:
    """The layers, and the embeddings of the program, of its oracle, and of the oracle with the program's codes."""
    quant = qc.QuantConfig(weights, activations="int8", separate=("*",), compute=compute)
    program = minilm.compile_encoder(minilm.load_encoder(), quant, None)
    session, module = program.run.session(stepwise=True), program.oracle
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    layers: list[Layer] = []
    found: list[list[np.ndarray]] = [[], [], []]
    for batch in batches:
        with recorded(program) as rows, torch.no_grad():
            found[0].append(np.asarray(session(**batch), np.float64))
        for place, force in ((1, False), (2, True)):
            with torch.no_grad():
                given = [batch[name] for name in names]
                out = Oracle(module, rows, layers, force).run(*given)
            found[place].append(np.asarray(out[0] if isinstance(out, tuple) else out, np.float64))
    return layers, [np.concatenate(each) for each in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="int8", help="the format of the weights")
    parser.add_argument("--compute", choices=("exact",), help="keeps attention in fp32")
    parser.add_argument("--batches", type=int, default=4, help="of 16 sentences")
    options = parser.parse_args()
    layers, (program, oracle, forced) = measure(
        options.recipe, options.compute, minilm.load_batches()[: options.batches]
    )
    print(f"{'quantisation':>12} {'K':>6} {'codes':>10} {'differ':>9} {'forced':>7} {'from a half':>12}")
    for number, each in enumerate(layers):
        print(f"{number:>12} {each.cols:>6} {each.codes:>10} {each.own:>9} {each.forced:>7} {each.from_half:>12.1e}")
    for name, other in (("own codes", oracle), ("forced codes", forced)):
        apart = 1 - minilm.cosines(program, other).min()
        print(f"{name}: 1 - cosine at most {apart:.1e}, an element of an embedding at most "
              f"{np.abs(program - other).max():.1e} apart")  # fmt: skip


if __name__ == "__main__":
    main()
