"""Tensors that an exported graph writes in place, and refusals of writes that a program cannot make."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from qcompiler.errors import ExportError

_MAYBE_ALIASES = ("to", "contiguous", "reshape", "flatten", "_to_copy", "clone")
"""Composite operators that may return their input itself; their schemas do not say so."""


def is_written(node: fx.Node) -> bool:
    """Whether an in-place operator may write this tensor, through any chain of views."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            if user in seen:
                continue
            schema = getattr(user.target, "_schema", None)
            if schema is None:
                if user.target is operator.getitem:  # of a list of views
                    seen.add(user)
                    pending.append(user)
                elif user.op != "output" and _writes_inside(user):
                    return True
                continue
            given = [*zip(schema.arguments, user.args, strict=False)]
            given += [(a, user.kwargs[a.name]) for a in schema.arguments if a.name in user.kwargs]
            aliases = [a.alias_info for a, value in given if value is current and a.alias_info is not None]
            if any(alias.is_write for alias in aliases):
                return True
            if aliases or schema.name.partition("::")[2] in _MAYBE_ALIASES:
                seen.add(user)
                pending.append(user)
    return False


def is_read(node: fx.Node) -> bool:
    """Whether a functional graph uses the values of a tensor, and not only its shape, to copy something else into
    it."""
    shape_only = (torch.ops.aten.copy.default, torch.ops.aten.expand_as.default)

    def reads(user: fx.Node) -> bool:
        values = user.args[1] if user.target is torch.ops.aten.copy.default else user.args[0]
        return user.target not in shape_only or values is node

    return any(reads(user) for user in node.users)


def _writes_inside(user: fx.Node) -> bool:
    """Whether a subgraph that the graph calls (`with torch.no_grad():`) writes anything."""
    parts = [a for a in user.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    graphs = [user.graph.owning_module.get_submodule(str(part.target)) for part in parts if user.graph.owning_module]
    return any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for graph in graphs
        if isinstance(graph, fx.GraphModule)
        for node in graph.graph.nodes
    )


def refuse_overlaps(
    written: Sequence[InputSpec], specs: Sequence[InputSpec], tensors: dict[str, torch.Tensor], program: ExportedProgram
) -> None:
    """Refuses overlaps: each tensor of the graph has its own memory, so a write to one must not be seen in another."""
    spans = {s.arg.name: span for s in specs if s.arg.name in tensors and (span := _span(tensors[s.arg.name]))}
    for spec in specs:
        if spec.kind == InputKind.PARAMETER:
            tensors[spec.arg.name] = program.state_dict[str(spec.target)]
            if span := _span(tensors[spec.arg.name]):
                spans[spec.arg.name] = span
    for spec in written:
        for other in specs:
            a, b = spans.get(spec.arg.name), spans.get(other.arg.name)
            if other is spec or a is None or b is None or a[0] != b[0] or a[2] <= b[1] or b[2] <= a[1]:
                continue
            raise ExportError(
                f"the model writes '{spec.target}' in place, and '{other.target}' shares its memory: in a program each "
                "is a state of its own. Keep one of the two, and take the other as a view of it inside forward"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """(storage, first byte, end) of a real tensor with elements."""
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) or not tensor.numel():
        return None
    size = tensor.element_size()
    last = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return tensor.untyped_storage().data_ptr(), start, start + (last + 1) * size


def refuse_written_arguments(program: ExportedProgram) -> None:
    """ExportError for a program (decomposed) that writes arguments or parameters, naming them."""
    for spec in program.graph_signature.output_specs:
        match spec.kind:
            case OutputKind.USER_OUTPUT | OutputKind.BUFFER_MUTATION:
                continue
            case OutputKind.USER_INPUT_MUTATION:
                raise ExportError(
                    f"the model writes into its argument '{spec.target}' in place; return the new value, or hold it in "
                    "a registered buffer"
                )
            case OutputKind.PARAMETER_MUTATION:
                raise ExportError(
                    f"the model writes into its parameter '{spec.target}' in place; what changes from call to call is "
                    "a state: register it with register_buffer"
                )
            case _:
                raise ExportError(f"the exported program has a result of kind {spec.kind.name}, which is not supported")
