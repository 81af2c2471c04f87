"""lower-to-rt and its neighbours: what is launched, what is copied, what is shared, what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from xdsl.dialects.builtin import ModuleOp

from qcompiler.errors import DeviceAssignmentError, KernelSelectionError
from qcompiler.ir import build, interpreter, qc, rt
from qcompiler.ir.module import set_path
from qcompiler.ir.rt_interpreter import run_rt
from qcompiler.ir.types import QTensorType, tensor
from qcompiler.passes.assign_devices import AssignDevicesPass
from qcompiler.passes.emit_kernels import kernel_specs
from qcompiler.passes.lower_to_rt import LowerToRtPass
from qcompiler.passes.lowering.kinds import TEMPLATES
from qcompiler.passes.pack_weights import PackWeightsPass, unpack
from qcompiler.passes.select_kernels import SelectKernelsPass
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.torch_regions import TorchOp, TorchRegion

LOWER = (AssignDevicesPass, SelectKernelsPass, PackWeightsPass, LowerToRtPass)


def lower(bench, module: ModuleOp) -> ModuleOp:
    for each in LOWER:
        each().apply(bench.ctx, module)
        module.verify()
    return module


def entry(module: ModuleOp) -> rt.EntryOp:
    return next(op for op in module.body.block.ops if isinstance(op, rt.EntryOp))


def launches(module: ModuleOp) -> Counter[str]:
    """How often each template is launched, and `copy` for rt.copy."""
    counts: Counter[str] = Counter()
    for step in entry(module).steps:
        if isinstance(step, rt.LaunchOp):
            counts[step.kernel_name.rsplit("_", 1)[0]] += 1
        else:
            counts[step.name] += 1
    return counts


def both(bench, module: ModuleOp, *inputs: np.ndarray) -> None:
    """The schedule computes what the tensor-level module means."""
    before = interpreter.run(module.clone(), bench.ctx.weights.copy(), inputs)
    lower(bench, module)
    after = run_rt(module, bench.ctx.weights, inputs, unpack=unpack)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def linear(bench, builder, x, n, k, key="w", shape=None):
    ref = bench.packed(key, n, k, "nf4", block=64)
    w = builder.insert(qc.ConstOp(key, QTensorType.of((n, k), "f32", ref)))
    return builder.insert(qc.LinearOp(x, w, None, tensor((*shape[:-1], n), "f32"))).result


def test_linear_with_dynamic_rows_becomes_one_select(bench):
    module = bench.module(
        [(("b", "s", 64), "f32")],
        {"b": (1, 4), "s": (1, 32)},
        lambda b, a: [linear(bench, b, a[0], 48, 64, shape=("b", "s", 64))],
    )
    both(bench, module, bench.rng.standard_normal((2, 3, 64)).astype(np.float32))
    assert launches(module) == {"rt.select": 1}
    specs = kernel_specs(module)
    assert {s.body.m_class for s in specs.values() if isinstance(s.body, LinearKernel)} == {"2-8", "large"}
    assert bench.ctx.weights["w"].layout == "cpu_p16_v1"


def test_plain_weights_are_packed_and_their_bias_is_not(bench):
    bench.plain("w", 24, 20)
    bench.plain("bias", 24)

    def body(b, a):
        w = b.insert(qc.ConstOp("w", tensor((24, 20), "f32"))).result
        bias = b.insert(qc.ConstOp("bias", tensor((24,), "f32"))).result
        return [b.insert(qc.LinearOp(a[0], w, bias, tensor(("s", 24), "f32"))).result]

    module = bench.module([(("s", 20), "f32")], {"s": (1, 9)}, body)
    both(bench, module, bench.rng.standard_normal((5, 20)).astype(np.float32))
    assert (bench.ctx.weights["w"].layout, bench.ctx.weights["bias"].layout) == ("cpu_p16_v1", "canonical")


def test_plain_weight_that_is_read_otherwise_stays_row_major(bench):
    bench.plain("w", 24, 20)

    def body(b, a):
        w = b.insert(qc.ConstOp("w", tensor((24, 20), "f32"))).result
        return [b.insert(qc.LinearOp(a[0], w, None, tensor(("s", 24), "f32"))).result, build.reduce(b, w, [0], "add")]

    module = bench.module([(("s", 20), "f32")], {"s": (1, 9)}, body)
    both(bench, module, bench.rng.standard_normal((5, 20)).astype(np.float32))
    assert bench.ctx.weights["w"].layout == "canonical"


def test_single_row_takes_the_gemv_alone(bench):
    module = bench.module([((1, 64), "f32")], {}, lambda b, a: [linear(bench, b, a[0], 48, 64, shape=(1, 64))])
    lower(bench, module)
    assert [s.body.m_class for s in kernel_specs(module).values()] == ["1"]


def test_result_is_computed_in_the_callers_memory(bench):
    module = bench.module(
        [(("s", 64), "f32")], {"s": (1, 9)}, lambda b, a: [linear(bench, b, a[0], 8, 64, shape=("s", 64))]
    )
    lower(bench, module)
    (step,) = entry(module).steps
    assert step.view_records[-1].buffer == "main.out.0"


def test_argument_returned_as_it_is_gets_its_own_memory(bench):
    module = bench.module([(("s", 4), "f32")], {"s": (1, 9)}, lambda b, a: [a[0], a[0]])
    both(bench, module, np.ones((3, 4), np.float32))
    assert launches(module) == {"rt.copy": 2}


def test_heads_are_split_and_merged_without_copies(bench):
    def body(b, a):
        heads = build.transpose(b, build.reshape(b, a[0], ("b", "s", 4, 8)), (0, 2, 1, 3))
        out = b.insert(qc.AttentionOp(heads, heads, heads, None, tensor(("b", 4, "s", 8), "f32"), scale=0.5)).result
        return [build.reshape(b, build.transpose(b, out, (0, 2, 1, 3)), ("b", "s", 32))]

    module = bench.module([(("b", "s", 32), "f32")], {"b": (1, 4), "s": (1, 9)}, body)
    both(bench, module, bench.rng.standard_normal((2, 5, 32)).astype(np.float32))
    assert launches(module)["attention"] == 1
    assert launches(module)["copy"] == 0


def test_softmax_over_a_middle_axis(bench):
    def body(b, a):
        return [b.insert(qc.SoftmaxOp(a[0], tensor((3, "s", 5), "f32"), axis=1)).result]

    module = bench.module([((3, "s", 5), "f32")], {"s": (1, 9)}, body)
    both(bench, module, bench.rng.standard_normal((3, 7, 5)).astype(np.float32))


def test_reduction_starts_from_its_fill(bench):
    module = bench.module([(("s", 6), "f32")], {"s": (1, 9)}, lambda b, a: [build.reduce(b, a[0], [1], "max")])
    both(bench, module, bench.rng.standard_normal((4, 6)).astype(np.float32))
    (spec,) = kernel_specs(module).values()
    assert isinstance(spec.body, LoopKernel)
    assert spec.body.init == ("-inf",)


def test_concat_and_slice_are_addresses(bench):
    def body(b, a):
        joined = build.concat(b, [a[0], a[1]], 1)
        return [build.extract_slice(b, joined, [0, 1], ["s", 3], [1, 1])]

    module = bench.module([(("s", 2), "f32"), (("s", 3), "f32")], {"s": (1, 9)}, body)
    x, y = bench.rng.standard_normal((4, 2)), bench.rng.standard_normal((4, 3))
    both(bench, module, x.astype(np.float32), y.astype(np.float32))


def test_equal_layers_share_one_kernel(bench):
    def body(b, a):
        x = a[0]
        for index in range(5):
            x = linear(bench, b, x, 64, 64, key=f"w{index}", shape=("s", 64))
        return [x]

    module = lower(bench, bench.module([(("s", 64), "f32")], {"s": (9, 99)}, body))
    assert launches(module) == {"linear_nf4_64x64_mlarge": 5}
    assert len(kernel_specs(module)) == 1


def state_module(bench, read_old: bool) -> ModuleOp:
    def body(b, a):
        old = b.insert(qc.StateOp("cache", tensor((1, 8, 4), "f32"))).result
        new = b.insert(qc.IndexUpdateOp(old, a[0], a[1], tensor((1, 8, 4), "f32"), axis=1)).result
        b.insert(qc.StateUpdateOp("cache", new))
        return [build.reduce(b, old if read_old else new, [1], "add")]

    return bench.module([((2,), "i64"), ((1, 2, 4), "f32")], {}, body)


def test_state_is_updated_in_place_without_a_copy(bench):
    module = lower(bench, state_module(bench, read_old=False))
    assert launches(module) == {"index_update": 1, "reduce": 1}
    first = next(iter(entry(module).steps))
    assert first.view_records[0].buffer == "s.cache"
    assert not bench.ctx.report.of("lower-to-rt")


def test_old_value_that_is_read_later_is_kept_and_counted(bench):
    module = lower(bench, state_module(bench, read_old=True))
    assert launches(module) == {"copy": 1, "index_update": 1, "reduce": 1}
    (decision,) = bench.ctx.report.of("lower-to-rt")
    assert decision.what == "state copied: 128 bytes for each run" and "linalg.generic" in decision.why


def test_op_without_a_kernel_is_named(bench, monkeypatch):
    monkeypatch.delitem(TEMPLATES, qc.SoftmaxOp)

    def body(b, a):
        return [b.insert(qc.SoftmaxOp(a[0], a[0].type, axis=1)).result]

    module = bench.module([(("s", 4), "f32")], {"s": (1, 9)}, body)
    with pytest.raises(KernelSelectionError, match=r"qc\.softmax"):
        lower(bench, module)


def test_torch_reads_rows_in_order_and_writes_where_the_result_is_wanted(bench):
    def body(b, a):
        turned = build.transpose(b, a[0], [1, 0])
        call = TorchOp(target="aten.lgamma.default", args=({"v": 0},))
        region = TorchRegion(inputs=1, ops=(call,), outputs=(1,))
        return list(b.insert(qc.TorchCallOp(region, [turned], [tensor((4, "s"), "f32")], ["2*s"])).outputs)

    module = lower(bench, bench.module([(("s", 4), "f32")], {"s": (1, 9)}, body))
    (entry,) = [op for op in module.body.block.ops if isinstance(op, rt.EntryOp)]
    copy, call = entry.steps
    assert isinstance(copy, rt.LaunchOp) and isinstance(call, rt.TorchCallOp)
    record = call.record
    assert record.sizes == ("2*s",) and record.inputs[0].strides == ("s", 1)
    assert record.outputs[0].buffer == "main.out.0"


def test_chosen_experts_are_one_launch_whatever_the_number_of_rows(bench):
    def body(b, a):
        w = b.insert(
            qc.ConstOp("w", QTensorType.of((4 * 24, 64), "f32", bench.packed("w", 4 * 24, 64, "nf4", block=64)))
        )
        kind = tensor(("2*s", 24), "f32")
        return [b.insert(qc.GroupedLinearOp(a[0], w, a[1], kind, experts=4, repeat=2)).result]

    module = bench.module([(("s", 64), "f32"), (("2*s",), "i64")], {"s": (1, 9)}, body)
    both(bench, module, bench.rng.standard_normal((3, 64)).astype(np.float32), np.array([3, 0, 0, 1, 3, 3]))
    assert launches(module) == {"grouped_linear_nf4_4x24x64": 1}
    assert bench.ctx.weights["w"].layout == "cpu_p16_v1"


def test_crossing_values_get_explicit_copies(bench):
    bench.ctx.devices = ("cuda:0", "cuda:1")
    bench.ctx.device_map = {"head": "cuda:1"}

    def body(b, a):
        hidden = build.reduce(b, a[0], [1], "add")
        out = build.reduce(b, hidden, [0], "add")
        set_path(out.owner, "head.sum")
        return [out]

    module = bench.module([((3, 4), "f32")], {}, body)
    AssignDevicesPass().apply(bench.ctx, module)
    copies = [op for op in module.walk() if isinstance(op, qc.CopyOp)]
    assert [(c.source.data, c.target.data) for c in copies] == [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]


def test_unknown_device_in_the_map_is_refused(bench):
    bench.ctx.device_map = {"head": "cuda:7"}
    module = bench.module([((3, 4), "f32")], {}, lambda b, a: [build.reduce(b, a[0], [1], "add")])
    with pytest.raises(DeviceAssignmentError, match="cuda:7"):
        AssignDevicesPass().apply(bench.ctx, module)
