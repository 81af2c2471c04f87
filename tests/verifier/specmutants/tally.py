"""Mutants of all seeds, judged by the checks of plans and, where these accept them, by running what is compiled.

Programs that come to the same text and memory are run once.  What was found is kept in a file, by the digest of text
and memory, so that a long run can be interrupted and goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qcompiler.errors import QCompilerError
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.loaded import check_image
from specmutants import judge_cpu, judge_sim
from specmutants.mutations import Mutant, mutants_of
from specmutants.seeds import SEEDS, seed

BATCH = 16
"""Kernels of one executable, and programs of one run on the simulated GPU."""


@dataclass
class Verdict:
    """`refused` is the error's type and text, or None; `found` what a judge says of an accepted one ("" if not run)."""

    seed: str
    mutant: Mutant
    refused: str | None = None
    found: str = ""

    @property
    def harm(self) -> bool:
        return self.found not in ("", "clean", "not run") and not self.found.startswith("refused by the emitter")

    def __str__(self) -> str:
        return f"{self.seed}, {self.mutant}: {self.refused or 'accepted'}; {self.found}"


@dataclass
class Known:
    """Judgements by digest, in a file that grows by a line for each."""

    file: Path | None = None
    found: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            for line in self.file.read_text().splitlines():
                key, verdict = json.loads(line)
                self.found[key] = verdict

    def add(self, key: str, verdict: str) -> None:
        self.found[key] = verdict
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps([key, verdict]) + "\n")


def refusal(image: ProgramImage) -> str | None:
    """Why the checks of a file's plan refuse it. Anything but an error of ours is an escape, and says so."""
    try:
        check_image(image)
    except QCompilerError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"ESCAPED {type(error).__name__}: {error}"
    return None


def checked(name: str, kind: str, sample: int | None, drawn: int = 0) -> Iterator[tuple[Verdict, ProgramImage]]:
    """The mutants of a seed and what the checks say of them: `sample` of each class, or all."""
    image = seed(name, kind)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants_of(image.plan):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for kind_of, mutants in by_kind.items():
        chosen = mutants
        if sample is not None and len(mutants) > sample:
            chosen = random.Random(f"{name} {kind_of} {drawn}").sample(mutants, sample)
        for mutant in chosen:
            if mutant.plan is None:
                yield Verdict(name, mutant, "PlanError: it is no plan"), image
                continue
            made = replace(image, plan=mutant.plan)
            yield Verdict(name, mutant, refusal(made)), made


def run_on_cpu(verdicts: Sequence[tuple[Verdict, ProgramImage]], known: Known) -> None:
    """Fills in `found`."""
    waiting: dict[str, tuple[judge_cpu.Job, list[Verdict]]] = {}
    for verdict, image in verdicts:
        try:
            job = judge_cpu.job_of(image)
        except QCompilerError as error:
            verdict.found = f"refused by the emitter: {error}"
            continue
        except judge_cpu.NotRunError:
            verdict.found = "not run"
            continue
        except Exception as error:
            verdict.found = f"the emitter escapes, {type(error).__name__}: {error}"
            continue
        if job.key in known.found:
            verdict.found = known.found[job.key]
        else:
            waiting.setdefault(job.key, (job, []))[1].append(verdict)
    for part in _with_few_kernels(waiting):
        with tempfile.TemporaryDirectory() as folder:
            found = judge_cpu.judge([waiting[key][0] for key in part], Path(folder))
        for key, said in zip(part, found, strict=True):
            known.add(key, said)
            for verdict in waiting[key][1]:
                verdict.found = said


def _with_few_kernels(waiting: Mapping[str, tuple[judge_cpu.Job, object]]) -> Iterator[list[str]]:
    """The jobs in parts of at most `BATCH` kernels, for compiling them is what takes time; those that share kernels
    stand together."""
    part: list[str] = []
    kernels: set[str] = set()
    for key in sorted(waiting, key=lambda key: waiting[key][0].kernels):
        more = kernels | set(waiting[key][0].kernels)
        if part and len(more) > BATCH:
            yield part
            part, more = [], set(waiting[key][0].kernels)
        part.append(key)
        kernels = more
    if part:
        yield part


def run_on_sim(verdicts: Sequence[tuple[Verdict, ProgramImage]], known: Known) -> None:
    waiting: dict[str, tuple[ProgramImage, list[Verdict]]] = {}
    for verdict, image in verdicts:
        try:
            text = judge_sim.text_of(image)
        except QCompilerError as error:
            verdict.found = f"refused by the emitter: {error}"
            continue
        except Exception as error:
            verdict.found = f"the emitter escapes, {type(error).__name__}: {error}"
            continue
        bare = "\n".join(line for line in text.splitlines() if not line.startswith("//"))
        plan = image.plan
        memory = repr((plan.arenas, plan.buffers, plan.entries, plan.init, plan.weights))
        key = "sim " + hashlib.sha256(f"{bare}\0{memory}".encode()).hexdigest()
        if key in known.found:
            verdict.found = known.found[key]
        else:
            waiting.setdefault(key, (image, []))[1].append(verdict)
    batch = list(waiting.items())
    for start in range(0, len(batch), BATCH):
        part = batch[start : start + BATCH]
        for (key, (_, own)), said in zip(part, judge_sim.judge([image for _, (image, _) in part]), strict=True):
            known.add(key, said)
            for verdict in own:
                verdict.found = said


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown: a row for each class."""
    rows = ["| class | mutants | refused | accepted | of these run | refused by the emitter | a judge reports |",
            "|---|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        for kind in (verdict.mutant.kind, "**all**"):
            own = counts.setdefault(kind, Counter())
            own["all"] += 1
            own["refused"] += verdict.refused is not None
            own["accepted"] += verdict.refused is None
            if verdict.refused is None:
                own["emitter"] += verdict.found.startswith("refused by the emitter")
                own["run"] += verdict.found == "clean" or verdict.harm
                own["harm"] += verdict.harm
    for kind in [*sorted(set(counts) - {"**all**"}), "**all**"]:
        own = counts[kind]
        cells = [own[name] for name in ("all", "refused", "accepted", "run", "emitter", "harm")]
        rows.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


__all__ = ["SEEDS", "Known", "Verdict", "checked", "refusal", "run_on_cpu", "run_on_sim", "table"]
