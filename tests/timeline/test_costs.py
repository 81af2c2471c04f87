"""Estimated times: what they are made of, and that a device never does more than it can."""

from __future__ import annotations

import random

import numpy as np
import pytest

from qcompiler.kernels.cost import (
    ATTAINED_FRACTION,
    GPUS,
    NO_COST,
    Cost,
    Occupancy,
    bytes_moved,
    copy_cost,
    device_cost,
    launch_cost,
    stored_bytes,
)
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.linear import LinearKernel

H100 = device_cost("sm_90a")


def operand(name: str, shape: tuple[int | str, ...], access: str = "r", dtype: str = "bf16") -> Operand:
    sizes = [size if isinstance(size, int) else 1 for size in shape]
    strides = tuple(int(_product(sizes[axis + 1 :])) for axis in range(len(shape)))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides)  # type: ignore[arg-type]


def _product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def linear(m: int, n: int, k: int, m_class: str) -> KernelSpec:
    weight = Operand(
        name="w", dtype="bf16", access="r", shape=(n, k), format=FormatRef(name="nf4", params={"block": 64}),
        layout="cuda_t16_v1",
    )  # fmt: skip
    body = LinearKernel(m=m, n=n, k=k, m_class=m_class, has_bias=False)  # type: ignore[arg-type]
    operands = (operand("x", (m, k)), weight, operand("out", (m, n), "w"))
    return KernelSpec(name="linear", symbols=(), operands=operands, body=body)


def test_every_architecture_has_figures() -> None:
    assert set(GPUS) == set(ARCHS)
    assert all(gpu.bandwidth * gpu.latency > 16 * 32 for gpu in GPUS.values())


def test_one_row_is_bound_by_the_bytes_of_its_weight_and_many_by_arithmetic() -> None:
    one, many = linear(1, 14336, 4096, "1"), linear(4096, 14336, 4096, "large")
    cost = launch_cost(one, {}, H100, "sm_90a")
    packed = stored_bytes(one.operands[1], {})
    assert 0.5 * 14336 * 4096 < packed < 0.6 * 14336 * 4096
    assert packed < cost.nbytes < 1.01 * packed
    assert cost.span == pytest.approx(cost.nbytes / (ATTAINED_FRACTION * H100.bandwidth) + 1.6, rel=0.02)
    busy = launch_cost(many, {}, H100, "sm_90a")
    assert busy.operations == 2 * 4096 * 14336 * 4096
    assert busy.span == pytest.approx(busy.operations / (ATTAINED_FRACTION * H100.tensor), rel=0.02)
    assert busy.share > 0.98


def test_a_small_launch_is_nearly_all_latency() -> None:
    cost = launch_cost(linear(1, 64, 64, "1"), {}, H100, "sm_90a")
    assert cost.share < 0.01 and cost.span < 2.5


def test_of_tables_and_experts_only_what_is_used_counts() -> None:
    ids, table, out = operand("ids", (2,), dtype="i64"), operand("table", (1000, 64)), operand("out", (2, 64), "w")
    rows = EmbeddingKernel(count=2, rows=1000, cols=64)
    assert bytes_moved((ids, table, out), rows, {}) == 16 + 2 * 128 + 2 * 128
    experts = GroupedLinearKernel(rows="s", repeat=2, experts=8, n=16, k=32)
    weights = operand("w", (8 * 16, 32))
    used = {s: bytes_moved((weights,), experts, {"s": s}) for s in (1, 4, 100)}
    assert used == {1: 2 * 1024, 4: 8 * 1024, 100: 8 * 1024}


def test_a_broadcast_is_read_as_it_is_stored() -> None:
    bias = Operand(name="b", dtype="f32", access="r", shape=(512, 64), strides=(0, 1))
    assert stored_bytes(bias, {}) == 64 * 4


def test_copies_within_a_device_take_its_memory_and_others_the_link() -> None:
    inside, across = (copy_cost(1 << 20, H100, crossing=crossing) for crossing in (False, True))
    assert inside.share > 0 and across.share == 0
    assert across.span > inside.span
    assert copy_cost(0, H100, crossing=True) == NO_COST


# --- launches beside each other --------------------------------------------------------------------------------------


def test_launches_that_fill_the_device_gain_nothing_beside_each_other() -> None:
    device, full = Occupancy(), Cost(10.0, 1.0)
    assert device.place(0.0, full) == 10.0
    assert device.place(0.0, full) == 20.0


def test_small_launches_fit_beside_each_other() -> None:
    device, small = Occupancy(), Cost(2.0, 0.25)
    assert [device.place(0.0, small) for _ in range(4)] == [2.0] * 4
    assert device.place(0.0, small) == 4.0


def test_a_launch_ends_where_times_are_large_and_so_coarse() -> None:
    # At 1e8 microseconds neighbouring doubles are 1.5e-8 apart, and a rest of that size looked for a piece behind the
    # last one: a Llama of 32 layers with 65,536 tokens had no timeline.
    for start in (1e6, 1e7, 1e8, 1e9):
        device, generator = Occupancy(), np.random.default_rng(0)
        end = start
        for span in generator.uniform(1.0, 1e4, 200):
            end = device.place(end, Cost(float(span), 0.7))
        assert end > start


def test_what_is_placed_later_gets_what_is_left() -> None:
    device = Occupancy()
    device.place(0.0, Cost(4.0, 0.75))
    assert device.finish(0.0, Cost(4.0, 0.5)) == pytest.approx(6.0)  # half its pace for 4, then 2 more
    assert device.finish(4.0, Cost(4.0, 0.5)) == 8.0
    assert device.finish(1.0, Cost(5.0, 0.0)) == 6.0


def test_no_device_ever_does_more_than_it_can() -> None:
    rng = random.Random(5)
    for _ in range(50):
        device, work, last = Occupancy(), 0.0, 0.0
        for _ in range(30):
            cost = Cost(rng.uniform(0.5, 9), rng.uniform(0.01, 1))
            begin = rng.uniform(0, 20)
            end = device.place(begin, cost)
            assert end >= begin + cost.span - 1e-6
            work, last = work + cost.span * cost.share, max(last, end)
        assert work <= last + 1e-6
        assert max(device._loads) <= 1 + 1e-9
