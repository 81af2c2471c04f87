"""Inputs of quantised linears in int8: `QuantConfig(activations=…)`, as operators of the graph.

    before   linear = aten.linear(x, dequantize, bias)
    after    rows = qc.quantize_rows(x, "token", 0.0, None);  values = qc.dequantize_rows(rows, K, f32)
             linear = aten.linear(values, dequantize, bias)

    "int8"            a scale per token, from its largest magnitude: the codes and values of the format int8
    "int8:static"     one scale per tensor, which an observer derives from calibration
    "llm_int8[:6.0]"  LLM.int8: as "int8", but columns that hold a magnitude of at least 6.0 stay in floating point:
                      linear = aten.linear(values, w, bias) + aten.linear(where(columns, x, 0), w), with codes 0 there

A convolution takes a scale per image, with "int8" alone (docs/decisions/038). The pixels of the image are the rows:

    after    pixels = permute(x, [0, 2, 3, 1]);  largest = amax(amax(abs(pixels), [2, 3]), 1)
             rows = qc.quantize_rows(pixels, "image", 0.0, None, largest)
             conv = aten.convolution(permute(qc.dequantize_rows(rows, C, f32), [0, 3, 1, 2]), dequantize, …)

With weights in int8 or int4 this is W8A8 or W4A8: fuse-dequant-matmul turns the linear into one integer product.
For weights in formats without such a product (formats/integer_product.py gives the reason) elementwise operators
compute the same values in floating point: ``q * s`` with q = clamp(round(x / s)).  Shapes do not depend on data, and
the host reads nothing, so everything can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from qcompiler.config import Activations, resolve_format
from qcompiler.formats.int8_rows import row_bytes
from qcompiler.formats.integer_product import integer_product
from qcompiler.formats.llm_int8 import SMALLEST_ABSMAX
from qcompiler.frontends.quantise.graph_run import Rounded
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear
from qcompiler.frontends.torch.qc_ops import torch_ops, torch_rows  # noqa: F401  (they register the operators)
from qcompiler.frontends.weights.weight_uses import reads

aten = torch.ops.aten
_EXPERTS = torch.ops.qc.grouped_linear.default
_CONVOLUTION = aten.convolution.default
_VIEWS = (aten.view.default, aten.permute.default, aten.flip.default)
CODE = 127.0


def quantise_inputs(
    graph: fx.Graph, kind: Activations, clips: Mapping[str, float], path_of: Callable[[fx.Node], str]
) -> list[tuple[str, str]]:
    """Quantises and dequantises the input of every linear, of every convolution, and of all products of experts, with a
    decoded weight; returns (the weight's path, what was done) for each.

    `clips` are the magnitudes that become 127, by the weights' paths, for static scales.  Linears that quantise one x
    in the same way share the quantisation, and so do convolutions.  Experts take a scale per token: which rows an
    expert gets is known only at run time, so calibration knows no range of its inputs, and outliers would need a second
    product of all experts.
    """
    made: dict[tuple[fx.Node, float, bool, bool], tuple[fx.Node, fx.Node | None]] = {}
    done = []
    for node in list(graph.nodes):
        weight = decoded_weight(node)
        if weight is None:
            continue
        path, convolves = path_of(weight), node.target is _CONVOLUTION
        x: Any = node.args[0]
        why = _why_floats(node, kind)
        if why is not None:
            done.append((path, f"not quantised: {why}"))
            continue
        clip = clips.get(path, 0.0) if kind.kind == "tensor" else 0.0
        obstacle = integer_product(resolve_format(weight.args[1]))
        integers = not isinstance(obstacle, str)
        key = (x, clip, integers, convolves)
        if key not in made:
            build = (_PixelBuilder if convolves else _Builder)(graph, node, x)
            made[key] = build.rows(kind, clip) if integers else (build.rounded(kind, clip), None)
        values, outliers = made[key]
        node.args = (values, *node.args[1:])
        if outliers is not None:
            _add_product(graph, node, outliers)
        how = "multiplied as integers" if integers else f"multiplied in floating point: {obstacle}"
        text = "int8, a scale per image" if convolves else kind.text
        done.append((path, text + (f" {clip / CODE:.3g}" if kind.kind == "tensor" else "") + f"; {how}"))
    return done


def rounded_inputs(weights: Sequence[GraphWeight]) -> Rounded:
    """The inputs of linears that a program with activations="int8" rounds."""
    quantised = [weight for weight in weights if is_quantised_linear(weight)]
    return Rounded(frozenset(read for weight in quantised for read in reads(weight.nodes)), _int8_values)


def _int8_values(x: torch.Tensor) -> torch.Tensor:
    """The values of x (…, K) as a linear reads them, in x's type."""
    rows = torch.ops.qc.quantize_rows(x, "token", 0.0, None)
    values: torch.Tensor = torch.ops.qc.dequantize_rows(rows, int(x.shape[-1]), x.dtype)
    return values


def decoded_weight(node: fx.Node) -> Any:
    """The node of the decoded weight that a linear, experts or a convolution multiply with; None for any other node.

    A convolution sees the stored matrix through views (conv_weights.py).
    """
    if node.target not in (aten.linear.default, _EXPERTS, _CONVOLUTION):
        return None
    weight: Any = node.args[1]
    while node.target is _CONVOLUTION and isinstance(weight, fx.Node) and weight.target in _VIEWS:
        weight = weight.args[0]
    return weight if is_decoded(weight) else None


def _why_floats(node: Any, kind: Activations) -> str | None:
    """Why the input of a product stays in floats; None if it is quantised."""
    if node.target is _EXPERTS and kind.kind != "token":
        return "the inputs of experts take a scale per token, activations='int8'"
    if node.target is not _CONVOLUTION:
        return None
    if kind.kind != "token":
        return f"the inputs of convolutions take a scale per image, activations='int8', not {kind.text!r}"
    if node.args[6]:
        return "the windows of a transposed convolution are of an image with zeros between its pixels"
    channels = int(node.args[0].meta["val"].shape[1])
    if row_bytes(channels) > 4 * channels:
        return (
            f"a pixel of {channels} channels takes {4 * channels} bytes in fp32 and {row_bytes(channels)} as a row of "
            "int8"
        )
    return None


def _add_product(graph: fx.Graph, node: fx.Node, outliers: fx.Node) -> None:
    """Adds to `node` the product of the same weight with the columns of outliers."""
    readers = list(node.users)
    with graph.inserting_after(node):
        alone = graph.call_function(aten.linear.default, (outliers, node.args[1]))
    with graph.inserting_after(alone):
        total = graph.call_function(aten.add.Tensor, (node, alone))
    for each in (alone, total):
        each.meta = dict(node.meta)
    for reader in readers:
        reader.replace_input_with(node, total)


def is_decoded(weight: Any) -> bool:
    """Whether an argument of a node is a weight that `qc.dequantize` decodes."""
    return isinstance(weight, fx.Node) and weight.target is torch.ops.qc.dequantize.default


class _Builder:
    """Inserts nodes before `before`, with the values that tracing them would give."""

    def __init__(self, graph: fx.Graph, before: fx.Node, x: fx.Node) -> None:
        self.graph, self.before, self.x = graph, before, x
        self.mode = x.meta["val"].fake_mode

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self.before.meta.items() if key != "val"}
        with self.mode:
            values = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def rounded(self, kind: Activations, clip: float) -> fx.Node:
        """x after quantising and dequantising, in x's dtype; computed in fp32."""
        dtype = self.x.meta["val"].dtype
        x = self.x if dtype == torch.float32 else self.call(aten._to_copy.default, self.x, dtype=torch.float32)
        out = {"token": self._token, "outliers": self._outliers, "tensor": self._tensor}[kind.kind](x, kind, clip)
        return out if dtype == torch.float32 else self.call(aten._to_copy.default, out, dtype=dtype)

    def rows(self, kind: Activations, clip: float) -> tuple[fx.Node, fx.Node | None]:
        """(the decoded values of the codes, the columns of outliers of x or None)."""
        x, columns, alone = self.x, None, None
        value = {"token": 0.0, "tensor": clip, "outliers": kind.threshold}[kind.kind]
        dtype = x.meta["val"].dtype
        if kind.kind == "outliers":
            wide = x if dtype == torch.float32 else self.call(aten._to_copy.default, x, dtype=torch.float32)
            columns = self._outlier_columns(self.call(aten.ge.Scalar, self.call(aten.abs.default, wide), value))
            zero = self.call(aten.full.default, [], 0.0, dtype=dtype, device=x.meta["val"].device)
            alone = self.call(aten.where.self, columns, x, zero)
        rows = self.call(torch.ops.qc.quantize_rows.default, x, kind.kind, value, columns)
        return self.call(torch.ops.qc.dequantize_rows.default, rows, int(x.meta["val"].shape[-1]), dtype), alone

    def _outlier_columns(self, outlier: fx.Node) -> fx.Node:
        leading = list(range(self.x.meta["val"].ndim - 1))
        return self.call(aten.any.dims, outlier, leading, True) if leading else outlier

    def _codes(self, scaled: fx.Node) -> fx.Node:
        return self.call(aten.clamp.default, self.call(aten.round.default, scaled), -CODE, CODE)

    def _token(self, x: fx.Node, _kind: Activations, _clip: float) -> fx.Node:
        """The format int8 for x's rows: a scale of 0 is replaced by 1."""
        largest = self.call(aten.amax.default, self.call(aten.abs.default, x), self._axes(), True)
        exact = self.call(aten.div.Tensor, largest, self._number(x, CODE))
        scale = self.call(aten.where.self, self.call(aten.gt.Scalar, exact, 0.0), exact, self._number(x, 1.0))
        return self.call(aten.mul.Tensor, self._codes(self.call(aten.div.Tensor, x, scale)), scale)

    def _tensor(self, x: fx.Node, _kind: Activations, clip: float) -> fx.Node:
        """One scale for all: codes of ``x * fp32(127 / clip)``; inputs that were always 0 become 0."""
        codes = self._codes(self.call(aten.mul.Tensor, x, CODE / clip if clip else 0.0))
        return self.call(aten.mul.Tensor, codes, clip / CODE)

    def _outliers(self, x: fx.Node, kind: Activations, _clip: float) -> fx.Node:
        """The decoded result of `formats.llm_int8.quantise_rows`, with the original columns of outliers."""
        zero = self._number(x, 0.0)
        outlier = self.call(aten.ge.Scalar, self.call(aten.abs.default, x), kind.threshold)
        columns = self._outlier_columns(outlier)
        kept = self.call(aten.where.self, outlier, zero, x)
        largest = self.call(aten.amax.default, self.call(aten.abs.default, kept), [-1], True)
        inverse = self.call(aten.div.Tensor, self._number(x, CODE), largest)
        tiny = self.call(aten.lt.Scalar, largest, float(SMALLEST_ABSMAX))
        inverse = self.call(aten.where.self, tiny, zero, inverse)
        codes = self.call(aten.round.default, self.call(aten.mul.Tensor, kept, inverse))
        step = self.call(aten.div.Tensor, largest, self._number(x, CODE))
        decoded = self.call(aten.mul.Tensor, codes, step)
        return self.call(aten.where.self, columns, x, decoded)

    def _axes(self) -> list[int]:
        """The axes of x that share a scale."""
        return [-1]

    def _number(self, x: fx.Node, value: float) -> fx.Node:
        """A tensor without dims: operators take shortcuts for Python numbers (a reciprocal)."""
        return self.call(aten.full.default, [], value, dtype=torch.float32, device=x.meta["val"].device)


class _PixelBuilder(_Builder):
    """The same for the input (b, c, h, w) or (b, c, length) of a convolution, whose pixels are the rows: with a scale
    per image in place of one per token."""

    def rows(self, _kind: Activations, _clip: float) -> tuple[fx.Node, fx.Node | None]:
        x, rank = self.x, self.x.meta["val"].ndim
        pixels = self.call(aten.permute.default, x, [0, *range(2, rank), 1])
        channels, dtype = int(x.meta["val"].shape[1]), x.meta["val"].dtype
        # Rows of the image first, so that threads share an image.
        largest = self.call(aten.amax.default, self.call(aten.abs.default, pixels), list(range(2, rank)))
        largest = self.call(aten.amax.default, largest, [1])
        if dtype != torch.float32:
            largest = self.call(aten._to_copy.default, largest, dtype=torch.float32)
        codes = self.call(torch.ops.qc.quantize_rows.default, pixels, "image", 0.0, None, largest)
        values = self.call(torch.ops.qc.dequantize_rows.default, codes, channels, dtype)
        return self.call(aten.permute.default, values, [0, rank - 1, *range(1, rank - 1)]), None

    def _axes(self) -> list[int]:
        return list(range(1, self.x.meta["val"].ndim))


__all__ = ["decoded_weight", "is_decoded", "quantise_inputs", "rounded_inputs"]
