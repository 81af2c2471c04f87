"""Which graphs a test run makes: fixed seeds, or those that `QC_FUZZ_SEED` and `QC_FUZZ_GRAPHS` ask for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphfuzz import batch, generate
from graphfuzz.graphs import Graph

FIRST_SEED = int(os.environ.get("QC_FUZZ_SEED", "1"))
FULL = int(os.environ.get("QC_FUZZ_GRAPHS", "2000"))
"""Graphs of a full run, at least."""
SIZE = 20
"""Graphs in a program: more share one export and one compilation, but a failing one is searched longer."""
QUICK, QUICK_BLOCKS = 2, 1
"""Programs of the quick run: of all kinds of graphs, and of parts of layers."""
BLOCKS = 30
"""Programs of parts of layers in the full run."""


@dataclass(frozen=True)
class Program:
    """A seed, and what its graphs are held against beside eager torch, both interpreters and the kernels."""

    seed: int
    checks: batch.Checks
    profile: str | None = None
    size: int = SIZE

    def graphs(self) -> tuple[list[Graph], Sequence[generate.Sizes]]:
        sizes = generate.sizes_of(self.seed)
        return [generate.graph_of(1000 * self.seed + i, sizes, self.profile) for i in range(self.size)], sizes


def drawn(seed: int, sizes: tuple[generate.Sizes, ...], count: int = SIZE) -> list[Graph]:
    """The first different graphs that hypothesis draws from this seed, without its examples of earlier runs.

    It draws constants that it finds in the project's own text now and then, so these graphs change with the project.
    """
    import hypothesis

    found: dict[str, Graph] = {}
    settings = hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    for again in range(10):

        @hypothesis.seed(100 * seed + again)
        @settings
        @hypothesis.given(generate.graphs(sizes))
        def collect(graph: Any) -> None:
            found.setdefault(graph.source(), graph)

        collect()
        if len(found) >= count:
            break
    return list(found.values())[:count]


def programs(first: int, graphs: int) -> list[Program]:
    """Programs for at least so many graphs; the dear checks take turns, every third has fixed sizes."""
    count = -(-graphs // SIZE)
    return [Program(first + i, checks_of(i)) for i in range(count)]


def blocks(first: int, count: int, size: int = SIZE) -> list[Program]:
    """Programs of parts of layers, of fixed sizes; every third also after each pass, or on the simulated GPU."""
    return [
        Program(
            first + i,
            batch.Checks(
                schedule=True, stepwise=i % 3 == 0, verify_each=i % 3 == 1, sim=i % 3 == 2, optimise="-O1", static=True
            ),
            "blocks",
            size,
        )
        for i in range(count)
    ]


def checks_of(turn: int) -> batch.Checks:
    return batch.Checks(
        schedule=turn % 2 == 0,
        stepwise=turn % 3 == 0,
        file=turn % 10 == 1,
        verify_each=turn % 10 == 3,
        optimise="-O3" if turn % 20 == 5 else "-O1",
        isa=("x86-64-v3", "generic")[turn // 10 % 2] if turn % 10 == 7 else None,
        static=turn % 3 == 2,
    )


def for_mlir(seed: int, count: int = SIZE) -> tuple[list[Graph], Sequence[generate.Sizes]]:
    """Graphs of a seed that upstream MLIR can compile."""
    sizes, found, number = generate.sizes_of(seed), [], 1000 * seed
    while len(found) < count:
        graph = generate.graph_of(number, sizes, "float" if number % 3 else None)
        if "uint8" not in graph.source():  # of which upstream's scalar ops know only the signless type
            found.append(graph)
        number += 1
    return found, sizes


def run(program: Program) -> batch.Report:
    """The report of a program; AssertionError with the text of every graph that fails, smaller ones first."""
    graphs, sizes = program.graphs()
    return hold(graphs, sizes, program.checks, f"seed {program.seed}")


def hold(graphs: Sequence[Graph], sizes: Sequence[generate.Sizes], checks: batch.Checks, what: str) -> batch.Report:
    """The report; AssertionError with the text of the graphs that fail."""
    report = batch.check(graphs, sizes, checks)
    if report.failures:
        stories = []
        for place, failure in batch.isolate(graphs, sizes, checks, report):
            stories.append(f"graph {place} of {what}, {failure.component}: {failure.detail}\n{graphs[place].source()}")
        told = sorted(stories, key=len) or [
            f"{what}: {f.component}: {f.detail} (no graph alone)" for f in report.failures
        ]
        raise AssertionError("\n\n".join(told))
    return report
