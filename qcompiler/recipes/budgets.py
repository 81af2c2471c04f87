"""Budgets as text: "4.25 bits" per weight, "700 MB" of weights, "kl<0.01" or "error<0.01" of the model's outputs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from qcompiler.errors import BudgetError

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
    "TIB": 1 << 40,
}  # fmt: skip
"""Decimal, as sizes are printed, unless the unit has an "i"."""


@dataclass(frozen=True)
class Budget:
    """`amount` is in bits per weight, in bytes, or a bound of a distance that is measured in `kind`."""

    kind: Literal["bits", "bytes", "kl", "error"]
    amount: float
    text: str

    @property
    def is_size(self) -> bool:
        return self.kind in ("bits", "bytes")

    @staticmethod
    def of(text: object) -> Budget:
        """BudgetError for anything but a budget."""
        found = _parsed(text) if isinstance(text, str) else None
        if found is None or not 0 < found.amount < float("inf"):
            raise BudgetError(
                f"budget={text!r}: write bits per weight ('4.25 bits'), a size of all weights ('1.5 GB', '700 MB'), or "
                "a bound ('kl<0.01'; 'error<0.001' for a model without logits)"
            )
        return found


def digits(amount: float) -> str:
    """The number with as many digits as it has: the text of a budget names the same budget."""
    short = f"{amount:g}"
    return short if float(short) == amount else repr(amount)


def _parsed(text: str) -> Budget | None:
    size = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]+)\s*", text)
    bound = re.fullmatch(r"\s*(kl|error)\s*<=?\s*([0-9.eE+-]+)\s*", text, re.IGNORECASE)
    try:
        if size is not None:
            amount, unit = float(size[1]), size[2]
            if unit.lower() in ("bit", "bits"):
                return Budget("bits", amount, f"{digits(amount)} bits")
            if unit.upper() in UNITS:
                return Budget("bytes", amount * UNITS[unit.upper()], f"{digits(amount)} {unit}")
        if bound is not None:
            amount, kind = float(bound[2]), bound[1].lower()
            return Budget("kl" if kind == "kl" else "error", amount, f"{kind}<{digits(amount)}")
    except ValueError:  # no number
        return None
    return None


__all__ = ["Budget", "digits"]
