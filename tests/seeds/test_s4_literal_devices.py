"""S4: the gate of a quantised mixture of experts, dequantised to a literal CPU device.

candle's quantised Mixtral keeps the gate of its experts in F16 or F32.  The code that loads a quantised model turned
such a tensor into floats on the CPU, a device written out in the code, while the rest of the layer lay on the GPU: the
first token ended in a device mismatch.

Here no operator has a device until the pass `assign-devices` gives it one, from what the user named; an operand that
lies elsewhere is refused by that pass, by `assign-streams`, and by the verifier of plans, at load as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from by_path import load
from torch import nn
from xdsl.dialects.builtin import StringAttr

import qcompiler as qc
from qcompiler.errors import DeviceAssignmentError, PlanError, ScheduleError, SimulationError
from qcompiler.ir import qc as ops
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import entry_funcs, path_of
from qcompiler.ir.text import parse_module
from qcompiler.passes.assign_devices import check_devices
from qcompiler.plan.plan import Arena, DeviceSlot, Launch, Plan, Select
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime import LoadedProgram

zoo = load("tests/models/zoo.py")

RECIPE = qc.QuantConfig("nf4", rules={"*.gate": None}, promise_bits=None)


class Experts(nn.Module):
    """A gate, and experts of which it weighs the two best for each token."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        least = weights.topk(2, dim=-1).values[..., -1:]
        weights = torch.where(weights >= least, weights, 0.0)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mixture() -> Any:
    torch.manual_seed(0)
    return zoo.Case(Mixture(), {"x": torch.randn(5, 64)}, {"x": torch.randn(13, 64)}, {"x": {0: ("n", 1, 20)}})


MODELS: dict[str, Callable[[], Any]] = {"mixture": mixture, "mixtral": zoo.DECODERS["mixtral"].case}
EACH = pytest.mark.parametrize("name", ["mixture", pytest.param("mixtral", marks=pytest.mark.slow)])


@cache
def compiled(name: str, weights: str | None = None) -> tuple[Any, qc.Program]:
    """Two layers of four experts, two for each token, on sim:1; experts and projections nf4, gates F32."""
    case = MODELS[name]()
    program = qc.qcompile(
        case.model, kwargs=case.example, quant=RECIPE, dynamic_shapes=case.dynamic_shapes, device="sim:1",
        weights=weights,
    )  # fmt: skip
    return case, program


def gates(program: qc.Program) -> list[Any]:
    return [row for row in program.ledger if row.parameters[0].endswith("gate.weight")]


# --- the failure -----------------------------------------------------------------------------------------------------


def test_a_gate_on_the_host_cannot_meet_its_input_on_the_device(rig: Callable[[str], Any]) -> None:
    """As it was: everything on the GPU but one operand, whose address the kernel takes all the same."""
    gpu = rig("sim:1")
    x, y, gate = gpu.put(np.ones(64)), gpu.empty("y"), np.ones(64, np.float32)
    stream = gpu.backend.stream("layer")
    with pytest.raises(SimulationError, match=r"operand 'w' of kernel 'use' uses the address .* no device memory"):
        gpu.backend.launch(stream, gpu.kernels["use"], [x.address, gate.ctypes.data, y.address], [])


# --- no operator names a device --------------------------------------------------------------------------------------


@EACH
def test_no_operator_has_a_device_before_it_is_assigned_and_all_have_the_users_afterwards(name: str) -> None:
    _, program = compiled(name, "none")
    assert all(row.format == "" and row.dtype == "float32" for row in gates(program)) and len(gates(program)) == 2
    experts = [row for row in program.ledger if "experts" in row.parameters[0] and row.counts]
    assert experts and all(row.format.startswith("nf4") for row in experts)
    before = program.stages[: program.stages.index("assign-devices")]
    for stage in before[before.index("import") :]:
        text = program.ir(stage)
        assert not [word for word in ("qc.device", '"cpu"', "cuda", "sim:") if word in text], stage
    assert [(slot.name, slot.kind) for slot in program.plan.devices] == [("cuda0", "cuda")]
    assert {arena.device for arena in program.plan.arenas} == {"cuda0"}
    assert {stream.device for stream in program.plan.streams} == {"cuda0"}


@EACH
def test_assigning_refuses_a_gate_on_the_cpu(name: str) -> None:
    """The text after the pass, with the device of one gate's weight written over: candle's line, in our words."""
    _, program = compiled(name, "none")
    context = QCContext.default(devices=("cuda:0",))
    module = parse_module(program.ir("assign-devices"), context)
    (entry,) = entry_funcs(module)
    check_devices(entry, "cuda:0")
    linears = [op for op in entry.body.block.ops if isinstance(op, ops.LinearOp) and path_of(op).endswith("gate")]
    assert len(linears) == 2
    linears[0].w.owner.attributes["qc.device"] = StringAttr("cpu")  # type: ignore[union-attr]
    with pytest.raises(DeviceAssignmentError, match=r"layers\.0\.mlp\.gate' runs on cuda:0 but reads a value on cpu"):
        check_devices(entry, "cuda:0")


def gate_on_the_cpu(plan: Plan) -> tuple[Plan, str]:
    """The plan with the buffer of one gate's weight moved to an arena of the CPU."""
    weights = {weight.offset: weight.name for weight in plan.weights}
    kinds = {arena.name: arena.kind for arena in plan.arenas}
    gate = next(
        buffer
        for buffer in plan.buffers
        if kinds[buffer.arena] == "constants" and weights[buffer.offset].endswith("layers.1.mlp.gate.weight")
    )
    constants = next(arena for arena in plan.arenas if arena.kind == "constants")
    cpu = Arena(name="constants.cpu", device="cpu", kind="constants", nbytes=constants.nbytes)
    buffers = [msgspec.structs.replace(b, arena=cpu.name) if b is gate else b for b in plan.buffers]
    moved = msgspec.structs.replace(
        plan,
        devices=(*plan.devices, DeviceSlot(name="cpu", kind="cpu")),
        arenas=(*plan.arenas, cpu),
        buffers=tuple(buffers),
    )
    return moved, gate.name


@EACH
def test_the_verifier_refuses_a_plan_with_an_operand_on_the_cpu(name: str) -> None:
    _, program = compiled(name, "none")
    verify_plan(program.plan)
    moved, gate = gate_on_the_cpu(program.plan)
    readers = [
        step
        for step in moved.entries[0].steps
        if isinstance(step, Launch | Select) and gate in [view.buffer for view in step.operands]
    ]
    assert len(readers) == 1
    with pytest.raises(ScheduleError, match=gate) as caught:
        verify_plan(moved)
    assert caught.value.rule == "wrong-device"


@pytest.mark.slow
def test_a_quantised_mixtral_with_a_float_gate_runs_where_it_is_told(tmp_path: Path) -> None:
    case, program = compiled("mixtral")
    assert len(gates(program)) == 2
    with torch.no_grad():
        wanted = program.oracle(**case.inputs).logits
    got = program(**case.inputs)["logits"]
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert torch.equal(program.capture(**case.inputs).replay(**case.inputs)["logits"], got)
    moved, _ = gate_on_the_cpu(program.plan)
    with pytest.raises(PlanError, match="runs on one kind"):
        LoadedProgram.from_image(dataclasses.replace(program.image, plan=moved), "sim:1")
