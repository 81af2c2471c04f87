"""The fused weights of a mixture of experts: the meaning of their uses, and how they are stored.

A parameter (E, N, K) holds the matrices of E experts; some models keep (E, K, N), or a matrix (E * N, K) of which they
take a view (E, N, K).  Which expert a row uses is data.
Four forms of the product are recognised, the first three with an expert's number for every pair of a row and an expert:

    bmm(W[index], x.unsqueeze(-1)).squeeze(-1)              "batched_mm" of transformers; (E, N, K)
    bmm(x.unsqueeze(1), W[index]).squeeze(1)                the same for (E, K, N)
    grouped_mm(x, W.transpose(1, 2), ends)                  "grouped_mm": rows sorted by expert, with the end of each
    bmm(x, W), bmm(x, W.transpose(1, 2))                    x (E, T, K): T rows for each expert

All become one operator, `qc.grouped_linear(x, W, index, experts, repeat)`, whose W is the matrix (E * N, K).  So a
format stores it like the weight of a linear, blocks run along K, and no kernel gathers weights by row.  Rows of x that
were copied for the experts of one token (`repeat_interleave`) are read from the original.

transformers computes experts by one of several equivalent functions.  Its default sorts rows by expert, which
`qc.grouped_linear` does not need; its "eager" loops over the experts that occur, which depends on data.  While a model
is exported, `as_pairs` makes its experts use "batched_mm", which is the first form.  Four models have no such choice:
Llama 4 sends every token through every expert, with zeros for those that the router did not choose, DBRX and LongCat
loop over the experts that occur, and JetMoE splits sorted rows by counts that Python reads.  `as_pairs` computes the
chosen pairs for all four.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from qcompiler.frontends.torch.qc_ops import torch_ops  # noqa: F401  (it registers qc.grouped_linear)
from qcompiler.frontends.weights.weight_source import EXPERTS_TRANSPOSED

aten = torch.ops.aten
_GROUPED_MM = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_COPIES = (aten.clone.default, aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.alias.default)
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_BATCHED = (aten.bmm.default, aten.matmul.default)
_INTEGERS = (torch.int64, torch.int32)


PAIRS = "batched_mm"
"""transformers' name of the function that computes each pair of a row and an expert separately."""

_SAME_MEANING = (None, "eager", "grouped_mm", "deepgemm", "sonicmoe")
"""Its other functions. A function that a caller registered under another name is exported as it is."""


@contextlib.contextmanager
def as_pairs(model: nn.Module) -> Iterator[None]:
    """Inside, a transformers model computes its experts pair by pair; its own function is restored afterwards."""
    name = "_experts_implementation_internal"  # the field behind a config's property `_experts_implementation`
    own = {each: made for each in model.modules() if (made := _own_pairs(each)) is not None}
    own |= {part: made for each in model.modules() for part, made in _pairs_of_parts(each).items()}
    held = (getattr(each, "config", None) for each in model.modules() if hasattr(type(each), "_apply_gate"))
    configs = {id(config): config for config in held if hasattr(config, name)}
    chosen = [(config, getattr(config, name)) for config in configs.values()]
    try:
        for config, choice in chosen:
            if choice in _SAME_MEANING:
                setattr(config, name, PAIRS)
        for each, made in own.items():
            each.forward = functools.partial(made, each)
        yield
    finally:
        for config, choice in chosen:
            setattr(config, name, choice)
        for each in own:
            vars(each).pop("forward", None)


_OWN_MIXTURES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "Llama4TextMoe": ("experts", ("gate_up_proj", "down_proj"), 3),
    "DbrxExperts": ("mlp", ("w1", "v1", "w2"), 2),
    "LongcatFlashExperts": ("", ("gate_up_proj", "down_proj"), 3),
}
"""Mixtures without the choice of a function: the module that holds their weights ("" for the mixture itself), the
weights, and their dims."""


def _own_pairs(module: nn.Module) -> Callable[..., Any] | None:
    """The function that computes a mixture of its own by pairs. A module whose `forward` was replaced on the instance
    is left alone."""
    name = type(module).__name__
    if name not in _OWN_MIXTURES or "forward" in vars(module):
        return None
    holder, weights, dims = _OWN_MIXTURES[name]
    inside = getattr(module, holder, None) if holder else module
    held = (getattr(inside, each, None) for each in weights)
    if not all(isinstance(each, nn.Parameter) and each.ndim == dims for each in held):
        return None
    ways: dict[str, Callable[..., Any]] = {
        "Llama4TextMoe": _chosen_experts, "DbrxExperts": _chosen_of_dbrx, "LongcatFlashExperts": _chosen_of_longcat,
    }  # fmt: skip
    return ways[name]


def _chosen_experts(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Llama4TextMoe.forward` for the experts that the router chose: all others get zeros there, and give zeros.

    The module multiplies a token by its score before the expert.  A score that underflows to 0 may make `topk` take
    another expert here, which then gives zeros too.
    """
    rows = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(rows)
    weights, index = scores.topk(module.top_k, dim=1)
    experts, chosen = module.experts, index.reshape(-1)
    pairs = (rows.unsqueeze(1) * weights.unsqueeze(2)).reshape(-1, module.hidden_dim)
    gate, up = torch.bmm(pairs.unsqueeze(1), experts.gate_up_proj[chosen]).squeeze(1).chunk(2, dim=-1)
    out = torch.bmm((up * experts.act_fn(gate)).unsqueeze(1), experts.down_proj[chosen]).squeeze(1)
    total = out.reshape(rows.shape[0], module.top_k, -1).sum(dim=1)
    return module.shared_expert(rows) + total, logits


def _chosen_of_dbrx(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`DbrxExperts.forward` without its loop over the experts that occur."""
    held, (tokens, top) = module.mlp, top_k_index.shape
    shape, chosen = (module.num_experts, module.ffn_hidden_size, module.hidden_size), top_k_index.reshape(-1)
    rows = hidden_states.reshape(-1, module.hidden_size).repeat_interleave(top, dim=0)
    gate, up = (torch.bmm(w.view(shape)[chosen], rows.unsqueeze(-1)).squeeze(-1) for w in (held.w1, held.v1))
    inside = held.activation_fn(gate) * up
    out = torch.bmm(inside.unsqueeze(1), held.w2.view(shape)[chosen]).squeeze(1)
    total = (out.view(tokens, top, -1) * top_k_weights.unsqueeze(-1)).sum(dim=1)
    return total.view(hidden_states.shape)


def _chosen_of_longcat(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`LongcatFlashExperts.forward` without its loop. Experts behind the last one with matrices return their input."""
    tokens, top = top_k_index.shape
    index = top_k_index.reshape(-1)
    has_matrices = index < module.num_routed_experts
    chosen = torch.where(has_matrices, index, 0)
    rows = hidden_states.repeat_interleave(top, dim=0)
    gate, up = torch.bmm(module.gate_up_proj[chosen], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    inside = module.act_fn(gate) * up
    out = torch.bmm(module.down_proj[chosen], inside.unsqueeze(-1)).squeeze(-1)
    out = torch.where(has_matrices.unsqueeze(1), out, rows).view(tokens, top, -1)
    return (out * top_k_weights.unsqueeze(-1)).to(hidden_states.dtype).sum(dim=1)


_SORTED_MIXTURES = ("JetMoeMoE", "JetMoeMoA")
"""Mixtures whose `router` sorts rows by expert for their `input_linear` and `output_linear`, and counts them."""


def _pairs_of_parts(module: Any) -> dict[nn.Module, Callable[..., Any]]:
    """The functions of a sorted mixture's parts that leave the pairs in their order; {} if a part was replaced."""
    if type(module).__name__ not in _SORTED_MIXTURES:
        return {}
    experts = [module.input_linear, module.output_linear]
    names = [type(part).__name__ for part in (module.router, *experts)]
    is_own = any("forward" in vars(part) for part in (module.router, *experts))
    if is_own or names != ["JetMoeTopKGating", *2 * ["JetMoeParallelExperts"]]:
        return {}
    return {module.router: _unsorted_routes, **dict.fromkeys(experts, _linear_of_pairs)}


def _unsorted_routes(router: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`JetMoeTopKGating.forward` without sorting: the order of the pairs (T * k), their tokens, their weights, their
    experts in the place of each expert's count, and the logits."""
    logits = router.layer(hidden_states).float()
    chosen, experts = logits.topk(router.top_k, dim=1)
    weights = torch.softmax(chosen, dim=1).type_as(hidden_states)
    order = torch.arange(experts.numel(), device=experts.device)
    return order, order // router.top_k, weights.flatten(), experts.flatten(), logits


def _linear_of_pairs(module: Any, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """`JetMoeParallelExperts.forward` for rows in any order, each with the number of its expert."""
    return torch.bmm(module.weight[experts], inputs.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class ExpertWeight:
    """How a parameter is stored that is, or is seen as, a tensor of this shape: `transposed` if that is (E, K, N)."""

    shape: tuple[int, int, int]
    transposed: bool

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def stored_shape(self) -> tuple[int, int]:
        experts, n, k = self.shape
        return (experts * k, n) if self.transposed else (experts * n, k)

    @property
    def text(self) -> str:
        """How the stored order of the values differs from the model's: "" if not at all."""
        return EXPERTS_TRANSPOSED if self.transposed else ""

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """A view of the model's values in stored order."""
        return values.reshape(self.shape).transpose(1, 2) if self.transposed else values


@dataclass(frozen=True)
class _Product:
    """One use: `node` is the operator to replace, `x` its rows, `index` the expert of each."""

    node: fx.Node
    x: fx.Node
    index: fx.Node | None
    """The node with the end of each expert's rows, or None."""
    ends: fx.Node | None
    transposed: bool
    axis: int | None
    """The unit dim of x and the result beside (rows, columns); None if they are matrices."""
    dense: bool = False
    """Whether x is (E, T, K), rows for each expert in turn."""


def expert_weight(tensor: torch.Tensor, nodes: Sequence[fx.Node]) -> ExpertWeight | None:
    """How a tensor with these placeholders is stored, if all its uses are products with chosen experts."""
    if tensor.ndim not in (2, 3) or not any(node.users for node in nodes):
        return None
    seen = [_matrices(node) for node in nodes]
    shapes = {tuple(each.meta["val"].shape) for each in itertools.chain(*seen)}
    if not all(seen) or len(shapes) != 1:
        return None
    products = [_products(node) for node in itertools.chain(*seen)]
    if any(each is None for each in products):
        return None
    kinds = {product.transposed for each in products for product in each or ()}
    if len(kinds) != 1:
        return None
    return ExpertWeight(shapes.pop(), kinds.pop())


def _matrices(placeholder: fx.Node) -> list[fx.Node]:
    """The nodes that are a weight's matrices (E, N, K): the placeholder, or all views of one that is (E * N, K). None
    if a matrix has any other use."""
    held = placeholder.meta["val"]
    if held.ndim == 3:
        return [placeholder]
    views = list(placeholder.users)
    for view in views:
        seen = view.meta["val"] if view.target in _RESHAPES else None
        if seen is None or seen.ndim != 3 or seen.shape[2] != held.shape[1]:
            return []
    return views


def group(graph: fx.Graph, weight: ExpertWeight, placeholders: Sequence[fx.Node]) -> None:
    """Turns every product with the weight into one `qc.grouped_linear`; placeholders hold the matrix (E * N, K)."""
    for placeholder in placeholders:
        matrices = _matrices(placeholder)
        products = [_products(each) for each in matrices]
        value = placeholder.meta["val"]
        with value.fake_mode:
            placeholder.meta["val"] = torch.empty(weight.stored_shape, dtype=value.dtype)
        for each in products:
            assert each is not None
            for product in each:
                _replace(graph, weight, placeholder, product)
        for matrix in matrices:
            _erase_unused(graph, list(matrix.users))


# --- recognising uses ------------------------------------------------------------------------------------------------


def _products(placeholder: fx.Node) -> list[_Product] | None:
    """The products that read a weight; None if it has any other use."""
    found: list[_Product] = []
    for user in placeholder.users:
        if _is_transpose(user):
            products = [_whole(u, user, transposed=False) for u in user.users]
        elif _is_gather(user, placeholder):
            products = [_batched(u, user) for u in user.users]
        else:
            products = [_whole(user, placeholder, transposed=True)]  # (E, K, N), as these operators expect
        for product in products:
            if product is None:
                return None
            found.append(product)
    return found


def _whole(node: fx.Node, weight: fx.Node, *, transposed: bool) -> _Product | None:
    """A product with all matrices: with sorted rows, or with the same number of rows for each."""
    if _is_grouped(node, weight):
        return _grouped(node, transposed=transposed)
    if node.target not in _BATCHED or len(node.args) != 2 or node.kwargs or node.args[1] is not weight:
        return None
    x = node.args[0]
    given, held = x.meta["val"] if isinstance(x, fx.Node) else None, weight.meta["val"]
    if given is None or given.ndim != 3 or given.dtype != held.dtype or given.shape[0] != held.shape[0]:
        return None  # `matmul` would repeat one of them
    return _Product(node, x, None, None, transposed, axis=None, dense=True)  # type: ignore[arg-type]


def _is_grouped(node: fx.Node, weight: fx.Node) -> bool:
    if str(node.target) not in _GROUPED_MM or len(node.args) < 3 or node.args[1] is not weight:
        return False
    plain = len(node.args) == 3 and all(value is None for key, value in node.kwargs.items() if key != "offs")
    return plain and isinstance(node.args[0], fx.Node) and node.args[0].meta["val"].ndim == 2


def _is_transpose(node: fx.Node) -> bool:
    """Whether a node is a weight with its last two dims exchanged."""
    if node.target is aten.transpose.int:
        return {int(d) % 3 for d in node.args[1:]} == {1, 2}  # type: ignore[arg-type]
    return node.target is aten.permute.default and [int(d) % 3 for d in node.args[1]] == [0, 2, 1]  # type: ignore[union-attr,arg-type]


def _is_gather(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a node is `weight[index]` with one vector of integers."""
    if node.target is not aten.index.Tensor or node.args[0] is not weight:
        return False
    indices: Any = node.args[1]
    index = indices[0].meta["val"] if len(indices) == 1 and isinstance(indices[0], fx.Node) else None
    return index is not None and index.ndim == 1 and index.dtype in _INTEGERS


def _batched(node: fx.Node, gathered: fx.Node) -> _Product | None:
    """bmm of the gathered matrices with one row, or one column, for each."""
    if node.target not in _BATCHED or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    index = gathered.args[1][0]  # type: ignore[index]
    for x, axis in ((right, 2), (left, 1)):
        if isinstance(x, fx.Node) and x is not gathered and x.meta["val"].ndim == 3 and x.meta["val"].shape[axis] == 1:
            return _Product(node, x, index, None, transposed=axis == 1, axis=axis)  # type: ignore[arg-type]
    return None


def _grouped(node: fx.Node, *, transposed: bool) -> _Product:
    x, _, ends = node.args
    assert isinstance(x, fx.Node) and isinstance(ends, fx.Node)
    index = _sorted_index(ends)
    return _Product(node, x, index, None if index is not None else ends, transposed, axis=None)


def _sorted_index(ends: fx.Node) -> fx.Node | None:
    """The sorted experts of the rows, if their counts were summed up: `cumsum(histc(experts, 0 … E - 1))`."""
    counts = ends.args[0] if ends.target is aten.cumsum.default else None
    while isinstance(counts, fx.Node) and counts.target in _COPIES:
        counts = counts.args[0]
    if not isinstance(counts, fx.Node) or counts.target is not aten.histc.default:
        return None
    values, bins, low, high = (*counts.args, *[None] * 4)[:4]
    while isinstance(values, fx.Node) and values.target in _COPIES:
        values = values.args[0]
    if not isinstance(bins, int) or bins != ends.meta["val"].shape[0] or low != 0 or high != bins - 1:
        return None
    if not isinstance(values, fx.Node) or len(values.args) != 2:
        return None
    sort, result = values.args
    if not isinstance(sort, fx.Node) or sort.target is not aten.sort.default or len(sort.args) != 1 or result != 0:
        return None
    return values if values.meta["val"].dtype in _INTEGERS else None


# --- the one form ----------------------------------------------------------------------------------------------------


def _replace(graph: fx.Graph, weight: ExpertWeight, placeholder: fx.Node, product: _Product) -> None:
    """Replaces the product by the operator."""
    node, axis = product.node, product.axis
    if product.dense:
        _replace_dense(graph, weight, placeholder, product)
        return
    with graph.inserting_before(node):
        x = product.x if axis is None else _call(graph, node, aten.squeeze.dim, product.x, axis)
        x, repeat = (x, 1) if axis is None else _before_copies(product.x, x, axis)
        index = product.index if product.index is not None else _index_of_rows(graph, node, x, product.ends)
        target = torch.ops.qc.grouped_linear.default
        made = _call(graph, node, target, x, placeholder, index, weight.experts, repeat)
        result = made if axis is None else _call(graph, node, aten.unsqueeze.default, made, axis)
    node.replace_all_uses_with(result)
    _erase_unused(graph, [node])


def _replace_dense(graph: fx.Graph, weight: ExpertWeight, placeholder: fx.Node, product: _Product) -> None:
    """Replaces a product of (E, T, K) with all matrices: row r of (E * T, K) has the expert r // T."""
    node, x, experts = product.node, product.x, weight.experts
    with graph.inserting_before(node):
        rows = _call(graph, node, aten.reshape.default, x, (-1, x.meta["val"].shape[2]))
        count = x.meta["val"].shape[1]
        each: Any = count if isinstance(count, int) else _call(graph, node, aten.sym_size.int, x, 1)
        numbers = graph.call_function(aten.arange.default, (experts,), {"device": torch.device("cpu")})
        numbers.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        with x.meta["val"].fake_mode:
            numbers.meta["val"] = torch.arange(experts)
        column = _call(graph, node, aten.unsqueeze.default, numbers, 1)
        table = _call(graph, node, aten.expand.default, column, (experts, each))
        index = _call(graph, node, aten.reshape.default, table, (-1,))
        made = _call(graph, node, torch.ops.qc.grouped_linear.default, rows, placeholder, index, experts, 1)
        result = _call(graph, node, aten.reshape.default, made, (experts, -1, made.meta["val"].shape[1]))
    node.replace_all_uses_with(result)
    _erase_unused(graph, [node])


def _call(graph: fx.Graph, place: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A node with another node's place in the model, and its value."""
    node = graph.call_function(target, args)
    node.meta = {key: value for key, value in place.meta.items() if key not in ("val", "tensor_meta")}
    values = fx.map_arg(args, lambda each: each.meta["val"])
    tensor = next(v for v in values if isinstance(v, torch.Tensor))
    with tensor.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*values)
    return node


def _before_copies(wide: fx.Node, rows: fx.Node, axis: int) -> tuple[fx.Node, int]:
    """The original of copied rows of x, and the number of copies: `x[:, None].expand(M, repeat, K).reshape(…)`."""
    node = wide.args[0] if wide.target is aten.unsqueeze.default and wide.args[1] in (axis, axis - 3) else None
    if not isinstance(node, fx.Node) or node.target not in _RESHAPES:
        return rows, 1
    source = node.args[0]
    while isinstance(source, fx.Node) and source.target in _COPIES and not source.kwargs.get("dtype"):
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.expand.default:
        return rows, 1
    narrow, shape = source.args[0], source.meta["val"].shape
    if not isinstance(narrow, fx.Node) or narrow.target is not aten.unsqueeze.default or len(shape) != 3:
        return rows, 1
    origin = narrow.args[0]
    if not isinstance(origin, fx.Node) or narrow.args[1] not in (1, -2) or not isinstance(shape[1], int):
        return rows, 1
    split = node.meta["val"].ndim == 2 and node.meta["val"].shape[-1] == origin.meta["val"].shape[-1]
    return (origin, shape[1]) if split else (rows, 1)


def _index_of_rows(graph: fx.Graph, place: fx.Node, x: fx.Node, ends: fx.Node | None) -> fx.Node:
    """The expert of each row: how many experts end at or before it."""
    assert ends is not None
    count = _call(graph, place, aten.sym_size.int, x, 0)
    with graph.inserting_before(place):
        rows = graph.call_function(aten.arange.default, (count,), {"device": torch.device("cpu")})
    rows.meta = {key: value for key, value in count.meta.items() if key != "val"}
    fake = ends.meta["val"]
    with fake.fake_mode:
        rows.meta["val"] = torch.arange(count.meta["val"])
    column = _call(graph, place, aten.unsqueeze.default, rows, 1)
    passed = _call(graph, place, aten.ge.Tensor, column, ends)
    return _call(graph, place, aten.sum.dim_IntList, passed, [1])


def _erase_unused(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erases nodes that nothing reads any more, and those that only they read."""
    for node in nodes:
        if node.op == "call_function" and not node.users:
            above = list(_inputs(node))
            graph.erase_node(node)
            _erase_unused(graph, above)


def _inputs(node: fx.Node) -> Iterator[fx.Node]:
    seen = dict.fromkeys(node.all_input_nodes)
    yield from (each for each in seen if each.op == "call_function" and not _checks(each))


def _checks(node: fx.Node) -> bool:
    return node.target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default)
