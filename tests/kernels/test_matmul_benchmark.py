"""benchmarks/matmul_cpu.py on small shapes: every product is in its table, what is missing is named, the page is
written; which measurements are disturbed, and which points stand out."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
from by_path import load

matmul = load("benchmarks/matmul_cpu.py")
growth, ours, peers, quiet, tables = matmul.growth, matmul.ours, matmul.peers, matmul.quiet, matmul.tables
PAGE = "before\n" + "".join(f"{begin}\nold\n{end}\n" for begin, end in (tables.CELLS, tables.GROWTH)) + "after\n"
SMALL = ["--rounds", "2", "--least", "1e-4", "--tries", "2", "--threads", "1", "--rotate", "100000"]


def small_run(path: Path, *arguments: str) -> dict[str, Any]:
    options = matmul.parsed([*SMALL, "--json", str(path), *arguments])
    found = matmul.measure(options)
    assert json.loads(path.read_text()) == found
    return dict(found)


@pytest.mark.slow
def test_every_product_is_in_the_table_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "GROWTH", (("int4", "exact"),))
    asked = ["--shapes", "64x96", "--m", "1", "3", "--formats", "nf4", "int4", "--peers", "onnxruntime"]
    absent = ["--peers-python", str(tmp_path / "no-python")]
    growing = ["--growth", "--growth-m", "1", "2", "3", "--growth-sides", "64", "128", "192", "--growth-side", "64"]
    run = small_run(tmp_path / "run.json", *asked, *absent, *growing, "--growth-threads", "1", "--growth-rounds", "1")
    assert [cell["m"] for cell in run["cells"]] == [1, 3]
    for cell in run["cells"]:
        rows = {row["product"]: row for row in cell["rows"]}
        assert set(rows) == {"nf4", "nf4 bf16", "int4", "int4 bf16", "int4 a8"}
        assert all(row["us"] > 0 and 1e-3 < row["error"] < 0.2 and row["copies"] > 1 for row in rows.values())
        assert "values of a table" in cell["missing"]["nf4 a8"]
        said = tables.text(cell)
        assert all(name in said for name in [*rows, "missing: nf4 a8"])
    assert "does not run" in run["missing"]["onnxruntime"] and "make bench-peers" in run["missing"]["onnxruntime"]
    assert run["missing"]["torch"] == "left out by --peers"
    assert [(sweep["axis"], len(sweep["lines"])) for sweep in run["growth"]] == [(axis, 1) for axis in "mnknk"]
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    images = tables.write(page, run)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| nf4 a8 | – | – |" in text and "- missing: onnxruntime: " in text and "points are above 1.3" in text
    assert len(images) == 3 + 5 and all(f"(page/{image.name})" in text for image in images)
    for image in images:
        assert xml.parse(image).getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match="each once"):
        tables.write(images[0], run)


@pytest.mark.slow
def test_peers_take_turns_and_compute_the_same(tmp_path: Path) -> None:
    """Those that the tests' environment has, and a reason for each of the others."""
    arguments = ["--shapes", "64x128", "--m", "2", "32", "--formats", "float", "--peers-python", sys.executable]
    run = small_run(tmp_path / "run.json", *arguments)
    assert {"torch", "bitsandbytes", "torchao"} <= set(run["versions"])
    for name in ("onnxruntime", "openvino", "llama_cpp"):
        assert (name in run["missing"]) == (importlib.util.find_spec(name) is None)
    for cell in run["cells"]:
        rows = {row["product"]: row for row in cell["rows"]}
        assert rows["torch fp32"]["error"] < 1e-5 and rows["torch bf16"]["error"] < 0.02
        assert {"torchao int4", "torchao int8", "torchao int8 a8"} <= set(rows)
        assert ("torch _int_mm" in rows) == (cell["m"] > 16) and ("torch _int_mm" in cell["missing"]) == (
            cell["m"] < 17
        )
        assert "bitsandbytes nf4" in rows or "AVX512-BF16" in cell["missing"]["bitsandbytes nf4"]


def test_a_runner_that_stops_is_named_and_the_others_go_on() -> None:
    def dies(least: float) -> float:
        raise peers.PeerError("its process has ended")

    runners = [ours.Runner(name, "fp32", 1, 2, 0.0, turn) for name, turn in (("a", lambda least: least), ("b", dies))]
    times, stopped = matmul.turns(runners, 3, 0.5)
    assert times == {"a": [0.5] * 3} and stopped == {"b": "its process has ended"}


STUB = """
import json, sys
print(json.dumps({"version": "1", "engines": {"a": "fp32"}}), flush=True)
sys.stdin.readline()
sys.exit("a library crashed")
"""


def test_a_process_that_ends_is_a_missing_peer_with_what_it_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(peers, "PROCESS", tmp_path / "stub.py")
    (peer,), missing = peers.start(["torch"], sys.executable, 1)
    assert "torch" not in missing and missing["openvino"] == "left out by --peers"
    for _ in range(2):
        with pytest.raises(peers.PeerError, match="ended with 1; it said last: a library crashed"):
            peer.runner("a", 1, 1, 1, 1)
    peer.close()


def test_a_process_that_hangs_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    child = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    script.write_text(f"{child}time.sleep(600)\n")
    monkeypatch.setattr(peers, "PROCESS", script)
    with pytest.raises(peers.PeerError, match="no answer within 1 s"):
        peers.Peer("torch", sys.executable, 1, silent=1.0)


def test_the_limit_is_the_longer_of_bytes_and_operations() -> None:
    limits = matmul.Limits(bandwidth=100.0, fp32=10.0, bf16=20.0, int8=None)
    assert limits.seconds("fp32", 10, 50) == (1.0, "fp32")
    assert limits.seconds("bf16", 10, 200) == (2.0, "bytes")
    assert limits.seconds("int8", 10, 10) is None


STAT = "cpu  9 9 9 9\ncpu0 100 0 50 700 30 5 5 10\ncpu1 1000 0 0 0 0 0 0 0\nintr 1\n"


def test_busy_time_is_that_of_the_named_cores_with_what_was_stolen() -> None:
    assert quiet.busy_seconds(STAT, frozenset({0}), 100) == 1.7
    assert quiet.busy_seconds(STAT, frozenset({0, 1}), 100) == 11.7


def test_a_disturbance_is_more_than_a_share_and_more_than_the_clocks_differ() -> None:
    assert quiet.Noise(0.2, 2.0, 2).disturbed
    assert not quiet.Noise(0.1, 2.0, 2).disturbed, "2.5 % of the cores"
    assert not quiet.Noise(0.04, 0.1, 2).disturbed, "ticks are no finer"
    assert not quiet.Noise(None, 1.0, 2).disturbed


def test_a_disturbed_cell_is_measured_again_and_then_marked() -> None:
    def takes(*seconds: float) -> Any:
        left = [(number, quiet.Noise(each, 1.0, 2)) for number, each in enumerate(seconds)]
        return quiet.until_quiet(lambda: left.pop(0), 3)

    found, noise, tries = takes(1.0, 0.01, 0.0)
    assert (found, noise.disturbed, tries) == (1, False, 2)
    found, noise, tries = takes(1.0, 0.4, 0.8, 0.0)
    assert (found, noise.disturbed, tries) == (1, True, 3), "the least of three"


def test_points_above_the_trend_of_their_neighbours_stand_out() -> None:
    sizes = [1, 2, 4, 8, 16]
    assert growth.outliers(sizes, [1.0, 2.0, 4.0, 8.0, 16.0]) == []
    (found,) = growth.outliers(sizes, [1.0, 2.0, 5.6, 8.0, 16.0])
    assert found.size == 4 and found.ratio == pytest.approx(1.4)
    assert [each.size for each in growth.outliers(sizes, [1.0, 2.0, 4.0, 8.0, 24.0])] == [16]
    assert [each.size for each in growth.outliers(sizes, [3.0, 2.0, 4.0, 8.0, 16.0])] == [1]
    assert growth.outliers([1, 2], [1.0, 9.0]) == []


def test_a_point_that_stands_out_once_is_measured_again() -> None:
    seen: list[int] = []

    def measure(i: int) -> float:
        seen.append(i)
        return (3.0 if i == 2 and seen.count(2) == 1 else 1.0) * 2**i

    times, outliers = matmul.grown(measure, [1, 2, 4, 8, 16])
    assert times == [1, 2, 4, 8, 16] and outliers == []
    assert matmul.grown(lambda i: (3.0 if i == 2 else 1.0) * 2**i, [1, 2, 4, 8, 16])[1][0].size == 4
