"""Which operators of an exported graph write a buffer in place, where each can become its functional form on the spot.

    %w = aten.index_copy_(%keys, 1, %rows, %new)          %w = aten.index_copy(%keys, 1, %rows, %new)
    %k = aten.view(%keys, …)                       ->     %k = aten.view(%w, …)
    return (%y,)                                          return (%w, %y)        # %w is what `keys` holds afterwards

That is possible where nothing made before a write can be a view of the buffer, and where the functional operator gives
the buffer's type, shape and strides.  torch's functionalisation handles every graph, but traces all of it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

COMPOSITE = "CompositeImplicitAutograd"


@dataclass(frozen=True)
class BufferWrites:
    """The writes in a graph, and the buffers that they write."""

    functional: dict[fx.Node, torch._ops.OpOverload] = field(default_factory=dict)
    """Each operator that writes -> the one that computes the new contents instead."""
    buffer_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Each operator that writes -> the placeholder of the buffer."""
    names: dict[fx.Node, str] = field(default_factory=dict)
    """Placeholder of a written buffer -> its name in the model, in the order of the inputs."""

    def same_memory(self, write: fx.Node) -> list[fx.Node]:
        """The names of the buffer up to `write`: its placeholder and the results of its writes. After `write`, each of
        them has its value."""
        buffer, known = self.buffer_of[write], list(self.buffer_of)
        return [buffer, *(w for w in known[: known.index(write) + 1] if self.buffer_of[w] is buffer)]


def buffer_writes(program: ExportedProgram) -> BufferWrites | None:
    """The writes in the graph's own nodes. None if one of them needs torch's functionalisation."""
    found = BufferWrites()
    specs = program.graph_signature.input_specs
    buffers = {spec.arg.name: str(spec.target) for spec in specs if spec.kind == InputKind.BUFFER}
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in buffers]
    for node in program.graph.nodes:
        if not is_write(node):
            continue
        buffer, functional = _written_buffer(node, found), _functional(node)
        if buffer is None or buffer not in inputs or functional is None:
            return None
        found.functional[node], found.buffer_of[node] = functional, buffer
        earlier = {user for name in found.same_memory(node) for user in name.users if user < node}
        if any(user not in found.buffer_of and not _makes_no_view(user) for user in earlier):
            return None
    found.names.update({node: buffers[node.name] for node in inputs if node in found.buffer_of.values()})
    return found


def is_write(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _written_buffer(node: fx.Node, found: BufferWrites) -> fx.Node | None:
    """What the operator writes, if that is its first argument alone and its only result."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema
    written = [i for i, each in enumerate(schema.arguments) if each.alias_info is not None and each.alias_info.is_write]
    base = node.args[0] if node.args else None
    if written != [0] or len(schema.returns) != 1 or not isinstance(base, fx.Node):
        return None
    result = schema.returns[0].alias_info
    return found.buffer_of.get(base, base) if result is not None and result.is_write else None


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """`index_copy` for `index_copy_`, if it makes a tensor of its own of the buffer's type, shape and strides."""
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
    return found if _place(made) == _place(wanted) else None


def _place(value: torch.Tensor) -> tuple[object, ...]:
    return value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride()))


def makes_own_tensors(target: torch._ops.OpOverload) -> bool:
    """Whether no result can be an argument or a view of one. Composite operators may return an argument as it is
    (`dropout` in evaluation), which their schemas do not say."""
    name: str = target.name()  # type: ignore[no-untyped-call]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSITE)
    return not composite and all(each.alias_info is None for each in target._schema.returns)


def _makes_no_view(user: fx.Node) -> bool:
    """Whether a use of a tensor leaves nothing behind that shares its memory."""
    if isinstance(user.meta.get("val"), torch.SymInt | int):
        return True
    return isinstance(user.target, torch._ops.OpOverload) and makes_own_tensors(user.target)


__all__ = ["BufferWrites", "buffer_writes", "is_write"]
