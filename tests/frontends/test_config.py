"""Recipes, their refusals, and the ledger's arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from qcompiler import formats
from qcompiler.config import QuantConfig, Rule, choices, format_text, parse_format, resolve_format, with_next
from qcompiler.errors import PromiseError, RecipeError, UnknownFormatError
from qcompiler.ledger import Ledger, LedgerRow


def test_presets_fill_what_is_not_given() -> None:
    config = QuantConfig("nf4")
    assert (config.linear, config.embedding, config.promise_bits, config.rules) == ("nf4", "int8", 6.5, ())
    assert QuantConfig("int4:group=64").linear == with_next("int4:group=64")
    assert QuantConfig("nf4", embedding=None, promise_bits=None).embedding is None
    assert QuantConfig.of(None).linear is None


@pytest.mark.parametrize("name", [name for name in formats.names() if name != "q2_K"])  # the name of a mixture
def test_every_format_is_a_recipe_that_promises_no_more_than_its_bits_and_int8_embeddings(name: str) -> None:
    config = QuantConfig(name)
    assert isinstance(config.linear, str)
    assert (choices(config.linear)[0], config.embedding) == (name, "int8")
    bits = resolve_format(name).bits_per_weight(4096, 4096)
    assert isinstance(config.promise_bits, float)
    assert (bits + 8.5) / 2 <= config.promise_bits <= max(6.5, (bits + 8.5) / 2 + 0.4, bits + 1.0)


def test_promises_of_recipes_do_not_change_with_later_formats() -> None:
    promises = {name: QuantConfig(name).promise_bits for name in ("nf4", "nf4:block=4096", "int4", "int8", "float")}
    assert promises == {"nf4": 6.5, "nf4:block=4096": 6.5, "int4": 6.5, "int8": 9.0, "float": None}
    assert QuantConfig("nf4:block=32").promise_bits == 6.75
    assert QuantConfig("int8:group=32").promise_bits == 9.5


def test_a_parameter_without_a_value_is_true() -> None:
    assert parse_format("nf4:double_quant") == parse_format("nf4:block=64,double_quant=True")
    assert QuantConfig("fp4:block=128, double_quant").linear == "fp4:block=128, double_quant"
    with pytest.raises(UnknownFormatError, match="no parameter 'quant'; it takes: block, double_quant"):
        QuantConfig("nf4:quant")
    with pytest.raises(UnknownFormatError, match="block=True is not one of 32"):
        QuantConfig("nf4:block")


@pytest.mark.parametrize(("text", "error"), [
    ("nf5", "no recipe is called 'nf5'.*'nf4'"), ("nf4:block=3", "block=3 is not one of"), ("nf4:64", "key=value"),
    ("int4:size=32", "no parameter 'size'"),
])  # fmt: skip
def test_unknown_formats_and_parameters_are_refused_with_choices(text: str, error: str) -> None:
    with pytest.raises(UnknownFormatError, match=error):
        QuantConfig(text)
    if text != "nf5":
        with pytest.raises(UnknownFormatError):
            QuantConfig("nf4", rules={"a": text})


def test_format_texts_come_back() -> None:
    for text in (
        "nf4:block=128", "int8", "int4:group=64,symmetric=False", "nf4:block=64,double_quant=True", "int8:group=32",
        "int4:group=row,scale=fp32,symmetric=True", "llm_int8",
    ):  # fmt: skip
        assert format_text(parse_format(text)) == text
    assert format_text(parse_format("int8:group=row,scale=fp32")) == "int8"


def test_the_first_matching_rule_wins_and_is_named() -> None:
    config = QuantConfig("nf4", rules=(Rule("*.query", "int8", "sensitive"), Rule("encoder.*", None)))
    assert config.choose(("encoder.0.query.weight",), "linear") == ("int8", "rule '*.query': sensitive")
    assert config.choose(("encoder.0.key.weight",), "linear") == (None, "rule 'encoder.*'")
    assert config.choose(("head.weight",), "linear") == ("nf4", "")
    assert config.choose(("emb.weight",), "embedding") == ("int8", "")


def test_rules_that_match_nothing_are_refused_with_near_names() -> None:
    weights, modules = ["encoder.layer.0.query.weight"], ["encoder", "encoder.layer", "encoder.norm"]
    with pytest.raises(RecipeError, match=r"'\*\.qeury' matches no module.*encoder\.layer\.0\.query"):
        QuantConfig("nf4", rules={"*.qeury": None}).check_rules(weights, modules)
    with pytest.raises(RecipeError, match="hold no weight of a linear"):
        QuantConfig("nf4", rules={"encoder.norm": None}).check_rules(weights, modules)
    QuantConfig("nf4", rules={"*.query": None}).check_rules(weights, modules)


@pytest.mark.parametrize("bad", [5, "x", [("a", 4)], [(3, "nf4")]])
def test_malformed_rules_are_refused(bad: Any) -> None:
    with pytest.raises(RecipeError):
        QuantConfig("nf4", rules=bad)
    with pytest.raises(RecipeError, match="quant="):
        QuantConfig.of(5)  # type: ignore[arg-type]


def _row(name: str, shape: tuple[int, ...], after: int, counts: bool = True) -> LedgerRow:
    row = LedgerRow((name,), shape, "float32", "nf4:block=64", "", 0, after, counts)
    return LedgerRow((name,), shape, "float32", "nf4:block=64", "", 4 * row.elements, after, counts)


def test_bits_per_weight_count_every_stored_bit_of_matrices_and_nothing_else() -> None:
    ledger = Ledger(
        (_row("a", (10, 8), 50), _row("b", (4, 5), 80), _row("bias", (100,), 400, counts=False)), "nf4", 11.0
    )
    assert ledger.bits_per_weight() == pytest.approx(8 * 130 / 100)
    ledger.check_promise()
    totals = json.loads(ledger.to_json())["totals"]
    assert totals["bytes_after"] == 530 and totals["bytes_before"] == 4 * 200


def test_a_missed_promise_names_the_worst_and_the_way_out() -> None:
    ledger = Ledger((_row("small", (10, 10), 50), _row("big", (10, 10), 400)), "nf4", 6.5)
    with pytest.raises(PromiseError, match=r"promises 6\.5 .* takes 18\.000.*big at 32\.00.*promise_bits=18\.0"):
        ledger.check_promise()
    Ledger(ledger.rows, "nf4", None).check_promise()


def test_the_table_has_a_line_for_each_row_and_the_totals() -> None:
    lines = Ledger((_row("a", (10, 8), 50),), "nf4", None).table().splitlines()
    assert lines[2].startswith("a ") and "10x8" in lines[2] and lines[-1].startswith("total")


def test_recipes_and_the_ledger_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import qcompiler.config, qcompiler.ledger, qcompiler"
    subprocess.run([sys.executable, "-c", code], check=True)
