"""The tensors of an exported graph: parameters, buffers and constants, tied ones together, with values from a source.

    linear.weight, head.weight (one storage)     one `GraphWeight` with two targets
    x @ W.t(), x @ W                             `aten.linear`; W is stored transposed
    a batch norm behind a convolution            folded into the convolution's weight

What quantises a graph (insert_qdq.py) and what only runs it with other weights (sensitivity.py) start from these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind

from qcompiler.frontends.quantise.fold_batch_norm import fold_batch_norms
from qcompiler.frontends.quantise.graph_weights import GraphWeight, kinds_of
from qcompiler.frontends.torch.capture.export import Exported
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.weights.weight_source import WeightSource
from qcompiler.frontends.weights.weight_uses import join_transposes, storage_key
from qcompiler.plan.weights import Bytes


class GraphTensors:
    """The graph of `exported`, which is rewritten in place, and its state. `room` gives memory for folded weights."""

    def __init__(self, exported: Exported, source: WeightSource, room: Callable[[int], Bytes]) -> None:
        self.source = source
        exported.program.state_dict.update(source.bind(exported.program))
        self.exported, self.folded, self.refolded = fold_batch_norms(exported, room, source)
        self.program = self.exported.program
        self.graph = self.program.graph
        self.state = dict(self.program.state_dict)
        self.constants = dict(self.program.constants)
        self.specs = list(self.program.graph_signature.input_specs)
        self.untied: set[str] = set()
        """Paths of tensors that share storage in the model, and no longer do."""

    def grouped(self) -> list[GraphWeight]:
        """Parameters, buffers and constants, tied ones grouped, in the order of the signature, with their uses."""
        nodes = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        groups: dict[Any, GraphWeight] = {}
        for spec in self.specs:
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                continue
            assert spec.target is not None
            tensor = self.state.get(spec.target, self.constants.get(spec.target))
            assert isinstance(tensor, torch.Tensor)
            shared = spec.kind == InputKind.PARAMETER and spec.target not in self.untied
            key = storage_key(tensor) if shared else spec.target
            weight = groups.setdefault(key, GraphWeight([], [], [], tensor))
            weight.targets.append(spec.target)
            weight.specs.append(spec)
            weight.nodes.append(nodes[spec.arg.name])
        for weight in groups.values():
            join_transposes(self.graph, weight.tensor, weight.nodes)
            weight.kinds = kinds_of(weight)
        return list(groups.values())

    def find_codes(self, weights: Iterable[GraphWeight]) -> None:
        """Sets the codes of parameters that the source has as codes."""
        for weight in weights:
            weight.codes = self.source.packed(weight.targets, weight.tensor) if weight.is_parameter else None

    def value(self, weight: GraphWeight) -> torch.Tensor:
        """The values of one tensor, in the model's order."""
        return self.source.read(weight.targets, weight.tensor) if weight.is_parameter else weight.tensor

    def identities(self, weights: Sequence[GraphWeight]) -> list[Any]:
        """JSON that identifies the values."""
        return [
            self.source.identity(weight.targets, weight.tensor) if weight.is_parameter else _digest(weight.tensor)
            for weight in weights
        ]


def _digest(tensor: torch.Tensor) -> str:
    """Identifies the values of a buffer or a constant."""
    data = to_numpy(tensor.detach().cpu().contiguous())
    return f"{data.dtype}{data.shape}{hashlib.sha256(data.reshape(-1).view(np.uint8).data).hexdigest()}"


__all__ = ["GraphTensors"]
