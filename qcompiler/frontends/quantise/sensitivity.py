"""What each weight of a model costs in each format: the float graph with one weight quantised, compared with itself.

    float       x -> embed -> q -> … -> head -> logits
    one weight  x -> embed -> q -> … -> head -> KL(logits || logits)            q in q4_K, all others as they are
                               |
                               runs from the first operator that reads q; what lies before it ran once

All inputs run together, node by node.  At the first operator that reads a weight, the rest of the graph runs once for
each candidate, one input at a time, from the values that are alive there.  So a candidate costs the part of the graph
behind its weight, and memory is that of the values that are alive, once for each input and twice for one of them.

The same operator gives the error of the layer's own output, and its worst channel.  With `by_output`, only one
candidate of each weight runs to the end; the others' cost follows from the squared error of the layer's output, to
which KL is proportional while errors are small.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from qcompiler.config import resolve_format
from qcompiler.errors import ArgumentError, CalibrationError, WorkdirError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.calibrate import chained_digest
from qcompiler.frontends.quantise.graph_run import Env, GraphRun, Values
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight, naming_errors
from qcompiler.frontends.quantise.judge import Distance, Judge, distance
from qcompiler.frontends.torch.common.values import row_major, to_numpy
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.progress import Runs, note

aten = torch.ops.aten
VERSION = 1
CODES = 1 << 30
"""Bytes of codes that are kept, so that a weight is encoded once for each format."""
FLOAT = "float"
"""The candidate that keeps a weight as it is."""

Wanted = Sequence[tuple[GraphWeight, Sequence[str]]]
"""Weights, each with its candidates."""


@dataclass(frozen=True)
class Effect:
    """What storing one weight in a format does. Errors are squared and relative.

    `cost` is the distance of the model's outputs when nothing else is quantised; None where it was not measured.
    `output_error` is that of the first operator that reads the weight, `channel` its output channel with the largest
    error, and `dead` the number of its channels that are zero for all data.
    """

    cost: float | None
    weight_error: float
    output_error: float
    channel: int = 0
    channel_error: float = 0.0
    dead: int = 0


@dataclass
class Study:
    """A float graph, its weights, and the inputs that it is studied on."""

    tensors: GraphTensors
    weights: Sequence[GraphWeight]
    judge: Judge
    inputs: Sequence[Any]
    folder: Path | None = None
    codes: dict[tuple[str, str], PackedTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values: dict[str, Callable[[], torch.Tensor]] = {
            node.name: partial(self.tensors.value, weight) for weight in self.weights for node in weight.nodes
        }
        self.run = GraphRun(self.tensors.program, [], self.values, kept=self.judge.nodes)
        self.place = {node: number for number, node in enumerate(self.run.nodes)}
        self.leaves = [self._leaves(number, given) for number, given in enumerate(self.inputs)]
        if not self.leaves:
            raise CalibrationError("the data has no inputs; it is an iterable of inputs of the model")
        self.first: dict[fx.Node, list[GraphWeight]] = {}
        for weight in (each for each in self.weights if each.kinds):
            self.first.setdefault(min(weight.users, key=self.place.__getitem__), []).append(weight)
        self.silent = {weight.targets[0] for each in self.first.values() for weight in each}
        for number, leaves in enumerate(self.leaves):
            self.judge.keep(self._float_run(leaves), number)
        self.judge.check()

    def _leaves(self, number: int, given: Any) -> list[Any]:
        try:
            leaves = self.run.leaves(given)
        except ArgumentError as error:
            raise type(error)(f"data[{number}]: {error}") from None
        for node, leaf in zip(self.run.inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not torch.isfinite(leaf).all():
                raise CalibrationError(f"data[{number}] holds NaN or infinity for '{node.name}'; leave that input out")
        return leaves

    def _float_run(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """The float outputs for one input. Layers whose input is not all zero are not `silent`."""
        env = self.run.begun(leaves)
        for node in self.run.nodes:
            for weight in self.first.get(node, ()):
                x = next((env[each] for each in node.all_input_nodes if each not in weight.nodes and each in env), None)
                if not isinstance(x, torch.Tensor) or not x.is_floating_point() or bool(x.any()):
                    self.silent.discard(weight.targets[0])
            self.run.step(node, [env])
        return self._judged(env, self.values)

    def _judged(self, env: Env, values: Values) -> list[torch.Tensor]:
        return [env[node] if node in env else values[node.name]() for node in self.judge.nodes]

    # --- one weight at a time ---

    def effects(self, wanted: Wanted, *, by_output: bool) -> dict[tuple[str, str], Effect]:
        """By the first path of a weight and the text of a format.

        CalibrationError for a layer whose inputs are all zero, and for results that are not finite; WorkdirError.
        """
        for weight, texts in wanted:
            if weight.targets[0] in self.silent and len(texts) > 1:
                raise CalibrationError(
                    f"the inputs of '{weight.targets[0]}' are zero for all data, so nothing is known of its formats; "
                    f"give other data, or its format: rules={{{weight.targets[0]!r}: 'int8'}}"
                )
        found: dict[tuple[str, str], Effect] = {}
        journal = _Journal.of(self, by_output) if self.folder is not None else None
        if journal is not None:
            found.update(journal.read())
        texts_of = {weight.targets[0]: texts for weight, texts in wanted}
        ahead: dict[fx.Node, list[tuple[GraphWeight, Sequence[str]]]] = {}
        for node, weights in self.first.items():
            each = [(weight, texts_of.get(weight.targets[0], ())) for weight in weights]
            ahead[node] = [pair for pair in each if not _is_known(found, *pair, by_output)]
        ahead = {node: each for node, each in ahead.items() if each}
        with Runs("measuring sensitivities", self._work(ahead, by_output)) as progress:
            sink = journal.open() if journal is not None else None
            try:
                self._over(ahead, found, progress, sink, by_output)
            finally:
                if sink is not None:
                    sink.close()
        return {
            (weight.targets[0], text): effect
            for weight, texts in wanted
            for text, effect in _costed({text: _known(found, weight, text) for text in texts}).items()
        }

    def _over(
        self,
        ahead: Mapping[fx.Node, Wanted],
        found: dict[tuple[str, str], Effect],
        progress: Runs,
        sink: TextIO | None,
        by_output: bool,
    ) -> None:
        envs = [self.run.begun(leaves) for leaves in self.leaves]
        left = len(ahead)
        for place, node in enumerate(self.run.nodes):
            if not left:
                return
            for weight, texts in ahead.get(node, ()):

                def measured(text: str, full: bool, weight: GraphWeight = weight, place: int = place) -> None:
                    known = found.get((weight.targets[0], text))
                    if text != FLOAT and (known is None or (full and known.cost is None)):
                        effect = self._effect(weight, text, place, envs, full)
                        found[weight.targets[0], text] = effect
                        _write(sink, weight.targets[0], text, effect)
                    progress.step(len(self.run.nodes) - place if full else 1)

                for text in texts:
                    measured(text, not by_output)
                anchor = _anchor({text: _known(found, weight, text) for text in texts})
                if by_output and anchor is not None:
                    measured(anchor, True)
            left -= node in ahead
            if left:
                self.run.step(node, envs)

    def _work(self, ahead: Mapping[fx.Node, Wanted], by_output: bool) -> list[int]:
        """The nodes that each measurement runs."""
        found: list[int] = []
        for node, each in ahead.items():
            behind = len(self.run.nodes) - self.place[node]
            for _, texts in each:
                found += [1 if by_output else behind] * len(texts) + [behind] * by_output
        return found

    def _effect(self, weight: GraphWeight, text: str, place: int, envs: Sequence[Env], full: bool) -> Effect:
        value = self.stored(weight, text)
        values = {**self.values, **{node.name: lambda: value for node in weight.nodes}}
        node, sums, found = self.run.nodes[place], _Channels(), []
        for number, env in enumerate(envs):
            plain, own = dict(env), dict(env)
            self.run.step(node, [plain])
            self.run.step(node, [own], values)
            sums.add(node, plain.get(node), own.get(node))
            del plain
            if full:
                found.append(self.judge.distance(number, self._to_the_end(place + 1, own, values)))
        cost = distance(found).mean if full else None
        if not (math.isfinite(cost or 0.0) and math.isfinite(sums.error)):
            raise CalibrationError(
                f"the outputs hold NaN or infinity when '{weight.targets[0]}' is stored as {text}: leave that "
                "candidate out"
            )
        float_value = self.tensors.value(weight)
        return Effect(cost, _relative(float_value, value), sums.error, *sums.worst(), sums.dead)

    def _to_the_end(self, place: int, env: Env, values: Values) -> list[torch.Tensor]:
        """The judged outputs of one input, from a node on. `env` is used up."""
        for node in self.run.nodes[place:]:
            self.run.step(node, [env], values)
        return self._judged(env, values)

    # --- all weights together ---

    def whole(self, chosen: Mapping[str, str]) -> Distance:
        """The distance of the graph whose weights are all quantised: formats by the first path of each weight.

        Inputs run together up to the last operator that reads a weight, and one at a time from there on, so that
        logits are in memory for one input only.
        """
        by_path = {weight.targets[0]: weight for weight in self.weights}
        values = dict(self.values)
        for path, text in chosen.items():
            if text != FLOAT:
                for node in by_path[path].nodes:
                    values[node.name] = partial(self.stored, by_path[path], text)
        last = max((self.place[user] for path in chosen for user in by_path[path].users), default=0)
        envs = [self.run.begun(leaves) for leaves in self.leaves]
        with Runs("running the whole recipe", [1] * last + [len(self.run.nodes) - last] * len(envs)) as progress:
            for node in self.run.nodes[:last]:
                self.run.step(node, envs, values)
                progress.step(1)
            found, held = [], dict[str, torch.Tensor]()

            def once(name: str) -> torch.Tensor:
                if name not in held:
                    held[name] = values[name]()
                return held[name]

            behind = {name: partial(once, name) for name in values}
            for number in range(len(envs)):
                found.append(self.judge.distance(number, self._to_the_end(last, envs[number], behind)))
                envs[number] = {}
                progress.step(len(self.run.nodes) - last)
        result = distance(found)
        if not math.isfinite(result.mean):
            raise CalibrationError(
                "the outputs hold NaN or infinity when all weights are stored as the recipe says, though not with one "
                "at a time: give a larger budget, or leave out the candidates of the fewest bits"
            )
        return result

    # --- values ---

    def stored(self, weight: GraphWeight, text: str) -> torch.Tensor:
        """What a weight decodes to in a format, in the model's order and type."""
        packed = self.codes.get((weight.targets[0], text))
        if packed is None:
            found = row_major(weight.arranged(self.tensors.value(weight)))
            with naming_errors(replace(weight, format=text)):
                packed = encode(resolve_format(text), to_numpy(found.reshape(weight.shape)))
            if sum(each.data.nbytes for each in self.codes.values()) + packed.data.nbytes <= CODES:
                self.codes[weight.targets[0], text] = packed
        decoded = torch.from_numpy(packed.format.decode(packed)).to(weight.tensor.dtype)
        return weight.restored(decoded)


# --- errors of a layer -----------------------------------------------------------------------------------------------


class _Channels:
    """Squares of the results of one operator, and of their errors, summed for each channel."""

    def __init__(self) -> None:
        self.squares: npt.NDArray[np.float64] = np.zeros(0)
        self.errors: npt.NDArray[np.float64] = np.zeros(0)

    def add(self, node: fx.Node, plain: Any, own: Any) -> None:
        """`plain` is the float result. Of several results the first counts, of a convolution dim 1 is the channel."""
        plain, own = (each[0] if isinstance(each, tuple | list) else each for each in (plain, own))
        if not isinstance(plain, torch.Tensor) or not plain.is_floating_point() or not plain.ndim:
            return
        axis = 1 if node.target is aten.convolution.default else plain.ndim - 1
        others = [dim for dim in range(plain.ndim) if dim != axis]
        squares, errors = (
            (each.square().sum(others) if others else each.square()).cpu().numpy()
            for each in (plain.double(), own.double() - plain.double())
        )
        if len(self.squares) not in (0, len(squares)):  # a channel that is a dynamic dimension
            squares, errors = squares.sum(keepdims=True), errors.sum(keepdims=True)
            self.squares, self.errors = self.squares.sum(keepdims=True), self.errors.sum(keepdims=True)
        self.squares = self.squares + squares if len(self.squares) else squares
        self.errors = self.errors + errors if len(self.errors) else errors

    @property
    def error(self) -> float:
        total = float(self.squares.sum())
        return float(self.errors.sum()) / total if total else 0.0

    @property
    def dead(self) -> int:
        return int(np.count_nonzero(self.squares == 0))

    def worst(self) -> tuple[int, float]:
        """The channel with the largest relative error, and that error; channels that are always zero have none."""
        shares = np.divide(self.errors, self.squares, out=np.zeros_like(self.errors), where=self.squares > 0)
        place = int(shares.argmax()) if len(shares) else 0
        return place, float(shares[place]) if len(shares) else 0.0


def _relative(plain: torch.Tensor, stored: torch.Tensor) -> float:
    wide = plain.detach().cpu().double()
    total = float(wide.square().sum())
    return float((stored.double() - wide).square().sum()) / total if total else 0.0


def _known(found: Mapping[tuple[str, str], Effect], weight: GraphWeight, text: str) -> Effect:
    return Effect(0.0, 0.0, 0.0) if text == FLOAT else found[weight.targets[0], text]


def _is_known(
    found: Mapping[tuple[str, str], Effect], weight: GraphWeight, texts: Sequence[str], by_output: bool
) -> bool:
    """Whether nothing is left to measure."""
    if any(text != FLOAT and (weight.targets[0], text) not in found for text in texts):
        return False
    each = {text: _known(found, weight, text) for text in texts}
    if by_output:
        anchor = _anchor(each)
        return anchor is None or each[anchor].cost is not None
    return all(effect.cost is not None for effect in each.values())


def _anchor(effects: Mapping[str, Effect]) -> str | None:
    """The candidate that runs to the end: the one in the middle by the error of the output. None without errors."""
    known = sorted((effect.output_error, text) for text, effect in effects.items() if effect.output_error > 0)
    return known[len(known) // 2][1] if known else None


def _costed(effects: Mapping[str, Effect]) -> dict[str, Effect]:
    """The effects with costs that were not measured, in proportion to the error of the layer's output."""
    anchor = _anchor(effects)
    base = effects[anchor] if anchor is not None else None
    per = (base.cost or 0.0) / base.output_error if base is not None else 0.0
    return {
        text: effect if effect.cost is not None else replace(effect, cost=per * effect.output_error)
        for text, effect in effects.items()
    }


# --- the journal -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Journal:
    """``sensitivity-<digest>.jsonl`` in the working folder: a line for each weight and candidate."""

    path: Path

    @staticmethod
    def of(study: Study, by_output: bool) -> _Journal:
        chain = ""
        for each in study.leaves:
            chain = chained_digest(chain, each)
        judged = [study.judge.measure, [node.name for node in study.judge.nodes], by_output]
        identities = study.tensors.identities(study.weights)
        facts = [VERSION, _graphs(study.tensors.program.graph_module), chain, judged, identities]
        assert study.folder is not None
        return _Journal(
            study.folder / f"sensitivity-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.jsonl"
        )

    def read(self) -> dict[tuple[str, str], Effect]:
        """What was measured before. A last line that was cut by a kill is left out."""
        found: dict[tuple[str, str], Effect] = {}
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return found
        except (OSError, UnicodeDecodeError) as error:
            note(f"{self.path} cannot be read ({error}): sensitivities are measured again")
            return found
        for line in filter(None, lines):
            try:
                path, text, effect = json.loads(line)
                found[str(path), str(text)] = _checked(Effect(**effect))
            except (ValueError, TypeError):
                note(f"a line of {self.path} cannot be read: it is measured again")
        if found:
            note(f"{len(found)} sensitivities were measured before ({self.path.name})")
        return found

    def open(self) -> TextIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a")
            if file.tell():
                file.write("\n")  # ends a line that was cut; an empty line means nothing
            return file
        except OSError as error:
            raise WorkdirError(f"cannot write {self.path}: {error}") from error


def _checked(effect: Effect) -> Effect:
    """ValueError for what no measurement gives; TypeError for no number."""
    numbers = [effect.weight_error, effect.output_error, effect.channel_error, effect.channel, effect.dead]
    if not all(math.isfinite(each) and each >= 0 for each in (*numbers, effect.cost or 0.0)):
        raise ValueError(effect)
    return effect


def _graphs(module: fx.GraphModule) -> list[str]:
    """The text of a graph and of those inside it: branches, loops."""
    return [str(each.graph) for each in module.modules() if isinstance(each, fx.GraphModule)]


def _write(sink: TextIO | None, path: str, text: str, effect: Effect) -> None:
    if sink is None:
        return
    try:
        sink.write(json.dumps([path, text, asdict(effect)]) + "\n")
        sink.flush()
    except OSError as error:
        raise WorkdirError(f"cannot write {sink.name}: {error}") from error


__all__ = ["FLOAT", "Effect", "Study"]
