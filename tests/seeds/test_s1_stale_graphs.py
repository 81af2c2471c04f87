"""S1: a dequantise kernel that escaped CUDA-graph capture, and replays that read stale weights.

In bitsandbytes the kernels that dequantise 4-bit weights were launched without naming a stream, so they went to the
default one.  While a caller captured a CUDA graph on another stream they ran at once and left no node in the graph.
The graph held the products only; on replay these read whatever the shared buffer of decoded weights held last, and the
model's text was nonsense, without any error.  Its int8 path with outliers could not be captured at all: which columns
are outliers was decided on the host.

Here a launch without a stream cannot be written, a graph that lacks a node is refused when it is sealed, and every
kind of quantised linear is replayed three times with fresh inputs and compared with eager calls to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import CaptureRuleError, PlanError, ScheduleError
from qcompiler.plan.plan import Copy, Launch, Select, from_json, to_json
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime.backends.base import Backend, Kernel, Stream
from qcompiler.runtime.executor import PlanExecutor

# --- the failure -----------------------------------------------------------------------------------------------------


def two_layers(rig: Any, decoding: Stream, computing: Stream, x: Any, y: Any, h: Any, w: Any, layers: Any) -> None:
    """Two quantised layers, y = ((x * w0) * w1), that decode into one buffer, as an allocator's pool gives it out."""
    for (codes, scale), source, target in zip(layers, (x, h), (h, y), strict=True):
        rig.run(decoding, "scale", codes, scale, w)
        rig.run(computing, "use", source, w, target)


def test_without_the_stream_a_replay_reads_stale_weights(rig: Callable[[str], Any], device: str) -> None:
    """As it was: captured on one stream, decoded on the default one; nothing complains, and the answer is wrong."""
    gpu = rig(device)
    layers = [(gpu.put(np.full(64, codes)), gpu.put([scale])) for codes, scale in ((3, 2.0), (5, 7.0))]
    x, y, h, w = gpu.put(np.ones(64)), gpu.empty("y"), gpu.empty("h"), gpu.empty("w")
    stream, legacy = gpu.backend.stream("captured"), gpu.backend.legacy_stream()
    two_layers(gpu, stream, stream, x, y, h, w, layers)
    assert gpu.read(y).tolist() == [3 * 2 * 5 * 7] * 64  # eager, all of it on one stream

    gpu.backend.begin_capture(stream, "relaxed")
    two_layers(gpu, legacy, stream, x, y, h, w, layers)
    graph = gpu.backend.end_capture(stream)
    gpu.backend.synchronize()
    assert graph.shape.nodes == {"kernel": 2}  # of four
    graph.launch(stream)
    assert gpu.read(y).tolist() == [(5 * 7) ** 2] * 64  # both layers computed with the last one's weight

    gpu.backend.begin_capture(stream)
    two_layers(gpu, stream, stream, x, y, h, w, layers)
    graph = gpu.backend.end_capture(stream)
    graph.launch(stream)
    assert graph.shape.nodes == {"kernel": 4} and gpu.read(y).tolist() == [210] * 64


# --- it cannot be written --------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.b(self.a(x)))


@cache
def small() -> qc.Program:
    torch.manual_seed(0)
    return qc.qcompile(Small(), (torch.randn(3, 64),), quant="nf4", device="sim:0")


def test_no_layer_has_a_launch_without_a_stream(rig: Callable[[str], Any]) -> None:
    """Neither the record of a step, nor a plan's text, nor a plan, nor the call of a device."""
    with pytest.raises(TypeError, match="stream"):
        Launch(kernel="scale", operands=())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="stream"):
        Copy(source=None, target=None)  # type: ignore[call-arg,arg-type]
    written = json.loads(to_json(small().plan))
    del written["entries"][0]["steps"][0]["stream"]
    with pytest.raises(PlanError, match="missing required field `stream`"):
        from_json(json.dumps(written))
    for step in range(len(written["entries"][0]["steps"])):
        written = json.loads(to_json(small().plan))
        written["entries"][0]["steps"][step]["stream"] = ""
        with pytest.raises(ScheduleError) as caught:
            verify_plan(from_json(json.dumps(written)))
        assert caught.value.rule == "no-stream"
    gpu = rig("sim:0")
    with pytest.raises(TypeError, match="stream"):
        gpu.backend.launch(kernel=gpu.kernels["use"], operands=[], symbols=[])
    with pytest.raises(TypeError, match="stream"):
        gpu.backend.copy(target=0, source=0, nbytes=4)


def test_work_that_escapes_a_capture_is_found_when_the_graph_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is made to do what bitsandbytes did: one of its launches goes to the default stream."""
    run = small().run
    backend = type(run.slots["cuda0"].backend)
    launch, count = backend.launch, [0]

    def escaping(self: Backend, stream: Stream, kernel: Kernel, *args: Any, **kwargs: Any) -> None:
        count[0] += stream.is_capturing
        launch(self, self.legacy_stream() if stream.is_capturing and count[0] == 1 else stream, kernel, *args, **kwargs)

    monkeypatch.setattr(backend, "launch", escaping)
    with pytest.raises(CaptureRuleError, match=r"holds 1 kernel nodes, its steps are 2 kernel nodes: work escaped"):
        run.capture(torch.randn(3, 64), mode="relaxed")
    monkeypatch.undo()
    x = torch.randn(3, 64)
    assert torch.equal(run.capture(x).replay(x), run(x))


def test_a_step_that_is_left_out_of_the_graph_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on another stream but not at all: work that the host skipped while it recorded."""
    run = small().run
    issue = PlanExecutor.run

    def shorter(self: PlanExecutor, context: Any, arenas: Any, binding: Any) -> None:
        if any(queue.stream.is_capturing for queue in self.queues):
            steps = self.prepare(binding).steps
            last = steps.pop()
            issue(self, context, arenas, binding)
            steps.append(last)
        else:
            issue(self, context, arenas, binding)

    monkeypatch.setattr(PlanExecutor, "run", shorter)
    with pytest.raises(CaptureRuleError, match="work escaped the capture"):
        run.capture(torch.randn(3, 64))


# --- and every kind of weight is replayed ----------------------------------------------------------------------------


class Formats(nn.Module):
    """One linear layer per format, each a result of its own, and their sum through another."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(256, 24) for name in names})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: layer(x) for name, layer in self.layers.items()}


def fresh(seed: int, rows: int) -> torch.Tensor:
    """Values with outliers (|x| > 6) in columns, and of a number, that differ from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 256, generator=generator)
    columns = torch.randperm(256, generator=generator)[: seed % 3 * 2]
    x[:, columns] *= 40
    return x


CASES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "four-bit": (("nf4", "fp4", "q4_K"), None),
    "int8-with-outliers": (("int8", "llm_int8"), "llm_int8:6.0"),
}


@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["four-bit", "int8-with-outliers"])
def test_the_third_replay_with_fresh_inputs_equals_eager_to_the_bit(case: str, rows: int, device: str) -> None:
    names, activations = CASES[case]
    torch.manual_seed(0)
    recipe = qc.QuantConfig("nf4", rules={f"layers.{name}": name for name in names}, activations=activations,
                            promise_bits=None)  # fmt: skip
    program = qc.qcompile(Formats(names), (fresh(0, rows),), quant=recipe, device=device)
    assert {row.format.partition(":")[0] for row in program.ledger if row.counts} == set(names)
    graph = program.capture(fresh(9, rows))
    steps = [step for step in program.plan.entries[0].steps if isinstance(step, Launch | Select)]
    assert graph.nodes["kernel"] == len(steps)
    seen = []
    for seed in (1, 2, 3):
        x = fresh(seed, rows)
        replayed, eager = graph.replay(x), program(x)
        with torch.no_grad():
            wanted = program.oracle(x)
        for name in names:
            assert torch.equal(replayed[name], eager[name]), f"{name}, replay {seed}"
            assert (eager[name] - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), f"{name}, replay {seed}"
        seen.append(replayed[names[0]].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    if activations is not None:
        assert len({int((fresh(seed, rows).abs() >= 6).any(0).sum()) for seed in (1, 2, 3)}) == 3
