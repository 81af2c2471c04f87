"""Which weights of a graph `tune_scales` tunes, and what the report says of each (tune_scales.py does the learning)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from qcompiler.calibrate.float_scales import why_fixed
from qcompiler.config import resolve_format
from qcompiler.errors import RecipeError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.graph_run import Watched
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear
from qcompiler.frontends.quantise.judge import Judge, vocabulary_of
from qcompiler.frontends.quantise.tune_scales import ScaleTuning, Tuned
from qcompiler.frontends.weights.weight_uses import reads

Decisions = list[tuple[str, str, str]]


def tune(
    tensors: GraphTensors,
    weights: Sequence[GraphWeight],
    inputs: Sequence[Any],
    folder: Path | None,
    codes: Callable[[GraphWeight], PackedTensor],
) -> tuple[dict[str, PackedTensor], Decisions]:
    """The weights whose scales were tuned, by path, and the report's decisions. `codes` gives the codes of a weight.

    RecipeError if no weight has scales that can be tuned, with the reasons, and for weights without values.
    """
    quantised = [weight for weight in weights if weight.format is not None]
    judge = Judge(tensors.program, "auto", vocabulary_of(tensors.exported.config, weights), "calibrate")
    read = _read_for(judge.nodes)
    whys = {weight.targets[0]: _why_not(weight, read) for weight in quantised}
    if all(whys.values()) or not tensors.source.valued:
        listed = "; ".join(dict.fromkeys(whys.values())) or "no weight is quantised"
        raise RecipeError(
            f"tune_scales=True serves nothing here: {listed if tensors.source.valued else 'the weights have no values'}"
        )
    packed = {weight.targets[0]: codes(weight) for weight in quantised if weight.codes is None}

    def decoded(weight: GraphWeight) -> torch.Tensor:
        found = packed.get(weight.targets[0])
        if found is None:
            return tensors.value(weight)
        return weight.restored(torch.from_numpy(found.format.decode(found)).to(weight.tensor.dtype))

    tuned = [
        _tuned(weight, packed[weight.targets[0]], tensors.value(weight), decoded(weight))
        for weight in quantised
        if not whys[weight.targets[0]]
    ]
    values, floats = (
        {node.name: functools.partial(read, weight) for weight in weights for node in weight.nodes}
        for read in (decoded, tensors.value)
    )
    tuning = ScaleTuning(tuned, judge, folder)
    tuning.run(tensors.program, inputs, values, floats, lambda: tensors.identities(weights))
    said = {path: f"not tuned: {why}" if why else tuning.said for path, why in whys.items()}
    return tuning.packed, [("scales", path, what) for path, what in said.items()]


def _read_for(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that these depend on, and these."""
    found, left = set(outputs), list(outputs)
    while left:
        for used in left.pop().all_input_nodes:
            if used not in found:
                found.add(used)
                left.append(used)
    return found


def _why_not(weight: GraphWeight, read: Container[fx.Node]) -> str:
    """Why the scales of a quantised weight are not tuned: "" if they are."""
    if weight.codes is not None:
        return "the source has its codes"
    if not any(node in read for node in weight.nodes):
        return "no output that is compared depends on it"
    return why_fixed(resolve_format(weight.format or ""), weight.shape[1])


def _tuned(weight: GraphWeight, packed: PackedTensor, values: torch.Tensor, decoded: torch.Tensor) -> Tuned:
    uses = reads(weight.nodes) if is_quantised_linear(weight) else ()
    watched = Watched(weight.targets[0], weight.shape[1], tuple(uses), tuple(weight.nodes))
    squares = [float(each.detach().double().square().sum()) for each in (decoded.float() - values.float(), values)]
    error = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
    return Tuned(watched, packed, error, lambda matrix: weight.restored(matrix.to(weight.tensor.dtype)))


__all__ = ["tune"]
