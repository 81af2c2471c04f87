"""Edits that change nothing must be accepted: a verifier that refuses all that is new earns no trust either.

`planmutants.neutral` makes them; what is legal it works out by reachability over the steps and by whole buffers,
without the verifier.  Some of each class are run on the simulated GPU as well, and must give the original's answers.
"""

from __future__ import annotations

from functools import cache

import pytest
from planmutants import tally

PER_CLASS = 8


@cache
def verdicts(program: str) -> tuple[tally.Verdict, ...]:
    return tuple(tally.judged(program, PER_CLASS, neutral=True))


def assert_all_are_accepted(found: tuple[tally.Verdict, ...]) -> None:
    wrong = [str(verdict) for verdict in found if verdict.rule is not None or verdict.harm is not None]
    assert not wrong, f"{len(wrong)} of {len(found)} neutral edits:\n" + "\n".join(wrong)


def test_neutral_edits_of_a_small_split_model_are_accepted():
    found = tuple(tally.judged("block", 3, neutral=True, run_neutral=0))
    assert_all_are_accepted(found)
    assert len(found) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("program", tally.PROGRAMS)
def test_every_neutral_edit_is_accepted_and_changes_no_answer(program):
    assert_all_are_accepted(verdicts(program))


@pytest.mark.slow
def test_there_are_enough_of_them():
    found = [verdict for program in tally.PROGRAMS for verdict in verdicts(program)]
    print(tally.neutral_table(found))
    assert len(found) >= 300
