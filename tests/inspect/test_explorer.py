"""The explorer's model and page, without a browser; test_explorer_browser.py opens it in one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from qcompiler import errors
from qcompiler.cli import main
from qcompiler.inspect.explore import model as records
from qcompiler.inspect.explore.collect import Contents, collect, contents_of_file
from qcompiler.inspect.explore.page import Explorer, recorded_digest, sources_digest
from qcompiler.inspect.explore.stages import StageText, Texts, count_ops, stage_records
from qcompiler.inspect.source_lines import LINES_FILE, read_lines
from qcompiler.plan.plan import Plan
from qcompiler.runtime import ProgramImage, save_image
from qcompiler.runtime.profile import Profile, StepProfile
from qcompiler.runtime.step_seconds import StepSeconds

ROOT = Path(__file__).parents[2]
WEB = ROOT / "qcompiler" / "inspect" / "explore" / "web"
HOSTILE = '</script><img src="http://example.org/x" onerror="alert(1)">'


class Reader(HTMLParser):
    """The elements of a page, and the texts of its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style", "title"):
            self.texts.append((self._inside, data))


@pytest.fixture
def saved(image: ProgramImage, tmp_path: Path) -> Path:
    path = tmp_path / "small.qca"
    save_image(image, path)
    return path


def contents(plan: Plan, **changes: Any) -> Contents:
    stages = [StageText(2, "import", "mlir", "builtin.module {}\n", 0.5)]
    given = {"stages": stages, "decisions": [], "ledger": None, **changes}
    return Contents(plan, "cpu", "x86-64-v3", "compile", "program", **given)


def unpacked(page: str, name: str) -> str:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    assert found is not None
    return zlib.decompress(base64.b64decode(found[1])).decode()


def test_the_bundle_is_built_from_these_sources() -> None:
    assert recorded_digest() == sources_digest(WEB), "run `npm ci && npm run build` in qcompiler/inspect/explore/web"


def test_the_pages_code_declares_the_fields_of_the_model() -> None:
    declared = dict(re.findall(r"export interface (\w+) \{(.*?)\}", (WEB / "src" / "model.ts").read_text(), re.S))
    for name, text in declared.items():
        if name == "Served":  # of the page alone
            continue
        fields = set(re.findall(r"(\w+): ", text))
        assert fields == {field.encode_name for field in msgspec.structs.fields(getattr(records, name))}, name


def test_a_file_gives_stages_kernels_steps_memory_and_says_what_it_lacks(saved: Path) -> None:
    found = collect(contents_of_file(saved))
    model = found.model
    assert [(stage.index, stage.name, stage.kind, stage.changed) for stage in model.stages] == [
        (2, "import", "mlir", True), (5, "dce", "mlir", True), (6, "emit-kernels", "source", True),
    ]  # fmt: skip
    assert [(kernel.name, kernel.template) for kernel in model.kernels] == [("add", "loop"), ("fill", "loop")]
    assert 'extern "C" void qk_0(' in found.texts[model.kernels[0].source]
    (step,) = model.entries[0].steps
    assert (step.kernel, step.place, step.reads, step.writes) == ("add", "model", ("x", "bias"), ("y",))
    assert step.alone is not None and step.alone > 0 and not step.measured
    assert [(arena.name, arena.kind) for arena in model.arenas][:2] == [("constants", "constants"), ("table", "init")]
    assert model.ledger[0].parameters == ("model.bias",) and model.totals["recipe"] == "nf4"
    assert any("a file does not hold them" in each for each in model.absent)
    assert all(stage.seconds is None for stage in model.stages)


def test_a_file_without_texts_says_so(image: ProgramImage, tmp_path: Path) -> None:
    save_image(image, tmp_path / "bare.qca", stages=False)
    model = collect(contents_of_file(tmp_path / "bare.qca")).model
    assert model.stages == () and any("saved without" in each for each in model.absent)
    assert len(model.kernels) == 2  # emitted from the plan


def test_cuda_kernels_have_an_engine_and_a_grid() -> None:
    model = collect(contents_of_file(ROOT / "tests" / "golden" / "0.1.0-format1-cuda.qca")).model
    assert {kernel.engine for kernel in model.kernels} <= {"fma", "mma"}
    assert all(re.match(r"grid .+ x .+ x .+, block \d+ x 1 x 1, ", kernel.launch) for kernel in model.kernels)


@pytest.mark.slow  # NVRTC compiles all kernels of a program
def test_machine_code_is_shown_where_it_was_asked_for() -> None:
    file = ROOT / "tests" / "golden" / "0.1.0-format1-cuda.qca"
    plain = collect(contents_of_file(file)).model
    assert all(kernel.sass == -1 for kernel in plain.kernels) and any("sass=True" in each for each in plain.absent)
    found = collect(contents_of_file(file, sass=True))
    assert not any("SASS" in each for each in found.model.absent)
    for kernel in found.model.kernels:
        assert " EXIT ;" in found.texts[kernel.sass] and "/*0000*/" in found.texts[kernel.sass]
        assert re.match(r"\d+ registers per thread, .*\(NVRTC [\d.]+ for sm_", kernel.resources), kernel.resources


def test_a_program_for_a_cpu_has_no_sass(saved: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="this program is for a CPU"):
        collect(contents_of_file(saved, sass=True))


def test_malformed_source_lines_are_a_corrupt_file() -> None:
    assert read_lines({}, "x.qca") == {}
    for text in ("{", "[]", '{"a": 1}', '{"a": [["line"]]}', '{"a": [["line", [1]]]}'):
        with pytest.raises(errors.CorruptFileError, match="the model's source lines are malformed"):
            read_lines({LINES_FILE: text}, "x.qca")


def test_an_unsafe_plan_is_refused_before_its_kernels_are_emitted(image: ProgramImage, tmp_path: Path) -> None:
    entry = image.plan.entries[0]
    (step,) = entry.steps
    short = msgspec.structs.replace(step.operands[1], shape=(4096,))
    unsafe = msgspec.structs.replace(step, operands=(step.operands[0], short, step.operands[2]))
    entries = (msgspec.structs.replace(entry, steps=(unsafe,)),)
    object.__setattr__(image, "plan", msgspec.structs.replace(image.plan, entries=entries))
    save_image(image, tmp_path / "unsafe.qca")
    with pytest.raises(errors.ScheduleError):
        contents_of_file(tmp_path / "unsafe.qca")


def test_a_launch_without_weights_belongs_to_the_module_around_it(image: ProgramImage) -> None:
    assert image.plan.init is not None
    entry, fill = image.plan.entries[0], image.plan.init.steps[0]
    steps = (entry.steps[0], fill, entry.steps[0], fill)
    plan = msgspec.structs.replace(image.plan, entries=(msgspec.structs.replace(entry, steps=steps),))
    places = [(step.place, step.inferred) for step in collect(contents(plan)).model.entries[0].steps]
    assert places == [("model", False), ("model", True), ("model", False), ("", False)]


def seconds(entry: str, us: float, **symbols: int) -> StepSeconds:
    """Of a profile of one launch."""
    step = StepProfile(0, "loop", "add", us, id=f"{entry}/0")
    return Profile(entry, symbols, 2, 5, us, us, us, (step,), isa="x86-64-v3").seconds()


def test_a_profile_s_seconds_replace_the_estimates_at_its_sizes_and_name_its_device(image: ProgramImage) -> None:
    (symbol,) = image.plan.entries[0].symbols
    found = collect(contents(image.plan, times=seconds("main", 2000.0, **{symbol.name: symbol.min}))).model
    main, init = found.entries
    assert (main.steps[0].alone, main.steps[0].measured) == (2000.0, True)
    assert main.symbols == {symbol.name: symbol.min} and symbol.min < symbol.max
    assert main.measured_on == "a CPU (x86-64-v3), 2 threads, medians of 5 rounds" and init.measured_on == ""
    assert "Measured times of init: the times of launches are estimates (docs/timeline.md)." in found.absent


def test_seconds_of_no_profile_are_shown_without_a_device(image: ProgramImage) -> None:
    found = collect(contents(image.plan, times={"main/0": 2e-3})).model.entries[0]
    assert found.steps[0].measured and found.measured_on == "a device that was not named"


@pytest.mark.parametrize(
    "wrong",
    [{"mian/0": 1.0}, {"main/1": 1.0}, {"main/-1": 1.0}, {"main": {0: 1.0}}, {"main/0": float("nan")},
     {"main/0": -1.0}, {"main/0": "1"}, {0: 1.0}, {"main/" + "9" * 5000: 1.0}],
)  # fmt: skip
def test_times_that_name_no_step_or_are_no_times_are_refused(image: ProgramImage, wrong: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="times of"):
        collect(contents(image.plan, times=wrong))


def test_a_later_profile_of_an_entry_point_replaces_the_one_before() -> None:
    both = seconds("main", 1.0, n=1) | seconds("init", 2.0) | seconds("main", 3.0, n=7)
    assert both == {"init/0": 2e-6, "main/0": 3e-6} and both.settings["main"].symbols == {"n": 7}
    other = seconds("main", 1.0, n=1)
    other |= seconds("main", 3.0, n=7)
    assert other.settings["main"].symbols == {"n": 7}
    assert set(both.settings) == {"main", "init"} and json.loads(json.dumps(both)) == both


def test_a_stage_tells_which_ops_came_and_went_and_an_unchanged_text_is_stored_once() -> None:
    before = 'builtin.module {\n  %0 = qc.const @w\n  %1, %2 = "qc.split"(%0)\n}\n'
    after = "builtin.module {\n  %0 = qc.const @w\n  %1 = qc.linear %0\n}\n"
    texts = Texts()
    found = stage_records(
        [StageText(0, "a", "mlir", before), StageText(1, "b", "mlir", before), StageText(2, "c", "mlir", after)], texts
    )
    assert [stage.changed for stage in found] == [True, False, True]
    assert found[2].delta == {"qc.linear": 1, "qc.split": -1}
    assert len(texts.all()) == 2
    assert count_ops("    x = torch.ops.aten.add.Tensor(y, z);  y = None\n", "torch") == {
        "torch.ops.aten.add.Tensor": 1
    }


@pytest.mark.parametrize("line", ["\n", "%a\n", "%a = \n"])
def test_ops_of_a_hostile_text_are_counted_in_linear_time(line: str) -> None:
    # Where a match could run on over line breaks, this text took hours.
    assert count_ops(line * 300_000 + "%0 = qc.const @w\n", "mlir") == {"qc.const": 1}


def test_a_file_whose_name_is_no_utf8_has_a_page(saved: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.qca"))
    odd.write_bytes(saved.read_bytes())
    page = Explorer(contents_of_file(odd)).html
    assert json.loads(unpacked(page, "model"))["facts"]["source"] == "?.qca"


def test_names_never_become_markup(image: ProgramImage) -> None:
    decisions = [{"stage": HOSTILE, "path": HOSTILE, "what": HOSTILE, "why": HOSTILE}]
    stages = [StageText(0, HOSTILE, "mlir", f'"x.y"() {{qc.path = "{HOSTILE}"}}')]
    given = contents(image.plan, stages=stages, decisions=decisions, qcompiler=HOSTILE)
    page = Explorer(changed(given, source=HOSTILE)).html
    reader = Reader()
    reader.feed(page)
    tags = [tag for tag, _ in reader.tags]
    assert set(tags) == {"html", "head", "meta", "title", "link", "style", "body", "div", "noscript", "script"}
    assert ("title", f"{Path(HOSTILE).name} for x86-64-v3 - qcompiler") in reader.texts
    assert json.loads(unpacked(page, "model"))["decisions"][0]["path"] == HOSTILE
    assert HOSTILE in unpacked(page, "text-0")
    assert page.count(HOSTILE) == 0


def changed(given: Contents, **changes: Any) -> Contents:
    """A copy of a record with other values."""
    return Contents(**{**vars(given), **changes})


def test_the_policy_allows_this_script_and_nothing_from_elsewhere(image: ProgramImage) -> None:
    page = Explorer(contents(image.plan)).html
    reader = Reader()
    reader.feed(page)
    (policy,) = [attrs["content"] for tag, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (style,) = [text for tag, text in reader.texts if tag == "style"]
    script = [text for tag, text in reader.texts if tag == "script"][-1]
    for rule, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    assert not any("src" in attrs or attrs.get("href", "data:,") != "data:," for _, attrs in reader.tags)


def test_a_notebook_shows_the_page_in_a_frame_that_can_run_scripts_only(image: ProgramImage) -> None:
    explorer = Explorer(contents(image.plan))
    reader = Reader()
    reader.feed(explorer._repr_html_())
    ((tag, attrs),) = reader.tags
    assert (tag, attrs["sandbox"], attrs["srcdoc"]) == ("iframe", "allow-scripts", explorer.html)


def test_the_command_writes_the_page_and_refuses_a_folder_that_is_not_there(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(saved), "--html", str(tmp_path / "out.html")]) == 0
    assert "recipe nf4" in capsys.readouterr().out  # the summary, too
    page = (tmp_path / "out.html").read_text()
    assert json.loads(unpacked(page, "model"))["facts"]["source"] == saved.name and str(saved.parent) not in page
    assert main(["inspect", str(saved), "--html", str(tmp_path / "none" / "out.html")]) == 1
    assert "make it first" in capsys.readouterr().err
