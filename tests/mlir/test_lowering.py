"""Upstream MLIR compiles what every op and every format is lowered to, and agrees with the definitions."""

from __future__ import annotations

import format_cases
import linalg_cases
import numpy as np
import pytest

from qcompiler import formats
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.mlir_oracle import run_with_mlir
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass

# Unsigned bytes are none of upstream's operands; `to_mlir` writes signless ones (tests/api/test_to_mlir.py).
NAMES = [name for name in (*linalg_cases.NAMES, *linalg_cases.LOOPS) if not name.endswith("ui8")]


@pytest.mark.parametrize("name", NAMES)
def test_mlir_agrees_with_the_interpreter_on_every_op(name: str) -> None:
    case = linalg_cases.case(name)
    before, after = dict(case.states), dict(case.states)
    wanted = run(case.module, case.weights, case.inputs, states=before)
    LowerQcToLinalgPass().apply(QCContext.default(), case.module)
    case.module.verify()
    got = run_with_mlir(case.module, case.weights, case.inputs, states=after)
    for a, b in zip([*got, *after.values()], [*wanted, *before.values()], strict=True):
        linalg_cases.same(a, b, case.tolerance)


@pytest.mark.parametrize("name", formats.names())
def test_mlir_decodes_every_format_with_all_parameters_bit_for_bit(name: str) -> None:
    for params in format_cases.all_parameters(name):
        fmt, shape = formats.get(name, **params), format_cases.shape_of(name, params)
        for data in (format_cases.encoded(name, params), format_cases.arbitrary(name, params)):
            if data is None:
                continue
            case = linalg_cases.decoded(name, shape, data, **params)
            LowerQcToLinalgPass().apply(QCContext.default(), case.module)
            got = run_with_mlir(case.module, case.weights, [])[0]
            with np.errstate(all="ignore"):
                wanted = fmt.decode(formats.from_bytes(fmt, *shape, data))
            np.testing.assert_array_equal(got, wanted, str(fmt))
            np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(wanted[wanted == 0]), str(fmt))
