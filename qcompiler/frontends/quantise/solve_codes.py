"""`QuantConfig(algorithm="gptq" | "round" | "awq")`: chooses the codes of linears one after the other, each for the
inputs that it gets when all weights before it are quantised.

    run      all inputs together, node by node, in the float graph
    linear   moments += X^T X over the inputs of the linear that comes next; codes = gptq(weight, moments), or for awq
             nearest codes with clipped scales
    run on   with the decoded codes in place of the weight
    round    at the end of a block (graph_blocks.py): codes and scales are learned from there on (learn_rounding.py),
             and the block runs again

So one pass over the graph quantises every linear for what the quantised model really computes.  Values live until their
last use, once for each input: for a transformer that is a hidden state and the values inside one layer.

With a working folder, the codes of each weight are written there as soon as they are known: after a kill, the next
compile runs the graph with them, and goes on behind the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.export import ExportedProgram

from qcompiler.calibrate import clipping, gptq, hqq
from qcompiler.calibrate.chosen_codes import NO_INPUTS, Moments, choose_codes, clip_scales
from qcompiler.calibrate.levels import Float64
from qcompiler.errors import CalibrationError
from qcompiler.formats import Format, PackedTensor
from qcompiler.frontends.quantise import learn_rounding
from qcompiler.frontends.quantise.calibrate import chained_digest
from qcompiler.frontends.quantise.graph_blocks import Block, find_blocks
from qcompiler.frontends.quantise.graph_run import GraphRun, Rounded, Values, Watched
from qcompiler.frontends.quantise.learn_rounding import BlockRun
from qcompiler.frontends.quantise.numbered_files import NumberedFiles
from qcompiler.frontends.quantise.soft_codes import SoftMatrix
from qcompiler.runtime.progress import Progress

Float32 = npt.NDArray[np.float32]

VERSION = 5


@dataclass(frozen=True)
class Matrix:
    """A weight whose codes are chosen.

    `values` gives its fp32 matrix (rows, K), and `arranged` the model's view of such a matrix, in the model's type.
    """

    watched: Watched
    format: Format
    rows: int
    values: Callable[[], npt.NDArray[np.float32]]
    arranged: Callable[[torch.Tensor], torch.Tensor]

    @property
    def path(self) -> str:
        return self.watched.path


@dataclass
class Solver:
    """Chooses the codes of `matrices` by `algorithm`. `packed` and `found` have codes and remarks by path."""

    matrices: Sequence[Matrix]
    folder: Path | None = None
    algorithm: str = "gptq"
    rounded: Rounded | None = None
    """What the program rounds of the inputs of linears. Without it they stay as the float graph computes them."""
    packed: dict[str, PackedTensor] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        program: ExportedProgram,
        inputs: Sequence[Any],
        values: Values,
        floats: Values,
        identity: Callable[[], Any],
    ) -> None:
        """`values` gives the tensor of each placeholder that is no input, and decodes the weights in `packed`; `floats`
        gives the model's own.

        `identity` is JSON that identifies the weights' values, and the formats of those that keep nearest codes.

        Errors: ArgumentError for inputs that do not fit the model; CalibrationError for no inputs, for values that are
        not finite and for too few rows; WorkdirError.
        """
        graph = GraphRun(program, [each.watched for each in self.matrices], values, rounded=self.rounded)
        leaves = [graph.leaves(given) for given in inputs]
        if not leaves:
            raise CalibrationError(NO_INPUTS)
        journal = _Journal.of(self, graph, leaves, identity) if self.folder is not None else None
        with Progress(f"choosing codes ({self.algorithm})", sum(map(_nbytes, self.matrices))) as progress:
            work = _Work(graph, {each.path: each for each in self.matrices}, journal, progress)
            if self.algorithm == "round":
                self._by_block(work, leaves, floats)
                return
            rounded = self.rounded
            last = Moments(_in_fp32 if rounded is None else lambda rows: _in_fp32(rounded.values(rows)))

            def see(path: str, x: list[torch.Tensor]) -> None:
                if path in self.packed:  # a weight that several linears read
                    return
                if not self._known(work, path):
                    choose = self._clip if self.algorithm == "awq" else self._solve
                    choose(work.matrices[path], last.of(path, x), work.matrices[path].values())
                    work.write(path, self.packed[path], self.found[path])
                progress.step(_nbytes(work.matrices[path]))

            graph.together(leaves, see)

    def _known(self, work: _Work, path: str) -> bool:
        """Whether the working folder has the codes of a weight; takes them."""
        found = work.read(path)
        if found is not None:
            self.packed[path], self.found[path] = found
        return found is not None

    # --- block by block ---

    def _by_block(self, work: _Work, leaves: Sequence[Sequence[Any]], floats: Values) -> None:
        """Two runs side by side, block by block: of the float model, and of the one with the codes so far."""
        graph, done, place = work.graph, 0, 0
        exact, ours = ([graph.begun(each) for each in leaves] for _ in range(2))
        blocks = find_blocks(graph)
        graph.keep(blocks[-1].ends)
        for block in blocks:
            for node in graph.nodes[place : block.first]:
                graph.step(node, exact, floats)
                graph.step(node, ours)
            place, size = block.stop, sum(_nbytes(work.matrices[path]) for path in block.paths)
            held = [dict(env) for env in ours]
            for node in graph.nodes[block.first : block.stop]:
                graph.step(node, exact, floats)
            known = [self._known(work, path) for path in block.paths]
            if not all(known):
                targets = [[env[end] for end in block.ends] for env in exact]
                steps = functools.partial(_reach, work.progress, done, size)
                self._learn(work, BlockRun(graph, block, held, targets, *self._weights(work, block)), steps)
            done += size
            work.progress.reach(done)
            ours = held
            for node in graph.nodes[block.first : block.stop]:
                graph.step(node, ours)

    def _weights(self, work: _Work, block: Block) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors that a block reads, by placeholder, and how those that are learned are arranged."""
        mine = {node.name: path for path in block.paths for node in work.placeholders(path)}
        fixed: dict[str, torch.Tensor] = {}
        for node in work.graph.nodes[block.first : block.stop]:
            for used in node.all_input_nodes:
                if used.op == "placeholder" and used.name in work.graph.values and used.name not in {*mine, *fixed}:
                    fixed[used.name] = work.graph.values[used.name]()
        return fixed, {name: work.matrices[path].arranged for name, path in mine.items()}

    def _learn(self, work: _Work, run: BlockRun, step: Callable[[int], object]) -> None:
        """The codes of one block: GPTQ's, or those that are learned from them on, if their loss is lower."""
        soft: dict[str, SoftMatrix] = {}
        last, envs = Moments(_in_fp32), [dict(env) for env in run.inputs]
        for path in run.block.paths:
            self.packed.pop(path, None)
        for node in work.graph.nodes[run.block.first : run.block.stop]:
            for path, x in work.graph.reads.get(node, ()):
                if path in run.block.paths and path not in soft:
                    given = [env[x] if x in env else work.graph.values[x.name]() for env in envs]
                    matrix, values = work.matrices[path], work.matrices[path].values()
                    rounded = self._solve(matrix, last.of(path, given), values)
                    soft[path] = SoftMatrix(self.packed[path], rounded)
            work.graph.step(node, envs)
        del envs
        matrices = work.by_placeholder(soft)
        before = run.loss(matrices)
        after = run.learn(matrices, step)
        taken = "the learned ones" if after < before else "gptq's"
        for path, learned in soft.items():
            if after < before:
                self.packed[path] = learned.packed()
            self.found[path] += (
                f"; squared error of the outputs of its block of {len(soft)} weights: {100 * before:.2g} % with gptq's "
                f"codes, {100 * after:.2g} % with learned roundings; {taken} are taken"
            )
            work.write(path, self.packed[path], self.found[path])

    def _solve(self, matrix: Matrix, moments: tuple[Float64, int], values: Float32) -> Float32:
        """Chooses the codes of one matrix by GPTQ, and returns the values that it rounded.

        CalibrationError names its path.
        """
        path, uses = matrix.path, len(matrix.watched.reads)
        solved, self.found[path] = choose_codes(
            path, matrix.format, values, moments, uses=uses, algorithm=self.algorithm
        )
        self.packed[path] = solved.packed
        return solved.rounded

    def _clip(self, matrix: Matrix, moments: tuple[Float64, int], values: Float32) -> None:
        """Chooses the scales of one matrix."""
        path, uses = matrix.path, len(matrix.watched.reads)
        self.packed[path], self.found[path] = clip_scales(path, matrix.format, values, moments, uses=uses)


def _nbytes(matrix: Matrix) -> int:
    """Bytes of its values in fp32, for progress."""
    return 4 * matrix.rows * matrix.watched.cols


def _in_fp32(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.float32).cpu()


@dataclass(frozen=True)
class _Work:
    """What a run of a solver works on: the graph, the matrices by path, the working folder's journal, the progress."""

    graph: GraphRun
    matrices: Mapping[str, Matrix]
    journal: _Journal | None
    progress: Progress

    def read(self, path: str) -> tuple[PackedTensor, str] | None:
        return self.journal.read(self._number(path), self.matrices[path]) if self.journal is not None else None

    def write(self, path: str, packed: PackedTensor, remark: str) -> None:
        if self.journal is not None:
            self.journal.write(self._number(path), packed, remark)

    def _number(self, path: str) -> int:
        return list(self.matrices).index(path)

    def by_placeholder(self, matrices: Mapping[str, SoftMatrix]) -> dict[str, SoftMatrix]:
        return {node.name: each for path, each in matrices.items() for node in self.placeholders(path)}

    def placeholders(self, path: str) -> list[fx.Node]:
        """The placeholders that hold a weight: several for tied ones."""
        return list(self.matrices[path].watched.nodes)


def _reach(progress: Progress, done: int, size: int, steps: int) -> None:
    progress.reach(done + size * steps // learn_rounding.STEPS)


@dataclass(frozen=True)
class _Journal:
    """The codes of each weight in the working folder, and what is said of them."""

    files: NumberedFiles

    @staticmethod
    def of(solver: Solver, run: GraphRun, leaves: Sequence[Any], identity: Callable[[], Any]) -> _Journal:
        assert solver.folder is not None
        matrices = solver.matrices
        chain = ""
        for each in leaves:
            chain = chained_digest(chain, each)
        named = [(m.path, m.rows, m.watched.cols, repr(m.format)) for m in matrices]
        facts = [
            VERSION,
            solver.algorithm,
            learn_rounding.STEPS,
            (gptq.DAMPING, gptq.SWEEPS, gptq.DESCENTS, hqq.SETTINGS),
            clipping.FACTORS,
            solver.rounded is not None,
            str(run.program.graph),
            named,
            chain,
            identity(),
        ]
        return _Journal(NumberedFiles.of(solver.folder, "codes", facts, "its codes are chosen again"))

    def read(self, number: int, matrix: Matrix) -> tuple[PackedTensor, str] | None:
        found = self.files.read(number, ("data", "remark"))
        if found is None:
            return None
        (data, remark), rows, cols = found, matrix.rows, matrix.watched.cols
        if data.dtype != np.uint8 or data.shape != (matrix.format.nbytes(rows, cols),):
            self.files.refuse(number)
            return None
        return PackedTensor(matrix.format, rows, cols, data), str(remark)

    def write(self, number: int, packed: PackedTensor, remark: str) -> None:
        self.files.write(number, {"data": packed.data, "remark": np.array(remark)})


__all__ = ["Matrix", "Solver"]
