"""What JAX refuses to trace, as errors of this package that name the user's line and the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from qcompiler.errors import (
    ArgumentStructureError,
    DataDependentShapeError,
    ExportError,
    NarrowedDimError,
    QCompilerError,
    UnsupportedOperatorError,
)
from qcompiler.frontends.jax.graph import user_line
from qcompiler.frontends.jax.reader import calls_back, custom_call

_JAX = str(Path(jax.__file__).parent)
_HERE = str(Path(__file__).parent)

_REASONS: list[tuple[type[BaseException], type[QCompilerError], str]] = [
    (
        jax.errors.NonConcreteBooleanIndexError, DataDependentShapeError,
        "the shape of a result depends on values (x[mask], jnp.nonzero, jnp.unique). Keep the shape and choose with "
        "jnp.where, or give the size (jnp.nonzero(x, size=8))",
    ),
    (
        jax.errors.TracerBoolConversionError, ExportError,
        "Python's if, while, and, or and not see a traced value. Choose with jnp.where, lax.cond or lax.select",
    ),
    (
        jax.errors.TracerIntegerConversionError, ExportError,
        "Python uses a traced value as an index or a length. Use jnp.take, lax.dynamic_slice, or pass the number as a "
        "Python int",
    ),
    (
        jax.errors.TracerArrayConversionError, ExportError,
        "NumPy was called on a traced array. Use jax.numpy",
    ),
    (
        jax.errors.ConcretizationTypeError, DataDependentShapeError,
        "Python needs the value of a traced array: for a size, a shape or float(x). Sizes must be Python numbers; "
        "jnp.nonzero, jnp.where(x) and jnp.unique take one (size=8)",
    ),
    (
        jax.errors.UnexpectedTracerError, ExportError,
        "a traced value left the function through a side effect (a global, a list, an attribute). Return it instead",
    ),
]  # fmt: skip


_UNSTABLE = re.compile(r"no compatibility guarantees.*?stablehlo\.custom_call @\"?([^\s\"(]+)", re.DOTALL)
"""jax.export's own error for a custom call that it does not know: the text has the op with its location."""


def refused(error: Exception, function: Any) -> QCompilerError:
    """The error to raise for one that came out of the trace of `function`."""
    if isinstance(error, QCompilerError):
        return error
    where = _line(error)
    name = getattr(function, "__name__", type(function).__name__)
    for kind, made, why in _REASONS:
        if isinstance(error, kind):
            return made(f"the function '{name}' cannot be jitted{where}: {why}")
    first = str(error).strip().partition("\n")[0]
    if target := _UNSTABLE.search(str(error)):
        source = user_line(str(error))[1]
        return custom_call(target[1], f" ({source})" if source else "")
    if "host_callbacks" in str(error):  # what keeps the program of qc.jax_callable alive
        return UnsupportedOperatorError(
            f"the function '{name}' calls a compiled program, which StableHLO does not hold: compile the function that "
            "the program was made from"
        )
    if "symbolic dimension" in str(error) or "InconclusiveDimension" in type(error).__name__:
        return NarrowedDimError(
            f"the function '{name}' needs to know a symbolic size{where}: {first}. Give the size as a number, add a "
            "constraint (jax.export.symbolic_shape(…, constraints=…)), or write the line for any size"
        )
    return ExportError(f"the function '{name}' cannot be exported{where}: {type(error).__name__}: {first}")


def check_results(named: Iterable[tuple[str, Any]], function: Any) -> None:
    """ArgumentStructureError for a result that is no array of numbers, with its path."""
    for path, leaf in named:
        name, where = getattr(function, "__name__", type(function).__name__), f" at {path}" if path else ""
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ArgumentStructureError(
                f"the function '{name}' returns a {type(leaf).__name__}{where}, which is no array: return arrays and "
                "numbers, in tuples, lists, dicts and namedtuples"
            )
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ArgumentStructureError(
                f"the function '{name}' returns a typed key of random numbers{where}, which a program cannot: return "
                "jax.random.key_data(key).view(jnp.int32)"
            )


def check_effects(jaxpr: Any) -> None:
    """UnsupportedOperatorError for a call into Python and for a kernel of Pallas, ExportError for a check that is left,
    with the line."""
    for eqn in _equations(jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            raise calls_back(name, place(eqn))
        if name == "pallas_call" and not eqn.params.get("interpret"):
            raise UnsupportedOperatorError(
                f"the function has a kernel of Pallas{place(eqn)}, which XLA compiles for its own devices: write it "
                "with jax.numpy, or pass interpret=True to pallas_call, which makes it operators of StableHLO"
            )
        if name == "check":
            raise ExportError(
                f"the function has a checkify.check{place(eqn)}: wrap it in checkify.checkify, or take the check out"
            )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of the jaxprs inside of it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def place(eqn: Any) -> str:
    """` (/path/model.py:12: y = …)` of an equation, empty where no line of the user's made it."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    source = user_line(" ".join(f'"{frame.file_name}":{frame.line_num}' for frame in frames))[1]
    return f" ({source})" if source else ""


def _line(error: BaseException) -> str:
    """` (model.py:12 in f: y = …)`: the innermost line outside JAX and this frontend."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_JAX, _HERE, "<"))]
    own = [f for f in own if "/qcompiler/" not in f.filename and "/contextlib.py" not in f.filename]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line})" if own else ""
