"""The verifier against one-edit mutants of real schedules, with the simulated GPU as the judge.

What a verifier of schedules can judge: whether every use comes after what it depends on, on the right device, in memory
that is its own, and whether every byte that is read was written.  So the edits are of waits, records, copies, streams,
devices and places.  What it cannot judge is which of two sound programs was meant: exchange two weights of one shape,
or leave out an update of a state, and the schedule is as sound as before.  `planmutants.mutations` says which edits it
leaves out for that reason.

A mutant that is accepted must run without a finding and with the original's answers.  A mutant that is refused is run
as well (the runtime's check of plans is in `check_image`, which the judge does not call): one that turns out to be
harmless was refused needlessly, and there may be one in twenty of those.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from planmutants import tally
from planmutants.mutations import mutants_of
from planmutants.programs import case

import qcompiler as qc
from qcompiler.errors import ScheduleError
from qcompiler.runtime.program_file import save_image

PER_CLASS = 8
"""Mutants of each class, program and variant in the long run; `python tests/verifier/tally.py` takes all."""


@cache
def verdicts(program: str) -> tuple[tally.Verdict, ...]:
    return tuple(tally.judged(program, PER_CLASS))


def assert_none_is_accepted_that_does_harm(found: tuple[tally.Verdict, ...]) -> None:
    wrong = [str(verdict) for verdict in found if verdict.rule is None and verdict.harm is not None]
    assert not wrong, f"{len(wrong)} of {len(found)} mutants:\n" + "\n".join(wrong)


def test_mutants_of_a_small_split_model_are_refused_or_harmless():
    found = tuple(tally.judged("block", 1))  # of each class
    assert_none_is_accepted_that_does_harm(found)
    assert len(found) >= 40 and sum(verdict.harm is not None for verdict in found) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("program", tally.PROGRAMS)
def test_every_mutant_is_refused_or_harmless(program):
    assert_none_is_accepted_that_does_harm(verdicts(program))


def test_the_documented_counts_keep_what_is_promised():
    """docs/schedule.md holds the tables that `tally.py` prints; their classes are those that there are."""
    text = (Path(__file__).parents[2] / "docs" / "schedule.md").read_text()
    mutants, neutral = (
        [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")]
        for part in text.split("**Neutral edits**")
    )
    counts = {row[0]: [int(cell) for cell in row[1:]] for row in mutants if row[0] != "rule" and row[-1].isdigit()}
    *_, all_of_them, _, needless, harmful = counts["**all**"]
    assert all_of_them >= 500 and needless <= 0.05 * all_of_them and harmful == 0
    assert counts.keys() - {"**all**"} >= {mutant.kind for mutant in mutants_of(case("block").image.plan)}
    counts = {row[0]: [int(cell) for cell in row[1:]] for row in neutral if row[-1].isdigit()}
    assert counts["**all**"][-2] >= 300 and counts["**all**"][-1] == 0


@pytest.mark.slow
def test_hardly_a_mutant_is_refused_that_does_no_harm():
    found = [verdict for program in tally.PROGRAMS for verdict in verdicts(program)]
    needless = [str(verdict) for verdict in found if verdict.rule is not None and verdict.harm is None]
    print(tally.table(found), *needless, sep="\n")
    assert len(found) >= 500
    assert len(needless) <= 0.05 * len(found), "\n".join(needless)


@pytest.mark.parametrize("variant", tally.VARIANTS)
def test_a_program_file_with_a_mutant_is_refused_by_the_same_rule(variant, tmp_path: Path):
    """The file is written with digests of what is in it, so that nothing but the verifier can object."""
    image = case("block").image
    refused = 0
    for number, mutant in enumerate(tally.sample(mutants_of(tally.VARIANTS[variant](image.plan)), 1)):
        rule = tally.refusal(mutant.plan)
        if rule is None or len(mutant.plan.devices) != 2:
            continue
        path = tmp_path / f"{number}.qca"
        save_image(replace(image, plan=mutant.plan), path)
        with pytest.raises(ScheduleError) as caught:
            qc.load(path, device="sim:0")
        assert caught.value.rule == rule, mutant.site
        refused += 1
    assert refused >= 12
