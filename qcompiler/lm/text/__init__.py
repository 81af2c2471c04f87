"""Tokenizers and chat templates: text to ids and back. Needs `pip install "qcompiler[lm]"`."""

from qcompiler.lm.text.pieces import Stream
from qcompiler.lm.text.text import Message, Text

__all__ = ["Message", "Stream", "Text"]
