"""The ledger of a compiled program says what the program stores, padding of its layouts included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import PromiseError
from qcompiler.ledger import PADDING_ALLOWANCE, Ledger, LedgerRow


def row(elements: int, nbytes: int) -> LedgerRow:
    return LedgerRow(("head.weight",), (1, elements), "float32", "nf4:block=64", "", 4 * elements, nbytes, True)


def test_bytes_of_the_ledger_are_those_of_the_weight_file() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 5)).eval()
    program = qc.qcompile(model, (torch.randn(3, 64),), quant="int8")
    assert program.ledger.bytes_after == sum(entry.nbytes for entry in program.plan.weights)
    (head,) = (r for r in program.ledger if r.parameters == ("2.weight",))
    assert head.padding == 11 * (40 + 4), "the panel of 16 rows holds 5: 11 rows of codes and scales are padding"
    assert "484 bytes of padding by the layout" in str(program.ledger)
    assert "of padding)" in program.ledger.totals()
    assert program.run.ledger["totals"]["padding"] == program.ledger.padding


def test_tied_weights_are_stored_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.words(ids))
            return out

    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.randint(0, 64, (3, 5))
    program = qc.qcompile(model, (ids,), quant="int8")
    (entry,) = program.plan.weights
    assert set(entry.parameters) == {"words.weight", "head.weight"}
    assert program.ledger.bytes_after == entry.nbytes == 64 * 32 + 4 * 64
    torch.testing.assert_close(program(ids), program.oracle(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("padding", "broken"), [(PADDING_ALLOWANCE, False), (PADDING_ALLOWANCE + 1, True)])
def test_padding_breaks_a_promise_only_where_it_is_more_than_a_tiny_models(padding: int, broken: bool) -> None:
    ledger = Ledger((row(1000, 800),), "nf4", 6.5).as_stored({"head.weight": 800 + padding})
    assert ledger.bits_per_weight() > 6.5, "what is shown counts the padding in any case"
    if broken:
        with pytest.raises(PromiseError, match=r"promises 6\.5 bits per weight"):
            ledger.check_promise()
    else:
        ledger.check_promise()


def test_a_promise_that_the_formats_break_is_an_error_however_small_the_padding() -> None:
    with pytest.raises(PromiseError):
        Ledger((row(1000, 900),), "nf4", 6.5).as_stored({"head.weight": 901}).check_promise()
