"""Mutants and neutral edits of all programs, judged by the verifier and by the simulator, counted by class."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planmutants.graph import spread, spread_with_new_memory
from planmutants.judge import WAYS, Judge, Way
from planmutants.mutations import Mutant, mutants_of
from planmutants.neutral import neutral_edits_of
from planmutants.programs import case
from qcompiler.errors import ScheduleError
from qcompiler.plan.plan import Plan
from qcompiler.plan.verify import verify_plan

Verifier = Callable[[Plan], None]

VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "as compiled": lambda plan: plan,
    "three streams": spread,
    "three streams, new memory": spread_with_new_memory,
}
"""A program's plan as it is, and with its steps on three streams of each device, where waits are plenty: with memory
as it is, whose sharing then needs waits of its own, and with memory given out for the three."""

PROGRAMS = ("llama", "mixtral", "split")


@dataclass(frozen=True)
class Verdict:
    """`rule` refused the plan, or None; `harm` is what the simulator found, or None."""

    program: str
    variant: str
    mutant: Mutant
    rule: str | None
    harm: str | None

    def __str__(self) -> str:
        verdict = f"refused ({self.rule})" if self.rule else "accepted"
        what = f"{self.program}, {self.variant}, {self.mutant.kind}, {self.mutant.site}"
        return f"{what}: {verdict}, {self.harm or 'harmless'}"


def refusal(plan: Plan, verify: Verifier = verify_plan) -> str | None:
    """The rule that refuses a plan, or None."""
    try:
        verify(plan)
    except ScheduleError as error:
        return error.rule or "without a name"
    return None


def sample(edits: Sequence[Mutant], per_class: int | None) -> list[Mutant]:
    """At most so many of each class, drawn with a fixed seed; all without a limit."""
    if per_class is None:
        return list(edits)
    kinds: dict[str, list[Mutant]] = {}
    for edit in edits:
        kinds.setdefault(edit.kind, []).append(edit)
    found: list[Mutant] = []
    for kind, each in kinds.items():
        found += random.Random(kind).sample(each, min(per_class, len(each)))
    return found


def judged(program: str, per_class: int | None, *, neutral: bool = False, run_neutral: int = 1) -> Iterator[Verdict]:
    """Verdicts of a program's mutants, or of its neutral edits (of which `run_neutral` of each class are run)."""
    judge = Judge(case(program))
    for variant, change in VARIANTS.items():
        plan = change(judge.case.image.plan)
        assert refusal(plan) is None and judge.harm(plan) is None, f"{program} {variant} is no sound program"
        edits = sample(neutral_edits_of(plan) if neutral else mutants_of(plan), per_class)
        seen: Counter[str] = Counter()
        for edit in edits:
            rule = refusal(edit.plan)
            ways: Sequence[Way] = WAYS
            if neutral:
                seen[edit.kind] += 1
                ways = WAYS[2:] if seen[edit.kind] <= run_neutral else ()
            yield Verdict(program, variant, edit, rule, judge.harm(edit.plan, ways))


# --- tables ----------------------------------------------------------------------------------------------------------


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: a row for each class; for each program its mutants, and behind them those accepted (all harmless) and
    those refused although harmless, where there are any."""
    programs = list(dict.fromkeys(verdict.program for verdict in verdicts))
    rows = [f"| class | {' | '.join(programs)} | all | accepted, harmless | refused, harmless | accepted, harmful |"]
    rows.append("|---|" + "---:|" * (len(programs) + 4))
    for kind in [*dict.fromkeys(verdict.mutant.kind for verdict in verdicts), ""]:
        own = [verdict for verdict in verdicts if kind in ("", verdict.mutant.kind)]
        cells = [sum(verdict.program == program for verdict in own) for program in programs]
        cells += [
            len(own),
            sum(verdict.rule is None and verdict.harm is None for verdict in own),
            sum(verdict.rule is not None and verdict.harm is None for verdict in own),
            sum(verdict.rule is None and verdict.harm is not None for verdict in own),
        ]
        rows.append(f"| {kind or '**all**'} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def neutral_table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: neutral edits by class and program, and those refused."""
    programs = list(dict.fromkeys(verdict.program for verdict in verdicts))
    rows = [f"| class | {' | '.join(programs)} | all | refused |", "|---|" + "---:|" * (len(programs) + 2)]
    for kind in [*dict.fromkeys(verdict.mutant.kind for verdict in verdicts), ""]:
        own = [verdict for verdict in verdicts if kind in ("", verdict.mutant.kind)]
        cells = [sum(verdict.program == program for verdict in own) for program in programs]
        cells += [len(own), sum(verdict.rule is not None for verdict in own)]
        rows.append(f"| {kind or '**all**'} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
