"""Lowers `qc` ops to plain linalg, arith and math: a second definition of their meaning, for compilers without `qc`.

Each op has one rule, `(op, LinalgLowering) -> results`, in the module of its kind. Everything accumulates in f32 (f64
if an operand is f64) and rounds once. Packed weights become `linalg.generic` over their bytes (`linalg_formats.py`). An
op without a rule has a reason in `WITHOUT`.
"""

from __future__ import annotations

from qcompiler.ir import qc
from qcompiler.ir.linalg_attention import ATTENTION
from qcompiler.ir.linalg_base import RULES, WITHOUT, LinalgLowering, lower
from qcompiler.ir.linalg_linear_attention import LINEAR_ATTENTION
from qcompiler.ir.linalg_matmuls import MATMULS
from qcompiler.ir.linalg_norms import NORMS
from qcompiler.ir.linalg_orders import ORDERS
from qcompiler.ir.linalg_positions import POSITIONS
from qcompiler.ir.linalg_recurrent import RECURRENT
from qcompiler.ir.linalg_rows import ROWS
from qcompiler.ir.linalg_sample import SAMPLE

__all__ = ["BY_THE_PASS", "CONSTANTS", "RULES", "STATES", "UPDATES", "WITHOUT", "LinalgLowering", "lower"]

for _table in (MATMULS, ATTENTION, NORMS, POSITIONS, ORDERS, ROWS, RECURRENT, LINEAR_ATTENTION, SAMPLE):
    RULES.update(_table)

CONSTANTS = "qc.constants"
"""Attribute of a lowered function: the contents of its last arguments, as `key` or `key:section`."""

STATES = "qc.states"
"""Attribute of a lowered function: the states that its arguments behind its own hold."""

UPDATES = "qc.updates"
"""Attribute of a lowered function: the states that its last results hold."""

BY_THE_PASS = (qc.ConstOp, qc.DimOp, qc.StateOp, qc.StateUpdateOp, qc.YieldOp)
"""Ops that the pass itself turns into arguments, results and sizes, or that end a region."""
