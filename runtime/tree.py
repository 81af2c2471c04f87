"""Trees of arguments and results, as a program file stores them.

    {"kind": "leaf", "index": i}                                     tensor number i
    {"kind": "tuple" | "list", "items": [node, …]}
    {"kind": "dict", "keys": [str, …], "items": [node, …]}
    {"kind": "namedtuple" | "modeloutput", "class": "module:Name", "keys": [str, …], "items": [node, …]}
    {"kind": "none"}    {"kind": "constant", "value": …}

A signature's inputs are ``{"args": <tuple node>, "kwargs": <dict node>}``.  Classes are rebuilt only where that runs no
code that the process does not have already (see `find_class`); elsewhere a result is a plain dict or tuple.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qcompiler.errors import ArgumentStructureError, CorruptFileError

Node = Mapping[str, Any]
Flatten = Callable[[Any, list[Any]], None]
Unflatten = Callable[[Sequence[Any]], Any]

MAX_DEPTH = 64
IMPORTABLE = frozenset({"transformers", "diffusers"})
"""Packages whose modules may be imported to rebuild a result class (where torch is loaded already)."""

_MISSING = object()


# --- checks ----------------------------------------------------------------------------------------------------------


def check_signature(inputs: object, outputs: object, input_count: int, output_count: int) -> None:
    """CorruptFileError unless both trees are well-formed and name every tensor."""
    if not isinstance(inputs, Mapping) or set(inputs) != {"args", "kwargs"}:
        raise CorruptFileError("the signature's inputs are not {'args': …, 'kwargs': …}")
    for part, kind in (("args", "tuple"), ("kwargs", "dict")):
        if not isinstance(inputs[part], Mapping) or inputs[part].get("kind") != kind:
            raise CorruptFileError(f"the signature's {part} are not a {kind} node")
    seen = [*_checked_leaves(inputs["args"], "args", 0), *_checked_leaves(inputs["kwargs"], "kwargs", 0)]
    if sorted(seen) != list(range(input_count)):
        raise CorruptFileError(f"the signature's arguments name tensors {sorted(seen)}, the plan has {input_count}")
    leaves = set(_checked_leaves(outputs, "result", 0))
    if leaves != set(range(output_count)):
        raise CorruptFileError(f"the signature's results name tensors {sorted(leaves)}, the plan has {output_count}")


def _checked_leaves(node: object, where: str, depth: int) -> Iterator[int]:
    if depth > MAX_DEPTH:
        raise CorruptFileError(f"the signature is nested deeper than {MAX_DEPTH} at {where}")
    if not isinstance(node, Mapping):
        raise CorruptFileError(f"the signature has no node at {where}")
    match dict(node):
        case {"kind": "leaf", "index": int(index), **rest} if not rest and not isinstance(index, bool):
            yield index
        case {"kind": "none", **rest} if not rest:
            return
        case {"kind": "constant", "value": value, **rest} if not rest:
            _check_constant(value, where)
        case {"kind": "tuple" | "list", "items": list(items), **rest} if not rest:
            for number, item in enumerate(items):
                yield from _checked_leaves(item, f"{where}[{number}]", depth + 1)
        case {"kind": "dict", "keys": list(keys), "items": list(items), **rest} if not rest and _fit(keys, items):
            for key, item in zip(keys, items, strict=True):
                yield from _checked_leaves(item, f"{where}[{key!r}]", depth + 1)
        case {
            "kind": "namedtuple" | "modeloutput", "class": str(), "keys": list(keys), "items": list(items), **rest
        } if not rest and _fit(keys, items):  # fmt: skip
            for key, item in zip(keys, items, strict=True):
                yield from _checked_leaves(item, f"{where}.{key}", depth + 1)
        case _:
            raise CorruptFileError(f"the signature's node at {where} is malformed: {str(node)[:200]}")


def _fit(keys: list[object], items: list[object]) -> bool:
    return len(keys) == len(items) == len(set(map(str, keys))) and all(isinstance(key, str) for key in keys)


def _check_constant(value: object, where: str) -> None:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise CorruptFileError(f"the signature's constant at {where} is no JSON scalar: {str(value)[:200]}")


# --- flatten ---------------------------------------------------------------------------------------------------------


def input_flattener(inputs: Node) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """A function from (args, kwargs) to tensors in the plan's order; ArgumentStructureError where they do not fit."""
    args_items: list[Node] = inputs["args"]["items"]
    kwargs_keys: list[str] = inputs["kwargs"]["keys"]
    order = [item.get("index") for item in args_items]
    if not kwargs_keys and order == list(range(len(order))):  # tensors only, in order: nothing to walk
        count = len(order)

        def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
            if kwargs:
                raise ArgumentStructureError(_unexpected(kwargs, kwargs_keys))
            if len(args) != count:
                raise ArgumentStructureError(_wrong_count(len(args), count))
            return list(args)

        return flat
    return _general_flattener(args_items, kwargs_keys, inputs["kwargs"]["items"])


def _general_flattener(
    args_items: list[Node], kwargs_keys: list[str], kwargs_items: list[Node]
) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    args_steps = [_flattener(item, f"args[{number}]") for number, item in enumerate(args_items)]
    kwargs_steps = [
        (key, _flattener(item, key), _is_optional(item)) for key, item in zip(kwargs_keys, kwargs_items, strict=True)
    ]
    known = frozenset(kwargs_keys)
    # Trailing arguments that hold no tensor may be left out: they are what the program was compiled with.
    required = len(args_items)
    while required and _is_optional(args_items[required - 1]):
        required -= 1
    total = len(args_items) + len(kwargs_items)
    leaves = sum(1 for item in (*args_items, *kwargs_items) for _ in _checked_leaves(item, "", 0))

    def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if not required <= len(args) <= len(args_steps):
            raise ArgumentStructureError(_wrong_count(len(args), len(args_steps)))
        if not known.issuperset(kwargs):
            raise ArgumentStructureError(_unexpected(kwargs, kwargs_keys))
        found: list[Any] = [_MISSING] * leaves
        for step, value in zip(args_steps, args, strict=False):
            step(value, found)
        for key, step, optional in kwargs_steps:
            value = kwargs.get(key, _MISSING)
            if value is not _MISSING:
                step(value, found)
            elif not optional:
                raise ArgumentStructureError(
                    f"the argument '{key}' is missing (the program takes {total} arguments, by keyword "
                    f"{_names(kwargs_keys)})"
                )
        return found

    return flat


def _is_optional(node: Node) -> bool:
    return next(_checked_leaves(node, "", 0), None) is None


def _wrong_count(got: int, wanted: int) -> str:
    return f"the program takes {wanted} positional arguments, the call has {got}"


def _unexpected(kwargs: Mapping[str, Any], keys: Sequence[str]) -> str:
    extra = sorted(set(kwargs) - set(keys))
    return f"unexpected keyword arguments: {_names(extra)}; the program was compiled with {_names(keys)}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def output_flattener(outputs: Node, count: int) -> Callable[[Any], list[Any]]:
    """A function from a tree of `out=` arrays to a list in the plan's order."""
    step = _flattener(outputs, "out")

    def flat(value: Any) -> list[Any]:
        found: list[Any] = [_MISSING] * count
        step(value, found)
        return found

    return flat


def _flattener(node: Node, where: str) -> Flatten:
    match node["kind"]:
        case "leaf":
            index: int = node["index"]

            def leaf(value: Any, found: list[Any]) -> None:
                found[index] = value

            return leaf
        case "none":
            return _expect_value(None, where)
        case "constant":
            return _expect_value(node["value"], where)
        case "tuple" | "list":
            return _sequence_flattener(node, where)
        case "namedtuple":
            return _sequence_flattener(node, where)
        case _:
            return _mapping_flattener(node, where)


def _expect_value(expected: object, where: str) -> Flatten:
    def check(value: Any, found: list[Any]) -> None:
        # `1 == True` in Python, but a model may not treat them alike.
        if value is not expected and (type(value) is not type(expected) or value != expected):
            raise ArgumentStructureError(
                f"'{where}' was {expected!r} when the program was compiled and is {_short(value)} now; "
                "pass the same value, or compile again with this one"
            )

    return check


def _sequence_flattener(node: Node, where: str) -> Flatten:
    steps = [_flattener(item, f"{where}[{number}]") for number, item in enumerate(node["items"])]
    kind = node["kind"]

    def sequence(value: Any, found: list[Any]) -> None:
        if not isinstance(value, tuple | list):
            raise ArgumentStructureError(f"'{where}' must be a {kind} of {len(steps)} items, not {_short(value)}")
        if len(value) != len(steps):
            raise ArgumentStructureError(f"'{where}' must have {len(steps)} items, not {len(value)}")
        for step, item in zip(steps, value, strict=True):
            step(item, found)

    return sequence


def _mapping_flattener(node: Node, where: str) -> Flatten:
    keys: list[str] = node["keys"]
    steps = [_flattener(item, f"{where}[{key!r}]") for key, item in zip(keys, node["items"], strict=True)]
    known = frozenset(keys)

    def mapping(value: Any, found: list[Any]) -> None:
        if not isinstance(value, dict | Mapping):
            raise ArgumentStructureError(f"'{where}' must be a dict with the keys {_names(keys)}, not {_short(value)}")
        if value.keys() != known:
            raise ArgumentStructureError(f"'{where}' must have the keys {_names(keys)}, not {_names(list(value))}")
        for key, step in zip(keys, steps, strict=True):
            step(value[key], found)

    return mapping


def _short(value: object) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"


def arguments_of(inputs: Node, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call that passes `tensors`, in the plan's order."""
    return unflattener(inputs["args"])(tensors), unflattener(inputs["kwargs"])(tensors)


# --- unflatten -------------------------------------------------------------------------------------------------------


def unflattener(node: Node) -> Unflatten:
    """A function from tensors in the plan's order to the caller's structure."""
    match node["kind"]:
        case "leaf":
            index: int = node["index"]
            return lambda leaves: leaves[index]
        case "none":
            return lambda leaves: None
        case "constant":
            value = node["value"]
            return lambda leaves: value
        case "list":
            items = [unflattener(item) for item in node["items"]]
            return lambda leaves: [item(leaves) for item in items]
        case "tuple":
            items = [unflattener(item) for item in node["items"]]
            return lambda leaves: tuple([item(leaves) for item in items])
        case _:
            return _named_unflattener(node)


def _named_unflattener(node: Node) -> Unflatten:
    pairs = [(key, unflattener(item)) for key, item in zip(node["keys"], node["items"], strict=True)]
    kind = node["kind"]
    known: list[Any] = []

    def named(leaves: Sequence[Any]) -> Any:
        values = {key: item(leaves) for key, item in pairs}
        if kind == "dict":
            return values
        # Looked up until it is there: the class may be imported after the program was loaded.
        if not known:
            cls = find_class(node["class"], kind, tuple(values))
            if cls is not None:
                known.append(cls)
        if known:
            return known[0](**values)
        return values if kind == "modeloutput" else tuple(values.values())

    return named


def find_class(name: str, kind: str, keys: tuple[str, ...]) -> Any | None:
    """The class `module:Name` if it may be rebuilt, else None.

    Its module must be loaded already, or belong to an installed package of `IMPORTABLE` while torch is loaded; and the
    class must be a dataclass that is a dict (`modeloutput`) or a namedtuple, with these fields.
    """
    module_name, _, class_name = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and module_name.partition(".")[0] in IMPORTABLE and "torch" in sys.modules:
        try:
            if importlib.util.find_spec(module_name) is not None:
                module = importlib.import_module(module_name)
        except ImportError:  # the class is not importable here: the plain structure is the documented result
            return None
    cls: Any = module
    for part in class_name.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type):
        return None
    if kind == "modeloutput":
        fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
        return cls if issubclass(cls, dict) and fields >= set(keys) else None
    return cls if issubclass(cls, tuple) and getattr(cls, "_fields", None) == keys else None
