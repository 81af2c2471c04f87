"""How byte-level BPE tokenizers split a text before they merge: the names of `tokenizer.ggml.pre` in GGUF files.

A name stands for regular expressions that are applied one after the other: each splits the pieces of the one before
into matches and what lies between them.  Where llama.cpp rewrites an expression, because its own engine lacks classes
such as `\\p{Lu}` or `(?i:`, this table has the expression of the tokenizer that the model was trained with.

Sources: llama.cpp, src/llama-vocab.cpp (names, order, which of them skip merges or add a start token), and the
tokenizer.json of the models.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _modern(numbers: str) -> str:
    """The expression that cl100k introduced: contractions, words with one sign before them, `numbers`, signs."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(numbers: str, contraction: str) -> str:
    """The expression that o200k introduced: a word ends where a small letter meets a capital one."""
    sign, large, small = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"{sign}{large}*{small}+{contraction}|{sign}{large}+{small}*{contraction}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3, _QWEN2 = _modern(r"\p{N}{1,3}"), _modern(r"\p{N}")
_GPT4O = _cased(r"\p{N}{1,3}", rf"{_CONTRACTIONS}?")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
_DEEPSEEK_LETTERS = (
    # Letters with a case, without scripts that were added to Unicode or got a case after that tokenizer was made.
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}\x{10cd}\x{10d0}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d40}-\x{10d8f}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_DEEPSEEK_LETTERS}+",
    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{d7ff}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-\x{d7ff}]+", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Split:
    """One way to split: its expressions; whether a piece that is a token stays whole, whatever the merges say
    (`whole_tokens`); whether a text begins with the start token if the file does not say (`starts`)."""

    patterns: tuple[str, ...]
    whole_tokens: bool = False
    starts: bool = False


def _table() -> dict[str, Split]:
    by_names: dict[str, Split] = {
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Split((_LLAMA3,), True, True),
        "dbrx smaug-bpe glm4 chatglm-bpe": Split((_LLAMA3,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Split((_QWEN2,)),
        "qwen35": Split(
            (_QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"),)
        ),
        "gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat "
        "a.x-4.0 mellum modern-bert exaone4 trillion granite-docling": Split((_GPT2,)),
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Split((r"\p{N}", _GPT2)),
        "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "deepseek-llm": Split(_DEEPSEEK),
        "deepseek-coder": Split(_DEEPSEEK_CODER),
        "deepseek-v3 hunyuan-dense joyai-llm": Split(_DEEPSEEK3),
        "gpt-4o llama4 kanana2 talkie minimax-m2": Split((_GPT4O,)),
        "tekken": Split((_cased(r"\p{N}", ""),), True, True),
        "bloom gpt3-finnish poro-chat": Split((_BLOOM,)),
        "viking": Split((_BLOOM, r"\p{N}")),
        "default": Split(_DEFAULT),
    }
    return {name: split for names, split in by_names.items() for name in names.split()}


SPLITS = _table()

__all__ = ["SPLITS", "Split"]
