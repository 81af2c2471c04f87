"""What a benchmark ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Its name, family and model."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    family = [
        line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(("cpu family", "model\t"))
    ]
    name = next(named, platform.processor() or platform.machine())
    return f"{name} (family {', model '.join(family[:2])})" if len(family) >= 2 else name
