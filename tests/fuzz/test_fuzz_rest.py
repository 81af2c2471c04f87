"""The other half of the full run, in a file of its own: a file's tests share one process, and there are two."""

from __future__ import annotations

import pytest
from graphfuzz import batch, generate, plan

FULL = plan.programs(plan.FIRST_SEED + 100, plan.FULL)
BLOCKS = plan.blocks(plan.FIRST_SEED + 1000, plan.BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("program", FULL[1::2], ids=lambda p: f"seed{p.seed}")
def test_the_other_graphs_agree_with_eager_torch(program: plan.Program) -> None:
    plan.run(program)


@pytest.mark.slow
@pytest.mark.parametrize("program", BLOCKS, ids=lambda p: f"seed{p.seed}")
def test_parts_of_layers_agree_with_eager_torch(program: plan.Program) -> None:
    plan.run(program)


@pytest.mark.slow
@pytest.mark.parametrize("seed", (8000, 8001, 8002))
def test_graphs_that_hypothesis_draws_agree(seed: int) -> None:
    """It likes repetition and extremes, which even draws do not make."""
    sizes = generate.sizes_of(seed)
    graphs = plan.drawn(seed, sizes)
    assert len(graphs) == plan.SIZE
    plan.hold(graphs, sizes, batch.Checks(schedule=True), f"hypothesis seed {seed}")
