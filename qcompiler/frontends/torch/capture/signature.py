"""The structure of a model's arguments and results, from torch's pytree specs, as the JSON tree of `plan.Signature`.

    {"kind": "leaf", "index": 0}                      the first tensor argument (or result)
    {"kind": "tuple" | "list", "items": […]}
    {"kind": "dict", "keys": […], "items": […]}
    {"kind": "namedtuple" | "modeloutput", "class": "module:Name", "keys": […], "items": […]}
    {"kind": "none"}    {"kind": "constant", "value": …}

The inputs' root is `{"args": <tuple node>, "kwargs": <dict node>, "names": [str, …]}`; `names` are the model's
positional parameters, up to the last one that the program was compiled with.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils._pytree import TreeSpec

from qcompiler.errors import ExportError

Node = dict[str, Any]


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """The parameters of a model's forward that a call may pass by position and by keyword, in order."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)


def names_in(program: ExportedProgram) -> tuple[str, ...]:
    """The names that an exported program has for the parameters that its example passed by position."""
    call = program.module_call_graph[0].signature
    names = list(call.forward_arg_names or ()) if call is not None else []
    args, _ = program.call_spec.in_spec.children()
    return tuple(names[: args.num_children])


def trees(program: ExportedProgram, parameters: Sequence[str] = ()) -> tuple[Node, Node]:
    """(inputs, outputs), for a forward with these positional parameters. ExportError for a container that programs
    cannot rebuild."""
    signature = program.graph_signature
    inputs = [s.arg for s in signature.input_specs if s.kind == InputKind.USER_INPUT]
    outputs = [s.arg for s in signature.output_specs if s.kind == OutputKind.USER_OUTPUT]
    args, kwargs = program.call_spec.in_spec.children()
    leaves = _leaves(inputs)
    tree: dict[str, Any] = {"args": _node(args, leaves), "kwargs": _node(kwargs, leaves)}
    known = {*parameters[: len(tree["args"]["items"])], *tree["kwargs"]["keys"]}
    last = max((number for number, name in enumerate(parameters, 1) if name in known), default=0)
    if last:
        tree["names"] = list(parameters[:last])
    return tree, _node(program.call_spec.out_spec, _leaves(outputs))


def _leaves(arguments: list[Any]) -> Iterator[Node]:
    index = 0
    for argument in arguments:
        if not isinstance(argument, ConstantArgument):
            yield {"kind": "leaf", "index": index}
            index += 1
        elif argument.value is None:
            yield {"kind": "none"}
        elif isinstance(argument.value, bool | int | float | str):
            yield {"kind": "constant", "value": argument.value}
        else:
            raise ExportError(
                f"the argument '{argument.name}' is a {type(argument.value).__name__}, which is no tensor"
            )


def _node(spec: TreeSpec, leaves: Iterator[Node]) -> Node:
    if spec.is_leaf():
        return next(leaves)
    kind, items = spec.type, [_node(child, leaves) for child in spec.children()]
    if kind is type(None):
        return {"kind": "none"}
    if kind in (tuple, list):
        return {"kind": kind.__name__, "items": items}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind is dict or name in ("collections:OrderedDict", "torch.fx.immutable_collections:immutable_dict"):
        return {"kind": "dict", "keys": _keys(spec), "items": items}
    if name == "torch.fx.immutable_collections:immutable_list":
        return {"kind": "list", "items": items}
    if name == "collections:namedtuple":  # torch keeps the class in the context
        cls = spec.context
        path = f"{cls.__module__}:{cls.__qualname__}"
        return {"kind": "namedtuple", "class": path, "keys": list(cls._fields), "items": items}
    if kind.__module__ == "torch.return_types":  # the result of x.max(1): a tuple with named fields
        return {"kind": "namedtuple", "class": name, "keys": list(kind.__match_args__), "items": items}
    if issubclass(kind, dict) and isinstance(spec.context, list) and all(isinstance(k, str) for k in spec.context):
        return {"kind": "modeloutput", "class": name, "keys": list(spec.context), "items": items}
    raise ExportError(
        f"the model takes or returns a {name}, which a program cannot rebuild: use tuple, list, dict, a namedtuple or "
        "a ModelOutput (for a cache of transformers: use_cache=False)"
    )


def _keys(spec: TreeSpec) -> list[str]:
    keys = list(spec.context)
    if not all(isinstance(key, str) for key in keys):
        raise ExportError(f"dictionaries in arguments and results need string keys, not {keys}")
    return keys
