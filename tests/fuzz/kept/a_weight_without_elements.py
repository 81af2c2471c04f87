"""passes: weights are found by their offset, and one without elements shared that of the next

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("p4", make("index:20", torch.int64, (0, 5), 4))
        self.p3 = torch.nn.Parameter(make("normal", torch.float32, (20, 1), 3))

    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v5 = F.embedding(self.p4, self.p3)
        v6 = x1 @ self.p3
        return (v5, v6,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "self.p4": "int64[0, 5]; index:20; 4",
        "self.p3": "float32[20, 1]; normal; 3",
        "x1": "float32[s, 20]; normal; 5",
    },
    [
        moves("v5 = F.embedding(self.p4, self.p3)", "float32[0, 5, 1]"),
        rounds("v6 = x1 @ self.p3", "float32[s, 1]", coarse=True),
    ],
    "v5, v6",
)
