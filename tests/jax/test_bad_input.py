"""What cannot be compiled: each error names the user's line, and what to write instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, pallas

import qcompiler as qc
from qcompiler.errors import (
    ArgumentError,
    ArgumentStructureError,
    DataDependentShapeError,
    ExportError,
    QCompilerError,
    RecipeError,
    UnsupportedOperatorError,
)
from qcompiler.frontends.jax.frontend import import_jax

P = {"w": jnp.ones((4, 4))}
X = np.ones((3, 4), np.float32)


def branches(p: Any, x: Any) -> Any:
    if x.sum() > 0:
        return x
    return x @ p["w"]


def picks(p: Any, x: Any) -> Any:
    return x[x > 0]


def counts(p: Any, x: Any) -> Any:
    return jnp.zeros(int(x[0, 0]))


def prints(p: Any, x: Any) -> Any:
    jax.debug.print("x = {}", x)
    return x


def calls_back(p: Any, x: Any) -> Any:
    return x + jax.jit(lambda v: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(v.shape, v.dtype), v))(x)


def checks(p: Any, x: Any) -> Any:
    checkify.check(jnp.all(x > 0), "negative")
    return x


def sizes(p: Any, x: Any) -> Any:
    return jnp.nonzero(x)


def narrows(p: Any, x: Any) -> Any:
    return x.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def waves(p: Any, x: Any) -> Any:
    return jnp.exp(1j * x).real


def returns_a_text(p: Any, x: Any) -> Any:
    return {"y": (x, "text")}


def returns_a_key(p: Any, x: Any) -> Any:
    return jax.random.key(0)


def calls_numpy(p: Any, x: Any) -> Any:
    return np.sin(x)


def loops(p: Any, x: Any) -> Any:
    return lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x)


def loops_long(p: Any, x: Any) -> Any:
    return lax.fori_loop(0, 10000, lambda i, v: v * 0.5, x)


def solves(p: Any, x: Any) -> Any:
    return jnp.linalg.cholesky(p["w"] + jnp.eye(4)) @ x.T


def complexes(p: Any, x: Any) -> Any:
    return jnp.abs(jnp.fft.fft(x))


def calls_a_library(p: Any, x: Any) -> Any:
    return jax.ffi.ffi_call("nobody", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def has_a_kernel(p: Any, x: Any) -> Any:
    return pallas.pallas_call(lambda x, y: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def returns_a_set(p: Any, x: Any) -> Any:
    return {"a", "b"}


CASES: list[tuple[Callable[..., Any], type[QCompilerError], str]] = [
    (branches, ExportError, r"test_bad_input\.py:\d+ in branches.*jnp\.where"),
    (picks, DataDependentShapeError, r"test_bad_input\.py:\d+ in picks.*jnp\.where"),
    (counts, DataDependentShapeError, r"in counts.*Python numbers"),
    (calls_numpy, ExportError, r"in calls_numpy.*jax\.numpy"),
    (prints, UnsupportedOperatorError, r"calls back into Python \(debug_print\) \(.*: jax\.debug\.print\("),
    (calls_back, UnsupportedOperatorError, r"\(pure_callback\) \(.*test_bad_input\.py:\d+: return x \+ jax\.jit"),
    (checks, ExportError, r"test_bad_input\.py:\d+: checkify\.check.*take the check out"),
    (sizes, DataDependentShapeError, r"in sizes.*jnp\.nonzero.*size=8"),
    (
        narrows,
        UnsupportedOperatorError,
        r"result of stablehlo\.convert has the element type f8E4M3FN \(.*: return x\.as",
    ),
    (waves, UnsupportedOperatorError, r"complex<f32> \(.*: return jnp\.exp\(1j"),
    (loops, UnsupportedOperatorError, r"number of trips.*test_bad_input\.py:\d+"),
    (loops_long, UnsupportedOperatorError, r"more than 512 trips.*test_bad_input\.py:\d+"),
    (solves, UnsupportedOperatorError, r"test_bad_input\.py:\d+"),
    (complexes, UnsupportedOperatorError, r"complex<f32>|stablehlo\.fft"),
    (calls_a_library, UnsupportedOperatorError, r"custom call 'nobody' has no lowering \(.*: return jax\.ffi"),
    (has_a_kernel, UnsupportedOperatorError, r"kernel of Pallas \(.*: return pallas\..*interpret=True"),
    (returns_a_set, ArgumentStructureError, r"'returns_a_set' returns a set, which"),
    (returns_a_text, ArgumentStructureError, r"returns a str at \['y'\]\[1\]"),
    (returns_a_key, ArgumentStructureError, r"returns a typed key.*key_data"),
]


@pytest.mark.parametrize(("function", "kind", "message"), CASES, ids=[c[0].__name__ for c in CASES])
def test_the_error_names_the_line(function: Any, kind: type[QCompilerError], message: str) -> None:
    with pytest.raises(kind, match=message):
        qc.qcompile(function, (P, X))


def test_wrong_arguments_name_the_function() -> None:
    with pytest.raises(ExportError, match="branches"):
        qc.qcompile(branches, (P, X, X))
    with pytest.raises(ArgumentStructureError, match=r"\(x,\): a tuple"):
        qc.qcompile(branches, X)


def test_sixty_four_bits_are_not_cut_in_silence() -> None:
    with pytest.raises(ArgumentError, match=r"'x' is float64.*jax_enable_x64"):
        qc.qcompile(lambda p, x: x @ p["w"], (P, X.astype(np.float64)))


@pytest.mark.slow
def test_a_function_takes_no_tensors_of_torch() -> None:
    import torch

    with pytest.raises(ExportError, match=r"'prints' is a function.*tensors of torch.*tensor\.numpy\(\)"):
        qc.qcompile(prints, (P, torch.ones(3, 4)))


def test_keys_of_random_numbers_are_made_inside(check: Any) -> None:
    with pytest.raises(ArgumentError, match=r"jax\.random\.key\(seed\).*key_data\(key\)\.view\(jnp\.int32\)"):
        qc.qcompile(lambda p, k: jax.random.normal(k, (3,)), (P, jax.random.key(0)))
    words = jax.random.key_data(jax.random.key(0)).view(jnp.int32)  # as the message says
    check(lambda p, k: jax.random.bits(jax.random.wrap_key_data(k.view(jnp.uint32)), (3,)).view(jnp.int32), P, words)


def test_keys_of_a_dict_have_an_order() -> None:
    with pytest.raises(ArgumentStructureError, match="a number beside a text"):
        qc.qcompile(lambda p, d: d[1], (P, {1: X, "2": X}))


def test_a_symbol_needs_an_upper_bound() -> None:
    (size,) = jax.export.symbolic_shape("n")
    with pytest.raises(ExportError, match=r"dynamic_shapes=\{'n': \(1, 64\)\}"):
        qc.qcompile(lambda p, x: x @ p["w"], (P, jax.ShapeDtypeStruct((size, 4), jnp.float32)))
    with pytest.raises(ArgumentError, match="the arguments are x"):
        qc.qcompile(lambda p, x: x @ p["w"], (P, X), dynamic_shapes={"y": {0: ("b", 1, 4)}})


@pytest.mark.parametrize(("shapes", "message"), [
    ({"x": {0: "b"}}, r"\('b', 1, 64\)"), ("b", "write a dict"), ({"x": {-1: ("b", 1, 4)}}, "dimensions 0 to 1"),
    ({"x": {2: ("b", 1, 4)}}, "dimensions 0 to 1"), ({"x": {0: ("b", 4, 1)}}, "1 <= low <= high"),
    ({"c": (1, 4)}, "no argument has"), ({"x": {0: ("b", 1, 4)}, "b": (1, 8)}, "one symbol has one range"),
    ({"x": {0: ("b", 1, 4), 1: ("b", 1, 5)}}, "one symbol has one range"),
])  # fmt: skip
def test_malformed_sizes_are_not_ignored(shapes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        import_jax(lambda p, x: x * 2, (P, X), None, None, shapes)


@pytest.mark.parametrize("kind", [jnp.complex64, jnp.float8_e4m3fn, jnp.int4])
def test_constants_of_other_types_name_the_line(kind: Any) -> None:
    table = jnp.ones((3, 4), jnp.float32).at[0, 0].set(2).astype(kind)
    with pytest.raises(UnsupportedOperatorError, match=r"test_bad_input\.py:\d+.*float32 or int32"):
        import_jax(lambda p, x: x * jnp.real(table * table).astype(jnp.float32), (P, X))


def test_donated_arguments_are_noted() -> None:
    step = jax.jit(lambda p, x: x @ p["w"], donate_argnums=1)
    assert [what for what, _ in import_jax(step, (P, X)).notes] == ["the donated argument 'x' stays an input"]
    assert [what for what, _ in import_jax(step, (P, X), donated=1).notes] == ["the donated argument 'x' is a state"]
    assert import_jax(jax.jit(lambda p, x: x @ p["w"]), (P, X)).notes == []


def test_a_function_without_arguments_is_told_what_to_write() -> None:
    with pytest.raises(ArgumentStructureError, match=r"qcompile\(branches, \(params, x\)\)"):
        qc.qcompile(branches, ())


def test_what_only_torch_has_is_refused() -> None:
    for options, kind in (
        ({"weights": "folder"}, ArgumentError),
        ({"fallback": "torch"}, ArgumentError),
        ({"quant": qc.QuantConfig("int8", smooth=0.5, promise_bits=None)}, RecipeError),
    ):  # fmt: skip
        with pytest.raises(kind):
            qc.qcompile(lambda p, x: x @ p["w"], (P, X), **options)


def test_without_jax_the_message_has_the_command() -> None:
    code = (
        "import importlib.util as u, sys, numpy as np, qcompiler as qc\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'jax' else found(name, *a)\n"
        "sys.modules['torch'] = None\n"
        "try: qc.qcompile(lambda p, x: x, ())\n"
        "except qc.errors.ArgumentStructureError as error: assert '(params, x)' in str(error)\n"
        "else: raise SystemExit('no error')\n"
        "try: qc.qcompile(lambda p, x: x, (np.ones(2), np.ones(2)))\n"
        "except qc.errors.MissingDependencyError as error: assert \"pip install 'qcompiler[jax]'\" in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_loads_no_jax() -> None:
    code = "import sys, qcompiler as qc, qcompiler.api; assert 'jax' not in sys.modules, 'jax'"
    subprocess.run([sys.executable, "-c", code], check=True)
