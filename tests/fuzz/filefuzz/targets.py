"""What is done with an input: all that qcompiler does with such a file before a kernel is compiled or run.

A target calls `step` for each thing it does; a `QCompilerError` there refuses the input, and the next thing is tried.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from qcompiler.errors import QCompilerError

MIB = 1 << 20
LONGEST_MESSAGE = 10_000


class FuzzFinding(Exception):
    """Something that no exception says: a message that is too long."""


class _BeforeCompilerError(BaseException):
    """Raised instead of starting a compiler."""


@dataclass
class Steps:
    """What became of the steps of one input. `begin` is called before each, and gives it its time."""

    begin: Callable[[], object] = lambda: None
    done: int = 0
    refused: int = 0
    messages: list[str] = field(default_factory=list)

    def __call__(self, action: Callable[[], Any]) -> Any:
        self.begin()
        try:
            result = action()
        except QCompilerError as error:
            message = f"{type(error).__name__}: {error}"
            if len(message) > LONGEST_MESSAGE:
                raise FuzzFinding(f"a message of {len(message)} characters: {message[:200]}") from error
            self.refused += 1
            self.messages.append(message)
            return None
        self.done += 1
        return result


@dataclass(frozen=True)
class Target:
    """`run` gets the folder of an input, which may take `base` + `times` * its bytes of memory."""

    run: Callable[[Path, Steps], None]
    base: int
    times: int


# --- program files ---------------------------------------------------------------------------------------------------


def _qca(folder: Path, step: Steps) -> None:
    from qcompiler.inspect import files, stage_texts
    from qcompiler.runtime.program_file import load_image

    path = folder / "program.qca"
    found = step(lambda: load_image(path))
    if found is not None:
        step(lambda: _load(found[0]))
    for describe in (files.describe, files.summary, files.plan_json, files.timeline_of):
        step(lambda describe=describe: describe(path))  # type: ignore[misc]
    step(lambda: str(files.ledger_of(path)))
    step(lambda: files.kernels_text(files.kernels_of(path)))
    step(lambda: stage_texts.ops_text(stage_texts.read_stages(path).matching(re.compile("linear"))))


def _load(image: Any) -> None:
    """What `qc.load` does, up to the compiler, and behind it: memory of a session, and what binds a call."""
    from qcompiler.kernels.cuda import emit as cuda_emit
    from qcompiler.runtime import native
    from qcompiler.runtime.backends.cpu import CpuBackend
    from qcompiler.runtime.binding import Binder
    from qcompiler.runtime.loaded import LoadedProgram, _initial_states, check_image
    from qcompiler.runtime.placement import SessionMemory, SlotDevice
    from qcompiler.runtime.tree import input_flattener, output_flattener, unflattener

    check_image(image)
    plan = image.plan
    if plan.devices and plan.devices[0].kind == "cpu":
        with mock.patch.object(native, "compile_code", _before_compiler), contextlib.suppress(_BeforeCompilerError):
            LoadedProgram.from_image(image)
        native.scratch_stride(plan, "x86-64-v3")
        slots = {slot.name: SlotDevice(slot.name, CpuBackend("x86-64-v3"), None, {}) for slot in plan.devices}  # type: ignore[arg-type]
        SessionMemory(plan, plan.entries, slots)
    else:
        cuda_emit.emit_module(plan.kernels, "sm_90a")
    Binder(plan)
    input_flattener(image.signature.inputs)
    output_flattener(image.signature.outputs, len(plan.entries[0].outputs))
    unflattener(image.signature.outputs)
    _initial_states(plan, image.weights)


def _before_compiler(*_: Any, **__: Any) -> Any:
    raise _BeforeCompilerError


# --- GGUF, folders, safetensors --------------------------------------------------------------------------------------


def _read_all(weights: Any) -> None:
    for tensor in weights.tensors.values():
        if tensor.codes is not None:
            tensor.codes.read()
        tensor.view()
        tensor.identity()
        tensor.release()


def _gguf(folder: Path, step: Steps) -> None:
    from qcompiler.frontends.checkpoints.convert import convert
    from qcompiler.frontends.checkpoints.gguf_files import GgufFile
    from qcompiler.frontends.checkpoints.gguf_models import from_gguf

    path = folder / "model.gguf"
    file = step(lambda: GgufFile(path))
    if file is None:
        step(lambda: from_gguf(path))
        return
    step(lambda: dict(file.metadata))
    for tensor in file.tensors.values():
        step(tensor.values)
        step(lambda tensor=tensor: (tensor.identity(), tensor.release()))  # type: ignore[misc]
    checkpoint = step(lambda: from_gguf(path))
    if checkpoint is not None:
        step(lambda: (repr(checkpoint), _read_all(checkpoint.weights)))
        step(lambda: convert(path, folder / "out", layout="bitsandbytes", to="nf4", lossy=True))
    step(lambda: convert(path, folder / "out.gguf", to="q8_0", lossy=True))


def _folder(folder: Path, step: Steps) -> None:
    from qcompiler.frontends.checkpoints.checkpoint_folder import from_checkpoint
    from qcompiler.frontends.checkpoints.convert import convert

    checkpoint = step(lambda: from_checkpoint(folder))
    if checkpoint is not None:
        step(lambda: (repr(checkpoint), _read_all(checkpoint.weights)))
        step(lambda: convert(folder, folder / "out", layout="gptq_v2", to="int4:group=32", lossy=True))


def _safetensors(folder: Path, step: Steps) -> None:
    from qcompiler.frontends.quantise.lora_adapter import read_adapter
    from qcompiler.frontends.weights.safetensors_files import read_tensors
    from qcompiler.frontends.weights.weight_source import Shards

    if (folder / "adapter_config.json").exists() or (folder / "adapter_model.safetensors").exists():
        layers = step(lambda: read_adapter(folder, None))
        for layer in layers or ():
            step(lambda layer=layer: layer.delta(outputs_first=True)(0, 1))  # type: ignore[misc]
        return
    path = folder / "model.safetensors"
    step(lambda: Shards(path))
    tensors = step(lambda: read_tensors(path, codes=True))
    for tensor in (tensors or {}).values():
        step(lambda tensor=tensor: (tensor.array(), tensor.identity(), tensor.release()))  # type: ignore[misc]


# --- the command line ------------------------------------------------------------------------------------------------


def _opt(folder: Path, step: Steps) -> None:
    from qcompiler import cli

    path = folder / "input.mlir"
    first = path.read_bytes()[:200].partition(b"\n")[0].decode("ascii", "replace") if path.is_file() else ""
    passes = first.removeprefix("// passes: ").strip() if first.startswith("// passes: ") else ""
    context = folder / "context.safetensors"
    options = argparse.Namespace(
        file=str(path), list=False, mlir=False, generic=False, passes=passes,
        context=str(context) if context.exists() else None,
        print_after=None, print_after_change=False, verify_each=None, timing=False,
    )  # fmt: skip
    for syntax in ("pretty", "mlir", "generic"):
        options.mlir, options.generic = syntax == "mlir", syntax == "generic"
        with _output():
            step(lambda: cli._opt(options))
        options.passes = ""


def _arrays(folder: Path, step: Steps) -> None:
    from qcompiler import input_files
    from qcompiler.runtime import interop

    paths = [str(p) if p.suffix == ".npz" else f"{p.stem}={p}" for p in sorted(folder.iterdir())]
    found = step(lambda: input_files.read_inputs(paths))
    if found is None:
        return
    args, kwargs = found
    program = _program()
    flat = step(lambda: program.flatten(args, dict(kwargs)))
    if flat is None:
        return
    wanted = tuple(zip(program.binder.names, program.binder.dtypes, strict=True))
    sources = step(
        lambda: [interop.read(value, name, dtype) for value, (name, dtype) in zip(flat, wanted, strict=True)]
    )
    if sources is not None:
        step(lambda: program.binder.bind([source.shape for source in sources]))


@dataclass
class _Bound:
    flatten: Any
    binder: Any


_made: list[_Bound] = []


def _program() -> _Bound:
    from filefuzz.seeds import ROOT
    from qcompiler.runtime.binding import Binder
    from qcompiler.runtime.program_file import load_image
    from qcompiler.runtime.tree import input_flattener

    if not _made:
        image, _ = load_image(ROOT / "tests/golden/0.1.0-format1-target.qca")
        _made.append(_Bound(input_flattener(image.signature.inputs), Binder(image.plan)))
    return _made[0]


@contextlib.contextmanager
def _output() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


TARGETS: dict[str, Target] = {
    "qca": Target(_qca, 64 * MIB, 64),
    "gguf": Target(_gguf, 64 * MIB, 16),
    "folder": Target(_folder, 64 * MIB, 32),
    "safetensors": Target(_safetensors, 32 * MIB, 32),
    "opt": Target(_opt, 64 * MIB, 100),
    "arrays": Target(_arrays, 96 * MIB, 8),
}


def prepare() -> None:
    """Imports all that targets use, so that children find it in memory."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers

    import qcompiler.cli
    import qcompiler.frontends
    import qcompiler.inspect.files
    import qcompiler.inspect.opt
    import qcompiler.inspect.stage_texts
    import qcompiler.kernels.cpu.emit
    import qcompiler.kernels.cuda.emit
    import qcompiler.runtime.interop
    from qcompiler.passes.pipeline import ALL_PASSES

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for name in ("Llama", "Qwen2", "Qwen3", "Mixtral", "Mistral"):
        getattr(transformers, f"{name}ForCausalLM")
    for make in ALL_PASSES.values():
        make()
    for module in pkgutil.walk_packages(qcompiler.frontends.__path__, "qcompiler.frontends."):
        importlib.import_module(module.name)
    assert "torch" in sys.modules
    gc.collect()
    gc.freeze()  # what tests before these have left, too: a child's collector would copy all of its pages
