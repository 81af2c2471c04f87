"""Origins in the user's program: module paths and source lines of fx nodes and of exceptions."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[2])  # qcompiler/frontends
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)')


def is_user_file(path: str) -> bool:
    """Whether a file is not torch's, not this frontend's, and not generated code."""
    return not path.startswith((_TORCH, _HERE, "<")) and "/sympy/" not in path


def module_path(node: fx.Node) -> str:
    """`encoder.layer.0.attention.self.query`: the innermost module that the node was traced in; "" for the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"^L\['self'\]\.?", "", path)
    return re.sub(r"\['?([^'\]]+)'?\]", r".\1", path).replace("@1", "").strip(".")


def place(node: fx.Node) -> str:
    """The text of `qc.path`: the module path, or `model.py:84` for an op of the outermost module."""
    path = module_path(node)
    if path:
        return path
    file, _, rest = source_line(node).partition(":")
    return f"{Path(file).name}:{rest.partition(' ')[0]}" if file else ""


def source_line(node: fx.Node) -> str:
    """`file.py:84 in forward: x = self.f(y)`: the innermost line outside torch; "" if torch kept none."""
    frames = [m for m in _FRAME.finditer(str(node.meta.get("stack_trace") or "")) if is_user_file(m["file"])]
    frames = frames or list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    return (
        f"{frames[-1]['file']}:{frames[-1]['line']} in {frames[-1]['function']}: {frames[-1]['code'].strip()}"
        if frames
        else ""
    )


def describe(node: fx.Node) -> str:
    """` in module 'encoder.layer.0' (file.py:84 in forward: …)`, for the middle of an error message."""
    path, line = module_path(node), source_line(node)
    where = f" in module '{path}'" if path else ""
    return where + (f" ({line})" if line else "")


def line_of_exception(error: BaseException) -> str:
    """The innermost line outside torch in the traceback of the exception or of one of its causes."""
    current: BaseException | None = error
    while current is not None:
        found = _line_of_traceback(current.__traceback__)
        if found:
            return found
        current = current.__cause__ or current.__context__
    return ""


def _line_of_traceback(trace: TracebackType | None) -> str:
    frames = [f for f in traceback.extract_tb(trace) if is_user_file(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}: {(last.line or '').strip()}"


_GUARDS = ("torch/__init__.py", "sym_node.py", "symbolic_shapes.py", "recording.py", "_stats.py")

_WITHIN_A_TRACE = ("narrowing.py", "settled_conditions.py", "pooling.py", "recurrent.py")
"""Modules of this frontend that torch calls while it traces."""


def line_of_frame(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line outside torch at or above `frame` and below this frontend's call of torch.export.

    The flag says whether the line itself is the condition (`if x.shape[1] > 1`), not an operator that it called.
    """
    direct = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and not name.endswith(_WITHIN_A_TRACE):
            break
        if is_user_file(name):
            code = linecache.getline(name, frame.f_lineno).strip()
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}: {code}", direct
        direct = direct and name.endswith((*_GUARDS, "narrowing.py", "settled_conditions.py"))
        frame = frame.f_back
    return "", False


def readable(module: Any) -> str:
    """The text of a graph module with shapes and source lines."""
    return str(module.print_readable(print_output=False, colored=False))
