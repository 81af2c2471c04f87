"""`qc bench`: calls of a program on random inputs, timed as a whole, or launch by launch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np

from qcompiler.command_inputs import from_factory
from qcompiler.errors import ArgumentError, IndexOutOfRangeError
from qcompiler.inspect.eager import eager_times
from qcompiler.plan.dims import dim
from qcompiler.plan.plan import EntryPoint, Plan
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.profile import Profile
from qcompiler.runtime.tree import arguments_of

WARM_UP = 3


class Bench:
    """A program and one set of arguments: normal floats, integers that are ones (zeros where a one is outside of a
    table), and sizes as large as they can be where `dims` does not name them. ArgumentError if a call of these sizes
    does not run the entry point asked for."""

    def __init__(self, run: LoadedProgram, entry: str | None = None, dims: Sequence[tuple[str, int]] = ()) -> None:
        self.run = run
        chosen = _entry(run.plan, entry)
        self.symbols = {symbol.name: symbol.max for symbol in chosen.symbols}
        for name, value in dims:
            if name not in self.symbols:
                raise ArgumentError(
                    f"--dim {name}={value}: the dimensions of '{chosen.name}' are {_list(self.symbols)}"
                )
            self.symbols[name] = value
        shapes = tuple(tuple(dim(size).evaluate(self.symbols) for size in sig.shape) for sig in chosen.inputs)
        self.entry = run.plan.entries[run.binder.bind(shapes).entry]
        if entry is not None and self.entry is not chosen:
            raise ArgumentError(
                f"--entry {chosen.name}: at {self._sizes} a call runs '{self.entry.name}', which comes first; give "
                "other sizes by --dim"
            )
        self.args, self.kwargs = _arguments(run, chosen, shapes, 1)
        try:
            run(*self.args, **self.kwargs)
        except IndexOutOfRangeError:  # of a table with one row: ones are for masks, and zeros are in every table
            self.args, self.kwargs = _arguments(run, chosen, shapes, 0)

    @property
    def _sizes(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.symbols.items()) or "static shapes"

    def times(self, rounds: int) -> dict[str, Any]:
        """Figures of timed calls as JSON values, in seconds."""
        for _ in range(WARM_UP):
            self.run(*self.args, **self.kwargs)
        times, before = [], self.run.report()["torch_seconds"]
        for _ in range(rounds):
            start = time.perf_counter()
            self.run(*self.args, **self.kwargs)
            times.append(time.perf_counter() - start)
        figures: dict[str, Any] = {
            "entry": self.entry.name,
            "dims": self.symbols,
            "rounds": len(times),
            "median_s": median(times),
            "min_s": min(times),
        }
        after = self.run.report()["torch_seconds"]
        if after["calls"] > before["calls"]:
            figures["torch_share"] = (after["torch"] - before["torch"]) / (after["calls"] - before["calls"])
        return figures

    def text(self, figures: Mapping[str, Any]) -> str:
        """The figures in a line or two."""
        where = f"{self.entry.name}, " * (len(self.run.plan.entries) > 1) + self._sizes
        middle, least = figures["median_s"] * 1e3, figures["min_s"] * 1e3
        line = f"{where}: median {middle:.3f} ms, least {least:.3f} ms of {figures['rounds']} runs"
        if "torch_share" in figures:
            line += f"\nin torch: {figures['torch_share']:.0%} of the time"
        return line

    def profile(self, rounds: int, model: str | None = None) -> Profile:
        """The time of each launch. `model` ("package.module:function") is called for the float model, which eager torch
        runs on the same arguments; without it the profile says why it has no times of torch."""
        if model is not None:  # eager torch comes first: an error in the model does not lose a profile
            threads = self.run.num_threads or None
            times = eager_times(from_factory(model)[0], self.args, self.kwargs, rounds=rounds, threads=threads)
            return self.run.profile(*self.args, rounds=rounds, **self.kwargs).beside(times)
        found = self.run.profile(*self.args, rounds=rounds, **self.kwargs)
        why = (
            "name the float model: --model package.module:function" if find_spec("torch") else "torch is not installed"
        )
        return replace(found, eager_missing=why)


def _arguments(
    run: LoadedProgram, entry: EntryPoint, shapes: Sequence[tuple[int, ...]], integer: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random floats, and integers that all are `integer`."""
    generator, tensors = np.random.default_rng(0), []
    for shape, sig in zip(shapes, entry.inputs, strict=True):
        dtype = NUMPY_DTYPES[sig.dtype]
        is_float = sig.dtype in ("f32", "f64", "f16", "bf16")
        tensors.append(generator.standard_normal(shape).astype(dtype) if is_float else np.full(shape, integer, dtype))
    return arguments_of(run.signature.inputs, tensors)


def _entry(plan: Plan, name: str | None) -> EntryPoint:
    """The entry point of that name, or the first one."""
    if name is None:
        return plan.entries[0]
    found = [entry for entry in plan.entries if entry.name == name]
    if not found:
        raise ArgumentError(f"--entry {name}: the entry points are {_list(entry.name for entry in plan.entries)}")
    return found[0]


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
