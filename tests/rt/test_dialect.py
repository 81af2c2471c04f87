"""The rt dialect: what is printed is read back, by xDSL and by a stock MLIR, and is the plan one to one."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Block, Region
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError, VerifyException

from qcompiler.errors import PlanError, ScheduleError
from qcompiler.ir import rt
from qcompiler.ir.qc import QC, SoftmaxOp
from qcompiler.ir.rt_plan import plan_from_rt, rt_from_plan, skeleton_kernels
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.ir.types import tensor
from qcompiler.plan.kernel import FormatRef, Operand
from qcompiler.plan.plan import SelectCase, Symbol, TensorSig, View
from qcompiler.plan.torch_regions import TorchOp, TorchRegion
from qcompiler.plan.verify import verify_plan

REGION = TorchRegion(inputs=1, ops=(TorchOp(target="aten.lgamma.default", args=({"v": 0},)),), outputs=(1,))
ACCEPTED = sorted((Path(__file__).parent / "files" / "accepted").glob("*.mlir"))


def text(module: ModuleOp, *, generic: bool = False) -> str:
    out = StringIO()
    Printer(out, print_generic_format=generic).print_op(module)
    return out.getvalue()


def read(source: str) -> ModuleOp:
    ctx = Context()
    for dialect in (Builtin, QC, rt.RT):
        ctx.load_dialect(dialect)
    module = Parser(ctx, source).parse_module()
    module.verify()
    return module


def view(buffer: str = "b0", **changes) -> View:
    return View(**{"buffer": buffer, "dtype": "f32", "shape": ("b*s", 4), "strides": (4, 1), **changes})


def everything() -> ModuleOp:
    """One of each op and attribute, in all their optional shapes."""
    operands = [
        Operand(name=name, dtype="f32", access=access, shape=("b*s", 4), strides=(4, 1))
        for name, access in (("x", "r"), ("out", "w"))
    ]
    body = Block(arg_types=[tensor(("b*s", 4), "f32")] * 2)
    softmax = SoftmaxOp(body.args[0], body.args[1].type, axis=1)
    body.add_ops([softmax, rt.YieldOp(softmax.result)])
    packed = view(
        "w0", dtype="bf16", shape=(8, 64), strides=(), format=FormatRef(name="nf4", params={"block": 64}),
        layout="cpu_p16_v1",
    )  # fmt: skip
    steps = [
        rt.LaunchOp("softmax", [view(), view(offset="4*s")]),
        rt.LaunchOp("softmax", [view(), packed], "s0"),
        rt.LaunchOp("softmax", [view(layout="cpu_p16_v1", shape=(8, 8), strides=()), view(shape=(), strides=())], "s0"),
        rt.SelectOp("s", [SelectCase(max=1, kernel="softmax"), SelectCase(max=None, kernel="bare")], [view()], "s0"),
        rt.CopyOp(view(), view(offset=-4)),
        rt.CopyOp(view(), view(), "s0"),
        rt.RecordOp("e0", "s0"),
        rt.WaitOp("e0", "s0"),
        rt.TorchCallOp(REGION, ["b*s", 7], [view()], [view(offset="4*s")], serves="encoder", stream="s0"),
        rt.TorchCallOp(REGION, [], [view()], [view(offset="4*s")]),
    ]
    return ModuleOp(
        [
            rt.DeviceOp("d0", "cuda", 1),
            rt.StreamOp("s0", "d0"),
            rt.EventOp("e0"),
            rt.ArenaOp("act", "d0", "activations", 4096, "main"),
            rt.ArenaOp("weights", "d0", "constants"),
            rt.BufferOp("b0", "act", 1024),
            rt.BufferOp("w0", "weights", 1024, 256, "encoder.0.weight"),
            rt.KernelOp("softmax", ["b", "s"], operands, Region(body), serves="a \"quoted\" place"),
            rt.KernelOp("bare", ["b", "s"], operands),
            rt.EntryOp(
                "main",
                [Symbol(name="s", min=1, max=9), Symbol(name="b", min=0, max=2)],
                [TensorSig(name="x", arena="act", dtype="i64", shape=("b", "s"))],
                [TensorSig(name="y", arena="act", dtype="f32", shape=(), torch_dtype="torch.float32")],
                steps,
            ),
            rt.EntryOp("init", [], [], [], is_init=True),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("generic", [False, True])
def test_everything_is_read_back(generic):
    module = everything()
    module.verify()
    again = read(text(module, generic=generic))
    assert text(again) == text(module)
    assert again.is_structurally_equivalent(module)


def test_attributes_give_their_records_back():
    for step in next(o for o in everything().body.block.ops if isinstance(o, rt.EntryOp)).steps:
        assert rt.step_op(step.record).is_structurally_equivalent(step)


@pytest.mark.parametrize("attribute", list(rt.RT.attributes), ids=lambda attribute: attribute.name)
def test_attribute_prints_every_field_of_its_record(attribute):
    storage = {"format", "layout"} if attribute.STORED else set()
    assert attribute.FIELDS.keys() | storage == set(attribute.RECORD.__struct_fields__)


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_schedule_and_plan_are_one_to_one(path, files):
    plan = files.plan(path)
    module = rt_from_plan(plan)
    module.verify()
    again = plan_from_rt(module, skeleton_kernels(module), files.ctx.weights)
    assert again == plan
    assert module.is_structurally_equivalent(files.read(path))
    verify_plan(again)


def test_missing_offset_and_missing_spec_are_named():
    module = everything()
    with pytest.raises(ScheduleError, match="buffer 'b0' has no offset yet; run plan-memory") as caught:
        plan_from_rt(module, skeleton_kernels(module))
    assert caught.value.rule == "unplaced-buffer"
    with pytest.raises(ScheduleError, match="kernel 'softmax' has no KernelSpec"):
        plan_from_rt(module, {})


def test_weight_of_a_buffer_must_be_in_the_store(files):
    module = files.read("accepted/two_streams.mlir")
    files.ctx.weights.remove("scale")
    with pytest.raises(ScheduleError, match="'scale', which the weight store does not have"):
        plan_from_rt(module, skeleton_kernels(module), files.ctx.weights)


def test_weight_has_one_offset_on_all_devices(files):
    module = files.read("accepted/two_devices.mlir")
    buffers = Schedule(module).buffers
    buffers["w1"].weight = buffers["w0"].weight
    with pytest.raises(ScheduleError, match=r"has the offset 0 in one arena and 1536 in another") as caught:
        plan_from_rt(module, skeleton_kernels(module), files.ctx.weights)
    assert caught.value.rule == "weight-offset"


def test_step_without_a_stream_stays_without_one_in_the_plan():
    step = rt.LaunchOp("k", [view()])
    assert step.stream_name is None
    assert step.record.stream == rt.NO_STREAM
    assert rt.step_op(step.record).stream_name is None


def test_names_are_unique_for_each_kind_only():
    module = ModuleOp([rt.ArenaOp("x", "d", "state"), rt.BufferOp("x", "x", 64)])
    module.verify()
    assert Schedule(module).device_of("x") == "d"
    with pytest.raises(PlanError, match="no buffer is named 'y'"):
        Schedule(module).device_of("y")
    with pytest.raises(ScheduleError, match="named @x"):
        Schedule(ModuleOp([rt.EventOp("x"), rt.EventOp("x")]))


INVALID = {
    'rt.device @d {kind = "tpu", index = 0 : i64}': "kind must be one of cpu, cuda, sim",
    'rt.arena @a {device = @d, kind = "heap", nbytes = 0 : i64}': "kind must be one of constants",
    'rt.arena @a {device = @d, nbytes = 0 : i64}': "kind",
    'rt.launch @k on @s [#rt.view<@b, f80, [1], [1], 0>]': "element type f80 is not one of",
    'rt.launch @k on @s [#rt.view<@b, f32, [1], [1]>]': "Expected ','",
    'rt.launch @k on @s [#rt.view<@b, f32, ["1.5"], [1], 0>]': "uses something other than",
    'rt.kernel @k attributes {symbols = [], operands = [#rt.operand<"x", f32, "rx", [1], [1]>]}': 'access must be',
    'rt.kernel @k attributes {symbols = [], operands = []} { ^bb0(%x : tensor<1xf32>): rt.yield }': "block arguments",
    'rt.kernel @k attributes {symbols = [], operands = [#rt.operand<"x", f32, "w", [1], [1]>]} '
    '{ ^bb0(%x : tensor<1xf32>): rt.yield }': "writes 1 operands but yields 0",
    'rt.kernel @k attributes {symbols = [], operands = []} { rt.event @e }': "not a terminator",
    'rt.entry @e attributes {symbols = [], inputs = [], outputs = []} { rt.event @x }': "is not a step",
}  # fmt: skip


@pytest.mark.parametrize("source", INVALID, ids=range(len(INVALID)))
def test_invalid_ops_are_refused(source):
    with pytest.raises((ParseError, VerifyException, PlanError), match=INVALID[source]):
        read(source)
