"""A program as a function of JAX: for `jax.jit` on the CPU, checked when it is traced."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from qcompiler.errors import ArgumentError, DeviceUnavailableError, MissingDependencyError
from qcompiler.plan.plan import calls_torch
from qcompiler.runtime.loaded import LoadedProgram


class HasRun(Protocol):
    """A `Program`."""

    @property
    def run(self) -> LoadedProgram: ...


def jax_callable(program: LoadedProgram | HasRun) -> Callable[..., Any]:
    """The program as a function of arrays of JAX: under `jax.jit`, and called as it is.

        f = qc.jax_callable(prog)
        step = jax.jit(lambda x: jnp.tanh(f(x)))

    Arguments and results are those of the program: the structure with which it was compiled, its dtypes, its sizes.
    They are checked when the function is traced.  XLA then calls the compiled entry point through `jax.ffi`, with its
    own buffers and without Python; several threads may call at once.  `jax.vmap` calls it once for each element, in
    turn.  It has no derivative.

    The program may be of any frontend, or of a file (`qc.load`).  It must run on the CPU, have no states, and call no
    operators of torch.  It lives as long as a function compiled with it.

    Errors: MissingDependencyError without JAX; DeviceUnavailableError for a program on another device; ArgumentError
    for one with states, torch calls or `stepwise=True`.  When traced: ArgumentStructureError, ArgumentDtypeError and
    ArgumentShapeError name the argument.  What a kernel reports at run time, an index outside of its table, is a
    `jax.errors.JaxRuntimeError` with the same text as a call of the program.
    """
    if importlib.util.find_spec("jax") is None:
        raise MissingDependencyError("jax_callable needs JAX, which is not installed: pip install 'qcompiler[jax]'")
    loaded = program if isinstance(program, LoadedProgram) else getattr(program, "run", None)
    if not isinstance(loaded, LoadedProgram):
        raise ArgumentError(
            f"jax_callable takes a program (of qc.qcompile or qc.load), not a {type(program).__name__}; a session has "
            "memory of its own, which a function for jax.jit cannot have"
        )
    _check(loaded)
    from qcompiler.runtime.jax_primitive import JaxCallable

    return JaxCallable(loaded)


def _check(program: LoadedProgram) -> None:
    if program.kind != "cpu":
        raise DeviceUnavailableError(
            f"the program runs on {program.device}, and jax.jit calls programs on the CPU only: call it outside of "
            "jax.jit, prog(x), or compile it with device='cpu'"
        )
    if states := [arena.name for arena in program.plan.arenas if arena.kind == "state"]:
        raise ArgumentError(
            f"the program has states ({', '.join(states[:3])}{', …' if len(states) > 3 else ''}), and a function for "
            "jax.jit remembers nothing between calls: call the program outside of jax.jit, or compile it with the "
            "cache as an argument and a result (for functions of JAX: without donate_argnums)"
        )
    if any(calls_torch(entry) for entry in program.plan.entries):
        raise ArgumentError(
            "the program calls operators of torch (fallback='torch'), which XLA's threads cannot: call it outside of "
            "jax.jit, or compile it without fallback"
        )
    if program.stepwise:
        raise ArgumentError("the program was loaded with stepwise=True: Python runs its steps; load it without")
