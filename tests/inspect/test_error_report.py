"""Ratios of signal to noise, and how a program's values are found among those of the model; without a compile."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, ModuleOp
from xdsl.passes import ModulePass

from qcompiler.errors import ArgumentError, KernelSelectionError
from qcompiler.frontends.common.imported import Compared, GraphValues
from qcompiler.inspect import stage_answers
from qcompiler.inspect.error_report import ErrorReport, Finder, answers_snr, layer_rows, snr, stage_row, worst
from qcompiler.inspect.explore.machine_code import machine_code
from qcompiler.inspect.explore.model import Errors, StageSnr
from qcompiler.inspect.measure_errors import measure
from qcompiler.inspect.stage_answers import StagesAgain
from qcompiler.ir.context import QCContext
from qcompiler.passes.pipeline import Stage

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Node:
    name: str
    values: Array
    op: str = "add.Tensor"
    path: str = "layer"
    line: str = "net.py:1"


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_ratio_is_that_of_powers_in_decibels() -> None:
    x = np.array([3.0, -4.0])
    assert snr(x, x + np.array([0.03, 0.04])) == pytest.approx(40.0)  # a hundredth of the amplitude
    assert snr(x, x) == "exact" and snr(x, 2 * x) == pytest.approx(0.0)
    assert snr(np.zeros(2), x) is None and snr(np.zeros(2), np.zeros(2)) == "exact"
    # In fp32 the sum of squares would overflow.
    assert snr(np.array([3e38], np.float32), np.array([2.97e38], np.float32)) == pytest.approx(40.0, abs=0.01)


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e200, 1.7e308])
def test_a_ratio_of_numbers_whose_squares_no_float64_holds(size: float) -> None:
    assert snr(np.array([size]), np.array([size / 2])) == pytest.approx(20 * math.log10(2), abs=1e-2)
    assert snr(np.array([size]), np.array([-size])) == pytest.approx(-20 * math.log10(2), abs=1e-2)


def test_integers_that_no_float64_tells_apart_are_not_exact() -> None:
    wanted, one_more = np.array([2**53]), np.array([2**53 + 1])
    assert snr(wanted, one_more) == pytest.approx(20 * 53 * math.log10(2)) and snr(one_more, one_more) == "exact"
    assert snr(np.array([True, True]), np.array([True, False])) == pytest.approx(10 * math.log10(2))


def test_a_float_model_with_results_of_other_shapes_is_none_of_the_program() -> None:
    run = GraphValues((), (noise(7, 64),))
    for results in ((noise(7, 1),), (np.float32(0),), (noise(7, 64), noise(7, 64))):
        with pytest.raises(ArgumentError, match="gives results of the shapes"):
            measure(None, Compared(run, GraphValues((), results)), None, (), {})  # type: ignore[arg-type]


def test_machine_code_is_made_for_known_architectures_only() -> None:
    with pytest.raises(KernelSelectionError, match="no CUDA architecture"):
        machine_code(None, "../../home/sm_90a")  # type: ignore[arg-type]


def test_a_nan_or_an_infinity_in_one_place_is_not_left_out() -> None:
    x, y = np.array([1.0, np.inf, np.nan]), np.array([1.0, np.inf, np.nan])
    assert snr(x, y) == "exact"
    for wrong in ([1.0, -np.inf, np.nan], [np.nan, np.inf, np.nan], [1.0, np.inf, 2.0], [1.0, 5.0, np.nan]):
        assert snr(x, np.array(wrong)) == "not finite"


def test_the_worst_of_ratios_is_the_least_and_nothing_is_no_ratio() -> None:
    assert worst(["exact", 40.0, None]) == 40.0 and worst([40.0, "not finite"]) == "not finite"
    assert worst(["exact", None]) == "exact" and worst([None]) is None and worst([]) is None


def test_a_step_is_the_value_that_it_is_nearest_to_not_the_next_one_of_a_residual_stream() -> None:
    x = noise(4, 16)
    nodes = [Node("x", x), Node("x_1", x + 0.05 * noise(4, 16, seed=1)), Node("other", noise(4, 16, seed=2))]
    assert snr(nodes[0].values, nodes[1].values) > 20  # type: ignore[operator]  # near enough to be taken for it
    finder = Finder(nodes)
    finder.see(3, x * np.float32(1 + 1e-6))
    assert {number: found.step for number, (_, found) in finder.found.items()} == {0: 3}
    finder.see(5, x + np.float32(0.001) * noise(4, 16, seed=3))  # a worse copy does not replace it
    assert finder.found[0][1].step == 3


def test_a_value_is_found_in_another_order_of_axes_and_under_all_names_of_its_views() -> None:
    x = noise(2, 3, 5)
    nodes = [Node("x", x), Node("view", x), Node("turned", x.transpose(2, 0, 1)), Node("flat", x.reshape(6, 5))]
    one_more = Finder(nodes)
    one_more.see(0, x.reshape(6, 5))  # rows of all sequences, one after the other
    assert sorted(one_more.found) == [0, 1, 3]
    finder = Finder(nodes)
    finder.see(0, np.ascontiguousarray(x.transpose(1, 0, 2)))
    assert sorted(finder.found) == [0, 1, 2]
    rows = layer_rows(nodes, {"x": x + np.float32(0.1)}, finder, "main")
    assert [(row.value, row.entry, row.step, row.oracle) for row in rows] == [
        ("x", "main", 0, "exact"), ("view", "main", 0, "exact"), ("turned", "main", 0, "exact"), ("flat", "", -1, None),
    ]  # fmt: skip
    assert rows[0].model == rows[0].quantised == pytest.approx(snr(x + np.float32(0.1), x))
    assert rows[1].model is None  # the float model has no such value


def test_weights_are_no_layers() -> None:
    assert layer_rows([Node("w", noise(2, 2), op="qc.dequantize.default")], {}, Finder([]), "main") == ()


def test_a_new_entry_point_is_compared_with_the_first() -> None:
    x = noise(4)
    assert answers_snr({"main": [x]}, {"main": [x], "decode": [x]}) == "exact"
    assert answers_snr({"main": [x]}, {"main": [x], "decode": [1.01 * x]}) == pytest.approx(40.0, abs=1e-3)


@dataclass(frozen=True)
class SpoilPass(ModulePass):
    """Makes each constant a hundredth larger."""

    name = "spoil"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for each in op.walk():
            if isinstance(each, arith.ConstantOp) and isinstance(each.value, FloatAttr):
                each.properties["value"] = FloatAttr(1.01 * each.value.value.data, each.value.type)


@dataclass(frozen=True)
class IdlePass(ModulePass):
    name = "idle"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        pass


MAPS = "[affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>]"
TEXT = f"""builtin.module {{
  func.func @main(%0: tensor<4xf32>) -> tensor<4xf32> {{
    %1 = tensor.empty() : tensor<4xf32>
    %2 = linalg.generic {{indexing_maps = {MAPS}, iterator_types = ["parallel"]}}
      ins(%0 : tensor<4xf32>) outs(%1 : tensor<4xf32>) {{
    ^bb0(%3: f32, %4: f32):
      %5 = arith.constant 2.0 : f32
      %6 = arith.mulf %3, %5 : f32
      linalg.yield %6 : f32
    }} -> tensor<4xf32>
    func.return %2 : tensor<4xf32>
  }}
}}
"""


def test_the_stage_that_spoils_the_answer_has_the_low_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple(Stage(name, made) for name, made in (("idle", IdlePass), ("spoil", SpoilPass), ("idle2", IdlePass)))
    monkeypatch.setattr(stage_answers, "STAGES", stages)
    seen: list[tuple[str, dict[str, list[Array]]]] = []
    x = noise(4)
    context = QCContext.default()
    StagesAgain(context, {}).run(TEXT, [x], {}, lambda name, now: seen.append((name, dict(now))))  # type: ignore[arg-type]
    assert [name for name, _ in seen] == ["import", "spoil"]  # a stage that changes nothing is not run again
    (_, start), (_, spoilt) = seen
    row = stage_row("spoil", spoilt, start, start, [2 * x], [])
    assert row.before == row.start == row.oracle == pytest.approx(40.0, abs=1e-3) and row.model is None
    assert stage_row("import", start, None, None, [2 * x], [2 * x]) == StageSnr(
        stage="import", before=None, start=None, oracle="exact", model="exact"
    )


def test_a_report_prints_dashes_for_nothing_and_is_json() -> None:
    rows = (StageSnr(stage="import", before=None, start=None, oracle=120.04, model="exact"),)
    errors = Errors(inputs=("x: float32[4]",), entry="main", results=(), layers=(), stages=rows, notes=("why",))
    report = ErrorReport(errors)
    assert "import - - 120.0 exact" in " ".join(str(report).split())
    assert str(report).endswith("note: why")
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["stages"][0] == {"stage": "import", "before": None, "start": None, "oracle": 120.04, "model": "exact"}
    assert not math.isnan(found["stages"][0]["oracle"])
