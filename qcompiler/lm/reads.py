"""What the logits of a step depend on, and what they must not depend on.

- A layer of transformers may write a state in every call and read it only in calls of one token: its path for several
  tokens is then that of a prompt, which begins without a state.  The step is traced with several tokens, so that each
  call of such a program would forget the ones before it.
- A model may count positions from the length of its cache, which is one number for all sequences of a batch.
- A model may keep a mask of its own in a buffer and cut it by the number of keys (GPT-Neo).  A cache has as many rows
  as it may hold tokens, so that the part that is cut is another token's.  A mask is a square of flags, of any size, or
  a triangle of numbers.
- A model may count positions from its tokens (RoBERTa, whose first position is the id of its padding token plus 1).
  Positions are arguments of a step and begin at 0.  What the model does with a count is not asked: it may look a table
  up by it, in any way, or compute with it.

Each of these would give wrong numbers and no error.  The checks follow numbers, not values: one call on fake tensors,
in which each result notes what it depends on.  They need no weights.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.capture.expert_weights import as_pairs
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING

if TYPE_CHECKING:
    from qcompiler.lm.step import DecoderStep

_aten = torch.ops.aten
_SHAPES_ONLY = {
    _aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.new_zeros, _aten.new_ones,
    _aten.new_empty, _aten.new_full, _aten.new_empty_strided,
}  # fmt: skip
"""Operators whose result has the shape of its argument, and none of its numbers."""

COUNT = "count"
_INDEX = {_aten.embedding: 1, _aten.index_select: 2, _aten.index: 1, _aten.gather: 2, _aten.take: 1}
"""Operators that look a table up, and the place of their indices among the arguments."""

_ZEROS = {_aten.zeros, _aten.zeros_like, _aten.new_zeros}
_BIASED = {_aten.addmm, _aten.linear}

CALL_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
)  # fmt: skip
"""What a call of a model of transformers may raise."""
_FIRST = "the position of the first sequence"


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes for each storage which of the followed tensors its numbers depend on."""

    def __init__(self, followed: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[torch.UntypedStorage] = []  # a storage that is alive gives its address to no other
        self.found: dict[int, frozenset[str]] = {}
        for name, tensor in followed.items():
            self.add(tensor, frozenset({name}))

    def of(self, value: Any) -> frozenset[str]:
        """The followed tensors that any tensor in `value` depends on."""
        tensors = [each for each in tree_iter(value) if isinstance(each, torch.Tensor)]
        return frozenset().union(*(self.found.get(_storage(each)._cdata, frozenset()) for each in tensors))

    def add(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        """Notes that a tensor depends on what `names` stand for."""
        storage = _storage(tensor)
        self.held.append(storage)
        self.found[storage._cdata] = self.found.get(storage._cdata, frozenset()) | names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        names = self.of((args, given))
        results = func(*args, **given)
        if names and func.overloadpacket not in _SHAPES_ONLY:
            # A buffer that is no fake tensor is written, and another tensor returned.
            written = [value for value, about in zip(args, func._schema.arguments, strict=False) if about.is_write]
            for each in tree_iter((results, written)):
                if isinstance(each, torch.Tensor):
                    self.add(each, names)
        return results


class TokenCounts(Origins):  # type: ignore[no-untyped-call]  # as above
    """Follows counts of tokens; `ids` are the tokens.

    What a table holds for a token is no count of it: a result depends on the index of a look-up only if that is a count
    already.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__({"ids": ids})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, names = func.overloadpacket, self.of((args, kwargs or {}))
        place = _INDEX.get(packet)
        if place is not None and names:
            results = func(*args, **(kwargs or {}))
            self.add(results, self.of(args[:place]) | self.of(args[place:]) & {COUNT})
            return results
        results = super().__torch_dispatch__(func, types, args, kwargs)
        if packet is _aten.cumsum and names:
            self.add(results, frozenset({COUNT}))
        return results

    def counted(self, value: Any) -> bool:
        """Whether any tensor in `value` depends on a count of tokens."""
        return COUNT in self.of(value)


class Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Notes whether a linear with a bias is given zeros, as `zeros`, `new_zeros` and `zeros_like` make them.

    A model without a state of before may multiply zeros in its place (ZAYA).  A step begins a text with a state of
    zeros, which is the same only without a bias.  Zeros that are cast, moved or made in another way are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, torch.UntypedStorage] = {}
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, given = func.overloadpacket, kwargs or {}
        results = func(*args, **given)
        if packet in _ZEROS:
            self.held[_storage(results)._cdata] = _storage(results)
        elif packet in _BIASED and len(args) > 2:
            x, bias = (args[1], args[0]) if packet is _aten.addmm else (args[0], args[2])
            self.found |= bias is not None and x.numel() > 0 and _storage(x)._cdata in self.held
        if func._schema.is_mutable:
            for each in tree_iter((args, given)):
                if isinstance(each, torch.Tensor):
                    self.held.pop(_storage(each)._cdata, None)
        return results


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def check_reads(step: DecoderStep, inputs: Mapping[str, torch.Tensor]) -> None:
    """ExportError unless a call with `inputs` writes each state of the step, and its logits depend on each, on no mask
    that the model keeps for itself, and in a step for several sequences on the position of none but their own."""
    states = {shape.name: step.get_buffer(shape.name) for shape in step.states}
    masks = {} if step.replaced or not step.shapes else dict(_masks(step))
    several = step.batch > 1 and bool(step.shapes)
    if not (states or masks or several):
        return
    step.first = torch.zeros((), dtype=torch.int64)
    try:
        found = _depends(step, {**states, **masks, _FIRST: step.first}, inputs)
    finally:
        step.first = None
    name = type(step.whole_model).__name__
    _refuse_writes(name, sorted(step.unwritten), inputs["ids"].shape[1])
    _refuse_states(name, sorted(set(states) - found))
    _refuse_mask(name, sorted(set(masks) & found))
    if several and _FIRST in found:
        _refuse_lengths(name, "counts positions from the length of its cache")
    if several and not step.has_mask:
        _refuse_lengths(name, "makes no mask by transformers' rules")


def _masks(step: DecoderStep) -> Iterable[tuple[str, torch.Tensor]]:
    """Buffers of the model that can be masks: squares over all pairs of positions."""
    config: Any = step.whole_model.config
    length = getattr(config, "max_position_embeddings", None)
    for name, buffer in step.whole_model.named_buffers():
        if buffer.ndim > 1 and buffer.shape[-1] == buffer.shape[-2] > 1 and _can_be_mask(buffer, length):
            yield name, buffer


def _can_be_mask(square: torch.Tensor, length: int | None) -> bool:
    """Whether a square is one of flags, one over the model's positions, or a triangle of numbers."""
    if square.dtype in (torch.bool, torch.uint8) or square.shape[-1] == length:
        return True
    if square.is_meta or type(square) is not torch.Tensor:
        return False  # it has no numbers yet
    lower, upper = (bool((square == part).all()) for part in (square.tril(), square.triu()))
    return lower != upper


def _refuse_writes(model: str, unwritten: list[str], tokens: int) -> None:
    """The next call would go on from another token."""
    if unwritten:
        raise ExportError(
            f"{model} does not hand the states {', '.join(unwritten)} to its cache in a call of "
            f"{'one token: compile it with a larger chunk' if tokens == 1 else 'several tokens'}"
        )


def _refuse_states(model: str, unread: list[str]) -> None:
    if unread:
        raise ExportError(
            f"{model} keeps the states {', '.join(unread)} and does not read them in a call of several tokens, so that "
            "a text that is read in several calls would be forgotten. transformers' implementation of this model must "
            "read its states in such calls, too"
        )


def _refuse_mask(model: str, masks: list[str]) -> None:
    if masks:
        raise ExportError(
            f"{model} has a mask of its own in '{masks[0]}', cut by the number of keys; a cache that is written in "
            "place always has the same number of rows. transformers cannot run this model with a static cache either"
        )


def _refuse_lengths(model: str, why: str) -> None:
    raise ExportError(
        f"{model} {why}, so that sequences of a batch cannot have different lengths: compile it with max_batch=1, and "
        "run several conversations"
    )


def _depends(
    step: DecoderStep, followed: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """The names of the followed tensors that the logits of a call with `inputs` depend on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    origins = Origins(followed)
    model = step.whole_model
    try:
        with TRACING, torch.no_grad(), as_pairs(model), FakeTensorMode(allow_non_fake_inputs=True), origins:
            logits, _ = step(**inputs)
    except CALL_ERRORS as error:
        way = "models of this kind are not compiled"
        if step.batch > 1:
            way = "compile it with max_batch=1, and run several conversations"
        raise ExportError(
            f"{type(model).__name__} cannot be called with a cache that is written in place ({line_of(error)}): "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; {way}"
        ) from error
    return origins.of(logits)


def line_of(error: BaseException) -> str:
    """The line of transformers that raised an error: its file, number and text."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/" in frame.filename]
    if not frames:
        return "a step"
    return f"{'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}: {frames[-1].line}"


__all__ = ["CALL_ERRORS", "TokenCounts", "Zeros", "check_reads", "line_of"]
