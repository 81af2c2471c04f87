"""The ledger of a compiled program says what the program stores, padding of its layouts included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import PromiseError
from qcompiler.frontends.quantise.stored_codes import AS_STORED, say_unused
from qcompiler.ledger import PADDING_ALLOWANCE, STATE, Ledger, LedgerRow


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


def test_states_are_counted_beside_the_weights() -> None:
    """A cache is not what a recipe makes smaller."""
    state = LedgerRow(("keys",), (2, 1000), "float32", "", STATE, 8000, 8000, counts=False)
    ledger = Ledger((row(1000, 500), state), "nf4")
    assert ledger.totals() == (
        "recipe nf4: 1 tensor, 4.0 kB -> 500 B, 4.000 bits per weight (no promise); 1 state of 8.0 kB"
    )
    assert f"    1 x {STATE}, 8.0 kB" in ledger.summary()


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


def test_a_recipe_for_a_file_of_codes_says_that_it_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a file in which everything is quantised the recipe would be ignored in silence."""
    chosen = row(64, 36)
    held, norm = replace(chosen, reason=AS_STORED), replace(chosen, format="", reason="fewer than two dimensions")
    say_unused(qc.QuantConfig("q4_K"), [held, held, norm])
    assert "the recipe 'q4_K' changes nothing: the file has codes of all 2 weights" in capsys.readouterr().err
    for recipe, rows in (("float", [held, norm]), ("q4_K", [held, chosen]), ("q4_K", [norm])):
        say_unused(qc.QuantConfig(recipe), rows)
    assert capsys.readouterr().err == ""
