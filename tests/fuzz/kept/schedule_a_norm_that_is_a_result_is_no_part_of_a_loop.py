"""schedule: a norm that is a result of the program, and that a loop reads, was computed by the loop and never written.

Graph 11002 of seed 11.

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p21 = torch.nn.Parameter(make("normal", torch.bfloat16, (32,), 1441283))
            self.p25 = torch.nn.Parameter(make("normal", torch.bfloat16, (16, 32), 1441287))

        def forward(self, x1000: torch.Tensor) -> tuple[torch.Tensor, ...]:
            v22 = F.rms_norm(x1000, (32,), self.p21, eps=1e-3)
            v23 = v22.to(torch.float32)
            v24 = v23.to(torch.bfloat16)
            v26 = F.linear(v24, self.p25)
            return (v22, v26,)
"""

from graphfuzz.keep import graph, moves, rounds

GRAPH = graph(
    {
        "self.p21": "bfloat16[32]; normal; 1441283",
        "self.p25": "bfloat16[16, 32]; normal; 1441287",
        "x1000": "bfloat16[17, 32]; normal; 8",
    },
    [
        rounds("v22 = F.rms_norm(x1000, (32,), self.p21, eps=1e-3)", "bfloat16[17, 32]"),
        moves("v23 = v22.to(torch.float32)", "float32[17, 32]"),
        rounds("v24 = v23.to(torch.bfloat16)", "bfloat16[17, 32]"),
        rounds("v26 = F.linear(v24, self.p25)", "bfloat16[17, 16]", coarse=True),
    ],
    "v22, v26",
)
