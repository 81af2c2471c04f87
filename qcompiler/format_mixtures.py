"""Mixtures: recipes that choose a format per tensor, as llama.cpp's quantiser does for its file types.

    q2_K_S  q2_K_M  q3_K_S  q3_K_M  q3_K_L  q4_K_S  q4_K_M  q5_K_S  q5_K_M

They are llama.cpp's Q2_K_S, Q2_K, …, Q5_K_M (`q2_K_M` is the one that llama.cpp calls Q2_K).  The choice depends on
the role of a matrix, on the depth of its layer, and on a few facts of the model.  Where the blocks of a format do not
divide K, the alternative format is taken.  tests/files/golden/mixtures.json holds the choices of llama.cpp's quantiser.

Source of the rules: llama.cpp, `llama_tensor_get_type` and the functions it calls, in src/llama-quant.cpp as of
llama-cpp-python 0.3.36.  Tensors that llama.cpp stores unquantised (norms, positions, routers) are kept here as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
    "kept", "other",
]  # fmt: skip

MIXTURES = {
    "q2_K_S": "q2_K", "q2_K_M": "q2_K", "q3_K_S": "q3_K", "q3_K_M": "q3_K", "q3_K_L": "q3_K", "q4_K_S": "q4_K",
    "q4_K_M": "q4_K", "q5_K_S": "q5_K", "q5_K_M": "q5_K",
}  # fmt: skip
"""The format of most tensors, by mixture."""

ALTERNATIVE_FORMAT = {
    "q2_K": "q4_0", "q3_K": "q4_0", "tq1_0": "q4_0", "tq2_0": "q4_0", "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0",
    "iq4_xs": "iq4_nl", "iq3_s": "iq4_nl", "iq3_xxs": "iq4_nl", "iq2_s": "iq4_nl", "iq2_xs": "iq4_nl",
    "iq2_xxs": "iq4_nl", "iq1_m": "iq4_nl", "iq1_s": "iq4_nl",
}  # fmt: skip
"""llama.cpp's alternative where blocks of 256 do not divide K: a format of blocks of 32."""

MANY_HEADS = 4
"""From this many query heads per head of k and v on, the matrix of v is small, so more bits for it cost little."""


@dataclass(frozen=True)
class Matrix:
    """A weight to choose a format for. `layer` is the number of its layer, or None outside of layers."""

    role: Role
    layer: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the model that the rules use: layers, experts (1 without), query heads per head of k and v.

    `falcon` and `llama_70b` say that the model has the shape of one of these two, which have rules of their own.
    """

    layers: int
    experts: int = 1
    heads_per_kv: int = 1
    falcon: bool = False
    llama_70b: bool = False


def choose(mixture: str, matrices: Sequence[Matrix], facts: ModelFacts) -> list[str | None]:
    """The format of each matrix, before K is considered; None for a matrix that is not quantised."""
    tied = all(matrix.role != "output" for matrix in matrices)
    ranks = _ranks(matrices)
    values = sum(matrix.role in _VALUES for matrix in matrices)
    chosen: list[str | None] = []
    for matrix, rank in zip(matrices, ranks, strict=True):
        base = MIXTURES[mixture]
        if matrix.role == "kept":
            chosen.append(None)
        elif matrix.role == "output" or (tied and matrix.role == "token_embd"):
            chosen.append("q8_0" if facts.falcon else "q6_K")
        elif matrix.role in _VALUES:
            chosen.append(_values(mixture, base, rank, values, facts))
        elif matrix.role == "attn_k":
            chosen.append("q8_0" if facts.experts == 8 else base)
        elif matrix.role == "attn_output":
            chosen.append(_attention_output(mixture, base, facts))
        elif matrix.role == "ffn_down":
            depth = matrix.layer if facts.experts > 1 and matrix.layer is not None else rank
            chosen.append(_down(mixture, base, depth, facts))
        else:
            chosen.append(base)
    return chosen


_VALUES = ("attn_v", "attn_qkv")
"""Matrices whose errors directly affect the result of attention."""


def _ranks(matrices: Sequence[Matrix]) -> list[int]:
    """The position of each matrix among those of its kind, counted from the first layer."""
    kinds = ["values" if matrix.role in _VALUES else matrix.role for matrix in matrices]
    order = sorted(range(len(matrices)), key=lambda i: (-1 if matrices[i].layer is None else matrices[i].layer, i))
    seen: dict[str, int] = {}
    ranks = [0] * len(matrices)
    for i in order:
        ranks[i] = seen.get(kinds[i], 0)
        seen[kinds[i]] = ranks[i] + 1
    return ranks


def _is_sensitive(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _values(mixture: str, base: str, rank: int, count: int, facts: ModelFacts) -> str:
    many = facts.heads_per_kv >= MANY_HEADS
    if facts.experts == 8:
        return "q8_0"
    found = base
    if mixture == "q2_K_M":
        found = "q4_K" if many else "q3_K"
    elif mixture == "q2_K_S" and many:
        found = "q4_K"
    elif mixture == "q3_K_M":
        found = "q5_K" if rank < 2 else "q4_K"
    elif mixture == "q3_K_L" or (mixture == "q4_K_S" and rank < 4):
        found = "q5_K"
    elif mixture in ("q4_K_M", "q5_K_M") and _is_sensitive(rank, count):
        found = "q6_K"
    return "q5_K" if facts.llama_70b and found in ("q3_K", "q4_K") else found


def _attention_output(mixture: str, base: str, facts: ModelFacts) -> str:
    if facts.falcon:
        return "q4_K" if mixture == "q3_K_L" else base
    if facts.experts == 8:
        return "q5_K" if mixture in ("q2_K_M", "q3_K_S", "q3_K_M", "q4_K_S", "q4_K_M") else base
    return {"q2_K_M": "q3_K", "q3_K_M": "q4_K", "q3_K_L": "q5_K"}.get(mixture, base)


def _down(mixture: str, base: str, layer: int, facts: ModelFacts) -> str:
    layers, sensitive = facts.layers, _is_sensitive(layer, facts.layers)
    early = layer < layers // 8
    match mixture:
        case "q2_K_M":
            return "q3_K"
        case "q2_K_S":
            return "q4_K" if early else base
        case "q3_K_M":
            if layer < layers // 16:
                return "q5_K"
            return "q3_K" if facts.falcon and not sensitive else "q4_K"
        case "q3_K_L":
            return "q4_K" if facts.falcon else "q5_K"
        case "q4_K_M" if facts.falcon:
            return "q6_K" if layer < layers // 16 else "q5_K" if sensitive else base
        case "q4_K_M" | "q5_K_M":
            return "q6_K" if sensitive else base
        case "q4_K_S" if early and not facts.falcon:
            return "q5_K"
    return base
