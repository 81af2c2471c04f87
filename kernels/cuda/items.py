"""Prints an `Items` for CUDA: a thread for each place, neighbouring threads at neighbouring places of the result."""

from __future__ import annotations

from qcompiler.kernels.cuda.geometry import CudaKernel
from qcompiler.kernels.cuda.per_element import THREADS, element_geometry
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.items import Copy, Items, by_role
from qcompiler.kernels.text import c_dim, header_comment, indent, offset, unravel
from qcompiler.plan.dims import product
from qcompiler.plan.kernel import KernelSpec


def write(spec: KernelSpec, form: Items) -> CudaKernel:
    """The kernel for any architecture."""
    places = (*form.outer, form.run)
    names, sizes = [axis.name for axis in places], [axis.size for axis in places]
    lines = [
        f"const int64_t e = (int64_t)blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (e < {c_dim(product(sizes))}) {{",
        *indent([*unravel("e", names, sizes), *_place(spec, form)]),
        "}",
    ]
    per = "column" if form.walk else "element"
    missing = (
        "" if form.index is None else f"; an index out of range {'writes nothing' if form.walk else 'gives poison'}"
    )
    head = header_comment(spec, f"{form.note}; a thread per {per}{missing}")
    text = "\n".join([head, signature(spec, THREADS, names=list(by_role(spec))), *indent(lines), "}\n"])
    return CudaKernel(text, element_geometry(sizes))


def _place(spec: KernelSpec, form: Items) -> list[str]:
    """What one thread does."""
    operands = by_role(spec)
    step: list[str] = []
    if form.index:
        step = form.index.lines(operands["index"])
        length = c_dim(form.index.length)
        step.append(
            f"if (at < 0 || at >= {length}) continue;" if form.walk else f"const bool there = at >= 0 && at < {length};"
        )
    if isinstance(form.step, Copy):
        copy = form.step
        value = f"{copy.source}[{offset(operands[copy.source], copy.read)}]"
        if form.index and not form.walk:
            value = f"there ? {value} : qc_poison({copy.source})"
        step.append(f"{copy.target}[{offset(operands[copy.target], copy.at)}] = {value};")
    else:
        step += form.step
    if form.walk:
        name = form.walk.name
        step = [f"for (int64_t {name} = 0; {name} < {c_dim(form.walk.size)}; {name}++) {{", *indent(step), "}"]
    return [*(f"{kind} {name} = {{}};" for kind, name in form.state), *step, *form.result]
