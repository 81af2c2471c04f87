"""The flags of g++ that emitted kernels need."""

from __future__ import annotations

OF_BITS = ("-ffp-contract=off", "-fno-math-errno")
"""Flags that decide bits: no contraction of a*b+c, which is fused only where the source says so."""

ZEN4 = ("-DQG_PAST_L2",)
"""Flags for a Zen 4, which decide no bit: how it is asked for codes (kernels/cpu/decode.h)."""

_WIDE = ("-mprefer-vector-width=512", "-mtune=icelake-server")


def tuning(isa: str) -> tuple[str, ...]:
    """Flags that decide no bit. Tuned for no processor in particular, g++ keeps integers in vector registers where it
    has too few others. Sums then go to the stack, and addresses wait behind all products under way
    (docs/performance.md#registers)."""
    return _WIDE if isa == "x86-64-v4" else ()
