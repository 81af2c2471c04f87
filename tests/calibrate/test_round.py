"""algorithm="round": roundings and scales learned by gradients, block by block, beside GPTQ's codes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from killed_runs import KILLED, killed_run
from torch import nn

import qcompiler as qc
from qcompiler.calibrate import gptq
from qcompiler.calibrate.levels import Levels, with_codes
from qcompiler.config import resolve_format
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise import learn_rounding
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.graph_blocks import find_blocks
from qcompiler.frontends.quantise.graph_run import GraphRun, Watched
from qcompiler.frontends.quantise.soft_codes import SoftMatrix
from qcompiler.frontends.torch.frontend import import_torch

K = 64


class Layer(nn.Module):
    """A residual layer of two parts, as a transformer's, with a table that all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(K), nn.LayerNorm(K)
        self.q, self.k, self.o = (nn.Linear(K, K, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(K, 2 * K), nn.Linear(2 * K, K)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.o(torch.sigmoid(self.q(y) * table) * self.k(y))
        return x + self.down(torch.relu(self.up(self.other(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, K), nn.Linear(K, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = torch.cos(torch.arange(ids.shape[1], device=ids.device)[:, None] * torch.linspace(0.1, 1, K))
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, table.to(x.dtype))
        return self.head(x)


class Crossed(nn.Module):
    """A U-Net's shape: what the first linear gives is read at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(K, K) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.second(torch.relu(y))
        return self.third(torch.relu(z)) * y + x


SHAPES = {"ids": {0: ("b", 1, 8), 1: ("s", 1, 64)}}
EXAMPLE = (torch.zeros(2, 7, dtype=torch.int64),)


def inputs(count: int = 4, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 32, (4, 40 + i), generator=generator) for i in range(count)]


def recipe(**options: Any) -> qc.QuantConfig:
    fields: dict[str, Any] = {"linear": "int2:group=64", "embedding": "int8", "algorithm": "round"}
    return qc.QuantConfig("float", **fields | options)


def imported(quant: Any, given: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    calibration = Calibration(inputs() if given is None else given, **options) if given is not False else None
    model = (model or Model(1)).eval()
    return import_torch(model, EXAMPLE, quant=quant, dynamic_shapes=SHAPES, calibration=calibration)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_rounding, "STEPS", 12)


# --- blocks ----------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module, x: torch.Tensor) -> tuple[GraphRun, list[Any]]:
    program = torch.export.export(model.eval(), (x,)).run_decompositions({})
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    watched = []
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            watched.append(Watched(targets[node.args[1].name], K, ((node, node.args[0]),)))
    run = GraphRun(program, watched, {})
    return run, find_blocks(run)


def test_layers_are_blocks_whatever_their_names_and_a_table_of_all_layers_is_no_obstacle() -> None:
    _, found = blocks_of(Model(3), torch.zeros(2, 5, dtype=torch.int64))
    parts = ("q", "k", "o", "up", "down")
    assert [set(block.paths) for block in found] == [
        *({f"layers.{number}.{part}.weight" for part in parts} for number in range(3)), {"head.weight"},
    ]  # fmt: skip
    assert all(len(block.ends) == 1 for block in found)
    assert all(a.stop == b.first for a, b in itertools.pairwise(found))


def test_a_graph_without_cuts_is_one_block_and_a_chain_is_cut_everywhere() -> None:
    _, found = blocks_of(Crossed(), torch.zeros(2, K))
    assert [block.paths for block in found] == [("first.weight",), ("second.weight", "third.weight")]
    assert [end.name for end in found[1].ends] == ["mul"], "the input may be read behind a cut"
    _, chain = blocks_of(nn.Sequential(*(nn.Linear(K, K) for _ in range(3))), torch.zeros(2, K))
    assert [block.paths for block in chain] == [(f"{number}.weight",) for number in range(3)]


# --- soft codes ------------------------------------------------------------------------------------------------------

TEXTS = ("int2", "int4:group=64", "int8", "int3:symmetric=False", "nf4", "fp4", "mxfp4", "q4_0")


def soft(text: str) -> tuple[Any, np.ndarray, SoftMatrix]:
    w = np.random.default_rng(0).standard_normal((5, K)).astype(np.float32)
    start = resolve_format(text).encode(w)
    return start, w, SoftMatrix(start, w)


@pytest.mark.parametrize("text", TEXTS)
def test_soft_codes_start_as_what_is_decoded_and_end_as_what_is_stored(text: str) -> None:
    start, _, matrix = soft(text)
    decode = start.format.decode
    np.testing.assert_allclose(matrix.values().detach(), decode(start), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(decode(matrix.packed()), decode(start), rtol=1e-5, atol=1e-6)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in matrix.learned:
            each.add_(torch.rand(each.shape, generator=random) - 0.5)
    matrix.limit()
    found = matrix.values().detach().numpy()
    assert (np.abs(found - decode(start)) > 1e-3).any()
    np.testing.assert_allclose(decode(matrix.packed()), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", TEXTS)
def test_places_begin_at_the_codes_that_are_given_even_where_others_are_nearer(text: str) -> None:
    """So learning starts from GPTQ's codes: half a gap further on, each code has moved by one at most."""
    start, w, _ = soft(text)
    other = resolve_format(text).encode(w[::-1].copy())
    codes = gptq.codes_of(other)
    matrix = SoftMatrix(with_codes(start, codes), w)
    levels = Levels.of(start)
    values = np.unique(levels.of_code)  # floats have two zeros, which are one step
    rank = np.zeros(256, np.int64)
    rank[levels.codes] = np.searchsorted(values, levels.of_code)
    np.testing.assert_array_equal(rank[gptq.codes_of(matrix.packed())], rank[codes])
    with torch.no_grad():
        matrix.places.add_(0.5)
    matrix.limit()
    moved = rank[gptq.codes_of(matrix.packed())] - rank[codes]
    assert set(np.unique(moved)) == {0, 1}


@pytest.mark.parametrize("text", ["int3:group=64", "nf4"])
def test_gptqs_codes_are_the_nearest_ones_of_the_values_that_it_says_it_rounded(text: str) -> None:
    random = np.random.default_rng(0)
    w, x = (random.standard_normal((rows, K)).astype(np.float32) for rows in (7, 200))
    x[:, 1:] += x[:, :-1]
    solved = gptq.solve(w, resolve_format(text).encode(w), (x.T @ x).astype(np.float64))
    levels = Levels.of(solved.packed)
    every = levels.slope[..., None] * levels.of_code + levels.offset[..., None]
    nearest = levels.codes[np.abs(every - solved.rounded[..., None]).argmin(-1)]
    np.testing.assert_array_equal(gptq.codes_of(solved.packed), nearest)
    assert (np.abs(solved.rounded - w).max(1) > 1e-3).all(), "each row was solved"


def test_gradients_pass_through_the_rounding_also_where_a_code_is_clipped() -> None:
    """By hand for int4 with scale s: d value / d place is s, d value / d factor is s * code."""
    start, w, _ = soft("int4:group=64")
    w[0, 0] = 100.0  # far outside the codes of its group
    matrix = SoftMatrix(start, w)
    matrix.values().sum().backward()
    scale = np.repeat(matrix.scales.numpy(), K, axis=1)
    np.testing.assert_allclose(matrix.places.grad, scale, rtol=1e-6)
    codes = gptq.codes_of(matrix.packed()).astype(np.float32) - 8
    np.testing.assert_allclose(matrix.factors.grad[:, 0], (scale * codes).sum(1), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_place_between_uneven_codes_is_their_gap() -> None:
    """nf4 with absmax s: the two codes beside w / s are found in the table by hand."""
    _, w, matrix = soft("nf4")
    matrix.values().sum().backward()
    absmax = np.abs(w.reshape(-1, K)).max(1, keepdims=True)
    table = np.unique(matrix.of_code.numpy())
    above = np.clip(np.searchsorted(table, w / absmax), 1, len(table) - 1)
    gap = absmax * (table[above] - table[above - 1])
    np.testing.assert_allclose(matrix.places.grad.reshape(w.shape), gap, rtol=1e-5)


# --- whole models ----------------------------------------------------------------------------------------------------


def outputs_error(result: Any, model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float((result.quantized.module(x) - model(x)).square().sum()) for x in inputs(3, seed=7))


@pytest.mark.slow
@pytest.mark.parametrize(("text", "most"), [("int2:group=64", 0.9), ("int3:symmetric=False", 0.9), ("nf4", 0.95)])
def test_outputs_for_other_inputs_are_nearer_than_gptqs(text: str, most: float) -> None:
    model = Model(2).eval()
    found = [
        outputs_error(imported(recipe(linear=text, algorithm=each), inputs(12), Model(2)), model)
        for each in ("gptq", "round")
    ]
    assert found[1] < most * found[0]


@pytest.mark.usefixtures("few_steps")
def test_learning_that_raises_the_loss_leaves_gptqs_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_rounding, "PLACE_RATE", 1.0)
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Linear(K, K)).eval(), torch.randn(2, 256, K)
    found = [
        import_torch(
            model, (given[0],), quant=recipe(linear="int3:group=64", algorithm=each), calibration=Calibration([*given])
        )
        for each in ("gptq", "round")
    ]
    np.testing.assert_array_equal(*(each.weights["0.weight"].data for each in found))
    said = [what for stage, _, what in found[1].quantized.decisions if stage == "codes"]
    assert said[0].endswith("gptq's are taken")


@pytest.mark.usefixtures("few_steps")
def test_the_report_names_the_block_and_two_runs_are_equal() -> None:
    runs = [imported(recipe()) for _ in range(2)]
    said = {path: what for stage, path, what in runs[0].quantized.decisions if stage == "codes"}
    assert "of its block of 2 weights: " in said["layers.0.up.weight"]
    for name in ("layers.0.q.weight", "head.weight"):
        np.testing.assert_array_equal(*(run.weights[name].data for run in runs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("few_steps")
def test_models_in_16_bits(dtype: torch.dtype) -> None:
    found = [what for stage, _, what in imported(recipe(), model=Model(1).to(dtype)).quantized.decisions]
    assert sum("learned roundings" in what for what in found) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "least"), [("int3:group=128", 0.80), ("int2:group=128", 0.90), ("int2:group=128,symmetric=False", 0.925)]
)
def test_it_closes_more_of_the_gap_on_the_trained_language_model_than_gptq(text: str, least: float) -> None:
    """The share of the KL of nearest codes; chosen on one part of the held-out text and judged by another.

    Measured: 81.6 ± 0.3 % in int3 and 93.8 ± 0.1 % in int2 with zero points (90.8 without), where GPTQ
    closes 75.8 and 88.7 ± 0.2 % (83.0).
    """
    bench = load("benchmarks/chosen_codes.py")
    row = bench.row(text, bench.calibration(64), bench.judge(), ("round",))
    assert row.by["round"].closed > least


# --- bad input -------------------------------------------------------------------------------------------------------


def test_it_needs_enough_data() -> None:
    with pytest.raises(RecipeError, match=r"algorithm='round' needs calibration data"):
        imported(recipe(), given=False)
    with pytest.raises(CalibrationError, match=r"gave 3 rows to 'layers.0.q.weight'.*round needs at least 16"):
        imported(recipe(), given=[torch.zeros(1, 3, dtype=torch.int64)])


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_values_that_are_not_finite_are_an_error_and_only_whole_blocks_are_written(tmp_path: Path) -> None:
    model = Model(1)
    with torch.no_grad():
        model.layers[0].down.bias[3] = float("nan")
    with pytest.raises(
        CalibrationError, match=r"of 'layers\.0\.up\.weight' to 'layers\.0\.down\.weight' are not finite"
    ):
        imported(recipe(), model=model, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "the block of q, k and o before it"


@pytest.mark.usefixtures("few_steps")
def test_inputs_that_are_all_zero_keep_the_nearest_codes() -> None:
    model = Model(1)
    with torch.no_grad():
        for each in (model.layers[0].norm, model.layers[0].other):
            each.weight.zero_()
            each.bias.zero_()
    result, fmt = imported(recipe(), model=model), resolve_format("int2:group=64")
    for name in ("q", "k"):
        w = model.layers[0].get_submodule(name).weight.detach().numpy()
        np.testing.assert_array_equal(result.weights[f"layers.0.{name}.weight"].data, fmt.encode(w).data)


@pytest.mark.slow
def test_an_operator_without_a_gradient_is_named() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(K, K) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            rows = torch.ops.qc.quantize_rows(self.second(y), "token", 0.0, None)
            return torch.ops.qc.dequantize_rows(rows, K, torch.float32) * self.third(y)

    model = Opaque().eval()
    given = Calibration([torch.randn(80, K)])
    with pytest.raises(CalibrationError, match=r"has no gradient, so algorithm='round' cannot learn it.*'gptq'"):
        import_torch(model, (torch.randn(80, K),), quant=recipe(linear="int4"), calibration=given)


SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import qcompiler as qc
from qcompiler.frontends.quantise import learn_rounding

torch.set_num_threads(1)
folder, die_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).eval()
learn_rounding.STEPS = 10
learned, learn = 0, learn_rounding.BlockRun.learn

def counted(*arguments):
    global learned
    learned += 1
    if learned == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(*arguments)

learn_rounding.BlockRun.learn = counted
inputs = [torch.randn(300, 64) for _ in range(2)]
quant = qc.QuantConfig("int2", algorithm="round")
program = qc.qcompile(model, (torch.ones(3, 64),), quant=quant, calibrate=inputs, workdir=folder + "/work",
                      dynamic_shapes={"input": {0: ("n", 1, 512)}})
program.save(folder + "/p.qca")
print(learned)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_behind_the_last_block_and_ends_in_the_same_file(tmp_path: Path) -> None:
    def compiled(name: str, die_at: int) -> tuple[int, str]:
        return killed_run(SCRIPT, tmp_path / name, die_at)

    assert compiled("whole", 0) == (0, "4")
    assert compiled("broken", 3)[0] == KILLED
    assert compiled("broken", 0) == (0, "2")
    assert (tmp_path / "broken" / "p.qca").read_bytes() == (tmp_path / "whole" / "p.qca").read_bytes()
