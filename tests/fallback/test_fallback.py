"""`fallback="torch"`: models with operators that have no lowering, compared with eager torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import (
    CaptureRuleError,
    DataDependentShapeError,
    ExportError,
    RuntimeFailure,
    TrustError,
    UnsupportedOperatorError,
)
from qcompiler.plan.plan import TorchCall


@torch.library.custom_op("qctest::spread", mutates_args=())
def spread(x: torch.Tensor, by: float, keep: bool = False) -> torch.Tensor:
    return x.clone() if keep else x * by + x.roll(1, -1)


@spread.register_fake
def _(x: torch.Tensor, by: float, keep: bool = False) -> torch.Tensor:
    return torch.empty_like(x)


class Denoiser(nn.Module):
    """A spectrogram, a mask from quantised linears, and back: complex values live on across compiled steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.first, self.last = nn.Linear(33, 64), nn.Linear(64, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(x, 64, 16, window=self.window, return_complex=True)
        hidden = torch.relu(self.first(spectrum.abs().log1p().transpose(1, 2)))
        mask = torch.sigmoid(self.last(hidden)).transpose(1, 2)
        return torch.istft(spectrum * mask, 64, 16, window=self.window, length=x.shape[-1])


class Spectral(nn.Module):
    """A Fourier layer with complex weights, and transforms of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filter", torch.randn(9, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = torch.fft.irfft(torch.fft.rfft(x) * self.filter * 2j, n=x.shape[-1])
        return mixed + x, torch.fft.fft2(x).conj().angle()


class Choice(nn.Module):
    """A condition on values, with weights in one branch and another condition in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def positive(y: torch.Tensor) -> torch.Tensor:
            return self.left(y) * 2

        def negative(y: torch.Tensor) -> torch.Tensor:
            return torch.cond(y.max() > -1, torch.sin, torch.cos, (y,))

        return self.out(torch.cond(x.sum() > 0, positive, negative, (x,)))


class Decompositions(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        square = x @ x.mT + torch.eye(5)
        return (u * s.unsqueeze(1)) @ v, torch.linalg.eigvalsh(square), torch.linalg.solve(square, x), s.sum(-1)


class Middle(nn.Module):
    """An operator of the user's between quantised linears, with a size among its neighbours' arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = spread(torch.relu(self.first(x)), 0.5)
        h = torch.lgamma(h.abs() + 1).roll(x.shape[0] - 1, 0)
        return self.last(h)


class AtLeast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(x.reshape(x.shape[0] * x.shape[1])).unfold(0, 3, x.shape[1]).lgamma()


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def same(found: Any, wanted: Any, tolerance: float = 3e-6) -> None:
    for mine, theirs in zip(leaves(found), leaves(wanted), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        scale = max(float(theirs.detach().double().abs().max()), 1.0) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * scale)


def calls(program: Any) -> list[TorchCall]:
    return [step for step in program.plan.entries[0].steps if isinstance(step, TorchCall)]


CASES: dict[str, Any] = {
    "denoiser": (Denoiser, lambda b: torch.randn(b, 800), {"x": {0: ("b", 1, 5)}}, (1, 2, 5)),
    "spectral": (Spectral, lambda b: torch.randn(b, 7, 16), {"x": {0: ("b", 1, 8)}}, (1, 3, 8)),
    "choice": (Choice, lambda b: torch.randn(b, 8), {"x": {0: ("b", 1, 8)}}, (1, 2, 8)),
    "decompositions": (Decompositions, lambda b: torch.randn(b, 5, 3), {"x": {0: ("b", 1, 6)}}, (1, 2, 6)),
    "middle": (Middle, lambda b: torch.randn(b, 64), {"x": {0: ("b", 1, 64)}}, (1, 2, 17, 64)),
    "sizes": (AtLeast, lambda b: torch.rand(b, 4), {"x": {0: ("b", 1, 9)}}, (1, 2, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_torch_at_every_batch(name: str) -> None:
    made, inputs, shapes, sizes = CASES[name]
    torch.manual_seed(0)
    model = made().eval()
    program = qc.qcompile(model, (inputs(3),), dynamic_shapes=shapes, fallback="torch", verify_each="numerics")
    assert calls(program)
    stepwise = program.run.session(stepwise=True)
    for size in sizes:
        for sign in (1, -1):
            x = inputs(size) * sign if name != "sizes" else inputs(size)
            same(program(x), model(x))
            for mine, step in zip(leaves(program(x)), leaves(stepwise(x)), strict=True):
                assert torch.equal(mine, step)  # the same kernels and the same torch


@pytest.mark.parametrize("name", ["denoiser", "choice", "middle"])
def test_without_fallback_the_error_names_the_way_out(name: str) -> None:
    made, inputs, _, _ = CASES[name]
    with pytest.raises((UnsupportedOperatorError, qc.errors.FrontendError)) as caught:
        qc.qcompile(made().eval(), (inputs(3),))
    if isinstance(caught.value, UnsupportedOperatorError):
        assert 'fallback="torch"' in str(caught.value)


@pytest.mark.parametrize("recipe", ["nf4", "int8", "int4"])
def test_quantised_linears_around_it_stay_compiled(recipe: str) -> None:
    torch.manual_seed(1)
    shapes = {"x": {0: ("b", 1, 64)}}
    program = qc.qcompile(Middle().eval(), (torch.randn(3, 64),), dynamic_shapes=shapes, quant=recipe, fallback="torch")
    for batch in (1, 2, 13, 64):
        x = torch.randn(batch, 64)
        same(program(x), program.oracle(x), 2e-5)
    rows = {row.parameters[0]: row.format for row in program.ledger}
    assert rows["first.weight"] and rows["last.weight"]
    assert {kernel.serves for kernel in program.plan.kernels if kernel.template == "linear"} == {"first", "last"}


def test_buckets_give_their_sizes_to_torch() -> None:
    model = AtLeast()
    buckets = [("one", {"b": (1, 1)}), ("many", {"b": (1, 9)})]
    program = qc.qcompile(
        model, (torch.rand(3, 4),), dynamic_shapes={"x": {0: ("b", 1, 9)}}, buckets=buckets, fallback="torch"
    )
    one, many = (next(s for s in entry.steps if isinstance(s, TorchCall)) for entry in program.plan.entries)
    assert all(isinstance(size, int) for size in one.sizes) and one.region == many.region
    for batch in (1, 2, 9):
        x = torch.rand(batch, 4)
        same(program(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_pass_through_torch(dtype: torch.dtype) -> None:
    class Gamma(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.lgamma(x * 2) + 1, (x > 0.5).logical_not().cumsum(0), torch.signbit(x)

    x = torch.rand(5, 3, dtype=dtype) + 0.25
    same(qc.qcompile(Gamma(), (x,), fallback="torch")(x), Gamma()(x), 1e-2 if dtype.itemsize == 2 else 1e-12)


def test_lowerings_without_a_kernel_for_the_type_go_to_torch() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 6), nn.LayerNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.first(x)).softmax(-1) * 2

    model, x = Wide().double().eval(), torch.randn(3, 8, dtype=torch.float64)
    program = qc.qcompile(model, (x,), fallback="torch")
    same(program(x), model(x), 1e-12)
    assert "no kernel for f64" in str(program.report())


def test_a_state_goes_through_torch() -> None:
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.copy_(torch.special.i1(self.total) + x)
            return self.total * 2

    x = torch.rand(4)
    program, eager = qc.qcompile(Count(), (x,), fallback="torch"), Count()
    for _ in range(3):
        same(program(x), eager(x))


def test_what_is_in_torch_is_said() -> None:
    torch.manual_seed(0)
    program = qc.qcompile(Denoiser().eval(), (torch.randn(2, 800),), fallback="torch")
    text = str(program.report())
    assert "torch runs aten.stft.default" in text and "complex values" in text
    (share,) = program.report().as_dict()["torch"]
    assert f"in torch, main: 2 of {share['steps']} steps" in text and share["steps"] > 4
    assert share["operators"]["aten.istft.default"] == 1 and share["calls"] == 2 and share["nbytes"] > 0
    assert "torch reads it (aten.stft.default" in str(program.ledger)
    program(torch.randn(2, 800))
    spent = program.run.report()["torch_seconds"]
    assert 0 < spent["torch"] < spent["calls"]
    assert [each.template for each in program.timeline().slices].count("torch") == 2


def test_a_program_without_torch_calls_says_nothing_of_it() -> None:
    program = qc.qcompile(nn.Linear(4, 4), (torch.randn(1, 4),), fallback="torch")
    program(torch.randn(1, 4))
    assert not calls(program) and "torch call" not in str(program.report())
    assert program.run.report()["torch_seconds"] == {"torch": 0.0, "calls": 0.0}


def test_file_runs_with_torch_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    x, file = torch.randn(2, 800), tmp_path / "denoiser.qca"
    program = qc.qcompile(
        Denoiser().eval(), (x,), dynamic_shapes={"x": {0: ("b", 1, 4)}}, quant="int8", fallback="torch"
    )
    program.save(file)
    run = qc.load(file)
    for batch in (1, 2, 4):
        y = torch.randn(batch, 800)
        assert torch.equal(run(y), program(y))
        assert np.array_equal(run(y.numpy()), program(y).numpy())
    assert main(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert "needed to run this" in text and "aten.istft.default" in text and "2 torch call" in text
    assert main(["bench", str(file), "--rounds", "3"]) == 0
    assert "in torch: " in capsys.readouterr().out
    assert main(["inspect", str(file), "--ir", "import"]) == 0
    assert 'qc.torch_call "aten.stft.default' in capsys.readouterr().out


def test_file_without_torch_gives_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "gamma.qca"
    qc.qcompile(Decompositions(), (torch.randn(2, 5, 3),), fallback="torch").save(file)
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['xdsl'] = None\n"
        "import qcompiler as qc\n"
        f"try: qc.load({str(file)!r})\n"
        "except qc.errors.MissingDependencyError as error: print('said:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "said:" in done.stdout and "pip install torch" in done.stdout, done.stderr


def test_an_operator_of_the_users_is_trusted_by_name_only(tmp_path: Path) -> None:
    x, file = torch.randn(3, 64), tmp_path / "middle.qca"
    program = qc.qcompile(Middle().eval(), (x,), fallback="torch")
    program.save(file)
    with pytest.raises(TrustError, match=r"qctest\.spread\.default.*trust_operators="):
        qc.load(file)
    run = qc.load(file, trust_operators=["qctest.spread.default"])
    assert torch.equal(run(x), program(x))


def test_commands_compile_and_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_here.py").write_text(
        "import torch\n"
        "class Gamma(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.ops.qctest.spread(torch.lgamma(x), 2.0)\n"
        "def make():\n"
        "    return Gamma(), (torch.ones(3, 4),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file, x = tmp_path / "gamma.qca", tmp_path / "x.npy"
    np.save(x, np.full((3, 4), 2.5, np.float32))
    assert main(["compile", "made_here:make", "-o", str(file)]) != 0
    assert 'fallback="torch"' in capsys.readouterr().err
    assert main(["compile", "made_here:make", "-o", str(file), "--fallback", "torch"]) == 0
    assert main(["run", str(file), str(x)]) != 0
    assert "trust_operators=" in capsys.readouterr().err
    assert (
        main(["run", str(file), str(x), "-o", str(tmp_path / "y.npz"), "--trust-operators", "qctest.spread.default"])
        == 0
    )
    (found,) = np.load(tmp_path / "y.npz").values()
    gamma = torch.lgamma(torch.full((3, 4), 2.5))
    np.testing.assert_allclose(found, (gamma * 2 + gamma.roll(1, -1)).numpy(), rtol=1e-6)


def test_capture_is_refused_with_the_reason() -> None:
    x = torch.randn(3, 64)
    program = qc.qcompile(Middle().eval(), (x,), fallback="torch", device="sim:0")
    same(program(x), program.oracle(x), 1e-5)
    with pytest.raises(CaptureRuleError, match=r"qctest\.spread\.default.*in torch.*captured graph"):
        program.capture(program.array(x))


@pytest.mark.parametrize("name", ["denoiser", "spectral", "choice", "decompositions"])
def test_the_simulated_gpu_hands_its_memory_to_torch(name: str) -> None:
    made, inputs, shapes, _ = CASES[name]
    torch.manual_seed(0)
    model = made().eval()
    program = qc.qcompile(model, (inputs(2),), dynamic_shapes=shapes, fallback="torch", device="sim:0")
    for batch in (1, 2):
        x = inputs(batch)
        same(program(x), model(x), 1e-5)
        there = program.array(x)
        result = program(there)
        same([torch.from_numpy(each.numpy()) for each in pytree.tree_leaves(result)], leaves(model(x)), 1e-5)


def test_sessions_run_at_the_same_time() -> None:
    torch.manual_seed(0)
    model = Denoiser().eval()
    program = qc.qcompile(model, (torch.randn(2, 800),), dynamic_shapes={"x": {0: ("b", 1, 4)}}, fallback="torch")
    wrong: list[int] = []

    def work(number: int) -> None:
        session = program.session()
        for round_ in range(8):
            generator = torch.Generator().manual_seed(100 * number + round_)
            x = torch.randn(1 + (number + round_) % 4, 800, generator=generator)
            with torch.no_grad():
                if not torch.allclose(session(x), model(x), atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_the_caller_switches_on_changes_nothing() -> None:
    x = torch.randn(4, 5, 3)
    program = qc.qcompile(Decompositions(), (x,), fallback="torch")
    wanted = program(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        found = program(x)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs) and not mine.requires_grad


def test_torchs_own_error_names_the_operator() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) * 2

    program = qc.qcompile(Inverse(), (torch.eye(3),), fallback="torch")
    with pytest.raises(RuntimeFailure, match=r"aten\.linalg_inv\.default failed: .*singular"):
        program(torch.zeros(3, 3))
    same(program(torch.eye(3)), torch.eye(3) * 2)


class _Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        match self.kind:
            case "nonzero":
                return x.nonzero() + 1
            case "random":
                return torch.poisson(x.abs())
            case "complex result":
                return torch.fft.fft(x)
            case "complex argument":
                return x.abs()
            case _:
                raise AssertionError(self.kind)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("nonzero", DataDependentShapeError, r"aten\.nonzero.*depends on the values.*test_fallback\.py"),
        ("random", UnsupportedOperatorError, r"aten\.poisson.*draws random numbers.*test_fallback\.py"),
        ("complex result", ExportError, r"returns complex values.*view_as_real"),
        ("complex argument", ExportError, r"argument 'x' is complex; pass torch\.view_as_real"),
    ],
)
def test_what_torch_cannot_do_either_is_refused_by_name(kind: str, error: type[Exception], message: str) -> None:
    x = torch.rand(6, 3, dtype=torch.complex64 if kind == "complex argument" else torch.float32)
    with pytest.raises(error, match=message):
        qc.qcompile(_Refused(kind), (x,), fallback="torch")


def test_torch_runs_on_the_device_of_its_module() -> None:
    torch.manual_seed(0)
    model = Middle().eval()
    x = torch.randn(4, 64)
    places = {"last": "sim:1", "": "sim:0"}
    program = qc.qcompile(model, (x,), fallback="torch", device=places)
    same(program(x), model(x), 1e-5)
    arenas = {buffer.name: buffer.arena for buffer in program.plan.buffers}
    devices = {arena.name: arena.device for arena in program.plan.arenas}
    for call in calls(program):
        assert {devices[arenas[view.buffer]] for view in call.operands} == {"cuda0"}  # the slot, which sim:0 fills
