"""The primitive of JAX behind `jax_callable`, and its rules: lowering to the handler, batching, differentiation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jaxlib.version
import numpy as np
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

from qcompiler.errors import (
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DeviceUnavailableError,
)
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import interop, jax_arrays
from qcompiler.runtime.binding import Binding
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.xla_programs import Registered, handler

TARGET = "qcompiler_call"

call_p: Any = jax.extend.core.Primitive(TARGET)  # its methods have no types
call_p.multiple_results = True


class JaxCallable:
    """Flattens and checks a call's arguments, and binds the primitive for their sizes."""

    def __init__(self, program: LoadedProgram) -> None:
        binder = program.binder
        self.flatten, self.unflatten = program.flatten_inputs, program.unflatten_outputs
        self.wanted = tuple(zip(binder.names, binder.dtypes, strict=True))
        self.results = tuple(zip(binder.output_names, binder.output_dtypes, strict=True))
        self.bind = binder.bind
        self.registered = Registered(program, _handler())
        self._calls: dict[tuple[tuple[int, ...], ...], Callable[..., Sequence[Any]]] = {}
        self.__name__ = self.__qualname__ = "qcompiler_program"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The program's results. ArgumentStructureError, ArgumentDtypeError, ArgumentShapeError name the argument."""
        values = self.flatten(args, kwargs)
        arrays = [_read(value, name, want) for value, (name, want) in zip(values, self.wanted, strict=True)]
        shapes = tuple([tuple(array.shape) for array in arrays])
        call = self._calls.get(shapes)
        if call is None:
            call = self._calls[shapes] = self._call(shapes)
        _check_results(self.results)
        return self.unflatten(call(*arrays))

    def _call(self, shapes: tuple[tuple[Any, ...], ...]) -> Callable[..., Sequence[Any]]:
        for (name, _), shape in zip(self.wanted, shapes, strict=True):
            if not all(isinstance(extent, int) for extent in shape):
                raise ArgumentShapeError(
                    f"argument '{name}' has the symbolic shape {shape}: a program is called with sizes that are known "
                    "when it is traced; trace the function once for each size"
                )
        bound = functools.partial(call_p.bind, registered=self.registered, call=_Call(self.bind(shapes), self.results))
        return jax.jit(bound, inline=True)


class _Call:
    """An entry point at one size, as a parameter of the primitive."""

    def __init__(self, binding: Binding, results: Sequence[tuple[str, str]]) -> None:
        self.entry = binding.entry
        self.symbols = tuple(binding.array)[: len(binding.symbols)]  # the array is never empty
        self.results = tuple(
            (shape, NUMPY_DTYPES[dtype]) for shape, (_, dtype) in zip(binding.outputs, results, strict=True)
        )
        self._key = (self.entry, self.symbols, self.results)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and other._key == self._key

    def __repr__(self) -> str:
        return f"entry {self.entry}, symbols {list(self.symbols)}"


@functools.cache
def _handler() -> Any:
    """The handler, registered with XLA."""
    library = handler(jax.ffi.include_dir(), str(jaxlib.version.__version__))
    capsule: Any = jax.ffi.pycapsule
    jax.ffi.register_ffi_target(TARGET, capsule(library.qx_run), platform="cpu")
    return library


# --- arguments and results -------------------------------------------------------------------------------------------


def _read(value: Any, name: str, want: str) -> Any:
    """An array of JAX or of NumPy, or a tracer, of the program's dtype."""
    if isinstance(value, bool | int | float):
        value = interop.read(value, name, want).owner
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ArgumentStructureError(
            f"argument '{name}' must be an array of JAX or NumPy ({want}), not a {type(value).__name__}"
        )
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        jax_arrays.check_readable(value, name)
    jax_arrays.check_width(f"argument '{name}' of the program", want)
    dtype = jax_arrays.type_name(value)
    if dtype != want:
        raise interop.wrong_dtype(name, dtype or str(value.dtype), want)
    return value


def _check_results(results: Sequence[tuple[str, str]]) -> None:
    for name, dtype in results:
        jax_arrays.check_width(f"result '{name}'", dtype)


# --- rules -----------------------------------------------------------------------------------------------------------


def _evaluate(*arrays: Any, registered: Registered, call: _Call) -> Any:
    """Reached under `jax.disable_jit` only."""
    with jax.disable_jit(False):
        return jax.jit(functools.partial(call_p.bind, registered=registered, call=call))(*arrays)


def _shapes(*_avals: Any, registered: Registered, call: _Call) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in call.results]


def _lower(ctx: Any, *operands: Any, registered: Registered, call: _Call) -> Any:
    attributes = {
        "program": ir.StringAttr.get(registered.key),
        "entry": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), call.entry),
        "symbols": ir.DenseI64ArrayAttr.get(list(call.symbols)),
    }
    ctx.module_context.add_keepalive(registered)  # as long as the executable
    return jax.ffi.ffi_lowering(TARGET, backend_config=attributes)(ctx, *operands)


def _lower_elsewhere(ctx: Any, *_operands: Any, **_params: Any) -> Any:
    raise DeviceUnavailableError(
        f"jax.jit lowers this function for {', '.join(ctx.module_context.platforms)}, and the program in it runs on "
        "the CPU: jit it for the CPU, jax.jit(f, device=jax.devices('cpu')[0])"
    )


def _batch(
    arrays: Sequence[Any], axes: Sequence[int | None], *, registered: Registered, call: _Call
) -> tuple[list[Any], list[int]]:
    """One call after another: a program has the sizes it was compiled for."""
    mapped = {number: axis for number, axis in enumerate(axes) if axis is not None}
    moved = [jax.numpy.moveaxis(arrays[number], axis, 0) for number, axis in mapped.items()]

    def one(parts: Sequence[Any]) -> list[Any]:
        given = list(arrays)
        for number, part in zip(mapped, parts, strict=True):
            given[number] = part
        return list(call_p.bind(*given, registered=registered, call=call))

    results = jax.lax.map(one, moved)
    return results, [0] * len(results)


def _differentiate(*_args: Any, **_params: Any) -> Any:
    raise ArgumentError(
        "a compiled program has no derivative, and jax.grad (or jvp, vjp) goes through it: put jax.lax.stop_gradient "
        "around its arguments, or differentiate the model before it is compiled"
    )


call_p.def_impl(_evaluate)
call_p.def_abstract_eval(_shapes)
mlir.register_lowering(call_p, _lower, platform="cpu")
mlir.register_lowering(call_p, _lower_elsewhere)
batching.primitive_batchers[call_p] = _batch
ad.primitive_jvps[call_p] = _differentiate
ad.primitive_transposes[call_p] = _differentiate
