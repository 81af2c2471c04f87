"""Writes complex arithmetic as arithmetic of real and imaginary parts.

    c = polar(r, a)                 re = r * cos(a)               im = r * sin(a)
    d = view_as_complex(x) * c      re = x0 * re - x1 * im        im = x0 * im + x1 * re
    y = view_as_real(d[:, None])    y = cat(re[:, None][..., None], im[:, None][..., None])

Programs have no complex values.  Models use them to rotate pairs of numbers (DeepSeek V2, Llama 4).  A complex value
that an operator outside of this table makes or reads stays as it is, and so do all values that depend on it; the
importer's error names the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument

aten = torch.ops.aten

Parts = tuple[fx.Node, fx.Node]
"""The real and the imaginary part."""

_VIEWS = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.view.default,
    aten.reshape.default, aten.expand.default, aten.transpose.int, aten.permute.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.resolve_conj.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.squeeze.default, aten.squeeze.dims,
}  # fmt: skip
"""Operators that move numbers and do not change them."""

_SUMS = {aten.add.Tensor, aten.sub.Tensor}


def use_real_parts(program: ExportedProgram) -> None:
    """Rewrites the graph of a decomposed program in place."""
    graph = program.graph_module.graph
    _Rewriter(graph).run()
    (returned,) = graph.output_node().args
    for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):
        if isinstance(spec.arg, TensorArgument) and isinstance(node, fx.Node):
            spec.arg = TensorArgument(node.name)


class _Rewriter:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.parts: dict[fx.Node, Parts] = {}
        self.place: fx.Node | None = None

    def run(self) -> None:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        for node in nodes:
            self.place = node
            with self.graph.inserting_before(node):
                if _is_complex(node):
                    parts = self.made(node)
                    if parts is not None:
                        self.parts[node] = parts
                elif node.args and isinstance(node.args[0], fx.Node) and node.args[0] in self.parts:
                    self.read(node, self.parts[node.args[0]])
        for node in reversed(nodes):
            if node in self.parts and not node.users:
                self.graph.erase_node(node)

    def made(self, node: fx.Node) -> Parts | None:
        """The parts of a complex result; None for an operator that is not in the table."""
        target: Any = node.target
        args: Any = node.args
        first: Any = args[0] if args else None
        if target is aten.polar.default:
            cos, sin = (self.call(each, args[1]) for each in (aten.cos.default, aten.sin.default))
            return self.mul(first, cos), self.mul(first, sin)
        if target is aten.view_as_complex.default:
            return self.call(aten.select.int, first, -1, 0), self.call(aten.select.int, first, -1, 1)
        if target is aten.complex.default and first.meta["val"].shape == args[1].meta["val"].shape:
            return first, args[1]
        if target in _VIEWS and first in self.parts:
            # Parts may be slices of a tensor, which `view` would not take.
            moves = aten.reshape.default if target is aten.view.default else target
            real, imaginary = (self.call(moves, part, *args[1:], **node.kwargs) for part in self.parts[first])
            return real, imaginary
        if target is aten._conj.default and first in self.parts:
            real, imaginary = self.parts[first]
            return real, self.call(aten.neg.default, imaginary)
        if target is aten.mul.Tensor:
            return self.product(*args[:2])
        if target in _SUMS and len(args) == 2 and not node.kwargs and all(each in self.parts for each in args):
            (a, b), (c, d) = (self.parts[each] for each in args)
            return self.call(target, a, c), self.call(target, b, d)
        return None

    def product(self, first: Any, second: Any) -> Parts | None:
        """The product of two complex values, or of one and a real one."""
        if first not in self.parts:
            first, second = second, first
        if first not in self.parts:
            return None
        real, imaginary = self.parts[first]
        if second in self.parts:
            c, d = self.parts[second]
            return (
                self.call(aten.sub.Tensor, self.mul(real, c), self.mul(imaginary, d)),
                self.call(aten.add.Tensor, self.mul(real, d), self.mul(imaginary, c)),
            )
        if isinstance(second, complex) or (isinstance(second, fx.Node) and _is_complex(second)):
            return None
        return self.mul(real, second), self.mul(imaginary, second)

    def read(self, node: fx.Node, parts: Parts) -> None:
        """Replaces an operator that makes real numbers of complex ones."""
        found: dict[Any, Callable[[], fx.Node]] = {
            aten.view_as_real.default: lambda: self.call(
                aten.cat.default, [self.call(aten.unsqueeze.default, part, -1) for part in parts], -1
            ),
            aten.real.default: lambda: parts[0],
            aten.imag.default: lambda: parts[1],
            aten.sym_size.int: lambda: self.call(aten.sym_size.int, parts[0], *node.args[1:]),
        }
        if node.target is aten._assert_tensor_metadata.default:  # of a type that the value no longer has
            self.graph.erase_node(node)
        elif node.target in found:
            node.replace_all_uses_with(found[node.target]())
            self.graph.erase_node(node)

    def mul(self, first: Any, second: Any) -> fx.Node:
        return self.call(aten.mul.Tensor, first, second)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in the place of the present one."""
        assert self.place is not None
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self.place.meta.items() if key not in ("val", "tensor_meta")}
        values = fx.map_arg(args, lambda each: each.meta["val"])
        with self.place.meta["val"].fake_mode:
            node.meta["val"] = target(*values, **kwargs)
        return node


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


__all__ = ["use_real_parts"]
