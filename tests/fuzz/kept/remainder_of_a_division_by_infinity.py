"""import: fmod and remainder were a - b * trunc(a / b), NaN where b is infinite; 1 // -inf was NaN, 1 // 0 too

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v1 = torch.full_like(x1, float('inf'))
        v2 = torch.remainder(x1, -v1)
        v3 = torch.fmod(x1, v1)
        v4 = x1 // v1
        v5 = x1 // torch.zeros_like(x1)
        v6 = torch.fmod(x2 * 1048576.0 * 1048576.0, 0.7)
        return (v2, v3, v4, v5, v6,)
"""

from graphfuzz.keep import graph, moves

GRAPH = graph(
    {
        "x1": "float32[3, s]; normal; 3",
        "x2": "float64[4, 2]; normal; 4",
    },
    [
        moves("v1 = torch.full_like(x1, float('inf'))", "float32[3, s]"),
        moves("v2 = torch.remainder(x1, -v1)", "float32[3, s]"),
        moves("v3 = torch.fmod(x1, v1)", "float32[3, s]"),
        moves("v4 = x1 // v1", "float32[3, s]"),
        moves("v5 = x1 // torch.zeros_like(x1)", "float32[3, s]"),
        moves("v6 = torch.fmod(x2 * 1048576.0 * 1048576.0, 0.7)", "float64[4, 2]"),
    ],
    "v2, v3, v4, v5, v6",
    special=True,
)
