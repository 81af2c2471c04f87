"""`QuantConfig(algorithm="round")`: learns the roundings and the clipping of scales of a block by gradients.

    target    the float block's outputs, for the float model's values
    step      outputs of the block with soft codes (soft_codes.py), for the values that the quantised model gives it
              loss = squares of the difference;  mean = MOMENTUM * mean + gradient
              each parameter -= rate * sign(mean);  the rate falls to zero

The block is the exported graph's own nodes (graph_blocks.py), run by autograd.  Learning starts from nearest codes.
GPTQ's codes of the block are made, too, and the block keeps those with the lower loss.  Whether GPTQ's codes are the
better start is open: it lowered the loss of some blocks of a random model, and raised it in the first layer of the tiny
Llama and in a single linear of correlated inputs, where a step moves offsets whose errors cancelled.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound,
AutoRound), arXiv 2309.05516.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qcompiler.errors import CalibrationError
from qcompiler.frontends.quantise.graph_blocks import Block
from qcompiler.frontends.quantise.graph_run import Env, GraphRun
from qcompiler.frontends.quantise.soft_codes import SoftMatrix

STEPS = 200
OFFSET_RATE = 0.5 * 2 / STEPS
"""The first step's length. The rate falls linearly, so an offset can move by `OFFSET_RATE` * STEPS / 2 = 0.5."""
FACTOR_RATE = 0.2 * 2 / STEPS
"""A factor of a scale can move by 0.2."""
MOMENTUM = 0.9
"""The sign of a single gradient is mostly noise; a mean of about ten gradients has less."""
ROWS = 2048
"""A step takes inputs until they have this many rows."""
SEED = 0


@dataclass
class BlockRun:
    """A block of `run` over `inputs`: the values before it, once for each input. `targets` are its float outputs.

    `fixed` gives what every placeholder but the learned weights holds; `arranged` the model's view of a learned matrix.
    """

    run: GraphRun
    block: Block
    inputs: Sequence[Env]
    targets: Sequence[Sequence[torch.Tensor]]
    fixed: Mapping[str, torch.Tensor]
    arranged: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]

    def learn(self, matrices: Mapping[str, SoftMatrix], step: Callable[[int], object]) -> float:
        """Learns `matrices`, by placeholder; returns their `loss`. `step` gets the number of steps so far.

        CalibrationError for outputs that are not finite, and for an operator without a gradient.
        """
        order = torch.Generator().manual_seed(SEED)
        taken: list[int] = []
        moving = [(matrix, [torch.zeros_like(each) for each in matrix.learned]) for matrix in matrices.values()]
        for number in range(STEPS):
            chosen = self._next(taken, order)
            for each in chosen:
                self._backward(matrices, each, len(chosen))
            for matrix, held in moving:
                _move(matrix, held, 1 - number / STEPS)
            step(number + 1)
        return self.loss(matrices)

    def _next(self, taken: list[int], order: torch.Generator) -> list[int]:
        """The inputs of the next step: in random order, each once before any comes again."""
        chosen: list[int] = []
        rows = 0
        while not chosen or rows < ROWS:
            if not taken:
                taken += torch.randperm(len(self.inputs), generator=order).tolist()
            if taken[-1] in chosen:
                break
            chosen.append(taken.pop())
            rows += sum(each[..., 0].numel() for each in self.targets[chosen[-1]][:1])
        return chosen

    def _backward(self, matrices: Mapping[str, SoftMatrix], each: int, count: int) -> None:
        with torch.enable_grad():
            loss = self._loss(each, {name: matrix.values() for name, matrix in matrices.items()}) / count
            try:
                loss.backward()  # type: ignore[no-untyped-call]
                why = "an operator behind one of its weights has none"
            except (NotImplementedError, RuntimeError) as error:
                why = str(error)
        if any(parameter.grad is None for matrix in matrices.values() for parameter in matrix.learned):
            raise CalibrationError(
                f"the block of {self._names()} has no gradient, so algorithm='round' cannot learn it: {why}. Choose "
                "algorithm='gptq'"
            )

    def loss(self, matrices: Mapping[str, SoftMatrix]) -> float:
        """The squared error of the block's outputs as a share of the targets' squares: the mean over all inputs."""
        with torch.no_grad():
            weights = {name: matrix.values() for name, matrix in matrices.items()}
            return sum(float(self._loss(each, weights)) for each in range(len(self.inputs))) / len(self.inputs)

    def _loss(self, each: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        env: Env = dict(self.inputs[each])
        for node in self.run.nodes[self.block.first : self.block.stop]:
            if node.op == "get_attr":
                env[node] = getattr(self.run.program.graph_module, str(node.target))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self._value(used, env, weights))
                env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        loss = torch.zeros(())
        for end, target in zip(self.block.ends, self.targets[each], strict=True):
            wanted = target.to(torch.float32)
            squares = wanted.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
            loss = loss + (env[end].to(torch.float32) - wanted).square().mean() / squares
        if not torch.isfinite(loss.detach()):
            raise CalibrationError(f"the outputs of the block of {self._names()} are not finite while calibrating")
        return loss

    def _value(self, used: fx.Node, env: Env, weights: Mapping[str, torch.Tensor]) -> Any:
        if used in env:
            return env[used]
        if used.name in weights:
            return self.arranged[used.name](weights[used.name])
        return self.fixed[used.name]

    def _names(self) -> str:
        paths = self.block.paths
        return f"'{paths[0]}'" + (f" to '{paths[-1]}'" if len(paths) > 1 else "")


def _move(matrix: SoftMatrix, means: Sequence[torch.Tensor], rate: float) -> None:
    """One step of what is learned of a matrix; `means` are running means of the gradients."""
    with torch.no_grad():
        for parameter, mean, length in zip(matrix.learned, means, (OFFSET_RATE, FACTOR_RATE), strict=False):
            assert parameter.grad is not None
            mean.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(mean.sign(), alpha=rate * length)
            parameter.grad = None
    matrix.limit()


__all__ = ["STEPS", "BlockRun"]
