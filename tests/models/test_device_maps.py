"""A model over several devices by `device={path: device}`: what lies where, what crosses, and the same answers."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.errors import ArgumentError, DeviceUnavailableError, ScheduleError, TargetMismatchError
from qcompiler.inspect.checks import copied_bytes
from qcompiler.ir.rt_plan import plan_from_rt, rt_from_plan
from qcompiler.plan.moved import moved_of
from qcompiler.plan.plan import Copy, Launch, Plan, Select, from_json, to_json
from qcompiler.plan.verify import verify_plan
from qcompiler.plan.weights import NoBytes, StoredTensor
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.sim.device import machine

zoo = load("tests/models/zoo.py")


class Block(nn.Module):
    """Counts its calls, runs a linear layer, and adds a table of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        table = torch.cos(torch.arange(x.shape[1] * x.shape[2]).reshape(x.shape[1:]) * 0.1)
        return torch.relu(self.linear(x) + table) + self.calls


class Tower(nn.Module):
    """Two blocks between an embedding and a head with the same weight; `side` needs nothing of the first block."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.first, self.second, self.side = Block(width), Block(width), nn.Linear(width, width)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(ids)
        return {"logits": self.head(self.second(self.first(x))), "side": self.side(x).transpose(1, 2)}


IDS = torch.arange(14).reshape(2, 7) % 40
DIMS = {"ids": {0: ("b", 2, 4)}}
MAP = {"second": "sim:1", "head": "sim:1", "side": "sim:1", "": "sim:0"}


@cache
def tower(*pairs: tuple[str, str]) -> qc.Program:
    torch.manual_seed(0)
    model = zoo.scaled(Tower(), 2.0)
    device = dict(pairs) or "sim:0"
    return qc.qcompile(model, (IDS,), quant="nf4", dynamic_shapes=DIMS, device=device)


def split() -> qc.Program:
    return tower(*MAP.items())


def crossing(plan: Plan) -> dict[str, list[Copy]]:
    """By entry point (and init), the copies from one device to another."""
    device = {arena.name: arena.device for arena in plan.arenas}
    where = {buffer.name: device[buffer.arena] for buffer in plan.buffers}
    entries = (*plan.entries, *((plan.init,) if plan.init is not None else ()))
    found: dict[str, list[Copy]] = {}
    for entry in entries:
        copies = [step for step in entry.steps if isinstance(step, Copy)]
        found[entry.name] = [step for step in copies if where[step.source.buffer] != where[step.target.buffer]]
    return found


def weights_on(plan: Plan) -> dict[str, list[str]]:
    """The names of the weights that each device slot holds."""
    device = {arena.name: arena.device for arena in plan.arenas}
    found: dict[str, list[str]] = {slot.name: [] for slot in plan.devices}
    for buffer in plan.buffers:
        if buffer.weight is not None:
            found[device[buffer.arena]].append(buffer.weight)
    return found


def assert_every_launch_is_at_home(plan: Plan) -> None:
    device = {arena.name: arena.device for arena in plan.arenas}
    where = {buffer.name: device[buffer.arena] for buffer in plan.buffers}
    streams = {stream.name: stream.device for stream in plan.streams}
    for entry in plan.entries:
        for step in entry.steps:
            if isinstance(step, Launch | Select):
                assert {where[view.buffer] for view in step.operands} == {streams[step.stream]}, step


def held(device: int) -> int:
    """Bytes of a simulated device that are in use."""
    gc.collect()
    with machine().entry():
        return sum(each.nbytes for each in machine()._allocations.values() if each.device == device)


# --- what lies where -------------------------------------------------------------------------------------------------


def test_a_model_over_two_devices_gives_the_bits_of_one() -> None:
    one, two = tower().session(), split().session()
    graph = split().session().capture(IDS)
    for turn in range(3):
        ids = (IDS + turn) % 40
        want, got, replayed = one(ids), two(ids), graph.replay(ids)
        for name, value in want.items():
            assert torch.equal(got[name], value) and torch.equal(replayed[name], value), name
    assert_every_launch_is_at_home(split().plan)


def test_each_weight_lies_only_where_it_is_used() -> None:
    on = weights_on(split().plan)
    assert on["cuda0"] == ["words.weight", "first.linear.weight", "first.linear.bias"]
    there = {f"{module}.{name}" for module in ("second.linear", "side") for name in ("weight", "bias")}
    assert set(on["cuda1"]) == {"words.weight", *there}
    sizes = {arena.device: arena.nbytes for arena in split().plan.arenas if arena.kind == "constants"}
    one = next(arena.nbytes for arena in tower().plan.arenas if arena.kind == "constants")
    tied = next(weight.nbytes for weight in split().plan.weights if weight.name == "words.weight")
    assert 0 < sum(sizes.values()) - one - tied < 1024  # the tied weight twice, all others once, and alignment
    assert split().image.weights.nbytes <= one


def test_what_crosses_are_values_of_the_call_and_tables_cross_at_load() -> None:
    copies = crossing(split().plan)
    hidden, logits = ("b", 7, 64), ("b", 7, 40)
    shapes = [step.source.shape for step in copies["main"]]
    assert sorted(shapes) == [logits, hidden, hidden, hidden]  # words -> side, first -> second, and two results home
    assert len(copies["init"]) == 1
    assert {arena.device for arena in split().plan.arenas if arena.kind == "init"} == {"cuda0", "cuda1"}


def test_states_lie_with_their_layers_and_no_call_copies_them() -> None:
    states = {arena.name: arena.device for arena in split().plan.arenas if arena.kind == "state"}
    assert sorted(states.values()) == ["cuda0", "cuda1"]
    assert next(device for name, device in states.items() if "second" in name) == "cuda1"
    assert set(map(str, copied_bytes(split().plan).values())) == {"{}"}


def test_report_and_ledger_name_the_devices() -> None:
    text = str(split().report())
    assert "on cuda0 = sim:0, cuda1 = sim:1" in text
    assert "words.weight (+1 tied) on cuda0, cuda1" in text and "second.linear.weight on cuda1" in text
    assert "ops on cuda:1" in text
    rows = {row.parameters[0]: row.devices for row in split().ledger}
    assert rows["first.linear.weight"] == ("cuda0",) and rows["second.linear.weight"] == ("cuda1",)
    assert all(row.devices == () for row in tower().ledger)


def test_the_verifier_reads_the_names_of_gathered_weights() -> None:
    plan = split().plan
    verify_plan(plan)
    kinds = {arena.name: arena.kind for arena in plan.arenas}
    bias = next(b for b in plan.buffers if b.weight == "second.linear.bias")
    scratch = next(b for b in plan.buffers if kinds[b.arena] == "activations")
    for buffer, change, rule in (
        (bias, {"weight": "third.linear.bias"}, "unknown-weight"),
        (bias, {"weight": "second.linear.weight"}, "unknown-weight"),  # it is larger
        (bias, {"weight": None}, "unknown-weight"),  # the arena names its other weights
        (bias, {"offset": bias.offset + 64}, "misaligned-weight"),
        (scratch, {"weight": "second.linear.bias"}, "unknown-weight"),
    ):
        made = msgspec.structs.replace(buffer, **change)
        buffers = tuple(made if each is buffer else each for each in plan.buffers)
        with pytest.raises(ScheduleError) as caught:
            verify_plan(msgspec.structs.replace(plan, buffers=buffers))
        assert caught.value.rule == rule, change


def test_a_plan_over_two_devices_is_its_text() -> None:
    plan = split().plan
    specs = {kernel.name: kernel for kernel in plan.kernels}
    store = [
        StoredTensor(w.name, w.dtype, w.shape, NoBytes(w.nbytes), w.format, w.layout, w.parameters)
        for w in plan.weights
    ]
    assert plan_from_rt(rt_from_plan(plan), specs, store, moved_of(plan)) == plan
    assert from_json(to_json(plan)) == plan


# --- loading elsewhere -----------------------------------------------------------------------------------------------


def test_a_file_starts_on_two_other_devices_and_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = split()
    assert program.devices == ("sim:0", "sim:1") and program.device == "sim:0"
    for layout in ("target", "canonical"):
        program.save(tmp_path / f"{layout}.qca", layout=layout)
    touched: list[str] = []
    for name in ("allocate", "load", "launch", "upload"):
        method = getattr(SimBackend, name)

        def watched(self: SimBackend, *args: Any, method: Any = method, **kwargs: Any) -> Any:
            touched.append(self.device)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(SimBackend, name, watched)
    want = tower().session()(IDS)
    touched.clear()
    before = held(0)
    runs = [
        qc.load(tmp_path / "target.qca", device="sim:1"),
        qc.load(tmp_path / "canonical.qca", devices=("sim:2", "sim:1")),
        program.to("sim:1"),
    ]
    assert [run.devices for run in runs] == [("sim:1", "sim:2"), ("sim:2", "sim:1"), ("sim:1", "sim:2")]
    program.run.reset()
    for run in runs:
        run.reset()
        assert all(torch.equal(run(IDS)[name], value) for name, value in want.items() if name == "side")
        run.reset()
        assert torch.equal(run(IDS)["logits"], want["logits"])
    assert set(touched) == {"sim:1", "sim:2"} and held(0) == before


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ({"secund": "sim:1"}, ArgumentError, "names 'secund', which is no module of the model; did you mean 'second'"),
        ({"": "sim:0", "second": "cpu"}, TargetMismatchError, "has sim:0 and cpu; a program runs on .* one kind"),
        ({"": "sim:0", "second": "gpu"}, DeviceUnavailableError, "there is no device 'gpu'"),
        ({"": "sim:0", "second": "sim:8"}, DeviceUnavailableError, "sim:8 is not available .* last one is sim:7"),
        ({}, ArgumentError, "name a device, or map module paths to devices"),
    ],
)  # fmt: skip
def test_a_map_that_cannot_be_is_refused_with_a_way_out(device: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qc.qcompile(Tower(), (IDS,), device=device)


def test_devices_of_two_architectures_need_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "architecture", lambda device: "sm_80" if device == "sim:0" else "sm_75")
    with pytest.raises(TargetMismatchError, match=r"sim:0 is sm_80, sim:1 is sm_75.*targets=\['sm_75', 'sm_80'\]"):
        qc.qcompile(Tower(), (IDS,), device={"second": "sim:1", "": "sim:0"})


@pytest.mark.slow
def test_a_map_to_one_device_is_that_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = qc.qcompile(model, (torch.ones(2, 8),), device={"1": "cpu", "": "cpu"})
    assert program.devices == ("cpu",) and len(program.plan.devices) == 1


# --- models of transformers ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe"])
def test_a_model_of_transformers_over_three_devices_gives_the_bits_of_one(name: str) -> None:
    case = zoo.DECODERS[name].case(masked=True)
    spread = {"model.layers.0.self_attn": "sim:2", "model.layers.1": "sim:1", "": "sim:0"}
    one, two = (
        qc.qcompile(case.model, kwargs=case.example, quant="nf4", dynamic_shapes=case.dynamic_shapes, device=device)
        for device in ("sim:0", spread)
    )
    assert_every_launch_is_at_home(two.plan)
    graph = two.capture(**case.inputs)
    want = one(**case.inputs)["logits"]
    assert torch.equal(two(**case.inputs)["logits"], want)
    assert torch.equal(graph.replay(**case.inputs)["logits"], want)
    for device, keys in weights_on(two.plan).items():
        for key in (each for each in keys if "layers." in each):
            place = "sim:1" if ".layers.1." in key else "sim:2" if ".layers.0.self_attn." in key else "sim:0"
            assert two.devices[int(device[-1])] == place, key


@pytest.mark.slow
def test_a_static_cache_lies_with_its_layers() -> None:
    """Prompt and tokens of a Llama over two devices: each layer's cache on the device of the layer, none copied."""
    import transformers
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    def compiled(device: Any) -> qc.Program:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        model.generation_config.cache_implementation = "static"
        step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=40)
        size = ("s", 1, 24)
        return qc.qcompile(
            step,
            kwargs={"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
            dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
            buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})],
            quant="nf4",
            device=device,
        )

    one, two = compiled("sim:0"), compiled({"model.model.layers.1": "sim:1", "": "sim:0"})
    states = {arena.name: arena.device for arena in two.plan.arenas if arena.kind == "state"}
    assert states == {f"state.{kind}_cache_{layer}": f"cuda{layer}" for kind in ("key", "value") for layer in range(2)}
    assert copied_bytes(two.plan) == {"decode": {}, "prefill": {}}
    assert_every_launch_is_at_home(two.plan)
    sessions = one.session(), two.session()
    ids, position = torch.arange(9).reshape(1, 9), 0
    for _ in range(4):
        positions = torch.arange(position, position + ids.shape[1])
        want, got = (session(input_ids=ids, cache_position=positions) for session in sessions)
        assert torch.equal(got, want)
        position += ids.shape[1]
        ids = want[:, -1:].argmax(-1)
    graph = sessions[1].capture(input_ids=ids, cache_position=torch.tensor([position]))
    for _ in range(3):
        given = {"input_ids": ids, "cache_position": torch.tensor([position])}
        want = sessions[0](**given)
        assert torch.equal(graph.replay(**given), want)
        position, ids = position + 1, want[:, -1:].argmax(-1)
    moved = two.run.to("sim:2", devices=("sim:2", "sim:3"))
    assert moved.devices == ("sim:2", "sim:3")
