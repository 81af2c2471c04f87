"""Finds, by the structure of the graph alone, where a scale of channels can move without a change of the function.

    u = rms_norm(h) * gain        gain / s
    q, k, v = linear(u, Wq), …    columns of Wq, Wk, Wv times s

    v = linear(u, Wv)             rows of Wv (and its bias) / s
    o = linear(attention(…v…), W) columns of W times s, by the channels that they hold

A *producer* is a product with a vector of parameters along the last dimension (the gain of a norm, with its bias), a
norm of torch with a gain, or a linear or a convolution whose weight nothing else reads.  Its *group* are the linears
that its channels reach through operators that commute with a scale (channels.py).  Channels that reach anything else
stay as they are: for a fused projection of queries, keys and values, only the values' channels are free.

Every linear that no group reaches gets the reason.  Nothing here knows a model, a module or a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import FLOATS, GraphWeight
from qcompiler.frontends.quantise.rewrites.channels import Flow, Read, Stop, along, follow, shape_of
from qcompiler.frontends.quantise.rewrites.moved_weights import Added, MovedWeights, Scaled
from qcompiler.frontends.torch.common.empty_weights import is_empty
from qcompiler.frontends.weights.weight_uses import as_linear, reads
from qcompiler.plan.plan import Rewrite

aten = torch.ops.aten
_NORMS = {aten.layer_norm.default: (2, 3), aten.native_layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
"""Places of gain and bias."""
_CASTS = (
    aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.type_as.default, aten.alias.default,
    aten.clone.default,
)  # fmt: skip
_PRODUCTS = (aten.mm.default, aten.matmul.default, aten.addmm.default)


@dataclass(frozen=True, eq=False)
class Vector:
    """A tensor of the producer that is divided by s along `axis`; its value in the graph is the tensor + `offset`."""

    weight: GraphWeight
    axis: int = 0
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight of a group: its columns, on `axis` of the model's tensor, hold channels of the producer.

    `read` is the first product with it, `others` are those behind it, with the same channels.
    """

    weight: GraphWeight
    axis: int
    read: Read
    others: list[Read] = field(default_factory=list)

    @property
    def channel_axis(self) -> int:
        """The dimension of the linear's input that holds the channels."""
        return 1 if self.read.node.target is aten.convolution.default else -1

    def by_column(self, values: torch.Tensor) -> torch.Tensor:
        """The values of the weight as (all others, K)."""
        return values.movedim(self.axis, -1).reshape(-1, values.shape[self.axis])


@dataclass(eq=False)
class Group:
    """One place where scales can move. `free` (channels,) says which channels may have a scale other than one."""

    path: str
    kind: str
    vectors: list[Vector]
    readers: list[Reader]
    free: torch.Tensor
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        return int(self.free.numel())

    def move(self, source: MovedWeights, scales: torch.Tensor, by: Rewrite) -> None:
        """Divides the producer's channels by `scales` (channels,), fp64 and positive, and multiplies the columns, for
        the rewrite `by`."""
        for each in self.vectors:
            moved: list[Any] = [Scaled(each.axis, 1 / scales)]
            if each.offset:
                moved = [Added(torch.tensor(each.offset, dtype=torch.float64)), *moved]
                moved.append(Added(torch.tensor(-each.offset, dtype=torch.float64)))
            source.change(by, each.weight.targets[0], *moved)
        for reader in self.readers:
            source.change(by, reader.weight.targets[0], Scaled(reader.axis, scales[reader.read.channels]))


@dataclass
class Found:
    """The groups, in the order of the graph, and for each linear without one (by its path) what stopped it."""

    groups: list[Group] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def find_groups(tensors: GraphTensors, weights: Sequence[GraphWeight]) -> Found:
    """Every place of the graph where scales can move."""
    return _Finder(tensors, weights).run()


@dataclass(frozen=True, eq=False)
class _Producer:
    node: fx.Node
    path: str
    kind: str
    vectors: tuple[Vector, ...]
    axis: int
    channels: int


class _Finder:
    def __init__(self, tensors: GraphTensors, weights: Sequence[GraphWeight]) -> None:
        self.tensors, self.graph = tensors, tensors.graph
        self.of = {node: weight for weight in weights for node in weight.nodes}
        self.linears = {w.targets[0]: w for w in weights if w.kinds & {"linear", "conv"} and reads_of(w)}
        self.states = zeroed_states(tensors)
        self.found = Found()
        self.taken: dict[str, str] = {}
        self.stopped: dict[str, str] = {}

    def run(self) -> Found:
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._try(node)
        for path, weight in self.linears.items():
            if path not in self.taken:
                self.found.reasons[path] = self.stopped.get(path) or self._no_producer(weight)
        return self.found

    def _try(self, node: fx.Node) -> None:
        producer, why = self._producer(node)
        if producer is None:
            return
        start = node
        if node.target is aten.native_layer_norm.default:
            start = next((user for user in node.users if user.args[1] == 0), node)
        flow = follow(start, along(producer.axis, len(shape_of(start)), producer.channels), self.states)
        readers = self._readers(producer, flow) if not why else []
        free = torch.ones(producer.channels, dtype=torch.bool)
        for stop in flow.stops:
            free[stop.channels] = False
        reached = [reader for reader in readers if free[reader.read.channels].any()]
        if reached and len(set(self._dtypes(producer, reached))) == 1:
            for reader in reached:
                self.taken[reader.weight.targets[0]] = producer.path
            self.found.groups.append(
                Group(
                    producer.path, producer.kind, list(producer.vectors), reached, free, reached[0].weight.tensor.dtype
                )
            )
            return
        if flow.stops and not why:
            why = f"the output of {producer.path} also goes elsewhere: {flow.stops[0].why}"
        for read in flow.reads:
            weight = self.of.get(read.weight)
            if weight is not None:
                self.stopped.setdefault(weight.targets[0], why or "its types differ from those in front of it")

    def _dtypes(self, producer: _Producer, readers: Sequence[Reader]) -> list[torch.dtype]:
        weights = [each.weight for each in producer.vectors] + [each.weight for each in readers]
        return [weight.tensor.dtype for weight in weights]

    # --- producers ---

    def _producer(self, node: fx.Node) -> tuple[_Producer | None, str]:
        """The producer that a node is, and why its tensors cannot be scaled, if they cannot."""
        if node.target in _NORMS:
            return self._norm(node)
        if node.target is aten.mul.Tensor:
            return self._gain(node)
        if node.target in (aten.linear.default, aten.convolution.default):
            return self._linear(node)
        if node.target in _PRODUCTS:
            return self._transposed(node)
        return None, ""

    def _norm(self, node: fx.Node) -> tuple[_Producer | None, str]:
        places = [node.args[at] if len(node.args) > at else None for at in _NORMS[node.target]]  # type: ignore[index]
        gain = places[0]
        if not isinstance(gain, fx.Node) or gain not in self.of or gain.meta["val"].ndim != 1:
            return None, ""
        held = [each for each in places if isinstance(each, fx.Node)]
        return self._vectors(node, "norm", [(each, 0, 0.0) for each in held], -1, {node})

    def _gain(self, node: fx.Node) -> tuple[_Producer | None, str]:
        """A product with a vector along the last dimension, and a bias that is added to it."""
        for at in (0, 1):
            gain, offset, users = gain_of(node.args[at], node, self.of)
            if gain is None:
                continue
            other = node.args[1 - at]
            if not isinstance(other, fx.Node) or other in self.of or shape_of(gain)[-1] != shape_of(node)[-1]:
                continue
            return self._vectors(node, "norm", [(gain, 0, offset)], -1, users)
        return None, ""

    def _linear(self, node: fx.Node) -> tuple[_Producer | None, str]:
        weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
        if not isinstance(weight, fx.Node) or weight not in self.of:
            return None, ""
        conv = node.target is aten.convolution.default
        if conv and node.args[6]:  # a transposed convolution has its output channels on the other axis
            return None, ""
        held = [(each, 0, 0.0) for each in (weight, bias) if isinstance(each, fx.Node)]
        return self._vectors(node, "linear", held, 1 if conv else -1, {node})

    def _transposed(self, node: fx.Node) -> tuple[_Producer | None, str]:
        """x @ W (+ b), with W as (in, out)."""
        for weight in node.all_input_nodes:
            arguments = as_linear(node, weight) if weight in self.of and self.of[weight].transposed else ()
            if arguments:
                bias = [(each, 0, 0.0) for each in arguments[2:]]
                return self._vectors(node, "linear", [(weight, 1, 0.0), *bias], -1, {node})
        return None, ""

    def _vectors(
        self, node: fx.Node, kind: str, held: Sequence[tuple[fx.Node, int, float]], axis: int, users: set[fx.Node]
    ) -> tuple[_Producer | None, str]:
        vectors, why = [], ""
        for each, at, offset in held:
            weight = self.of.get(each)
            if weight is None:
                return None, ""
            why = why or why_fixed(weight, users)
            vectors.append(Vector(weight, at, offset))
        first = vectors[0].weight
        path = first.targets[0].rpartition(".")[0] or first.targets[0]
        return _Producer(node, path, kind, tuple(vectors), axis, int(first.tensor.shape[held[0][1]])), why

    # --- readers ---

    def _readers(self, producer: _Producer, flow: Flow) -> list[Reader]:
        """The readers whose columns may change. A weight that may not adds a stop to the flow."""
        found: dict[str, Reader] = {}
        ours = {read.node for read in flow.reads}
        for read in flow.reads:
            weight = self.of.get(read.weight)
            why = (
                "a weight that is computed reads it" if weight is None else self._why_no_reader(weight, ours, producer)
            )
            if weight is not None and not why:
                known = found.get(weight.targets[0])
                if known is not None and not torch.equal(known.read.channels, read.channels):
                    why = f"'{weight.targets[0]}' reads it twice, with different channels"
                axis = 0 if weight.transposed else 1
                if known is None:
                    found[weight.targets[0]] = Reader(weight, axis, read)
                else:
                    known.others.append(read)
            if why:
                flow.stops.append(_stop_of(read, why))
        return list(found.values())

    def _why_no_reader(self, weight: GraphWeight, ours: set[fx.Node], producer: _Producer) -> str:
        path = weight.targets[0]
        if any(vector.weight is weight for vector in producer.vectors):
            return f"'{path}' reads its own output"
        if path in self.taken:
            return f"'{path}' has its scale from {self.taken[path]}"
        why = why_fixed(weight, ours)
        if not why and weight.experts is not None:
            why = f"'{path}' holds experts"
        return why

    def _no_producer(self, weight: GraphWeight) -> str:
        """What stands in front of a linear that no scale can reach."""
        linear, x = reads_of(weight)[0]
        del linear
        seen = x
        while seen.op == "call_function" and len(seen.all_input_nodes) == 1 and _is_view(seen):
            seen = seen.all_input_nodes[0]
        if seen.op == "placeholder":
            return "its input is an input of the model"
        return f"its input comes from {described(seen)}, which holds no scale of channels"


def _stop_of(read: Read, why: str) -> Stop:
    return Stop(read.node, read.channels.unique(), why)  # type: ignore[no-untyped-call]


def gain_of(given: Any, user: fx.Node, of: Mapping[fx.Node, GraphWeight]) -> tuple[fx.Node | None, float, set[fx.Node]]:
    """The parameter of a gain `w`, `w + 1` or a cast of them; the constant; the nodes that may read it."""
    users, offset = {user}, 0.0
    node = given
    while isinstance(node, fx.Node) and node not in of:
        if node.op != "call_function" or set(node.users) - users:
            return None, 0.0, set()
        users.add(node)
        if node.target in (aten.add.Tensor, aten.add.Scalar) and not offset and not node.kwargs:
            numbers = [each for each in node.args[:2] if isinstance(each, int | float)]
            if len(numbers) != 1:
                return None, 0.0, set()
            offset = float(numbers[0])
        elif node.target not in _CASTS:
            return None, 0.0, set()
        node = next((each for each in node.args if isinstance(each, fx.Node)), None)
    fits = isinstance(node, fx.Node) and node.meta["val"].ndim == 1 and node.meta["val"].dtype in FLOATS
    return (node, offset, users) if fits and isinstance(node, fx.Node) else (None, 0.0, set())


def why_fixed(weight: GraphWeight, users: set[fx.Node]) -> str:
    """Why the values of a producer's tensor cannot change: "" if they can."""
    path = weight.targets[0]
    if not weight.is_parameter or weight.specs[0].kind != InputKind.PARAMETER:
        return f"'{path}' is no parameter"
    if weight.codes is not None:
        return f"the source has '{path}' as codes"
    others = [user for user in weight.users if user not in users]
    return f"'{path}' is also read by {described(others[0])}" if others else ""


def reads_of(weight: GraphWeight) -> list[tuple[fx.Node, fx.Node]]:
    """(product, its rows) for each linear or convolution that reads a weight."""
    found = list(reads(weight.nodes))
    for user in weight.users:
        if user.target is aten.convolution.default and user.args[1] in weight.nodes:
            x = user.args[0]
            assert isinstance(x, fx.Node)
            found.append((user, x))
    return found


def zeroed_states(tensors: GraphTensors) -> list[str]:
    """Placeholders of buffers that the graph writes and that begin with zeros."""
    mutated = set(tensors.program.graph_signature.buffers_to_mutate.values())
    found = []
    for spec in tensors.specs:
        held = tensors.state.get(str(spec.target)) if spec.target in mutated else None
        if not isinstance(held, torch.Tensor) or is_empty(held):
            continue
        if held.dtype in FLOATS and not bool(held.any()):
            found.append(spec.arg.name)
    return found


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    casts = node.target in _CASTS
    return casts or (schema is not None and any(argument.alias_info is not None for argument in schema.returns))


def described(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    where = next((path for path, _ in reversed(list(stack.values())) if path), "")
    name = str(node.target).removesuffix(".default")
    return f"{name} in {where}" if where else name


__all__ = [
    "Found", "Group", "Reader", "Vector", "described", "find_groups", "gain_of", "reads_of", "why_fixed",
    "zeroed_states",
]  # fmt: skip
