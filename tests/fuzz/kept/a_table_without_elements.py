"""passes: hoist-constant-masks took a dim of size 0 for one along which the table repeats

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("c1", make("normal", torch.float32, (0, 2), 4))

    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v5 = self.c1 * 2
        v6 = torch.cat((v5, x1), 0)
        return (v5, v6,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "self.c1": "float32[0, 2]; normal; 4",
        "x1": "float32[s, 2]; normal; 5",
    },
    [
        moves("v5 = self.c1 * 2", "float32[0, 2]"),
        moves("v6 = torch.cat((v5, x1), 0)", "float32[s, 2]"),
    ],
    "v5, v6",
)
