"""Compares the tokens of GGUF files with those that llama.cpp published for them.

    python tests/text/compare_llama_cpp.py llama.cpp/models

llama.cpp's repository has files of vocabularies (ggml-vocab-*.gguf) with hard texts (.inp) and their tokens (.out).
They are megabytes of others, so they are not here; docs/tokenizers.md has the outcome of the last comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qcompiler.lm.text import Text

SEPARATOR = "\n__ggml_vocab_test__\n"


def compare(path: Path) -> tuple[int, list[str]]:
    """The number of texts of one vocabulary, and those with other tokens, or that do not come back.

    WordPiece loses spaces and capital letters, so its texts need not come back.
    """
    text = Text.from_gguf(path)
    given = Path(f"{path}.inp").read_text(encoding="utf-8").split(SEPARATOR)
    given = given[:-1] if not given[-1] else given
    published = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")[: len(given)]
    wrong = []
    for each, line in zip(given, published, strict=True):
        ids = text.encode(each, wrap=False)
        comes_back = text.decode(ids) == each or "bert" in path.name
        if ids != [int(number) for number in line.split()] or not comes_back:
            wrong.append(each)
    return len(given), wrong


def main(folder: Path) -> int:
    """Prints a line for each vocabulary. 1 if one has other tokens, or there is none."""
    files = [path for path in sorted(folder.glob("*.gguf")) if Path(f"{path}.inp").is_file()]
    failed = not files
    for path in files:
        count, wrong = compare(path)
        failed = failed or bool(wrong)
        print(f"{path.name}: {count - len(wrong)} of {count} texts agree")
        for each in wrong:
            print(f"    {each!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
