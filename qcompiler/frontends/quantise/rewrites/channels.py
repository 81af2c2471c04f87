"""Follows the channels of a value through a graph: which elements hold a multiple of which channel.

    y = linear(x, W)          (b, s, 128)   channel of an element: its last index
    view, transpose           (b, 2, s, 64)                        64 * head + last index
    expand, reshape           (b, 4, s, 64)                        two heads hold each channel (grouped queries)
    attention(q, k, y)        (b, 4, s, 64)                        the same: it is linear in its values
    reshape                   (b, s, 256)                          column -> channel, of 128

If channel c of y is divided by s[c], every element that holds channel c is divided by s[c], and a linear that reads
these columns gets back what it computed before if its columns are multiplied.  `follow` walks from a value to all that
reads it.  It returns the linears that it reaches, and the operators that do not commute with such a scale.

Labels are an integer tensor with the value's number of dimensions: the channel of each element.  A dimension that does
not matter has size 1, so symbolic sizes never need a number.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from qcompiler.frontends.weights.weight_uses import as_linear

aten = torch.ops.aten
Labels = torch.Tensor
Size = Any
"""An int, or a sympy expression."""


@dataclass(frozen=True, eq=False)
class Read:
    """A linear, or a convolution, whose columns are channels: `channels` (K,)."""

    node: fx.Node
    weight: fx.Node
    x: fx.Node
    channels: Labels


@dataclass(frozen=True, eq=False)
class Stop:
    """An operator that does not commute with a scale of `channels`."""

    node: fx.Node
    channels: Labels
    why: str


@dataclass
class Flow:
    """What reads a value: linears, and operators that keep its channels where they are."""

    reads: list[Read] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    labels: dict[fx.Node, Any] = field(default_factory=dict)


class _NotLinearError(Exception):
    """An operator does not commute with a scale of channels; its text says why."""


def along(axis: int, rank: int, count: int) -> Labels:
    """Labels of a value whose `axis` holds `count` channels in order."""
    shape = [1] * rank
    shape[axis] = count
    return torch.arange(count).reshape(shape)


def follow(start: fx.Node, labels: Labels, states: Iterable[str] = ()) -> Flow:
    """Follows the channels of `start` to every reader.

    `states` are the placeholders of buffers that begin with zeros and are written by the graph: a cache.
    """
    walk = _Walk(frozenset(states))
    walk.flow.labels[start] = labels
    node = start.next
    while node.op != "root":
        used = [each for each in node.all_input_nodes if each in walk.flow.labels]
        if used:
            walk.visit(node, used)
        node = node.next
    return walk.flow


def follow_one(node: fx.Node, labels: Labels) -> Labels | None:
    """Labels of a node's result if its first operand has `labels` and no other has any; None if it stops them."""
    rule, first = _RULES.get(node.target), _args(node)[0]
    if rule is None or not isinstance(first, fx.Node):
        return None
    try:
        found = rule(node, {first: labels})
    except _NotLinearError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def size_of(size: Any) -> Size:
    """An int, or the sympy expression of a symbolic size."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_Integer else expr
    return int(size)


def shape_of(node: fx.Node) -> list[Size]:
    return [size_of(each) for each in node.meta["val"].shape]


@dataclass
class _Walk:
    states: frozenset[str]
    flow: Flow = field(default_factory=Flow)

    def visit(self, node: fx.Node, used: Sequence[fx.Node]) -> None:
        if node.op == "output":
            returned = [each for each in used if each.target is not aten.index_copy.default]
            for each in returned:
                self._stop(node, [each], "it is a result of the model")
            return
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor | tuple | list):  # a size, or an assertion about the type
            return
        if node.target is aten.scaled_dot_product_attention.default:
            others = [each for each in (*_args(node)[:2], *_args(node)[3:]) if each in self.flow.labels]
            if others:  # of a fused projection, the channels of queries and keys stay, and those of values go on
                self._stop(node, others, "attention multiplies queries with keys")
            if _args(node)[2] not in self.flow.labels:
                return
        try:
            if not self._reads(node, used):
                self.flow.labels[node] = self._through(node, used)
        except _NotLinearError as error:
            self._stop(node, used, str(error) or f"{_name(node)} does not commute with a scale of channels")

    def _stop(self, node: fx.Node, used: Sequence[fx.Node], why: str) -> None:
        parts = [part.reshape(-1) for each in used for part in _parts(self.flow.labels[each])]
        channels: Labels = torch.cat(parts).unique()  # type: ignore[no-untyped-call]
        self.flow.stops.append(Stop(node, channels, why))

    def _reads(self, node: fx.Node, used: Sequence[fx.Node]) -> bool:
        """Whether a node is a linear or a convolution that reads channels as its columns."""
        arguments: tuple[Any, ...] = ()
        axis = -1
        if node.target is aten.linear.default:
            arguments = _args(node)
        elif node.target is aten.convolution.default:
            arguments, axis = _args(node), 1
            if _args(node)[8] != 1 or _args(node)[6]:
                raise _NotLinearError("its channels are read by a grouped or a transposed convolution")
        else:
            for weight in node.all_input_nodes:
                arguments = arguments or (as_linear(node, weight) if weight.op == "placeholder" else ())
        if not arguments:
            return False
        x, weight = arguments[0], arguments[1]
        if list(used) != [x] or not isinstance(weight, fx.Node) or weight.op != "placeholder":
            raise _NotLinearError("it reaches a product by something other than its rows")
        labels = self.flow.labels[x]
        axis %= labels.ndim
        if labels.numel() != labels.shape[axis] or labels.shape[axis] != shape_of(x)[axis]:
            raise _NotLinearError("a linear reads it with channels in more than its columns")
        self.flow.reads.append(Read(node, weight, x, labels.reshape(-1)))
        return True

    def _through(self, node: fx.Node, used: Sequence[fx.Node]) -> Any:
        if node.target is aten.index_copy.default:
            return self._into_state(node, used)
        rule = _RULES.get(node.target)
        if rule is None:
            raise _NotLinearError
        return rule(node, self.flow.labels)

    def _into_state(self, node: fx.Node, used: Sequence[fx.Node]) -> Labels:
        """A cache that only this writes and that begins with zeros: all that it holds has the scale of its channels."""
        cache, source = _args(node)[0], _args(node)[3]
        if list(used) != [source] or not isinstance(cache, fx.Node) or cache.name not in self.states:
            raise _NotLinearError("it is copied into a tensor that holds other values")
        if list(cache.users) != [node]:
            raise _NotLinearError("it is written to a state that is read elsewhere")
        labels: Labels = self.flow.labels[source]
        if labels.shape[int(_args(node)[1])] != 1:
            raise _NotLinearError
        return labels


def _args(node: fx.Node) -> Any:
    """The arguments of a call: what they are is the operator's business."""
    return node.args


def _parts(labels: Any) -> list[Labels]:
    return list(labels) if isinstance(labels, list) else [labels]


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


# --- rules -----------------------------------------------------------------------------------------------------------

Known = dict[fx.Node, Any]
Rule = Callable[[fx.Node, Known], Any]
_RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return add


def _only(node: fx.Node, known: Known, at: int = 0) -> Labels:
    """The labels of the operand at a place, the only one that has labels: x / x and x @ x have two such operands."""
    operand = _args(node)[at]
    labelled = [each for each in _args(node) if isinstance(each, fx.Node) and each in known]
    if not isinstance(operand, fx.Node) or labelled != [operand]:
        raise _NotLinearError
    if any(each in known for each in node.all_input_nodes if each is not operand):  # in a list, or by keyword
        raise _NotLinearError
    labels = known.get(operand)
    if not isinstance(labels, torch.Tensor):
        raise _NotLinearError
    return labels


@_rule(
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.to.dtype,
    aten.to.dtype_layout, aten._to_copy.default, aten.neg.default, aten.relu.default, aten.lift_fresh_copy.default,
    aten.mul.Scalar, aten.div.Scalar, aten.leaky_relu.default, aten.type_as.default,
)  # fmt: skip
def _same(node: fx.Node, known: Known) -> Labels:
    """Elementwise and positively homogeneous: f(x / s) = f(x) / s for s > 0."""
    if not node.meta["val"].dtype.is_floating_point:
        raise _NotLinearError("it is rounded to integers")
    return _only(node, known)


@_rule(aten.dropout.default)
def _dropout(node: fx.Node, known: Known) -> Labels:
    if _args(node)[2]:
        raise _NotLinearError
    return _only(node, known)


@_rule(aten.mul.Tensor)
def _product(node: fx.Node, known: Known) -> Labels:
    held = [each for each in _args(node)[:2] if isinstance(each, fx.Node) and each in known]
    if len(held) != 1 or _args(node)[0] is _args(node)[1]:
        raise _NotLinearError("it is multiplied with itself")
    return _aligned(known[held[0]], node)


@_rule(aten.div.Tensor)
def _quotient(node: fx.Node, known: Known) -> Labels:
    return _aligned(_only(node, known), node)


@_rule(aten.add.Tensor, aten.sub.Tensor)
def _sum(node: fx.Node, known: Known) -> Labels:
    """Both operands hold the same channel in each place."""
    held = [known[each] for each in _args(node)[:2] if isinstance(each, fx.Node) and each in known]
    if len(held) < 2:
        raise _NotLinearError("it is added to a value that has another scale")
    first, second = (_aligned(each, node) for each in held)
    if first.shape != second.shape or not torch.equal(first, second):
        raise _NotLinearError("different channels of it are added")
    return first


def _aligned(labels: Any, node: fx.Node) -> Labels:
    if not isinstance(labels, torch.Tensor):
        raise _NotLinearError
    rank = len(node.meta["val"].shape)
    return labels.reshape([1] * (rank - labels.ndim) + list(labels.shape))


@_rule(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
def _reshape(node: fx.Node, known: Known) -> Labels:
    operand = _args(node)[0]
    assert isinstance(operand, fx.Node)
    return reshaped(_only(node, known), shape_of(operand), shape_of(node))


def reshaped(labels: Labels, old: Sequence[Size], new: Sequence[Size]) -> Labels:
    """Labels after a reshape. Dimensions are matched where the products of all sizes before them are equal."""
    ends, expanded = _matched(old, new), list(labels.shape)
    shape: list[int] = []
    for (first, begin), (last, end) in itertools.pairwise(ends):
        sizes = list(old[first:last])
        kept = [size for size in sizes if size != 1]
        wanted = [size for size in new[begin:end] if size != 1]
        if all(labels.shape[at] == 1 for at in range(first, last)):
            shape += [1] * (end - begin)
        elif len(kept) == 1 and len(wanted) == 1:
            shape += [max(labels.shape[first:last]) if size != 1 else 1 for size in new[begin:end]]
        elif all(isinstance(size, int) for size in (*sizes, *new[begin:end])):
            expanded[first:last] = sizes
            shape += list(new[begin:end])
        else:
            raise _NotLinearError("its channels are merged with a dimension of unknown size")
    return labels.expand(expanded).reshape(shape)


def _matched(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[int, int]]:
    """Places (in old, in new) up to which the products of sizes are equal, in order, from (0, 0) to both ends."""
    places = {_product_key(old[:at]): at for at in range(len(old) + 1)}
    found = {0: 0}
    for at in range(len(new) + 1):
        place = places.get(_product_key(new[:at]))
        if place is not None:
            found[place] = at
    found.pop(0, None)
    if found.get(len(old)) != len(new):
        raise _NotLinearError("it is reshaped in a way whose sizes cannot be matched")
    return [(0, 0), *sorted(found.items())]


def _product_key(sizes: Sequence[Size]) -> Any:
    product = sympy.Integer(1)
    for size in sizes:
        product = product * size
    return sympy.expand(product)


@_rule(aten.transpose.int)
def _transpose(node: fx.Node, known: Known) -> Labels:
    first, second = _args(node)[1:3]
    return _only(node, known).transpose(first, second)


@_rule(aten.permute.default)
def _permute(node: fx.Node, known: Known) -> Labels:
    return _only(node, known).permute(_args(node)[1])


@_rule(aten.expand.default)
def _expand(node: fx.Node, known: Known) -> Labels:
    """A dimension of size 1 that repeats holds the same channels everywhere."""
    return _aligned(_only(node, known), node)


@_rule(aten.slice.Tensor)
def _slice(node: fx.Node, known: Known) -> Labels:
    labels = _only(node, known)
    given: list[Any] = list(_args(node)[1:])
    dim, first, stop, step = given + [0, None, None, 1][len(given) :]
    if labels.shape[dim] == 1:
        return labels
    if not all(each is None or isinstance(each, int) for each in (first, stop, step)):
        raise _NotLinearError
    found: Labels = aten.slice.Tensor(labels, dim, first, stop, step)
    return found


@_rule(aten.select.int)
def _select(node: fx.Node, known: Known) -> Labels:
    labels, (dim, place) = _only(node, known), _args(node)[1:3]
    if labels.shape[dim] == 1:
        return labels.squeeze(dim)
    return labels.select(dim, place)


@_rule(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.unsafe_split.Tensor)
def _split(node: fx.Node, known: Known) -> list[Labels]:
    labels, args = _only(node, known), _args(node)
    unbinds = node.target is aten.unbind.int
    place = 1 if unbinds else 2
    dim: Any = args[place] if len(args) > place else node.kwargs.get("dim", 0)
    if labels.shape[dim] == 1:
        return [labels.squeeze(dim) if unbinds else labels] * len(node.meta["val"])
    return list(node.target(labels, *args[1:], **node.kwargs))  # type: ignore[operator]


@_rule(operator.getitem)
def _item(node: fx.Node, known: Known) -> Labels:
    labels = known[_args(node)[0]]
    if not isinstance(labels, list):
        raise _NotLinearError
    found: Labels = labels[_args(node)[1]]
    return found


@_rule(aten.index.Tensor, aten.index_select.default)
def _index(node: fx.Node, known: Known) -> Labels:
    """Rows that are taken from one dimension without channels."""
    labels = _only(node, known)
    if node.target is aten.index_select.default:
        dim, index = int(_args(node)[1]), _args(node)[2]
    else:
        named = [(at, each) for at, each in enumerate(_args(node)[1]) if each is not None]
        if len(named) != 1:
            raise _NotLinearError
        dim, index = named[0]
    if labels.shape[dim] != 1 or index.meta["val"].dtype not in (torch.int64, torch.int32):
        raise _NotLinearError
    rank = index.meta["val"].ndim
    return labels.reshape([*labels.shape[:dim], *[1] * rank, *labels.shape[dim + 1 :]])


@_rule(aten.mean.dim, aten.sum.dim_IntList)
def _reduce(node: fx.Node, known: Known) -> Labels:
    """A sum over dimensions without channels."""
    labels, dims = _only(node, known), _args(node)[1]
    keep = bool(_args(node)[2]) if len(_args(node)) > 2 else bool(node.kwargs.get("keepdim"))
    places = [int(dim) % labels.ndim for dim in dims or range(labels.ndim)]
    if any(labels.shape[at] != 1 for at in places):
        raise _NotLinearError("its channels are summed")
    return labels if keep else labels.reshape([s for at, s in enumerate(labels.shape) if at not in places])


@_rule(aten.max_pool2d.default, aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def _pool(node: fx.Node, known: Known) -> Labels:
    """Pools over the last two dimensions, which hold no channels."""
    labels = _only(node, known)
    if labels.shape[-1] != 1 or labels.shape[-2] != 1:
        raise _NotLinearError
    return labels


@_rule(aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node, known: Known) -> Labels:
    """Attention is linear in its values: a result's head and column hold those of the values."""
    labels = known[_args(node)[2]]
    if not isinstance(labels, torch.Tensor) or labels.ndim < 3 or labels.shape[-2] != 1:
        raise _NotLinearError
    heads, ours = shape_of(node)[-3], labels.shape[-3]
    if ours == 1:
        return labels
    if not isinstance(heads, int) or heads % ours:
        raise _NotLinearError
    return labels.repeat_interleave(heads // ours, -3)  # grouped queries: consecutive heads share their values


@_rule(aten.matmul.default, aten.bmm.default)
def _matmul(node: fx.Node, known: Known) -> Labels:
    """P x, linear in the columns of x: the sum runs over a dimension without channels."""
    labels = _only(node, known, 1)
    if labels.ndim < 2 or labels.shape[-2] != 1:  # a vector is summed over its channels
        raise _NotLinearError
    return _aligned(labels, node)


__all__ = ["Flow", "Read", "Stop", "along", "follow", "follow_one", "shape_of"]
