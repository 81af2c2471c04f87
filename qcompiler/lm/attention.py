"""The attention and the masks that transformers finds under the name `ATTENTION`: a language model that is compiled
calls these through the interfaces that transformers has for them.

The heads of grouped queries stay unrepeated, and a mask compares keys with the positions of a call, which are data:
sequences of a batch may have different lengths, and no mask is an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.qc_ops import torch_ring  # noqa: F401  (it registers an op)
from qcompiler.lm import probe, rotation, states

if TYPE_CHECKING:
    from qcompiler.lm.step import DecoderStep

ATTENTION = "qcompiler"
"""The name under which transformers finds this module's attention and mask."""

HEEDED: Final = frozenset(
    ("scaling", "softcap", "s_aux", "sinks", "position_bias", "sliding_window", "indices", "block_indices")
)
"""What a model may say of an attention, by the names that transformers' models use."""

UNNEEDED: Final = frozenset((
    "dropout", "is_causal", "deterministic", "output_attentions", "position_ids", "cache_position", "cu_seq_lens_q",
    "cu_seq_lens_k", "max_length_q", "max_length_k",
))  # fmt: skip
"""Arguments that add nothing to what the mask says: positions and lengths, for kernels that make masks themselves, and
what is for training."""


def register() -> None:
    """Makes both known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, mask_by_position)


def mask_by_position(
    batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any
) -> torch.Tensor:
    """(b, 1, s, length), true where transformers' rule keeps a key: the rule is asked with each token's position.

    A row of a ring has the latest position up to the token's that lies in it.
    """
    seen = probe.current()
    if seen is not None:
        return seen.mask(batch_size, q_length, kv_length, mask_function)
    step = _step()
    positions = step.positions
    assert positions is not None
    sequences = torch.arange(batch_size)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    queries, keys = positions[:, None, :, None], torch.arange(kv_length)[None, None, None, :]
    in_ring = step.ring is not None and kv_length == step.ring.rows
    if in_ring:
        keys = queries - (queries - keys) % kv_length
    kept: torch.Tensor = mask_function(sequences, head, queries, keys)
    if in_ring:
        kept = kept & (keys >= 0)
    return kept.expand(batch_size, 1, q_length, kv_length)


def attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **how: Any
) -> tuple[torch.Tensor, None]:
    """Scaled dot products with grouped heads (b, s, heads, dim).

    Soft caps, sinks and position biases, for which torch has no operator, are written out; the compiler finds
    `qc.attention` in what is written.  ExportError for an argument that is not known here, since attention without it
    would be another.
    """
    _check_arguments(module, how)
    scale, softcap = how.get("scaling"), how.get("softcap")
    sinks, bias = how.get("s_aux"), how.get("position_bias")
    if sinks is None:
        sinks = how.get("sinks")  # of each query (b, heads, s, 1): Inkling 2
    seen, layer = probe.current(), None
    if seen is not None:
        seen.attended(key, attention_mask, how.get("sliding_window"), is_biased=bias is not None)
    else:
        step = _step()
        layer = next((each for each in step.caches if getattr(each, "read", None) is key), None)
        if layer is not None and layer.window is None and attention_mask is None:
            raise ExportError(
                f"{type(module).__name__} calls attention without a mask: a token would see all rows of the cache. "
                "transformers' masks are made by `create_causal_mask`"
            )
    for chosen in _chosen_keys(module, query.shape[1], key.shape[2], how):
        attention_mask = attention_mask & chosen
    if layer is not None and layer.is_rotated:
        dim = query.shape[-1]
        query, scale = layer.rotate(query), (scale if scale is not None else dim**-0.5) / rotation.squared(dim)
    if sinks is not None and sinks.ndim != 4:
        sinks = sinks.reshape(1, -1, 1, 1)
    if layer is not None and layer.window is not None and bias is None:
        made = _ring_attention(query, key, value, scale, softcap, layer.window, sinks)
        return made.transpose(1, 2).contiguous(), None
    if softcap is None and sinks is None and bias is None:
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2).contiguous(), None
    return _written_out(query, key, value, attention_mask, scale, softcap, bias, sinks), None


def _step() -> DecoderStep:
    """The step that asks. ExportError for a call of the model by another thread than the one that compiles it."""
    step = states.current()
    if step is None:
        raise ExportError(
            "a model is called while another thread compiles it, and its attention is replaced meanwhile: call it "
            "before or after that"
        )
    return step


def _check_arguments(module: nn.Module, how: dict[str, Any]) -> None:
    """ExportError if attention is given a number or tensors under a name that is not known."""
    for name, value in how.items():
        if name in HEEDED | UNNEEDED or isinstance(value, bool):
            continue
        if any(isinstance(each, torch.Tensor | float | int) for each in tree_leaves(value)):
            raise ExportError(
                f"{type(module).__name__} calls attention with `{name}`, which is not known: ignoring it could give "
                "other logits. Known are "
                + ", ".join(f"`{each}`" for each in sorted(HEEDED))
                + "; a model of your own "
                "can be compiled by qc.qcompile, with attention written out"
            )


def _chosen_keys(module: Any, heads: int, keys: int, how: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Whether each token (b, 1 or heads, s, keys) attends to a key, where a layer chooses them: the tokens `indices`
    (b, s, k) of DeepSeek's sparse attention, or the blocks of tokens `block_indices` (b, kv heads, s, k) of MiniMax M3,
    where -1 is none."""
    indices = how.get("indices")
    if indices is not None and indices.shape[-1] < keys:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
        yield chosen.scatter(-1, indices.long(), True)[:, None]
    blocks = how.get("block_indices")
    if blocks is None:
        return
    size = module.indexer.block_size
    count = -(-keys // size)
    if blocks.shape[-1] < count:
        chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool)
        chosen = chosen.scatter(-1, torch.where(blocks < 0, count, blocks), True)[..., :count]
        chosen = chosen.repeat_interleave(size, -1)[..., :keys]
        yield chosen.repeat_interleave(heads // chosen.shape[1], 1)


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention (b, s, heads, dim) for which torch has no operator.

    The queries of a group of heads are rows of one product with the group's keys, which are read once: (b, kv heads,
    group · s, dim).  A sink is one more score of each head, whose weight multiplies nothing.
    """
    b, heads, s, dim = query.shape
    rows = key.shape[1], heads // key.shape[1] * s
    scores = (query.reshape(b, *rows, dim) @ key.transpose(2, 3)).view(b, heads, s, key.shape[2])
    scores = scores * (scale if scale is not None else dim**-0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    # as in scaled_dot_product_attention; with a bias, the least number, as transformers writes it
    hidden = -torch.inf if bias is None else torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~kept, hidden)
    if sinks is None:
        weights = scores.float().softmax(-1)
    else:
        extra = sinks.expand(b, heads, s, 1).to(scores.dtype)
        weights = torch.cat([scores, extra], -1).float().softmax(-1)[..., :-1]
    out = weights.to(query.dtype).reshape(b, *rows, key.shape[2]) @ value
    return out.view(b, heads, s, value.shape[3]).transpose(1, 2).contiguous()


def _ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    window: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention to the keys of a layer that keeps a ring."""
    factor = float(scale if scale is not None else query.shape[-1] ** -0.5)
    step = _step()
    made: torch.Tensor = torch.ops.qc.ring_attention(query, key, value, step.positions, window, factor, softcap, sinks)
    return made


def take_masks(implementation: str) -> None:
    """Gives calls of a step or a probe `mask_by_position` under the name of an attention that transformers does not let
    be replaced (Falcon, GPT-J, GPT-Neo, Bloom). All other calls, of any thread, get transformers' own mask."""
    if implementation not in ("eager", "sdpa"):
        return
    usual = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    if getattr(usual, "by_position", False):
        return

    @functools.wraps(usual)
    def mask(*args: Any, **how: Any) -> Any:
        if states.current() is None and probe.current() is None:
            return usual(*args, **how)
        kept = mask_by_position(*args, **how)
        if implementation != "eager":
            return kept
        dtype = how.get("dtype", torch.float32)
        return torch.where(kept, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    vars(mask)["by_position"] = True
    ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, mask)
