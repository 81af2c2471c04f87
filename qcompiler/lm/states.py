"""States of a language model beside keys and values: windows of convolutions, states of recurrences.

transformers holds both in the layers of its cache (`LinearAttentionCacheLayerMixin`), whatever the model is:

    update_conv_state(x)        x (b, channels, s) is put behind the last K columns, of which the layer keeps the last K
    get_recurrent_state()       what `update_recurrent_state` was given by the call before; None at the beginning

Here they are buffers of the step, so that they become states of the program, and each sequence has a slot of them. A
sequence whose call begins at position 0 begins with zeros, which is what transformers computes without a state, or in a
state of tokens (Qwen 4 hashes the last ones) with the token that ends a text.  A call's sequences read as many tokens
as the call has, or none (`counts`, lm/conversation.py): one that reads none keeps its states.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from qcompiler.lm.step import DecoderStep

Kind = Literal["conv", "recurrent"]

_current = threading.local()


def current() -> DecoderStep | None:
    """The step that this thread calls: transformers' functions have no other way to it."""
    return getattr(_current, "step", None)


def call(step: DecoderStep | None) -> None:
    """Makes a step the one that this thread calls."""
    _current.step = step


@dataclass(frozen=True)
class StateShape:
    """One state of one sequence: the `index`-th of its kind in a layer of the cache. A text begins with `start`."""

    kind: Kind
    layer: int
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def name(self) -> str:
        """The name of the buffer, and of the program's state."""
        return f"{self.kind}_{self.layer}_{self.index}"


class StatesOfSlots(LinearAttentionCacheLayerMixin):
    """The states of one layer, during one call. Each is a buffer (slots, …); sequence i of the call uses slot i."""

    step: DecoderStep
    number: int

    def __init__(self, step: DecoderStep, number: int) -> None:
        shapes = [shape for shape in step.states if shape.layer == number]
        LinearAttentionCacheLayerMixin.__init__(self, max(shape.index for shape in shapes) + 1)
        self.step, self.number = step, number
        self.starts = {(shape.kind, shape.index): shape.start for shape in shapes}
        self.buffers: dict[tuple[Kind, int], torch.Tensor] = {
            (shape.kind, shape.index): getattr(step, shape.name) for shape in shapes
        }
        self.attended_to: dict[int, torch.Tensor] = {}
        self.written: set[tuple[Kind, int]] = set()
        self.has_previous_state: dict[int, bool] = dict.fromkeys(range(self.number_of_states), True)
        self.conv_states: dict[int, torch.Tensor | None] = dict(self._before("conv"))
        self.recurrent_states: dict[int, torch.Tensor | None] = dict(self._before("recurrent"))

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing: the buffers are there."""

    def _before(self, kind: Kind) -> Iterator[tuple[int, torch.Tensor]]:
        """The states that the call begins with, (b, …)."""
        assert self.step.positions is not None
        begins = self.step.positions[:, 0] == 0
        for (each, index), buffer in self.buffers.items():
            if each == kind:
                start = torch.full((), self.starts[each, index], dtype=buffer.dtype)
                yield index, torch.where(_over(begins, buffer), start, self._slots(buffer))

    @property
    def unwritten(self) -> list[str]:
        """The states that the call left as they were."""
        return [f"{kind}_{self.number}_{index}" for kind, index in self.buffers if (kind, index) not in self.written]

    def _slots(self, buffer: torch.Tensor) -> torch.Tensor:
        """The slots of the call's sequences. Without a batch there is one slot."""
        assert self.step.counts is not None
        return buffer[: self.step.counts.shape[0]] if self.step.batch > 1 else buffer

    def _write(self, kind: Kind, index: int, new: torch.Tensor) -> None:
        """Writes states (b, …) of the sequences that read tokens."""
        assert self.step.counts is not None
        buffer = self.buffers[kind, index]
        self.written.add((kind, index))
        kept = self._slots(buffer)
        kept.copy_(torch.where(_over(self.step.counts > 0, buffer), new.to(buffer.dtype), kept))

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Writes the last columns; returns those of before and the call's, (b, channels, K + s)."""
        before = self.conv_states[state_idx]
        assert before is not None
        whole = torch.cat([before, conv_states.to(before.dtype)], dim=-1)
        self._write("conv", state_idx, whole[..., -before.shape[-1] :])
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Writes the state after the call's last token, unless `attended` did; returns it."""
        if recurrent_states is not self.attended_to.get(state_idx):
            self._write("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def attended(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        rate: torch.Tensor | None,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token reads of a recurrence, and its last states. The operator writes them itself, in place."""
        positions, counts, buffer = self.step.positions, self.step.counts, self.buffers["recurrent", index]
        assert positions is not None and counts is not None
        after, out = torch.ops.qc.linear_attention(
            buffer, query, key, value, decay, positions[:, 0], counts, rate, beta
        )
        buffer.copy_(after)
        self.written.add(("recurrent", index))
        self.attended_to[index] = last = self._slots(after)
        return out, last


def _over(flags: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Flags (b) as a condition for states (b, …)."""
    return flags.reshape(-1, *[1] * (buffer.ndim - 1))


def register(step: nn.Module, shapes: list[StateShape], slots: int) -> None:
    """Makes a buffer of zeros for each state."""
    for shape in shapes:
        step.register_buffer(shape.name, torch.zeros((slots, *shape.shape), dtype=shape.dtype))


__all__ = ["StateShape", "StatesOfSlots", "register"]
