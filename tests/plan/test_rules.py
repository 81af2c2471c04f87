"""Every rule of the verifier is in docs/schedule.md and is provoked by some test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "qcompiler" / "plan").glob("*.py"), *(ROOT / "qcompiler" / "ir").glob("rt*.py")]
NAME = r"[a-z]+(?:-[a-z]+)+"


def rules_of_the_code() -> set[str]:
    text = "\n".join(path.read_text() for path in SOURCES)
    found = set(re.findall(rf'rule="({NAME})"', text))
    found |= set(re.findall(rf'_refuse_operand\("({NAME})"', text))
    return found | set(re.findall(r'"((?:write|unordered)-[a-z]+)"', text))


def test_every_rule_is_documented_and_no_other():
    table = [line for line in (ROOT / "docs" / "schedule.md").read_text().splitlines() if line.startswith("| `")]
    documented = {name for line in table for name in re.findall(rf"`({NAME})`", line.split("|")[1])}
    assert documented == rules_of_the_code()


def test_every_rule_is_provoked():
    files = "\n".join(path.read_text() for path in (ROOT / "tests" / "rt" / "files" / "refused").glob("*.mlir"))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py") if path.name != "test_rules.py")
    provoked = set(re.findall(rf"^// refused: ({NAME})$", files, re.MULTILINE))
    provoked |= set(re.findall(rf'"({NAME})"', tests))
    assert rules_of_the_code() - provoked == set()
