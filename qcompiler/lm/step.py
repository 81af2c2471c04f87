"""The module that is compiled for a language model: one call reads some tokens of each sequence, gives logits, and
samples the next tokens.

transformers' model stays as it is.  It gets three things through the interfaces that transformers has for them:

- a cache whose layers are buffers of this module, so that they become states of the program, written in place;
- an attention function that leaves the heads of grouped queries unrepeated;
- a mask function that compares keys with the positions of this call, which are data: sequences of a batch may have
  different lengths, and neither a mask nor a table is an argument.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qcompiler.errors import ArgumentError, ExportError
from qcompiler.formats import cache_rows
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING, alone
from qcompiler.frontends.torch.qc_ops import torch_cache, torch_ring, torch_sample  # noqa: F401  (they register ops)
from qcompiler.lm import attention, pooled, probe, recurrences, rotation, states
from qcompiler.lm.length import Length
from qcompiler.lm.record import mark_slots
from qcompiler.units import human_bytes

ROUNDED: Final = "rounded"
CacheKind = torch.dtype | cache_rows.Kind | Literal["rounded"] | None
"""What a cache holds: numbers of a type, rows of a kind, numbers of the model's own type (None), or `ROUNDED`: bf16 in
layers whose keys and values attention reads as they are, and the model's type in others."""


class DecoderStep(nn.Module):
    """One call of a decoder with a cache for `batch` sequences of `length` tokens each.

    Arguments, all int64: `ids` (b, s) are the tokens that each sequence reads; `positions` (b, s) are theirs;
    `rows` (b, s) are the rows of the cache that get their keys, row `slot * length + position`, or in a layer with a
    ring (lm/probe.py) row `slot * ring.rows + position % ring.rows`; `wanted` (k) picks the
    tokens that get logits, as indices into the b·s tokens; `how` (b, 10) says for each sequence how its next token is
    drawn (plan/kinds/sample.py).  Models with states beside keys and values (lm/states.py) also take `counts` (b), how
    many of its tokens a sequence reads: s, or 0, which leaves its states as they are.  Returns logits (k, vocabulary)
    and the tokens (b), negative where there is none.

    `drawn` has the tokens of the last call; an id below 0 stands for it, so that the next step needs nothing from
    the host.  `marks` (2, slots, vocabulary) has the tallies of tokens for penalties, to which each drawn one is added,
    and what is added to logits.  The host writes both.

    Sequence i of a call uses slot i.  A token attends to the keys of its own slot whose position the model's mask
    allows; a row that was not written yet lies behind every position, and is never read.
    """

    whole_model: Any
    drawn: torch.Tensor
    marks: torch.Tensor
    unwritten: Sequence[str] = ()
    """The states that the last call left as they were."""

    def __init__(
        self, model: nn.Module, batch: int, length: int, tokens: int, chunk: int, cache: CacheKind = None
    ) -> None:
        super().__init__()
        # The model's parts are parts of this module, under their own names: rules, ledgers and reports show those.
        self._modules.update(model._modules)
        self._parameters.update(model._parameters)
        self._buffers.update(model._buffers)
        self.__dict__["whole_model"] = model  # parts of models are called language_model
        self.batch, self.length = batch, length
        self.positions: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.begins: torch.Tensor | None = None
        """The row (b, 1) of each sequence's first token."""
        self.wanted: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None
        self.caches: list[Any] = []
        self.asked: torch.Tensor | None = None
        self.first: torch.Tensor | None = None
        """What stands for the first sequence's position while lm/reads.py follows it."""
        self.told = {"position_ids"} <= set(inspect.signature(model.forward).parameters)
        self.kind = cache if isinstance(cache, str) and cache != ROUNDED else None
        found, self.vocabulary = probe.probe(model)
        self.has_mask = bool(found.masks) or found.has_masks_of_blocks
        config: Any = model.config
        self.replaced = config._attn_implementation == attention.ATTENTION
        """Whether all attention of the model is that of this module."""
        self.cache_argument = probe.cache_argument(model)
        self.windows = found.windows(tokens)
        self.shapes = dict(sorted(found.shapes.items()))
        self.states = sorted(found.states.values(), key=lambda each: (each.layer, each.kind, each.index))
        self.entries = sorted(found.entries.values(), key=lambda each: (each.layer, each.name))
        self.reasons = found.reasons
        self.ring = probe.ring_of(self.windows, chunk, tokens)
        self.rotated = found.rotated() if self.kind == "int4" else frozenset[int]()
        self.ring_rows: torch.Tensor | None = None
        for number, layer in self.shapes.items():
            rows = self.rows_of(number)
            if number in self.rotated:
                turn = rotation.hadamard(layer.key_dim, layer.dtype)
                self.register_buffer(f"rotation_{layer.key_dim}", turn, persistent=False)
            kept = {"keys": layer.key_dim} | ({"values": layer.value_dim} if layer.has_values else {})
            for name, dim in kept.items():
                rounded = torch.bfloat16 if cache == ROUNDED and found.reads(number) else layer.dtype
                row = torch.zeros(dim, dtype=cache if isinstance(cache, torch.dtype) else rounded)
                if self.kind is not None:
                    row = torch.zeros(cache_rows.row_bytes(dim, self.kind), dtype=torch.int8)
                self.register_buffer(f"{name}_{number}", _rows(row, layer.heads, batch * rows))
        for number, indexer in sorted(found.indexers.items()):
            row = torch.zeros(indexer.key_dim, dtype=indexer.dtype)
            self.register_buffer(f"index_{number}", _rows(row, 1, batch * self.rows_of(number)))
        slots = mark_slots(batch)
        pooled.register(self, self.entries, batch, length)
        states.register(self, self.states, slots)
        self.register_buffer("drawn", torch.zeros(slots, dtype=torch.int64))
        self.register_buffer("marks", torch.zeros(2, slots, self.vocabulary))

    @property
    def has_states(self) -> bool:
        """Whether a layer has states beside keys and values. `forward` then takes `counts`."""
        return bool(self.states)

    @property
    def cache_dtype(self) -> str:
        """What keys and values of the first layer are kept as, or what the states are without any."""
        dtypes = [getattr(self, f"keys_{number}").dtype for number in self.shapes] or [s.dtype for s in self.states]
        return self.kind if self.shapes and self.kind else str(dtypes[0]).removeprefix("torch.")

    def rows_of(self, layer: int) -> int:
        """The rows that a sequence has in a layer of the cache."""
        return self.ring.rows if self.ring is not None and layer in self.ring.layers else self.length

    def _in_ring(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the rings for `rows` of whole sequences."""
        assert self.ring is not None
        if self.batch == 1:
            return rows % self.ring.rows
        slots = torch.arange(rows.shape[0])[:, None]
        return slots * self.ring.rows + (rows - slots * self.length) % self.ring.rows

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        wanted: torch.Tensor,
        how: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = ids.shape[0]
        self.counts = counts
        ids = torch.where(ids < 0, self.drawn[:count, None].clamp(min=0), ids)
        logits = self._logits(ids, positions, rows, wanted)
        tallies, bias = self.marks[0, :count], self.marks[1, :count]
        tokens: torch.Tensor = torch.ops.qc.sample(logits, how, tallies, bias)
        places = torch.arange(count) * self.vocabulary + tokens.clamp(min=0)
        self.marks.view(-1).index_add_(0, places, (tokens >= 0).to(torch.float32))
        self.drawn[:count] = tokens
        return logits, tokens

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        self.positions, self.rows, self.wanted = positions, rows.reshape(-1), wanted
        self.begins = rows[:, :1]
        self.ring_rows = None if self.ring is None else self._in_ring(rows).reshape(-1)
        states.call(self)
        try:
            self.caches = self._cache_layers()
            more: dict[str, Any] = {"position_ids": positions} if self.told else {}
            if not self.states:
                # Some models count tokens in this mask; what is seen follows from the positions alone.
                # Layers with other states would multiply by it, which changes nothing: no call has padding.
                more["attention_mask"] = torch.ones(ids.shape[0], self.length, dtype=torch.int64)
            more[self.cache_argument] = StepCache(self)
            logits: torch.Tensor = self.whole_model(input_ids=ids, use_cache=True, **more).logits
            self.unwritten = [name for layer in self.caches for name in getattr(layer, "unwritten", ())]
        finally:
            states.call(None)
            self.positions = self.rows = self.begins = self.wanted = self.ring_rows = self.counts = None
            self.caches, self.asked = [], None
        return logits

    def _cache_layers(self) -> list[Any]:
        """The layers of transformers' cache for this call."""
        with_states = {shape.layer for shape in self.states}
        layers: list[Any] = []
        # transformers has a class for layers without a cache since 5.23; before it, such a layer's cache stays empty.
        nothing: Any = getattr(cache_utils, "DummyLayer", DynamicLayer)()
        for number in range(max((*self.shapes, *with_states)) + 1):
            if number in self.shapes:
                kind = StatesAndCacheOfSlots if number in with_states else CacheOfSlots
                layers.append(kind(self, number))
            else:
                layers.append(states.StatesOfSlots(self, number) if number in with_states else nothing)
        return layers

    def layer_of(self, state: torch.Tensor | None) -> tuple[states.StatesOfSlots, int] | None:
        """The layer and the number of a state, as the model was given it."""
        for layer in self.caches if state is not None else ():
            if isinstance(layer, states.StatesOfSlots):
                for index, given in (*layer.recurrent_states.items(), *layer.conv_states.items()):
                    if given is state:
                        return layer, index
        return None

    def rows_of_head(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook before the model's head: the head is computed for the wanted tokens alone."""
        (hidden,) = args
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.wanted),)


class CacheOfSlots(CacheLayerMixin):  # type: ignore[no-untyped-call]  # a part of transformers has no types
    """The keys and values of one layer: (heads, batch * length, dim), where each sequence has `length` rows.

    `window` is that of a layer that keeps a ring, else None.
    """

    is_compileable = True
    number: int

    def __init__(self, step: DecoderStep, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.number = step, number
        self.keys: Any = getattr(step, f"keys_{number}")
        self.shape = step.shapes[number]
        self.values: Any = getattr(step, f"values_{number}") if self.shape.has_values else self.keys
        self.length = step.rows_of(number)
        self.is_sliding = self.length != step.length  # transformers asks a sliding layer for the size of their mask
        self.window = step.windows[number] if self.is_sliding else None
        self.is_rotated = number in step.rotated
        self.indexer_position_ids: Any = None
        """Qwen 4 puts the positions of a call behind these; its index asks for those of the call's tokens alone."""
        self.read: Any = None
        """The keys that attention gets, once they are known."""
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the buffers are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Writes the call's keys and values to their rows; returns those of each sequence, (b, heads, length, dim)."""
        if self.is_rotated:
            key_states = self.rotate(key_states)
        new = (key_states, value_states) if self.shape.has_values else (key_states,)
        kept = (self.keys, self.values)
        read = [self._update(*each) for each in zip(kept, new, self._stored(new), strict=False)]
        self.read = read[0]
        return read[0], read[-1] if self.shape.value_dim else read[0][..., :0]

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Writes the keys by which a layer chooses tokens (b, s, dim); returns each sequence's, (b, length, dim).  They
        have the model's type, whatever the cache has."""
        step = self.step
        assert step.rows is not None
        b, s, dim = keys.shape
        kept: torch.Tensor = getattr(step, f"index_{self.number}")
        kept.index_copy_(1, step.rows, keys.reshape(1, b * s, dim))
        slots = kept.view(step.batch, self.length, dim)
        return slots[:b] if step.batch > 1 else slots

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """`update_indexer` of (b, 1, s, dim), as MiniMax M3 asks it."""
        return self.update_indexer(keys[:, 0])[:, None]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries (…, dim) times the layer's rotation (lm/rotation.py)."""
        return functional.linear(x, getattr(self.step, f"rotation_{x.shape[-1]}"))

    def _stored(self, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Keys and values, or what is both, as the cache has them."""
        kind = self.step.kind
        if kind is None:
            return tuple(each.to(kept.dtype) for each, kept in zip(new, (self.keys, self.values), strict=False))
        if len(new) == 2 and new[0].shape == new[1].shape:  # one kernel makes the rows of both
            both: torch.Tensor = torch.ops.qc.quantize_cache(torch.cat(new, 1), kind)
            made: tuple[torch.Tensor, ...] = torch.split(both, new[0].shape[1], 1)
            return made
        return tuple(torch.ops.qc.quantize_cache(each, kind) for each in new)

    def _update(self, kept: torch.Tensor, new: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Writes rows of the call; returns those of each sequence as numbers."""
        step = self.step
        places = step.ring_rows if self.is_sliding else step.rows
        assert places is not None
        b, heads, s, dim = new.shape
        kept.index_copy_(1, places, rows.transpose(0, 1).reshape(heads, b * s, -1))
        # A cast of a part of the batch would make torch ask how its dims lie, which fixes the size of the batch.
        if step.kind is None:
            read = kept.to(new.dtype)
        else:
            read = torch.ops.qc.dequantize_cache(kept, step.kind, dim, new.dtype)
        slots = read.view(heads, step.batch, self.length, dim).transpose(0, 1)
        return slots[:b] if step.batch > 1 else slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> Any:
        """The position of the first sequence's first token: what models count from without positions. A tensor; as a
        `Length` while the step is traced, so that what Python does with it needs no value."""
        assert self.step.positions is not None
        if self.step.first is not None:
            return self.step.first
        first = self.step.positions[0, 0]
        return Length(first, self.length) if torch.compiler.is_exporting() else first

    def get_max_length(self) -> int:
        return self.length


class StepCache(Cache):
    """The cache of one call, which notes what state of a recurrence the model asked for last."""

    def __init__(self, step: DecoderStep) -> None:
        super().__init__(layers=step.caches)
        self.step = step

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self.step.asked = super().get_recurrent_state(layer_idx, state_idx)
        return self.step.asked

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have states alone: transformers takes the size of its mask from one that has keys."""
        return [
            isinstance(layer, states.StatesOfSlots) and not isinstance(layer, CacheOfSlots) for layer in self.layers
        ]


class StatesAndCacheOfSlots(states.StatesOfSlots, CacheOfSlots):  # type: ignore[no-untyped-call, override]
    """A layer that has both: keys and values, and states."""

    def __init__(self, step: DecoderStep, number: int) -> None:
        CacheOfSlots.__init__(self, step, number)
        states.StatesOfSlots.__init__(self, step, number)


@contextlib.contextmanager
def prepared(
    model: nn.Module, batch: int, rows: int, cache: CacheKind, length: int, chunk: int
) -> Iterator[DecoderStep]:
    """The step of a model, with `rows` rows of the cache for each sequence, of which `length` may hold tokens.

    A call reads up to `chunk` tokens of each sequence.

    The model's own attention, and its settings, are back when the context ends. Until then another thread that compiles
    the same model waits.
    """
    with alone(model), _prepared(model, batch, rows, cache, length, chunk) as step:
        yield step


@contextlib.contextmanager
def _prepared(
    model: nn.Module, batch: int, rows: int, cache: CacheKind, length: int, chunk: int
) -> Iterator[DecoderStep]:
    attention.register()
    config: Any = model.config
    before = config._attn_implementation
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise ExportError(f"{type(model).__name__} has no output embeddings: it is no causal language model")
    modes = [(module, module.training) for module in model.modules()]
    handle = None
    try:
        with fixed_rotations(model, length), recurrences.replaced(model), pooled.replaced(model):
            with TRACING:
                model.set_attn_implementation(attention.ATTENTION)  # type: ignore[operator]
                attention.take_masks(config._attn_implementation)
                step = DecoderStep(model, batch, rows, length, chunk, cache).eval()
            handle = head.register_forward_pre_hook(step.rows_of_head)
            yield step
    finally:
        if handle is not None:
            handle.remove()
        model.set_attn_implementation(before)  # type: ignore[operator]
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def fixed_rotations(model: nn.Module, length: int) -> Iterator[None]:
    """Rotary frequencies that depend on the length of the text ("dynamic", "longrope") become those of `length` tokens.

    transformers recomputes them as a text grows, and leaves keys in the cache as they are: the numbers then depend on
    how a text was cut into calls.  Here all keys of a cache are turned alike.
    """
    held: list[tuple[Any, Any, dict[str, Any], Any]] = [
        (module, module.rope_type, dict(module._buffers), vars(module).get("attention_scaling"))
        for module in model.modules()
        if isinstance(getattr(module, "rope_type", None), str | dict) and hasattr(module, "config")
    ]
    try:
        for module, kinds, _, _ in held:
            if isinstance(kinds, str):
                module.rope_type = _fixed(module, kinds, "", length, {})
            else:
                module.rope_type = {
                    name: _fixed(module, kind, f"{name}_", length, {"layer_type": name}) for name, kind in kinds.items()
                }
        yield
    finally:
        for module, kinds, buffers, scaling in held:
            module.rope_type = kinds
            module._buffers.update(buffers)
            if scaling is not None:
                module.attention_scaling = scaling


def _fixed(module: Any, kind: str, prefix: str, length: int, which: dict[str, str]) -> str:
    """The kind of rotation that stays: a kind that follows the length is computed here, and stays as it is."""
    if kind != "longrope" and "dynamic" not in kind:
        return kind
    old = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, **which)
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(old.dtype), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return "fixed"


def _rows(row: torch.Tensor, heads: int, count: int) -> torch.Tensor:
    """The keys or the values of a layer: `count` times `row` for each head. ArgumentError if memory does not take
    it."""
    try:
        return row.repeat(heads, count, 1)
    except RuntimeError as error:  # torch has no class of its own for it
        raise ArgumentError(
            f"the keys or values of one layer would take {human_bytes(row.nbytes * heads * count)} for {count} tokens, "
            "more than this machine can allocate: choose a smaller max_seq_len or max_batch, or a narrower kv_cache"
        ) from error
