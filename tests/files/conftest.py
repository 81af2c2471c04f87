"""Inputs of the small models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(3))
