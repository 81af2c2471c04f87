"""The rt interpreter: kernels mean what their regions mean, memory is poisoned, arenas are shared as planned."""

from __future__ import annotations

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from qcompiler import formats
from qcompiler.errors import InterpreterError
from qcompiler.ir import qc, rt
from qcompiler.ir.rt_interpreter import RtInterpreter, run_rt
from qcompiler.ir.types import QTensorType, tensor
from qcompiler.plan.dims import contiguous_strides
from qcompiler.plan.kernel import FormatRef, Operand
from qcompiler.plan.plan import SelectCase, Symbol, TensorSig, View
from qcompiler.plan.weights import NUMPY_DTYPES, StoredTensor, WeightStore


def view(buffer, shape=("s", 4), strides=None, offset=0, dtype="f32", **storage):
    strides = contiguous_strides(shape) if strides is None else strides
    return View(buffer=buffer, dtype=dtype, shape=shape, strides=strides, offset=offset, **storage)


def operand(name, access, like):
    return Operand(
        name=name, dtype=like.dtype, access=access, shape=like.shape, strides=like.strides, format=like.format,
        layout=like.layout,
    )  # fmt: skip


def kernel(name, operands, build, types=None):
    """A kernel whose region is what `build(*block arguments)` makes."""
    types = types or [tensor(o.shape, o.dtype) for o in operands]
    block = Block(arg_types=types)
    made: Operation = build(*block.args)
    block.add_ops([made, rt.YieldOp(*made.results)])
    return rt.KernelOp(name, ["s"], operands, Region(block))


def softmax(x: SSAValue, out: SSAValue) -> Operation:
    return qc.SoftmaxOp(x, out.type, axis=1)


def module(steps, kernels=(), buffers=(), arenas=(), shape=("s", 4)):
    sig = [TensorSig(name=n, arena=n, dtype="f32", shape=shape) for n in "xy"]
    return ModuleOp(
        [
            rt.DeviceOp("d", "cuda"),
            *(rt.ArenaOp(n, "d", "output" if n == "y" else "input", 256, "main") for n in "xy"),
            rt.ArenaOp("act", "d", "activations", 1024, "main"),
            *arenas,
            *(rt.BufferOp(n, n, 256) for n in "xy"),
            *buffers,
            *kernels,
            rt.EntryOp("main", [Symbol(name="s", min=1, max=16)], sig[:-1], sig[-1:], steps),
        ]
    )


SOFTMAX = kernel("softmax", [operand("x", "r", view("")), operand("out", "w", view(""))], softmax)


def reference(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def test_launch_and_copy_run_in_order(x):
    steps = [
        rt.CopyOp(view("x"), view("a"), "copy"),
        rt.RecordOp("e", "copy"),
        rt.WaitOp("e", "compute"),
        rt.LaunchOp("softmax", [view("a"), view("y")], "compute"),
    ]
    made = module(steps, [SOFTMAX.clone()], [rt.BufferOp("a", "act", 256)])
    (y,) = run_rt(made, WeightStore(), [x])
    np.testing.assert_allclose(y, reference(x), rtol=1e-6)


def test_results_are_the_callers_own(x):
    interpreter = RtInterpreter(
        module([rt.LaunchOp("softmax", [view("x"), view("y")])], [SOFTMAX.clone()]), WeightStore()
    )
    (first,) = interpreter.run([x])
    kept = first.copy()
    interpreter.run([x + 1 * np.arange(4, dtype=np.float32)])
    np.testing.assert_array_equal(first, kept)


def test_unwritten_memory_reads_as_nan(x):
    made = module([rt.CopyOp(view("a"), view("y"))], [], [rt.BufferOp("a", "act", 256)])
    assert np.isnan(run_rt(made, WeightStore(), [x])[0]).all()


def test_memory_of_the_last_call_is_gone(x):
    """The first call writes three rows of @a, the second reads row 2 after writing one."""
    one = View(buffer="a", dtype="f32", shape=(1, 4), strides=(4, 1), offset=8)
    steps = [rt.CopyOp(view("x"), view("a")), rt.CopyOp(view("a"), view("y")), rt.CopyOp(one, view("y", (1, 4)))]
    interpreter = RtInterpreter(module(steps, [], [rt.BufferOp("a", "act", 256, 0)]), WeightStore())
    np.testing.assert_array_equal(interpreter.run([x])[0][0], x[2])
    assert np.isnan(interpreter.run([x[:1]])[0]).all()


def test_a_wrong_offset_shows_in_the_answer(x):
    def run(offset):
        steps = [
            rt.CopyOp(view("x"), view("a")),
            rt.LaunchOp("softmax", [view("x"), view("b")]),
            rt.CopyOp(view("a"), view("y")),
        ]
        made = module(steps, [SOFTMAX.clone()], [rt.BufferOp("a", "act", 256, 0), rt.BufferOp("b", "act", 256, offset)])
        return run_rt(made, WeightStore(), [x])[0]

    np.testing.assert_array_equal(run(256), x)
    assert not np.array_equal(run(0), x)


def test_views_are_strided_and_offset(x):
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    turned = view("x", (4, 4), (1, 4))
    spec = kernel("softmax", [operand("x", "r", turned), operand("out", "w", view("", (4, 4)))], softmax)
    made = module([rt.LaunchOp("softmax", [turned, view("y", (4, 4))])], [spec], shape=("s", 4))
    np.testing.assert_allclose(run_rt(made, WeightStore(), [square])[0], reference(square.T), rtol=1e-6)


def test_select_takes_the_first_case_that_fits(x):
    def shifted(name, axis):
        ops = [operand("x", "r", view("")), operand("out", "w", view(""))]
        return kernel(name, ops, lambda a, out: qc.CumsumOp(a, out.type, axis=axis))

    select = rt.SelectOp(
        "s", [SelectCase(max=1, kernel="rows"), SelectCase(max=None, kernel="cols")], [view("x"), view("y")]
    )
    made = module([select], [shifted("rows", 0), shifted("cols", 1)])
    interpreter = RtInterpreter(made, WeightStore())
    np.testing.assert_allclose(interpreter.run([x[:1]])[0], x[:1])
    np.testing.assert_allclose(interpreter.run([x])[0], x.cumsum(1), rtol=1e-6)


def test_packed_weights_go_through_unpack(x):
    store = WeightStore()
    fmt = formats.get("int8")
    w = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    packed = fmt.encode(w)
    ref = FormatRef(name="int8", params=dict(fmt.params))
    scrambled = np.asarray(packed.data)[::-1].copy()
    store.add(StoredTensor("w", "f32", (4, 4), scrambled, ref, layout="reversed"))
    stored = view("w", (4, 4), (), format=ref, layout="reversed")
    operands = [operand("x", "r", view("")), operand("w", "r", stored), operand("out", "w", view(""))]
    types: list[Attribute] = [tensor(("s", 4), "f32"), QTensorType.of((4, 4), "f32", ref, "reversed")]
    linear = kernel(
        "linear", operands, lambda a, w, out: qc.LinearOp(a, w, None, out.type), [*types, tensor(("s", 4), "f32")]
    )
    made = module(
        [rt.LaunchOp("linear", [view("x"), stored, view("y")])],
        [linear],
        [rt.BufferOp("w", "weights", scrambled.nbytes, weight="w")],
        [rt.ArenaOp("weights", "d", "constants")],
    )
    (y,) = run_rt(made, store, [x], unpack=lambda _f, _l, _d, _s, data: data[::-1])
    np.testing.assert_allclose(y, x @ fmt.decode(packed).T, rtol=1e-5, atol=1e-6)
    with pytest.raises(InterpreterError, match="unpack"):
        run_rt(made, store, [x])


def test_constants_cannot_be_written(x):
    store = WeightStore()
    store.add_array("w", np.zeros((16, 4), np.float32))
    made = module(
        [rt.CopyOp(view("x"), view("w"))], [], [rt.BufferOp("w", "weights", 256, weight="w")],
        [rt.ArenaOp("weights", "d", "constants")],
    )  # fmt: skip
    with pytest.raises(InterpreterError, match="'copy' writes a constant"):
        run_rt(made, store, [x])


def test_init_runs_once_and_states_come_and_go(x):
    row = view("table", (1, 4))
    state = view("kv", (16, 4))
    ops = [operand("out", "w", row)]
    block = Block(arg_types=[tensor((1, 4), "f32")])
    constant = qc.ConstOp("row", tensor((1, 4), "f32"))
    block.add_ops([constant, rt.YieldOp(constant.result)])
    fill = rt.KernelOp("fill", [], ops, Region(block))
    made = module(
        [rt.CopyOp(row, view("kv", (1, 4), offset=4)), rt.CopyOp(view("kv", ("s", 4)), view("y"))],
        [fill],
        [rt.BufferOp("table", "tables", 16), rt.BufferOp("kv", "state.kv", 256)],
        [rt.ArenaOp("tables", "d", "init"), rt.ArenaOp("state.kv", "d", "state")],
    )
    assert state.shape == (16, 4)
    made.body.block.add_op(rt.EntryOp("init", [], [], [], [rt.LaunchOp("fill", [row])], is_init=True))
    store = WeightStore()
    store.add_array("row", np.full((1, 4), 7, np.float32))
    interpreter = RtInterpreter(made, store)
    states = {"kv": np.zeros((16, 4), np.float32)}
    (y,) = interpreter.run([x], states=states)
    np.testing.assert_array_equal(y, [[0] * 4, [7] * 4, [0] * 4])
    np.testing.assert_array_equal(states["kv"][1], [7] * 4)
    with pytest.raises(InterpreterError, match="state 'kv' has no value"):
        interpreter.run([x])


@pytest.mark.parametrize(
    ("steps", "kernels", "message"),
    [
        ([rt.LaunchOp("none", [])], [], "entry @main, step 0 .*kernel @none is not declared"),
        ([rt.LaunchOp("bare", [])], [rt.KernelOp("bare", [], [])], "has no region"),
        ([rt.LaunchOp("softmax", [view("x")])], [SOFTMAX], "takes 2 operands, not 1"),
        ([rt.CopyOp(view("x", offset=60), view("y"))], [], "leaves its 256 bytes"),
        ([rt.CopyOp(view("nothing"), view("y"))], [], "no buffer is named 'nothing'"),
        ([rt.SelectOp("s", [SelectCase(max=2, kernel="k")], [])], [], "no case of the select fits s = 3"),
    ],
)
def test_what_cannot_run_says_why(x, steps, kernels, message):
    made = module([step.clone() for step in steps], [each.clone() for each in kernels])
    with pytest.raises(InterpreterError, match=message):
        run_rt(made, WeightStore(), [x])


def test_inputs_must_fit_the_signature(x):
    made = module([rt.CopyOp(view("x"), view("y"))])
    for array, message in [
        (x.astype(np.float64), "is float64"),
        (x[:, :3], "has shape"),
        (np.zeros((17, 4), np.float32), r"is 17, outside of \[1, 16\]"),
    ]:
        with pytest.raises(InterpreterError, match=message):
            run_rt(made, WeightStore(), [array])
    with pytest.raises(InterpreterError, match="takes 1 inputs, not 2"):
        run_rt(made, WeightStore(), [x, x])
    with pytest.raises(InterpreterError, match="no entry @other"):
        run_rt(made, WeightStore(), [x], entry="other")


def test_poison_is_nan_in_every_float_type():
    for dtype in ("f32", "f64", "f16", "bf16"):
        assert np.isnan(np.full(8, 0xFF, np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float64)).all()
