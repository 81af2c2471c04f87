"""Stage `import`: the graph of JAX as one `func.func @main` of qc, linalg and tensor ops, with weights in a store.

    %w = qc.const @params.Dense_0.kernel : !qc.qtensor<32x64xf32, #qc.format<"nf4", …>, …>
    %d = qc.dequantize %w
    %y = qc.linear %x, %d {qc.path = "params.Dense_0"}

The result is what the torch frontend makes of the same model; nothing behind it knows the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Region, SSAValue

from qcompiler.config import QuantConfig
from qcompiler.errors import ArgumentError, DimError, FrontendError, QCompilerError, UnsupportedOperatorError
from qcompiler.frontends.common.imported import Compared, GraphValues, Stages
from qcompiler.frontends.jax.exported import Exported
from qcompiler.frontends.jax.float_run import Calibration, FloatRun
from qcompiler.frontends.jax.graph import Node, Value
from qcompiler.frontends.jax.indexing import row_index
from qcompiler.frontends.jax.products import conv_of, product_of
from qcompiler.frontends.jax.quantise import Quantized, quantise
from qcompiler.frontends.jax.scope import Scope
from qcompiler.frontends.jax.table import BUILDERS
from qcompiler.frontends.jax.weight_views import Matrix, Use
from qcompiler.frontends.weights.weight_files import WeightFiles
from qcompiler.ir import qc, types
from qcompiler.ir.module import set_arg_names, set_path, set_ranges
from qcompiler.ledger import Ledger
from qcompiler.plan.dims import Range
from qcompiler.plan.kernel import DType
from qcompiler.plan.plan import Signature, initial_weight
from qcompiler.plan.weights import Bytes, WeightStore


@dataclass
class JaxImport:
    """The imported module and everything else that a program needs (frontends/common/imported.py)."""

    module: ModuleOp
    weights: WeightStore
    signature: Signature
    symbols: dict[str, Range]
    quantized: Quantized
    states: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    torch_parts: tuple[Any, ...] = ()
    torch_calls: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        return self.quantized.ledger

    @property
    def notes(self) -> list[tuple[str, str]]:
        return self.quantized.exported.graph.notes

    @property
    def decisions(self) -> tuple[tuple[str, str, str], ...]:
        return self.quantized.decisions

    def compared(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flatten: Callable[[Any], Sequence[Any]]
    ) -> Compared:
        """The results of the function with decoded weights, and of `model`, a function of the same arguments."""

        if model is not None and not callable(model):
            raise ArgumentError(f"model={type(model).__name__}: give the float model, a function of these arguments")

        def run(function: Callable[..., Any]) -> GraphValues:
            return GraphValues((), tuple(np.asarray(leaf) for leaf in flatten(function(*args, **kwargs))))

        return Compared(run(self.oracle()), None if model is None else run(model))

    def room(self, nbytes: int) -> Bytes:
        """Memory for the program's image."""
        return self.quantized.files.room(nbytes)

    def oracle(self) -> Any:
        """The function with decoded weights: jittable."""
        return self.quantized.module

    def sample_inputs(self) -> list[npt.NDArray[Any]]:
        """The example inputs as flat arrays, for `verify_each="numerics"`."""
        return [np.asarray(sample) for sample in self.quantized.exported.samples]


def import_in_stages(
    export: Callable[[], Exported],
    quant: QuantConfig | str | None,
    *,
    valued: bool,
    files: WeightFiles | None,
    calibration: Calibration | None = None,
) -> JaxImport:
    """Runs the three stages; `result.texts` holds the dumps "00-export" and "01-insert-qdq".

    `calibration` has the inputs that the float graph runs over before weights are encoded.

    See `quantise` and `import_graph` for errors.
    """
    stages = Stages()
    with stages("export"):
        exported = export()
        stages.texts["00-export"] = exported.graph.text()
    with stages("insert-qdq"):
        floats = None if calibration is None else _float_run(exported, calibration)
        quantized = quantise(exported, quant, valued=valued, files=files, floats=floats)
        stages.texts["01-insert-qdq"] = quantized.text()
    with stages("import"):
        result = import_graph(quantized)
    result.texts, result.seconds = stages.texts, stages.seconds
    return result


def _float_run(exported: Exported, calibration: Calibration) -> FloatRun:
    """The graph with float weights, which have no values in its store."""
    plain = import_graph(quantise(exported, None, valued=False))
    return FloatRun(plain.module, plain.weights, exported.inputs, exported.states, calibration)


def import_graph(quantized: Quantized) -> JaxImport:
    """Imports a graph whose weights are encoded. UnsupportedOperatorError names the operator and the user's line."""
    return _Importer(quantized).run()


class _Importer:
    def __init__(self, quantized: Quantized) -> None:
        self.quantized, self.graph = quantized, quantized.exported.graph
        self.weights = quantized.weights.copy()
        self.block = Block()
        self.scope = Scope(self.block, self.graph.ranges, self.weights)
        self.decoded: dict[tuple[int, DType], SSAValue] = {}
        self.lines: dict[str, dict[str, list[str]]] = {}
        """By module path: the lines of the function, each with the operators that it became."""

    def run(self) -> JaxImport:
        kept = [argument for argument in self.graph.arguments if argument not in self.graph.states]
        for argument in self.graph.states:
            self._state(argument)
        for argument in kept:
            if argument.unsigned and argument.dtype != "ui8":
                raise UnsupportedOperatorError(
                    f"the argument '{argument.name}' is {argument.type.replace('ui', 'uint')}, which programs do not "
                    "take: pass it as int32, and convert it in the function (.view or .astype)"
                )
            type_ = types.tensor(argument.shape, argument.dtype)
            self.scope.values[argument] = self.block.insert_arg(type_, len(self.block.args))
        uses = self.quantized.uses.uses
        live = self.graph.live(lambda node: _needs(node, uses.get(node)))
        self._leaves(live)
        for node in live:
            if any(result.known is None for result in node.results):
                self._node(node, uses.get(node))
        for argument, number in self.graph.states.items():
            update = qc.StateUpdateOp(argument.name, self.scope.value(self.graph.returned[number]))
            set_path(update, argument.name)
            self.block.add_op(update)
        gone = set(self.graph.states.values())
        returned = [self._returned(value) for i, value in enumerate(self.graph.returned) if i not in gone]
        self.block.add_op(func.ReturnOp(*returned))
        kinds = ([a.type for a in self.block.args], [v.type for v in returned])
        main = func.FuncOp("main", kinds, Region(self.block))
        set_ranges(main, self.graph.ranges)
        set_arg_names(main, [argument.name for argument in kept])
        exported = self.quantized.exported
        return JaxImport(
            ModuleOp([main]), self.weights, Signature(inputs=exported.inputs, outputs=exported.outputs),
            dict(self.graph.ranges), self.quantized, exported.states, lines={
                path: tuple((line, tuple(ops)) for line, ops in found.items()) for path, found in self.lines.items()
            },
        )  # fmt: skip

    def _state(self, argument: Value) -> None:
        """A state begins as the example argument."""
        values = self.quantized.exported.states[argument.name]
        if np.ascontiguousarray(values).reshape(-1).view(np.uint8).any():
            self.weights.add_array(initial_weight(f"state.{argument.name}"), np.array(values))
        op = qc.StateOp(argument.name, types.tensor(argument.shape, argument.dtype))
        set_path(op, argument.name)
        self.block.add_op(op)
        self.scope.values[argument] = op.result

    def _leaves(self, live: list[Node]) -> None:
        """Constants for the leaves that are read as they are."""
        uses = self.quantized.uses.uses
        read = {value for node in live for value in _needs(node, uses.get(node))} | set(self.graph.returned)
        for leaf in self.graph.leaves:
            if leaf in read:
                op = qc.ConstOp(leaf.name, types.tensor(leaf.shape, leaf.dtype))
                set_path(op, leaf.name)
                self.block.add_op(op)
                self.scope.values[leaf] = op.result

    def _node(self, node: Node, use: Use | None) -> None:
        path = self._path(use) if use is not None else node.line
        if node.source:
            ops = self.lines.setdefault(path, {}).setdefault(node.source, [])
            if node.op not in ops:
                ops.append(node.op)
        scope = self.scope.at(path)
        try:
            made = self._weighted(scope, node, use) if use is not None else self._built(scope, node)
        except QCompilerError as error:
            if type(error) not in (QCompilerError, DimError):
                raise
            raise node.unsupported(str(error)) from error
        results = made if isinstance(made, tuple) else (made,)
        for value, built in zip(node.results, results, strict=True):
            wanted = types.tensor(value.shape, value.dtype)
            if built.type != wanted:
                raise FrontendError(f"import of {node.op} gave {built.type}, the trace says {wanted} ({node.source})")
            self.scope.values[value] = built

    def _built(self, scope: Scope, node: Node) -> Any:
        builder = BUILDERS.get(node.op)
        if builder is None:
            where = f" ({node.source})" if node.source else ""
            raise UnsupportedOperatorError(
                f"the operator {node.op} has no lowering{where}. Rewrite that line with supported operators, or "
                "compute it outside of the compiled function and pass the result in"
            )
        for value in node.operands:
            _ = value.dtype  # refuses complex numbers and 8-bit floats, with the line
        return builder(scope, node)

    def _path(self, use: Use) -> str:
        key = self.quantized.key(use.matrices[0])
        return key.rpartition(".")[0] or key

    # --- weights ---

    def _weighted(self, scope: Scope, node: Node, use: Use) -> SSAValue:
        if use.kind == "linear":
            ways = [self.quantized.way(m) for m in use.matrices]
            weights = [self._weight(m, way.compute) for m, way in zip(use.matrices, ways, strict=True)]
            return product_of(scope, node, use, weights, [way.quantised for way in ways])
        if use.kind == "conv":
            return conv_of(scope, node, self._kernel(scope, use.matrices[0], node.result.dtype))
        weight = self._weight(use.matrices[0], None)
        type_ = types.tensor(node.result.shape, node.result.dtype)
        return scope.insert(qc.EmbeddingOp(row_index(scope, node), weight, type_))

    def _kernel(self, scope: Scope, matrix: Matrix, result: DType) -> SSAValue:
        """The decoded matrix of a convolution, in the type of the recipe's arithmetic or of the result."""
        compute = self.quantized.way_of_convolution(matrix).compute
        weight = self._weight(matrix, compute)
        return weight if compute is not None else scope.cast(weight, result)

    def _weight(self, matrix: Matrix, compute: DType | None) -> SSAValue:
        """The decoded matrix; that of a quantised linear or convolution has the type of the recipe's arithmetic."""
        key = self.quantized.key(matrix)
        stored = self.weights[key]
        dtype: DType = compute if compute is not None and stored.format is not None else stored.dtype
        if (id(matrix), dtype) in self.decoded:
            return self.decoded[id(matrix), dtype]
        shape = (matrix.rows, matrix.cols)
        if stored.format is None:
            ops: list[Any] = [qc.ConstOp(key, types.tensor(shape, stored.dtype))]
        else:
            const = qc.ConstOp(key, types.QTensorType.of(shape, dtype, stored.format))
            ops = [const, qc.DequantizeOp(const.result, types.tensor(shape, dtype))]
        for op in ops:
            set_path(op, key)
            self.block.add_op(op)
        made: SSAValue = ops[-1].results[0]
        self.decoded[id(matrix), dtype] = made
        return made

    def _returned(self, value: Value) -> SSAValue:
        if value.unsigned and value.dtype != "ui8":
            raise UnsupportedOperatorError(
                f"the function returns {value.type.replace('ui', 'uint')}, which programs do not: convert the result, "
                ".astype(jnp.int32) or .view(jnp.int32)"
            )
        return self.scope.value(value)


def _needs(node: Node, use: Use | None) -> list[Value]:
    """The operands that a node's lowering reads as tensors: all but the weight."""
    return [v for i, v in enumerate(node.operands) if use is None or i != use.operand]
