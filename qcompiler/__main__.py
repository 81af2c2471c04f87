"""`python -m qcompiler`: the `qc` command."""

from __future__ import annotations

import sys

from qcompiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
