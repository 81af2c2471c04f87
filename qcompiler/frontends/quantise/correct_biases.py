"""`QuantConfig(correct_bias=True)`: the mean of each linear's outputs becomes that of the float model.

    float model       y = x W^T + b
    quantised model   y' = x' W'^T + b',     b' = b + mean(y) - mean(x' W'^T + b)

Codes change the mean of a linear's outputs wherever its inputs have a mean, and a bias takes that back: nothing else
changes, and nothing is added but N numbers where a linear had no bias.  Two runs of the graph go side by side, node by
node: one of the float model, and one with final codes and the biases so far.  So each bias also takes back what the
weights before it did to the mean.  (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", arXiv:1906.04721, section 4.2; here the means are measured.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from qcompiler.calibrate.chosen_codes import NO_INPUTS
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.graph_run import Env, GraphRun, Values
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear
from qcompiler.frontends.quantise.rewrites.moved_weights import Added, MovedWeights
from qcompiler.frontends.quantise.rewrites.new_parameters import bias_of, give_bias
from qcompiler.frontends.weights.weight_uses import reads
from qcompiler.runtime.progress import Progress, note
from qcompiler.units import counted

aten = torch.ops.aten


@dataclass(frozen=True)
class _Linear:
    """A linear whose bias is corrected: its weight's path, the node of its outputs (…, N), and the bias's path (N,)."""

    path: str
    node: fx.Node
    bias: str
    nbytes: int
    """Of the weight's values, for progress."""


@dataclass(frozen=True)
class _Mean:
    """What the mean of a linear's outputs is short of, (N,) in fp64, and its share of their squared error."""

    mean: torch.Tensor
    share: float
    rows: int

    @property
    def chance(self) -> float:
        """The share up to which a correction does not pay on other inputs.

        Let m be the mean over R rows, and V the variance of a row's error, summed over columns.  |m|^2 is V / R above
        the square of the true mean, and a correction by m adds V / R to the error of a new row: it pays if
        |m|^2 > 2 V / R.  With the squared error S of all rows, V = (S - R |m|^2) / (R - 1), which makes it
        R |m|^2 / S > 2 / (R + 1).
        """
        return 2 / (self.rows + 1)

    @property
    def known(self) -> bool:
        """Whether the mean is corrected."""
        return self.share > self.chance


@dataclass
class BiasCorrection:
    """Corrects the biases of a graph. `source` holds what is added to them; `decisions` are the report's."""

    tensors: GraphTensors
    source: MovedWeights
    decisions: list[tuple[str, str, str]] = field(default_factory=list)
    linears: list[_Linear] = field(default_factory=list)

    def give(self, weights: Sequence[GraphWeight]) -> list[GraphWeight]:
        """Gives a bias of zeros to each linear with a quantised weight that has none; the biases that were made.

        RecipeError if no bias can be corrected, with the reasons.
        """
        made, reasons = [], []
        owner = {node: weight for weight in weights for node in weight.nodes}
        for weight in weights:
            if weight.format is None or not weight.kinds - {"embedding"}:
                continue
            why = _why_not(weight, owner)
            if why:
                reasons.append(why)
                self.decisions.append(("bias", weight.targets[0], f"not corrected: {why}"))
                continue
            (linear, _), *_ = reads(weight.nodes)
            before, beside = len(self.tensors.specs), bias_of(linear, weight) is None
            bias = give_bias(self.tensors, self.source, linear, weight)
            if len(self.tensors.specs) > before:
                made.append(self._parameter(bias))
            added = beside and linear.target is not aten.linear.default  # x @ W, and an addition behind it
            node, nbytes = next(iter(linear.users)) if added else linear, weight.tensor.nbytes
            self.linears.append(_Linear(weight.targets[0], node, bias, nbytes))
        if not self.linears:
            listed = "; ".join(dict.fromkeys(reasons)) or "no linear has a quantised weight"
            raise RecipeError(f"correct_bias=True serves nothing here: {listed}")
        return made

    def _parameter(self, target: str) -> GraphWeight:
        """A parameter that was made, as `GraphTensors.grouped` would give it."""
        spec = next(each for each in self.tensors.specs if each.target == target)
        placeholders = self.tensors.graph.find_nodes(op="placeholder")
        node = next(each for each in placeholders if each.name == spec.arg.name)
        return GraphWeight([target], [spec], [node], self.tensors.state[target])

    def correct(
        self,
        weights: Sequence[GraphWeight],
        inputs: Sequence[object],
        decoded: Callable[[GraphWeight], torch.Tensor],
    ) -> None:
        """Measures the means for `inputs` of the model, and changes the biases.

        `decoded` gives a weight's values by its final codes. Memory: the values that are alive, twice for each input.
        Errors: CalibrationError for no inputs, and for outputs that are not finite; ArgumentError for inputs that do
        not fit the model.
        """
        if not self.source.valued:
            self.decisions.append(("bias", "", "not corrected: the weights have no values"))
            return
        if not inputs:
            raise CalibrationError(NO_INPUTS)
        floats, quantised = (
            {node.name: functools.partial(read, weight) for weight in weights for node in weight.nodes}
            for read in (self.tensors.value, decoded)
        )
        measured = self._means(inputs, floats, quantised)
        for linear, found in zip(self.linears, measured, strict=True):
            share = f"{100 * found.share:.3g} % of the squared error of its outputs was an error of their mean"
            said = f"corrected: {share}, over {counted(found.rows, 'row')}"
            if found.known:
                self.source.change("correct-bias", linear.bias, Added(found.mean))
            else:
                said = f"not {said}; above {100 * found.chance:.3g} % it is more than chance"
            self.decisions.append(("bias", linear.path, said))
        if not any(found.known for found in measured):
            note("no bias is corrected: the means of the outputs moved no more than by chance. Give more inputs")

    def _means(self, inputs: Sequence[object], floats: Values, quantised: Values) -> list[_Mean]:
        """What was measured for each linear."""
        run = GraphRun(self.tensors.program, [], floats)
        by_node = {each.node: each for each in self.linears}
        run.keep({node for node in by_node if node in run.done.get(node, ())})  # results of the model
        leaves = [run.leaves(given) for given in inputs]
        exact, ours = ([run.begun(each) for each in leaves] for _ in range(2))
        found: dict[fx.Node, _Mean] = {}
        with Progress("correcting biases", sum(each.nbytes for each in self.linears)) as progress:
            for node in run.nodes:
                run.step(node, exact, floats)
                run.step(node, ours, quantised)
                if node in by_node:
                    found[node] = _mean_moved(by_node[node], exact, ours)
                    progress.step(by_node[node].nbytes)
        return [found[each.node] for each in self.linears]


def _why_not(weight: GraphWeight, owner: Mapping[fx.Node, GraphWeight]) -> str:
    """Why the bias of a quantised weight's linear cannot be corrected: "" if it can. `owner` is by placeholder."""
    if "linear" not in weight.kinds:
        return "a convolution reads it"
    if weight.codes is not None:
        return "the source has its codes, and no values to compare with"
    if weight.experts is not None:
        return "the outputs of experts are not collected by expert"
    if not is_quantised_linear(weight):
        return "a recurrent layer reads it"
    linears = reads(weight.nodes)
    if len(linears) != 1:
        return f"{len(linears)} linears read it"
    bias = bias_of(linears[0][0], weight)
    if bias is None:
        return ""
    if bias.op != "placeholder":
        return "its bias is computed"
    if bias not in owner or not owner[bias].is_parameter:  # these keep the values that they have
        return "its bias is a buffer or a constant" if bias in owner else "its bias is an input of the model"
    return "others read its bias, too" if len(owner[bias].users) > 1 else ""


def _mean_moved(linear: _Linear, exact: Sequence[Env], ours: Sequence[Env]) -> _Mean:
    """Moves the outputs of a linear to the mean of the float model's, as its bias will."""
    rows, squares = 0, 0.0
    total = torch.zeros(exact[0][linear.node].shape[-1], dtype=torch.float64)
    for right, wrong in zip(exact, ours, strict=True):
        error = (right[linear.node].double() - wrong[linear.node].double()).reshape(-1, len(total)).cpu()
        rows += len(error)
        total += error.sum(0)
        squares += float((error * error).sum())
    if not rows:
        raise CalibrationError(f"`calibrate` gave no rows to '{linear.path}': give inputs that are not empty")
    if not torch.isfinite(total).all():
        raise CalibrationError(
            f"the outputs of '{linear.path}' are not finite while its bias is corrected: leave out inputs that give "
            "NaN or infinity, such as rows of padding alone, or leave out correct_bias"
        )
    mean = total / rows
    found = _Mean(mean, rows * float((mean * mean).sum()) / squares if squares else 0.0, rows)
    for wrong in ours if found.known else ():
        values = wrong[linear.node]
        wrong[linear.node] = (values.double() + mean.to(values.device)).to(values.dtype)
    return found


__all__ = ["BiasCorrection"]
