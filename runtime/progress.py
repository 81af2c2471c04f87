"""One line on stderr for work that takes long. `QC_QUIET=1` silences it; stdout is never touched."""

from __future__ import annotations

import os
import sys


def note(text: str) -> None:
    if not os.environ.get("QC_QUIET"):
        print(f"qcompiler: {text}", file=sys.stderr, flush=True)
