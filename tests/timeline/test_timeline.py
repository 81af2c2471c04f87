"""Timelines of real programs: their order is the plan's, their text fits, their trace is well-formed."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError
from qcompiler.plan.plan import Record, Wait
from qcompiler.runtime.timeline import Timeline


def check_order(program: Any, shown: Timeline) -> None:
    """Slices of a stream follow each other; what waits begins after what it waits for."""
    entry = next(each for each in program.plan.entries if each.name == shown.entry)
    assert [each.step for each in shown.slices] == sorted(each.step for each in shown.slices)
    assert all(entry.steps[each.step].stream == each.stream for each in shown.slices)
    for stream in shown.streams:
        own = [each for each in shown.slices if each.stream == stream]
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(own))
    for edge in shown.edges:
        assert shown.slices[edge.source].end < shown.slices[edge.target].begin
        assert shown.slices[edge.source].stream != shown.slices[edge.target].stream
    assert shown.waits == sum(isinstance(step, Wait) for step in entry.steps)
    for before, after in itertools.pairwise(shown.critical):
        assert shown.slices[before].end <= shown.slices[after].begin + 1e-9
    assert max(each.end for each in shown.slices) <= shown.span + 1e-9


def test_branches_run_beside_each_other_and_meet(branches: qc.Program) -> None:
    shown = branches.timeline("decode")
    check_order(branches, shown)
    assert len(shown.streams) > 1 and shown.waits > 0 and shown.edges
    assert shown.span < 0.98 * shown.serial
    streams = {each.label: each.stream for each in shown.slices}
    assert len({streams["query"], streams["key"], streams["value"]}) > 1
    assert shown.slices[shown.critical[-1]].label == "out"


def test_the_report_says_what_the_timeline_shows(branches: qc.Program) -> None:
    for entry in branches.plan.entries:
        shown = branches.timeline(entry.name)
        (choice,) = [c for c in branches.report().choices if (c.stage, c.path) == ("assign-streams", entry.name)]
        assert choice.what == f"streams {', '.join(sorted(shown.streams))}; {shown.waits} waits"
        assert f"{shown.span:.1f} us" in choice.why and f"on one stream {shown.serial:.1f}" in choice.why


def test_sizes_choose_the_entry_point_and_are_checked(branches: qc.Program) -> None:
    assert branches.timeline().entry == "decode"
    small, large = (branches.timeline("prefill", {"s": s}) for s in (1, 32))
    assert branches.timeline(symbols={"s": 9}).entry == "prefill"
    assert small.symbols == {"b": 4, "s": 1} and small.span < large.span
    for entry, symbols, message in (
        ("encode", {}, "no entry point 'encode'; the program has decode, prefill"),
        ("prefill", {"s": 33}, "takes s from 1 to 32, not 33"),
        ("prefill", {"n": 2}, "has no dimension 'n'; it has b, s"),
        (None, {"b": 9}, "takes b from 1 to 4, not 9"),
    ):
        with pytest.raises(ArgumentError, match=message):
            branches.timeline(entry, symbols)


def test_a_cpu_has_one_row_without_waits(on_the_cpu: qc.Program) -> None:
    shown = on_the_cpu.timeline("prefill")
    check_order(on_the_cpu, shown)
    assert list(shown.streams) == ["cpu.compute"] and shown.waits == 0
    assert shown.span == pytest.approx(shown.serial) and len(shown.critical) == len(shown.slices)


def test_measured_steps_take_their_time(branches: qc.Program) -> None:
    steps = {each.step: 100.0 for each in branches.timeline("decode").slices}
    shown = branches.timeline("decode", measured=steps)
    check_order(branches, shown)
    assert shown.measured and all(each.end - each.begin == pytest.approx(100) for each in shown.slices)
    assert "measured" in str(shown) and "estimated" not in str(shown)
    assert all(event["args"]["time"] == "measured" for event in shown.perfetto()["traceEvents"] if event["ph"] == "X")


# --- text ------------------------------------------------------------------------------------------------------------


def test_weights_that_a_second_device_gathers_name_their_slices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Linear(48, 32), torch.nn.Linear(32, 16)).eval()
    program = qc.qcompile(model, (torch.ones(1, 16),), device={"1": "sim:1", "2": "sim:1", "": "sim:0"})
    shown = program.timeline()
    check_order(program, shown)
    assert [each.place for each in shown.slices if each.template == "linear"] == ["0", "1", "2"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_chart_has_a_row_for_each_stream_and_fits(branches: qc.Program, width: int) -> None:
    shown = branches.timeline("decode")
    lines = shown.text(width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert "estimated for A100" in lines[0] and "not measured" in lines[0]
    for stream in shown.streams:
        (row,) = [line for line in lines if line.split(" ")[0] == stream]
        assert set(row[len(stream) :]) - set(". ")
    with pytest.raises(ArgumentError, match="too narrow"):
        shown.text(40)


def test_a_part_of_the_chart_is_named_by_its_times(branches: qc.Program) -> None:
    shown = branches.timeline("decode")
    last = shown.slices[shown.critical[-1]]
    assert "[" in shown.text(begin=last.begin, end=last.end)
    with pytest.raises(ArgumentError, match="no part of a timeline"):
        shown.text(begin=5, end=4)


# --- traces ----------------------------------------------------------------------------------------------------------


def test_a_trace_has_a_process_a_thread_slices_and_an_arrow_for_each_wait(branches: qc.Program, tmp_path: Path) -> None:
    shown = branches.timeline("decode")
    shown.save(tmp_path / "x.json")
    trace = json.loads((tmp_path / "x.json").read_text())
    assert trace == shown.perfetto()
    events = trace["traceEvents"]
    names = {(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert names == {("process_name", "cuda0"), *(("thread_name", stream) for stream in shown.streams)}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(shown.slices)
    (query,) = [e for e in slices if e["name"] == "query"]
    assert query["cat"] == "linear" and query["args"]["place"] == "query"
    assert query["args"]["operands"][0] == "f32[4, 64]" and query["args"]["operands"][1] == "nf4[64, 64]"
    assert query["args"]["bytes"] > 64 * 64 // 2
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(starts) == len(shown.edges) and starts.keys() == ends.keys()
    for number, begin in starts.items():
        end = ends[number]
        assert begin["ts"] < end["ts"] and end["bp"] == "e"
        assert _slice_at(slices, begin) and _slice_at(slices, end)


def _slice_at(slices: list[dict[str, Any]], event: dict[str, Any]) -> bool:
    """Viewers bind an arrow's end to the slice of its thread that holds its time."""
    here = [e for e in slices if (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
    return any(e["ts"] - 1e-3 <= event["ts"] <= e["ts"] + e["dur"] + 1e-3 for e in here)


# --- files and the command line --------------------------------------------------------------------------------------


def test_a_loaded_program_shows_it_without_torch_and_xdsl(saved: Path, branches: qc.Program) -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['xdsl'] = None\n"
        "from qcompiler.runtime import load\n"
        f"run = load({str(saved)!r}, device='sim:0')\n"
        "print(run.timeline('decode'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{branches.timeline('decode')}\n"


def test_the_command_line_prints_writes_and_lists(saved: Path, tmp_path: Path, capsys: Any) -> None:
    out, shown = tmp_path / "trace.json", ["inspect", str(saved), "--timeline"]
    assert main([*shown, "--entry", "prefill", "--dim", "s=4", "--perfetto", str(out)]) == 0
    assert capsys.readouterr().out.startswith("prefill(b=4, s=4): ")
    assert json.loads(out.read_text())["otherData"]["symbols"] == {"b": 4, "s": 4}
    assert main([*shown, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["entry"] == "decode" and facts["span_us"] < facts["serial_us"]
    assert {step["stream"] for step in facts["steps"]} == set(facts["streams"])
    assert main([*shown, "--between", "1,3"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main([*shown, "--between", "three"])
    assert "'three' is not a pair of times in microseconds" in capsys.readouterr().err


# --- running ---------------------------------------------------------------------------------------------------------


def test_overlapping_streams_are_right_eager_and_replayed(branches: qc.Program, inputs: Any) -> None:
    """The simulated GPU reports any two launches that touch the same bytes without an order."""
    graphs = {s: branches.capture(*inputs(2, s)) for s in (1, 5, 32)}
    assert {graph.entry for graph in graphs.values()} == {"decode", "prefill"}
    for seed, s in enumerate((5, 1, 32, 1, 5)):
        args = inputs(2, s, seed + 1)
        with torch.no_grad():
            wanted = branches.oracle(*args)
        eager = branches(*args)
        assert (eager - wanted).norm() <= 1e-5 * wanted.norm()
        assert torch.equal(graphs[s].replay(*args), eager)


def test_without_overlap_there_is_one_stream(monkeypatch: pytest.MonkeyPatch, inputs: Any) -> None:
    monkeypatch.setenv("QC_COMPUTE_STREAMS", "1")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    program = qc.qcompile(model, inputs(1, 2)[:1], device="sim:0")
    assert [stream.name for stream in program.plan.streams] == ["cuda0.compute"]
    assert not any(isinstance(step, Record | Wait) for step in program.plan.entries[0].steps)
    monkeypatch.setenv("QC_COMPUTE_STREAMS", "none")
    with pytest.raises(ArgumentError, match="QC_COMPUTE_STREAMS='none' is not a number from 1 to 16"):
        qc.qcompile(model, inputs(1, 2)[:1], device="sim:0")
