"""Runs targets in turn, counts what comes out, and makes findings small."""

from __future__ import annotations

import json
import random
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filefuzz import mutate, seeds, server
from filefuzz.documents import Edit, apply
from filefuzz.server import Outcome

KEPT = Path(__file__).resolve().parents[1] / "kept_files"


@dataclass(frozen=True)
class Case:
    """An input: edits of a seed of a target."""

    target: str
    seed: str
    edits: tuple[Any, ...] = ()

    @staticmethod
    def drawn(target: str, number: int) -> Case:
        """Number `number` of a target; the same on every machine while seeds and `mutate` are the same."""
        random_ = random.Random(f"{target} {number}")
        names = seeds.names(target)
        if target == "opt" and random_.random() < 0.8:  # what is refused as it is takes an edit nowhere
            names = [name for name in names if "-invalid" not in name]
        seed = random_.choice(names) if target != "opt" or random_.random() > 0.05 else "context"
        return Case(target, seed, tuple(mutate.edits(random_, seeds.seed(target, seed))))

    def files(self) -> Any:
        """What the edits make of the seed. Edits that do not fit one another are left out from the end."""
        edits: Sequence[Edit] = self.edits
        while True:
            try:
                return apply(seeds.seed(self.target, self.seed), edits)
            except (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError, struct.error):
                if not edits:
                    raise
                edits = edits[:-1]

    def json(self) -> dict[str, Any]:
        return {"target": self.target, "seed": self.seed, "edits": list(self.edits)}


@dataclass
class Counts:
    """What became of a target's inputs."""

    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    largest: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[int, Outcome]] = field(default_factory=dict)

    def add(self, number: int, outcome: Outcome) -> None:
        self.inputs += 1
        self.slowest, self.largest = max(self.slowest, outcome.seconds), max(self.largest, outcome.nbytes)
        if not outcome.found:
            self.refused += outcome.kind == "refused"
            self.accepted += outcome.kind == "accepted"
            return
        name = f"{outcome.kind}: {outcome.where}"
        self.findings[name] += 1
        self.first.setdefault(name, (number, outcome))


def campaign(
    targets: Sequence[str], seconds: float, first: int = 0, most: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Counts]:  # fmt: skip
    """Inputs of each target in turn, a batch each time, until the time is over or each has had `most`."""
    counts = {target: Counts() for target in targets}
    end = time.monotonic() + seconds
    while open_ := [t for t in targets if most is None or counts[t].inputs < most]:
        if time.monotonic() > end:
            break
        target = min(open_, key=lambda target: counts[target].seconds)  # each has the same time
        mine, began = counts[target], time.monotonic()
        number = first + mine.inputs
        size = server.BATCH if most is None else min(server.BATCH, most - mine.inputs)
        inputs = [Case.drawn(target, number + i).files() for i in range(size)]
        for offset, outcome in enumerate(server.run(target, inputs)):
            known = len(mine.findings)
            mine.add(number + offset, outcome)
            if len(mine.findings) > known:
                report(f"{target} {number + offset}: {outcome.kind}: {outcome.where}")
        mine.seconds += time.monotonic() - began
    return counts


def table(counts: dict[str, Counts]) -> str:
    columns = "  inputs  refused accepted  found classes   slowest    memory"
    lines = [f"{'target':12} {columns}"]
    for target, each in counts.items():
        lines.append(
            f"{target:12} {each.inputs:8} {each.refused:8} {each.accepted:8} {sum(each.findings.values()):6} "
            f"{len(each.findings):7} {each.slowest:7.1f} s {each.largest / 2**20:5.0f} MiB"
        )
    for target, each in counts.items():
        for name, count in each.findings.most_common():
            lines.append(f"  {target} {each.first[name][0]}: {count} x {name}")
    return "\n".join(lines)


# --- findings --------------------------------------------------------------------------------------------------------


def smaller(case: Case, where: str, kind: str) -> Case:
    """With as few edits as still give the same class of finding."""
    edits = list(case.edits)
    for index in reversed(range(len(edits))):
        fewer = Case(case.target, case.seed, tuple(edits[:index] + edits[index + 1 :]))
        (outcome,) = server.run(case.target, [fewer.files()])
        if (outcome.kind, outcome.where) == (kind, where):
            del edits[index]
    return Case(case.target, case.seed, tuple(edits))


def file_name(case: Case, where: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{case.target} {where}".lower()).strip("-")[:100] + ".json"


def keep(case: Case, outcome: Outcome, folder: Path) -> Path:
    """Writes a case as JSON, one edit to a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(case, f"{outcome.kind} {outcome.where}")
    edits = ",\n  ".join(json.dumps(edit) for edit in case.edits)
    head = f'"target": "{case.target}", "seed": "{case.seed}", "was": {json.dumps(outcome.where)}'
    text = f'{{{head}, "edits": [\n  {edits}\n]}}\n'
    path.write_text(text)
    return path


def read(path: Path) -> Case:
    found = json.loads(path.read_text())
    return Case(found["target"], found["seed"], tuple(found["edits"]))
