"""Recurrences of transformers' models as one operator: `torch.ops.qc.linear_attention`, whose kernel is the loop.

transformers marks the functions that compute a recurrence with the names of the kernels that may replace them
(`use_kernel_func_from_hub_with_fallback`), and each name has one convention for its arguments, whatever the model is.
`replaced` puts functions of this module in their places while a model is compiled.  transformers' own functions loop
over tokens or chunks in Python, which would fix the length of a call, and `selective_scan_fn` knows no state to begin
with.

| name | recurrence | of |
|---|---|---|
| `causal_conv1d_fn` | a product for each column of the window | every model with a convolution |
| `selective_scan_fn` | decay for each channel and column of the state | Mamba, Falcon Mamba, Jamba, Zamba |
| `mamba_chunk_scan_combined` | decay for each head | Mamba 2, Bamba, Falcon H1, Granite 4, Nemotron H, Zamba 2 |
| `chunk_gated_delta_rule` | decay for each head, delta rule | Qwen 3 Next, Qwen 3.5, OLMo hybrid |
| `chunk_kda` | decay for each column, delta rule | Kimi Linear |

States are (b, heads, values, keys) here, in fp32, whatever their order is in transformers: nothing else reads them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.qc_ops import torch_linear_attention  # noqa: F401  (it registers the operator)
from qcompiler.lm import probe, states

Tensor = torch.Tensor


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """The causal convolution of each channel: hidden_states (b, channels, L), weight (channels, K).

    In a step, the first K columns are the layer's state. The result has a column for each whole window, (b, channels,
    L - K + 1), and callers take the last ones.  A probing call has no state: its result has L columns.
    """
    taps, width = weight.shape[-1], hidden_states.shape[-1]
    wide = hidden_states.to(weight.dtype)
    if states.current() is None or width < taps:
        wide = functional.pad(wide, (taps - 1, 0))
        width += taps - 1
    columns = [wide[:, :, i : i + width - taps + 1] * weight[:, i, None] for i in range(taps)]
    total = columns[0] if bias is None else columns[0] + bias[:, None]
    for column in columns[1:]:
        total = total + column
    return (total if activation is None else ACT2FN[activation](total)).to(hidden_states.dtype)


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Mamba's scan: hidden_states, dt and z (b, channels, s), A (channels, n), B and C (b, n, s), D (channels)."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    step = (functional.softplus(dt) if delta_softplus else dt).float().transpose(1, 2)
    x = hidden_states.float().transpose(1, 2)
    keys, queries = (each.float().transpose(1, 2).unsqueeze(2) for each in (B, C))
    out, last = _attended(queries, keys, (step * x).unsqueeze(3), step.unsqueeze(3), A.float(), None, _asked())
    total = out.squeeze(3).transpose(1, 2)
    if D is not None:
        total = total + hidden_states * D[None, :, None]
    if z is not None:
        total = total * functional.silu(z)
    return (total, last) if return_last_state else total


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba 2's scan: hidden_states (b, s, heads, p), dt (b, s, heads), A and D (heads), B and C (b, s, groups, n)."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    step = torch.clamp(functional.softplus(dt) if dt_softplus else dt, dt_limit[0], dt_limit[1]).float()
    x = hidden_states.float()
    decay = (step * A.float()).unsqueeze(3)
    out, last = _attended(C.float(), B.float(), x * step.unsqueeze(3), decay, None, None, initial_states)
    if D is not None:
        out = out + x * D[..., None]
    return (out, last) if return_final_states else out


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: query and key (b, s, groups, n), value (b, s, heads, p), beta (b, s, heads); g (b, s,
    heads), or (b, s, heads, n) for a decay of each column."""
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = g.float() if g.ndim == 4 else g.float().unsqueeze(3)
    out, last = _attended(query, key, value.float(), decay, None, beta.float(), initial_state)
    return out.to(value.dtype), last if output_final_state else None


def convolution_of_one(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`convolution` of the call's one token (b, channels, 1), behind the columns that the layer has."""
    step = states.current()
    found = None if step is None else step.layer_of(conv_state)
    if found is None:
        raise ExportError("a model convolves a token behind columns that are no state of its cache")
    layer, index = found
    whole = layer.update_conv_state(hidden_states, index)
    return convolution(whole, weight, bias, activation)[:, :, -1:]


def scan_of_one(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`selective_scan` of one token, x (b, channels), or `chunk_scan`, x (b, heads, p), where dt, A, D and its bias are
    repeated over p."""
    if hidden_states.ndim == 2:
        x, steps, keys, queries = (each.unsqueeze(-1) for each in (hidden_states, dt, B, C))
        gate = None if z is None else z.unsqueeze(-1)
        out: Tensor = selective_scan(x, steps, A, keys, queries, D, gate, dt_bias, dt_softplus)
        return out.squeeze(-1)
    bias, skip = (None if each is None else each[:, 0] for each in (dt_bias, D))
    x, steps, keys, queries = (each.unsqueeze(1) for each in (hidden_states, dt[..., 0], B, C))
    one: Tensor = chunk_scan(
        x, steps, A[:, 0, 0], keys, queries, D=skip, dt_bias=bias, initial_states=state, dt_softplus=dt_softplus
    )
    return one.squeeze(1) if z is None else one.squeeze(1) * functional.silu(z)


def _asked() -> Tensor | None:
    """The state that the model asked for last: Mamba's scan is not given it. Each is used once, so that no layer reads
    the state of another. Zamba keeps a layer's heads as one state, and scans one head after the other."""
    step = states.current()
    if step is None or step.asked is None:
        return None
    found, step.asked = step.asked, None
    if found.ndim == 4:
        return found
    if step.batch > 1:  # a part of the slots' states is no state that the operator can write
        raise ExportError("this model scans each head of a layer by itself: compile it with max_batch=1")
    step.asked = found[:, 1:] if found.shape[1] > 1 else None
    return found[:, 0]


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What each token reads, (b, s, heads, p), and the last states (b, heads, p, n)."""
    b, s, heads, width = value.shape
    step = states.current()
    found = None if step is None else step.layer_of(state)
    if found is None:
        first = torch.ones(b, dtype=torch.int64)
        if state is None:
            state = torch.zeros(b, heads, width, key.shape[3])
        last, out = _linear_attention(
            state.float(), query, key, value, decay, first, torch.full((b,), s, dtype=torch.int64), rate, beta
        )
        return out, last
    layer, index = found
    return layer.attended(index, query, key, value, decay, rate, beta)


_linear_attention: Callable[..., tuple[Tensor, Tensor]] = torch.ops.qc.linear_attention

REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "selective_scan_fn": selective_scan,
    "mamba_chunk_scan_combined": chunk_scan,
    "chunk_gated_delta_rule": delta_rule,
    "chunk_kda": delta_rule,
    # The same for a call of one token, which models ask for on their own:
    "causal_conv1d_update": convolution_of_one,
    "selective_state_update": scan_of_one,
    "fused_recurrent_gated_delta_rule": delta_rule,
    "fused_recurrent_kda": delta_rule,
}
"""By the name of the kernel."""


_lock = threading.Lock()
_held: dict[tuple[str, str], tuple[Any, int]] = {}
"""By module and name: the function of transformers that was replaced, and how many compilations use the new one."""


@contextlib.contextmanager
def replaced(model: nn.Module) -> Iterator[None]:
    """Puts `REPLACEMENTS` into the modules that define the model's classes, for calls of a step or a probe.

    Several threads may compile models of one module: the last one puts transformers' functions back.
    """
    modules = {kind.__module__ for each in model.modules() for kind in type(each).__mro__}
    mine: list[tuple[str, str]] = []
    try:
        with _lock:
            for module in sorted(name for name in modules if name.startswith("transformers.")):
                for name, function in list(vars(sys.modules[module]).items()):
                    made = REPLACEMENTS.get(kernel_of(function) or "")
                    if (module, name) not in _held and made is not None:
                        _held[module, name] = function, 0
                        setattr(sys.modules[module], name, _within_a_step(made, function))
                    if (module, name) in _held:
                        original, users = _held[module, name]
                        _held[module, name] = original, users + 1
                        mine.append((module, name))
        yield
    finally:
        with _lock:
            for module, name in mine:
                original, users = _held.pop((module, name))
                if users > 1:
                    _held[module, name] = original, users - 1
                else:
                    setattr(sys.modules[module], name, original)


def kernel_of(function: Any) -> str | None:
    """The name of the kernel that may replace a function of transformers, or the function's own, if that is a
    kernel's; None for any other object."""
    while inspect.isfunction(function) and hasattr(function, "__wrapped__"):
        names = inspect.getclosurevars(function).nonlocals
        if {"func_name", "torch_function"} <= set(names):
            return str(names["func_name"])
        function = function.__wrapped__
    if inspect.isfunction(function) and function.__name__ in REPLACEMENTS:
        return function.__name__
    return None


def _within_a_step(made: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`made` while this thread calls a step or a probe; other threads' models compute as before."""

    def chosen(*args: Any, **options: Any) -> Any:
        called = states.current() is not None or probe.current() is not None
        return (made if called else function)(*args, **options)

    return chosen


__all__ = ["REPLACEMENTS", "kernel_of", "replaced"]
