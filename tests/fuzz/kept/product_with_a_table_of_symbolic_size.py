"""passes: a matrix of (6*s, 5) that init computes was taken for the weight of a linear, whose K is fixed

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = x1.shape[1]
        v4 = x1.reshape(6*s)
        v7 = torch.full((6*s, 5,), 0.125)
        v8 = torch.tanh(v7)
        v9 = torch.matmul(v4, v8)
        return (v9,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "x1": "float32[6, s]; normal; 3",
    },
    [
        moves("v4 = x1.reshape(6*s)", "float32[6*s]"),
        moves("v7 = torch.full((6*s, 5,), 0.125)", "float32[6*s, 5]"),
        rounds("v8 = torch.tanh(v7)", "float32[6*s, 5]"),
        rounds("v9 = torch.matmul(v4, v8)", "float32[5]", coarse=True),
    ],
    "v9",
)
