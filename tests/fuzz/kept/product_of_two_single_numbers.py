"""passes: a product of two single numbers, one of them a weight, collapsed to rank 0 before a linear

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p1 = torch.nn.Parameter(make("grid", torch.float32, (1,), 7))

    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v2 = torch.dot(x1, self.p1)
        return (v2,)
"""

from graphfuzz.keep import graph, rounds

GRAPH = graph(
    {
        "self.p1": "float32[1]; grid; 7",
        "x1": "float32[1]; normal; 3",
    },
    [
        rounds("v2 = torch.dot(x1, self.p1)", "float32[]"),
    ],
    "v2",
)
