"""Finds the residual stream of a graph by its structure: the values that additions connect, in front of norms.

    h = embedding(ids, E)                     writes the stream
    h = h + linear(attention, Wo)             writes it
    u = rms_norm(h) * gain; linear(u, Wq)     reads it, behind a norm

A rotation of the stream, h -> h Q, leaves the function alone if everything that writes it is rotated, everything that
reads it turns back, and what lies between commutes with Q.  An RMS norm without a gain does: |h Q| = |h|.  A layer norm
does if Q keeps the vector of ones, since then the mean of a row stays.  So gains and biases of norms must move into the
linears behind them.

The search starts at the input of each norm and grows over additions, views of rows and casts.  The first operator that
is none of these ends it, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.rewrites.channels import along, follow_one, shape_of
from qcompiler.frontends.quantise.rewrites.new_parameters import bias_of
from qcompiler.frontends.quantise.rewrites.scale_groups import Vector, described, gain_of, why_fixed
from qcompiler.frontends.weights.weight_uses import as_linear

aten = torch.ops.aten
_NORMS = (aten.layer_norm.default, aten.rms_norm.default)
_LINEARS = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)
_JOINS = (aten.add.Tensor, aten.sub.Tensor, aten.cat.default)
_ROWWISE = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.flatten.using_ints, aten.unflatten.int, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.slice.Tensor, aten.select.int, aten.index.Tensor, aten.index_select.default, aten.clone.default,
    aten.contiguous.default, aten.alias.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout,
    aten._to_copy.default, aten.type_as.default, aten.dropout.default, aten.neg.default,
)  # fmt: skip
"""Views and casts; of these, those that keep the last dimension as it is commute with a rotation of it."""


class NoStreamError(Exception):
    """What stopped the search."""


@dataclass(frozen=True, eq=False)
class Writer:
    """A tensor whose values enter the stream along `axis`: an embedding, a linear's rows, its bias, a vector."""

    weight: GraphWeight
    axis: int


@dataclass(frozen=True, eq=False)
class StreamReader:
    """A linear that reads the stream, behind a norm with `gain` and `shift` or without a norm."""

    linear: fx.Node
    weight: GraphWeight
    gain: Vector | None
    shift: GraphWeight | None


@dataclass
class Stream:
    """A residual stream of `width` numbers."""

    width: int
    values: set[fx.Node] = field(default_factory=set)
    writers: dict[fx.Node, list[Writer]] = field(default_factory=dict)
    readers: list[StreamReader] = field(default_factory=list)
    norms: set[fx.Node] = field(default_factory=set)
    keeps_ones: bool = False
    """Whether a layer norm reads it, so that a rotation must keep the mean of a row."""
    additions: int = 0


def find_streams(tensors: GraphTensors, weights: Sequence[GraphWeight]) -> tuple[list[Stream], dict[str, str]]:
    """The streams of a graph, and for each norm without one (by its place in the model) what stopped the search."""
    found: list[Stream] = []
    reasons: dict[str, str] = {}
    seen: set[fx.Node] = set()
    of = {node: weight for weight in weights for node in weight.nodes}
    for node in list(tensors.graph.nodes):
        h = _normed(node)
        if h is None or h in seen:
            continue
        search = _Search(of, Stream(int(shape_of(h)[-1])))
        try:
            stream = search.run(h)
            found.append(stream)
        except NoStreamError as error:
            reasons[described(node)] = str(error)
        seen |= search.stream.values
    return found, reasons


def _normed(node: fx.Node) -> fx.Node | None:
    """The input of a norm: of torch's own, or of the square from which an RMS norm is computed."""
    h = node.args[0] if node.args else None
    if not isinstance(h, fx.Node) or not isinstance(h.meta.get("val"), torch.Tensor):
        return None
    if node.target in _NORMS or node.target is aten.native_layer_norm.default:
        return h if len(node.args[1]) == 1 else None  # type: ignore[arg-type]
    return h if _root_of_square(node) is not None else None


def _root_of_square(square: fx.Node) -> fx.Node | None:
    """1 / sqrt(mean(h^2) + eps) from the square of h; None for any other square."""
    squared = square.target is aten.pow.Tensor_Scalar and square.args[1] == 2
    squared |= square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    if not squared or len(square.users) != 1:
        return None
    mean = next(iter(square.users))
    if mean.target is not aten.mean.dim or list(mean.args[1]) not in ([-1], [mean.meta["val"].ndim - 1]):  # type: ignore[arg-type]
        return None
    if not (mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim")) or len(mean.users) != 1:
        return None
    root = next(iter(mean.users))
    if root.target in (aten.add.Tensor, aten.add.Scalar) and len(root.users) == 1:
        if not any(isinstance(each, int | float) for each in root.args[:2]):
            return None
        root = next(iter(root.users))
    power = root.args[1] if root.target is aten.pow.Tensor_Scalar else None
    return root if root.target is aten.rsqrt.default or power == -0.5 else None


class _Search:
    def __init__(self, of: dict[fx.Node, GraphWeight], stream: Stream) -> None:
        self.of, self.stream = of, stream
        self.todo: list[fx.Node] = []

    def run(self, h: fx.Node) -> Stream:
        self._add(h)
        while self.todo:
            value = self.todo.pop()
            self._write(value)
            self._read(value)
        if not self.stream.additions:
            raise NoStreamError("nothing is added to its input: it is no residual stream")
        self._check_uses()
        return self.stream

    def _add(self, value: Any) -> None:
        if not isinstance(value, fx.Node) or shape_of(value)[-1:] != [self.stream.width]:
            raise NoStreamError(f"{described(value) if isinstance(value, fx.Node) else value} has another width")
        if value not in self.stream.values:
            self.stream.values.add(value)
            self.todo.append(value)

    # --- where values come from ---

    def _write(self, value: fx.Node) -> None:
        target = value.target
        if value in self.of:
            self.stream.writers[value] = [self._writer(value, value.meta["val"].ndim - 1)]
        elif value.op == "placeholder":
            raise NoStreamError(f"'{value.name}', an input or a state of the model, is part of the stream")
        elif target is aten.embedding.default:
            self.stream.writers[value] = [self._writer(value.args[0], 1)]
        elif target in _LINEARS:
            self._write_linear(value)
        elif target in (aten.add.Tensor, aten.sub.Tensor) and not value.kwargs:
            self.stream.additions += 1
            for each in value.args[:2]:
                self._add(each)
        elif target is aten.cat.default and _last(value, value.args[1] if len(value.args) > 1 else 0) is False:
            for each in value.args[0]:  # type: ignore[union-attr]
                self._add(each)
        elif _scales(value) or self._is_rowwise(value):
            self._add(value.args[0])
        else:
            raise NoStreamError(f"{described(value)} writes the stream, and does not commute with a rotation")

    def _writer(self, node: Any, axis: int) -> Writer:
        if node not in self.of:
            raise NoStreamError(f"{described(node)} is no parameter, and writes the stream")
        return Writer(self.of[node], axis)

    def _write_linear(self, node: fx.Node) -> None:
        for weight in node.all_input_nodes:
            arguments = node.args if node.target is aten.linear.default else as_linear(node, weight)
            if weight in self.of and arguments and arguments[1] is weight:
                held = self.of[weight]
                writers = [Writer(held, 1 if node.target is not aten.linear.default else 0)]
                bias = bias_of(node, held)
                self.stream.writers[node] = writers + ([self._writer(bias, 0)] if bias is not None else [])
                return
        raise NoStreamError(f"{described(node)} writes the stream with a weight that is no parameter")

    # --- what reads them ---

    def _read(self, value: fx.Node) -> None:
        roots = {root for user in value.users if (root := _root_of_square(user)) is not None}
        squares = {user for user in value.users if _root_of_square(user) is not None}
        for user in list(value.users):
            if user in squares or not isinstance(user.meta.get("val"), torch.Tensor | tuple | list):
                if user.op == "output":
                    raise NoStreamError("the stream itself is a result of the model")
                continue
            if user.target in _NORMS or user.target is aten.native_layer_norm.default:
                self._read_norm(user)
            elif user.target is aten.mul.Tensor and roots & set(user.all_input_nodes):
                self.stream.norms.add(user)
                self._behind(user, None, None)
            elif user.target in _LINEARS:
                self._read_linear(user, value, None, None)
            elif user.target in _JOINS or _scales(user) or self._is_rowwise(user):
                self._add(user)
            else:
                raise NoStreamError(f"{described(user)} reads the stream, and does not commute with a rotation")

    def _read_norm(self, node: fx.Node) -> None:
        if len(node.args[1]) != 1:  # type: ignore[arg-type]
            raise NoStreamError(f"{described(node)} norms several dimensions")
        self.stream.norms.add(node)
        centres = node.target is not aten.rms_norm.default
        self.stream.keeps_ones |= centres
        held = [node.args[at] if len(node.args) > at else None for at in (2, 3)]
        gain = self._fixed(held[0], {node}) if held[0] is not None else None
        shift = self._fixed(held[1], {node}) if centres and held[1] is not None else None
        start = node
        if node.target is aten.native_layer_norm.default:
            start = next(user for user in node.users if user.args[1] == 0)
        self._behind(start, Vector(gain) if gain is not None else None, shift)

    def _behind(self, value: fx.Node, gain: Vector | None, shift: GraphWeight | None) -> None:
        """Walks from a norm's result to the linears that read it."""
        for user in list(value.users):
            if user.op != "output" and not isinstance(user.meta.get("val"), torch.Tensor):
                continue
            if user.target in _LINEARS:
                self._read_linear(user, value, gain, shift)
            elif user.op != "output" and self._is_rowwise(user):
                self._behind(user, gain, shift)
            elif user.target is aten.mul.Tensor and gain is None and (found := self._gain(user, value)) is not None:
                self._behind(user, found, None)
            elif user.target is aten.add.Tensor and gain is not None and shift is None and self._shift(user, value):
                self._behind(user, gain, self._shift(user, value))
            else:
                what = "is a result of the model" if user.op == "output" else f"is read by {described(user)}"
                raise NoStreamError(
                    f"the result of {described(value)}, a norm of the stream, {what}, which is no linear"
                )

    def _gain(self, product: fx.Node, value: fx.Node) -> Vector | None:
        for at in (0, 1):
            if product.args[1 - at] is value:
                node, offset, users = gain_of(product.args[at], product, self.of)
                if node is not None and shape_of(node) == [self.stream.width]:
                    weight = self._fixed(node, users)
                    return Vector(weight, 0, offset)
        return None

    def _shift(self, added: fx.Node, value: fx.Node) -> GraphWeight | None:
        other = [each for each in added.args[:2] if each is not value]
        if len(other) == 1 and other[0] in self.of and shape_of(other[0]) == [self.stream.width]:  # type: ignore[arg-type]
            return self._fixed(other[0], {added})
        return None

    def _read_linear(self, node: fx.Node, x: fx.Node, gain: Vector | None, shift: GraphWeight | None) -> None:
        for weight in node.all_input_nodes:
            arguments = node.args if node.target is aten.linear.default else as_linear(node, weight)
            if weight in self.of and arguments and arguments[:2] == (x, weight):
                self.stream.readers.append(StreamReader(node, self.of[weight], gain, shift))
                return
        raise NoStreamError(f"{described(node)} reads the stream with a weight that is no parameter")

    # --- conditions ---

    def _fixed(self, node: Any, users: set[fx.Node]) -> GraphWeight:
        weight = self.of.get(node)
        if weight is None:
            raise NoStreamError(f"a gain or a bias of {described(next(iter(users)))} is no parameter")
        why = why_fixed(weight, users)
        if why:
            raise NoStreamError(why)
        return weight

    def _is_rowwise(self, node: fx.Node) -> bool:
        """Whether an operator only moves whole rows."""
        if node.target not in _ROWWISE or not isinstance(node.args[0], fx.Node):
            return False
        before = along(-1, len(shape_of(node.args[0])), self.stream.width)
        if shape_of(node.args[0])[-1:] != [self.stream.width] or shape_of(node)[-1:] != [self.stream.width]:
            return False
        after = follow_one(node, before)
        return after is not None and torch.equal(after, along(-1, len(shape_of(node)), self.stream.width))

    def _check_uses(self) -> None:
        """Each tensor is used by the stream alone, and in one way; a tied embedding may be a reader's weight, too.

        A linear may read and write, if each product with its weight does.
        """
        ways: dict[int, set[Any]] = {}
        users: dict[int, set[fx.Node]] = {}
        weights: dict[int, GraphWeight] = {}
        written: dict[int, set[fx.Node]] = {}
        read: dict[int, set[fx.Node]] = {}
        for node, writers in self.stream.writers.items():
            for each in writers:
                written.setdefault(id(each.weight), set()).add(node)
                way = "embedding" if node.target is aten.embedding.default else ("writes", each.axis)
                ways.setdefault(id(each.weight), set()).add(way)
                users.setdefault(id(each.weight), set()).update({node} if node.op != "placeholder" else node.users)
                weights[id(each.weight)] = each.weight
        for reader in self.stream.readers:
            key = id(reader.weight)
            ways.setdefault(key, set()).add((id(reader.gain.weight) if reader.gain else 0, id(reader.shift)))
            users.setdefault(key, set()).add(reader.linear)
            read.setdefault(key, set()).add(reader.linear)
            weights[key] = reader.weight
            bias = bias_of(reader.linear, reader.weight) if reader.shift is not None else None
            if bias is not None:  # the norm's bias moves into it
                self._fixed(bias, {each.linear for each in self.stream.readers if each.weight is reader.weight})
        for key, weight in weights.items():
            why = why_fixed(weight, users[key])
            kinds = ways[key] - {"embedding"}
            writes = {way for way in kinds if way[0] == "writes"}
            mixed = "embedding" in ways[key] or read.get(key, written.get(key)) != written.get(key)
            if not why and (len(kinds - writes) > 1 or len(writes) > 1 or (writes and mixed)):
                why = f"'{weight.targets[0]}' is read in several ways"
            if why:
                raise NoStreamError(why)


def _scales(node: fx.Node) -> bool:
    """Whether a node multiplies a value by a number."""
    if node.target in (aten.mul.Scalar, aten.div.Scalar):
        return True
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or not isinstance(node.args[0], fx.Node):
        return False
    return isinstance(node.args[1], int | float)


def _last(node: fx.Node, dim: Any) -> bool:
    return int(dim) % len(shape_of(node)) == len(shape_of(node)) - 1


__all__ = ["NoStreamError", "Stream", "StreamReader", "Writer", "find_streams"]
