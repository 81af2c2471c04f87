"""The parts of an attention, joined in their order; sums and total follow the largest score so far."""

from __future__ import annotations

from qcompiler.kernels.items import Axis, Items
from qcompiler.kernels.text import offset
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.join_attention import JoinAttentionKernel


def form(spec: KernelSpec) -> Items:
    """A column walks the parts. CUDA has a kernel of its own, which knows the largest score before it adds."""
    body = spec.body
    assert isinstance(body, JoinAttentionKernel)
    x, out = spec.operands
    row = ("b", "h", "i")
    sums, top, total = (offset(x, (*row, "p", c)) for c in ("c", str(body.value_dim), str(body.value_dim + 1)))
    return Items(
        note=f"{body.parts} parts, in order",
        outer=(Axis("b", body.batch), Axis("h", body.heads), Axis("i", body.q_len)),
        run=Axis("c", body.value_dim),
        block=64,
        walk=Axis("p", body.parts),
        state=(("float", "best"), ("float", "all"), ("float", "sum")),
        step=(
            f"const float top = x[{top}], most = p == 0 || top > best ? top : best;",
            "const float shift = most == -INFINITY ? 0.0f : most;  // no key yet: all weights are exp(-inf) = 0",
            "const float kept = p == 0 ? 0.0f : qc_exp(best - shift), fade = qc_exp(top - shift);",
            f"all = all * kept + x[{total}] * fade;",
            f"sum = sum * kept + x[{sums}] * fade;",
            "best = most;",
        ),
        result=(f"qc_store(out + {offset(out, (*row, 'c'))}, all == 0.0f ? 0.0f : sum / all);",),
        cost=16,
    )
