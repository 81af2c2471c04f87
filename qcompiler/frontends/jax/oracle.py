"""The accuracy oracle of recipes that change how linears compute: the function in JAX, its products replaced.

It is also the oracle of a weight in 16 bits that the function widens before it reads it, `w.astype(jnp.float32)`:
the program decodes to that type at once, and so the leaf is given in it.

The function is traced again, and its jaxpr is evaluated equation by equation.  What is a view of a weight (a slice, a
transpose, a layer of a scan) stays known as that weight, and a `dot_general` that reads one rounds its other operand
as the program does: to int8 codes and back, or to bf16.  So does a convolution, to bf16 alone.  This shares no code
with the graph that the compiler reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from qcompiler.config import Activations
from qcompiler.errors import FrontendError
from qcompiler.formats.llm_int8 import SMALLEST_ABSMAX
from qcompiler.frontends.jax.exported import Arithmetic, Run, StaticScales
from qcompiler.frontends.jax.trees import is_array, struct

CODE = 127.0


@dataclass(frozen=True)
class _Traced:
    """A value of the evaluation; `weight` is the number of the leaf that it is a view of. `parts` is the same view of
    the numbers of its parts, where each has a static scale."""

    value: Any
    weight: int | None = None
    parts: Any = None


def in_arithmetic(
    run: Run,
    arithmetic: Mapping[int, Arithmetic],
    traced_types: Mapping[int, str] | None = None,
    scales: Mapping[int, StaticScales] | None = None,
) -> Run:
    """`run(leaves, args, kwargs)` with linears and convolutions in another arithmetic, by the numbers of their leaves;
    jittable.

    `traced_types` are NumPy's names of the types that the function sees of leaves that are given in wider ones.
    `scales` are static ones, by the numbers of leaves.
    """

    def computed(leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def function(leaves: list[Any], given: Any) -> Any:
            return run(leaves, *given)

        return Evaluation(arithmetic, traced_types or {}, scales or {}).call(function, list(leaves), (args, kwargs))

    return computed


@dataclass
class Evaluation:
    """Evaluates jaxprs; `arithmetic` is by the numbers of leaves, `met` collects those whose products were replaced."""

    arithmetic: Mapping[int, Arithmetic]
    traced_types: Mapping[int, str] = field(default_factory=dict)
    scales: Mapping[int, StaticScales] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)

    def call(self, function: Callable[[list[Any], Any], Any], leaves: list[Any], given: Any) -> Any:
        """`function(leaves, given)`; what is no array in `given` is fixed.

        FrontendError if a product that the compiler sees is not found.
        """
        self.met.clear()
        flat, tree = jax.tree_util.tree_flatten(given)
        places = [i for i, leaf in enumerate(flat) if is_array(leaf)]

        def traced(leaves: list[Any], arrays: list[Any]) -> Any:
            whole = list(flat)
            for place, array in zip(places, arrays, strict=True):
                whole[place] = array
            return function(leaves, jax.tree_util.tree_unflatten(tree, whole))

        arrays = [flat[i] for i in places]
        seen = [struct(x.shape, self.traced_types.get(number, x.dtype)) for number, x in enumerate(leaves)]
        closed, shape = jax.make_jaxpr(traced, return_shape=True)(seen, arrays)
        parts = {number: each.parts for number, each in self.scales.items()}
        values = [_Traced(leaf, number, parts.get(number)) for number, leaf in enumerate(leaves)]
        found = self.jaxpr(closed.jaxpr, closed.consts, [*values, *map(_Traced, arrays)])
        if missing := set(self.arithmetic) - self.met:
            raise FrontendError(
                f"the oracle found no product of the weights number {sorted(missing)}, which the program multiplies: "
                "this is a fault of the oracle; compare with the function itself"
            )
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(shape), [each.value for each in found])

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[_Traced]) -> list[_Traced]:
        known: dict[Any, _Traced] = dict(zip(jaxpr.constvars, map(_Traced, consts), strict=True))
        known.update(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            operands = [_Traced(v.val) if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
            known.update(zip(eqn.outvars, self.equation(eqn, operands), strict=True))
        return [_Traced(v.val) if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[_Traced]) -> list[_Traced]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](params, operands)
        if name in _CALLS:
            inner = next(params[key] for key in ("jaxpr", "call_jaxpr") if key in params)
            return self.jaxpr(*_open(inner), operands)
        if name == "conv_general_dilated" and operands[1].weight in self.arithmetic:
            return [_Traced(self._convolution(params, operands))]
        if name == "dot_general":
            weights = [position for position in (0, 1) if operands[position].weight in self.arithmetic]
            if len(weights) == 1:
                return [_Traced(self._product(params, operands, weights[0]))]
        results = _bound(eqn, [each.value for each in operands])
        weight = operands[0].weight if operands and name in _VIEWS else None
        if name == "gather" and len(params["dimension_numbers"].offset_dims) < results[0].ndim:
            weight = None  # rows of a table, one for each index: x of the products behind it
        if weight is None or operands[0].parts is None:
            return [_Traced(result, weight) for result in results]
        parts: Sequence[Any] = [operands[0].parts]
        if name != "convert_element_type":
            parts = _bound(eqn, [operands[0].parts, *(each.value for each in operands[1:])])
        return [_Traced(result, weight, part) for result, part in zip(results, parts, strict=True)]

    # --- control flow ---

    def _scan(self, params: Any, operands: list[_Traced]) -> list[_Traced]:
        consts, carries = params["num_consts"], params["num_carry"]
        held, begin, over = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

        def body(carry: list[Any], parts: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            given = [*held, *map(_Traced, carry)]
            given += [_Traced(part, whole.weight, numbers) for part, numbers, whole in zip(*parts, over, strict=True)]
            found = [each.value for each in self.jaxpr(*_open(params["jaxpr"]), given)]
            return found[:carries], found[carries:]

        end, made = lax.scan(
            body, [each.value for each in begin], ([each.value for each in over], [each.parts for each in over]),
            length=params["length"], reverse=params["reverse"],
        )  # fmt: skip
        return [_Traced(each) for each in (*end, *made)]

    def _while(self, params: Any, operands: list[_Traced]) -> list[_Traced]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body = operands[:first], operands[first:second]

        def goes_on(carry: list[Any]) -> Any:
            return self.jaxpr(*_open(params["cond_jaxpr"]), [*of_cond, *map(_Traced, carry)])[0].value

        def body(carry: list[Any]) -> list[Any]:
            given = [*of_body, *map(_Traced, carry)]
            return [each.value for each in self.jaxpr(*_open(params["body_jaxpr"]), given)]

        return [_Traced(each) for each in lax.while_loop(goes_on, body, [each.value for each in operands[second:]])]

    def _cond(self, params: Any, operands: list[_Traced]) -> list[_Traced]:
        index, *given = operands

        def branch(jaxpr: Any) -> Callable[[], list[Any]]:
            return lambda: [each.value for each in self.jaxpr(*_open(jaxpr), given)]

        made = lax.switch(jnp.asarray(index.value, jnp.int32), [branch(jaxpr) for jaxpr in params["branches"]])
        return [_Traced(each) for each in made]

    # --- products ---

    def _product(self, params: Any, operands: list[_Traced], position: int) -> Any:
        """The dot_general of a weight in the recipe's arithmetic."""
        number = operands[position].weight
        assert number is not None
        self.met.add(number)
        how = self.arithmetic[number]
        weight, x = operands[position].value, operands[1 - position].value
        contracted, batch = (params["dimension_numbers"][part][1 - position] for part in (0, 1))
        if how.codes is not None:
            scales = None
            if number in self.scales:
                at = _parts_of(operands[position].parts, params["dimension_numbers"], position, x.ndim)
                scales = (jnp.asarray(self.scales[number].factors)[at], jnp.asarray(self.scales[number].scales)[at])
            x = codes_of(x, how.codes, contracted, batch, scales)
        if how.bf16:
            x, weight = _rounded(x), _rounded(weight)
        lhs, rhs = (weight, x) if position == 0 else (x, weight)
        result = jnp.result_type(*(each.value for each in operands))
        wanted = params["preferred_element_type"] or result
        made = lax.dot_general(
            lhs, rhs, params["dimension_numbers"], precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32 if how.bf16 else wanted,
        )  # fmt: skip
        return made.astype(wanted)

    def _convolution(self, params: Any, operands: list[_Traced]) -> Any:
        """The convolution of a weight whose factors are rounded to bf16."""
        x, weight = operands
        assert weight.weight is not None
        self.met.add(weight.weight)
        wanted = params["preferred_element_type"] or jnp.result_type(x.value, weight.value)
        numbers = {key: value for key, value in params.items() if key not in ("precision", "preferred_element_type")}
        made = lax.conv_general_dilated_p.bind(
            _rounded(x.value), _rounded(weight.value), precision=(lax.Precision.HIGHEST,) * 2,
            preferred_element_type=np.dtype(np.float32), **numbers,
        )  # fmt: skip
        return made.astype(wanted)


def _rounded(values: Any) -> Any:
    """Numbers of bf16, in fp32."""
    return lax.reduce_precision(values.astype(jnp.float32), 8, 7)


_CALLS = frozenset({
    "jit", "call", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call", "composite", "compute_on",
})  # fmt: skip
"""Primitives that apply their jaxpr to their operands. Others with a jaxpr do not: `reduce` folds by its own."""

_VIEWS = frozenset({
    "slice", "dynamic_slice", "gather", "reshape", "squeeze", "transpose", "expand_dims", "broadcast_in_dim",
    "convert_element_type", "copy", "copy_p", "split",
})  # fmt: skip
"""Primitives behind which a weight is still a weight. Reads of other kinds keep the leaf from being quantised."""


def _bound(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation's primitive."""
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    results: Sequence[Any] = found if eqn.primitive.multiple_results else [found]
    return results


def _parts_of(parts: Any, numbers: Any, position: int, rank: int) -> Any:
    """The part of a leaf that each entry of the batch dims is, as an array that broadcasts with x of this rank."""
    mine, theirs = numbers[1][position], numbers[1][1 - position]
    others = tuple(axis for axis in range(parts.ndim) if axis not in mine)
    held = jnp.max(parts, others)  # in the order of the axes; batch dims are named in the order of the pairs
    order = sorted(range(len(mine)), key=lambda pair: mine[pair])
    places = [theirs[pair] for pair in order]
    held = jnp.transpose(held, sorted(range(len(places)), key=lambda i: places[i]))
    return jnp.expand_dims(held, [axis for axis in range(rank) if axis not in theirs])


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, consts) of an open or closed jaxpr."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def codes_of(x: Any, kind: Activations, contracted: Sequence[int], batch: Sequence[int], scales: Any = None) -> Any:
    """x through int8 codes and back: a row is what the contracted dims hold (formats/int8_rows.py).

    `scales` are the factor for x and the scale, of kind "tensor".
    """
    wide, axes = x.astype(jnp.float32), tuple(contracted)
    if kind.kind == "tensor":
        largest = jnp.max(jnp.abs(wide), axes, keepdims=True)
        factor, scale = scales
        return _decoded(wide * factor, scale, largest).astype(x.dtype)
    if kind.kind == "token":
        largest = jnp.max(jnp.abs(wide), axes, keepdims=True)
        scale = jnp.where(largest / CODE > 0, largest / CODE, 1)
        decoded = _decoded(wide / scale, scale, largest)
        return decoded.astype(x.dtype)
    outlier = jnp.abs(wide) >= kind.threshold
    free = tuple(axis for axis in range(x.ndim) if axis not in (*contracted, *batch))
    columns = jnp.any(outlier, free, keepdims=True)
    kept = jnp.where(outlier, 0, wide)
    largest = jnp.max(jnp.abs(kept), axes, keepdims=True)
    inverse = jnp.where(largest < SMALLEST_ABSMAX, 0, CODE / largest)
    return jnp.where(columns, wide, _decoded(kept * inverse, largest / CODE, largest)).astype(x.dtype)


def _decoded(scaled: Any, scale: Any, largest: Any) -> Any:
    codes = jnp.clip(jnp.round(scaled), -CODE, CODE)
    return jnp.where(jnp.isfinite(largest), codes * scale, jnp.nan)
