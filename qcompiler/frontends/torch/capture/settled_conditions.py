"""Answers conditions that hold for every size of a range, so that torch adds no guard for them.

    s * min(256, 256*s) == 256*s,  s in 1 … 8     min(256, 256*s) is 256, and both sides are equal

torch asks such questions of its own (is this view contiguous?), and cannot simplify the minimum of two sizes.  A guard
that remains would be refused as one that narrows the range.  What it asks only to note how a result lies in memory,
which nobody reads, gets no guard at all: `x[:, :-1]` would exclude the size whose part has one column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def settled_conditions() -> Iterator[None]:
    """While a model is traced, removes minima and maxima with a known result from each condition before torch evaluates
    it, and keeps what torch only notes of results from adding guards."""
    from torch.fx.experimental import _config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes import shape_prop

    original = ShapeEnv.evaluate_expr
    config: Any = _config
    asked = "is_contiguous_for_memory_format_or_false"
    answer: Any = getattr(shape_prop, asked, None)  # a name that torch may change: then the guards stay

    def without_guards(*args: Any, **kwargs: Any) -> Any:
        with config.patch(backed_size_oblivious=True):
            return answer(*args, **kwargs)

    def evaluate(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, without_known_choices(expression, self.var_to_range), *args, **kwargs)

    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
    if answer is not None:
        setattr(shape_prop, asked, without_guards)
    try:
        yield
    finally:
        if answer is not None:
            setattr(shape_prop, asked, answer)
        ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]


def without_known_choices(expression: Any, ranges: Any) -> Any:
    """The expression (of sympy) with each minimum and maximum of two sizes replaced by the argument that it equals
    over the whole range of its symbol. `ranges` has torch's range of each symbol.

    A difference that is affine in one symbol has the same sign over the whole range if it has that sign at both ends.
    """
    from torch.utils._sympy.functions import Max, Min

    if not hasattr(expression, "atoms"):
        return expression
    known = {}
    for choice in expression.atoms(Min, Max):
        if len(choice.args) == 2:
            first, second = choice.args
            sign = _sign(first - second, ranges)
            if sign is not None:
                known[choice] = first if (sign > 0) == isinstance(choice, Max) else second
    return expression.xreplace(known) if known else expression


def _sign(difference: Any, ranges: Any) -> int | None:
    """1 if the difference is nowhere negative, -1 if it is nowhere positive; None if that is not known."""
    values = [difference]
    if difference.free_symbols:
        symbol, *others = difference.free_symbols
        is_affine = difference.is_polynomial(symbol) and not difference.diff(symbol).free_symbols
        if others or symbol not in ranges or not is_affine:
            return None
        values = [difference.subs(symbol, end) for end in (ranges[symbol].lower, ranges[symbol].upper)]
    if all(value.is_nonnegative for value in values):
        return 1
    return -1 if all(value.is_nonpositive for value in values) else None


__all__ = ["settled_conditions", "without_known_choices"]
