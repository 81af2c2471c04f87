"""schedule: a view without elements was refused because it begins behind the last byte

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor, x4: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x1.shape[2]
        v2 = torch.cosh(x1)
        v3 = torch.softmax(v2, -4)
        v5 = x4.expand((8, 0, n, 1,))
        v6 = torch.slice_scatter(v3, v5, 3, 2, 3)
        return (v6,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "x1": "float32[8, 0, n, 4]; normal; 3",
        "x4": "float32[0, 1, 1]; normal; 4",
    },
    [
        rounds("v2 = torch.cosh(x1)", "float32[8, 0, n, 4]"),
        rounds("v3 = torch.softmax(v2, -4)", "float32[8, 0, n, 4]"),
        moves("v5 = x4.expand((8, 0, n, 1,))", "float32[8, 0, n, 1]"),
        moves("v6 = torch.slice_scatter(v3, v5, 3, 2, 3)", "float32[8, 0, n, 4]"),
    ],
    "v6",
)
