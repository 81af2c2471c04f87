"""Updates rows along one dim in place, like `index_copy`: the write of a KV cache.

A negative index is out of range, as in torch.index_copy: counted from the end, a position before the first one would
overwrite the last slot of the cache. CUDA has a kernel of its own, with a block for each entry of the index list: a
thread that walks the list, as here, would leave most of a GPU idle while a prompt is read.
"""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Copy, Index, Items
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.index_update import IndexUpdateKernel

BLOCK = 1024


def form(spec: KernelSpec) -> Items:
    """An item walks the index list in order, so that the last of equal indices wins with any number of threads."""
    body = spec.body
    assert isinstance(body, IndexUpdateKernel)
    return Items(
        note="rows written in the order of the index list",
        outer=(Axis("o", body.outer),),
        run=Axis("n", body.inner),
        block=BLOCK,
        walk=Axis("i", body.count),
        index=Index(("i",), body.length, from_end=False),
        step=Copy("x", ("o", "at", "n"), "src", ("o", "i", "n")),
        cost=2,
    )
