"""`qc search`: the front goes to stdout, the recipe to a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcompiler.command_inputs import check_writable, from_factory
from qcompiler.errors import ArgumentError
from qcompiler.lm.search import search as search_recipe
from qcompiler.recipes.drawing import check_drawable
from qcompiler.recipes.result import SearchResult
from qcompiler.runtime.array_files import read_arrays
from qcompiler.runtime.files import replacing

ARRAYS = (".npy", ".npz")


def search(options: argparse.Namespace) -> None:
    """Checks what is to be written first: nothing is written before the search has ended."""
    wanted = ((options.output, (".toml",)), (options.plot, (".svg", ".png")), (options.report, (".json",)))
    for path, suffixes in wanted:
        check_writable(path)
        if path is not None and path.suffix not in suffixes:
            raise ArgumentError(f"'{path}' must end in {' or '.join(suffixes)}")
    check_drawable(options.plot)
    result = _searched(options)
    print(result.table())
    print(f"\n{result.report()}")
    result.save(options.output)
    if options.plot is not None:
        result.plot(options.plot)
    if options.report is not None:
        with replacing(options.report) as file:
            file.write(result.report().to_json().encode())
    for path, _ in wanted:
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)


def _searched(options: argparse.Namespace) -> SearchResult:
    how: dict[str, Any] = {
        "candidates": options.candidates, "merged": not options.separate, "sensitivity": options.sensitivity,
        "measure": options.measure, "workdir": options.workdir, "speed": options.speed, "num_threads": options.threads,
    }  # fmt: skip
    if not Path(options.model).exists() and ":" in options.model:
        texts = {"--limit": options.limit, "--max-seq-len": options.max_seq_len}
        if given := [name for name, value in texts.items() if value is not None]:
            raise ArgumentError(f"{' and '.join(given)}: of texts for a language model, and '{options.model}' is none")
        model, args, kwargs, dims = from_factory(options.model)
        data = [_input(path) for path in options.data]
        if args or kwargs:  # without them the first of the data is the example
            how |= {"args": args, "kwargs": kwargs}
        return search_recipe(model, data, options.budget, dynamic_shapes=dims, **how)
    data = [_text(path, options.limit) for path in options.data]
    return search_recipe(Path(options.model), data, options.budget, max_seq_len=options.max_seq_len, **how)


def _text(path: Path, limit: int | None) -> str:
    if path.suffix in ARRAYS:
        raise ArgumentError(f"--data {path}: a language model reads texts; arrays are for package.module:function")
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is no text in UTF-8: {error}") from error
    return text if limit is None else text.encode()[: max(limit, 0)].decode(errors="ignore")


def _input(path: Path) -> Any:
    """An array is the one argument, an .npz with names the keywords."""
    import torch

    if path.suffix not in ARRAYS:
        raise ArgumentError(f"--data {path}: the inputs of a function's model are .npy or .npz files, one for each")
    found = read_arrays(path)
    if isinstance(found, Mapping):
        return {name: torch.from_numpy(values.copy()) for name, values in found.items()}
    return torch.from_numpy(found.copy())  # what was read is a mapping that cannot be written


__all__ = ["search"]
