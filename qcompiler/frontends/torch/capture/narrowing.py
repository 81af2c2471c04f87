"""Checks that the exported graph equals the model over the whole requested range; if not, finds the line that narrows.

torch.export traces one example.  It assumes sizes of at least 2, so `if x.shape[1] > 1:` becomes its true branch
without a guard, even if the range includes 1.  Two checks close this gap: `check_ranges` compares torch's ranges with
the requested ones, and `probe` runs model and graph at each symbol's minimum and compares the numbers.  `blame` traces
once more while it records torch's guard evaluation, and returns the lines whose conditions change inside the range.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from qcompiler.errors import NarrowedDimError
from qcompiler.frontends.torch.capture import attributes, eager_graph
from qcompiler.frontends.torch.common import empty_weights
from qcompiler.frontends.torch.common.origins import line_of_frame
from qcompiler.frontends.torch.common.symbols import Symbols
from qcompiler.plan.dims import Range, dim
from qcompiler.runtime.progress import Counted


def check_ranges(
    program: ExportedProgram,
    names: Mapping[str, str],
    ranges: Mapping[str, Range],
    derived: Set[str],
    why: Why,
) -> None:
    """NarrowedDimError if torch's own range of a symbol does not include the requested one.

    torch gives a minimum of 2 to a symbol that occurs only in derived sizes (`2 * Dim`); for those, `probe` decides.
    """
    for symbol, bounds in program.range_constraints.items():
        name = names.get(str(symbol))
        if name is None or name not in ranges:
            continue
        low, high = ranges[name]
        floor = max(low, 2) if name in derived else low
        if int(bounds.lower) > floor or int(bounds.upper) < high:
            found = f"[{bounds.lower}, {bounds.upper}]"
            raise NarrowedDimError(f"the model accepts '{name}' in {found} only, not in [{low}, {high}]" + why([name]))


Why = Callable[[Sequence[str]], str]
"""Turns the names of symbols into text that names the lines that narrowed them."""


# --- numbers at the minimum ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """A note about the export for the program's report, with its reason."""

    what: str
    why: str


@dataclass(frozen=True)
class Probe:
    """One call at sizes other than the traced ones: the symbols that differ, all sizes by symbol, and the arguments."""

    sizes: dict[str, int]
    bindings: dict[str, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def probe(
    model: nn.Module,
    program: ExportedProgram,
    symbols: Symbols,
    probes: Sequence[Probe],
    why: Why,
) -> tuple[Note, ...]:
    """Runs the model and its graph on each probe. NarrowedDimError if they differ in value, or in shape from the
    graph's symbolic shapes.  Returns notes on what could not be checked.

    Changes of the model by a run are undone. A model without values is run for its shapes only.
    """
    mutated = len(program.graph_signature.buffers_to_mutate)
    results = [leaf for leaf in program.graph.output_node().args[0][mutated:] if leaf is not None]
    if empty_weights.has_empty_parameters(model):
        return tuple(_probe_shapes(model, results, symbols, each, why) for each in probes)
    graph = eager_graph.runnable(program)
    with Counted("comparing the graph with the model", 2 * len(probes), "runs") as progress:
        for each in probes:
            with torch.no_grad(), attributes.unchanged(model):
                expected = _leaves(model(*copy.deepcopy(each.args), **copy.deepcopy(each.kwargs)))
            progress.step(1)
            found = _run_graph(graph, each, why)
            progress.step(1)
            stated = [_stated_shape(leaf, symbols, each.bindings) for leaf in results]
            fits = all(s is None or s == tuple(e.shape) for s, e in zip(stated, expected, strict=False))
            if not fits or len(expected) != len(found) or not all(map(_close, expected, found)):
                raise NarrowedDimError(
                    f"at {_text(each.sizes)} the model takes another path than the one that was traced: its results "
                    "differ from the graph's" + why(list(each.sizes))
                )
    return ()


def _run_graph(graph: nn.Module, each: Probe, why: Why) -> list[Any]:
    """The leaves of the graph's results on a probe. NarrowedDimError if it does not run there."""
    try:
        with torch.no_grad(), attributes.unchanged(graph):
            return _leaves(graph(*copy.deepcopy(each.args), **copy.deepcopy(each.kwargs)))
    except (RuntimeError, AssertionError, IndexError) as error:
        raise NarrowedDimError(
            f"the traced graph does not run at {_text(each.sizes)}: {error}" + why(list(each.sizes))
        ) from error


def _probe_shapes(model: nn.Module, results: Sequence[Any], symbols: Symbols, each: Probe, why: Why) -> Note:
    """The same for a model without values. Only shapes are compared, so another path with equal shapes goes unseen."""
    what = f"at {_text(each.sizes)} the model's values were not compared with those of its graph"
    found = empty_weights.result_shapes(model, each.args, each.kwargs)
    if isinstance(found, str):
        return Note(what, f"its parameters hold no values, nor were shapes compared: {found}")
    stated = [_stated_shape(leaf, symbols, each.bindings) for leaf in results]
    shapes = [tuple(f.shape) if isinstance(f, torch.Tensor) else None for f in found]
    if len(stated) != len(shapes) or any(s not in (None, f) for s, f in zip(stated, shapes, strict=True)):
        raise NarrowedDimError(
            f"at {_text(each.sizes)} the model takes another path than the one that was traced: its results have other "
            "shapes than the graph's" + why(list(each.sizes))
        )
    return Note(what, "its parameters hold no values; the shapes of the results agree")


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def _stated_shape(leaf: Any, symbols: Symbols, bindings: Mapping[str, int]) -> tuple[int, ...] | None:
    value = leaf.meta.get("val") if isinstance(leaf, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(dim(size).evaluate(bindings) for size in symbols.shape(value.shape))


def _leaves(tree: Any) -> list[Any]:
    """Copies of the results: a result that is a buffer would change when buffers are restored."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _close(a: Any, b: Any) -> bool:
    return same_values(a, b, relative=0.05, absolute=0.02)


def same_values(a: Any, b: Any, relative: float, absolute: float) -> bool:
    """Whether two results are equal: integers exactly, floats within `relative` of each value or `absolute` of the
    largest finite one of `a`. Infinities and NaN must be in the same places."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    a, b = a.double(), b.double()
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=relative, atol=absolute * largest, equal_nan=True)


# --- the narrowing line ----------------------------------------------------------------------------------------------

MOST_SIZES = 2048
"""Sizes of a range that are tried to find those which take one path: about a second for a few conditions."""


@dataclass(frozen=True)
class _Condition:
    expression: Any
    hints: dict[Any, int]
    value: Any
    line: str
    """The user's line with the module, or the module alone where all the code is torch's."""
    direct: bool

    def at(self, symbol: Any, size: int) -> str:
        """Its value where the symbol has this size and all others are as traced; "" if it is not known."""
        moved = self.expression.xreplace({**self.hints, symbol: size})
        return "" if getattr(moved, "free_symbols", None) else str(moved)


def blame(
    trace: Callable[[], object], modules: Mapping[int, str], sizes: Mapping[str, int], ranges: Mapping[str, Range]
) -> Why:
    """A function from symbol names to ". Narrowed by file.py:3 in forward: …", with the module and the way out. Runs
    `trace` again, once, when called.

    Symbols are recognised by their traced sizes, which are all different. `modules` are the module paths by `id`.
    """

    def why(names: Sequence[str]) -> str:
        conditions: list[_Condition] = []
        with _observed(conditions, modules), contextlib.suppress(Exception):
            trace()
        guilty = [c for c in conditions if c.line and _narrows(c, names, sizes, ranges)]
        direct = [c for c in guilty if c.direct]
        unique = list(dict.fromkeys(c.line for c in direct or guilty))[:3]
        return ". Narrowed by " + "; ".join(unique) + _way_out(guilty, names, sizes, ranges) if unique else ""

    return why


@contextlib.contextmanager
def _observed(conditions: list[_Condition], modules: Mapping[int, str]) -> Iterator[None]:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    original = ShapeEnv.evaluate_expr

    def evaluate(self: Any, expression: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(self, expression, *args, **kwargs)
        if getattr(expression, "free_symbols", None):
            line, direct = line_of_frame(sys._getframe(1))
            module = _module_of_frame(sys._getframe(1), modules)
            line = f"{line} ({module})" if line and module else line or module
            known = self.backed_var_to_val
            hints = {s: int(known[s]) for s in expression.free_symbols if s in known}
            conditions.append(_Condition(expression, hints, value, line, direct))
        return value

    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = original  # type: ignore[method-assign]


def _module_of_frame(frame: FrameType | None, modules: Mapping[int, str]) -> str:
    """`module 'encoder.0', a Conv2d`: the innermost module of the model whose call is under way; "" for the model
    itself."""
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            called = frame.f_locals.get("self")
            if path := modules.get(id(called), ""):
                return f"module '{path}', a {type(called).__name__}"
        frame = frame.f_back
    return ""


def _symbol_of(condition: _Condition, name: str, sizes: Mapping[str, int]) -> Any:
    """The condition's symbol of that name; None if it has none."""
    return next((symbol for symbol, hint in condition.hints.items() if sizes.get(name) == hint), None)


def _narrows(
    condition: _Condition, names: Sequence[str], sizes: Mapping[str, int], ranges: Mapping[str, Range]
) -> bool:
    """Whether the condition's value changes when a symbol of `names` moves through its range."""
    for name in names:
        symbol = _symbol_of(condition, name, sizes)
        if symbol is None:
            continue
        (low, high), hint = ranges[name], sizes[name]
        near = {int(n) + d for n in condition.expression.atoms() if n.is_Integer for d in (-1, 0, 1)}
        near |= set(range(hint - 8, hint + 9))  # a condition on a remainder changes from one size to the next
        for value in {low, low + 1, (low + high) // 2, high} | near:
            if low <= value <= high and condition.at(symbol, value) not in ("", str(condition.value)):
                return True
    return False


def _way_out(
    guilty: Sequence[_Condition], names: Sequence[str], sizes: Mapping[str, int], ranges: Mapping[str, Range]
) -> str:
    """The longest range of each size in which all conditions have one value; where there is none, to change the
    line."""
    found = []
    for name in names:
        (low, high), last = ranges[name], 0
        tried = [*range(low, min(high, low + MOST_SIZES) + 1), *([high] if high > low + MOST_SIZES else [])]
        concerned = {str(c.expression): (c, s) for c in guilty if (s := _symbol_of(c, name, sizes)) is not None}
        if not concerned:
            continue
        values = [tuple(c.at(symbol, size) for c, symbol in concerned.values()) for size in tried]
        runs = []
        for i in range(1, len(tried) + 1):
            if i == len(tried) or values[i] != values[last]:
                runs.append((tried[last], tried[i - 1]))
                last = i
        best = max(runs, key=lambda run: run[1] - run[0])
        if best[0] == best[1]:
            return ". Change that line"
        found.append(f'("{name}", {best[0]}, {best[1]})')
    return f". Give a range of sizes that take one path, such as {', '.join(found)}, or change that line"
