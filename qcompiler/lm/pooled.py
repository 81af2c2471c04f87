"""Entries that stand for blocks of tokens: attention to the keys of whole blocks, and indexes that choose blocks.

Some models pool the numbers of `rate` consecutive tokens into one entry, once the last of them was read:

| model | entries | of a window of |
|---|---|---|
| DeepSeek V4, heavily compressed attention | keys, which are values too | a block |
| DeepSeek V4, compressed sparse attention | keys, and the keys of its index | a block and the one before |
| Qwen 4, GLM 5 Next | the keys of their indexes | a block |

transformers keeps lists that grow by lengths which Python counts, or looks for the blocks by value.  Here a layer has a
buffer with a row for each block that a sequence may have, and the last columns of the window that is open are a state
(lm/states.py).  A call of s tokens at position p completes at most ceil(s / rate) blocks, and makes one entry more,
from block p // rate on: torch would take a size that may be 1 for one that never is.  A token at position p sees the
entries below (p + 1) // rate.  The entry of a block that is not complete lies behind every position, and the call that
reads the block's last token writes it again.

`replaced` puts the functions of this module in the places of a model's compressors and indexes, which are found by
their parts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from qcompiler.errors import ExportError
from qcompiler.lm import probe, states

Tensor = torch.Tensor
Pool = Callable[[Tensor, Tensor], Tensor]
"""From the columns of windows (b, n, width, channels), and whether each of them is before the text's first token
(b, n, width, 1): entries (b, n, dim)."""
Turn = Callable[[Tensor, Tensor], Tensor]
"""From entries (b, n, dim) and the positions (b, n) of their blocks' first tokens: the entries, rotated to these."""


@dataclass(frozen=True)
class EntryShape:
    """The entries of one layer and purpose: for each sequence, a row of `dim` numbers for each block of `rate`
    tokens."""

    layer: int
    name: str
    rate: int
    dim: int
    dtype: torch.dtype

    @property
    def is_attended(self) -> bool:
        """Whether attention reads the entries as keys; else an index does."""
        return self.name == "keys"

    @property
    def buffer(self) -> str:
        """The name of the buffer, and of the program's state."""
        return f"entries_{self.layer}_{self.name}"

    def rows(self, tokens: int) -> int:
        """The rows of a sequence of `tokens`: a call writes up to two blocks that it does not complete."""
        return tokens // self.rate + 2


def register(step: nn.Module, shapes: list[EntryShape], batch: int, tokens: int) -> None:
    """Makes a buffer of zeros for each kind of entries."""
    for shape in shapes:
        rows = torch.zeros(1, batch * shape.rows(tokens), shape.dim, dtype=shape.dtype)
        step.register_buffer(shape.buffer, rows)


def updated(shape: EntryShape, state: int, columns: Tensor, width: int, pool: Pool, turn: Turn) -> Tensor:
    """Pools the blocks that a call completes; returns each sequence's entries (b, rows, dim).

    `columns` (b, s, channels) are those of the call's tokens.  `state` is the number of the layer's state that holds
    the columns before the call.  A window has `width` columns.
    """
    step, before = states.current(), max(width - 1, 1)  # a state has a column at least
    b, s, channels = columns.shape
    if step is None:
        seen = probe.current()
        assert seen is not None
        seen.entries[shape.buffer] = shape
        found = states.StateShape("conv", shape.layer, state, (channels, before), columns.dtype)
        seen.states[found.name] = found
        return columns.new_zeros(b, 0, shape.dim)  # attention then gets the mask of the keys before
    assert step.positions is not None and step.begins is not None
    first, count = step.positions[:, :1], (s - 1) // shape.rate + 2
    layer: Any = step.caches[shape.layer]
    whole = layer.update_conv_state(columns.transpose(1, 2), state).transpose(1, 2)  # (b, before + s, channels)
    blocks = first // shape.rate + torch.arange(count)  # (b, n)
    places = (blocks * shape.rate)[:, :, None] + torch.arange(shape.rate - width, shape.rate)  # positions in the text
    taken = (places - first[:, :, None] + before).clamp(max=before + s - 1)
    if step.batch > 1:
        taken = taken + torch.arange(b)[:, None, None] * (before + s)
    windows = whole.reshape(-1, channels)[taken]
    made = turn(pool(windows, (places < 0).unsqueeze(-1)), blocks * shape.rate)
    rows = shape.rows(step.length)
    begin = step.begins  # a sequence that reads nothing writes behind its tokens, where no entry is complete
    if step.batch > 1:
        slots = torch.arange(b)[:, None]
        targets = (begin - slots * step.length) // shape.rate + slots * rows + torch.arange(count)
    else:
        targets = begin // shape.rate + torch.arange(count)
    kept: Tensor = getattr(step, shape.buffer)
    kept.index_copy_(1, targets.reshape(-1), made.reshape(1, b * count, shape.dim).to(kept.dtype))
    each = kept.view(step.batch, rows, shape.dim)
    return each[:b] if step.batch > 1 else each


def complete(entries: Tensor, positions: Tensor, rate: int) -> Tensor:
    """(b, s, rows): whether the block of an entry was read when the token at a position was."""
    return torch.arange(entries.shape[1]) < ((positions + 1) // rate)[:, :, None]


def best(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """(b, s, rows): the `count` entries with the highest scores, of those that are seen."""
    rows = scores.shape[-1]
    if count >= rows:
        return seen
    found = scores.masked_fill(~seen, -math.inf).topk(count, dim=-1).indices
    return torch.zeros(seen.shape, dtype=torch.bool).scatter(-1, found, True) & seen


def of_blocks(chosen: Tensor, positions: Tensor, rate: int, count: int) -> Tensor:
    """(b, s, count): the keys of chosen blocks (b, s, rows), and those behind the last whole block."""
    last = (positions + 1) // rate * rate
    keys = torch.arange(count)
    of_token = (keys >= last[:, :, None]) & (keys <= positions[:, :, None])
    return chosen.repeat_interleave(rate, dim=-1)[..., :count] | of_token


# --- DeepSeek V4 ------------------------------------------------------------------------------------------------------


def _is_compressor(module: nn.Module) -> bool:
    """A compressor, or an index of compressed keys, which has one of its own."""
    return {"compress_rate", "kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb"} <= _parts(module)


def _compressed(module: Any, name: str, state: int, hidden_states: Tensor, layer_idx: int) -> Tensor:
    """The entries of a compressor (b, rows, dim): sums of a window's vectors, weighted by a softmax of their gates.

    Where there are two series of vectors, a window has the first series of the block before, and the second of its own.
    """
    dim, rate = int(module.head_dim), int(module.compress_rate)
    wide = module.position_bias.shape[-1]
    series = wide // dim
    columns = torch.cat([module.kv_proj(hidden_states), module.gate_proj(hidden_states)], -1)

    def pool(windows: Tensor, outside: Tensor) -> Tensor:
        kv, gate = windows[..., :wide], windows[..., wide:]
        halves = [(slice(i * rate, (i + 1) * rate), slice(i * dim, (i + 1) * dim)) for i in range(series)]
        kv = torch.cat([kv[:, :, of, part] for of, part in halves], 2)
        gate = torch.cat([gate[:, :, of, part] + module.position_bias[:, part] for of, part in halves], 2)
        weights = gate.masked_fill(outside, -math.inf).softmax(dim=2, dtype=torch.float32).to(kv.dtype)
        return module.kv_norm((kv * weights).sum(dim=2))  # type: ignore[no-any-return]

    def turn(entries: Tensor, positions: Tensor) -> Tensor:
        return _turned(module, entries.unsqueeze(1), positions).squeeze(1)

    shape = EntryShape(layer_idx, name, rate, dim, hidden_states.dtype)
    return updated(shape, state, columns, series * rate, pool, turn)


def _turned(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """x (b, heads, n, dim) with the rotary positions (b, n) of a compressor."""
    cos, sin = module.rotary_emb(x, position_ids=positions, layer_type=module.rope_layer_type)
    turned: Tensor = sys.modules[type(module).__module__].apply_rotary_pos_emb(x, cos, sin)
    return turned


def _compressor(
    module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
) -> tuple[Tensor, Tensor]:
    """Compressed keys (b, 1, rows, dim), and whether each token sees them (b, 1, s, rows)."""
    entries = _compressed(module, "keys", 0, hidden_states, layer_idx)
    if hasattr(module, "indexer"):
        kept = module.indexer(hidden_states, q_residual, position_ids, past_key_values, layer_idx)
    else:
        kept = complete(entries, position_ids, module.compress_rate)
    return entries.unsqueeze(1), kept.unsqueeze(1)


def _compressed_index(
    module: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
) -> Tensor:
    """Whether each token chooses an entry (b, s, rows)."""
    del past_key_values
    keys = _compressed(module, "index", 1, hidden_states, layer_idx)
    b, s, _ = hidden_states.shape
    queries = module.q_b_proj(q_residual).view(b, s, -1, module.head_dim).transpose(1, 2)
    scores = module.scorer(_turned(module, queries, position_ids).transpose(1, 2), keys, hidden_states)
    return best(scores, complete(keys, position_ids, module.compress_rate), module.index_topk)


# --- Qwen 4 -----------------------------------------------------------------------------------------------------------


def _is_block_index(module: nn.Module) -> bool:
    return {"compress_ratio", "block_topk", "index_qk_proj", "q_layernorm", "k_layernorm"} <= _parts(module)


def _block_index(
    module: Any,
    rotary: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: Any,
) -> Tensor:
    """Whether each token chooses a key (b, 1, s, keys): keys of the best blocks, and those behind the last whole block.

    `rotary` makes the rotary positions of the model.
    """
    del past_key_values
    b, s, _ = hidden_states.shape
    dim, rate = int(module.index_head_dim), int(module.compress_ratio)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    queries, keys = module.index_qk_proj(hidden_states).split([module.index_n_heads * dim, dim], dim=-1)
    cos, sin = (each[:, -s:] for each in position_embeddings)
    queries = rotate(module.q_layernorm(queries.reshape(b, s, -1, dim)), cos=cos, sin=sin, unsqueeze_dim=2)

    def pool(windows: Tensor, outside: Tensor) -> Tensor:
        del outside  # a block begins in the text
        return module.k_layernorm(windows.float().mean(dim=2).to(windows.dtype))  # type: ignore[no-any-return]

    def turn(entries: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rotary(entries, positions[None].expand(3, -1, -1))
        return rotate(entries.unsqueeze(2), cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2)  # type: ignore[no-any-return]

    shape = EntryShape(module.layer_idx, "index", rate, dim, hidden_states.dtype)
    entries = updated(shape, 0, keys, rate, pool, turn)
    step, count = states.current(), attention_mask.shape[-1]
    if step is None:
        return torch.ones(b, 1, s, count, dtype=torch.bool)
    assert step.positions is not None
    scores = functional.relu(torch.einsum("bshd,bnd->bshn", queries.float(), entries.float()))
    chosen = best(scores.sum(dim=2) / math.sqrt(dim), complete(entries, step.positions, rate), module.block_topk)
    return of_blocks(chosen, step.positions, rate, count).unsqueeze(1)


# --- GLM 5 Next -------------------------------------------------------------------------------------------------------


def _is_pool_index(module: nn.Module) -> bool:
    return {"index_kpool", "index_kpool_compress_ape", "index_kpool_compress_gate", "wq_b", "wk"} <= _parts(module)


def _pool_index(
    module: Any, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, past_key_values: Any
) -> Tensor:
    """Whether each token chooses a key (b, s, keys): keys of the best blocks, and those behind the last whole block."""
    del attention_mask, past_key_values
    if not module.index_kpool_always_select_tail:
        raise ExportError(
            "an index that leaves out the tokens of the last, incomplete block (index_kpool_always_select_tail=False) "
            "shows no key to a text's first tokens; transformers then weighs all keys alike, later ones among them"
        )
    b, s, _ = hidden_states.shape
    dim, rate = int(module.head_dim), int(module.index_kpool)
    keys = module.k_norm(module.wk(hidden_states))
    columns = torch.cat([keys, functional.linear(hidden_states, module.index_kpool_compress_gate)], -1)

    def pool(windows: Tensor, outside: Tensor) -> Tensor:
        del outside  # a block begins in the text
        weights = (windows[..., dim:].float() + module.index_kpool_compress_ape.float()).softmax(dim=2)
        pooled: Tensor = (weights.to(windows.dtype) * windows[..., :dim]).sum(dim=2)
        return pooled

    shape = EntryShape(module.layer_idx, "index", rate, dim, hidden_states.dtype)
    entries = updated(shape, 0, columns, rate, pool, lambda entries, _: entries)
    step = states.current()
    if step is None:
        return torch.ones(b, s, s, dtype=torch.bool)  # a probing call has no other tokens
    assert step.positions is not None
    queries = module.wq_b(q_resid).view(b, s, -1, dim)
    scores = functional.relu(torch.einsum("bshd,bnd->bshn", queries.float(), entries.float()) * module.softmax_scale)
    weights = module.weights_proj(hidden_states).float() * module.n_heads**-0.5
    scores = (scores * weights.unsqueeze(-1)).sum(dim=2)
    chosen = best(scores, complete(entries, step.positions, rate), module.index_topk // rate)
    return of_blocks(chosen, step.positions, rate, step.length)


def _mask_of_keys(topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """The mask (b, 1, s, keys) of what `_pool_index` chose, which follows from positions."""
    del query_states, kv_length
    seen = probe.current()
    if seen is not None:
        seen.has_masks_of_blocks = True
    return topk_indices.unsqueeze(1)


def _parts(module: nn.Module) -> set[str]:
    """The names of a module's attributes, parameters and modules."""
    return {*vars(module), *module._parameters, *module._buffers, *module._modules}


@contextlib.contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    """Puts the functions of this module into the modules of a model that pool tokens."""
    changed: list[tuple[nn.Module, str]] = []
    rotary: nn.Module | None = None
    try:
        for module in model.modules():
            made: Callable[..., Any] | None = None
            if isinstance(getattr(module, "rotary_emb", None), nn.Module) and not _is_compressor(module):
                rotary = module.rotary_emb  # type: ignore[assignment]
            if _is_compressor(module):
                made = functools.partial(_compressed_index if hasattr(module, "scorer") else _compressor, module)
            elif _is_block_index(module) and rotary is not None:
                made = functools.partial(_block_index, module, rotary)
            elif _is_pool_index(module):
                made = functools.partial(_pool_index, module)
            if made is not None:
                module.forward = made
                changed.append((module, "forward"))
            if hasattr(module, "build_attention_mask_from_topk"):
                vars(module)["build_attention_mask_from_topk"] = _mask_of_keys
                changed.append((module, "build_attention_mask_from_topk"))
        yield
    finally:
        for module, name in changed:
            delattr(module, name)


__all__ = ["EntryShape", "best", "complete", "of_blocks", "register", "replaced", "updated"]
