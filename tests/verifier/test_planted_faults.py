"""The mutation test can fail: with a rule out of the verifier, it accepts mutants that the simulator reports.

For each rule that refuses mutants of two programs, a verifier without it is made; among the mutants which that rule
refused, it must accept one that does harm.  So must a verifier whose idea of order, or of memory, is lax.
"""

from __future__ import annotations

from functools import cache

import pytest
from planmutants import tally
from planmutants.faulty import LAX, lax, without_rule
from planmutants.judge import Judge, Way
from planmutants.mutations import Mutant, mutants_of
from planmutants.programs import case

RULES = (
    "buffer-outside-arena", "buffer-overlap", "init-unwritten", "live-overlap", "negative-offset", "output-unwritten",
    "unordered-read", "unordered-reuse", "unwritten-read", "wrong-device",
)  # fmt: skip
"""Those that harmful mutants meet first and alone: behind `wait-before-record`, for one, stands `unordered-read`."""

PER_CLASS, TRIES = 36, 12
"""Mutants of each class; and of those that a faulty verifier accepts, how many are run until one does harm."""

Case = tuple[str, Mutant]


@cache
def by_rule() -> dict[str, list[Case]]:
    """Refused mutants, with their programs: of the small split model, and of a Llama whose streams share memory."""
    found: dict[str, list[Case]] = {}
    for program, variants in (("block", tally.VARIANTS), ("llama", ("three streams",))):
        for variant in variants:
            plan = tally.VARIANTS[variant](case(program).image.plan)
            for mutant in tally.sample(mutants_of(plan), PER_CLASS):
                rule = tally.refusal(mutant.plan)
                if rule is not None:
                    found.setdefault(rule, []).append((program, mutant))
    return found


@cache
def judge(program: str) -> Judge:
    return Judge(case(program))


def is_caught(accepted: list[Case]) -> bool:
    """Whether the simulator reports one of the mutants that a faulty verifier accepted."""
    return any(judge(program).harm(mutant.plan, (Way(0, False),)) is not None for program, mutant in accepted[:TRIES])


def accepted_by(verify: tally.Verifier, refused: list[Case]) -> list[Case]:
    return [each for each in refused if tally.refusal(each[1].plan, verify) is None]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_verifier_without_a_rule_fails_the_mutation_test(rule):
    assert is_caught(accepted_by(without_rule(rule), by_rule()[rule]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", LAX)
def test_a_lax_verifier_fails_the_mutation_test(fault):
    refused = by_rule()
    with lax(fault) as verify:
        accepted = [found[0] for mutants in refused.values() if (found := accepted_by(verify, mutants))]
    assert is_caught(accepted)


def test_two_faults_are_found_among_few_mutants():
    """The short run's share of the above."""
    plan = tally.spread(case("block").image.plan)
    assert tally.refusal(plan, without_rule("unordered-read")) is None, "the faulty verifier still takes what is sound"
    for rule, kind in (("unordered-read", "wait deleted"), ("buffer-outside-arena", "arena shortened")):
        verify = without_rule(rule)
        mutants = [mutant for mutant in mutants_of(plan) if mutant.kind == kind and tally.refusal(mutant.plan) == rule]
        assert is_caught(accepted_by(verify, [("block", mutant) for mutant in mutants]))
