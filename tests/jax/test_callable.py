"""Programs inside of functions of JAX: `qc.jax_callable` under jit, vmap and grad, and what it refuses."""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DeviceUnavailableError,
    MissingDependencyError,
    UnsupportedOperatorError,
)
from qcompiler.plan.dims import dim
from qcompiler.plan.operands import ITEMSIZE

R = np.random.default_rng(0)
W = R.standard_normal((16, 8)).astype(np.float32)
RECIPE = qc.QuantConfig("int8", promise_bits=None)  # small models: scales are a large share
ROWS = R.standard_normal((6, 16)).astype(np.float32)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.fixture(scope="module")
def program() -> qc.Program:
    """Takes 1 to 32 rows of 16 numbers."""
    return qc.qcompile(layer, (W, ROWS[:3]), quant=RECIPE, dynamic_shapes={"x": {0: ("b", 1, 32)}})


@pytest.fixture(scope="module")
def f(program: qc.Program) -> Callable[..., Any]:
    return qc.jax_callable(program)


def test_errors_are_measured_on_arrays_of_jax_too(program: qc.Program) -> None:
    def model(x: Any) -> Any:
        return layer(W, x)

    x = jnp.asarray(ROWS[:3])
    (row,) = program.errors(x, model=model).errors.results
    wanted, found = (np.asarray(f(x), np.float64) for f in (model, program))
    ratio = 10 * np.log10(np.sum(wanted**2) / np.sum((wanted - found) ** 2))
    assert row.model == pytest.approx(ratio, abs=1e-3) and 5 < ratio < 60
    with pytest.raises(qc.QCompilerError, match="model=int: give the float model, a function"):
        program.errors(x, model=3)
    with pytest.raises(qc.QCompilerError, match="argument 'x' has dtype f64"):
        program.errors(np.zeros((3, 16)), model=model)


def test_a_function_that_calls_a_program_is_refused(f: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"calls a compiled program.*that the program was made from"):
        qc.qcompile(lambda w, x: f(x) @ w.T, (W, ROWS[:3]))


def test_a_module_path_has_the_lines_of_the_function(program: qc.Program) -> None:
    lines = program._imported.lines
    (((product, ops),), ((tanh, others),)) = lines.values()
    assert product == tanh and product.startswith(f"{__file__}:") and product.endswith(": return jnp.tanh(x @ w)")
    assert ops == ("stablehlo.dot_general",) and others == ("stablehlo.tanh",)


def test_a_jitted_call_has_the_bits_of_a_call(program: qc.Program, f: Any) -> None:
    jitted = jax.jit(lambda x: (f(x) * 2, f(x=x[:1])))
    for rows in (1, 3, 6):
        x = jnp.asarray(ROWS[:rows])
        whole, first = jitted(x)
        assert np.array_equal(whole, program(ROWS[:rows]) * 2) and np.array_equal(first, program(ROWS[:1]))
        assert np.array_equal(f(x), program(ROWS[:rows])) and np.array_equal(f(ROWS[:rows]), f(x))
    with jax.disable_jit():
        assert np.array_equal(f(ROWS), program(ROWS))


def test_a_jitted_call_runs_no_python(f: Any) -> None:
    jitted, x, calls = jax.jit(f), jnp.asarray(ROWS), []
    jitted(x)
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        jitted(x)
    finally:
        sys.setprofile(None)
    assert calls == []


class Model(nn.Module):
    """Ids and rows in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(self.table(ids) + x), "seen": ids > 3}


@pytest.fixture(scope="module")
def model() -> qc.Program:
    torch.manual_seed(0)
    example = (torch.zeros(6, dtype=torch.int32), torch.zeros(6, 16))
    return qc.qcompile(Model().eval(), example, quant=qc.QuantConfig("nf4", promise_bits=None))


IDS = np.array([1, 10, 0, 4, 4, 7], np.int32)


@pytest.mark.slow
def test_a_model_of_torch_and_a_file_are_functions_of_jax(model: qc.Program, tmp_path: Path) -> None:
    wanted = model(IDS, ROWS)
    model.save(tmp_path / "model.qca")
    for program in (model, model.run, qc.load(tmp_path / "model.qca")):
        found = jax.jit(qc.jax_callable(program))(IDS, x=ROWS)
        assert sorted(found) == ["seen", "y"] and found["seen"].dtype == bool
        assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_what_a_kernel_refuses_is_an_error_with_its_words(model: qc.Program) -> None:
    jitted = jax.jit(qc.jax_callable(model))
    bad = IDS + np.int32(90)
    with pytest.raises(qc.errors.IndexOutOfRangeError) as eager:
        model(bad, ROWS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="outside 0…10") as error:
        jitted(bad, ROWS)
    assert str(eager.value) in str(error.value)
    assert np.array_equal(jitted(IDS, ROWS)["y"], model(IDS, ROWS)["y"])  # the next call is not affected


KINDS = (np.float32, jnp.bfloat16, np.float16, np.int32, np.int16, np.int8, np.uint8, np.bool_)


@pytest.mark.slow
def test_every_type_and_empty_and_scalar_results() -> None:
    values = [(ROWS * 9).astype(kind) for kind in KINDS]

    def copies(*arrays: Any) -> Any:
        return *(array[::-1] for array in arrays), arrays[0][:0], arrays[0][0, 0]

    program = qc.qcompile(lambda a: copies(*a), (tuple(values),))
    given = tuple(jnp.asarray(value) for value in values)
    for found in (jax.jit(qc.jax_callable(program))(given), program(given)):
        for one, wanted in zip(found, copies(*values), strict=True):
            assert isinstance(one, jax.Array) and one.dtype == wanted.dtype and np.array_equal(one, wanted)


def test_vmap_calls_the_program_for_each_element(program: qc.Program, f: Any) -> None:
    x = R.standard_normal((4, 3, 16)).astype(np.float32)
    wanted = np.stack([program(each) for each in x])
    assert np.array_equal(jax.vmap(f)(x), wanted)
    assert np.array_equal(jax.jit(jax.vmap(f, in_axes=1))(x.swapaxes(0, 1)), wanted)
    assert np.array_equal(jax.vmap(jax.vmap(f))(x[None]), wanted[None])
    assert jax.vmap(f)(jnp.zeros((0, 3, 16))).shape == (0, 3, 8)


@pytest.mark.slow
def test_vmap_over_one_of_several_arguments(model: qc.Program) -> None:
    rows = R.standard_normal((2, 6, 16)).astype(np.float32)
    found = jax.vmap(qc.jax_callable(model), in_axes=(None, 0))(IDS, rows)
    assert np.array_equal(found["y"], np.stack([model(IDS, each)["y"] for each in rows]))
    assert found["seen"].shape == (2, 6)


def test_loops_and_branches_may_call_it(program: qc.Program, f: Any) -> None:
    def turns(x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (jnp.tile(f(h), 2), None), x, None, length=3)[0]

    wanted = ROWS
    for _ in range(3):
        wanted = np.tile(program(wanted), 2)
    assert np.array_equal(jax.jit(turns)(ROWS), wanted)
    branch = jax.jit(lambda b, x: jax.lax.cond(b, f, lambda x: x[:, :8], x))
    assert np.array_equal(branch(True, ROWS), program(ROWS)) and np.array_equal(branch(False, ROWS), ROWS[:, :8])


def test_a_derivative_through_it_is_an_error_and_beside_it_is_none(program: qc.Program, f: Any) -> None:
    for through in (jax.grad(lambda x: f(x).sum()), jax.jit(jax.grad(lambda x: jax.jit(f)(x).sum())),
                    lambda x: jax.jvp(f, (x,), (x,)), lambda x: jax.linearize(f, x),
                    jax.grad(lambda x: jax.checkpoint(f)(x).sum())):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"no derivative.*stop_gradient"):
            through(ROWS)
    beside = jax.grad(lambda s, x: (f(x) * s).sum())(2.0, ROWS)
    assert np.allclose(beside, program(ROWS).sum(), rtol=1e-5)
    stopped = jax.jit(jax.grad(lambda x: (f(jax.lax.stop_gradient(x)) + x[:, :8]).sum()))(ROWS)
    assert stopped[:, :8].min() == 1 and stopped[:, 8:].max() == 0


MISFITS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda f: f(jnp.ones((3, 15))), ArgumentShapeError, r"'x' has shape \(3, 15\), expected \(b, 16\)"),
    (lambda f: f(jnp.ones((33, 16))), ArgumentShapeError, r"dimension 0 \(b\) is 33, and b must lie in 1…32"),
    (lambda f: f(jnp.ones(16)), ArgumentShapeError, r"1 dimension instead of 2"),
    (lambda f: f(jnp.ones((3, 16), jnp.int32)), ArgumentDtypeError, r"'x' has dtype i32, the program takes f32"),
    (lambda f: f(np.ones((3, 16))), ArgumentDtypeError, r"'x' has dtype f64, the program takes f32"),
    (lambda f: f(jax.random.key(0)), ArgumentDtypeError, r"'x' has dtype key<fry>"),
    (lambda f: f([jnp.ones((3, 16))]), ArgumentStructureError, r"'x' must be an array of JAX or NumPy"),
    (lambda f: f(torch.ones(3, 16)), ArgumentStructureError, r"not a Tensor"),
    (lambda f: f(), ArgumentStructureError, r"'x' is missing"),
    (lambda f: f(jnp.ones((3, 16)), y=1), ArgumentStructureError, r"unexpected keyword arguments: 'y'"),
]


@pytest.mark.parametrize(("call", "kind", "message"), MISFITS, ids=range(len(MISFITS)))
def test_misfits_are_errors_when_it_is_traced(f: Any, call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(f)
    with pytest.raises(kind, match=message):
        jax.eval_shape(lambda: call(f))  # runs nothing


def test_symbolic_sizes_of_jax_are_refused(f: Any) -> None:
    shape = jax.export.symbolic_shape("n, 16")
    with pytest.raises(ArgumentShapeError, match="'x' has the symbolic shape"):
        jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct(shape, jnp.float32))


def _by_hand(key: str, rows: int = 3, columns: int = 8, entry: int = 0, symbols: tuple[int, ...] = (3,)) -> Any:
    """A call of the handler as anyone may write it: 3 rows in, `rows` by `columns` out."""
    result = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    call = jax.ffi.ffi_call("qcompiler_call", result)
    return call(jnp.asarray(ROWS[:3]), program=key, entry=entry, symbols=np.array(symbols, np.int64))


BY_HAND: list[tuple[dict[str, Any], str]] = [
    ({"symbols": (1 << 19,)}, "size 0 of the call is 524288, and must lie in 1…32"),
    ({"symbols": (-1,)}, "size 0 of the call is -1, and must lie in 1…32"),
    ({"symbols": ()}, "gives 0 sizes to an entry point that has 1"),
    ({"symbols": (3, 3)}, "gives 2 sizes to an entry point that has 1"),
    ({"symbols": (4,)}, "argument 0 of the call has 192 bytes, and its program takes 256"),
    ({"rows": 2}, "result 0 of the call has 64 bytes, and its program takes 96"),
    ({"entry": 1}, "no entry point 1"),
    ({"entry": -1}, "no entry point -1"),
]


@pytest.mark.parametrize(("what", "message"), BY_HAND, ids=range(len(BY_HAND)))
def test_a_call_that_was_written_by_hand_is_checked_when_it_runs(f: Any, what: dict[str, Any], message: str) -> None:
    assert np.array_equal(_by_hand(f.registered.key), f(ROWS[:3]))
    frames = f.registered.free_frames
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*{message}"):
        _by_hand(f.registered.key, **what)
    assert f.registered.free_frames == frames  # what was taken for the call is given back


HALF = jnp.asarray(ROWS[:3], jnp.bfloat16)
OF_EQUAL_WIDTH: list[tuple[Any, Any, str]] = [
    (HALF.astype(jnp.float16), jnp.bfloat16, "argument 0 of the call is f16, and its program takes bf16"),
    (HALF.view(jnp.int16), jnp.bfloat16, "argument 0 of the call is i16, and its program takes bf16"),
    (HALF.view(jnp.uint16), jnp.bfloat16, "argument 0 of the call is XLA's type 7, and its program takes bf16"),
    (HALF, jnp.float16, "result 0 of the call is f16, and its program takes bf16"),
]


@pytest.fixture(scope="module")
def of_halves() -> Any:
    return qc.jax_callable(qc.qcompile(lambda x: x * 2, (HALF,)))


@pytest.mark.parametrize(("x", "kind", "message"), OF_EQUAL_WIDTH, ids=range(len(OF_EQUAL_WIDTH)))
def test_a_buffer_of_another_type_of_equal_width_is_refused(of_halves: Any, x: Any, kind: Any, message: str) -> None:
    def call(kind: Any, x: Any) -> Any:
        made = jax.ffi.ffi_call("qcompiler_call", jax.ShapeDtypeStruct((3, 16), kind))
        return made(x, program=of_halves.registered.key, entry=0, symbols=np.zeros(0, np.int64))

    assert np.array_equal(call(jnp.bfloat16, HALF), HALF * 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT: .*{message}"):
        call(kind, x)


def test_the_handler_knows_every_element_type_of_programs() -> None:
    source = resources.files("qcompiler.runtime").joinpath("xla_handler.cpp").read_text()
    assert sorted(re.findall(r'ffi::DataType::\w+, "(\w+)"\}', source)) == sorted(ITEMSIZE)


def test_no_memory_for_a_call_is_an_error_of_xla(program: qc.Program, f: Any) -> None:
    from qcompiler.runtime import xla_programs

    described, library = xla_programs._described(program.run), f.registered._library
    described.scratch_stride = 1 << 60  # no address space is as large
    handle = library.qx_register(b"huge", ctypes.byref(described))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: the system gives no memory"):
        _by_hand("huge")
    library.qx_unregister(b"huge", handle)


SIZES = ("b", "max(b, 2)", "min(5, b)", "(2*b - 9) // 2 + 5", "(b - 8) % 4", "b*b - 2*b", "b*(b // 2)*(7 % b)")


def test_the_handler_computes_sizes_as_the_plan_does(program: qc.Program, f: Any) -> None:
    from qcompiler.runtime import xla_programs

    described, library, plan = xla_programs._described(program.run), f.registered._library, program.run.plan
    for place, (text, more) in enumerate((text, more) for text in SIZES for more in (0, 1)):
        assert dim(text).evaluate({"b": 3}) == 3
        shape = (f"{text} + {more}", 16)
        entry = msgspec.structs.replace(
            plan.entries[0], inputs=(msgspec.structs.replace(plan.entries[0].inputs[0], shape=shape),)
        )
        code = xla_programs._sizes(entry)
        held = (ctypes.c_int64 * len(code))(*code)
        table = described.held[1]
        table[0].sizes, table[0].operation_count = ctypes.addressof(held), len(code) // 2
        key = f"sizes {place}"
        handle = library.qx_register(key.encode(), ctypes.byref(described))
        if more:
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"argument 0 .* has 192 bytes, .* takes 256"):
                _by_hand(key)
        else:
            assert np.array_equal(_by_hand(key), f(ROWS[:3]))
        library.qx_unregister(key.encode(), handle)


@pytest.mark.slow
def test_results_of_sizes_that_are_computed_and_programs_without_symbols() -> None:
    f = qc.jax_callable(qc.qcompile(Halves().eval(), (torch.ones(6, 4),), dynamic_shapes={"x": {0: ("a", 3, 32)}}))
    for rows in (3, 4, 6):
        half, twice = jax.jit(f)(ROWS[:rows, :4])
        assert np.array_equal(half, ROWS[:rows:2, :4] * 2) and twice.shape == (2 * rows - 1, 4)
    static = qc.jax_callable(qc.qcompile(lambda x: x + 1, (ROWS,)))
    assert np.array_equal(jax.jit(static)(ROWS), ROWS + 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="gives 1 sizes to an entry point that has 0"):
        _by_hand(static.registered.key)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[::2] * 2, torch.cat([x, x[1:]])


@pytest.mark.slow
def test_sixty_four_bits_need_x64() -> None:
    program = qc.qcompile(nn.Embedding(5, 4).eval(), (torch.zeros(3, dtype=torch.int64),))
    f, ids = qc.jax_callable(program), np.array([0, 4, 2])
    with pytest.raises(ArgumentDtypeError, match=r"'input' of the program is int64.*jax_enable_x64"):
        jax.jit(f)(ids)
    with jax.enable_x64(True):
        assert np.array_equal(jax.jit(f)(ids), program(ids))
        assert np.array_equal(program(jnp.asarray(ids)), program(ids))
    argmax = qc.qcompile(Argmax().eval(), (torch.zeros(2, 5),))
    for call in (jax.jit(qc.jax_callable(argmax)), argmax):
        with pytest.raises(ArgumentDtypeError, match=r"result 'out0' is int64"):
            call(jnp.ones((2, 5)))


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(x)
        return self.n * 2


@pytest.mark.slow
def test_what_is_no_function_is_refused(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = qc.qcompile(Counter().eval(), (torch.ones(3),))
    assert counter(jnp.ones(3))[0] == 2 and counter(jnp.ones(3))[0] == 4  # eagerly it has its state
    with pytest.raises(ArgumentError, match=r"has states \(.*an argument and a result"):
        qc.jax_callable(counter)
    with pytest.raises(ArgumentError, match="stepwise"):
        qc.jax_callable(qc.runtime.LoadedProgram.from_image(program.image, stepwise=True))
    with pytest.raises(ArgumentError, match="a session has memory of its own"):
        qc.jax_callable(program.session())
    there = qc.qcompile(lambda x: x + 1, (ROWS,), device="sim:0")
    with pytest.raises(DeviceUnavailableError, match=r"runs on sim:0.*outside of jax\.jit"):
        qc.jax_callable(there)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"qcompiler\[jax\]"):
        qc.jax_callable(program)


@pytest.mark.slow
def test_several_programs_in_one_jit(program: qc.Program, f: Any, model: qc.Program) -> None:
    other = qc.qcompile(layer, (W * 2, ROWS), quant=RECIPE)
    g, h = qc.jax_callable(other), qc.jax_callable(model)
    found = jax.jit(lambda i, x: f(x) + g(x) + h(i, x)["y"] + f(x[::-1]))(IDS, ROWS)
    wanted = program(ROWS) + other(ROWS) + model(IDS, ROWS)["y"] + program(ROWS[::-1])
    assert np.allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_threads_may_call_at_once(program: qc.Program) -> None:
    f = qc.jax_callable(program)
    jitted = jax.jit(lambda x: f(x) + f(x * 2) + f(x * 3))  # XLA may run these at once, too
    inputs = [R.standard_normal((rows, 16)).astype(np.float32) for rows in (1, 3, 6, 31)]
    wanted = [program(x) + program(x * 2) + program(x * 3) for x in inputs]
    wrong: list[Any] = []

    def calls(x: Any, y: Any) -> None:
        for _ in range(40):
            if not np.allclose(jitted(x), y, rtol=1e-5, atol=1e-6):
                wrong.append(x.shape)

    threads = [threading.Thread(target=calls, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and 1 <= f.registered.free_frames <= 12


@pytest.mark.slow
def test_a_program_lives_as_long_as_what_was_compiled_with_it() -> None:
    program = qc.qcompile(layer, (W, ROWS), quant=RECIPE)
    wanted, loaded = program(ROWS), weakref.ref(program.run)
    jitted, compiled = _two_functions(qc.jax_callable(program))
    jitted(ROWS)
    del program
    gc.collect()
    assert np.array_equal(jitted(ROWS), wanted)
    del jitted
    jax.clear_caches()
    gc.collect()
    assert np.array_equal(compiled(ROWS), wanted) and loaded() is not None
    del compiled
    jax.clear_caches()
    gc.collect()
    assert loaded() is None


def _two_functions(f: Callable[..., Any]) -> tuple[Any, Any]:
    return jax.jit(lambda x: f(x) + 0), jax.jit(lambda x: f(x) + 0).lower(ROWS).compile()


# --- arrays of JAX, eagerly ------------------------------------------------------------------------------------------


def test_arrays_of_jax_are_used_in_place(program: qc.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    from qcompiler.runtime import interop, jax_arrays

    read, made = [], []
    monkeypatch.setattr(interop, "_read_dlpack", _recorded(interop._read_dlpack, read, lambda source: source.address))
    monkeypatch.setattr(jax_arrays, "new", _recorded(jax_arrays.new, made, lambda pair: pair[1]))
    x = jnp.asarray(ROWS)
    y = program(x)
    assert isinstance(y, jax.Array) and np.array_equal(y, program(ROWS))
    assert (read, made) == ([x.unsafe_buffer_pointer()], [y.unsafe_buffer_pointer()])


def _recorded(function: Any, into: list[Any], what: Any) -> Any:
    def call(*args: Any) -> Any:
        result = function(*args)
        into.append(what(result))
        return result

    return call


@pytest.mark.slow
def test_results_are_arrays_of_jax_if_an_argument_is(model: qc.Program) -> None:
    assert isinstance(model(jnp.asarray(IDS), ROWS)["y"], jax.Array)
    assert isinstance(model(IDS, ROWS)["y"], np.ndarray)
    assert isinstance(model(torch.tensor(IDS), jnp.asarray(ROWS))["y"], torch.Tensor)


def test_results_are_read_while_they_are_computed(program: qc.Program) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, a: jnp.sin(a @ a.T @ a), x))(jnp.ones((300, 16)))
    assert np.array_equal(program(slow[:6]), program(np.asarray(slow[:6])))


def test_arrays_that_cannot_be_read_are_refused(program: qc.Program, f: Any) -> None:
    with pytest.raises(ArgumentStructureError, match=r"'x' is traced by JAX.*qc\.jax_callable\(prog\)"):
        jax.jit(program)(ROWS)
    with pytest.raises(ArgumentDtypeError, match=r"'x' has dtype i32, the program takes f32"):
        program(jnp.ones((3, 16), jnp.int32))
    with pytest.raises(ArgumentDtypeError, match=r"'x' has dtype key<fry>"):
        program(jax.random.key(0))
    with pytest.raises(ArgumentStructureError, match="arrays of JAX are never written to"):
        program(ROWS, out=jnp.ones((6, 8)))
    gone = jnp.asarray(ROWS)
    gone.delete()
    for call in (program, f):
        with pytest.raises(ArgumentError, match="'x' is an array of JAX that was deleted"):
            call(gone)


def test_memory_that_no_consumer_takes_is_freed() -> None:
    from qcompiler.runtime.dlpack import HostTensor

    tensor = HostTensor((3, 4), "bf16")
    assert tensor.address % 64 == 0 and tensor.__dlpack_device__() == (1, 0)
    capsule = tensor.__dlpack__()
    with pytest.raises(BufferError):
        tensor.__dlpack__()
    del tensor, capsule
    for _ in range(2000):  # 8 GB if it leaked
        HostTensor((1024, 1024), "f32")


# --- other processes -------------------------------------------------------------------------------------------------


def _python(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_file_in_jit_needs_neither_torch_nor_xdsl_and_results_outlive_python(
    program: qc.Program, tmp_path: Path
) -> None:
    program.save(tmp_path / "layer.qca")
    wanted = float(program(np.ones((2, 16), np.float32)).sum())
    code = (
        "import sys; sys.modules['torch'] = sys.modules['xdsl'] = None\n"
        "import jax, jax.numpy as jnp, qcompiler as qc\n"
        f"prog = qc.load({str(tmp_path / 'layer.qca')!r})\n"
        "f = jax.jit(qc.jax_callable(prog)); x = jnp.ones((2, 16)); kept = prog(x), f(x), jnp.sin(prog(x))\n"
        "print(float(f(x).sum()), float(kept[0].sum()))\n"
    )
    assert [float(text) for text in _python(code).split()] == pytest.approx([wanted, wanted], rel=1e-6)


@pytest.mark.slow
def test_an_executable_of_jaxs_disk_cache_finds_its_program_in_another_process(
    program: qc.Program, tmp_path: Path
) -> None:
    program.save(tmp_path / "layer.qca")
    other = qc.qcompile(layer, (W * 3, ROWS[:3]), quant=RECIPE, dynamic_shapes={"x": {0: ("b", 1, 32)}})
    other.save(tmp_path / "other.qca")
    code = (
        "import jax, sys, os, qcompiler as qc, jax.numpy as jnp\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)\n"
        "hits = []; jax.monitoring.register_event_listener(lambda name, **k: hits.append(name))\n"
        "f = qc.jax_callable(qc.load(os.environ['QCA'])); y = jax.jit(f)(jnp.ones((2, 16)))\n"
        "print(y[0, 0], sum('cache_hits' in name for name in hits))\n"
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    first, again, second = (
        _python(code, QCA=str(tmp_path / f"{name}.qca"), **cache).split() for name in ("layer", "layer", "other")
    )
    assert first[0] == again[0] != second[0]
    assert int(again[1]) > int(first[1])
