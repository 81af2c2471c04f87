"""The engines of matmul_cuda.py: our linear kernels, torch's, bitsandbytes', each as a CUDA graph. Needs a GPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import emit
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import FormatRef, KernelSpec, LinearKernel, Operand
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends.cuda import CudaBackend

LAYOUT = "cuda_t16_v1"
LEAST_CALLS = 8
PROBE_BYTES = 1 << 30
WRONG = 1e-2
"""Relative error of a result in bf16 above which an engine is not timed."""

Measured = Any
"""matmul_cuda.Measured; `Bench` is given the class."""


def m_class(m: int) -> Any:
    return "1" if m == 1 else "2-8" if m <= 8 else "9-64" if m <= 64 else "large"


def linear_spec(kind: str, params: Mapping[str, Any], m: int, n: int, k: int) -> KernelSpec:
    """A bf16 linear for one class of M, without bias."""
    rows: Dim = 1 if m == 1 else "m"

    def plain(name: str, shape: tuple[Dim, ...], access: Any) -> Operand:
        return Operand(name=name, dtype="bf16", access=access, shape=shape, strides=(shape[1], 1))

    packed = FormatRef(name=kind, params=dict(params))
    w = Operand(name="w", dtype="bf16", access="r", shape=(n, k), format=packed, layout=LAYOUT)
    body = LinearKernel(m=rows, n=n, k=k, m_class=m_class(m), has_bias=False)
    name = f"{kind}_{n}_{k}_{m_class(m).replace('-', '_')}"
    operands = (plain("x", (rows, k), "r"), w, plain("out", (rows, n), "w"))
    return KernelSpec(name=name, symbols=() if m == 1 else ("m",), operands=operands, body=body)


@dataclass
class Weight:
    """One weight: copies of its bytes on the device, and its decoded values (bf16, rows x columns)."""

    copies: list[Any]
    decoded: Any

    @property
    def nbytes(self) -> int:
        return int(self.copies[0].nbytes)


def copies_of(tensor: Any, cache: int) -> list[Any]:
    """The tensor and clones of it, more than twice the cache together."""
    count = max(1, min(64, -(-2 * cache // tensor.nbytes)))
    return [tensor, *(tensor.clone() for _ in range(count))]


class Graph:
    """`calls` calls of an engine as one CUDA graph. `call(i)` uses copy i of the weight and gives the result."""

    def __init__(self, record: Measured, call: Callable[[int], Any], calls: int, wanted: Any = None) -> None:
        self.record, self.calls = record, calls
        result = call(0)
        torch.cuda.synchronize()
        if wanted is not None:
            error = float((result.float() - wanted).norm() / wanted.norm())
            if not error < WRONG:
                raise ArithmeticError(f"relative error {error:.2e} against the decoded weight")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(calls):
                call(i)
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self) -> None:
        """One replay, in seconds per call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.record.times.append(start.elapsed_time(end) / 1e3 / self.calls)


class Bench:
    """Our kernels on the current device, and the peers."""

    def __init__(
        self,
        kinds: Mapping[str, Mapping[str, Any]],
        shapes: Sequence[tuple[int, int]],
        ms: Sequence[int],
        record: Callable[..., Measured],
    ) -> None:
        torch.cuda.init()
        torch.manual_seed(0)
        index = torch.cuda.current_device()
        self.kinds, self.backend, self.record = kinds, CudaBackend(index), record
        properties = torch.cuda.get_device_properties(index)
        self.cache = properties.L2_cache_size
        self.device = {
            "gpu": torch.cuda.get_device_name(index), "arch": self.backend.isa, "torch": torch.__version__,
            "cuda": torch.version.cuda, "l2_bytes": self.cache, "multiprocessors": properties.multi_processor_count,
            "python": platform.python_version(),
        }  # fmt: skip
        self.specs = {
            (kind, n, k, m_class(m)): linear_spec(kind, params, m, n, k)
            for kind, params in kinds.items() for n, k in shapes for m in ms
        }  # fmt: skip
        self.kernels = self._build()
        self.weights: dict[tuple[str, int, int], Weight] = {}
        self.peers: dict[tuple[str, int, int], Any] = {}
        self.copy_graph: Graph | None = None

    def _build(self) -> dict[str, Any]:
        """Every kernel, a module per format: NVRTC takes them side by side."""
        groups = [[spec for key, spec in self.specs.items() if key[0] == kind] for kind in self.kinds]
        plans = [
            Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=tuple(group), entries=())
            for group in groups
        ]
        with ThreadPoolExecutor(len(plans)) as pool:
            builds = list(pool.map(self.backend.build, plans))
        loaded: dict[str, Any] = {}
        for plan, build in zip(plans, builds, strict=True):
            loaded.update(self.backend.load(plan, build))
        return loaded

    def measure(self, n: int, k: int, m: int, rounds: int) -> tuple[list[Measured], Measured, list[tuple[str, str]]]:
        """(every engine that runs, the copy, (engine, reason) of those that do not)."""
        with torch.no_grad():
            x = torch.randn((m, k), device="cuda").bfloat16()
            copy = self._copying()
            made, missing = [self._torchs(n, k, x), *(self._ours(kind, n, k, x) for kind in self.kinds)], []
            for name, peer in (("torch int4pack", self._int4pack), ("bitsandbytes nf4", self._bitsandbytes)):
                try:
                    made.append(peer(n, k, x))
                except Exception as error:  # another project's kernel: whatever it raises is the reason
                    missing.append((name, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"))
            for turn in range(rounds + 2):
                for graph in (*made, copy) if turn % 2 else (copy, *reversed(made)):
                    graph.time()
                if turn == 1:  # warm: the clocks are up
                    for graph in (*made, copy):
                        graph.record.times.clear()
        return [graph.record for graph in made], copy.record, missing

    # --- weights ---

    def weight(self, kind: str, n: int, k: int) -> Weight:
        """Random values, packed. All weights of a shape are encoded at once, a thread each."""
        if (kind, n, k) not in self.weights:
            w = np.random.default_rng(0).standard_normal((n, k), np.float32) / np.float32(k**0.5)

            def make(each: str) -> tuple[Any, Any]:
                fmt = formats.get(each, **self.kinds[each])
                packed = fmt.encode(w)
                return layouts.get(LAYOUT).pack(fmt, "bf16", n, k, packed.data), fmt.decode(packed)

            with ThreadPoolExecutor(len(self.kinds)) as pool:
                for each, (data, values) in zip(self.kinds, pool.map(make, self.kinds), strict=True):
                    decoded = torch.from_numpy(values).cuda().bfloat16()
                    self.weights[each, n, k] = Weight(copies_of(torch.from_numpy(data).cuda(), self.cache), decoded)
        return self.weights[kind, n, k]

    def _plain(self, n: int, k: int) -> list[Any]:
        """A bf16 weight and its copies."""
        if ("plain", n, k) not in self.peers:
            decoded = self.weight(next(iter(self.kinds)), n, k).decoded
            self.peers["plain", n, k] = copies_of(decoded, self.cache)
        return list(self.peers["plain", n, k])

    # --- engines ---

    def _record(self, n: int, k: int, x: Any, name: str, path: str, weight_bytes: int) -> Measured:
        m = x.shape[0]
        return self.record(n, k, m, name, path, weight_bytes + x.nbytes + 2 * m * n)

    def _ours(self, kind: str, n: int, k: int, x: Any) -> Graph:
        m, weight = x.shape[0], self.weight(kind, n, k)
        spec = self.specs[kind, n, k, m_class(m)]
        kernel, out = self.kernels[spec.name], torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
        symbols = () if m == 1 else (m,)

        def call(i: int) -> Any:
            w = weight.copies[i % len(weight.copies)]
            addresses = (x.data_ptr(), w.data_ptr(), out.data_ptr())
            self.backend.launch(self.backend.caller_stream(), kernel, addresses, symbols)
            return out

        path = emit.emit_kernel(spec, self.backend.isa).engine
        record = self._record(n, k, x, kind, path, weight.nbytes)
        wanted = x.float() @ weight.decoded.float().T
        try:
            return Graph(record, call, max(LEAST_CALLS, len(weight.copies)), wanted)
        except ArithmeticError as error:
            raise SystemExit(f"{kind} at M = {m}, {n} x {k}: {error}") from error

    def _torchs(self, n: int, k: int, x: Any) -> Graph:
        weights, out = self._plain(n, k), torch.empty((x.shape[0], n), dtype=x.dtype, device="cuda")

        def call(i: int) -> Any:
            return torch.mm(x, weights[i % len(weights)].T, out=out)

        record = self._record(n, k, x, "torch bf16", "cuBLAS", weights[0].nbytes)
        return Graph(record, call, max(LEAST_CALLS, len(weights)))

    def _int4pack(self, n: int, k: int, x: Any) -> Graph:
        """`torch._weight_int4pack_mm`: codes less 8, times a bf16 scale, plus a bf16 zero, per 32 columns."""
        group = 32
        if ("int4pack", n, k) not in self.peers:
            codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
            pairs = codes[:, ::2] << 4 | codes[:, 1::2]
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
            scales = (torch.rand((k // group, n, 2), device="cuda") / k**0.5).bfloat16()
            s, z = (scales[..., i].T.float().repeat_interleave(group, 1) for i in range(2))
            decoded = ((codes.float() - 8) * s + z).bfloat16()
            self.peers["int4pack", n, k] = copies_of(packed, self.cache), scales, decoded
        copies, scales, decoded = self.peers["int4pack", n, k]

        def call(i: int) -> Any:
            return torch.ops.aten._weight_int4pack_mm(x, copies[i % len(copies)], group, scales)

        nbytes = copies[0].nbytes + scales.nbytes
        record = self._record(n, k, x, "torch int4pack", "tinygemm", nbytes)
        return Graph(record, call, max(LEAST_CALLS, len(copies)), x.float() @ decoded.float().T)

    def _bitsandbytes(self, n: int, k: int, x: Any) -> Graph:
        """`bitsandbytes.matmul_4bit` with an nf4 weight in blocks of 64, as `Linear4bit` calls it."""
        from bitsandbytes import functional, matmul_4bit

        if ("bitsandbytes", n, k) not in self.peers:
            plain = self._plain(n, k)[0]
            packed, state = functional.quantize_4bit(plain, blocksize=64, quant_type="nf4")
            decoded = functional.dequantize_4bit(packed, state)
            self.peers["bitsandbytes", n, k] = copies_of(packed, self.cache), state, decoded
        copies, state, decoded = self.peers["bitsandbytes", n, k]

        def call(i: int) -> Any:
            return matmul_4bit(x, copies[i % len(copies)].t(), quant_state=state)

        nbytes = copies[0].nbytes + state.absmax.nbytes
        record = self._record(n, k, x, "bitsandbytes nf4", "bitsandbytes", nbytes)
        return Graph(record, call, max(LEAST_CALLS, len(copies)), x.float() @ decoded.float().T)

    def _copying(self) -> Graph:
        """Device to device; bytes read and written. Times begin anew."""
        if self.copy_graph is None:
            source = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            record = self.record(0, 0, 0, "copy", "copy", 2 * PROBE_BYTES)
            self.copy_graph = Graph(record, lambda i: target.copy_(source), 2)
        self.copy_graph.record.times = []
        return self.copy_graph
