"""S5: `.to()` moved the codes of a quantised model and left a table of 16 entries behind.

A Flux transformer in diffusers, quantised to 4 bits by bitsandbytes, was used on cuda:1.  A quantised weight was a
tensor of codes with a bundle of others beside it; `.to("cuda:1")` moved the codes, and the table of 16 values that they
stand for stayed on cuda:0.  The kernel on cuda:1 then read memory of another GPU.

Here a quantised tensor is one value: one buffer in memory, one entry of the file, one operand of a kernel.  What code
tables kernels need is part of their text.  A program moves as a whole or not at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import SimulationError
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.sim.device import machine

FIRST, SECOND = "sim:6", "sim:7"
"""Two devices that no other test of the suite uses, so that what lies there is this file's."""


def held(device: str) -> int:
    """Bytes in use on a device, once the collector has been through."""
    gc.collect()
    with machine().entry():
        index = int(device.partition(":")[2])
        return sum(each.nbytes for each in machine()._allocations.values() if each.device == index)


# --- the failure -----------------------------------------------------------------------------------------------------


@dataclass
class Bundle:
    """A quantised weight as several tensors, and a `.to()` that forgets one."""

    gpu: Any
    codes: Any
    table: Any

    def to(self, gpu: Any) -> Bundle:
        stream, codes = gpu.backend.stream("move"), gpu.backend.allocate(self.codes.nbytes, label="codes")
        gpu.backend.copy(stream, codes.address, self.codes.address, self.codes.nbytes)
        gpu.backend.synchronize(stream)
        return Bundle(gpu, codes, self.table)

    def decode(self) -> np.ndarray:
        out = self.gpu.empty("out")
        self.gpu.run(self.gpu.backend.stream("decode"), "look", self.codes, self.table, out)
        return self.gpu.read(out)


def test_a_bundle_leaves_its_table_behind(rig: Callable[[str], Any]) -> None:
    first, second = rig(FIRST), rig(SECOND)
    codes, table = np.arange(64) % 16, np.linspace(-1, 1, 16, dtype=np.float32)
    weight = Bundle(first, first.put(codes, np.int64, "codes"), first.put(table, label="table"))
    assert np.array_equal(weight.decode(), table[codes])
    moved = weight.to(second)
    with pytest.raises(SimulationError, match=f"operand 'table' of kernel 'look' lies in 'table' of {FIRST}") as caught:
        moved.decode()
    assert caught.value.finding == "wrong-device"


# --- one value -------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 48), nn.Linear(48, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@cache
def layers(device: str) -> qc.Program:
    torch.manual_seed(0)
    quant = qc.QuantConfig("nf4:double_quant=True", rules={"down": "fp4"}, promise_bits=None)
    return qc.qcompile(Layers(), (torch.randn(3, 128),), quant=quant, device=device)


def test_a_quantised_tensor_is_one_operand_one_buffer_one_entry() -> None:
    """Codes, absmax, nested absmax, offset and table: one value in the IR, the plan and the file."""
    program = layers(FIRST)
    linears = [kernel for kernel in program.plan.kernels if isinstance(kernel.body, LinearKernel)]
    for kernel in linears:
        body = kernel.body
        assert isinstance(body, LinearKernel) and body.has_bias
        extras = 0 if body.epilogue is None else len(body.epilogue.inputs) - 1
        assert len(kernel.operands) == 4 + extras  # x, w, bias, out
        assert kernel.operands[1].format is not None
    names = [weight.name for weight in program.plan.weights]
    assert sorted(names) == ["down.bias", "down.weight", "up.bias", "up.weight"]
    for weight in program.plan.weights:
        if weight.format is not None:
            fmt = formats.get(weight.format.name, **weight.format.params)
            assert weight.nbytes >= fmt.nbytes(*weight.shape)
    codes = [" ".join(f"{value!r}" for value in formats.get(name).declaration.table[:3]) for name in ("nf4", "fp4")]
    assert codes and "__constant__" not in program.ir("emit-kernels")  # no table lives in a module of one device


def moves_whole(program: qc.Program, path: Path, call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program on FIRST, moved to SECOND, and loaded there from a file: equal bits; nothing on FIRST afterwards."""
    program.save(path)
    want = call(program.run)
    captured = call(program.run.capture)
    assert held(FIRST) > 0 and held(SECOND) == 0
    moved = program.run.to(SECOND)
    on_second = held(SECOND)
    del captured
    program._loaded = None  # the first one is dropped
    assert held(FIRST) == 0 and on_second > 0
    used: set[str] = set()
    for name in ("allocate", "load", "upload", "copy", "launch"):
        method = getattr(SimBackend, name)

        def watched(self: SimBackend, *args: Any, method: Any = method, **kwargs: Any) -> Any:
            used.add(self.device)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(SimBackend, name, watched)
    started = qc.load(path, device=SECOND)
    for run in (moved, started):
        assert torch.equal(call(run), want)
        assert run.devices == (SECOND,)
    assert used == {SECOND} and held(FIRST) == 0


def test_a_program_moves_whole_and_starts_on_the_second_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    program = layers(FIRST)
    graph = program.capture(x)
    assert torch.equal(graph.replay(x), program(x))
    del graph
    moves_whole(program, tmp_path / "layers.qca", lambda run: answer(run, x), monkeypatch)


def answer(run: Any, *args: Any, **kwargs: Any) -> Any:
    """A run's first result; of a bound `capture`, the replay's."""
    result = run(*args, **kwargs)
    result = result.replay(*args, **kwargs) if hasattr(result, "replay") else result
    return result if isinstance(result, torch.Tensor) else next(iter(result.values()))


@pytest.mark.slow
def test_a_flux_transformer_moves_whole_and_starts_on_the_second_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    image, text = 16, 6
    given = {
        "hidden_states": torch.randn(2, image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, text, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.rand(2, generator=generator),
        "img_ids": torch.randint(0, 9, (image, 3), generator=generator).float(),
        "txt_ids": torch.zeros(text, 3),
    }
    program = qc.qcompile(model, kwargs=given, quant="nf4", device=FIRST)
    assert any(row.format.startswith("nf4") for row in program.ledger)
    with torch.no_grad():
        wanted = program.oracle(**given).sample
    assert (answer(program, **given) - wanted).norm() <= 1e-5 * wanted.norm()
    moves_whole(program, tmp_path / "flux.qca", lambda run: answer(run, **given), monkeypatch)
