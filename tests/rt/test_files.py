"""Hand-written schedules with several streams and devices: the sound are accepted, each broken one is refused."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from qcompiler.errors import ScheduleError
from qcompiler.plan.verify import verify_plan

FILES = Path(__file__).parent / "files"
ACCEPTED = sorted((FILES / "accepted").glob("*.mlir"))
REFUSED = sorted((FILES / "refused").glob("*.mlir"))


def name(path: Path) -> str:
    return path.stem


def header(text: str, key: str) -> str:
    found = re.search(rf"^// {key}: (.*)$", text, re.MULTILINE)
    assert found is not None, f"the file needs a line '// {key}: …'"
    return found.group(1)


def code(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("//")]


@pytest.mark.parametrize("path", ACCEPTED, ids=name)
def test_sound_schedule_is_accepted(path, files):
    verify_plan(files.plan(path))


@pytest.mark.parametrize("path", REFUSED, ids=name)
def test_broken_schedule_is_refused_by_its_own_rule(path, files):
    text = path.read_text()
    captured = ("main",) if "// captured" in text else ()
    with pytest.raises(ScheduleError, match=re.escape(header(text, "message"))) as caught:
        verify_plan(files.plan(path), captured=captured)
    assert caught.value.rule == header(text, "refused")


@pytest.mark.parametrize("path", REFUSED, ids=name)
def test_broken_schedule_is_one_edit_away_from_a_sound_one(path):
    text = path.read_text()
    base = (FILES / "accepted" / header(text, "base")).read_text()
    matcher = difflib.SequenceMatcher(None, code(base), code(text), autojunk=False)
    edits = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
    moved = len(edits) == 2 and sorted(e[0] for e in edits) == ["delete", "insert"]
    assert len(edits) == 1 or moved


def test_every_broken_schedule_names_another_problem():
    seen = {(header(t, "refused"), header(t, "message")) for t in (p.read_text() for p in REFUSED)}
    assert len(seen) == len(REFUSED) >= 12
