"""Arrays of JAX as arguments and results, by DLPack. JAX is never imported here: a caller with its arrays has it.

A result is memory that `free` frees, with the header of DLPack in front of it.  So JAX can drop it at any time and on
any thread, also when Python has ended.  It begins at a multiple of 64 bytes, else JAX would copy it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from qcompiler.errors import ArgumentDtypeError, ArgumentError, ArgumentStructureError
from qcompiler.plan.weights import DTYPE_NAMES, NUMPY_DTYPES
from qcompiler.runtime import dlpack

WIDE = ("i64", "f64")
"""Types that JAX has with x64 only."""

X64 = 'begin with jax.config.update("jax_enable_x64", True), or compile a model that takes and returns 32 bits'


def is_jax_array(value: Any) -> bool:
    """Whether `value` is an array of JAX, or a tracer of one."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, getattr(jax, "Array", ()))


def check_readable(value: Any, name: str) -> None:
    """ArgumentError for a tracer, an array that was donated, and one in pieces on several devices."""
    jax = sys.modules["jax"]
    if isinstance(value, jax.core.Tracer):
        raise ArgumentStructureError(
            f"argument '{name}' is traced by JAX (jit, vmap or grad), and a program takes arrays with values: call "
            "f = qc.jax_callable(prog) there instead, made once outside of the traced function"
        )
    if value.is_deleted():
        raise ArgumentError(f"argument '{name}' is an array of JAX that was deleted, or donated to another function")
    if len(value.sharding.device_set) > 1:
        raise ArgumentStructureError(
            f"argument '{name}' is an array of JAX over {len(value.sharding.device_set)} devices; "
            "put it on one, jax.device_put(x, jax.devices()[0])"
        )


def type_name(value: Any) -> str | None:
    """Our name of the dtype of an array of JAX; None for one that programs do not have (keys, int4, complex)."""
    try:
        return DTYPE_NAMES.get(value.dtype)
    except TypeError:  # a dtype of JAX's own, which NumPy cannot compare
        return None


def check_width(what: str, dtype: str) -> None:
    """ArgumentDtypeError for 64 bits where JAX has 32: it would convert without a word."""
    if dtype in WIDE and not sys.modules["jax"].config.jax_enable_x64:
        raise ArgumentDtypeError(f"{what} is {NUMPY_DTYPES[dtype].name}, and JAX runs without x64: {X64}")


def new(shape: tuple[int, ...], dtype: str, name: str) -> tuple[dlpack.HostTensor, int]:
    """Memory for a result on the host, and its address. OutOfMemoryError; ArgumentDtypeError, see `check_width`."""
    check_width(f"result '{name}'", dtype)
    made = dlpack.HostTensor(shape, dtype)
    return made, made.address


def handed_over(results: Sequence[Any]) -> list[Any]:
    """The results as arrays of JAX, in the same memory: those of `new`, and arrays on a CUDA device."""
    take = sys.modules["jax"].dlpack.from_dlpack
    return [take(result) for result in results]
