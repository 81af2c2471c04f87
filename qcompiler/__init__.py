"""qcompiler: a quantisation compiler. Exports are lazy (PEP 562), so a lower layer never pulls in the roof."""

from __future__ import annotations

__version__ = "0.1.0"
