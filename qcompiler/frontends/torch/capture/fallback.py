"""`fallback="torch"`: nodes of the graph without a lowering become regions that torch runs (plan/torch_regions.py).

    %a = aten.unfold(%x, …)        lowered
    %b = aten._fft_r2c(%a, …)      no lowering            %c = qc.torch_call "aten._fft_r2c, aten.abs" %a
    %c = aten.abs(%b)              reads complex values

A region grows as long as nothing outside it needs one of its values; then it is emitted, before the node that does.
Between regions a complex value is a real tensor with the two parts along a last axis; nothing else in a program sees
it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from xdsl.ir import Block, Operation, SSAValue

from qcompiler.errors import DimError, PlanError, UnsupportedOperatorError
from qcompiler.frontends.torch.aten.scope import BUILDERS, Scope
from qcompiler.frontends.torch.capture.torch_runner import TorchRunner
from qcompiler.frontends.torch.common.origins import describe
from qcompiler.frontends.torch.common.values import DTYPES, dtype_name
from qcompiler.ir import qc, types
from qcompiler.ir.types import tensor_dtype
from qcompiler.kernels.select import FLOATS
from qcompiler.passes.lowering.kinds import FLOAT_ONLY
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.torch_regions import COND, TORCH_DTYPES, TorchOp, TorchRegion, operators

_ATEN = torch.ops.aten
_COND = torch.ops.higher_order.cond

KEPT_WHOLE = frozenset({
    _ATEN.stft.default, _ATEN.istft.default, _ATEN.unfold_backward.default, _ATEN.linalg_cholesky.default,
    _ATEN.linalg_det.default, _ATEN.linalg_inv.default, _ATEN.linalg_lstsq.default, _ATEN.linalg_lu_factor.default,
    _ATEN.linalg_matrix_exp.default, _ATEN.linalg_pinv.default, _ATEN.linalg_pinv.atol_rtol_float,
    _ATEN.linalg_slogdet.default, _ATEN.linalg_solve.default, _ATEN.linalg_svd.default, _ATEN.linalg_svdvals.default,
    _ATEN.linalg_eig.default, _ATEN.linalg_eigh.default, _ATEN.linalg_eigvals.default, _ATEN.linalg_eigvalsh.default,
    _ATEN.cholesky.default, _ATEN.inverse.default, _ATEN.det.default, _ATEN.logdet.default, _ATEN.slogdet.default,
    _ATEN.matrix_exp.default, _ATEN.svd.default, _ATEN.qr.default,
})  # fmt: skip
"""Operators that torch runs as a whole. Decomposed, they become many small operators, or operators that may raise for
some values, which a program cannot hold."""

_ROW_MAJOR = {
    "aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default",
}  # fmt: skip
"""Eager torch may lay out a tensor differently from the trace, and then refuses to view it."""

_UNSAID = ("device", "layout", "pin_memory", "memory_format")
"""Arguments about a tensor's device and layout; the step decides these."""

_PAIR = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class TorchPart:
    """One region of the program: its module path, its operators, and the reason."""

    path: str
    operators: tuple[str, ...]
    why: str


@dataclass
class _Open:
    """A region that may still grow."""

    nodes: list[fx.Node]
    why: str


@dataclass
class Fallback:
    """Collects the nodes that torch runs and emits them as regions. `scope` is the function under construction."""

    scope: Scope
    graph_module: fx.GraphModule
    parts: list[TorchPart] = field(default_factory=list)
    pairs: dict[fx.Node, SSAValue] = field(default_factory=dict)
    """Complex values that exist as real tensors with the two parts along a last axis."""
    _positions: dict[fx.Node, int] = field(default_factory=dict)
    _open: list[_Open] = field(default_factory=list)
    _home: dict[fx.Node, _Open] = field(default_factory=dict)

    def takes(self, node: fx.Node) -> str | None:
        """Why torch must run a node; None if a lowering may be tried."""
        if node.target is operator.getitem:
            return "" if node.args[0] in self._home else None
        if node.target is _COND:
            return "a condition on values"
        if any(_is_foreign(value) for each in (node, *node.all_input_nodes) for value in _tensors(each)):
            return "complex values"
        known = node.target in BUILDERS or not isinstance(node.target, torch._ops.OpOverload)
        return None if known or node.target.namespace == "qc" else "no lowering"  # type: ignore[union-attr]

    def take(self, node: fx.Node, why: str) -> None:
        """Puts a node into the region of its inputs, or into one of its own."""
        _require_harmless(node)
        mine = list({id(home): home for each in node.all_input_nodes if (home := self._home.get(each))}.values())
        if mine:
            first, *others = mine
            for other in others:  # neither reads the other: join them to one region
                first.nodes += other.nodes
                self._open.remove(other)
                self._home.update(dict.fromkeys(other.nodes, first))
            first.nodes.append(node)
        else:
            first = _Open([node], why)
            self._open.append(first)
        self._home[node] = first

    def require_kernels(self, before: Operation | None, block: Block) -> None:
        """UnsupportedOperatorError if the ops of a node's lowering, after `before`, have no kernels for their type."""
        made = block.first_op if before is None else before.next_op
        while made is not None:
            if isinstance(made, FLOAT_ONLY) and tensor_dtype(made.results[0].type) not in FLOATS:
                raise UnsupportedOperatorError(f"no kernel for {tensor_dtype(made.results[0].type)}")
            made = made.next_op

    def settle(self, needed: Iterable[fx.Node]) -> None:
        """Emits the regions of these nodes."""
        for node in needed:
            if node in self._home:
                self._emit(self._home[node])

    def settle_all(self) -> None:
        for each in list(self._open):
            self._emit(each)

    def _emit(self, part: _Open) -> None:
        self._open.remove(part)
        for node in part.nodes:
            del self._home[node]
        nodes = sorted(part.nodes, key=self._position)
        built = _Builder(self.scope, self.graph_module, self.pairs).build(nodes)
        if built is None:
            return
        region, inputs, sizes, results = built
        try:
            TorchRunner().prepare(region)
        except PlanError as error:
            raise UnsupportedOperatorError(f"{error}{describe(nodes[0])}") from error
        scope = self.scope.at(nodes[0])
        kinds = [_plain_type(self.scope, node, value) for node, value in results]
        op = qc.TorchCallOp(region, inputs, kinds, sizes)
        scope.builder.insert(op)
        for (node, value), made in zip(results, op.outputs, strict=True):
            if _is_foreign(value):
                self.pairs[node] = made
            else:
                self.scope.values[node] = made
        inner = [name for op in region.ops for branch in op.branches for name in operators(branch)]
        names = dict.fromkeys(str(node.target) for node in nodes if node.target is not operator.getitem)
        self.parts.append(TorchPart(scope.path, tuple(dict.fromkeys([*names, *inner])), part.why))

    def _position(self, node: fx.Node) -> int:
        if not self._positions:
            self._positions = {each: number for number, each in enumerate(self.graph_module.graph.nodes)}
        return self._positions[node]


_Built = tuple[TorchRegion, list[SSAValue], list[Dim], list[tuple[fx.Node, Any]]]


class _Builder:
    """Builds one region. Values are numbered: inputs, then results in order."""

    def __init__(self, scope: Scope, graph_module: fx.GraphModule, pairs: Mapping[fx.Node, SSAValue]) -> None:
        self.scope, self.graph_module, self.pairs = scope, graph_module, pairs
        self.sizes: list[Dim] = []

    def build(self, nodes: Sequence[fx.Node]) -> _Built | None:
        """The region with its operands, its sizes, and the nodes of its results; None without results."""
        inside = set(nodes)
        needed = dict.fromkeys(
            each for node in nodes for each in node.all_input_nodes if each not in inside and _tensors(each)
        )
        inputs = [self.pairs[node] if node in self.pairs else self.scope.value(node) for node in needed]
        ops = _Ops(self, self.graph_module, len(inputs))
        for number, node in enumerate(needed):
            ops.numbers[node] = [number]
        for node in needed:
            if node in self.pairs:
                ops.numbers[node] = ops.add("aten.view_as_complex.default", [{"v": ops.numbers[node][0]}])
        for node in nodes:
            ops.call(node)
        results: list[tuple[fx.Node, Any]] = []
        outputs: list[int] = []
        for node in nodes:
            for user, number, value in _results_of(node, ops.numbers[node], inside):
                if _is_foreign(value):
                    plain = ops.add("aten.resolve_conj.default", [{"v": number}])
                    outputs += ops.add("aten.view_as_real.default", [{"v": plain[0]}])
                else:
                    outputs.append(number)
                results.append((user, value))
        if not outputs:
            return None
        region = TorchRegion(inputs=len(inputs), ops=tuple(ops.ops), outputs=tuple(outputs))
        return region, inputs, self.sizes, results

    def size(self, value: Any, node: fx.Node) -> dict[str, int]:
        """The reference to a size. UnsupportedOperatorError for a size that a program cannot express."""
        try:
            size = dim(self.scope.symbols.dim(value)).to_dim()
        except DimError as error:
            raise UnsupportedOperatorError(f"{node.target}: {error}{describe(node)}") from error
        if size not in self.sizes:
            self.sizes.append(size)
        return {"size": self.sizes.index(size)}


class _Ops:
    """The operators of a region or of a branch under construction. `numbers` holds the values of each node."""

    def __init__(self, builder: _Builder, module: fx.GraphModule, inputs: int) -> None:
        self.builder, self.module = builder, module
        self.ops: list[TorchOp] = []
        self.numbers: dict[fx.Node, list[int]] = {}
        self._count = inputs

    def add(
        self,
        target: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        results: int = 1,
        branches: Sequence[TorchRegion] = (),
    ) -> list[int]:
        """Appends an operator; returns the numbers of its results."""
        self.ops.append(
            TorchOp(
                target=target, args=tuple(args), kwargs=dict(kwargs or {}), results=results, branches=tuple(branches)
            )
        )
        self._count += results
        return list(range(self._count - results, self._count))

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            self.numbers[node] = [self.numbers[source][index]]
            return
        value = node.meta["val"]
        results = len(value) if isinstance(value, tuple | list) else 1
        if node.target is _COND:
            self.numbers[node] = self._cond(node, results)
            return
        target = str(node.target)
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        args = [
            None if argument.name in _UNSAID else self.encode(given, node)
            for argument, given in zip(schema, node.args, strict=False)
        ]
        kwargs = {name: self.encode(given, node) for name, given in node.kwargs.items() if name not in _UNSAID}
        if node.kwargs.get("layout") not in (None, torch.strided):
            raise UnsupportedOperatorError(f"{node.target} makes a {node.kwargs['layout']} tensor{describe(node)}")
        if target == "aten.view_as_complex.default":  # torch needs the two parts to be contiguous
            args = [{"v": self.add("aten.contiguous.default", args)[0]}]
        self.numbers[node] = self.add(_ROW_MAJOR.get(target, target), args, kwargs, results)

    def _cond(self, node: fx.Node, results: int) -> list[int]:
        predicate, yes, no, given = node.args
        if not isinstance(predicate, fx.Node) or not _tensors(predicate):
            raise UnsupportedOperatorError(
                f"torch.cond on a size{describe(node)}: write `if` in Python, or compile once for each range of sizes"
            )
        assert isinstance(yes, fx.Node) and isinstance(no, fx.Node) and isinstance(given, list | tuple)
        branches = [self._branch(getattr(self.module, str(each.target)), len(given), node) for each in (yes, no)]
        return self.add(COND, [self.encode(each, node) for each in (predicate, *given)], None, results, branches)

    def _branch(self, module: fx.GraphModule, inputs: int, node: fx.Node) -> TorchRegion:
        inner = _Ops(self.builder, module, inputs)
        outputs: list[int] = []
        for number, each in enumerate(module.graph.find_nodes(op="placeholder")):
            inner.numbers[each] = [number]
        for each in module.graph.nodes:
            if each.op == "output":
                returned = each.args[0] if isinstance(each.args[0], list | tuple) else (each.args[0],)
                if not all(isinstance(value, fx.Node) and value in inner.numbers for value in returned):
                    raise UnsupportedOperatorError(
                        f"a branch of torch.cond returns something that is no tensor{describe(node)}"
                    )
                outputs = [inner.numbers[value][0] for value in returned]
            elif each.op == "call_function" and each.users and not _is_number(each.meta.get("val")):
                _require_harmless(each)
                inner.call(each)
        return TorchRegion(inputs=inputs, ops=tuple(inner.ops), outputs=tuple(outputs))

    def encode(self, argument: Any, node: fx.Node) -> Any:
        """An argument in a region's encoding. UnsupportedOperatorError for a kind that regions do not have."""
        match argument:
            case fx.Node():
                if isinstance(argument.meta.get("val"), torch.SymInt):
                    return self.builder.size(argument.meta["val"], node)
                if argument in self.numbers and len(self.numbers[argument]) == 1:
                    return {"v": self.numbers[argument][0]}
            case torch.dtype() if (name := str(argument).removeprefix("torch.")) in TORCH_DTYPES:
                return {"dtype": name}
            case float() if not math.isfinite(argument):
                return {"float": str(argument)}
            case complex():
                return {"complex": [argument.real, argument.imag]}
            case None | bool() | int() | float() | str():
                return argument
            case list() | tuple():
                return [self.encode(item, node) for item in argument]
        raise UnsupportedOperatorError(
            f'{node.target} takes {argument}, which fallback="torch" cannot pass on: it passes tensors, sizes, numbers '
            f"and dtypes{describe(node)}"
        )


def _results_of(node: fx.Node, numbers: Sequence[int], inside: set[fx.Node]) -> list[tuple[fx.Node, int, Any]]:
    """The values of a node that are read outside its region: (the node there, the number, the value)."""
    value = node.meta["val"]
    outside = [user for user in node.users if user not in inside]
    if not isinstance(value, tuple | list):
        return [(node, numbers[0], value)] if outside else []
    return [(user, numbers[user.args[1]], user.meta["val"]) for user in outside]  # type: ignore[index]


def _require_harmless(node: fx.Node) -> None:
    """UnsupportedOperatorError for an operator that does more than compute."""
    if not isinstance(node.target, torch._ops.OpOverload):
        if node.target in (operator.getitem, _COND):
            return
        raise UnsupportedOperatorError(
            f'{node.target} is no operator that fallback="torch" can run: it runs ATen operators, custom operators and '
            f"torch.cond{describe(node)}"
        )
    if node.target._schema.is_mutable:
        raise UnsupportedOperatorError(
            f'{node.target} writes an argument, and what fallback="torch" runs must be functional{describe(node)}'
        )
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        raise UnsupportedOperatorError(
            f"{node.target} draws random numbers, and a program computes one answer for one input{describe(node)}. "
            "Draw them outside and pass them in"
        )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    value = node.meta.get("val")
    return [each for each in (value if isinstance(value, tuple | list) else [value]) if isinstance(each, torch.Tensor)]


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool)


def _is_foreign(value: Any) -> bool:
    """Whether a tensor has a type that programs do not have."""
    return isinstance(value, torch.Tensor) and value.dtype not in DTYPES


def _plain_type(scope: Scope, node: fx.Node, value: torch.Tensor) -> Any:
    """The type of a result outside its region; for a complex one, the type of its two parts."""
    shape = scope.symbols.shape(value.shape)
    if not _is_foreign(value):
        return types.tensor(shape, dtype_name(value.dtype))
    if value.dtype not in _PAIR:
        raise UnsupportedOperatorError(
            f"{node.target} gives {value.dtype}, which programs cannot hold, and an operator that is compiled reads "
            f"it or the model returns it{describe(node)}"
        )
    return types.tensor((*shape, 2), dtype_name(_PAIR[value.dtype]))


__all__ = ["KEPT_WHOLE", "Fallback", "TorchPart"]
