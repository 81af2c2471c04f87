"""passes: collapsing (0, s) gave a static 0, which MLIR refuses

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v4 = x1.flatten(1, 2)
        return (v4,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "x1": "float32[3, 0, s]; normal; 3",
    },
    [
        moves("v4 = x1.flatten(1, 2)", "float32[3, 0]"),
    ],
    "v4",
)
