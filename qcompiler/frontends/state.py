"""What a model remembers between calls, as declared state: buffers, and tensors that it holds without registering them.

torch.export lifts a tensor twice when a model reaches it by two roads: as a registered buffer, and through a plain
object such as a cache of transformers, where it becomes a constant with the same memory.  What a graph writes to the
one would be lost to the other.  `declare_states` makes them one buffer again, and makes buffers of all constants that
the graph writes.  A number that the model counts in Python is no tensor: the graph holds it as it was while tracing.
`PythonNumbers` finds those that matter.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind

from qcompiler.errors import ExportError

_LIFTED = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_MAYBE_ALIASES = ("to", "contiguous", "reshape", "flatten", "_to_copy", "clone")
"""Composite operators that may return their input itself; their schemas do not say so."""


# --- tensors ---------------------------------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that are one: storage and place in it. A fake tensor is only itself."""
    if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) or not tensor.numel():
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def declare_states(program: ExportedProgram, model: nn.Module | None = None) -> ExportedProgram:
    """The program (not yet decomposed) with one buffer for each tensor that it may write; names come from `model`.

    ExportError where a written tensor overlaps another one that is not the same.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    specs = list(program.graph_signature.input_specs)
    constants = dict(program.constants)
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
    written = [s for s in specs if s.arg.name in tensors and _is_written(nodes[s.arg.name])]
    _refuse_overlaps(written, specs, tensors, program)
    names = held_tensors(model) if model is not None and any(_is_constant(s) for s in written) else {}
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
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=constants,
        verifiers=[program.verifier],
    )


def _spell_out_copies(module: fx.GraphModule) -> None:
    """`x.copy_(y)` converts and broadcasts y; torch.export 2.13 forgets both where it makes the copy functional."""
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
    """`wanted`, or with a number behind it if a parameter or buffer is called that."""
    taken = {str(s.target) for s in program.graph_signature.input_specs if s.kind != InputKind.CONSTANT_TENSOR}
    name, count = wanted, 1
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    return name


def _is_written(node: fx.Node) -> bool:
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
    """Whether a functional graph uses the values of a tensor, and not just its shape to copy something else into."""
    shape_only = (torch.ops.aten.copy.default, torch.ops.aten.expand_as.default)

    def reads(user: fx.Node) -> bool:
        values = user.args[1] if user.target is torch.ops.aten.copy.default else user.args[0]
        return user.target not in shape_only or values is node

    return any(reads(user) for user in node.users)


def _writes_inside(user: fx.Node) -> bool:
    """Whether a function that the graph calls on a part of itself (`with torch.no_grad():`) writes anything."""
    parts = [a for a in user.args if isinstance(a, fx.Node) and a.op == "get_attr"]
    graphs = [user.graph.owning_module.get_submodule(str(part.target)) for part in parts if user.graph.owning_module]
    return any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for graph in graphs
        if isinstance(graph, fx.GraphModule)
        for node in graph.graph.nodes
    )


def _refuse_overlaps(
    written: Sequence[InputSpec], specs: Sequence[InputSpec], tensors: dict[str, torch.Tensor], program: ExportedProgram
) -> None:
    """Each tensor of the graph is a memory of its own: what is written to a part of one must not be seen in another."""
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


# --- the objects that a model holds -----------------------------------------------------------------------------------

_LEAVES = (str, bytes, type, nn.Module, torch.dtype, torch.device, torch.Size)
_MOST = 50_000
"""Objects to look at: a configuration of transformers has some hundred."""


def _held(model: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, owner, key, value) of everything that modules hold in plain attributes, lists, dicts and objects."""
    pending: list[tuple[str, Any, Any]] = []
    hidden = set(vars(nn.Module()))
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        pending += [(f"{prefix}{key}", vars(module), key) for key in vars(module) if key not in hidden]
    seen: set[int] = set()
    while pending and len(seen) < _MOST:
        path, owner, key = pending.pop(0)
        value = owner[key]
        yield path, owner, key, value
        if isinstance(value, (*_LEAVES, torch.Tensor)) or callable(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            pending += [(f"{path}.{k}", value, k) for k in value]
        elif isinstance(value, list):
            pending += [(f"{path}.{i}", value, i) for i in range(len(value))]
        elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
            pending += [(f"{path}.{k}", vars(value), k) for k in vars(value)]


def held_tensors(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that a model holds without registering them, by id."""
    found: dict[int, str] = {}
    for path, _, _, value in _held(model):
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), path)
    return found


@contextlib.contextmanager
def _traced_buffers_put_back(model: nn.Module) -> Iterator[None]:
    """A model may set a buffer or an attribute to a new tensor in `forward` (frequencies that depend on the length):
    traced, that leaves a tensor without values in it, and the model would be broken behind the export."""
    places = [place for module in model.modules() for place in (module._buffers, module.__dict__)]
    before = [dict(place) for place in places]
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            for key in [key for key, value in place.items() if isinstance(value, torch.Tensor)]:
                if key not in values:
                    del place[key]
                elif place[key] is not values[key]:
                    place[key] = values[key]


@contextlib.contextmanager
def held_tensors_as_buffers(model: nn.Module) -> Iterator[None]:
    """Registers the tensors that plain objects of a model hold (a cache of transformers), while it is traced.

    torch.export sees such a tensor as a constant, and really writes it where no argument takes part (`length.add_(1)`):
    the graph would not hold that write.  In here every call of the model finds its buffers in those places instead.
    """
    plain = [
        (path, owner, key, value)
        for path, owner, key, value in _held(model)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)  # nn.LSTM lists its parameters
        if "." in path and not _is_attribute(model, path)
    ]
    known = {id(buffer): name for name, buffer in model.named_buffers(remove_duplicate=False)}
    made: list[str] = []
    for path, _, _, value in plain:
        if id(value) not in known:
            name = path.replace(".", "_")
            name = name if not hasattr(model, name) else f"{name}_held"
            model.register_buffer(name, value, persistent=False)
            known[id(value)] = name
            made.append(name)

    def bind(module: nn.Module, args: object) -> None:
        for _, owner, key, value in plain:
            owner[key] = module.get_buffer(known[id(value)])

    def release(module: nn.Module, args: object, result: object) -> None:
        for _, owner, key, value in plain:
            owner[key] = value

    handles = [model.register_forward_pre_hook(bind), model.register_forward_hook(release)] if plain else []
    try:
        with _traced_buffers_put_back(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for _, owner, key, value in plain:
            owner[key] = value
        for name in made:
            delattr(model, name)


def _is_attribute(model: nn.Module, path: str) -> bool:
    """Whether a module itself has the tensor as an attribute, which torch.export knows about."""
    parent, _, name = path.rpartition(".")
    try:
        return name in vars(model.get_submodule(parent))
    except AttributeError:
        return False


@dataclass
class PythonNumbers:
    """The numbers that a model holds in Python, and which of them its forward changes.

    `before` is what they were; `after` holds those that one call left different, as plain numbers.
    """

    model: nn.Module
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self._now()

    def _now(self) -> dict[str, Any]:
        return {path: value for path, _, _, value in _held(self.model) if _is_number(value)}

    def put_back(self) -> None:
        """All numbers as they were."""
        self._set(self.before)

    def _set(self, numbers: dict[str, Any]) -> None:
        for path, owner, key, value in list(_held(self.model)):
            if path in numbers and _is_number(value) and value is not numbers[path]:
                owner[key] = numbers[path]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what changes in a call of the model inside; numbers are as before when it ends.

        torch.export puts attributes of modules back itself, before it returns: hence the hook.
        """

        def look(module: nn.Module, args: object, result: object) -> None:
            self.after = {p: _plain(v) for p, v in self._now().items() if p in self.before and v is not self.before[p]}
            self.after = {p: v for p, v in self.after.items() if v != self.before[p]}

        handle = self.model.register_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()
            self.put_back()

    def refuse_if_they_matter(self, first: ExportedProgram, trace: Callable[[], ExportedProgram]) -> None:
        """ExportError if a second call, which begins with the changed numbers, would be another graph."""
        if not self.after:
            return
        changed = dict(self.after)
        self._set(changed)
        try:
            same = trace().graph_module.code == first.graph_module.code
        except Exception:  # the second call does not even trace: it is another one
            same = False
        finally:
            self.put_back()
        if same:
            return
        names = ", ".join(f"'{path}' ({self.before[path]} to {value})" for path, value in sorted(changed.items())[:3])
        raise ExportError(
            f"the model counts in Python numbers what it does from call to call: {names}. A program would begin every "
            "call with the first. Keep the number in a registered tensor buffer and change it in place (for "
            "transformers: a cache of StaticLayers instead of sliding-window ones, docs/state.md)"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _plain(value: Any) -> Any:
    """A number, for a symbolic one the traced example's."""
    node = getattr(value, "node", None)
    return value if node is None or node.hint is None else node.hint
