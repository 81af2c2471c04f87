"""import: torch.cat of tensors without elements had no operand left

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v1 = torch.cat((x1, x1), 0)
        return (v1,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "x1": "float32[0, 3]; normal; 3",
    },
    [
        moves("v1 = torch.cat((x1, x1), 0)", "float32[0, 3]"),
    ],
    "v1",
)
