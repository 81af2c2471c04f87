"""Trees of arguments and results, as a program file stores them.

    {"kind": "leaf", "index": i}                                     tensor number i
    {"kind": "tuple" | "list", "items": [node, …]}
    {"kind": "dict", "keys": [str, …], "items": [node, …]}
    {"kind": "namedtuple" | "modeloutput", "class": "module:Name", "keys": [str, …], "items": [node, …]}
    {"kind": "none"}    {"kind": "constant", "value": …}

A signature's inputs are ``{"args": <tuple node>, "kwargs": <dict node>, "names": [str, …]}``.  `names` are the model's
positional parameters, in order: a call may then pass each argument by position or by keyword, whichever way the program
was compiled.  Files without `names` take arguments only in the way of the compile.
Classes are rebuilt only if that imports no new code (see `find_class`); else a result is a plain dict or tuple.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qcompiler.errors import ArgumentStructureError, CorruptFileError
from qcompiler.units import counted

Node = Mapping[str, Any]
Flatten = Callable[[Any, list[Any]], None]
Unflatten = Callable[[Sequence[Any]], Any]

MAX_DEPTH = 64
IMPORTABLE = frozenset({"transformers", "diffusers"})
"""Packages whose modules may be imported to rebuild a result class (if torch is loaded already)."""

_MISSING = object()


# --- checks ----------------------------------------------------------------------------------------------------------


def check_signature(inputs: object, outputs: object, input_count: int, output_count: int) -> None:
    """CorruptFileError unless both trees are well-formed and name every tensor."""
    if not isinstance(inputs, Mapping) or set(inputs) - {"names"} != {"args", "kwargs"}:
        raise CorruptFileError("the signature's inputs are not {'args': …, 'kwargs': …, 'names': …}")
    for part, kind in (("args", "tuple"), ("kwargs", "dict")):
        if not isinstance(inputs[part], Mapping) or inputs[part].get("kind") != kind:
            raise CorruptFileError(f"the signature's {part} are not a {kind} node")
    seen = [*_checked_leaves(inputs["args"], "args", 0), *_checked_leaves(inputs["kwargs"], "kwargs", 0)]
    _check_names(inputs)
    if sorted(seen) != list(range(input_count)):
        raise CorruptFileError(f"the signature's arguments name tensors {sorted(seen)}, the plan has {input_count}")
    leaves = set(_checked_leaves(outputs, "result", 0))
    if leaves != set(range(output_count)):
        raise CorruptFileError(f"the signature's results name tensors {sorted(leaves)}, the plan has {output_count}")


def _check_names(inputs: Mapping[str, Any]) -> None:
    """CorruptFileError unless the parameters' names are distinct strings, and no name has two arguments."""
    names = inputs.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise CorruptFileError(f"the signature's names are not a list of distinct texts: {str(names)[:200]}")
    positional = len(inputs["args"]["items"])
    if twice := sorted(set(names[:positional]) & set(inputs["kwargs"]["keys"])):
        raise CorruptFileError(f"the signature has the argument '{twice[0]}' twice, by position and by keyword")


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
    """A function from (args, kwargs) to tensors in the plan's order; ArgumentStructureError if they do not fit."""
    items, keys = inputs["args"]["items"], inputs["kwargs"]["keys"]
    general = _Arguments(inputs).flat
    order = [item.get("index") for item in items]
    if keys or order != list(range(len(order))):
        return general
    count = len(order)

    def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        # The hot path: only tensors, all by position and in the plan's order.
        return general(args, kwargs) if kwargs or len(args) != count else list(args)

    return flat


class _Arguments:
    """Binds a call's arguments to a signature as Python binds them to the model's `forward`."""

    def __init__(self, inputs: Node) -> None:
        args: list[Node] = inputs["args"]["items"]
        keys: list[str] = inputs["kwargs"]["keys"]
        parameters: list[str] = inputs.get("names", [])
        items = [*args, *inputs["kwargs"]["items"]]
        self.names: list[str | None] = [*parameters[: len(args)], *[None] * (len(args) - len(parameters)), *keys]
        shown = [name or f"args[{number}]" for number, name in enumerate(self.names)]
        self.steps = [_flattener(item, where) for item, where in zip(items, shown, strict=True)]
        # Arguments that hold no tensor may be left out: they then have the value of the compile.
        self.optional = [next(_checked_leaves(item, "", 0), None) is None for item in items]
        self.by_name = {name: number for number, name in enumerate(self.names) if name is not None}
        self.leaves = sum(1 for item in items for _ in _checked_leaves(item, "", 0))
        # The entry at each position of a call: the number of the argument, or the name of a parameter of the model
        # that was not given at the compile.
        self.positions: list[int | str] = [*range(len(args))]
        self.positions += [self.by_name.get(name, name) for name in parameters[len(args) :]]
        while self.positions and isinstance(self.positions[-1], str):
            self.positions.pop()

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Tensors in the plan's order."""
        if len(args) > len(self.positions):
            raise ArgumentStructureError(self._wrong_count(len(args)))
        found: list[Any] = [_MISSING] * self.leaves
        given = [False] * len(self.steps)
        for place, value in zip(self.positions, args, strict=False):
            if isinstance(place, str):
                raise ArgumentStructureError(
                    f"the program was compiled without '{place}', the parameter at this position of forward; "
                    f"pass later arguments by keyword: {_names(self.by_name)}"
                )
            self.steps[place](value, found)
            given[place] = True
        for name, value in kwargs.items():
            number = self.by_name.get(name)
            if number is None:
                raise ArgumentStructureError(self._unexpected(kwargs))
            if given[number]:
                raise ArgumentStructureError(f"the argument '{name}' is given twice, by position and by keyword")
            self.steps[number](value, found)
            given[number] = True
        for number, is_there in enumerate(given):
            if not is_there and not self.optional[number]:
                raise ArgumentStructureError(self._missing(number, len(args)))
        return found

    def _missing(self, number: int, got: int) -> str:
        name = self.names[number]
        if name is None:
            return self._wrong_count(got)
        return (
            f"the argument '{name}' is missing (the program takes {counted(len(self.steps), 'argument')}: "
            f"{_names(self.by_name)})"
        )

    def _wrong_count(self, got: int) -> str:
        return f"the program takes {counted(len(self.positions), 'positional argument')}, the call has {got}"

    def _unexpected(self, kwargs: Mapping[str, Any]) -> str:
        extra = sorted(set(kwargs) - set(self.by_name))
        return f"unexpected keyword arguments: {_names(extra)}; the program was compiled with {_names(self.by_name)}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def result_names(outputs: Node) -> list[tuple[str, int]]:
    """A name for each tensor of the results, with its number in the plan.

    `result`; `result.0` of a tuple, `hidden` of a dict or a class, `cache.0` of what lies deeper.  A tensor that is
    returned twice has two names, and no two names are equal, although keys may have points in them.
    """
    named: dict[str, int] = {}
    for plain, number in _named_leaves(outputs, ""):
        name = plain
        while name in named:
            name += "_"
        named[name] = number
    return list(named.items())


def names_in_order(outputs: Node, count: int) -> list[str]:
    """The first name of each of `count` results, in the plan's order."""
    named = {number: name for name, number in reversed(result_names(outputs))}
    return [named[number] for number in range(count)]


def _named_leaves(node: Node, name: str) -> Iterator[tuple[str, int]]:
    if node["kind"] == "leaf":
        yield name or "result", node["index"]
    items = node.get("items", [])
    keys = node.get("keys", range(len(items)))
    prefix = f"{name}." if name else "" if "keys" in node else "result."
    for key, item in zip(keys, items, strict=True):
        yield from _named_leaves(item, f"{prefix}{key}")


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
        # `1 == True` in Python, but a model may treat them differently.
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
            raise ArgumentStructureError(
                f"'{where}' must be a {kind} of {counted(len(steps), 'item')}, not {_short(value)}"
            )
        if len(value) != len(steps):
            raise ArgumentStructureError(f"'{where}' must have {counted(len(steps), 'item')}, not {len(value)}")
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
        # Looked up until it is found: the class may be imported after the program was loaded.
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
        except Exception:  # the class cannot be imported here, for any reason: use the plain structure
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
