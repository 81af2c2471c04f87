"""Program files made to do harm: each is refused while it is loaded, before memory is used or a compiler started.

Each file differs from a sound one in one place, and is written with digests of what is in it, so that nothing but the
checks of the plan can object.  The first twelve ran when they were found, and the first of them ran its author's code.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import handmade
import numpy as np
import pytest
from handmade import DOUBLE, ONE, Maker, doubling, loop, op, operand, replace, view_of, with_body, with_operand

import qcompiler as qc
from qcompiler import formats, passes, runtime
from qcompiler.errors import CompileFailedError, QCompilerError, RuntimeFailure, ScheduleError
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelSpec
from qcompiler.plan.kinds.argmax import ArgmaxKernel
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.gather import GatherKernel
from qcompiler.plan.kinds.index_update import IndexUpdateKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.order import OrderKernel
from qcompiler.plan.kinds.scatter import ScatterKernel
from qcompiler.plan.plan import Arena, Buffer, Copy, Launch, Plan, Select, TensorSig, View
from qcompiler.plan.verify import verify_plan
from qcompiler.plan.weights import StoredTensor
from qcompiler.runtime import loaded
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.program_file import save_image

NF4 = FormatRef(name="nf4", params=dict(formats.get("nf4", block=64).params))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setenv("QC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def refusal(image: ProgramImage, plan: Plan, folder: Path, device: str | None = None) -> str:
    """Why loading a file with this plan is refused. It fails if anything is built or allocated before."""

    def reached(*_: Any, **__: Any) -> Any:
        raise AssertionError("the plan passed its checks")

    path = folder / "attack.qca"
    save_image(changed(image, plan=plan), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.registry, "backend", reached)
        patch.setattr(loaded, "SessionMemory", reached)
        with pytest.raises(QCompilerError) as caught:
            qc.load(path, device=device)
    assert not isinstance(caught.value, CompileFailedError | RuntimeFailure), caught.value
    return str(caught.value)


def runs(image: ProgramImage, *arguments: Any) -> Any:
    """The sound program's results: an attack's original must not be refused as well."""
    return loaded.LoadedProgram.from_image(image)(*arguments)


# --- programs --------------------------------------------------------------------------------------------------------


def linear() -> ProgramImage:
    """``x @ w.T + bias``, w in nf4."""
    fmt = formats.get("nf4", block=64)
    packed = fmt.encode(np.random.default_rng(0).standard_normal((48, 64), np.float32))
    data = layouts.get("cpu_p16_v1").pack(fmt, "f32", 48, 64, packed.data)
    weight = StoredTensor("w", "f32", (48, 64), data, NF4, "cpu_p16_v1")
    operands = (
        operand("x", ("b", 64)),
        operand("w", (48, 64), format=NF4, layout="cpu_p16_v1"),
        operand("bias", (48,)),
        operand("out", ("b", 48), "w"),
    )
    body = LinearKernel(m="b", n=48, k=64, m_class="large", has_bias=True)
    spec = KernelSpec(name="linear", symbols=("b",), operands=operands, body=body)
    return Maker({"b": (1, 8)}).kernel(spec, {"w": weight}).image()


def attention() -> ProgramImage:
    operands = tuple(operand(name, ("b", 2, "s", 8), "w" if name == "out" else "r") for name in ("q", "k", "v", "out"))
    body = AttentionKernel(
        batch="b", heads=2, kv_heads=2, q_len="s", kv_len="s", head_dim=8, value_dim=8, scale=0.5, causal=True,
        mask="none",
    )  # fmt: skip
    spec = KernelSpec(name="attend", symbols=("b", "s"), operands=operands, body=body)
    return Maker({"b": (1, 2), "s": (1, 8)}).kernel(spec).image()


def top_k() -> ProgramImage:
    operands = (operand("x", (2, 8, 1)), operand("values", (2, 4, 1), "w"), operand("at", (2, 4, 1), "w", "i64"))
    body = OrderKernel(outer=2, length=8, count=4, inner=1, descending=True)
    return Maker().kernel(KernelSpec(name="top", symbols=(), operands=operands, body=body)).image()


def symbolic() -> ProgramImage:
    return Maker({"b": (1, 8), "s": (1, 8)}).kernel(doubling(("b", "s"), ("b", "s"))).image()


def filling(extent: Any, ranges: Any) -> ProgramImage:
    """An output of `extent` ones beside an argument that gives the symbols; an attack where `extent` is one."""
    out = operand("y", (extent,), "w", strides=(1,))
    spec = loop("ones", (extent,), (out,), ((1,),), (ONE,), symbols=sorted(ranges))
    maker = Maker(ranges)
    maker.input("x", tuple(sorted(ranges)))
    maker.output("y", (1,))
    maker.launch(spec, (view_of(out, "y"),))
    return maker.image()


def with_state() -> ProgramImage:
    """The result of an init kernel, copied out, and a state beside it."""
    maker = Maker()
    spec = loop("fill", (16,), (operand("y", (16,), "w"),), ((1,),), (ONE,))
    maker.kernels.append(spec)
    maker._arena("table", "init", 64)
    maker.state("kept", 4096)
    maker.output("y", (16,))
    table = View(buffer="table", dtype="f32", shape=(16,), strides=(1,))
    maker.init.append(Launch(kernel="fill", stream="q", operands=(table,)))
    maker.steps.append(Copy(stream="q", source=table, target=replace(table, buffer="y")))
    return maker.image()


SOUND: dict[str, tuple[Callable[[], ProgramImage], tuple[Any, ...]]] = {
    "linear": (linear, (np.ones((2, 64), np.float32), np.ones(48, np.float32))),
    "attention": (attention, (np.ones((1, 2, 3, 8), np.float32),) * 3),
    "top-k": (top_k, (np.ones((2, 8, 1), np.float32),)),
    "loop": (symbolic, (np.ones((2, 3), np.float32),)),
    "init": (with_state, ()),
}


@pytest.mark.parametrize("name", SOUND)
def test_the_programs_that_attacks_are_edits_of_run(name: str) -> None:
    make, arguments = SOUND[name]
    runs(make(), *arguments)


# --- H1 to H12 -------------------------------------------------------------------------------------------------------


def init_writes(image: ProgramImage, **changes: Any) -> Plan:
    assert image.plan.init is not None
    (step,) = image.plan.init.steps
    assert isinstance(step, Launch)
    moved = replace(step, operands=(replace(step.operands[0], **changes),))
    return replace(image.plan, init=replace(image.plan.init, steps=(step, moved)))


def test_h1_an_init_entry_that_writes_a_state_is_refused(tmp_path: Path) -> None:
    """A state has no memory then: its buffer's offset would be an absolute address."""
    image = with_state()
    assert "init" in refusal(image, init_writes(image, buffer="kept"), tmp_path)


def test_h1_does_not_reach_native_code(tmp_path: Path) -> None:
    """Loading in a child of its own ends with an error, not with a signal."""
    image = with_state()
    plan = init_writes(image, buffer="kept")
    buffers = tuple(replace(b, offset=1 << 20) if b.name == "kept" else b for b in plan.buffers)
    arenas = tuple(replace(a, nbytes=1 << 21) if a.name == "kept" else a for a in plan.arenas)
    path = tmp_path / "attack.qca"
    save_image(changed(image, plan=replace(plan, buffers=buffers, arenas=arenas)), path)
    assert in_child(lambda: qc.load(path)) == "refused"


def test_h1_an_arena_without_memory_does_not_reach_native_code_even_unverified() -> None:
    """The second wall: with the verifier left out, what calls native code still sees that the arena has no memory."""
    image = with_state()
    attack = changed(image, plan=init_writes(image, buffer="kept"))

    def load() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loaded, "check_image", lambda image: None)
            loaded.LoadedProgram.from_image(attack)

    assert in_child(load) == "refused"


def product_text(name: str, times: int) -> str:
    return "*".join([name] * times)


@pytest.mark.parametrize(
    ("extent", "ranges"),
    [
        ("max(-18446744073709551616*n + 1000000, 1)", {"n": (1, 4)}),
        (f"{product_text('n', 32)} - {4**32 - 1}", {"n": (4, 4)}),
        ("9223372036854775807*n - 9223372036854775806*n", {"n": (1, 1)}),
        ("(4611686018427387904*n + 4611686018427387904) // 9223372036854775808", {"n": (1, 1)}),
    ],
)
def test_h2_sizes_that_leave_64_bits_on_the_way_are_refused(extent: str, ranges: Any, tmp_path: Path) -> None:
    from qcompiler.errors import DimError
    from qcompiler.plan.dims import parse

    try:
        text = str(parse(extent))
    except DimError:
        return  # no such text can stand in a plan
    if text in ("n", "1"):
        return
    image = filling(1, {"n": (1, 4)})
    plan = filling(1, ranges).plan
    plan = with_operand(with_body(plan, extents=(text,)), 0, shape=(text,))
    refusal(image, plan, tmp_path)


def test_h3_a_packed_copy_stays_in_the_callers_memory(tmp_path: Path) -> None:
    """1 MiB between arguments of 4 bytes: packed views passed by the check of the caller's arrays."""
    maker = Maker()
    for name in ("x", "y"):
        (maker.input if name == "x" else maker.output)(name, (1 << 18,))
    q8 = FormatRef(name="q8_0", params=dict(formats.get("q8_0").params))
    packed = View(buffer="x", dtype="f32", shape=(1024, 512), format=q8, layout="canonical")
    maker.steps.append(Copy(stream="q", source=packed, target=replace(packed, buffer="y")))
    flat = View(buffer="x", dtype="f32", shape=(1,), strides=(1,))
    maker.steps.append(Copy(stream="q", source=flat, target=replace(flat, buffer="y")))
    image = maker.image()
    entry = image.plan.entries[0]
    short = {
        "inputs": tuple(replace(sig, shape=(1,)) for sig in entry.inputs),
        "outputs": tuple(replace(sig, shape=(1,)) for sig in entry.outputs),
    }
    plan = replace(image.plan, entries=(replace(entry, **short),))
    assert "plain values" in refusal(image, plan, tmp_path)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_h4_attention_takes_the_last_dim_with_unit_stride_only(place: int, tmp_path: Path) -> None:
    image = attention()
    strides = image.plan.kernels[0].operands[place].strides[:3]
    refusal(image, with_operand(image.plan, place, strides=(*strides, 0)), tmp_path)


def test_h5_loops_over_negative_extents_are_refused(tmp_path: Path) -> None:
    image = Maker({"b": (4, 8), "s": (4, 8)}).kernel(doubling(("b", "s"), ("b", "s"))).image()
    nothing = tuple(replace(access, coefficients=(0, 0)) for access in image.plan.kernels[0].body.accesses)
    plan = with_body(image.plan, extents=("-b + 3", "-s + 3"), accesses=nothing)
    refusal(image, plan, tmp_path)


def test_h6_names_of_operands_do_not_become_variables() -> None:
    """An output called `y_row` was shadowed by the row pointer of `y`: the sum went elsewhere."""
    x, y = operand("y", (4, 8)), operand("y_row", (4, 8), "w")
    spec = loop("k", (4, 8), (x, y), ((8, 1), (8, 1)), (DOUBLE,))
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    assert (runs(Maker().kernel(spec).image(), values)[0] == 2 * values).all()


HOSTILE = (
    *("y_row", "task", "sym", "call", "i0", "i0_end", "qc_run", "memcpy", "operand0", "first", "lane", "tasks", "op"),
    *("n_s", "int64_t", "x", "t_twice", "v_x", "ctx", "values"),
)


@pytest.mark.parametrize("name", HOSTILE)
def test_h6_no_name_of_a_file_is_an_identifier_of_what_is_compiled(name: str) -> None:
    """What is compiled is the same to the letter, whatever operands, values, kernels, symbols, entries are called."""
    from qcompiler.kernels.cpu.emit import emit_program
    from qcompiler.kernels.cuda import emit as cuda

    def code(text: str) -> str:
        return re.sub(r"//[^\n]*", "", text)

    plain = named_plan("double", ("x", "y"), ("b", "s"), "main", "v")
    other = named_plan(name, (name, f"{name}_"), (f"b{name}", f"s{name}"), f"{name}(", f"{name}9")
    assert code(emit_program(other, "x86-64")) == code(emit_program(plain, "x86-64"))
    for emit in (cuda.emit_program, cuda.emit_sim_program):
        assert code(emit(other, "sm_80")) == code(emit(plain, "sm_80"))


def named_plan(kernel: str, operands: tuple[str, str], symbols: tuple[str, str], entry: str, value: str) -> Plan:
    spec = doubling(symbols, symbols, name=kernel)
    program = replace(spec.body.body, inputs=((operands[0], "f32"), (operands[1], "f32")),
                      ops=(op(value, "arith.addf", operands[0], operands[0]),), yields=(value,))  # fmt: skip
    spec = replace(spec, operands=tuple(replace(each, name=own) for each, own in zip(spec.operands, operands,
                   strict=True)), body=replace(spec.body, body=program))  # fmt: skip
    plan = Maker(dict.fromkeys(symbols, (1, 8))).kernel(spec).image().plan
    arenas = tuple(replace(arena, entry=entry) if arena.entry else arena for arena in plan.arenas)
    return replace(plan, arenas=arenas, entries=(replace(plan.entries[0], name=entry),))


def test_h6_what_takes_a_plan_takes_numbers() -> None:
    """Kernels under their own names are emitted for tests and tables; whatever compiles a plan takes the numbered
    text."""
    named = re.compile(r"emit_(sim_)?module\(|emit_kernels\((?!\(\),)")  # `emit_kernels((),` are headers alone
    for package in (runtime, passes):
        files = sorted(Path(package.__file__).parent.rglob("*.py"))
        assert len(files) > 50, package
        for file in files:
            assert not named.search(file.read_text()) or file.name == "engine.py", file


@pytest.mark.parametrize("text", ["a\nint x;", "a\\", "a??/", "a\u2028b", "*/ int x; /*", "a\rb", "\\\n", "é" * 3])
def test_h6_a_comment_ends_where_it_should(text: str) -> None:
    from qcompiler.kernels.text import comment

    assert re.fullmatch(r"[A-Za-z0-9 _.,:;()\[\]=+*/<>^'%&|-]*", comment(text))


def test_h7_top_k_of_more_than_there_are_is_refused(tmp_path: Path) -> None:
    image = top_k()
    plan = with_body(image.plan, count=9)
    for place in (1, 2):
        plan = with_operand(plan, place, shape=(2, 9, 1), strides=(9, 1, 1))
        plan = resized(plan, place - 1, (2, 9, 1))
    assert "count" in refusal(image, plan, tmp_path)


def resized(plan: Plan, number: int, shape: tuple[Any, ...]) -> Plan:
    """The plan with another shape of one output, and memory for it."""
    (entry,) = plan.entries
    outputs = list(entry.outputs)
    sig = outputs[number] = replace(outputs[number], shape=shape)
    plan = replace(plan, entries=(replace(entry, outputs=tuple(outputs)),))
    return handmade.with_arena(plan, sig.arena, nbytes=int(np.prod(shape)) * handmade.ITEMSIZE[sig.dtype])


@pytest.mark.parametrize("name", ["index", "ids", "bias"])
def test_h8_a_bias_is_contiguous_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    image = linear()
    plan = with_operand(image.plan, 2, name=name, strides=(0,))
    assert "stride" in refusal(image, plan, tmp_path)


def test_h9_an_operand_that_is_written_in_part_is_no_result(tmp_path: Path) -> None:
    """One iteration of a loop whose output has 128 elements: the others were what malloc left."""
    image = Maker().kernel(doubling()).image()
    refusal(image, with_body(image.plan, extents=(1, 1)), tmp_path)


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (16, 0), (8, 1)])
def test_h10_results_that_overlap_themselves_are_refused(strides: tuple[int, int], tmp_path: Path) -> None:
    image = Maker().kernel(doubling()).image()
    plan = with_operand(image.plan, 1, strides=strides)
    accesses = image.plan.kernels[0].body.accesses
    plan = with_body(plan, accesses=(accesses[0], replace(accesses[1], coefficients=strides)))
    refusal(image, plan, tmp_path)


def test_h10_a_loop_that_visits_an_element_twice_without_folding_is_refused(tmp_path: Path) -> None:
    """Which of the values stays would depend on threads."""
    image = Maker().kernel(doubling()).image()
    body = image.plan.kernels[0].body
    more = {
        "extents": (*body.extents, 4),
        "iterators": ("parallel",) * 3,
        "accesses": tuple(replace(access, coefficients=(*access.coefficients, 0)) for access in body.accesses),
    }
    refusal(image, with_body(image.plan, **more), tmp_path)


@pytest.mark.parametrize("extent", ["(s // b)", "(s % b)", "(s // (b - 4))", "max((s // b), 1)"])
def test_h11_divisors_that_may_be_zero_are_refused_wherever_they_stand(extent: str, tmp_path: Path) -> None:
    image = Maker({"b": (0, 8), "s": (1, 8)}).kernel(doubling(("b", "s"), ("b", "s"))).image()
    body = image.plan.kernels[0].body
    more = {
        "extents": (*body.extents, extent),
        "iterators": ("parallel", "parallel", "reduction"),
        "accesses": tuple(replace(access, coefficients=(*access.coefficients, 0)) for access in body.accesses),
        "init": ("0x0.0p+0",),
    }
    refusal(image, with_body(image.plan, **more), tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "*".join(["(a + b + c + d + e + f + g)"] * 20),
        "+".join(["1"] * 2000),
        "(" * 500 + "s" + ")" * 500,
        "max(" * 300 + "s" + ", s)" * 300,
        " + ".join(f"s{i}*t{i}" for i in range(400)),
        "1" * 4000,
        "*".join(["s"] * 1000),
    ],
)
def test_h12_a_size_that_takes_long_to_expand_is_refused_at_once(text: str, tmp_path: Path) -> None:
    """In a child that has five seconds of processor time: expanded, one such size takes minutes."""
    image = symbolic()
    plan = with_body(image.plan, extents=(text, "s"))
    assert in_child(lambda: refusal(image, plan, tmp_path), seconds=5) == "done"


# --- more holes of the same kinds ------------------------------------------------------------------------------------


def test_an_init_entry_with_results_is_refused(tmp_path: Path) -> None:
    """Results of init have no memory either."""
    image = with_state()
    assert image.plan.init is not None
    (step,) = image.plan.init.steps
    assert isinstance(step, Launch)
    arena = replace(next(a for a in image.plan.arenas if a.name == "y"), name="z", entry="init")
    buffer = replace(next(b for b in image.plan.buffers if b.name == "y"), name="z", arena="z")
    other = replace(step, operands=(replace(step.operands[0], buffer="z"),))
    init = replace(
        image.plan.init, outputs=(TensorSig(name="z", arena="z", dtype="f32", shape=(16,)),), steps=(step, other)
    )
    plan = replace(image.plan, init=init, arenas=(*image.plan.arenas, arena), buffers=(*image.plan.buffers, buffer))
    assert "init" in refusal(image, plan, tmp_path)


def rule_of(plan: Plan) -> str | None:
    with pytest.raises(ScheduleError) as caught:
        verify_plan(plan)
    return caught.value.rule


def test_each_new_rule_is_broken_by_one_edit() -> None:
    image = with_state()
    assert rule_of(init_writes(image, buffer="kept")) == "init-arena"
    assert image.plan.init is not None
    argument = TensorSig(name="z", arena="z", dtype="f32", shape=(16,))
    assert rule_of(replace(image.plan, init=replace(image.plan.init, inputs=(argument,)))) == "init-signature"
    streams = tuple(replace(image.plan.streams[0], name=f"q{i}") for i in range(300))
    assert rule_of(replace(image.plan, streams=(*image.plan.streams, *streams))) == "too-many-streams"
    image = symbolic()
    (entry,) = image.plan.entries
    narrow = replace(entry, inputs=(replace(entry.inputs[0], dtype="i16", shape=("b", "2*s")),))
    assert rule_of(replace(image.plan, entries=(narrow,))) == "argument-dtype"
    q8 = FormatRef(name="q8_0", params=dict(formats.get("q8_0").params))
    packed = View(buffer="x", dtype="f32", shape=(1, 32), format=q8, layout="canonical")
    copy = Copy(stream="q", source=packed, target=replace(packed, buffer="y"))
    assert rule_of(replace(image.plan, entries=(replace(entry, steps=(copy,)),))) == "packed-argument"


def test_memory_of_truth_values_is_of_nothing_else(tmp_path: Path) -> None:
    """`bool` has two values: what a kernel loads as one must not have been written as a number."""
    maker = Maker()
    maker.input("x", (16,), "ui8")
    maker.output("y", (16,), "i1")
    maker.activation("a", 64)
    number = View(buffer="x", dtype="ui8", shape=(16,), strides=(1,))
    maker.steps.append(Copy(stream="q", source=number, target=replace(number, buffer="a")))
    truth = replace(number, buffer="a", dtype="i1")
    maker.steps.append(Copy(stream="q", source=truth, target=replace(truth, buffer="y")))
    assert rule_of(maker.image().plan) == "truth-values"

    maker = Maker()
    maker.store.add(StoredTensor("t", "i1", (4,), np.array([0, 1, 2, 1], np.uint8)))
    maker.output("y", (4,), "i1")
    view = View(buffer="weight t", dtype="i1", shape=(4,), strides=(1,))
    maker.steps.append(Copy(stream="q", source=view, target=replace(view, buffer="y")))
    image = maker.image()
    assert "truth" in refusal(image, image.plan, tmp_path)


@pytest.mark.parametrize("mode", ["gather", "index_update", "scatter", "order"])
def test_what_is_moved_keeps_its_type(mode: str, tmp_path: Path) -> None:
    """A gather copied rows by the size of its result's elements: from rows of smaller ones, behind their end."""
    out, more = operand("out", (2, 3, 8), "w", "f64"), (operand("index", (3,), dtype="i64"),)
    if mode == "gather":
        body: Any = GatherKernel(mode="take", outer=2, length=4, count=3, inner=8)
        operands = (operand("x", (2, 4, 8)), *more, out)
    elif mode == "index_update":
        body = IndexUpdateKernel(outer=2, length=4, count=3, inner=8)
        operands = (operand("x", (2, 4, 8), "rw", "f64"), *more, operand("src", (2, 3, 8)))
    elif mode == "scatter":
        body = ScatterKernel(outer=2, length=4, count=3, inner=8, fold="none")
        index = operand("index", (2, 3, 8), dtype="i64")
        operands = (index, operand("src", (2, 3, 8)), operand("out", (2, 4, 8), "rw", "f64"))
    else:
        body = OrderKernel(outer=2, length=4, count=3, inner=8, descending=True)
        operands = (operand("x", (2, 4, 8)), out, operand("at", (2, 3, 8), "w", "i64"))
    image = Maker().kernel(KernelSpec(name="k", symbols=(), operands=operands, body=body)).image()
    assert "one type" in refusal(image, image.plan, tmp_path)


def test_rows_of_int8_begin_where_they_are_read_as_words(tmp_path: Path) -> None:
    """Their codes are read in pieces of 16 bytes, their scale as a float."""
    from specmutants.seeds import seed

    for kind in ("cpu", "cuda"):
        image = seed("linear_codes", kind)
        (entry,) = image.plan.entries
        first, second = entry.steps
        assert isinstance(first, Launch) and isinstance(second, Launch)
        later = tuple(
            replace(step, operands=tuple(replace(v, offset=8) if v.buffer == "rows" else v for v in step.operands))
            for step in (first, second)
        )
        plan = handmade.with_arena(replace(image.plan, entries=(replace(entry, steps=later),)), "rows", nbytes=4096)
        device = None if kind == "cpu" else "sim:0"
        assert "multiples" in refusal(image, plan, tmp_path, device)


def test_argmax_of_nothing_is_refused(tmp_path: Path) -> None:
    operands = (operand("x", (2, "s", 3)), operand("out", (2, 3), "w", "i64"))
    body = ArgmaxKernel(outer=2, length="s", inner=3)
    image = Maker({"s": (1, 4)}).kernel(KernelSpec(name="k", symbols=("s",), operands=operands, body=body)).image()
    (entry,) = image.plan.entries
    empty = replace(entry, symbols=(replace(entry.symbols[0], min=0),))
    assert "zero or negative" in refusal(image, replace(image.plan, entries=(empty,)), tmp_path)


@pytest.mark.parametrize(
    ("text", "dtype"), [("99999999999999999999", "i64"), ("1; int x", "i32"), ("300", "ui8"), ("zzz", "f32")]
)
def test_constants_are_numbers_of_their_type(text: str, dtype: str, tmp_path: Path) -> None:
    image = Maker().kernel(doubling()).image()
    program = image.plan.kernels[0].body.body
    more = op("c", "arith.constant", dtype=dtype, value=text)
    plan = with_body(image.plan, body=replace(program, ops=(*program.ops, more)))
    refusal(image, plan, tmp_path)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_arena_of_constants_is_no_larger_than_the_weights(kind: str, tmp_path: Path) -> None:
    """One arena gathers its weights, so that the file ends with the last of them; another one was filled with two
    gigabytes from where the file is mapped."""
    from specmutants.seeds import seed

    image = seed("linear", kind)
    named = tuple(replace(b, weight="w") if b.name == "weight w" else b for b in image.plan.buffers)
    (weight,) = image.plan.weights
    sound = changed(image, weights=image.weights[: weight.nbytes], plan=replace(image.plan, buffers=named))
    device = None if kind == "cpu" else "sim:0"
    loaded.check_image(sound)
    large = Arena(name="large", device="d", kind="constants", nbytes=1 << 31)
    assert "first 2147483648" in refusal(
        sound, replace(sound.plan, arenas=(*sound.plan.arenas, large)), tmp_path, device
    )
    nameless = Buffer(name="nameless", arena="w", offset=1152, nbytes=64)
    assert "names no weight" in refusal(sound, replace(sound.plan, buffers=(*named, nameless)), tmp_path, device)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["embedding", "grouped"])
def test_a_weight_of_no_bytes_is_no_table_of_2_to_the_70_values(name: str, kind: str, tmp_path: Path) -> None:
    """Its bytes were counted in 64 bits, and were none; whatever index was looked up was read behind the weights."""
    from specmutants.seeds import seed

    image = seed(name, kind)
    (weight,) = image.plan.weights
    rows, cols = (1 << 50, 1 << 20) if name == "embedding" else (1 << 48, 1 << 24)
    plan = image.plan
    for number, spec in enumerate(plan.kernels):
        for place, each in enumerate(spec.operands):
            if each.shape == weight.shape:
                plan = with_operand(plan, place, number, shape=(rows, cols))
            elif each.shape[-1] == weight.shape[1]:
                plan = with_operand(plan, place, number, shape=(*each.shape[:-1], cols), strides=(cols, 1))
    size = {"rows": rows, "cols": cols} if name == "embedding" else {"experts": rows // 16, "k": cols}
    plan = with_body(plan, **size)
    plan = replace(plan, weights=(replace(weight, shape=(rows, cols), nbytes=0),))
    buffers = tuple(replace(b, nbytes=0) if b.arena == "w" else b for b in plan.buffers)
    large = {arena.name for arena in plan.arenas if arena.kind in ("input", "output")}
    arenas = tuple(replace(a, nbytes=1 << 52) if a.name in large else a for a in plan.arenas)
    buffers = tuple(replace(b, nbytes=1 << 52) if b.arena in large else b for b in buffers)
    (entry,) = plan.entries
    sigs = {
        part: tuple(
            replace(s, shape=(*s.shape[:-1], cols)) if s.shape[-1] == weight.shape[1] else s
            for s in getattr(entry, part)
        )
        for part in ("inputs", "outputs")
    }
    plan = replace(plan, buffers=buffers, arenas=arenas, entries=(replace(entry, **sigs),))
    said = refusal(image, plan, tmp_path, None if kind == "cpu" else "sim:0")
    assert re.search(r"2\*\*5[34]|needs \d{15}", said), said


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("used", ["argument", "yield"])
def test_a_loop_that_does_not_reduce_has_no_accumulator(kind: str, used: str, tmp_path: Path) -> None:
    """Its body used what a result held before, which no text has a name for: a compiler was given a "?"."""
    image = Maker({}, kind).kernel(doubling()).image("x86-64" if kind == "cpu" else "sm_80")
    program = image.plan.kernels[0].body.body
    ops = (op("twice", "arith.addf", "in0", "in1"),) if used == "argument" else program.ops
    yields = ("in1",) if used == "yield" else program.yields
    plan = with_body(image.plan, body=replace(program, ops=ops, yields=yields))
    assert "accumulator" in refusal(image, plan, tmp_path, None if kind == "cpu" else "sim:0")


@pytest.mark.parametrize("key", ["name", "self", "cls", "block "])
def test_parameters_of_a_format_are_its_own(key: str, tmp_path: Path) -> None:
    """Parameters become keywords of a call; those that the call has itself were an error of Python."""
    image = linear()
    ref = FormatRef(name="nf4", params={**NF4.params, key: 64})
    refusal(image, with_operand(image.plan, 1, format=ref), tmp_path)


def test_a_select_whose_last_case_has_a_maximum_runs_like_the_plan() -> None:
    """The verifier has seen that no size is above it; the printed entry point takes it for all that is left."""
    from specmutants.seeds import seed

    image = seed("whole")
    (entry,) = image.plan.entries
    select = entry.steps[0]
    assert isinstance(select, Select)
    cases = (*select.cases[:-1], replace(select.cases[-1], max=12))
    steps = (replace(select, cases=cases), *entry.steps[1:])
    bounded = changed(image, plan=replace(image.plan, entries=(replace(entry, steps=steps),)))
    for b in (1, 4, 5, 12):
        x = np.random.default_rng(b).standard_normal((b, 64), np.float32)
        for found, wanted in zip(runs(bounded, x), runs(image, x), strict=True):
            assert (found == wanted).all()


def test_wild_positions_are_data(tmp_path: Path) -> None:
    """A position of 2**63 - 1 was counted on by one."""
    from specmutants.seeds import seed

    image = seed("attention_decode")
    arguments = handmade.arguments(image, {"b": 2})
    far, near = np.full((2, 1), 2**63 - 1), np.full((2, 1), 11)
    program = loaded.LoadedProgram.from_image(image)
    (wild,), (tame,) = (program(*arguments[:-1], last) for last in (far, near))
    assert (wild == tame).all()


def in_child(deed: Callable[[], Any], seconds: int = 120) -> str:
    """How a deed ended in a forked child: "done", "refused" (a QCompilerError), the name of another error, or of the
    signal that ended the child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            try:
                deed()
                word = "done"
            except QCompilerError:
                word = "refused"
            except BaseException as error:
                word = f"{type(error).__name__}: {error}"
            os.write(writer, word.encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        word = said.read()
    _, status = os.waitpid(child, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else word
