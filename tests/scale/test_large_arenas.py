"""Arenas of more than 4 GiB: planned, verified, allocated as they are touched, and right behind byte 2**32."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import qcompiler as qc
from qcompiler.errors import PlanError
from qcompiler.plan.plan import Plan
from qcompiler.plan.verify import verify_plan

WIDTH, MOST = 1024, 600_000
"""A row of 4 KiB, and as many of them as 2.3 GiB hold."""


class Branches(torch.nn.Module):
    """Four intermediate results that live at once: none can take another's place, nor be joined with a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(8, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.out = torch.nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.into(x)
        soft, normal = torch.softmax(wide, -1), self.norm(wide)
        return self.out(soft) + self.out(normal) + self.out(wide)


@pytest.fixture(scope="module")
def program() -> Any:
    torch.manual_seed(0)
    return qc.qcompile(Branches().eval(), (torch.randn(3, 8),), dynamic_shapes={"x": {0: ("b", 1, MOST)}})


def activations(plan: Plan) -> tuple[int, dict[str, int]]:
    """Bytes of the arena of activations, and the offsets of its buffers."""
    (arena,) = [arena for arena in plan.arenas if arena.kind == "activations"]
    return arena.nbytes, {b.name: b.offset for b in plan.buffers if b.arena == arena.name}


def far_buffer(plan: Plan) -> str:
    nbytes, offsets = activations(plan)
    assert nbytes > 1 << 32
    name = max(offsets, key=offsets.__getitem__)
    assert offsets[name] >= 1 << 32
    return name


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_program_with_buffers_behind_byte_2_to_the_32_runs(program: Any, stepwise: bool) -> None:
    far_buffer(program.plan)
    session = program.run.session(stepwise=stepwise)
    for rows in (1, 7):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(session(x), program.oracle(x), rtol=1e-5, atol=1e-5)


def test_the_verifier_sees_buffers_that_overlap_behind_byte_2_to_the_32(program: Any) -> None:
    """The far buffer is moved onto another by 64 bytes less than that one's size, and out of its arena."""
    plan: Plan = program.plan
    verify_plan(plan)
    name = far_buffer(plan)
    nbytes, offsets = activations(plan)
    sizes = {b.name: b.nbytes for b in plan.buffers}
    before = max((other for other in offsets if other != name), key=offsets.__getitem__)
    end = offsets[before] + sizes[before]
    with pytest.raises(PlanError, match=r"overlap|share"):
        verify_plan(moved(plan, name, end - 64))
    with pytest.raises(PlanError, match="arena"):
        verify_plan(moved(plan, name, nbytes - sizes[name] + 64))


def moved(plan: Plan, name: str, offset: int) -> Plan:
    buffers = tuple(
        msgspec.structs.replace(buffer, offset=offset) if buffer.name == name else buffer for buffer in plan.buffers
    )
    return msgspec.structs.replace(plan, buffers=buffers)


def test_a_simulated_gpu_takes_memory_of_a_large_arena_as_it_is_touched() -> None:
    torch.manual_seed(0)
    program = qc.qcompile(
        Branches().eval(), (torch.randn(3, 8),), dynamic_shapes={"x": {0: ("b", 1, MOST)}}, device="sim:0"
    )
    far_buffer(program.plan)
    x = torch.randn(2, 8)
    before = resident()
    torch.testing.assert_close(program(x), program.oracle(x), rtol=1e-5, atol=1e-5)
    assert resident() - before < 1 << 30


def resident() -> int:
    """Bytes of anonymous memory that this process holds."""
    from pathlib import Path

    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_resident_memory_is_measured() -> None:
    before = resident()
    held = np.ones(1 << 26, np.uint8)
    assert resident() - before > 1 << 25
    del held
