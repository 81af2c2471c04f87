"""The explorer in a real browser, and its bundle built again. They need node, npm and chromium; nothing is skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.inspect.explore.page import bundled
from qcompiler.inspect.report import Choice

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WEB = HERE.parents[1] / "qcompiler" / "inspect" / "explore" / "web"
CHROMIUM = os.environ.get("QC_CHROMIUM", "/usr/bin/chromium")
HOSTILE = '</script><img src="http://example.org/x" onerror="alert(1)">'


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with their pinned packages."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    missing += [] if Path(CHROMIUM).exists() else [f"{CHROMIUM} (apt install chromium, or set QC_CHROMIUM)"]
    if missing:
        pytest.fail(f"the explorer's tests need {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("explorer") / "web"
    shutil.copytree(WEB, folder, ignore=shutil.ignore_patterns("node_modules"))
    for script in (HERE / "explorer_browser.mjs", HERE.parents[1] / "benchmarks" / "explorer_page.mjs"):
        shutil.copy(script, folder)
    node(folder, "npm", "ci", "--no-audit", "--no-fund")
    return folder


def node(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A program of four blocks, with a decision that quotes hostile text; the number of its stages."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block() for _ in range(4))).eval()
    program = qc.qcompile(net, (torch.randn(3, 64),), quant="nf4", dynamic_shapes={"input": {0: ("b", 1, 64)}})
    program.decided([Choice("import", HOSTILE, HOSTILE, HOSTILE)])
    path = tmp_path_factory.mktemp("page") / "blocks.html"
    program.explore(path, error=program.errors(torch.randn(5, 64), model=net))
    return path, len(program.stages)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that was profiled at five rows, of 64 at most."""
    torch.manual_seed(0)
    shapes = {"x": {0: ("b", 1, 64)}}
    program = qc.qcompile(Block().eval(), (torch.randn(3, 64),), quant="nf4", dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("measured") / "block.html"
    program.explore(path, times=program.profile(torch.randn(5, 64), rounds=3).seconds())
    return path


def test_the_bundle_is_what_its_sources_build(tools: Path) -> None:
    node(tools, "npm", "run", "types")
    node(tools, "node", "build.mjs", "again")
    for name in ("explorer.js", "explorer.css"):
        assert (tools / "again" / name).read_text() == bundled(name)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_can_read_a_program(
    tools: Path, page: tuple[Path, int], tmp_path: Path, width: int, scheme: str
) -> None:
    file, stages = page
    seen: dict[str, Any] = json.loads(
        node(tools, "node", "explorer_browser.mjs", str(file), str(tmp_path), str(width), scheme)
    )
    assert seen["console"] == [] and seen["requests"] == []
    assert seen["images"] == 0 and seen["title"].startswith("blocks for x86-64")
    assert seen["contrast"] == [] and seen["overflow"] == []
    assert len(list(tmp_path.glob("*.png"))) == 13
    assert seen["stages"] == stages and any("lower-conv2d" in text for text in seen["grey"])
    assert "qc.linear" in seen["selected"] and " lines in " in seen["found"]
    # Four linears of eight, in each of the stages on tensors: `op:` and `path:` ask for lines that have both.
    whole, part = (int(seen[name].split()[0].replace(",", "")) for name in ("found", "both"))
    assert 80 <= part < whole / 2
    for part in ("qc.linear", "type", "tensor<", "module", "0.up", "used", "ended in", "kernel ", "source, C++",
                 "parameters", "nf4", "in each stage", "raise-idioms",
                 "test_explorer_browser.py:", "in forward: return x + self.down(", "linear.default"):  # fmt: skip
        assert part in seen["panel"], part
    assert seen["inSight"] == seen["selected"], "a comparison begins at the op that was looked at"
    assert seen["closed"] and seen["changes"].startswith("+")
    assert seen["reached"] == "code" and any(mark in seen["difference"] for mark in ("added", "moved", "removed"))
    assert seen["folded"][1] < seen["folded"][0]
    assert seen["byKeys"] == "@main"
    assert HOSTILE in seen["decisions"]
    assert "not measured" in seen["timeline"] and "activations.main" in seen["memory"]
    assert "Measured times" in seen["about"] and "SASS" not in seen["about"] and seen["boxes"] >= 4
    assert "launch 0 of main" in seen["step"] and "source, C++" in seen["step"]
    assert "program against float" in seen["step"] and "program against the float model" in seen["graphErrors"]
    for part in ("program / oracle", "0.norm", "gelu.default", "fused, or a view", "fuse-epilogues", "exact", "dB"):
        assert part in seen["errors"], part
    assert "not measured" in seen["kernels"] and "other sizes" in seen["kernels"] and "0.00 µs" not in seen["kernels"]
    assert "not measured" in seen["about"] and "not measured" in seen["graph"]
    assert [seen[name].split("\t")[6] for name in ("largest", "smallest")] == ["4,608", "256"]


def test_the_pictures_of_the_tutorial_show_what_the_page_shows_now(tmp_path: Path) -> None:
    pictures = load("benchmarks/explorer_pictures.py")
    assert pictures.recorded() == pictures.digest_of(pictures.tutorial_program(tmp_path)), "`make docs` takes them anew"
    files = sorted(pictures.PICTURES.glob("*.png"))
    assert [file.name for file in files] == ["explorer-diff.png", "explorer-graph.png", "explorer-value.png"]
    assert sum(file.stat().st_size for file in files) < 300_000


def test_a_program_of_32_layers_is_a_page_under_10_mb_that_opens_in_3_s(tmp_path: Path) -> None:
    size = load("benchmarks/explorer_size.py")
    found = size.measure(32, "nf4", tmp_path)
    assert found["bytes"] < size.MOST_BYTES and found["open"] < size.MOST_SECONDS, size.table(found)


def test_the_page_says_that_times_are_measured_and_on_what(tools: Path, measured: Path, tmp_path: Path) -> None:
    seen: dict[str, Any] = json.loads(
        node(tools, "node", "explorer_browser.mjs", str(measured), str(tmp_path), "1280", "light")
    )
    assert seen["console"] == [] and seen["requests"] == [] and seen["contrast"] == []
    for part in ("graph", "kernels", "timeline", "about", "step"):
        assert "measured on a CPU (x86-64" in seen[part] and "medians of 3 rounds" in seen[part], part
        assert "at b=5" in seen[part] and "estimate" not in seen[part], part
