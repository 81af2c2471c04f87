"""passes: a quantised table that is also summed had no kernel (qc.dequantize)

class Graph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p5 = torch.nn.Parameter(make("normal", torch.float32, (7, 8), 3))

    def forward(self, x6: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v7 = F.embedding(x6, self.p5)
        v9 = self.p5.sum(0, keepdim=True)
        return (v7, v9,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "self.p5": "float32[7, 8]; normal; 3",
        "x6": "int64[s]; index:7; 4",
    },
    [
        moves("v7 = F.embedding(x6, self.p5)", "float32[s, 8]"),
        rounds("v9 = self.p5.sum(0, keepdim=True)", "float32[1, 8]"),
    ],
    "v7, v9",
    quant={"p5": "int8"},
)
