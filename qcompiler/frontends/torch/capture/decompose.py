"""Decomposes operators for which import has no builder.

torch's own `run_decompositions` traces the whole graph again, through functionalisation, to decompose a few nodes: for
a language model of 32 layers that takes longer than everything after it.  Most graphs write nothing in place, or only
buffers, as caches are written, and results of operators that nothing else refers to.  In these, `decompose` replaces
only the nodes that need it: a write by its functional operator (local_writes.py), and another node by a trace of its
own decomposition.  Nodes with equal operator, arguments and types, as in equal layers, share one trace.  The other
graphs (control flow, automatic mixed precision, writes that a view made before would see) use torch's way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram, exported_program
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.aten.recurrent import DECOMPOSITIONS
from qcompiler.frontends.torch.capture.local_writes import LocalWrites, local_writes

KeepOps = frozenset[Any]

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
"""A part of the graph that was traced under `torch.no_grad()`: (enabled, graph, *arguments)."""

_PLACE = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "from_node", "custom")
"""The fields of a node's meta about its place in the model; the nodes of its decomposition inherit them."""


def decompose(program: ExportedProgram, keep: KeepOps) -> ExportedProgram:
    """The program with every operator outside `keep` decomposed by torch's core ATen table, and nothing in place."""
    keep -= _MAY_RETURN_ITS_ARGUMENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writes = _local_writes(program)
        if writes is not None:
            with contextlib.suppress(_NotLocalError):
                return _Decomposer(program, _table(keep), keep, writes).run()
        try:
            decomposed: ExportedProgram = program.run_decompositions(dict(_table(keep).every))
        except Exception as error:  # whatever torch's own passes raise
            raise ExportError(_cannot(program.graph_module, error)) from error
        return decomposed


def _cannot(module: fx.GraphModule, error: Exception) -> str:
    """Why torch cannot decompose a graph: its in-place operators, which are the reason for this path."""
    targets = (node.target for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    written = sorted({str(target) for target in targets if target._schema.is_mutable})
    what = f" its operators in place ({', '.join(written)}) by functional ones" if written else " the model"
    text = str(error).strip().partition("\n")[0]
    return (
        f"torch's run_decompositions fails on the exported graph ({type(error).__name__}: {text}); replace{what}, or "
        "give qcompile an ExportedProgram that is decomposed already"
    )


_MAY_RETURN_ITS_ARGUMENT: KeepOps = frozenset({torch.ops.aten.type_as.default})
"""A composite operator whose schema does not say so: kept, torch would lose what is written to its result."""

ALSO = ("addmv.default", "dist.default", "grid_sampler_2d.default", "ldexp.Tensor",
         "tril_indices.default", "triu_indices.default")  # fmt: skip
"""Operators that torch can decompose, but keeps by default."""


@dataclass(frozen=True)
class _Table:
    """What is decomposed, and how: torch's table without what is kept, and with ours."""

    every: Any
    """For torch's `run_decompositions`."""

    plain: Any
    """What is not composite, for `make_fx`."""

    composite: Any
    """How a trace takes the composite operators that are kept, or decomposed by a function of their own."""


def _table(keep: KeepOps) -> _Table:
    return _table_of(keep, tuple(torch.ops._dir), tuple(_registered("CompositeImplicitAutograd")))


_registered = torch._C._dispatch_get_registrations_for_dispatch_key


@functools.lru_cache(maxsize=4)
def _table_of(keep: KeepOps, namespaces: tuple[str, ...], composite: tuple[str, ...]) -> _Table:
    """torch looks through all operators for it, in each namespace again: 0.1 s. It stays the same until somebody
    registers an operator."""
    table: Any = dict(torch.export.default_decompositions())
    for name in ALSO:
        packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        table[op] = torch._decomp.decomposition_table[op]
    table |= DECOMPOSITIONS
    table = {op: how for op, how in table.items() if op not in keep}
    implicit, plain = exported_program._split_decomp_table_to_cia_and_python_decomp(dict(table))
    # What is decomposed by itself (`partial(decompose, kernel=op)`) needs no override in a trace.  There are 447 of
    # these operators, and overriding them takes 0.1 s in every compilation.
    special = {op: how for op, how in implicit.items() if not isinstance(how, functools.partial)}
    return _Table(table, plain, special)


class _NotLocalError(Exception):
    """A decomposition that cannot replace its node: it has effects, or brings a tensor of its own."""


# --- graphs whose nodes can be replaced one by one -------------------------------------------------------------------


def _local_writes(program: ExportedProgram) -> LocalWrites | None:
    """What the graph writes in place, if local_writes.py can make all of it functional, and no subgraph is called
    except for `torch.no_grad()`; else None."""
    if program.graph_signature.backward_signature is not None:
        return None
    if any(spec.kind != OutputKind.USER_OUTPUT for spec in program.graph_signature.output_specs):
        return None
    writes = local_writes(program)
    return writes if writes is not None and _only_functional(program.graph_module, writes) else None


def _only_functional(module: fx.GraphModule, writes: LocalWrites) -> bool:
    """Whether nothing is written in place but by `writes`."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            inner = getattr(module, str(node.target), None)
            if not isinstance(inner, fx.GraphModule) or not all(user.target is _GRAD_MODE for user in node.users):
                return False
            if not _only_functional(inner, writes):
                return False
        elif node.op == "call_function" and node.target is not _GRAD_MODE and node not in writes.functional:
            if isinstance(node.target, torch._ops.HigherOrderOperator) or _has_effect(node):
                return False
        elif node.op not in ("placeholder", "call_function", "output"):
            return False
    return True


_CHECKS = ("aten::_assert", "aten::sym_constrain_range")
"""Operators without results that assert what torch checked while tracing."""


def _has_effect(node: fx.Node) -> bool:
    """Whether an operator writes an argument, or exists for an effect (to raise an error) instead of its results."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return schema.is_mutable or not (schema.returns or schema.name.startswith(_CHECKS))


# --- the new graph ---------------------------------------------------------------------------------------------------


@dataclass
class _Decomposer:
    """Copies a graph node by node, and replaces nodes by their decompositions."""

    program: ExportedProgram
    table: _Table
    keep: KeepOps
    writes: LocalWrites
    graph: fx.Graph = field(default_factory=fx.Graph)
    traces: dict[Hashable, fx.GraphModule] = field(default_factory=dict)
    _tracing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Entered by the first trace, since it takes 0.1 s and many graphs need none."""

    def run(self) -> ExportedProgram:
        new: dict[fx.Node, Any] = {}
        with self._tracing:
            self._copy(self.program.graph_module, new)
        self.graph.eliminate_dead_code()
        return self._rebuilt(new)

    def _copy(self, module: fx.GraphModule, new: dict[fx.Node, Any]) -> Any:
        """Appends the nodes of a graph and returns its result; `new` already maps its placeholders."""
        for node in module.graph.nodes:
            if node in new:
                continue
            if node.op == "output":
                if module is not self.program.graph_module:
                    return fx.map_arg(node.args[0], lambda n: new[n])
                new[node] = self.graph.node_copy(node, lambda n: new[n])
                left = tuple(new[buffer] for buffer in self.writes.names)
                new[node].args = ((*left, *new[node].args[0]),)
            elif node in self.writes.functional:
                new[node] = self._expand(node, self.writes.functional[node], new)
                self._put_back(node, new)
            elif node.op == "get_attr":
                continue  # the graph of a `torch.no_grad()`
            elif node.target is _GRAD_MODE:
                inner = getattr(module, str(node.args[1].target))
                parameters = [n for n in inner.graph.nodes if n.op == "placeholder"]
                given = {p: new[a] for p, a in zip(parameters, node.args[2:], strict=True)}
                new[node] = self._copy(inner, given)
            elif node.args and isinstance(new.get(source := node.args[0]), tuple | list):
                new[node] = new[source][node.args[1]]  # getitem of a node that became several
            elif (same := _unchanged(node)) is not None:
                new[node] = new[same]
            elif self._is_taken_apart(node.target):
                new[node] = self._expand(node, node.target, new)
            else:
                new[node] = self.graph.node_copy(node, lambda n: new[n])
                if node.op == "placeholder":
                    new[node].name = node.name  # the signature's name; fx would avoid names of builtins
        return None

    def _put_back(self, write: fx.Node, new: dict[fx.Node, Any]) -> None:
        """Notes what the buffer holds after `write`, which may have written a part of it."""
        made = new[write]
        if write not in self.writes.views_of:
            new.update(dict.fromkeys(self.writes.same_memory(write), made))
        for names, target, arguments in self.writes.put_back(write):
            made = self.graph.call_function(target, fx.map_arg(arguments(made), lambda n: new.get(n, n)))
            made.meta = {**_place_of(write), "val": names[0].meta["val"]}
            new.update(dict.fromkeys(names, made))

    def _is_taken_apart(self, target: Any) -> bool:
        """Whether torch decomposes it, by its table or as a composite operator, and import has no builder for it."""
        if target in self.keep or not isinstance(target, torch._ops.OpOverload):
            return False
        if target in self.table.plain:
            return True
        name: str = target.name()  # type: ignore[no-untyped-call]
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))

    def _expand(self, node: fx.Node, target: Any, new: Mapping[fx.Node, Any]) -> Any:
        """What computes `target` of the node's arguments: the operator itself, or the trace of its decomposition."""
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: new[n])
        if not self._is_taken_apart(target):
            made = self.graph.call_function(target, *arguments)
            made.meta = dict(node.meta)
            return made
        leaves, spec = pytree.tree_flatten(arguments)
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        key = (target, spec, tuple(_leaf_key(leaf) for leaf in leaves), _same_nodes(nodes))
        trace = self.traces.get(key)
        if trace is None:
            trace = self.traces[key] = self._trace(target, leaves, spec)
        inside: dict[fx.Node, Any] = dict(zip(trace.graph.find_nodes(op="placeholder"), nodes, strict=True))
        place = _place_of(node)
        for each in trace.graph.nodes:
            if each.op == "output":
                return fx.map_arg(each.args[0], lambda n: inside[n])
            if each not in inside:
                made = inside[each] = self.graph.node_copy(each, lambda n: inside[n])
                made.meta = {**each.meta, **place}
        raise AssertionError("a graph without an output")

    def _trace(self, target: Any, leaves: Sequence[Any], spec: Any) -> fx.GraphModule:
        """The decomposition of one operator at arguments of these types; or _NotLocalError."""
        if not self.traces:  # inside, traces also keep the operators that torch could decompose but that are kept
            composite = self.table.composite
            self._tracing.enter_context(exported_program._override_composite_implicit_decomp(composite))
            self._tracing.enter_context(torch.no_grad())
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        values = [leaves[i].meta["val"] for i in places]

        def call(*given: Any) -> Any:
            filled = list(leaves)
            for place, value in zip(places, given, strict=True):
                filled[place] = value
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return target(*args, **kwargs)

        mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None) or self._mode()
        with mode, enable_python_dispatcher():
            traced = make_fx(call, decomposition_table=self.table.plain, _allow_non_fake_inputs=True)(*values)
        if any(n.op in ("get_attr", "call_module") or _has_effect(n) for n in traced.graph.nodes):
            raise _NotLocalError(str(target))
        return traced

    def _mode(self) -> FakeTensorMode:
        for node in self.program.graph.nodes:
            if isinstance(value := node.meta.get("val"), FakeTensor):
                return value.fake_mode
        return FakeTensorMode()

    def _rebuilt(self, new: Mapping[fx.Node, Any]) -> ExportedProgram:
        old = self.program
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        module.meta.update(old.graph_module.meta)
        returned = self.graph.output_node().args[0]
        assert isinstance(returned, tuple | list)
        names = list(self.writes.names.values())
        left = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(node.name), name)
            for name, node in zip(names, returned, strict=False)
        ]
        outputs = [
            OutputSpec(spec.kind, TensorArgument(node.name), spec.target)
            if isinstance(spec.arg, TensorArgument) and isinstance(node, fx.Node)
            else spec
            for spec, node in zip(old.graph_signature.output_specs, returned[len(names) :], strict=True)
        ]
        return ExportedProgram(
            root=module,
            graph=self.graph,
            graph_signature=ExportGraphSignature(list(old.graph_signature.input_specs), [*left, *outputs]),
            state_dict=old.state_dict,
            range_constraints=exported_program._get_updated_range_constraints(module, old.range_constraints),
            module_call_graph=copy.copy(old.module_call_graph),
            example_inputs=old.example_inputs,
            constants=old.constants,
            verifiers=[old.verifier],
        )


def _unchanged(node: fx.Node) -> fx.Node | None:
    """What `node` converts to the type, device and layout that it has, without a copy; None if it does anything else.
    torch's own trace would not have the node, since such a conversion returns its argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket is not torch.ops.aten.to:
        return None
    names = (argument.name for argument in node.target._schema.arguments)
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    source: fx.Node = given["self"]
    before, after = source.meta["val"], node.meta["val"]
    if given.get("copy") or given.get("memory_format"):
        return None
    return source if all(getattr(before, n) == getattr(after, n) for n in ("dtype", "device", "layout")) else None


def _place_of(node: fx.Node) -> dict[str, Any]:
    return {name: node.meta[name] for name in _PLACE if name in node.meta}


def _leaf_key(leaf: Any) -> Hashable:
    """An argument, reduced to what decides its decomposition."""
    if not isinstance(leaf, fx.Node):
        return type(leaf), repr(leaf)
    value = leaf.meta["val"]
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    return value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride()))


def _same_nodes(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Which arguments are the same node: a trace of f(x, x) does not fit f(x, y)."""
    first: dict[fx.Node, int] = {}
    return tuple(first.setdefault(node, i) for i, node in enumerate(nodes))


__all__ = ["decompose"]
