"""benchmarks/gpu_first.py on the simulated GPU, and what it does when workers crash, hang or lose their device."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from by_path import load

from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.runtime.backends import registry

first = load("benchmarks/gpu_first.py")
from gpubench import cells, compiled, document, ours, peers, worker  # noqa: E402  # the folder is on the path now

SCRIPT = Path(first.__file__)
TELLING = ("linear/nf4/4096x4096/m1", "linear/int4/1024x4096/m64", "linear/w8a8/4096x4096/m16", "norm/ours/1x4096",
           "attention_decode/ours/1024", "linear/torch/4096x4096/m1", "linear/tinygemm/4096x4096/m64",
           "linear/bitsandbytes/4096x4096/m16")  # fmt: skip


def measure(path: Path, *only: str, device: str = "sim:0", budget: float = 240.0, **more: str) -> document.Document:
    command = [sys.executable, "-P", str(SCRIPT), "--device", device, "--json", str(path), "--budget", str(budget)]
    env = {**os.environ, "QC_QUIET": "1", "QC_SIM_CHECK": "0", **more}
    done = subprocess.run([*command, "--only", *only], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    made: document.Document = document.made(json.loads(path.read_text()), str(path))
    return made


# --- cells -----------------------------------------------------------------------------------------------------------


def test_every_size_and_format_is_measured_once_and_the_telling_ones_first() -> None:
    every = cells.every()
    names = [cell.id for cell in every]
    assert len(names) == len(set(names))
    for engine in cells.WEIGHT_ONLY:
        for n, k in cells.SHAPES:
            for m in cells.MS:
                assert f"linear/{engine}/{n}x{k}/m{m}" in names
        for m in cells.MS:
            assert f"linear/{engine}/4096x4096/m{m}/symbolic" in names
    assert all(f"attention_decode/ours/{keys}" in names for keys in (1024, 8192, 32768))
    assert names.index("linear/nf4/4096x4096/m1") < 9
    telling = ["linear/nf4/4096x4096/m64", "attention_decode/ours/8192", "layer/nf4", "linear/nf4/4096x4096/m4096"]
    assert all(names.index(name) < 35 for name in telling)


def test_a_text_that_names_no_cell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert first.main(["--only", "nf5"]) == 2
    assert "'nf5'" in capsys.readouterr().err


def test_a_fixed_m_and_any_m_are_two_kernels_and_each_is_what_select_picks() -> None:
    fixed, free = (ours.linear_spec("nf4", 4096, 4096, 16, symbolic=each) for each in (False, True))
    assert (fixed.symbols, fixed.body.m, fixed.body.m_class) == ((), 16, "9-64")
    assert (free.symbols, free.body.m, free.body.m_class) == (("m",), "m", "9-64")
    assert ours.linear_spec("nf4", 4096, 4096, 1).body.m_class == "1"
    assert ours.linear_spec("nf4", 4096, 4096, 1, symbolic=True).body.m_class == "2-8", (
        "any M has no kernel for one row"
    )
    sixteen, any_ = (emit_kernel(spec, "sm_90a").geometry for spec in (fixed, free))
    assert "16 tokens" in emit_kernel(fixed, "sm_90a").notes[0] and "64 tokens" in emit_kernel(free, "sm_90a").notes[0]
    assert sixteen.grid[0] == 1 and any_.at({"m": 16})[0] == 1


def test_every_kernel_is_emitted_under_a_name_of_its_own() -> None:
    """At one shape of linears: the others differ in numbers alone."""
    shapes = ((4096, 4096), (8192, 0), (0, 4096), (cells.PREFILL, 0))
    wanted = [c for c in cells.every() if not c.is_peer and c.kind != "layer" and (c.n, c.k) in shapes]
    specs: dict[str, Any] = {}
    for cell in wanted:
        spec = ours.spec_of(cell, cells.sizes(cell, "full"))
        assert specs.setdefault(spec.name, spec) == spec, f"two kernels are called {spec.name}"
    tensor_cores = [spec for spec in specs.values() if spec.template == "linear"]
    assert tensor_cores and all(emit_kernel(spec, "sm_90a").engine == "mma" for spec in tensor_cores)
    assert set(specs) <= set(compiled.specs(wanted)), "the cubins to bring along are those that are launched"


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cells_run_on_the_simulated_gpu_and_no_times_are_pretended(tmp_path: Path) -> None:
    found = measure(tmp_path / "out.json", *TELLING)
    rows = {row.id: row for row in found.cells}
    assert (found.kind, found.timed, found.scale) == ("sim", False, "small")
    wrong = {row.id: row.reason for row in found.cells if row.status not in ("ok", "left out")}
    assert not wrong, wrong
    assert not any(row.samples for row in found.cells)
    for name in ("linear/nf4/4096x4096/m1", "linear/int4/1024x4096/m64", "attention_decode/ours/1024"):
        row = rows[name]
        assert 1e-5 < row.errors["eager"] == row.errors["replay"] <= row.tolerance
        assert row.nodes == {"kernel": row.calls} and row.copies > 1
    assert "shape rules" in rows["linear/tinygemm/4096x4096/m64"].reason
    assert rows["linear/bitsandbytes/4096x4096/m16"].errors["eager"] < peers.WRONG
    moments = {(probe.name, probe.moment) for probe in found.probes}
    assert {("copy", "before"), ("copy", "after"), ("launch", "before"), ("clocks", "after")} <= moments
    assert not [probe for probe in found.probes if probe.reason and probe.name != "clocks"]


def test_events_graphs_and_resources_come_from_the_driver(tmp_path: Path) -> None:
    """On a driver made of host memory: what a GPU's rig asks for and gets. Its times mean nothing."""
    twins = load("tests/gpu/stub_twins.py")
    names = ["linear/nf4/4096x4096/m1", "norm/ours/1x4096", "linear/torch/4096x4096/m1"]
    stub = twins.environment(twins.folder(tmp_path))
    found = measure(tmp_path / "out.json", *names, device="cuda:0", **stub)
    rows = {row.id: row for row in found.cells}
    assert (found.kind, found.timed, found.scale) == ("stub", True, "small"), "full sizes are for GPUs"
    for name in names[:2]:
        row = rows[name]
        assert row.status == "ok", row.reason
        assert len(row.samples) == worker.SMALL_ROUNDS and min(row.samples) > 0
        assert row.nodes == {"kernel": row.calls}
        assert row.kernel["registers"] > 0 and row.kernel["blocks_per_sm"] > 0
    assert rows[names[2]].status == "not run" and "no CUDA device" in found.peers_missing["torch linear"]
    values = {probe.name: probe.values for probe in found.probes if probe.moment == "before"}
    assert values["copy"]["terabytes_per_second"] and values["launch"]["eager_device_us"] > 0
    assert found.environment["attributes"].keys() >= {"l2_bytes", "multiprocessors"}


@pytest.mark.slow
def test_a_decode_step_is_captured_and_its_launches_are_listed(tmp_path: Path) -> None:
    found = measure(tmp_path / "out.json", "layer")
    (row,) = found.cells
    assert row.status == "ok", row.reason
    assert row.nodes == {"kernel": 9} and row.extra["launches"] == 9
    assert sum(step["template"] == "linear" for step in row.extra["steps"]) == 4


@pytest.mark.slow
def test_every_cell_runs_on_the_simulated_gpu(tmp_path: Path) -> None:
    found = measure(tmp_path / "out.json", "/", budget=1500.0)
    assert not found.failures, found.failures
    assert len(found.cells) == len(cells.every())
    assert {row.status for row in found.cells} <= {"ok", "not run"}


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path: Path) -> None:
    if registry.is_available("cuda:0"):
        pytest.skip("this machine has a GPU; `make gpu-check` runs the benchmark there")
    command = [sys.executable, "-P", str(SCRIPT), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:8]) == (0, "no GPU: "), done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["cells"] == []


# --- what goes wrong -------------------------------------------------------------------------------------------------


def worker_on(monkeypatch: pytest.MonkeyPatch, names: list[str], **changes: Any) -> list[dict[str, Any]]:
    """The messages of a worker in this process."""
    for name, value in changes.items():
        monkeypatch.setattr(ours, name, value)
    heard: list[dict[str, Any]] = []
    task = worker.Task(device="sim:0", scale="small", cells=names, seconds=120.0, first=False)
    worker.Worker(task, heard.append).run()
    return heard


def test_a_wrong_result_is_listed_with_its_error_and_the_next_cell_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ours.relative
    seen = iter([0.5])
    heard = worker_on(
        monkeypatch, ["norm/ours/1x4096", "attention_decode/ours/1024"],
        relative=lambda result, wanted: next(seen, None) or right(result, wanted),
    )  # fmt: skip
    first_row, second = (message["row"] for message in heard if "row" in message)
    assert first_row["status"] == "wrong" and first_row["errors"] == {"eager": 0.5, "replay": 0.5}
    assert "5.00e-01" in first_row["reason"] and not first_row["samples"]
    assert second["status"] == "ok"
    assert heard[-1] == {"done": True}


def test_a_replay_with_other_bits_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ours.Launched.work

    def work(self: Any, *args: Any) -> Any:
        whole = made(self, *args)
        turns = iter([b"one", b"another"])
        whole.output = lambda: next(turns)
        return whole

    monkeypatch.setattr(ours.Launched, "work", work)
    row = worker_on(monkeypatch, ["norm/ours/1x4096"])[1]["row"]
    assert (row["status"], row["reason"]) == ("wrong", "a replay gave other bits than an eager launch")


def test_an_exception_costs_its_cell_and_a_lost_device_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise RuntimeError("launch failed: too many resources")

    names = ["norm/ours/1x4096", "attention_decode/ours/1024"]
    heard = worker_on(monkeypatch, names, norm=refuses)
    rows = [message["row"] for message in heard if "row" in message]
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert rows[0]["reason"] == "RuntimeError: launch failed: too many resources"
    monkeypatch.setattr(worker.Worker, "_probe", lambda self, moment: None)
    monkeypatch.setattr("gpubench.rig.Rig.healthy", lambda self: "cudaErrorIllegalAddress")
    heard = worker_on(monkeypatch, names, norm=refuses)
    assert [next(iter(message)) for message in heard] == ["begin", "row", "lost"]


FAULTY = """
import json, os, sys, time
task = json.load(sys.stdin)
pipe = os.fdopen(int(sys.argv[1]), "w")
def say(**message):
    pipe.write(json.dumps(message) + "\\n"); pipe.flush()
for name in task["cells"]:
    say(begin=name)
    if "int4" in name:
        os._exit(139)
    if "q4_K" in name:
        time.sleep(60)
    status = "failed" if "int8" in name else "ok"
    row = {"id": name, "kind": "linear", "engine": "x", "status": status, "samples": [1.0]}
    say(row=row)
    if "int8" in name:
        say(lost="cudaErrorIllegalAddress")
        sys.exit()
say(done=True)
"""


def test_a_crash_a_hang_and_a_lost_device_cost_their_cells_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty.py").write_text(textwrap.dedent(FAULTY))
    monkeypatch.setattr(first, "USUAL_LIMIT", 1.5)
    monkeypatch.setattr(
        first.Run, "command", lambda self, sent: [sys.executable, str(tmp_path / "faulty.py"), str(sent)]
    )
    arguments = argparse.Namespace(device="sim:0", budget=60.0, rounds=1, small=False, json=tmp_path / "out.json")
    run = first.Run(arguments, [cells.Cell("linear", engine, 4096, 4096, 1) for engine in cells.WEIGHT_ONLY])
    run.all()
    found = document.made(json.loads((tmp_path / "out.json").read_text()), "out.json")
    by_engine = {row.id.split("/")[1]: row for row in found.cells if row.kind == "linear"}
    assert by_engine["int4"].status == "failed" and "ended with 139" in by_engine["int4"].reason
    assert by_engine["q4_K"].status == "failed" and "it was killed" in by_engine["q4_K"].reason
    assert by_engine["int8"].status == "failed"
    assert all(by_engine[name].status == "ok" for name in ("nf4", "mxfp4", "bf16"))
    assert len(found.restarts) == 3 and len(found.failures) == 3


@pytest.mark.parametrize(("gpu", "held"), [("NVIDIA H200", True), ("NVIDIA A100-SXM4-80GB", False)])
def test_a_run_is_held_to_the_predictions_of_its_own_gpu(gpu: str, held: bool, tmp_path: Path) -> None:
    arguments = argparse.Namespace(device="sim:0", budget=1.0, rounds=1, small=False, json=None)
    run = first.Run(arguments, cells.chosen(["norm"]))
    run.document.scale, run.document.environment = "full", {"gpu": gpu}
    run.expect()
    run.keep(document.Row("norm/ours/1x4096", "norm", "ours", samples=[3.0]))
    assert bool(run.rows["norm/ours/1x4096"].predicted) == held == run.document.predictions.startswith("NVIDIA H200")


def test_cells_without_time_are_left_out_and_the_file_is_whole(tmp_path: Path) -> None:
    arguments = argparse.Namespace(device="sim:0", budget=1.0, rounds=1, small=False, json=tmp_path / "out.json")
    run = first.Run(arguments, cells.chosen(["norm"]))
    run.all()
    found = document.made(json.loads((tmp_path / "out.json").read_text()), "out.json")
    assert [row.status for row in found.cells] == ["left out"] * 4
