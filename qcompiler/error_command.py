"""`qc inspect FILE --error DATA --model WHERE`: the errors of a program of a file.

A file holds neither the float model nor the graph of its oracle.  So the model is made again and compiled again, and
the result must be the program of the file: the same plan, and the same bytes of weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from qcompiler.api import qcompile
from qcompiler.command_inputs import from_factory
from qcompiler.config import QuantConfig
from qcompiler.errors import ArgumentError
from qcompiler.input_files import by_structure, read_inputs
from qcompiler.inspect.error_report import ErrorReport
from qcompiler.program import Program
from qcompiler.runtime.image import with_digests
from qcompiler.runtime.program_file import Header, read_program
from qcompiler.runtime.repack import canonical_directory, to_canonical


def errors_of_file(path: Path, data: Path, where: str | None, quant: str | None) -> ErrorReport:
    """The errors of the program in a file on the inputs in `data` (.npz by the names of the inputs, or one .npy).

    `where` is `package.module:function`, as for `qc compile`; `quant` the recipe, by default what the ledger names.
    ArgumentError without `where`, and if the model does not compile to the program of the file.
    """
    if where is None:
        raise ArgumentError(
            f"--error compares {path.name} with the model that it was compiled from, and a file holds neither the "
            "float weights nor the graph: add --model package.module:function, the function of `qc compile`"
        )
    header, _ = read_program(path)
    if len(header.plan.devices) > 1:
        raise ArgumentError(
            f"{path.name} runs on several devices, and a file does not hold the map of its modules: use Program.errors "
            "where it is compiled"
        )
    args, kwargs = read_inputs([data])
    model, program = _compiled_again(header, where, quant)
    _require_same(program, header, path, where)
    given, named = by_structure(program.plan, program.image.signature, args, kwargs)
    return program.errors(*given, model=model, **named)


def _compiled_again(header: Header, where: str, quant: str | None) -> tuple[Any, Program]:
    """(the float model, the program)."""
    model, args, kwargs, dynamic_shapes = from_factory(where)
    recipe = quant if quant is not None else _recipe(header)
    kind, isa = header.plan.devices[0].kind, header.target.isa
    device = "cpu" if kind == "cpu" else f"{kind}:0"
    program = qcompile(
        model, args, kwargs, quant=recipe, dynamic_shapes=dynamic_shapes, device=device, targets=[isa]
    )  # fmt: skip
    return model, program


def _recipe(header: Header) -> QuantConfig | None:
    """The recipe that the ledger names. It may have had rules, which a ledger does not hold.

    RecipeError for a name that is no preset: a file's name in a ledger is not opened.
    """
    totals = header.ledger.get("totals") if isinstance(header.ledger, dict) else None
    name = totals.get("recipe") if isinstance(totals, dict) else None
    return QuantConfig(name) if isinstance(name, str) else None


def _require_same(program: Program, header: Header, path: Path, where: str) -> None:
    """ArgumentError unless a program has the plan and the weights of a file."""
    image = program.image
    what = None
    plan = image.plan if header.plan.moved is not None else msgspec.structs.replace(image.plan, moved=None)
    if plan != header.plan:
        what = "another plan"
    else:
        stored, weights = image.plan.weights, image.weights
        if header.layout == "canonical":
            stored = canonical_directory(image.plan.weights)
            weights = to_canonical(image.plan.weights, image.weights, stored)
        if with_digests(stored, weights) != header.stored:
            what = "other weights"
    if what is not None:
        raise ArgumentError(
            f"{where} compiles to {what} than {path.name} has, so its errors would be those of another program. Give "
            "the recipe with --quant, and see that weights and the version of qcompiler are the same (a function that "
            "draws random weights calls torch.manual_seed first); for a compile "
            "with `calibrate`, `buckets` or a recipe in Python use Program.errors there"
        )


__all__ = ["errors_of_file"]
