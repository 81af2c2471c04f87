"""Chat templates: Jinja text from a file that nobody here wrote, rendered within limits.

A template is a program.  jinja2's sandbox keeps it from Python's objects, but lets it loop for ever and build
gigabytes.  Here, everything in a template that can repeat or grow goes through a budget:

    loops, calls, filters                    a step each; recursive loops are refused
    ~  +  *  %  join replace tojson …        the size is known before the value is made
    lists, dicts, slices, captured blocks    charged by their elements, nested ones included
    output                                   at most MAX_TEXT characters

The syntax tree is rewritten so that operators which jinja2 does not let us intercept (`~`, slices, literals, `for`)
become filters whose names no template can write.  Methods and filters are those of a list.  What the template sees are
plain values: texts, numbers, lists and dicts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from qcompiler.errors import ChatTemplateError, MissingDependencyError, QCompilerError
from qcompiler.formats.foreign.json_text import shown
from qcompiler.lm.text.budget import BUDGET, MAX_TEXT, Budget, LimitError, plain

NAME = "<chat template>"


class ChatTemplate:
    """A compiled template. ChatTemplateError, with the line, if its syntax is wrong."""

    def __init__(self, source: str) -> None:
        self._environment = _environment()
        try:
            code = self._environment.compile(source, name=NAME, filename=NAME)
            template_class = self._environment.template_class
            self._template = template_class.from_code(self._environment, code, self._environment.make_globals(None))
        except RecursionError as error:
            raise ChatTemplateError("the chat template is nested too deeply") from error
        except Exception as error:
            line = getattr(error, "lineno", None)
            place = f"line {line} of the chat template" if line else "the chat template"
            raise ChatTemplateError(f"{place} is no valid Jinja: {shown(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. ChatTemplateError, with the line and the message, for whatever stops it."""
        given, size = plain(variables)
        budget = Budget(size)
        token = BUDGET.set(budget)
        pieces: list[str] = []
        try:
            for piece in self._template.generate(given):
                budget.output(len(piece))
                pieces.append(piece)
        except QCompilerError:
            raise
        except Exception as error:
            raise ChatTemplateError(_described(error, given.get("messages"))) from error
        finally:
            BUDGET.reset(token)
        return "".join(pieces)


def _described(error: Exception, messages: Any) -> str:
    """What went wrong, at which line, and at which message."""
    line, message = None, None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == NAME:
            line = trace.tb_lineno
            for value in trace.tb_frame.f_locals.values():
                for place, each in enumerate(messages if isinstance(messages, list) else []):
                    message = (place, each) if value is each and isinstance(each, dict) else message
        trace = trace.tb_next
    where = f"line {line} of the chat template" if line else "the chat template"
    if message:
        where += f", at message {message[0]} (role {shown(message[1].get('role'))})"
    match error:
        case LimitError():
            return f"{where}: {error}"
        case RecursionError():
            return f"{where}: macros call each other too deeply"
        case _ if type(error).__name__ == "TemplateError":
            return f"{where} refuses the messages: {shown(error)}"
        case _:
            return f"{where}: {type(error).__name__}: {shown(error)}"


@functools.cache
def _environment() -> Any:
    """The environment of all templates. MissingDependencyError has the command that installs jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError('chat templates need the package jinja2: pip install "qcompiler[lm]"') from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < (3, 1, 6):
        raise MissingDependencyError(
            f"jinja2 {jinja2.__version__} has known ways out of its sandbox; 3.1.6 is needed: "
            'pip install -U "qcompiler[lm]"'
        )
    from qcompiler.lm.text.sandbox import make_environment

    return make_environment()


__all__ = ["MAX_TEXT", "ChatTemplate"]
