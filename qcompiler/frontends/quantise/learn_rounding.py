"""`QuantConfig(algorithm="round")`: learns the roundings and the clipping of scales of a block by gradients.

    target    the float block's outputs, for the float model's values
    step      outputs of the block with soft codes (soft_codes.py), for the values that the quantised model gives it
              loss = squares of the difference, as a share of the target's squares
              Adam moves places of codes and factors of scales; its rate falls to zero

The block is the exported graph's own nodes (graph_blocks.py), run by autograd.  Learning starts from GPTQ's codes, and
each place where GPTQ rounded: at the weight, moved by the errors of other columns that it makes up for.  So the start
has GPTQ's loss, and a place is as far from the next code as the value that GPTQ rounded was.

Signed gradients (SignRound) raised GPTQ's loss on the tiny Llama.  They move every place by the same length in a step,
so that places without a clear gradient go to other codes, too, and errors that cancelled no longer do.  Adam divides
the mean of the gradients by the root of the mean of their squares: a place whose gradient changes sign moves little.
The loss of a single linear is what GPTQ lowers, and there Adam may find no less.

Sources: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound,
AutoRound), arXiv 2309.05516, for learning roundings by a block's outputs; Kingma and Ba, "Adam: A Method for Stochastic
Optimization", arXiv 1412.6980.
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
PLACE_RATE = 7e-3
"""Adam's rate for places, in gaps between codes: with a rate that falls linearly, a place can move by about 0.7."""
FACTOR_RATE = 3e-3
"""Adam's rate for factors of scales."""
DECAYS = (0.9, 0.99)
"""Of Adam's means: ten gradients, and a hundred squares."""
TINY = 1e-12
"""What Adam adds to the root: less than any gradient that counts. The loss is a share, and has a million parameters."""
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
        different = list({id(matrix): matrix for matrix in matrices.values()}.values())  # a tied weight has two names
        adam = _adam(different)
        falling = torch.optim.lr_scheduler.LambdaLR(adam, lambda number: 1 - number / STEPS)
        for number in range(STEPS):
            chosen = self._next(taken, order)
            for each in chosen:
                self._backward(matrices, each, len(chosen))
            adam.step()
            adam.zero_grad()
            falling.step()
            for matrix in different:
                matrix.limit()
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


def _adam(matrices: Sequence[SoftMatrix]) -> torch.optim.Adam:
    factors = [matrix.factors for matrix in matrices if matrix.factors is not None]
    groups: list[dict[str, Any]] = [{"params": [matrix.places for matrix in matrices], "lr": PLACE_RATE}]
    if factors:
        groups.append({"params": factors, "lr": FACTOR_RATE})
    return torch.optim.Adam(groups, betas=DECAYS, eps=TINY)


__all__ = ["STEPS", "BlockRun"]
