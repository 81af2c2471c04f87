"""Linears that read the same rows are one: the same bits, fewer launches, and every weight known by its name."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.config import resolve_format
from qcompiler.errors import RecipeError
from qcompiler.formats import stacking
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import functions, path_of
from qcompiler.passes.pipeline import run_pipeline, upto
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.quantize_rows import QuantizeRowsKernel
from qcompiler.plan.plan import Copy, Launch, Select

APART = ("*",)
K, ROWS = 256, (40, 24, 17)
SIZES = (1, 5, 33, 80)
"""Rows of x, one for each row class of linears."""


class Heads(nn.Module):
    """Three linears of one x, of different sizes; `biases` says which have one."""

    def __init__(self, biases: tuple[bool, bool, bool] = (False, False, False), k: int = K) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(k, rows, bias=bias) for rows, bias in zip(ROWS, biases, strict=True))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q(x).cumsum(0), self.k(x).cumsum(-1), self.v(x).softmax(-1)


class Many(nn.Module):
    """`Heads` under the name of each format."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Heads() for name in names})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part for n, block in enumerate(self.blocks.values()) for part in block(x * (n + 1))]


def linears(program: qc.Program) -> int:
    """Launches of linears in the first entry point."""
    kernels = {spec.name: spec for spec in program.plan.kernels}
    found = 0
    for step in program.plan.entries[0].steps:
        name = step.kernel if isinstance(step, Launch) else step.cases[0].kernel if isinstance(step, Select) else None
        found += name is not None and isinstance(kernels[name].body, LinearKernel)
    return found


def both(model: nn.Module, x: torch.Tensor, quant: str | None, **options: Any) -> tuple[qc.Program, qc.Program]:
    """The program, and the one whose linears stay apart."""
    made = []
    for separate in ((), APART):
        settings = {"rules": options.get("rules", ()), "activations": options.get("activations")}
        recipe = qc.QuantConfig(quant or "float", separate=separate, promise_bits=None, **settings)
        dims = {"x": {0: ("m", 1, 96)}}
        kept = {key: value for key, value in options.items() if key not in settings}
        made.append(qc.qcompile(model, (x,), dynamic_shapes=dims, quant=recipe, **kept))
    return made[0], made[1]


def assert_same_bits(first: qc.Program, second: qc.Program, dtype: torch.dtype, k: int = K) -> None:
    generator = torch.Generator().manual_seed(7)
    for rows in SIZES:
        x = torch.randn(rows, k, generator=generator).to(dtype)
        x[0, :3] = torch.tensor([0.0, -0.0, 1e-30])
        for number, (a, b) in enumerate(zip(first(x), second(x), strict=True)):
            assert a.view(torch.uint8).equal(b.contiguous().view(torch.uint8)), f"{rows} rows, result {number}"


def families() -> list[tuple[str, ...]]:
    """All formats, a few to a program; plain values are the first."""
    names = [*formats.names(), "nf4:double_quant", "int4:group=32,symmetric=False"]
    return [tuple(names[at : at + 6]) for at in range(0, len(names), 6)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("texts", [
    pytest.param(texts, id=texts[0], marks=() if n == 0 else pytest.mark.slow) for n, texts in enumerate(families())
])  # fmt: skip
@pytest.mark.slow
def test_every_format_and_row_class_gives_the_same_bits(texts: tuple[str, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    names = {f"b{n}": text for n, text in enumerate(texts)}
    rules = {f"blocks.{name}.*": text for name, text in names.items()}
    model = Many(tuple(names)).eval().to(dtype)
    merged, apart = both(model, torch.randn(3, K).to(dtype), "nf4", rules=rules)
    assert_same_bits(merged, apart, dtype)
    can, most = 0, 3 if dtype == torch.float32 else 2  # in bf16 v's epilogue gives the f32 that its softmax reads
    for text in texts:
        fmt = resolve_format(text)
        fits = [n for n in range(2, most + 1) if stacking.obstacle(fmt, ROWS[:n], K) is None]
        can += max(fits, default=1) - 1
    assert linears(apart) == 3 * len(texts)
    assert linears(merged) == 3 * len(texts) - can and (can > 0 or len(texts) < 3)


BIASES = [
    pytest.param(biases, id=str(biases), marks=() if biases == (True, False, True) else pytest.mark.slow)
    for biases in itertools.product((False, True), repeat=3)
]


@pytest.mark.parametrize("biases", BIASES)
def test_biases_are_put_together_and_missing_ones_change_no_bit(biases: tuple[bool, bool, bool]) -> None:
    """Whisper's keys have no bias, its queries and values do. A sum of -0.0 must stay one."""
    torch.manual_seed(1)
    model = Heads(biases).eval()
    with torch.no_grad():
        model.k.weight[:8] = -0.0
    merged, apart = both(model, torch.randn(3, K), "float")
    assert (linears(merged), linears(apart)) == (1, 3)
    assert_same_bits(merged, apart, torch.float32)


def test_rows_of_int8_are_made_once_and_read_once() -> None:
    torch.manual_seed(2)
    merged, apart = both(Heads().eval(), torch.randn(3, K), "int8", activations="int8")
    assert (linears(merged), linears(apart)) == (1, 3)
    for program in (merged, apart):
        kinds = Counter(type(spec.body) for spec in program.plan.kernels)
        assert kinds[QuantizeRowsKernel] == 1
    assert_same_bits(merged, apart, torch.float32)


def decisions(program: qc.Program) -> dict[str, str]:
    """What merge-linears said, by place."""
    return {c.path: f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "merge-linears"}


class Apart(nn.Module):
    """Pairs that look alike and may not become one, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        self.returned, self.other = nn.Linear(K, 16), nn.Linear(K, 16)
        self.shared, self.once, self.twice = (nn.Linear(K, 16, bias=False) for _ in range(3))
        self.plain, self.scaled = nn.Linear(K, 16, bias=False), nn.Linear(K, 16, bias=False)
        self.flat, self.beside = nn.Linear(K, 16, bias=False), nn.Linear(K, 16, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, ...]:
        company = self.shared(y).cumsum(0) + self.once(y).cumsum(-1)
        second = self.shared(z).cumsum(0) + self.twice(z).cumsum(-1)
        epilogues = self.plain(u).cumsum(-1) + F.relu(self.scaled(u)).cumsum(0)
        w = u * 2
        turned = self.flat(w).reshape(-1, 4).cumsum(0).sum(0) + self.beside(w).cumsum(-1)[:, :4].sum(0)
        return self.returned(x), self.other(x).cumsum(0), company, second, epilogues, turned


def test_pairs_that_would_cost_a_copy_or_a_second_weight_stay_apart() -> None:
    torch.manual_seed(3)
    inputs = tuple(torch.randn(3, K) for _ in range(4))
    program = qc.qcompile(Apart().eval(), inputs, quant="nf4")
    apart = qc.qcompile(Apart().eval(), inputs, quant=qc.QuantConfig("nf4", separate=APART))
    said = decisions(program)
    assert "its result is the program's" in said["returned"]
    assert "read elsewhere" in said["shared"] + said["once"] + said["twice"]
    assert "their epilogues differ" in said["scaled"]
    assert "would read a copy of its result" in said["flat"]
    assert len(program.plan.entries[0].steps) == len(apart.plan.entries[0].steps)
    assert program.ledger.bytes_after == apart.ledger.bytes_after


class HeadNorms(nn.Module):
    """Queries and keys with a norm for each head, as in Qwen3 and Gemma 3."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(K, dim * many, bias=False) for many in (3, 2, 2))
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (each(x).unflatten(-1, (-1, self.dim)) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, 2)[:, :, :3].transpose(1, 2) for each in (self.k_norm(k), v))
        return (F.scaled_dot_product_attention(self.q_norm(q).transpose(1, 2), k, v, is_causal=True),)


RUNS = [
    pytest.param(dim, dtype, device, marks=() if quick else pytest.mark.slow)
    for device in ("cpu", "sim:0")
    for dim in (32, 20)
    for dtype in (torch.float32, torch.bfloat16)
    for quick in [(dim, dtype, device) == (20, torch.float32, "cpu")]
]


@pytest.mark.parametrize(("dim", "dtype", "device"), RUNS)
def test_norms_of_heads_read_a_merged_result_in_place(dim: int, dtype: torch.dtype, device: str) -> None:
    """The heads of a token lie side by side, and tokens as far apart as q, k and v are wide."""
    torch.manual_seed(8)
    model = HeadNorms(dim).eval().to(dtype)
    with torch.no_grad():
        for norm in (model.q_norm, model.k_norm):
            norm.weight.uniform_(0.5, 1.5)
    size, made = {"x": {1: ("s", 1, 8)}}, []
    for batch in (1, 3):
        x = torch.randn(batch, 5, K).to(dtype)
        for separate in ((), APART):
            recipe = qc.QuantConfig("nf4", separate=separate)
            buckets = [("decode", {"s": (1, 1)}), ("prompt", {"s": (1, 8)})]
            made.append(qc.qcompile(model, (x,), dynamic_shapes=size, quant=recipe, device=device, buckets=buckets))
        merged, apart = made[-2:]
        assert "3 linears are one" in "".join(decisions(merged).values())
        for one, other in zip(merged.plan.entries, apart.plan.entries, strict=True):
            count, before = (sum(isinstance(s, Launch | Select | Copy) for s in each.steps) for each in (one, other))
            assert count == before - 2, "no copy, and two linears fewer"
        for tokens in (1, 2, 5):
            part = x[:, :tokens]
            first, second = (each(part) for each in (merged, apart))
            for ours, theirs in zip(first, second, strict=True):
                assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), (batch, tokens)


def test_a_recipe_names_what_stays_separate() -> None:
    x = torch.randn(3, K)
    program = qc.qcompile(Heads().eval(), (x,), quant=qc.QuantConfig("nf4", separate=("k",)))
    assert linears(program) == 2 and "keeps it separate" in decisions(program)["k"]
    assert qc.QuantConfig("nf4", separate=["k"]).separate == ("k",)
    with pytest.raises(RecipeError, match="'query' matches no module"):
        qc.qcompile(Heads().eval(), (x,), quant=qc.QuantConfig("nf4", separate=("query",)))
    with pytest.raises(RecipeError, match="a tuple of globs"):
        qc.QuantConfig("nf4", separate="k")  # type: ignore[arg-type]


def test_formats_that_differ_stay_apart_and_those_that_agree_do_not() -> None:
    rules = {"k": "int8"}
    program = qc.qcompile(Heads().eval(), (torch.randn(3, K),), quant=qc.QuantConfig("nf4", rules=rules))
    assert linears(program) == 2
    assert "stored as nf4 (f32) and as int8 (f32)" in decisions(program)["k"]


def test_the_ledger_names_each_weight_with_its_share() -> None:
    torch.manual_seed(4)
    merged, apart = both(Heads((True, True, True)).eval(), torch.randn(3, K), "int8")
    rows = {row.parameters: row for row in merged.ledger}
    assert [row.parameters for row in merged.ledger] == [row.parameters for row in apart.ledger]
    assert merged.ledger.bytes_after == sum(entry.nbytes for entry in merged.plan.weights)
    assert rows[("v.weight",)].format == "int8" and rows[("v.weight",)].shape == (17, K)
    assert merged.ledger.padding < apart.ledger.padding, "81 rows need one panel less than 40, 24 and 17"
    stored = [entry for entry in merged.plan.weights if entry.parts and len(entry.shape) == 2]
    (weight,) = stored
    parts = [(part.rows, *part.parameters) for part in weight.parts]
    assert parts == [(40, "q.weight"), (24, "k.weight"), (17, "v.weight")]
    assert weight.name == "q.weight+k.weight+v.weight" and weight.paths == ("q.weight", "k.weight", "v.weight")


@pytest.mark.parametrize("layout", ["target", "canonical"])
def test_a_saved_program_gives_the_same_bits(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    merged, _ = both(Heads().eval(), torch.randn(3, K), "q4_K")
    merged.save(tmp_path / "heads.qca", layout=layout)
    loaded = qc.load(tmp_path / "heads.qca", verify="full")
    x = torch.randn(9, K)
    for a, b in zip(loaded(x.numpy()), merged(x), strict=True):
        assert np.array_equal(np.asarray(a), b.numpy())


@pytest.mark.parametrize("quant", ["nf4", "q4_K", "float"])
def test_an_adapter_is_merged_into_its_rows_alone(quant: str) -> None:
    """Of three weights in one, two are changed: what comes out is what the separate ones give."""
    torch.manual_seed(6)
    x = torch.randn(5, K)
    merged, apart = both(Heads().eval(), x, quant)
    tensors = {}
    for name, rows in (("q", ROWS[0]), ("v", ROWS[2])):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(4, K) * 0.1
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, 4) * 0.1
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"]}
    ours, report = qc.merge_lora(merged, tensors, config=config)
    theirs, expected = qc.merge_lora(apart, tensors, config=config)
    assert [(row.path, row.error, row.kept) for row in report.layers] == [
        (row.path, row.error, row.kept) for row in expected.layers
    ]
    before = merged(x)
    for number, (a, b) in enumerate(zip(ours(x.numpy()), theirs(x.numpy()), strict=True)):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.array_equal(np.asarray(a), before[number].numpy()) == (number == 1)


class Adapters(nn.Module):
    """A low-rank update beside each of two linears, as PEFT computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(K, 48, bias=False), nn.Linear(K, 48, bias=False)
        self.down = nn.ModuleList(nn.Linear(K, 8, bias=False) for _ in "qv")
        self.up = nn.ModuleList(nn.Linear(8, 48, bias=False) for _ in "qv")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = self.q(x) + 2.0 * self.up[0](self.down[0](x))
        v = self.v(x) + 2.0 * self.up[1](self.down[1](x))
        return q.cumsum(-1), v.softmax(-1)


@pytest.mark.slow
def test_adapters_beside_linears_are_merged_too() -> None:
    torch.manual_seed(7)
    rules = {"down.*": None, "up.*": None}
    merged, apart = both(Adapters().eval(), torch.randn(3, K), "nf4", rules=rules)
    assert (linears(merged), linears(apart)) == (4, 6)
    assert_same_bits(merged, apart, torch.float32)


class CrossAttention(nn.Module):
    """Two layers that make keys and values of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (nn.ModuleList(nn.Linear(32, 32) for _ in range(2)) for _ in "kv")

    def forward(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for k, v in zip(self.k, self.v, strict=True):
            q = q + F.scaled_dot_product_attention(q, k(rows)[:, None], v(rows)[:, None])
        return q


def test_no_result_is_kept_past_an_attention_that_reads_a_part_of_it() -> None:
    program = qc.qcompile(CrossAttention().eval(), (torch.randn(1, 1, 3, 32), torch.randn(1, 7, 32)))
    kept = {path for path, what in decisions(program).items() if "2 linears are one" in what}
    assert kept == {"k.0+v.0", "k.1+v.1"}


def imported_heads(**options: Any) -> tuple[Any, QCContext]:
    imported = import_torch(Heads().eval(), (torch.randn(3, K),), quant="nf4")
    return imported, QCContext.default(weights=imported.weights, **options)


def test_what_lies_on_several_devices_stays_apart() -> None:
    imported, ctx = imported_heads(devices=("cpu", "sim:0"), device_map={"k": "sim:0"})
    run_pipeline(imported.module, ctx, stages=upto("merge-linears"))
    (function,) = functions(imported.module)
    found = [path_of(op) for op in function.body.block.ops if op.name == "qc.linear"]
    assert sorted(found) == ["k", "q+v"]
    devices = {op.attributes["qc.device"].data for op in function.body.block.ops if op.name == "tensor.extract_slice"}
    assert devices == {"cpu"}


@pytest.mark.slow
def test_the_interpreter_agrees_after_every_pass() -> None:
    static = load("tests/models/test_static_cache.py")
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    step = TorchExportableModuleWithStaticCache(static.llama(), batch_size=1, max_cache_len=static.LENGTH)
    given = {"input_ids": static.prompt(7), "cache_position": torch.arange(7)}
    program = qc.qcompile(step, kwargs=given, quant="nf4", verify_each="numerics")
    assert sum("3 linears are one" in text for text in decisions(program).values()) == static.LAYERS


@pytest.mark.parametrize(
    "quant", ["nf4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "q4_K, else q4_0, else int8"))]
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_llama_with_a_cache_gives_the_same_bits_in_fewer_launches(quant: str, dtype: torch.dtype) -> None:
    """Up to eight rows; of nine and more, linears of 32 features are multiplied in another order than wider ones."""
    static = load("tests/models/test_static_cache.py")
    recipes = (quant, qc.QuantConfig(quant, separate=APART))
    merged, apart = (static.compiled("cpu", dtype, recipe)[1] for recipe in recipes)
    for ours, theirs in zip(*(static.decode(p.session(), static.prompt(7), 6) for p in (merged, apart)), strict=True):
        assert torch.equal(ours, theirs)
    for one, other in zip(merged.plan.entries, apart.plan.entries, strict=True):
        norms = 2 * static.LAYERS + 1 if one.name == "decode" else 0  # these stay what they are, too, with ("*",)
        assert len(one.steps) == len(other.steps) - 3 * static.LAYERS - norms  # q, k and v; gate and up


@pytest.mark.slow
def test_a_simulated_gpu_gives_the_same_tokens() -> None:
    static = load("tests/models/test_static_cache.py")
    for dtype in (torch.float32, torch.bfloat16):
        runs = []
        for separate in ((), APART):
            program = static.compiled("sim:0", dtype, qc.QuantConfig("nf4", separate=separate))[1]
            runs.append(static.decode(program.session(), static.prompt(), 2))
        for ours, theirs in zip(*runs, strict=True):
            assert static.error(ours, theirs) <= (1e-5 if dtype == torch.float32 else 2e-2)
