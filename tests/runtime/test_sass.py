"""Machine code is counted along the path that a full tile takes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from qcompiler.errors import SassError
from qcompiler.runtime import sass

KERNEL = """
	.section	.text.qk_a,"ax",@progbits
qk_a:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E.NA.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/               @P1 BRA `(.L_x_2) ;
        /*0040*/                   LDG.E.U16 R8, desc[UR4][R2.64] ;
        /*0050*/                   IADD3 R8, R8, 0x1, RZ ;
.L_x_2:
        /*0060*/                   LOP3.LUT R9, R4, 0xf000f, RZ, 0xc0, !PT ;
        /*0070*/                   BRA.DIV UR8, `(.L_x_9) ;
.L_x_3:
        /*0080*/                   HMMA.16816.F32.BF16 R32, R32, R38, R28 ;
        /*0090*/                   NOP ;
        /*00a0*/              @!P2 BRA `(.L_x_3) ;
        /*00b0*/              @!P3 BRA `(.L_x_0) ;
        /*00c0*/                   EXIT ;
.L_x_9:
        /*00d0*/                   BRA `(.L_x_3) ;
"""


def loop_of(text: str) -> sass.HotLoop:
    return sass.hot_loop(sass.parse(text)["qk_a"], 4, Fraction(1, 8))


def test_the_path_with_the_loads_of_weights_is_counted_and_the_slow_one_is_not() -> None:
    opcodes = loop_of(KERNEL).opcodes
    assert opcodes["LDG"] == 1, "the load of 2 bytes lies on the path that full tiles skip"
    assert "IADD3" not in opcodes and "S2R" not in opcodes and "EXIT" not in opcodes and "NOP" not in opcodes


def test_an_inner_loop_runs_as_often_as_its_products_ask_for() -> None:
    loop = loop_of(KERNEL)
    assert loop.weights == 32  # 16 bytes of 4-bit codes
    assert loop.opcodes["HMMA"] == 4  # 32 / 8
    assert loop.opcodes["BRA"] == 4 + 4  # its own branch each time; of the outer loop the branches on the path
    assert loop.total == 4 * 2 + 6
    assert loop.per_weight == loop.total / 32
    assert sum(loop.classes.values()) == pytest.approx(loop.per_weight)


def test_products_that_do_not_match_the_weights_are_an_error() -> None:
    with pytest.raises(SassError, match="cannot be the products of 32 weights"):
        sass.hot_loop(sass.parse(KERNEL)["qk_a"], 4, Fraction(1, 64))


def test_a_kernel_without_a_hot_loop_is_an_error() -> None:
    without = KERNEL.replace("LDG.E.NA.128.CONSTANT", "LDG.E.128.CONSTANT")
    with pytest.raises(SassError, match="no loop holds both"):
        loop_of(without)


def test_a_loop_left_by_a_call_is_a_loop() -> None:
    """ptxas for sm_80 ends some loops by a conditional CALL.REL.NOINC to what follows, and a BRA back."""
    left = KERNEL.replace(
        "/*00b0*/              @!P3 BRA `(.L_x_0) ;",
        "/*00b0*/              @!P3 CALL.REL.NOINC `(.L_x_8) ;\n        /*00b8*/  BRA `(.L_x_0) ;\n.L_x_8:",
    )
    assert loop_of(left).weights == 32


def test_a_cubin_that_is_none_is_an_error(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "a.cubin"
    file.write_bytes(b"no cubin")
    with pytest.raises(SassError, match="nvdisasm refused it"):
        sass.disassemble(file)
