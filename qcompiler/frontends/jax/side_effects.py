"""Arrays that a function replaces in its arguments: a variable of Flax NNX, or an entry of a dict.

    self.count[...] += 1                  a variable: an error, where results depend on it
    batch["x"] = batch["x"] / 255         an entry of a dict: a note in the report

`jax.export` traces copies of the arguments, so such a change is lost after the call, as it is under `jax.jit`.  A
variable holds a state, and later calls would compute with the first one: this is refused.  A dict is often changed as a
place for work, and then nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from qcompiler.errors import ArgumentStructureError, ExportError
from qcompiler.frontends.jax.graph import Graph
from qcompiler.frontends.jax.refusals import place
from qcompiler.frontends.jax.trees import flattened, is_array, variable_paths


@dataclass(frozen=True)
class Replaced:
    """An array that its container holds no longer, by its number among the arrays; `value` is in its place."""

    number: int
    value: Any
    in_variable: bool


def watched(function: Callable[[], Any], containers: Any, arrays: Sequence[Any]) -> tuple[Any, list[Replaced]]:
    """`function()`, and the `arrays` that it replaced in `containers` and does not return in their new form."""
    before, _ = flattened(containers)
    variables = variable_paths(containers)
    result = function()
    try:
        after = {jax.tree_util.keystr(path): leaf for path, leaf in flattened(containers)[0]}
    except ArgumentStructureError:  # a dict got keys that have no order: only its copy in the trace has them
        after = {}
    numbers = {id(array): number for number, array in enumerate(arrays)}
    returned = {id(leaf) for leaf in jax.tree_util.tree_leaves(result)}
    found = []
    for path, leaf in before:
        now = after.get(jax.tree_util.keystr(path), leaf)
        if id(leaf) in numbers and now is not leaf and id(now) not in returned:
            found.append(Replaced(numbers[id(leaf)], now, path[:-1] in variables))
    return result, found


def check(found: Iterable[Replaced], graph: Graph, line: Callable[[int], str]) -> None:
    """Notes in the report. ExportError for a variable that results depend on; `line(number)` is its place, in brackets.

    `found` has the numbers of `graph.leaves`, and behind them of `graph.arguments`.
    """
    values = [*graph.leaves, *graph.arguments]
    read = {value for node in graph.live() for value in node.operands} | set(graph.returned)
    for each in found:
        value = values[each.number]
        if each.in_variable and value in read:
            raise ExportError(
                f"the function assigns '{value.name}', a variable of the module{line(each.number)}, and its results "
                "depend on it: a program would begin each call with the first value. model.eval() turns off dropout "
                "and the statistics of a batch. Else split the module and return its state: graph, state = "
                "nnx.split(model), and a function (params, state, x) that merges them and returns the new state"
            )
        graph.notes.append((
            f"the function replaces '{value.name}' in its argument{line(each.number)}",
            "the change is lost after the call, as under jax.jit: return the new value, if it is needed",
        ))  # fmt: skip


def line_of(traced: Callable[..., list[Replaced]], arguments: Sequence[Any], number: int) -> str:
    """The place where array `number` gets its new value; the function is traced again to find it.

    "" if no operation made the value, and for a function that does something else, or fails, when it is traced again.
    """

    def new_value(*given: Any) -> list[Any]:
        return [each.value for each in traced(*given) if each.number == number and is_array(each.value)]

    try:
        jaxpr = jax.make_jaxpr(new_value)(*arguments).jaxpr
    except Exception:  # whatever the function raises; its first trace went well
        return ""
    made = [eqn for eqn in jaxpr.eqns for result in jaxpr.outvars if result in eqn.outvars]
    return place(made[0]) if made else ""
