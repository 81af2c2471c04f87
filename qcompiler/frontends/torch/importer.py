"""Stage `import`: the fx graph as one `func.func @main` of qc, linalg and tensor ops, with weights in a store.

    %w = qc.const @encoder.layer.0.attention.self.query.weight : !qc.qtensor<384x384xf32, #qc.format<"nf4", …>, …>
    %d = qc.dequantize %w
    %q = qc.linear %x, %d, %b {qc.path = "encoder.layer.0.attention.self.query"}

Each ATen operator has one entry in `aten.table.BUILDERS`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument, TensorArgument
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Region, SSAValue

from qcompiler.config import parse_format
from qcompiler.errors import DimError, ExportError, FrontendError, UnsupportedOperatorError
from qcompiler.frontends.common.imported import Compared
from qcompiler.frontends.quantise.insert_qdq import PACKED, Quantized
from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.aten.scope import Result, Scope, bind
from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture import signature
from qcompiler.frontends.torch.capture.fallback import Fallback, TorchPart
from qcompiler.frontends.torch.capture.graph_values import Lines, compared, lines_of
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING
from qcompiler.frontends.torch.capture.writes import is_read
from qcompiler.frontends.torch.common.empty_weights import is_empty
from qcompiler.frontends.torch.common.origins import describe
from qcompiler.frontends.torch.common.values import dtype_name, to_numpy
from qcompiler.frontends.torch.qc_ops import (
    torch_cache,
    torch_hadamard,
    torch_linear,
    torch_linear_attention,
    torch_ring,
    torch_rows,
    torch_sample,
)
from qcompiler.ir import qc, types
from qcompiler.ir.module import set_arg_names, set_path, set_ranges
from qcompiler.ledger import Ledger
from qcompiler.plan.dims import Dim, Range
from qcompiler.plan.kernel import DType
from qcompiler.plan.plan import Signature, initial_weight
from qcompiler.plan.weights import Bytes, NoBytes, StoredTensor, WeightStore

FallbackChoice = Literal["torch"] | None

__all__ = ["BUILDERS", "IGNORED", "ImportResult", "Importer", "TensorSpec", "import_program"]

# Assertions that torch checked while tracing; the program's signature checks sizes again.
IGNORED = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
}

_BATCH_NORM_IN_TRAINING = torch.ops.aten._native_batch_norm_legit_functional.default
"""It takes the statistics of the batch, and gives new running ones."""

_QC_OPS = (torch_rows, torch_cache, torch_ring, torch_linear, torch_linear_attention, torch_hadamard)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument or result of the model."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    torch_dtype: str


@dataclass
class ImportResult:
    """The imported module, and everything else that a program needs.

    `symbols` are the ranges of the dimensions; `states` the initial values of buffers that the model writes (keyed as
    `qc.state`); `torch_parts` the regions that torch runs (with `fallback="torch"`).  `texts` are the dumps
    of the earlier stages, `seconds` the times of the three, and `quantized` holds the ledger and the eager oracle.
    """

    module: ModuleOp
    weights: WeightStore
    signature: Signature
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    symbols: dict[str, Range]
    quantized: Quantized
    states: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    torch_parts: tuple[TorchPart, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def torch_calls(self) -> tuple[str, ...]:
        """The operators that torch runs."""
        return tuple(dict.fromkeys(name for part in self.torch_parts for name in part.operators))

    @property
    def ledger(self) -> Ledger:
        return self.quantized.ledger

    @property
    def notes(self) -> list[tuple[str, str]]:
        """(what, why) of decisions of the export."""
        return [(note.what, note.why) for note in self.quantized.exported.notes]

    @property
    def decisions(self) -> tuple[tuple[str, str, str], ...]:
        return self.quantized.decisions

    @property
    def lines(self) -> Lines:
        """The model's source lines by module path, each with the operators that it became."""
        return lines_of(self.quantized.exported.program)

    def compared(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flatten: Callable[[Any], Sequence[Any]]
    ) -> Compared:
        """One run of the oracle, and one of the float model unless it is None, with the value of every node."""
        return compared(self.quantized.exported.program, model, args, kwargs)

    def room(self, nbytes: int) -> Bytes:
        """Zeroed memory for the program's image."""
        return self.quantized.files.room(nbytes)

    def oracle(self) -> Callable[..., Any]:
        """The quantised graph in eager torch."""
        return self.quantized.module

    def sample_inputs(self) -> list[npt.NDArray[Any]]:
        """The example inputs of the export as flat arrays, for `verify_each="numerics"`."""
        args, kwargs = self.quantized.exported.program.example_inputs or ((), {})
        leaves = pytree.tree_leaves((args, kwargs))
        return [to_numpy(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def import_program(quantized: Quantized, *, fallback: FallbackChoice = None) -> ImportResult:
    """Imports a rewritten program.

    UnsupportedOperatorError names the operator, the module and the source line; with `fallback="torch"` the operator
    becomes a part of a `qc.torch_call` instead, unless it does more than compute.
    """
    return Importer(quantized, fallback).run()


class Importer:
    """Walks a rewritten program and builds `func.func @main` from its nodes, with one builder for each."""

    def __init__(self, quantized: Quantized, fallback: FallbackChoice) -> None:
        self.quantized = quantized
        self.program: ExportedProgram = quantized.exported.program
        self.weights = quantized.weights.copy()
        self.block = Block()
        self.scope = Scope(self.block, quantized.exported.symbols, quantized.exported.ranges)
        self.fallback = Fallback(self.scope, self.program.graph_module) if fallback == "torch" else None
        self.inputs: list[TensorSpec] = []
        self.states: dict[str, npt.NDArray[Any]] = {}
        specs = self.program.graph_signature.input_specs
        self._targets = {spec.arg.name: str(spec.target) for spec in specs if spec.target is not None}
        self._tied = {path: row.parameters for row in quantized.ledger for path in row.parameters}

    def run(self) -> ImportResult:
        with TRACING:
            return self._run()

    def _run(self) -> ImportResult:
        self._placeholders()
        for node in self.program.graph.nodes:
            if node.op == "call_function" and node.users and node.target not in IGNORED:
                self._call(node)
            elif node.op == "get_attr" and node.users and not self._is_branch(node):
                self._refuse_subgraph(next(iter(node.users)))
            elif node.op in ("call_module", "call_method"):
                raise FrontendError(f"the graph holds a {node.op} of {node.target}, which import does not know")
        outputs = self._outputs()
        main = self._function()
        inputs, results = signature.trees(self.program, self.quantized.exported.parameters)
        return ImportResult(
            ModuleOp([main]),
            self.weights,
            Signature(inputs=inputs, outputs=results),
            tuple(self.inputs),
            outputs,
            dict(self.quantized.exported.ranges),
            self.quantized,
            self.states,
            tuple(self.fallback.parts) if self.fallback is not None else (),
        )

    # --- inputs ---

    def _placeholders(self) -> None:
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        mutated = set(self.program.graph_signature.buffers_to_mutate.values())
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                self._argument(node, spec.arg)
            elif is_read(node):  # a buffer that is written and never read is not a state
                self._constant(node, str(spec.target), state=spec.target in mutated)

    def _argument(self, node: fx.Node, argument: Any) -> None:
        if isinstance(argument, ConstantArgument):
            return
        if not isinstance(argument, TensorArgument):
            kind = "size" if isinstance(argument, SymIntArgument) else type(argument).__name__
            raise ExportError(f"the argument '{node.name}' is a {kind}; only tensors and constants can be arguments")
        value = node.meta["val"]
        if value.dtype.is_complex:
            raise ExportError(
                f"the argument '{node.name}' is complex; pass torch.view_as_real of it, and take "
                "torch.view_as_complex in the model"
            )
        shape, dtype = self.scope.shape(node), dtype_name(value.dtype)
        self.inputs.append(TensorSpec(node.name, dtype, shape, str(value.dtype).removeprefix("torch.")))
        self.scope.values[node] = self.block.insert_arg(types.tensor(shape, dtype), len(self.block.args))

    def _constant(self, node: fx.Node, target: str, *, state: bool) -> None:
        key = target.removesuffix(PACKED)
        if target.endswith(PACKED) and key in self.weights:
            return  # read through qc.dequantize
        tensor = self.program.state_dict.get(target, self.program.constants.get(target))
        assert isinstance(tensor, torch.Tensor)
        is_pair = self.fallback is not None and tensor.dtype.is_complex and not state
        if is_pair:
            tensor = torch.view_as_real(tensor.resolve_conj())
        type_ = types.tensor(tuple(tensor.shape), dtype_name(tensor.dtype))
        if state:
            self.states[target] = np.array(to_numpy(tensor))
            if self.states[target].reshape(-1).view(np.uint8).any():
                self.weights.add_array(initial_weight(f"state.{target}"), self.states[target])
            op: qc.StateOp | qc.ConstOp = qc.StateOp(target, type_)
        else:
            parameters = self._tied.get(target, (target,))
            if is_empty(tensor):
                nbytes, dtype = tensor.numel() * tensor.element_size(), dtype_name(tensor.dtype)
                self.weights.add(
                    StoredTensor(target, dtype, tuple(tensor.shape), NoBytes(nbytes), parameters=parameters)
                )
            else:
                self.weights.add_array(target, to_numpy(tensor), parameters)
            op = qc.ConstOp(target, type_)
        set_path(op, target)
        self.block.add_op(op)
        if is_pair and self.fallback is not None:
            self.fallback.pairs[node] = op.result
        else:
            self.scope.values[node] = op.result

    def _dequantize(self, node: fx.Node) -> SSAValue:
        """The packed weight as one value, and its decoding; both have the parameter's path."""
        packed, text, shape, torch_dtype = node.args
        assert isinstance(packed, fx.Node) and isinstance(text, str)
        ref, dtype = parse_format(text), dtype_name(torch_dtype)  # type: ignore[arg-type]
        rows, cols = (int(size) for size in shape)  # type: ignore[union-attr,arg-type]
        target = self._target_of(packed)
        key = target.removesuffix(PACKED)
        if key not in self.weights:  # a program that came with its own dequantize
            data = to_numpy(self.program.state_dict[target])
            self.weights.add(StoredTensor(key, dtype, (rows, cols), data, ref, "canonical", (key,)))
        const = qc.ConstOp(key, types.QTensorType.of((rows, cols), dtype, ref))
        decoded = qc.DequantizeOp(const.result, types.tensor((rows, cols), dtype))
        for op in (const, decoded):
            set_path(op, key)
            self.block.add_op(op)
        return decoded.result

    def _grouped_linear(self, scope: Scope, node: fx.Node) -> SSAValue:
        """Products with chosen experts, in the form that insert-qdq makes."""
        experts, repeat = node.args[3:]
        assert isinstance(experts, int) and isinstance(repeat, int)
        type_ = types.tensor(scope.shape(node), scope.dtype(node))
        x, w, index = (scope.value(each) for each in node.args[:3])
        return scope.insert(qc.GroupedLinearOp(x, w, index, type_, experts=experts, repeat=repeat))

    def _target_of(self, placeholder: fx.Node) -> str:
        if placeholder.name not in self._targets:
            raise FrontendError(f"{placeholder.name} is dequantised, but it is an argument and not a weight")
        return self._targets[placeholder.name]

    # --- operators ---

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | int | float | bool):
            return  # sizes are read from the trace at their uses
        if node.target is torch.ops.qc.dequantize.default:
            self.scope.values[node] = self._dequantize(node)
            return
        if self.fallback is not None:
            if node in self.scope.values or node in self.fallback.pairs:
                return  # a result of a region
            if (why := self.fallback.takes(node)) is not None:
                self.fallback.take(node, why)
                return
            self.fallback.settle(node.all_input_nodes)
        scope = self.scope.at(node)
        if node.target is torch.ops.qc.grouped_linear.default:
            self.scope.values[node] = self._grouped_linear(scope, node)
            return
        for imports in (each.IMPORTS for each in _QC_OPS):
            if node.target in imports:
                self.scope.values[node] = imports[node.target](scope, node)
                return
        if node.target is torch_sample.OPERATOR:
            self.scope.values[node] = torch_sample.import_sample(scope, node)
            return
        if node.target is recurrent.OPERATOR:
            self.scope.values[node] = recurrent.import_recurrent(scope, node)
            return
        before = self.block.last_op
        try:
            self.scope.values[node] = self._build(scope, node)
            if self.fallback is not None:
                self.fallback.require_kernels(before, self.block)
        except UnsupportedOperatorError as error:
            if self.fallback is None:
                raise
            self.fallback.take(node, str(error).partition(" (")[0])
        except DimError as error:
            raise UnsupportedOperatorError(f"{node.target}: {error}{describe(node)}") from error

    def _build(self, scope: Scope, node: fx.Node) -> Result:
        if node.target is operator.getitem:
            return BUILDERS[operator.getitem](scope, node, {"source": node.args[0], "index": node.args[1]})
        builder = BUILDERS.get(node.target)
        if node.target is _BATCH_NORM_IN_TRAINING:
            raise scope.unsupported(node, "the model is in training mode; call model.eval() before compiling it")
        if builder is None:
            raise UnsupportedOperatorError(
                f"the operator {node.target} has no lowering{describe(node)}. Rewrite that line with supported "
                'operators, let torch run it (fallback="torch"), or compute it outside of the compiled '
                "model and pass the result in"
            )
        result = builder(scope, node, bind(node))
        self._check(node, result)
        return result

    def _is_branch(self, node: fx.Node) -> bool:
        """Whether a subgraph is a branch of a `torch.cond` that torch runs."""
        return self.fallback is not None and all(user.target is torch.ops.higher_order.cond for user in node.users)

    def _refuse_subgraph(self, node: fx.Node) -> None:
        raise UnsupportedOperatorError(
            f"the operator {node.target} runs a part of the model as a function, which has no lowering"
            f"{describe(node)}. Choose with torch.where instead of torch.cond, or let torch run the condition "
            '(fallback="torch"); a loop must have a fixed length and be written in Python'
        )

    def _check(self, node: fx.Node, result: Result) -> None:
        """Checks that the built value has the type of the trace."""
        value = node.meta.get("val")
        metas = list(value) if isinstance(value, list | tuple) else [value]
        for built, meta in zip(result if isinstance(result, tuple) else (result,), metas, strict=True):
            if built is None or meta is None:
                continue
            wanted = types.tensor(self.scope.symbols.shape(meta.shape), dtype_name(meta.dtype))
            if built.type != wanted:
                raise FrontendError(
                    f"import of {node.target} gave {built.type}, the trace says {wanted}{describe(node)}"
                )

    # --- results ---

    def _outputs(self) -> tuple[TensorSpec, ...]:
        nodes = {n.name: n for n in self.program.graph.nodes}
        results: list[SSAValue] = []
        specs: list[TensorSpec] = []
        if self.fallback is not None:
            self.fallback.settle_all()
        for spec in self.program.graph_signature.output_specs:
            if isinstance(spec.arg, ConstantArgument):
                continue
            if not isinstance(spec.arg, TensorArgument):
                raise ExportError("the model returns a size (an int computed from shapes); return tensors only")
            node = nodes[spec.arg.name]
            if node.meta["val"].dtype.is_complex:
                raise ExportError(
                    f"the model returns complex values; return torch.view_as_real of them{describe(node)}"
                )
            value = self.scope.value(node)
            if spec.kind == OutputKind.BUFFER_MUTATION and str(spec.target) not in self.states:
                continue
            if spec.kind == OutputKind.BUFFER_MUTATION:
                op = qc.StateUpdateOp(str(spec.target), value)
                set_path(op, str(spec.target))
                self.block.add_op(op)
                continue
            results.append(value)
            torch_dtype = str(node.meta["val"].dtype).removeprefix("torch.")
            specs.append(TensorSpec(node.name, self.scope.dtype(node), self.scope.shape(node), torch_dtype))
        self.block.add_op(func.ReturnOp(*results))
        return tuple(specs)

    def _function(self) -> func.FuncOp:
        returned = self.block.last_op
        assert returned is not None
        kinds = ([a.type for a in self.block.args], [v.type for v in returned.operands])
        main = func.FuncOp("main", kinds, Region(self.block))
        set_ranges(main, self.quantized.exported.ranges)
        set_arg_names(main, [spec.name for spec in self.inputs])
        return main
