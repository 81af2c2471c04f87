"""The schedule verifier against a slow second opinion, on mutants of sound schedules, at speed, and rule by rule."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator

import msgspec
import pytest
from hadamard_cases import spec as hadamard
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracle import is_sound

from qcompiler.errors import PlanError, ScheduleError
from qcompiler.plan.kernel import FormatRef, Operand
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    EntryPoint,
    Launch,
    MovedParameter,
    Plan,
    Record,
    Step,
    Symbol,
    TensorSig,
    View,
    Wait,
    WeightEntry,
    WeightPart,
    from_json,
    to_json,
)
from qcompiler.plan.verify import verify_plan

replace = msgspec.structs.replace


def refusal(plan: Plan, **options: object) -> str | None:
    """The rule that refuses the plan, or None."""
    try:
        verify_plan(plan, **options)  # type: ignore[arg-type]
    except ScheduleError as error:
        return error.rule
    return None


def with_steps(plan: Plan, steps: list[Step]) -> Plan:
    return replace(plan, entries=(replace(plan.entries[0], steps=tuple(steps)),))


# --- random schedules ------------------------------------------------------------------------------------------------

SLOTS = {"a": 0, "b": 64, "c": 0, "d": 64}
step_kinds = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from("xabcd"), st.sampled_from("abcdy")),
    st.tuples(st.just("binary"), st.sampled_from(["xa", "ab", "bd", "cx", "cd"]), st.sampled_from("abcdy")),
    st.tuples(st.just("order"), st.sampled_from("012"), st.sampled_from("012")),
    st.tuples(st.just("order"), st.sampled_from("012"), st.sampled_from("012")),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("s0", "s0", "s1", "s2")), step_kinds), max_size=9), st.booleans())
def test_verdict_equals_that_of_a_slow_oracle(maker, drawn, straight):
    """Buffers share all their bytes or none and views are whole, so the verifier's judgement is exact."""
    steps: list[Step] = [maker.launch("s0", x="r", a="w")] if straight else []
    for stream, (kind, first, second) in drawn:
        if kind == "order":
            event = f"e{len(steps)}"
            steps += [Record(stream=f"s{first}", event=event), Wait(stream=f"s{second}", event=event)]
        elif second in first:
            continue
        else:
            steps.append(maker.launch(stream, **dict.fromkeys(first, "r"), **{second: "w"}))
    plan = maker.plan(steps, SLOTS, streams=3, events=40, outputs=False)
    assert (refusal(plan) is None) == is_sound(plan, plan.entries[0], {})


views = st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(("s0", "s1")), st.booleans(), st.sampled_from("ab"), views), max_size=6),
    st.sampled_from((64, 32, 0)),
)
def test_nothing_unsound_is_accepted_for_partial_views(maker, drawn, gap):
    """Parts of buffers that overlap in parts: the verifier may refuse more than it must, never less."""
    steps: list[Step] = [maker.launch("s0", x="r", a="w"), maker.launch("s0", x="r", b="w")]
    kernels = []
    steps += [Record(stream="s0", event="e0"), Wait(stream="s1", event="e0")]
    for number, (stream, is_write, buffer, (offset, count, stride)) in enumerate(drawn):
        if offset + (count - 1) * stride >= 16:
            continue
        view = maker.view(buffer, offset, count, stride)
        access = "w" if is_write else "r"
        spec = maker.kernel([access], f"k{number}")
        operand = replace(spec.operands[0], shape=view.shape, strides=view.strides)
        kernels.append(replace(spec, operands=(operand,)))
        steps.append(Launch(kernel=spec.name, stream=stream, operands=(view,)))
    plan = maker.plan(steps[:4], {"a": 0, "b": gap // 64 * 64, "z": 64}, outputs=False)
    plan = with_steps(replace(plan, kernels=(*plan.kernels, *kernels)), steps)
    if refusal(plan) is None:
        assert is_sound(plan, plan.entries[0], {})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("aab"), views), max_size=12), st.booleans())
def test_a_read_is_refused_just_if_a_byte_of_it_was_never_written(maker, drawn, in_halves):
    """One stream and buffers apart: what remains is which bytes are written, and that is judged exactly."""
    halves = [(True, "a", (0, 8, 2)), (True, "a", (1, 8, 2))] if in_halves else []
    steps: list[Step] = []
    kernels = []
    for number, (is_write, buffer, (offset, count, stride)) in enumerate([*halves, *drawn]):
        if offset + (count - 1) * stride >= 16:
            continue
        view = maker.view(buffer, offset, count, stride)
        spec = maker.kernel(["w" if is_write else "r"], f"k{number}")
        kernels.append(replace(spec, operands=(replace(spec.operands[0], shape=view.shape, strides=view.strides),)))
        steps.append(Launch(kernel=spec.name, stream="s0", operands=(view,)))
    plan = replace(maker.plan([], {"a": 0, "b": 64}, outputs=False), kernels=tuple(kernels))
    plan = with_steps(plan, steps)
    assert refusal(plan) == (None if is_sound(plan, plan.entries[0], {}) else "unwritten-read")


# --- mutants of the hand-written schedules ---------------------------------------------------------------------------


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    steps = list(plan.entries[0].steps)
    streams = [stream.name for stream in plan.streams]
    for number, step in enumerate(steps):
        yield f"drop step {number}", with_steps(plan, steps[:number] + steps[number + 1 :])
        for stream in streams:
            if stream != step.stream:
                moved = [*steps[:number], replace(step, stream=stream), *steps[number + 1 :]]
                yield f"step {number} on {stream}", with_steps(plan, moved)
        if number:
            swapped = [*steps[: number - 1], step, steps[number - 1], *steps[number + 1 :]]
            yield f"swap steps {number - 1} and {number}", with_steps(plan, swapped)
        if isinstance(step, Record | Wait):
            for event in plan.events:
                if event.name != step.event:
                    other = [*steps[:number], replace(step, event=event.name), *steps[number + 1 :]]
                    yield f"step {number} with {event.name}", with_steps(plan, other)
    for i, buffer in enumerate(plan.buffers):
        for offset in {b.offset for b in plan.buffers if b.arena == buffer.arena} | {buffer.offset + 64}:
            if offset != buffer.offset:
                buffers = (*plan.buffers[:i], replace(buffer, offset=offset), *plan.buffers[i + 1 :])
                yield f"{buffer.name} at {offset}", replace(plan, buffers=buffers)


@pytest.mark.parametrize("name", ["two_devices", "shared_memory", "ring"])
def test_mutants_are_refused_unless_they_are_sound(name, schedules):
    plan = schedules(name)
    assert refusal(plan) is None
    symbols = {symbol.name: 3 for symbol in plan.entries[0].symbols}
    refused = survived = 0
    for what, mutant in mutants(plan):
        if refusal(mutant) is not None:
            refused += 1
            continue
        survived += 1
        assert is_sound(mutant, mutant.entries[0], symbols), f"{what}: accepted, but unsound"
    assert refused > 2 * survived


@pytest.mark.parametrize("name", ["two_devices", "shared_memory", "ring", "two_streams"])
def test_every_wait_and_every_record_is_needed(name, schedules):
    plan = schedules(name)
    steps = list(plan.entries[0].steps)
    for number, step in enumerate(steps):
        if isinstance(step, Wait | Record):
            rest = steps[:number] + steps[number + 1 :]
            assert refusal(with_steps(plan, rest)) is not None, f"step {number} is not missed"


@pytest.mark.parametrize("name", ["two_devices", "shared_memory", "two_streams"])
def test_every_copy_and_every_launch_is_needed(name, schedules):
    """Not so in the ring, where a slot that is not refilled still holds the chunk before."""
    plan = schedules(name)
    steps = list(plan.entries[0].steps)
    for number, step in enumerate(steps):
        if isinstance(step, Copy | Launch):
            rest = steps[:number] + steps[number + 1 :]
            assert refusal(with_steps(plan, rest)) is not None, f"step {number} is not missed"


# --- speed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3])
def test_verifying_twice_as_many_steps_takes_twice_the_work(maker, streams):
    names = [f"t{i}" for i in range(60)]

    def calls(count: int) -> int:
        steps: list[Step] = [maker.launch("s0", x="r", t0="w")]
        for i in range(1, count):
            before, now = names[(i - 1) % 60], names[i % 60]
            stream = f"s{i % streams}"
            if streams > 1:
                event = f"e{i}"
                steps += [Record(stream=f"s{(i - 1) % streams}", event=event), Wait(stream=stream, event=event)]
            steps.append(maker.launch(stream, **{before: "r", now: "w"}))
        plan = maker.plan(
            steps, {name: 64 * (i % 7) for i, name in enumerate(names)}, streams=streams, events=count, outputs=False
        )
        profile = cProfile.Profile()
        profile.runcall(verify_plan, plan)
        return int(pstats.Stats(profile).total_calls)

    assert calls(2000) < 2.2 * calls(1000)


# --- single rules ----------------------------------------------------------------------------------------------------


def simple(maker, **options: object) -> Plan:
    return maker.plan([maker.launch("s0", x="r", y="w")], {}, **options)


def test_captured_entry_may_not_run_on_the_cpu(maker):
    assert refusal(simple(maker), captured=("main",)) is None
    assert refusal(simple(maker, kind="cpu")) is None
    assert refusal(simple(maker, kind="cpu"), captured=("main",)) == "capture-host-work"


def test_captured_entry_may_not_be_empty(maker):
    plan = maker.plan([], {}, outputs=False)
    assert refusal(plan) is None
    assert refusal(plan, captured=("main",)) == "capture-empty"
    assert refusal(plan, captured=("other",)) == "unknown-entry"


def test_in_place_is_for_loops_that_read_where_they_write(maker):
    plan = maker.plan([maker.launch("s0", x="r", a="w"), maker.launch("s0", a="r", y="w")], {"a": 0})
    shifted = Launch(kernel="k_r_w", stream="s0", operands=(maker.view("a"), maker.view("a")))
    steps = [plan.entries[0].steps[0], shifted, plan.entries[0].steps[1]]
    assert refusal(with_steps(plan, steps)) is None
    kernels = []
    for kernel in plan.kernels:
        moved = (replace(kernel.operands[0], shape=(8,)), replace(kernel.operands[1], shape=(8,)))
        kernels.append(replace(kernel, name="half", operands=moved))
    half = Launch(kernel="half", stream="s0", operands=(maker.view("a", 0, 8), maker.view("a", 4, 8)))
    plan = replace(plan, kernels=(*plan.kernels, kernels[0]))
    assert refusal(with_steps(plan, [steps[0], half, steps[2]])) == "operand-alias"
    apart = Launch(kernel="half", stream="s0", operands=(maker.view("a", 0, 8), maker.view("a", 8, 8)))
    assert refusal(with_steps(plan, [steps[0], apart, steps[2]])) is None


def test_columns_of_one_buffer_do_not_conflict(maker):
    """Two streams write the left and the right half of every row."""
    left = View(buffer="y", dtype="f32", shape=("s", 2), strides=(4, 1))
    right = replace(left, offset=2)
    near = replace(left, offset=1)
    operand = Operand(name="out", dtype="f32", access="w", shape=("s", 2), strides=(4, 1))
    spec = replace(maker.kernel(["w"]), name="half", symbols=("s",), operands=(operand,))
    sig = TensorSig(name="y", arena="out", dtype="f32", shape=("s", 4))
    base = maker.plan([], {})
    entry = replace(base.entries[0], symbols=(Symbol(name="s", min=1, max=4),), outputs=(sig,))
    entry = replace(entry, inputs=(TensorSig(name="x", arena="in", dtype="f32", shape=("s",)),))
    plan = replace(base, kernels=(spec,), entries=(entry,))
    both = [Launch(kernel="half", stream=f"s{i}", operands=(view,)) for i, view in enumerate((left, right))]
    assert refusal(with_steps(plan, both)) is None
    assert refusal(with_steps(plan, [both[0], replace(both[1], operands=(near,))])) == "unordered-write"


def constant_plan(maker, entry: WeightEntry, view: View, nbytes: int = 4096) -> Plan:
    operand = Operand(
        name="w", dtype=view.dtype, access="r", shape=view.shape, strides=view.strides, format=view.format,
        layout=view.layout,
    )  # fmt: skip
    base = simple(maker)
    spec = replace(maker.kernel(["r", "w"]), name="use", operands=(operand, base.kernels[0].operands[1]))
    launch = Launch(kernel="use", stream="s0", operands=(view, maker.view("y")))
    return with_steps(
        replace(
            base,
            kernels=(spec,),
            arenas=(*base.arenas, Arena(name="weights", device="d", kind="constants", nbytes=nbytes)),
            buffers=(*base.buffers, Buffer(name="w", arena="weights", offset=entry.offset, nbytes=entry.nbytes)),
            weights=(entry,),
        ),
        [launch],
    )


NF4 = FormatRef(name="nf4", params={"block": 64})
PACKED = View(buffer="w", dtype="f32", shape=(16, 64), format=NF4, layout="cpu_p16_v1")
ENTRY = WeightEntry(name="w", dtype="f32", shape=(16, 64), offset=256, nbytes=576, format=NF4, layout="cpu_p16_v1")
PLAIN = WeightEntry(name="w", dtype="f32", shape=(16,), offset=0, nbytes=64)


def test_packed_weight_is_accepted_as_it_is_stored(maker):
    assert refusal(constant_plan(maker, ENTRY, PACKED)) is None


def test_a_record_of_moved_parameters_names_stored_ones_once_with_what_moved_them(maker):
    named = constant_plan(maker, replace(ENTRY, parameters=("a.weight", "b.weight")), PACKED)
    first, second = (MovedParameter(parameter=path, by=("equalise",)) for path in ("a.weight", "b.weight"))
    for record in (None, (), (first,), (second, first)):
        assert refusal(replace(named, moved=record)) is None
        assert from_json(to_json(replace(named, moved=record))).moved == record
    for record in ((first, first), (replace(first, parameter="c.weight"),), (replace(first, by=()),)):
        assert refusal(replace(named, moved=record)) == "moved-parameter"
    with pytest.raises(PlanError, match="moved"):
        from_json(to_json(replace(named, moved=(replace(first, by=("other",)),))))


def test_a_transform_of_inputs_without_a_moved_weight_is_refused():
    kernels = (hadamard("transform", "f32", 3, 64, 32),)
    plan = Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), entries=(), kernels=kernels)
    assert refusal(plan) is None, "nothing is recorded"
    assert refusal(replace(plan, moved=())) == "moved-parameter"


@pytest.mark.parametrize(
    ("entry", "view", "rule"),
    [
        (replace(ENTRY, layout="canonical"), PACKED, "weight-mismatch"),
        (replace(ENTRY, format=replace(NF4, params={"block": 128})), PACKED, "weight-mismatch"),
        (replace(ENTRY, shape=(64, 16)), PACKED, "weight-mismatch"),
        (ENTRY, replace(PACKED, dtype="bf16"), None),  # another type to decode to
        (ENTRY, replace(PACKED, dtype="i32"), "weight-mismatch"),
        (ENTRY, replace(PACKED, offset=4), "view-rank"),
        (replace(ENTRY, offset=64), PACKED, "misaligned-weight"),
        (replace(ENTRY, offset=-256), PACKED, "negative-offset"),
        (replace(ENTRY, offset=3840), PACKED, "buffer-outside-arena"),
        (replace(PLAIN, shape=(15,)), View(buffer="w", dtype="f32", shape=(16,), strides=(1,)), "weight-size"),
        (PLAIN, View(buffer="w", dtype="f32", shape=(17,), strides=(1,)), "view-outside-buffer"),
        (PLAIN, View(buffer="w", dtype="i32", shape=(16,), strides=(1,)), "weight-mismatch"),
    ],
)  # fmt: skip
def test_weight_and_view_must_agree(maker, entry, view, rule):
    assert refusal(constant_plan(maker, entry, view)) == rule


def test_a_view_sees_no_more_than_its_weight(maker):
    """A larger buffer, which begins where the weight does, shows the next one as well."""
    view = View(buffer="w", dtype="f32", shape=(32,), strides=(1,))
    plan = constant_plan(maker, PLAIN, view)
    large = replace(plan, buffers=tuple(replace(b, nbytes=128) if b.name == "w" else b for b in plan.buffers))
    assert refusal(plan) == "view-outside-buffer"
    assert refusal(large) == "weight-mismatch"


def test_a_view_of_an_argument_stays_in_the_caller_s_array(maker):
    """The arena has the largest size; the array of a call may be smaller."""
    for side, name in (("inputs", "x"), ("outputs", "y")):
        plan = maker.plan([maker.launch("s0", x="r", y="w")], {})
        entry = plan.entries[0]
        symbols = (Symbol(name="s", min=1, max=16),)
        given = (TensorSig(name="n", arena="n", dtype="f32", shape=("s",)),)
        sig = replace(getattr(entry, side)[0], shape=("s",))
        entry = replace(entry, **{side: (sig,), "symbols": symbols})
        arena = Arena(name="n", device="d", kind="input", nbytes=64, entry="main")
        plan = replace(plan, arenas=(*plan.arenas, arena), entries=(replace(entry, inputs=(*entry.inputs, *given)),))
        assert refusal(plan) == "view-outside-buffer", name


def test_an_input_arena_needs_an_argument(maker):
    plan = maker.plan([maker.launch("s0", x="r", y="w")], {})
    arena = Arena(name="more", device="d", kind="input", nbytes=64, entry="main")
    buffers = tuple(replace(b, arena="more") if b.name == "x" else b for b in plan.buffers)
    assert refusal(replace(plan, arenas=(*plan.arenas, arena), buffers=buffers)) == "signature-arena"


def test_a_packed_copy_fits_both_buffers(maker):
    """The executor copies the bytes of the format, whatever else the buffers hold; a smaller target would be
    overrun."""
    packed = View(buffer="w", dtype="f32", shape=(16, 64), format=NF4, layout="cpu_p16_v1")
    plan = constant_plan(maker, ENTRY, packed)
    canonical = replace(ENTRY, layout="canonical")
    source = replace(packed, layout="canonical")
    step = Copy(stream="s0", source=source, target=replace(source, buffer="a"))
    for nbytes, room, rule in ((576, 576, None), (1024, 576, None), (576, 1024, None), (1024, 575, "packed-size")):
        more = replace(
            plan,
            weights=(canonical,),
            arenas=tuple(replace(each, nbytes=2048) if each.name == "act" else each for each in plan.arenas),
            buffers=(
                *(replace(b, nbytes=nbytes) if b.name == "w" else b for b in plan.buffers if b.name != "a"),
                Buffer(name="a", arena="act", offset=0, nbytes=room),
            ),
        )
        launch = maker.launch("s0", x="r", y="w")
        more = replace(more, kernels=(maker.kernel(["r", "w"]),))
        assert refusal(with_steps(more, [launch, step])) == rule


def test_weight_directory_is_checked(maker):
    plan = constant_plan(maker, ENTRY, PACKED)
    over = replace(ENTRY, name="v", offset=512)
    assert refusal(replace(plan, weights=(ENTRY, over))) == "weight-overlap"
    assert refusal(replace(plan, weights=(ENTRY, replace(over, offset=3840)))) == "weight-outside-arena"
    assert refusal(replace(plan, weights=(replace(ENTRY, offset=1024),))) == "unknown-weight"
    assert refusal(replace(plan, weights=())) == "unknown-weight"
    assert refusal(replace(plan, weights=(ENTRY, ENTRY))) == "duplicate-name"


@pytest.mark.parametrize(("rows", "parameters", "rule"), [
    ((4, 12), (), None), ((16,), (), None), ((4, 11), (), "weight-size"), ((4, 13), (), "weight-size"),
    ((-4, 20), (), "weight-size"), ((0, 16), (), "weight-size"), ((4, 12), ("w",), "weight-size"),
])  # fmt: skip
def test_the_parts_of_a_weight_are_all_of_its_rows(maker, rows, parameters, rule):
    parts = tuple(WeightPart(count, (f"p{n}",)) for n, count in enumerate(rows))
    entry = replace(ENTRY, parts=parts, parameters=parameters)
    assert refusal(constant_plan(maker, entry, PACKED)) == rule


def test_packed_activation_needs_the_bytes_of_its_format(maker):
    view = View(buffer="a", dtype="f32", shape=(2, 64), format=NF4, layout="canonical")
    operand = Operand(name="q", dtype="f32", access="w", shape=(2, 64), format=NF4, layout="canonical")
    base = maker.plan([maker.launch("s0", x="r", y="w")], {"a": 0})
    spec = replace(maker.kernel(["w"]), name="quantize", operands=(operand,))
    launch = Launch(kernel="quantize", stream="s0", operands=(view,))
    plan = with_steps(replace(base, kernels=(*base.kernels, spec)), [launch, base.entries[0].steps[0]])
    assert refusal(plan) == "packed-size"  # 64 bytes of codes and 8 of absmax do not fit into 64
    arenas = (*plan.arenas[:2], replace(plan.arenas[2], nbytes=72))
    roomy = replace(plan, buffers=(*plan.buffers[:2], replace(plan.buffers[2], nbytes=72)), arenas=arenas)
    assert refusal(roomy) is None
    layout = replace(view, layout="cpu_p16_v1")
    packed = replace(spec, operands=(replace(operand, layout="cpu_p16_v1"),))
    odd = with_steps(replace(roomy, kernels=(*base.kernels, packed)), [replace(launch, operands=(layout,))])
    assert refusal(odd) == "operand-storage"


def test_dimensions_must_be_decidable(maker):
    """A stride that may have either sign, a divisor that may be zero, a symbol that the entry does not have."""
    base = simple(maker)
    entry = replace(
        base.entries[0],
        symbols=(Symbol(name="s", min=0, max=8),),
        inputs=(*base.entries[0].inputs, TensorSig(name="n", arena="n", dtype="f32", shape=("s",))),
    )
    arena = Arena(name="n", device="d", kind="input", nbytes=64, entry="main")

    def rule(**geometry: object) -> str | None:
        view = replace(maker.view("x"), **geometry)
        operand = replace(maker.kernel(["r"]).operands[0], shape=view.shape, strides=view.strides)
        reader = replace(maker.kernel(["r"], "reader"), symbols=("s",), operands=(operand,))
        plan = replace(simple(maker, kind="cpu"), entries=(entry,))
        plan = replace(plan, arenas=(*plan.arenas, arena), kernels=(*plan.kernels, reader))
        return refusal(with_steps(plan, [Launch(kernel="reader", stream="s0", operands=(view,)), *entry.steps]))

    assert rule(shape=(2,), strides=("s - 4",), offset=8) == "bad-dimension"
    assert rule(shape=(2,), offset="8//s") == "bad-dimension"
    assert rule(shape=("t",)) == "unbound-symbol"
    assert rule(shape=(2,), strides=(-1,), offset=1) is None
    assert rule(shape=(2,), strides=(-1,), offset=0) == "view-outside-buffer"


def test_two_devices_in_one_slot_are_refused(maker):
    plan = simple(maker)
    assert refusal(replace(plan, devices=(*plan.devices, replace(plan.devices[0], name="e")))) == "duplicate-device"


def test_json_keeps_the_verdict(maker):
    plan = constant_plan(maker, ENTRY, PACKED)
    assert from_json(to_json(plan)) == plan
    verify_plan(from_json(to_json(plan)))
    with pytest.raises(PlanError, match="malformed"):
        from_json(to_json(plan).replace(b'"arena"', b'"arenas"', 1))


def test_spelling_of_a_dimension_does_not_matter(maker):
    plan = simple(maker)
    spec = plan.kernels[0]
    entry = plan.entries[0]
    operand = replace(spec.operands[0], shape=("b*s",))
    view = replace(maker.view("x"), shape=("s*b",))
    entry = EntryPoint(
        name="main",
        symbols=(Symbol(name="b", min=1, max=2), Symbol(name="s", min=1, max=8)),
        inputs=(TensorSig(name="x", arena="in", dtype="f32", shape=("b", "s")),),
        outputs=entry.outputs,
        steps=(Launch(kernel="k_r_w", stream="s0", operands=(view, maker.view("y"))),),
    )
    spec = replace(spec, symbols=("b", "s"), operands=(operand, spec.operands[1]))
    assert refusal(replace(plan, kernels=(spec,), entries=(entry,))) is None
