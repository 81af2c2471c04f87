"""passes: arith.constant of ui8, which MLIR does not have: every tensor filled with a uint8

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v1 = torch.full_like(x1, 200)
        v2 = F.pad(x1, (1, 1), value=3)
        return (v1, v2,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "x1": "uint8[4]; integer; 3",
    },
    [
        moves("v1 = torch.full_like(x1, 200)", "uint8[4]"),
        moves("v2 = F.pad(x1, (1, 1), value=3)", "uint8[6]"),
    ],
    "v1, v2",
)
