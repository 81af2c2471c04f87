"""How far torch.export is.  It is one call that says nothing, but it calls the model's modules one after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from qcompiler.runtime.progress import Counted


@contextmanager
def counting_modules(model: nn.Module) -> Iterator[None]:
    """While it is entered, progress counts the modules of the model that have been called, each once.

    The total is an upper bound: a module that the model holds and does not call is never counted.
    """
    waiting = {id(module): module for module in model.modules() if _has_forward(module)}
    with Counted("tracing the model", len(waiting), "modules") as progress:

        def called(module: nn.Module, _args: Any, _result: Any) -> None:
            if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond, which may change nothing outside of it
                return
            if waiting.pop(id(module), None) is not None:  # one step, also if two threads call the module
                progress.step(1)

        # For the modules of the whole process: a hook of this model's would be a change of the model.
        handle = register_module_forward_hook(called)
        try:
            yield
        finally:
            handle.remove()


def _has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: an nn.ModuleList, for example, cannot."""
    return type(module).forward is not nn.Module.forward


__all__ = ["counting_modules"]
