"""Mutants of kernels, views, sizes, memory, init, states and entries: those that the checks accept do no harm.

A mutant is a program file with one edit and right digests.  Accepted ones are compiled with AddressSanitizer and UBSan
and run with every arena and argument between guards, in two fillings of memory and two orders of tasks, with sound and
with wild indices; or run on the simulated GPU.  `tally_specs.py` takes all mutants; docs/schedule.md has its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from specmutants import judge_cpu, tally
from specmutants.seeds import SEEDS, seed

from qcompiler.errors import PlanError
from qcompiler.plan.verify_kernels import check_kernels

SHORT = ("reduced", "gather", "softmax")
"""Seeds whose kernels compile in no time."""


def assert_no_escape(verdicts: Sequence[tally.Verdict]) -> None:
    escaped = [str(verdict) for verdict in verdicts if (verdict.refused or "").startswith("ESCAPED")]
    assert not escaped, "\n".join(escaped)


def assert_no_harm(verdicts: Sequence[tally.Verdict]) -> None:
    harmful = [str(verdict) for verdict in verdicts if verdict.refused is None and verdict.harm]
    assert not harmful, "\n".join(harmful)


def assert_refused_or_accepted(names: Sequence[str], kind: str, classes: int) -> None:
    verdicts = [verdict for name in names for verdict, _ in tally.checked(name, kind, 1)]
    assert_no_escape(verdicts)
    refused = sum(verdict.refused is not None for verdict in verdicts)
    assert refused >= 80 * len(names) * 0.6 and len(verdicts) - refused >= 3 * len(names)
    assert len({verdict.mutant.kind for verdict in verdicts}) >= classes


def test_no_mutant_of_a_few_programs_escapes_the_checks() -> None:
    """One of each class: refused by an error of ours, or accepted."""
    assert_refused_or_accepted(("reduced", "linear"), "cpu", 60)
    assert_refused_or_accepted(("softmax",), "cuda", 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_mutant_escapes_the_checks_with_an_error_of_python(kind: str) -> None:
    assert_refused_or_accepted(tuple(SEEDS), kind, 100)


def test_accepted_mutants_of_small_kernels_run_clean(tmp_path: Path) -> None:
    accepted = [each for name in SHORT for each in tally.checked(name, "cpu", 6) if each[0].refused is None]
    tally.run_on_cpu(accepted[:24], tally.Known())
    verdicts = [verdict for verdict, _ in accepted[:24]]
    assert_no_harm(verdicts)
    assert sum(verdict.found == "clean" for verdict in verdicts) >= 9


def test_the_judge_sees_what_the_checks_refuse(tmp_path: Path) -> None:
    """The judge would report mutants of each of these kinds, were they accepted."""
    image = seed("reduced")
    wanted = {
        "sanitizer": ("kernels.body.extents", "kernels.0.body.extents.1: 50 to '100'"),
        "another answer": ("kernels.body.extents", "kernels.0.body.extents.0: 'b' to '0'"),
    }
    found = {(v.mutant.kind, v.mutant.site): (v, made) for v, made in tally.checked("reduced", "cpu", None)}
    jobs = []
    for key in wanted.values():
        verdict, made = found[key]
        assert verdict.refused is not None
        jobs.append(judge_cpu.job_of(replace(image, plan=made.plan)))
    for said, expected in zip(judge_cpu.judge(jobs, tmp_path), wanted, strict=True):
        assert said.startswith(expected)


@pytest.mark.parametrize("change", [{"window": 5}, {"window": 13}, {"window": None}, {"last": False}, {"mask": "bool"}])
def test_a_ring_that_is_too_short_for_its_window_and_queries_is_refused(change: dict[str, Any]) -> None:
    image = seed("attention_ring")
    (spec,) = image.plan.kernels
    body = msgspec.structs.replace(spec.body, **change)
    plan = msgspec.structs.replace(image.plan, kernels=(msgspec.structs.replace(spec, body=body),))
    check_kernels(image.plan)
    with pytest.raises(PlanError):
        check_kernels(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_accepted_mutants_run_clean_with_sanitizers(name: str) -> None:
    accepted = [each for each in tally.checked(name, "cpu", 4) if each[0].refused is None]
    tally.run_on_cpu(accepted[:24], tally.Known())
    assert_no_harm([verdict for verdict, _ in accepted[:24]])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDS)
def test_accepted_mutants_run_clean_on_the_simulated_gpu(name: str) -> None:
    accepted = [each for each in tally.checked(name, "cuda", 2) if each[0].refused is None]
    tally.run_on_sim(accepted[:8], tally.Known())
    assert_no_harm([verdict for verdict, _ in accepted[:8]])


def test_every_kind_of_kernel_has_a_seed() -> None:
    from qcompiler.kernels.cpu.emit import TEMPLATES

    seen = {spec.template for name in SEEDS for spec in seed(name).plan.kernels}
    assert seen == set(TEMPLATES)
    for name in SEEDS:
        check_kernels(seed(name).plan)
