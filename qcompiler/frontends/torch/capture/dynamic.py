"""Dynamic dimensions: from the user's specification to `torch.export`'s, and example inputs for a good trace.

Accepted for one dimension of one tensor argument:

    ("s", 1, 512)                        a name with its inclusive range
    torch.export.Dim("s", min=1, max=512), 2 * Dim(…), Dim.DYNAMIC(min=1, max=512)
    None, an int, Dim.STATIC             static

torch.export specialises a dimension of size 1, and one whose size happens to equal another.  So every dynamic dimension
is traced with an odd size >= 3 that no parameter, no static dimension and no other symbol has.  Example tensors of
other sizes are tiled or cut.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from qcompiler.errors import ArgumentError, ArgumentShapeError, ArgumentStructureError, UnboundedDimError
from qcompiler.plan.dims import Range
from qcompiler.units import counted

Tree = Any
"""A pytree of a call's arguments, or of their dimension specs."""


@dataclass
class TraceInputs:
    """Arguments for torch.export: resized example inputs, its dynamic_shapes, and the requested ranges by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any] | None
    ranges: dict[str, Range] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """The traced size of each symbol; all different."""
    derived: frozenset[str] = frozenset()
    """Symbols that occur only inside derived sizes such as `2 * Dim`."""


@dataclass(frozen=True)
class _Requested:
    """One dynamic dimension: the symbol, and for a derived one how its size follows from the symbol's."""

    name: str
    low: int
    high: int
    derived: Any = None

    def size(self, root: int) -> int:
        return root if self.derived is None else int(self.derived.fn(root))

    def torch_dim(self, roots: Mapping[str, Dim]) -> Any:
        root = roots[self.name]
        return root if self.derived is None else root._derive(self.derived.fn)


_Spec = dict[int, _Requested | int | None]


def prepare(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    *,
    sizes: Mapping[str, int] | None = None,
) -> TraceInputs:
    """Resolves `dynamic_shapes` against a call `model(*args, **kwargs)`; `sizes` overrides the traced sizes.

    Errors: UnboundedDimError for a dimension without a maximum, ArgumentStructureError if the tree of specs does not
    fit the arguments, ArgumentShapeError if an example contradicts its spec.
    """
    if not dynamic_shapes:
        return TraceInputs(tuple(args), dict(kwargs), None)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentStructureError(
            f"the example arguments do not fit {type(model).__name__}.forward: {error}"
        ) from error
    arguments = bound.arguments
    specs = _match(arguments, dynamic_shapes)
    collector = _Collector()
    requested = {name: collector.walk(value, specs.get(name), name) for name, value in arguments.items()}
    ranges = collector.ranges()
    fixed = {size for p in (*model.parameters(), *model.buffers()) for size in p.shape} | collector.static_sizes
    sizes = _choose_sizes(ranges, collector.example_sizes, fixed) | dict(sizes or {})
    traced = {name: (low, high) for name, (low, high) in ranges.items() if low != high}
    roots = {name: Dim(name, min=low, max=high) for name, (low, high) in traced.items()}
    resized = {name: _resize(value, requested[name], sizes) for name, value in arguments.items()}
    shapes = {name: _torch_spec(value, requested[name], roots) for name, value in arguments.items()}
    new_args, new_kwargs = _call(bound, resized, len(args), kwargs)
    return TraceInputs(
        new_args,
        new_kwargs,
        shapes,
        traced,
        {n: sizes[n] for n in traced},
        frozenset(ranges) - frozenset(collector.example_sizes),
    )


@contextlib.contextmanager
def named_keywords(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, keywords that a call passes through `**kwargs` are visible as parameters of `model.forward`.

    torch.export 2.13 assigns dynamic_shapes wrongly for arguments inside `**kwargs`.
    """
    forward = model.forward
    old = inspect.signature(forward)
    parameters = [p for p in old.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    named = {p.name for p in parameters}
    extra = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in named]
    if not extra or len(parameters) == len(old.parameters) or "forward" in vars(model):
        yield
        return

    @functools.wraps(forward)
    def call(*values: Any, **keywords: Any) -> Any:
        return forward(*values, **keywords)

    call.__signature__ = old.replace(parameters=[*parameters, *extra])  # type: ignore[attr-defined]
    model.forward = call
    try:
        yield
    finally:
        del model.forward


def _call(
    bound: inspect.BoundArguments, values: Mapping[str, Any], positional: int, kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turns `values` by parameter name back into the positional and keyword arguments of the call."""
    flat: list[Any] = []
    keywords: dict[str, Any] = {}
    for name, value in values.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            flat += value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords |= value
        elif name in kwargs:
            keywords[name] = value
        else:
            flat.append(value)
    assert len(flat) == positional
    return tuple(flat), {name: keywords[name] for name in kwargs}


def _match(arguments: Mapping[str, Any], dynamic_shapes: Any) -> dict[str, Tree]:
    """Specs by parameter name. A name inside `**kwargs` may be given at the top level."""
    if isinstance(dynamic_shapes, list | tuple):
        if len(dynamic_shapes) > len(arguments):
            count, names = len(arguments), ", ".join(arguments)
            raise ArgumentStructureError(
                f"dynamic_shapes has {counted(len(dynamic_shapes), 'entry', 'entries')} for "
                f"{counted(count, 'argument')} ({names})"
            )
        return dict(zip(arguments, dynamic_shapes, strict=False))
    if not isinstance(dynamic_shapes, Mapping):
        raise ArgumentStructureError("dynamic_shapes must be a dict by argument name, or a tuple in argument order")
    specs: dict[str, Tree] = {}
    for name, spec in dynamic_shapes.items():
        if name in arguments:
            specs[name] = spec
            continue
        home = next((a for a, value in arguments.items() if isinstance(value, Mapping) and name in value), None)
        if home is None:
            known = ", ".join(arguments) or "none"
            raise ArgumentStructureError(f"dynamic_shapes names '{name}', which is no argument of the call ({known})")
        specs.setdefault(home, {})[name] = spec
    return specs


class _Collector:
    """Walks arguments and specs side by side and collects the request for each symbol."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[Range, str]] = {}
        self.example_sizes: dict[str, int] = {}
        self.static_sizes: set[int] = set()

    def ranges(self) -> dict[str, Range]:
        return {name: bounds for name, (bounds, _) in self._ranges.items()}

    def walk(self, value: Any, spec: Tree, path: str) -> Tree:
        """A tree like `value` whose tensors are replaced by `_Spec`s and everything else by None."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, spec, path)
        if isinstance(value, Mapping):
            unknown = set(spec or {}) - set(value)
            if spec is not None and (not isinstance(spec, Mapping) or unknown):
                raise ArgumentStructureError(
                    f"dynamic_shapes of '{path}' do not fit its keys {sorted(map(str, value))}"
                )
            return {key: self.walk(item, (spec or {}).get(key), f"{path}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            if spec is not None and (not isinstance(spec, list | tuple) or len(spec) != len(value)):
                raise ArgumentStructureError(
                    f"dynamic_shapes of '{path}' must have {counted(len(value), 'entry', 'entries')}"
                )
            return [
                self.walk(item, spec[i] if spec is not None else None, f"{path}[{i}]") for i, item in enumerate(value)
            ]
        if spec:
            raise ArgumentStructureError(
                f"dynamic_shapes gives dimensions for '{path}', which is a {type(value).__name__}"
            )
        return None

    def _tensor(self, value: torch.Tensor, spec: Tree, path: str) -> _Spec:
        if spec is None:
            entries: Iterable[tuple[int, Any]] = ()
        elif isinstance(spec, Mapping):
            entries = spec.items()
        elif isinstance(spec, list | tuple) and len(spec) == value.ndim:
            entries = enumerate(spec)
        else:
            raise ArgumentStructureError(
                f"dynamic_shapes of '{path}' must be {{dim: spec}} or one entry for each of its {value.ndim} dimensions"
            )
        result: _Spec = {}
        for axis, entry in entries:
            if not isinstance(axis, int) or not -value.ndim <= axis < value.ndim:
                raise ArgumentStructureError(
                    f"'{path}' has {value.ndim} dimensions; dynamic_shapes names dimension {axis!r}"
                )
            result[axis % value.ndim] = self._dim(entry, value.shape[axis], f"dimension {axis} of '{path}'", path, axis)
        self.static_sizes.update(n for i, n in enumerate(value.shape) if not isinstance(result.get(i), _Requested))
        return result

    def _dim(self, entry: Any, size: int, where: str, path: str, axis: int) -> _Requested | int | None:
        parsed = _parse_dim(entry, where, f"{_identifier(path)}_{axis}")
        if parsed is None:
            return None
        if isinstance(parsed, int):
            if parsed != size:
                raise ArgumentShapeError(f"{where} is declared {parsed}, but the example has {size}")
            return None
        bounds = (parsed.low, parsed.high)
        known = self._ranges.setdefault(parsed.name, (bounds, where))
        if known[0] != bounds:
            raise ArgumentError(
                f"the dimension '{parsed.name}' has the range {bounds} at {where} and {known[0]} at {known[1]}"
            )
        if parsed.derived is None and self.example_sizes.setdefault(parsed.name, size) != size:
            raise ArgumentShapeError(
                f"{where} has the size {size}, but '{parsed.name}' has {self.example_sizes[parsed.name]} elsewhere"
            )
        return parsed


def _parse_dim(entry: Any, where: str, default_name: str) -> _Requested | int | None:
    from torch.export.dynamic_shapes import _DerivedDim, _DimHint, _DimHintType

    match entry:
        case None | int():
            return entry
        case str():
            raise UnboundedDimError(f'{where} ("{entry}") has no maximum: write ("{entry}", 1, 512)')
        case (str(), _, _):
            if isinstance(entry[1], int) and entry[1] < 1:
                raise ArgumentError(
                    f"{where}: {entry!r} begins at {entry[1]}, and sizes begin at 1: a program takes no tensor without "
                    f"elements. Write {(entry[0], 1, entry[2])!r}, and leave out calls of that size"
                )
            return _bounded(entry[0], entry[1], entry[2], where)
        case _DimHint():
            if entry.type == _DimHintType.STATIC:
                return None
            return _bounded(default_name, entry.min, entry.max, where)
        case _DerivedDim():
            root = entry.root
            if isinstance(root, _DerivedDim):
                raise ArgumentError(f"{where}: {entry.__name__} is derived twice; write it as one expression of a Dim")
            bounds = _bounded(root.__name__, root.min, root.max, where)
            return _Requested(bounds.name, bounds.low, bounds.high, entry)
        case Dim():
            return _bounded(entry.__name__, entry.min, entry.max, where)
        case _:
            raise ArgumentError(
                f'{where}: {entry!r} is no dimension; write ("name", min, max), a torch.export.Dim, an int or None'
            )


def _bounded(name: str, low: Any, high: Any, where: str) -> _Requested:
    """A dimension with a range. Sizes start at 1: torch's default minimum of 0 means "not stated" here."""
    if not name.isidentifier():
        raise ArgumentError(f"{where}: {name!r} is not a name (letters, digits and '_')")
    if high is None or not isinstance(high, int):
        raise UnboundedDimError(
            f"{where} ('{name}') has no maximum. Memory is planned for the largest size: write (\"{name}\", 1, 512) or "
            f'torch.export.Dim("{name}", min=1, max=512)'
        )
    low = max(int(low or 0), 1)
    if low > high:
        raise ArgumentError(f"{where} ('{name}'): the minimum {low} is above the maximum {high}")
    return _Requested(name, low, high)


def _identifier(path: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in path).strip("_")


def _choose_sizes(ranges: Mapping[str, Range], examples: Mapping[str, int], fixed: set[int]) -> dict[str, int]:
    """One size per symbol: odd, >= 3, different from every other size; the example's own if that qualifies."""
    sizes: dict[str, int] = {}
    for name, (low, high) in ranges.items():
        taken = fixed | set(sizes.values())
        start = max(low, 3) | 1
        ideal = (n for n in (examples.get(name, 0), *range(start, high + 1, 2)) if n % 2 and n not in taken)
        good = next((n for n in ideal if max(low, 3) <= n <= high), None)
        if good is None:  # a narrow range: take a free size in it, from the top (2 rather than 1)
            good = next((n for n in range(high, low - 1, -1) if n not in sizes.values()), high)
        sizes[name] = good
    return sizes


def _resize(value: Any, spec: Tree, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, torch.Tensor):
        for axis, entry in spec.items():
            if isinstance(entry, _Requested):
                value = tile_to(value, axis, entry.size(sizes[entry.name]))
        return value
    if isinstance(value, Mapping):
        return type(value)({key: _resize(item, spec[key], sizes) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items = [_resize(item, sub, sizes) for item, sub in zip(value, spec, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tile_to(value: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """`value` repeated (or cut) along `axis` to `size`; values stay valid ids and masks."""
    old = value.shape[axis]
    if old == size:
        return value
    if old == 0:
        raise ArgumentShapeError(f"an example input has the size 0 along dimension {axis}")
    with torch.no_grad():
        return value.index_select(axis, torch.arange(size, device=value.device) % old)


def _torch_spec(value: Any, spec: Tree, roots: Mapping[str, Dim]) -> Any:
    if isinstance(value, torch.Tensor):
        dims = {a: e.torch_dim(roots) for a, e in spec.items() if isinstance(e, _Requested) and e.name in roots}
        return dims or None
    if isinstance(value, Mapping):
        return {key: _torch_spec(item, spec[key], roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_torch_spec(item, sub, roots) for item, sub in zip(value, spec, strict=True))
    return None
