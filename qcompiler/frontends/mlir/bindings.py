"""MLIR's parsers: jaxlib has StableHLO's, torch-mlir has those of torch, linalg, tensor, arith, math and shape.

Both are imported here only, and only when a text needs one.
"""

from __future__ import annotations

import importlib
from typing import Any

from qcompiler.errors import ExportError, MissingDependencyError
from qcompiler.frontends.mlir.text import ModuleText

JAX = "pip install 'qcompiler[jax]'"
TORCH_MLIR = "pip install 'qcompiler[mlir]'"


def load(text: ModuleText, file: str) -> None:
    """Imports the parsers that a text needs. MissingDependencyError with the command to run."""
    if text.dialect != "stablehlo" or text.mixed:
        _torch_mlir(text, file)
    if text.dialect == "stablehlo":
        _jaxlib(file)


def parse(text: ModuleText, file: str) -> Any:
    """The parsed and verified module, in the bindings of the dialect's parser.

    MissingDependencyError with the command to run; ExportError with the parser's message.
    """
    if text.dialect != "stablehlo":
        return _with_torch_mlir(text, file)
    body = text.body
    if text.mixed:
        module = _with_torch_mlir(text, file)
        body = module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True)
    return _with_jaxlib(body, file)


def _jaxlib(file: str) -> tuple[Any, Any, list[Any]]:
    """`ir`, the extension with upstream's dialects, and the modules of StableHLO's."""
    try:
        ir = importlib.import_module("jaxlib.mlir.ir")
        upstream = importlib.import_module("jaxlib.mlir._mlir_libs._jax_mlir_ext")
        names = ("stablehlo", "chlo", "sdy", "mhlo")
        return ir, upstream, [importlib.import_module(f"jaxlib.mlir.dialects.{name}") for name in names]
    except ImportError as error:
        raise MissingDependencyError(
            f"{file} is StableHLO, which is read with JAX's parser; install it with: {JAX}"
        ) from error


def _with_jaxlib(body: str, file: str) -> Any:
    ir, upstream, (stablehlo, chlo, sdy, mhlo) = _jaxlib(file)
    context = ir.Context()
    context.allow_unregistered_dialects = True  # shape and tensor; each op is looked up by name afterwards
    registry = ir.DialectRegistry()
    upstream.register_dialects(registry)  # func and arith
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)  # attributes of JAX's custom calls
    return _parsed(ir, context, body, file)


def _torch_mlir(text: ModuleText, file: str) -> tuple[Any, Any, Any]:
    """`ir`, the module of the torch dialect, and `passmanager`."""
    try:
        ir, dialect, passes = (
            importlib.import_module(f"torch_mlir.{name}") for name in ("ir", "dialects.torch", "passmanager")
        )
    except ImportError as error:
        what = "StableHLO with ops of shape and tensor" if text.mixed else f"in the {text.dialect} dialect"
        raise MissingDependencyError(
            f"{file} is {what}, which is read with torch-mlir's parser; install it with: {TORCH_MLIR}"
        ) from error
    return ir, dialect, passes


def _with_torch_mlir(text: ModuleText, file: str) -> Any:
    ir, dialect, passes = _torch_mlir(text, file)
    context = ir.Context()
    dialect.register_dialect(context)
    if text.mixed:  # running the pass on nothing loads the dialects that it may make
        with context, ir.Location.unknown():
            loading = passes.PassManager.parse("builtin.module(func.func(convert-torch-to-stablehlo))")
            loading.run(ir.Module.create().operation)
    return _parsed(ir, context, text.body, file)


def _parsed(ir: Any, context: Any, body: str, file: str) -> Any:
    with context, ir.Location.unknown():
        try:
            module = ir.Module.parse(body)
            module.operation.verify()
        except (ir.MLIRError, ValueError) as error:
            raise ExportError(f"{file} does not parse: {_message(str(error))}") from error
    return module


def _message(text: str) -> str:
    """The first error of MLIR's, with its line."""
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    found = (lines or [text.strip()])[0].removeprefix("error:").strip()
    return found.replace('"-":', "line ")[:500]


def walk(op: Any) -> list[Any]:
    """The operations inside of another one, at any depth."""
    found, stack = [], [op]
    while stack:
        for region in stack.pop().regions:
            for block in region.blocks:
                inner = [each.operation for each in block.operations]
                found += inner
                stack += [each for each in inner if len(each.regions)]
    return found
