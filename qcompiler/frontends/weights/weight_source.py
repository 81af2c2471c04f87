"""The source of a model's parameter values: the module itself, files, or none.

`insert-qdq` asks a source for one tensor at a time and releases it before it asks for the next.  A source whose files
hold a matrix as codes returns the codes (`packed`), which are stored unchanged.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from qcompiler.errors import WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.frontends.torch.common.empty_weights import is_empty
from qcompiler.frontends.torch.common.values import row_major, to_numpy
from qcompiler.frontends.weights.safetensors_files import read_tensors
from qcompiler.frontends.weights.weight_uses import storage_key
from qcompiler.units import counted

Identity = dict[str, Any]
"""JSON that is equal only if values are equal: a file's tensor by its place and the file's change, else a digest."""


class WeightSource(Protocol):
    """Values by the paths of parameters."""

    valued: bool
    """False if there are no values at all: weights are sizes, and nothing is encoded."""
    streams: bool
    """True if values come from files: then packed weights go to files, too."""

    def bind(self, program: ExportedProgram) -> Mapping[str, torch.Tensor]:
        """Replacements for tensors of the program's state, before any values are read."""

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        """The values of a stored tensor on the CPU, in the shape and dtype that the model declares (`tensor`).

        `targets` are all of its paths (several if tied).  WeightsError if there are no values.
        """

    def identity(self, targets: Sequence[str], tensor: torch.Tensor) -> Identity:
        """Identifies these values."""

    def packed(self, targets: Sequence[str], tensor: torch.Tensor) -> StoredCodes | None:
        """The codes of a stored tensor, if it is already quantised; None for values."""

    def release(self, targets: Sequence[str]) -> None:
        """The values are no longer needed."""


EXPERTS_TRANSPOSED = "experts transposed"
"""The model has (E, K, N), and the matrix is (E * N, K)."""


@dataclass(frozen=True)
class StoredCodes:
    """A matrix that a file holds as codes of one of our formats.

    `read` returns its canonical bytes; if `mapped` they are pages of the file, else they are made anew each time.  With
    a `permutation` the codes belong to columns in another order: ``y = x[..., permutation] @ W.T``.  `arrangement` is
    how the matrix differs from the model's tensor: "" (it has that shape), or EXPERTS_TRANSPOSED.
    """

    where: str
    format: Format
    rows: int
    cols: int
    read: Callable[[], PackedTensor]
    mapped: bool = False
    permutation: npt.NDArray[np.intp] | None = None
    arrangement: str = ""


class ModuleWeights:
    """The values of the module's own tensors."""

    valued = True
    streams = False

    def bind(self, program: ExportedProgram) -> Mapping[str, torch.Tensor]:
        del program
        return {}

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        if is_empty(tensor):
            raise WeightsError(
                f"the parameter '{targets[0]}' holds no values (it is a fake or meta tensor): name the folder that "
                'holds them, weights="path/of/safetensors", or where the model is that of qc.from_gguf or '
                'qc.from_checkpoint, weights=checkpoint.weights; or compile for plan and sizes only, weights="none"'
            )
        return tensor.detach().cpu()

    def identity(self, targets: Sequence[str], tensor: torch.Tensor) -> Identity:
        return content_identity(self.read(targets, tensor))

    def packed(self, targets: Sequence[str], tensor: torch.Tensor) -> StoredCodes | None:
        del targets, tensor
        return None

    def release(self, targets: Sequence[str]) -> None:
        del targets


class NoValues:
    """No values: `weights="none"`."""

    valued = False
    streams = False

    def bind(self, program: ExportedProgram) -> Mapping[str, torch.Tensor]:
        del program
        return {}

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        del tensor
        raise WeightsError(f"'{targets[0]}' was asked for its values, but the model is compiled without any")

    def identity(self, targets: Sequence[str], tensor: torch.Tensor) -> Identity:
        self.read(targets, tensor)
        return {}

    def packed(self, targets: Sequence[str], tensor: torch.Tensor) -> StoredCodes | None:
        del targets, tensor
        return None

    def release(self, targets: Sequence[str]) -> None:
        del targets


def content_identity(values: torch.Tensor) -> Identity:
    """Dtype, shape and sha256 of a tensor's values."""
    array = to_numpy(values)
    digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data)
    dtype = str(values.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(values.shape), "sha256": digest.hexdigest()}


# --- files -----------------------------------------------------------------------------------------------------------


class InFile(Protocol):
    """A tensor of a file: plain values, or codes."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The model's shape."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of values; None for codes."""

    @property
    def codes(self) -> StoredCodes | None: ...

    @property
    def is_made(self) -> bool:
        """Whether `view` computes the values, which then take memory, and does not show the mapped file."""

    def view(self) -> torch.Tensor:
        """The values: in the mapped file if possible; decoded, if they are codes."""

    def identity(self) -> Identity: ...

    def release(self) -> None: ...


class FileWeights:
    """Values and codes of files, mapped and read one tensor at a time; the common part of `Shards` and checkpoints.

    `tensors` are by the names of the file, which are the model's after `rename`, or except for one prefix.  `ignore`
    are globs of names that the model does not have.
    """

    valued = True
    streams = True
    hint = ""
    """The end of the message about names that do not fit: how to map them."""

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, InFile],
        *,
        rename: Callable[[str], str] | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.tensors = tensors
        self._rename, self._ignore = rename, tuple(ignore)
        self._found: dict[str, InFile] = {}
        self._views: dict[str, torch.Tensor] = {}

    def replaced(self, tensors: Mapping[str, InFile]) -> FileWeights:
        """The same source with other tensors under some of its names."""
        made = copy.copy(self)
        made.tensors, made._found, made._views = {**self.tensors, **tensors}, {}, {}
        return made

    def bind(self, program: ExportedProgram) -> Mapping[str, torch.Tensor]:
        """Mapped values if dtypes agree; else tensors without values, which `read` converts one at a time."""
        groups, optional, known = _stored_groups(program)
        self._found = self._match(groups, optional, known)
        mode = next(n.meta["val"] for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)).fake_mode
        made: dict[str, torch.Tensor] = {}
        for names, declared in groups:
            found = self._found.get(names[0])
            if found is None:
                continue
            value: torch.Tensor
            if found.dtype == declared.dtype and not found.is_made:
                value = found.view()
            elif found.dtype is None or isinstance(declared, torch.nn.Parameter):
                with mode:
                    value = torch.empty(found.shape, dtype=declared.dtype)
            else:  # buffers are few and small, and are read by value
                value = found.view().to(declared.dtype)
            if isinstance(declared, torch.nn.Parameter):
                value = torch.nn.Parameter(value, requires_grad=False)
            self._views[names[0]] = value
            made.update(dict.fromkeys(names, value))
        return made

    def read(self, targets: Sequence[str], tensor: torch.Tensor) -> torch.Tensor:
        return row_major(self._found[targets[0]].view(), tensor.dtype) if is_empty(tensor) else tensor.detach()

    def identity(self, targets: Sequence[str], tensor: torch.Tensor) -> Identity:
        """The file's own identity if the tensor is unchanged from the file; else a digest of its content."""
        if tensor is self._views.get(targets[0]):
            return self._found[targets[0]].identity()
        return content_identity(tensor)

    def packed(self, targets: Sequence[str], tensor: torch.Tensor) -> StoredCodes | None:
        """The codes of a tensor that is unchanged from the file."""
        found = self._found.get(targets[0])
        return found.codes if found is not None and tensor is self._views.get(targets[0]) else None

    def release(self, targets: Sequence[str]) -> None:
        if targets[0] in self._found:
            self._found[targets[0]].release()

    # --- names ---

    def _match(
        self, groups: Sequence[tuple[list[str], torch.Tensor]], optional: set[str], known: set[str]
    ) -> dict[str, InFile]:
        """The file's tensor for each group of tied names, under all of them."""
        rename = self._rename or _best_renaming([names for names, _ in groups], self.tensors)
        found: dict[str, InFile] = {}
        missing: list[str] = []
        mismatched: list[str] = []
        for names, declared in groups:
            here = next((self.tensors[rename(n)] for n in names if rename(n) in self.tensors), None)
            if here is None:
                missing += [] if names[0] in optional else [" = ".join(names)]
            elif here.shape != tuple(declared.shape):
                mismatched.append(f"'{here.name}' is {_text(here.shape)}, the model has {_text(declared.shape)}")
            else:
                found.update(dict.fromkeys(names, here))
        expected = {rename(name) for name in known}
        unexpected = [
            name
            for name in self.tensors
            if name not in expected and not any(fnmatch.fnmatchcase(name, glob) for glob in self._ignore)
        ]
        self._refuse(missing, unexpected, mismatched)
        return found

    def _refuse(self, missing: list[str], unexpected: list[str], mismatched: list[str]) -> None:
        problems = []
        if missing:
            problems.append(f"it lacks {len(missing)} of the model's parameters: {_few(missing)}")
        if unexpected:
            problems.append(
                f"it holds {counted(len(unexpected), 'tensor')} that the model does not have: {_few(unexpected)}"
            )
        if mismatched:
            problems.append(f"{len(mismatched)} shapes differ: {_few(mismatched)}")
        if problems:
            raise WeightsError(f"the weights in {self.path} do not fit the model. " + "; ".join(problems) + self.hint)


class Shards(FileWeights):
    """The values of a safetensors file, or of a folder of shards, mapped and read one at a time.

    Names are the model's, or differ by one prefix on all names of either side ("model.", for a module that wraps the
    checkpoint's model, or is a part of it).  `rename` maps a parameter's path to its name in the file if that is not
    enough; `ignore` are globs of names in the file that the model does not have.  Of tied parameters any one may be in
    the file.  Values are converted to the dtype that the model declares.

    Names and shapes must match: a parameter or persistent buffer that the file lacks, a name in the file that the model
    lacks, and another shape are WeightsErrors that list the names.  A buffer that the model writes (its state) may be
    missing: it then starts with the model's own values.
    """

    hint = (
        ". Names are mapped by weights=Shards(path, rename=lambda name: …), and those that the model does not need are "
        'named by Shards(path, ignore=["cls.*"]). qc.from_checkpoint(folder) reads a folder as it is published, with a '
        "matrix for each expert"
    )

    def __init__(
        self, path: str | Path, *, rename: Callable[[str], str] | None = None, ignore: Sequence[str] = ()
    ) -> None:
        super().__init__(path, read_tensors(Path(path)), rename=rename, ignore=ignore)


def _stored_groups(program: ExportedProgram) -> tuple[list[tuple[list[str], torch.Tensor]], set[str], set[str]]:
    """Groups of tied names with the declared tensor; names that a file may lack; and all names it may hold.

    A parameter or buffer that the graph does not read may be missing; so may a buffer that it writes.
    """
    state = program.state_dict
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    written = set(program.graph_signature.buffers_to_mutate.values())
    groups: dict[Any, tuple[list[str], torch.Tensor]] = {}
    used: set[str] = set()
    known: set[str] = set(state)
    for spec in program.graph_signature.input_specs:
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or spec.target is None:
            continue
        known.add(spec.target)
        tensor = state.get(spec.target)
        if not isinstance(tensor, torch.Tensor):  # a buffer that is not persistent
            continue
        key = storage_key(tensor) if spec.kind == InputKind.PARAMETER else spec.target
        groups.setdefault(key, ([], tensor))[0].append(spec.target)
        if nodes[spec.arg.name].users and spec.target not in written:
            used.add(spec.target)
    optional = {names[0] for names, _ in groups.values() if not used.intersection(names)}
    return list(groups.values()), optional, known


def _best_renaming(groups: Sequence[Sequence[str]], tensors: Mapping[str, Any]) -> Callable[[str], str]:
    """The identity, or one prefix removed from the model's names or the file's: whichever finds most parameters."""
    candidates: list[Callable[[str], str]] = [lambda name: name]
    for prefix in _prefixes(name for names in groups for name in names):
        candidates.append(lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
    for prefix in _prefixes(tensors):
        candidates.append(lambda name, prefix=prefix: prefix + name)  # type: ignore[misc]
    return max(candidates, key=lambda rename: sum(any(rename(n) in tensors for n in names) for names in groups))


def _prefixes(names: Any) -> list[str]:
    """Leading parts of paths, up to three deep: "model.", "model.decoder."."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for depth in range(1, min(4, len(parts))):
            found[".".join(parts[:depth]) + "."] = None
    return list(found)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" … ({len(names)} in all)" if len(names) > 10 else "")


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


__all__ = [
    "EXPERTS_TRANSPOSED", "FileWeights", "InFile", "ModuleWeights", "NoValues", "Shards", "StoredCodes",
    "WeightSource", "content_identity",
]  # fmt: skip
