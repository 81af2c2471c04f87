"""The number of tokens in a cache, while a model is traced: what Python asks of it needs no value, or is refused."""

from __future__ import annotations

import pytest
import torch

from qcompiler.errors import ExportError
from qcompiler.lm.length import Length


@pytest.fixture
def past() -> Length:
    return Length(torch.tensor(5), 40)


def test_positions_from_a_length_on_are_as_many_as_tokens(past: Length) -> None:
    assert torch.arange(past, past + 3).tolist() == [5, 6, 7]
    assert torch.arange(past, 3 + past, dtype=torch.int32).dtype == torch.int32
    assert (torch.arange(3) + past).tolist() == (past + torch.arange(3)).tolist() == [5, 6, 7]
    assert torch.arange(2, 6).tolist() == [2, 3, 4, 5]


def test_arithmetic_is_that_of_the_number(past: Length) -> None:
    for made, wanted in (
        (past + 2, 7), (2 - past, -3), (past - 2, 3), (-(past - 2), -3), (past * 2, 10), (3 * (past + 1), 18),
        (past + past, 10), ((1 - past) - (2 - past), -1), (past + 3 - past, 3),
        (torch.maximum(past, torch.tensor(9)), 9),
    ):  # fmt: skip
        assert int(made.value if isinstance(made, Length) else made) == wanted


def test_a_comparison_that_holds_for_every_number_is_decided(past: Length) -> None:
    assert past >= 0 and past + 1 > 0 and not past < 0 and past + 3 > past
    assert max(0, 1 - (past + 1)) == 0  # how MPT cuts its table of biases
    assert not 1 - (past + 4) > 0 and -past <= 0
    assert not past + 2 > 64 and past + 24 <= 64  # whether XGLM's table is too short


@pytest.mark.parametrize(
    "ask",
    [
        lambda past: past > 0, lambda past: past < 9, lambda past: 2 - past > 0, lambda past: past == 0,
        lambda past: past != 0, lambda past: not past, lambda past: past + 24 > 63, lambda past: max(3, past),
    ],
)  # fmt: skip
def test_what_the_number_decides_is_refused(past: Length, ask: object) -> None:
    assert callable(ask)
    where = r"decides by the number of tokens in its cache.*test_length\.py.*lambda past:"
    with pytest.raises(ExportError, match=where):
        ask(past)
