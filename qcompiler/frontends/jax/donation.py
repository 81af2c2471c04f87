"""Donated arguments as states: `donate_argnums` of `qcompile`.

    step(params, token, cache) -> (logits, cache)        donate_argnums=2
    prog(token) -> (logits, None)                        the cache is a state of the program

An argument is paired with the result, or the element of a tuple, list, dict or namedtuple of results, that has its
structure, shapes and types.  Several of one kind are paired in order, as JAX pairs donated buffers.  What a jitted
function donates itself stays an input, with a note: to JAX a donation is about memory, and changes no call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend

from qcompiler.errors import ArgumentError
from qcompiler.frontends.jax.trees import Tree, numbered, tree_of


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments: its number, the number of its positional argument (None: a keyword), its type."""

    number: int
    argument: int | None
    struct: jax.ShapeDtypeStruct


def numbers(donated: int | Sequence[int] | None, count: int, has_weights: bool) -> tuple[int, ...]:
    """The arguments behind the one with the weights, counted from 0. ArgumentError for one that is not there."""
    if donated is None:
        return ()
    given = (donated,) if isinstance(donated, int) else tuple(donated)
    for number in given:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ArgumentError(f"donate_argnums={donated!r}: the function has the arguments 0 to {count - 1}")
        if has_weights and number == 0:
            raise ArgumentError(
                f"donate_argnums={donated!r}: the first argument holds the weights, which are constants of the "
                "program; donate the cache, another argument"
            )
    return tuple(dict.fromkeys(number - has_weights for number in given))


def donated_by_function(jaxpr: Any, weights: int) -> set[int]:
    """The numbers of the arrays that a jitted function donates, if it is all of the traced one."""
    found = set()
    position = {variable: i - weights for i, variable in enumerate(jaxpr.jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for variable, is_donated in zip(eqn.invars, eqn.params.get("donated_invars") or (), strict=False):
            if is_donated and not isinstance(variable, jax.extend.core.Literal) and position.get(variable, -1) >= 0:
                found.add(position[variable])
    return found


def note(
    found: Collection[int], names: Sequence[str], leaves: Sequence[Leaf], has_weights: bool,
    notes: list[tuple[str, str]],
) -> None:  # fmt: skip
    """Notes for the report about arguments of which the function itself donates an array."""
    donated = [leaf.argument for leaf in leaves if leaf.number in found]
    for number in dict.fromkeys(donated):
        if number is None:
            notes.append(("a donated keyword argument stays an input", "only positional arguments can become states"))
            continue
        notes.append((
            f"the donated argument '{names[number]}' stays an input",
            f"if the function returns its new value, qcompile(…, donate_argnums={number + has_weights}) makes it a "
            "state of the program",
        ))  # fmt: skip


def pair(
    args: Sequence[Any],
    names: Sequence[str],
    leaves: Sequence[Leaf],
    chosen: Sequence[int],
    results: Any,
    avals: Sequence[Any],
    notes: list[tuple[str, str]],
) -> dict[int, int]:
    """The number of the new value among the results, for each array of a state.

    `chosen` are arguments; notes for the report are appended.  ArgumentError for one without such a result, or with
    several.
    """
    parts = _parts(results, avals)
    states: dict[int, int] = {}
    arrays = {number: [leaf for leaf in leaves if leaf.argument == number] for number in chosen}
    kinds = {number: _kind(args[number], [leaf.struct for leaf in arrays[number]]) for number in chosen}
    for number in chosen:
        same = [other for other in chosen if kinds[other] == kinds[number]]
        fitting = [part for part in parts if part[0] == kinds[number]]
        own = arrays[number]
        if len(fitting) != len(same) or not own:
            raise ArgumentError(
                f"the donated argument '{names[number]}' becomes a state if one result has its "
                f"structure, shapes and types; of {len(same)} such arguments there are {len(fitting)} results. Return "
                "its new value, alone or as an element of a tuple or dict; or leave it out of donate_argnums"
            )
        begin = fitting[same.index(number)][1]
        if any(not isinstance(size, int) for leaf in own for size in leaf.struct.shape):
            raise ArgumentError(
                f"the donated argument '{names[number]}' has a dynamic size, which a state cannot "
                "have: fix it, or leave it out of donate_argnums"
            )
        states.update({leaf.number: begin + i for i, leaf in enumerate(own)})
        notes.append(
            (f"the donated argument '{names[number]}' is a state", f"its new value is result {begin} in flat order")
        )
    return states


def _kind(argument: Any, structs: Sequence[Any]) -> Any:
    return jax.tree_util.tree_structure(argument), tuple((tuple(s.shape), s.dtype) for s in structs)


def _parts(results: Any, avals: Sequence[Any]) -> list[tuple[Any, int]]:
    """(kind, number of the first leaf) of the result and of its elements."""
    types = [(tuple(aval.shape), aval.dtype) for aval in avals]
    found, begin = [((results, tuple(types)), 0)], 0
    for child in results.children():
        end = begin + child.num_leaves
        found.append(((child, tuple(types[begin:end])), begin))
        begin = end
    return found


_GONE: Tree = {"kind": "gone"}


def outputs(results: Any, states: Iterable[int]) -> Tree:
    """The tree of the results: those of states are None, whole, and the others are numbered."""
    gone = set(states)
    kept = iter(range(results.num_leaves))
    leaves = {i: _GONE if i in gone else {"kind": "leaf", "index": next(kept)} for i in range(results.num_leaves)}
    return _without(tree_of(numbered(results), leaves, "the result"))


def _without(node: Tree) -> Tree:
    """None for a container of states alone."""
    if _is_gone(node):
        return {"kind": "none"}
    return {**node, "items": [_without(item) for item in node["items"]]} if "items" in node else node


def _is_gone(node: Tree) -> bool:
    items = node.get("items")
    return node is _GONE if items is None else bool(items) and all(_is_gone(item) for item in items)
