"""A model's memory between calls as declared states: buffers, and tensors that it holds without registering them.

torch.export lifts a tensor twice if a model reaches it by two paths: as a registered buffer, and through a plain object
such as a cache of transformers, where it becomes a constant with the same memory.  A write to one would be lost to the
other.  `declare_states` makes them one buffer again, and makes buffers of all constants that the graph writes.  Values
that a call *assigns* to attributes are found before (remembered.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec

from qcompiler.frontends.torch.capture import attributes
from qcompiler.frontends.torch.capture.writes import is_written, refuse_overlaps

_LIFTED = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def memory_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory: storage and position in it. A fake tensor equals only itself."""
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) or not tensor.numel():
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def declare_states(
    program: ExportedProgram, model: nn.Module | None = None, attributes_of: Mapping[str, str] | None = None
) -> ExportedProgram:
    """The program (not yet decomposed) with one buffer for each tensor that it may write; names come from `model`.

    `attributes_of` maps a buffer made for the trace to the path of its attribute.

    ExportError if a written tensor overlaps another one.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = list(program.graph_signature.input_specs)
    constants, state_dict = dict(program.constants), dict(program.state_dict)
    first: dict[Any, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for spec in sorted((s for s in specs if s.kind in _LIFTED), key=lambda s: s.kind != InputKind.BUFFER):
        tensor = program.state_dict.get(str(spec.target), constants.get(str(spec.target)))
        if not isinstance(tensor, torch.Tensor):
            continue  # a script object
        tensors[spec.arg.name] = tensor
        other = first.setdefault(memory_of(tensor), spec)
        if other is not spec:
            nodes[spec.arg.name].replace_all_uses_with(nodes[other.arg.name])
            program.graph.erase_node(nodes[spec.arg.name])
            specs.remove(spec)
            constants.pop(str(spec.target), None)
    written = [s for s in specs if s.arg.name in tensors and is_written(nodes[s.arg.name])]
    refuse_overlaps(written, specs, tensors, program)
    for made, path in (attributes_of or {}).items():
        _rename(made, path, program.graph, specs, constants, state_dict)
    written = [spec for spec in written if spec in specs]
    names = _held_tensors(model) if model is not None and any(_is_constant(s) for s in written) else {}
    for spec in written:
        if _is_constant(spec):
            target = _free_name(names.get(id(tensors[spec.arg.name]), str(spec.target)), program)
            constants[target] = constants.pop(str(spec.target))
            specs[specs.index(spec)] = InputSpec(InputKind.BUFFER, spec.arg, target, persistent=False)
    _spell_out_copies(program.graph_module)
    program.graph_module.recompile()
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(specs, program.graph_signature.output_specs),
        state_dict=state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=[program.verifier],
    )


def _rename(
    made: str, path: str, graph: fx.Graph, specs: list[InputSpec], constants: dict[str, Any], state_dict: dict[str, Any]
) -> None:
    """Gives the buffer `made` the name of its attribute; a registered buffer of that name is no longer used."""
    spec = next((s for s in specs if s.kind == InputKind.BUFFER and s.target == made), None)
    if spec is None:
        return
    old = next((s for s in specs if s.kind == InputKind.BUFFER and s.target == path), None)
    if old is not None:
        node = next(n for n in graph.nodes if n.op == "placeholder" and n.name == old.arg.name)
        for copy in list(node.users):
            graph.erase_node(copy)  # torch.export's own note of the assignment
        graph.erase_node(node)
        specs.remove(old)
    persistent = path in state_dict
    (state_dict if persistent else constants)[path] = constants.pop(made)  # a memory of its own
    specs[specs.index(spec)] = InputSpec(InputKind.BUFFER, spec.arg, path, persistent=persistent)


def _held_tensors(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that a model holds without registering them, by id."""
    found: dict[int, str] = {}
    for place, value in attributes.walk(model):
        if isinstance(value, torch.Tensor) and not place.registered:
            found.setdefault(id(value), place.path)
    return found


def _spell_out_copies(module: fx.GraphModule) -> None:
    """Makes the conversion and broadcast of `x.copy_(y)` explicit, which torch.export 2.13 drops when it makes the copy
    functional."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(inner := getattr(module, str(node.target), None), fx.GraphModule):
            _spell_out_copies(inner)
            inner.recompile()
        if node.target is not torch.ops.aten.copy_.default:
            continue
        target, source = node.args[:2]
        to = target.meta["val"]
        with module.graph.inserting_before(node), to.fake_mode:
            if source.meta["val"].dtype != to.dtype:
                converted = module.graph.call_function(torch.ops.aten.to.dtype, (source, to.dtype))
                converted.meta = {**node.meta, "val": source.meta["val"].to(to.dtype)}
                source = converted
            if tuple(source.meta["val"].shape) != tuple(to.shape):
                wide = module.graph.call_function(torch.ops.aten.expand_as.default, (source, target))
                wide.meta = {**node.meta, "val": source.meta["val"].expand_as(to)}
                source = wide
        node.args = (target, source, *node.args[2:])


def _is_constant(spec: InputSpec) -> bool:
    return spec.kind == InputKind.CONSTANT_TENSOR


def _free_name(wanted: str, program: ExportedProgram) -> str:
    """`wanted`, with a number if a parameter or buffer has that name."""
    taken = {str(s.target) for s in program.graph_signature.input_specs if s.kind != InputKind.CONSTANT_TENSOR}
    name, count = wanted, 1
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    return name
