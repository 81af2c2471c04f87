"""import: a number beside a uint8 tensor wraps in torch (-1 is 255), and was compared as it stands

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v1 = x1 > -1
        v2 = x1 // -7
        v3 = x1 + -1
        return (v1, v2, v3,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "x1": "uint8[b]; integer; 5",
    },
    [
        moves("v1 = x1 > -1", "bool[b]"),
        moves("v2 = x1 // -7", "uint8[b]"),
        moves("v3 = x1 + -1", "uint8[b]"),
    ],
    "v1, v2, v3",
)
