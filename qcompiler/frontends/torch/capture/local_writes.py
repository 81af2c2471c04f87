"""Which operators of an exported graph write in place, where each can become its functional form on the spot.

    %w = aten.index_copy_(%keys, 1, %rows, %new)          %w = aten.index_copy(%keys, 1, %rows, %new)
    %k = aten.view(%keys, …)                       ->     %k = aten.view(%w, …)
    return (%y,)                                          return (%w, %y)        # %w is what `keys` holds afterwards

A part of a buffer, or its elements in another shape, are written through a view; what is written is put back:

    %part = aten.slice(%drawn, 0, 0, 4)                   %part = aten.slice(%drawn, 0, 0, 4)
    %w = aten.copy_(%part, %new)                  ->      %w = aten.copy(%part, %new)
                                                          %whole = aten.slice_scatter(%drawn, %w, 0, 0, 4)

So is a part of a part; the parts on the way to it are made anew, too, and stand for what was read of them before.

Results of operators are written in the same way, as by `nn.ReLU(inplace=True)`: after a write, its result stands for
the one that was written.

That is possible where no view of what is written was made before a write and is read after it, and where the functional
operator gives the type, shape and strides of what it writes.  torch's functionalisation handles every graph, but traces
all of it again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

COMPOSITE = "CompositeImplicitAutograd"

_ATEN = torch.ops.aten
_VIEWS: dict[Any, Any] = {
    _ATEN.slice.Tensor: _ATEN.slice_scatter.default,
    _ATEN.select.int: _ATEN.select_scatter.default,
    _ATEN.view.default: _ATEN.view.default,
}
"""Views that can be written through -> the operator that puts what was written back."""

_OWN = frozenset(
    {
        _ATEN.linear.default, _ATEN.matmul.default, _ATEN.batch_norm.default, _ATEN.layer_norm.default,
        _ATEN.group_norm.default, _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default,
        _ATEN.conv1d.padding, _ATEN.conv2d.padding, _ATEN.conv3d.padding,
    }
)  # fmt: skip
"""Composite operators whose result is never an argument."""


@dataclass(frozen=True)
class LocalWrites:
    """The writes in a graph, and what they write: buffers, and results of operators."""

    functional: dict[fx.Node, torch._ops.OpOverload] = field(default_factory=dict)
    """Each operator that writes -> the one that computes the new contents instead."""
    buffer_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Each operator that writes -> the placeholder of the buffer, or the operator whose result is written."""
    views_of: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Each operator that writes through views -> what it writes, of what that is a view, and so on up to the buffer."""
    names: dict[fx.Node, str] = field(default_factory=dict)
    """Placeholder of a written buffer -> its name in the model, in the order of the inputs."""

    def same_memory(self, write: fx.Node) -> list[fx.Node]:
        """The names of the whole buffer up to `write`: its placeholder and the results of its writes. After `write`,
        each of them has its value."""
        buffer, known = self.buffer_of[write], list(self.buffer_of)
        whole = (w for w in known[: known.index(write) + 1] if w not in self.views_of)
        return [buffer, *(w for w in whole if self.buffer_of[w] is buffer)]

    def put_back(self, write: fx.Node) -> Iterator[tuple[list[fx.Node], torch._ops.OpOverload, Callable[..., Any]]]:
        """What is made anew after `write` wrote a part, from the inside: the nodes whose value it is from then on, the
        operator, and its arguments for what was made before."""
        buffer = self.buffer_of[write]
        for view, whole in itertools.pairwise([*self.views_of.get(write, []), buffer]):
            names = self.same_memory(write) if whole is buffer else [whole]
            yield names, _VIEWS[view.target], functools.partial(_arguments, view, whole)


def _arguments(view: fx.Node, whole: fx.Node, part: Any) -> tuple[Any, ...]:
    """The arguments of the operator that puts `part` in the place of `view` into `whole`, of which that is a view."""
    if view.target is _ATEN.view.default:
        return part, tuple(whole.meta["val"].shape)
    return whole, part, *view.args[1:]


def local_writes(program: ExportedProgram) -> LocalWrites | None:
    """The writes in the graph's own nodes, and in those of its parts under `torch.no_grad()`, which may write what they
    made themselves. None if one of them needs torch's functionalisation."""
    found = LocalWrites()
    specs = program.graph_signature.input_specs
    buffers = {spec.arg.name: str(spec.target) for spec in specs if spec.kind == InputKind.BUFFER}
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in buffers]
    if not _found(found, program.graph_module, inputs):
        return None
    found.names.update({node: buffers[node.name] for node in inputs if node in found.buffer_of.values()})
    return found


def _found(found: LocalWrites, module: fx.GraphModule, inputs: Sequence[fx.Node]) -> bool:
    """Notes the writes of a graph, whose buffers are `inputs`; False if one of them needs torch."""
    for node in module.graph.nodes:
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule) and not _found(found, inner, ()):
            return False
        if is_write(node) and not _is_local(found, node, inputs):
            return False
    return True


def _is_local(found: LocalWrites, node: fx.Node, inputs: Sequence[fx.Node]) -> bool:
    """Notes a write; False if it needs torch."""
    base = _written(node)
    if base is None:
        return False
    views = []
    while base.target in _VIEWS and not base.kwargs:
        views.append(base)
        base = base.all_input_nodes[0]
    if views:
        found.views_of[node] = views
    if base in found.views_of:  # what an earlier write left of a part
        return False
    buffer = found.buffer_of.get(base, base)
    if not all(_can_put_back(*each) for each in itertools.pairwise([*views, buffer])):
        return False
    functional = _functional(node, any_strides=bool(views) and not node.users)
    if functional is None or (buffer not in inputs and not _is_its_own(buffer)):
        return False
    found.functional[node], found.buffer_of[node] = functional, buffer
    made_anew = {*found.same_memory(node), *views[1:]}
    earlier = {user for name in made_anew for user in name.users if user < node} - made_anew
    return all(user in found.buffer_of or _is_gone_after(user, node) for user in earlier)


def is_write(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written(node: fx.Node) -> fx.Node | None:
    """What the operator writes, if that is its first argument alone and its only result."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    written = [i for i, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]
    base = node.args[0] if node.args else None
    if written != [0] or len(schema.returns) != 1 or not isinstance(base, fx.Node):
        return None
    result = schema.returns[0].alias_info
    return base if result is not None and result.is_write else None


def _can_put_back(view: fx.Node, whole: fx.Node) -> bool:
    """`view` needs the sizes of the whole as numbers; no node of the graph may have one that is dynamic."""
    return view.target is not _ATEN.view.default or all(isinstance(size, int) for size in whole.meta["val"].shape)


def _functional(node: fx.Node, *, any_strides: bool) -> torch._ops.OpOverload | None:
    """`index_copy` for `index_copy_`, if it makes a tensor of its own of the type, shape and strides of what it writes.

    Strides do not matter where nothing reads the result but the operator that puts it back.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    space, _, name = node.target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    found = getattr(packet, node.target._overloadname, None) if name.endswith("_") else None
    if not isinstance(found, torch._ops.OpOverload) or not makes_own_tensors(found):
        return None
    if [a.name for a in found._schema.arguments] != [a.name for a in node.target._schema.arguments]:
        return None
    wanted = node.args[0].meta["val"] if isinstance(node.args[0], fx.Node) else None
    args, kwargs = pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    if not isinstance(wanted, torch._subclasses.FakeTensor):
        return None
    with wanted.fake_mode, torch.no_grad():
        made: Any = found(*args, **kwargs)
    count = 3 if any_strides else 4
    return found if _place(made)[:count] == _place(wanted)[:count] else None


def _place(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride()))


def makes_own_tensors(target: torch._ops.OpOverload) -> bool:
    """Whether no result can be an argument or a view of one. Composite operators may return an argument as it is
    (`dropout` in evaluation), which their schemas do not say."""
    name: str = target.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSITE)
    return not composite and all(each.alias_info is None for each in target._schema.returns)


def _is_its_own(node: fx.Node) -> bool:
    """Whether a node is an operator whose result shares no memory with its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    one = isinstance(node.meta.get("val"), torch.Tensor)
    return one and (node.target in _OWN or makes_own_tensors(node.target))


def _is_gone_after(user: fx.Node, write: fx.Node) -> bool:
    """Whether a use of a tensor leaves nothing behind that shares its memory, or nothing that is read after `write`."""
    if isinstance(user.meta.get("val"), torch.SymInt | int):
        return True
    if isinstance(user.target, torch._ops.OpOverload) and makes_own_tensors(user.target):
        return True
    return all(each is write or (each < write and _is_gone_after(each, write)) for each in user.users)


__all__ = ["LocalWrites", "is_write", "local_writes"]
