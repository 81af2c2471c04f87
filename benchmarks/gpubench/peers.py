"""Times of other projects' kernels for the same op: torch (cuBLAS, SDPA, RMSNorm), tinygemm's int4, bitsandbytes' nf4.

    peer = peer_of(cell, sizes, place, cache)     # place: "cuda", "cpu" or "fake"
    peer.call(2)                                  # one call on copy 2
    peer.error()                                  # against float64 over the peer's own decoded weight

On "cpu" the same calls run if the peer has a CPU kernel.  With "fake" tensors torch checks the arguments against the
op's schema and its shapes, and computes nothing (tinygemm's op has no CPU kernel).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from gpubench.cells import Cell, Sizes
from gpubench.weights import copies_of

WRONG = 1e-2
GROUP = 128
"""Columns of a group of tinygemm's weights, equal to our int4's."""

TILE = 8
"""`_convert_weight_to_int4pack`'s innerKTiles: tiles of 16 columns per load."""


class PeerMissingError(Exception):
    """A peer that cannot run here; the text is the reason."""


@dataclass
class Peer:
    """One peer at one size. `wanted` is None if nothing is computed (fake tensors)."""

    call: Callable[[int], Any]
    wanted: Callable[[], Any] | None
    copies: int
    nbytes: int
    operations: int
    path: str
    result: Any = None

    def error(self) -> float | None:
        """||out - ref|| / ||ref|| of one call."""
        self.result = self.call(0)
        if self.wanted is None:
            return None
        ref = self.wanted()
        return float((self.result.double() - ref).norm() / ref.norm())


def place_of(cell: Cell, device: str) -> str:
    """Where a peer runs on a machine whose rig is `device`: "cuda" on a GPU, else "cpu" or "fake"."""
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise PeerMissingError("torch sees no CUDA device")
        return "cuda"
    return "fake" if cell.engine == "tinygemm" else "cpu"


@torch.no_grad()
def peer_of(cell: Cell, sizes: Sizes, device: str, cache: int) -> Peer:
    """PeerMissingError for a peer that does not have the op, or is not installed."""
    match cell.kind, cell.engine:
        case "linear", "torch":
            return _torch_linear(sizes, device, cache)
        case "linear", "tinygemm":
            if device != "fake":
                return _tinygemm(sizes, device, cache)
            with FakeTensorMode():
                return dataclasses.replace(_tinygemm(sizes, "cpu", cache), wanted=None)
        case "linear", "bitsandbytes":
            return _bitsandbytes(sizes, device, cache)
        case (("attention_decode" | "attention_prefill"), "torch"):
            return _attention(sizes, device, cache, causal=cell.kind == "attention_prefill")
        case "norm", "torch":
            return _norm(sizes, device, cache)
    raise PeerMissingError(f"{cell.engine} has no {cell.kind}")


def _random(shape: Sequence[int], device: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.randn(tuple(shape), device=device).bfloat16()


def _copies(tensor: Any, cache: int) -> list[Any]:
    return [tensor, *(tensor.clone() for _ in range(copies_of(tensor.nbytes, cache) - 1))]


def _torch_linear(sizes: Sizes, device: str, cache: int) -> Peer:
    x = _random((sizes.m, sizes.k), device, 1)
    weights = _copies(_random((sizes.n, sizes.k), device, 2) * sizes.k**-0.5, cache)
    out = torch.empty((sizes.m, sizes.n), dtype=x.dtype, device=device)
    return Peer(
        lambda i: torch.mm(x, weights[i % len(weights)].T, out=out), lambda: x.double() @ weights[0].double().T,
        len(weights), weights[0].nbytes + x.nbytes + out.nbytes, 2 * sizes.m * sizes.n * sizes.k, "cuBLAS bf16",
    )  # fmt: skip


def _tinygemm(sizes: Sizes, device: str, cache: int) -> Peer:
    """`torch.ops.aten._weight_int4pack_mm`: (code - 8) * scale + zero, bf16 pairs (scale, zero) per 128 columns."""
    n, k = sizes.n, sizes.k
    if n % 8 or k % (16 * TILE) or k % GROUP:
        raise PeerMissingError(f"tinygemm takes N % 8 == 0 and K % {16 * TILE} == 0, not {n} x {k}")
    x = _random((sizes.m, k), device, 1)
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32, device=device)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, TILE)
    scales = (torch.rand((k // GROUP, n, 2), device=device) / k**0.5).bfloat16()
    copies = _copies(packed, cache)

    def wanted() -> Any:
        scale, zero = (scales[..., i].T.double().repeat_interleave(GROUP, 1) for i in range(2))
        return x.double() @ ((codes.double() - 8) * scale + zero).bfloat16().double().T

    return Peer(
        lambda i: torch.ops.aten._weight_int4pack_mm(x, copies[i % len(copies)], GROUP, scales),
        wanted, len(copies),
        n * k // 2 + scales.nbytes + x.nbytes + 2 * sizes.m * n, 2 * sizes.m * n * k, "tinygemm int4 g128",
    )  # fmt: skip


def _bitsandbytes(sizes: Sizes, device: str, cache: int) -> Peer:
    """`bitsandbytes.matmul_4bit` over nf4 in blocks of 64, as its `Linear4bit` calls it."""
    try:
        from bitsandbytes import functional as bnb
        from bitsandbytes import matmul_4bit
    except ImportError as error:
        raise PeerMissingError(f"bitsandbytes: {error}") from error
    x, plain = _random((sizes.m, sizes.k), device, 1), _random((sizes.n, sizes.k), device, 2) * sizes.k**-0.5
    packed, state = bnb.quantize_4bit(plain, blocksize=64, quant_type="nf4")
    copies = _copies(packed, cache)
    return Peer(
        lambda i: matmul_4bit(x, copies[i % len(copies)].t(), quant_state=state),
        lambda: x.double() @ bnb.dequantize_4bit(packed, state).double().T, len(copies),
        packed.nbytes + state.absmax.nbytes + x.nbytes + 2 * sizes.m * sizes.n, 2 * sizes.m * sizes.n * sizes.k,
        "bitsandbytes nf4",
    )  # fmt: skip


def _attention(sizes: Sizes, device: str, cache: int, *, causal: bool) -> Peer:
    """SDPA over (batch, heads, length, dim) views of (batch, length, heads, dim), the layout of our kernel."""
    q = _random((1, sizes.m, sizes.heads, sizes.dim), device, 1).transpose(1, 2)
    keys, values = (
        [
            each.transpose(1, 2)
            for each in _copies(_random((1, sizes.n, sizes.kv_heads, sizes.dim), device, seed), cache)
        ]
        for seed in (2, 3)
    )

    def attend(query: Any, key: Any, value: Any) -> Any:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)

    def wanted() -> Any:  # a head at a time: the scores of all would be gigabytes
        group = sizes.heads // sizes.kv_heads
        heads = [
            attend(*(each.double() for each in (q[:, [h]], keys[0][:, [h // group]], values[0][:, [h // group]])))
            for h in range(sizes.heads)
        ]
        return torch.cat(heads, 1)

    pairs = sizes.m * sizes.n // (2 if causal else 1)
    return Peer(
        lambda i: attend(q, keys[i % len(keys)], values[i % len(values)]), wanted, len(keys),
        2 * q.nbytes + 2 * keys[0].nbytes, 4 * pairs * sizes.heads * sizes.dim, "torch SDPA",
    )  # fmt: skip


def _norm(sizes: Sizes, device: str, cache: int) -> Peer:
    x, weight = _random((sizes.m, sizes.k), device, 1), _random((sizes.k,), device, 2)
    rows = _copies(x, cache if sizes.m > 1 else 0)
    return Peer(
        lambda i: functional.rms_norm(rows[i % len(rows)], (sizes.k,), weight, 1e-5),
        lambda: functional.rms_norm(x.double(), (sizes.k,), weight.double(), 1e-5), len(rows),
        2 * x.nbytes + weight.nbytes, 4 * x.numel(), "torch rms_norm",
    )  # fmt: skip


# --- times -----------------------------------------------------------------------------------------------------------


def seconds(peer: Peer, calls: int, rounds: int) -> list[float]:
    """Seconds of each round's replay of a CUDA graph of `calls` calls, after a warm-up replay. Needs a GPU."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for i in range(3):  # handles, workspaces and choices of kernels must not be made in the capture
            peer.call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for i in range(calls):
            peer.call(i)
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found
