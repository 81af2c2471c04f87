"""S3: one hand-written block size for all k-quants; tests that skipped; masks rebuilt in every layer of every step.

candle launched its CUDA dequantise kernels for k-quants with one block size of 32, written by hand beside them and
right for one of the formats: the others decoded a part of each block.  Tests of the CUDA path existed, and skipped
without a word where no GPU was.  And its models built the causal mask on the host, and copied it to the GPU, in every
layer of every decode step.

Here launch numbers are computed with the kernel from the format's declaration and its layout, plans hold none, and the
simulated GPU finds a result that was left unwritten.  It runs the tests that need a GPU where there is none.  Masks are
made once, at load, and a step of one token copies nothing from the host.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import SimulationError
from qcompiler.inspect.checks import copied_bytes, recomputed_per_call
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.geometry import Geometry
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.plan import DeviceSlot, Launch, Plan
from qcompiler.runtime import reset_simulated_gpu
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend
from qcompiler.runtime.backends.sim import SimBackend, SimKernel

K_QUANTS = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K")
ROWS, COLS = 40, 512
LAYOUT = "cuda_t16_v1"


# --- geometry --------------------------------------------------------------------------------------------------------


def operand(name: str, access: Any, *shape: int, dtype: Any = "f32", **more: Any) -> Operand:
    strides = () if "format" in more else tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides, **more)


def kernels(kind: str) -> tuple[KernelSpec, KernelSpec]:
    """A product with one row of x, and the decoded rows themselves."""
    ref = FormatRef(name=kind, params=dict(formats.get(kind).params))
    w, table = (operand("w", "r", ROWS, COLS, format=ref, layout=layout) for layout in (LAYOUT, "canonical"))
    product = LinearKernel(m=1, n=ROWS, k=COLS, m_class="1", has_bias=False)
    decoded = EmbeddingKernel(count=ROWS, rows=ROWS, cols=COLS)
    x, y = operand("x", "r", 1, COLS), operand("y", "w", 1, ROWS)
    ids, rows = operand("ids", "r", ROWS, dtype="i64"), operand("out", "w", ROWS, COLS)
    return (
        KernelSpec(name=f"product_{kind}", symbols=(), operands=(x, w, y), body=product),
        KernelSpec(name=f"decode_{kind}", symbols=(), operands=(ids, table, rows), body=decoded),
    )


PLAN = Plan(
    devices=(DeviceSlot(name="gpu", kind="cuda"),), streams=(), events=(), arenas=(), buffers=(),
    kernels=tuple(spec for kind in K_QUANTS for spec in kernels(kind)), entries=(),
)  # fmt: skip


def anew() -> tuple[Backend, dict[str, Any]]:
    """A simulated GPU that has found nothing yet, with the kernels."""
    reset_simulated_gpu("sim:0")
    backend = registry.backend("sim:0", "sm_80")
    return backend, dict(backend.load(PLAN, backend.build(PLAN)))


def launched(kernel: str, arrays: list[np.ndarray], out: np.ndarray, threads: int | None = None) -> str:
    """Runs a kernel on a GPU that has found nothing; `out` is what it then holds. Returns the finding, or "".

    `threads` is a block size by hand. A finding stays with its GPU: nothing can be read from it any more.
    """
    backend, loaded = anew()
    chosen = loaded[kernel] if threads is None else forced(loaded[kernel], threads)
    stream = backend.stream("seed")
    memory = [backend.allocate(array.nbytes) for array in (*arrays, out)]
    for each, array in zip(memory, arrays, strict=False):
        backend.upload(stream, each.address, array.ctypes.data, array.nbytes)
    backend.zero(stream, memory[-1].address, out.nbytes)
    backend.synchronize(stream)
    try:
        backend.launch(stream, chosen, [each.address for each in memory], [])
        backend.synchronize(stream)
    except SimulationError as error:
        reset_simulated_gpu("sim:0")
        return error.finding
    backend.download(stream, out.ctypes.data, memory[-1].address, out.nbytes)
    backend.synchronize(stream)
    return ""


def forced(kernel: SimKernel, threads: int) -> SimKernel:
    """The kernel with a block size by hand."""
    geometry = dataclasses.replace(kernel.geometry, block=(threads, 1, 1))
    return SimKernel(kernel.spec, kernel.function, geometry, kernel.checked)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_a_block_size_by_hand_decodes_a_part_and_is_found(kind: str) -> None:
    fmt = formats.get(kind)
    w = fmt.encode(np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32))
    x = np.random.default_rng(1).standard_normal((1, COLS)).astype(np.float32)
    decoded, tiles = fmt.decode(w), layouts.get(LAYOUT).pack(fmt, "f32", ROWS, COLS, w.data)
    ids, out, y = np.arange(ROWS), np.zeros((ROWS, COLS), np.float32), np.zeros((1, ROWS), np.float32)

    assert launched(f"decode_{kind}", [ids, w.data], out) == ""
    assert np.array_equal(out, decoded)
    assert launched(f"product_{kind}", [x, tiles], y) == ""
    assert np.allclose(y, x @ decoded.T, rtol=0, atol=1e-4)

    assert launched(f"decode_{kind}", [ids, w.data], out, threads=32) == "unwritten-output"
    assert launched(f"product_{kind}", [x, tiles], y, threads=32) == "uninitialised-read"


def test_no_plan_and_no_step_holds_a_launch_number() -> None:
    assert Launch.__struct_fields__ == ("kernel", "stream", "operands")
    fields = {name for body in (KernelSpec, LinearKernel, EmbeddingKernel, Operand) for name in body.__struct_fields__}
    assert not {name for name in fields if any(word in name for word in ("grid", "block", "thread", "warp", "shared"))}


def test_geometry_follows_the_declaration() -> None:
    """A table of values gets room in shared memory; blocks that straddle rows go one tile at a time."""

    def geometry(kind: str, cols: int) -> Geometry:
        fmt = formats.get(kind)
        x, y = operand("x", "r", 1, cols), operand("y", "w", 1, ROWS)
        ref = FormatRef(name=kind, params=dict(fmt.params))
        w = operand("w", "r", ROWS, cols, format=ref, layout=LAYOUT)
        body = LinearKernel(m=1, n=ROWS, k=cols, m_class="1", has_bias=False)
        return emit.geometry(KernelSpec(name="product", symbols=(), operands=(x, w, y), body=body), "sm_80")

    assert formats.get("nf4").declaration.table is not None and formats.get("q4_K").declaration.table is None
    assert geometry("nf4", 4096).shared > geometry("q4_K", 4096).shared
    assert geometry("nf4", 4096).block == geometry("nf4", 4096 + 64).block
    assert geometry("nf4", 4096 + 16) != geometry(
        "nf4", 4096 + 64
    )  # blocks of 64 that begin in one row, end in the next


# --- skips -----------------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
FOR_MACHINES_WITHOUT = {
    "tests/api/test_devices.py", "tests/gpu/test_check.py", "tests/gpu/test_gpu_first.py",
    "tests/gpu/test_gpu_profile.py",
}  # fmt: skip
"""What can only be seen where there is no GPU."""


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in names:
                yield node


def parsed(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """The files of the suite that hold one of the words."""
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            yield f"tests/{path.relative_to(TESTS)}", ast.parse(text)


def test_no_test_skips_without_a_reason_or_for_want_of_a_gpu() -> None:
    seen = 0
    for name, tree in parsed("skip", "xfail"):
        for call in calls(tree, "skip", "skipif", "importorskip", "xfail"):
            seen += 1
            text = ast.unparse(call)
            has_reason = call.args if "skipif" not in text else any(each.arg == "reason" for each in call.keywords)
            assert has_reason, f"{name}:{call.lineno} skips without a reason: {text}"
            for_a_gpu = any(word in text for word in ("is_available", "device_count", "cuda:0", "a GPU"))
            assert not for_a_gpu or name in FOR_MACHINES_WITHOUT, f"{name}:{call.lineno} skips without a GPU: {text}"
        decorators = [d for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for d in f.decorator_list]
        assert not [d for d in decorators if ast.unparse(d).endswith("mark.skip")], name
    assert seen > 10


def test_whatever_runs_on_a_gpu_runs_on_the_simulated_one() -> None:
    """Every list of devices that may hold cuda:0 holds sim:0 whatever the machine has."""
    seen = 0
    for name, tree in parsed("DEVICES = ", "GPUS = "):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] in (["DEVICES"], ["GPUS"]):
                seen += 1
                assert isinstance(node.value, ast.List) and "sim:0" in ast.unparse(node.value), name
                always = [each for each in node.value.elts if not isinstance(each, ast.Starred)]
                assert "sim:0" in "".join(map(ast.unparse, always)), name
    assert seen >= 6


def test_skips_are_shown_in_every_summary(pytestconfig: pytest.Config) -> None:
    assert "a" in pytestconfig.getoption("reportchars")


# --- masks -----------------------------------------------------------------------------------------------------------

LENGTH, LAYERS = 24, 2


class Layer(nn.Module):
    """Attention over a cache, with the mask made where it is used, as candle's models made it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 64)
        self.register_buffer("keys", torch.zeros(1, 2, LENGTH, 8))
        self.register_buffer("values", torch.zeros(1, 2, LENGTH, 8))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).split([32, 16, 16], -1)
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        self.keys.index_copy_(2, at, k)
        self.values.index_copy_(2, at, v)
        mask = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))[at]
        out = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, mask, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, at)
        return x


def test_masks_by_hand_are_an_upload_in_every_layer_of_every_step(
    rig: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the mask of each layer and step on the host, and from there to the device."""
    device, uploads = rig("sim:0"), counted(monkeypatch, "upload")
    steps = 3
    for _ in range(steps):
        for _ in range(LAYERS):
            mask = device.put(np.tril(np.ones((8, 8), np.float32)))
            del mask
    assert len(uploads) == steps * LAYERS


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    made: list[int] = []
    method = getattr(SimBackend, name)

    def watched(self: SimBackend, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(SimBackend, name, watched)
    return made


def decoder(weights: str | None = None) -> tuple[nn.Module, qc.Program]:
    torch.manual_seed(0)
    model, size = Decoder().eval(), ("s", 1, 9)
    return model, qc.qcompile(
        model, (torch.randn(1, 5, 32), torch.arange(5)), dynamic_shapes={"x": {1: size}, "at": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 9)})], device="sim:0", weights=weights,
    )  # fmt: skip


def test_no_entry_point_makes_or_reads_a_mask() -> None:
    _, program = decoder("none")
    assert recomputed_per_call(program.plan) == []
    assert copied_bytes(program.plan) == {"decode": {}, "prefill": {}}
    masks = [kernel.body.mask for kernel in program.plan.kernels if isinstance(kernel.body, AttentionKernel)]
    assert masks and set(masks) == {"none"}


@pytest.mark.slow
def test_a_decode_step_copies_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, program = decoder()
    prompt = torch.randn(1, 7, 32)
    assert torch.allclose(program(prompt, torch.arange(7)), model(prompt, torch.arange(7)), atol=1e-5)
    x = torch.randn(1, 1, 32)
    arrays = [(program.array(x), program.array(torch.tensor([position]))) for position in (7, 8, 9)]
    graph = program.capture(*arrays[0])
    assert "copy" not in graph.nodes
    made = {name: counted(monkeypatch, name) for name in ("upload", "download", "allocate")}
    results = [graph.replay(*each) for each in arrays]
    assert {name: len(each) for name, each in made.items() if name != "allocate"} == {"upload": 0, "download": 0}
    for position, result in zip((7, 8, 9), results, strict=True):
        with torch.no_grad():
            wanted = model(x, torch.tensor([position]))
        assert np.allclose(result.numpy(), wanted.numpy(), atol=1e-5)
