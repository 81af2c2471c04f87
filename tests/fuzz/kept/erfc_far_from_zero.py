"""import: erfc was 1 - erf(x), which has no digit left from x = 4 on

class Graph(torch.nn.Module):
    def forward(self, x1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        v1 = torch.erfc(x1)
        v2 = torch.erfc(x1 * 4.0)
        v3 = torch.erfc(-x1)
        return (v1, v2, v3,)
"""

from graphfuzz.keep import graph, rounds

GRAPH = graph(
    {
        "x1": "float32[b, 9]; positive; 3",
    },
    [
        rounds("v1 = torch.erfc(x1)", "float32[b, 9]"),
        rounds("v2 = torch.erfc(x1 * 4.0)", "float32[b, 9]"),
        rounds("v3 = torch.erfc(-x1)", "float32[b, 9]"),
    ],
    "v1, v2, v3",
)
