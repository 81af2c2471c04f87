"""assign-streams, plan-memory and verify-schedule on hand-built schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, i64

from qcompiler.errors import DeviceAssignmentError, PassError, QCompilerError, ScheduleError
from qcompiler.ir import rt
from qcompiler.ir.context import QCContext
from qcompiler.ir.rt_schedule import Schedule
from qcompiler.passes.assign_streams import DEFAULT_STREAMS, AssignStreamsPass
from qcompiler.passes.plan_memory import PlanMemoryPass
from qcompiler.passes.schedule.step_order import dependences
from qcompiler.passes.schedule.stream_memory import ActivationMemory
from qcompiler.passes.verify_schedule import VerifySchedulePass
from qcompiler.plan.kernel import Operand
from qcompiler.plan.plan import Symbol, TensorSig, View

ROWS = 16


def operand(name: str, access: str) -> Operand:
    return Operand(name=name, dtype="f32", access=access, shape=("s", 4), strides=(4, 1))  # type: ignore[arg-type]


def view(buffer: str) -> View:
    return View(buffer=buffer, dtype="f32", shape=("s", 4), strides=(4, 1))


def launch(reads: str, write: str) -> rt.LaunchOp:
    """`launch("ab", "c")`: a kernel that reads the buffers a and b and writes c."""
    return rt.LaunchOp(f"k{len(reads)}", [view(name) for name in (*reads, write)])


def copy(source: str, target: str) -> rt.CopyOp:
    return rt.CopyOp(view(source), view(target))


class Builder:
    """Modules over three devices: single letters name activation buffers (A–L host, M–S gpu0, T–Z gpu1)."""

    def __init__(self) -> None:
        self.ctx = QCContext.default()

    @staticmethod
    def device(buffer: str) -> str:
        if buffer in "xy" or buffer <= "L":
            return "host"
        return "gpu0" if buffer <= "S" else "gpu1"

    def module(self, steps: Sequence[rt.StepOp]) -> ModuleOp:
        names = sorted({v.buffer for step in steps for v in step.view_records} | {"x", "y"})
        nbytes = 4 * 4 * ROWS
        arenas = [
            rt.ArenaOp("in", "host", "input", 0, "main"),
            rt.ArenaOp("out", "host", "output", 0, "main"),
            *(rt.ArenaOp(f"act.{d}", d, "activations", 0, "main") for d in ("host", "gpu0", "gpu1")),
        ]
        home = {"x": "in", "y": "out"}
        sigs = [[TensorSig(name=n, arena=home[n], dtype="f32", shape=("s", 4))] for n in "xy"]
        return ModuleOp(
            [
                rt.DeviceOp("host", "cpu"),
                rt.DeviceOp("gpu0", "cuda", 0),
                rt.DeviceOp("gpu1", "cuda", 1),
                *arenas,
                *(rt.BufferOp(n, home.get(n, f"act.{self.device(n)}"), nbytes) for n in names),
                *(
                    rt.KernelOp(f"k{n}", ["s"], [*(operand(f"in{i}", "r") for i in range(n)), operand("out", "w")])
                    for n in range(4)
                ),
                rt.EntryOp("main", [Symbol(name="s", min=1, max=ROWS)], *sigs, steps),
            ]
        )

    def apply(self, module: ModuleOp, compute_streams: int = DEFAULT_STREAMS) -> Schedule:
        for each in (AssignStreamsPass(compute_streams), PlanMemoryPass(), VerifySchedulePass()):
            each.apply(self.ctx, module)
            module.verify()
        return Schedule(module)


@pytest.fixture
def builder() -> Builder:
    return Builder()


def steps_of(schedule: Schedule) -> list[str]:
    found = []
    for step in schedule.entries["main"].steps:
        name = step.name.removeprefix("rt.")
        event = f" {rt.name_of(step.event)}" if isinstance(step, rt.RecordOp | rt.WaitOp) else ""
        found.append(f"{name}{event} on {step.stream_name}")
    return found


# --- assign-streams --------------------------------------------------------------------------------------------------


def test_a_cpu_has_one_stream_and_no_events(builder):
    schedule = builder.apply(builder.module([launch("x", "A"), launch("x", "B"), launch("AB", "y")]))
    assert steps_of(schedule) == ["launch on host.compute"] * 3
    assert list(schedule.streams) == ["host.compute"]
    assert not schedule.events


def test_a_copy_to_the_gpu_and_back_waits_on_both_sides(builder):
    schedule = builder.apply(builder.module([copy("x", "M"), launch("M", "N"), copy("N", "y")]))
    assert steps_of(schedule) == [
        "copy on gpu0.copy",
        "record e0 on gpu0.copy",
        "wait e0 on gpu0.compute",
        "launch on gpu0.compute",
        "record e1 on gpu0.compute",
        "wait e1 on gpu0.copy",
        "copy on gpu0.copy",
    ]


def test_one_record_serves_many_waits_and_order_that_exists_gets_none(builder):
    """Both kernels on gpu1 need the same copy; the second follows the first on its stream."""
    steps = [copy("x", "M"), launch("M", "N"), copy("N", "T"), launch("T", "U"), launch("TU", "V"), copy("V", "y")]
    schedule = builder.apply(builder.module(steps))
    kinds = [step.split()[0] for step in steps_of(schedule)]
    assert kinds.count("record") == kinds.count("wait") == 4
    assert "wait e2 on gpu1.compute" in steps_of(schedule)


def test_order_through_a_third_stream_needs_no_event_of_its_own(builder):
    """x goes to gpu0's M and on to gpu1; writing M again waits for its last reader only."""
    steps = [copy("x", "M"), launch("M", "N"), copy("N", "T"), launch("", "M"), launch("T", "U"), copy("U", "y")]
    schedule = builder.apply(builder.module(steps))
    waits = [step for step in steps_of(schedule) if step.startswith("wait")]
    assert len(waits) == 4


def test_a_write_waits_for_readers_on_other_streams(builder):
    """gpu1 copies N away; the kernel that overwrites N must wait for that copy."""
    steps = [launch("", "N"), copy("N", "T"), launch("", "N"), launch("N", "M"), copy("M", "y"), launch("T", "U")]
    listed = steps_of(builder.apply(builder.module(steps)))
    second = [i for i, step in enumerate(listed) if step == "launch on gpu0.compute"][1]
    assert listed[second - 1] == "wait e1 on gpu0.compute"


def test_streams_that_are_named_are_left_alone(builder):
    module = builder.module([launch("x", "y")])
    step = next(Schedule(module).entries["main"].steps)
    step.set_stream("mine")
    AssignStreamsPass().apply(builder.ctx, module)
    assert step.stream_name == "mine"
    assert not Schedule(module).streams


def test_half_named_streams_are_refused(builder):
    module = builder.module([launch("x", "A"), launch("A", "y")])
    next(Schedule(module).entries["main"].steps).set_stream("mine")
    with pytest.raises(PassError, match="name all or none"):
        AssignStreamsPass().apply(builder.ctx, module)


def test_a_kernel_across_devices_is_refused(builder):
    with pytest.raises(DeviceAssignmentError, match="'M' on gpu0, 'T' on gpu1; only a copy may cross"):
        AssignStreamsPass().apply(builder.ctx, builder.module([launch("M", "T")]))


# --- random graphs through all three passes --------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 25))
def test_what_the_passes_make_is_accepted_by_the_verifier(seed, count):
    """Random graphs over three devices: the verifier, which shares no code with the passes, agrees to every one."""
    rng = random.Random(seed)
    builder = Builder()
    steps: list[rt.StepOp] = []
    known: dict[str, set[str]] = {"host": {"x"}, "gpu0": set(), "gpu1": set()}
    homes = {"host": "ABCDEF", "gpu0": "MNOPQ", "gpu1": "TUVWX"}
    for _ in range(count):
        device = rng.choice(list(homes))
        target = rng.choice(homes[device])
        sources = sorted(known[device] - {target})
        if sources and rng.random() < 0.7:
            steps.append(launch("".join(rng.sample(sources, min(len(sources), rng.randint(1, 3)))), target))
        else:
            others = sorted(b for d in known for b in known[d] if b != target)
            steps.append(copy(rng.choice(others), target))
        known[device].add(target)
    steps.append(copy(rng.choice(sorted(set().union(*known.values()))), "y"))
    schedule = builder.apply(builder.module(steps))
    memory = ActivationMemory(schedule, steps, dependences(schedule, steps))
    arenas = [arena.record for arena in schedule.arenas.values()]
    planned = sum(arena.nbytes for arena in arenas if arena.kind == "activations")
    foreseen = memory.nbytes([str(step.stream_name) for step in steps])
    assert 0.66 * planned <= foreseen <= 1.5 * planned, "assign-streams foresees plan-memory, to a buffer or two"


def test_branches_on_a_gpu_get_streams_of_their_own(builder):
    """Two chains behind one copy: the second goes to a stream of its own, and the last kernel waits for it."""
    first = [launch("M", "N"), *(launch(a, b) for a, b in ("NO", "OP", "PQ"))]
    second = [launch("M", "R"), *(launch(a, b) for a, b in ("RS", "SR", "RS"))]
    schedule = builder.apply(builder.module([copy("x", "M"), *first, *second, launch("QS", "M"), copy("M", "y")]))
    listed = steps_of(schedule)
    assert [step for step in listed if step.startswith("launch")] == [
        *["launch on gpu0.compute"] * 4, *["launch on gpu0.compute1"] * 5
    ]  # fmt: skip
    assert list(schedule.streams) == ["gpu0.compute", "gpu0.compute1", "gpu0.copy"]


def test_the_number_of_compute_streams_is_an_option(builder):
    chains = [[launch("M", a), launch(a, b), launch(b, a), launch(a, b)] for a, b in ("NO", "PQ")]
    steps = [copy("x", "M"), *chains[0], *chains[1], launch("OQ", "M"), copy("M", "y")]
    module = builder.module(steps)
    assert list(builder.apply(module, compute_streams=1).streams) == ["gpu0.compute", "gpu0.copy"]
    with pytest.raises(PassError, match="compute-streams is 0; it is a number from 1 to 16"):
        builder.apply(builder.module([launch("x", "y")]), compute_streams=0)


# --- plan-memory -----------------------------------------------------------------------------------------------------


def offsets(schedule: Schedule) -> dict[str, int]:
    return {name: op.record.offset for name, op in schedule.buffers.items()}


def test_a_chain_needs_two_buffers(builder):
    schedule = builder.apply(builder.module([launch("x", "A"), launch("A", "B"), launch("B", "C"), launch("C", "y")]))
    found = offsets(schedule)
    assert found["A"] == found["C"] != found["B"]
    assert schedule.arenas["act.host"].record.nbytes == 2 * 16 * ROWS
    (decision,) = [d for d in builder.ctx.report.of("plan-memory") if d.path == "act.host"]
    assert decision.what == "512 bytes for 3 buffers"
    assert decision.why == "without sharing 768, at least 512 live at once"


def test_memory_is_not_shared_across_streams_without_an_order(builder):
    """M is dead in the list when gpu0's copy stream writes O, but nothing orders the copy after M's last reader."""
    steps = [copy("x", "M"), launch("M", "N"), copy("x", "O"), launch("NO", "P"), copy("P", "y")]
    module = builder.module(steps)
    found = offsets(builder.apply(module))
    assert found["M"] != found["O"]


def test_memory_is_shared_across_streams_that_an_event_orders(builder):
    """Copying N home waits for the kernel that read M, so what is copied in afterwards may take M's bytes."""
    steps = [copy("x", "M"), launch("M", "N"), copy("N", "A"), copy("x", "O"), launch("O", "P"), copy("P", "y")]
    schedule = builder.apply(builder.module(steps))
    assert offsets(schedule)["O"] == offsets(schedule)["M"]
    assert schedule.arenas["act.gpu0"].record.nbytes == 2 * 16 * ROWS


def test_buffers_with_offsets_keep_them(builder):
    module = builder.module([launch("x", "A"), launch("A", "B"), launch("B", "y")])
    Schedule(module).buffers["A"].set_offset(1024)
    assert offsets(builder.apply(module)) == {"A": 1024, "B": 0, "x": 0, "y": 0}


def test_large_buffers_leave_gaps_that_small_ones_fill(builder):
    module = builder.module([launch("x", "A"), launch("A", "B"), launch("AB", "C"), launch("C", "D"), launch("D", "y")])
    schedule = Schedule(module)
    for name, nbytes in {"A": 4096, "B": 1000, "C": 1000, "D": 1000}.items():
        schedule.buffers[name].nbytes = IntegerAttr(nbytes, i64)
    builder.apply(module)
    assert schedule.arenas["act.host"].record.nbytes == 4096 + 1024 + 1000


def test_constants_follow_the_stores_order_at_256_bytes(builder):
    builder.ctx.weights.add_array("unused", np.zeros(10, np.float32))
    builder.ctx.weights.add_array("second", np.zeros(10, np.float32))
    builder.ctx.weights.add_array("first", np.zeros(70, np.float32))
    module = builder.module([launch("x", "y")])
    extra = [
        rt.ArenaOp("w.host", "host", "constants"),
        rt.ArenaOp("w.gpu", "gpu0", "constants"),
        rt.BufferOp("w1", "w.host", 280, weight="first"),
        rt.BufferOp("w2", "w.host", 40, weight="second"),
        rt.BufferOp("w1.gpu", "w.gpu", 280, weight="first"),
    ]
    module.body.block.insert_ops_before(extra, module.body.block.ops.first)
    schedule = builder.apply(module)
    assert {n: o for n, o in offsets(schedule).items() if n.startswith("w")} == {"w1": 256, "w2": 0, "w1.gpu": 256}
    assert schedule.arenas["w.host"].record.nbytes == schedule.arenas["w.gpu"].record.nbytes == 536


def test_unknown_weight_is_refused(builder):
    module = builder.module([launch("x", "y")])
    extra = [rt.ArenaOp("w", "host", "constants"), rt.BufferOp("w1", "w", 280, weight="first")]
    module.body.block.insert_ops_before(extra, module.body.block.ops.first)
    AssignStreamsPass().apply(builder.ctx, module)
    with pytest.raises(PassError, match="holds the weight 'first', which the weight store does not have"):
        PlanMemoryPass().apply(builder.ctx, module)


def test_steps_without_streams_are_refused(builder):
    with pytest.raises(PassError, match="has no stream; run assign-streams"):
        PlanMemoryPass().apply(builder.ctx, builder.module([launch("x", "y")]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=25))
def test_placement_never_overlaps_what_lives_at_once_and_stays_near_the_bound(drawn):
    from qcompiler.passes.plan_memory import place
    from qcompiler.passes.schedule.lifetimes import Use

    sizes = [size for size, _, _ in drawn]
    lives = [(first, first + length) for _, first, length in drawn]
    uses = [[Use("main", [b + 1], [a], a, b)] for a, b in lives]
    placed = place(sizes, uses, {})
    assert all(offset % 64 == 0 for offset in placed)
    for i in range(len(drawn)):
        for j in range(i):
            if lives[i][0] <= lives[j][1] and lives[j][0] <= lives[i][1]:
                assert placed[i] + sizes[i] <= placed[j] or placed[j] + sizes[j] <= placed[i]
    bound = max(sum(-(-s // 64) * 64 for s, (a, b) in zip(sizes, lives, strict=True) if a <= t <= b) for t in range(30))
    assert max(o + s for o, s in zip(placed, sizes, strict=True)) <= 1.5 * bound + 64


# --- verify-schedule -------------------------------------------------------------------------------------------------


def test_verify_schedule_refuses_what_the_verifier_refuses(builder):
    module = builder.module([launch("x", "A"), launch("A", "y")])
    for op in Schedule(module).buffers.values():
        op.set_offset(0)
    for arena in Schedule(module).arenas.values():
        arena.set_nbytes(16 * ROWS)
    with pytest.raises(ScheduleError, match=r"step 0 .* names no stream; run assign-streams"):
        VerifySchedulePass().apply(builder.ctx, module)
    AssignStreamsPass().apply(builder.ctx, module)
    VerifySchedulePass().apply(builder.ctx, module)


def test_passes_need_a_compilation_context(builder):
    module = builder.module([launch("x", "y")])
    AssignStreamsPass().apply(Context(), module)
    for each in (PlanMemoryPass, VerifySchedulePass):
        with pytest.raises(QCompilerError, match="needs the weight store"):
            each().apply(Context(), module)
