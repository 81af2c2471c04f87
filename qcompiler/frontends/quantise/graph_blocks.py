"""The blocks of an exported graph: pieces between which only one value is handed on, such as a layer of a transformer.

    h1 = h + attention(norm(h))          a cut behind h1: of what the model computes, only h1 is read later
    h2 = h1 + mlp(norm(h1))              a cut behind h2
    …                                    attention, mlp, attention, mlp: the pattern repeats, so a block is two pieces

Masks, positions and rotary tables may be read across a cut: they depend on no parameter, or on no input.  Names play no
part.  A graph without cuts (a U-Net, whose early values are read at its end) is one block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.export.graph_signature import InputKind

from qcompiler.frontends.quantise.graph_run import GraphRun


@dataclass(frozen=True)
class Block:
    """The nodes [first, stop) of the graph, the weights that are read in it first, and the values that it hands on."""

    first: int
    stop: int
    paths: tuple[str, ...]
    ends: tuple[fx.Node, ...]


def find_blocks(run: GraphRun) -> list[Block]:
    """The blocks that read `run.watched`, in order. What lies behind the last of these weights' cut is in no block."""
    stream = _stream(run)
    cuts = _cuts(run, stream)
    pieces = _pieces(run, cuts)
    size = _repeat([_signature(run, *piece) for piece in pieces])
    seen: set[str] = set()
    blocks = []
    for first, stop in _joined(pieces, *size):
        paths = []
        for node in run.nodes[first:stop]:
            paths += [path for path, _ in run.reads.get(node, ()) if path not in seen and path not in paths]
        seen.update(paths)
        if paths:
            blocks.append(Block(first, stop, tuple(paths), _ends(run, stream, first, stop)))
    return blocks


def _stream(run: GraphRun) -> set[fx.Node]:
    """The nodes that depend on an input and on a parameter."""
    specs = run.program.graph_signature.input_specs
    learned = {spec.arg.name for spec in specs if spec.kind == InputKind.PARAMETER}
    of_input, of_parameter = set(run.inputs), {node for node in run.nodes if node.name in learned}
    for node in run.nodes:
        if node.op == "call_function":
            for found in (of_input, of_parameter):
                if any(used in found for used in node.all_input_nodes):
                    found.add(node)
    return {node for node in of_input & of_parameter if node.op == "call_function"}


def _last_reads(run: GraphRun, stream: set[fx.Node]) -> dict[fx.Node, int]:
    """The place of the last node that reads each node of the stream; what the graph returns is not read."""
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(run.nodes):
        for used in node.all_input_nodes if node.op != "output" else ():
            if used in stream:
                last[used] = place
    return last


def _cuts(run: GraphRun, stream: set[fx.Node]) -> list[int]:
    """The places p at which at most one value of the stream is made before p and read at p or later."""
    last, cuts, alive = _last_reads(run, stream), [0], 0
    ending: dict[int, int] = {}
    begun = False
    for place, node in enumerate(run.nodes):
        alive -= ending.pop(place, 0)
        if node in last:
            alive += 1
            ending[last[node]] = ending.get(last[node], 0) + 1
        begun = begun or node in stream
        if begun and alive <= 1:
            cuts.append(place + 1)
    if cuts[-1] != len(run.nodes):
        cuts.append(len(run.nodes))
    return cuts


def _pieces(run: GraphRun, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Pieces [first, stop) with at least one watched weight each; nodes without any belong to the piece behind them."""
    pieces, first = [], cuts[0]
    for stop in cuts[1:]:
        if any(node in run.reads for node in run.nodes[first:stop]):
            pieces.append((first, stop))
            first = stop
    return pieces


def _signature(run: GraphRun, first: int, stop: int) -> tuple[object, ...]:
    """The inputs and outputs of each watched weight in a piece."""
    cols = {each.path: each.cols for each in run.watched}
    return tuple(
        (cols[path], str(node.meta["val"].shape[-1]))
        for node in run.nodes[first:stop]
        for path, _ in run.reads.get(node, ())
    )


def _repeat(signatures: Sequence[tuple[object, ...]]) -> tuple[int, int]:
    """(begin, period) of the longest run of pieces that repeats; of equal runs the one with the shortest period."""
    best, found = 0, (0, 1)
    for period in range(1, len(signatures) // 2 + 1):
        length = 0
        for place in range(len(signatures) - period):
            length = length + 1 if signatures[place] == signatures[place + period] else 0
            if length and length + period > best and length >= period:
                best, found = length + period, (place + 1 - length, period)
    return found


def _joined(pieces: Sequence[tuple[int, int]], begin: int, period: int) -> list[tuple[int, int]]:
    """Pieces joined by `period` from `begin` on, and before it in whole periods from the end."""
    bounds = sorted({*range(begin % period, len(pieces), period), 0, len(pieces)})
    return [(pieces[a][0], pieces[b - 1][1]) for a, b in itertools.pairwise(bounds) if b > a]


def _ends(run: GraphRun, stream: set[fx.Node], first: int, stop: int) -> tuple[fx.Node, ...]:
    """The values that a block hands on; of the last one, those that the graph returns."""
    last = _last_reads(run, stream)
    inside = [node for node in run.nodes[first:stop] if node in stream]
    handed = [node for node in inside if last.get(node, -1) >= stop]
    returned = set(run.nodes[-1].all_input_nodes)
    return tuple(handed or [node for node in inside if node in returned])


__all__ = ["Block", "find_blocks"]
