"""What a benchmark ran on."""

from __future__ import annotations

import platform
from pathlib import Path

from qcompiler.runtime.isa import cpuinfo_fields


def processor() -> str:
    """Its name, family and model."""
    fields = cpuinfo_fields(Path("/proc/cpuinfo")) or {}
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = [fields[each] for each in ("cpu family", "model") if each in fields]
    return f"{name} (family {', model '.join(family)})" if len(family) == 2 else name
