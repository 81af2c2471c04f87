"""A plan whose kernels would reach beyond their operands is refused, though every view lies in its buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from qcompiler.errors import PlanError
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.plan import Plan
from qcompiler.runtime.loaded import check_image
from qcompiler.runtime.plan_bodies import check_bodies


def with_kernel(plan: Plan, name: str, **body: Any) -> Plan:
    """The plan with other fields in one kernel's body."""
    kernels = tuple(
        msgspec.structs.replace(spec, body=msgspec.structs.replace(spec.body, **body)) if spec.name == name else spec
        for spec in plan.kernels
    )
    return msgspec.structs.replace(plan, kernels=kernels)


def access(plan: Plan, name: str, number: int, **changes: Any) -> Plan:
    """The plan with another access of one operand of a loop."""
    body: Any = next(spec.body for spec in plan.kernels if spec.name == name)
    accesses = list(body.accesses)
    accesses[number] = msgspec.structs.replace(accesses[number], **changes)
    return with_kernel(plan, name, accesses=tuple(accesses))


def test_a_sound_plan_passes(small: Any) -> None:
    check_bodies(small.image.plan)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: with_kernel(plan, "linear_many", k=128), r"'linear_many' .* \['b', 128\] of its operand 'x'"),
        (lambda plan: with_kernel(plan, "linear_many", n=49), "operand 'w'"),
        (lambda plan: with_kernel(plan, "linear_many", codes=True), "96\\] of its operand 'x'"),
        (lambda plan: with_kernel(plan, "linear_many", m="2*b"), "operand 'x'"),
        (lambda plan: with_kernel(plan, "linear_one", has_bias=False), "do not fit"),
        (lambda plan: with_kernel(plan, "relu_add", extents=("b + 1", 48)), "accesses elements 0 to 48\\*b \\+ 47"),
        (lambda plan: with_kernel(plan, "table", extents=(49,)), "accesses elements 0 to 48 .* covers 0 to 47"),
        (lambda plan: access(plan, "relu_add", 0, offset=1), "operand 'h'"),
        (lambda plan: access(plan, "relu_add", 2, offset=-1), "operand 'out'"),
        (lambda plan: access(plan, "relu_add", 2, coefficients=(48, 2)), "operand 'out'"),
        (lambda plan: access(plan, "relu_add", 2, coefficients=(-48, 1)), "operand 'out'"),
        (lambda plan: access(plan, "relu_add", 1, coefficients=("b - 2", 1)), "operand 't'|positive or negative"),
    ],
)
def test_a_body_beyond_its_operands_is_refused(small: Any, change: Any, text: str) -> None:
    plan = change(small.image.plan)
    with pytest.raises(PlanError, match=text):
        check_bodies(plan)
    with pytest.raises(PlanError):
        check_image(replace(small.image, plan=plan))


def test_a_written_operand_that_is_declared_read_only_is_refused(small: Any) -> None:
    plan = small.image.plan
    for name in ("linear_one", "count"):
        kernels = []
        for spec in plan.kernels:
            operands = spec.operands
            if spec.name == name:
                operands = (*operands[:-1], msgspec.structs.replace(operands[-1], access="r"))
            kernels.append(msgspec.structs.replace(spec, operands=operands))
        with pytest.raises(PlanError, match="declares"):
            check_bodies(msgspec.structs.replace(plan, kernels=tuple(kernels)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nbytes": 1024}, r"'w' has 1024 bytes, its layout 'cpu_p16_v1' needs"),
        ({"shape": (4800, 64)}, "needs"),
        ({"shape": (48, 64, 1)}, r"not \(rows, cols\)"),
        ({"layout": "cpu_p99"}, "'w'"),
    ],
)
def test_a_packed_weight_without_all_its_bytes_is_refused(small: Any, changes: Any, text: str) -> None:
    weights = list(small.image.plan.weights)
    weights[0] = msgspec.structs.replace(weights[0], **changes)
    with pytest.raises(PlanError, match=text):
        check_bodies(msgspec.structs.replace(small.image.plan, weights=tuple(weights)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": 0}, "window of 0 keys"),
        ({"window": 1 << 40}, "window of 1099511627776 keys"),
        ({"softcap": 0.0}, "softcap 0.0"),
        ({"softcap": float("inf")}, "softcap inf"),
        ({"kv_heads": 3}, "4 heads over 3 heads"),
        ({"ring": True}, "needs `last` and a window"),
    ],
)
def test_an_attention_with_impossible_limits_is_refused(small: Any, change: dict[str, Any], text: str) -> None:
    strides = ("64*s", 8, 32, 1)
    operands = tuple(
        Operand(name=name, dtype="f32", access="w" if name == "out" else "r", shape=("b", 4, "s", 8), strides=strides)
        for name in ("q", "k", "v", "out")
    )
    body = AttentionKernel(
        batch="b", heads=4, kv_heads=4, q_len="s", kv_len="s", head_dim=8, value_dim=8, scale=0.5, causal=True,
        mask="none", window=5, softcap=2.0,
    )  # fmt: skip
    spec = KernelSpec(name="attend", symbols=("b", "s"), operands=operands, body=body)
    plan = msgspec.structs.replace(small.image.plan, kernels=(*small.image.plan.kernels, spec))
    check_bodies(plan)
    with pytest.raises(PlanError, match=text):
        check_bodies(with_kernel(plan, "attend", **change))


GROUPED = {"rows": 2, "repeat": 3, "experts": 4, "n": 5, "k": 7}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 3}, "'x'"), ({"k": 8}, "'x'"), ({"experts": 5}, "'w'"), ({"n": 6}, "'w'"), ({"repeat": 4}, "'index'"),
        ({"experts": -4, "n": -5}, "positive"), ({"repeat": 0}, "positive"), ({"experts": 2, "n": 10}, "'out'"),
    ],
)  # fmt: skip
def test_a_grouped_linear_beyond_its_operands_is_refused(small: Any, change: dict[str, Any], text: str) -> None:
    """Experts times rows is the weight, rows times pairs per row the index and the result."""
    shapes: dict[str, Any] = {"x": (2, 7), "w": (20, 7), "index": (6,), "out": (6, 5)}
    operands = tuple(
        Operand(
            name=name, dtype="i64" if name == "index" else "f32", access="w" if name == "out" else "r", shape=shape,
            strides=(shape[1], 1) if len(shape) == 2 else (1,),
        )
        for name, shape in shapes.items()
    )  # fmt: skip

    def plan(**body: Any) -> Plan:
        spec = KernelSpec(name="g", symbols=(), operands=operands, body=GroupedLinearKernel(**{**GROUPED, **body}))
        found: Plan = small.image.plan
        return msgspec.structs.replace(found, kernels=(*found.kernels, spec))

    check_bodies(plan())
    with pytest.raises(PlanError, match=text):
        check_bodies(plan(**change))
