"""A linear that combines pairs of rows, as its templates see it: a weight of whole panels, and sums in two halves.

Panels of a weight in one of `plan/pairs.py`'s layouts are panels like all others, of its rows in another order.  So the
code that decodes and multiplies needs to know nothing of pairs; only what finishes the sums of a panel does.
"""

from __future__ import annotations

import msgspec

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.layouts.pairs import obstacle
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.pairs import PAIR_LAYOUTS, stored_rows


def in_panels(spec: KernelSpec) -> KernelSpec:
    """The spec whose weight, and body, have the stored rows. One without pairs, or of panels, is returned as it is.

    The contract of the kind has proven that such a layout stands exactly where pairs are combined.
    """
    body, w = spec.body, spec.operands[1]
    if not isinstance(body, LinearKernel) or w.layout not in PAIR_LAYOUTS:
        return spec
    rows, cols = (int(size) for size in w.shape)
    why = obstacle(None if w.format is None else formats.get(w.format.name, **w.format.params), cols)
    if why is not None:
        raise KernelSelectionError(f"kernel '{spec.name}': its weight cannot be in layout '{w.layout}': {why}")
    plain = msgspec.structs.replace(w, shape=(stored_rows(rows), cols), layout=PAIR_LAYOUTS[w.layout])
    return msgspec.structs.replace(
        spec,
        operands=(spec.operands[0], plain, *spec.operands[2:]),
        body=msgspec.structs.replace(body, n=stored_rows(rows)),
    )


def columns_of(spec: KernelSpec) -> int:
    """Columns of the result. Whole panels may have room for more."""
    return int(spec.operands[-1].shape[-1])
