"""ncu for `make gpu-check`: how it is called, and what it prints."""

from __future__ import annotations

import re
from typing import Any

FORBIDDEN = "ERR_NVGPUCTRPERM"
"""What ncu says where the driver keeps the GPU's counters from its users."""

COMMAND = (
    "ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--set", "full",
    "--kernel-name", "regex:^qk_", "--launch-count", "2",
)  # fmt: skip
"""Every section: a list of metrics would fail as a whole where a chip lacks one of them."""


def metrics(output: str) -> dict[str, Any]:
    """ncu's raw page as metric -> value (a number where it is one) of the last launch, and `launches`, all of them."""
    rows = [line for line in output.splitlines() if line.startswith('"')]
    if len(rows) < 3:
        return {}
    names, values = _fields(rows[0]), [_fields(row) for row in rows[2:]]
    launches = [
        {name: _number(value) for name, value in zip(names, row, strict=False) if "__" in name or name == "Kernel Name"}
        for row in values
    ]
    return {**launches[-1], "launches": launches}


def _fields(row: str) -> list[str]:
    return [each.replace('""', '"') for each in re.findall(r'"((?:[^"]|"")*)"', row)]


def _number(text: str) -> Any:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


def why_none(output: str) -> str:
    if FORBIDDEN in output:
        return f"{FORBIDDEN}: this machine does not let its users read the GPU's counters"
    errors = [line for line in output.splitlines() if "==ERROR==" in line or "Error" in line]
    return " ".join(errors)[:500] or f"ncu printed no metrics: {output.strip()[-300:]}"
