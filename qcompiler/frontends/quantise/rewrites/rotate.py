"""`rotate-hidden`: turns the residual stream by a random orthogonal matrix that is folded into weights.

    before   h = E[ids]            u = rms_norm(h) * g        y = u W^t          h + x Wo^t
    after    h Q = (E Q)[ids]      u Q = rms_norm(h Q)        y = u Q (W g Q)^t  h Q + x (Q^t Wo)^t

QuaRot (arXiv 2404.00456) and SpinQuant turn the stream by a Hadamard matrix with random signs: outliers of a few
channels spread over all of them, and no operator is added.  Here no norm changes its kind either: where a layer norm
reads the stream, the matrix keeps the vector of ones (orthogonal.py).

A tied embedding is untied: the head reads the stream behind a norm with a gain of its own, and the embedding does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.rewrites.moved_weights import Added, Filled, MovedWeights, Rotated, Scaled
from qcompiler.frontends.quantise.rewrites.new_parameters import give_bias, untie
from qcompiler.frontends.quantise.rewrites.orthogonal import Rotation
from qcompiler.frontends.quantise.rewrites.residual import Stream, StreamReader

SEED = 0
ROTATE: Final = "rotate-hidden"


def rotate(tensors: GraphTensors, source: MovedWeights, stream: Stream, number: int) -> list[str]:
    """Rotates a stream, the `number`th of the graph; what was untied and which biases were made, for the report."""
    rotation = Rotation(stream.width, SEED + number, stream.keeps_ones)
    said = []
    paths: dict[int, str] = {}
    for weight, linears in _tied(stream):
        first, second = untie(tensors, source, weight, linears)
        paths[id(weight)] = second
        said.append(f"untied: {second} has other values than {first} now, since the gain in front of it moved into it")
        _write(source, first, 1, rotation)
    vectors: dict[str, float] = {}
    for reader in _distinct(stream.readers):
        path = paths.get(id(reader.weight), reader.weight.targets[0])
        linears = [each.linear for each in stream.readers if each.weight is reader.weight]
        said += _turn_reader(tensors, source, stream, reader, linears, path, rotation)
        if reader.gain is not None:
            vectors[reader.gain.weight.targets[0]] = 1 - reader.gain.offset
        if reader.shift is not None:
            vectors[reader.shift.targets[0]] = 0.0
    for path, value in vectors.items():
        source.change(ROTATE, path, Filled(value))
    done: set[tuple[str, int]] = set()
    for writers in stream.writers.values():
        for each in writers:
            path = each.weight.targets[0]
            if id(each.weight) not in paths and (path, each.axis) not in done:
                done.add((path, each.axis))
                _write(source, path, each.axis, rotation)
    return said


def _write(source: MovedWeights, path: str, axis: int, rotation: Rotation) -> None:
    source.change(ROTATE, path, Rotated(axis, rotation))


def _turn_reader(
    tensors: GraphTensors,
    source: MovedWeights,
    stream: Stream,
    reader: StreamReader,
    linears: Sequence[torch.fx.Node],
    path: str,
    rotation: Rotation,
) -> list[str]:
    """Turns the columns of one weight, which `linears` read, and moves the norm's gain and bias into it."""
    weight, said = reader.weight, []
    axis = 0 if reader.linear.target is not torch.ops.aten.linear.default else 1
    if reader.shift is not None:
        before = set(source.made)
        biases = {give_bias(tensors, source, linear, weight): linear for linear in linears}
        made = source.made - before
        said += [f"a bias for {path}, since the norm in front of it has one"] * bool(made)
        if source.valued:
            shift = tensors.value(reader.shift).double()
            matrix = source.read([path], weight.tensor).double().movedim(axis, -1)
            for bias in sorted(biases):
                source.change(ROTATE, bias, Added(matrix @ shift))
        for bias in sorted(made):
            if biases[bias] in stream.writers:  # which the search found without a bias
                source.change(ROTATE, bias, Rotated(0, rotation))
    if reader.gain is not None and source.valued:
        source.change(ROTATE, path, Scaled(axis, tensors.value(reader.gain.weight).double() + reader.gain.offset))
    source.change(ROTATE, path, Rotated(axis, rotation))
    return said


def _distinct(readers: Sequence[StreamReader]) -> list[StreamReader]:
    """One reader for each weight."""
    return list({id(each.weight): each for each in reversed(readers)}.values())[::-1]


def _tied(stream: Stream) -> list[tuple[GraphWeight, list[torch.fx.Node]]]:
    """Weights that an embedding writes and linears read, with these linears."""
    embeddings = {
        id(each.weight): each.weight
        for node, writers in stream.writers.items()
        for each in writers
        if node.target is torch.ops.aten.embedding.default
    }
    found = []
    for key, weight in embeddings.items():
        linears = [reader.linear for reader in stream.readers if id(reader.weight) == key]
        if linears:
            found.append((weight, linears))
    return found


__all__ = ["ROTATE", "rotate"]
