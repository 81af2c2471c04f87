"""Eager torch on one set of sizes, and how far its own roundings move each number.

Beside eager torch, a graph runs in float64: once plainly, and a few times with every rounding that eager torch makes
replaced by a random one of up to `AMPLITUDE` half units in the last place of the type that is rounded to (operands of
an operator are moved by the unit that it computes in, results by that of their own type). The largest move of an
element over the runs is what reordered sums, kept or deleted roundings and other `exp`s may change there: cancellation,
steep functions and long chains are in it, whatever the operators. Hence

* `tolerance`: `ALLOWANCE` times the move of the element (or half the root mean square of all moves in the tensor, where
  an element was lucky), plus two half units of the result itself;
* what is discrete (integers, comparisons, positions, the places of NaN and infinities) has to come out equal in all
  runs, else the statement means nothing on these values, and the generator takes another;
* a statement whose moves are large against its values is refused in the same way.

Values that every implementation computes to the bit (`Statement.exact`, on exact operands) are not moved at all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import torch

from graphfuzz.graphs import SMALLEST, UNIT, Graph, Leaf, Statement
from graphfuzz.values import make

AMPLITUDE = 8.0
RUNS = 4
ALLOWANCE = 2.0
LARGEST = 3e4
"""Values above are refused: fp16 ends at 65504."""

Tensor = torch.Tensor
Env = dict[str, Tensor]


class Meaningless(Exception):
    """A statement whose result cannot be compared: it depends on roundings, overflows, or is not what was predicted."""


@cache
def _compiled(text: str, double: bool) -> CodeType:
    if double:
        text = re.sub(r"torch\.(float32|bfloat16|float16)\b", "torch.float64", text)
    return compile(text, "<statement>", "eval")


def evaluate(text: str, env: Mapping[str, Any], symbols: Mapping[str, int], *, double: bool) -> Any:
    """One statement's right side on tensors by name."""
    attributes = {name.removeprefix("self."): value for name, value in env.items() if name.startswith("self.")}
    space = {**env, **symbols, "self": SimpleNamespace(**attributes)}
    previous = torch.get_default_dtype()
    if double:
        torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(_compiled(text, double), {"torch": torch, "F": torch.nn.functional}, space)
    finally:
        torch.set_default_dtype(previous)


@dataclass
class Known:
    """Of a value: whether it is exact, and the coarsest unit among the roundings behind it."""

    exact: bool
    unit: float


class Trial:
    """A graph at one set of sizes, statement by statement."""

    def __init__(self, symbols: Mapping[str, int], seed: int, *, special: bool = False) -> None:
        self.symbols, self.special = dict(symbols), special
        self.seed = seed
        self.eager: Env = {}
        self.doubles: list[Env] = [{} for _ in range(RUNS + 1)]
        """The plain run, then those with random roundings."""
        self.known: dict[str, Known] = {}
        self.random = torch.Generator().manual_seed(seed + 1)

    def leaf(self, leaf: Leaf, value: Tensor | None = None) -> None:
        """Binds a leaf to its values (or to those given, for weights that were quantised)."""
        if value is None:
            shape = [size.at(self.symbols) for size in leaf.type.shape]
            seed = leaf.seed + (1009 * self.seed if leaf.is_input else 0)
            value = make(leaf.fill, getattr(torch, leaf.type.dtype), shape, seed)
        self.eager[leaf.name] = value
        for env in self.doubles:
            env[leaf.name] = _double(value)
        self.known[leaf.name] = Known(True, 0.0)

    def step(self, statement: Statement) -> None:
        """Runs a statement everywhere. Meaningless, with nothing bound, where its result cannot be compared."""
        results = self._eager(statement)
        known = [self.known[name] for name in statement.operands]
        exact = statement.exact and all(k.exact for k in known)
        unit = max((k.unit for k in known), default=0.0)
        doubles = [self._double_run(statement, env, run) for run, env in enumerate(self.doubles)]
        for index, name in enumerate(statement.names):
            value = results[index]
            mine = [run[index] for run in doubles]
            is_float = value.is_floating_point()
            if exact or not is_float:
                self._check_discrete(value, mine, exact)
                self._bind(name, value, [_double(value)] * len(mine), Known(True, unit if not is_float else 0.0))
                continue
            coarsest = max(unit, _unit_of(value))
            self._check_float(value, mine, coarsest)
            self._bind(name, value, mine, Known(False, coarsest))

    def _bind(self, name: str, value: Tensor, doubles: Iterable[Tensor], known: Known) -> None:
        self.eager[name] = value
        for env, double in zip(self.doubles, doubles, strict=True):
            env[name] = double
        self.known[name] = known

    def _eager(self, statement: Statement) -> list[Tensor]:
        try:
            found = evaluate(statement.text, self.eager, self.symbols, double=False)
        except (RuntimeError, IndexError, ValueError) as error:
            raise Meaningless(f"eager torch refuses {statement.text}: {error}") from error
        results = list(found) if isinstance(found, list | tuple) else [found]
        for result, type_ in zip(results, statement.types, strict=True):
            shape = tuple(size.at(self.symbols) for size in type_.shape)
            if tuple(result.shape) != shape or result.dtype != getattr(torch, type_.dtype):
                raise AssertionError(
                    f"{statement.text} gave {result.dtype}{tuple(result.shape)}, not {type_} = {shape}"
                )
        return results

    def _double_run(self, statement: Statement, env: Env, run: int) -> list[Tensor]:
        if run:
            moved = dict(env)
            for name in statement.operands:
                if env[name].is_floating_point() and not statement.exact:
                    moved[name] = self._moved(env[name], self.eager[name].dtype, inside=not statement.coarse)
            env = moved
        try:
            found = evaluate(statement.text, env, self.symbols, double=True)
        except (RuntimeError, IndexError, ValueError) as error:
            raise Meaningless(f"in float64, eager torch refuses {statement.text}: {error}") from error
        results = list(found) if isinstance(found, list | tuple) else [found]
        if run:
            dtypes = [getattr(torch, type_.dtype) for type_ in statement.types]
            results = [self._moved(r, d) if d.is_floating_point else r for r, d in zip(results, dtypes, strict=True)]
        return results

    def _moved(self, value: Tensor, dtype: torch.dtype, *, inside: bool = False) -> Tensor:
        """The value with random roundings: of fp32 arithmetic (`inside` an operator), or of its own dtype."""
        name = str(dtype).removeprefix("torch.")
        unit = min(UNIT["float32"], UNIT[name]) if inside else UNIT[name]
        draw = torch.rand((2, *value.shape), generator=self.random, dtype=torch.float64) * 2 - 1
        return value * (1 + AMPLITUDE * unit * draw[0]) + AMPLITUDE * SMALLEST[name] * draw[1]

    def _check_discrete(self, value: Tensor, doubles: list[Tensor], exact: bool) -> None:
        if value.is_floating_point():
            self._check_range(value)
        if exact:
            return
        for double in doubles:
            if not torch.equal(double.to(value.dtype), value):
                raise Meaningless("a discrete result depends on roundings")

    def _check_range(self, value: Tensor) -> None:
        if self.special or not value.numel():
            return
        if not bool(value.isfinite().all()):
            raise Meaningless("the result is not finite")
        if float(value.abs().max()) > LARGEST:
            raise Meaningless("the result is too large")

    def _check_float(self, value: Tensor, doubles: list[Tensor], unit: float) -> None:
        self._check_range(value)
        finite = value.isfinite()
        for double in doubles:
            if not torch.equal(double.isfinite(), finite):
                raise Meaningless("what is finite depends on roundings")
            odd, double_odd = value[~finite].double(), double[~finite]
            if not torch.equal(odd.nan_to_num(), double_odd.nan_to_num()) or not torch.equal(
                odd.isnan(), double_odd.isnan()
            ):
                raise Meaningless("NaN or infinity depends on roundings")
        if not bool(finite.any()):
            return
        plain = doubles[0][finite]
        moves = torch.stack([d[finite] - plain for d in doubles[1:]])
        size, move = float(plain.square().mean().sqrt()), float(moves.square().mean().sqrt())
        limit = 1e-3 if unit <= UNIT["float32"] else 0.1
        if move > limit * size and move > 1e-30:
            raise Meaningless("the result is mostly rounding")
        allowed = tolerance_of(value, doubles)
        if bool(((value.double() - doubles[0]).abs()[finite] > allowed[finite]).any()):
            raise Meaningless("eager torch itself is further off")

    def write(self, buffer: str, value: str, statements: Iterable[Statement]) -> None:
        """`buffer.copy_(value)`, behind all statements: views of the buffer show what was written."""
        held = self.eager[buffer]
        if not held.numel():
            return
        storage = held.untyped_storage().data_ptr()
        views = [s for s in statements if any(self.eager[n].untyped_storage().data_ptr() == storage for n in s.names)]
        held.copy_(self.eager[value])
        for env in self.doubles:
            env[buffer] = env[value]
            for view in views:
                results = evaluate(view.text, env, self.symbols, double=True)
                results = results if isinstance(results, list | tuple) else [results]
                env.update(zip(view.names, results, strict=True))
        self.known.update({name: self.known[value] for view in views for name in view.names})

    def tolerance(self, name: str) -> Tensor | None:
        """What another implementation may be off by at each element; None: nothing, not a bit."""
        if self.known[name].exact:
            return None
        return tolerance_of(self.eager[name], [env[name] for env in self.doubles])


def _unit_of(value: Tensor) -> float:
    return UNIT[str(value.dtype).removeprefix("torch.")]


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def tolerance_of(value: Tensor, doubles: list[Tensor]) -> Tensor:
    """float64, of the value's shape; where the value is not finite, zero."""
    if not value.numel():
        return torch.zeros(value.shape, dtype=torch.float64)
    finite = value.isfinite()
    zero = torch.zeros((), dtype=torch.float64)
    plain = torch.where(finite, doubles[0], zero)
    moves = torch.stack([torch.where(finite, d, zero) - plain for d in doubles[1:]]).abs().amax(0)
    typical = moves.square().mean().sqrt() / 2
    name = str(value.dtype).removeprefix("torch.")
    own = 2 * UNIT[name] * plain.abs() + SMALLEST[name]
    return ALLOWANCE * torch.maximum(moves, typical) + own


def run_graph(
    graph: Graph, symbols: Mapping[str, int], seed: int, weights: Callable[[str], Tensor | None] = lambda _: None
) -> Trial:
    """All of a graph at one set of sizes; `weights(attribute)` gives the values of a parameter that was quantised."""
    trial = Trial(symbols, seed, special=graph.special)
    for leaf in graph.leaves:
        trial.leaf(leaf, None if leaf.is_input else weights(leaf.attribute))
    for statement in graph.statements:
        if statement.names:
            trial.step(statement)
    for buffer, value in written_states(graph).items():
        trial.write(buffer, value, graph.statements)
    return trial


def written_states(graph: Graph) -> dict[str, str]:
    """Buffer -> the value that the graph leaves in it."""
    return {s.operands[0]: s.operands[1] for s in graph.statements if not s.names}
