"""nothing of the compiler: the expected answer missed that a returned view of a buffer shows what is written later

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s1", make("normal", torch.float32, (4, 2), 3))

    def forward(self, x2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v2 = torch.lerp(self.s1, x2, 0.25)
        v3 = self.s1.reshape(8)
        v4 = v3.unsqueeze(0)
        v5 = torch.exp(v3)
        self.s1.copy_(v2)
        return (v2, v4, v5,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "self.s1": "float32[4, 2]; normal; 3",
        "x2": "float32[4, 2]; normal; 4",
    },
    [
        rounds("v2 = torch.lerp(self.s1, x2, 0.25)", "float32[4, 2]", coarse=True),
        moves("v3 = self.s1.reshape(8)", "float32[8]"),
        moves("v4 = v3.unsqueeze(0)", "float32[1, 8]"),
        rounds("v5 = torch.exp(v3)", "float32[8]"),
        moves("self.s1.copy_(v2)", ""),
    ],
    "v2, v4, v5",
)
