"""What a profile says of measured steps: groups, shares, charts, traces. The steps here are made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from attention_cases import BY_NAME
from combined_cases import make as combined_case

from qcompiler.errors import ArgumentError
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds import KINDS
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.linears import LinearsKernel
from qcompiler.runtime.limits import Limits, Machine
from qcompiler.runtime.places import moved_to
from qcompiler.runtime.profile import (
    OTHER_KINDS,
    PRODUCTS,
    WITH_PRODUCTS,
    EagerTimes,
    Profile,
    StepProfile,
    folding,
)
from qcompiler.runtime.step_costs import arithmetic_of

LIMITS = Limits(bandwidth=10e9, fp32=100e9, bf16=200e9, int8=None)


def step(number: int, us: float, path: str = "", kind: str = "linear", **others: Any) -> StepProfile:
    figures = {"nbytes": 10_000, "operations": 50_000, "limit_us": 1.0, "limited_by": "bytes", "estimate_us": 2.0}
    return StepProfile(
        number, kind, f"{kind}_{number % 2}" if kind != "copy" else "", us, id=f"main/{number}", stream="s",
        paths=tuple(path.split(" & ")) if path else (), **(figures | others),
    )  # fmt: skip


STEPS = (
    step(0, 4.0, "layers.0.attn.q & layers.0.attn.k", begin_us=0.0),
    step(1, 2.0, "layers.0.mlp", begin_us=4.5),
    step(3, 4.0, "layers.1.attn.q & layers.1.attn.k", begin_us=7.0),
    step(4, 2.0, "layers.1.mlp", limit_us=3.0, begin_us=11.0),
    step(5, 1.0, kind="copy", limit_us=None, estimate_us=None, begin_us=13.0),
)


def profile(steps: tuple[StepProfile, ...] = STEPS, **others: Any) -> Profile:
    machine = Machine("here", LIMITS, "measured")
    return Profile("main", {"n": 3}, 2, 5, 20.0, 12.0, 13.5, steps, machine=machine, streams={"s": "cpu"}, **others)


def test_every_kind_of_kernel_is_a_product_has_products_or_is_another() -> None:
    """A new kind must be placed: the share of products is the time of those that are named."""
    placed = [*PRODUCTS, *WITH_PRODUCTS, *OTHER_KINDS]
    assert sorted(placed) == sorted(KINDS)


def test_the_share_of_products_has_linears_that_share_a_launch() -> None:
    kinds = ("linear", "linears", "grouped_linear", "batch_matmul", "attention", "recurrent", "loop", "copy")
    found = profile(tuple(step(number, 1.0, kind=kind) for number, kind in enumerate(kinds)))
    assert (found.not_product, found.with_products) == (0.5, 0.25)
    assert "50.0% are not matrix products; 25.0% are attention and recurrences" in str(found)
    assert (read := json.loads(found.to_json()))["with_products"] == 0.25 and read["not_product"] == 0.5
    assert "recurrences" not in str(profile())


def test_modules_add_up_and_layers_fold() -> None:
    found = {each.name: each for each in profile().by_module()}
    assert list(found) == ["layers.0.attn.q+k", "layers.1.attn.q+k", "layers.0.mlp", "layers.1.mlp", ""]
    assert sum(each.us for each in found.values()) == 13.0 and sum(each.share for each in found.values()) == 1.0
    assert found["layers.1.mlp"].of_limit == 1.5 and found[""].of_limit is None
    folded = {each.name: (each.launches, each.us, each.limit_us) for each in profile().by_module(layers=False)}
    assert folded == {"layers.*.attn.q+k": (2, 8.0, 2.0), "layers.*.mlp": (2, 4.0, 4.0), "": (1, 1.0, None)}


def test_only_numbers_of_layers_fold() -> None:
    folded = folding(["model.layers.3.mlp.0", "model.layers.3", "head.0", "head.2", "", "7"])
    assert folded == {
        "model.layers.3.mlp.0": "model.layers.*.mlp.0", "model.layers.3": "model.layers.*", "head.0": "head.0",
        "head.2": "head.2", "": "", "7": "7",
    }  # fmt: skip


def test_kernels_are_groups_and_copies_are_one() -> None:
    found = {each.name: (each.launches, each.us) for each in profile().by_kernel()}
    assert found == {"linear_0": (2, 6.0), "linear_1": (2, 6.0), "copy": (1, 1.0)}


def test_torch_stands_only_where_all_modules_of_a_row_are_known() -> None:
    eager = EagerTimes(50.0, {"layers.0.attn.q": 6.0, "layers.0.attn.k": 5.0, "layers.1.attn.q": 4.0}, "torch")
    found = {each.name: each.eager_us for each in profile().beside(eager).by_module()}
    assert found["layers.0.attn.q+k"] == 11.0
    assert found["layers.1.attn.q+k"] is found["layers.0.mlp"] is found[""] is None
    assert profile().as_dict()["eager"] is None and "eager=model" in profile().as_dict()["eager_missing"]


def test_a_step_without_time_or_limit_has_no_share() -> None:
    assert step(0, 0.0).of_limit is None and step(0, 1.0, limit_us=None).of_limit is None
    empty = profile(())
    assert empty.not_product == 0 and "the call" in str(empty) and "</svg>" in empty.svg()
    assert empty.by_module() == [] and json.loads(empty.to_json())["steps"] == []


def test_the_text_says_why_a_share_is_above_the_limit() -> None:
    by_bytes, by_rate = step(0, 0.5, "a"), step(1, 0.5, "b", limited_by="fp32")
    assert "the bytes were in caches" in str(profile((by_bytes,)))
    assert "other work disturbed the probes" in str(profile((by_rate,)))
    assert "more than 100 %" not in str(profile((step(0, 2.0, "a"), step(1, 1.0, "b"))))
    assert "other work interrupted" in str(profile((step(0, 5.0),))) and "interrupted" not in str(profile())
    late = str(profile((step(0, 5.0, late=True),)))
    assert "1 step was submitted late" in late


def test_tables_are_as_long_as_asked_and_refuse_another_order() -> None:
    assert len(profile().table(by="step").splitlines()) == 1 + len(STEPS)
    assert profile().table(most=2).splitlines()[-1] == "and 3 more: 5.0 us"
    with pytest.raises(ArgumentError, match="by 'module', 'kernel' or 'step'"):
        profile().table(by="layer")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="by 'module' or by 'kernel'"):
        profile().svg(by="step")  # type: ignore[arg-type]


def boxes(text: str) -> list[tuple[str, float, float, float]]:
    """(title, x, y, width) of each box."""
    name = "{http://www.w3.org/2000/svg}"
    return [
        (rect.findtext(f"{name}title", ""), *(float(rect.attrib[key]) for key in ("x", "y", "width")))
        for rect in ElementTree.fromstring(text).iter(f"{name}rect")
        if "y" in rect.attrib
    ]


@pytest.mark.parametrize("by", ["module", "kernel"])
def test_the_boxes_of_each_row_are_as_wide_as_their_time_and_do_not_overlap(by: Any) -> None:
    found = boxes(profile().svg(by=by))
    rows: dict[float, list[tuple[float, float]]] = {}
    for title, x, y, width in found:
        us = float(title.rpartition(": ")[2].partition(" us")[0])
        assert width == pytest.approx(1200 * us / 13, abs=0.1)
        rows.setdefault(y, []).append((x, x + width))
    for row in rows.values():
        assert all(right <= left + 0.2 for (_, right), (left, _) in zip(sorted(row), sorted(row)[1:], strict=False))
    assert found[0][0].startswith("main: 13.0 us, 100.0%, 5 launches")


def test_names_of_a_model_are_escaped_and_thin_boxes_counted() -> None:
    text = profile((step(0, 1e6, "a<b>&c"), step(1, 0.1, "thin"))).svg()
    assert any("a<b>&c" in title for title, *_ in boxes(text)) and "2 boxes are too thin to draw" in text


@pytest.mark.parametrize("name", ["a\x00b\x1b[31m", "a\ud800", "a\ufffe", ".".join("a" * 3000), ".".join("0" * 9000)])
def test_names_of_a_hostile_file_break_neither_charts_nor_terminals(name: str, tmp_path: Path) -> None:
    found = profile((step(0, 1.0, name),))
    for by in ("module", "kernel"):
        assert len(boxes(found.svg(by=by))) >= 3  # type: ignore[arg-type]
    found.save(tmp_path / "p.svg")
    found.save(tmp_path / "p.json")
    texts = [str(found), *(found.table(by=by) for by in ("module", "kernel", "step"))]  # type: ignore[arg-type]
    assert all(letter.isprintable() or letter == "\n" for text in texts for letter in text)


def test_launches_that_serve_two_layers_fold_to_one_row() -> None:
    """The end of a layer merged with the start of the next one, as residual sums are."""
    steps = [step(n, 1.0, f"layers.{n}.up & layers.{n - 1}.norm") for n in (1, 2, 3)]
    (row,) = profile(tuple(steps)).by_module(layers=False)
    assert (row.name, row.launches) == ("layers.*.up+norm", 3)


def test_a_trace_has_each_step_at_its_time_and_the_json_its_id(tmp_path: Path) -> None:
    found = profile()
    slices = [event for event in found.to_perfetto()["traceEvents"] if event["ph"] == "X"]
    assert [(each["ts"], each["dur"]) for each in slices] == [(each.begin_us, each.us) for each in STEPS]
    read = json.loads(found.to_json())
    assert read["profile_schema"] == 1 and [each["id"] for each in read["steps"]] == [each.id for each in STEPS]
    assert found.seconds()["main/3"] == 4e-6 and found.measured()[3] == 4.0
    assert (read["steps_us"], read["timing_us"], read["outside_us"]) == (13.0, 1.5, 7.0)
    found.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == found.to_perfetto()
    with pytest.raises(ArgumentError, match=r"name a \.svg file"):
        found.save(tmp_path / "trace.txt")


@pytest.mark.parametrize(
    ("path", "near", "moved"),
    [
        ("layers.0.attn", "layers.3.attn.o", "layers.3.attn"),
        ("layers.0", "layers.12.mlp.up", "layers.12"),
        ("enc.0.b.1.x", "enc.4.b.7.y", "enc.4.b.7.x"),
        ("enc.0.b.1.x", "enc.4.c.7.y", None),  # nothing says which b
        ("layers.0.attn", "head", None),
        ("norm", "layers.3.mlp", "norm"),
        ("layers.0.attn", "layers", None),
    ],
)
def test_a_path_moves_to_the_layers_around_it(path: str, near: str, moved: str | None) -> None:
    assert moved_to(path, near) == moved


@pytest.mark.parametrize(
    ("name", "isa", "limits", "used"),
    [
        ("odd_dims", "x86-64-v4", LIMITS, "bf16"),
        ("odd_dims", "x86-64-v4", replace(LIMITS, bf16=None), "fp32"),
        ("odd_dims", "x86-64-v3", LIMITS, "fp32"),
        ("decode_softcap", "x86-64-v4", LIMITS, "fp32"),  # two heads: reads keys in place
        ("cache_decode_grouped", "x86-64-v4", LIMITS, "bf16"),
    ],
)
def test_attention_is_compared_with_the_rate_of_its_products(name: str, isa: str, limits: Limits, used: str) -> None:
    case = BY_NAME[name]
    assert arithmetic_of(replace(case, compute="bf16").spec, isa, "cpu", limits) == used
    assert arithmetic_of(case.spec, isa, "cpu", limits) == "fp32"


@pytest.mark.parametrize(("top", "factors", "used"), [(0, "f32", "fp32"), (0, "bf16", "bf16"), (2, "bf16", "fp32")])
def test_experts_are_compared_with_the_rate_of_their_products(top: int, factors: Any, used: str) -> None:
    spec = combined_case("cpu_p16_v2", "nf4", 4, 64, 96, rows=2, top=top, factors=factors).spec
    assert arithmetic_of(spec, "x86-64-v4", "cpu", LIMITS) == used
    assert arithmetic_of(spec, "x86-64-v4", "cpu", replace(LIMITS, bf16=None)) == "fp32"


@pytest.mark.parametrize(
    ("dtypes", "codes", "used"),
    [("f32 f32", "", "fp32"), ("bf16 bf16", "", "bf16"), ("f32 bf16", "", "bf16"), ("bf16 f32", "1", "int8")],
)
def test_linears_in_one_launch_are_compared_with_the_fastest_of_their_rates(dtypes: str, codes: str, used: str) -> None:
    bodies, operands = [], list[Operand]()
    for number, dtype in enumerate(dtypes.split()):
        names = (("x", (3, 96), "r", "f32"), ("w", (24, 96), "r", dtype), ("out", (3, 24), "w", "f32"))
        operands += [
            Operand(name=f"{name}_{number}", dtype=kind, access=access, shape=shape, strides=(shape[1], 1))  # type: ignore[arg-type]
            for name, shape, access, kind in names
        ]
        integers = str(number) in codes
        bodies.append(LinearKernel(m=3, n=24, k=96, m_class="2-8", has_bias=False, codes=integers))
    spec = KernelSpec(name="l", symbols=(), operands=tuple(operands), body=LinearsKernel(linears=tuple(bodies)))
    assert arithmetic_of(spec, "x86-64-v4", "cpu", LIMITS) == used
