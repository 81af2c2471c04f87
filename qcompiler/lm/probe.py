"""What a call of a language model hands to its cache and to its attention: shapes, and the windows of its layers.

The call computes no values.  No configuration describes these facts for every architecture.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from transformers.cache_utils import Cache

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.capture.expert_weights import as_pairs
from qcompiler.lm.reads import CALL_ERRORS, TokenCounts, Zeros, line_of
from qcompiler.lm.rotation import block_of
from qcompiler.lm.states import Kind, StateShape

if TYPE_CHECKING:
    from qcompiler.lm.pooled import EntryShape

MaskRule = Callable[..., Any]
"""transformers' rule: whether the query at a position sees the key at a position, as broadcast tensors."""

TOKENS = 3
"""How many tokens the call reads."""

ROW_GROUP = 16
"""Rings have a multiple of so many rows, so that the rows of all sequences begin at whole cache lines."""

_current = threading.local()


@dataclass(frozen=True)
class Ring:
    """The rows that each sequence has in the layers with a window: position p lies in row p % rows."""

    window: int
    """The largest window of these layers."""
    rows: int
    layers: frozenset[int]


@dataclass(frozen=True)
class LayerShape:
    """What one layer hands to its cache. `is_shared`: its keys are its values too."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    is_shared: bool = False

    @property
    def has_values(self) -> bool:
        """Whether there are values to be kept beside the keys. GLM 5 Next hands over some without columns."""
        return self.value_dim > 0 and not self.is_shared


@dataclass
class Probe:
    """What was seen of each layer of the cache. `states` are those beside keys and values, by name. `indexers` are the
    keys by which a layer chooses tokens, `entries` what stands for blocks of tokens (lm/pooled.py). `uses` are the
    calls of attention that read a layer: the window that transformers handed over, and the rule of the mask. `biased`
    are the layers whose attention adds a number for each position."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    states: dict[str, StateShape] = field(default_factory=dict)
    indexers: dict[int, LayerShape] = field(default_factory=dict)
    entries: dict[str, EntryShape] = field(default_factory=dict)
    uses: dict[int, list[tuple[int | None, MaskRule | None]]] = field(default_factory=dict)
    biased: set[int] = field(default_factory=set)
    unsaid: set[tuple[int, int]] = field(default_factory=set)
    """States of convolutions, by layer and index, whose width no argument says."""
    keys: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, MaskRule]] = field(default_factory=list)
    has_masks_of_blocks: bool = False
    """Whether attention has masks of lm/pooled.py in the place of transformers'."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a layer has no window, once `windows` was asked."""

    def mask(self, batch: int, queries: int, keys: int, rule: MaskRule) -> torch.Tensor:
        """A mask that stands for `rule`."""
        made = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
        self.masks.append((made, rule))
        return made

    def attended(self, key: torch.Tensor, mask: Any, window: Any, is_biased: bool = False) -> None:
        """Notes a call of attention, and whether it adds a number for each position. Keys that no layer handed to the
        cache in this form are not noted."""
        rule = next((rule for made, rule in self.masks if _is_whole(mask, made)), None)
        for kept, layer in self.keys:
            if kept is key or self._is_followed_by_entries(kept, layer, key):
                self.uses.setdefault(layer, []).append((window if isinstance(window, int) else None, rule))
                if is_biased:
                    self.biased.add(layer)

    def _is_followed_by_entries(self, kept: torch.Tensor, layer: int, key: torch.Tensor) -> bool:
        """Whether attention gets the last keys of a layer, and behind them what stands for blocks of tokens."""
        follows = any(shape.layer == layer and shape.is_attended for shape in self.entries.values())
        return follows and kept is self.keys[-1][0] and key.shape[1::2] == kept.shape[1::2]

    def reads(self, layer: int) -> bool:
        """Whether all that reads a layer's keys and values is attention that becomes `qc.attention`: scaled dot
        products, perhaps with a soft cap or sinks."""
        return layer in self.uses and layer not in self.biased

    def rotated(self) -> frozenset[int]:
        """The layers whose keys may be rotated: they are no values, and all that reads them is attention, which rotates
        its queries as well."""
        return frozenset(
            layer
            for layer, shape in self.shapes.items()
            if layer in self.uses and block_of(shape.key_dim) > 1 and not shape.is_shared
        )

    def windows(self, length: int) -> dict[int, int]:
        """The window of each layer that has one, over `length` positions: what transformers hands to attention, where
        the rule of the mask shows these keys and no others."""
        found = {}
        for layer in self.shapes:
            window, why = self._window(layer, length)
            if window is None:
                self.reasons[layer] = why
            else:
                found[layer] = window
        unclear = [layer for layer in self.shapes if layer not in found and self._has_window(layer, length)]
        if found and unclear:  # transformers makes one mask for all layers with a window, of one size
            why = f"layer {unclear[0]} has a window, and {self.reasons[unclear[0]]}"
            self.reasons |= dict.fromkeys(found, why)
            return {}
        return found

    def _has_window(self, layer: int, length: int) -> bool:
        """Whether transformers hands a window below `length` to any attention that reads the layer."""
        return any(window is not None and window < length for window, _ in self.uses.get(layer, []))

    def _window(self, layer: int, length: int) -> tuple[int | None, str]:
        """The window of a layer, or why it has none."""
        uses = self.uses.get(layer, [])
        if not uses:
            return None, "transformers' attention interface does not show how its keys are read"
        if layer in self.indexers:
            return None, "an index chooses the tokens that it attends to"
        if layer in self.biased:
            return None, "what its attention adds for each position stands in the order of positions"
        (window, rule), *others = uses
        if any(other != (window, rule) for other in others):
            return None, "several attentions read it, with different windows"
        if window is None:
            return None, "it has no window"
        if window >= length:
            return None, f"its window of {window} tokens shows all of {length}"
        if window < 1 or rule is None or not shows_window(rule, window, length):
            return None, f"its mask is not that of a window of {window} tokens"
        return window, ""


def _is_whole(mask: Any, made: torch.Tensor) -> bool:
    """Whether a mask is the one that was made, or a view of all of it."""
    if mask is made:
        return True
    is_view = isinstance(mask, torch.Tensor) and mask._base is made
    return is_view and (mask.shape, mask.stride(), mask.storage_offset()) == (made.shape, made.stride(), 0)


def shows_window(rule: MaskRule, window: int, length: int) -> bool:
    """Whether a query at each position of `length` sees the last `window` positions up to its own.

    Both ends of what it sees are asked for every position, and all keys for some.
    """
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    each = torch.arange(length).view(1, 1, -1, 1)
    some = each[:, :, torch.linspace(0, length - 1, 16).long()]
    for queries, keys in (
        *((each, (each + offset).clamp(0, length - 1)) for offset in (-window, 1 - window, 0, 1)),
        (some, torch.arange(length).view(1, 1, 1, -1)),
    ):
        wanted = (keys <= queries) & (keys > queries - window)
        shown = rule(zero, zero, queries, keys)
        if is_fake(shown) or not torch.equal(shown.expand(wanted.shape), wanted):
            return False
    return True


def _shows_later_tokens(rule: MaskRule) -> bool:
    """Whether a query sees the key of the next position: masks of encoders do.

    What a rule shows may depend on numbers of the call, which a probe has not got: the chunks of Llama 4 begin behind
    the padding of a text.  Nothing is said of such a rule.
    """
    zero, queries = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(TOKENS).view(1, 1, -1, 1)
    shown = torch.as_tensor(rule(zero, zero, queries, queries + 1))
    return not is_fake(shown) and bool(shown.any())


def ring_rows(window: int, chunk: int) -> int:
    """The rows of a ring: a call of `chunk` tokens writes all their keys before its first token looks `window` - 1
    positions back."""
    return -(-(window + chunk - 1) // ROW_GROUP) * ROW_GROUP


def ring_of(windows: dict[int, int], chunk: int, length: int) -> Ring | None:
    """The ring of the layers with a window, or None if it would be no smaller than the whole sequence.

    All layers have rings of one size.
    """
    if not windows:
        return None
    window = max(windows.values())
    rows = ring_rows(window, chunk)
    return Ring(window, rows, frozenset(windows)) if rows < length else None


def current() -> Probe | None:
    """The probe of this thread's call, if there is one."""
    return getattr(_current, "probe", None)


@contextmanager
def _probing() -> Iterator[Probe]:
    _current.probe = Probe()
    try:
        yield _current.probe
    finally:
        _current.probe = None


@contextmanager
def _states_in_modules(model: nn.Module) -> Iterator[None]:
    """ExportError if a call leaves tensors in attributes of modules that were None: states that no conversation could
    have for its own. They are None again afterwards."""
    empty = [
        (module, path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is None
    ]
    try:
        yield
        found = [f"{path}.{name}" for module, path, name in empty if isinstance(getattr(module, name), torch.Tensor)]
    finally:
        for module, _, name in empty:
            if isinstance(getattr(module, name), torch.Tensor):
                setattr(module, name, None)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ExportError(
            f"{type(model).__name__} keeps states in its modules ({found[0]}{more}) and not in the cache that it is "
            "given, so that no two texts could have their own; models of this kind are not compiled"
        )


def probe(model: nn.Module) -> tuple[Probe, int]:
    """What a call of the model shows, and how many logits it gives. ExportError for a model without a cache."""
    seen, vocabulary, is_counted = _called(model, TOKENS)
    if seen.unsaid:
        _check_widths(seen, _called(model, TOKENS + 1)[0])
    rules = [rule for uses in seen.uses.values() for _, rule in uses if rule is not None]
    if not seen.uses:  # attention of the model's own, which says nothing of its masks
        rules = [rule for _, rule in seen.masks]
    if any(map(_shows_later_tokens, rules)):
        raise ExportError(
            f"{type(model).__name__} shows a token those that follow it, and is no causal language model as it is "
            "configured: models of this kind have is_decoder=True in their configuration where they were trained to "
            "generate"
        )
    for name, state in seen.states.items():
        if not state.dtype.is_floating_point:
            seen.states[name] = replace(state, start=_token_before_a_text(model, state))
    if not seen.shapes and not seen.states:
        raise ExportError(
            f"{type(model).__name__} hands neither keys and values nor states to a cache; a causal language model of "
            "transformers with `use_cache` is needed"
        )
    if is_counted:
        raise ExportError(
            f"{type(model).__name__} counts positions from its tokens, and padding among them: a text's first position "
            "depends on the id of the padding token. Positions of a compiled model begin at 0"
        )
    return seen, vocabulary


def _called(model: nn.Module, tokens: int) -> tuple[Probe, int, bool]:
    """What a call with so many tokens shows, how many logits it gives, and whether they depend on counts of tokens."""
    with _probing() as seen:
        recorder = _Recorder(seen)
        try:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with torch.no_grad(), as_pairs(model), _states_in_modules(model), mode:
                ids = torch.zeros(1, tokens, dtype=torch.int64)
                with TokenCounts(ids) as counts, Zeros() as zeros:
                    found = model(input_ids=ids, use_cache=True, **{cache_argument(model): recorder})
        except CALL_ERRORS as error:
            text = " ".join(str(error).split())[:300]
            raise ExportError(
                f"{type(model).__name__} cannot read tokens with a cache ({line_of(error)}: {type(error).__name__}: "
                f"{text}): check that its configuration is that of the weights, that it is a causal language model, "
                "and that it takes a cache of transformers' common classes, not one of its own"
            ) from error
        if zeros.found and any(state.kind == "recurrent" for state in seen.states.values()):
            raise ExportError(
                f"{type(model).__name__} multiplies zeros by a linear with a bias while there is no state of before: "
                "a step begins a text with states of zeros, but this model begins it with the bias"
            )
        return seen, int(found.logits.shape[-1]), counts.counted(found.logits)


def _check_widths(seen: Probe, longer: Probe) -> None:
    """ExportError if the width of a state of a convolution is not said, and is another in a longer call."""
    for layer, index in sorted(seen.unsaid):
        one, other = (found.states.get(f"conv_{layer}_{index}") for found in (seen, longer))
        if one is None or other is None or one.shape != other.shape:
            raise ExportError(
                f"layer {layer} keeps a state of a convolution without saying its width (`conv_kernel_size`), and "
                f"hands over {_columns(one)} columns in a call of {TOKENS} tokens, but {_columns(other)} in one of "
                f"{TOKENS + 1}: its module has to pass `conv_kernel_size` to `update_conv_state`"
            )


def _columns(state: StateShape | None) -> int:
    return 0 if state is None else state.shape[-1]


def _token_before_a_text(model: nn.Module, state: StateShape) -> int:
    """The token that stands for those before a text, in a state of tokens."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) == state.layer and isinstance(vars(module).get("eos_token_id"), int):
            return int(module.eos_token_id)  # type: ignore[arg-type]
    dtype = str(state.dtype).removeprefix("torch.")
    raise ExportError(
        f"layer {state.layer} of {type(model).__name__} keeps whole numbers ({dtype}), and no module of it says with "
        "which token a text begins (`eos_token_id`)"
    )


class _Layers(list[Any]):
    """An empty list, each element of which answers what some models ask of a layer: Qwen 4 for the positions of the
    tokens before, MiniMax M3 to keep the keys of its index (b, 1, s, dim)."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __getitem__(self, number: Any) -> Any:
        return SimpleNamespace(
            indexer_position_ids=None, update_index=lambda keys: self.recorder.update_indexer(keys, number)
        )


class _Recorder(Cache):
    """A cache that keeps nothing, and notes what it is given. No layer has a state yet."""

    def __init__(self, seen: Probe) -> None:
        super().__init__(layers=_Layers(self))
        self.seen = seen

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype,
            is_shared=value_states is key_states,
        )  # fmt: skip
        self.seen.keys.append((key_states, layer_idx))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        dim = int(indexer_key_states.shape[-1])
        self.seen.indexers[layer_idx] = LayerShape(1, dim, 0, indexer_key_states.dtype)
        return indexer_key_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """transformers keeps as many columns as it is given where the model does not say how many: `probe` refuses
        those that are as many as the call has tokens, since they would be the length of a prompt."""
        if conv_kernel_size is None:
            self.seen.unsaid.add((layer_idx, state_idx))
            conv_kernel_size = conv_states.shape[-1]
        shape = (*conv_states.shape[1:-1], conv_kernel_size)
        self._note("conv", layer_idx, state_idx, shape, conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._note("recurrent", layer_idx, state_idx, tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def _note(self, kind: Kind, layer: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        found = StateShape(kind, layer, index, tuple(int(size) for size in shape), dtype)
        self.seen.states[found.name] = found


def cache_argument(model: nn.Module) -> str:
    """The name by which a model takes its cache: models without attention call it `cache_params`."""
    taken = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in taken and "past_key_values" not in taken else "past_key_values"
