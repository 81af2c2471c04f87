"""Inputs for a module of which only the IR is known: for `qc opt --verify-each numerics` and `qc reduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import Attribute

from qcompiler.errors import InterpreterError, QCompilerError
from qcompiler.ir.interpreter import bind_symbols
from qcompiler.ir.module import entry_funcs, ranges_of
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.checks.answers import initial_states, is_scheduled
from qcompiler.passes.checks.reproducer import Samples
from qcompiler.plan.dims import dim
from qcompiler.plan.weights import NUMPY_DTYPES

SIZE = 3
"""The size of a dynamic dimension, as far as its range allows: no power of two, and small."""


def samples_for(module: ModuleOp, recorded: Samples | None = None) -> Samples:
    """The recorded samples where they still fit the first entry point, else random ones from a fixed seed.

    Floats are normal; integers are zeros and ones, since most are indices, and a table may have no more rows. States
    that were not recorded start as zeros. QCompilerError for a schedule, whose inputs are not tensors.
    """
    if is_scheduled(module):
        if recorded is None:
            raise QCompilerError("a schedule holds no types of inputs: numerics can be checked up to lower-to-rt only")
        return recorded
    functions = entry_funcs(module)
    if not functions:
        raise QCompilerError("the module has no entry point, so there is nothing to run")
    states = initial_states(module)
    if recorded is not None:
        kept = {key: value for key, value in recorded.states.items() if key in states}
        states = {key: kept[key] if _alike(kept.get(key), value) else value for key, value in states.items()}
        try:
            bind_symbols(functions[0], recorded.inputs)
            return Samples(recorded.inputs, states)
        except InterpreterError:
            pass  # the module takes other inputs than those recorded: it was reduced
    sizes = {name: min(max(SIZE, low), high) for name, (low, high) in ranges_of(functions[0]).items()}
    generator = np.random.default_rng(0)
    types = [argument.type for argument in functions[0].body.block.args]
    return Samples(tuple(_random(each, sizes, generator) for each in types), states)


def _alike(value: npt.NDArray[Any] | None, other: npt.NDArray[Any]) -> bool:
    return value is not None and (value.shape, value.dtype) == (other.shape, other.dtype)


def _random(kind: Attribute, sizes: Mapping[str, int], generator: np.random.Generator) -> npt.NDArray[Any]:
    if not isinstance(kind, TensorType):
        raise QCompilerError(f"an entry point takes a {kind.name}, for which there are no random values")
    shape: Sequence[int] = [dim(size).evaluate(sizes) for size in shape_of(kind)]
    dtype = NUMPY_DTYPES[tensor_dtype(kind)]
    values = generator.standard_normal(shape)
    return (values if tensor_dtype(kind) in ("f64", "f32", "f16", "bf16") else values > 0).astype(dtype)


__all__ = ["samples_for"]
