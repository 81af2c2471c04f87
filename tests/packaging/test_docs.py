"""The pages: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qcompiler import cli, errors
from qcompiler.frontends.torch.frontend import FRONTEND_STAGES
from qcompiler.passes.pipeline import STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def test_the_quickstart_runs_as_one_program(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    assert len(blocks) >= 8
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(blocks)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch.Size([3, 10])" in done.stdout and "(3, 10)" in done.stdout
    assert "rule 'head'" in done.stdout


def test_the_example_of_a_search_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "quantisation.md").read_text()
    (part,) = re.findall(r"<!-- search example -->\n```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(part.replace('quant="recipe.toml"', 'quant="recipe.toml", weights="none"'), {})
    assert 4 < float(printed.getvalue().splitlines()[-1]) <= 5
    assert {path.name for path in tmp_path.iterdir()} == {"front.svg", "recipe.toml", "smaller.toml"}


@pytest.mark.slow
def test_the_page_on_state_runs_as_one_program(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "state.md").read_text(), re.DOTALL)
    environment = {**os.environ, "QC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(blocks)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "updated in place" in done.stdout and "[[5, 17, 2, " in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_make_targets_and_commands_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= targets
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(re.findall(r"(?:^|`)qc ([a-z]+) ", text, re.MULTILINE)) <= set(action.choices)


def test_every_command_and_option_is_described() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in action.choices.items():
        assert f"## qc {name}" in text
        for option in (o for a in parser._actions for o in a.option_strings if o.startswith("--") and o != "--help"):
            assert f"`{option}" in text, f"docs/cli.md does not describe {option} of qc {name}"


def test_the_readme_counts_the_stages() -> None:
    (named,) = re.findall(r"a list of (\d+) named stages", (ROOT / "README.md").read_text())
    assert int(named) == len(FRONTEND_STAGES) + len(STAGES)


def test_every_error_has_a_way_out() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    raised = [name for name, each in vars(errors).items() if isinstance(each, type)]
    assert sorted(named) == sorted(name for name in raised if name != "QCompilerError")


def test_every_page_can_be_found_from_the_readme() -> None:
    """Along links, from page to page."""
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text())
            ahead += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - reached == {ROOT / "docs" / "site" / "index.md"}  # the site's own table of contents
