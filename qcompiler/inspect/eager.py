"""Eager torch on the input of a profile: the time of a call, and each module's own time in it.

found = program.profile(x).beside(eager_times(model, (x,)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from qcompiler.errors import ArgumentError
from qcompiler.runtime.profile import EagerTimes

WARM_UP = 3


def eager_times(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rounds: int = 30,
    threads: int | None = None,
) -> EagerTimes:
    """Medians over the rounds, in microseconds, without gradients, on so many threads of torch's.

    A module's own time is that between its hooks without that of the modules inside of it.  Calls with hooks and calls
    without take turns: the whole call's time is that of the latter.  On a GPU the hooks wait for the device.  Arrays of
    NumPy become tensors.  States of the model change as by that many calls.
    ArgumentError for something that is no module of torch, or without rounds.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"eager={type(model).__name__}: give the float model, a torch.nn.Module")
    if rounds < 1:
        raise ArgumentError(f"rounds={rounds}: a profile takes one round or more")
    given, named = torch.utils._pytree.tree_map(_tensor, (tuple(args), dict(kwargs or {})))
    wait = _waiting(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with torch.no_grad():
            wholes, parts = [], []
            for _ in range(WARM_UP + rounds):
                began = perf_counter()
                model(*given, **named)
                wait()
                wholes.append(perf_counter() - began)
                with _watched(model, wait) as own:
                    model(*given, **named)
                parts.append(own)
    finally:
        torch.set_num_threads(before)
    kept = parts[WARM_UP:]
    modules = {path: median(each.get(path, 0.0) for each in kept) * 1e6 for path in kept[0]}
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()}) or ["no parameters"]
    count = threads or before
    note = f"torch {torch.__version__}, {', '.join(dtypes)}, {count} thread{'s' * (count != 1)}"
    return EagerTimes(median(wholes[WARM_UP:]) * 1e6, modules, note)


def _tensor(value: Any) -> Any:
    import torch

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _waiting(model: Any) -> Callable[[], None]:
    """Waits until the model's device is done."""
    import torch

    device = next((each.device for each in [*model.parameters(), *model.buffers()]), None)
    if device is None or device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


@contextmanager
def _watched(model: Any, wait: Callable[[], None]) -> Iterator[dict[str, float]]:
    """While it is entered, each call of a module adds its own seconds to what it gives, by path."""
    own: dict[str, float] = {}
    running: list[list[float]] = []  # the start of each open call, and the seconds of the calls inside of it

    def enters(_module: Any, _args: Any) -> None:
        wait()
        running.append([perf_counter(), 0.0])

    def leaves(path: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, _result: Any) -> None:
            wait()
            began, inside = running.pop()
            took = perf_counter() - began
            own[path] = own.get(path, 0.0) + took - inside
            if running:
                running[-1][1] += took

        return hook

    handles = []
    try:
        for path, module in model.named_modules():
            handles += [module.register_forward_pre_hook(enters), module.register_forward_hook(leaves(path))]
        yield own
    finally:
        for handle in handles:
            handle.remove()
