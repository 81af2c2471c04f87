"""The logits of a language model's oracle: the quantised graph in torch, without kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

import qcompiler as qc
from qcompiler.plan.kinds.sample import WORDS


def oracle_logits(lm: qc.CausalLM, prompt: Sequence[int]) -> npt.NDArray[Any]:
    """(s, vocabulary) of a prompt of at most a chunk, in an empty cache."""
    assert lm.program is not None
    positions = torch.arange(len(prompt))[None]
    counts = {"counts": torch.tensor([len(prompt)])} if lm.record.counts else {}
    with torch.no_grad():
        logits, _ = lm.program.oracle(
            ids=torch.tensor([list(prompt)]), positions=positions, rows=positions, wanted=positions[0],
            how=torch.full((1, WORDS), -1), **counts,
        )  # fmt: skip
    found: npt.NDArray[Any] = logits.float().numpy()
    return found


def logits_limit(activations: Any, cache: str) -> float:
    """How far a program's logits may lie from the oracle's, of their norm.

    A code that rounds the other way moves one number by 1/127 of the largest; a narrow cache rounds once more.
    """
    return 2e-2 if activations or cache in ("int8", "fp8", "int4") else 1e-5 if cache == "fp32" else 1e-3
