"""benchmarks/gpu_report.py: tables of whole, partial and failed runs, marks, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from by_path import load

report = load("benchmarks/gpu_report.py")
schema = load("benchmarks/gpu_schema.py")
from gpubench import cells, claims, document, marks, pages, worker  # noqa: E402  # the folder is on the path now

TERMS = {"fixed": [1.3, 3.2], "dram": [2.3, 2.9], "issue": [3.0, 5.0]}
PREDICTED = {"low_us": 4.3, "high_us": 9.2, "bound": "issue", "terms": TERMS}
FUNCTIONAL = ["linear/nf4/4096x4096/m1", "norm/ours/1x4096", "attention_decode/ours/8192"]


@pytest.fixture(scope="module")
def functional() -> document.Document:
    """A run of three cells on the simulated GPU."""
    heard: list[dict[str, Any]] = []
    worker.Worker(worker.Task("sim:0", "small", FUNCTIONAL, 120.0), heard.append).run()
    found = document.Document(kind="sim", device="sim:0", scale="small", began="2026-11-22T10:00:00", commit="abc1234")
    found.cells = [document.Row(**message["row"]) for message in heard if "row" in message]
    found.probes = [document.Probe(**message["probe"]) for message in heard if "probe" in message]
    found.environment = next(message["environment"] for message in heard if "environment" in message)
    return found


@pytest.fixture
def timed(functional: document.Document) -> document.Document:
    """The same as a GPU would give it: times, bytes of the full sizes, predictions, a peer, a symbolic cell."""
    found = copy.deepcopy(functional)
    found.kind, found.timed, found.scale = "gpu", True, "full"
    found.environment |= {"gpu": "NVIDIA H200", "arch": "sm_90a", "driver_cuda": "13.0"}
    for row in found.cells:
        row.samples, row.predicted = [6.0, 5.0, 40.0], PREDICTED
    linear = found.cells[0]
    linear.n, linear.k, linear.m, linear.nbytes, linear.operations = 4096, 4096, 1, 9_460_000, 2 * 4096 * 4096
    peer = dataclasses.replace(linear, id="linear/torch/4096x4096/m1", engine="torch", samples=[12.0], predicted={})
    free = dataclasses.replace(linear, id=f"{linear.id}/symbolic", rows="symbolic", samples=[9.0])
    found.cells += [peer, free]
    found.probes = [
        document.Probe("copy", moment, {"nbytes": 1, "terabytes_per_second": [4.2, 4.3, 4.4]})
        for moment in ("before", "after")
    ] + [document.Probe("launch", "before", {"node_us": 1.25, "eager_device_us": 4.5})]
    return found


def page(found: document.Document, **more: Any) -> str:
    text: str = pages.text(pages.Report(found, [each.as_json() for each in claims.CLAIMS], "today", **more))
    return text


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


# --- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("median", "verdict", "factor", "where"),
    [(6.0, "right", 1.0, "waiting"), (18.4, "slower", 2.0, "waiting"), (2.15, "faster", 2.0, "launch"),
     (4.5, "right", 1.0, "launch")],
)  # fmt: skip
def test_a_time_is_marked_with_its_factor_and_the_nearest_limit(
    median: float, verdict: str, factor: float, where: str
) -> None:
    row = document.Row("x", "linear", "nf4", samples=[median], predicted=PREDICTED)
    found = marks.mark(row)
    assert (found.verdict, found.factor, found.where) == (verdict, pytest.approx(factor), where)


def test_the_nearest_limit_is_the_one_whose_best_time_is_most_of_the_time() -> None:
    assert marks.nearest(20.0, {"fixed": [1, 2], "dram": [15, 20], "issue": [10, 30]}) == ("dram", 0.75)
    assert marks.nearest(100.0, {"fixed": [1, 2], "dram": [15, 20], "issue": [10, 30]})[0] == "waiting"


def test_cells_without_a_time_or_a_prediction_have_no_mark() -> None:
    assert marks.mark(document.Row("x", "linear", "nf4", predicted=PREDICTED)) is None
    assert marks.mark(document.Row("x", "linear", "nf4", samples=[1.0])) is None


def test_claims_are_right_wrong_or_not_measured(timed: document.Document) -> None:
    every = [each.as_json() for each in claims.CLAIMS]
    assert [each.verdict for each in marks.judged(timed, every) if each.claim["measure"] == "nf4_gemv_of_copy"] == [
        "right", "wrong",
    ]  # fmt: skip
    found = {each.claim["measure"]: each for each in reversed(marks.judged(timed, every))}
    gemv = found["nf4_gemv_of_copy"]
    assert gemv.value == pytest.approx(9_460_000 / 6.0 / 4.3e6)
    assert (gemv.verdict, gemv.aim) == ("right", "missed")
    assert (found["decode_8k_us"].value, found["decode_8k_us"].verdict, found["decode_8k_us"].aim) == (
        6.0,
        "wrong",
        "reached",
    )
    assert found["nf4_m4096_of_peak"].verdict == "not measured"
    assert (found["wrong_cells"].value, found["wrong_cells"].verdict) == (0, "right")
    timed.cells[1].status = "wrong"
    again = {each.claim["measure"]: each for each in marks.judged(timed, [each.as_json() for each in claims.CLAIMS])}
    assert (again["wrong_cells"].value, again["wrong_cells"].verdict, again["wrong_cells"].aim) == (
        1,
        "wrong",
        "missed",
    )


# --- pages -----------------------------------------------------------------------------------------------------------


def test_a_timed_run_shows_medians_shares_marks_and_what_any_m_costs(timed: document.Document) -> None:
    timed.cells[1].samples = [20.0]
    text = page(timed)
    linear = line_of(text, "| 1 | 12.0, 18%")
    assert "6.0, 37%, 2.00×" in linear, "the median, not the mean; bytes over the copy's rate; over torch's bf16"
    assert "`norm/ours/1x4096` | 20.0 | 4.3 to 9.2 | slower by 2.17× | issue | waiting" in text
    assert "3 of 4 predicted cells are in their range, 0 are faster, 1 slower" in text
    assert "| nf4 4096 × 4096 | 1 | 6.0 | 9.0 | 1.50× |" in text
    assert "| before | 4.30 TB/s |" in text and "1.25 | 4.50 |" in text
    assert text.index("What was predicted") < text.index("Where predictions were missed") < text.index("### Linears")


def test_a_cell_faster_than_a_copy_is_pointed_out(timed: document.Document) -> None:
    assert "not from memory" not in page(timed)
    timed.cells[0].samples = [1.9]  # 9.46 MB: 4.98 TB/s where copies do 4.3
    assert "not from memory: `linear/nf4/4096x4096/m1`." in page(timed)


def test_wrong_results_come_first_with_their_errors(timed: document.Document) -> None:
    timed.cells[0].status, timed.cells[0].samples = "wrong", []
    timed.cells[0].errors, timed.cells[0].reason = {"eager": 1.6e-3, "replay": 0.25}, "replay: error 2.50e-01"
    timed.cells[1].status, timed.cells[1].reason, timed.cells[1].errors = "failed", "cudaErrorIllegalAddress", {}
    text = page(timed)
    assert "| linear/nf4/4096x4096/m1 | wrong | eager 1.6e-03, replay 2.5e-01 | replay: error 2.50e-01 |" in text
    assert "| norm/ours/1x4096 | failed | – | cudaErrorIllegalAddress |" in text
    assert text.index("What is wrong") < text.index("What was predicted")
    assert "| 1 | 12.0, 18% | wrong |" in text, "a wrong cell has no time"


def test_an_error_that_is_no_number_is_null_in_the_file(timed: document.Document, tmp_path: Path) -> None:
    timed.cells[0].status, timed.cells[0].errors = "wrong", {"eager": float("nan"), "replay": float("inf")}
    timed.cells[0].samples, timed.cells[0].reason = [], "eager: error nan, at most 4e-03 is right"
    document.write(timed, tmp_path / "bench.json")
    assert "NaN" not in (tmp_path / "bench.json").read_text()
    found, _ = report.read(tmp_path / "bench.json")
    assert found.cells[0].errors == {"eager": None, "replay": None}
    assert "eager none, or NaN, replay none, or NaN | eager: error nan" in page(found)


def test_a_partial_run_names_what_is_missing(timed: document.Document) -> None:
    timed.cells[2].status, timed.cells[2].samples = "left out", []
    timed.peers_missing = {"tinygemm linear": "RuntimeError: no kernel image"}
    text = page(timed)
    assert "1 cells, the first of them `attention_decode/ours/8192`" in text
    assert "| tinygemm linear | RuntimeError: no kernel image |" in text
    assert "| attention of one query over 8,192 keys | 150 µs to 200 µs | – | not measured |" in text


def test_an_untimed_run_pretends_nothing(functional: document.Document) -> None:
    text = page(functional)
    assert "No GPU: cells ran for their results" in text and "small ones" in text
    assert "µs" not in text


def test_a_step_is_taken_apart(timed: document.Document) -> None:
    steps = [{"number": i, "kernel": name, "template": "x", "nbytes": 4_300_000, "us": us}
             for i, (name, us) in enumerate((("linear", 30.0), ("attention", 100.0), ("linear", 20.0)))]  # fmt: skip
    extra = {"steps": steps, "serial_us": [200.0], "launches": 3, "keys": 8192, "eager_us": 400.0}
    timed.cells.append(
        document.Row("layer/nf4", "layer", "nf4", status="ok", samples=[180.0], nbytes=12_900_000, extra=extra)
    )
    text = page(timed)
    assert "180.0 µs as a captured graph of 3 launches, 200.0 µs on one stream, 400.0 µs eagerly" in text
    assert "Its bytes take 3.0 µs" in text and "3 nodes that do nothing would take 3.8 µs" in text
    assert text.index("| `attention` | 1 | 100.0 | 50% | 1.0 |") < text.index("| `linear` | 2 | 50.0 | 25% | 2.0 |")


# --- files -----------------------------------------------------------------------------------------------------------


def saved(found: document.Document, path: Path, **more: Any) -> Path:
    """A gpu-check.json around the run."""
    kind = schema.Report(kind="gpu", bench=dataclasses.asdict(found), **more)
    schema.write(kind, path)
    return path


def test_the_check_s_failures_and_what_it_learned_are_in_the_report(timed: document.Document, tmp_path: Path) -> None:
    failure = schema.Failure("softmax", "", "7x130", "replayed", "qk_softmax_1", 0.5, 1e-5, 12, 910)
    learned = schema.Learned("end on another thread", "908", "901")
    profile = schema.Profile("nf4_m64", "racecheck", False, findings=["========= Race reported between …"])
    path = saved(timed, tmp_path / "gpu-check.json", failures=[failure], learned=[learned], profile=[profile])
    text = pages.text(report.report_of(path))
    assert "| softmax  7x130 | wrong, replayed | 5.0e-01 | 12 of 910 elements differ" in text
    assert "| end on another thread | 908 | 901 (differs) |" in text
    assert "| nf4_m64 | racecheck | – | ========= Race reported" in text


def test_a_check_without_times_is_reported_as_far_as_it_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema.write(schema.Report(kind="none", reason="no CUDA driver"), tmp_path / "gpu-check.json")
    assert report.main([str(tmp_path / "gpu-check.json")]) == 0
    assert "0 s of 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is no JSON"), ('{"schema": 1, "gpu": {}}', "schema 1"), ("[]", "schema None"),
     ('{"bench_schema": 7, "commit": "abc1234"}', "use the scripts of the commit that wrote it (abc1234)"),
     ('{"bench_schema": 1, "cells": [{"id": "x"}]}', "cells[0]: Row lacks engine, kind"),
     ('{"bench_schema": 1, "speed": 3}', "Document has no speed"),
     ('{"bench_schema": 1, "cells": [{"id": "x", "kind": "y", "engine": "z", "status": "great"}]}', "'great'")],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert report.main([str(tmp_path / "x.json")]) == 1
    assert said in capsys.readouterr().err


def test_the_page_is_written_between_its_markers_and_the_file_is_kept(
    timed: document.Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "performance.md"
    target.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    path = saved(timed, tmp_path / "gpu-check.json")
    assert report.main([str(path), "--write", str(target), "--keep", "--results", str(tmp_path)]) == 0
    text = target.read_text()
    assert text.startswith(f"before\n\n{report.BEGIN}\nNVIDIA H200 (sm_90a")
    assert text.endswith(f"{report.END}\n\nafter\n") and "old" not in text
    assert (tmp_path / "h200-2026-11-22-abc1234.json").read_bytes() == path.read_bytes()
    assert "h200-2026-11-22-abc1234.json" in text


def test_a_page_is_not_written_from_a_run_without_a_gpu(
    functional: document.Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "performance.md"
    target.write_text(f"{report.BEGIN}\nold\n{report.END}\n")
    document.write(functional, tmp_path / "bench.json")
    assert report.main([str(tmp_path / "bench.json"), "--write", str(target)]) == 1
    assert "was not measured on a GPU (sim)" in capsys.readouterr().err
    assert "old" in target.read_text()


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(report.UnreadableError, match="each once"):
        report.written("nothing here", "x", "docs/performance.md")


def test_the_page_of_the_repository_has_the_markers() -> None:
    performance = Path(report.ROOT, "docs", "performance.md").read_text()
    assert "x" in report.written(performance, "x", "docs/performance.md")


def test_every_linear_of_the_table_is_a_cell() -> None:
    names = {cell.id for cell in cells.every()}
    assert all(f"linear/{engine}/{n}x{k}/m1" in names for engine in cells.WEIGHT_ONLY for n, k in pages.LAYER_TIMES)
