"""`profile`: every step of a call is timed, counted and really run, and the session is as usable as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qcompiler as qc
from qcompiler.errors import ArgumentError, DeviceUnavailableError, IndexOutOfRangeError
from qcompiler.plan.plan import Launch, Select
from qcompiler.runtime.profile import PRODUCTS, WARM_UP


class Counter(torch.nn.Module):
    """Ids to rows of a table, through a linear; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 256)
        self.linear = torch.nn.Linear(256, 4096)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return torch.softmax(self.linear(self.table(ids)), -1), self.calls.clone()


@pytest.fixture(scope="module")
def program() -> Any:
    torch.manual_seed(0)
    shapes = {"ids": {0: ("n", 1, 65)}}
    return qc.qcompile(Counter().eval(), (torch.arange(7),), dynamic_shapes=shapes, quant="nf4")


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("threads", [1, 2])
def test_each_launch_of_the_plan_is_timed(program: Any, tmp_path: Any, rows: int, threads: int) -> None:
    program.save(tmp_path / "counter.qca")
    run = qc.load(tmp_path / "counter.qca", num_threads=threads)
    found = run.profile(torch.arange(rows) % 50, rounds=4)
    (entry,) = [entry for entry in run.entries if entry.name == found.entry]
    launches = [number for number, step in enumerate(entry.steps) if isinstance(step, Launch | Select)]
    kernels = {spec.name: spec.template for spec in run.plan.kernels}
    assert [step.step for step in found.steps if step.kernel] == launches
    assert all(step.kind == kernels[step.kernel] for step in found.steps if step.kernel)
    assert (found.entry, found.symbols) == (("decode[n=1]", {}) if rows == 1 else ("prefill[n<=65]", {"n": rows}))
    assert (found.threads, found.rounds) == (threads, 4)
    assert all(step.us >= 0 for step in found.steps) and found.call_us > 0 and found.entry_us > 0
    (linear,) = [step for step in found.steps if step.kind in PRODUCTS]
    # A product of 4096 x 256 is worth handing over. With one thread it opens no region or runs its tasks inline.
    assert linear.regions <= 1 and (threads == 1 or (linear.regions == 1 and linear.tasks > 1 and linear.task_us > 0))
    assert sum(kind.us for kind in found.kinds()) == pytest.approx(found.steps_us)
    assert 0 < found.not_product < 1


def test_the_steps_really_run(program: Any) -> None:
    session = program.session()
    ids = torch.arange(5)
    session.profile(ids, rounds=3)
    # Each round is a call, the compiled function, and the steps twice: timed, and counted.
    assert session(ids)[1].item() == 4 * (WARM_UP + 3) + 1


def test_a_profile_leaves_answers_as_they_are(program: Any) -> None:
    session, ids = program.session(), torch.arange(9)
    before = session(ids)[0]
    kept = before.clone()
    session.profile(ids, rounds=2)
    assert torch.equal(session(ids)[0], kept) and torch.equal(before, kept)


def test_an_error_of_a_kernel_is_the_call_s_own(program: Any) -> None:
    session = program.session()
    with pytest.raises(IndexOutOfRangeError, match="met the index 50"):
        session.profile(torch.full((3,), 50))
    session(torch.arange(3))  # not busy


def test_a_part_in_torch_is_timed_as_a_step() -> None:
    class Middle(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(torch.lgamma(self.first(x).abs() + 1))
            return result

    program = qc.qcompile(Middle().eval(), (torch.randn(3, 64),), fallback="torch")
    found = program.profile(torch.randn(3, 64), rounds=2)
    kinds = [step.kind for step in found.steps]
    assert kinds.count("torch") == 1 and kinds[0] != "torch" and kinds[-1] == "linear"
    assert next(step.us for step in found.steps if step.kind == "torch") > 0


def test_no_rounds_are_refused(program: Any) -> None:
    with pytest.raises(ArgumentError, match="one round or more"):
        program.profile(torch.arange(3), rounds=0)


def test_the_table_adds_up(program: Any) -> None:
    found = program.profile(torch.arange(3), rounds=2)
    text = str(found)
    assert text.startswith("prefill[n<=65], n=3: ") and "outside of steps" in text and "not matrix products" in text
    figures = found.as_dict()
    assert figures["outside_us"] == pytest.approx(figures["call_us"] - sum(step["us"] for step in figures["steps"]))


def test_a_device_says_what_profiles_it() -> None:
    program = qc.qcompile(torch.nn.Linear(16, 8).eval(), (torch.randn(2, 16),), device="sim:0")
    with pytest.raises(DeviceUnavailableError, match="Nsight"):
        program.profile(torch.randn(2, 16))
