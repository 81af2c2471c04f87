"""`QuantConfig(tune_scales=True)`: learns the scales of all quantised weights for the outputs of the whole model.

    float run   logits (or outputs) of the float graph, which are kept (judge.py)
    step        outputs with the codes as they are, and each scale times a factor, rounded as it is stored
                loss = KL(float || quantised) of the logits, or the squared error of the outputs
                Adam moves the factors; its rate falls to zero
    end         the scales of the last step, if inputs that no step has seen have a lower loss with them

Codes stay, so this comes after everything that chooses them, and the result is ordinary weights in the same formats.
Which fields of a format are scales follows from its declaration (calibrate/float_scales.py).

An input runs through the graph by autograd.  Where the decoded weights take more than `HELD` bytes, each block of the
graph (graph_blocks.py) runs a second time when its gradients are computed, so that the values of one block are alive.

With a working folder, what was learned is written there every few steps: after a kill, the next compile goes on behind
the last write, and ends in the same scales.

Sources: Chen et al., "EfficientQAT", ACL 2025 (arXiv 2407.11062), for step sizes that are trained end to end after
blocks; Kingma and Ba, "Adam", arXiv 1412.6980; Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv
1604.06174, for blocks that run twice.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from qcompiler.calibrate.chosen_codes import NO_INPUTS
from qcompiler.calibrate.float_scales import FloatScales, Term
from qcompiler.errors import CalibrationError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.calibrate import chained_digest
from qcompiler.frontends.quantise.graph_blocks import find_blocks
from qcompiler.frontends.quantise.graph_run import Env, GraphRun, Values, Watched
from qcompiler.frontends.quantise.judge import Judge, distance
from qcompiler.frontends.quantise.numbered_files import NumberedFiles
from qcompiler.runtime.progress import Counted, note

VERSION = 1
STEPS = 128
RATE = 0.05
"""Adam's rate for factors of scales, times the squared error of the matrix.  A factor moves by about the rate in each
step, whatever its gradient, and errors that cancel no longer do where that is much beside them: with the rate that
suits int2, 0.01, int4 became worse, and 0.001 was better than 0.0025."""
WARM = 5
"""Steps in which the rate rises: Adam's means begin at zero, and a first step is as long as the rate whatever the
gradient."""
DECAYS = (0.9, 0.99)
TINY = 1e-12
"""What Adam adds to the root: less than any gradient that counts."""
LEAST, MOST = 0.5, 1.5
"""Of a scale: the range of its factor."""
ROWS = 1024
"""A step takes inputs until their outputs have this many rows."""
ASIDE = 8
"""One of so many inputs is set aside: no step sees it, and it decides whether the scales are taken."""
FEW = 1
"""With fewer rows of outputs than this for each scale, a note says that the data is little."""
HELD = 1 << 30
"""Bytes of decoded weights from which on each block runs twice."""
COMMIT = 8
"""Steps between two writes of what was learned."""
SEED = 0


@dataclass(frozen=True)
class Tuned:
    """A weight whose scales are learned.

    `error` is that of its codes, |decoded - values| / |values|.  `arranged` gives the model's view of a decoded matrix,
    in the model's type.
    """

    watched: Watched
    packed: PackedTensor
    error: float
    arranged: Callable[[torch.Tensor], torch.Tensor]

    @property
    def path(self) -> str:
        return self.watched.path


class _Sum(torch.autograd.Function):
    """Values (rows, K) of a matrix, from an entry for each run of each term.

    For the gradient nothing is kept but the terms.
    """

    @staticmethod
    def forward(ctx: Any, matrix: _Matrix, *entries: torch.Tensor) -> torch.Tensor:
        ctx.matrix = matrix
        total = torch.zeros(matrix.shape)
        for term, each in zip(matrix.terms, entries, strict=True):
            total.view(-1, term.run).addcmul_(_values(term).view(-1, term.run), each[:, None])
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = gradient.contiguous()
        found = ((flat.view(-1, term.run) * _values(term).view(-1, term.run)).sum(1) for term in ctx.matrix.terms)
        return (None, *found)


def _values(term: Term) -> torch.Tensor:
    """What a term's entries are multiplied with, (rows, K) in fp32."""
    values = torch.from_numpy(term.values)
    if term.table is None:
        return values
    return torch.from_numpy(term.table).index_select(0, values.reshape(-1).int()).view(values.shape)


class _Matrix:
    """A matrix whose scales are multiplied with factors, one for each entry of each of its terms."""

    def __init__(self, tuned: Tuned) -> None:
        self.tuned, self.scales = tuned, FloatScales(tuned.packed)
        self.terms, self.shape = self.scales.terms, (tuned.packed.rows, tuned.packed.cols)
        self.factors = [torch.ones(len(term.start), requires_grad=True) for term in self.terms]

    def entries(self) -> list[torch.Tensor]:
        """The entries as they are stored. The gradient passes through the rounding as if it were not there."""
        found = []
        for term, factor in zip(self.terms, self.factors, strict=True):
            exact = torch.from_numpy(term.start) * factor
            stored = torch.from_numpy(self.scales.stored(term, exact.detach().numpy()))
            found.append(exact + (stored - exact).detach())
        return found

    def values(self) -> torch.Tensor:
        runs = [
            each.repeat_interleave(term.repeats)[: self.shape[0] * self.shape[1] // term.run]
            for term, each in zip(self.terms, self.entries(), strict=True)
        ]
        matrix: torch.Tensor = _Sum.apply(self, *runs)  # type: ignore[no-untyped-call]
        return self.tuned.arranged(matrix)

    def packed(self) -> PackedTensor:
        with torch.no_grad():
            return self.scales.assemble([each.numpy() for each in self.entries()])

    def limit(self) -> None:
        with torch.no_grad():
            for each in self.factors:
                each.clamp_(LEAST, MOST)


@dataclass
class ScaleTuning:
    """Tunes the scales of `tuned` for the outputs that `judge` compares. `packed` and `said` are what was found."""

    tuned: Sequence[Tuned]
    judge: Judge
    folder: Path | None = None
    packed: dict[str, PackedTensor] = field(default_factory=dict)
    said: str = ""

    def run(
        self,
        program: torch.export.ExportedProgram,
        inputs: Sequence[Any],
        values: Values,
        floats: Values,
        identity: Callable[[], Any],
    ) -> None:
        """`values` gives the tensor of each placeholder that is no input: what codes mean, for all weights that have
        some; `floats` gives the model's own. `identity` is JSON that identifies `values`.

        Errors: ArgumentError for inputs that do not fit the model; CalibrationError for fewer than two inputs, for
        values that are not finite, and for operators without a gradient; WorkdirError.
        """
        run = GraphRun(program, [each.watched for each in self.tuned], values, kept=self.judge.nodes)
        leaves = [run.leaves(given) for given in inputs]
        if not leaves:
            raise CalibrationError(NO_INPUTS)
        if len(leaves) < 2:
            raise CalibrationError(
                "`calibrate` gave one input, and tune_scales needs two: one to learn from, and one to judge by. Cut it "
                "into several inputs"
            )
        for number, each in enumerate(leaves):
            self.judge.keep(_float_outputs(run, self.judge, each, floats), number)
        self.judge.check()
        matrices = [_Matrix(each) for each in self.tuned]
        self._warn(matrices)
        learning = _Learning(run, self.judge, leaves, matrices)
        journal = self._journal(run, leaves, identity) if self.folder is not None else None
        before = learning.loss(learning.aside)
        learning.learn(journal)
        after = learning.loss(learning.aside)
        taken = after < before
        if taken:
            self.packed = {each.tuned.path: each.packed() for each in matrices}
        what = "KL of the logits" if self.judge.measure == "kl" else "squared error of the outputs"
        count = len(learning.aside)
        self.said = (
            f"scales {'tuned' if taken else 'not taken'}: {what} {before:.3g} -> {after:.3g} on "
            f"{count} of {len(leaves)} inputs that were set aside, after {STEPS} steps on the others"
        )

    def _warn(self, matrices: Sequence[_Matrix]) -> None:
        scales = sum(len(factor) for each in matrices for factor in each.factors)
        if self.judge.rows < FEW * scales:
            note(
                f"tune_scales learns {scales:,} scales, and `calibrate` gives {self.judge.rows:,} rows of outputs; "
                "more inputs make better scales"
            )

    def _journal(self, run: GraphRun, leaves: Sequence[Any], identity: Callable[[], Any]) -> NumberedFiles:
        assert self.folder is not None
        chain = ""
        for each in leaves:
            chain = chained_digest(chain, each)
        codes = [(t.path, repr(t.packed.format), hashlib.sha256(t.packed.data.data).hexdigest()) for t in self.tuned]
        facts = [VERSION, STEPS, RATE, ROWS, self.judge.measure, str(run.program.graph), codes, chain, identity()]
        return NumberedFiles.of(self.folder, "tuned", facts, "its scales are tuned again")


def _float_outputs(run: GraphRun, judge: Judge, leaves: Sequence[Any], floats: Values) -> list[torch.Tensor]:
    env = run.begun(leaves)
    for node in run.nodes:
        run.step(node, [env], floats)
    return [env[node] if node in env else floats[node.name]() for node in judge.nodes]


class _Learning:
    """Factors that are learned: the graph in pieces, the inputs to learn from and those that are set `aside`."""

    def __init__(
        self, run: GraphRun, judge: Judge, leaves: Sequence[Sequence[Any]], matrices: Sequence[_Matrix]
    ) -> None:
        self.run, self.judge, self.leaves, self.matrices = run, judge, leaves, matrices
        self.by_name = {node.name: each for each in matrices for node in each.tuned.watched.nodes}
        self.aside = list(range(ASIDE - 1, len(leaves), ASIDE)) or [len(leaves) - 1]
        self.seen = [number for number in range(len(leaves)) if number not in self.aside]
        blocks = [place for block in find_blocks(run) for place in (block.first, block.stop)]
        ends = sorted({0, *blocks, len(run.nodes)})
        self.pieces = list(itertools.pairwise(ends))
        self.twice = sum(4 * each.shape[0] * each.shape[1] for each in matrices) > HELD
        self.fixed: dict[str, torch.Tensor] = {}
        groups = [{"params": each.factors} for each in matrices]
        self.adam = torch.optim.Adam(groups, betas=DECAYS, eps=TINY)

    # --- the graph ---

    def outputs(self, number: int) -> list[torch.Tensor]:
        """What the judge compares, for one input, with gradients of the factors."""
        env = self.run.begun(self.leaves[number])
        for first, stop in self.pieces:
            if self.twice and torch.is_grad_enabled():
                env = checkpoint(self._piece, first, stop, env, use_reentrant=False, preserve_rng_state=False)
            else:
                env = self._piece(first, stop, env)
        return [env[node] if node in env else self._fixed(node) for node in self.judge.nodes]

    def _piece(self, first: int, stop: int, before: Env) -> Env:
        env, weights = dict(before), dict[int, torch.Tensor]()

        def value(used: fx.Node) -> Any:
            if used in env:
                return env[used]
            matrix = self.by_name.get(used.name)
            if matrix is None:
                return self._fixed(used)
            if id(matrix) not in weights:
                weights[id(matrix)] = matrix.values()
            return weights[id(matrix)]

        for node in self.run.nodes[first:stop]:
            if node.op == "get_attr":
                env[node] = getattr(self.run.program.graph_module, str(node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), value)
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            for used in self.run.done.get(node, ()):
                env.pop(used, None)
        return env

    def _fixed(self, node: fx.Node) -> torch.Tensor:
        """A tensor that is not learned. It is read once and kept."""
        if node.name not in self.fixed:
            self.fixed[node.name] = self.run.values[node.name]().detach()
        return self.fixed[node.name]

    # --- steps ---

    def learn(self, journal: NumberedFiles | None) -> None:
        """Learns the factors; goes on behind what `journal` holds."""
        begun = self._read(journal) if journal is not None else 0
        batches = self._batches()
        for _ in range(begun):
            next(batches)
        with Counted("tuning scales", STEPS, "steps") as progress:
            progress.reach(begun)
            for number in range(begun, STEPS):
                chosen = next(batches)
                for each in chosen:
                    self._backward(each, len(chosen))
                rate = RATE * min(1.0, (number + 1) / WARM) * (1 - number / STEPS)
                for matrix, group in zip(self.matrices, self.adam.param_groups, strict=True):
                    group["lr"] = rate * matrix.tuned.error**2
                self.adam.step()
                self.adam.zero_grad()
                for matrix in self.matrices:
                    matrix.limit()
                progress.reach(number + 1)
                if journal is not None and ((number + 1) % COMMIT == 0 or number + 1 == STEPS):
                    journal.write(0, self._state(number + 1))

    def _batches(self) -> Iterator[list[int]]:
        """The inputs of each step: in random order, each once before any comes again."""
        order, left = torch.Generator().manual_seed(SEED), list[int]()
        while True:
            chosen, rows = list[int](), 0
            while not chosen or rows < ROWS:
                if not left:
                    left += [self.seen[place] for place in torch.randperm(len(self.seen), generator=order).tolist()]
                if left[-1] in chosen:
                    break
                chosen.append(left.pop())
                each = self.judge.reference[chosen[-1]][0]
                rows += each.numel() // max(each.shape[-1], 1)
            yield chosen

    def _backward(self, number: int, count: int) -> None:
        why = "an operator behind it has none"
        with torch.enable_grad():
            loss = self.judge.loss(number, self.outputs(number)) / count
            if not torch.isfinite(loss.detach()):
                raise CalibrationError(
                    f"calibrate[{number}]: the quantised model's outputs are not finite while its scales are tuned; "
                    "leave that input out, or leave out tune_scales"
                )
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            except (NotImplementedError, RuntimeError) as error:
                why = str(error)
        for matrix in self.matrices:
            if any(factor.grad is None for factor in matrix.factors):
                raise CalibrationError(
                    f"'{matrix.tuned.path}' has no gradient, so tune_scales cannot learn its scales: {why}. Leave "
                    "tune_scales out"
                )

    def loss(self, numbers: Sequence[int]) -> float:
        with torch.no_grad():
            return distance([self.judge.distance(each, self.outputs(each)) for each in numbers]).mean

    # --- what was learned so far ---

    def _state(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {"step": np.array(step)}
        for number, factor in enumerate(self._factors()):
            held = self.adam.state[factor]
            found[f"factor{number}"] = factor.detach().numpy()
            for name in ("exp_avg", "exp_avg_sq") if held else ():
                found[f"{name}{number}"] = held[name].numpy()
        return found

    def _read(self, journal: NumberedFiles) -> int:
        """Takes what a file holds; the number of steps that were done."""
        factors = self._factors()
        names = [f"{name}{number}" for number in range(len(factors)) for name in ("factor", "exp_avg", "exp_avg_sq")]
        found = journal.read(0, ["step", *names])
        if found is None:
            return 0
        step, arrays = int(found[0]), found[1:]
        shapes = [factor.shape for factor in factors for _ in range(3)]
        if any(each.shape != shape or each.dtype != np.float32 for each, shape in zip(arrays, shapes, strict=True)):
            journal.refuse(0)
            return 0
        with torch.no_grad():
            for number, factor in enumerate(factors):
                held, mean, squares = (torch.from_numpy(each) for each in arrays[3 * number : 3 * number + 3])
                factor.copy_(held)
                self.adam.state[factor] = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": squares}
        return step

    def _factors(self) -> list[torch.Tensor]:
        return [factor for matrix in self.matrices for factor in matrix.factors]


__all__ = ["ScaleTuning", "Tuned"]
