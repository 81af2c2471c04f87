"""`tq` beside linears: in experts' matrices, in recurrent layers, and in an embedding, against the eager oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.recurrent import RecurrentKernel

K = 256  # a block of the trellis
EXPERTS, ROWS, TOP = 3, 19, 2
FORMATS = ("tq", "tq:bits=3", "tq:bits=2")
DEVICES = ["cpu", "sim:0"]


class Experts(nn.Module):
    """A row of x times the matrices of the experts that `index` names; an expert begins inside of a panel."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, ROWS, K, generator=torch.Generator().manual_seed(1)) / K**0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOP, dim=0)
        return torch.bmm(self.w[index.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1)


class Recurrent(nn.Module):
    """Both cells with gates, and a projection of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.gru = nn.GRU(K, K)
        self.lstm = nn.LSTM(K, 2 * K, proj_size=K)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gru(x)[0], self.lstm(self.gru(x)[0])[0]


def assert_equals_the_oracle(program: qc.Program, *args: torch.Tensor) -> None:
    with torch.no_grad():
        expected = program.oracle(*args)
    found = program(*args)
    for got, wanted in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)  # fp32 sums of 256 products, in another order


def formats_of(program: qc.Program, body: type) -> set[str]:
    """The formats of the weights that kernels of a kind read."""
    kernels = [kernel for kernel in program.plan.kernels if isinstance(kernel.body, body)]
    return {each.format.name for kernel in kernels for each in kernel.operands if each.format is not None}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", FORMATS)
def test_experts_are_multiplied_from_codes(text: str, device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = {"x": {0: ("t", 1, 70)}, "index": {0: ("t", 1, 70)}}
    x, index = torch.randn(5, K, generator=generator), torch.randint(EXPERTS, (5, TOP), generator=generator)
    program = qc.qcompile(
        Experts().eval(), (x, index), quant=qc.QuantConfig("float", linear=text), dynamic_shapes=rows, device=device
    )
    assert formats_of(program, GroupedLinearKernel) == {"tq"}
    for count in (1, 5, 70):
        x, index = torch.randn(count, K, generator=generator), torch.randint(EXPERTS, (count, TOP), generator=generator)
        assert_equals_the_oracle(program, x, index)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("text", FORMATS)
def test_recurrent_layers_multiply_inputs_and_states_from_codes(text: str, device: str) -> None:
    x = torch.randn(3, 2, K, generator=torch.Generator().manual_seed(4))
    program = qc.qcompile(Recurrent().eval(), (x,), quant=qc.QuantConfig("float", linear=text), device=device)
    assert formats_of(program, RecurrentKernel) == {"tq"}
    assert_equals_the_oracle(program, x)


@pytest.mark.slow
def test_a_state_narrower_than_a_block_is_refused_by_name() -> None:
    """The other matrices of the layer are wide enough."""
    model = nn.LSTM(K, 64).eval()
    with pytest.raises(qc.errors.QCompilerError, match=r"weight_hh_l0.*64.*256"):
        qc.qcompile(model, (torch.zeros(2, 1, K),), quant=qc.QuantConfig("float", linear="tq"), device="cpu")
