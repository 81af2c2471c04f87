"""Pytrees of JAX: paths of leaves as text, and containers as the JSON trees of `plan.Signature`.

{"params": {"Dense_0": {"kernel": w}}}        "params.Dense_0.kernel"
(Layer(weight=w), [b])                        "0.weight", "1.0"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from qcompiler.errors import ArgumentError, ArgumentStructureError

Tree = dict[str, Any]
WIDE = ("float64", "int64", "uint64", "complex128")


def is_array(leaf: object) -> bool:
    """An array with values, or a `jax.ShapeDtypeStruct`."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether an array is one of typed keys, which have values in JAX alone."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def leaf_paths(tree: object) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves with their paths. The value of a variable of Flax NNX has the path of the variable."""
    found, _ = flattened(tree)
    inner = variable_paths(tree)
    return [(path[:-1] if path[:-1] in inner else path, leaf) for path, leaf in found]


def variable_paths(tree: object) -> set[tuple[Any, ...]]:
    """The paths of variables of Flax NNX; their values are one key further."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]
    return {path for path, leaf in nodes if _is_variable(leaf)}


def flattened(tree: object) -> tuple[list[tuple[Any, Any]], Any]:
    """Leaves with paths, and the structure. ArgumentStructureError for a dict whose keys have no order."""
    try:
        return jax.tree_util.tree_flatten_with_path(tree)
    except ValueError as error:
        if "sorting pytree dictionary keys" not in str(error):
            raise
        raise ArgumentStructureError(
            "a dict among the arguments has keys that JAX cannot sort, such as a number beside a text: use texts"
        ) from error


def _is_variable(node: object) -> bool:
    """Whether a node is a variable of Flax NNX, told by its classes' names: Flax is not imported here."""
    kinds = type(node).__mro__
    return any(kind.__name__ == "Variable" and kind.__module__.startswith("flax.nnx") for kind in kinds)


def path_text(path: tuple[Any, ...]) -> str:
    """A key path as one text with dots."""
    parts = []
    for key in path:
        for field in ("key", "idx", "name"):
            if hasattr(key, field):
                parts.append(str(getattr(key, field)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def shape_struct(leaf: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array. ArgumentError for 64 bits where JAX would silently take 32."""
    name_of, config = str(leaf.dtype), cast("Any", jax.config)
    if name_of in WIDE and not config.jax_enable_x64:
        raise ArgumentError(
            f"'{name}' is {name_of}, and JAX runs without x64, where it would compute in "
            f"{name_of.replace('64', '32').replace('128', '64')}: convert the array, or begin with "
            'jax.config.update("jax_enable_x64", True)'
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ArgumentError(
            f"'{name}' is a typed key of random numbers, which a program cannot take: make it in the function, "
            "jax.random.key(seed), or pass jax.random.key_data(key).view(jnp.int32) and begin the function with "
            "key = jax.random.wrap_key_data(key.view(jnp.uint32))"
        )
    return struct(leaf.shape, leaf.dtype)


def struct(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """JAX's description of an array, whose constructor has no types."""
    make: Any = jax.ShapeDtypeStruct
    made: jax.ShapeDtypeStruct = make(shape, dtype)
    return made


def tree_of(value: Any, leaf_of: Mapping[int, Tree], where: str) -> Tree:
    """The node of a container whose leaves are numbers into `leaf_of`, or constants.

    ArgumentStructureError for a container that a program cannot rebuild.
    """
    if isinstance(value, _Leaf):
        return leaf_of[value.number]
    if value is None:
        return {"kind": "none"}
    if isinstance(value, bool | int | float | str):
        return {"kind": "constant", "value": value}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ArgumentStructureError(f"the dict at {where} has keys that are not texts: {list(value)[:5]}")
        items = [tree_of(item, leaf_of, f"{where}[{key!r}]") for key, item in value.items()]
        return {"kind": "dict", "keys": list(value), "items": items}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = type(value)
        items = [tree_of(item, leaf_of, f"{where}.{key}") for key, item in zip(value._fields, value, strict=True)]
        return {"kind": "namedtuple", "class": f"{kind.__module__}:{kind.__qualname__}", "keys": list(value._fields),
                "items": items}  # fmt: skip
    if type(value) in (tuple, list):
        items = [tree_of(item, leaf_of, f"{where}[{i}]") for i, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": items}
    raise ArgumentStructureError(
        f"{where} is a {type(value).__name__}, which a program cannot rebuild: use tuple, list, dict or a namedtuple "
        "for arguments and results (only the first argument, which holds the weights, may be any pytree)"
    )


class _Leaf:
    """Stands for leaf `number` in a container; no pytree, and no constant."""

    def __init__(self, number: int) -> None:
        self.number = number


def numbered(treedef: Any) -> Any:
    """The container of a treedef, its leaves numbered."""
    return jax.tree_util.tree_unflatten(treedef, [_Leaf(i) for i in range(treedef.num_leaves)])
