"""The other half of the full run, in a file of its own: a file's tests share one process, and there are two."""

from __future__ import annotations

import pytest
from graphfuzz import plan

FULL = plan.programs(plan.FIRST_SEED + 100, plan.FULL)


@pytest.mark.slow
@pytest.mark.parametrize("program", FULL[1::2], ids=lambda p: f"seed{p.seed}")
def test_the_other_graphs_agree_with_eager_torch(program: plan.Program) -> None:
    plan.run(program)
