"""The model of benchmarks/gpubench/model.py, and the predictions that were frozen with it."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from by_path import load

from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime import nvrtc, sass

predict = load("benchmarks/gpu_predict.py")
from gpubench import cells, claims, model, occupancy, ours  # noqa: E402  # the folder is on the path now

SQUARE = (4096, 4096)


def counts(per_weight: float | None = 5.0, registers: int = 96) -> Any:
    return lambda spec, bits, products: model.Count(registers, per_weight, {"LDS": 0.5})


def linear(m: int, engine: str = "nf4", per_weight: float | None = 5.0, **more: Any) -> model.Prediction:
    found = model.predict(cells.Cell("linear", engine, *SQUARE, m, **more), counts(per_weight))
    assert found is not None
    return found


def test_one_row_costs_its_instructions_or_its_bytes_whichever_take_longer() -> None:
    slow, fast = linear(1, per_weight=20.0), linear(1, per_weight=0.5)
    assert (slow.bound, fast.bound) == ("issue", "dram")
    # 20 instructions for each of 2^24 weights, 32 lanes, four a clock on 132 multiprocessors; 256 panels: 2 / 1.94
    assert slow.terms["issue"][0] == pytest.approx(20 * 2**24 / 32 / (4 * 132 * 1980 * 0.9) * (2 * 132 / 256))
    assert fast.terms["dram"][0] == pytest.approx(fast.facts["bytes"] / (4.3e6 * 0.95))
    assert slow.low_us == pytest.approx(slow.terms["fixed"][0] + slow.terms["table"][0] + slow.terms["issue"][0])


def test_a_range_has_its_ends_in_order_and_grows_with_the_work() -> None:
    found = [linear(m) for m in (64, 512, 4096)]
    assert all(0 < each.low_us < each.high_us for each in found)
    assert found[0].low_us < found[1].low_us < found[2].low_us
    assert linear(4096).terms["tensor"][0] == pytest.approx(2 * 4096**3 / (989e6 * 0.79) * (512 // 132 + 1) * 132 / 512)


def test_a_kernel_for_any_m_is_predicted_for_the_tile_that_m_gets() -> None:
    """4096 rows of w: 64 blocks along them. 128 rows of x are two blocks of 64, 512 are two of 256."""
    few, many = linear(128, symbolic=True), linear(512, symbolic=True)
    assert (few.facts["blocks"], many.facts["blocks"]) == (128, 128)
    assert many.terms["tensor"][0] == pytest.approx(4 * few.terms["tensor"][0])


def test_few_blocks_leave_multiprocessors_without_work() -> None:
    small = model.predict(cells.Cell("linear", "nf4", 1024, 4096, 1), counts())
    assert (
        small is not None and small.facts["blocks"] == 64 and small.facts["uneven"] == pytest.approx(132 / 64, abs=1e-3)
    )


def test_any_m_of_16_pays_for_a_tile_of_64() -> None:
    fixed, free = linear(16), linear(16, symbolic=True)
    assert free.terms["tensor"][0] == pytest.approx(4 * fixed.terms["tensor"][0])
    assert free.low_us > fixed.low_us


def test_a_loop_that_cannot_be_counted_is_named_and_predicted_without_it() -> None:
    found = model.predict(cells.Cell("linear", "nf4", *SQUARE, 1), lambda *_: model.Count(96, reason="no loop"))
    assert found is not None and "issue" not in found.terms and found.facts["not_counted"] == "no loop"


def test_attention_of_one_query_waits_for_loads_of_eight_blocks() -> None:
    found = model.predict(cells.Cell("attention_decode", "ours", n=8192, m=1), counts(None))
    assert found is not None and (found.bound, found.facts["blocks"]) == ("flight", 8)


@pytest.mark.parametrize(
    ("registers", "shared", "blocks"), [(32, 0, 8), (96, 0, 2), (128, 0, 2), (129, 0, 1), (32, 100 << 10, 2)]
)
def test_blocks_per_multiprocessor(registers: int, shared: int, blocks: int) -> None:
    assert occupancy.blocks_per_multiprocessor("sm_90a", 256, registers, shared) == blocks


# --- frozen ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(predict.FROZEN.read_text())
    return found


def test_every_cell_of_ours_and_torch_s_linears_have_a_frozen_range(frozen: dict[str, Any]) -> None:
    wanted = {c.id for c in cells.every() if not c.is_peer or (c.engine == "torch" and c.kind == "linear")}
    assert set(frozen["cells"]) == wanted
    for name, each in frozen["cells"].items():
        assert 0 < each["low_us"] < each["high_us"], name
        assert each["bound"] in (*each["terms"], "fixed"), name


def test_what_is_frozen_says_of_which_day_and_tree(frozen: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d at [0-9a-f]{7,}\+?", frozen["frozen"])
    assert frozen["model"] == model.VERSION, "a new model gets a new file"
    assert frozen["compiler"].startswith("NVRTC 13")


def test_the_page_shows_the_claims_as_they_are_held() -> None:
    assert claims.markdown() in Path(predict.FROZEN.parents[2], "docs", "gpu.md").read_text()


def test_frozen_claims_can_be_measured(frozen: dict[str, Any]) -> None:
    assert {each["measure"] for each in frozen["claims"]} == set(claims.MEASURES)
    assert all(each["low"] <= each["high"] and each["source"] for each in frozen["claims"])


def test_instructions_are_counted_in_the_cubin_of_the_kernel_that_is_launched() -> None:
    spec = ours.linear_spec("nf4", 4096, 4096, 1)
    found = predict.counted(spec, 4, Fraction(8, 64))
    assert found.per_weight is not None and 1.0 < found.per_weight < 20.0
    assert found.opcodes["HMMA"] == pytest.approx(8 / 64)
    function = sass.disassemble(nvrtc.build_module(predict.plan_of(spec), "sm_90a").path)["qk_0"]
    assert sum(found.opcodes.values()) == pytest.approx(sass.hot_loop(function, 4, Fraction(8, 64)).per_weight)


def test_a_kernel_without_a_hot_loop_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise predict.SassError("no loop holds both")

    monkeypatch.setattr(sass, "hot_loop", refuses)
    spec: KernelSpec = ours.linear_spec("nf4", 4096, 4096, 1)
    assert predict.counted(spec, 4, Fraction(8, 64)).reason == "no loop holds both"
