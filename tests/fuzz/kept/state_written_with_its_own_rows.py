"""passes: index_copy into a state in place, with the state itself as the source, made an unsafe schedule

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s2", make("normal", torch.float32, (3, 2), 4))

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v4 = self.s2.index_copy(0, x1, self.s2)
        v5 = torch.tanh(x2)
        self.s2.copy_(v4)
        return (v4, v5,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "self.s2": "float32[3, 2]; normal; 4",
        "x1": "int64[3]; order:3; 5",
        "x2": "float32[s, 2]; normal; 6",
    },
    [
        moves("v4 = self.s2.index_copy(0, x1, self.s2)", "float32[3, 2]"),
        rounds("v5 = torch.tanh(x2)", "float32[s, 2]"),
        moves("self.s2.copy_(v4)", ""),
    ],
    "v4, v5",
)
