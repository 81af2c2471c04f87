"""The second oracle: upstream MLIR compiles and runs a module (torch-mlir's bindings; torch is not imported).

    outputs = run_with_mlir(module, weights, [x])              # after the pass lower-qc-to-linalg
    results = mlir_jit(text, [x])                              # any func + linalg + tensor + arith + math text

Needs the extra `qcompiler[mlir]`. Results own their memory.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import ArrayAttr, ModuleOp, StringAttr, TensorType

from qcompiler.errors import MissingDependencyError, QCompilerError
from qcompiler.ir.interpreter_scalar import numpy_dtype
from qcompiler.ir.linalg_formats import sections_of
from qcompiler.ir.linalg_lowering import CONSTANTS, STATES, UPDATES
from qcompiler.ir.module import INIT, find_func, init_func, result_keys, return_op
from qcompiler.ir.text import print_for_mlir
from qcompiler.ir.types import QTensorType
from qcompiler.plan.weights import NUMPY_DTYPES, WeightStore

Array = npt.NDArray[Any]

PIPELINE = (
    "builtin.module(one-shot-bufferize{bufferize-function-boundaries=1 "
    "function-boundary-type-conversion=identity-layout-map},buffer-deallocation-pipeline,"
    "convert-bufferization-to-memref,convert-linalg-to-loops,lower-affine,convert-scf-to-cf,expand-strided-metadata,"
    "lower-affine,arith-emulate-unsupported-floats{source-types=bf16 target-type=f32},arith-expand{include-bf16=true},"
    "convert-math-to-llvm,convert-math-to-libm,convert-to-llvm,"
    "reconcile-unrealized-casts)"
)


def bindings() -> tuple[Any, Any, Any]:
    """torch-mlir's `ir`, `passmanager` and `execution_engine`. MissingDependencyError explains how to install them."""
    try:
        ir, passes, engine = (
            importlib.import_module(f"torch_mlir.{name}") for name in ("ir", "passmanager", "execution_engine")
        )
    except ImportError as error:
        raise MissingDependencyError(
            "upstream MLIR is needed for this; install it with: pip install 'qcompiler[mlir]' (that is torch-mlir)"
        ) from error
    return ir, passes, engine


def parses_in_mlir(text: str, *, upstream_only: bool = False) -> None:
    """Parses and verifies `text` in stock MLIR, with unregistered dialects allowed unless it must be `upstream_only`.
    QCompilerError if MLIR refuses it."""
    ir, _, _ = bindings()
    with ir.Context() as context:
        context.allow_unregistered_dialects = not upstream_only
        try:
            parsed = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise QCompilerError(f"MLIR does not parse the text: {error}") from error
        parsed.operation.verify()


# --- memref descriptors ----------------------------------------------------------------------------------------------


def _descriptor_class(rank: int) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
    ]
    if rank:
        fields += [("sizes", ctypes.c_int64 * rank), ("strides", ctypes.c_int64 * rank)]
    return type(f"MemRef{rank}", (ctypes.Structure,), {"_fields_": fields})


def _describe(array: Array) -> Any:
    descriptor: Any = _descriptor_class(array.ndim)()
    descriptor.allocated = descriptor.aligned = array.ctypes.data
    descriptor.offset = 0
    for axis in range(array.ndim):
        descriptor.sizes[axis] = array.shape[axis]
        descriptor.strides[axis] = array.strides[axis] // array.itemsize
    return descriptor


def _read(descriptor: Any, rank: int, dtype: np.dtype[Any]) -> Array:
    """A copy of the array that a descriptor points to."""
    shape = tuple(descriptor.sizes) if rank else ()
    strides = tuple(s * dtype.itemsize for s in descriptor.strides) if rank else ()
    if 0 in shape:
        return np.empty(shape, dtype)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    start = descriptor.aligned + descriptor.offset * dtype.itemsize
    raw = np.frombuffer((ctypes.c_char * span).from_address(start), np.uint8)
    typed = raw[: span - span % dtype.itemsize].view(dtype)
    return np.array(np.lib.stride_tricks.as_strided(typed, shape, strides), order="C")


class _Unranked(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int64), ("descriptor", ctypes.c_void_p))


def _memref_copy(itemsize: int, source: Any, target: Any) -> None:
    """MLIR's runtime function for strided copies, which the bindings do not ship."""
    views = []
    for side in (source, target):
        rank = side.contents.rank
        descriptor: Any = ctypes.cast(side.contents.descriptor, ctypes.POINTER(_descriptor_class(rank))).contents
        shape = tuple(descriptor.sizes) if rank else ()
        strides = tuple(s * itemsize for s in descriptor.strides) if rank else ()
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + itemsize
        start = descriptor.aligned + descriptor.offset * itemsize
        raw = np.frombuffer((ctypes.c_char * max(span, 0)).from_address(start), f"V{itemsize}")
        views.append(np.lib.stride_tricks.as_strided(raw, shape, strides))
    views[1][...] = views[0]


_MEMREF_COPY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(_Unranked), ctypes.POINTER(_Unranked))(
    _memref_copy
)


# --- running ---------------------------------------------------------------------------------------------------------


class Jitted:
    """A function of `text`, compiled by upstream MLIR: call it with arrays as often as needed.

    Its arguments and results are ranked tensors. `level` is LLVM's: 0 compiles a small model in half a second instead
    of six, and runs slower. From 2 on loops become vectors, and those of bf16 need a function of LLVM's runtime that
    the bindings do not ship. QCompilerError carries MLIR's message.
    """

    def __init__(self, text: str, entry: str = "main", *, level: int = 1) -> None:
        ir, passmanager, execution_engine = bindings()
        self.entry = entry
        with ir.Context() as self._context:
            self._context.allow_unregistered_dialects = True
            try:
                module = ir.Module.parse(text)
                named = {ir.StringAttr(op.operation.attributes["sym_name"]).value: op for op in module.body}
                function = named[entry].operation
                function.attributes["llvm.emit_c_interface"] = ir.UnitAttr.get()
                type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
                self._results = [_result_kind(t, ir) for t in type_.results]
                passmanager.PassManager.parse(PIPELINE).run(module.operation)
                self._engine = execution_engine.ExecutionEngine(module, opt_level=level)
            except ir.MLIRError as error:
                raise QCompilerError(f"MLIR does not compile the module: {error}") from error
        self._engine.raw_register_runtime("memrefCopy", ctypes.cast(_MEMREF_COPY, ctypes.c_void_p))

    def __call__(self, *inputs: Array) -> list[Array]:
        """The results. Inputs are copied, since bufferisation may write in place."""
        held = [np.array(x, order="C") for x in inputs]
        arguments = [_describe(x) for x in held]
        kinds = [(f"r{i}", _descriptor_class(rank)) for i, (rank, _) in enumerate(self._results)]
        returned: Any = type("Results", (ctypes.Structure,), {"_fields_": kinds})()
        pointers = [ctypes.pointer(ctypes.pointer(x)) for x in ([returned] if kinds else []) + arguments]
        with self._context:
            self._engine.invoke(self.entry, *pointers)
        values = [_read(getattr(returned, f"r{i}"), *kind) for i, kind in enumerate(self._results)]
        owned = {x.ctypes.data for x in held}
        free = ctypes.CDLL(None).free
        free.argtypes = [ctypes.c_void_p]
        for pointer in {getattr(returned, f"r{i}").allocated for i in range(len(kinds))} - owned:
            free(pointer)
        return values


def mlir_jit(text: str, inputs: Sequence[Array], entry: str = "main", *, level: int = 1) -> list[Array]:
    """Compiles `text` with upstream MLIR and calls `entry` once: see `Jitted`."""
    return Jitted(text, entry, level=level)(*inputs)


_MLIR_DTYPES = {name: NUMPY_DTYPES[name] for name in ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "i1")}


def _result_kind(type_: Any, ir: Any) -> tuple[int, np.dtype[Any]]:
    shaped = ir.RankedTensorType(type_)
    return shaped.rank, _MLIR_DTYPES[str(shaped.element_type)]


def run_with_mlir(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Sequence[Array],
    entry: str = "main",
    states: MutableMapping[str, Array] | None = None,
) -> list[Array]:
    """Runs a module after `lower-qc-to-linalg`. Arguments and results are those of the interpreter's `run`."""
    text, computed = print_for_mlir(module), {}
    init = init_func(module)
    if init is not None and entry != INIT:
        values = mlir_jit(text, _constants(init, weights, {}), INIT)
        computed = dict(zip(result_keys(init), values, strict=True))
    function = _entry(module, entry)
    arrays = mlir_jit(text, arguments_of(module, weights, inputs, entry, states, computed), entry)
    for value, array in zip(return_op(function).operands, arrays, strict=True):
        assert isinstance(value.type, TensorType) and array.dtype == numpy_dtype(value.type)
    updates = keys_of(function, UPDATES)
    outputs = arrays[: len(arrays) - len(updates)]
    if states is not None:
        states.update(zip(updates, arrays[len(outputs) :], strict=True))
    return outputs


def arguments_of(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Sequence[Array],
    entry: str = "main",
    states: Mapping[str, Array] | None = None,
    computed: Mapping[str, Array] | None = None,
) -> list[Array]:
    """All arguments of a lowered function: its own, the states that it reads, and its constants.

    `computed` holds the results of `@init`. QCompilerError for a state without a value.
    """
    function, given = _entry(module, entry), states if states is not None else {}
    missing = [key for key in keys_of(function, STATES) if key not in given]
    if missing:
        raise QCompilerError(f"the state '{missing[0]}' has no value; pass it in `states`")
    read = [given[key] for key in keys_of(function, STATES)]
    return [*inputs, *read, *_constants(function, weights, computed or {})]


def _entry(module: ModuleOp, entry: str) -> func.FuncOp:
    function = find_func(module, entry)
    if function is None:
        raise QCompilerError(f"the module has no function @{entry}")
    return function


def keys_of(function: func.FuncOp, attribute: str) -> list[str]:
    """The keys in an attribute of a lowered function: `qc.constants`, `qc.states` or `qc.updates`."""
    keys = function.attributes.get(attribute)
    return [k.data for k in keys if isinstance(k, StringAttr)] if isinstance(keys, ArrayAttr) else []


def _constants(function: func.FuncOp, weights: WeightStore, computed: Mapping[str, Array]) -> list[Array]:
    """The arrays that a function's `qc.constants` names: `key`, or `key:section` of a packed weight."""
    names = keys_of(function, CONSTANTS)
    return [computed[name] if name in computed else constant_array(name, weights) for name in names]


def constant_array(name: str, weights: WeightStore) -> Array:
    """A constant of the store by `key`, or a section of a packed one by `key:section`."""
    if name in weights:
        return np.asarray(weights[name].array())
    key, _, section = name.rpartition(":")
    stored = weights[key]
    if stored.format is None or stored.layout != "canonical":
        raise QCompilerError(f"constant '{key}' is not packed in the canonical layout")
    packed = QTensorType.of(stored.shape, stored.dtype, stored.format)
    for found, offset, count, dtype in sections_of(packed):
        if found == section:
            kind = NUMPY_DTYPES[dtype]
            return stored.data[offset : offset + count * kind.itemsize].view(kind)
    raise QCompilerError(f"constant '{key}' has no section '{section}'")
