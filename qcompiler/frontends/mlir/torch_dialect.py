"""The torch dialect as an fx.GraphModule: each `torch.aten` op is the operator of torch that it names.

    %5 = torch.aten.permute %w, %4                 aten.permute.default(w, [1, 0])
    %6 = torch.aten.mm %x, %5                      aten.linear.default(x, w), if w is a weight

From there on a text goes the road of PyTorch's models: the same export, tables, recipes and oracle. It needs torch, as
the writing of such a text did.  Only operators of aten that compute are taken; the graph runs on fake tensors first,
and each result must have the type that the text says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode

from qcompiler.errors import ArgumentStructureError, ExportError, QCompilerError, UnsupportedOperatorError
from qcompiler.frontends.jax.graph import Graph, Value
from qcompiler.frontends.mlir import sizes
from qcompiler.frontends.mlir.constants import Constants
from qcompiler.frontends.mlir.dense import dense_array, scalar_number
from qcompiler.frontends.mlir.model import MlirModel
from qcompiler.frontends.mlir.types import Argument, Shape, check_size, parse_type
from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING

aten = torch.ops.aten

_TORCH: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "ui8": torch.uint8, "i1": torch.bool,
}  # fmt: skip
_SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip
"""torch's numbers of dtypes, which the dialect writes as ints."""
_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.preserve_format, 2: torch.channels_last}
_INTS: dict[str, Callable[..., Any]] = {
    "torch.aten.add.int": operator.add, "torch.aten.sub.int": operator.sub, "torch.aten.mul.int": operator.mul,
    "torch.aten.floordiv.int": operator.floordiv, "torch.aten.remainder.int": operator.mod,
    "torch.aten.neg.int": operator.neg,
}  # fmt: skip
_PRIMS = {"torch.prims.convert_element_type": "torch.aten.to.dtype", "torch.prims.squeeze": "torch.aten.squeeze.dims"}
_TEXTS = {"approximate", "rounding_mode", "reduce", "mode", "equation", "indexing", "padding_mode"}
"""Arguments of operators that may be texts: words that choose a rule."""
_BY_VALUE = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Value tensors have no strides, so that a view is a reshape."""
SIZES = (3, 5, 7, 11, 13, 17, 19, 23)
"""Example sizes of symbols: different, so that no two are taken for equal."""


def torch_program(
    model: MlirModel, args: Sequence[Any], dynamic_shapes: Mapping[str, Any] | None
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...], dict[str, Any] | None]:
    """The graph, example inputs, and sizes by the graph's names of arguments: what `qcompile` takes for torch.

    UnsupportedOperatorError and ExportError name the op and its line.
    """
    shapes, ranges = sizes.resolve(model.inputs, dynamic_shapes)
    chosen = {
        name: min(max(size, low), high)
        for size, (name, (low, high)) in zip(SIZES * (len(ranges) // 8 + 1), ranges.items(), strict=False)
    }
    reader = _Reader(model)
    graph_module = reader.run()
    plain = [tuple(chosen.get(n, n) if isinstance(n, str) else n for n in shape) for shape in shapes]
    inputs = tuple(_sample(a, shape) for a, shape in zip(model.inputs, plain, strict=True))  # type: ignore[arg-type]
    if args:
        if len(args) != len(inputs):
            raise ArgumentStructureError(
                f"{len(args)} example inputs were given, and the function takes {len(inputs)}: "
                f"{', '.join(argument.name for argument in model.inputs)}"
            )
        inputs = tuple(
            torch.as_tensor(np.asarray(each)) if not isinstance(each, torch.Tensor) else each for each in args
        )
    reader.check(graph_module, inputs)
    dims: dict[str, Any] = {}
    for argument, shape in zip(model.inputs, shapes, strict=True):
        symbols = {axis: (n, *ranges[n]) for axis, n in enumerate(shape) if isinstance(n, str)}
        if symbols:
            dims[_identifier(argument.name)] = symbols
    return graph_module, inputs, dims or None


def _sample(argument: Argument, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _TORCH.get(argument.element)
    if dtype is None:
        raise ExportError(f"the argument '{argument.name}' is {argument.element}, which torch's programs do not take")
    draw = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=draw).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def _identifier(name: str) -> str:
    made = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return made if made[:1].isalpha() else f"arg_{made}"


class _Reader:
    """Builds the graph, one node for each op."""

    def __init__(self, model: MlirModel) -> None:
        self.model = model
        self.graph, self.module = fx.Graph(), nn.Module()
        self.values: dict[Any, Any] = {}
        self.lines: dict[str, tuple[str, str, str]] = {}
        """By node: the op, its line, and the type that the text gives its result."""
        self.weights: set[fx.Node] = set()
        self.constants = Constants(Graph(), model.text.resources, {a.name for a in model.arguments})
        self.attributes: dict[Value, fx.Node] = {}

    def run(self) -> fx.GraphModule:
        block = self.model.function.regions[0].blocks[0]
        for argument, value in zip(self.model.arguments, block.arguments, strict=True):
            if argument.name not in self.model.weights:
                self.values[value] = self.graph.placeholder(_identifier(argument.name))
        for argument, value in zip(self.model.arguments, block.arguments, strict=True):
            if argument.name in self.model.weights:
                self.values[value] = self._attribute(argument.name, self.model.weights[argument.name])
        for each in block.operations:
            op = each.operation
            if op.name == "func.return":
                found = [self.values[value] for value in op.operands]
                self.graph.output(found[0] if len(found) == 1 else tuple(found))
            else:
                self._op(op)
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)

    # --- ops ---

    def line(self, op: Any) -> str:
        return self.model.line(str(op.location))

    def _op(self, op: Any) -> None:
        name = str(op.name)
        if name == "torch.operator":
            name = "torch." + str(op.attributes["name"]).strip('"').removeprefix("torch.")
        rule = _RULES.get(name)
        operands = [self.values.get(value) for value in op.operands] if rule is not _skip else []
        if rule is not None:
            found = rule(self, op, operands)
        elif name in _INTS:
            found = self._call(op, _INTS[name], tuple(operands), {})
        elif name.startswith(("torch.aten.", "torch.prims.")):
            found = self._aten(op, name, operands)
        else:
            raise self._unsupported(op, name, "")
        if len(op.results) == 1:
            self.values[op.results[0]] = found
        else:
            for number, value in enumerate(op.results):
                self.values[value] = self._call(op, operator.getitem, (found, number), {}, value)

    def _unsupported(self, op: Any, name: str, why: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(
            f"the operator {name} has no lowering ({self.line(op)}){why}. Write the part with operators of aten that "
            "compute tensors, or compute it outside of the program and pass the result in"
        )

    def _call(self, op: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = result if result is not None else (op.results[0] if len(op.results) == 1 else None)
        self.lines[node.name] = (str(op.name), self.line(op), str(given.type) if given is not None else "")
        return node

    def _aten(self, op: Any, name: str, operands: list[Any]) -> Any:
        name = _PRIMS.get(name, name)
        _, namespace, *path = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), path[0], None)
        named = path[1] if len(path) > 1 else "default"
        named = named.removesuffix("hacked_twin").removesuffix("_") or "default"  # of TorchScript: no index is None
        overload = getattr(packet, named, None) if packet is not None else None
        if not isinstance(overload, torch._ops.OpOverload):
            raise self._unsupported(op, name, ": torch has no such operator")
        _refuse_effects(self, op, name, overload)
        args, kwargs = self._arguments(op, name, overload, operands)
        overload = _BY_VALUE.get(overload, overload)
        if overload is aten.mm.default and (weight := self._transposed(args[1])) is not None:
            return self._call(op, aten.linear.default, (args[0], weight), {})
        if overload is aten.bmm.default and (matrix := self._repeated(args[1])) is not None:
            weight = self._transposed(matrix)
            target = aten.matmul.default if weight is None else aten.linear.default
            return self._call(op, target, (args[0], matrix if weight is None else weight), {})
        if overload is aten.mul.Scalar and args[1] == 1 and self._keeps_type(op):
            return args[0]  # torch-mlir's addmm has an alpha and a beta of 1
        return self._call(op, overload, args, kwargs)

    def _keeps_type(self, op: Any) -> bool:
        return str(op.operands[0].type) == str(op.results[0].type)

    def _repeated(self, value: Any) -> Any:
        """The matrix that is repeated for each entry of a batch: torch-mlir writes a linear on three dimensions so."""
        while isinstance(value, fx.Node) and value.target is aten.reshape.default and self._same_type(value):
            value = value.args[0]
        if not isinstance(value, fx.Node) or value.target not in (aten.broadcast_to.default, aten.expand.default):
            return None
        source = value.args[0]
        shapes = [self._shape_of(source), self._shape_of(value)]
        return source if len(shapes[0]) == 2 and len(shapes[1]) == 3 and shapes[0] == shapes[1][1:] else None

    def _same_type(self, node: fx.Node) -> bool:
        source = node.args[0]
        return isinstance(source, fx.Node) and self._shape_of(source) == self._shape_of(node) != ()

    def _shape_of(self, node: Any) -> Shape:
        """The shape that the text gives a node without `?`, else ()."""
        declared = self.lines.get(node.name, ("", "", ""))[2] if isinstance(node, fx.Node) else ""
        shape = parse_type(declared, "a value")[0] if declared.startswith("!torch.vtensor<[") else ()
        batch = shape[:1] if len(shape) == 3 else ()
        return () if any(size is None for size in shape[len(batch) :]) else shape

    def _transposed(self, value: Any) -> fx.Node | None:
        """The weight behind a transpose."""
        if not isinstance(value, fx.Node) or value.target not in (aten.permute.default, aten.transpose.int):
            return None
        source, *order = value.args
        swapped = order in ([[1, 0]], [0, 1], [1, 0], [-1, -2], [-2, -1])
        return source if swapped and isinstance(source, fx.Node) and source in self.weights else None

    def _arguments(
        self, op: Any, name: str, overload: Any, operands: list[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schema = overload._schema.arguments
        if len(operands) > len(schema):
            raise self._unsupported(op, name, f": it takes {len(schema)} arguments, and {len(operands)} are given")
        args, kwargs = [], {}
        for argument, value in zip(schema, operands, strict=False):
            made = self._argument(op, name, argument, value)
            if argument.kwarg_only:
                kwargs[argument.name] = made
            else:
                args.append(made)
        return tuple(args), kwargs

    def _argument(self, op: Any, name: str, argument: Any, value: Any) -> Any:
        """The dialect's ints for dtypes, layouts and memory formats as torch's values."""
        kind = str(argument.real_type).removeprefix("Optional[").rstrip("]")
        if isinstance(value, str) and argument.name not in _TEXTS and kind != "Device":
            raise self._unsupported(op, name, f": its argument {argument.name} is a text")
        if value is None or isinstance(value, fx.Node):
            return value
        tables: dict[str, tuple[str, Mapping[int, Any]]] = {
            "ScalarType": ("dtype", _SCALAR_TYPES),
            "Layout": ("layout", {0: torch.strided}),
            "MemoryFormat": ("memory_format", _MEMORY_FORMATS),
        }
        for typed, (named, table) in tables.items():
            if kind == typed or argument.name == named:
                if value not in table:
                    raise self._unsupported(op, name, f": its {argument.name} is {value}")
                return table[value]
        return torch.device("cpu") if kind == "Device" or argument.name == "device" else value

    # --- constants ---

    def literal(self, op: Any) -> fx.Node:
        text = str(op.attributes["value"])
        shape, kind = parse_type(str(op.results[0].type), f"a constant ({self.line(op)})")
        sizes_ = tuple(size for size in shape if size is not None)
        if kind not in _TORCH:
            raise self._unsupported(op, "torch.vtensor.literal", f": torch has no {kind}")
        where = f" ({self.line(op)})"
        if text.startswith("dense_resource<"):
            value = self.constants.resource(text, sizes_, kind, where)
        else:
            self.constants.check_splat(sizes_, where)
            if text[6:7] not in '["':
                number = scalar_number(text[6:].partition(">")[0] + f" : {kind}")
                return self.graph.call_function(aten.full.default, (list(sizes_), number), {"dtype": _TORCH[kind]})
            value = self.constants.dense((text, kind), dense_array(text, sizes_, kind, where), sizes_, kind)
        if value not in self.attributes:
            array = self.constants.arrays.get(value, value.known)
            name = value.name or f"constant_{len(self.attributes)}"
            self.attributes[value] = self._attribute(name, array)
        return self.attributes[value]

    def _attribute(self, path: str, array: Any) -> fx.Node:
        """A parameter, or a buffer of integers, at a dotted path of the module."""
        made = _tensor(array)
        *parents, name = path.split(".")
        place = self.module
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            child = getattr(place, parent)
            if not isinstance(child, nn.Module):
                return self._attribute(path.replace(".", "_"), array)
            place = child
        if hasattr(place, name):
            return self._attribute(f"{path.replace('.', '_')}_2", array)
        if made.is_floating_point():
            place.register_parameter(name, nn.Parameter(made, requires_grad=False))
        else:
            place.register_buffer(name, made)
        node = self.graph.get_attr(path)
        self.weights.add(node)
        return node

    # --- types ---

    def check(self, graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        """Runs the graph on fake tensors. ExportError for an op that torch refuses, or whose result has another type
        than the text says, or is huge."""
        reader = self

        class Checked(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                name, line, declared = reader.lines.get(n.name, (n.name, "", ""))
                try:
                    made = super().run_node(n)
                except QCompilerError:
                    raise
                except Exception as error:  # whatever torch raises for arguments that do not fit
                    first = str(error).strip().partition("\n")[0]
                    raise ExportError(f"{name} ({line}) cannot be computed: {type(error).__name__}: {first}") from error
                if isinstance(made, torch.Tensor):
                    _check_type(made, declared, f"{name} ({line})")
                return made

        try:
            with TRACING, FakeTensorMode(allow_non_fake_inputs=True) as mode:
                Checked(graph_module).run(*(mode.from_tensor(each) for each in inputs))
        except ExportError as error:  # fx adds its own lines to the message
            raise ExportError(str(error).partition("\n")[0]) from error


def _check_type(made: torch.Tensor, declared: str, what: str) -> None:
    check_size(tuple(int(size) for size in made.shape), what)
    if not declared.startswith("!torch.vtensor<["):
        return
    shape, element = parse_type(declared, what)
    fits = len(shape) == made.dim() and all(n in (None, int(m)) for n, m in zip(shape, made.shape, strict=True))
    if not fits or _TORCH.get(element) != made.dtype:
        raise ExportError(
            f"the result of {what} is {declared}, says the text, and torch computes {tuple(made.shape)}, "
            f"{str(made.dtype).removeprefix('torch.')}"
        )


def _tensor(array: Any) -> torch.Tensor:
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _refuse_effects(reader: _Reader, op: Any, name: str, overload: Any) -> None:
    """Only operators that compute: no writes, no files, nothing that torch cannot decompose."""
    if overload._schema.is_mutable:
        raise reader._unsupported(op, name, ": it writes into an argument")
    composite = overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if overload not in BUILDERS and overload not in core_aten_decompositions() and not composite:
        raise reader._unsupported(op, name, "")
    if not any("Tensor" in str(argument.type) for argument in overload._schema.arguments) and overload not in BUILDERS:
        made = {"full", "zeros", "ones", "arange", "empty", "scalar_tensor", "eye", "linspace"}
        if overload._schema.name.partition("::")[2] not in made:
            raise reader._unsupported(op, name, ": it takes no tensor")


Rule = Callable[[_Reader, Any, list[Any]], Any]


def _number(reader: _Reader, op: Any, operands: list[Any]) -> Any:
    del reader, operands
    return scalar_number(str(op.attributes["value"]))


def _word(reader: _Reader, op: Any, operands: list[Any]) -> str:
    del reader, operands
    return str(op.attributes["value"]).strip('"')


def _none(reader: _Reader, op: Any, operands: list[Any]) -> None:
    del reader, op, operands


def _list(reader: _Reader, op: Any, operands: list[Any]) -> list[Any]:
    del reader, op
    return list(operands)


def _size(reader: _Reader, op: Any, operands: list[Any]) -> fx.Node:
    return reader._call(op, aten.sym_size.int, tuple(operands), {})


def _literal(reader: _Reader, op: Any, operands: list[Any]) -> fx.Node:
    del operands
    return reader.literal(op)


def _same(reader: _Reader, op: Any, operands: list[Any]) -> Any:
    del reader, op
    return operands[0]


def _skip(reader: _Reader, op: Any, operands: list[Any]) -> None:
    del reader, op, operands


_RULES: dict[str, Rule] = {
    "torch.constant.int": _number,
    "torch.constant.float": _number,
    "torch.constant.bool": _number,
    "torch.constant.str": _word,
    "torch.constant.device": _word,
    "torch.constant.none": _none,
    "torch.prim.ListConstruct": _list,
    "torch.prim.TupleConstruct": _list,
    "torch.aten.size.int": _size,
    "torch.aten.sym_size.int": _size,
    "torch.vtensor.literal": _literal,
    "torch.tensor_static_info_cast": _same,
    "torch.symbolic_int": _skip,
    "torch.bind_symbolic_shape": _skip,
}
