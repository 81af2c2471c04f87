"""Budgets of speed as text, and what the linears of a recipe take by measurement (recipes/linear_times.py).

    "3 ms"                  the linears of one call, together
    "1.2 x int4"            1.2 times what they would take with every weight in int4
    "3 ms at 32 rows"       with 32 rows of x (tokens) in a call; without it one row: a token of one sequence

Only linears count: the other kernels do not depend on a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from qcompiler.config import resolve_format
from qcompiler.errors import BudgetError, FormatShapeError, RecipeError
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.quantise.sensitivity import FLOAT
from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.recipes.budgets import digits
from qcompiler.recipes.layers import Item
from qcompiler.recipes.linear_times import Case, copies_for

UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
MOST_ROWS = 1 << 16

MOST_NS = 1 << 62
"""A limit that every recipe keeps, of 64 bits as all sums of times."""

GRAMMAR = (
    "write a time of the linears of one call ('3 ms', '800 us'), or a multiple of what they take in one format "
    "('1.2 x int4'), either for one row of x or followed by 'at 32 rows'"
)


@dataclass(frozen=True)
class Speed:
    """At most `amount` nanoseconds, or `amount` times the time in `reference`, for the linears of a call of `rows`."""

    amount: float
    reference: str | None
    rows: int
    text: str

    @staticmethod
    def of(text: object) -> Speed:
        """BudgetError for anything but a budget of speed; UnknownFormatError for a reference that is no format."""
        found = _parsed(text) if isinstance(text, str) else None
        if found is None or not 0 < found.amount < float("inf") or not 1 <= found.rows <= MOST_ROWS:
            raise BudgetError(f"speed={text!r}: {GRAMMAR}")
        if found.reference not in (None, FLOAT):
            resolve_format(str(found.reference))
        return found


def _parsed(text: str) -> Speed | None:
    """A form without meaning is None; an amount that is no number, too."""
    found = re.fullmatch(
        r"\s*(?:<=?)?\s*([0-9.eE+-]+)\s*(?:(ns|us|ms|s)|[x×]\s*(\S+))(?:\s+at\s+(\d{1,9})\s+rows?)?\s*", text
    )
    if found is None:
        return None
    try:
        amount = float(found[1])
    except ValueError:
        return None
    rows = int(found[4]) if found[4] else 1
    at = f" at {rows} rows" if rows != 1 else ""
    if found[2]:
        return Speed(amount * UNITS[found[2]], None, rows, f"{digits(amount)} {found[2]}{at}")
    return Speed(amount, found[3], rows, f"{digits(amount)} x {found[3]}{at}")


@dataclass(frozen=True)
class Times:
    """`ns` has, for each item, the nanoseconds of its linears in a call by the text of a format. `limit` is the budget
    in nanoseconds, and `left_out` are the weights whose operators were not measured."""

    speed: Speed
    ns: Sequence[Mapping[str, int]]
    limit: int
    left_out: tuple[str, ...]

    def total(self, texts: Iterable[str]) -> int:
        """The nanoseconds of all items, each in its format."""
        return sum(ns[text] for ns, text in zip(self.ns, texts, strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        count = f"{len(self.left_out)} weight{'s' * (len(self.left_out) != 1)}"
        if not self.left_out:
            return ()
        named = ", ".join(self.left_out[:3]) + ", …" * (len(self.left_out) > 3)
        return (f"speed counts linears: the operators of {count} (convolutions, experts, recurrent layers) "
                f"have no time here: {named}",)  # fmt: skip


def times_of(items: Sequence[Item], speed: Speed, measured: Callable[[Iterable[Case]], Mapping[Case, int]]) -> Times:
    """The times of all items in all of their formats, and the limit.

    RecipeError for a model without linears, and for a reference that a weight cannot have.
    """
    calls = [_calls(item) for item in items]
    if not any(calls):
        raise RecipeError(f"speed={speed.text!r}: none of the weights belongs to a linear, and only linears are timed")
    model = sum(layer.elements for item, count in zip(items, calls, strict=True) if count for layer in item.layers)
    wanted = [_cases(item, speed, model) if count else {} for item, count in zip(items, calls, strict=True)]
    taken = measured(case for cases in wanted for case in cases.values())
    ns = [
        {text: count * taken[cases[text]] if count else 0 for text in cases or item.texts}
        for item, cases, count in zip(items, wanted, calls, strict=True)
    ]
    limit = speed.amount
    if speed.reference is not None:
        limit *= sum(each[_reference(item, speed)] for item, each in zip(items, ns, strict=True))
    weights = [layer.weight for item in items for layer in item.layers]
    left_out = [each.targets[0] for each in weights if each.kinds != {"embedding"} and not _products(each)]
    return Times(speed, ns, int(min(limit, MOST_NS)), tuple(left_out))


def _reference(item: Item, speed: Speed) -> str:
    """The format that an item has in the recipe that the budget is a multiple of: its only one, if it has no choice."""
    return item.texts[0] if item.fixed or not _calls(item) else str(speed.reference)


def _cases(item: Item, speed: Speed, model: int) -> dict[str, Case]:
    """What is to be measured for an item by format: its weights are one linear, whose rows lie one behind another."""
    rows = sum(layer.weight.shape[0] for layer in item.layers)
    cols = item.layers[0].weight.shape[1]
    texts = list(item.texts)
    if speed.reference is not None and not item.fixed and speed.reference not in texts:
        texts.append(speed.reference)
    found = {}
    for text in texts:
        nbytes = _nbytes(item, text, speed)
        whole = round(nbytes * model / (rows * cols))
        dtype = dtype_name(item.layers[0].weight.tensor.dtype)
        found[text] = Case(rows, cols, text, dtype, speed.rows, copies_for(nbytes, whole))
    return found


def _nbytes(item: Item, text: str, speed: Speed) -> int:
    if text in item.texts:
        return item.nbytes(text)
    tensors = [layer.weight for layer in item.layers]
    if text == FLOAT:
        return sum(weight.tensor.numel() * weight.tensor.element_size() for weight in tensors)
    try:
        return sum(resolve_format(text).nbytes(*weight.shape) for weight in tensors)
    except FormatShapeError as error:
        raise RecipeError(f"speed={speed.text!r}: '{item.layers[0].path}' cannot be in {text}: {error}") from error


def _calls(item: Item) -> int:
    """How often a call multiplies by the item: its weights that are stored as one are read together."""
    return max(_products(layer.weight) for layer in item.layers)


def _products(weight: GraphWeight) -> int:
    """The number of linears of the graph that read a weight. A table is looked up, which takes next to no time."""
    if "linear" not in weight.kinds or weight.conv is not None or weight.experts is not None:
        return 0
    return sum(user.target is not recurrent.OPERATOR and "embedding" not in str(user.target) for user in weight.users)
