"""`profile`: every step of a call is timed, counted and really run, and the session is as usable as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import ArgumentError, CompileFailedError, IndexOutOfRangeError
from qcompiler.inspect.eager import eager_times
from qcompiler.plan.plan import Launch, Select
from qcompiler.runtime import limits
from qcompiler.runtime.profile import PRODUCTS
from qcompiler.runtime.profile_cpu import WARM_UP


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


@pytest.mark.parametrize("rows", [1, 7, pytest.param(64, marks=pytest.mark.slow)])
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
    session.profile(ids, rounds=3, keep_states=False)
    # Each round is a call, the compiled function, and the steps twice: timed, and counted.
    assert session(ids)[1].item() == 4 * (WARM_UP + 3) + 1


def test_states_are_as_before_a_profile_also_after_an_error(program: Any) -> None:
    session = program.session()
    session(torch.arange(5))
    session.profile(torch.arange(5), rounds=2)
    with pytest.raises(IndexOutOfRangeError):
        session.profile(torch.full((3,), 50))
    assert session(torch.arange(5))[1].item() == 2


@pytest.mark.parametrize("counts", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("threads", [1, 2])
def test_steps_that_are_timed_give_the_bits_of_a_call(program: Any, tmp_path: Any, threads: int, counts: bool) -> None:
    program.save(tmp_path / "counter.qca")
    run = qc.load(tmp_path / "counter.qca", num_threads=threads)
    ids = torch.arange(40)
    untimed, timed = run.session(), run.session()
    expected = untimed(ids)
    binding, results, _sources = timed._bind((ids,), {}, None)
    for result in results:
        result.fill_(77)
    timed.walk(binding).run(counts=counts)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    assert all((untimed.states()[name] == data).all() for name, data in timed.states().items())


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


def test_a_loaded_program_knows_what_each_launch_has_to_do(program: Any, tmp_path: Any) -> None:
    program.save(tmp_path / "counter.qca")
    found = qc.load(tmp_path / "counter.qca", num_threads=1).profile(np.arange(7), rounds=2)
    linear, table = (next(step for step in found.steps if step.kind == kind) for kind in ("linear", "embedding"))
    assert (linear.paths, linear.path_from, linear.arithmetic) == (("linear",), "weights", "fp32")
    assert linear.operations >= 2 * 7 * 256 * 4096 and 4096 * 256 // 2 < linear.nbytes < 4096 * 256
    assert table.paths == ("table",) and table.operations == 0 < table.nbytes
    limits = found.machine.limits
    assert linear.limit_us == 1e6 * max(linear.operations / limits.fp32, linear.nbytes / limits.bandwidth)
    assert linear.estimate_us > linear.limit_us and found.machine.rates == "measured"
    assert found.timing_us == found.round_us - found.entry_us and found.round_us > 0
    assert {step.id for step in found.steps} == {f"{found.entry}/{step.step}" for step in found.steps}


@pytest.mark.slow
def test_eager_torch_stands_beside_the_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Sequential(nn.ReLU(), nn.Linear(96, 64))).eval()
    found = qc.qcompile(model, (torch.randn(4, 64),)).profile(torch.randn(4, 64), rounds=2, eager=model)
    modules = {each.name: each.eager_us for each in found.by_module()}
    assert modules.keys() == {"0", "1.1"} and all(us > 0 for us in modules.values())
    assert found.eager.modules.keys() == {"", "0", "1", "1.0", "1.1"}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ArgumentError, match="give the float model"):
        eager_times("model", (torch.randn(4, 64),))


def test_an_error_in_the_float_model_comes_before_the_profile(program: Any) -> None:
    class Fails(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not today")

    before = program(torch.arange(5))[1].item()
    with pytest.raises(RuntimeError, match="not today"):
        program.profile(torch.arange(5), rounds=2, keep_states=False, eager=Fails())
    assert program(torch.arange(5))[1].item() == before + 1


def test_times_are_not_lost_if_the_limits_cannot_be_measured(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(threads: int, isa: str) -> None:
        raise CompileFailedError("the disk is full")

    monkeypatch.setattr(limits, "cpu_limits", fails)
    found = program.profile(torch.arange(5), rounds=1)
    assert found.machine is None and found.steps_us > 0 and "no limit: the probes" in str(found)
    assert "the disk is full" in found.machine_missing
