"""Random graphs: eager torch, both interpreters and the compiled kernels give the same answers.

The seeds are fixed. `QC_FUZZ_SEED=1000 QC_FUZZ_GRAPHS=5000 pytest tests/fuzz -m slow` looks elsewhere; what fails is
printed as a module. `tests/fuzz/explore.py` also shrinks it and keeps it.
"""

from __future__ import annotations

import pytest
from graphfuzz import plan

QUICK = [
    *plan.programs(plan.FIRST_SEED, plan.QUICK * plan.SIZE),
    *plan.blocks(plan.FIRST_SEED + 10, plan.QUICK_BLOCKS, plan.SIZE // 4),
]
FULL = plan.programs(plan.FIRST_SEED + 100, plan.FULL)


def test_the_full_run_makes_as_many_graphs_as_promised() -> None:
    assert len(FULL) * plan.SIZE >= plan.FULL
    assert len({program.seed for program in [*QUICK, *FULL]}) == len(QUICK) + len(FULL)


@pytest.mark.parametrize("program", QUICK, ids=lambda p: f"seed{p.seed}")
def test_graphs_agree_with_eager_torch(program: plan.Program) -> None:
    report = plan.run(program)
    assert report.set_aside <= 1
    assert min(report.compared[c] for c in ("export", "import", "passes", "native")) >= program.size


@pytest.mark.slow
@pytest.mark.parametrize("program", FULL[0::2], ids=lambda p: f"seed{p.seed}")
def test_many_graphs_agree_with_eager_torch(program: plan.Program) -> None:
    plan.run(program)
