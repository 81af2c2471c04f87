"""Folds batch norms into the convolution (or linear) in front of them, before its weight is encoded.

    before  c = aten.convolution(x, p_conv_weight, None, …)
            n = aten._native_batch_norm_legit_no_training(c, p_bn_weight, p_bn_bias, b_mean, b_var, 0.1, 1e-05)
            y = n[0]
    after   y = aten.convolution(x, p_conv_weight, p_conv_bias, …)     weight * s,  (bias - mean) * s + bn_bias
                                                                       with s = bn_weight / sqrt(var + eps)

This is the first step of insert-qdq.  Values come from the same source as all others, one weight at a time, in the type
that the model declares; they are computed in fp64 and rounded once to the weight's type.  For a program without values
only the graph changes.  A batch norm stays if its convolution's result has another reader, if the weight is shared, or
if its statistics are not constants of the program; import then turns it into a scale and a shift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument

from qcompiler.frontends.torch.capture.export import Exported
from qcompiler.frontends.torch.common.empty_weights import is_empty
from qcompiler.frontends.weights.weight_source import WeightSource
from qcompiler.plan.weights import Bytes

aten = torch.ops.aten
AT_A_TIME = 1 << 16  # elements
_STORED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def fold_batch_norms(
    exported: Exported, room: Callable[[int], Bytes], source: WeightSource
) -> tuple[Exported, dict[str, str], frozenset[str]]:
    """The program without the folded batch norms, for each tensor that was folded the path it was folded into, and the
    paths of the weights and biases that have other values, or are new.

    The graph is modified in place.  `room` returns memory for new values.  WeightsError if `source` lacks values.
    """
    folder = _Folder(exported.program, room, source)
    for node in list(exported.program.graph.nodes):
        if node.target is aten._native_batch_norm_legit_no_training.default:
            folder.fold(node)
    if not folder.moved:
        return exported, {}, frozenset()
    return replace(exported, program=folder.rebuilt()), folder.folded, frozenset(folder.moved)


class _Folder:
    def __init__(self, program: ExportedProgram, room: Callable[[int], Bytes], source: WeightSource) -> None:
        self.program, self.graph, self.room, self.source = program, program.graph, room, source
        self.specs = list(program.graph_signature.input_specs)
        self.state = dict(program.state_dict)
        self.nodes = {n.name: n for n in self.graph.nodes if n.op == "placeholder"}
        mutated = set(program.graph_signature.buffers_to_mutate.values())
        self.stored = {
            self.nodes[spec.arg.name]: str(spec.target)
            for spec in self.specs
            if spec.kind in _STORED and spec.target not in mutated
        }
        self.folded: dict[str, str] = {}
        self.moved: set[str] = set()
        self._products = torch.empty(0, dtype=torch.float64)

    def fold(self, norm: fx.Node) -> None:
        """Folds one batch norm, if all its operands are constant and nothing else reads the result in front of it."""
        operands: list[Any] = list(norm.args[:5])
        product, given = operands[0], operands[1:]
        if not isinstance(product, fx.Node) or any(n is not None and n not in self.stored for n in given):
            return
        if not self._alone(product, norm):
            return
        weight, bias = product.args[1], _bias(product)
        assert isinstance(weight, fx.Node)
        if bias is not None and bias not in self.stored:
            return
        if self.source.valued:
            parts = [None if node is None else self._value(node) for node in given]
            eps = float(norm.args[6])  # type: ignore[arg-type]
            factor, shift = _affine(parts, None if bias is None else self._value(bias), eps)
            values = self._value(weight)
            self._set(weight, self._scaled(values, factor))
            self.source.release([self.stored[weight]])
            self._give_bias(product, weight, shift.to(values.dtype))
        else:
            with weight.meta["val"].fake_mode:
                self._give_bias(
                    product, weight, torch.empty(weight.meta["val"].shape[0], dtype=weight.meta["val"].dtype)
                )
        self.moved.add(self.stored[weight])
        self._remove(norm, product, given)

    def _tensor(self, node: fx.Node) -> torch.Tensor:
        """A constant of the program, perhaps without values."""
        target = self.stored[node]
        found = self.state.get(target, self.program.constants.get(target))
        assert isinstance(found, torch.Tensor)
        return found.detach()

    def _value(self, node: fx.Node) -> torch.Tensor:
        """The values of a constant of the program."""
        held = self._tensor(node)
        return self.source.read([self.stored[node]], held) if is_empty(held) else held

    def _alone(self, product: fx.Node, norm: fx.Node) -> bool:
        """Whether the norm is the product's only reader, and the product has one output channel per weight row."""
        if product.target is aten.convolution.default:
            if product.args[6]:
                return False
        elif product.target is not aten.linear.default or product.meta["val"].ndim != 2:
            return False
        weight = product.args[1]
        if list(product.users) != [norm] or not isinstance(weight, fx.Node) or weight not in self.stored:
            return False
        if product.meta["val"].dtype != weight.meta["val"].dtype or weight.meta["val"].ndim < 2:
            return False
        if any(user.op != "call_function" or user.args[1:] != (0,) for user in norm.users):  # [0]: the result
            return False
        return list(weight.users) == [product] and not self._tied(weight)

    def _tied(self, node: fx.Node) -> bool:
        """Whether another tensor of the program shares this one's memory."""
        cell = self._tensor(node).untyped_storage()._cdata
        others = (self._tensor(n) for n in self.stored if n is not node and n.users)
        return any(each.untyped_storage()._cdata == cell for each in others)

    def _scaled(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`values` times a factor for each of its rows, some rows at a time: fp64 takes a multiple of their memory."""
        out = torch.from_numpy(self.room(values.numel() * values.element_size())).view(values.dtype)
        given, out = values.reshape(values.shape[0], -1), out.reshape(values.shape[0], -1)
        columns = given.shape[1]
        step = max(1, AT_A_TIME // max(columns, 1))
        if self._products.numel() < step * columns:  # one buffer for all: many allocations would fragment the heap
            self._products = torch.empty(step * columns, dtype=torch.float64)
        for first in range(0, values.shape[0], step):
            rows = slice(first, first + step)
            products = self._products[: given[rows].numel()].reshape(given[rows].shape)
            out[rows].copy_(products.copy_(given[rows]).mul_(factor[rows, None]))
        return out.reshape(values.shape)

    # --- rewriting ---

    def _set(self, node: fx.Node, value: torch.Tensor) -> None:
        target = self.stored[node]
        self.moved.add(target)
        self.state[target] = torch.nn.Parameter(value, requires_grad=False)

    def _give_bias(self, product: fx.Node, weight: fx.Node, value: torch.Tensor) -> None:
        """A bias for a product: its present one if nothing else reads that, else a new parameter."""
        bias = _bias(product)
        if bias is not None and len(bias.users) == 1 and not self._tied(bias):
            return self._set(bias, value)
        module = self.stored[weight].rpartition(".")[0]
        target = f"{module}.bias" if module else "bias"
        while target in self.state:
            target += "_folded"
        with self.graph.inserting_after(weight):
            made = self.graph.placeholder(f"{weight.name}_bias")
        made.meta["val"] = weight.meta["val"].new_empty(value.shape)
        place = next(i for i, spec in enumerate(self.specs) if spec.arg.name == weight.name)
        self.specs.insert(place + 1, InputSpec(InputKind.PARAMETER, TensorArgument(made.name), target))
        self.stored[made] = target
        self._set(made, value)
        product.args = (*product.args[:2], made, *product.args[3:])
        return None

    def _remove(self, norm: fx.Node, product: fx.Node, given: list[Any]) -> None:
        path = self.stored[product.args[1]]
        for user in list(norm.users):
            user.replace_all_uses_with(product)
            self.graph.erase_node(user)
        self.graph.erase_node(norm)
        self.folded |= {self.stored[n]: path for n in given if n is not None and not n.users}

    def rebuilt(self) -> ExportedProgram:
        """The program with the present graph."""
        old = self.program
        self.graph.lint()
        old.graph_module.recompile()
        return ExportedProgram(
            root=old.graph_module,
            graph=self.graph,
            graph_signature=ExportGraphSignature(self.specs, _outputs(old)),
            state_dict=self.state,
            range_constraints=old.range_constraints,
            module_call_graph=old.module_call_graph,
            example_inputs=old.example_inputs,
            constants=old.constants,
            verifiers=[old.verifier],
        )


def _outputs(program: ExportedProgram) -> list[Any]:
    """The output specs under the names of the present results."""
    returned = program.graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    specs = []
    for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):
        named = isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
        specs.append(replace(spec, arg=TensorArgument(node.name)) if named else spec)
    return specs


def _bias(product: fx.Node) -> fx.Node | None:
    bias = product.args[2] if len(product.args) > 2 else None
    return bias if isinstance(bias, fx.Node) else None


def _affine(
    parts: list[torch.Tensor | None], bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, t) of the batch norm as `x * s + t`, including a bias of the product in front, in fp64."""
    weight, shift, mean, var = (None if v is None else v.double() for v in parts)
    assert mean is not None and var is not None
    factor = 1 / torch.sqrt(var + eps)
    factor = factor if weight is None else factor * weight
    centre = -mean if bias is None else bias.double() - mean
    return factor, centre * factor if shift is None else centre * factor + shift


__all__ = ["fold_batch_norms"]
