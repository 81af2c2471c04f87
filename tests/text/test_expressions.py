"""Expressions of a tokenizer.json: published ones run, those that could take hours are refused before the engine sees
them, and what is accepted takes linear time in the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from qcompiler.errors import TokenizerError
from qcompiler.lm.text import Text
from qcompiler.lm.text.expressions import MAX_STEPS, check_expressions
from qcompiler.lm.text.splits import SPLITS

TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def splitting(*patterns: str) -> dict[str, Any]:
    steps = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated"} for each in patterns]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


@pytest.mark.parametrize("name", SPLITS)
def test_each_known_way_to_split_is_accepted(name: str) -> None:
    check_expressions(splitting(*SPLITS[name].patterns))


@pytest.mark.parametrize("pattern", [
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,2}}|{TAIL}",  # another count of digits
    r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", r"\d", r"[0-9]{3}", r"\d|[\p{P}\p{S}]", r" {2,}", r"(?<= ) +",
    r"<0x[0-9A-F]{2}>", r"[[:alpha:]]+|[a-z&&[^b]]+", r"\\[a-z]+(?:_[a-z0-9]{1,8})?", r"[\]x]y", r"(?>a|b)c*+", "",
])  # fmt: skip
def test_usual_expressions_are_accepted(pattern: str) -> None:
    check_expressions(splitting(pattern))


@pytest.mark.parametrize(("pattern", "why"), [
    (r"(a+)+$", "a repetition without bound, and behind or around it"),
    (r"(?:.|..){1,24}\b\B", f"more than {MAX_STEPS} steps"),
    (r"[\s\S]*[\s\S]*\b\B", "a repetition without bound"),
    (r"[\s\S]+\b\B", "a repetition without bound"),
    (r"\d|(?=a*)", "a repetition without bound"),
    (r"(?:a+|b)c", "a repetition without bound"),
    (r"(?:a+b)*c", "a repetition without bound"),
    (r"(?:a?)+", "repeats without bound what may match nothing"),
    (r"(?:a?){30}a{30}", "steps"),
    (r"(a|b)\1", r"it has '.*1', which is not known"),
    (r"a**", "a quantifier behind a quantifier"),
    (r"a{3,}{3,}", "a quantifier behind a quantifier"),
    (r"a{3,2}", "at least 3 and at most 2"),
    (r"(?x)a +b", r"it has '\(\?x\)', which"),
    (r"(?~a)", r"it has '\(\?~a'"),
    (r"(?(a)b)", "which is not known here"),
    (r"[ab", "a class that is not closed"),
    (r"(ab", "a bracket that is not closed"),
    (r"ab)", "a bracket that was not opened"),
    ("(" * 40 + ")" * 40, "nested deeper"),
    ("[" * 40 + "]" * 40, "nested deeper"),
    ("a" * 5000, "5,000 characters"),
])  # fmt: skip
def test_what_may_take_hours_is_refused_with_the_reason(pattern: str, why: str) -> None:
    with pytest.raises(TokenizerError, match=why):
        check_expressions(splitting(pattern))


def test_many_expressions_share_the_bound() -> None:
    check_expressions(splitting(*["[ab]{20}"] * 10))
    with pytest.raises(TokenizerError, match="with the others"):
        check_expressions(splitting(*["[ab]{20}"] * 100))


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_each_part_is_read(part: str) -> None:
    step = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    with pytest.raises(TokenizerError, match=rf"its {part} has an expression .*\(a\+\)\+\$"):
        check_expressions({part: {"type": "Sequence", "steps": [step]}})


LEAVES = st.sampled_from(
    ["a", "b", ".", "[ab]", r"\w", r"[^b]", r"\b", "$", "(?!a)", "(?=b)", r"[\s\S]", r"\s+", r"\s*[\r\n]+"]
)
PATTERNS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.tuples(
            st.sampled_from(["(", "(?:", "(?=", "(?!", "(?i:"]), inner,
            st.sampled_from([")", ")*", ")+", ")?", "){0,3}", "){2,9}", "){2,}", ")+?"]),
        ).map("".join),
        st.tuples(
            st.sampled_from(["a", "[ab]", "."]), st.sampled_from(["*", "+", "?", "{1,20}", "*?"]), inner
        ).map("".join),
    ),
    max_leaves=8,
)  # fmt: skip
TEXTS = ("a" * 3000, "ab" * 1500, ("a" * 40 + "b\n ") * 70)


@example(r"(?:a|[ab]){2,9}b*")
@settings(deadline=None, max_examples=60)
@given(PATTERNS)
def test_what_is_accepted_takes_linear_time(pattern: str) -> None:
    """What the rules exclude takes minutes on these texts, or makes the engine give up."""
    try:
        check_expressions(splitting(pattern))
    except TokenizerError:
        return
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:
        assert "onig" in repr(error).lower() or "target" in repr(error), error  # the engine does not take it
        return
    for text in TEXTS:
        begin = time.process_time()
        assert "".join(piece for piece, _ in split.pre_tokenize_str(text)) == text
        assert time.process_time() - begin < 2.0, pattern


def test_a_folder_with_such_an_expression_is_refused_by_its_name(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, **splitting("(a+)+$")}))
    with pytest.raises(TokenizerError, match=rf"{tmp_path.name}.*might take hours.*'\(a\+\)\+\$'.*pass ids"):
        Text.from_folder(tmp_path)
