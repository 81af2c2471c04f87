"""Small steps in one launch: the same bits as apart, the rows that they write and no others, and what stays apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qcompiler as qc
from qcompiler.errors import IndexOutOfRangeError, PassError
from qcompiler.passes import pipeline
from qcompiler.passes.merge_launches import MergeLaunchesPass
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.parts import PartsKernel
from qcompiler.plan.plan import Launch
from qcompiler.runtime.isa import runnable_isas

HEADS, KV_HEADS, DIM, LENGTH = 5, 2, 12, 11
"""No powers of two: a row of a head is no multiple of a vector."""


class Layer(nn.Module):
    """Attention on a static cache, and one linear for queries, keys and values. `turned` are the first elements of each
    head that are rotated: all of them, or a part as in GPT-NeoX."""

    def __init__(self, batch: int, dtype: torch.dtype, cache: torch.dtype, turned: int = DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = turned
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, bias=False, dtype=dtype)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, KV_HEADS, LENGTH, DIM, dtype=cache))
        self.register_buffer("inv_freq", 1.0 / 100.0 ** (torch.arange(0, turned, 2) / turned))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        columns = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
        q, k, v = (part.view(batch, length, -1, DIM).transpose(1, 2) for part in self.qkv(x).split(columns, -1))
        angle = torch.cat([position[:, None] * self.inv_freq] * 2, -1)
        q, k = (self.turned(each, angle.cos().to(x.dtype), angle.sin().to(x.dtype)) for each in (q, k))
        self.keys.index_copy_(2, position, k.to(self.keys.dtype))
        self.values.index_copy_(2, position, v.to(self.values.dtype))
        seen = torch.arange(LENGTH)[None] <= position[:, None]
        keys, values = (each.to(x.dtype).repeat_interleave(HEADS, 1) for each in (self.keys, self.values))
        return F.scaled_dot_product_attention(q.repeat_interleave(KV_HEADS, 1), keys, values, attn_mask=seen)

    def turned(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, rest, half = x[..., : self.part], x[..., self.part :], self.part // 2
        first = first * cos + torch.cat([-first[..., half:], first[..., :half]], -1) * sin
        return torch.cat([first, rest], -1) if rest.numel() else first


TYPES = {
    "f32": (torch.float32, torch.float32, DIM), "bf16": (torch.bfloat16, torch.bfloat16, DIM),
    "bf16 cache": (torch.float32, torch.bfloat16, DIM), "part f32": (torch.float32, torch.float32, 8),
    "part bf16": (torch.bfloat16, torch.bfloat16, 8),
}  # fmt: skip
"""Of x, of the cache, and how many elements of a head are rotated."""


@cache
def program_of(batch: int, types: str, device: str, target: str | None, most: int) -> qc.Program:
    dtype = TYPES[types][0]
    model = Layer(batch, *TYPES[types]).eval()
    size = ("s", 1, 8)
    stages = pipeline.STAGES
    try:
        pipeline.STAGES = pipeline.with_options(stages, {"merge-launches": {"most": most}})
        return qc.qcompile(
            model, (torch.ones(batch, 7, HEADS * DIM, dtype=dtype), torch.arange(7)),
            dynamic_shapes={"x": {1: size}, "position": {0: size}}, device=device,
            targets=None if target is None else [target],
            buckets=[("decode", {"s": (1, 1)}), ("prompt", {"s": (1, 8)})],
        )  # fmt: skip
    finally:
        pipeline.STAGES = stages


def both(batch: int, types: str, device: str = "cpu", target: str | None = None) -> tuple[qc.Program, qc.Program]:
    return program_of(batch, types, device, target, 8), program_of(batch, types, device, target, 1)


def steps(batch: int, types: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A prompt of 7, then single tokens: behind it, in its middle, and the last row."""
    generator = torch.Generator().manual_seed(3)
    for position in (torch.arange(7), *(torch.tensor([each]) for each in (7, 3, LENGTH - 1))):
        x = torch.randn(batch, len(position), HEADS * DIM, generator=generator).to(TYPES[types][0])
        yield x, position


def bits(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(value).view(np.uint8)


def kinds(program: qc.Program, entry: str) -> Counter[str]:
    specs = {spec.name: spec.template for spec in program.plan.kernels}
    (found,) = [each for each in program.plan.entries if each.name == entry]
    return Counter(specs[step.kernel] if isinstance(step, Launch) else type(step).__name__ for step in found.steps)


def parts(program: qc.Program) -> list[PartsKernel]:
    return [spec.body for spec in program.plan.kernels if isinstance(spec.body, PartsKernel)]


RUNS = [
    pytest.param(batch, types, device, target, marks=() if quick else pytest.mark.slow)
    for device, target in (("cpu", None), *(("cpu", isa) for isa in runnable_isas()[:-1]), ("sim:0", None))
    for batch in (1, 3)
    for types in TYPES
    for quick in [target is None and device == "cpu" and (batch, types) in ((1, "f32"), (3, "part bf16"))]
]


@pytest.mark.parametrize(("batch", "types", "device", "target"), RUNS)
def test_results_and_caches_have_the_bits_of_the_steps_apart(
    batch: int, types: str, device: str, target: str | None
) -> None:
    programs = both(batch, types, device, target)
    assert any(part.index is not None for each in parts(programs[0]) for part in each.parts)
    assert not parts(programs[1])
    one, other = (program.session() for program in programs)
    for x, position in steps(batch, types):
        assert (bits(one(x, position)) == bits(other(x, position))).all()
        states = one.states(), other.states()
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            assert (bits(states[0][name]) == bits(states[1][name])).all(), name


def test_rope_of_queries_and_keys_and_both_rows_of_the_cache_are_one_launch() -> None:
    merged, apart = both(1, "f32")
    now, before = kinds(merged, "decode"), kinds(apart, "decode")
    assert before["index_update"] == 2 and now["index_update"] == 0
    found = [each for each in parts(merged) if any(part.index is not None for part in each.parts)]
    assert len(found) == 1, "equal kernels are shared, and one writes rows"
    rows = [part for part in found[0].parts if part.index is not None]
    assert len(found[0].parts) == 3 and len(rows) == 2
    assert sorted(bool(part.loop.body.ops) for part in rows) == [False, True], "keys are computed in their row"
    assert before.total() - now.total() >= 3


def test_a_part_of_each_head_is_turned_where_the_head_is_put_together() -> None:
    merged, apart = both(3, "part bf16")
    assert kinds(apart, "decode").total() - kinds(merged, "decode").total() >= 7
    (found,) = [each for each in parts(merged) if any(part.index is not None for part in each.parts)]
    assert len(found.parts) == 5, "q in two parts, the keys' row in two, the values' row"
    assert sum(part.index is not None for part in found.parts) == 3


def test_a_prompt_keeps_its_updates() -> None:
    """Of equal positions the last one wins, which no order of parts says."""
    merged, _ = both(1, "f32")
    assert kinds(merged, "prompt")["index_update"] == 2
    assert any(isinstance(spec.body, IndexUpdateKernel) for spec in merged.plan.kernels)


def test_the_stepwise_executor_gives_the_same_bits() -> None:
    program = both(3, "part bf16")[0]
    whole, single = program.session(), program.session(stepwise=True)
    for x, position in steps(3, "part bf16"):
        assert (bits(whole(x, position)) == bits(single(x, position))).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_a_row_out_of_range_writes_nothing(device: str) -> None:
    """On the CPU it is reported; a kernel of a GPU cannot."""
    session = both(1, "f32", device)[0].session()
    x, _ = next(steps(1, "f32"))
    session(x, torch.arange(7))
    before = {name: bits(value).copy() for name, value in session.states().items()}
    for wrong in (-1, LENGTH, 2**40):
        if device == "cpu":
            with pytest.raises(IndexOutOfRangeError, match=str(wrong)):
                session(x[:, :1], torch.tensor([wrong]))
        else:
            session(x[:, :1], torch.tensor([wrong]))
        for name, value in session.states().items():
            assert (bits(value) == before[name]).all(), (wrong, name)


@pytest.mark.slow
def test_replays_of_a_captured_step_write_the_same_rows() -> None:
    merged, apart = both(1, "f32", "sim:0")
    one, other = merged.session(), apart.session()
    (first, at), *more = steps(1, "f32")
    assert (bits(one(first, at)) == bits(other(first, at))).all()
    graph = one.capture(more[0][0], more[0][1])
    for x, position in more:
        assert (bits(graph.replay(x, position)) == bits(other(x, position))).all()
        for name, value in other.states().items():
            assert (bits(one.states()[name]) == bits(value)).all(), name


def test_the_report_says_what_was_merged() -> None:
    program = both(1, "f32")[0]
    text = str(program.report())
    assert "launches are one" in text and "computed in a row that is written" in text


def test_the_number_of_parts_is_an_option_of_the_pass() -> None:
    (made,) = pipeline.parse_passes("merge-launches{most=3}")
    assert made == MergeLaunchesPass(most=3)
    with pytest.raises(PassError, match="1 to 32"):
        pipeline.parse_passes("merge-launches{most=0}")[0].apply(None, None)  # type: ignore[arg-type]
