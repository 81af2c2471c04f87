"""torchao: its configurations for the CPU, compiled by torch.compile, all copies in one graph.

Each copy has rows of its own, equal to the others': a compiler would make rows of int8 once for all copies otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import torchao
from shared import Case, Engine, Made
from torchao.prototype.quantization.int4 import Int8DynamicActivationInt4WeightConfig, PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from with_torch import read, use_threads

VERSION = torchao.__version__
__all__ = ["ENGINES", "VERSION", "use_threads"]


class Copies(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for w in case.weights():
            layer = torch.nn.Linear(case.k, case.n, bias=False, dtype=torch.bfloat16)
            layer.weight.data.copy_(torch.from_numpy(w))
            self.layers.append(layer)

    def forward(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [layer(x) for layer, x in zip(self.layers, rows, strict=True)]


def compiled(case: Case, config: Any) -> Made:
    torch._dynamo.reset()
    copies = Copies(case).eval()
    quantize_(copies, config)
    rows = [torch.from_numpy(case.x).to(torch.bfloat16) for _ in range(case.copies)]
    call = torch.compile(copies, dynamic=False)
    return lambda: call(rows), read


ENGINES = {
    "torchao int4": Engine("bf16", 5, lambda case: compiled(case, PrototypeInt4WeightOnlyConfig(group_size=32))),
    "torchao int8": Engine("bf16", 8, lambda case: compiled(case, Int8WeightOnlyConfig())),
    "torchao int4 a8": Engine("int8", 5, lambda case: compiled(case, Int8DynamicActivationInt4WeightConfig(32))),
    "torchao int8 a8": Engine("int8", 8, lambda case: compiled(case, Int8DynamicActivationInt8WeightConfig())),
}
