"""A weight of an exported graph: the parameters that share its storage, how the graph uses it, and how it is stored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec

from qcompiler.calibrate import gptq
from qcompiler.calibrate.free_scales import why_no_scales
from qcompiler.calibrate.levels import why_no_levels
from qcompiler.config import format_text, parse_format, resolve_format
from qcompiler.errors import FormatShapeError, FormatValueError
from qcompiler.frontends.quantise.choose_formats import Described, Kind
from qcompiler.frontends.quantise.conv_weights import GROUPED, ConvWeight, conv_weight
from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.capture.expert_weights import ExpertWeight, expert_weight
from qcompiler.frontends.torch.common.values import dtype_name
from qcompiler.frontends.weights.weight_files import Entry
from qcompiler.frontends.weights.weight_source import StoredCodes
from qcompiler.frontends.weights.weight_uses import as_linear
from qcompiler.plan.kernel import DType

aten = torch.ops.aten

FLOATS: dict[torch.dtype, DType] = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass
class GraphWeight:
    """One stored tensor (tied parameters together) and how the graph uses it."""

    targets: list[str]
    specs: list[InputSpec]
    nodes: list[fx.Node]
    tensor: torch.Tensor
    transposed: bool = False
    conv: ConvWeight | None = None
    experts: ExpertWeight | None = None
    kinds: set[Kind] = field(default_factory=set)
    format: str | None = None
    """Text of the storage format; None for a weight that is not quantised."""
    codes: StoredCodes | None = None
    """The source's codes, if it has them instead of values."""

    @property
    def users(self) -> list[fx.Node]:
        return [user for node in self.nodes for user in node.users]

    @property
    def is_parameter(self) -> bool:
        return self.specs[0].kind == InputKind.PARAMETER

    @property
    def arrangement(self) -> str:
        """How the stored tensor differs from the model's; "" if it does not."""
        if self.experts is not None:
            return self.experts.text
        return "transposed" if self.transposed else self.conv.text if self.conv is not None else ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The stored shape."""
        if self.conv is not None:
            return self.conv.stored_shape
        if self.experts is not None:
            return self.experts.stored_shape
        shape = tuple(self.tensor.shape)
        return tuple(reversed(shape)) if self.transposed else shape

    @property
    def nbytes(self) -> int:
        """Canonical bytes. FormatShapeError if the format cannot store the shape."""
        if self.format is None:
            return self.tensor.numel() * self.tensor.element_size()
        rows, cols = self.shape
        return resolve_format(self.format).nbytes(rows, cols)

    def arranged(self, values: torch.Tensor) -> torch.Tensor:
        """A view of the model's values in stored order."""
        if self.conv is not None:
            return self.conv.moved(values)
        if self.experts is not None:
            return self.experts.moved(values)
        return values.t() if self.transposed else values

    def restored(self, matrix: torch.Tensor) -> torch.Tensor:
        """The model's values from the stored ones: the inverse of `arranged`."""
        if self.conv is not None:
            for operator, argument in self.conv.steps():
                matrix = operator(matrix, argument)
            return matrix
        if self.experts is not None:
            experts, first, second = self.experts.shape
            if self.experts.transposed:
                matrix = matrix.reshape(experts, second, first).transpose(1, 2)
            return matrix.reshape(self.tensor.shape)
        return matrix.t() if self.transposed else matrix

    def entry(self) -> Entry:
        text = format_text(parse_format(self.format)) if self.format is not None else ""
        dtype = dtype_name(self.tensor.dtype)
        return Entry(self.targets[0], text, dtype, self.shape, self.nbytes, self.arrangement)


@contextlib.contextmanager
def naming_errors(weight: GraphWeight) -> Iterator[None]:
    """Adds the parameter and the way out to a format's errors."""
    key, shape = weight.targets[0], " x ".join(map(str, weight.shape))
    try:
        yield
    except FormatShapeError as error:
        module = key.rpartition(".")[0]
        raise FormatShapeError(
            f"parameter '{key}' ({shape}): {error}. Choose another format for it: rules={{{module!r}: 'int8'}}, or "
            f"keep it: rules={{{module!r}: None}}; a text such as 'q4_K, else int8' names an alternative"
        ) from error
    except FormatValueError as error:
        raise FormatValueError(f"parameter '{key}' ({shape}): {error}") from error


def described(weight: GraphWeight) -> Described:
    """What the choice of a format may look at."""
    kind: Kind = "embedding" if "embedding" in weight.kinds else "conv" if weight.conv else "linear"
    taps = math.prod(weight.conv.shape[2:]) if weight.conv is not None else 1
    return Described(tuple(weight.targets), kind, weight.shape, tuple(weight.tensor.shape), taps)


def kinds_of(weight: GraphWeight) -> set[Kind]:
    """How the graph uses a float matrix; empty for a tensor that is not quantised. Sets `conv`, `experts`, and, if
    every use is `x @ W`, `transposed`."""
    if weight.tensor.dtype not in FLOATS or weight.specs[0].kind != InputKind.PARAMETER:
        return set()
    weight.conv = conv_weight(weight.tensor, weight.nodes)
    if weight.conv is not None and weight.conv.quantizes:
        return {"conv"}
    weight.experts = expert_weight(weight.tensor, weight.nodes)
    if weight.experts is not None:
        return {"linear"}
    if weight.tensor.ndim != 2:
        return set()
    kinds: set[Kind] = set()
    products = 0
    for user in weight.users:
        if user.target is aten.linear.default and user.args[1] in weight.nodes and user.args[0] not in weight.nodes:
            kinds.add("linear")
        elif user.target is aten.embedding.default and user.args[0] in weight.nodes:
            kinds.add("embedding")
        elif any(recurrent.is_weight_of(user, node) for node in weight.nodes):
            kinds.add("linear")
        elif any(as_linear(user, node) for node in weight.nodes):
            products += 1
    if products and products == len(weight.users):
        weight.transposed = True
        kinds.add("linear")
    return kinds


def takes_importance(weight: GraphWeight) -> bool:
    """Whether a linear's weight is encoded here, in a format that weights the errors of columns."""
    if weight.codes is not None or weight.format is None or not is_quantised_linear(weight):
        return False
    return resolve_format(weight.format).takes_importance


def is_quantised_linear(weight: GraphWeight) -> bool:
    """Whether a weight is quantised and used by plain linears: not by a convolution, experts or a recurrent layer."""
    single = weight.conv is None and weight.experts is None
    single = single and all(user.target is not recurrent.OPERATOR for user in weight.users)
    return single and "linear" in weight.kinds and weight.format is not None


def why_encoders_scales(weight: GraphWeight) -> str:
    """Why hqq does not choose the scales of a quantised weight: "" if it does."""
    if weight.codes is not None:
        return "the source has its codes"
    if not weight.kinds & {"linear", "conv"} or weight.format is None:
        return "it is an embedding"
    return why_no_scales(resolve_format(weight.format), weight.shape[1])


def why_nearest(weight: GraphWeight, algorithm: str) -> str:
    """Why `algorithm` does not choose the codes of a linear by data: "" if it does."""
    if "linear" not in weight.kinds:
        return "it is no linear"
    if weight.codes is not None:
        return "the source has its codes"
    if weight.experts is not None:
        return "the inputs of experts are not collected by expert"
    if "embedding" in weight.kinds:
        return "it is an embedding, too"
    if not is_quantised_linear(weight):
        return "a recurrent layer reads it"
    assert weight.format is not None
    why = {"gptq": gptq.why_not, "awq": why_no_scales}.get(algorithm, why_no_levels)
    return why(resolve_format(weight.format), weight.shape[1])


def why_kept(weight: GraphWeight) -> str:
    """Why a weight is not quantised whatever the recipe says, as the ledger's row gives it."""
    if weight.specs[0].kind == InputKind.BUFFER:
        return "buffer"
    if weight.specs[0].kind == InputKind.CONSTANT_TENSOR:
        return "constant of the graph"
    if weight.tensor.ndim < 2:
        return "fewer than two dimensions"
    if weight.tensor.dtype not in FLOATS:
        return "formats store float32, bfloat16 and float16"
    return GROUPED if weight.conv is not None else "not the weight of a linear, a convolution or an embedding"
